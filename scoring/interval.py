"""The interval of a predicted score: how far predicted times may be off.

Two records, joined as independent (root of the sum of squares of their logarithms):

* `make calibrate`: predicted / measured for the published times of a 910B3, its 10th to
  90th percentile.
* `make sensitivity`: by how much a case's time moves when a constant is halved or doubled,
  for the constants that the published times hardly feel, because nothing overlaps there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from harness.studies.sources import TIMES, fingerprint

from .rules import Entry, Score, suite_score

RESULTS = Path(__file__).resolve().parent.parent / "results"
PERCENTILES = (10.0, 90.0)
Range = tuple[float, float]


def calibration_range(ratios: Iterable[float]) -> Range:
    """True time over predicted time, low and high, from predicted / measured of the published rows."""
    low, high = np.percentile(np.asarray(list(ratios)), PERCENTILES)
    return 1.0 / float(high), 1.0 / float(low)


def joined(ranges: Iterable[Range]) -> Range:
    """Independent ranges of a factor as one. Each counts downwards below 1 and upwards above it."""
    down = up = 0.0
    for low, high in ranges:
        down += min(0.0, math.log(low), math.log(high)) ** 2
        up += max(0.0, math.log(low), math.log(high)) ** 2
    return math.exp(-math.sqrt(down)), math.exp(math.sqrt(up))


@dataclass(frozen=True)
class Record:
    """What `make calibrate` and `make sensitivity` wrote.

    Attributes:
        calibration: true time over predicted time.
        effects: by case, times over the unchanged one for each constant that calibration
            hardly feels.
        stale: the effects are of other sources than these.
    """

    calibration: Range
    effects: Mapping[str, Sequence[Range]] = field(default_factory=dict)
    stale: bool = False

    def of(self, case: str, *, baseline_predicted: bool = False) -> Range:
        """True over predicted time of a case (bf16 takes the fp16 case of its number); with a
        predicted baseline, of the ratio to it: the calibration error counts for both."""
        effects = self.effects.get(case.replace("-bf16", "-fp16"), ())
        return joined([self.calibration, *effects, *([self.calibration] if baseline_predicted else [])])


def recorded(results: Path = RESULTS) -> Record | None:
    """The records in a folder; None without a calibration."""
    try:
        rows = json.loads((results / "calibration.json").read_text())["rows"]
    except FileNotFoundError:
        return None
    calibration = calibration_range(float(row["ratio"]) for row in rows)
    try:
        content = json.loads((results / "sensitivity.json").read_text())
    except FileNotFoundError:
        return Record(calibration)
    effects = {
        name: [
            (float(low), float(high)) for low, high in (case["effects"][label] for label in content["unconstrained"])
        ]
        for name, case in content["cases"].items()
    }
    mark = fingerprint(TIMES)
    return Record(calibration, effects, any(case["sources"] != mark for case in content["cases"].values()))


def score_interval(
    correctness: Sequence[Entry], performance: Sequence[Entry], ranges: Sequence[Range]
) -> tuple[Score, Score]:
    """The scores when every own time is as slow and as fast as its range allows; baselines stay."""

    def scaled(which: int) -> list[Entry]:
        return [
            entry if entry.ms is None else replace(entry, ms=entry.ms * ends[which])
            for entry, ends in zip(performance, ranges, strict=True)
        ]

    return suite_score(correctness, scaled(1)), suite_score(correctness, scaled(0))


@dataclass(frozen=True)
class Timed:
    """A performance case: its name, what the rules need of it, whether its baseline is predicted too."""

    name: str
    entry: Entry
    baseline_predicted: bool


def interval_text(suite: str, correctness: Sequence[Entry], performance: Sequence[Timed], record: Record | None) -> str:
    """How far a predicted score can be trusted, as a sentence."""
    if record is None:
        return f"{suite}: no results/calibration.json, so the predicted score has no interval (make calibrate)"
    ranges = [record.of(case.name, baseline_predicted=case.baseline_predicted) for case in performance]
    slow, fast = score_interval(correctness, [case.entry for case in performance], ranges)
    means = ["none" if score.geomean_speedup is None else f"{score.geomean_speedup:.3g}" for score in (slow, fast)]
    text = (
        f"{suite}: score {slow.score:.1f} to {fast.score:.1f}, geometric mean {means[0]} to {means[1]}: the "
        f"calibration's 10th to 90th percentile (true over predicted time {record.calibration[0]:.2f} to "
        f"{record.calibration[1]:.2f})"
    )
    if any(case.baseline_predicted for case in performance):
        text += ", counted for both sides of a ratio whose baseline is predicted too"
    if not record.effects:
        return text + "; constants that no published time tests are left out (make sensitivity)"
    text += ", joined with the constants that no published time tests, halved and doubled"
    return text + (" (for other sources than these: make sensitivity)" if record.stale else "")
