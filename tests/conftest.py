"""Shared fixtures: the virtual NPU, small helpers to run kernels on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness import virtual_npu


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    virtual_npu.install()


@pytest.fixture(params=virtual_npu.RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each compiler release that `make setup` installs."""
    return str(request.param)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20261130)


@pytest.fixture
def poisoned() -> Callable[..., torch.Tensor]:
    """An output tensor full of NaN, so that an element nobody wrote shows."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    return make
