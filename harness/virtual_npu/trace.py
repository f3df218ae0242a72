"""Traces and profiles of a predicted launch.

    python -m harness.virtual_npu.trace --suite forward --case P1
    python -m harness.virtual_npu.trace --suite forward --case P1 --profile

The trace is Chrome's JSON format, for ui.perfetto.dev: one lane for each pipe of the cube
core and of the two vector cores, with the names of the real profiler, waits by their cause,
and arrows for cross-core flags. A picture of a steady stretch goes beside it. Times are
predicted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..configs import Case, input_rule, select
from .costs import default_constants
from .driver import Recording, run
from .timing import PROFILER_NAMES, Timed

LANES = (
    "aic_scalar",
    "aic_mte2",
    "aic_mte1",
    "aic_mac",
    "aic_fixpipe",
    "aiv_mte2",
    "aiv_vec",
    "aiv_mte3",
    "aiv_scalar",
)
COLOURS = {"run": "#3b7dd8", "wait": "#d9a441", "wait for L0": "#d9a441", "cross-core wait": "#c0504d"}


def lane(kind: str, pipe: str, sub: int) -> str:
    """Profiler name of a pipe, with the vector core's number."""
    name = PROFILER_NAMES[kind].get(pipe, pipe)
    return name if kind == "AIC" else f"{name} {sub}"


