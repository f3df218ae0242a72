"""The marked blocks: which there are, and what each needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .records import WRITERS, Records


@dataclass(frozen=True)
class Block:
    """A block: its text from the records, and the results files without which it has none."""

    make: Callable[[Records], str]
    needs: tuple[str, ...]


BLOCKS: dict[str, Block] = {}


def block(name: str, *needs: str) -> Callable[[Callable[[Records], str]], Callable[[Records], str]]:
    """Register the maker of a block."""

    def register(make: Callable[[Records], str]) -> Callable[[Records], str]:
        BLOCKS[name] = Block(make, needs)
        return make

    return register


def render(records: Records) -> dict[str, str]:
    """The text of every block; of one whose results are missing, what writes them."""
    found = {}
    for name, item in BLOCKS.items():
        missing = [need for need in item.needs if not records.has(need)]
        if missing:
            told = "; ".join(f"`results/{need}.json` is not there, {WRITERS[need]} writes it" for need in missing)
            found[name] = f"*Left out: {told}.*"
        else:
            found[name] = item.make(records)
    return found
