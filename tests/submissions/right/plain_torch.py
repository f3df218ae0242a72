"""Right values from plain PyTorch, for tests of the evaluator: no kernel, so never a time."""

import torch


def _scores(q, k, causal, sm_scale):
    scores = q.float() @ k.float().transpose(-1, -2) * sm_scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def attention_fwd(q, k, v, causal=False, sm_scale=None, *, block_m=None, block_n=None):
    scores = _scores(q, k, causal, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.empty_like(q)
    out.copy_(torch.exp(scores - lse.unsqueeze(-1)) @ v.float())
    return out, lse


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None):
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    p = torch.exp(_scores(q, k, causal, sm_scale) - lse.unsqueeze(-1))
    dout = dout.float()
    delta = (dout * out.float()).sum(-1, keepdim=True)
    ds = p * (dout @ v.float().transpose(-1, -2) - delta) * sm_scale
    dv = p.transpose(-1, -2) @ dout
    dq, dk = ds @ k.float(), ds.transpose(-1, -2) @ q.float()
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
