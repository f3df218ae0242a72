"""Devices where time is measured: an accelerator that torch drives, timed between events.

What differs between accelerators is one `Accelerator` in `ACCELERATORS`; everything else is
shared. A call is timed at the full official shape in steps that the evaluator asks for, so
that it can interleave the submission's repeats with those of a baseline in another process.
Each repeat first flushes L2 and is checked: some heads, at places that the submission is not
told, hold inputs that change between repeats, and their outputs must be those of the first
repeat on the same inputs, bit for bit. The evaluator compares these with the reference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import cuda, npu
from .configs import input_rule
from .launches import recorded_launches

WARM_UPS, REPEATS = 5, 30  # the contest's
MOST_REPEATS = 120  # where the spread stays large
SPREAD = 0.02  # of the middle half of the times over their median: small enough to stop
Call = Callable[[Mapping[str, torch.Tensor]], Any]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Accelerator:
    """What the shared code needs to know of one kind of accelerator.

    Attributes:
        kind: value of DEVICE and torch's name of the device type.
        present: whether this process could use one; never raises.
        api: imports what is needed and returns the module with Event (enable_timing, record,
            elapsed_time in ms) and synchronize, as torch.npu and torch.cuda have them.
        describe: chip, compiler and versions; see `devices.Device.describe`.
        l2_bytes: size of the last cache before memory.
        peak_flops: dense fp16/bf16 operations a second of the matrix units, None where unknown.
        chosen: DEVICE unset takes this kind when it is present.
        baselines: what is timed beside a submission, see `baselines.baseline`.
        judges: its fp64 is fast and complete enough to compute the references.
    """

    kind: str
    present: Callable[[], bool]
    api: Callable[[], Any]
    describe: Callable[[], dict[str, str]]
    l2_bytes: Callable[[], int]
    peak_flops: Callable[[], float | None]
    chosen: bool
    baselines: tuple[str, ...] = ("vendor", "textbook")
    judges: bool = False


ACCELERATORS = {
    "npu": Accelerator("npu", npu.present, npu.api, npu.describe, npu.l2_bytes, npu.peak_flops, chosen=True),
    # A witness only: the textbook has no tiles for it.
    "cuda": Accelerator(
        "cuda",
        cuda.present,
        cuda.api,
        cuda.describe,
        cuda.l2_bytes,
        cuda.peak_flops,
        chosen=False,
        baselines=("vendor",),
        judges=True,
    ),
}


def spread(times: Sequence[float]) -> float:
    """Distance between the quartiles over the median; infinite for fewer than two times."""
    if len(times) < 2:
        return math.inf
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else math.inf


def enough(times: Mapping[str, Sequence[float]]) -> bool:
    """Whether to stop: the contest's number of repeats and a small spread of each, or the most."""
    fewest = min(len(own) for own in times.values())
    small = all(spread(own) <= SPREAD for own in times.values())
    return fewest >= MOST_REPEATS or (fewest >= REPEATS and small)


class MeasuredDevice:
    """An accelerator in this process."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.kind = accelerator, accelerator.kind
        self.api = accelerator.api()

    def describe(self) -> dict[str, str]:
        """As `devices.Device.describe`."""
        return {"kind": self.kind, **self.accelerator.describe(), "time": "measured"}

    def values(self, call: Call, inputs: Mapping[str, torch.Tensor], cores: int) -> tuple[Any, tuple[str, ...]]:
        """As `devices.Device.values`; the chip has the cores that it has."""
        moved = {name: tensor.to(self.kind) for name, tensor in inputs.items()}
        with recorded_launches() as launches:
            returned = call(moved)
        self.api.synchronize()
        kernels = tuple(sorted(set(launches)))
        for name, tensor in inputs.items():  # so that an overwritten input shows
            tensor.copy_(moved[name].cpu())
        if isinstance(returned, (tuple, list)):
            return tuple(x.cpu() if isinstance(x, torch.Tensor) else x for x in returned), kernels
        return returned, kernels

    def ready(
        self, call: Call, shapes: Shapes, samples: Sequence[Mapping[str, torch.Tensor]], places: Sequence[int]
    ) -> TimedCall:
        """A call with its inputs on the device, warmed up; see `TimedCall`."""
        return TimedCall(self, call, shapes, samples, places)


@dataclass(frozen=True)
class Repeat:
    """One timed repeat: milliseconds, and what was wrong with its outputs ("" for nothing)."""

    ms: float
    fault: str = ""


def _background(name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Random inputs of a timed call, drawn on the device by the contest's rule."""
    rule = input_rule()
    if name == "lse":  # about what such scores give
        return torch.full(shape, math.log(shape[-1]), dtype=dtype, device=kind)
    mean, std = {"dout": (0.0, rule.dout_std), "out": (0.0, 0.1 * rule.std)}.get(name, (rule.mean, rule.std))
    return torch.empty(shape, dtype=torch.float32, device=kind).normal_(mean, std).to(dtype)


