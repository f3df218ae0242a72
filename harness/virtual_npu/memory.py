"""Memories as bytes, and views of them.

A view knows where it lies (memory, byte offset, strides), so that bounds, unwritten bytes
and overlaps can be checked; its numpy array is made when an op first touches it. Making a
view out of bounds is allowed (a block pointer may hang over the edge); touching it is not.

The compiler plans several buffers onto the same on-chip bytes, one after the other. Bytes
belong to the buffer that wrote them last; for every other one they are lost, and reading
them through it is an error. An op that overwrites its operand is planned so: its result is
a buffer of its own at the same place, and the operand is never read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from .errors import LostValueError, OutOfBoundsError, UninitialisedReadError, UnknownOpError

DTYPES: dict[str, np.dtype] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
}

# Memory starts as all ones: NaN in fp16, bf16 and fp32.
POISON = 0xFF


class Memory:
    """Bytes of one memory. `written` has one flag for each byte, or is None where reads
    need no check (tensors of the caller)."""

    __slots__ = ("data", "high", "home", "live", "losses", "lost_to", "low", "name", "rivals", "space", "written")

    def __init__(self, name: str, space: str, size: int | None = None, data: np.ndarray | None = None) -> None:
        self.name = name
        self.space = space
        self.home = self
        self.low = self.high = 0  # of a buffer: where it lies
        self.live = False  # of a buffer: some byte is its own
        self.rivals: list[Memory] = []  # buffers that share some of these bytes
        self.losses = 0  # how often bytes went to a rival
        self.lost_to = ""
        self.written: np.ndarray | None = None
        if data is not None:
            self.data = data
        else:
            assert size is not None
            self.data = np.full(size, POISON, np.uint8)
            self.written = np.zeros(size, np.bool_)

    def buffer(self, name: str, low: int, high: int) -> Memory:
        """A planned buffer of bytes `low` to `high` (exclusive): offsets stay those of this
        memory, what is written is its own record."""
        made = Memory(name, self.space, data=self.data)
        made.home, made.low, made.high = self, low, high
        made.written = np.zeros(len(self.data), np.bool_)
        return made

    def share(self, other: Memory) -> None:
        """Two buffers have bytes in common: each write of one may cost the other some."""
        self.rivals.append(other)
        other.rivals.append(self)

    def lose(self, low: int, high: int, rival: Memory) -> None:
        """A rival writes these bytes."""
        assert self.written is not None
        if self.written[low:high].any():
            self.written[low:high] = False
            self.losses += 1
            self.lost_to = rival.name
            self.live = bool(self.written[self.low : self.high].any())


class View:
    """`shape` and `strides` in elements; `offset` in bytes (for i1, which is packed, in
    bits). `array()` is the numpy array over the memory's bytes. `known` says that all of its
    bytes were found written, `marked` that they are marked so; both until a rival of its
    buffer writes there."""

    __slots__ = ("_array", "_known", "_marked", "dtype", "memory", "offset", "shape", "strides")

    def __init__(
        self, memory: Memory, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.memory = memory
        self.dtype = dtype
        self.offset = offset
        self.shape = shape
        self.strides = strides
        self._array: np.ndarray | None = None
        self._known = self._marked = 0 if memory.written is None else -1

    @property
    def known(self) -> bool:
        return self._known == self.memory.losses

    @known.setter
    def known(self, value: bool) -> None:
        self._known = self.memory.losses if value else -1

    @property
    def marked(self) -> bool:
        return self._marked == self.memory.losses

    @marked.setter
    def marked(self, value: bool) -> None:
        self._marked = self.memory.losses if value else -1

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def count(self) -> int:
        size = 1
        for dim in self.shape:
            size *= dim
        return size

    def describe(self) -> str:
        unit = "bit" if self.dtype == "i1" else "byte"
        shape = "x".join(map(str, self.shape))
        return f"{shape}x{self.dtype} at {unit} {self.offset} of {self.memory.name} ({len(self.memory.data)} bytes)"

    def array(self) -> np.ndarray:
        """The numpy array (not for i1).

        Raises:
            OutOfBoundsError: the view reaches outside of its memory.
        """
        if self._array is None:
            self._array = self._over(self.memory.data, DTYPES[self.dtype])
        return self._array

    def _over(self, data: np.ndarray, dtype: np.dtype) -> np.ndarray:
        scale = self.itemsize
        strides = tuple(stride * scale for stride in self.strides)
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        low, high = self.hull()
        if low < 0 or high > len(data):
            raise OutOfBoundsError(f"{self.describe()}: bytes {low} to {high} are accessed")
        return np.ndarray(self.shape, dtype, data, self.offset, strides)

    def _byte_range(self) -> tuple[int, int]:
        """First and last byte (exclusive) of a packed i1 view, which must be contiguous."""
        expected = 1
        for dim, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if dim != 1 and stride != expected:
                raise UnknownOpError(f"an i1 view that is not contiguous: {self.describe()}")
            expected *= dim
        if self.offset % 8:
            raise UnknownOpError(f"an i1 view that does not start at a byte: {self.describe()}")
        start, stop = self.offset // 8, (self.offset + self.count + 7) // 8
        if start < 0 or stop > len(self.memory.data):
            raise OutOfBoundsError(f"{self.describe()}: bytes {start} to {stop} are accessed")
        return start, stop

    def load_bits(self) -> np.ndarray:
        """An i1 view as booleans."""
        start, stop = self._byte_range()
        bits = np.unpackbits(self.memory.data[start:stop], count=self.count, bitorder="little")
        return bits.view(np.bool_).reshape(self.shape)

    def store_bits(self, values: np.ndarray) -> None:
        """Write booleans to an i1 view."""
        start, stop = self._byte_range()
        self.memory.data[start:stop] = np.packbits(np.broadcast_to(values, self.shape).ravel(), bitorder="little")

    def _written(self) -> np.ndarray:
        written = self.memory.written
        assert written is not None
        if self.dtype == "i1":
            start, stop = self._byte_range()
            return written[start:stop]
        scale = self.itemsize
        flags = self._over(written, np.dtype((np.void, scale)))
        return np.ndarray((*flags.shape, scale), np.bool_, written, self.offset, (*flags.strides, 1))

    def check_written(self) -> None:
        """Raise UninitialisedReadError if a byte of the view was never written."""
        if self.known or 0 in self.shape:
            return
        flags = self._written()
        if not flags.all():
            share = 1.0 - float(flags.mean())
            if self.memory.lost_to:
                raise LostValueError(
                    f"{self.describe()}: {share:.1%} of its bytes are lost: {self.memory.lost_to} wrote there since"
                )
            raise UninitialisedReadError(f"{self.describe()}: {share:.1%} of its bytes were never written")
        self.known = True

    def mark_written(self) -> None:
        """Record that every byte of the view is written."""
        if self.marked or 0 in self.shape:
            return
        if self.dtype != "i1":
            self.array()  # bounds
        live = [rival for rival in self.memory.rivals if rival.live]
        if live:
            low, high = self.hull()
            for rival in live:
                rival.lose(low, high, self.memory)
        self.memory.live = True
        self._written()[...] = True
        self.marked = self.known = True

    def hull(self) -> tuple[int, int]:
        """First and last byte (exclusive)."""
        if self.dtype == "i1":
            return self._byte_range()
        reach = [(n - 1) * stride * self.itemsize for n, stride in zip(self.shape, self.strides, strict=True)]
        low = self.offset + sum(step for step in reach if step < 0)
        return low, self.offset + sum(step for step in reach if step > 0) + self.itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        strides[index] = strides[index + 1] * shape[index + 1]
    return tuple(strides)


def _scale(dtype: str) -> int:
    """Units of `offset` for one element: bytes, or bits for i1."""
    return 1 if dtype == "i1" else DTYPES[dtype].itemsize


def subview(view: View, offsets: Sequence[int], sizes: Sequence[int], steps: Sequence[int], rank: int) -> View:
    """`memref.subview`; unit dimensions are dropped from the left until `rank` remain."""
    shift = sum(offset * stride for offset, stride in zip(offsets, view.strides, strict=True))
    strides = tuple(stride * step for stride, step in zip(view.strides, steps, strict=True))
    shape = tuple(sizes)
    if min(shape, default=0) < 0:
        raise OutOfBoundsError(f"a subview with sizes {shape} of {view.describe()}")
    if len(shape) != rank:
        kept = list(range(len(shape)))
        for index in range(len(shape)):
            if len(kept) > rank and shape[index] == 1:
                kept.remove(index)
        shape = tuple(shape[index] for index in kept)
        strides = tuple(strides[index] for index in kept)
    return View(view.memory, view.dtype, view.offset + shift * _scale(view.dtype), shape, strides)


def reinterpret(view: View, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> View:
    """`memref.reinterpret_cast`: offset counts from the start of the source's buffer."""
    return View(view.memory, view.dtype, view.offset + offset * _scale(view.dtype), tuple(sizes), tuple(strides))


