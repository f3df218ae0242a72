"""Reads the HIVM module that the compiler printed into a small in-memory form.

xdsl parses the generic MLIR text. Two things are kept out of its parser because it does
not know them: affine maps (semi-affine expressions; evaluated here) and locations (each
op's source line is taken from its text line).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from xdsl.context import Context
from xdsl.dialects import arith, builtin, cf, func, memref, scf
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.parser import Parser

from .errors import UnknownOpError

DYNAMIC = -(2**63)  # MLIR's mark for a size, stride or offset given by an operand

_LOCATION = re.compile(r' loc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\)')
_OP_START = re.compile(r'^\s*(?:%[\w:]+(?:, %[\w:]+)* = )?"[\w.]+"\(')
_LIBRARY = ("standard.py", "math.py", "core.py", "semantic.py", "kernel.ttadapter.mlir")
_TRAILING = re.compile(r" loc\((.*)\)\s*$")


@dataclass(frozen=True)
class MemRef:
    """Type of a memref: `shape` and `strides` in elements, None where dynamic; `strides`
    is None for the row-major layout; `space` is gm, ub, cbuf (L1) or cc (L0C)."""

    shape: tuple[int | None, ...]
    dtype: str
    space: str
    strides: tuple[int | None, ...] | None = None


@dataclass(eq=False)
class Value:
    """An SSA value: a number that is unique in the module, and its type (a MemRef or the
    MLIR name of a scalar type)."""

    number: int
    type: MemRef | str

    @property
    def name(self) -> str:
        return f"v{self.number}"


@dataclass(eq=False)
class Region:
    args: list[Value]
    ops: list[Op]


@dataclass(eq=False)
class Op:
    """One operation. `place` is "file.py:line" of the Python kernel."""

    name: str
    operands: list[Value]
    results: list[Value]
    attrs: dict[str, Any]
    regions: list[Region]
    place: str
    number: int = 0

    def segments(self) -> list[list[Value]]:
        """Operands split by `operandSegmentSizes` (all in one list where it is absent)."""
        sizes = self.attrs.get("operandSegmentSizes")
        if sizes is None:
            return [self.operands]
        parts, at = [], 0
        for size in sizes:
            parts.append(self.operands[at : at + size])
            at += size
        return parts

    def __str__(self) -> str:
        return f"{self.name} at {self.place}"

    def walk(self) -> Iterator[Op]:
        yield self
        for region in self.regions:
            for op in region.ops:
                yield from op.walk()


@dataclass(eq=False)
class Function:
    """A function of the device program. `core` is AIC, AIV or MIX; `mix` says that it is
    one half of a kernel that runs on cube and vector cores."""

    name: str
    core: str
    mix: bool
    args: list[Value]
    arg_kinds: list[str]
    body: Region

    def walk(self) -> Iterator[Op]:
        for op in self.body.ops:
            yield from op.walk()


@dataclass(eq=False)
class Module:
    functions: list[Function]
    host: dict[str, int] = field(default_factory=dict)


def _scalar_constant(attribute: Attribute) -> Any:
    if isinstance(attribute, builtin.IntegerAttr):
        value = attribute.value.data
        if isinstance(attribute.type, builtin.IntegerType) and attribute.type.width.data == 1:
            return value & 1
        return value
    if isinstance(attribute, builtin.FloatAttr):
        return float(attribute.value.data)
    raise UnknownOpError(f"constant {attribute}")


def _plain(attribute: Attribute) -> Any:
    """An attribute as a Python value; enums of unknown dialects by their name."""
    if isinstance(attribute, builtin.IntegerAttr | builtin.FloatAttr):
        return _scalar_constant(attribute)
    if isinstance(attribute, builtin.StringAttr | builtin.IntAttr):
        return attribute.data
    if isinstance(attribute, builtin.UnitAttr):
        return True
    if isinstance(attribute, builtin.DenseArrayBase):
        return tuple(attribute.get_values())
    if isinstance(attribute, builtin.ArrayAttr):
        return [_plain(item) for item in attribute.data]
    if isinstance(attribute, builtin.DenseIntOrFPElementsAttr):
        return [_plain(item) if isinstance(item, Attribute) else item for item in attribute.get_values()]
    value = getattr(attribute, "value", None)
    if isinstance(value, builtin.StringAttr):
        return value.data
    return str(attribute)


def _scalar_name(attribute: Attribute) -> str:
    if isinstance(attribute, builtin.IntegerType):
        return f"i{attribute.width.data}"
    if isinstance(attribute, builtin.IndexType):
        return "index"
    return str(attribute)


def _type(attribute: Attribute) -> MemRef | str:
    if not isinstance(attribute, builtin.MemRefType):
        return _scalar_name(attribute)
    shape = tuple(None if size < 0 else size for size in attribute.get_shape())
    layout = attribute.layout
    strides: tuple[int | None, ...] | None = None
    if isinstance(layout, builtin.StridedLayoutAttr):
        strides = tuple(
            s.data if isinstance(s, builtin.IntAttr) and s.data != DYNAMIC else None for s in layout.strides.data
        )
    elif not isinstance(layout, builtin.NoneAttr):
        raise UnknownOpError(f"memref layout {layout}")
    space = _plain(attribute.memory_space) if not isinstance(attribute.memory_space, builtin.NoneAttr) else "gm"
    return MemRef(shape, _scalar_name(attribute.element_type), str(space), strides)


class _Locations:
    """Source places of the ops, in the order in which xdsl walks them."""

    def __init__(self, lines: list[str]) -> None:
        self.aliases: dict[str, str] = {}
        for line in lines:
            match = re.match(r"(#loc\d*) = loc\((.*)\)\s*$", line)
            if match:
                self.aliases[match[1]] = match[2]
        self.places: list[str] = []
        open_ops: list[int] = []
        for line in lines:
            if _OP_START.match(line):
                self.places.append("")
                if line.rstrip().endswith("({"):
                    open_ops.append(len(self.places) - 1)
                    continue
                self.places[-1] = self._place(line)
            elif re.match(r"\s*\}\)", line) and open_ops:
                index = open_ops.pop()
                self.places[index] = self._place(line)
            elif re.match(r"\s*\}, \{", line):
                continue

    def _place(self, line: str) -> str:
        match = _TRAILING.search(line)
        return self._resolve(match[1]) if match else "unknown"

    def _resolve(self, text: str) -> str:
        """The innermost place in a file of the user's: a helper inlined into a kernel has a
        call-site location, its own line first; Triton's library lines are passed over."""
        places = self._places_in(text, 0)
        return next(
            (place for place in places if place.split(":")[0] not in _LIBRARY), places[0] if places else "unknown"
        )

    def _places_in(self, text: str, depth: int) -> list[str]:
        found: list[str] = []
        if depth > 20:
            return found
        for match in re.finditer(r'"([^"]+)":(\d+):\d+|(#loc\d*)', text):
            if match[3]:
                found += self._places_in(self.aliases.get(match[3], ""), depth + 1)
            else:
                found.append(f"{match[1].rsplit('/', 1)[-1]}:{match[2]}")
        return found


