"""Views over bytes: bounds, strides, packed booleans, unwritten bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.virtual_npu.errors import LostValueError, OutOfBoundsError, UninitialisedReadError, UnknownOpError
from harness.virtual_npu.memory import (
    Memory,
    View,
    bytes_as,
    collapse,
    contiguous_strides,
    expand,
    reinterpret,
    subview,
)


def tensor(*shape: int) -> View:
    """A view over a tensor with values 0, 1, 2, ..."""
    data = np.arange(int(np.prod(shape)), dtype=np.float32)
    return View(Memory("tensor t", "gm", data=data.view(np.uint8)), "f32", 0, shape, contiguous_strides(shape))


@given(data=st.data())
def test_subview_is_numpy_slicing(data: st.DataObject) -> None:
    shape = (7, 9, 5)
    view = tensor(*shape)
    offsets, sizes, steps = [], [], []
    for dim in shape:
        offset = data.draw(st.integers(0, dim - 1))
        step = data.draw(st.integers(1, 3))
        size = data.draw(st.integers(1, (dim - offset - 1) // step + 1))
        offsets.append(offset), sizes.append(size), steps.append(step)
    expected = view.array()[
        tuple(slice(o, o + (n - 1) * s + 1, s) for o, n, s in zip(offsets, sizes, steps, strict=True))
    ]
    np.testing.assert_array_equal(subview(view, offsets, sizes, steps, 3).array(), expected)


def test_subview_drops_unit_dimensions() -> None:
    view = subview(tensor(4, 8, 8), (2, 0, 0), (1, 8, 8), (1, 1, 1), 2)
    assert view.shape == (8, 8)
    assert view.array()[0, 0] == 128


def test_collapse_and_expand_are_views() -> None:
    view = tensor(4, 6)
    flat = collapse(view, [[0, 1]])
    assert flat.shape == (24,)
    back = expand(flat, [[0, 1]], (4, 6))
    back.array()[1, 1] = -1
    assert view.array()[1, 1] == -1


def test_collapse_refuses_a_gap() -> None:
    with pytest.raises(UnknownOpError, match="collapse"):
        collapse(subview(tensor(4, 6), (0, 0), (4, 3), (1, 1), 2), [[0, 1]])


def test_touching_out_of_bounds_is_an_error_but_making_the_view_is_not() -> None:
    view = reinterpret(tensor(4, 6), 20, (2, 6), (6, 1))
    inside = subview(view, (0, 0), (1, 4), (1, 1), 2)
    assert inside.array().tolist() == [[20, 21, 22, 23]]
    with pytest.raises(OutOfBoundsError, match=r"2x6xf32 at byte 80 of tensor t \(96 bytes\): bytes 80 to 128"):
        view.array()


def test_negative_offset_is_out_of_bounds() -> None:
    with pytest.raises(OutOfBoundsError):
        reinterpret(tensor(4), -1, (2,), (1,)).array()


def test_unwritten_bytes_are_found_and_memory_starts_as_nan() -> None:
    memory = Memory("ub", "ub", 64)
    view = View(memory, "f32", 0, (4, 4), (4, 1))
    assert np.isnan(view.array()).all()
    half = subview(view, (0, 0), (4, 2), (1, 1), 2)
    half.mark_written()
    half.check_written()
    with pytest.raises(UninitialisedReadError, match=r"50\.0% of its bytes were never written"):
        View(memory, "f32", 0, (4, 4), (4, 1)).check_written()


@given(values=st.lists(st.booleans(), min_size=1, max_size=40))
def test_packed_booleans_round_trip(values: list[bool]) -> None:
    memory = Memory("ub", "ub", 64)
    view = View(memory, "i1", 16 * 8, (len(values),), (1,))
    view.store_bits(np.array(values))
    assert view.load_bits().tolist() == values
    assert memory.data[16] & 1 == values[0]  # the first element is the lowest bit


def test_bytes_as_is_a_typed_window() -> None:
    memory = Memory("workspace", "gm", 256)
    base = View(memory, "i8", 0, (256,), (1,))
    window = bytes_as(base, "f16", 128, (4, 8))
    window.array()[...] = 1
    assert memory.data[128:192].view(np.float16).tolist() == [1.0] * 32


def two_buffers() -> tuple[View, View]:
    """Two planned buffers of 64 bytes; the second one starts in the middle of the first."""
    home = Memory("ub", "ub", 96)
    first, second = home.buffer("buffer one", 0, 64), home.buffer("buffer two", 32, 96)
    first.share(second)
    return View(first, "f32", 0, (16,), (1,)), View(second, "f32", 32, (16,), (1,))


def test_bytes_that_another_buffer_took_over_are_lost() -> None:
    one, two = two_buffers()
    one.mark_written()
    one.check_written()
    two.mark_written()
    with pytest.raises(LostValueError, match=r"16xf32 at byte 0 of buffer one .*: 50\.0% .* lost: buffer two wrote"):
        one.check_written()
    subview(one, (0,), (8,), (1,), 1).check_written()  # its other half is its own
    two.check_written()
    one.mark_written()
    one.check_written()
    with pytest.raises(LostValueError, match="buffer one wrote there since"):
        two.check_written()


def test_a_buffer_does_not_inherit_what_another_one_wrote() -> None:
    one, two = two_buffers()
    one.mark_written()
    with pytest.raises(UninitialisedReadError, match="of buffer two"):
        subview(two, (0,), (8,), (1,), 1).check_written()


def test_an_op_over_its_operand_is_legal() -> None:
    """Planned in place: the result is a buffer of its own on the same bytes."""
    home = Memory("ub", "ub", 64)
    operand, result = home.buffer("operand", 0, 64), home.buffer("result", 0, 64)
    operand.share(result)
    source, target = View(operand, "f32", 0, (16,), (1,)), View(result, "f32", 0, (16,), (1,))
    for _ in range(2):
        source.mark_written()
        source.check_written()
        target.mark_written()
        target.check_written()


def test_packed_booleans_take_bytes_over_too() -> None:
    home = Memory("ub", "ub", 64)
    numbers, bits = home.buffer("numbers", 0, 64), home.buffer("bits", 60, 64)
    numbers.share(bits)
    view = View(numbers, "f32", 0, (16,), (1,))
    view.mark_written()
    View(bits, "i1", 8 * 60, (32,), (1,)).mark_written()
    with pytest.raises(LostValueError, match="bits wrote there since"):
        view.check_written()
    subview(view, (0,), (15,), (1,), 1).check_written()
