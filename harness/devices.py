"""The devices: accelerators, where time is measured (`measured.py`), and the virtual NPU,
where time is predicted. All run the same calls with the same arguments."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import virtual_npu
from .launches import recorded_launches
from .measured import ACCELERATORS, Call, MeasuredDevice, Shapes

KINDS = (*ACCELERATORS, "virtual")
SMALL_ELEMENTS = 1 << 16


class NotTimedError(RuntimeError):
    """A call did something that the device has no time for."""


@dataclass(frozen=True)
class Timing:
    """Time of one call: milliseconds, and where known the cube's ideal share of it (0 to 1), the
    kernels that it launched, and notes on them for the reader."""

    ms: float
    cube_utilisation: float | None = None
    kernels: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


class Device(Protocol):
    """What the worker asks of every device."""

    kind: str

    def describe(self) -> dict[str, str]:
        """kind, name, compiler, time ("predicted" or "measured"), and warning where there is one."""

    def values(self, call: Call, inputs: Mapping[str, torch.Tensor], cores: int) -> tuple[Any, tuple[str, ...]]:
        """Run a call on CPU inputs; returns what it returned, on the CPU, and the kernels that it
        launched, as name(constexpr=value, ...)."""


def choose() -> str:
    """The first accelerator that is there and may be chosen, else "virtual"; the environment
    variable DEVICE overrides.

    Raises:
        ValueError: DEVICE is something else, or an accelerator that is not there.
    """
    wanted = os.environ.get("DEVICE", "")
    if not wanted:
        return next((kind for kind, one in ACCELERATORS.items() if one.chosen and one.present()), "virtual")
    if wanted not in KINDS:
        raise ValueError(f"DEVICE must be one of {', '.join(KINDS)}, got {wanted!r}")
    if wanted != "virtual" and not ACCELERATORS[wanted].present():
        raise ValueError(f"DEVICE is {wanted}, but torch sees no such device")
    return wanted


def open_device(kind: str, release: str) -> VirtualDevice | MeasuredDevice:
    """The device of that kind in this process.

    Args:
        kind: a key of `ACCELERATORS`, or "virtual".
        release: bishengir release of the virtual NPU; a real NPU uses the one of its CANN.

    Raises:
        ValueError: another kind, or an unknown release.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return VirtualDevice(release) if kind == "virtual" else MeasuredDevice(ACCELERATORS[kind])


def _package(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} (not installed)"


class _HostOps(TorchDispatchMode):
    """Charges the torch ops of a timed call: on an NPU each is a kernel of its own, here it
    runs on the host. Views and fresh memory are free; a fill of any size, and any op on few
    elements, costs a launch and its bytes at the bandwidth of HBM, and large fills are not
    carried out. An op on many elements has no predicted time and ends the call.
    """

    FREE = frozenset(
        {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view", "set_"}
        | {"_reshape_alias", "expand", "permute", "transpose", "t", "slice", "select", "as_strided", "detach", "alias"}
        | {"unsqueeze", "squeeze", "unbind", "split", "split_with_sizes", "lift_fresh", "unfold"}
    )
    FILLED = frozenset({"zeros", "ones", "full", "zeros_like", "ones_like", "full_like"} | {"new_zeros", "new_ones"})
    FILLS = frozenset({"zero_", "fill_"})

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[int] = []  # bytes of each op
        self.refused: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in self.FREE:
            return func(*args, **kwargs)
        if name in self.FILLED:
            form = func(*args, **{**kwargs, "device": "meta"})
            self.ops.append(form.numel() * form.element_size())
            large = form.numel() > SMALL_ELEMENTS
            return torch.empty(form.shape, dtype=form.dtype) if large else func(*args, **kwargs)
        if name in self.FILLS:
            self.ops.append(args[0].numel() * args[0].element_size())
            return args[0] if args[0].numel() > SMALL_ELEMENTS else func(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if all(tensor.numel() <= SMALL_ELEMENTS for tensor in tensors):
            result = func(*args, **kwargs)
            tensors += [value for value in (result,) if isinstance(value, torch.Tensor)]
            if all(tensor.numel() <= SMALL_ELEMENTS for tensor in tensors):
                self.ops.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
                return result
        self.refused = (
            f"the timed call runs torch.{name} on more than {SMALL_ELEMENTS} elements: "
            "the virtual NPU predicts the time of kernels and fills only, so do that work in a kernel"
        )
        raise NotTimedError(self.refused)

    def cycles(self) -> float:
        """Predicted cycles of the ops together."""
        from .virtual_npu.hardware import default_constants

        constants = default_constants()
        launch, bandwidth = constants["launch"]["kernel_cycles"], constants["shared"]["hbm_bytes_per_cycle"]
        return float(sum(launch + size / bandwidth for size in self.ops))


class VirtualDevice:
    """The model of a 910B3: the compiled kernels run in Python, time is predicted."""

    kind = "virtual"

    def __init__(self, release: str) -> None:
        if release not in virtual_npu.RELEASES:
            raise ValueError(f"release must be one of {', '.join(virtual_npu.RELEASES)}, got {release!r}")
        self.release = release

    def describe(self) -> dict[str, str]:
        """As `Device.describe`."""
        return {
            "kind": self.kind,
            "name": "virtual Ascend 910B3",
            "compiler": f"{_package('triton-ascend')}, bishengir {self.release}",
            "time": "predicted",
        }

    def values(self, call: Call, inputs: Mapping[str, torch.Tensor], cores: int) -> tuple[Any, tuple[str, ...]]:
        """As `Device.values`, with every hazard an error."""
        device = virtual_npu.run(mode="values", release=self.release, cores=cores, hazards=True)
        with device, recorded_launches() as launches:
            returned = call(inputs)
        return returned, tuple(sorted(set(launches)))

    def time(self, call: Call, shapes: Shapes) -> Timing:
        """Predict the time of a call on inputs of those shapes and dtypes; the tensors' memory
        is never touched."""
        inputs = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        device = virtual_npu.run(mode="timing", release=self.release, cores=virtual_npu.CORES)
        with device as recording, recorded_launches() as launches, _HostOps() as host:
            call(inputs)
        if host.refused:  # also when the submission caught the error
            raise NotTimedError(host.refused)
        if not recording.kernels:
            raise NotTimedError("no Triton kernel was launched: the virtual NPU predicts the time of kernels only")
        if not (math.isfinite(recording.ms) and recording.ms > 0):
            raise NotTimedError(f"the predicted time is {recording.ms} ms")
        share = recording.cycles / (recording.cycles + host.cycles())
        utilisation = recording.cube_utilisation
        cube = None if utilisation is None else utilisation * share
        return Timing(recording.ms / share, cube, tuple(sorted(set(launches))), tuple(recording.notes))
