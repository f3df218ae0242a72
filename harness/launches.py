"""Which Triton kernels a block of code launches, on any device."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any


def _describe(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name and constexprs of a launch: what makes one compiled kernel another."""
    given = {name: value for name, value in kwargs.items() if name in function.arg_names}
    try:
        bound = inspect.signature(function.fn).bind_partial(*args, **given)
    except TypeError:
        return str(function.__name__)
    bound.apply_defaults()
    constants = [param.name for param in function.params if param.is_constexpr and param.name in bound.arguments]
    return f"{function.__name__}({', '.join(f'{name}={bound.arguments[name]}' for name in constants)})"


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[str]]:
    """Fills the list with the launches of the block, as name(constexpr=value, ...)."""
    from triton.runtime.jit import JITFunction

    launches: list[str] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(_describe(self, args, kwargs))
        return original(self, *args, **kwargs)

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original
