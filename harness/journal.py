"""The journal of a run: one line for each finished case, on disk before the next one counts,
so that a run that was ended in any way can go on.

The first line says what run it is: `--resume` takes results only of the same submissions,
harness, device and options. The secret seed is not in it: the submission's process could read
it there. A resumed run draws a new one for the cases that are left.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .configs import cases
from .evaluator import Settings
from .results import CaseResult, Status

REPOSITORY = Path(__file__).resolve().parent.parent
HARNESS = ("harness", "scoring")
OPTIONS = ("mode", "release", "full", "public_seed", "work", "static_check")


def _digest(paths: list[Path]) -> str:
    hashed = hashlib.sha256()
    for path in sorted(paths):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def fingerprint(submissions: Mapping[str, Path], settings: Settings, device: Mapping[str, str]) -> dict[str, Any]:
    """What must be the same for results of two runs to belong together."""
    code = [path for folder in HARNESS for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".toml")]
    return {
        "submissions": {  # with what stands beside them: a submission may be several files
            suite: f"{path.name} {_digest(list(path.resolve().parent.glob('*.py')))}"
            for suite, path in sorted(submissions.items())
        },
        "harness": _digest(code),
        "device": dict(device),
        "options": {
            name: getattr(settings, name) for name in ("mode", "release", "full", "public_seed", "work", "static_check")
        },
    }


def _row(result: CaseResult) -> dict[str, Any]:
    row = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return row | {"case": [result.case.suite, result.case.name], "status": result.status.value}


def _result(row: dict[str, Any]) -> CaseResult:
    suite, name = row["case"]
    case = next(case for case in cases(suite) if case.name == name)
    return CaseResult(**{**row, "case": case, "status": Status(row["status"])})


class Journal:
    """The journal at a path; `start` opens it.

    Args:
        path: the file.
        run: see `fingerprint`.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path, self.run = path, json.loads(json.dumps(run))

    def start(self, resume: bool) -> list[CaseResult]:
        """Begin the journal anew, or with `resume` go on with what is there.

        Returns:
            The results of cases that are finished.

        Raises:
            ValueError: the journal to resume is of another run; the message says what differs.
        """
        if resume and self.path.is_file():
            return self._read()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"")
        self._append({"run": self.run})
        return []

    def _read(self) -> list[CaseResult]:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a line that was being written when the run ended is not whole
        lines = [json.loads(line) for line in whole.splitlines()]
        before = lines[0].get("run", {}) if lines else self.run
        wrong = [name for name in self.run if before.get(name) != self.run[name]]
        if wrong:
            raise ValueError(
                f"--resume: {self.path} is of a run with other {', '.join(wrong)}; start anew without --resume"
            )
        os.truncate(self.path, len(whole))
        if not lines:
            self._append({"run": self.run})
        finished = {tuple(line["case"]): _result(line) for line in lines[1:]}
        return list(finished.values())

    def add(self, result: CaseResult) -> None:
        """Write a finished case; it is on disk when this returns."""
        self._append(_row(result))

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
