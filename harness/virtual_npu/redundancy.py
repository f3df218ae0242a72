"""Why a synchronisation that can be left out unnoticed is redundant: evidence from the run.

The happens-before check finds nothing without it; that alone would be the checker vouching
for itself. So a run with every synchronisation in place is logged, each access with its
exact bytes and each synchronisation in program order, and the log is searched without
clocks for what the synchronisation could have ordered:

* A barrier of one pipe only orders a write on that pipe before later accesses of the same
  pipe (reads before writes stay in order by themselves, other pipes are reached by flags).
  With no such pair between the neighbouring barriers it orders nothing. Where there are
  pairs, each must be ordered by a chain of local flags that goes out from the pipe behind
  the first access and comes back before the second.
* A barrier of all pipes with no instruction and no cross-core set after it orders nothing.
* An op that never runs on this shape says nothing; it is reported as not reached.

Anything else stays without an argument. Each argument holds for leaving out that one op.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
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


@dataclass(frozen=True)
class Flag:
    """A local flag raised behind pipe number `queue`, or waited for by it (also inside mmadL1)."""

    queue: int
    index: int
    set: bool


@dataclass
class Log:
    """One program of one core in program order: touches, local flags, and the number of each
    synchronisation in front of what it does."""

    core: str
    entries: list[Touch | Flag | int] = field(default_factory=list)

    @cached_property
    def set_of(self) -> dict[int, int]:
        """Position of the set that each wait consumes, by position of the wait; first in, first out."""
        raised: dict[int, deque[int]] = {}
        found = {}
        for position, entry in enumerate(self.entries):
            if isinstance(entry, Flag):
                waiting = raised.setdefault(entry.index, deque())
                if entry.set:
                    waiting.append(position)
                else:
                    found[position] = waiting.popleft()
        return found


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

        def set_flag(index: int, source: int) -> None:
            log.entries.append(Flag(source, index, set=True))
            Tracker.set_flag(tracker, index, source)

        def wait_flag(index: int, target: int) -> None:
            log.entries.append(Flag(target, index, set=False))
            Tracker.wait_flag(tracker, index, target)

        tracker._touch = touch  # type: ignore[method-assign]
        tracker.set_flag = set_flag  # type: ignore[method-assign]
        tracker.wait_flag = wait_flag  # type: ignore[method-assign]
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
    """What stands on a pipe between two other barriers, with the barrier in question inside:
    writes from before it with their positions, and touches since its last execution."""

    before: list[tuple[int, Touch]] = field(default_factory=list)
    recent: list[tuple[int, Touch]] = field(default_factory=list)


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


def _ordered(log: Log, start: int, end: int, skip: int, barriers: dict[int, str]) -> bool:
    """Whether local flags or barriers, without op `skip`, make the touch at `end` wait for the
    one at `start`: which pipes issue only behind it is followed from the one to the other."""
    first, second = log.entries[start], log.entries[end]
    assert isinstance(first, Touch) and isinstance(second, Touch)
    behind: set[int] = set()  # pipes whose next instruction starts after the first touch is done
    carrying: set[int] = set()  # positions of sets that are raised after it is done
    for position in range(start + 1, end):
        entry = log.entries[position]
        if isinstance(entry, Flag):
            if entry.set:
                if entry.queue == first.queue or entry.queue in behind:
                    carrying.add(position)
            elif log.set_of[position] in carrying:
                if entry.queue == INDEX["S"]:
                    return True  # the scalar unit issues all that follows
                behind.add(entry.queue)
        elif isinstance(entry, int) and entry != skip and entry in barriers:
            pipe = barriers[entry]
            if pipe == "ALL":
                return True
            if INDEX[pipe] == first.queue:
                behind.add(first.queue)
        if second.queue in behind:
            return True
    return False


def _pipe_barrier(logs: list[Log], core: str, op: Op, barriers: dict[int, str]) -> str | None:
    """Evidence that a barrier of one pipe orders no pair by itself, or None where it may."""
    pipe = barriers[op.number]
    queue = INDEX[pipe]
    if queue in ORDERED_WRITES:
        return None  # the hazard check never looks at such pairs, so nothing was shown
    pairs = _Pairs()
    runs = compared = by_flags = 0
    for log in logs:
        if log.core != core:
            continue
        window = _Window()
        for position, entry in enumerate(log.entries):
            if isinstance(entry, int):
                if entry == op.number:
                    runs += 1
                    window.before += [item for item in window.recent if item[1].write]
                    window.recent = []
                elif barriers.get(entry) in (pipe, "ALL"):
                    window = _Window()
            elif isinstance(entry, Touch) and entry.queue == queue:
                for start, earlier in window.before:
                    compared += 1
                    if pairs.overlap(earlier, entry):
                        if not _ordered(log, start, position, op.number, barriers):
                            return None
                        by_flags += 1
                window.recent.append((position, entry))
    shared = f"{by_flags} share bytes, each ordered by flags through another pipe" if by_flags else "none share bytes"
    return (
        f"ran {runs} times; of {compared} pairs of a write on pipe {pipe} before it and an access of that pipe after "
        f"it, up to the next barriers, {shared}"
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
        "no instruction and no cross-core set follows it, and the check that every pipe is done when the program ends "
        "passed in the run without it"
    )


def argument(logs: list[Log], functions: dict[str, Function], core: str, op: Op) -> str | None:
    """Why leaving out this op changes nothing, or None where the log does not show it.

    Args:
        logs: from `record`.
        functions: the program's functions by core.
        core: "AIC" or "AIV".
        op: an op that `reached` says ran, and whose deletion led to no report.
    """
    if op.name != BARRIER:
        return None
    walked = list(functions[core].walk())
    barriers = {o.number: str(o.attrs["pipe"]).removeprefix("PIPE_") for o in walked if o.name == BARRIER}
    if barriers[op.number] == "ALL":
        return _final_barrier(logs, core, op, {o.number for o in walked if o.name == "hivm.hir.sync_block_set"})
    return _pipe_barrier(logs, core, op, barriers)
