"""FlashAttention forward in one small Triton-Ascend kernel: a start for one's own.

Rows must be a multiple of 64; nothing is tuned.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def small_fwd_kernel(
    q, k, v, out, lse, scale, heads, N, CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """One program for each core steps over tiles of BM query rows of all heads. BM differs from
    BN: bishengir 1.1.0 does not split a square masked tile over the two vector cores."""
    for tile in range(tl.program_id(0), heads * (N // BM), tl.num_programs(0)):
        i_m = tile % (N // BM)
        base = (tile // (N // BM)).to(tl.int64) * N * D
        b_q = tl.load(tl.make_block_ptr(q + base, (N, D), (D, 1), (i_m * BM, 0), (BM, D), (1, 0)))  # [BM, D]
        b_m = tl.full([BM], float("-inf"), tl.float32)
        b_l = tl.zeros([BM], tl.float32)
        b_acc = tl.zeros([BM, D], tl.float32)
        o_m = (i_m * BM + tl.arange(0, BM)).to(tl.float32)
        for n in range(0, i_m * BM + BM if CAUSAL else N, BN):
            b_k = tl.load(tl.make_block_ptr(k + base, (N, D), (D, 1), (n, 0), (BN, D), (1, 0)))  # [BN, D]
            b_s = tl.dot(b_q, tl.trans(b_k)) * scale  # [BM, BN]
            if CAUSAL:
                o_n = (n + tl.arange(0, BN)).to(tl.float32)
                b_s = tl.where(o_m[:, None] >= o_n[None, :], b_s, float("-inf"))
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_p = tl.exp(b_s - b_m_new[:, None])
            b_alpha = tl.exp(b_m - b_m_new)
            b_l = b_l * b_alpha + tl.sum(b_p, 1)
            b_v = tl.load(tl.make_block_ptr(v + base, (N, D), (D, 1), (n, 0), (BN, D), (1, 0)))  # [BN, D]
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None])
            b_m = b_m_new
        p_out = tl.make_block_ptr(out + base, (N, D), (D, 1), (i_m * BM, 0), (BM, D), (1, 0))
        tl.store(p_out, (b_acc / b_l[:, None]).to(out.type.element_ty))
        tl.store(lse + (tile // (N // BM)).to(tl.int64) * N + i_m * BM + tl.arange(0, BM), b_m + tl.log(b_l))


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    """out and lse of [Z, H, N, D] tensors that are contiguous."""
    z, h, n, d = q.shape
    if q.device.type == "cpu":
        from harness import virtual_npu

        virtual_npu.install()
    driver = triton.runtime.driver.active
    cores = driver.utils.get_device_properties(driver.get_current_device())["num_aicore"]
    out = torch.empty_like(q)
    lse = torch.empty((z, h, n), dtype=torch.float32, device=q.device)
    scale = d**-0.5 if sm_scale is None else sm_scale
    small_fwd_kernel[(cores,)](q, k, v, out, lse, scale, z * h, n, CAUSAL=causal, D=d, BM=32, BN=64)
    return out, lse
