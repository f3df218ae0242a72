"""The contest's rules as pure functions. They know statuses and times, no devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CORRECTNESS_POINTS = 40.0
PERFORMANCE_POINTS = 60.0


@dataclass(frozen=True)
class Entry:
    """What the rules need of a case.

    Attributes:
        passed: the correctness check passed.
        ms: time in milliseconds, or None where there is none.
        baseline_ms: time to compare with, in milliseconds, or None.
    """

    passed: bool
    ms: float | None = None
    baseline_ms: float | None = None

    @property
    def speedup(self) -> float | None:
        """Baseline over own time; None for a failed case or without both times."""
        if not self.passed or not _is_time(self.ms) or not _is_time(self.baseline_ms):
            return None
        assert self.ms is not None and self.baseline_ms is not None
        return self.baseline_ms / self.ms


@dataclass(frozen=True)
class Score:
    """Points of a suite: correctness 0 to 40, performance 0 to 60, their sum, and the uncapped
    geometric mean of the speed-ups (None when a case has none)."""

    correctness_points: float
    performance_points: float
    score: float
    geomean_speedup: float | None


def _is_time(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def correctness_points(entries: Sequence[Entry]) -> float:
    """40 points for the share of passed cases.

    Raises:
        ValueError: no entries.
    """
    if not entries:
        raise ValueError("entries must not be empty")
    return CORRECTNESS_POINTS * sum(entry.passed for entry in entries) / len(entries)


def performance_points(entries: Sequence[Entry]) -> float:
    """60 points, shared equally: each case gets its share times min(baseline / time, 1); a
    case that failed or has no time gets nothing.

    Raises:
        ValueError: no entries.
    """
    if not entries:
        raise ValueError("entries must not be empty")
    return PERFORMANCE_POINTS / len(entries) * math.fsum(min(entry.speedup or 0.0, 1.0) for entry in entries)


def geomean_speedup(entries: Sequence[Entry]) -> float | None:
    """Geometric mean of the uncapped speed-ups, by the mean of their logs; None when any case
    has no speed-up, so that leaving a slow case out never helps."""
    speedups = [entry.speedup for entry in entries]
    known = [value for value in speedups if value is not None]
    if not known or len(known) < len(speedups):
        return None
    return math.exp(math.fsum(math.log(value) for value in known) / len(known))


def suite_score(correctness: Sequence[Entry], performance: Sequence[Entry]) -> Score:
    """Score of a suite.

    Args:
        correctness: its correctness cases; when it has none, its performance cases count for
            correctness too.
        performance: its performance cases.

    Raises:
        ValueError: no performance cases.
    """
    correct = correctness_points(correctness or performance)
    fast = performance_points(performance)
    return Score(correct, fast, correct + fast, geomean_speedup(performance))
