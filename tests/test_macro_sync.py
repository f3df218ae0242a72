"""The synchronisation operands of the matrix macro: all, or none."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import backward
import forward
from harness import virtual_npu
from harness.virtual_npu import mutation
from harness.virtual_npu.errors import UnknownOpError
from harness.virtual_npu.hivm import Op, Value
from harness.virtual_npu.launch import Launch
from harness.virtual_npu.ops_cube import sync_arguments, sync_texts

MACRO = "hivm.hir.mmadL1"


def default_solver(module):
    """A kernel file's pipeline without the option `sync_solver`."""
    options = {name: value for name, value in module._PIPELINE_OPTIONS.items() if name != "sync_solver"}
    return mock.patch.object(module, "_PIPELINE_OPTIONS", options)


@pytest.mark.parametrize("d", [64, 128])
def test_a_macro_without_events_drains_by_itself(rng, d) -> None:
    """The default solver leaves the macro's seven operands away where it synchronises around it;
    reading them failed with "not enough values to unpack (expected 7, got 0)" (a row of the
    ablation). They are then -1, as the compiler's last step fills them in."""
    q, k, v = ((torch.randn(1, 2, 1024, d, generator=rng) * 0.5).half() for _ in range(3))
    timed = torch.empty(1, 40, 1024, d).half()
    captured: list[Launch] = []
    with default_solver(forward):
        with virtual_npu.run("values", hazards=True, cores=1, release="1.1.0", capture=captured):
            out, _ = forward.attention_fwd(q, k, v, False, 0.5)
        with virtual_npu.run("timing", release="1.1.0") as drained:
            forward.attention_fwd(timed, timed, timed, False, 0.5)
    with virtual_npu.run("timing", release="1.1.0") as shipped:
        forward.attention_fwd(timed, timed, timed, False, 0.5)
    program = captured[0].program
    macros = [op for op in program.functions["AIC"].walk() if op.name == MACRO]
    assert any(not sync_arguments(op) for op in macros), "the compiler gives every macro its operands"
    assert len(mutation.syncs(program)) > 10
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.5)
    assert (out.double() - exact).abs().max() < 1e-3
    assert drained.ms > shipped.ms


def test_the_backward_is_timed_without_events_too() -> None:
    """As above: the same row of the backward."""
    x = torch.empty(1, 20, 1024, 256).half()
    lse = torch.empty(1, 20, 1024)
    with default_solver(backward), virtual_npu.run("timing", release="1.1.0") as record:
        backward.attention_bwd(x, x, x, x, x, lse, False, 0.5)
    assert record.ms > 0


def macro(count: int) -> Op:
    values = [Value(number, "i64") for number in range(7 + count)]
    return Op(MACRO, values, [], {"operandSegmentSizes": [1] * 7 + [count, 0, 0]}, [], "k.py:1", 1)


def test_all_or_none() -> None:
    assert sync_texts(macro(0), str) == ["-1"] * 7
    assert len(sync_arguments(macro(7))) == 7
    with pytest.raises(UnknownOpError, match="3 synchronisation operands instead of 7 or none"):
        sync_arguments(macro(3))
