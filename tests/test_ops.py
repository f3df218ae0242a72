"""Each group of device ops against numpy, built directly from the registry."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.virtual_npu import ops_cube, ops_dma, ops_vector  # noqa: F401 - they register their ops
from harness.virtual_npu.errors import OutOfBoundsError, UninitialisedReadError, UnknownOpError
from harness.virtual_npu.hivm import MemRef, Op, Value
from harness.virtual_npu.memory import DTYPES, Memory, View, contiguous_strides
from harness.virtual_npu.ops import lookup
from harness.virtual_npu.ops_cube import k_parts
from harness.virtual_npu.scalars import SCALARS, truncated_division, truncated_remainder

SIZES = {"ub": 1 << 16, "cbuf": 1 << 18, "cc": 1 << 17, "gm": 1 << 18}


class Bench:
    """Memories, and a way to run one op on views of them."""

    def __init__(self) -> None:
        self.memories = {space: Memory(space, space, size) for space, size in SIZES.items()}
        self.next = dict.fromkeys(SIZES, 0)

    def view(self, space: str, dtype: str, shape: tuple[int, ...], values=None) -> View:
        """A fresh tile, written with `values` if given."""
        offset = self.next[space]
        size = 1
        for dim in shape:
            size *= dim
        scale = 1 if dtype == "i1" else DTYPES[dtype].itemsize
        self.next[space] += -(-size * scale // 32) * 32 + 32
        view = View(
            self.memories[space], dtype, offset * 8 if dtype == "i1" else offset, shape, contiguous_strides(shape)
        )
        if values is not None:
            view.mark_written()
            if dtype == "i1":
                view.store_bits(np.asarray(values, np.bool_))
            else:
                view.array()[...] = values
        return view

    def run(self, name: str, *operands, **attrs) -> None:
        values = []
        for number, operand in enumerate(operands):
            kind = MemRef(operand.shape, operand.dtype, operand.memory.space) if isinstance(operand, View) else "f32"
            values.append(Value(number, kind))
        op = Op(f"hivm.hir.{name}", values, [], attrs, [], "test.py:1")
        with np.errstate(all="ignore"):
            lookup(op).build(op)(*operands)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("vadd", np.add),
        ("vsub", np.subtract),
        ("vmul", np.multiply),
        ("vdiv", np.divide),
        ("vmax", np.maximum),
        ("vmin", np.minimum),
    ],
)
def test_binary_with_a_broadcast_operand(bench, name, function, dtype) -> None:
    a = bench.view("ub", dtype, (8, 24), normal(8, 24))
    b = bench.view("ub", dtype, (8, 1), normal(8, 1) + 3)
    out = bench.view("ub", dtype, (8, 24))
    bench.run(name, a, b, out, operandSegmentSizes=(2, 1, 0), broadcast=(1,), transpose=())
    np.testing.assert_array_equal(out.array(), function(a.array(), b.array()))


def test_binary_in_place_and_with_a_scalar(bench) -> None:
    a = bench.view("ub", "f32", (64,), normal(64))
    expected = a.array() * np.float32(0.5)
    bench.run("vmul", a, np.float32(0.5), a, operandSegmentSizes=(2, 1, 0))
    np.testing.assert_array_equal(a.array(), expected)


def test_integers_wrap_at_their_width(bench) -> None:
    a = bench.view("ub", "i32", (2,), [2**31 - 1, -(2**31)])
    out = bench.view("ub", "i32", (2,))
    bench.run("vadd", a, a, out, operandSegmentSizes=(2, 1, 0))
    assert out.array().tolist() == [-2, 0]


def test_transposed_operands_are_refused(bench) -> None:
    a = bench.view("ub", "f32", (4, 4), 0)
    with pytest.raises(UnknownOpError, match="transpose"):
        bench.run("vadd", a, a, a, operandSegmentSizes=(2, 1, 0), transpose=(1, 0))


def test_reading_what_nobody_wrote(bench) -> None:
    a, out = bench.view("ub", "f32", (64,)), bench.view("ub", "f32", (64,))
    with pytest.raises(UninitialisedReadError, match="100.0% of its bytes"):
        bench.run("vexp", a, out, operandSegmentSizes=(1, 1, 0))


# fp32 values that round in an interesting way: ties, overflow, subnormals, signed zero.
FP16_CASES = {
    2049.0: 2048.0,  # tie to even, down
    2051.0: 2052.0,  # tie to even, up
    65519.0: 65504.0,  # just below the overflow threshold
    65520.0: np.inf,
    -65520.0: -np.inf,
    2.0**-24: 2.0**-24,  # smallest subnormal
    2.0**-25: 0.0,  # tie to even: zero
    1.5 * 2.0**-25: 2.0**-24,
    -0.0: -0.0,
}
BF16_CASES = {
    257.0: 256.0,  # tie to even, down
    259.0: 260.0,  # tie to even, up
    3.38e38: float(np.float32(3.38e38).astype(ml_dtypes.bfloat16)),
    3.4028235e38: np.inf,  # rounds up past the largest bf16
    2.0**-133: 2.0**-133,  # smallest subnormal
    2.0**-134: 0.0,
}


@pytest.mark.parametrize(("dtype", "cases"), [("f16", FP16_CASES), ("bf16", BF16_CASES)])
def test_narrowing_rounds_to_nearest_even(bench, dtype, cases) -> None:
    a = bench.view("ub", "f32", (len(cases),), np.array(list(cases), np.float32))
    out = bench.view("ub", dtype, (len(cases),))
    bench.run("vcast", a, out, operandSegmentSizes=(1, 1, 0), round_mode="rint")
    got = out.array().astype(np.float64)
    np.testing.assert_array_equal(got, np.array(list(cases.values()), np.float64))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(list(cases.values())))


def test_narrowing_keeps_nan(bench) -> None:
    a, out = bench.view("ub", "f32", (1,), np.nan), bench.view("ub", "bf16", (1,))
    bench.run("vcast", a, out, operandSegmentSizes=(1, 1, 0), round_mode="rint")
    assert np.isnan(out.array().astype(np.float32)).all()


@pytest.mark.parametrize(
    ("mode", "expected"), [("rint", [2, -2, 0]), ("floor", [2, -3, 0]), ("ceil", [3, -2, 1]), ("trunc", [2, -2, 0])]
)
def test_float_to_integer(bench, mode, expected) -> None:
    a = bench.view("ub", "f32", (3,), [2.5, -2.5, 0.5])
    out = bench.view("ub", "i32", (3,))
    bench.run("vcast", a, out, operandSegmentSizes=(1, 1, 0), round_mode=mode)
    assert out.array().tolist() == expected


def test_compare_select_and_not(bench) -> None:
    a, b = bench.view("ub", "f32", (40,), normal(40)), bench.view("ub", "f32", (40,), 0.0)
    mask, inverse = bench.view("ub", "i1", (40,)), bench.view("ub", "i1", (40,))
    out = bench.view("ub", "f32", (40,))
    bench.run("vcmp", a, b, mask, operandSegmentSizes=(2, 1), compare_mode="gt")
    bench.run("vnot", mask, inverse, operandSegmentSizes=(1, 1, 0))
    scratch = bench.view("ub", "f32", (8,))
    bench.run("vsel", inverse, b, a, out, scratch, operandSegmentSizes=(3, 1, 1))
    np.testing.assert_array_equal(out.array(), np.where(a.array() > 0, a.array(), 0))


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_keep_the_dimension(bench, kind, axis) -> None:
    a = bench.view("ub", "f32", (12, 40), normal(12, 40))
    out = bench.view("ub", "f32", (1, 40) if axis == 0 else (12, 1))
    scratch = bench.view("ub", "f32", (64,))
    bench.run("vreduce", a, out, scratch, operandSegmentSizes=(1, 1, 1, 0), arith=kind, reduce_dims=(axis,))
    expected = getattr(a.array(), kind)(axis=axis, keepdims=True)
    np.testing.assert_allclose(out.array(), expected, rtol=1e-6)


def test_maximum_keeps_nan(bench) -> None:
    a = bench.view("ub", "f32", (1, 8), [1, np.nan, 3, 4, 5, 6, 7, 8])
    out, scratch = bench.view("ub", "f32", (1, 1)), bench.view("ub", "f32", (8,))
    bench.run("vreduce", a, out, scratch, operandSegmentSizes=(1, 1, 1, 0), arith="max", reduce_dims=(1,))
    assert np.isnan(out.array()).all()


def test_unknown_reduction_is_an_error(bench) -> None:
    a, out = bench.view("ub", "f32", (4, 8), 0), bench.view("ub", "f32", (4, 1))
    with pytest.raises(UnknownOpError, match="reduction xori"):
        bench.run("vreduce", a, out, operandSegmentSizes=(1, 1, 0, 0), arith="xori", reduce_dims=(1,))


def test_broadcast_transpose_arange_copy(bench) -> None:
    column = bench.view("ub", "f32", (6, 1), normal(6, 1))
    wide, turned = bench.view("ub", "f32", (6, 16)), bench.view("ub", "f32", (16, 6))
    bench.run("vbrc", column, wide, broadcast_dims=(1,))
    bench.run("vtranspose", wide, turned, permutation=(1, 0))
    np.testing.assert_array_equal(turned.array(), np.broadcast_to(column.array(), (6, 16)).T)
    numbers = bench.view("ub", "i32", (4, 8))
    bench.run("varange", numbers, 3, 100, 1, operandSegmentSizes=(1, 1, 2))
    np.testing.assert_array_equal(numbers.array(), 3 + np.arange(4)[:, None] * 100 + np.arange(8))
    other = bench.view("ub", "i32", (4, 8))
    bench.run("copy", numbers, other)
    np.testing.assert_array_equal(other.array(), numbers.array())


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    k=st.integers(1, 40),
    dtype=st.sampled_from(["f16", "bf16", "f32"]),
    flips=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_nd2nz_mmad_fixpipe(m, n, k, dtype, flips, seed) -> None:
    """GM to fractals in L1, a product in L0C twice (the second accumulates), and back to GM."""
    bench = Bench()
    rng = np.random.default_rng(seed)
    a_flip, b_flip = flips
    a, b = rng.normal(size=(m, k)), rng.normal(size=(k, n))
    columns = 32 // DTYPES[dtype].itemsize

    def to_l1(matrix: np.ndarray) -> View:
        rows, cols = matrix.shape
        source = bench.view("gm", dtype, (rows, cols), matrix)
        tile = bench.view("cbuf", dtype, (-(-cols // columns), -(-rows // 16), 16, columns))
        bench.run("nd2nz", source, tile, operandSegmentSizes=(1, 1, 0, 0))
        return tile

    left, right = to_l1(a.T if a_flip else a), to_l1(b.T if b_flip else b)
    result = bench.view("cc", "f32", (-(-n // 16), -(-m // 16), 16, 16))
    attrs = {"a_transpose": True} if a_flip else {}
    attrs |= {"b_transpose": True} if b_flip else {}
    for init in (1, 0):
        bench.run(
            "mmadL1", left, right, init, m, k, n, result, *[-1] * 7,
            operandSegmentSizes=(1, 1, 1, 1, 1, 1, 1, 7, 0, 0), **attrs,
        )  # fmt: skip
    out = bench.view("gm", "f16", (m, n))
    bench.run("fixpipe", result, out, dma_mode="nz2nd", pre_quant="F322F16")
    rounded = [x.astype(DTYPES[dtype]).astype(np.float64) for x in (a, b)]
    np.testing.assert_allclose(out.array().astype(np.float64), 2 * (rounded[0] @ rounded[1]), rtol=2e-3, atol=2e-3)


def test_load_and_store_move_strided_tiles(bench) -> None:
    source = bench.view("gm", "f32", (8, 32), normal(8, 32))
    window = View(source.memory, "f32", source.offset + 16, (8, 8), (32, 1))
    tile = bench.view("ub", "f32", (8, 8))
    bench.run("load", window, tile, operandSegmentSizes=(1, 1, 0, 0, 0, 0))
    np.testing.assert_array_equal(tile.array(), source.array()[:, 4:12])
    target = bench.view("gm", "f32", (8, 32), 0)
    bench.run("store", tile, View(target.memory, "f32", target.offset + 32, (8, 8), (32, 1)))
    np.testing.assert_array_equal(target.array()[:, 8:16], tile.array())
    assert (target.array()[:, 16:] == 0).all()


def test_load_pads_on_the_left(bench) -> None:
    source, tile = bench.view("gm", "f32", (5,), normal(5)), bench.view("ub", "f32", (8,))
    bench.run("load", source, tile, np.float32(0), 3, operandSegmentSizes=(1, 1, 1, 1, 0, 0), pad_mode="PadValue")
    np.testing.assert_array_equal(tile.array(), [0, 0, 0, *source.array()])


def test_tiles_that_do_not_fit_their_target(bench) -> None:
    source, tile = bench.view("gm", "f16", (32, 32), 0), bench.view("cbuf", "f16", (1, 2, 16, 16))
    with pytest.raises(OutOfBoundsError, match="nd2nz"):
        bench.run("nd2nz", source, tile, operandSegmentSizes=(1, 1, 0, 0))


def test_unknown_op_is_an_error(bench) -> None:
    with pytest.raises(UnknownOpError, match=r"vsort at test\.py:1: this op is not known"):
        bench.run("vsort", bench.view("ub", "f32", (8,), 0))


def test_k_parts_follow_the_template() -> None:
    # 32 KB halves of L0A and L0B in fp16: 16384 / 128 = 128 deep for 128-row tiles.
    assert k_parts(128, 128, 128, 2) == ([128], True)
    assert k_parts(256, 64, 128, 2) == ([64, 64], True)
    assert k_parts(128, 128, 80, 2) == ([80], True)
    assert k_parts(256, 64, 80, 2) == ([64, 16], True)
    assert k_parts(2048, 16, 32, 2) == ([16, 16], False)


@given(a=st.integers(-(2**31), 2**31 - 1), b=st.integers(-(2**31), 2**31 - 1).filter(bool))
def test_division_truncates_like_c(a, b) -> None:
    assert truncated_division(a, b) == int(np.fix(np.longdouble(a) / np.longdouble(b)))
    assert truncated_division(a, b) * b + truncated_remainder(a, b) == a


@given(
    name=st.sampled_from(["arith.addi", "arith.subi", "arith.muli"]),
    bits=st.sampled_from([8, 16, 32, 64]),
    data=st.data(),
)
def test_scalar_integers_wrap(name, bits, data) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    a, b = data.draw(st.integers(low, high)), data.draw(st.integers(low, high))
    op = Op(name, [], [Value(0, f"i{bits}")], {}, [], "test.py:1")
    got = eval(SCALARS[name](op, ["a", "b"]), {"a": a, "b": b})  # noqa: S307
    exact = {"arith.addi": a + b, "arith.subi": a - b, "arith.muli": a * b}[name]
    assert got == (exact - low) % 2**bits + low
