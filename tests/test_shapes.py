"""What users bring: lengths, head dims, head ratios, alignments, layouts, values, sizes.

Every value test surrounds the inputs with NaN, starts fresh memory as NaN, checks races, and
compares with fp64: at most twice the error of plain PyTorch that rounds where the kernels
round, plus one unit in the last place; the first and last rows and the first columns apart.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import backward
import forward
from backward import attention_bwd
from forward import attention_fwd
from harness import virtual_npu
from harness.poison import poisoned_memory

LENGTHS = (1, 2, 5, 17, 63, 65, 127, 129, 200, 513, 1000, 1023, 1025)
HEAD_DIMS = (16, 24, 40, 59, 64, 80, 96, 100, 128, 160, 192, 200, 256)
RATIOS = (1, 2, 4, 8)
CAUSAL = (False, "top-left", "bottom-right")
DTYPES = (torch.float16, torch.bfloat16)
RELATIONS = ("equal", "below", "above")  # Sq to Sk
SCHEDULES = ("cube-first", "vector-first", "alternate")
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One attention problem; h query heads, hk key heads."""

    sq: int
    sk: int
    d: int
    dv: int
    ratio: int
    causal: bool | str
    dtype: torch.dtype
    layout: str = "BNSD"
    release: str = "1.1.0"
    heads: int = 1
    scale: float | None = None

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.sq}x{self.sk}-d{self.d},{self.dv}-g{self.ratio}-{self.causal}-{kind}-{self.layout}-{self.release}"
        )


def shift_of(causal: bool | str, sq: int, sk: int) -> int | None:
    return None if not causal else sk - sq if causal == "bottom-right" else 0


