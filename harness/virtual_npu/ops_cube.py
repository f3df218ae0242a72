"""The cube core's matrix op. `mmadL1` is a macro: it moves its operands from L1 to L0A and
L0B in k parts (pipe MTE1) and multiplies (pipe M); see `k_parts` for its loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import OutOfBoundsError, TilePitchError, UnknownOpError
from .hardware import L0_BYTES
from .hivm import MemRef, Op, Value
from .memory import DTYPES, View
from .ops import Kernel, device_op, read, require_absent, write

FRACTAL = 16


def _access(op: Op) -> tuple[list[int], list[int], list[int]]:
    return [0, 1], [6], []


def matrix(view: View, rows: int, cols: int, *, transposed: bool) -> np.ndarray:
    """The [rows, cols] fp32 matrix of an L1 tile in fractals [c1][r1][16][c0]; of the
    transposed tile when it was stored so."""
    if transposed:
        return matrix(view, cols, rows, transposed=False).T
    c1, r1, r0, c0 = view.shape
    if c1 > 1 and view.strides[0] != r1 * r0 * c0:
        # The macro computes the pitch of its L1 loads from sizes[1] * sizes[2], not from the strides
        # (AscendNPU-IR, lib/Template/lib/Cube/LocalMmad.cpp, load_l1_to_l0a and load_l1_to_l0b).
        raise TilePitchError(
            f"{view.describe()}: rows of a larger tile, which the matrix unit would load with the wrong pitch; "
            "slice columns only, or load the rows by themselves"
        )
    if rows > r1 * r0 or cols > c1 * c0:
        raise OutOfBoundsError(f"a {rows}x{cols} matrix in {view.describe()}")
    blocks = -(-cols // c0)
    window = View(
        view.memory,
        view.dtype,
        view.offset,
        (blocks, rows, c0),
        (view.strides[0], view.strides[2], view.strides[3]),
    )
    whole = (blocks, rows) == (c1, r1 * r0)
    window.known = view.known and whole
    tile = read(window)
    view.known = view.known or whole
    return tile.transpose(1, 0, 2).reshape(rows, blocks * c0)[:, :cols].astype(np.float32)


@device_op("mmadL1", pipe="M", access=_access)
def mmad(op: Op) -> Kernel:
    """L0C tile (fp32 fractals) = or += A [m, k] times B [k, n] from L1."""
    require_absent(op, "enable_HF32")
    if op.attrs["operandSegmentSizes"][-1]:
        raise UnknownOpError(f"{op}: a bias operand is not modelled")
    a_transposed, b_transposed = "a_transpose" in op.attrs, "b_transpose" in op.attrs

    def run(a: View, b: View, init: int, m: int, k: int, n: int, c: View, *_sync: Any) -> None:
        if m == 0 or k == 0 or n == 0:
            return
        left = matrix(a, m, k, transposed=a_transposed)
        right = matrix(b, k, n, transposed=b_transposed)
        n1, _m1, _m0, n0 = c.shape
        blocks = -(-n // n0)
        if blocks > n1 or m > c.shape[1] * c.shape[2]:
            raise OutOfBoundsError(f"an {m}x{n} result in {c.describe()}")
        product = np.zeros((m, blocks * n0), np.float32)
        np.matmul(left, right, out=product[:, :n])
        tile = product.reshape(m, blocks, n0).transpose(1, 0, 2)
        window = View(c.memory, c.dtype, c.offset, (blocks, m, n0), (c.strides[0], c.strides[2], c.strides[3]))
        whole = c.shape == (blocks, -(-m // FRACTAL), FRACTAL, n0) and m % FRACTAL == 0
        window.known, window.marked = c.known and whole, c.marked and whole
        write(window, tile if init else read(window) + tile)
        if whole:
            c.known = c.marked = True

    return run


def k_parts(m0: int, n0: int, k: int, itemsize: int) -> tuple[list[int], bool]:
    """The k sizes of the macro's loop and whether it uses both halves of L0A and L0B:
    k_part = floor(32 KB / itemsize / max(m0, n0) to 16) to 16; one 64 KB buffer when that
    is 0 (AscendNPU-IR, lib/Template/lib/Cube/LocalMmad.cpp). m0 and n0 are the rows and
    columns of the L1 tiles."""
    align = max(16, 32 // itemsize)
    widest = -(-max(m0, n0) // align) * align
    double = True
    part = (L0_BYTES // 2 // itemsize // widest) // align * align
    if part == 0:
        double = False
        part = (L0_BYTES // itemsize // widest) // align * align
    if part == 0:
        raise UnknownOpError(f"a matrix of {m0} rows and {n0} columns does not fit L0")
    return [min(part, k - start) for start in range(0, k, part)], double


SYNC_ARGUMENTS = 7  # waits for A and B, sets after A and B, loop parity, two M->MTE1 events


def sync_arguments(op: Op) -> list[Value]:
    """The macro's synchronisation operands: all of them, or none, which stands for -1 in each place
    (AscendNPU-IR, lib/Conversion/HIVMToStandard/HIVMToStandard.cpp, genAdditionalFunctionArgs)."""
    found = op.segments()[7]
    if len(found) not in (0, SYNC_ARGUMENTS):
        raise UnknownOpError(f"{op}: {len(found)} synchronisation operands instead of {SYNC_ARGUMENTS} or none")
    return found


def sync_texts(op: Op, ref: Callable[[Value], str]) -> list[str]:
    """Their texts, "-1" for what is absent."""
    return [ref(value) for value in sync_arguments(op)] or ["-1"] * SYNC_ARGUMENTS


def itemsize(value: Value) -> int:
    """Bytes of an element of a matrix operand."""
    assert isinstance(value.type, MemRef)
    return DTYPES[value.type.dtype].itemsize
