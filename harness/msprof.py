"""`make npu-profile CASE=P1`: pipe counters of a real NPU beside the virtual NPU's prediction.

On a machine with an NPU it runs the case under CANN's msprof (task-based PipeUtilization
counters), reads its op_summary_*.csv, and prints for each kernel the measured time and the
busy share of each pipe beside the predicted ones. The prediction is made there when the
virtual NPU is installed too, else it comes from a file: `--predict FILE` on any machine with
the virtual NPU writes it, `--prediction FILE` reads it.

Column names are those of op_summary for Atlas A2, as in the msprof repository's
docs/zh/profile_data_file_references.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .configs import SUITES, Case, input_rule, select
from .results import write_json

REPOSITORY = Path(__file__).resolve().parent.parent
LOCAL = REPOSITORY / "results" / "local"
RUNS = 10  # profiled calls; the first half warms up
# Pipe: its column in op_summary, and the virtual NPU's busy counters.
PIPES = {
    "cube": ("aic_mac_ratio", ("aic_mac",)),
    "mte1": ("aic_mte1_ratio", ("aic_mte1",)),
    "mte2 of cube": ("aic_mte2_ratio", ("aic_mte2",)),
    "fixpipe": ("aic_fixpipe_ratio", ("aic_fixpipe",)),
    "scalar of cube": ("aic_scalar_ratio", ("aic_scalar",)),
    "vector": ("aiv_vec_ratio", ("aiv_vec0", "aiv_vec1")),
    "mte2 of vector": ("aiv_mte2_ratio", ("aiv_mte20", "aiv_mte21")),
    "mte3": ("aiv_mte3_ratio", ("aiv_mte30", "aiv_mte31")),
    "scalar of vector": ("aiv_scalar_ratio", ("aiv_scalar0", "aiv_scalar1")),
}
Kernels = dict[str, dict[str, Any]]  # name: us, and pipes with the busy share of each, 0 to 1


def _call(case: Case) -> Any:
    """The submission's function on inputs by name, and the inputs' shapes."""
    from .submissions import load

    function = load(REPOSITORY / f"{case.suite}.py", case.suite)
    scale = input_rule().sm_scale
    full = (case.z, case.h, case.n, case.d)
    shapes: dict[str, Any] = dict.fromkeys(("q", "k", "v"), (full, case.torch_dtype))
    if case.suite == "forward":
        return (lambda x: function(x["q"], x["k"], x["v"], case.causal, scale)), shapes
    import torch

    shapes |= dict.fromkeys(("dout", "out"), (full, case.torch_dtype)) | {"lse": (full[:3], torch.float32)}
    names = ("dout", "q", "k", "v", "out", "lse")
    return (lambda x: function(*(x[name] for name in names), case.causal, scale)), shapes


def predict(case: Case) -> Kernels:
    """The virtual NPU's prediction, kernel by kernel."""
    import torch

    from . import virtual_npu

    call, shapes = _call(case)
    inputs = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    with virtual_npu.run(mode="timing") as record:
        call(inputs)
    found: Kernels = {}
    for kernel in record.kernels:
        busy, cycles = kernel.report["busy"], kernel.report["core_cycles"]
        pipes = {
            pipe: statistics.fmean(busy.get(counter, 0.0) for counter in counters) / cycles
            for pipe, (_, counters) in PIPES.items()
        }
        found[kernel.name] = {"us": (kernel.ms or 0.0) * 1e3, "pipes": pipes}
    return found


def run_on_npu(case: Case) -> None:
    """What msprof watches: the case, some times."""
    from .devices import open_device
    from .measured import WARM_UPS, MeasuredDevice

    device = open_device("npu", "")
    assert isinstance(device, MeasuredDevice)
    call, shapes = _call(case)
    timed = device.ready(call, shapes, [{}], [0])
    for _ in range(RUNS - WARM_UPS):
        timed.repeat()