def golden(q, k, v, dout, causal, scale, rounded: torch.dtype | None = None) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of [Z, H, S, D] tensors by the textbook: in fp64, or in fp32 with
    P, dS and the results rounded to a dtype as the kernels round them."""
    work = torch.float64 if rounded is None else torch.float32

    def cut(x):
        return x if rounded is None else x.to(rounded).to(work)

    group = q.shape[1] // k.shape[1]
    q, k, v, dout = (x.to(work) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), dout))
    s = q @ k.transpose(-1, -2) * scale
    shift = shift_of(causal, q.shape[2], k.shape[2])
    if shift is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) > torch.arange(s.shape[-2])[:, None] + shift, -math.inf)
    m = s.amax(-1, keepdim=True).clamp(min=torch.finfo(work).min)
    e = (s - m).exp()
    total = e.sum(-1, keepdim=True)
    lse = (m + total.log()).squeeze(-1)
    total = total.where(total > 0, torch.ones_like(total))
    out = cut(cut(e) @ v / total)
    p = e / total
    ds = cut(p * (dout @ v.transpose(-1, -2) - (out * dout).sum(-1, keepdim=True)))
    dq = ds @ k * scale
    dk = (ds.transpose(-1, -2) @ q * scale).unflatten(1, (-1, group)).sum(2)
    dv = (cut(p).transpose(-1, -2) @ dout).unflatten(1, (-1, group)).sum(2)
    return [out, lse, *(cut(x) for x in (dq, dk, dv))]


def fenced(x: torch.Tensor, gaps: bool) -> torch.Tensor:
    """x with NaN around: before and after it, and (gaps) between its rows."""
    if gaps:
        z, a, b, d = x.shape
        room = torch.full((z, a, b + 2, d + 5), math.nan, dtype=x.dtype)
        view = room[:, :, 1:-1, 3 : 3 + d]
    else:
        room = torch.full((x.numel() + 2048,), math.nan, dtype=x.dtype)
        view = room[1024:-1024].view(x.shape)
    view.copy_(x)
    return view


def compare(name: str, got: torch.Tensor, gold: torch.Tensor, plain: torch.Tensor) -> None:
    """got against fp64, all of it and its edges apart ([Z, H, S, D] or [Z, H, S])."""
    if name == "lse":
        torch.testing.assert_close(got.double(), gold, rtol=1e-5, atol=1e-4)
        return
    unit = torch.finfo(got.dtype).eps
    assert got.isfinite().all(), name
    for part in (..., (..., slice(0, 4), slice(None)), (..., slice(-4, None), slice(None)), (..., slice(0, 2))):
        error = (got.double() - gold)[part].abs().max().item()
        limit = 2 * (plain.double() - gold)[part].abs().max().item() + unit * (gold[part].abs().max().item() + 0.1)
        assert error <= limit, f"{name}{part}: error {error:.2e}, limit {limit:.2e}"


def run(case: Case, seed: int = 0, values=None) -> list[torch.Tensor]:
    """Forward and backward of a case, checked. Returns out, lse, dq, dk, dv."""
    rng = torch.Generator().manual_seed(seed)
    hk, h = case.heads, case.heads * case.ratio
    shapes = ((h, case.sq, case.d), (hk, case.sk, case.d), (hk, case.sk, case.dv), (h, case.sq, case.dv))
    q, k, v, dout = (torch.randn(1, *s, generator=rng) for s in shapes)
    if values is not None:
        q, k, v, dout = values(q, k, v, dout)
    q, k, v, dout = (x.to(case.dtype) for x in (q, k, v, dout))
    scale = case.d**-0.5 if case.scale is None else case.scale
    gold = golden(q, k, v, dout, case.causal, scale)
    plain = golden(q, k, v, dout, case.causal, scale, case.dtype)
    given = [x.transpose(1, 2) if case.layout == "BSND" else x for x in (q, k, v, dout)]
    given = [fenced(x, gaps=(seed + i) % 2 == 0) for i, x in enumerate(given)]
    copies = [x.clone() for x in given]
    q, k, v, dout = given
    options = {"release": case.release, "schedule": SCHEDULES[seed % 3]}
    with poisoned_memory(), virtual_npu.run(cores=3, hazards=True, **options):
        out, lse = attention_fwd(q, k, v, case.causal, case.scale, layout=case.layout)
        grads = attention_bwd(dout, q, k, v, out, lse, case.causal, case.scale, layout=case.layout)
    for copy, x in zip(copies, given, strict=True):
        assert torch.equal(copy, x), "an input was overwritten"
    results = []
    for name, got, exact, other in zip(NAMES, (out, lse, *grads), gold, plain, strict=True):
        assert got.is_contiguous(), name
        assert got.dtype == (torch.float32 if name == "lse" else case.dtype), name
        if name != "lse" and case.layout == "BSND":
            got = got.transpose(1, 2)
        assert got.shape == exact.shape, name
        compare(name, got, exact, other)
        results.append(got)
    if case.causal == "bottom-right" and case.sq > case.sk:
        hidden = case.sq - case.sk
        assert (results[0][:, :, :hidden] == 0).all()
        assert (results[1][:, :, :hidden] == -math.inf).all()
        assert (results[2][:, :, :hidden] == 0).all()
    return results


def lengths(n: int, relation: str, rng: random.Random) -> tuple[int, int]:
    """Sq and Sk: n and n, or n and a longer or shorter one."""
    if relation == "equal":
        return n, n
    others = [m for m in LENGTHS if (m > n) == (relation == "below") and m != n]
    return n, rng.choice(others) if others else n


def sample(count: int, seed: int, releases=virtual_npu.RELEASES) -> Iterator[Case]:
    """Cases of the matrix in which every value of each axis comes up equally often."""
    rng = random.Random(seed)

    def shuffled(values) -> Iterator:
        while True:
            yield from rng.sample(list(values), len(values))

    axes = [shuffled(x) for x in (LENGTHS, RELATIONS, HEAD_DIMS, RATIOS, CAUSAL, DTYPES, ("BNSD", "BSND"), releases)]
    for n, relation, d, ratio, causal, dtype, layout, release in itertools.islice(zip(*axes, strict=False), count):
        sq, sk = lengths(n, relation, rng)
        dv = d if rng.random() < 0.7 else rng.choice(HEAD_DIMS)
        heads = 2 if ratio == 1 and max(sq, sk) < 300 else 1
        yield Case(sq, sk, d, dv, ratio, causal, dtype, layout, release, heads)


@pytest.mark.parametrize(("number", "case"), list(enumerate(sample(13, 25))), ids=str)
def test_matrix(number, case) -> None:
    run(case, number)


@pytest.mark.slow
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("n", LENGTHS)
def test_full_matrix(n, d) -> None:
    """The whole product, hours of it: `make test-full`."""
    rng = random.Random(n * 1000 + d)
    product = itertools.product(RELATIONS, RATIOS, CAUSAL, DTYPES)
    for number, (relation, ratio, causal, dtype) in enumerate(product):
        sq, sk = lengths(n, relation, rng)
        release = virtual_npu.RELEASES[number % 2]
        run(Case(sq, sk, d, d, ratio, causal, dtype, ("BNSD", "BSND")[number // 2 % 2], release), number)


@pytest.mark.parametrize(("d", "release"), [(1, "1.1.0"), (7, "1.2.0"), (129, "1.1.0"), (255, "1.2.0")])
def test_any_head_dim(d, release) -> None:
    """No multiple of the fractal, of 32 bytes or of anything; v's differs."""
    run(Case(70, 90, d, 256 - d, 2, "bottom-right", torch.float16, release=release), d)


