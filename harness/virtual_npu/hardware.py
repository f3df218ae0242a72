"""The constants of the 910B3, from hardware.toml."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache
def default_constants() -> dict[str, Any]:
    """All of them, by section."""
    return tomllib.loads(Path(__file__).with_name("hardware.toml").read_text())


_MEMORY = default_constants()["memory"]
# Bytes of the memories that the compiler plans buffers in, by their names in HIVM.
LOCAL_BYTES = {"ub": _MEMORY["ub_bytes"], "cbuf": _MEMORY["l1_bytes"], "cc": _MEMORY["l0c_bytes"]}
L0_BYTES = _MEMORY["l0a_bytes"]  # the template's loop over k takes L0A and L0B to be equal
assert _MEMORY["l0b_bytes"] == L0_BYTES
