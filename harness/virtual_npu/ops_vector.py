"""Vector core ops (pipe V) on the unified buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import UnknownOpError
from .hivm import Op
from .memory import DTYPES, View
from .ops import (
    Kernel,
    device_op,
    memref,
    numpy_dtype,
    read,
    require_absent,
    source,
    write,
)


def _target(op: Op) -> int:
    """Position of the (first) destination operand."""
    parts = op.segments()
    return len(parts[0]) if len(parts) > 1 else 1


BINARY: dict[str, Callable[..., Any]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vdiv": np.divide,
    "vmax": np.maximum,
    "vmin": np.minimum,
}


@device_op(*BINARY, pipe="V")
def binary(op: Op) -> Kernel:
    """dst = a op b; a size-1 dimension or a scalar is broadcast; integers wrap."""
    require_absent(op, "transpose")
    function = BINARY[op.name.rsplit(".", 1)[1]]
    target = _target(op)
    dtype = numpy_dtype(op, op.operands[target])
    integer_division = op.name.endswith("vdiv") and dtype.kind == "i"

    def run(*operands: Any) -> None:
        a, b, out = source(operands[0]), source(operands[1]), operands[target]
        if integer_division:
            write(out, np.trunc(np.divide(a, b, dtype=np.float64)).astype(dtype))
            return
        if dtype.kind == "i":
            a, b = np.asarray(a, dtype), np.asarray(b, dtype)
        if not out.marked:
            out.mark_written()
        function(a, b, out=out.array(), casting="unsafe")

    return run


BITWISE: dict[str, Callable[..., Any]] = {"vand": np.bitwise_and, "vor": np.bitwise_or, "vxor": np.bitwise_xor}


@device_op(*BITWISE, pipe="V")
def bitwise(op: Op) -> Kernel:
    """dst = a op b on bits (packed booleans or integers)."""
    require_absent(op, "transpose")
    function = BITWISE[op.name.rsplit(".", 1)[1]]
    target = _target(op)

    def run(*operands: Any) -> None:
        write(operands[target], function(source(operands[0]), source(operands[1])))

    return run


@device_op("vnot", pipe="V")
def vnot(op: Op) -> Kernel:
    """dst = ~src."""
    require_absent(op, "transpose")

    def run(src: View, dst: View, *_scratch: Any) -> None:
        write(dst, np.invert(read(src)))

    return run


@device_op("vshl", "vshr", pipe="V")
def shift(op: Op) -> Kernel:
    """dst = a << b or a >> b (arithmetic)."""
    function = np.left_shift if op.name.endswith("vshl") else np.right_shift
    target = _target(op)
    dtype = numpy_dtype(op, op.operands[target])

    def run(*operands: Any) -> None:
        write(
            operands[target], function(np.asarray(source(operands[0]), dtype), np.asarray(source(operands[1]), dtype))
        )

    return run


def _relu(x: np.ndarray, out: np.ndarray) -> None:
    np.maximum(x, 0, out=out)


def _reciprocal(x: np.ndarray, out: np.ndarray) -> None:
    np.divide(1, x, out=out, casting="unsafe")


def _rsqrt(x: np.ndarray, out: np.ndarray) -> None:
    np.divide(1, np.sqrt(x), out=out, casting="unsafe")


UNARY: dict[str, Callable[..., Any]] = {
    "vexp": np.exp,
    "vln": np.log,
    "vabs": np.abs,
    "vsqrt": np.sqrt,
    "vrelu": _relu,
    "vrec": _reciprocal,
    "vrsqrt": _rsqrt,
}


@device_op(*UNARY, pipe="V")
def unary(op: Op) -> Kernel:
    """dst = f(src)."""
    require_absent(op, "transpose")
    function = UNARY[op.name.rsplit(".", 1)[1]]
    target = _target(op)

    def run(*operands: Any) -> None:
        out = operands[target]
        x = source(operands[0])
        if not out.marked:
            out.mark_written()
        function(x, out=out.array())

    return run


_ROUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rint": np.rint,
    "round": lambda x: np.where(x < 0, np.ceil(x - 0.5), np.floor(x + 0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
}


@device_op("vcast", pipe="V")
def vcast(op: Op) -> Kernel:
    """dst = src in another type. Float to narrower float rounds to nearest even; float to
    integer rounds by `round_mode`; integers wrap or extend."""
    require_absent(op, "transpose", "broadcast")
    mode = op.attrs.get("round_mode", "rint")
    target = _target(op)
    src_name, dst_name = memref(op.operands[0]).dtype, memref(op.operands[target]).dtype
    floats = ("f16", "bf16", "f32")
    narrowing = src_name in floats and dst_name in floats and src_name == "f32" and dst_name != "f32"
    if narrowing and mode not in ("rint", "round_mode_rint"):
        raise UnknownOpError(f"{op}: rounding mode {mode} from {src_name} to {dst_name}")
    to_integer = src_name in floats and dst_name not in floats and dst_name != "i1"
    unsigned = op.attrs.get("cast") == "cast_unsigned"
    if to_integer and mode not in _ROUND:
        raise UnknownOpError(f"{op}: rounding mode {mode}")

    def run(*operands: Any) -> None:
        x, out = source(operands[0]), operands[target]
        if to_integer:
            write(out, _ROUND[mode](x.astype(np.float32)).astype(DTYPES[dst_name]))
        elif dst_name == "i1":
            write(out, x != 0)
        elif src_name == "i1" and not unsigned and dst_name not in floats:
            write(out, x.astype(DTYPES[dst_name]))
        else:
            write(out, x.astype(DTYPES[dst_name]))

    return run


_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@device_op("vcmp", pipe="V")
def vcmp(op: Op) -> Kernel:
    """dst (packed booleans) = a compared with b."""
    require_absent(op, "transpose")
    mode = op.attrs.get("compare_mode", "eq")
    if mode not in _COMPARE:
        raise UnknownOpError(f"{op}: compare mode {mode}")
    function, target = _COMPARE[mode], _target(op)

    def run(*operands: Any) -> None:
        write(operands[target], function(source(operands[0]), source(operands[1])))

    return run


@device_op("vsel", pipe="V")
def vsel(op: Op) -> Kernel:
    """dst = a where condition else b."""
    require_absent(op, "transpose")
    target = _target(op)
    dtype = numpy_dtype(op, op.operands[target])

    def run(*operands: Any) -> None:
        condition, a, b = (source(operand) for operand in operands[:3])
        write(operands[target], np.where(condition, np.asarray(a, dtype), np.asarray(b, dtype)))

    return run


@device_op("vbrc", pipe="V")
def vbrc(op: Op) -> Kernel:
    """dst = src broadcast along `broadcast_dims`; src may be a scalar."""
    target = _target(op)

    def run(*operands: Any) -> None:
        write(operands[target], source(operands[0]))

    return run


_REDUCE: dict[str, Callable[..., Any]] = {
    "sum": np.add.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "prod": np.multiply.reduce,
}


@device_op("vreduce", pipe="V")
def vreduce(op: Op) -> Kernel:
    """dst = src reduced along `reduce_dims`, which stay as size-1 dimensions; sums in the
    type of src."""
    kind = op.attrs.get("arith")
    if kind not in _REDUCE:
        raise UnknownOpError(f"{op}: reduction {kind}")
    function, target = _REDUCE[kind], _target(op)
    axes = tuple(op.attrs["reduce_dims"])

    def run(*operands: Any) -> None:
        write(operands[target], function(read(operands[0]), axis=axes, keepdims=True))

    return run


@device_op("vtranspose", pipe="V")
def vtranspose(op: Op) -> Kernel:
    """dst = src with its dimensions permuted."""
    permutation = tuple(op.attrs["permutation"])
    target = _target(op)

    def run(*operands: Any) -> None:
        write(operands[target], read(operands[0]).transpose(permutation).copy())

    return run


def _varange_access(op: Op) -> tuple[list[int], list[int], list[int]]:
    return [], [0], []


@device_op("varange", pipe="V", access=_varange_access)
def varange(op: Op) -> Kernel:
    """dst[i, j, ...] = offset + i * stride0 + j * stride1 + ..."""
    dtype = numpy_dtype(op, op.operands[0])
    has_offset = op.attrs["operandSegmentSizes"][1] == 1

    def run(dst: View, *numbers: int) -> None:
        offset = numbers[0] if has_offset else 0
        steps = numbers[1:] if has_offset else numbers
        values = np.full(dst.shape, offset, np.int64)
        for axis, step in enumerate(steps):
            shape = [1] * len(dst.shape)
            shape[axis] = -1
            values = values + np.arange(dst.shape[axis]).reshape(shape) * step
        write(dst, values.astype(dtype))

    return run


@device_op("copy", pipe="V")
def copy(op: Op) -> Kernel:
    """dst = src inside the unified buffer."""
    require_absent(op, "pad_mode", "collapse_reassociation")

    def run(src: View, dst: View) -> None:
        write(dst, read(src))

    return run