def chrome_events(timed: Timed, name: str, clock_hz: float) -> list[dict[str, Any]]:
    """Chrome trace events of one launch; times in microseconds."""
    scale = 1e6 / clock_hz
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{name} (predicted)"}}
    ]
    lanes: dict[str, int] = {}
    flows = 0
    sets: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for core in timed.cores:
        for kind, pipe, start, end, number in core.events:
            thread = lanes.setdefault(lane(core.kind, pipe, core.sub), len(lanes) + 1)
            op = core.code.ops.get(number)
            label = op.name.removeprefix("hivm.hir.") if op is not None else kind
            if kind == "run" and label.startswith("sync_block_set") and op is not None:
                sets.setdefault((core.kind, int(op.attrs.get("static_flag_id", -1))), []).append((end, thread))
                continue
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": thread,
                    "ts": start * scale,
                    "dur": (end - start) * scale,
                    "name": label if kind == "run" else f"{kind} at {label}",
                    "cat": kind,
                    "args": {"line": op.place if op is not None else "", "cycles": round(end - start, 1)},
                }
            )
            if kind == "cross-core wait" and op is not None:
                # An arrow from the other side's lane that raised the flag to where the wait ends.
                source = "aic_fixpipe" if core.kind == "AIV" else f"aiv_mte3 {0}"
                if source in lanes:
                    flows += 1
                    flow = {"pid": 1, "id": flows, "name": "cross-core flag", "cat": "flag"}
                    latency = default_constants()["sync"]["cross_core_cycles"]
                    events.append({**flow, "ph": "s", "tid": lanes[source], "ts": (end - latency) * scale})
                    events.append({**flow, "ph": "f", "bp": "e", "tid": thread, "ts": end * scale})
    events += [
        {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": text}}
        for text, thread in lanes.items()
    ]
    return events


def picture(timed: Timed, title: str, path: Path, window: tuple[float, float] | None = None) -> None:
    """A PNG of a stretch of the timeline (default: 8 % of the run, from its middle)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    low, high = window or (0.5 * timed.cycles, 0.58 * timed.cycles)
    rows: dict[str, list[tuple[float, float, str]]] = {}
    for core in timed.cores:
        for kind, pipe, start, end, _ in core.events:
            if end > low and start < high and end > start:
                rows.setdefault(lane(core.kind, pipe, core.sub), []).append((start, end - start, kind))
    order = [name for base in LANES for name in sorted(rows) if name.rsplit(" ", 1)[0] == base or name == base]
    figure, axes = plt.subplots(figsize=(12, 0.42 * len(order) + 1.2))
    for index, name in enumerate(order):
        for kind, colour in COLOURS.items():
            spans = [(start, length) for start, length, k in rows[name] if k == kind]
            height = 0.8 if kind == "run" else 0.25
            axes.broken_barh(spans, (index - height / 2, height), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(order)), order)
    axes.invert_yaxis()
    axes.set_xlim(low, high)
    axes.set_xlabel("predicted cycles (1.8 GHz)")
    axes.set_title(title)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for kind, colour in COLOURS.items() if kind != "wait for L0"]
    axes.legend(handles, [k for k in COLOURS if k != "wait for L0"], loc="upper right", ncols=3, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def profile_table(record: Recording, console: Console, top: int = 30) -> None:
    """Print busy cycles by source line, and where the cores wait."""
    for kernel in record.kernels:
        report = kernel.report
        total = report["core_cycles"]
        console.print(
            f"[bold]{kernel.name}[/bold]: predicted {kernel.ms:.3f} ms, {total:.0f} cycles on the busiest core"
        )
        busy = ", ".join(f"{name} {cycles / total:.0%}" for name, cycles in sorted(report["busy"].items()))
        console.print(f"  busy: {busy}")
        waits = ", ".join(f"{name} {cycles / total:.0%}" for name, cycles in report["cross_core_wait"].items())
        console.print(f"  scalar unit at cross-core waits: {waits}; L2 stretch {report['l2_stretch']:.2f}")
        lines = report["lines"]
        names = sorted({name for row in lines.values() for name in row if not name.endswith("bytes")})
        table = Table(box=None)
        for heading in ("line", *names, "GM bytes"):
            table.add_column(heading, no_wrap=True)
        order = sorted(
            lines, key=lambda line: -max([v for n, v in lines[line].items() if not n.endswith("bytes")] or [0])
        )
        for line in order[:top]:
            row = lines[line]
            moved = sum(value for name, value in row.items() if name.endswith("bytes"))
            cells = [f"{row[name] / total:.1%}" if row.get(name) else "" for name in names]
            table.add_row(line, *cells, f"{moved:.3g}" if moved else "")
        console.print(table)


def case_call(suite: str, case: Case, heads: int | None) -> Callable[[], object]:
    """The call of a case with torch.empty tensors; `heads` replaces its batch and heads."""
    from backward import attention_bwd
    from forward import attention_fwd

    z, h = (case.z, case.h) if heads is None else (1, heads)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    x = torch.empty(z, h, case.n, case.d, dtype=dtype)
    if suite == "forward":
        return lambda: attention_fwd(x, x, x, case.causal, input_rule().sm_scale)
    lse = torch.empty(z, h, case.n)
    return lambda: attention_bwd(x, x, x, x, x, lse, case.causal, input_rule().sm_scale)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace or profile a case on the virtual NPU.")
    parser.add_argument("--suite", choices=("forward", "backward"), default="forward")
    parser.add_argument("--case", default="P1", help="name of the case, as `make score` prints it")
    parser.add_argument("--heads", type=int, default=40, help="heads in the trace (a profile runs them all)")
    parser.add_argument("--release", default="1.1.0")
    parser.add_argument("--profile", action="store_true", help="print cycles by source line instead")
    parser.add_argument("--out", type=Path, default=Path("results/local"), help="folder for the trace")
    arguments = parser.parse_args()
    (case,) = select(arguments.suite, [arguments.case])
    console = Console(width=130)
    if arguments.profile:
        call = case_call(arguments.suite, case, None)
        with run("timing", release=arguments.release) as record:
            call()
        profile_table(record, console)
        return
    call = case_call(arguments.suite, case, arguments.heads)
    traced: list[Any] = []
    with run("timing", release=arguments.release, trace=traced):
        call()
    arguments.out.mkdir(parents=True, exist_ok=True)
    clock = default_constants()["chip"]["clock_hz"]
    for program, timed in traced:
        stem = arguments.out / f"{case.name}-{program.name}"
        stem.with_suffix(".json").write_text(
            json.dumps({"traceEvents": chrome_events(timed, f"{case.name} {program.name}", clock)})
        )
        picture(
            timed,
            f"{case.name}: {program.name}, {arguments.heads} heads on 20 cores (predicted)",
            stem.with_suffix(".png"),
        )
        print(f"wrote {stem}.json (open it in ui.perfetto.dev) and {stem}.png")


if __name__ == "__main__":
    main()
