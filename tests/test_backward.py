"""The backward on the virtual NPU against fp64 autograd, both compilers, races checked."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

import backward
from backward import (
    _PIPELINES,
    HEAD_DIMS,
    attention_bwd,
    attention_bwd_kernel_dkdv,
    attention_bwd_kernel_dq,
    attention_bwd_kernel_pipeline,
    get_path_bwd,
    get_tiling_bwd,
    pipeline_scratch,
)
from forward import attention_fwd
from harness import virtual_npu

from .test_forward import inputs, reference

SCALE = 0.5
NAMES = ("dq", "dk", "dv")


def golden(q, k, v, dout, causal, scale) -> list[torch.Tensor]:
    """out, lse and gradients in fp64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference(*leaves, causal, scale)
    out.backward(dout.double())
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def same_precision(q, k, v, dout, out, lse, causal, scale) -> list[torch.Tensor]:
    """A plain PyTorch backward that rounds P and dS as the kernels do."""
    s = q.float() @ k.float().transpose(-1, -2) * scale
    p = (s - lse.float()[..., None]).exp()
    if causal:
        p = p.masked_fill(torch.ones(p.shape[-2:], dtype=torch.bool).triu(1), 0)
    delta = (out.to(q.dtype).float() * dout.float()).sum(-1, keepdim=True)
    ds = (p * (dout.float() @ v.float().transpose(-1, -2) - delta)).to(q.dtype).float()
    p = p.to(q.dtype).float()
    grads = ds @ k.float() * scale, ds.transpose(-1, -2) @ q.float() * scale, p.transpose(-1, -2) @ dout.float()
    return [g.to(q.dtype) for g in grads]


def check(q, k, v, dout, causal, scale, **options) -> None:
    out, lse, *expected = golden(q, k, v, dout, causal, scale)
    copies = [x.clone() for x in (q, k, v, dout)]
    with virtual_npu.run(hazards=True, **options):
        grads = attention_bwd(dout, q, k, v, out.to(q.dtype), lse.float(), causal, scale)
    plain = same_precision(q, k, v, dout, out, lse, causal, scale)
    floor = 1e-4 if q.dtype == torch.float16 else 1e-3
    for name, grad, gold, other in zip(NAMES, grads, expected, plain, strict=True):
        assert grad.dtype == q.dtype
        limit = 2 * (other.double() - gold).abs().max().item() + floor
        assert (grad.double() - gold).abs().max().item() <= limit, name
        # The first keys of a causal run sum over all rows: looked at apart, relative to their size.
        head, size = slice(0, 4), gold[:, :, :4].abs().max().item()
        assert (grad.double() - gold)[:, :, head].abs().max().item() <= 0.02 * size + limit, name
    for copy, x in zip(copies, (q, k, v, dout), strict=True):
        assert torch.equal(copy, x), "an input was overwritten"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(d, causal, release, rng) -> None:
    q, k, v = inputs(rng, 1, 3, 256, d, torch.float16)
    check(q, k, v, torch.randn(q.shape, generator=rng).half(), causal, SCALE, release=release, cores=2)


@pytest.mark.parametrize("d", [64, 128])
def test_bf16(d, rng) -> None:
    q, k, v = inputs(rng, 1, 2, 256, d, torch.bfloat16)
    check(q, k, v, torch.randn(q.shape, generator=rng).bfloat16(), True, SCALE, cores=2)


def half_precision_or_slow(d: int, causal: bool, dtype: torch.dtype):
    """Each dtype is a compilation of its own: bf16 by default for one configuration."""
    slow = dtype == torch.bfloat16 and (d, causal) != (128, False)
    return pytest.param(d, causal, dtype, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("d", "causal", "dtype"),
    [half_precision_or_slow(*key, dtype) for key in _PIPELINES for dtype in (torch.float16, torch.bfloat16)],
)
def test_pipeline(d, causal, dtype, rng) -> None:
    """Three heads on two cores: one program steps from a head to the next."""
    assert get_path_bwd(1, 3, 1024, d, causal, 2) == "pipeline"
    q, k, v = inputs(rng, 1, 3, 1024, d, dtype)
    check(q, k, v, torch.randn(q.shape, generator=rng).to(dtype), causal, SCALE, cores=2, schedule="timed")


@pytest.mark.parametrize(("d", "causal"), [(64, False), (128, False), (256, True)])
def test_pipeline_with_a_scale_that_ds_does_not_carry(d, causal, rng) -> None:
    """Another program than that of a scale of 1/2: dK and dQ are scaled at the end, by the vector cores."""
    q, k, v = inputs(rng, 1, 3, 1024, d, torch.float16)
    check(q, k, v, torch.randn(q.shape, generator=rng).half(), causal, d**-0.5, cores=2, schedule="jitter-1")


