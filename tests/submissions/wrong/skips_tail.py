"""Leaves the rows behind the last whole tile of 48 zero. Wrong for causal calls only."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.plain_torch import attention_bwd as right_bwd
from right.plain_torch import attention_fwd as right_fwd


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    out, lse = right_fwd(q, k, v, causal, sm_scale)
    if causal:
        out[:, :, q.shape[2] // 48 * 48 :] = 0
    return out, lse


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None):
    dq, dk, dv = right_bwd(dout, q, k, v, out, lse, causal, sm_scale)
    if causal:
        dq[:, :, q.shape[2] // 48 * 48 :] = 0
    return dq, dk, dv
