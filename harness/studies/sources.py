"""Which sources a survey's result belongs to, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("forward.py", "backward.py")
MACHINE = ("harness/virtual_npu/*.py", "harness/virtual_npu/*.toml")
# Of a predicted time: the compiled program's reader and the time model; and the kernels.
CLOCK = tuple(
    f"harness/virtual_npu/{name}" for name in ("costs.py", "hardware.toml", "hivm.py", "lower.py", "timing.py")
)
TIMES = (*KERNELS, *CLOCK)


def fingerprint(patterns: Iterable[str], *settings: object) -> str:
    """Of the files that match the patterns under the repository's root, and of settings."""
    digest = hashlib.sha256(repr(settings).encode())
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
