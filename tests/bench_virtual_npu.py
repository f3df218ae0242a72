"""Host time of the toolchain and of the virtual NPU (`make bench`); nothing here is time of a
kernel on an NPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from backward import attention_bwd
from forward import attention_fwd
from harness import virtual_npu
from harness.configs import input_rule, select
from harness.reference import reference_bwd, reference_fwd
from tests.submissions.right.small_triton import attention_fwd as small_fwd
from tests.submissions.right.small_triton import small_fwd_kernel

SCALE = input_rule().sm_scale


def _inputs(n: int, d: int, heads: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, d, generator=generator).mul_(0.5).half() for _ in range(4)]


@pytest.mark.parametrize("release", virtual_npu.RELEASES)
def test_compile_small_kernel(benchmark, release, tmp_path, monkeypatch) -> None:
    """Triton front end, bishengir and the HIVM reader, nothing cached."""
    q, k, v, _ = _inputs(128, 64)
    fresh = itertools.count()

    def forget() -> None:
        monkeypatch.setenv("VNPU_CACHE", str(tmp_path / str(next(fresh))))
        small_fwd_kernel.cache.clear()

    def compile_and_run() -> None:
        with virtual_npu.run(release=release, cores=1, mode="timing"):
            small_fwd(q, k, v, True, SCALE)

    benchmark.pedantic(compile_and_run, setup=forget, rounds=3)


@pytest.mark.parametrize("hazards", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1024, 64), (1024, 256), (4096, 64)])
def test_forward_values(benchmark, n, d, hazards) -> None:
    """Values of one head."""
    q, k, v, _ = _inputs(n, d)

    def values() -> torch.Tensor:
        with virtual_npu.run(cores=1, hazards=hazards):
            return attention_fwd(q, k, v, False, SCALE)[0]

    out = benchmark.pedantic(values, rounds=3, warmup_rounds=1)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("hazards", [False, True])
@pytest.mark.parametrize("d", [64, 256])
def test_backward_values(benchmark, d, hazards) -> None:
    """Values of one head with n=1024."""
    q, k, v, dout = _inputs(1024, d)
    out, lse = reference_fwd(q, k, v, False, SCALE)
    out, lse = out.half(), lse.float()

    def values() -> torch.Tensor:
        with virtual_npu.run(cores=1, hazards=hazards):
            return attention_bwd(dout, q, k, v, out, lse, False, SCALE)[0]

    dq = benchmark.pedantic(values, rounds=3, warmup_rounds=1)
    assert torch.isfinite(dq).all()


@pytest.mark.parametrize("name", ["P1", "P6"])
def test_forward_prediction(benchmark, name) -> None:
    """Predicted time of an official case; the tensors are never touched."""
    (case,) = select("forward", [name])
    q, k, v = (torch.empty(case.z, case.h, case.n, case.d, dtype=case.torch_dtype) for _ in range(3))

    def predict() -> float:
        with virtual_npu.run(mode="timing") as recording:
            attention_fwd(q, k, v, case.causal, SCALE)
        return recording.ms

    assert benchmark.pedantic(predict, rounds=2, warmup_rounds=1) > 0


def test_reference(benchmark) -> None:
    """The fp64 gradients that a check compares with, one head with n=1024."""
    q, k, v, dout = _inputs(1024, 64)
    benchmark.pedantic(lambda: reference_bwd(dout, q, k, v, True, SCALE), rounds=3, warmup_rounds=1)
