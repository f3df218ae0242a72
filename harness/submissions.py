"""Loads the callables that are evaluated."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FUNCTIONS = {"forward": "attention_fwd", "backward": "attention_bwd"}


def load(path: Path, suite: str) -> Callable[..., Any]:
    """The function of a suite in a Python file: `attention_fwd` or `attention_bwd`.

    The file's own folder is importable while it loads and afterwards.

    Raises:
        ValueError: an unknown suite, no such file, or no such function in it.
        Exception: whatever the file raises while it is imported.
    """
    if suite not in FUNCTIONS:
        raise ValueError(f"suite must be one of {', '.join(FUNCTIONS)}, got {suite!r}")
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"{suite} must name a Python file, got {path}, which does not exist")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"submission_{suite}_{path.stem}"  # never the name of a module that exists
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{suite} must name a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    function = getattr(module, FUNCTIONS[suite], None)
    if not callable(function):
        raise ValueError(f"{path.name} must define {FUNCTIONS[suite]}, found no such function")
    return function
