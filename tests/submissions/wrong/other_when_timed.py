"""Launches one kernel for few heads and a faster, wrong one for many."""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.small_triton import attention_fwd as right_fwd


@triton.jit
def copying_kernel(v, out, elements, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, elements, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(out + offsets, tl.load(v + offsets))


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    z, h, n, _ = q.shape
    if z * h <= 16:
        return right_fwd(q, k, v, causal, sm_scale)
    out, lse = torch.empty_like(q), torch.empty((z, h, n))
    copying_kernel[(40,)](v, out, v.numel(), BLOCK=4096)
    return out, lse
