"""A compiled kernel: its functions by core, ready to run in each mode."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cached_property, lru_cache

from .errors import DroppedSyncError, UnknownOpError
from .hivm import Function, Module, read
from .split import unsplit
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

    def check_user_syncs(self) -> None:
        """Every `sync_block_set` and `sync_block_wait` of the kernel must have arrived.

        Raises:
            DroppedSyncError: the compiler left some out (bishengir 1.2.0 does so in a plain
                `for` loop that it decides to pipeline by itself).
        """
        asked = Counter(
            tuple(line.split()[2:5]) for line in self.text.splitlines()[:200] if line.startswith("// user sync_block_")
        )
        if not asked:
            return
        arrived: Counter[tuple[str, ...]] = Counter()
        for function in self.functions.values():
            for op in function.walk():
                if op.name.startswith("hivm.hir.sync_block_") and "static_flag_id" in op.attrs:
                    key = (op.name.rsplit(".", 1)[1], str(op.attrs["tcore_type"]), str(op.attrs["static_flag_id"]))
                    arrived[key] += 1
        missing = [
            f"{name} on the {core.lower()} side, id {flag} ({arrived[name, core, flag]} of {number} arrived)"
            for (name, core, flag), number in sorted(asked.items())
            if arrived[name, core, flag] < number
        ]
        if missing:
            raise DroppedSyncError(
                f"{self.name}: the compiler dropped synchronisations that the kernel asks for: {'; '.join(missing)}. "
                "bishengir 1.2.0 does this in a plain `for` loop with cube and vector work, which it pipelines by "
                "itself. Put the loop body under one `if` that holds both kinds of work, or write the loop as `while`."
            )

    @property
    def vector_only(self) -> bool:
        """A kernel without cube work runs one program on each vector core."""
        return set(self.functions) == {"AIV"}

    @cached_property
    def lost_time(self) -> list[str]:
        """What both vector cores of a kernel with cube work do twice, line by line."""
        if self.vector_only or "AIV" not in self.functions:
            return []
        return list(dict.fromkeys(str(store) for store in unsplit(self.functions["AIV"])))

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
    """The program of a compiled kernel.

    Raises:
        DroppedSyncError: a synchronisation of the kernel is missing in it.
    """
    program = Program(name, text)
    program.check_user_syncs()
    return program
