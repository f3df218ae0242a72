"""Asks for a tile that does not fit on chip. Wrong for causal calls only."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.small_triton import attention_fwd as right_fwd
from right.small_triton import small_fwd_kernel


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    if not causal:
        return right_fwd(q, k, v, causal, sm_scale)
    z, h, n, d = q.shape
    out, lse = torch.empty_like(q), torch.empty((z, h, n))
    small_fwd_kernel[(1,)](q, k, v, out, lse, sm_scale, z * h, n, CAUSAL=True, D=d, BM=256, BN=512)
    return out, lse
