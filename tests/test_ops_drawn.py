"""Vector ops and data movers on drawn shapes, strides and offsets, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.virtual_npu import ops_dma, ops_vector  # noqa: F401 - they register their ops
from harness.virtual_npu.errors import UninitialisedReadError
from harness.virtual_npu.hivm import MemRef, Op, Value
from harness.virtual_npu.memory import DTYPES, Memory, View
from harness.virtual_npu.ops import lookup

FLOATS, INTEGERS = ("f32", "f16"), ("i32", "i16")
drawn = settings(max_examples=25, deadline=None)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
seeds = st.integers(0, 2**16)


@st.composite
def tile(draw: st.DrawFn, shape: tuple[int, ...], dtype: str, space: str = "ub") -> View:
    """A view of that shape in a memory of its own: any offset, rows further apart than they are long."""
    strides: list[int] = []
    reach = 1
    for size in reversed(shape):
        strides.insert(0, reach + (draw(st.integers(0, 5)) if strides else 0))
        reach = strides[0] * size
    itemsize = DTYPES[dtype].itemsize
    offset = draw(st.integers(0, 16)) * itemsize
    return View(Memory(space, space, offset + reach * itemsize), dtype, offset, shape, tuple(strides))


def fill(view: View, seed: int) -> np.ndarray:
    """Random contents of a view; a copy of them."""
    random = np.random.default_rng(seed)
    dtype = DTYPES[view.dtype]
    if dtype.kind == "i":
        values = random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, view.shape, dtype, endpoint=True)
    else:
        values = (random.standard_normal(view.shape) * 4).astype(dtype)
    view.mark_written()
    view.array()[...] = values
    return values


def outside(view: View) -> np.ndarray:
    """The bytes of the memory that are not the view's."""
    data = view.memory.data
    mask = np.ones(len(data), np.bool_)
    if view.dtype == "i1":
        mask[view.offset // 8 : (view.offset + view.count + 7) // 8] = False
        return data[mask]
    strides = (*(stride * view.itemsize for stride in view.strides), 1)
    np.ndarray((*view.shape, view.itemsize), np.bool_, mask, view.offset, strides)[...] = False
    return data[mask]


def run(name: str, *operands: object, **attrs: object) -> None:
    values = [
        Value(number, MemRef(o.shape, o.dtype, o.memory.space) if isinstance(o, View) else "f32")
        for number, o in enumerate(operands)
    ]
    op = Op(f"hivm.hir.{name}", values, [], attrs, [], "test.py:1")
    target = next(o for o in reversed(operands) if isinstance(o, View))
    with np.errstate(all="ignore"):
        before = outside(target).copy()
        lookup(op).build(op)(*operands)
    np.testing.assert_array_equal(outside(target), before)  # nothing beside the tile is touched


def equal(view: View, expected: np.ndarray) -> None:
    view.check_written()
    np.testing.assert_array_equal(view.array(), expected)


@drawn
@given(st.data(), shapes, seeds, st.sampled_from(("vadd", "vsub", "vmul", "vmax", "vmin")))
def test_binary(data, shape, seed, name) -> None:
    dtype = data.draw(st.sampled_from((*FLOATS, *INTEGERS)))
    broadcast = tuple(1 if data.draw(st.booleans()) else size for size in shape)
    a, b, out = (data.draw(tile(s, dtype)) for s in (shape, broadcast, shape))
    x, y = fill(a, seed), fill(b, seed + 1)
    run(name, a, b, out, operandSegmentSizes=(2, 1, 0))
    function = {"vadd": np.add, "vsub": np.subtract, "vmul": np.multiply, "vmax": np.maximum, "vmin": np.minimum}[name]
    with np.errstate(all="ignore"):
        equal(out, function(x, y, dtype=DTYPES[dtype]))


@drawn
@given(st.data(), shapes, seeds, st.sampled_from(("vexp", "vln", "vabs", "vsqrt", "vrelu", "vrec")))
def test_unary(data, shape, seed, name) -> None:
    a, out = (data.draw(tile(shape, "f32")) for _ in range(2))
    x = fill(a, seed)
    run(name, a, out, operandSegmentSizes=(1, 1, 0))
    functions = {
        "vexp": np.exp, "vln": np.log, "vabs": np.abs, "vsqrt": np.sqrt,
        "vrelu": lambda v: np.maximum(v, 0), "vrec": lambda v: np.float32(1) / v,
    }  # fmt: skip
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(out.array(), functions[name](x), rtol=1e-6)


@drawn
@given(st.data(), shapes, seeds, st.sampled_from(("vand", "vor", "vxor", "vshl", "vshr")))
def test_bits(data, shape, seed, name) -> None:
    dtype = data.draw(st.sampled_from(INTEGERS))
    a, b, out = (data.draw(tile(shape, dtype)) for _ in range(3))
    x, y = fill(a, seed), fill(b, seed + 1)
    if name in ("vshl", "vshr"):
        y = b.array()[...] = y % (8 * b.itemsize)
    run(name, a, b, out, operandSegmentSizes=(2, 1, 0))
    functions = {
        "vand": np.bitwise_and, "vor": np.bitwise_or, "vxor": np.bitwise_xor,
        "vshl": np.left_shift, "vshr": np.right_shift,
    }  # fmt: skip
    equal(out, functions[name](x, y))


@drawn
@given(st.data(), shapes, seeds, st.sampled_from(("eq", "ne", "lt", "le", "gt", "ge")))
def test_compare_and_select(data, shape, seed, mode) -> None:
    a, b, out = (data.draw(tile(shape, "f32")) for _ in range(3))
    x, y = fill(a, seed), fill(b, seed + 1)
    y = b.array()[...] = np.where(np.arange(y.size).reshape(shape) % 3 == 0, x, y)  # some are equal
    count = int(np.prod(shape))
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    bits = View(Memory("mask", "ub", 64 + count), "i1", 8 * data.draw(st.integers(0, 32)), shape, strides)
    run("vcmp", a, b, bits, operandSegmentSizes=(2, 1), compare_mode=mode)
    functions = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal,
    }  # fmt: skip
    expected = functions[mode](x, y)
    np.testing.assert_array_equal(bits.load_bits(), expected)
    run("vsel", bits, a, b, out, operandSegmentSizes=(3, 1, 0))
    equal(out, np.where(expected, x, y))


