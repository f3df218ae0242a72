"""Why a synchronisation that can be left out unnoticed is redundant: evidence from the run.

The happens-before check finds nothing without it; that alone would be the checker vouching
for itself. So a run with every synchronisation in place is logged, each access with its
exact bytes and each synchronisation in the order of the run, and the log is searched
without clocks for what the synchronisation could have ordered:

* A barrier of one pipe orders what that pipe did before it with what it does later (other
  pipes are reached by flags). Where no two of these accesses conflict, up to the
  neighbouring barriers, it orders nothing. Where some do, each pair must be ordered by a
  chain of flags that goes out from the pipe behind the first access and comes back before
  the second, through other pipes of the core or through the other cores of the block.
* A barrier of all pipes with no instruction and no cross-core set after it orders nothing.
* An op that never runs on this shape says nothing; it is reported as not reached.

Anything else stays without an argument. Each argument holds for leaving out that one op.
REASONS says where in the compiler such barriers come from.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .hazards import INDEX, ORDERED, QUEUES, Region, Tracker, _really_overlap
from .hivm import Function, Op
from .launch import Launch
from .memory import Memory
from .program import Program
from .values import NAMESPACE, SYNC, Code, Core, ValueLowering

BARRIER = "hivm.hir.pipe_barrier"
# Why the compiler makes a barrier that orders nothing, with the place in AscendNPU-IR (@52f96a13,
# bishengir/lib/Dialect/HIVM/Transforms/InjectSync).
REASONS = {
    "end": "a barrier of all pipes stands at the end of every program, also where the scalar unit has waited for "
    "every pipe by then (SyncAnalysis.cpp, InsertLastPipeAll)",
    "one tensor": "any two accesses to the same tensor in global memory count as overlapping, whatever their offsets "
    "(MemoryDependentAnalyzer.cpp, isGMBufferOverlap)",
    "one buffer": "any two accesses to the same buffer on chip, or to one whose address varies, count as overlapping "
    "(MemoryDependentAnalyzer.cpp, MemAlias and isBufferAddressRangeOverlap)",
    "another barrier": "nothing of the pipe stands between it and the next barrier; redundant flags are removed, "
    "barriers never (RemoveRedundantSync.cpp, Plan, takes pairs of a set and a wait only)",
    "flags": "flags for other dependencies order its accesses too; redundant flags are removed, barriers never "
    "(RemoveRedundantSync.cpp, Plan, takes pairs of a set and a wait only)",
}
Place = tuple[str, int]  # a core's name and a pipe's number


@dataclass(frozen=True)
class Touch:
    """Bytes of one memory that an instruction on a pipe reads or writes."""

    place: Place
    number: int
    op: Op
    memory: int
    region: Region
    write: bool
    space: str = "ub"


@dataclass(frozen=True)
class Evidence:
    """Why a barrier orders nothing: what the log shows, and which of REASONS it is."""

    text: str
    reason: str


@dataclass(frozen=True)
class Flag:
    """A local flag raised behind a pipe, or waited for by it (also inside mmadL1)."""

    place: Place
    index: int
    set: bool


@dataclass(frozen=True)
class Cross:
    """A cross-core set behind a pipe with the numbers of the sets that it raises, or a wait
    of the scalar unit with those that it consumes."""

    place: Place
    sets: tuple[int, ...]
    set: bool


@dataclass(frozen=True)
class Mark:
    """A core comes to a synchronisation."""

    core: str
    number: int


@dataclass
class Log:
    """One program of the grid: touches, flags, and each synchronisation in front of what it
    does, in the order in which its cores ran."""

    entries: list[Touch | Flag | Cross | Mark] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)  # "AIC" or "AIV" by core

    @cached_property
    def set_of(self) -> dict[int, int]:
        """Position of the set that each local wait consumes, by position of the wait; first in, first out."""
        raised: dict[tuple[str, int], deque[int]] = {}
        found = {}
        for position, entry in enumerate(self.entries):
            if isinstance(entry, Flag):
                waiting = raised.setdefault((entry.place[0], entry.index), deque())
                if entry.set:
                    waiting.append(position)
                else:
                    found[position] = waiting.popleft()
        return found


class _LoggingLowering(ValueLowering):
    """Values-mode code that also marks each synchronisation that it executes."""

    def prologue(self) -> Iterable[str]:
        yield from super().prologue()
        yield "mark = log_of(core)"

    def device(self, op: Op, indent: int) -> None:
        if op.name in SYNC or op.name == "hivm.hir.mmadL1":
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


class _Recorder:
    """Writes the logs of a launch; one for each program of the grid."""

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.raised = 0
        self.waiting: dict[tuple[str, int, int], deque[int]] = {}  # by receiver, sender's number, flag

    def start(self, core: Core) -> Callable[[int], None]:
        """A program begins on a core: what marks its synchronisations."""
        if not self.logs or core.name in self.logs[-1].kinds:
            self.logs.append(Log())
            self.waiting.clear()
        log = self.logs[-1]
        log.kinds[core.name] = core.kind
        tracker = core.tracker
        assert tracker is not None

        def note(memory: Memory, region: Region, queue: int, op: Op, write: bool) -> None:
            touch = Touch((core.name, queue), tracker.count[queue], op, id(memory), region, write, memory.space)
            log.entries.append(touch)
            Tracker._note(tracker, memory, region, queue, op, write)

        def set_flag(index: int, source: int) -> None:
            log.entries.append(Flag((core.name, source), index, set=True))
            Tracker.set_flag(tracker, index, source)

        def wait_flag(index: int, target: int) -> None:
            log.entries.append(Flag((core.name, target), index, set=False))
            Tracker.wait_flag(tracker, index, target)

        def block_set(flag: int, pipe: int, sub: int) -> None:
            sets = []
            for peer in core.peers:
                self.raised += 1
                sets.append(self.raised)
                self.waiting.setdefault((peer.name, sub, flag), deque()).append(self.raised)
            log.entries.append(Cross((core.name, pipe), tuple(sets), set=True))
            Tracker.block_set(tracker, flag, pipe, sub)

        def block_wait(flag: int, senders: int) -> None:
            sets = tuple(self.waiting[core.name, sub, flag].popleft() for sub in range(senders))
            log.entries.append(Cross((core.name, INDEX["S"]), sets, set=False))
            Tracker.block_wait(tracker, flag, senders)

        for name, function in (
            ("_note", note),
            ("set_flag", set_flag),
            ("wait_flag", wait_flag),
            ("block_set", block_set),
            ("block_wait", block_wait),
        ):
            setattr(tracker, name, function)
        return lambda number: log.entries.append(Mark(core.name, number))


def record(launch: Launch) -> list[Log]:
    """Run a captured launch once more, hazards on, and log it."""
    recorder = _Recorder()
    program = Program(launch.program.name, launch.program.text)
    program.__dict__["module"] = launch.program.module
    program.__dict__["hazards"] = {
        core: _compile(function, recorder.start) for core, function in launch.program.functions.items()
    }
    launch.again(program)
    return recorder.logs


def reached(logs: Sequence[Log]) -> Counter[int]:
    """How often each synchronisation ran, by op number."""
    return Counter(entry.number for log in logs for entry in log.entries if isinstance(entry, Mark))


@dataclass
class _Window:
    """What a core's pipe does between two other barriers, with the barrier in question inside:
    touches from before it with their positions, and touches since its last execution."""

    before: list[tuple[int, Touch]] = field(default_factory=list)
    recent: list[tuple[int, Touch]] = field(default_factory=list)


class _Pairs:
    """Whether two touches conflict; each pair of regions is compared once."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, Any], bool] = {}

    def conflict(self, a: Touch, b: Touch) -> bool:
        if not (a.write or b.write) or a.number == b.number:
            return False
        if a.memory != b.memory or a.region.high <= b.region.low or b.region.high <= a.region.low:
            return False
        key = (a.region.key, b.region.key)
        if key not in self.known:
            self.known[key] = _really_overlap(a.region, b.region)
        return self.known[key]


