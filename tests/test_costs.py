"""Costs against the published figures that they come from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from harness.virtual_npu import costs
from harness.virtual_npu.costs import Costs
from harness.virtual_npu.errors import UnknownOpError
from harness.virtual_npu.hardware import default_constants
from harness.virtual_npu.hivm import MemRef, Op, Value

COSTS = Costs()
TOML = Path(costs.__file__).with_name("hardware.toml")


def make(name: str, shapes: list[tuple[int, ...] | None], dtype: str = "f32", **attrs) -> tuple[Op, list]:
    """An op on UB tiles (None: a scalar), the last one its destination."""
    values = [Value(i, MemRef(s, dtype, "ub") if s is not None else "f32") for i, s in enumerate(shapes)]
    segments = [len(values) - 1, 1]
    return Op(f"hivm.hir.{name}", values, [], {"operandSegmentSizes": segments, **attrs}, [], "k.py:1"), shapes


def cycles(name: str, shapes: list[tuple[int, ...] | None], dtype: str = "f32", **attrs) -> float:
    op, sizes = make(name, shapes, dtype, **attrs)
    return COSTS.vector(op, sizes).vector


def test_every_number_has_a_unit_or_a_comment() -> None:
    """The unit is in the name, or a comment stands beside it or beside its table."""
    commented = False
    for line in TOML.read_text().splitlines():
        if line.startswith("["):
            commented = "#" in line
        elif "=" in line and not line.startswith(("#", "name")):
            name = line.split("=")[0].strip()
            known = "#" in line or commented or name.endswith(("_cycles", "_bytes", "_per_cycle"))
            assert known, f"{name} has neither a comment nor a unit"
    tomllib.loads(TOML.read_text())


def test_peak_rate_of_the_cube_is_4096_macs_a_cycle() -> None:
    assert COSTS.mad(128, 256, 128, 2) == 128 * 256 * 128 / 4096
    chip = default_constants()["chip"]
    assert 2 * 4096 * chip["cores"] * chip["clock_hz"] == pytest.approx(chip["peak_fp16_flops"], rel=1e-3)


def test_fp32_products_run_at_a_quarter() -> None:
    assert COSTS.mad(128, 128, 128, 4) == 4 * COSTS.mad(128, 128, 128, 2)


@pytest.mark.parametrize(("m", "n", "published"), [(128, 128, 734), (128, 256, 1275)])
def test_fixpipe_drain(m: int, n: int, published: int) -> None:
    """164 + m max(4.45, 4 n / 118), pypto L0CostModel."""
    assert COSTS.fixpipe(m, n) == pytest.approx(published, abs=1)


def test_fixpipe_penalty_of_odd_widths() -> None:
    """n = 96 costs 5.2 and n = 80 costs 10.4 cycles more for each row."""
    base = COSTS.fixpipe(100, 64)
    assert (COSTS.fixpipe(100, 96) - base) / 100 == pytest.approx(5.2)
    assert (COSTS.fixpipe(100, 80) - base) / 100 == pytest.approx(10.4)


@pytest.mark.parametrize(("kib", "published"), [(1, 173), (16, 295), (32, 373), (64, 623), (128, 945)])
def test_gm_to_l1_transfer(kib: int, published: int) -> None:
    """msKPP's table; the fit is within 11.5 %."""
    assert sum(COSTS.transfer("gm_to_l1", kib * 1024)) == pytest.approx(published, rel=0.13)


@pytest.mark.parametrize(("kib", "published"), [(1, 216), (16, 300), (32, 485)])
def test_gm_to_ub_transfer(kib: int, published: int) -> None:
    assert sum(COSTS.transfer("gm_to_ub", kib * 1024)) == pytest.approx(published, rel=0.1)


def test_an_empty_transfer_costs_nothing() -> None:
    assert COSTS.transfer("gm_to_ub", 0) == (0.0, 0.0)


def test_softmax_of_a_half_tile() -> None:
    """64x256 fp32 scores on one vector core: scale 256, subtract 512, exp 512 cycles (facts, 2.3)."""
    tile = (64, 256)
    assert cycles("vmul", [tile, None, tile]) == 256
    assert cycles("vexp", [tile, tile]) == 512
    spread = 64 // 8 * 1.0 + default_constants()["vector"]["barrier_cycles"]
    assert cycles("vsub", [tile, (64, 1), tile]) == pytest.approx(512 + spread)
    row_max = cycles("vreduce", [tile, (64, 1)], arith="max", reduce_dims=[1])
    assert 700 < row_max < 1100


def test_fp16_exp_costs_the_cycles_of_as_many_fp32_values_a_half() -> None:
    assert cycles("vexp", [(64, 128), (64, 128)], "f16") == cycles("vexp", [(64, 128), (64, 128)])


def test_integer_compares_fall_to_the_scalar_unit() -> None:
    op, shapes = make("vcmp", [(8, 64), (8, 64), (8, 64)], "i32", compare_mode="lt")
    cost = COSTS.vector(op, shapes)
    assert cost.vector == 0 and cost.scalar == 8 * 64 * default_constants()["scalar"]["element_cycles"]


def test_changed_constants_change_only_that_model() -> None:
    constants = {**default_constants(), "vector": {**default_constants()["vector"], "slope_cycles": {}}}
    constants["vector"]["slope_cycles"] = {**default_constants()["vector"]["slope_cycles"], "vexp": 8.0}
    op, shapes = make("vexp", [(64, 64), (64, 64)])
    assert Costs(constants).vector(op, shapes).vector == 4 * COSTS.vector(op, shapes).vector


def test_an_op_without_a_cost_is_named() -> None:
    op, shapes = make("vmystery", [(8,), (8,)])
    with pytest.raises(UnknownOpError, match=r"hivm\.hir\.vmystery at k\.py:1: no cost is known"):
        COSTS.vector(op, shapes)
