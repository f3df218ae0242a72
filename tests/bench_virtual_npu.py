"""Host time of the toolchain and of the virtual NPU (`make bench`); nothing here is time of a
kernel on an NPU. Writes results/bench.json: seconds (median), and instructions a second."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backward import attention_bwd
from forward import attention_fwd
from harness import virtual_npu
from harness.configs import cases, input_rule, select
from harness.reference import reference_bwd, reference_fwd
from harness.results import write_json
from harness.studies.trace import case_call
from tests.submissions.right.small_triton import attention_fwd as small_fwd
from tests.submissions.right.small_triton import small_fwd_kernel

SCALE = input_rule().sm_scale
BENCH = Path(__file__).resolve().parent.parent / "results" / "bench.json"


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, Any]]:
    """What was measured, by benchmark; written at the end."""
    found: dict[str, Any] = {}
    yield found
    if found:
        write_json(BENCH, {"cpus": os.cpu_count(), "rows": found})


@pytest.fixture
def keep(rows: dict[str, Any], benchmark: Any, request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Record this benchmark, which executed that many instructions of the machine."""

    def record(instructions: int) -> None:
        seconds = benchmark.stats.stats.median
        rate = instructions / seconds
        benchmark.extra_info["instructions_per_second"] = round(rate)
        name = request.node.name.removeprefix("test_")
        rows[name] = {
            "seconds": round(seconds, 4), "instructions": instructions, "instructions_per_second": round(rate),
        }  # fmt: skip

    return record


def _instructions(call: Callable[[], object], cores: int) -> int:
    """Instructions that a call executes on the pipes of all cores."""
    with virtual_npu.run("values", hazards=True, cores=cores) as recording:
        call()
    return sum(kernel.report["instructions"] for kernel in recording.kernels)


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
def test_forward_values(benchmark, keep, n, d, hazards) -> None:
    """Values of one head."""
    q, k, v, _ = _inputs(n, d)

    def values() -> torch.Tensor:
        with virtual_npu.run(cores=1, hazards=hazards):
            return attention_fwd(q, k, v, False, SCALE)[0]

    out = benchmark.pedantic(values, rounds=3, warmup_rounds=1)
    assert torch.isfinite(out).all()
    keep(_instructions(lambda: attention_fwd(q, k, v, False, SCALE), cores=1))


@pytest.mark.parametrize("hazards", [False, True])
@pytest.mark.parametrize("d", [64, 256])
def test_backward_values(benchmark, keep, d, hazards) -> None:
    """Values of one head with n=1024."""
    q, k, v, dout = _inputs(1024, d)
    out, lse = reference_fwd(q, k, v, False, SCALE)
    out, lse = out.half(), lse.float()

    def values() -> torch.Tensor:
        with virtual_npu.run(cores=1, hazards=hazards):
            return attention_bwd(dout, q, k, v, out, lse, False, SCALE)[0]

    dq = benchmark.pedantic(values, rounds=3, warmup_rounds=1)
    assert torch.isfinite(dq).all()
    keep(_instructions(lambda: attention_bwd(dout, q, k, v, out, lse, False, SCALE), cores=1))


TIMED = [(case.suite, case.name) for suite in ("forward", "backward") for case in cases(suite)
         if case.kind == "performance" and case.dtype == "fp16"]  # fmt: skip


@pytest.mark.parametrize(("suite", "name"), TIMED)
def test_prediction(benchmark, keep, suite, name) -> None:
    """Predicted time of a whole official case; the tensors are never touched. All twelve
    together should take less than five minutes."""
    (case,) = select(suite, [name])
    call = case_call(suite, case, None)
    reports: list[dict[str, Any]] = []

    def predict() -> float:
        with virtual_npu.run(mode="timing") as recording:
            call()
        reports[:] = [kernel.report for kernel in recording.kernels]
        return recording.ms

    assert benchmark.pedantic(predict, rounds=1) > 0
    keep(sum(report["instructions"] for report in reports))


def test_reference(benchmark) -> None:
    """The fp64 gradients that a check compares with, one head with n=1024."""
    q, k, v, dout = _inputs(1024, 64)
    benchmark.pedantic(lambda: reference_bwd(dout, q, k, v, True, SCALE), rounds=3, warmup_rounds=1)
