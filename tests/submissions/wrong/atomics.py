"""Adds up dq with atomics, so that its bits depend on the order of the blocks."""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.plain_torch import attention_bwd as right_bwd


@triton.jit
def adding_kernel(part, total, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.atomic_add(total + offsets, tl.load(part + tl.program_id(0) * BLOCK + offsets))


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None):
    dq, dk, dv = right_bwd(dout, q, k, v, out, lse, causal, sm_scale)
    if causal:
        total = torch.zeros(dq.numel())
        adding_kernel[(2,)](torch.cat([dq.flatten(), dq.flatten()]).float() / 2, total, dq.numel())
        dq = total.view(dq.shape).to(dq.dtype)
    return dq, dk, dv
