"""The references against torch autograd in fp64."""

from __future__ import annotations

import pytest
import torch

from harness import reference

SHAPES = [(1, 1, 1, 16), (2, 3, 64, 16), (1, 2, 100, 33), (1, 1, 257, 64)]


def _autograd(dout, q, k, v, causal, sm_scale):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * sm_scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(scores, -1) @ v
    grads = torch.autograd.grad(out, (q, k, v), dout.double())
    return out.detach(), torch.logsumexp(scores, -1).detach(), grads


def _inputs(shape, dtype, rng):
    return [torch.randn(shape, generator=rng).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("block", [1 << 22, 1000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_autograd(shape, causal, block, rng, monkeypatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    dout, q, k, v = _inputs(shape, torch.float16, rng)
    out, lse, grads = _autograd(dout, q, k, v, causal, 0.5)
    got_out, got_lse = reference.reference_fwd(q, k, v, causal, 0.5)
    got_grads = reference.reference_bwd(dout, q, k, v, causal, 0.5)
    for got, wanted in zip((got_out, got_lse, *got_grads), (out, lse, *grads), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_default_scale(rng) -> None:
    dout, q, k, v = _inputs((1, 2, 32, 64), torch.bfloat16, rng)
    out, lse, grads = _autograd(dout, q, k, v, False, 0.125)
    torch.testing.assert_close(reference.reference_fwd(q, k, v)[0], out)
    torch.testing.assert_close(reference.reference_fwd(q, k, v)[1], lse)
    torch.testing.assert_close(reference.reference_bwd(dout, q, k, v), grads)


def test_large_logits_stay_finite(rng) -> None:
    dout, q, k, v = (100 * x for x in _inputs((1, 1, 64, 64), torch.float32, rng))
    out, lse = reference.reference_fwd(q, k, v, True, 0.5)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()
    assert all(torch.isfinite(x).all() for x in reference.reference_bwd(dout, q, k, v, True, 0.5))


def test_gradients_for_a_rounded_output(rng) -> None:
    """With `out` given, delta comes from it: what a backward can know."""
    dout, q, k, v = _inputs((1, 1, 48, 32), torch.bfloat16, rng)
    out, _ = reference.reference_fwd(q, k, v, False, 0.5)
    exact = reference.reference_bwd(dout, q, k, v, False, 0.5)
    given = reference.reference_bwd(dout, q, k, v, False, 0.5, out=out)
    rounded = reference.reference_bwd(dout, q, k, v, False, 0.5, out=out.bfloat16())
    torch.testing.assert_close(given, exact)
    assert torch.equal(rounded[2], exact[2])  # dv does not depend on out
    assert not torch.allclose(rounded[0], exact[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_same_precision_is_near_and_not_exact(dtype, causal, rng) -> None:
    dout, q, k, v = _inputs((1, 2, 96, 64), dtype, rng)
    out, _, grads = _autograd(dout, q, k, v, causal, 0.5)
    got = (
        reference.same_precision_fwd(q, k, v, causal, 0.5),
        *reference.same_precision_bwd(dout, q, k, v, causal, 0.5),
    )
    for mine, exact in zip(got, (out, *grads), strict=True):
        assert mine.dtype == dtype
        error = float((mine.double() - exact).norm() / exact.norm())
        assert 1e-5 < error < (0.01 if dtype == torch.float16 else 0.08)


def test_bad_shapes(rng) -> None:
    dout, q, k, v = _inputs((1, 1, 8, 16), torch.float32, rng)
    with pytest.raises(ValueError, match=r"k must have shape \[1, 1, 8, 16\], got \[1, 1, 4, 16\]"):
        reference.reference_fwd(q, k[:, :, :4], v)
    with pytest.raises(ValueError, match=r"q must be \[Z, H, N, D\], got shape \[8, 16\]"):
        reference.reference_fwd(q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(ValueError, match=r"dout must have shape"):
        reference.reference_bwd(dout[..., :3], q, k, v)