@drawn
@given(st.data(), shapes, seeds, st.sampled_from(("sum", "max", "min")))
def test_reduce(data, shape, seed, kind) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    reduced = tuple(1 if i == axis else size for i, size in enumerate(shape))
    a, out = data.draw(tile(shape, "f32")), data.draw(tile(reduced, "f32"))
    x = fill(a, seed)
    run("vreduce", a, out, operandSegmentSizes=(1, 1, 0), arith=kind, reduce_dims=(axis,))
    function = {"sum": np.sum, "max": np.max, "min": np.min}[kind]
    np.testing.assert_allclose(out.array(), function(x.astype(np.float64), axis, keepdims=True), rtol=1e-5, atol=1e-4)


@drawn
@given(st.data(), shapes, seeds, st.sampled_from((("f32", "f16"), ("f16", "f32"), ("i32", "f32"), ("f32", "i32"))))
def test_cast(data, shape, seed, types) -> None:
    a, out = (data.draw(tile(shape, dtype)) for dtype in types)
    x = fill(a, seed)
    if types[0] == "i32":
        x = a.array()[...] = x % 1000
    run("vcast", a, out, operandSegmentSizes=(1, 1, 0), round_mode="rint", cast="cast_signed")
    equal(out, (np.rint(x) if types[1] == "i32" else x).astype(DTYPES[types[1]]))


@drawn
@given(st.data(), shapes, seeds)
def test_broadcast_transpose_and_copy(data, shape, seed) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    narrow = tuple(1 if i == axis else size for i, size in enumerate(shape))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    one, wide, copy = data.draw(tile(narrow, "f32")), data.draw(tile(shape, "f32")), data.draw(tile(shape, "f32"))
    turned = data.draw(tile(tuple(shape[i] for i in order), "f32"))
    x = np.broadcast_to(fill(one, seed), shape)
    run("vbrc", one, wide, broadcast_dims=(axis,))
    equal(wide, x)
    run("vtranspose", wide, turned, permutation=order)
    equal(turned, x.transpose(order))
    run("copy", wide, copy)
    equal(copy, x)


@drawn
@given(st.data(), shapes, st.integers(-1000, 1000))
def test_arange(data, shape, start) -> None:
    steps = [data.draw(st.integers(-50, 50)) for _ in shape]
    out = data.draw(tile(shape, "i32"))
    run("varange", out, start, *steps, operandSegmentSizes=(1, 1, len(shape)))
    grids = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij")
    equal(out, start + sum(grid * step for grid, step in zip(grids, steps, strict=True)))


@drawn
@given(st.data(), shapes, seeds, st.booleans())
def test_load_and_store(data, shape, seed, add) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    source, target = data.draw(tile(shape, dtype, "gm")), data.draw(tile(shape, dtype, "gm"))
    on_chip = data.draw(tile(shape, dtype))
    x, before = fill(source, seed), fill(target, seed + 1)
    run("load", source, on_chip)
    equal(on_chip, x)
    run("store", on_chip, target, **({"atomic_kind": "add"} if add else {}))
    equal(target, before + x if add else x)


@drawn
@given(st.data(), st.tuples(st.integers(1, 5), st.integers(1, 6)), st.integers(0, 4), st.integers(0, 4), seeds)
def test_load_with_padding(data, shape, left, right, seed) -> None:
    source = data.draw(tile(shape, "f32", "gm"))
    on_chip = data.draw(tile((shape[0], left + shape[1] + right), "f32"))
    x = fill(source, seed)
    run("load", source, on_chip, -1.5, left, pad_mode="PadValue", operandSegmentSizes=(1, 1, 1, 1, 0, 0))
    equal(on_chip, np.pad(x, ((0, 0), (left, right)), constant_values=-1.5))


@drawn
@given(st.data(), shapes, st.sampled_from(("vadd", "vexp", "vreduce", "copy", "store")))
def test_one_missing_element_is_noticed(data, shape, name) -> None:
    """Every family checks that what it reads was written, to the last byte."""
    a = data.draw(tile(shape, "f32"))
    fill(a, 0)
    last = a.offset + sum((n - 1) * s for n, s in zip(shape, a.strides, strict=True)) * 4
    a.memory.written[last + 3] = False
    a.known = a.marked = False
    out = data.draw(tile(shape, "f32", "gm" if name == "store" else "ub"))
    operands = (a, a, out) if name == "vadd" else (a, out)
    attrs = {"operandSegmentSizes": (len(operands) - 1, 1, 0)} if name.startswith("v") else {}
    with pytest.raises(UninitialisedReadError):
        run(name, *operands, arith="max", reduce_dims=(), **attrs)