def _ordered(log: Log, start: int, end: int, skip: int, barriers: dict[int, str]) -> bool:
    """Whether flags or barriers, without op `skip`, make the touch at `end` wait for the one
    at `start`: which pipes issue only behind it is followed from the one to the other."""
    first, second = log.entries[start], log.entries[end]
    assert isinstance(first, Touch) and isinstance(second, Touch)
    behind: set[Place] = set()  # pipes whose next instruction starts after the first touch is done
    carrying: set[int] = set()  # positions of local sets that are raised after it is done
    crossing: set[int] = set()  # numbers of cross-core sets that are
    for position in range(start + 1, end):
        entry = log.entries[position]
        whole: str | None = None  # a core whose scalar unit waits, and so all that it issues later
        if isinstance(entry, Flag):
            if entry.set:
                if entry.place == first.place or entry.place in behind:
                    carrying.add(position)
            elif log.set_of[position] in carrying:
                behind.add(entry.place)
                if entry.place[1] == INDEX["S"]:
                    whole = entry.place[0]
        elif isinstance(entry, Cross):
            if entry.set:
                if entry.place == first.place or entry.place in behind:
                    crossing.update(entry.sets)
            elif crossing.intersection(entry.sets):
                whole = entry.place[0]
        elif isinstance(entry, Mark) and entry.number != skip and entry.number in barriers:
            pipe = barriers[entry.number]
            if pipe == "ALL":
                if entry.core == first.place[0] or any(core == entry.core for core, _ in behind):
                    whole = entry.core
            elif (entry.core, INDEX[pipe]) == first.place:
                behind.add(first.place)
        if whole is not None:
            behind.update((whole, queue) for queue in range(QUEUES))
        if second.place in behind:
            return True
    return False