@pytest.mark.parametrize(
    "case",
    [
        Case(64, 300, 40, 40, 1, "top-left", torch.float16),
        Case(400, 17, 40, 40, 1, "bottom-right", torch.float16, release="1.2.0"),
        Case(70, 71, 40, 40, 1, "bottom-right", torch.float16),
    ],
    ids=str,
)
def test_edges_of_the_mask(case) -> None:
    """A tile of keys that no row sees, of rows that see no key: L0C must not be read unwritten.
    A shift of 1, which Triton makes a constant."""
    run(case)


def test_a_chosen_tile_longer_than_the_rows(release) -> None:
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, n, 40, generator=rng).half() for n in (20, 50, 50))
    with poisoned_memory(), virtual_npu.run(release=release, hazards=True):
        out, lse = attention_fwd(q, k, v, "bottom-right", block_m=32, block_n=64)
    gold = golden(q, k, v, torch.zeros_like(q), "bottom-right", 40**-0.5)
    plain = golden(q, k, v, torch.zeros_like(q), "bottom-right", 40**-0.5, q.dtype)
    compare("out", out, gold[0], plain[0])
    compare("lse", lse, gold[1], plain[1])


# Layouts.


def both_ways(q, k, v, dout, causal, **options) -> None:
    """The views give, bit for bit, what their contiguous copies give."""
    results = []
    for tensors in ((q, k, v, dout), [x.contiguous() for x in (q, k, v, dout)]):
        q, k, v, dout = tensors
        with poisoned_memory(), virtual_npu.run(hazards=True, cores=2):
            out, lse = attention_fwd(q, k, v, causal, **options)
            results.append((out, lse, *attention_bwd(dout, q, k, v, out, lse, causal, **options)))
    for name, a, b in zip(NAMES, *results, strict=True):
        assert torch.equal(a, b), name
        assert a.isfinite().all(), name


def test_chunks_of_a_fused_tensor() -> None:
    """q and k from one [Z, S, H, 3 D] projection, v transposed, dout a transposed BSND."""
    rng = torch.Generator().manual_seed(2)
    q, k, _ = torch.randn(2, 70, 2, 72, generator=rng).half().chunk(3, -1)
    v = torch.randn(2, 2, 70, 24, generator=rng).half()
    dout = torch.randn(2, 70, 2, 24, generator=rng).half().transpose(1, 2)
    both_ways(q, k, v.transpose(1, 2), dout.transpose(1, 2), True, layout="BSND")


def test_a_last_dimension_that_is_not_unit_stride_and_expanded_tensors() -> None:
    """Those are copied: q transposed in its last two dimensions, rows of dout that are all one
    row, k with one head and one batch for all."""
    rng = torch.Generator().manual_seed(3)
    q = torch.randn(2, 2, 24, 70, generator=rng).half().transpose(2, 3)
    k = torch.randn(1, 1, 70, 24, generator=rng).half().expand(2, 2, -1, -1)
    v = torch.randn(2, 2, 70, 24, generator=rng).half()
    dout = torch.randn(2, 2, 1, 24, generator=rng).half().expand(-1, -1, 70, -1)
    both_ways(q, k, v, dout, False)
    both_ways(q, k, v, torch.ones((), dtype=torch.float16).expand(2, 2, 70, 24), False)
    assert forward._rows_apart(k) is k
    assert forward._rows_apart(q).is_contiguous()
    assert forward._rows_apart(dout).is_contiguous()


# Values.


def huge_positive(q, k, v, dout):
    return q.abs() * 10, k.abs() * 10, v, dout


def huge_negative(q, k, v, dout):
    return q.abs() * 10, -k.abs() * 10, v, dout


def equal_rows(q, k, v, dout):
    return q * 0, k, v, dout


def one_huge_key(q, k, v, dout):
    k[:, :, 40] *= 200
    return q, k, v, dout


@pytest.mark.parametrize(
    ("values", "sk", "dtype"),
    [
        (huge_positive, 90, torch.float16),
        (huge_negative, 90, torch.bfloat16),
        (huge_negative, 40, torch.float16),
        (equal_rows, 90, torch.float16),
        (one_huge_key, 90, torch.float16),
    ],
)
def test_values(values, sk, dtype) -> None:
    """A softmax without the row's maximum overflows; a stand-in for -inf hides real logits; a
    key of padding scores 0, far above rows of -1000 (NaN in dq: flash-attention#334)."""
    run(Case(70, sk, 24, 24, 2, "top-left", dtype, scale=0.5), 3, values)


