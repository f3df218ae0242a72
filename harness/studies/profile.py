"""`python -m harness.studies.profile`: where a predicted launch spends its time, by line.

For each line of the Python kernel: cycles on each pipe of the cube core and of the first
vector core (the second one does the same work on other rows), bytes by level of memory, and
the waits with what they wait for. The predicted time and the share of reads that HBM serves
are those of the whole case; the lines come from a traced run on a few heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from ..configs import select
from ..virtual_npu.driver import KernelRun, run
from ..virtual_npu.hivm import Op
from ..virtual_npu.program import Program
from ..virtual_npu.timing import PROFILER_NAMES, Timed

LEVELS = ("L1 to L0", "GM read", "of it HBM", "GM write")
HEADS = 40  # of the traced run: two for each core
TOP = 25
Key = TypeVar("Key")


def lane(kind: str, pipe: str, sub: int | None = None) -> str:
    """Profiler name of a pipe, with the vector core's number where one is given."""
    name = PROFILER_NAMES[kind].get(pipe, pipe)
    return name if kind == "AIC" or sub is None else f"{name} {sub}"


def cause(kind: str, core: str, op: Op | None) -> str:
    """What an event of a wait waits for.

    Args:
        kind: of the event, "wait", "wait for L0" or "cross-core wait".
        core: the core that waits, "AIC" or "AIV".
        op: the op that it stands at.
    """
    if kind == "cross-core wait":
        flag = "" if op is None or "static_flag_id" not in op.attrs else f" {op.attrs['static_flag_id']}"
        return f"cross-core flag{flag} from the {'vector cores' if core == 'AIC' else 'cube core'}"
    if kind == "wait for L0":
        return "L0A/L0B free (aic_mac)"
    if op is not None and op.name == "hivm.hir.wait_flag":
        return lane(core, str(op.attrs["set_pipe"]).removeprefix("PIPE_"))
    return "aic_mte2" if core == "AIC" else "another pipe"


@dataclass
class Profile:
    """One kernel of a launch; all numbers are of the busiest core, in cycles and bytes.

    Attributes:
        name: the kernel.
        cycles: predicted cycles of the traced run on that core.
        busy: by line, cycles by pipe.
        moved: by line, bytes by level (LEVELS).
        waits: by (line, pipe that waits, cause), cycles.
    """

    name: str
    cycles: float
    busy: dict[str, dict[str, float]] = field(default_factory=dict)
    moved: dict[str, dict[str, float]] = field(default_factory=dict)
    waits: dict[tuple[str, str, str], float] = field(default_factory=dict)


def _add(table: dict[Key, float], key: Key, amount: float) -> None:
    table[key] = table.get(key, 0.0) + amount


def profile(program: Program, timed: Timed, hbm_share: Mapping[str, float]) -> Profile:
    """The profile of a traced launch.

    Args:
        program, timed: from `run("timing", trace=[...])`.
        hbm_share: by argument number, the share of its reads that HBM serves (a launch's report).
    """
    result = Profile(program.name, timed.cycles)
    for core in timed.cores:
        if core.sub:
            continue
        for step, number in core.steps():
            if step.pipe == "S":
                continue  # counted for a stretch of code, not for a line
            line = step.op.place
            if step.cycles:
                _add(result.busy.setdefault(line, {}), lane(core.kind, step.pipe), timed.cycles_of(step) * number)
            share = hbm_share.get(str(step.argument), 0.0)
            amounts = (step.l1_bytes, step.read_bytes, step.read_bytes * share, step.write_bytes)
            for level, amount in zip(LEVELS, amounts, strict=True):
                if amount:
                    _add(result.moved.setdefault(line, {}), level, amount * number)
        for kind, pipe, start, end, number in core.events:
            if kind == "run":
                continue
            op = core.code.ops.get(number)
            place = op.place if op is not None else "?"
            _add(result.waits, (place, lane(core.kind, pipe), cause(kind, core.kind, op)), end - start)
    return result


