"""Why a synchronisation that can be left out unnoticed is redundant: evidence from the run.

The happens-before check finds nothing without it; that alone would be the checker vouching
for itself. So a run with every synchronisation in place is logged, each access with its
exact bytes and each synchronisation in program order, and the log is searched without
clocks for what the synchronisation could have ordered:

* A barrier of one pipe only orders a write on that pipe before later accesses of the same
  pipe (reads before writes stay in order by themselves, other pipes are reached by flags).
  With no such pair between the neighbouring barriers it orders nothing.
* A barrier of all pipes with no instruction and no cross-core set after it orders nothing.
* An op that never runs on this shape says nothing; it is reported as not reached.

Anything else stays without an argument. Each argument holds for leaving out that one op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .hazards import INDEX, ORDERED_WRITES, Region, Tracker, _really_overlap
from .hivm import Function, Op
from .launch import Launch
from .memory import Memory
from .program import Program
from .values import NAMESPACE, SYNC, Code, Core, ValueLowering

BARRIER = "hivm.hir.pipe_barrier"


@dataclass(frozen=True)
class Touch:
    """Bytes of one memory that an instruction on pipe number `queue` reads or writes."""

    queue: int
    number: int
    op: Op
    memory: int
    region: Region
    write: bool


@dataclass
class Log:
    """One program of one core: touches, and numbers of synchronisations, in program order."""

    core: str
    entries: list[Touch | int] = field(default_factory=list)


class _LoggingLowering(ValueLowering):
    """Values-mode code that also marks each synchronisation it executes."""

    def prologue(self) -> Iterable[str]:
        yield from super().prologue()
        yield "mark = log_of(core)"

    def device(self, op: Op, indent: int) -> None:
        if op.name in SYNC:
            self.emit(indent, f"mark({op.number})", op)
        super().device(op, indent)


def _compile(function: Function, log_of: Callable[[Core], Callable[[int], None]]) -> Code:
    lowering = _LoggingLowering(function, hazards=True)
    text = lowering.generate("core_program")
    filename = f"<hivm log {function.name}>"
    namespace: dict[str, Any] = {**NAMESPACE, "log_of": log_of}
    exec(compile(text, filename, "exec"), namespace)  # noqa: S102 - text written by ValueLowering
    ops = {op.number: op for op in function.walk()}
    return Code(function, namespace["core_program"], filename, lowering.line_ops, ops, text)


def record(launch: Launch) -> list[Log]:
    """Run a captured launch once more, hazards on, and log it."""
    logs: list[Log] = []
    regions: dict[tuple[Any, ...], Region] = {}

    def log_of(core: Core) -> Callable[[int], None]:
        log = Log(core.kind)
        logs.append(log)
        tracker = core.tracker
        assert tracker is not None

        def touch(
            memory: Memory, low: int, high: int, key: tuple[Any, ...], queue: int, op: Op, *, write: bool
        ) -> None:
            region = regions.setdefault(key, Region(low, high, key))
            log.entries.append(Touch(queue, tracker.count[queue], op, id(memory), region, write))
            Tracker._touch(tracker, memory, low, high, key, queue, op, write=write)

        tracker._touch = touch  # type: ignore[method-assign]
        return log.entries.append

    program = Program(launch.program.name, launch.program.text)
    program.__dict__["module"] = launch.program.module
    program.__dict__["hazards"] = {
        core: _compile(function, log_of) for core, function in launch.program.functions.items()
    }
    launch.again(program)
    return logs


def reached(logs: list[Log], core: str) -> Counter[int]:
    """How often each synchronisation of a core ran, by op number."""
    return Counter(entry for log in logs if log.core == core for entry in log.entries if isinstance(entry, int))


@dataclass
class _Window:
    """What stands on a pipe between two other barriers, with the barrier in question inside."""

    before: dict[tuple[int, tuple[Any, ...]], Touch] = field(default_factory=dict)  # writes, from before it
    recent: list[Touch] = field(default_factory=list)  # since its last execution


class _Pairs:
    """Whether two touches have a byte in common; each pair of regions is compared once."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, Any], bool] = {}

    def overlap(self, a: Touch, b: Touch) -> bool:
        if a.memory != b.memory or a.region.high <= b.region.low or b.region.high <= a.region.low:
            return False
        key = (a.region.key, b.region.key)
        if key not in self.known:
            self.known[key] = _really_overlap(a.region, b.region)
        return self.known[key]


def _pipe_barrier(logs: list[Log], core: str, op: Op, barriers: dict[int, str]) -> str | None:
    """Evidence that a barrier of one pipe orders no pair, or None where it may."""
    pipe = barriers[op.number]
    queue = INDEX[pipe]
    if queue in ORDERED_WRITES:
        return f"writes on pipe {pipe} stay in order in hardware and nothing on that pipe reads them back"
    pairs = _Pairs()
    runs, compared = 0, 0
    for log in logs:
        if log.core != core:
            continue
        window = _Window()
        for entry in log.entries:
            if isinstance(entry, int):
                if entry == op.number:
                    runs += 1
                    for touch in window.recent:
                        if touch.write:
                            window.before[touch.memory, touch.region.key] = touch
                    window.recent = []
                elif barriers.get(entry) in (pipe, "ALL"):
                    window = _Window()
                continue
            if entry.queue != queue:
                continue
            for earlier in window.before.values():
                compared += 1
                if pairs.overlap(earlier, entry):
                    return None
            window.recent.append(entry)
    return (
        f"ran {runs} times; between the barriers around it no instruction on pipe {pipe} touches bytes that one "
        f"before it wrote ({compared} pairs compared)"
    )


def _final_barrier(logs: list[Log], core: str, op: Op, sets: set[int]) -> str | None:
    """Evidence that a barrier of all pipes is the last thing of its programs."""
    for log in logs:
        if log.core != core:
            continue
        after = False
        for entry in log.entries:
            if entry == op.number:
                after = True
            elif after and (isinstance(entry, Touch) or entry in sets):
                return None
    return (
        "no instruction and no cross-core set follows it, and without it the scalar unit has still waited for every "
        "pipe when the program ends"
    )


def argument(logs: list[Log], functions: dict[str, Function], core: str, op: Op) -> str | None:
    """Why leaving out this op changes nothing, or None where the log does not show it.

    Args:
        logs: from `record`.
        functions: the program's functions by core.
        core: "AIC" or "AIV".
        op: an op that `reached` says ran.
    """
    if op.name != BARRIER:
        return None
    walked = list(functions[core].walk())
    barriers = {o.number: str(o.attrs["pipe"]).removeprefix("PIPE_") for o in walked if o.name == BARRIER}
    if barriers[op.number] == "ALL":
        return _final_barrier(logs, core, op, {o.number for o in walked if o.name == "hivm.hir.sync_block_set"})
    return _pipe_barrier(logs, core, op, barriers)
