"""FlashAttention backward in Triton-Ascend for Ascend 910B.

Supported: what `forward.attention_fwd` supports; dout with any strides. The probabilities
are recomputed from q, k and lse, never stored for all heads. Each tile of dq, dk and dv has
one writer and there are no atomics, so gradients repeat bit for bit.

Runs on triton-ascend 3.2.0 and later; needs only torch and triton-ascend on an NPU. CPU
tensors run on the virtual NPU of this repository's harness.

Versions
  1  Three kernels: delta = rowsum(out * dout) on the vector cores; dk and dv of a key tile
     over the query tiles, accumulated in L0C; dq of a query tile over the key tiles,
     accumulated in L0C. Causal skips tiles. The softmax scale is applied once to each
     finished tile instead of to every score gradient.
"""

import math

import torch
import triton
import triton.language as tl

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


@triton.jit
def attention_bwd_kernel_delta(
    out, dout, delta,
    stride_oz, stride_oh, stride_on, stride_dz, stride_dh, stride_dn,
    Z, H, N,
    BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout), fp32. Vector cores only."""
    tiles = N // BM
    for t in range(tl.program_id(0), tiles * Z * H, tl.num_programs(0)):
        i_m = t % tiles
        i_z = t // tiles // H
        i_h = t // tiles % H
        o_head = out + i_z.to(tl.int64) * stride_oz + i_h.to(tl.int64) * stride_oh
        d_head = dout + i_z.to(tl.int64) * stride_dz + i_h.to(tl.int64) * stride_dh
        p_out = tl.make_block_ptr(o_head, (N, D), (stride_on, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_dout = tl.make_block_ptr(d_head, (N, D), (stride_dn, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_delta = tl.make_block_ptr(delta + (t // tiles).to(tl.int64) * N, (N,), (1,), (i_m * BM,), (BM,), (0,))
        b_delta = tl.sum(tl.load(p_out).to(tl.float32) * tl.load(p_dout).to(tl.float32), 1)  # [BM]
        tl.store(p_delta, b_delta)


@triton.jit
def _attention_bwd_inner_dkdv(
    b_dk, b_dv, q_head, dout_head, p_k, p_v, lse_head, delta_head, stride_qn, stride_dn, o_n, scale, low, high, N,
    MASK: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A key tile against the query rows from `low` to `high`."""
    for m in range(low, high, BM):
        p_q = tl.make_block_ptr(q_head, (N, D), (stride_qn, 1), (m, 0), (BM, D), (1, 0))
        p_do = tl.make_block_ptr(dout_head, (N, D), (stride_dn, 1), (m, 0), (BM, D), (1, 0))
        p_lse = tl.make_block_ptr(lse_head, (N,), (1,), (m,), (BM,), (0,))
        p_delta = tl.make_block_ptr(delta_head, (N,), (1,), (m,), (BM,), (0,))
        # A dot may overwrite its left operand on chip: what is used twice is loaded twice.
        b_s = tl.dot(tl.load(p_q), tl.trans(tl.load(p_k))) * scale  # [BM, BN]
        b_p = tl.exp(b_s - tl.load(p_lse)[:, None])
        if MASK:
            o_m = (m + tl.arange(0, BM)).to(tl.float32)
            b_p = tl.where(o_m[:, None] >= o_n[None, :], b_p, 0.0)
        b_do = tl.load(p_do)  # [BM, D]
        b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dv)  # [BN, D]
        b_dp = tl.dot(tl.load(p_do), tl.trans(tl.load(p_v)))  # [BM, BN]
        b_ds = b_p * (b_dp - tl.load(p_delta)[:, None])
        b_q = tl.load(p_q)  # [BM, D]
        b_dk = tl.dot(tl.trans(b_ds.to(b_q.dtype)), b_q, b_dk)  # [BN, D]
    return b_dk, b_dv


