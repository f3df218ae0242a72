"""Scalar code of a core as Python expressions: integers wrap at their width.

Each entry gets the op and the texts of its operands, and gives the text of its result.
Values at run time: integers as signed Python ints (i1 as 0 or 1), f32 and f16 as numpy
scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import UnknownOpError
from .hivm import Op

Emit = Callable[[Op, list[str]], str]
SCALARS: dict[str, Emit] = {}


def scalar(*names: str) -> Callable[[Emit], Emit]:
    """Register the Python text of an op."""

    def register(function: Emit) -> Emit:
        for name in names:
            SCALARS[name] = function
        return function

    return register


def width(op: Op) -> int:
    """Bits of the op's integer result; index counts as 64."""
    kind = op.results[0].type
    if kind == "index":
        return 64
    if isinstance(kind, str) and kind[0] == "i" and kind[1:].isdigit():
        return int(kind[1:])
    raise UnknownOpError(f"{op}: integer op with result {kind}")


def wrapped(op: Op, text: str) -> str:
    """`text` reduced to the width of the op's result, as a signed number."""
    bits = width(op)
    if op.results[0].type == "index":
        return text
    if bits == 1:
        return f"(({text}) & 1)"
    half = 1 << (bits - 1)
    return f"((({text}) + {half} & {2 * half - 1}) - {half})"


def truncated_division(a: int, b: int) -> int:
    """C's integer division.

    Raises:
        ZeroDivisionError: b is 0.
    """
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def truncated_remainder(a: int, b: int) -> int:
    """C's integer remainder: it has the sign of `a`."""
    return a - b * truncated_division(a, b)


HELPERS: dict[str, Any] = {
    "_div": truncated_division,
    "_rem": truncated_remainder,
    "_f32": np.float32,
    "_f16": np.float16,
    "_fmax": np.maximum,
    "_fmin": np.minimum,
    "_exp": np.exp,
    "_log": np.log,
    "_inf": float("inf"),
    "_nan": float("nan"),
}

_INTEGER = {"arith.addi": "+", "arith.subi": "-", "arith.muli": "*", "arith.shli": "<<", "arith.shrsi": ">>"}
_BITS = {"arith.andi": "&", "arith.ori": "|", "arith.xori": "^"}
_FLOAT = {"arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/"}


@scalar(*_INTEGER)
def _integer(op: Op, x: list[str]) -> str:
    return wrapped(op, f"{x[0]} {_INTEGER[op.name]} {x[1]}")


@scalar(*_BITS)
def _bits(op: Op, x: list[str]) -> str:
    return f"({x[0]} {_BITS[op.name]} {x[1]})"


@scalar(*_FLOAT)
def _float(op: Op, x: list[str]) -> str:
    return f"({x[0]} {_FLOAT[op.name]} {x[1]})"


@scalar("arith.negf")
def _negf(op: Op, x: list[str]) -> str:
    return f"(-{x[0]})"


@scalar("arith.divsi")
def _divsi(op: Op, x: list[str]) -> str:
    return f"_div({x[0]}, {x[1]})"


@scalar("arith.remsi")
def _remsi(op: Op, x: list[str]) -> str:
    return f"_rem({x[0]}, {x[1]})"


@scalar("arith.divui", "arith.remui", "arith.shrui")
def _unsigned(op: Op, x: list[str]) -> str:
    mask = (1 << width(op)) - 1
    sign = {"arith.divui": "//", "arith.remui": "%", "arith.shrui": ">>"}[op.name]
    return wrapped(op, f"({x[0]} & {mask}) {sign} ({x[1]} & {mask})")


@scalar("arith.floordivsi")
def _floordiv(op: Op, x: list[str]) -> str:
    return f"({x[0]} // {x[1]})"


@scalar("arith.ceildivsi")
def _ceildiv(op: Op, x: list[str]) -> str:
    return f"(-(-{x[0]} // {x[1]}))"


@scalar("arith.maxsi")
def _maxsi(op: Op, x: list[str]) -> str:
    return f"({x[0]} if {x[0]} >= {x[1]} else {x[1]})"


@scalar("arith.minsi")
def _minsi(op: Op, x: list[str]) -> str:
    return f"({x[0]} if {x[0]} <= {x[1]} else {x[1]})"


@scalar("arith.maximumf", "arith.maxnumf")
def _maxf(op: Op, x: list[str]) -> str:
    return f"_fmax({x[0]}, {x[1]})"


@scalar("arith.minimumf", "arith.minnumf")
def _minf(op: Op, x: list[str]) -> str:
    return f"_fmin({x[0]}, {x[1]})"


@scalar("math.exp")
def _expf(op: Op, x: list[str]) -> str:
    return f"_exp({x[0]})"


@scalar("math.log")
def _logf(op: Op, x: list[str]) -> str:
    return f"_log({x[0]})"


_SIGNED = {0: "==", 1: "!=", 2: "<", 3: "<=", 4: ">", 5: ">="}
_UNSIGNED = {6: "<", 7: "<=", 8: ">", 9: ">="}


@scalar("arith.cmpi")
def _cmpi(op: Op, x: list[str]) -> str:
    predicate = op.attrs["predicate"]
    if predicate in _SIGNED:
        return f"(1 if {x[0]} {_SIGNED[predicate]} {x[1]} else 0)"
    mask = (1 << 64) - 1
    return f"(1 if ({x[0]} & {mask}) {_UNSIGNED[predicate]} ({x[1]} & {mask}) else 0)"


# Ordered predicates only: false for NaN, as Python compares.
_ORDERED = {1: "==", 2: ">", 3: ">=", 4: "<", 5: "<="}


@scalar("arith.cmpf")
def _cmpf(op: Op, x: list[str]) -> str:
    predicate = op.attrs["predicate"]
    if predicate not in _ORDERED:
        raise UnknownOpError(f"{op}: float predicate {predicate}")
    return f"(1 if {x[0]} {_ORDERED[predicate]} {x[1]} else 0)"


@scalar("arith.select")
def _select(op: Op, x: list[str]) -> str:
    return f"({x[1]} if {x[0]} else {x[2]})"


@scalar("arith.index_cast", "arith.trunci")
def _cast(op: Op, x: list[str]) -> str:
    return x[0] if op.results[0].type in ("index", "i64") else wrapped(op, x[0])


@scalar("arith.extui", "arith.index_castui")
def _extui(op: Op, x: list[str]) -> str:
    source = op.operands[0].type
    if source in ("i1", "index"):
        return x[0]
    assert isinstance(source, str)
    return f"({x[0]} & {(1 << int(source[1:])) - 1})"


@scalar("arith.extsi")
def _extsi(op: Op, x: list[str]) -> str:
    return f"(-{x[0]})" if op.operands[0].type == "i1" else x[0]


@scalar("arith.sitofp", "arith.extf", "arith.truncf")
def _to_float(op: Op, x: list[str]) -> str:
    return f"_{op.results[0].type}({x[0]})"


@scalar("arith.fptosi")
def _to_int(op: Op, x: list[str]) -> str:
    return wrapped(op, f"int({x[0]})")


def constant(op: Op) -> str:
    """Text of an `arith.constant`."""
    value, kind = op.attrs["value"], op.results[0].type
    if kind in ("f32", "f16", "bf16"):
        text = {"inf": "_inf", "-inf": "-_inf", "nan": "_nan"}.get(repr(value), repr(value))
        return f"_{'f32' if kind == 'bf16' else kind}({text})"
    if isinstance(value, int):
        return repr(value)
    raise UnknownOpError(f"{op}: constant {value!r} of type {kind}")
