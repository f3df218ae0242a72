"""Markdown: tables, numbers, and what stands between markers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

MARKER = re.compile(r"<!-- (begin|end):([a-z0-9-]+) -->")


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent where that is readable; "-" for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(float(f'{value:.{digits}g}')))))}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share as "12 %"; "-" for None."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def span(bounds: tuple[float, float] | None) -> str:
    """A range "low to high"; "-" for None."""
    return "-" if bounds is None else f"{number(bounds[0])} to {number(bounds[1])}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[int] = (0,)) -> str:
    """A table; columns are flush right but those in `left`."""
    rule = [":--" if index in set(left) else "--:" for index in range(len(header))]
    lines = [f"| {' | '.join(_cell(text) for text in row)} |" for row in (header, rule, *rows)]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def figure(name: str, text: str) -> str:
    """An image of figures/ with its caption."""
    return f"![{text}](figures/{name}.svg)\n\n*{text}*"


def markers(text: str) -> list[str]:
    """Names of the marked blocks, in order.

    Raises:
        ValueError: a marker without its partner, or a name twice.
    """
    found = MARKER.findall(text)
    names = [name for _, name in found[::2]]
    if found != [(kind, name) for name in names for kind in ("begin", "end")] or len(set(names)) != len(names):
        raise ValueError(f"text must have each begin marker followed by its end marker, got {found}")
    return names


def insert(text: str, blocks: Mapping[str, str]) -> str:
    """The text with each marked block replaced by the block of that name.

    Raises:
        ValueError: markers as for `markers`, or a marked block that has no content.
    """
    missing = [name for name in markers(text) if name not in blocks]
    if missing:
        raise ValueError(f"text must have known blocks, got {', '.join(missing)}; known: {', '.join(blocks)}")
    parts = MARKER.split(text)  # text, kind, name, text, kind, name, ...
    out = [parts[0]]
    for index in range(1, len(parts), 6):
        name, after = parts[index + 1], parts[index + 5]
        out.append(f"<!-- begin:{name} -->\n{blocks[name].strip()}\n<!-- end:{name} -->{after}")
    return "".join(out)
