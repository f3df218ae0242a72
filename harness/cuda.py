"""A CUDA GPU through torch and upstream Triton: silicon that runs the same kernel sources, so a
second witness for their values. Its times say nothing about an NPU."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

# Dense fp16 operations a second of the tensor cores, by the name that torch gives.
PEAK_FLOPS = {"NVIDIA H200": 989.4e12}  # NVIDIA H200 data sheet, without sparsity


def present() -> bool:
    """Whether torch sees a CUDA GPU."""
    return bool(torch.cuda.is_available())


def api() -> Any:
    """torch.cuda."""
    return torch.cuda


def l2_bytes() -> int:
    """Size of L2."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def peak_flops() -> float | None:
    """Dense fp16 operations a second, for the GPUs of `PEAK_FLOPS`."""
    return PEAK_FLOPS.get(torch.cuda.get_device_name(0))


def describe() -> dict[str, str]:
    """name, compiler and cores (multiprocessors)."""
    return {
        "name": torch.cuda.get_device_name(0),
        "compiler": f"triton {version('triton')}, torch {torch.__version__}",
        "cores": str(torch.cuda.get_device_properties(0).multi_processor_count),
    }