def test_logits_below_any_stand_in(release) -> None:
    """flashinfer#4267: a finite stand-in for -inf outweighs real logits that lie below it."""
    rng = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 1, n, 24, generator=rng) for n in (40, 70, 70))
    q, k, v = (q.abs() * 1e4).bfloat16(), (k.abs() * -1e4).bfloat16(), v.bfloat16()
    for causal in CAUSAL:
        with poisoned_memory(), virtual_npu.run(release=release, hazards=True):
            out, lse = attention_fwd(q, k, v, causal, 1e6)
        gold, plain = (golden(q, k, v, v[:, :, :40], causal, 1e6, rounded) for rounded in (None, q.dtype))
        compare("out", out, gold[0], plain[0])
        compare("lse", lse, gold[1], plain[1])


def test_fp16_overflow_of_ds_is_reported() -> None:
    """dS beyond 65504: the gradients are infinite or NaN, as a loss scaler expects, not finite
    and wrong."""
    rng = torch.Generator().manual_seed(6)
    q, k, v, dout = (torch.randn(1, 1, 70, 24, generator=rng).half() for _ in range(4))
    v, dout = v * 100, dout * 1000
    out, lse = attention_fwd(q, k, v)
    dq, dk, _ = attention_bwd(dout, q, k, v, out, lse)
    exact = golden(q, k, v, dout, False, 24**-0.5)
    for got, gold in ((dq, exact[2]), (dk, exact[3])):
        wrong = (got.double() - gold).abs() > 0.05 * gold.abs().max()
        assert wrong.any()
        assert not got[wrong].isfinite().any()


# Sizes.


def test_offsets_beyond_32_bits(tmp_path, monkeypatch) -> None:
    """fla#1080: each kind of stride that carries an element beyond 2^31, in a sparse file, for
    inputs and results: batch, head, rows (a later tile's first row lies beyond)."""
    n, d, row = 200, 16, 1 << 25
    storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=n * row, dtype=torch.float16)
    rng = torch.Generator().manual_seed(7)
    by_row, by_head, by_batch = (2 * d, d, row, 1), (n * d, 1 << 31, d, 1), (1 << 31, n * d, d, 1)
    strides = itertools.cycle((by_row, by_head, by_batch))
    starts = itertools.count(1 << 16, 1 << 16)

    def far(z=2, h=2, n=n, d=d, *_):
        return storage.as_strided((z, h, n, d), next(strides), next(starts))

    inputs = [far() for _ in range(4)]
    for x in inputs:
        x.copy_(torch.randn(x.shape, generator=rng))
    near = [x.contiguous() for x in inputs]
    results = []
    for q, k, v, dout in (near, inputs):
        if q is inputs[0]:
            for module in (forward, backward):
                monkeypatch.setattr(module, "_empty", far)
        out, lse = attention_fwd(q, k, v, True, 0.5, block_n=64)
        results.append((out, lse, *attention_bwd(dout, q, k, v, out, lse, True, 0.5)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_more_tiles_than_a_grid_holds() -> None:
    """triton-ascend#16: a grid of more than 65535 programs is refused. (Memory never touched.)"""
    q, k, v, out = (torch.empty(1 << 14, 4, 64, 16, dtype=torch.float16) for _ in range(4))
    lse = torch.empty(1 << 14, 4, 64)
    with virtual_npu.run("timing") as record:
        attention_fwd(q, k, v)
        attention_bwd(out, q, k, v, out, lse)
    assert [kernel.grid for kernel in record.kernels] == [(20, 1, 1), (40, 1, 1), (20, 1, 1), (20, 1, 1)]
    assert all(kernel.ms > 0 for kernel in record.kernels)


if __name__ == "__main__":  # a longer sample than the default: python -m tests.test_shapes COUNT SEED
    import sys
    import time
    import traceback

    for number, case in enumerate(sample(int(sys.argv[1]), int(sys.argv[2]))):
        start = time.time()
        try:
            run(case, number)
            print(number, case, f"ok {time.time() - start:.1f} s", flush=True)
        except Exception as error:
            print(number, case, f"FAILED {type(error).__name__}: {str(error)[:600]}", flush=True)
            if not isinstance(error, (AssertionError, virtual_npu.VirtualNPUError)):
                traceback.print_exc()
