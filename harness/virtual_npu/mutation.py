"""Mutation of a compiled kernel: what if one synchronisation were missing?

For each synchronisation of the program, explicit or made by the compiler, an op of its own
or one of the flags that `mmadL1` takes as operands, the program is run without it. A
deletion counts as noticed when the virtual NPU reports an error or the results change in one
of the launches. What goes unnoticed is either redundant, never reached by these launches, or
a hole in the model: `redundancy` looks for evidence of the first.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from . import redundancy
from .errors import VirtualNPUError
from .hivm import Function, Op, Region, Value
from .launch import Launch
from .ops_cube import sync_arguments
from .program import Program
from .values import SYNC as SYNCS
from .values import compile_values

SECONDS = 300.0  # a mutant that runs longer counts as one that does not end
NOT_REACHED = "not reached: this op never runs in these launches"
NO_EVIDENCE = (
    "no evidence of redundancy in the log of the run; the happens-before check finds every conflicting pair of "
    "accesses ordered by other synchronisations"
)


_FRESH = 10**9  # number of a value that no program has
MACRO = "hivm.hir.mmadL1"
# Its flag operands that can be left out alone. (Without its M->MTE1 flags, operands 12 and 13,
# the macro drains L0 itself: slower, not less safe.)
MACRO_FLAGS = {7: "wait for A", 8: "wait for B", 9: "set after A", 10: "set after B"}


@dataclass(frozen=True)
class Sync:
    """A synchronisation: an op, or one of the flag operands of mmadL1."""

    core: str
    op: Op
    operand: int | None = None

    @property
    def detail(self) -> str:
        """What tells which synchronisation this is."""
        if self.operand is not None:
            return MACRO_FLAGS[self.operand]
        keys = ("pipe", "set_pipe", "wait_pipe", "tpipe", "static_event_id", "static_flag_id")
        return ", ".join(f"{key} {self.op.attrs[key]}" for key in keys if key in self.op.attrs)


@dataclass
class Mutant:
    """A program without one synchronisation."""

    sync: Sync
    program: Program
    index: int


@dataclass
class Outcome:
    """What a deletion led to.

    Attributes:
        core: "AIC" or "AIV".
        op: the deleted op and its line, or the mmadL1 without one of its flags.
        detail: which synchronisation it is.
        noticed: an error was reported, or the results changed.
        error: the report; empty when only the values changed or nothing did.
        argument: for an unnoticed one, why it changes nothing.
        proven: the argument rests on the log of the run (`redundancy`), not on the
            happens-before check alone, and the op was reached.
        reason: for a proven one, which of `redundancy.REASONS` it is.
        index: its place among the program's synchronisations.
    """

    core: str
    op: str
    detail: str
    noticed: bool
    error: str = ""
    argument: str = ""
    proven: bool = False
    reason: str = ""
    index: int = 0


def _region_of(region: Region, op: Op) -> Region | None:
    """The region that holds an op."""
    if any(candidate is op for candidate in region.ops):
        return region
    inner = (_region_of(nested, op) for candidate in region.ops for nested in candidate.regions)
    return next((found for found in inner if found is not None), None)


def syncs(program: Program) -> list[Sync]:
    """The synchronisations of a program."""
    found = []
    for core, function in program.functions.items():
        none = {op.results[0] for op in function.walk() if op.name == "arith.constant" and op.attrs["value"] == -1}
        for op in function.walk():
            if op.name in SYNCS:
                found.append(Sync(core, op))
            elif op.name == MACRO:
                present = {7 + i: value for i, value in enumerate(sync_arguments(op))}
                found += [Sync(core, op, i) for i in MACRO_FLAGS if i in present and present[i] not in none]
    return found


@contextlib.contextmanager
def _without(function: Function, sync: Sync) -> Iterator[None]:
    """The function without a synchronisation, for a block."""
    op, operand = sync.op, sync.operand
    if operand is None:
        region = _region_of(function.body, op)
        assert region is not None
        index = next(i for i, candidate in enumerate(region.ops) if candidate is op)
        del region.ops[index]
        try:
            yield
        finally:
            region.ops.insert(index, op)
        return
    none = Op("arith.constant", [], [Value(_FRESH, "i64")], {"value": -1}, [], op.place, -1)
    before, op.operands[operand] = op.operands[operand], none.results[0]
    function.body.ops.insert(0, none)
    try:
        yield
    finally:
        del function.body.ops[0]
        op.operands[operand] = before


def mutants(program: Program, part: int = 0, of: int = 1) -> Iterator[Mutant]:
    """One program (to run with hazards) for each synchronisation that can be left out, or for
    every `of`-th of them from number `part` on.

    The mutants share the parsed module, from which the synchronisation is absent until the
    next one is asked for.
    """
    hazards = program.hazards  # compiled before anything is left out
    for index, sync in list(enumerate(syncs(program)))[part::of]:
        function = program.functions[sync.core]
        with _without(function, sync):
            mutant = Program(program.name, program.text)
            mutant.__dict__["module"] = program.module
            mutant.__dict__["hazards"] = {**hazards, sync.core: compile_values(function, hazards=True)}
            yield Mutant(sync, mutant, index)


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds (main thread only; elsewhere no limit)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not at its end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Runner:
    """Runs versions of a captured launch, each from the same memory contents."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        self.launch = launch
        self.seconds = seconds
        self.before = [(memory, memory.data.copy()) for memory in launch.memories()]
        self.expected = self.run(launch.program)

    def restore(self) -> None:
        for memory, data in self.before:
            memory.data[...] = data

    def run(self, program: Program) -> bytes:
        self.restore()
        with _limit(self.seconds):
            return self.launch.again(program)

    def noticed(self, program: Program) -> tuple[bool, str]:
        """Whether a mutant is noticed, and the report."""
        try:
            return self.run(program) != self.expected, ""
        except (VirtualNPUError, TimeoutError) as caught:
            return True, f"{type(caught).__name__}: {caught}"


