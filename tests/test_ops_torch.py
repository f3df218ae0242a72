"""The autograd function and the two custom ops: gradients, opcheck, torch.compile, export."""

from __future__ import annotations

import math

import pytest
import torch

import forward
from backward import attention_bwd, attention_bwd_op
from forward import attention, attention_fwd, attention_fwd_op, get_tiling
from harness import virtual_npu

from .test_shapes import golden

LAYOUTS = ("BNSD", "BSND")


def problem(layout: str = "BNSD", grad: bool = True, sq: int = 40, sk: int = 70) -> list[torch.Tensor]:
    """q, k, v with two query heads for one key head and a head dim of 24."""
    rng = torch.Generator().manual_seed(6)
    shapes = ((1, 2, sq, 24), (1, 1, sk, 24), (1, 1, sk, 32))
    tensors = [torch.randn(s, generator=rng).half() for s in shapes]
    if layout == "BSND":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    return [x.requires_grad_(grad) for x in tensors]


def expected_grads(q, k, v, dout, causal, layout: str = "BNSD") -> list[torch.Tensor]:
    """dq, dk and dv in fp64, in the layout of the inputs."""

    def turn(x):
        return x.transpose(1, 2) if layout == "BSND" else x

    q, k, v, dout = (turn(x.detach()) for x in (q, k, v, dout))
    return [turn(x) for x in golden(q, k, v, dout, causal, q.shape[3] ** -0.5)[2:]]


def close(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize(("causal", "layout"), [(False, "BNSD"), (True, "BSND"), ("bottom-right", "BSND")])
def test_gradients(causal, layout) -> None:
    q, k, v = problem(layout)
    out = attention(q, k, v, causal, None, None, None, layout)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).half()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    close(grads, expected_grads(q, k, v, dout, causal, layout))


def test_gradients_agree_with_differences() -> None:
    """Like gradcheck, which needs fp64: the loss's change along a direction, by fp64 attention,
    is what the gradients say."""
    tensors = problem()
    out = attention(*tensors, "bottom-right", None)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).half()
    grads = torch.autograd.grad(out, tensors, weights)
    steps = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).double() for i, x in enumerate(tensors)]

    def loss(size: float) -> float:
        moved = [x.detach().double() + size * step for x, step in zip(tensors, steps, strict=True)]
        result = golden(*moved, torch.zeros(out.shape), "bottom-right", 24**-0.5)[0]
        return float((result * weights.double()).sum())

    difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    said = sum(float((grad.double() * step).sum()) for grad, step in zip(grads, steps, strict=True))
    assert said == pytest.approx(difference, rel=5e-3)


def test_the_op_has_the_same_gradients() -> None:
    q, k, v = problem()
    out, lse = torch.ops.ascend_attention.forward(q, k, v, "top-left")
    assert not lse.requires_grad
    dout = torch.ones_like(out)
    by_op = torch.autograd.grad(out, (q, k, v), dout)
    by_function = torch.autograd.grad(attention(q, k, v, True, None), (q, k, v), dout)
    assert all(torch.equal(a, b) for a, b in zip(by_op, by_function, strict=True))


def test_only_some_inputs_need_gradients() -> None:
    q, k, v = problem(grad=False)
    k.requires_grad_()
    out = attention(q, k, v, False, None)
    out.sum().backward()
    close([k.grad], expected_grads(q, k, v, torch.ones(out.shape), False)[1:2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout) -> None:
    tensors = problem(layout)
    torch.library.opcheck(attention_fwd_op, (*tensors, "bottom-right", 0.3, None, None, layout))
    tensors = [x.detach() for x in tensors]
    out, lse = attention_fwd(*tensors, "bottom-right", 0.3, layout=layout)
    arguments = (torch.ones_like(out), *tensors, out, lse, "bottom-right", 0.3, layout)
    torch.library.opcheck(attention_bwd_op, arguments)


class Module(torch.nn.Module):
    """A small attention block, in BSND as projections give it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv = torch.nn.Linear(48, 3 * 48, dtype=torch.float16)
        self.out = torch.nn.Linear(48, 48, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(attention(q, k, v, True, None, None, None, "BSND").flatten(2))


def module_and_input() -> tuple[Module, torch.Tensor]:
    torch.manual_seed(9)
    return Module(), torch.randn(1, 33, 48).half()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while tracing
def test_compiled_module_calls_the_ops() -> None:
    """One graph without breaks, with one call of each op, and the bits of eager mode."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)  # without a code generator
    module, x = module_and_input()
    eager = module(x)
    eager.sum().backward()
    wanted = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    got = compiled(x)
    got.sum().backward()
    assert torch.equal(got, eager)
    assert all(torch.equal(p.grad, want) for p, want in zip(module.parameters(), wanted, strict=True))
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert len(graphs) == 2
    assert targets.count("ascend_attention.forward.default") == 1
    assert targets.count("ascend_attention.backward.default") == 1


def test_export_holds_the_op() -> None:
    module, x = module_and_input()
    program = torch.export.export(module, (x,))
    assert any(str(node.target) == "ascend_attention.forward.default" for node in program.graph.nodes)
    assert torch.equal(program.module()(x), module(x))


def test_fake_tensors_are_checked_like_real_ones() -> None:
    q, k, v = (x.to("meta") for x in problem(grad=False))
    out, lse = attention_fwd_op(q, k, v)
    assert out.shape == (1, 2, 40, 32)
    assert lse.shape == (1, 2, 40)
    with pytest.raises(ValueError, match="v must have the length of k, 70, got 9"):
        attention_fwd_op(q, k, v[:, :, :9])
    with pytest.raises(ValueError, match="causal must be"):
        attention_fwd_op(q, k, v, "lower")


def test_a_graders_tiles_keep_the_fast_path(monkeypatch) -> None:
    """The grader passes get_tiling's tiles to `attention`; taken as a choice of tiles they sent
    every official shape to the general path."""
    taken = []
    monkeypatch.setattr(forward, "_forward_pipeline", lambda q, *_: taken.append(q.shape) or (q, q[..., 0].float()))
    q = torch.zeros(1, 2, 1024, 64, dtype=torch.float16)
    with virtual_npu.run("timing", cores=2):
        attention(q, q, q, False, 0.5, *get_tiling(1, 2, 1024, 64, False))
        assert taken == [q.shape]
        attention(q, q, q, False, 0.5, 64, 64)
        assert taken == [q.shape]


def test_two_runs_give_the_same_bits() -> None:
    """Grouped heads, tails, different lengths: no result hangs on the number of programs."""
    q, k, v = problem(grad=False, sq=130, sk=200)
    runs = []
    for cores in (1, 20, 20):
        with virtual_npu.run(cores=cores):
            out, lse = attention_fwd(q, k, v, "bottom-right")
            runs.append((out, lse, *attention_bwd(torch.ones_like(out), q, k, v, out, lse, "bottom-right")))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_errors_come_before_a_launch(monkeypatch) -> None:
    q, k, v = problem()
    monkeypatch.setattr(forward, "_prepare_device", lambda _: pytest.fail("the device was touched"))
    for arguments, kind, text in (
        ((q, k, v, "left", None), ValueError, "causal must be False, True"),
        ((q, k, v, True, math.nan), ValueError, "sm_scale must be finite in fp32, got nan"),
        ((q[0], k, v, True, None), ValueError, "q must have 4 dimensions"),
        ((q, k, v, True, None, 63), ValueError, "block_m must be a power of two"),
        ((q, k[..., :8], v, True, None), ValueError, "k must have the head dimension of q, 24, got 8"),
    ):
        with pytest.raises(kind, match=text):
            attention(*arguments)
