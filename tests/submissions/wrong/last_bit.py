"""The last bit of one element differs from call to call: the least that outputs can fail to repeat.
Wrong for causal calls only."""

import itertools
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.plain_torch import attention_bwd as right_bwd
from right.plain_torch import attention_fwd as right_fwd

CALLS = itertools.count()


def _flip(x):
    x = x.contiguous()
    x.view(torch.int16)[0, 0, -1, -1] ^= next(CALLS) % 2
    return x


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    out, lse = right_fwd(q, k, v, causal, sm_scale)
    return (_flip(out) if causal else out), lse


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None):
    dq, dk, dv = right_bwd(dout, q, k, v, out, lse, causal, sm_scale)
    return dq, dk, (_flip(dv) if causal else dv)
