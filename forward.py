"""FlashAttention forward in Triton-Ascend for Ascend 910B.

Supported: q, k, v of shape [Z, H, N, D] in fp16 or bf16, any strides with a contiguous
last dimension, N >= 1, D in {16, 32, 64, 128, 256}, causal or not. Softmax is exact: fp32
statistics, a running maximum, fp32 accumulators.

Runs on triton-ascend 3.2.0 and later; needs only torch and triton-ascend on an NPU. CPU
tensors run on the virtual NPU of this repository's harness.

Versions
  1  FA-2 as in the textbook: one program for each core, tiles before the diagonal without a
     mask, NaN-propagating maximum (one vmax instead of five ops), masks from float compares
     (integer ones fall to the scalar unit), wide key tiles.
"""

import math

import torch
import triton
import triton.language as tl

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


@triton.jit
def _attention_fwd_inner(
    b_acc, b_l, b_m, b_q, k, v, stride_kn, stride_vn, o_m, scale, low, high, N, VALID,
    MASK_CAUSAL: tl.constexpr, MASK_TAIL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One query tile against the keys from `low` (a multiple of BN) to `high`."""
    for n in range(low, high, BN):
        p_k = tl.make_block_ptr(k, (N, D), (stride_kn, 1), (n, 0), (BN, D), (1, 0))
        p_v = tl.make_block_ptr(v, (N, D), (stride_vn, 1), (n, 0), (BN, D), (1, 0))
        b_k = tl.load(p_k)  # [BN, D]
        b_v = tl.load(p_v)  # [BN, D]
        b_s = tl.dot(b_q, tl.trans(b_k)) * scale  # [BM, BN]
        if MASK_CAUSAL or MASK_TAIL:
            # Compared as floats: integer compares of tensors fall to the scalar unit.
            o_n = (n + tl.arange(0, BN)).to(tl.float32)
            if MASK_CAUSAL:
                b_s = tl.where(o_m[:, None] >= o_n[None, :], b_s, float("-inf"))
            else:
                b_s = tl.where(o_n[None, :] < VALID, b_s, float("-inf"))
        # Every row has a key it may see in the first tile, so the maximum is finite.
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1), propagate_nan=tl.PropagateNan.ALL)
        b_p = tl.exp(b_s - b_m_new[:, None])
        b_alpha = tl.exp(b_m - b_m_new)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = b_acc * b_alpha[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)  # [BM, D]
        b_m = b_m_new
    return b_acc, b_l, b_m


@triton.jit
def attention_fwd_kernel_general(
    q, k, v, out, lse,
    stride_qz, stride_qh, stride_qn, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_on,
    scale, Z, H, N, VALID,
    STAGE: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Forward for every supported shape; BM and BN divide N.

    STAGE is a bit mask: 1 for keys that need no causal mask, 2 for those on the diagonal
    (causal is 3). TAIL: the keys from VALID to N are padding (causal rows never see them).
    Each program takes query tiles in turn, tiles of one position after another
    (query-tile-major), so that causal work is balanced.
    """
    heads = Z * H
    for t in range(tl.program_id(0), N // BM * heads, tl.num_programs(0)):
        i_m = t // heads
        i_z = (t % heads) // H
        i_h = (t % heads) % H
        q_head = q + i_z.to(tl.int64) * stride_qz + i_h.to(tl.int64) * stride_qh
        k_head = k + i_z.to(tl.int64) * stride_kz + i_h.to(tl.int64) * stride_kh
        v_head = v + i_z.to(tl.int64) * stride_vz + i_h.to(tl.int64) * stride_vh
        o_head = out + i_z.to(tl.int64) * stride_oz + i_h.to(tl.int64) * stride_oh
        p_q = tl.make_block_ptr(q_head, (N, D), (stride_qn, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_out = tl.make_block_ptr(o_head, (N, D), (stride_on, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_lse = tl.make_block_ptr(lse + (t % heads).to(tl.int64) * N, (N,), (1,), (i_m * BM,), (BM,), (0,))
        b_q = tl.load(p_q)  # [BM, D]
        o_m = (i_m * BM + tl.arange(0, BM)).to(tl.float32)
        b_m = tl.full([BM], float("-inf"), tl.float32)
        b_l = tl.zeros([BM], tl.float32)
        b_acc = tl.zeros([BM, D], tl.float32)
        if STAGE & 2:
            middle = i_m * BM // BN * BN
            end = (i_m + 1) * BM
        else:
            middle = VALID // BN * BN
            end = VALID
        b_acc, b_l, b_m = _attention_fwd_inner(
            b_acc, b_l, b_m, b_q, k_head, v_head, stride_kn, stride_vn, o_m, scale, 0, middle, N, VALID,
            False, False, BN, D,
        )  # fmt: skip
        if STAGE & 2 or TAIL:
            b_acc, b_l, b_m = _attention_fwd_inner(
                b_acc, b_l, b_m, b_q, k_head, v_head, stride_kn, stride_vn, o_m, scale, middle, end, N, VALID,
                STAGE & 2, TAIL, BN, D,
            )  # fmt: skip
        tl.store(p_out, (b_acc / b_l[:, None]).to(out.type.element_ty))
        tl.store(p_lse, b_m + tl.log(b_l))


def _prepare_device(tensor: torch.Tensor) -> None:
    """CPU tensors run on the virtual NPU, which is imported only then."""
    if tensor.device.type == "cpu":
        from harness import virtual_npu

        virtual_npu.install()


def _core_count() -> int:
    """AI cores of the active device (one cube core and two vector cores each)."""
    driver = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["num_aicore"])


def _check_tensor(name: str, tensor: torch.Tensor, like: torch.Tensor | None) -> None:
    """One input of the forward; see `attention_fwd` for what is allowed."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions [Z, H, N, D], got shape {list(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be torch.float16 or torch.bfloat16, got {tensor.dtype}")
    if 0 in tensor.shape:
        raise ValueError(f"{name} must not be empty, got shape {list(tensor.shape)}")
    if tensor.shape[3] not in HEAD_DIMS:
        raise ValueError(f"{name} must have a head dimension in {list(HEAD_DIMS)}, got {tensor.shape[3]}")
    if tensor.stride(3) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {list(tensor.stride())}")
    if like is None:
        return
    if tensor.shape != like.shape:
        raise ValueError(f"{name} must have the shape of q, {list(like.shape)}, got {list(tensor.shape)}")
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of q, {like.dtype}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of q, {like.device}, got {tensor.device}")


def _check_options(causal: bool, sm_scale: float | None) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    if sm_scale is None:
        return
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)):
        raise TypeError(f"sm_scale must be a float or None, got {type(sm_scale).__name__}")
    if not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale must be finite, got {sm_scale}")


def _check_block(name: str, size: int | None) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} must be an int or None, got {type(size).__name__}")
    if size < 16 or size & (size - 1):
        raise ValueError(f"{name} must be a power of two, 16 or larger, got {size}")


# Of the tiles that fit on chip with both vector cores at work, the fastest on the virtual NPU.
_TILES = {16: (128, 256), 32: (128, 256), 64: (128, 256), 128: (128, 256), 256: (64, 128)}
_TILES_MASKED = {16: (64, 256), 32: (64, 256), 64: (64, 256), 128: (64, 256), 256: (32, 128)}


def get_tiling(Z: int, H: int, N_CTX: int, HEAD_DIM: int, causal: bool) -> tuple[int, int]:
    """Tile sizes (BM, BN) of the general path for a shape.

    A mask needs room on chip, so shapes that need one (causal, or keys that do not fill the
    last tile) take smaller tiles. Tiles of fewer than 64 keys would make the compiler give
    up the split of a tile over the two vector cores.

    Raises:
        ValueError: HEAD_DIM is not supported.
    """
    if HEAD_DIM not in HEAD_DIMS:
        raise ValueError(f"HEAD_DIM must be one of {list(HEAD_DIMS)}, got {HEAD_DIM}")
    fitting = max(64, triton.next_power_of_2(N_CTX))
    bm, bn = (min(size, fitting) for size in _TILES[HEAD_DIM])
    if causal or N_CTX % bm or N_CTX % bn:
        bm, bn = (min(size, fitting) for size in _TILES_MASKED[HEAD_DIM])
        if bm == bn:  # bishengir 1.1.0 does not split a square masked tile either
            bm //= 2
    return bm, bn


def attention_fwd(q, k, v, causal=False, sm_scale=None, *, block_m=None, block_n=None):
    """softmax(q kᵀ · sm_scale) v and its log-sum-exp.

    Args:
        q, k, v: [Z, H, N, D], fp16 or bf16, one shape, dtype and device; any strides with a
            contiguous last dimension; D in {16, 32, 64, 128, 256}.
        causal: row i sees keys 0 to i.
        sm_scale: factor on the scores; default 1 / sqrt(D).
        block_m, block_n: tile sizes instead of those of `get_tiling`.

    Returns:
        out [Z, H, N, D] in q's dtype, and lse [Z, H, N], fp32, natural logarithm.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    _check_tensor("q", q, None)
    _check_tensor("k", k, q)
    _check_tensor("v", v, q)
    _check_options(causal, sm_scale)
    _check_block("block_m", block_m)
    _check_block("block_n", block_n)
    z, h, n, d = q.shape
    scale = d**-0.5 if sm_scale is None else float(sm_scale)
    _prepare_device(q)
    tile_m, tile_n = get_tiling(z, h, n, d, causal)
    bm, bn = block_m or tile_m, block_n or tile_n
    padded = triton.cdiv(n, max(bm, bn)) * max(bm, bn)
    if padded != n:
        # A tail on chip would need zeroed L1 tiles, and the compiler's zeroing races with the
        # matrix unit's reads (it does not wait for them): pad in global memory instead.
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, padded - n)) for x in (q, k, v))
    out = torch.empty((z, h, padded, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((z, h, padded), dtype=torch.float32, device=q.device)
    programs = min(_core_count(), padded // bm * z * h)
    attention_fwd_kernel_general[(programs,)](
        q, k, v, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        scale, z, h, padded, n,
        STAGE=3 if causal else 1, TAIL=padded != n, BM=bm, BN=bn, D=d,
    )  # fmt: skip
    if padded != n:
        return out[:, :, :n].contiguous(), lse[:, :, :n].contiguous()
    return out, lse


class _attention(torch.autograd.Function):
    """Differentiable attention; its arguments are those that the contest's grader passes."""

    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, BM=None, BN=None):
        out, lse = attention_fwd(q, k, v, causal, sm_scale, block_m=BM, block_n=BN)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.sm_scale = causal, sm_scale
        return out

    @staticmethod
    def backward(ctx, dout):
        from backward import attention_bwd

        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = attention_bwd(dout, q, k, v, out, lse, ctx.causal, ctx.sm_scale)
        return dq, dk, dv, None, None, None, None


attention = _attention.apply
