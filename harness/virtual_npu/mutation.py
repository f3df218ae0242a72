"""Mutation of a compiled kernel: what if one synchronisation were missing?

For each synchronisation of the program, explicit or made by the compiler, the program is
run without it; a deletion counts as noticed when the virtual NPU reports an error or the
results change in one of the launches. What goes unnoticed is either redundant, never
reached by these launches, or a hole in the model: `redundancy` looks for evidence of the
first.
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
from .hivm import Op, Region
from .launch import Launch
from .program import Program
from .values import SYNC as SYNCS
from .values import compile_values

SECONDS = 300.0  # a mutant that runs longer counts as one that does not end
NOT_REACHED = "not reached: this op never runs in these launches"
NO_EVIDENCE = (
    "no evidence of redundancy in the log of the run; the happens-before check finds every conflicting pair of "
    "accesses ordered by other synchronisations"
)


@dataclass
class Mutant:
    """A program without one op, and where that op stood."""

    core: str
    op: Op
    program: Program


@dataclass
class Outcome:
    """What a deletion led to.

    Attributes:
        core: "AIC" or "AIV".
        op: the deleted op and its line.
        detail: which synchronisation it is.
        noticed: an error was reported, or the results changed.
        error: the report; empty when only the values changed or nothing did.
        argument: for an unnoticed one, why it changes nothing.
        proven: the argument rests on the log of the run (`redundancy`), not on the
            happens-before check alone, and the op was reached.
    """

    core: str
    op: str
    detail: str
    noticed: bool
    error: str = ""
    argument: str = ""
    proven: bool = False


def _region_of(region: Region, op: Op) -> Region | None:
    """The region that holds an op."""
    if any(candidate is op for candidate in region.ops):
        return region
    inner = (_region_of(nested, op) for candidate in region.ops for nested in candidate.regions)
    return next((found for found in inner if found is not None), None)


def detail(op: Op) -> str:
    """The attributes that tell which synchronisation this is."""
    keys = ("pipe", "set_pipe", "wait_pipe", "tpipe", "static_event_id", "static_flag_id")
    return ", ".join(f"{key} {op.attrs[key]}" for key in keys if key in op.attrs)


def syncs(program: Program) -> list[tuple[str, Op]]:
    """The synchronisations of a program, with their core."""
    return [(core, op) for core, function in program.functions.items() for op in function.walk() if op.name in SYNCS]


def mutants(program: Program) -> Iterator[Mutant]:
    """One program (to run with hazards) for each synchronisation that can be left out.

    The mutants share the parsed module, from which the op is absent until the next one is
    asked for.
    """
    hazards = program.hazards  # compiled before anything is left out
    for core, op in syncs(program):
        function = program.functions[core]
        region = _region_of(function.body, op)
        assert region is not None
        index = next(i for i, candidate in enumerate(region.ops) if candidate is op)
        del region.ops[index]
        try:
            mutant = Program(program.name, program.text)
            mutant.__dict__["module"] = program.module
            mutant.__dict__["hazards"] = {**hazards, core: compile_values(function, hazards=True)}
            yield Mutant(core, op, mutant)
        finally:
            region.ops.insert(index, op)


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
) -> list[Outcome]:
    """Run every mutant of a program, hazards on, in each launch until it is noticed.

    Args:
        launches: of one program, from `run("values", hazards=True, capture=[...])`.
        progress: called with the number of mutants done and their total.
        seconds: limit for one run of a mutant.

    Returns:
        One outcome for each synchronisation; unnoticed ones with an argument.

    Raises:
        ValueError: no launch, or launches of different programs.
    """
    if len({launch.program.key for launch in launches}) != 1:
        raise ValueError(f"launches must be some of one program, got {len(launches)} of others")
    program = launches[0].program
    runners = [_Runner(launch, seconds) for launch in launches]
    total = len(syncs(program))
    outcomes: list[Outcome] = []
    unnoticed: list[tuple[Outcome, Op]] = []
    for mutant in mutants(program):
        outcome = Outcome(mutant.core, str(mutant.op), detail(mutant.op), noticed=False)
        for runner in runners:
            outcome.noticed, outcome.error = runner.noticed(mutant.program)
            if outcome.noticed:
                break
        outcomes.append(outcome)
        if not outcome.noticed:
            unnoticed.append((outcome, mutant.op))
        progress(len(outcomes), total)
    if unnoticed:
        logs = []
        for runner in runners:
            runner.restore()
            logs += redundancy.record(runner.launch)
        runs = redundancy.reached(logs)
        for outcome, op in unnoticed:
            if not runs[op.number]:
                outcome.argument = NOT_REACHED
                continue
            found = redundancy.argument(logs, program.functions, op)
            outcome.argument, outcome.proven = found or NO_EVIDENCE, found is not None
    for runner in runners:
        runner.restore()
    return outcomes
