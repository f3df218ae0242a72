"""The baseline: textbook FlashAttention-2 in Triton-Ascend, as public teams start out.

Forward and backward follow the algorithm line by line: one program for each core steps
over tiles, the compiler splits cube and vector work, nothing overlaps across tiles. The
forward has the three choices with which times on a real 910B3 were published (tile size,
place of the accumulator, tile order), so that the virtual NPU can be calibrated on it, and
`lazy`, which leaves out the running maximum: wrong for real inputs, published, timed only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ACCUMULATORS = ("ub", "gm")
ORDERS = ("hz", "m")


@triton.jit
def _rescale_in_slices(p_acc, b_pv, b_alpha, BM: tl.constexpr, D: tl.constexpr, SLICES: tl.constexpr):
    """acc = acc * alpha + pv on an accumulator in global memory, a few rows at a time."""
    ROWS: tl.constexpr = BM // SLICES
    b_acc = tl.load(p_acc)  # [BM, D]
    for i in range(SLICES):
        b_part = tl.extract_slice(b_acc, (i * ROWS, 0), (ROWS, D), (1, 1))
        b_new = tl.extract_slice(b_pv, (i * ROWS, 0), (ROWS, D), (1, 1))
        b_scale = tl.extract_slice(b_alpha, [i * ROWS], [ROWS], [1])
        b_acc = tl.insert_slice(b_acc, b_part * b_scale[:, None] + b_new, (i * ROWS, 0), (ROWS, D), (1, 1))
    tl.store(p_acc, b_acc)


@triton.jit
def _attend(
    b_acc, b_l, b_m, b_q, p_k, p_v, p_acc, o_m, scale, low, high,
    MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    GM_ACC: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """One query tile against the keys from `low` to `high`."""
    p_k = tl.advance(p_k, (low, 0))
    p_v = tl.advance(p_v, (low, 0))
    for n in range(low, high, BN):
        b_k = tl.load(p_k)  # [BN, D]
        b_s = tl.dot(b_q, tl.trans(b_k))  # [BM, BN]
        b_s = b_s * scale
        if MASKED:
            # Compared as floats: integers fall to the scalar unit.
            o_n = (n + tl.arange(0, BN)).to(tl.float32)
            b_s = tl.where(o_m.to(tl.float32)[:, None] >= o_n[None, :], b_s, -1.0e6)
        if LAZY:
            b_p = tl.exp(b_s)
            b_l = b_l + tl.sum(b_p, 1)
            b_alpha = b_l
        else:
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_p = tl.exp(b_s - b_m_new[:, None])
            b_alpha = tl.exp(b_m - b_m_new)
            b_l = b_l * b_alpha + tl.sum(b_p, 1)
            b_m = b_m_new
        b_v = tl.load(p_v)  # [BN, D]
        if GM_ACC:
            b_pv = tl.dot(b_p.to(b_v.dtype), b_v)
            SLICES: tl.constexpr = 4
            if LAZY:
                tl.store(p_acc, tl.load(p_acc) + b_pv)
            else:
                _rescale_in_slices(p_acc, b_pv, b_alpha, BM, D, SLICES)
        else:
            if not LAZY:
                b_acc = b_acc * b_alpha[:, None]
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)
        p_k = tl.advance(p_k, (BN, 0))
        p_v = tl.advance(p_v, (BN, 0))
    return b_acc, b_l, b_m


@triton.jit
def textbook_fwd_kernel(
    q, k, v, out, lse, acc, scale, stride_z, stride_h, stride_n, Z, H, N,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, GM_ACC: tl.constexpr, M_ORDER: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """Forward; q, k, v, out share their strides."""
    tiles = N // BM
    for t in range(tl.program_id(0), tiles * Z * H, tl.num_programs(0)):
        if M_ORDER:
            i_h = t % (Z * H)
            i_m = t // (Z * H)
        else:
            i_m = t % tiles
            i_h = t // tiles
        base = (i_h // H).to(tl.int64) * stride_z + (i_h % H).to(tl.int64) * stride_h
        p_q = tl.make_block_ptr(q + base, (N, D), (stride_n, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_k = tl.make_block_ptr(k + base, (N, D), (stride_n, 1), (0, 0), (BN, D), (1, 0))
        p_v = tl.make_block_ptr(v + base, (N, D), (stride_n, 1), (0, 0), (BN, D), (1, 0))
        p_out = tl.make_block_ptr(out + base, (N, D), (stride_n, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_acc = tl.make_block_ptr(acc + tl.program_id(0) * BM * D, (BM, D), (D, 1), (0, 0), (BM, D), (1, 0))
        o_m = i_m * BM + tl.arange(0, BM)
        b_q = tl.load(p_q)  # [BM, D]
        b_m = tl.full([BM], float("-inf"), tl.float32)
        b_l = tl.zeros([BM], tl.float32)
        if GM_ACC:
            # In slices: the zeros stay on chip for the whole kernel.
            for i in range(4):
                p_part = tl.make_block_ptr(
                    acc + (tl.program_id(0) * BM + i * (BM // 4)) * D,
                    (BM // 4, D),
                    (D, 1),
                    (0, 0),
                    (BM // 4, D),
                    (1, 0),
                )
                tl.store(p_part, tl.zeros([BM // 4, D], tl.float32))
            b_acc = tl.zeros([BM], tl.float32)  # stands in; the accumulator is p_acc
        else:
            b_acc = tl.zeros([BM, D], tl.float32)
        if CAUSAL:
            middle = i_m * BM // BN * BN
            end = (i_m * BM + BM + BN - 1) // BN * BN
        else:
            middle = N
            end = N
        b_acc, b_l, b_m = _attend(
            b_acc, b_l, b_m, b_q, p_k, p_v, p_acc, o_m, scale, 0, middle, False, BM, BN, D, GM_ACC, LAZY
        )
        if CAUSAL:
            b_acc, b_l, b_m = _attend(
                b_acc, b_l, b_m, b_q, p_k, p_v, p_acc, o_m, scale, middle, end, True, BM, BN, D, GM_ACC, LAZY
            )
        if LAZY:
            b_m = b_l * 0.0
        if GM_ACC:
            b_out = tl.load(p_acc) / b_l[:, None]
        else:
            b_out = b_acc / b_l[:, None]
        tl.store(p_out, b_out.to(out.type.element_ty))
        tl.store(lse + i_h.to(tl.int64) * N + o_m, b_m + tl.log(b_l))


@triton.jit
def textbook_delta_kernel(out, dout, delta, ROWS, BM: tl.constexpr, D: tl.constexpr):
    """delta = rowsum(out * dout)."""
    for t in range(tl.program_id(0), ROWS // BM, tl.num_programs(0)):
        o_rows = t.to(tl.int64) * BM + tl.arange(0, BM)
        o_tile = o_rows[:, None] * D + tl.arange(0, D)[None, :]
        b_out = tl.load(out + o_tile).to(tl.float32)
        b_dout = tl.load(dout + o_tile).to(tl.float32)
        tl.store(delta + o_rows, tl.sum(b_out * b_dout, 1))


@triton.jit
def textbook_dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, scale, Z, H, N,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One key tile at a time: dk and dv over all query tiles."""
    tiles = N // BN
    for t in range(tl.program_id(0), tiles * Z * H, tl.num_programs(0)):
        i_n = t % tiles
        i_h = t // tiles
        base = i_h.to(tl.int64) * N * D
        p_k = tl.make_block_ptr(k + base, (N, D), (D, 1), (i_n * BN, 0), (BN, D), (1, 0))
        p_v = tl.make_block_ptr(v + base, (N, D), (D, 1), (i_n * BN, 0), (BN, D), (1, 0))
        p_dk = tl.make_block_ptr(dk + base, (N, D), (D, 1), (i_n * BN, 0), (BN, D), (1, 0))
        p_dv = tl.make_block_ptr(dv + base, (N, D), (D, 1), (i_n * BN, 0), (BN, D), (1, 0))
        b_dk = tl.zeros([BN, D], tl.float32)
        b_dv = tl.zeros([BN, D], tl.float32)
        first = i_n * BN // BM * BM if CAUSAL else 0
        for m in range(first, N, BM):
            p_q = tl.make_block_ptr(q + base, (N, D), (D, 1), (m, 0), (BM, D), (1, 0))
            p_do = tl.make_block_ptr(dout + base, (N, D), (D, 1), (m, 0), (BM, D), (1, 0))
            o_m = m + tl.arange(0, BM)
            b_q = tl.load(p_q)  # [BM, D]
            b_s = tl.dot(b_q, tl.trans(tl.load(p_k))) * scale  # [BM, BN]
            b_lse = tl.load(lse + i_h.to(tl.int64) * N + o_m)
            b_p = tl.exp(b_s - b_lse[:, None])
            if CAUSAL:
                o_n = i_n * BN + tl.arange(0, BN)
                b_p = tl.where(o_m[:, None] >= o_n[None, :], b_p, 0.0)
            b_do = tl.load(p_do)  # [BM, D]
            b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dv)
            b_dp = tl.dot(tl.load(p_do), tl.trans(tl.load(p_v)))  # [BM, BN]
            b_delta = tl.load(delta + i_h.to(tl.int64) * N + o_m)
            b_ds = b_p * (b_dp - b_delta[:, None]) * scale
            b_dk = tl.dot(tl.trans(b_ds.to(b_q.dtype)), tl.load(p_q), b_dk)
        tl.store(p_dk, b_dk.to(dk.type.element_ty))
        tl.store(p_dv, b_dv.to(dv.type.element_ty))


