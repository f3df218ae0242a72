"""The forward on the virtual NPU against fp64, both compilers, races checked."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from forward import HEAD_DIMS, _attention, attention, attention_fwd, get_path, get_tiling, scratch_bytes
from harness import virtual_npu

SCALE = 0.5


def reference(q, k, v, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in fp64."""
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def inputs(rng, z, h, n, d, dtype, factor=1.0) -> list[torch.Tensor]:
    return [(torch.randn(z, h, n, d, generator=rng) * 0.5 * factor).to(dtype) for _ in range(3)]


def same_precision_error(q, k, v, causal, scale, expected) -> float:
    """Largest error of plain PyTorch attention that rounds where the kernels round."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    out = (p.to(q.dtype).float() @ v.float() / p.sum(-1, keepdim=True)).to(q.dtype)
    return (out.double() - expected).abs().max().item()


def check(q, k, v, causal, scale, **options) -> None:
    """The result is right to twice the error of a same-precision run, and nothing races."""
    copies = [x.clone() for x in (q, k, v)]
    with virtual_npu.run(hazards=True, **options):
        out, lse = attention_fwd(q, k, v, causal, scale)
    expected, expected_lse = reference(q, k, v, causal, scale)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    floor = 1e-5 if q.dtype == torch.float16 else 1e-4
    limit = 2 * same_precision_error(q, k, v, causal, scale, expected) + floor
    assert (out.double() - expected).abs().max().item() <= limit
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)
    for copy, x in zip(copies, (q, k, v), strict=True):
        assert torch.equal(copy, x), "an input was overwritten"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(d, causal, release, rng) -> None:
    check(*inputs(rng, 1, 2, 512, d, torch.float16), causal, SCALE, release=release, cores=3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_bf16(d, causal, rng) -> None:
    check(*inputs(rng, 1, 2, 256, d, torch.bfloat16), causal, SCALE, cores=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [5.0, 20.0])
def test_large_logits(factor, dtype, rng) -> None:
    """A softmax without a running maximum overflows here."""
    check(*inputs(rng, 1, 1, 256, 64, dtype, factor), True, SCALE, cores=2)


def test_equal_logits_and_one_huge_key(rng) -> None:
    q, k, v = inputs(rng, 1, 1, 256, 64, torch.float16)
    q[:, :, :128] = 0  # rows of equal logits
    k[:, :, 200] *= 40
    check(q, k, v, False, SCALE, cores=2)


def test_negative_scale(rng) -> None:
    check(*inputs(rng, 1, 1, 128, 64, torch.float16), False, -0.25, cores=2)


def test_default_scale(rng) -> None:
    q, k, v = inputs(rng, 1, 1, 128, 64, torch.float16)
    assert torch.equal(attention_fwd(q, k, v)[0], attention_fwd(q, k, v, False, 0.125)[0])


def test_views_give_the_result_of_contiguous(rng) -> None:
    """Transposed BSND and chunks of a fused qkv tensor, each with strides of its own."""
    qkv = (torch.randn(2, 128, 3, 2, 64, generator=rng) * 0.5).half()
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    v = v.contiguous()
    assert not q.is_contiguous()
    out, lse = attention_fwd(q, k, v, True, SCALE)
    expected, expected_lse = attention_fwd(q.contiguous(), k.contiguous(), v, True, SCALE)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_the_number_of_cores_does_not_change_a_bit(rng) -> None:
    q, k, v = inputs(rng, 1, 3, 256, 64, torch.float16)
    results = []
    for cores in (1, 7, 20):
        with virtual_npu.run(cores=cores):
            results.append(attention_fwd(q, k, v, True, SCALE))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_tiles_can_be_chosen(rng) -> None:
    q, k, v = inputs(rng, 1, 1, 256, 64, torch.float16)
    out, _ = attention_fwd(q, k, v, False, SCALE, block_m=64, block_n=128)
    torch.testing.assert_close(out.double(), reference(q, k, v, False, SCALE)[0], rtol=1e-2, atol=1e-3)


def test_a_tile_that_does_not_fit(rng) -> None:
    q, k, v = inputs(rng, 1, 1, 512, 128, torch.float16)
    with pytest.raises(
        virtual_npu.CompileError, match=r"q\[1, 1, 512, 128\].*BM=512, BN=512.*(\n.*)*overflow, requires"
    ):
        attention_fwd(q, k, v, False, SCALE, block_m=512, block_n=512)


def test_autograd_function(rng) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(rng, 1, 1, 128, 64, torch.float16))
    out = attention(q, k, v, True, SCALE, *get_tiling(1, 1, 128, 64, True))
    out.backward(torch.ones_like(out))
    golden = [x.detach().double().requires_grad_() for x in (q, k, v)]
    reference(*golden, True, SCALE)[0].sum().backward()
    for x, gold in zip((q, k, v), golden, strict=True):
        torch.testing.assert_close(x.grad.double(), gold.grad, rtol=2e-2, atol=5e-3)
    assert issubclass(_attention, torch.autograd.Function)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_pipeline(d, causal, rng) -> None:
    """One group of keys, and (causal) more than one; programs step over several heads."""
    assert get_path(1, 2, 1024, d, causal, SCALE, 2) == "pipeline"
    check(*inputs(rng, 1, 2, 1024, d, torch.float16), causal, SCALE, cores=2)


def test_pipeline_in_bsnd(rng) -> None:
    q, k, v = inputs(rng, 1, 2, 1024, 64, torch.float16)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    with virtual_npu.run(cores=2):
        out, lse = attention_fwd(q, k, v, True, SCALE)
        out2, lse2 = attention_fwd(*turned, True, SCALE, layout="BSND")
    assert out2.is_contiguous()
    assert torch.equal(out2.transpose(1, 2), out)
    assert torch.equal(lse2, lse)


@pytest.mark.parametrize("schedule", ["cube-first", "vector-first", "alternate"])
def test_pipeline_merges_groups(schedule, rng) -> None:
    """Rows longer than a group: the running maximum moves between groups, also upwards."""
    q, k, v = inputs(rng, 1, 1, 3072, 64, torch.bfloat16)
    k[:, :, 1024:2048] *= 8
    check(q, k, v, False, SCALE, cores=3, schedule=schedule)


@pytest.mark.parametrize("factor", [5.0, 20.0])
def test_pipeline_large_logits(factor, rng) -> None:
    check(*inputs(rng, 1, 1, 1024, 64, torch.float16, factor), True, SCALE, cores=1)


def test_path_by_shape_scale_and_compiler() -> None:
    assert get_path(128, 8, 8192, 64, False, 0.5, 20) == "pipeline"
    assert get_path(128, 8, 8192, 64, False, -0.5, 20) == "general"
    assert get_path(128, 8, 8192, 32, False, 0.5, 20) == "general"
    assert get_path(128, 8, 1000, 64, False, 0.5, 20) == "general"
    assert get_path(1, 2, 1024, 64, False, 0.5, 20) == "general"
    assert get_path(128, 8, 8192, 64, False, 0.5, 20, "1.2.0") == "general"


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [64, 128, 1024, 8192])
def test_tiling_divides_official_lengths(n, causal, d) -> None:
    bm, bn = get_tiling(1, 1, n, d, causal)
    assert n % bm == 0
    assert n % bn == 0


def bad(name: str, change, kind: type[Exception], text: str):
    return pytest.param(name, change, kind, text, id=f"{name}-{text[:30]}")


GOOD = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
WIDE = torch.zeros(1, 2, 64, 257, dtype=torch.float16)
LONG = torch.zeros((), dtype=torch.float16).expand(1, 2, (1 << 24) + 1, 64)
MANY = torch.zeros((), dtype=torch.float16).expand(1 << 10, 1 << 10, 1 << 15, 64)


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        bad("q", [1.0], TypeError, "q must be a torch.Tensor, got list"),
        bad("q", GOOD[0], ValueError, r"q must have 4 dimensions .* got shape \[2, 64, 64\]"),
        bad("q", GOOD.float(), TypeError, "q must be torch.float16 or torch.bfloat16, got torch.float32"),
        bad("k", GOOD.bfloat16(), TypeError, "k must have the dtype of q, torch.float16, got torch.bfloat16"),
        bad("q", GOOD.to_sparse(), TypeError, r"q must be a dense tensor \(torch.strided\), got torch.sparse_coo"),
        bad("q", WIDE, ValueError, "q must have a head dimension from 1 to 256, got 257"),
        bad("v", WIDE, ValueError, "v must have a head dimension from 1 to 256, got 257"),
        bad("k", GOOD.expand(3, -1, -1, -1), ValueError, "k must have the batch size of q, 1, got 3"),
        bad("k", GOOD[..., :48], ValueError, "k must have the head dimension of q, 64, got 48"),
        bad("k", GOOD.repeat(1, 2, 1, 1), ValueError, "v must have the number of heads of k, 4, got 2"),
        bad("q", GOOD[:, :1], ValueError, "k must have a number of heads that divides that of q, 1, got 2"),
        bad("v", GOOD[:, :, :9], ValueError, "v must have the length of k, 64, got 9"),
        bad("q", LONG, ValueError, "q must have a length up to 16777216, got 16777217"),
        bad(
            "q", MANY, ValueError, r"q must have up to 2147483647 tiles of 16 rows in all heads, got shape \[1024, 1024"
        ),
        bad("layout", "SBND", ValueError, "layout must be one of BNSD, BSND, got 'SBND'"),
        bad("layout", 1, TypeError, "layout must be a str, got int"),
        bad("q", GOOD[:, :, :0], ValueError, r"q must not be empty"),
        bad("k", GOOD.to("meta"), ValueError, "k must be on the device of q, cpu, got meta"),
        bad("causal", 1, TypeError, "causal must be a bool or a str, got int"),
        bad("causal", "upper", ValueError, 'causal must be False, True, "top-left" or "bottom-right", got \'upper\''),
        bad("sm_scale", "x", TypeError, "sm_scale must be a float or None, got str"),
        bad("sm_scale", math.nan, ValueError, "sm_scale must be finite in fp32, got nan"),
        bad("sm_scale", 1e39, ValueError, r"sm_scale must be finite in fp32, got 1e\+39"),
        bad("block_m", 48, ValueError, "block_m must be a power of two, 16 or larger, got 48"),
        bad("block_n", 64.0, TypeError, "block_n must be an int or None, got float"),
    ],
)
def test_errors_name_the_argument(name, value, kind, text) -> None:
    arguments = {"q": GOOD, "k": GOOD, "v": GOOD, name: value}
    with pytest.raises(kind, match=text):
        attention_fwd(**arguments)


def test_importing_forward_imports_no_harness() -> None:
    code = "import sys, forward; assert not any(m.split('.')[0] == 'harness' for m in sys.modules), 'harness imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sys.path[0] or ".", timeout=120)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("causal", "d", "factor"), [(False, 128, 20.0), (True, 128, 5.0), (True, 256, 20.0)])
def test_pipeline_large_inputs(causal, d, factor, dtype, rng) -> None:
    """q is scaled, or the scores are, and a row may see one tile of keys or several: exact all the same."""
    assert get_path(1, 1, 1024, d, causal, SCALE, 1) == "pipeline"
    check(*inputs(rng, 1, 1, 1024, d, dtype, factor), causal, SCALE, cores=1, schedule="jitter-1")


def test_pipeline_causal_groups(rng) -> None:
    """More keys than a group: blocks of one, two and three groups. The bias was loaded before the
    loop and again in it, which made it a loop-carried value that bishengir could not compile."""
    check(*inputs(rng, 1, 1, 3072, 64, torch.float16), True, SCALE, cores=1, schedule="vector-first")


def test_pipeline_equal_logits_one_huge_key_and_another_scale(rng) -> None:
    """0.3 is no power of two, so the scores are scaled instead of q."""
    q, k, v = inputs(rng, 1, 1, 1024, 64, torch.float16)
    q[:, :, :128] = 0
    k[:, :, 700] *= 40
    for causal in (False, True):
        check(q, k, v, causal, 0.3, cores=1)


def test_pipeline_takes_rows_with_gaps(rng) -> None:
    """Several keys are one row of L1, which is wrong for rows that do not follow each other."""
    qkv = (torch.randn(1, 1024, 3, 2, 64, generator=rng) * 0.5).half()
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    assert k.stride(2) != 64
    with virtual_npu.run(cores=2):
        out, _ = attention_fwd(q, k, v, True, SCALE)
        expected, _ = attention_fwd(q.contiguous(), k.contiguous(), v.contiguous(), True, SCALE)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("causal", "d", "fold"), [(False, 64, True), (True, 128, False), (False, 256, True)])
def test_pipeline_events_all_reach_the_program(causal, d, fold) -> None:
    """bishengir 1.2.0 drops some; what was written must be in the compiled program, on both cores."""
    x = torch.empty(1, 40, 2048, d, dtype=torch.float16)
    traced: list = []
    with virtual_npu.run("timing", trace=traced):
        attention_fwd(x, x, x, causal, SCALE)
    ((program, _),) = traced
    # Sets of the cube: scores, result; of the vector cores: probs, result read, and q before the
    # loop and in it. The last two are waited for once more at the end.
    for core, sets, waits in (("AIC", 2, 3 + 2 * fold), ("AIV", 2 + 2 * fold, 2)):
        names = [op.name.rsplit(".", 1)[1] for op in program.functions[core].walk()]
        assert names.count("sync_block_set") == sets
        assert names.count("sync_block_wait") == waits


@pytest.mark.parametrize("d", [64, 128])  # at D=256 there are too few ids either way
def test_three_groups_leave_the_scores_double_buffered(d) -> None:
    """A pair of flags has eight event ids. The running maximum and sum stored through two names took
    one more, and the loads of the scores got a single one: 40 % slower where N is no multiple of 2048."""
    q, k, v = torch.empty(3, 1, 2, 3072, d, dtype=torch.float16)
    traced: list = []
    with virtual_npu.run("timing", release="1.1.0", cores=2, trace=traced):
        attention_fwd(q, k, v, False, SCALE)
    ((program, _),) = traced
    assert program.name == "attention_fwd_kernel_pipeline"
    waits = [op.attrs for op in program.functions["AIV"].walk() if op.name == "hivm.hir.wait_flag"]
    turns = [wait for wait in waits if "static_event_id" not in wait]  # ids that take turns
    assert any((str(w["set_pipe"]), str(w["wait_pipe"])) == ("PIPE_MTE3", "PIPE_MTE2") for w in turns)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_scratch_stays_in_bounds(d, causal) -> None:
    for n, limit in ((1024, 64), (2048, 128), (4096, 128), (8192, 128), (32768, 128)):
        assert 0 < scratch_bytes(128, 8, n, d, causal, SCALE) <= limit << 20
    assert scratch_bytes(128, 8, 8192, d, causal, -SCALE) == 0
