"""The interval of a predicted score."""

from __future__ import annotations

import json
import math

import pytest

from harness.studies import sensitivity
from harness.studies.sources import TIMES, fingerprint
from scoring.interval import Record, calibration_range, joined, recorded, score_interval
from scoring.rules import Entry

RATIOS = [0.9 + 0.02 * i for i in range(11)]  # 10th and 90th percentile: 0.92 and 1.08


def _write(folder, *, effects=None, sources="x") -> None:
    (folder / "calibration.json").write_text(json.dumps({"rows": [{"ratio": ratio} for ratio in RATIOS]}))
    if effects is not None:
        cases = {"P1": {"effects": effects, "sources": sources}}
        content = {"unconstrained": ["L2 bandwidth"], "cases": cases}
        (folder / "sensitivity.json").write_text(json.dumps(content))


def test_the_true_time_is_predicted_over_the_ratios_percentiles() -> None:
    assert calibration_range(RATIOS) == pytest.approx((1 / 1.08, 1 / 0.92))


def test_independent_ranges_join_by_their_logarithms() -> None:
    low, high = joined([(0.8, 1.25), (1.3, 0.9)])
    assert math.log(high) ** 2 == pytest.approx(math.log(1.25) ** 2 + math.log(1.3) ** 2)
    assert math.log(low) ** 2 == pytest.approx(math.log(0.8) ** 2 + math.log(0.9) ** 2)
    assert joined([(0.8, 1.25), (1.0, 1.0)]) == pytest.approx((0.8, 1.25))
    assert joined([(1.1, 1.2)])[0] == 1.0  # both ends slower: nothing downwards
    assert joined([]) == (1.0, 1.0)


def test_no_calibration_no_interval(tmp_path) -> None:
    assert recorded(tmp_path) is None


def test_calibration_alone(tmp_path) -> None:
    _write(tmp_path)
    record = recorded(tmp_path)
    assert record is not None and not record.effects and not record.stale
    assert record.of("P1") == record.calibration == calibration_range(RATIOS)


def test_calibration_and_sensitivity(tmp_path) -> None:
    """The interval of a score came from the calibration alone; the record of the constants
    that it does not test lay unused."""
    _write(tmp_path, effects={"L2 bandwidth": [1.5, 0.9], "L1 to L0B rate": [9.0, 0.1]}, sources=fingerprint(TIMES))
    record = recorded(tmp_path)
    assert record is not None and not record.stale
    assert record.of("P1") == pytest.approx(joined([calibration_range(RATIOS), (1.5, 0.9)]))
    assert record.of("P2") == record.calibration  # a case that the record does not have


def test_a_record_of_other_sources_says_so(tmp_path) -> None:
    _write(tmp_path, effects={"L2 bandwidth": [1.0, 1.0]})
    record = recorded(tmp_path)
    assert record is not None and record.stale


def test_bf16_takes_the_case_of_fp16() -> None:
    record = Record((0.9, 1.1), {"C1-fp16": [(1.5, 0.5)]})
    assert record.of("C1-bf16") == record.of("C1-fp16") != record.calibration


def test_a_predicted_baseline_brings_its_own_error() -> None:
    record = Record((0.8, 1.25))
    low, high = record.of("C1-fp16", baseline_predicted=True)
    assert math.log(high) == pytest.approx(math.log(1.25) * 2**0.5)
    assert math.log(low) == pytest.approx(math.log(0.8) * 2**0.5)


def test_the_constants_that_count_are_those_that_are_surveyed() -> None:
    assert set(sensitivity.UNCONSTRAINED) <= set(sensitivity.UNCERTAIN)


def test_a_model_that_predicts_too_fast_means_a_lower_score() -> None:
    entries = [Entry(True, 10.0, 9.0), Entry(True, 10.0, 20.0)]
    slow, fast = score_interval([], entries, [(0.8, 1.25)] * 2)
    assert slow.geomean_speedup == pytest.approx((0.9 * 2) ** 0.5 * 0.8)
    assert fast.geomean_speedup == pytest.approx((0.9 * 2) ** 0.5 * 1.25)
    assert slow.performance_points == pytest.approx(30 * 0.72 + 30)
    assert fast.performance_points == pytest.approx(60)
    assert slow.correctness_points == fast.correctness_points == 40


def test_each_case_has_its_own_range() -> None:
    entries = [Entry(True, 10.0, 5.0), Entry(True, 10.0, 5.0)]
    slow, fast = score_interval([], entries, [(0.5, 2.0), (1.0, 1.0)])
    assert slow.performance_points == pytest.approx(30 * 0.25 + 30 * 0.5)
    assert fast.performance_points == pytest.approx(30 + 30 * 0.5)


def test_a_failed_case_stays_without_points() -> None:
    slow, fast = score_interval([], [Entry(False, None, 5.0), Entry(True, 5.0, 5.0)], [(0.9, 1.1)] * 2)
    assert slow.correctness_points == fast.correctness_points == 20
    assert fast.geomean_speedup is None
