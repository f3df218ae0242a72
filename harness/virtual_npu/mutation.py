"""Mutation of a compiled kernel: what if one synchronisation were missing?

For each synchronisation of the program, explicit or made by the compiler, the program is
run without it; a deletion counts as noticed when the virtual NPU reports an error or the
results change. What goes unnoticed is either redundant or a hole in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import VirtualNPUError
from .hivm import Op, Region, read
from .launch import Launch
from .program import Program

SYNCS = tuple(
    f"hivm.hir.{name}" for name in ("set_flag", "wait_flag", "pipe_barrier", "sync_block_set", "sync_block_wait")
)


@dataclass
class Mutant:
    """A program without one op, and where that op stood."""

    core: str
    op: Op
    program: Program


@dataclass
class Outcome:
    """What a deletion led to: `error` is empty when only the values changed, `noticed` False
    when nothing did."""

    core: str
    op: str
    detail: str
    noticed: bool
    error: str = ""


def _remove(region: Region, number: int) -> bool:
    for index, op in enumerate(region.ops):
        if op.number == number:
            del region.ops[index]
            return True
        if any(_remove(inner, number) for inner in op.regions):
            return True
    return False


def detail(op: Op) -> str:
    """The attributes that tell which synchronisation this is."""
    keys = ("pipe", "set_pipe", "wait_pipe", "tpipe", "static_event_id", "static_flag_id")
    return ", ".join(f"{key} {op.attrs[key]}" for key in keys if key in op.attrs)


def mutants(program: Program) -> Iterator[Mutant]:
    """One program for each synchronisation that can be left out."""
    for core, function in program.functions.items():
        for op in function.walk():
            if op.name in SYNCS:
                mutant = Program(program.name, program.text)
                mutant.__dict__["module"] = read(program.text)
                if _remove(mutant.functions[core].body, op.number):
                    yield Mutant(core, op, mutant)


def survey(launch: Launch, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Outcome]:
    """Run every mutant of a captured launch, hazards on, from the same memory contents.

    Args:
        launch: from `run("values", hazards=True, capture=[...])`, before it ran.
        progress: called with the number of mutants done and their total.
    """
    before = [(memory, memory.data.copy()) for memory in launch.memories()]

    def run(program: Program) -> bytes:
        for memory, data in before:
            memory.data[...] = data
        return launch.again(program)

    expected = run(launch.program)
    outcomes = []
    total = sum(op.name in SYNCS for function in launch.program.functions.values() for op in function.walk())
    for mutant in mutants(launch.program):
        error = ""
        try:
            noticed = run(mutant.program) != expected
        except VirtualNPUError as caught:
            noticed, error = True, f"{type(caught).__name__}: {caught}"
        outcomes.append(Outcome(mutant.core, str(mutant.op), detail(mutant.op), noticed, error))
        progress(len(outcomes), total)
    for memory, data in before:
        memory.data[...] = data
    return outcomes


ARGUMENTS = {
    "PIPE_ALL": "the last op of a core whose pipes were all waited for already: the scalar unit stood at a "
    "cross-core wait or flag behind the last instruction of each pipe",
    "PIPE_V": "no instruction after it reads or overwrites bytes that one before it writes, unless another "
    "barrier or flag stands between them: the bytes on its two sides are disjoint, or only read before",
    "flag": "other flags and barriers order every pair of conflicting accesses that this one orders",
}


def argument(outcome: Outcome) -> str:
    """Why a deletion that went unnoticed changes nothing. It rests on the run itself: the
    happens-before check went over every pair of accesses without this op and found each
    conflicting one ordered by something else, and the values are the same."""
    for key in ("PIPE_ALL", "PIPE_V"):
        if key in outcome.detail:
            return ARGUMENTS[key]
    return ARGUMENTS["flag"]
