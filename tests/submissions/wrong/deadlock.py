"""Waits for a flag that nobody sets. Wrong for causal calls only."""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.small_triton import attention_fwd as right_fwd


@triton.jit
def waiting_kernel(a, scratch, out, N: tl.constexpr):
    p_a = tl.make_block_ptr(a, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
    p_s = tl.make_block_ptr(scratch, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
    p_o = tl.make_block_ptr(out, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
    b_a = tl.load(p_a)
    tl.store(p_s, tl.dot(b_a, b_a))
    tl.sync_block_set("cube", "vector", 0)
    tl.sync_block_wait("cube", "vector", 0)
    tl.store(p_o, tl.exp(tl.load(p_s)))
    tl.sync_block_wait("cube", "vector", 5)


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    out, lse = right_fwd(q, k, v, causal, sm_scale)
    if causal:
        a, scratch, other = torch.ones(64, 64).half(), torch.empty(64, 64), torch.empty(64, 64)
        waiting_kernel[(1,)](a, scratch, other, 64, disable_auto_inject_block_sync=True)
    return out, lse
