"""`make npu-doctor`: what works on a machine with an NPU, step by step, and some times.

Each step runs in a process of its own with a time limit, since a fault of the device can end
or hang the process. All is written to a file that can be sent back; `--rows FILE` takes the
times of such a file into harness/studies/measurements.csv, from which `make calibrate` reads.

    torch, torch_npu, npu     the packages import, an NPU is seen
    stack                     versions, and where they are not the contest's
    cores                     what each documented call says
    memory, events            copies, arithmetic, time between events
    vendor                    npu_fusion_attention and its gradient against fp64
    textbook                  plain Triton kernels against fp64: the compiler and launches work
    forward, backward         this project's kernels: values, then times beside the vendor's
    times                     the textbook at tile sizes with a published time
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import npu
from .configs import Case, cases
from .evaluator import Evaluator, Settings
from .measured import spread
from .results import Status, write_json

REPOSITORY = Path(__file__).resolve().parent.parent
MEASUREMENTS = REPOSITORY / "harness" / "studies" / "measurements.csv"
OUT = REPOSITORY / "results" / "local" / "npu-doctor.json"
PROBE_SECONDS = 120.0
ROW_KEYS = ("kernel", "z", "h", "n", "d", "causal", "bm", "bn", "acc", "order")


class Trouble(Exception):
    """A step found something that does not work; the text says what and, where known, the cure."""


# Steps that run alone in a process of their own. Each returns a line of text.


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}"


def _torch_npu() -> str:
    try:
        import torch_npu
    except ImportError as error:
        cure = "source set_env.sh of the CANN toolkit" if "lib" in str(error) else "install torch_npu 2.7.1.post4"
        raise Trouble(f"{error}: {cure}") from None
    return f"torch_npu {torch_npu.__version__}"


def _npu() -> str:
    if not npu.api().is_available():
        raise Trouble("torch.npu.is_available() is False: see npu-smi info, and ASCEND_RT_VISIBLE_DEVICES")
    return str(npu.api().get_device_name(0))


def _stack() -> str:
    found = npu.stack()
    text = ", ".join(f"{name} {value}" for name, value in found.items())
    wrong = npu.mismatches(found) + npu.queue_warning()
    return f"{text}; WARNING {'; '.join(wrong)}" if wrong else text


def _cores() -> str:
    counts = npu.core_counts()
    if not any(isinstance(count, int) for count in counts.values()):
        raise Trouble(f"no call tells the number of AI cores: {counts}")
    known = {count for count in counts.values() if isinstance(count, int)}
    text = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return text if known == {npu.CORES} else f"{text}; WARNING a 910B3 has {npu.CORES}"


def _memory() -> str:
    import torch

    npu.api()
    host = torch.arange(4096, dtype=torch.float32).half()
    there = host.to("npu")
    if not torch.equal(there.cpu(), host) or not torch.equal((there + there).cpu(), host + host):
        raise Trouble("a copy to the NPU and back, or a sum there, changed values")
    return f"copies and sums are exact; L2 is {npu.l2_bytes() >> 20} MiB"


def _events() -> str:
    import torch

    api = npu.api()
    block = torch.empty(1 << 26, dtype=torch.float32, device="npu")
    times = []
    for _ in range(5):
        start, end = api.Event(enable_timing=True), api.Event(enable_timing=True)
        start.record()
        block.zero_()
        end.record()
        api.synchronize()
        times.append(float(start.elapsed_time(end)))
    if not min(times) > 0:
        raise Trouble(f"the time between two events is {min(times)} ms")
    return f"256 MiB are filled in {statistics.median(times):.3f} ms"


PROBES: dict[str, Callable[[], str]] = {
    "torch": _torch,
    "torch_npu": _torch_npu,
    "npu": _npu,
    "stack": _stack,
    "cores": _cores,
    "memory": _memory,
    "events": _events,
}


def probe(name: str) -> dict[str, Any]:
    """Run one step in a process of its own; returns status (ok, warning or failed), text, and
    of "stack" the versions as data."""
    command = [sys.executable, "-m", "harness.doctor", "--step", name]
    try:
        run = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "text": f"did not end within {PROBE_SECONDS:g} s"}
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if not lines:
        tail = " | ".join((run.stdout + run.stderr).strip().splitlines()[-3:])
        return {"status": "failed", "text": f"the process ended with code {run.returncode}: {tail}"}
    return dict(json.loads(lines[-1]))


def _answer(name: str) -> dict[str, Any]:
    try:
        text = PROBES[name]()
        data = npu.stack() if name == "stack" else None
    except Trouble as trouble:
        return {"status": "failed", "text": str(trouble)}
    except Exception as error:
        return {"status": "failed", "text": f"{type(error).__name__}: {error}"}
    return {"status": "warning" if "WARNING" in text else "ok", "text": text.replace("WARNING ", ""), "data": data}


# Steps by the evaluator, whose children run on the device.


def _small(suite: str, causal: bool) -> Case:
    return Case(suite, "correctness", 1, "small", 1, 2, 256, 64, causal, "fp16", "public")


def _baseline(evaluator: Evaluator, name: str) -> tuple[str, str]:
    verdicts = {
        f"{suite} {'causal' if causal else 'full'}": evaluator.baseline_verdict(_small(suite, causal), name)
        for suite in ("forward", "backward")
        for causal in (False, True)
    }
    wrong = [f"{what}: {v.status.value}: {v.message}" for what, v in verdicts.items() if v.status is not Status.PASSED]
    if wrong:
        return "failed", "; ".join(wrong)
    worst = max(verdict.measures.max_abs for verdict in verdicts.values() if verdict.measures)
    return "ok", f"{', '.join(verdicts)} agree with fp64, largest error {worst:.1e}"


def _own(evaluator: Evaluator, suite: str, timed: list[Case], rows: list[dict[str, Any]]) -> tuple[str, str]:
    results = [evaluator.evaluate(case) for case in (_small(suite, False), _small(suite, True), *timed)]
    for result in results[2:]:
        rows.append(_case_row(result.case) | {"status": result.status.value, "ms": result.ms})
        rows[-1] |= {"baseline": result.baseline, "baseline_ms": result.baseline_ms, "textbook_ms": result.textbook_ms}
        rows[-1] |= {"spread": result.spread, "message": result.message}
    wrong = [f"{r.case}: {r.status.value}: {r.message}" for r in results if r.status is not Status.PASSED]
    if wrong:
        return "failed", "; ".join(wrong)
    texts = [f"{r.case.name} {r.ms:.3g} ms, {r.baseline} {r.baseline_ms:.3g} ms" for r in results[2:] if r.baseline_ms]
    notes = [r.message for r in results if r.message]
    return "warning" if notes else "ok", "; ".join(["values agree with fp64", *texts, *notes])


def _case_row(case: Case) -> dict[str, Any]:
    kept = ("suite", "name", "z", "h", "n", "d", "causal", "dtype")
    return {name: value for name, value in dataclasses.asdict(case).items() if name in kept}


def published_rows() -> list[dict[str, str]]:
    """Rows of measurements.csv with a time of the textbook, one for each shape and tile."""
    lines = [line for line in MEASUREMENTS.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["kernel"] == "textbook"]
    return list({tuple(row[key] for key in ROW_KEYS): row for row in rows}.values())


def _times(evaluator: Evaluator, rows: list[dict[str, str]], times: list[dict[str, Any]]) -> tuple[str, str]:
    failed = []
    for row in rows:
        numbers = {key: int(row[key]) for key in ("z", "h", "n", "d", "bm", "bn")}
        z, h, n, d = (numbers[key] for key in "zhnd")
        case = Case("forward", "performance", 1, "row", z, h, n, d, row["causal"] == "1", "fp16", "public")
        options = {"block_m": numbers["bm"], "block_n": numbers["bn"], "acc": row["acc"], "order": row["order"]}
        try:
            measured = evaluator.baseline_times(case, "textbook", **options)
        except RuntimeError as error:
            failed.append(f"{case} {options}: {error}")
            continue
        entry = {key: row[key] for key in ROW_KEYS}
        times.append(entry | {"ms": statistics.median(measured), "spread": spread(measured), "repeats": len(measured)})
    text = f"{len(times)} of {len(rows)} rows timed"
    return ("warning" if failed else "ok"), "; ".join([text, *failed])


def examine(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Take all steps; what follows a failed step that it needs is skipped.

    Args:
        quick: one timed case of each suite and three rows only.
        say: told a line for each step.

    Returns:
        What is written to the file: written, stack, steps, cases, times.
    """
    found: dict[str, Any] = {
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "stack": {},
        "steps": [],
        "cases": [],
        "times": [],
    }

    def step(name: str, take: Callable[[], tuple[str, str]]) -> bool:
        start = time.monotonic()
        status, text = take()
        seconds = round(time.monotonic() - start, 1)
        found["steps"].append({"name": name, "status": status, "text": text, "seconds": seconds})
        say(f"{status:8} {name}: {text}")
        return status != "failed"

    for name in PROBES:
        answers: list[dict[str, Any]] = []

        def take(name: str = name, answers: list[dict[str, Any]] = answers) -> tuple[str, str]:
            answers.append(probe(name))
            return answers[0]["status"], answers[0]["text"]

        if not step(name, take) and name in ("torch", "torch_npu", "npu"):
            say(f"skipped  all behind {name}")
            return found
        found["stack"] |= answers[0].get("data") or {}
    settings = Settings(device="npu", mode="score", jobs=1, seconds=300.0, memory_bytes=32 << 30)
    evaluator = Evaluator({suite: REPOSITORY / f"{suite}.py" for suite in ("forward", "backward")}, settings)
    try:
        step("vendor", lambda: _baseline(evaluator, "vendor"))
        works = step("textbook", lambda: _baseline(evaluator, "textbook"))
        if not works:
            say("skipped  all behind textbook")
            return found
        for suite in ("forward", "backward"):
            timed = [case for case in cases(suite) if case.kind == "performance"][: 1 if quick else None]
            step(suite, lambda suite=suite, timed=timed: _own(evaluator, suite, timed, found["cases"]))  # type: ignore[misc]
        rows = sorted(published_rows(), key=lambda row: float(row["ms"]))[: 3 if quick else None]
        step("times", lambda: _times(evaluator, rows, found["times"]))
    finally:
        evaluator.close()
    return found