def show(found: Profile, whole: KernelRun, console: Console, top: int = TOP) -> None:
    """Print a profile under the head line of the whole case's launch."""
    report = whole.report
    total = report["core_cycles"]
    console.print(f"[bold]{found.name}[/bold]: predicted {whole.ms:.3f} ms, {total:.0f} cycles on the busiest core")
    busy = ", ".join(f"{name} {cycles / total:.0%}" for name, cycles in sorted(report["busy"].items()))
    waits = ", ".join(f"{name} {cycles / total:.0%}" for name, cycles in report["cross_core_wait"].items())
    console.print(f"  busy: {busy}")
    console.print(f"  at cross-core waits: {waits}; L2 stretch {report['l2_stretch']:.2f}")
    lines = {*found.busy, *found.moved}
    pipes = sorted({name for row in found.busy.values() for name in row})
    levels = [level for level in LEVELS if any(level in row for row in found.moved.values())]
    table = Table(box=None)
    for heading in ("line", *pipes, *(f"{level} KiB" for level in levels)):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "line" else "right")
    for line in sorted(lines, key=lambda line: (-max(found.busy.get(line, {}).values(), default=0.0), line))[:top]:
        busy_here, moved = found.busy.get(line, {}), found.moved.get(line, {})
        shares = [f"{busy_here[name] / found.cycles:.1%}" if name in busy_here else "" for name in pipes]
        kib = [f"{moved[level] / 1024:.0f}" if level in moved else "" for level in levels]
        table.add_row(line, *shares, *kib)
    console.print(table)
    waiting = Table(box=None)
    for heading in ("waits that cost most", "pipe", "for", "of the time"):
        waiting.add_column(heading, no_wrap=True)
    costly = sorted(found.waits.items(), key=lambda item: -item[1])[: top // 2]
    for (line, pipe, reason), cycles in costly:
        waiting.add_row(line, pipe, reason, f"{cycles / found.cycles:.1%}")
    console.print(waiting)


def run_profile(
    full: Callable[[], object], part: Callable[[], object], release: str = "1.1.0"
) -> list[tuple[Profile, KernelRun]]:
    """Profile the launches of a call.

    Args:
        full: the call at its full size, with tensors whose contents do not matter.
        part: the same call on fewer heads.
        release: of bishengir.

    Returns:
        For each launch its profile (of `part`) and its run (of `full`).
    """
    with run("timing", release=release) as record:
        full()
    shares = {kernel.name: kernel.report["hbm_share"] for kernel in record.kernels}
    traced: list[Any] = []
    with run("timing", release=release, trace=traced, hbm_share=shares):
        part()
    return [
        (profile(program, timed, shares[program.name]), whole)
        for (program, timed), whole in zip(traced, record.kernels, strict=True)
    ]


def main() -> None:
    from .trace import case_call

    parser = argparse.ArgumentParser(description="Predicted cycles, bytes and waits of a case by source line.")
    parser.add_argument("--suite", choices=("forward", "backward"), default="forward")
    parser.add_argument("--case", default="P1", help="name of the case, as `make score` prints it")
    parser.add_argument("--heads", type=int, default=HEADS, help="heads of the traced run")
    parser.add_argument("--release", default="1.1.0")
    parser.add_argument("--top", type=int, default=TOP, help="lines to print for each kernel")
    arguments = parser.parse_args()
    chosen = select(arguments.suite, [arguments.case])
    if len(chosen) != 1:
        parser.error(f"--case must name one case, got {', '.join(case.name for case in chosen)}")
    (case,) = chosen
    full, part = (case_call(arguments.suite, case, heads) for heads in (None, arguments.heads))
    console = Console(width=170)
    console.print(f"{case}; lines from {arguments.heads} heads; all times predicted")
    for found, whole in run_profile(full, part, arguments.release):
        show(found, whole, console, arguments.top)


if __name__ == "__main__":
    main()
