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


def survey(
    program: Program,
    run: Callable[[Program], bytes],
    progress: Callable[[int], None] = lambda done: None,
) -> list[Outcome]:
    """Run every mutant.

    Args:
        program: the compiled kernel.
        run: executes a program (with hazards on) and returns its results as bytes.
        progress: called with the number of mutants done.
    """
    expected = run(program)
    outcomes = []
    for index, mutant in enumerate(mutants(program)):
        error = ""
        try:
            noticed = run(mutant.program) != expected
        except VirtualNPUError as caught:
            noticed, error = True, f"{type(caught).__name__}: {caught}"
        outcomes.append(Outcome(mutant.core, str(mutant.op), detail(mutant.op), noticed, error))
        progress(index + 1)
    return outcomes