def new_rows(found: dict[str, Any], chip: str = npu.CONTEST["chip"]) -> list[str]:
    """Lines for measurements.csv of the times in a doctor's file.

    Raises:
        ValueError: the file is of another chip, or holds no times, or one that is no time.
    """
    got = found.get("stack", {}).get("chip")
    if got != chip:
        raise ValueError(f"the file must be of an {chip}, got {got}")
    if not found.get("times"):
        raise ValueError("the file must hold times, got none: its steps say why")
    lines = []
    source = f"doctor-{found['written'][:10]}"
    for entry in found["times"]:
        if not 0 < float(entry["ms"]) < 1e6:
            raise ValueError(f"ms must be a time in milliseconds, got {entry['ms']}")
        values = [str(entry[key]) for key in ROW_KEYS]
        if any("," in value or "\n" in value for value in values):
            raise ValueError(f"a row must be of plain words, got {values}")
        kernel, *shape = values
        lines.append(",".join([source, chip.removeprefix("Ascend"), kernel, *shape, f"{float(entry['ms']):.4g}"]))
    return lines


def take_rows(file: Path, measurements: Path = MEASUREMENTS) -> int:
    """Append the times of a doctor's file to measurements.csv; returns how many.

    Raises:
        ValueError: see `new_rows`; or the rows stand there already.
    """
    lines = new_rows(json.loads(file.read_text()))
    text = measurements.read_text()
    if any(line in text.splitlines() for line in lines):
        raise ValueError(f"{file} has been taken before: its rows stand in {measurements}")
    measurements.write_text(text.rstrip("\n") + "\n" + "\n".join(lines) + "\n")
    return len(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when no step failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m harness.doctor", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="what to send back")
    parser.add_argument("--quick", action="store_true", help="fewer times")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="take the times of such a file for make calibrate")
    parser.add_argument("--step", choices=PROBES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.step:
        print(json.dumps(_answer(arguments.step)))
        return 0
    if arguments.rows:
        try:
            print(f"{take_rows(arguments.rows)} rows added to {os.path.relpath(MEASUREMENTS)}: make calibrate")
        except (OSError, ValueError) as error:
            parser.error(f"--rows: {error}")
        return 0
    found = examine(arguments.quick, print)
    write_json(arguments.out, found)
    print(f"wrote {os.path.relpath(arguments.out)}: please send it back")
    return 1 if any(step["status"] == "failed" for step in found["steps"]) else 0


if __name__ == "__main__":
    sys.exit(main())
