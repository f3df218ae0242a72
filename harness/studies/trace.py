"""Traces of a predicted launch.

    python -m harness.studies.trace --suite forward --case P1

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

from ..configs import Case, input_rule, select
from ..virtual_npu.driver import run
from ..virtual_npu.hardware import default_constants
from ..virtual_npu.timing import Timed
from .profile import cause, lane

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


MAX_EVENTS = 200_000  # a trace that the Perfetto UI still opens at once


def _slices(timed: Timed, max_events: int) -> tuple[list[tuple[float, dict[str, Any]]], float]:
    """Slices of instructions and waits with their start, and the cycle up to which all are there."""
    every = [
        (start, core, kind, pipe, end, number) for core in timed.cores for kind, pipe, start, end, number in core.events
    ]
    every.sort(key=lambda event: event[0])
    last = every[max_events][0] if len(every) > max_events else timed.cycles
    slices = []
    for start, core, kind, pipe, end, number in every[:max_events]:
        op = core.code.ops.get(number)
        label = op.name.removeprefix("hivm.hir.") if op is not None else "scalar"
        name = label if kind == "run" else f"wait for {cause(kind, core.kind, op)}"
        arguments = {"line": op.place if op is not None else "", "cycles": round(end - start, 1)}
        body = {"tid": lane(core.kind, pipe, core.sub), "name": name, "cat": kind, "args": arguments}
        slices.append((start, {**body, "dur": end - start}))
    return slices, last


def flows(timed: Timed) -> list[tuple[float, str, float, str, int]]:
    """Cross-core flags that a core really waited for: cycle and lane of the set, cycle and lane
    of the end of the wait, flag id. A wait of the cube core is answered by the later vector core."""
    raised: dict[tuple[str, int, int], list[tuple[float, str]]] = {}
    for core in timed.cores:
        for is_set, flag, time, pipe in core.signals:
            if is_set:
                raised.setdefault((core.kind, core.sub, flag), []).append((time, pipe))
    found = []
    for core in timed.cores:
        waited = {end for kind, _, _, end, _ in core.events if kind == "cross-core wait"}
        senders = [other for other in timed.cores if other.kind != core.kind]
        taken: dict[int, int] = {}
        for is_set, flag, time, _ in core.signals:
            if is_set:
                continue
            index = taken[flag] = taken.get(flag, -1) + 1
            if time in waited:
                set_at, pipe, sub, kind = max(
                    (*raised[sender.kind, sender.sub, flag][index], sender.sub, sender.kind) for sender in senders
                )
                found.append((set_at, lane(kind, pipe, sub), time, lane(core.kind, "S", core.sub), flag))
    return found


def chrome_events(timed: Timed, name: str, clock_hz: float, max_events: int = MAX_EVENTS) -> list[dict[str, Any]]:
    """Chrome trace events of one traced launch.

    Args:
        timed: from `run("timing", trace=[...])`.
        name: shown as the process.
        clock_hz: of the cores; the events' times are microseconds.
        max_events: instructions and waits to keep, from the start of the launch.
    """
    scale = 1e6 / clock_hz
    slices, last = _slices(timed, max_events)
    arrows: list[tuple[float, dict[str, Any]]] = []
    for number, (set_at, source, end, target, flag) in enumerate(flows(timed), 1):
        if end > last:
            continue
        # A short slice on the setting pipe, for the arrow to leave from; it ends with the set.
        body = {"cat": "flag", "name": f"set flag {flag}"}
        slices.append((set_at - 1.0, {**body, "tid": source, "dur": 1.0, "args": {}}))
        flow = {"cat": "flag", "id": number, "name": f"cross-core flag {flag}"}
        arrows.append((set_at - 0.5, {**flow, "ph": "s", "tid": source}))
        arrows.append((end - 0.5, {**flow, "ph": "f", "bp": "e", "tid": target}))
    used = {event["tid"] for _, event in slices}
    order = [text for base in LANES for text in sorted(used) if text == base or text.rsplit(" ", 1)[0] == base]
    threads = {text: number for number, text in enumerate(order, 1)}
    title = f"{name} (predicted)" + (f", first {last:.0f} of {timed.cycles:.0f} cycles" if last < timed.cycles else "")
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for text, number in threads.items():
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": text}})
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for start, event in slices:
        event = {**event, "ph": "X", "pid": 1, "tid": threads[event["tid"]]}
        events.append({**event, "ts": start * scale, "dur": event["dur"] * scale})
    events += [{**event, "pid": 1, "tid": threads[event["tid"]], "ts": at * scale} for at, event in arrows]
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


def case_call(suite: str, case: Case, heads: int | None) -> Callable[[], object]:
    """The call of a case with torch.empty tensors; `heads` replaces its batch and heads."""
    from backward import attention_bwd
    from forward import attention_fwd

    z, h = (case.z, case.h) if heads is None else (1, heads)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    q, k, v, out, dout = (torch.empty(z, h, case.n, case.d, dtype=dtype) for _ in range(5))
    if suite == "forward":
        return lambda: attention_fwd(q, k, v, case.causal, input_rule().sm_scale)
    lse = torch.empty(z, h, case.n)
    return lambda: attention_bwd(dout, q, k, v, out, lse, case.causal, input_rule().sm_scale)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace a case on the virtual NPU.")
    parser.add_argument("--suite", choices=("forward", "backward"), default="forward")
    parser.add_argument("--case", default="P1", help="name of the case, as `make score` prints it")
    parser.add_argument("--heads", type=int, default=40, help="heads in the trace")
    parser.add_argument("--events", type=int, default=MAX_EVENTS, help="instructions and waits to keep")
    parser.add_argument("--release", default="1.1.0")
    parser.add_argument("--out", type=Path, default=Path("results/local"), help="folder for the trace")
    arguments = parser.parse_args()
    chosen = select(arguments.suite, [arguments.case])
    if len(chosen) != 1:
        parser.error(f"--case must name one case, got {', '.join(case.name for case in chosen)}")
    (case,) = chosen
    call = case_call(arguments.suite, case, arguments.heads)
    traced: list[Any] = []
    with run("timing", release=arguments.release, trace=traced):
        call()
    arguments.out.mkdir(parents=True, exist_ok=True)
    clock = default_constants()["chip"]["clock_hz"]
    for program, timed in traced:
        stem = arguments.out / f"{case.name}-{program.name}"
        events = chrome_events(timed, f"{case.name} {program.name}", clock, arguments.events)
        stem.with_suffix(".json").write_text(json.dumps({"traceEvents": events}))
        picture(
            timed,
            f"{case.name}: {program.name}, {arguments.heads} heads on 20 cores (predicted)",
            stem.with_suffix(".png"),
        )
        print(f"wrote {stem}.json (open it in ui.perfetto.dev) and {stem}.png")


if __name__ == "__main__":
    main()
