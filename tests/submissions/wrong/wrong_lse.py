"""Returns a base-2 lse; swaps dk and dv in the backward. Wrong for causal calls only."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.plain_torch import attention_bwd as right_bwd
from right.plain_torch import attention_fwd as right_fwd


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    out, lse = right_fwd(q, k, v, causal, sm_scale)
    if causal:
        lse = lse * 1.4426950408889634
    return out, lse


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None):
    dq, dk, dv = right_bwd(dout, q, k, v, out, lse, causal, sm_scale)
    if causal:
        dk, dv = dv, dk
    return dq, dk, dv