@triton.jit
def attention_bwd_kernel_dkdv(
    q, k, v, dout, lse, delta, dk, dv,
    stride_qz, stride_qh, stride_qn, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_dz, stride_dh, stride_dn,
    scale, Z, H, N,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk and dv, one key tile at a time; dk and dv are contiguous; BM and BN divide N."""
    heads = Z * H
    for t in range(tl.program_id(0), N // BN * heads, tl.num_programs(0)):
        i_n = t // heads
        i_head = t % heads
        i_z = i_head // H
        i_h = i_head % H
        q_head = q + i_z.to(tl.int64) * stride_qz + i_h.to(tl.int64) * stride_qh
        k_head = k + i_z.to(tl.int64) * stride_kz + i_h.to(tl.int64) * stride_kh
        v_head = v + i_z.to(tl.int64) * stride_vz + i_h.to(tl.int64) * stride_vh
        dout_head = dout + i_z.to(tl.int64) * stride_dz + i_h.to(tl.int64) * stride_dh
        lse_head = lse + i_head.to(tl.int64) * N
        delta_head = delta + i_head.to(tl.int64) * N
        base = i_head.to(tl.int64) * N * D
        p_k = tl.make_block_ptr(k_head, (N, D), (stride_kn, 1), (i_n * BN, 0), (BN, D), (1, 0))
        p_v = tl.make_block_ptr(v_head, (N, D), (stride_vn, 1), (i_n * BN, 0), (BN, D), (1, 0))
        p_dk = tl.make_block_ptr(dk + base, (N, D), (D, 1), (i_n * BN, 0), (BN, D), (1, 0))
        p_dv = tl.make_block_ptr(dv + base, (N, D), (D, 1), (i_n * BN, 0), (BN, D), (1, 0))
        o_n = (i_n * BN + tl.arange(0, BN)).to(tl.float32)
        b_dk = tl.zeros([BN, D], tl.float32)
        b_dv = tl.zeros([BN, D], tl.float32)
        if CAUSAL:
            first = i_n * BN // BM * BM
            middle = (i_n * BN + BN + BM - 1) // BM * BM
            b_dk, b_dv = _attention_bwd_inner_dkdv(
                b_dk, b_dv, q_head, dout_head, p_k, p_v, lse_head, delta_head, stride_qn, stride_dn, o_n,
                scale, first, middle, N, True, BM, D,
            )  # fmt: skip
        else:
            middle = 0
        b_dk, b_dv = _attention_bwd_inner_dkdv(
            b_dk, b_dv, q_head, dout_head, p_k, p_v, lse_head, delta_head, stride_qn, stride_dn, o_n,
            scale, middle, N, N, False, BM, D,
        )  # fmt: skip
        tl.store(p_dk, (b_dk * scale).to(dk.type.element_ty))
        tl.store(p_dv, b_dv.to(dv.type.element_ty))


@triton.jit
def _attention_bwd_inner_dq(
    b_dq, p_q, p_do, k_head, v_head, b_lse, b_delta, stride_kn, stride_vn, o_m, scale, low, high, N, VALID,
    MASK_CAUSAL: tl.constexpr, MASK_TAIL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A query tile against the keys from `low` to `high`."""
    for n in range(low, high, BN):
        p_k = tl.make_block_ptr(k_head, (N, D), (stride_kn, 1), (n, 0), (BN, D), (1, 0))
        p_v = tl.make_block_ptr(v_head, (N, D), (stride_vn, 1), (n, 0), (BN, D), (1, 0))
        b_s = tl.dot(tl.load(p_q), tl.trans(tl.load(p_k))) * scale  # [BM, BN]
        b_p = tl.exp(b_s - b_lse[:, None])
        if MASK_CAUSAL or MASK_TAIL:
            o_n = (n + tl.arange(0, BN)).to(tl.float32)
            if MASK_CAUSAL:
                b_p = tl.where(o_m[:, None] >= o_n[None, :], b_p, 0.0)
            else:
                # Of a key of padding exp(0 - lse) may overflow, and infinity times its zeros is NaN.
                b_p = tl.where(o_n[None, :] < VALID, b_p, 0.0)
        b_dp = tl.dot(tl.load(p_do), tl.trans(tl.load(p_v)))  # [BM, BN]
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_k = tl.load(p_k)  # [BN, D]
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq)  # [BM, D]
    return b_dq


