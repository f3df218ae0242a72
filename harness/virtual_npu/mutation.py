"""Mutation of a compiled kernel: what if one synchronisation were missing?

For each synchronisation of the program, explicit or made by the compiler, the program is
run without it; a deletion counts as noticed when the virtual NPU reports an error or the
results change. What goes unnoticed is either redundant, never reached on the shape that
ran, or a hole in the model: `redundancy` looks for evidence of the first.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
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
NOT_REACHED = "not reached: this op never runs on this shape"
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
    """One program for each synchronisation that can be left out.

    The mutants share the parsed module, from which the op is absent until the next one is
    asked for.
    """
    values, hazards = program.values, program.hazards  # compiled before anything is left out
    for core, op in syncs(program):
        function = program.functions[core]
        region = _region_of(function.body, op)
        assert region is not None
        index = next(i for i, candidate in enumerate(region.ops) if candidate is op)
        del region.ops[index]
        try:
            mutant = Program(program.name, program.text)
            mutant.__dict__["module"] = program.module
            mutant.__dict__["values"] = {**values, core: compile_values(function)}
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


def survey(
    launch: Launch,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    seconds: float = SECONDS,
) -> list[Outcome]:
    """Run every mutant of a captured launch, hazards on, from the same memory contents.

    Args:
        launch: from `run("values", hazards=True, capture=[...])`, before it ran.
        progress: called with the number of mutants done and their total.
        seconds: limit for one mutant.

    Returns:
        One outcome for each synchronisation; unnoticed ones with an argument.
    """
    before = [(memory, memory.data.copy()) for memory in launch.memories()]

    def restore() -> None:
        for memory, data in before:
            memory.data[...] = data

    def run(program: Program) -> bytes:
        restore()
        with _limit(seconds):
            return launch.again(program)

    expected = run(launch.program)
    restore()
    logs = redundancy.record(launch)
    runs = {core: redundancy.reached(logs, core) for core in launch.program.functions}
    total = len(syncs(launch.program))
    outcomes: list[Outcome] = []
    unnoticed: list[tuple[Outcome, Op]] = []
    for mutant in mutants(launch.program):
        outcome = Outcome(mutant.core, str(mutant.op), detail(mutant.op), noticed=True)
        try:
            outcome.noticed = run(mutant.program) != expected
        except (VirtualNPUError, TimeoutError) as caught:
            outcome.error = f"{type(caught).__name__}: {caught}"
        outcomes.append(outcome)
        if not outcome.noticed:
            unnoticed.append((outcome, mutant.op))
        progress(len(outcomes), total)
    for outcome, op in unnoticed:
        if not runs[outcome.core][op.number]:
            outcome.argument = NOT_REACHED
            continue
        found = redundancy.argument(logs, launch.program.functions, outcome.core, op)
        outcome.argument, outcome.proven = found or NO_EVIDENCE, found is not None
    restore()
    return outcomes