def survey(
    launches: Sequence[Launch],
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    seconds: float = SECONDS,
    part: int = 0,
    of: int = 1,
) -> list[Outcome]:
    """Run the mutants of a program, hazards on, in each launch until it is noticed.

    Args:
        launches: of one program, from `run("values", hazards=True, capture=[...])`.
        progress: called with the number of mutants done and their total.
        seconds: limit for one run of a mutant.
        part, of: every `of`-th mutant from number `part` on; several processes share a survey so.

    Returns:
        One outcome for each synchronisation; unnoticed ones with an argument.

    Raises:
        ValueError: no launch, or launches of different programs.
    """
    if len({launch.program.key for launch in launches}) != 1:
        raise ValueError(f"launches must be some of one program, got {len(launches)} of others")
    program = launches[0].program
    runners = [_Runner(launch, seconds) for launch in launches]
    total = len(range(part, len(syncs(program)), of))
    outcomes: list[Outcome] = []
    unnoticed: list[tuple[Outcome, Sync]] = []
    for mutant in mutants(program, part, of):
        sync = mutant.sync
        outcome = Outcome(sync.core, str(sync.op), sync.detail, noticed=False, index=mutant.index)
        for runner in runners:
            outcome.noticed, outcome.error = runner.noticed(mutant.program)
            if outcome.noticed:
                break
        outcomes.append(outcome)
        if not outcome.noticed:
            unnoticed.append((outcome, sync))
        progress(len(outcomes), total)
    if unnoticed:
        logs = []
        for runner in runners:
            runner.restore()
            logs += redundancy.record(runner.launch)
        runs = redundancy.reached(logs)
        for outcome, sync in unnoticed:
            if not runs[sync.op.number]:
                outcome.argument = NOT_REACHED
                continue
            found = redundancy.argument(logs, program.functions, sync.op)
            if found is None:
                outcome.argument = NO_EVIDENCE
            else:
                outcome.argument, outcome.reason, outcome.proven = found.text, found.reason, True
    for runner in runners:
        runner.restore()
    return outcomes
