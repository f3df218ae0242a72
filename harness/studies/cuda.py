"""`python -m harness.studies.cuda`: the kernel sources on a CUDA GPU, a second, physical witness.

One call checks every official case with all heads and times it beside SDPA, runs the
explicit pipelines (which on a GPU hand over by barriers and are slow, but whose indexing,
masks, skipping and merging are those of the NPU) on all heads of the performance cases, and
puts a small case of each kernel through compute-sanitizer. Writes results/cuda.json after each row.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..checks import OUTPUTS, judge
from ..configs import SUITES, Case, cases, input_rule, make_inputs
from ..evaluator import Evaluator, Settings, chunks, evaluate
from ..measures import merge
from ..results import CaseResult, Status, write_json

REPOSITORY = Path(__file__).resolve().parents[2]
SUBMISSIONS = {suite: REPOSITORY / f"{suite}.py" for suite in SUITES}
TOOLS = ("memcheck", "racecheck")
SMALL = (1, 2, 1024)  # z, h, n of the sanitized calls: the shortest that the pipelines take
Row = dict[str, Any]


def result_row(result: CaseResult) -> Row:
    """A case as the evaluator saw it; SDPA is the vendor's operator here."""
    return {
        "case": result.case.name,
        "status": result.status.value,
        "message": result.message,
        "heads": result.heads_checked,
        "errors": result.max_abs_error,
        "rms_error": result.rms_error,
        "ms": result.ms,
        "sdpa_ms": result.baseline_ms,
        "ratio": result.speedup,
    }


def pipeline_call(case: Case) -> Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]] | None:
    """The explicit pipeline of a forward case, or None where it has none. Upstream Triton does
    not compile the backward's: it slices tiles by rows and keeps block pointers across branches."""
    if case.suite == "backward":
        return None
    import forward

    scale = input_rule().sm_scale
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    if forward.get_path(case.z, case.h, case.n, case.d, case.causal, scale, programs) != "pipeline":
        return None
    settings = forward._pipeline_settings(case.n, case.d, case.causal)
    return lambda x: forward._forward_pipeline(x["q"], x["k"], x["v"], case.causal, scale, programs, settings)


def pipeline_row(case: Case) -> Row:
    """All heads of a case through its pipeline, which it must have."""
    call = pipeline_call(case)
    assert call is not None
    row: Row = {"case": f"{case.name} pipeline", "status": Status.PASSED.value, "heads": case.heads, "errors": None}
    parts = []
    for part, (z, h) in enumerate(chunks(case, Settings(device="cuda", full=True))):
        inputs = make_inputs(case, z, h, part, large=part == 0, device="cuda")
        before = {name: x.clone() for name, x in inputs.items()}
        try:
            outputs = dict(zip(OUTPUTS[case.suite], call(inputs), strict=True))
            torch.cuda.synchronize()
        except Exception as error:
            return row | {"status": Status.RUNTIME_ERROR.value, "message": f"{type(error).__name__}: {error}"[:300]}
        verdict = judge(case, before, inputs, outputs)
        if verdict.measures is not None:
            parts.append(verdict.measures)
        if verdict.status is not Status.PASSED:
            return row | {"status": verdict.status.value, "message": verdict.message}
    together = merge(parts)
    return row | {"errors": together.max_abs, "rms_error": together.rms}


def small_calls() -> Iterator[str]:
    """Runs each kernel once on a small case; yields what ran."""
    import backward
    import forward

    z, h, n = SMALL
    for case in cases("forward") + cases("backward"):
        if case.kind != "performance" or case.dtype != "fp16" or case.d == 256:
            continue
        small = Case(**{**vars(case), "z": z, "h": h, "n": n})
        inputs = make_inputs(small, z, h, 0, device="cuda")
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        out, lse = forward.attention_fwd(q, k, v, case.causal, input_rule().sm_scale)
        if case.suite == "backward":
            backward.attention_bwd(inputs["dout"], q, k, v, out, lse, case.causal, input_rule().sm_scale)
        else:
            settings = forward._pipeline_settings(n, case.d, case.causal)
            forward._forward_pipeline(q, k, v, case.causal, input_rule().sm_scale, 2, settings)
        torch.cuda.synchronize()
        yield f"{case.suite} D={case.d} {'causal' if case.causal else 'full'}"


def sanitize(seconds: float) -> list[Row]:
    """compute-sanitizer's verdict on `small_calls`, one row for each tool."""
    sanitizer = shutil.which("compute-sanitizer")
    rows: list[Row] = []
    for tool in TOOLS:
        row: Row = {"case": f"compute-sanitizer {tool}", "errors": None}
        if sanitizer is None:
            rows.append(row | {"status": "skipped", "message": "compute-sanitizer is not on PATH"})
            continue
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", __spec__.name, "--small"]
        try:
            run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            rows.append(row | {"status": "timeout", "message": f"not done after {seconds:.0f} s"})
            continue
        last = [line for line in (run.stdout + run.stderr).splitlines() if "SUMMARY" in line or "Error" in line]
        status = "passed" if run.returncode == 0 else "failed"
        rows.append(row | {"status": status, "message": "; ".join(last[-2:])[:300]})
    return rows


def show(rows: list[Row], console: Console) -> None:
    """The table of all rows; every time in it is measured."""
    table = Table(title="on the GPU, all heads; times measured")
    for name in ("case", "status", "heads", "largest error", "ms", "SDPA ms", "SDPA / own", "message"):
        table.add_column(name)
    for row in rows:
        numbers = [row.get(name) for name in ("errors", "ms", "sdpa_ms", "ratio")]
        cells = ["-" if value is None else f"{value:.3g}" for value in numbers]
        table.add_row(row["case"], row["status"], str(row.get("heads") or "-"), *cells, row.get("message") or "")
    console.print(table)


def main() -> None:
    """Run everything; exit 1 when a row is not passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "results" / "cuda.json")
    parser.add_argument("--seconds", type=float, default=110.0, help="limit of each compute-sanitizer tool")
    parser.add_argument("--budget", type=float, default=500.0, help="no pipeline is started after so many seconds")
    parser.add_argument("--small", action="store_true", help="only the small calls, as compute-sanitizer runs them")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    if arguments.small:
        for text in small_calls():
            print(text, flush=True)
        return
    settings = Settings(device="cuda", mode="score", full=True, seconds=600.0, memory_bytes=32 << 30)
    probe = Evaluator(SUBMISSIONS, settings)
    try:
        device = probe.describe()
    finally:
        probe.close()
    rows: list[Row] = []
    start = time.monotonic()

    def keep(row: Row) -> None:
        rows.append(row)
        write_json(arguments.json, {"device": device, "time": "measured", "rows": rows})
        spent = time.monotonic() - start
        print(f"[{spent:.0f} s] {row['case']}: {row['status']} {row.get('message') or ''}", flush=True)

    everything = [case for suite in SUITES for case in cases(suite)]
    for row in sanitize(arguments.seconds):
        keep(row)
    evaluate(everything, SUBMISSIONS, settings, on_result=lambda result: keep(result_row(result)))
    for case in everything:
        if case.kind != "performance" or pipeline_call(case) is None:
            continue
        if time.monotonic() - start > arguments.budget:
            keep({"case": f"{case.name} pipeline", "status": "skipped", "message": "out of time", "errors": None})
        else:
            keep(pipeline_row(case))
    show(rows, Console(width=160))
    print(f"wrote {arguments.json} after {time.monotonic() - start:.0f} s")
    if any(row["status"] not in ("passed", "skipped") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
