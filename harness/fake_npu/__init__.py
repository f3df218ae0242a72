"""A stand-in for torch_npu on a machine without an NPU, for tests and for `make submission`.

Put this folder on PYTHONPATH and `import torch_npu` finds the fake. It proves that the calls
of this project have the documented form; it proves nothing about the chip.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SIGNATURES = FOLDER / "signatures.toml"
