"""Error measures and the pass rule: what must fail fails, also when NaN is around."""

from __future__ import annotations

import math

import pytest
import torch

from harness.measures import LSE_TOLERANCE, fault, measure, merge, tolerance

HALF = torch.float16


@pytest.fixture
def reference(rng) -> torch.Tensor:
    """Small values, as an attention output over 1024 keys has them."""
    return 0.03 * torch.randn(2, 2, 256, 64, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "operations", "wanted"),
    [
        (HALF, 1, 2.0**-8),
        (HALF, 2047, 2.0**-8),
        (HALF, 2048, 2.0**-7),
        (torch.bfloat16, 64, 2.0**-7),
        (torch.bfloat16, 8192, 2.0**-7),
    ],
)
def test_tolerance(dtype, operations, wanted) -> None:
    assert tolerance(dtype, operations) == wanted


def test_tolerance_refuses() -> None:
    with pytest.raises(ValueError, match=r"dtype must be torch.float16 or torch.bfloat16, got torch.float32"):
        tolerance(torch.float32, 10)
    with pytest.raises(ValueError, match=r"operations must be at least 1, got 0"):
        tolerance(HALF, 0)


def test_measures_of_a_known_error() -> None:
    reference = torch.full((1, 1, 128, 2), 2.0, dtype=torch.float64)
    actual = reference.clone()
    actual[0, 0, 100, 1] += 0.5
    plain = reference + 0.25
    got = measure(actual, reference, plain)
    assert got.max_abs == 0.5
    assert got.max_scaled == 0.25
    assert got.rms == pytest.approx(math.sqrt(0.25 / 256))
    assert got.worst_block == pytest.approx(0.5 / math.sqrt(128 * 4.0))
    assert got.vs_torch == 2.0
    assert got.torch_scaled == 0.125


def test_a_rounded_reference_passes(reference) -> None:
    for dtype in (HALF, torch.bfloat16):
        assert fault("out", measure(reference.to(dtype), reference), dtype, 1024) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_never_passes(reference, bad) -> None:
    actual = reference.to(HALF)
    actual[1, 1, 255, 63] = bad
    got = measure(actual, reference)
    assert not got.finite
    assert math.isnan(got.max_abs)
    assert fault("out", got, HALF, 1024) == "out has NaN or infinite elements"
    assert fault("lse", measure(actual[..., 0].float(), reference[..., 0]), HALF, 1024) is None
    assert fault("lse", measure(actual[..., 63].float(), reference[..., 63]), HALF, 1024) is not None


def test_nan_measures_never_pass(reference) -> None:
    """Even if `finite` were wrong, a NaN measure must not pass."""
    import dataclasses

    good = measure(reference.to(HALF), reference)
    for name in ("max_scaled", "worst_block"):
        assert fault("out", dataclasses.replace(good, **{name: math.nan}), HALF, 1024) is not None
    assert fault("out", dataclasses.replace(good, worst_block=None), HALF, 1024) is not None


def test_a_reference_must_be_finite(reference) -> None:
    reference[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="reference must be finite"):
        measure(reference.to(HALF), reference)
    with pytest.raises(ValueError, match=r"actual must have the reference's shape"):
        measure(reference[:1], reference)


def test_zeros_fail(reference) -> None:
    """They nearly pass an absolute tolerance: the outputs are small."""
    tiny = reference * 0.02
    got = measure(torch.zeros_like(tiny, dtype=HALF), tiny)
    assert got.max_scaled < tolerance(HALF, 1024)
    assert "relative RMS error" in str(fault("out", got, HALF, 1024))


def test_one_wrong_tile_fails(reference) -> None:
    actual = reference.to(HALF)
    actual[1, 0, 64:80] = actual[1, 0, 80:96]
    got = measure(actual, reference)
    assert got.worst_block > 0.2
    assert fault("out", got, HALF, 1024) is not None


def test_one_wrong_element_fails(reference) -> None:
    actual = reference.to(HALF)
    actual[0, 1, 7, 9] += 0.01
    assert "an element is off by" in str(fault("out", measure(actual, reference), HALF, 1024))
    assert fault("out", measure(actual, reference), HALF, 4096) is not None


def test_plain_torch_widens_the_element_limit_of_gradients_only(reference) -> None:
    actual = reference.clone()
    actual[0, 0, 3, 3] += 0.009
    plain = reference.clone()
    plain[0, 0, 4, 4] += 0.005
    assert fault("dk", measure(actual, reference), torch.bfloat16, 1024) is not None
    assert fault("dk", measure(actual, reference, plain), torch.bfloat16, 1024) is None
    assert fault("out", measure(actual, reference, plain), torch.bfloat16, 1024) is not None
    zeros = torch.zeros_like(reference)
    assert "relative RMS" in str(fault("dk", measure(zeros, reference, zeros), torch.bfloat16, 1024))


def test_lse_limit() -> None:
    reference = torch.full((1, 2, 64), 7.0, dtype=torch.float64)
    assert fault("lse", measure(reference + 0.99 * 7 * LSE_TOLERANCE, reference), HALF, 64) is None
    assert fault("lse", measure(reference + 1.01 * 7 * LSE_TOLERANCE, reference), HALF, 64) is not None


def test_short_last_block(rng) -> None:
    for n in (1, 63, 65, 130):
        reference = torch.randn(1, 2, n, 16, generator=rng, dtype=torch.float64)
        actual = reference.clone()
        actual[0, 1, n - 1] = 0
        assert measure(actual, reference).worst_block > 0.02
        assert measure(reference, reference).worst_block == 0


def test_merge(reference) -> None:
    parts = [measure(reference[:1].to(HALF), reference[:1]), measure(reference[1:].to(HALF), reference[1:])]
    whole = measure(reference.to(HALF), reference)
    got = merge(parts)
    assert got.elements == whole.elements
    assert got.max_abs == whole.max_abs
    assert got.rms == pytest.approx(whole.rms)
    assert got.worst_block == whole.worst_block
    bad = measure(torch.full_like(reference, math.nan), reference)
    for order in ([whole, bad], [bad, whole]):
        assert not merge(order).finite
        assert math.isnan(merge(order).max_abs)
    with pytest.raises(ValueError, match="parts must not be empty"):
        merge([])