class _Reader:
    def __init__(self, places: list[str]) -> None:
        self.places = places
        self.values: dict[SSAValue, Value] = {}
        self.count = 0

    def value(self, ssa: SSAValue) -> Value:
        found = self.values.get(ssa)
        if found is None:
            found = self.values[ssa] = Value(len(self.values), _type(ssa.type))
        return found

    def op(self, source: Operation) -> Op:
        number = self.count
        self.count += 1
        name = source.op_name.data if isinstance(source, builtin.UnregisteredOp) else source.name
        attrs = {key: _plain(value) for key, value in {**source.attributes, **source.properties}.items()}
        attrs.pop("op_name__", None)
        operands = [self.value(operand) for operand in source.operands]
        op = Op(
            name,
            operands,
            [self.value(result) for result in source.results],
            attrs,
            [],
            self.places[number] if number < len(self.places) else "unknown",
            number,
        )
        for region in source.regions:
            if len(region.blocks) > 1:
                raise UnknownOpError(f"{op}: a region with {len(region.blocks)} blocks")
            for block in region.blocks:
                op.regions.append(self.region(block))
        return op

    def region(self, block: Block) -> Region:
        args = [self.value(arg) for arg in block.args]
        return Region(args, [self.op(op) for op in block.ops])


def _affine_text(text: str) -> str:
    return text.replace('"', "'")