@pytest.mark.parametrize(
    ("factor", "gain"), [(1.0, 2.0**-10), (1.0, 2.0**10), (5.0, 1.0), (5.0, 2.0**8), (20.0, 1.0), (20.0, 2.0**-10)]
)
def test_pipeline_accuracy(factor, gain, rng) -> None:
    """Large inputs, and gradients of 2^-10 to 2^10 times normal (5 and 2^10 together give a dq that
    fp16 cannot hold, while dS, 22000 there, still fits: the scale is applied to finished sums).
    Errors relative to the norm of the gradient."""
    q, k, v = inputs(rng, 1, 1, 1024, 128, torch.float16, factor)
    dout = (torch.randn(q.shape, generator=rng) * gain).half()
    out, lse, *expected = golden(q, k, v, dout, True, SCALE)
    with virtual_npu.run(hazards=True, cores=1):
        grads = attention_bwd(dout, q, k, v, out.half(), lse.float(), True, SCALE)
    plain = same_precision(q, k, v, dout, out, lse, True, SCALE)
    for name, grad, gold, other in zip(NAMES, grads, expected, plain, strict=True):
        assert torch.isfinite(grad).all(), name
        limit = 2 * (other.double() - gold).norm() + 1e-4 * gold.norm()
        assert (grad.double() - gold).norm() <= limit, name


@pytest.mark.parametrize(("d", "causal"), _PIPELINES)
def test_pipeline_gives_the_same_bits_under_every_schedule_and_on_any_cores(d, causal, rng) -> None:
    q, k, v = inputs(rng, 1, 3, 1024, d, torch.float16)
    dout = torch.randn(q.shape, generator=rng).half()
    out, lse = (x.to(t) for x, t in zip(reference(q, k, v, causal, SCALE), (q.dtype, torch.float32), strict=True))
    runs = []
    for cores, schedule in ((1, "cube-first"), (2, "vector-first"), (3, "jitter-1")):
        with virtual_npu.run(cores=cores, hazards=True, schedule=schedule):
            runs.append(attention_bwd(dout, q, k, v, out, lse, causal, SCALE))
    for grads in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0], strict=True))


@pytest.mark.parametrize("release", ["1.1.0"])
@pytest.mark.parametrize("scale", [0.3, 0.5])
@pytest.mark.parametrize(("d", "causal"), _PIPELINES)
def test_every_event_of_the_pipeline_reaches_the_compiled_program(d, causal, scale, release) -> None:
    """A compiler pass of 1.2.0 drops users' events from some loops without a word; of those that
    arrive, each id has sets on one side and waits on the other."""
    x, lse = torch.empty(1, 3, 1024, d, dtype=torch.float16), torch.empty(1, 3, 1024)
    attention_bwd_kernel_pipeline.cache.clear()
    with virtual_npu.run("timing", release=release, cores=2):
        attention_bwd(x, x, x, x, x, lse, causal, scale)
    (compiled,) = (one for by_key in attention_bwd_kernel_pipeline.cache.values() for one in by_key.values())
    text = compiled.asm["npubin"].decode()
    found = {
        op: sorted(set(re.findall(rf'hir\.{op}".*static_flag_id = (\d+)', text)), key=int)
        for op in ("sync_block_set", "sync_block_wait")
    }
    # Every wait of the source names its event; some sets pass it on as a parameter.
    events = sorted(set(re.findall(r'_sync_wait\("\w+", "\w+", (\d+)\)', inspect.getsource(backward))), key=int)
    assert len(events) == 7
    if _PIPELINES[d, causal]["FOLD"] and scale == 0.5:
        events = [event for event in events if event not in ("2", "6")]  # of results that are still to be scaled
    assert found == {"sync_block_set": events, "sync_block_wait": events}
    assert "limit_sub_block_id0" not in text, "a vector core repeats the other one's work"


def test_pipeline_scratch_fits_beside_the_inputs_in_l2() -> None:
    for d, causal in _PIPELINES:
        sizes = pipeline_scratch(1024, d, causal, 20, 0.3)
        held = sum(elements * (2 if name in ("probs", "ds") else 4) for name, elements in sizes.items())
        assert held <= 128 * 2**20, (d, causal, held / 2**20)


def test_path_by_shape_and_compiler() -> None:
    assert get_path_bwd(128, 8, 1024, 128, False, 20) == "pipeline"
    assert get_path_bwd(128, 8, 1024, 128, False, 20, "1.2.0") == "general"
    assert get_path_bwd(128, 8, 1000, 128, False, 20) == "general"
    assert get_path_bwd(128, 8, 1024, 32, False, 20) == "general"
    assert get_path_bwd(1, 2, 1024, 128, False, 20) == "general"


