"""The same bits in every run and on any number of cores, and no hazard under any schedule where a
program steps from a head to the next."""

from __future__ import annotations

import pytest
import torch

from backward import attention_bwd
from forward import attention_fwd
from harness import virtual_npu
from harness.studies.schedules import SCHEDULES
from harness.worker import same_bits

SCALE = 0.5
CORES = (20, 20, 20, 20, 20, 7, 1)  # five runs on the chip's, and two other numbers
PIPELINES = {"attention_fwd_kernel_pipeline", "attention_bwd_kernel_pipeline"}
GENERAL = {
    "attention_fwd_kernel_general",
    "attention_bwd_kernel_delta",
    "attention_bwd_kernel_dkdv",
    "attention_bwd_kernel_dq",
}


def both(shape: tuple[int, int, int], causal: bool, dtype: torch.dtype, **options) -> tuple[list, set[str]]:
    """Outputs of forward and backward of seeded inputs [1, H, N, D], and the kernels that ran."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = ((torch.randn(1, *shape, generator=generator) * 0.5).to(dtype) for _ in range(4))
    with virtual_npu.run("values", **options) as record:
        out, lse = attention_fwd(q, k, v, causal, SCALE)
        grads = attention_bwd(dout, q, k, v, out, lse, causal, SCALE)
    return [out, lse, *grads], {kernel.name for kernel in record.kernels}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "causal", "dtype", "kernels"),
    [
        # Twenty heads are the fewest that twenty cores of the backward's pipeline take.
        ((20, 1024, 64), True, torch.float16, PIPELINES),
        slow((20, 1024, 64), False, torch.float16, PIPELINES),
        slow((20, 1024, 64), False, torch.bfloat16, PIPELINES),
        ((3, 256, 64), True, torch.bfloat16, GENERAL),
        ((3, 320, 64), False, torch.float16, GENERAL),
    ],
)
def test_five_runs_and_any_number_of_cores_give_the_same_bits(shape, causal, dtype, kernels) -> None:
    first: list = []
    for cores in CORES:
        outputs, ran = both(shape, causal, dtype, cores=cores, release="1.1.0")
        assert ran == kernels
        first = first or outputs
        assert all(same_bits(a, b) for a, b in zip(outputs, first, strict=True)), f"{cores} cores"
    assert all(torch.isfinite(x).all() for x in first)


def check_schedules(shape, causal, dtype, release, kernels) -> None:
    first: list = []
    for schedule in SCHEDULES:
        outputs, ran = both(shape, causal, dtype, cores=2, hazards=True, release=release, schedule=schedule)
        assert ran == kernels
        first = first or outputs
        assert all(same_bits(a, b) for a, b in zip(outputs, first, strict=True)), schedule


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, slow(128), slow(256)])
def test_pipelines_of_three_heads_on_two_cores_have_no_hazard(d, causal) -> None:
    """The compiler from 1.2 on takes the general kernels (`forward.get_path`)."""
    check_schedules((3, 1024, d), causal, torch.float16, "1.1.0", PIPELINES)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "d"), [(256, 64), slow(300, 128), slow(1024, 256)])
def test_general_kernels_of_three_heads_on_two_cores_have_no_hazard(n, d, causal, release) -> None:
    if n == 1024 and release == "1.1.0":
        pytest.skip("takes the pipeline")
    check_schedules((3, n, d), causal, torch.float16, release, GENERAL)