def read(text: str) -> Module:
    """Parse a module as `bishengir-compile` printed it before its last lowering.

    Raises:
        UnknownOpError: something in the module that this reader does not know.
    """
    lines = text.split("\n")
    maps: dict[str, str] = {}
    kept = []
    for line in lines:
        match = re.match(r"(#map\d*) = affine_(?:map|set)<(.*)>\s*(?:loc.*)?$", line)
        if match:
            maps[match[1]] = match[2]
        elif not line.startswith("#loc"):
            kept.append(_LOCATION.sub("", line))
    body = re.sub(r"= (#map\d*)\b", lambda m: f'= "{_affine_text(maps[m[1]])}"', "\n".join(kept))
    context = Context(allow_unregistered=True)
    for dialect in (builtin.Builtin, func.Func, scf.Scf, arith.Arith, memref.MemRef, cf.Cf):
        context.load_dialect(dialect)
    parsed = Parser(context, body).parse_module()
    reader = _Reader(_Locations(lines).places)
    top = reader.op(parsed)
    module = Module([])
    for op in top.regions[0].ops:
        if op.name != "func.func" or not op.regions:
            continue
        name = op.attrs["sym_name"]
        kind = op.attrs.get("hacc.function_kind")
        region = op.regions[0]
        if kind == "HOST":
            constants = [inner for inner in region.ops if inner.name == "arith.constant"]
            returned = region.ops[-1].operands
            if len(constants) >= 1 and returned:
                by_value = {c.results[0]: c.attrs["value"] for c in constants}
                if returned[0] in by_value:
                    module.host[op.attrs.get("hacc.host_func_type", name)] = by_value[returned[0]]
            continue
        kinds = [
            attrs.get("hacc.arg_type", "kernel") if isinstance(attrs, dict) else "kernel"
            for attrs in _argument_attributes(op, parsed)
        ]
        module.functions.append(
            Function(
                name,
                str(op.attrs.get("hivm.func_core_type", "MIX")),
                "hivm.part_of_mix" in op.attrs,
                region.args,
                kinds or ["kernel"] * len(region.args),
                region,
            )
        )
    return module


def _argument_attributes(op: Op, parsed: builtin.ModuleOp) -> list[dict[str, Any]]:
    for source in parsed.body.block.ops:
        if isinstance(source, func.FuncOp) and source.sym_name.data == op.attrs["sym_name"]:
            if source.arg_attrs is None:
                return []
            return [
                {key: _plain(value) for key, value in item.data.items()}
                for item in source.arg_attrs.data
                if isinstance(item, builtin.DictionaryAttr)
            ]
    return []


def affine_expression(text: str, operands: list[str]) -> list[str]:
    """The results of an affine map as Python expressions over the given operand names.

    `text` is MLIR's inside of `affine_map<...>`, for example `(d0)[s0] -> (d0 floordiv 2)`.
    """
    match = re.match(r"\(([^)]*)\)\s*(?:\[([^\]]*)\])?\s*->\s*\((.*)\)\s*$", text)
    if match is None:
        raise UnknownOpError(f"affine map {text}")
    names = [name.strip() for part in (match[1], match[2] or "") for name in part.split(",") if name.strip()]
    if len(names) != len(operands):
        raise UnknownOpError(f"affine map {text} with {len(operands)} operands")
    renamed = dict(zip(names, operands, strict=True))
    body = match[3].replace("floordiv", "//").replace("ceildiv", "@").replace(" mod ", " % ")
    results, depth, at = [], 0, 0
    for index, char in enumerate(body + ","):
        if char == "," and depth == 0:
            results.append(body[at:index])
            at = index + 1
        depth += (char == "(") - (char == ")")
    return [_ceildiv(re.sub(r"\b[ds]\d+\b", lambda m: renamed[m[0]], result.strip())) for result in results]


def _ceildiv(expression: str) -> str:
    """`a @ b` (ceildiv) as `-(-(a) // b)`; `@` binds like `*` and `//` in Python, so the
    left operand is the run of factors before it."""
    while "@" in expression:
        at = expression.index("@")
        start, depth = at - 1, 0
        while start >= 0:
            char = expression[start]
            depth += (char == ")") - (char == "(")
            if depth < 0 or (depth == 0 and char in "+-" and expression[:start].rstrip()[-1:] not in "*/%@("):
                break
            start -= 1
        left = expression[start + 1 : at].strip()
        rest = expression[at + 1 :].lstrip()
        end, depth = 0, 0
        while end < len(rest):
            char = rest[end]
            if depth == 0 and (char in " )*+-/%@" and end > 0):
                break
            depth += (char == "(") - (char == ")")
            end += 1
        expression = f"{expression[: start + 1]} (-(-({left}) // {rest[:end]})){rest[end:]}"
    return expression
