"""Makes fresh memory of torch.empty and its kin NaN, so that an element nobody wrote shows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_NAMES = ("empty", "empty_like", "empty_strided")
_METHODS = ("new_empty", "new_empty_strided")
_active = False


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    if not _active or not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.numel() == 0:
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def _wrap(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _fill(function(*args, **kwargs))

    poisoned.poisons = True  # type: ignore[attr-defined]
    return poisoned


def install() -> None:
    """Replace the functions once. They do as before outside of `poisoned_memory`, also for a
    module that imported them by name after this call."""
    for owner, names in ((torch, _NAMES), (torch.Tensor, _METHODS)):
        for name in names:
            function = getattr(owner, name)
            if not hasattr(function, "poisons"):
                setattr(owner, name, _wrap(function))


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, fresh memory is NaN (integers: their largest value)."""
    global _active
    install()
    before = _active
    _active = True
    try:
        yield
    finally:
        _active = before
