"""Whether the compiler split a kernel's vector work over the two vector cores.

In a kernel with cube work both vector cores run the same program; each finds its rows by
its number. Where the compiler fails to split a tile, both do all of it: either both store
it, or a guard lets only the first one store. That is lost time, not a race.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .hivm import Function, MemRef, Op, Region, Value

STORE = "hivm.hir.store"


@dataclass(frozen=True)
class Unsplit:
    """A store to global memory whose address does not depend on the vector core. `guarded`:
    a condition on the vector core's number stands around it."""

    op: Op
    guarded: bool

    def __str__(self) -> str:
        who = "only one of them stores it" if self.guarded else "both store it"
        return (
            f"lost time: both vector cores do all rows of the tile stored at {self.op.place} ({who}); "
            "the compiler did not split it between them"
        )


def _flows(op: Op) -> Iterator[tuple[list[Value], list[Value]]]:
    """What an op's results and its regions' arguments follow from: (sources, targets)."""
    if op.name == "scf.for":
        body = op.regions[0]
        yield op.operands[:3], body.args[:1]
        for start, argument, end, result in zip(
            op.operands[3:], body.args[1:], body.ops[-1].operands, op.results, strict=True
        ):
            yield [start, end, *op.operands[:3]], [argument, result]
    elif op.name == "scf.if":
        ends = [region.ops[-1].operands for region in op.regions if region.ops]
        for position, result in enumerate(op.results):
            yield [op.operands[0], *(end[position] for end in ends)], [result]
    elif op.name == "scf.while":
        before, after = op.regions
        condition = before.ops[-1].operands
        for start, argument, end in zip(op.operands, before.args, after.ops[-1].operands, strict=True):
            yield [start, end], [argument]
        for passed, argument, result in zip(condition[1:], after.args, op.results, strict=True):
            yield [passed, condition[0]], [argument, result]
    else:
        yield op.operands, op.results


def _core_dependent(function: Function) -> set[Value]:
    """The values that follow from the vector core's number."""
    found = {result for op in function.walk() if op.name == "hivm.hir.get_sub_block_idx" for result in op.results}
    flows = [flow for op in function.walk() for flow in _flows(op)]
    while True:
        more = {
            target
            for sources, targets in flows
            if any(source in found for source in sources)
            for target in targets
            if target not in found
        }
        if not more:
            return found
        found |= more


def unsplit(function: Function) -> list[Unsplit]:
    """The stores of a vector core's function that do not go by the core's number."""
    dependent = _core_dependent(function)
    found: list[Unsplit] = []

    def visit(region: Region, guarded: bool) -> None:
        for op in region.ops:
            if op.name == STORE:
                target = op.operands[1]
                if isinstance(target.type, MemRef) and target.type.space == "gm" and target not in dependent:
                    found.append(Unsplit(op, guarded))
            inside = guarded or (op.name == "scf.if" and op.operands[0] in dependent)
            for inner in op.regions:
                visit(inner, inside)

    visit(function.body, False)
    return found
