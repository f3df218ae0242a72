"""Rows of a study that are kept between runs, so that an interrupted or repeated run only
makes what is missing or was made from other sources."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..results import write_json
from .sources import MACHINE, fingerprint

REPOSITORY = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


def sources(*names: str) -> str:
    """A digest of files that a result hangs on: `names` (relative to the repository) and the
    virtual NPU with its constants."""
    return fingerprint((*names, *MACHINE))


def digest(*parts: object) -> str:
    """A digest of values with a stable repr."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class Kept:
    """The rows of a results file, each with a name in "key" and the digest of what it was made from.

    Args:
        path: the results file; a missing one has no rows.
        wanted: the rows that there should be, in order: key to digest. Others are dropped.
    """

    def __init__(self, path: Path, wanted: dict[str, str]) -> None:
        self.path, self.wanted = path, wanted
        found = json.loads(path.read_text())["rows"] if path.is_file() else []
        self.rows: dict[str, Row] = {row["key"]: row for row in found if wanted.get(row["key"]) == row["made_from"]}

    def missing(self) -> list[str]:
        """Keys of the rows that must be made."""
        return [key for key in self.wanted if key not in self.rows]

    def add(self, key: str, row: Row, **head: Any) -> None:
        """Keep a row and write the file; `head` stands before the rows in it."""
        self.rows[key] = {"key": key, **row, "made_from": self.wanted[key]}
        self.write(**head)

    def write(self, **head: Any) -> None:
        """Write the rows there are, in the order wanted."""
        write_json(self.path, {**head, "rows": self.ordered()})

    def ordered(self) -> list[Row]:
        """The rows there are, in the order wanted."""
        return [self.rows[key] for key in self.wanted if key in self.rows]


def progress(done: int, total: int, text: str) -> None:
    """One line of progress."""
    print(f"[{done}/{total}] {text}", flush=True)
