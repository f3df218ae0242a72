"""What a predicted time is made of, and what it refuses."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.devices import NotTimedError, VirtualDevice, open_device
from harness.virtual_npu.hardware import default_constants
from tests.submissions.right.small_triton import attention_fwd

SHAPES = dict.fromkeys(("q", "k", "v"), ((2, 4, 256, 64), torch.float16))


def _call(before=lambda x: None):
    def call(x):
        before(x)
        return attention_fwd(x["q"], x["k"], x["v"], False, 0.5)

    return call


@pytest.fixture(scope="module")
def device() -> VirtualDevice:
    return VirtualDevice("1.1.0")


def _ms(cycles: float) -> float:
    return cycles / default_constants()["chip"]["clock_hz"] * 1e3


def test_views_and_fresh_memory_are_free(device) -> None:
    def views(x) -> None:
        x["q"].transpose(1, 2)[:, 3].unsqueeze(0).expand(5, -1, -1, -1)
        torch.empty(1 << 30)

    assert device.time(_call(views), SHAPES) == device.time(_call(), SHAPES)


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: torch.zeros(1 << 28),
        lambda x: torch.full((1 << 28,), 1.0),
        lambda x: torch.ones_like(torch.empty(1 << 28)),
        lambda x: torch.empty(1 << 28).zero_(),
        lambda x: x["q"].new_zeros(1 << 29),
    ],
)
def test_a_fill_costs_a_launch_and_its_bytes(device, fill) -> None:
    plain, filled = device.time(_call(), SHAPES), device.time(_call(fill), SHAPES)
    constants = default_constants()
    cycles = constants["launch"]["kernel_cycles"] + 2**30 / constants["shared"]["hbm_bytes_per_cycle"]
    assert filled.ms - plain.ms == pytest.approx(_ms(cycles))
    assert filled.cube_utilisation * filled.ms == pytest.approx(plain.cube_utilisation * plain.ms)
    assert filled.kernels == plain.kernels == ("small_fwd_kernel(CAUSAL=False, D=64, BM=32, BN=64)",)


def test_a_small_op_costs_a_launch(device) -> None:
    plain, more = device.time(_call(), SHAPES), device.time(_call(lambda x: torch.arange(100) * 2), SHAPES)
    assert more.ms - plain.ms == pytest.approx(_ms(2 * default_constants()["launch"]["kernel_cycles"]), rel=1e-3)


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (lambda x: x["q"] * 2, "mul"),
        (lambda x: x["q"].sum(), "sum"),
        (lambda x: x["q"].transpose(1, 2).contiguous(), "clone"),
        (lambda x: x["q"].copy_(x["k"]), "copy_"),
        (lambda x: torch.arange(1 << 20), "arange"),
    ],
)
def test_work_outside_of_kernels_is_refused(device, work, name) -> None:
    with pytest.raises(NotTimedError, match=f"the timed call runs torch.{name} on more than 65536 elements"):
        device.time(_call(work), SHAPES)


def test_work_outside_of_kernels_is_refused_also_when_the_error_is_caught(device) -> None:
    def work(x) -> None:
        with contextlib.suppress(NotTimedError):
            x["q"].exp()

    with pytest.raises(NotTimedError, match=r"torch\.exp"):
        device.time(_call(work), SHAPES)


def test_no_kernel_no_time(device) -> None:
    with pytest.raises(NotTimedError, match="no Triton kernel was launched"):
        device.time(lambda x: torch.empty_like(x["q"]), SHAPES)


def test_open_device_refuses() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of npu, .*virtual, got 'tpu'"):
        open_device("tpu", "1.1.0")
    with pytest.raises(ValueError, match=r"release must be one of 1\.1\.0, 1\.2\.0, got '2'"):
        open_device("virtual", "2")


def test_a_machine_with_an_npu_needs_nothing_of_the_virtual_one() -> None:
    """`make setup NPU=1` installs neither xdsl nor the compilers."""
    code = """
import sys
for name in ("xdsl", "ml_dtypes", "ascendnpuir", "matplotlib", "hypothesis"):
    sys.modules[name] = None
import scoring.__main__, scoring.submission, harness.worker, harness.devices, harness.baselines, harness.textbook
import harness.doctor, harness.msprof, forward, backward
"""
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
