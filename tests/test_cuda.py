"""The CUDA device: what can be tested without a GPU, and the small cases where there is one."""

from __future__ import annotations

import pytest
import torch

from harness import devices
from harness.configs import select
from harness.evaluator import Settings, chunks, judges
from harness.results import CaseResult, Status
from harness.studies import cuda

GPU = torch.cuda.is_available()


@pytest.mark.skipif(GPU, reason="there is a CUDA GPU")
def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE", "cuda")
    with pytest.raises(ValueError, match="DEVICE is cuda, but torch sees no such device"):
        devices.choose()


@pytest.mark.parametrize("name", ["P1", "P6", "F1"])
def test_all_heads_are_checked(name: str) -> None:
    (case,) = select("forward", [name])
    assert judges("cuda")
    parts = list(chunks(case, Settings(device="cuda", full=True)))
    assert sum(z * h for z, h in parts) == case.heads


def test_row_of_a_result() -> None:
    (case,) = select("forward", ["P1"])
    result = CaseResult(case, Status.PASSED, ms=2.0, baseline="vendor, same run", baseline_ms=3.0, max_abs_error=1e-3)
    row = cuda.result_row(result)
    assert (row["case"], row["status"], row["ms"], row["sdpa_ms"], row["ratio"]) == ("P1", "passed", 2.0, 3.0, 1.5)


@pytest.mark.skipif(not GPU, reason="no CUDA GPU: the kernels did not run on one")
def test_small_cases_run() -> None:
    assert list(cuda.small_calls())
