"""Lets the vendor's operator do the work."""

import torch
import torch_npu


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    options = {}
    if causal:
        options = {"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu_(1).to(q.device), "sparse_mode": 2}
    out, high, total = torch_npu.npu_fusion_attention(q, k, v, q.shape[1], "BNSD", scale=sm_scale, **options)[:3]
    return out, high[..., 0] + total[..., 0].log()
