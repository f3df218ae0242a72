"""The Ascend NPU through torch_npu: what is there, in which versions.

Every interface of torch_npu used here and in `baselines` stands in
fake_npu/signatures.toml with the place in the wheel that declares it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

# The contest's stack.
CONTEST = {
    "chip": "Ascend910B3",
    "Python": "3.11",
    "CANN": "8.5.0",
    "torch_npu": "2.7.1.post4",
    "triton-ascend": "3.2.1",
    "bishengir": "1.1.0",
}
CORES = 20  # of a 910B3, each with one matrix unit of 4096 fp16 multiply-adds a cycle
PEAK_FLOPS = {"Ascend910B3": 294.9e12}
L2_BYTES = 192 << 20  # of a 910B3, where the properties do not say
UNKNOWN = "unknown"


def present() -> bool:
    """Whether torch_npu is installed, loads and sees an NPU."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        return bool(api().is_available())
    except (ImportError, OSError, RuntimeError):  # CANN is not installed, or its environment is not set
        return False


def api() -> Any:
    """torch.npu."""
    import torch_npu  # noqa: F401 (adds torch.npu)

    return torch.npu  # type: ignore[attr-defined]


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return UNKNOWN


def bishengir() -> str:
    """Release of the bishengir-compile on PATH."""
    compiler = shutil.which("bishengir-compile")
    if compiler is None:
        return UNKNOWN
    try:
        run = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    match = re.search(r"bishengir-compile (\d+(?:\.\d+)+)", run.stdout)
    return match[1] if match else UNKNOWN


def _first(*ways: Callable[[], Any]) -> Any:
    """What the first of several calls gives that works; None when none does."""
    for way in ways:
        try:
            return way()
        except Exception:  # each fails in its own way on a machine that lacks it
            continue
    return None


def stack() -> dict[str, str]:
    """Versions by the names of `CONTEST`, UNKNOWN where there is none to be had."""
    import torch_npu

    npu = api()
    return {
        "chip": str(npu.get_device_name(0)),
        "Python": platform.python_version(),
        "CANN": str(_first(lambda: npu.utils.get_cann_version("CANN")) or UNKNOWN),
        "torch_npu": str(getattr(torch_npu, "__version__", UNKNOWN)),
        "triton-ascend": _package("triton-ascend"),
        "bishengir": bishengir(),
    }


def mismatches(found: dict[str, str]) -> list[str]:
    """In words, where a stack is not the contest's."""
    return [
        f"{name} {found.get(name, UNKNOWN)} is not the contest's {wanted}"
        for name, wanted in CONTEST.items()
        if re.match(rf"{re.escape(wanted)}(?![0-9])", found.get(name, UNKNOWN)) is None
    ]


def queue_warning() -> list[str]:
    """In words, where Triton's launches pass by torch_npu's task queue: events, which go through
    it, would then not enclose them."""
    if os.environ.get("TRITON_ENABLE_TASKQUEUE", "true").lower() in ("true", "1"):
        return []
    return ["TRITON_ENABLE_TASKQUEUE is off, so that the times between events are not those of the kernels"]


def core_counts() -> dict[str, int | str]:
    """AI cores by each documented call, in the order in which they are tried; a text where one
    fails."""
    npu = api()

    def of_triton() -> int:
        import triton

        active = triton.runtime.driver.active
        return int(active.utils.get_device_properties(active.get_current_device())["num_aicore"])

    ways: dict[str, Callable[[], int]] = {
        "torch.npu.get_device_properties": lambda: int(npu.get_device_properties(0).cube_core_num),
        "torch.npu.get_device_limit": lambda: int(npu.get_device_limit(0)["cube_core_num"]),
        "triton": of_triton,
    }
    counts: dict[str, int | str] = {}
    for name, way in ways.items():
        try:
            counts[name] = way()
        except Exception as error:  # each fails in its own way on a machine that lacks it
            counts[name] = f"{type(error).__name__}: {error}"
    return counts


def core_count() -> int:
    """AI cores by the first call that answers; a 910B3's where none does."""
    return next((count for count in core_counts().values() if isinstance(count, int)), CORES)


def l2_bytes() -> int:
    """Size of L2."""
    size = _first(lambda: int(api().get_device_properties(0).L2_cache_size))
    return size or L2_BYTES


def peak_flops() -> float | None:
    """fp16 operations a second of all matrix units, for chips whose clock is known."""
    return PEAK_FLOPS.get(str(api().get_device_name(0)))


def describe() -> dict[str, str]:
    """name, compiler, cores, and warning where the stack is not the contest's."""
    found = stack()
    text = {
        "name": found["chip"],
        "compiler": ", ".join(f"{name} {found[name]}" for name in ("triton-ascend", "bishengir", "torch_npu", "CANN")),
        "cores": str(core_count()),
    }
    wrong = mismatches(found) + queue_warning()
    return text | ({"warning": "; ".join(wrong)} if wrong else {})
