"""What each instruction costs, in cycles, from the constants of `hardware.toml`.

Vector ops follow the library templates that the compiler links (AscendNPU-IR,
lib/Template): a row reduction folds the row by halves before the cross-lane instruction, a
broadcast operand is first spread by vbrcb, a select passes its mask's address through the
scalar unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UnknownOpError
from .hardware import default_constants
from .hivm import MemRef, Op
from .memory import DTYPES
from .ops_cube import k_parts

Shape = Sequence[int]
Constants = Mapping[str, Any]


@dataclass(frozen=True)
class VectorCost:
    """`vector` cycles on pipe V; `scalar` cycles that the scalar unit spends between two
    hand-overs with pipe V (0: none)."""

    vector: float
    scalar: float = 0.0


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _count(shape: Shape) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total


def _bytes(dtype: str) -> float:
    return 1 / 8 if dtype == "i1" else DTYPES[dtype].itemsize


class Costs:
    """Cost functions under one set of constants."""

    def __init__(self, constants: Constants | None = None) -> None:
        self.constants = constants if constants is not None else default_constants()
        self.slope: Mapping[str, float] = self.constants["vector"]["slope_cycles"]
        self.barrier: float = self.constants["vector"]["barrier_cycles"]

    def repeats(self, shape: Shape, dtype: str, contiguous: bool = True) -> int:
        """Repeats of 256 bytes that an elementwise op needs."""
        size = _bytes(dtype)
        if contiguous or len(shape) < 2:
            return max(1, int(-(-_count(shape) * size // 256)))
        return max(1, _count(shape[:-1])) * max(1, int(-(-shape[-1] * size // 256)))

    def vector(self, op: Op, shapes: list[Shape | None]) -> VectorCost:
        """Cost of a vector op; `shapes` has one entry for each operand, None for scalars.

        Raises:
            UnknownOpError: no cost is known.
        """
        name = op.name.rsplit(".", 1)[1]
        function = _VECTOR.get(name)
        if function is None:
            raise UnknownOpError(f"{op}: no cost is known")
        return function(self, op, name, shapes)

    def mad(self, m: int, n: int, k: int, itemsize: int) -> float:
        """Cycles of one matrix instruction without its head."""
        cube = self.constants["cube"]
        tiles = _ceil(m, 16) * _ceil(n, 16) * _ceil(k * itemsize, 32)
        factor = cube["mad_fp32_factor"] if itemsize == 4 else 1.0
        return float(tiles * cube["mad_cycles_per_tile"] * factor)

    def mmad_parts(self, m0: int, n0: int, n: int, k: int, itemsize: int) -> tuple[list[dict[str, float]], bool]:
        """For each k part of the macro: MTE1 cycles of A and B, cycles of the mad, whether
        a barrier follows; and whether both halves of L0 are used."""
        cube = self.constants["cube"]
        parts, double = k_parts(m0, n0, k, itemsize)
        rows = []
        for part in parts:
            depth = _ceil(part * itemsize, 32) * 32
            rows.append(
                {
                    "a": m0 * depth / cube["l0a_bytes_per_cycle"],
                    "b": _ceil(n, 16) * 16 * depth / cube["l0b_bytes_per_cycle"],
                    "mad": self.mad(m0, n, part, itemsize),
                    "barrier": float((m0 // 16) * (n // 16) < 10),
                }
            )
        return rows, double

    def fixpipe(self, rows: int, cols: int) -> float:
        """Cycles to drain a tile of the fp32 accumulator."""
        fix = self.constants["fixpipe"]
        if rows == 0 or cols == 0:
            return 0.0
        odd = _ceil(cols, 8)
        while odd % 2 == 0:
            odd //= 2
        per_row = max(fix["row_cycles"], 4 * cols / fix["bytes_per_cycle"]) + fix["odd_cycles"] * (odd - 1)
        return float(fix["head_cycles"] + rows * per_row)

    def rough(self, op: Op) -> float:
        """About how long an op takes, from its static shapes (dynamic sizes count as 1)."""
        shapes = [
            tuple(dim or 1 for dim in operand.type.shape) if isinstance(operand.type, MemRef) else None
            for operand in op.operands
        ]
        name = op.name.rsplit(".", 1)[1]
        if name in _VECTOR:
            cost = self.vector(op, list(shapes))
            return cost.vector + cost.scalar
        path = {"load": "gm_to_ub", "store": "ub_to_gm", "nd2nz": "nd2nz", "fixpipe": "ub_to_gm"}.get(name)
        first = shapes[0] if shapes else None
        if path is None or first is None:
            return 1.0
        return sum(self.transfer(path, 2.0 * _count(first)))

    def transfer(self, path: str, size: float) -> tuple[float, float]:
        """Latency and, apart, the cycles that the bytes take (stretched by contention)."""
        if size <= 0:
            return 0.0, 0.0
        constants = self.constants[path]
        return constants["latency_cycles"], size / constants["bytes_per_cycle"]


VectorFunction = Callable[[Costs, Op, str, list[Shape | None]], VectorCost]
_VECTOR: dict[str, VectorFunction] = {}


def _cost(*names: str) -> Callable[[VectorFunction], VectorFunction]:
    def register(function: VectorFunction) -> VectorFunction:
        for name in names:
            _VECTOR[name] = function
        return function

    return register


def _type(op: Op, position: int) -> MemRef:
    kind = op.operands[position].type
    if not isinstance(kind, MemRef):
        raise UnknownOpError(f"{op}: operand {position} is a {kind}")
    return kind


def _destination(op: Op) -> int:
    parts = op.segments()
    return len(parts[0]) if len(parts) > 1 else 1


def _contiguous(kind: MemRef) -> bool:
    if kind.strides is None:
        return True
    expected: int | None = 1
    for dim, stride in zip(reversed(kind.shape), reversed(kind.strides), strict=True):
        if dim != 1 and stride != expected:
            return False
        expected = None if dim is None or expected is None else expected * dim
    return True


_INT64 = ("i64",)


@_cost("vadd", "vsub", "vmul", "vdiv", "vmax", "vmin", "vand", "vor", "vxor", "vshl", "vshr")
def _elementwise(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    out = _destination(op)
    kind = _type(op, out)
    shape = shapes[out]
    assert shape is not None
    if kind.dtype in _INT64:
        return VectorCost(0.0, costs.constants["scalar"]["element_cycles"] * _count(shape))
    sources = [i for i in range(out) if shapes[i] is not None]
    contiguous = all(_contiguous(_type(op, i)) for i in [*sources, out])
    repeats = costs.repeats(shape, kind.dtype, contiguous)
    cycles = 0.0
    if len(sources) < out:  # a scalar operand
        if name in ("vmul", "vadd", "vmax", "vmin") or (name == "vsub" and shapes[0] is not None):
            return VectorCost(costs.slope["scalar_form"] * repeats)
        cycles += costs.slope["vdup"] + costs.barrier
    for position in sources:
        source = shapes[position]
        assert source is not None
        if list(source) != list(shape):
            cycles += _ceil(_count(source), 8) * costs.slope["vbrcb"] + costs.barrier
            repeats = costs.repeats(shape, kind.dtype, contiguous=False)
    return VectorCost(cycles + costs.slope[name] * repeats)


@_cost("vexp", "vln", "vsqrt", "vrsqrt", "vrec", "vabs", "vrelu", "vnot")
def _unary(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    out = _destination(op)
    kind, shape = _type(op, out), shapes[out]
    assert shape is not None
    repeats = costs.repeats(shape, kind.dtype, _contiguous(kind) and _contiguous(_type(op, 0)))
    factor = costs.slope["fp16_transcendental"] if kind.dtype == "f16" and name in ("vexp", "vln", "vsqrt") else 1.0
    return VectorCost(costs.slope[name] * repeats * factor)


@_cost("vcast")
def _cast(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    out = _destination(op)
    shape = shapes[out]
    assert shape is not None
    source, target = _type(op, 0), _type(op, out)
    if "i64" in (source.dtype, target.dtype) and "i32" not in (source.dtype, target.dtype):
        return VectorCost(0.0, costs.constants["scalar"]["element_cycles"] * _count(shape))
    wider = source.dtype if _bytes(source.dtype) >= _bytes(target.dtype) else target.dtype
    steps = 2 if "i1" in (source.dtype, target.dtype) else 1
    repeats = costs.repeats(shape, wider, _contiguous(source) and _contiguous(target))
    return VectorCost(costs.slope[name] * repeats * steps + (steps - 1) * costs.barrier)


@_cost("vcmp")
def _compare(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    out = _destination(op)
    shape = shapes[out]
    assert shape is not None
    kinds = [op.operands[i].type for i in range(out) if shapes[i] is not None]
    dtype = kinds[0].dtype if isinstance(kinds[0], MemRef) else "f32"
    mode = op.attrs.get("compare_mode", "eq")
    if dtype == "i64" or (dtype == "i32" and mode != "eq"):
        return VectorCost(0.0, costs.constants["scalar"]["element_cycles"] * _count(shape))
    slope = costs.slope["vcmp"] if len(kinds) == 2 else costs.slope["scalar_form"]
    return VectorCost(slope * costs.repeats(shape, dtype))


@_cost("vsel")
def _select(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    out = _destination(op)
    kind, shape = _type(op, out), shapes[out]
    assert shape is not None
    # The address of the mask is stored to UB by the scalar unit, between two flags.
    return VectorCost(
        costs.slope[name] * costs.repeats(shape, kind.dtype) + costs.barrier,
        costs.constants["scalar"]["store_cycles"],
    )


@_cost("vbrc")
def _broadcast(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    shape = shapes[1]
    assert shape is not None
    kind = _type(op, 1)
    repeats = costs.repeats(shape, kind.dtype, _contiguous(kind))
    source = shapes[0]
    if source is None:
        return VectorCost(costs.slope["vdup"] * repeats)
    if len(shape) > 1 and source[-1] == 1 and shape[-1] != 1:
        spread = _ceil(_count(source), 8) * costs.slope["vbrcb"] + costs.barrier
        return VectorCost(spread + costs.slope["vcopy"] * costs.repeats(shape, kind.dtype, contiguous=False))
    return VectorCost(costs.slope["vcopy"] * repeats)


@_cost("vreduce")
def _reduce(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    kind, shape = _type(op, 0), shapes[0]
    assert shape is not None
    axes = op.attrs["reduce_dims"]
    if kind.dtype not in ("f32", "f16"):
        return VectorCost(0.0, costs.constants["scalar"]["element_cycles"] * _count(shape))
    size = DTYPES[kind.dtype].itemsize
    lanes = 256 // size
    combine = costs.slope["vadd"] if op.attrs["arith"] == "sum" else costs.slope["vmax"]
    cross = costs.slope["vcadd"] if op.attrs["arith"] == "sum" else costs.slope["vcmax"]
    if list(axes) == [len(shape) - 1]:
        rows, width, cycles = max(1, _count(shape[:-1])), shape[-1], 0.0
        while width > lanes:  # fold the row by halves until it fits one repeat
            half = 1 << ((width - 1).bit_length() - 1)
            cycles += costs.barrier + combine * rows * _ceil(min(half, width - half) * size, 256)
            width = half
        return VectorCost(cycles + costs.barrier + cross * rows)
    if list(axes) == [0]:
        rows, cols, cycles = shape[0], max(1, _count(shape[1:])), 0.0
        while rows > 1:
            half = rows // 2
            cycles += costs.barrier + combine * costs.repeats((half, cols), kind.dtype)
            rows -= half
        return VectorCost(cycles)
    raise UnknownOpError(f"{op}: no cost is known for a reduction of axes {axes}")


@_cost("vtranspose")
def _transpose(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    shape = shapes[0]
    assert shape is not None
    if len(shape) < 2:
        return VectorCost(costs.slope["vcopy"] * costs.repeats(shape, _type(op, 0).dtype))
    blocks = _count(shape[:-2]) * _ceil(shape[-2], 16) * _ceil(shape[-1], 16)
    return VectorCost(costs.slope["transpose_block"] * blocks)


@_cost("varange")
def _arange(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    shape = shapes[0]
    assert shape is not None
    kind = _type(op, 0)
    # The first repeat by the scalar unit, then doubling by vadds (NPU-IR, Arange1D.cpp).
    first = 256 // DTYPES[kind.dtype].itemsize
    repeats = costs.repeats(shape, kind.dtype)
    return VectorCost(
        costs.slope["scalar_form"] * repeats + costs.barrier * repeats.bit_length(),
        costs.constants["scalar"]["op_cycles"] * 4 * min(first, _count(shape)),
    )


@_cost("copy")
def _copy(costs: Costs, op: Op, name: str, shapes: list[Shape | None]) -> VectorCost:
    shape = shapes[0]
    assert shape is not None
    kind = _type(op, 0)
    return VectorCost(costs.slope["vcopy"] * costs.repeats(shape, kind.dtype, _contiguous(kind)))