@triton.jit
def textbook_dq_kernel(
    q, k, v, dout, lse, delta, dq, scale, Z, H, N,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One query tile at a time: dq over all key tiles."""
    tiles = N // BM
    for t in range(tl.program_id(0), tiles * Z * H, tl.num_programs(0)):
        i_m = t % tiles
        i_h = t // tiles
        base = i_h.to(tl.int64) * N * D
        p_q = tl.make_block_ptr(q + base, (N, D), (D, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_do = tl.make_block_ptr(dout + base, (N, D), (D, 1), (i_m * BM, 0), (BM, D), (1, 0))
        p_dq = tl.make_block_ptr(dq + base, (N, D), (D, 1), (i_m * BM, 0), (BM, D), (1, 0))
        o_m = i_m * BM + tl.arange(0, BM)
        b_lse = tl.load(lse + i_h.to(tl.int64) * N + o_m)
        b_delta = tl.load(delta + i_h.to(tl.int64) * N + o_m)
        b_dq = tl.zeros([BM, D], tl.float32)
        last = (i_m * BM + BM + BN - 1) // BN * BN if CAUSAL else N
        for n in range(0, last, BN):
            p_k = tl.make_block_ptr(k + base, (N, D), (D, 1), (n, 0), (BN, D), (1, 0))
            p_v = tl.make_block_ptr(v + base, (N, D), (D, 1), (n, 0), (BN, D), (1, 0))
            b_k = tl.load(p_k)  # [BN, D]
            b_s = tl.dot(tl.load(p_q), tl.trans(b_k)) * scale  # [BM, BN]
            b_p = tl.exp(b_s - b_lse[:, None])
            if CAUSAL:
                o_n = n + tl.arange(0, BN)
                b_p = tl.where(o_m[:, None] >= o_n[None, :], b_p, 0.0)
            b_dp = tl.dot(tl.load(p_do), tl.trans(tl.load(p_v)))  # [BM, BN]
            b_ds = b_p * (b_dp - b_delta[:, None]) * scale
            b_dq = tl.dot(b_ds.to(b_k.dtype), tl.load(p_k), b_dq)
        tl.store(p_dq, b_dq.to(dq.type.element_ty))


def _programs() -> int:
    """One program for each AI core of the device."""
    driver = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["num_aicore"])


def _fit(n: int, tile: int) -> int:
    """The largest tile up to `tile` that divides n."""
    while n % tile:
        tile //= 2
    return tile


def _scale(d: int, sm_scale: float | None) -> float:
    return d**-0.5 if sm_scale is None else float(sm_scale)


def _tiles_fwd(n: int, d: int, causal: bool) -> tuple[int, int]:
    """The tutorial's choice, as far as it fits on chip (a causal mask takes room too)."""
    bm, bn = (64 if causal or d == 128 else 128, 128) if d < 256 else (32, 128)
    return _fit(n, bm), _fit(n, bn)


def textbook_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    *,
    block_m: int | None = None,
    block_n: int | None = None,
    acc: str = "ub",
    order: str = "hz",
    lazy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Textbook forward of contiguous [Z, H, N, D] fp16 or bf16 tensors.

    Args:
        acc: place of the fp32 accumulator, "ub" or "gm".
        order: "hz" (tiles of a head one after another) or "m" (query-tile-major).
        lazy: leave out the running maximum (for timing comparisons only).

    Returns:
        out [Z, H, N, D] and lse [Z, H, N] fp32.

    Raises:
        ValueError: acc or order is unknown, or the tiles do not divide N.
    """
    if acc not in ACCUMULATORS:
        raise ValueError(f"acc must be one of {', '.join(ACCUMULATORS)}, got {acc!r}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    z, h, n, d = q.shape
    default_m, default_n = _tiles_fwd(n, d, causal)
    bm, bn = block_m or default_m, block_n or default_n
    if n % bm or n % bn:
        raise ValueError(f"block_m and block_n must divide N = {n}, got {bm} and {bn}")
    programs = _programs()
    out = torch.empty_like(q)
    lse = torch.empty((z, h, n), dtype=torch.float32, device=q.device)
    scratch = torch.empty(programs * bm * d if acc == "gm" else 1, dtype=torch.float32, device=q.device)
    textbook_fwd_kernel[(programs,)](
        q, k, v, out, lse, scratch, _scale(d, sm_scale), q.stride(0), q.stride(1), q.stride(2), z, h, n,
        bm, bn, d, causal, acc == "gm", order == "m", lazy,
    )  # fmt: skip
    return out, lse


def textbook_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Textbook backward of contiguous [Z, H, N, D] fp16 or bf16 tensors: dq, dk, dv."""
    z, h, n, d = q.shape
    programs = _programs()
    scale = _scale(d, sm_scale)
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    textbook_delta_kernel[(2 * programs,)](out, dout, delta, z * h * n, _fit(n, 32), d)
    tile = _fit(n, 64 if d <= 128 else 32)
    textbook_dkdv_kernel[(programs,)](q, k, v, dout, lse, delta, dk, dv, scale, z, h, n, tile, tile, d, causal)
    textbook_dq_kernel[(programs,)](q, k, v, dout, lse, delta, dq, scale, z, h, n, tile, tile, d, causal)
    return dq, dk, dv
