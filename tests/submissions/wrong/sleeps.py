"""Waits instead of computing. Wrong for causal calls only."""

import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.plain_torch import attention_bwd as right_bwd
from right.plain_torch import attention_fwd as right_fwd


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    out, lse = right_fwd(q, k, v, causal, sm_scale)
    if causal:
        time.sleep(0.5)
        out = torch.empty_like(out)
    return out, lse


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None):
    dq, dk, dv = right_bwd(dout, q, k, v, out, lse, causal, sm_scale)
    if causal:
        time.sleep(0.5)
        dq = torch.empty_like(dq)
    return dq, dk, dv
