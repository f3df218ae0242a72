"""The interval of a predicted score."""

from __future__ import annotations

import json

import pytest

from scoring.interval import residual_range, score_interval
from scoring.rules import Entry


def test_percentiles_of_the_residuals(tmp_path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"rows": [{"ratio": 0.9 + 0.02 * i} for i in range(11)]}))
    assert residual_range(path) == pytest.approx((0.92, 1.08))


def test_no_calibration_no_interval(tmp_path) -> None:
    assert residual_range(tmp_path / "absent.json") is None


def test_a_model_that_predicts_too_fast_means_a_lower_score() -> None:
    entries = [Entry(True, 10.0, 9.0), Entry(True, 10.0, 20.0)]
    slow, fast = score_interval([], entries, (0.8, 1.25))
    assert slow.geomean_speedup == pytest.approx((0.9 * 2) ** 0.5 * 0.8)
    assert fast.geomean_speedup == pytest.approx((0.9 * 2) ** 0.5 * 1.25)
    assert slow.performance_points == pytest.approx(30 * 0.72 + 30)
    assert fast.performance_points == pytest.approx(60)
    assert slow.correctness_points == fast.correctness_points == 40


def test_a_failed_case_stays_without_points() -> None:
    slow, fast = score_interval([], [Entry(False, None, 5.0), Entry(True, 5.0, 5.0)], (0.9, 1.1))
    assert slow.correctness_points == fast.correctness_points == 20
    assert fast.geomean_speedup is None
