"""The registry of device ops: for each its pipe, what it reads and writes, its values.

An op's values are given by a builder: it gets the op (static attributes resolved once) and
returns a function of the run-time operands. Cost lives in `costs.py`, keyed by the same
names. An op without an entry is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import UnknownOpError
from .hivm import MemRef, Op, Value
from .memory import DTYPES, View

PIPES = ("S", "V", "MTE1", "MTE2", "MTE3", "M", "FIX")

Kernel = Callable[..., None]
Builder = Callable[[Op], Kernel]


@dataclass(frozen=True)
class DeviceOp:
    """`access` tells which operands are read, which written, which used as scratch (by
    their positions)."""

    default_pipe: str
    build: Builder
    access: Callable[[Op], tuple[list[int], list[int], list[int]]]

    def pipe(self, op: Op) -> str:
        """The pipe that executes the op: filling L1 is MTE2's work, not the vector unit's
        (AscendNPU-IR, GetPipe.cpp)."""
        if op.name == "hivm.hir.vbrc" and any(
            isinstance(o.type, MemRef) and o.type.space == "cbuf" for o in op.operands
        ):
            return "MTE2"
        return self.default_pipe


DEVICE_OPS: dict[str, DeviceOp] = {}


def by_segments(op: Op) -> tuple[list[int], list[int], list[int]]:
    """The usual layout of a vector op: sources, destinations, scratch buffers."""
    parts = op.segments()
    if len(parts) == 1:  # one source, one destination, perhaps a scratch buffer
        positions = [[0], [1], list(range(2, len(op.operands)))]
    else:
        positions, at = [], 0
        for part in parts:
            positions.append(list(range(at, at + len(part))))
            at += len(part)
        while len(positions) < 3:
            positions.append([])
    memrefs = [[i for i in part if isinstance(op.operands[i].type, MemRef)] for part in positions]
    return memrefs[0], memrefs[1], [i for part in memrefs[2:] for i in part]


def device_op(
    *names: str, pipe: str, access: Callable[[Op], tuple[list[int], list[int], list[int]]] = by_segments
) -> Callable[[Builder], Builder]:
    """Register an op of the HIVM dialect (without its `hivm.hir.` prefix)."""

    def register(build: Builder) -> Builder:
        for name in names:
            DEVICE_OPS[f"hivm.hir.{name}"] = DeviceOp(pipe, build, access)
        return build

    return register


def lookup(op: Op) -> DeviceOp:
    """The entry of an op.

    Raises:
        UnknownOpError: there is none.
    """
    found = DEVICE_OPS.get(op.name)
    if found is None:
        raise UnknownOpError(f"{op}: this op is not known to the virtual NPU")
    return found


def read(view: View) -> np.ndarray:
    """A view's array after the check that its bytes were written (i1 as booleans)."""
    if not view.known:
        view.check_written()
    return view.load_bits() if view.dtype == "i1" else view.array()


def source(operand: Any) -> Any:
    """A vector op's source: a view's array, or the scalar itself."""
    return read(operand) if isinstance(operand, View) else operand


def write(view: View, values: Any) -> None:
    """Store values into a view, rounding to its type."""
    if not view.marked:
        view.mark_written()
    if view.dtype == "i1":
        view.store_bits(np.asarray(values, np.bool_))
    elif 0 not in view.shape:
        view.array()[...] = values


def require_absent(op: Op, *names: str) -> None:
    """Refuse attributes whose meaning is not modelled."""
    for name in names:
        value = op.attrs.get(name)
        if value not in (None, (), [], False):
            raise UnknownOpError(f"{op}: attribute {name} = {value} is not modelled")


def memref(value: Value) -> MemRef:
    """The value's type, which must be a memref."""
    if not isinstance(value.type, MemRef):
        raise UnknownOpError(f"a memref was expected, got {value.type}")
    return value.type


def numpy_dtype(op: Op, value: Value) -> np.dtype:
    """The numpy type of a memref operand."""
    name = memref(value).dtype
    if name not in DTYPES:
        raise UnknownOpError(f"{op}: element type {name}")
    return DTYPES[name]
