"""The results files, each with the make target that writes it."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.configs import SUITES, Case, cases
from scoring.interval import Record, recorded

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "results"
# By the name of the file: what writes it.
WRITERS = {
    "score": "`make score`",
    "calibration": "`make calibrate`",
    "sensitivity": "`make sensitivity`",
    "mutation": "`make mutation`",
    "schedules": "`make schedules`",
    "ablation": "`make ablation`",
    "roofline": "`make roofline`",
    "timelines": "`make roofline`",
    "accuracy": "`make accuracy`",
    "tune": "`make tune CASE=P1` (any case)",
    "tiles": "`make tiles`",
    "cuda": "`make cuda` on a machine with a CUDA GPU",
    "forward_steps": "whoever changes the forward: one record for each step",
    "backward_steps": "whoever changes the backward: one record for each step",
}


class Records:
    """What results/ holds.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self._read: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Whether the file `name`.json is there."""
        return (self.folder / f"{name}.json").is_file()

    def __getitem__(self, name: str) -> Any:
        """The content of `name`.json."""
        if name not in self._read:
            self._read[name] = json.loads((self.folder / f"{name}.json").read_text())
        return self._read[name]

    @cached_property
    def error(self) -> Record | None:
        """How far predicted times may be off; None without a calibration."""
        return recorded(self.folder)

    def interval(self, case: str, ms: float) -> tuple[float, float] | None:
        """The range in ms that a predicted time of a case stands for; None without a calibration."""
        if self.error is None:
            return None
        low, high = self.error.of(case)
        return ms * low, ms * high


def named_cases(document: dict[str, Any]) -> list[tuple[Case, dict[str, Any]]]:
    """The rows of results/score.json with their cases, in its order."""
    keys = ("suite", "kind", "z", "h", "n", "d", "causal", "dtype")
    known = {tuple(getattr(case, key) for key in keys): case for suite in SUITES for case in cases(suite)}
    return [(known[tuple(row[key] for key in keys)], row) for row in document["cases"]]