def bytes_as(view: View, dtype: str, offset: int, shape: Sequence[int]) -> View:
    """`memref.view`: a typed, contiguous window at a byte offset of a byte buffer."""
    return View(view.memory, dtype, view.offset + offset, tuple(shape), contiguous_strides(shape))


def bitcast(view: View, dtype: str) -> View:
    """`hivm.hir.bitcast`: the same bytes under another type of the same width."""
    if _scale(dtype) != _scale(view.dtype):
        raise UnknownOpError(f"bitcast of {view.describe()} to {dtype}")
    return View(view.memory, dtype, view.offset, view.shape, view.strides)


def collapse(view: View, groups: Sequence[Sequence[int]]) -> View:
    """`memref.collapse_shape`: each group of dimensions becomes one."""
    shape, strides = [], []
    for group in groups:
        size, stride = 1, 1
        for index in reversed(group):
            dim = view.shape[index]
            if dim == 1:
                continue
            if size == 1:
                stride = view.strides[index]
            elif view.strides[index] != stride * size and dim != 0:
                raise UnknownOpError(f"collapse {group} of {view.describe()} with strides {view.strides}")
            size *= dim
        if size == 1 and group:
            stride = view.strides[group[-1]]
        shape.append(size)
        strides.append(stride)
    return View(view.memory, view.dtype, view.offset, tuple(shape), tuple(strides))


def expand(view: View, groups: Sequence[Sequence[int]], shape: Sequence[int]) -> View:
    """`memref.expand_shape`: each dimension becomes a row-major group."""
    strides = [0] * len(shape)
    for dim, group in enumerate(groups):
        stride = view.strides[dim]
        for index in reversed(group):
            strides[index] = stride
            stride *= shape[index]
    return View(view.memory, view.dtype, view.offset, tuple(shape), tuple(strides))