def _pipe_barrier(logs: Sequence[Log], op: Op, barriers: dict[int, str]) -> Evidence | None:
    """Evidence that a barrier of one pipe orders no pair by itself, or None where it may."""
    pipe = barriers[op.number]
    queue = INDEX[pipe]
    if queue in ORDERED:
        return None  # the hazard check never looks at such pairs, so nothing was shown
    pairs = _Pairs()
    runs = compared = by_flags = 0
    tensors = False  # pairs in one memory of global memory, of which one writes
    for log in logs:
        windows: dict[str, _Window] = {}
        for position, entry in enumerate(log.entries):
            if isinstance(entry, Mark):
                window = windows.setdefault(entry.core, _Window())
                if entry.number == op.number:
                    runs += 1
                    window.before += window.recent
                    window.recent = []
                elif barriers.get(entry.number) in (pipe, "ALL"):
                    windows[entry.core] = _Window()
            elif isinstance(entry, Touch) and entry.place[1] == queue:
                window = windows.setdefault(entry.place[0], _Window())
                for start, earlier in window.before:
                    compared += 1
                    tensors |= entry.space == "gm" and earlier.memory == entry.memory and earlier.write | entry.write
                    if pairs.conflict(earlier, entry):
                        if not _ordered(log, start, position, op.number, barriers):
                            return None
                        by_flags += 1
                window.recent.append((position, entry))
    found = f"{by_flags} conflict, each ordered by flags through other pipes or cores" if by_flags else "none conflict"
    reason = "flags" if by_flags else "another barrier" if not compared else "one tensor" if tensors else "one buffer"
    text = (
        f"ran {runs} times; of {compared} pairs of an access on pipe {pipe} before it and one after it, "
        f"up to the next barriers, {found}"
    )
    return Evidence(text, reason)


def _final_barrier(logs: Sequence[Log], op: Op, sets: set[int]) -> Evidence | None:
    """Evidence that a barrier of all pipes is the last thing of its programs."""
    for log in logs:
        ended: set[str] = set()
        for entry in log.entries:
            if isinstance(entry, Mark):
                if entry.number == op.number:
                    ended.add(entry.core)
                elif entry.core in ended and entry.number in sets:
                    return None
            elif isinstance(entry, Touch) and entry.place[0] in ended:
                return None
    return Evidence(
        "no instruction and no cross-core set follows it, and the check that every pipe is done when the program ends "
        "passed in the run without it",
        "end",
    )


def argument(logs: Sequence[Log], functions: dict[str, Function], op: Op) -> Evidence | None:
    """Why leaving out this op changes nothing, or None where the log does not show it.

    Args:
        logs: from `record`.
        functions: the program's functions by core.
        op: an op that `reached` says ran, and whose deletion led to no report.
    """
    if op.name != BARRIER:
        return None
    walked = [o for function in functions.values() for o in function.walk()]
    barriers = {o.number: str(o.attrs["pipe"]).removeprefix("PIPE_") for o in walked if o.name == BARRIER}
    if barriers[op.number] == "ALL":
        return _final_barrier(logs, op, {o.number for o in walked if o.name == "hivm.hir.sync_block_set"})
    return _pipe_barrier(logs, op, barriers)