def read_summary(text: str, names: list[str]) -> Kernels:
    """Medians over the later half of each kernel's rows in an op_summary CSV.

    Args:
        text: the file.
        names: kernels to look for in "Op Name".

    Raises:
        ValueError: a column is missing, or no row is of any of the kernels.
    """
    rows = list(csv.DictReader(text.lstrip("\ufeff").splitlines()))
    wanted = ["Op Name", "Task Duration(us)", *(column for column, _ in PIPES.values())]
    missing = [name for name in wanted if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"op_summary must have the columns {', '.join(wanted)}; {', '.join(missing)} missing")
    found: Kernels = {}
    for name in names:
        own = [row for row in rows if row["Op Name"] == name or row["Op Name"].startswith(f"{name}_")]
        if len(names) > 1:  # a kernel whose name begins with another one's
            longer = [other for other in names if other != name and other.startswith(f"{name}_")]
            own = [row for row in own if not any(row["Op Name"].startswith(other) for other in longer)]
        own = own[len(own) // 2 :]
        if not own:
            continue
        found[name] = {
            "us": statistics.median(float(row["Task Duration(us)"]) for row in own),
            "pipes": {pipe: _median(own, column) for pipe, (column, _) in PIPES.items()},
        }
    if not found:
        seen = sorted({row["Op Name"] for row in rows})
        raise ValueError(f"op_summary must have rows of {', '.join(names)}, got {', '.join(seen[:10])}")
    return found


def _median(rows: list[dict[str, str]], column: str) -> float | None:
    """None where a core had no part in the kernel: msprof writes N/A."""
    values = [float(row[column]) for row in rows if row[column] not in ("N/A", "")]
    return statistics.median(values) if values else None


def profile(case: Case, names: list[str]) -> Kernels:
    """Run a case under msprof and read its counters.

    Raises:
        RuntimeError: msprof is not on PATH, fails or writes no summary.
        ValueError: see `read_summary`.
    """
    msprof = shutil.which("msprof")
    if msprof is None:
        raise RuntimeError("msprof is not on PATH: source set_env.sh of the CANN toolkit")
    application = [sys.executable, "-m", "harness.msprof", "--run", "--suite", case.suite, "--case", case.name]
    with tempfile.TemporaryDirectory(prefix="msprof-") as folder:  # 0700: msprof wants it closed to others
        command = [msprof, f"--application={shlex.join(application)}", f"--output={folder}"]
        command += ["--ai-core=on", "--aic-mode=task-based", "--aic-metrics=PipeUtilization", "--task-time=on"]
        run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=1800)
        summaries = sorted(Path(folder).rglob("op_summary_*.csv"))
        if run.returncode or not summaries:
            tail = " | ".join((run.stdout + run.stderr).strip().splitlines()[-5:])
            raise RuntimeError(f"msprof ended with code {run.returncode} and {len(summaries)} summaries: {tail}")
        return read_summary("\n".join(_joined(summaries)), names)


def _joined(paths: list[Path]) -> list[str]:
    """The lines of a summary that msprof cut into several files, with one header."""
    lines: list[str] = []
    for path in paths:
        lines += path.read_text(encoding="utf-8-sig").splitlines()[bool(lines) :]
    return lines


def table(case: Case, measured: Kernels, predicted: Kernels) -> Table:
    """Measured beside predicted."""
    shown = Table("kernel", "what", "measured", "predicted", "ratio", title=str(case), title_justify="left", box=None)
    for name in dict.fromkeys([*measured, *predicted]):
        ours, theirs = predicted.get(name), measured.get(name)
        pair = (theirs["us"] if theirs else None, ours["us"] if ours else None)
        ratio = f"{pair[1] / pair[0]:.2f}" if pair[0] and pair[1] else "-"
        shown.add_row(name, "time", *("-" if us is None else f"{us:.1f} us" for us in pair), ratio)
        for pipe in PIPES:
            shares = [one["pipes"][pipe] if one else None for one in (theirs, ours)]
            shown.add_row("", pipe, *("-" if share is None else f"{share:.0%}" for share in shares), "")
    return shown


def _prediction(case: Case, file: Path | None) -> Kernels:
    """From a file, or from a process of its own: the NPU's Triton driver must not be in it."""
    if file:
        return dict(json.loads(file.read_text())["kernels"])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "prediction.json"
        command = [sys.executable, "-m", "harness.msprof", "--suite", case.suite, "--case", case.name]
        run = subprocess.run(
            [*command, "--predict", str(out)], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        if run.returncode:
            tail = (run.stderr.strip().splitlines() or ["?"])[-1]
            raise RuntimeError(f"no prediction here ({tail}); make one elsewhere and give it by --prediction FILE")
        return dict(json.loads(out.read_text())["kernels"])


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 where something is missing."""
    parser = argparse.ArgumentParser(prog="python -m harness.msprof", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--suite", choices=SUITES, default="forward")
    parser.add_argument("--case", default="P1", metavar="N")
    parser.add_argument("--predict", type=Path, metavar="FILE", help="only write the prediction; needs no NPU")
    parser.add_argument("--prediction", type=Path, metavar="FILE", help="read the prediction instead of making it")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        (case,) = select(arguments.suite, [arguments.case])
    except ValueError as error:
        parser.error(str(error))
    if arguments.run:
        run_on_npu(case)
        return 0
    if arguments.predict:
        write_json(arguments.predict, {"suite": case.suite, "case": case.name, "kernels": predict(case)})
        print(f"wrote {os.path.relpath(arguments.predict)}")
        return 0
    try:
        predicted = _prediction(case, arguments.prediction)
        measured = profile(case, list(predicted))
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Console(width=100).print(table(case, measured, predicted))
    out = LOCAL / f"npu-profile-{case.suite}-{case.name}.json"
    write_json(out, {"case": str(case), "measured": measured, "predicted": predicted})
    print(f"wrote {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
