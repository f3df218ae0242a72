"""Measured time, on an accelerator made of CPU tensors and a clock of its own."""

from __future__ import annotations

import math

import pytest
import torch

from harness import measured
from harness.measured import Accelerator, MeasuredDevice, enough, spread

SHAPES = dict.fromkeys(("q", "k", "v"), ((2, 3, 64, 16), torch.float16))
PLACES = [4, 1]


class Clock:
    """Stands for torch.npu: events read a counter that the calls advance."""

    def __init__(self) -> None:
        self.ms, self.synchronized = 0.0, True
        clock = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                clock.synchronized = False
                self.at = clock.ms

            def elapsed_time(self, end: Event) -> float:
                assert clock.synchronized, "elapsed_time before synchronize"
                return end.at - self.at

        self.Event = Event

    def synchronize(self) -> None:
        self.synchronized = True


@pytest.fixture
def device() -> MeasuredDevice:
    clock = Clock()
    describe = {"name": "clock", "compiler": "none"}
    return MeasuredDevice(
        Accelerator("cpu", lambda: True, lambda: clock, lambda: describe, lambda: 4096, lambda: None, chosen=False)
    )


def _call(device: MeasuredDevice, times=(1.0,)):
    """A right call that takes these times in turn."""
    runs = []

    def call(x):
        device.api.ms += times[len(runs) % len(times)]
        runs.append({name: tensor.data_ptr() for name, tensor in x.items()})
        return x["q"] * 2, x["k"].float().sum(-1)

    return call, runs


def _ready(device: MeasuredDevice, call) -> measured.TimedCall:
    generator = torch.Generator().manual_seed(1)
    samples = [{name: torch.randn(2, 64, 16, generator=generator).half() for name in SHAPES} for _ in range(2)]
    return device.ready(call, SHAPES, samples, PLACES)


def test_a_repeat_is_the_time_between_events_after_five_warm_ups(device) -> None:
    call, runs = _call(device, [9.0] * 5 + [1.0, 2.0, 4.0])
    timed = _ready(device, call)
    assert len(runs) == measured.WARM_UPS == 5
    assert [timed.repeat().ms for _ in range(3)] == [1.0, 2.0, 4.0]
    assert all(run == runs[0] for run in runs), "the same tensors every time"


def test_the_outputs_of_the_planted_heads_come_back(device) -> None:
    timed = _ready(device, _call(device)[0])
    for sample, (doubled, total) in zip(timed.samples, timed.outputs(), strict=True):
        assert torch.equal(doubled, sample["q"] * 2)
        assert torch.equal(total, sample["k"].float().sum(-1))


def test_l2_is_flushed_outside_of_the_timed_part(device) -> None:
    timed = _ready(device, _call(device)[0])
    assert timed.flush.numel() * 4 == 2 * 4096
    timed.flush.fill_(1)
    timed.repeat()
    assert not timed.flush.any()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, run: (x["q"] * 2 + run * 1e-3, x["k"].sum(-1)), "two calls on the same inputs gave different"),
        (lambda x, run: (x["q"].mul_(2), x["k"].sum(-1)), "input overwritten: q"),
        (lambda x, run: (x["q"] * 2,) if run > 6 else (x["q"] * 2, x["k"].sum(-1)), "gave different outputs"),
        (lambda x, run: None, "returned something else than when checked"),
        (lambda x, run: (x["q"] * 2, 3), "returned something else than when checked"),
    ],
)
def test_each_timed_output_is_checked(device, spoil, message) -> None:
    """Only the last of several timed outputs used to be looked at in the harnesses that this
    one learned from."""
    runs = []

    def call(x):
        runs.append(1)
        device.api.ms += 1
        return spoil(x, len(runs))

    timed = _ready(device, call)
    faults = [timed.repeat().fault for _ in range(4)]
    assert any(message in fault for fault in faults), faults


def test_an_output_kept_from_the_last_call_shows(device) -> None:
    kept = []

    def call(x):
        device.api.ms += 1
        kept.append((x["q"] * 2, x["k"].float().sum(-1)))
        return kept[-2 if len(kept) == 7 else -1]

    timed = _ready(device, call)
    assert [bool(timed.repeat().fault) for _ in range(3)] == [False, True, False]


def test_spread_and_when_to_stop() -> None:
    assert spread([1.0]) == math.inf
    assert spread([1.0, 1.0, 1.0]) == 0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    steady, wild = [1.0] * 30, [1.0, 2.0] * 15
    assert not enough({"own": steady[:29]})
    assert enough({"own": steady})
    assert not enough({"own": steady, "vendor": wild})
    assert enough({"own": steady * 4, "vendor": wild * 4})


def test_values_bring_back_changed_inputs(device) -> None:
    inputs = {"q": torch.ones(2, 2)}
    returned, kernels = device.values(lambda x: (x["q"].mul_(3), 7), inputs, 1)
    assert kernels == ()
    assert torch.equal(returned[0], torch.full((2, 2), 3.0))
    assert returned[1] == 7
    assert torch.equal(inputs["q"], torch.full((2, 2), 3.0))


def test_describe(device) -> None:
    assert device.describe() == {"kind": "cpu", "name": "clock", "compiler": "none", "time": "measured"}