class TimedCall:
    """A call at full shape, repeat by repeat.

    Args:
        device: where.
        call: what is timed.
        shapes: shape [z, h, n, ...] and dtype of each input.
        samples: inputs of a few heads, [heads, n, ...] by name, on the CPU; repeats take them
            in turn.
        places: the heads (0 to z h - 1) that they go to.
    """

    def __init__(
        self,
        device: MeasuredDevice,
        call: Call,
        shapes: Shapes,
        samples: Sequence[Mapping[str, torch.Tensor]],
        places: Sequence[int],
    ) -> None:
        self.api, self.call, kind = device.api, call, device.kind
        self.inputs = {name: _background(name, shape, dtype, kind) for name, (shape, dtype) in shapes.items()}
        self.samples = [{name: tensor.to(kind) for name, tensor in sample.items()} for sample in samples]
        self.places = list(places)
        self.first: list[tuple[torch.Tensor, ...] | None] = [None] * len(self.samples)
        self.flush = torch.empty(2 * device.accelerator.l2_bytes() // 4, dtype=torch.float32, device=kind)
        self.done = 0
        for _ in range(WARM_UPS):
            self.repeat()

    def repeat(self) -> Repeat:
        """Time the call once, on the next sample."""
        index, self.done = self.done % len(self.samples), self.done + 1
        sample = self.samples[index]
        for name, planted in sample.items():
            for head, place in zip(planted, self.places, strict=True):
                self._heads(self.inputs[name])[place].copy_(head)
        self.flush.zero_()
        start, end = self.api.Event(enable_timing=True), self.api.Event(enable_timing=True)
        start.record()
        returned = self.call(self.inputs)
        end.record()
        self.api.synchronize()
        ms = float(start.elapsed_time(end))
        changed = [
            name for name, planted in sample.items() if not torch.equal(self._picked(self.inputs[name]), planted)
        ]
        if changed:
            return Repeat(ms, f"input overwritten: {', '.join(changed)}")
        return Repeat(ms, self._compare(index, returned))

    @staticmethod
    def _heads(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, *tensor.shape[2:])

    def _picked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies of the planted heads."""
        heads = self._heads(tensor)
        return torch.stack([heads[place] for place in self.places])

    def _compare(self, index: int, returned: Any) -> str:
        """Keep the sample's outputs of the first repeat; later ones must be the same."""
        outputs = [x for x in returned if isinstance(x, torch.Tensor)] if isinstance(returned, (tuple, list)) else []
        whole = [x for x in outputs if x.shape[:3] == self.inputs["q"].shape[:3]]
        if len(whole) < len(returned if isinstance(returned, (tuple, list)) else [returned]):
            return "returned something else than when checked"
        picked = tuple(self._picked(x) for x in whole)
        before = self.first[index]
        if before is None:
            self.first[index] = picked
            return ""
        same = len(before) == len(picked) and all(torch.equal(a, b) for a, b in zip(before, picked, strict=True))
        return "" if same else "two calls on the same inputs gave different outputs"

    def outputs(self) -> list[list[torch.Tensor]]:
        """For each sample the outputs of its heads, on the CPU."""
        return [[x.cpu() for x in first or ()] for first in self.first]
