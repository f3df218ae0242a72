"""The interval of a predicted score, from the calibration of the time model.

`make calibrate` writes predicted / measured for the published times of a 910B3. Its 10th and
90th percentile say how far a predicted time may be off; a true time then lies between
predicted / high and predicted / low.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from .rules import Entry, Score, suite_score

CALIBRATION = Path(__file__).resolve().parent.parent / "results" / "calibration.json"
PERCENTILES = (10.0, 90.0)


def residual_range(path: Path = CALIBRATION) -> tuple[float, float] | None:
    """The percentiles of predicted / measured, or None where no calibration was written."""
    if not path.is_file():
        return None
    ratios = [float(row["ratio"]) for row in json.loads(path.read_text())["rows"]]
    if not ratios:
        return None
    low, high = np.percentile(ratios, PERCENTILES)
    return float(low), float(high)


def scaled(entries: Sequence[Entry], factor: float) -> list[Entry]:
    """The entries with their own times multiplied; baselines stay."""
    return [entry if entry.ms is None else replace(entry, ms=entry.ms * factor) for entry in entries]


def score_interval(
    correctness: Sequence[Entry], performance: Sequence[Entry], residuals: tuple[float, float]
) -> tuple[Score, Score]:
    """The scores when every own time is as slow and as fast as the calibration allows.

    Meant for baselines that were measured: a baseline predicted by the same model is off by
    its own error, which this does not know.
    """
    low, high = residuals
    return (
        suite_score(correctness, scaled(performance, 1.0 / low)),
        suite_score(correctness, scaled(performance, 1.0 / high)),
    )
