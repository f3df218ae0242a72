"""A factor far below the tolerance that differs from call to call: outputs must repeat bit for bit.
Wrong for causal calls only."""

import itertools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.plain_torch import attention_bwd as right_bwd
from right.plain_torch import attention_fwd as right_fwd

CALLS = itertools.count()


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    out, lse = right_fwd(q, k, v, causal, sm_scale)
    if causal:
        out = (out.float() * (1 + 1e-3 * (next(CALLS) % 2))).to(out.dtype)
    return out, lse


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None):
    dq, dk, dv = right_bwd(dout, q, k, v, out, lse, causal, sm_scale)
    if causal:
        dq = (dq.float() * (1 + 1e-3 * (next(CALLS) % 2))).to(dq.dtype)
    return dq, dk, dv
