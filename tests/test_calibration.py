"""The model against published times of a 910B3, and what predictions hang on."""

from __future__ import annotations

import pytest
import torch

from forward import attention_fwd
from harness import virtual_npu
from harness.studies import calibration, sensitivity
from harness.virtual_npu.hardware import default_constants


def test_the_published_rows_are_all_there() -> None:
    rows = calibration.published()
    assert len(rows) == 20
    assert sum(row.lazy for row in rows) == 3
    assert {row.acc for row in rows} == {"ub", "gm"}
    assert all(row.ms > 0 and row.n % row.block_m == 0 and row.n % row.block_n == 0 for row in rows)


def test_published_times_are_predicted() -> None:
    """Every row on shrunken shapes. Published constants gave 6.5 % (worst 16 %) at full size."""
    result = calibration.calibrate(z=8, with_holdout=False)
    assert result["mape"] < 0.09
    assert result["worst"] < 0.20
    assert result["spearman"] > 0.98


def test_a_shrunken_run_scales_to_the_full_one() -> None:
    row = min(calibration.published(), key=lambda row: row.ms)
    assert calibration.predict(row, z=8) == pytest.approx(calibration.predict(row), rel=0.02)


def test_fitted_constants_exist_and_start_inside_their_ranges() -> None:
    for path, (low, high) in calibration.FITTED.items():
        assert low <= calibration._value(path, default_constants()) <= high


def test_mape_weighs_both_directions() -> None:
    assert calibration.mape([1.1, 0.9, 1.0]) == pytest.approx(0.2 / 3)


def test_sensitivity_changes_one_constant_and_leaves_the_shipped_ones() -> None:
    for label, (path, factors) in sensitivity.UNCERTAIN.items():
        before = calibration._value(path, default_constants())
        assert calibration._value(path, sensitivity.changed(path, factors[1])) == pytest.approx(before * factors[1]), (
            label
        )
        assert calibration._value(path, default_constants()) == before
    assert set(sensitivity.UNCONSTRAINED) <= set(sensitivity.UNCERTAIN)


def test_hbm_shares_can_be_given_by_kernel() -> None:
    """A few heads stay in L2; with the shares of a full run they cost what they do there."""
    import torch

    from harness.textbook import textbook_fwd

    x = torch.empty(1, 40, 512, 64, dtype=torch.float16)

    def call() -> None:
        textbook_fwd(x, x, x, False, 0.5)

    slow = copy_with_hbm(60.0)
    none = sensitivity.predicted(call, slow, {"textbook_fwd_kernel": {}})
    every = sensitivity.predicted(call, slow, {"textbook_fwd_kernel": {str(i): 1.0 for i in range(40)}})
    assert every > 1.2 * none


def copy_with_hbm(rate: float) -> dict:
    path = ("shared", "hbm_bytes_per_cycle")
    return sensitivity.changed(path, rate / calibration._value(path, default_constants()))


def test_l2_gives_no_more_than_its_limit() -> None:
    """A kernel that hides its transfers behind other work was predicted faster than L2 can move
    its bytes: contention stretched each transfer, and nothing bounded their sum."""
    x = torch.empty(1, 20, 1024, 64, dtype=torch.float16)
    constants = default_constants()
    times = []
    for limit in (constants["shared"]["l2_limit_bytes_per_cycle"], 20.0):
        slow = {**constants, "shared": {**constants["shared"], "l2_limit_bytes_per_cycle": limit}}
        with virtual_npu.run(mode="timing", cores=20, constants=slow) as recording:
            attention_fwd(x, x, x)
        times.append(recording.cycles)
    traffic = recording.kernels[0].report["offered_l2_bytes_per_cycle"]
    assert times[1] > 2 * times[0] * min(1.0, traffic / 20.0) > times[0]