def test_strided_dout(rng) -> None:
    """A transposed and an expanded gradient give what their contiguous copies give."""
    q, k, v = inputs(rng, 1, 2, 128, 64, torch.float16)
    out, lse = attention_fwd(q, k, v, False, SCALE)
    transposed = torch.randn(1, 128, 2, 64, generator=rng).half().transpose(1, 2)
    for dout in (transposed, torch.ones((), dtype=torch.float16).expand(q.shape)):
        strided = attention_bwd(dout, q, k, v, out, lse, False, SCALE)
        plain = attention_bwd(dout.contiguous(), q, k, v, out, lse, False, SCALE)
        assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


def test_two_runs_and_any_number_of_cores_give_the_same_bits(rng) -> None:
    q, k, v = inputs(rng, 1, 3, 256, 64, torch.float16)
    dout = torch.randn(q.shape, generator=rng).half()
    out, lse = attention_fwd(q, k, v, True, SCALE)
    runs = []
    for cores in (1, 7, 20, 20):
        with virtual_npu.run(cores=cores):
            runs.append(attention_bwd(dout, q, k, v, out, lse, True, SCALE))
    for grads in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0], strict=True))


@pytest.mark.parametrize("n", [17, 200])
def test_padded_keys_far_above_the_real_ones(n, release) -> None:
    """flash-attention#334: a key of padding scores 0; where every real score is far below, its
    exp(0 - lse) overflows, and infinity times the padding's zeros made dq NaN."""
    generator = torch.Generator().manual_seed(n)
    noise = [(torch.randn(1, 1, n, 64, generator=generator) * 0.1) for _ in range(4)]
    q, k, v, dout = (noise[0] + 2).half(), (noise[1] - 2).half(), noise[2].half(), (noise[3] * 10).half()
    check(q, k, v, dout, False, SCALE, release=release, cores=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_both_vector_cores_have_rows_of_their_own(d, causal, release) -> None:
    """bishengir 1.2.0 put every store under a sub-block-0 guard, so that the second vector core
    only repeated the first one's work. Both are busy then too: only the compiled text shows it."""
    x, lse = torch.empty(1, 1, 512, d, dtype=torch.float16), torch.empty(1, 1, 512)
    for kernel in (attention_bwd_kernel_dkdv, attention_bwd_kernel_dq):
        kernel.cache.clear()
    with virtual_npu.run("timing", release=release, cores=2):
        attention_bwd(x, x, x, x, x, lse, causal, SCALE)
    for kernel in (attention_bwd_kernel_dkdv, attention_bwd_kernel_dq):
        (compiled,) = (one for by_key in kernel.cache.values() for one in by_key.values())
        text = compiled.asm["npubin"].decode()
        assert "hivm.hir.get_sub_block_idx" in text
        assert "limit_sub_block_id0" not in text


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_tiling_fits_official_length(d) -> None:
    for bm, bn in get_tiling_bwd(1024, d, True):
        assert 1024 % bm == 0
        assert 1024 % bn == 0


GOOD = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
LSE = torch.zeros(1, 2, 64)


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("dout", GOOD[:, :1], ValueError, r"dout must have shape \[1, 2, 64, 64\], got \[1, 1, 64, 64\]"),
        ("dout", None, TypeError, "dout must be a torch.Tensor, got NoneType"),
        ("dout", GOOD.bfloat16(), TypeError, "dout must have the dtype of q, torch.float16, got torch.bfloat16"),
        ("out", GOOD[..., :48], ValueError, r"out must have shape \[1, 2, 64, 64\], got \[1, 2, 64, 48\]"),
        ("q", GOOD[0], ValueError, r"q must have 4 dimensions \[Z, H, N, D\], got shape \[2, 64, 64\]"),
        ("k", GOOD[..., :48], ValueError, "k must have the head dimension of q, 64, got 48"),
        ("v", GOOD[:, :1], ValueError, "v must have the number of heads of k, 2, got 1"),
        ("lse", 1.0, TypeError, "lse must be a torch.Tensor, got float"),
        ("lse", LSE.to("meta"), ValueError, "lse must be on the device of q, cpu, got meta"),
        ("layout", "bnsd", ValueError, "layout must be one of BNSD, BSND, got 'bnsd'"),
        ("out", GOOD.float(), TypeError, "out must be torch.float16 or torch.bfloat16, got torch.float32"),
        ("lse", LSE.half(), TypeError, "lse must be torch.float32, got torch.float16"),
        ("lse", LSE[:, :1], ValueError, r"lse must have shape \[1, 2, 64\], got \[1, 1, 64\]"),
        ("sm_scale", math.inf, ValueError, "sm_scale must be finite in fp32, got inf"),
        ("causal", None, TypeError, "causal must be a bool or a str, got NoneType"),
    ],
)
def test_errors_name_the_argument(name, value, kind, text) -> None:
    arguments = {"dout": GOOD, "q": GOOD, "k": GOOD, "v": GOOD, "out": GOOD, "lse": LSE, name: value}
    with pytest.raises(kind, match=text):
        attention_bwd(**arguments)
