"""Turns a device function into Python: control flow and scalars as plain Python, each
device op as one line that a subclass writes.

The result is a generator function: it yields where its core has to wait for another core.
Interpreting op by op would cost several times more; the text also gives, by line number,
the op in which something went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import UnknownOpError
from .hivm import DYNAMIC, Function, MemRef, Op, Region, Value, affine_expression
from .scalars import SCALARS, constant

AFFINE = ("affine.apply", "affine.min", "affine.max")
IDENTITY = ("hivm.hir.get_block_idx", "hivm.hir.get_sub_block_idx", "hivm.hir.get_block_num")
VIEW_OPS = (
    "hivm.hir.pointer_cast",
    "hivm.hir.bitcast",
    "memref.cast",
    "memref.collapse_shape",
    "memref.expand_shape",
    "memref.reinterpret_cast",
    "memref.subview",
    "memref.view",
    "memref.memory_space_cast",
)
# No effect on values or time: masks are set by each op, addresses of flags are implicit.
SILENT = ("hivm.hir.set_ffts_base_addr", "hivm.hir.set_mask_norm", "hivm.hir.set_ctrl", "annotation.mark")
TRAPS = ("arith.divsi", "arith.remsi", "arith.divui", "arith.remui", "arith.floordivsi", "arith.ceildivsi")


def is_pure(op: Op) -> bool:
    """Whether the op only computes a value."""
    return op.name in SCALARS or op.name in VIEW_OPS or op.name in AFFINE or op.name in IDENTITY


class Lowering:
    """Writes one function. Subclasses say how device ops are written (`device`), and what
    is left out (`wanted`)."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.lines: list[str] = []
        self.line_ops: dict[int, Op] = {}
        self.text: dict[Value, str] = {}
        self.invariant: set[Value] = set()
        self.hoisted: set[Op] = set()
        self.definitions: dict[Value, Op] = {}
        for op in function.walk():
            for result in op.results:
                self.definitions[result] = op

    # What a subclass decides.

    def parameters(self) -> str:
        """Parameters of the Python function."""
        raise NotImplementedError

    def device(self, op: Op, indent: int) -> None:
        """Write a device op."""
        raise NotImplementedError

    def view(self, op: Op) -> str:
        """Text of a memref-producing op."""
        raise NotImplementedError

    def wanted(self, value: Value) -> bool:
        """Whether anything needs this value."""
        return True

    def prologue(self) -> Iterable[str]:
        """Lines at the top of the function."""
        return ()

    def epilogue(self) -> Iterable[str]:
        """Lines before the function returns."""
        return ()

    # The common part.

    def emit(self, indent: int, text: str, op: Op | None = None) -> None:
        self.lines.append("    " * indent + text)
        if op is not None:
            self.line_ops[len(self.lines)] = op

    def ref(self, value: Value) -> str:
        """Text of a use of a value."""
        return self.text.get(value, value.name)

    def generate(self, name: str) -> str:
        """The Python text; `line_ops` then maps its line numbers to ops."""
        self.emit(0, f"def {name}({self.parameters()}):")
        for line in self.prologue():
            self.emit(1, line)
        self._hoist(self.function.body, self._find_invariant())
        self.block(self.function.body, 1)
        for line in self.epilogue():
            self.emit(1, line)
        self.emit(1, "return")
        self.emit(1, "yield")
        return "\n".join(self.lines) + "\n"

    def _find_invariant(self) -> set[Value]:
        invariant = set(self.function.args)
        for op in self.function.walk():
            fixed = op.name == "arith.constant" or (
                is_pure(op) and op.name not in TRAPS and all(operand in invariant for operand in op.operands)
            )
            if fixed:
                invariant.update(op.results)
        return invariant

    def _hoist(self, region: Region, invariant: set[Value]) -> None:
        """Compute once, at the top, what depends on nothing that changes."""
        for op in region.ops:
            if op.name == "arith.constant":
                self.text[op.results[0]] = constant(op) if isinstance(op.results[0].type, str) else "None"
                self.hoisted.add(op)
            elif op.results and is_pure(op) and op.name not in TRAPS and all(r in invariant for r in op.results):
                if all(operand in invariant for operand in op.operands) and self.wanted(op.results[0]):
                    self.emit(1, f"{op.results[0].name} = {self.expression(op)}", op)
                self.hoisted.add(op)
            for inner in op.regions:
                self._hoist(inner, invariant)

    def expression(self, op: Op) -> str:
        """Text of a pure op's result."""
        operands = [self.ref(operand) for operand in op.operands]
        if op.name in AFFINE:
            results = affine_expression(op.attrs["map"], operands)
            if op.name == "affine.apply":
                return f"({results[0]})"
            return f"{op.name[-3:]}({', '.join(results)}, {results[0]})"
        if op.name == "hivm.hir.get_block_idx":
            return "block"
        if op.name == "hivm.hir.get_sub_block_idx":
            return "sub"
        if op.name == "hivm.hir.get_block_num":
            return "blocks"
        if op.name in VIEW_OPS:
            return self.view(op)
        return SCALARS[op.name](op, operands)

    def block(self, region: Region, indent: int) -> None:
        """Write the ops of a region."""
        for op in region.ops:
            if op in self.hoisted or op.name in SILENT:
                continue
            if op.name == "scf.for":
                self._for(op, indent)
            elif op.name == "scf.if":
                self._if(op, indent)
            elif op.name == "scf.while":
                self._while(op, indent)
            elif op.name in ("scf.yield", "scf.condition", "func.return"):
                continue  # written by the op around it
            elif is_pure(op):
                if self.wanted(op.results[0]):
                    self.emit(indent, f"{op.results[0].name} = {self.expression(op)}", op)
            else:
                self.device(op, indent)

    def _assign(self, indent: int, targets: list[Value], values: list[Value], op: Op) -> None:
        pairs = [(t.name, self.ref(v)) for t, v in zip(targets, values, strict=True) if self.wanted(t)]
        pairs = [(t, v) for t, v in pairs if t != v]
        if pairs:
            left, right = ", ".join(t for t, _ in pairs), ", ".join(v for _, v in pairs)
            self.emit(indent, f"{left} = {right}", op)

    def _for(self, op: Op, indent: int) -> None:
        lower, upper, step = (self.ref(operand) for operand in op.operands[:3])
        body = op.regions[0]
        carried = body.args[1:]
        self._assign(indent, carried, op.operands[3:], op)
        self.emit(indent, f"for {body.args[0].name} in range({lower}, {upper}, {step}):", op)
        self.loop_body(op, body, indent + 1)
        self._assign(indent + 1, carried, body.ops[-1].operands, op)
        self.emit(indent + 1, "pass")
        self._assign(indent, op.results, carried, op)

    def loop_body(self, op: Op, body: Region, indent: int) -> None:
        """Write the body of a loop; a subclass may wrap it."""
        self.block(body, indent)

    def _if(self, op: Op, indent: int) -> None:
        self.emit(indent, f"if {self.ref(op.operands[0])}:", op)
        self.branch(op, op.regions[0], indent + 1)
        if len(op.regions) > 1 and op.regions[1].ops:
            self.emit(indent, "else:")
            self.branch(op, op.regions[1], indent + 1)

    def branch(self, op: Op, region: Region, indent: int) -> None:
        """Write one branch of an `scf.if`."""
        self.block(region, indent)
        if region.ops and region.ops[-1].name == "scf.yield":
            self._assign(indent, op.results, region.ops[-1].operands, op)
        self.emit(indent, "pass")

    def _while(self, op: Op, indent: int) -> None:
        before, after = op.regions
        self._assign(indent, before.args, op.operands, op)
        self.emit(indent, "while True:", op)
        self.loop_body(op, before, indent + 1)
        condition = before.ops[-1]
        if condition.name != "scf.condition":
            raise UnknownOpError(f"{op}: a while loop that ends in {condition.name}")
        self._assign(indent + 1, op.results, condition.operands[1:], op)
        self.emit(indent + 1, f"if not {self.ref(condition.operands[0])}:", op)
        self.emit(indent + 2, "break")
        self._assign(indent + 1, after.args, condition.operands[1:], op)
        self.block(after, indent + 1)
        self._assign(indent + 1, before.args, after.ops[-1].operands, op)


def mixed(static: Iterable[int], dynamic: list[str]) -> list[str]:
    """Static numbers with the dynamic ones filled in, as texts."""
    rest = iter(dynamic)
    return [next(rest) if number == DYNAMIC else str(number) for number in static]


def as_tuple(items: list[str]) -> str:
    """Text of a Python tuple."""
    return "(" + "".join(f"{item}, " for item in items) + ")"


def static_shape(op: Op, value: Value) -> tuple[int, ...]:
    """The shape of a memref that must be static."""
    assert isinstance(value.type, MemRef)
    if None in value.type.shape:
        raise UnknownOpError(f"{op}: dynamic shape {value.type.shape}")
    return tuple(dim for dim in value.type.shape if dim is not None)
