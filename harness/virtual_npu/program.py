"""A compiled kernel: its functions by core, ready to run in each mode."""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache

from .errors import UnknownOpError
from .hivm import Function, Module, read
from .values import Code, compile_values


class Program:
    """A kernel as `bishengir-compile` left it.

    Attributes:
        name: the kernel's name.
        text: the HIVM module.
        key: hash of the text, for caches.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def module(self) -> Module:
        return read(self.text)

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The device functions: AIC (cube core) and AIV (vector core), one or both."""
        found: dict[str, Function] = {}
        for function in self.module.functions:
            if function.core not in ("AIC", "AIV"):
                raise UnknownOpError(f"{self.name}: function {function.name} has core type {function.core}")
            if function.core in found:
                raise UnknownOpError(f"{self.name}: more than one {function.core} function")
            found[function.core] = function
        if not found:
            raise UnknownOpError(f"{self.name}: no device function in the compiled module")
        return found

    @property
    def vector_only(self) -> bool:
        """A kernel without cube work runs one program on each vector core."""
        return set(self.functions) == {"AIV"}

    @cached_property
    def values(self) -> dict[str, Code]:
        """Values-mode code by core."""
        return {core: compile_values(function) for core, function in self.functions.items()}

    @cached_property
    def hazards(self) -> dict[str, Code]:
        """Values-mode code that also tracks the order of accesses, by core."""
        return {core: compile_values(function, hazards=True) for core, function in self.functions.items()}

    @property
    def workspace_bytes(self) -> int:
        """Global-memory workspace of one block, in bytes."""
        return self.module.host.get("infer_workspace_shape_function", 0)


@lru_cache(maxsize=64)
def load_program(name: str, text: str) -> Program:
    """The program of a compiled kernel (parsed when first run)."""
    return Program(name, text)