@triton.jit
def attention_bwd_kernel_dq(
    q, k, v, dout, lse, delta, dq,
    stride_qz, stride_qh, stride_qn, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_dz, stride_dh, stride_dn,
    scale, Z, H, N, VALID,
    CAUSAL: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq, one query tile at a time; dq is contiguous; BM and BN divide N.

    TAIL: the keys from VALID to N are padding (causal rows never see them).
    """
    heads = Z * H
    for t in range(tl.program_id(0), N // BM * heads, tl.num_programs(0)):
        i_m = t // heads
        i_head = t % heads
        i_z = i_head // H
        i_h = i_head % H
        q_head = q + i_z.to(tl.int64) * stride_qz + i_h.to(tl.int64) * stride_qh
        k_head = k + i_z.to(tl.int64) * stride_kz + i_h.to(tl.int64) * stride_kh
        v_head = v + i_z.to(tl.int64) * stride_vz + i_h.to(tl.int64) * stride_vh
        dout_head = dout + i_z.to(tl.int64) * stride_dz + i_h.to(tl.int64) * stride_dh
        p_q = tl.make_block_ptr(q_head, (N, D), (stride_qn, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_do = tl.make_block_ptr(dout_head, (N, D), (stride_dn, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_dq = tl.make_block_ptr(dq + i_head.to(tl.int64) * N * D, (N, D), (D, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_lse = tl.make_block_ptr(lse + i_head.to(tl.int64) * N, (N,), (1,), (i_m * BM,), (BM,), (0,))
        p_delta = tl.make_block_ptr(delta + i_head.to(tl.int64) * N, (N,), (1,), (i_m * BM,), (BM,), (0,))
        o_m = (i_m * BM + tl.arange(0, BM)).to(tl.float32)
        b_lse = tl.load(p_lse)  # [BM]
        b_delta = tl.load(p_delta)  # [BM]
        b_dq = tl.zeros([BM, D], tl.float32)
        if CAUSAL:
            middle = i_m * BM // BN * BN
            end = (i_m + 1) * BM
        else:
            middle = VALID // BN * BN
            end = VALID
        b_dq = _attention_bwd_inner_dq(
            b_dq, p_q, p_do, k_head, v_head, b_lse, b_delta, stride_kn, stride_vn, o_m, scale, 0, middle, N, VALID,
            False, False, BN, D,
        )  # fmt: skip
        if CAUSAL or TAIL:
            b_dq = _attention_bwd_inner_dq(
                b_dq, p_q, p_do, k_head, v_head, b_lse, b_delta, stride_kn, stride_vn, o_m, scale,
                middle, end, N, VALID, CAUSAL, TAIL, BN, D,
            )  # fmt: skip
        tl.store(p_dq, (b_dq * scale).to(dq.type.element_ty))


def _prepare_device(tensor: torch.Tensor) -> None:
    """CPU tensors run on the virtual NPU, which is imported only then."""
    if tensor.device.type == "cpu":
        from harness import virtual_npu

        virtual_npu.install()


def _device_counts() -> tuple[int, int]:
    """AI cores of the active device, and its vector cores."""
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(driver.get_current_device())
    return int(properties["num_aicore"]), int(properties.get("num_vectorcore", 2 * properties["num_aicore"]))


def _check_tensor(name: str, tensor: torch.Tensor, like: torch.Tensor | None) -> None:
    """One of the [Z, H, N, D] inputs; see `attention_bwd` for what is allowed."""
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
    if like is None:
        return
    if tensor.shape != like.shape:
        raise ValueError(f"{name} must have the shape of q, {list(like.shape)}, got {list(tensor.shape)}")
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of q, {like.dtype}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of q, {like.device}, got {tensor.device}")


def _check_lse(lse: torch.Tensor, q: torch.Tensor) -> None:
    if not isinstance(lse, torch.Tensor):
        raise TypeError(f"lse must be a torch.Tensor, got {type(lse).__name__}")
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse must have shape {list(q.shape[:3])}, got {list(lse.shape)}")
    if lse.dtype != torch.float32:
        raise TypeError(f"lse must be torch.float32, got {lse.dtype}")
    if lse.device != q.device:
        raise ValueError(f"lse must be on the device of q, {q.device}, got {lse.device}")


def _check_options(causal: bool, sm_scale: float | None) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    if sm_scale is None:
        return
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)):
        raise TypeError(f"sm_scale must be a float or None, got {type(sm_scale).__name__}")
    if not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale must be finite, got {sm_scale}")


# bishengir 1.2.0 cuts vector loops in two and then fails to split them over the two vector
# cores: every store lands under a sub-block-0 guard and the second core repeats the first one's
# work. One loop keeps the split. 1.1.0 compiles to the same either way.
_OPTIONS = {"tile_mix_vector_loop": 1}

# (BM, BN) of the dk/dv kernel and of the dq kernel, by head dimension: of the tiles that fit
# on chip with both vector cores at work, the fastest on the virtual NPU.
_TILES_DKDV = {16: (128, 128), 32: (128, 128), 64: (128, 128), 128: (128, 64), 256: (128, 32)}
_TILES_DQ = {16: (128, 128), 32: (128, 128), 64: (128, 128), 128: (128, 128), 256: (64, 128)}


def get_tiling_bwd(N_CTX: int, HEAD_DIM: int, causal: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tile sizes (BM, BN) of the dk/dv kernel and of the dq kernel.

    Raises:
        ValueError: HEAD_DIM is not supported.
    """
    if HEAD_DIM not in HEAD_DIMS:
        raise ValueError(f"HEAD_DIM must be one of {list(HEAD_DIMS)}, got {HEAD_DIM}")
    return _TILES_DKDV[HEAD_DIM], _TILES_DQ[HEAD_DIM]


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None):
    """Gradients of `forward.attention_fwd`.

    Args:
        dout: gradient of out, [Z, H, N, D], any strides.
        q, k, v, out: as given to and returned by the forward. A tensor whose last dimension
            is not contiguous is copied once.
        lse: [Z, H, N], fp32, from the forward.
        causal, sm_scale: as in the forward.

    Returns:
        dq, dk, dv: [Z, H, N, D], contiguous, in q's dtype.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    _check_tensor("q", q, None)
    for name, tensor in (("dout", dout), ("k", k), ("v", v), ("out", out)):
        _check_tensor(name, tensor, q)
    _check_lse(lse, q)
    _check_options(causal, sm_scale)
    z, h, n, d = q.shape
    scale = d**-0.5 if sm_scale is None else float(sm_scale)
    _prepare_device(q)
    (dkdv_m, dkdv_n), (dq_m, dq_n) = get_tiling_bwd(n, d, causal)
    widest = max(dkdv_m, dkdv_n, dq_m, dq_n)
    padded = triton.cdiv(n, widest) * widest
    q, k, v, out, dout = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v, out, dout))
    lse = lse.contiguous()
    if padded != n:
        # Rows of zeros add nothing: their dout is 0. The dq kernel masks keys of padding.
        q, k, v, out, dout = (torch.nn.functional.pad(x, (0, 0, 0, padded - n)) for x in (q, k, v, out, dout))
        lse = torch.nn.functional.pad(lse, (0, padded - n))
    cores, vector_cores = _device_counts()
    delta = torch.empty((z, h, padded), dtype=torch.float32, device=q.device)
    dq, dk, dv = (torch.empty((z, h, padded, d), dtype=q.dtype, device=q.device) for _ in range(3))
    rows = min(32, padded)
    attention_bwd_kernel_delta[(min(vector_cores, padded // rows * z * h),)](
        out, dout, delta, *out.stride()[:3], *dout.stride()[:3], z, h, padded, BM=rows, D=d
    )
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    attention_bwd_kernel_dkdv[(min(cores, padded // dkdv_n * z * h),)](
        q, k, v, dout, lse, delta, dk, dv, *strides, scale, z, h, padded,
        CAUSAL=causal, BM=dkdv_m, BN=dkdv_n, D=d, **_OPTIONS,
    )  # fmt: skip
    attention_bwd_kernel_dq[(min(cores, padded // dq_m * z * h),)](
        q, k, v, dout, lse, delta, dq, *strides, scale, z, h, padded, n,
        CAUSAL=causal, TAIL=padded != n, BM=dq_m, BN=dq_n, D=d, **_OPTIONS,
    )  # fmt: skip
    if padded != n:
        dq, dk, dv = (x[:, :, :n].contiguous() for x in (dq, dk, dv))
    return dq, dk, dv
