"""Data movers: GM to UB and L1 (MTE2), UB to GM (MTE3), L0C to GM (FIX)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import OutOfBoundsError, UnknownOpError
from .hivm import Op
from .memory import DTYPES, View
from .ops import Kernel, device_op, memref, read, require_absent, write

FRACTAL = 16  # rows of a fractal; its columns are 32 bytes (AscendNPU-IR, HIVM layouts)


def _first_to_second(op: Op) -> tuple[list[int], list[int], list[int]]:
    return [0], [1], []


def _pad(op: Op) -> str | None:
    mode = op.attrs.get("pad_mode")
    if mode is None:
        return None
    for known in ("PadNull", "PadValue", "PadFirstElem"):
        if known in str(mode):
            return known
    raise UnknownOpError(f"{op}: pad mode {mode}")


@device_op("load", pipe="MTE2", access=_first_to_second)
def load(op: Op) -> Kernel:
    """UB tile = GM tile of the same shape; with a pad value, `left_padding_num` leading
    columns of dst get it."""
    pad = _pad(op)
    if pad == "PadFirstElem":
        raise UnknownOpError(f"{op}: pad mode {pad}")
    sizes = op.attrs.get("operandSegmentSizes", (1, 1, 0, 0, 0, 0))
    has_value, has_left, has_right = (sizes[i] if i < len(sizes) else 0 for i in (2, 3, 4))
    if has_right:
        raise UnknownOpError(f"{op}: right padding is not modelled")
    fills = bool(op.attrs.get("init_out_buffer"))

    def run(src: View, dst: View, *rest: Any) -> None:
        value = rest[0] if has_value else None
        left = int(rest[has_value]) if has_left else 0
        if 0 in src.shape:
            return
        if fills and value is not None:
            write(dst, value)
        if left == 0 and src.shape == dst.shape:
            write(dst, read(src))
            return
        if src.shape[:-1] != dst.shape[:-1] or src.shape[-1] + left > dst.shape[-1]:
            raise OutOfBoundsError(f"load of {src.describe()} with {left} columns of padding into {dst.describe()}")
        if value is not None:
            write(dst, value)
        window = View(
            dst.memory,
            dst.dtype,
            dst.offset + left * dst.strides[-1] * dst.itemsize,
            src.shape,
            dst.strides,
        )
        write(window, read(src))

    return run


@device_op("store", pipe="MTE3", access=_first_to_second)
def store(op: Op) -> Kernel:
    """GM tile = UB tile; with `atomic_kind` add, GM tile += UB tile."""
    atomic = op.attrs.get("atomic_kind")
    if atomic not in (None, "none", "add"):
        raise UnknownOpError(f"{op}: atomic kind {atomic}")

    def run(src: View, dst: View) -> None:
        if 0 in dst.shape:
            return
        if atomic == "add":
            write(dst, read(dst) + read(src))
        else:
            write(dst, read(src))

    return run


@device_op("nd2nz", pipe="MTE2", access=_first_to_second)
def nd2nz(op: Op) -> Kernel:
    """L1 tile in fractals [cols/c0][rows/16][16][c0] = row-major GM tile [rows, cols]; the
    last column block is filled up with zeros."""
    columns = 32 // DTYPES[memref(op.operands[0]).dtype].itemsize
    sizes = op.attrs.get("operandSegmentSizes", (1, 1, 0, 0))
    has_pad = len(sizes) > 2 and sizes[2] == 1
    fills = bool(op.attrs.get("init_out_buffer"))
    has_condition = len(sizes) > 3 and sizes[3] == 1

    def run(src: View, dst: View, *rest: Any) -> None:
        if fills and (not has_condition or rest[-1]):
            write(dst, rest[0] if has_pad else 0)
        if len(src.shape) != 2:
            raise UnknownOpError(f"{op}: source of rank {len(src.shape)}")
        rows, cols = src.shape
        if rows == 0 or cols == 0:
            return
        blocks = -(-cols // columns)
        if dst.shape[0] < blocks or dst.shape[1] * FRACTAL < rows or dst.shape[3] != columns:
            raise OutOfBoundsError(f"nd2nz of {src.describe()} into {dst.describe()}")
        tile = read(src)
        if cols % columns:
            padded = np.zeros((rows, blocks * columns), tile.dtype)
            padded[:, :cols] = tile
            tile = padded
        # Rows of consecutive fractals in one column of fractals lie one after another.
        window = View(
            dst.memory,
            dst.dtype,
            dst.offset,
            (blocks, rows, columns),
            (dst.strides[0], dst.strides[2], dst.strides[3]),
        )
        if dst.strides[1] != FRACTAL * dst.strides[2]:
            raise UnknownOpError(f"{op}: destination strides {dst.strides}")
        whole = (blocks, rows) == (dst.shape[0], dst.shape[1] * FRACTAL)
        window.marked = dst.marked and whole
        write(window, tile.reshape(rows, blocks, columns).transpose(1, 0, 2))
        if whole:
            dst.marked = dst.known = True

    return run


_QUANT = {"no_quant": None, "F322F16": "f16", "F322BF16": "bf16"}


@device_op("fixpipe", pipe="FIX", access=_first_to_second)
def fixpipe(op: Op) -> Kernel:
    """GM tile (row-major) = L0C tile (fractals), rounded to fp16 or bf16 if asked."""
    mode = str(op.attrs.get("dma_mode", "nz2nz")).lower()
    if mode != "nz2nd":
        raise UnknownOpError(f"{op}: fixpipe mode {mode}")
    require_absent(op, "channel_split")
    for name, neutral in (("pre_quant", _QUANT), ("pre_relu", {"no_relu": None, "NO_RELU": None})):
        value = op.attrs.get(name)
        if value is not None and value not in neutral and value.upper() != "NO_QUANT":
            raise UnknownOpError(f"{op}: {name} = {value}")

    def run(src: View, dst: View, *_conditions: Any) -> None:
        rows, cols = dst.shape
        if rows == 0 or cols == 0:
            return
        n1, m1, m0, n0 = src.shape
        if rows > m1 * m0 or cols > n1 * n0:
            raise OutOfBoundsError(f"fixpipe of {src.describe()} into {dst.describe()}")
        blocks = -(-cols // n0)
        window = View(
            src.memory, src.dtype, src.offset, (blocks, rows, n0), (src.strides[0], src.strides[2], src.strides[3])
        )
        window.known = src.known and (blocks, rows) == (n1, m1 * m0)
        write(dst, read(window).transpose(1, 0, 2).reshape(rows, blocks * n0)[:, :cols])

    return run
