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
  2  Every shape that the forward takes, by the same means (exact head dimensions, the last
     tile moved back); the query heads of a key head are summed in turn.
  3  An explicit pipeline for N = 1024: one kernel, whole heads to a core. The cube computes S
     and dP of a group of keys to scratch of its core; the vector cores make P and dS of them,
     while the cube multiplies the group before: dV and dK over all queries in L0C, and dQ of the
     head at its end. Large tiles, sliced on chip, loaded a phase ahead; delta in the same kernel.
"""

import functools
import re
import shutil
import subprocess

import torch
import triton
import triton.language as tl

try:  # triton-ascend 3.2.1 moved its extensions
    import triton.language.extra.cann.extension as al
except ImportError:
    al = tl

# Upstream Triton, for CUDA, has no extensions, so it cannot compile the pipeline.
ASCEND = tl.constexpr(hasattr(al, "sync_block_set"))
if ASCEND.value:
    _sync_set, _sync_wait, _slice = al.sync_block_set, al.sync_block_wait, al.extract_slice

HEAD_DIMS = (16, 32, 64, 128, 256)  # those of the tables below; every other one is rounded up to find its tiles
MAX_HEAD_DIM = 256
MAX_LENGTH = 1 << 24
MAX_TILES = (1 << 31) - 1
LAYOUTS = ("BNSD", "BSND")
DTYPES = (torch.float16, torch.bfloat16)
FP32_MAX = (2 - 2**-23) * 2.0**127


@triton.jit
def attention_bwd_kernel_delta(
    out, dout, delta,
    stride_oz, stride_oh, stride_on, stride_dz, stride_dh, stride_dn,
    Z, H, N,
    TAIL: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout), fp32; N >= BM. Vector cores only.

    TAIL: BM does not divide N; the last tile overlaps the one before, and its rows belong to
    it alone.
    """
    tiles = tl.cdiv(N, BM)
    for t in range(tl.program_id(0), tiles * Z * H, tl.num_programs(0)):
        row = t % tiles * BM
        rows = N  # this tile stores its rows below `rows`
        if TAIL:
            if row + BM > N:
                row = N - BM
            else:
                rows = N - BM
        i_z = t // tiles // H
        i_h = t // tiles % H
        o_head = out + i_z.to(tl.int64) * stride_oz + i_h.to(tl.int64) * stride_oh
        d_head = dout + i_z.to(tl.int64) * stride_dz + i_h.to(tl.int64) * stride_dh
        p_out = tl.make_block_ptr(o_head, (N, D), (stride_on, 1), (row, 0), (BM, D), (1, 0))
        p_dout = tl.make_block_ptr(d_head, (N, D), (stride_dn, 1), (row, 0), (BM, D), (1, 0))
        p_delta = tl.make_block_ptr(delta + (t // tiles).to(tl.int64) * N, (rows,), (1,), (row,), (BM,), (0,))
        b_delta = tl.sum(tl.load(p_out).to(tl.float32) * tl.load(p_dout).to(tl.float32), 1)  # [BM]
        if TAIL:
            tl.store(p_delta, b_delta, boundary_check=(0,))
        else:
            tl.store(p_delta, b_delta)


@triton.jit
def _attention_bwd_inner_dkdv(
    b_dk, b_dv, q_head, dout_head, p_k, p_v, lse_head, delta_head, stride_qn, stride_dn, o_n, scale, low, high,
    SQ, SHIFT,
    MASK_CAUSAL: tl.constexpr, MASK_TAIL: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """A key tile against the query rows from `low` to `high`.

    MASK_TAIL: the tile is moved back so that it ends at the last row, and rows before `low`
    do not count.
    """
    for m in range(low, high, BM):
        start = m
        if MASK_TAIL:
            start = SQ - BM
        p_q = tl.make_block_ptr(q_head, (SQ, D), (stride_qn, 1), (start, 0), (BM, D), (1, 0))
        p_do = tl.make_block_ptr(dout_head, (SQ, DV), (stride_dn, 1), (start, 0), (BM, DV), (1, 0))
        p_lse = tl.make_block_ptr(lse_head, (SQ,), (1,), (start,), (BM,), (0,))
        p_delta = tl.make_block_ptr(delta_head, (SQ,), (1,), (start,), (BM,), (0,))
        # A dot may overwrite its left operand on chip: what is used twice is loaded twice.
        b_s = tl.dot(tl.load(p_q), tl.trans(tl.load(p_k))) * scale  # [BM, BN]
        b_p = tl.exp(b_s - tl.load(p_lse)[:, None])
        if MASK_CAUSAL or MASK_TAIL:
            o_m = (start + SHIFT + tl.arange(0, BM)).to(tl.float32)
            if MASK_TAIL:
                o_m = tl.where(o_m >= m + SHIFT, o_m, float("-inf"))
            if MASK_CAUSAL:
                b_p = tl.where(o_m[:, None] >= o_n[None, :], b_p, 0.0)
            else:
                b_p = tl.where(o_m[:, None] >= 0, b_p, 0.0)
        b_do = tl.load(p_do)  # [BM, DV]
        b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dv)  # [BN, DV]
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
    stride_dkz, stride_dkh, stride_dkn, stride_dvz, stride_dvh, stride_dvn,
    scale, Z, HK, SQ, SK, SHIFT,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, TAIL_M: tl.constexpr, TAIL_N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """dk and dv, one key tile at a time; SQ >= BM and SK >= BN.

    CAUSAL: row i sees the keys up to i + SHIFT. TAIL_M: BM does not divide SQ. TAIL_N: BN does
    not divide SK; the last tile then overlaps the one before, and its keys belong to it alone.
    The GROUP query heads of a key head are summed in turn, in L0C.
    """
    heads = Z * HK
    for t in range(tl.program_id(0), tl.cdiv(SK, BN) * heads, tl.num_programs(0)):
        col = t // heads * BN
        cols = SK  # this tile stores its keys below `cols`
        if TAIL_N:
            if col + BN > SK:
                col = SK - BN
            else:
                cols = SK - BN
        i_z = t % heads // HK
        i_hk = t % heads % HK
        k_head = k + i_z.to(tl.int64) * stride_kz + i_hk.to(tl.int64) * stride_kh
        v_head = v + i_z.to(tl.int64) * stride_vz + i_hk.to(tl.int64) * stride_vh
        dk_head = dk + i_z.to(tl.int64) * stride_dkz + i_hk.to(tl.int64) * stride_dkh
        dv_head = dv + i_z.to(tl.int64) * stride_dvz + i_hk.to(tl.int64) * stride_dvh
        p_k = tl.make_block_ptr(k_head, (SK, D), (stride_kn, 1), (col, 0), (BN, D), (1, 0))
        p_v = tl.make_block_ptr(v_head, (SK, DV), (stride_vn, 1), (col, 0), (BN, DV), (1, 0))
        p_dk = tl.make_block_ptr(dk_head, (cols, D), (stride_dkn, 1), (col, 0), (BN, D), (1, 0))
        p_dv = tl.make_block_ptr(dv_head, (cols, DV), (stride_dvn, 1), (col, 0), (BN, DV), (1, 0))
        o_n = (col + tl.arange(0, BN)).to(tl.float32)
        b_dk = tl.zeros([BN, D], tl.float32)
        b_dv = tl.zeros([BN, DV], tl.float32)
        full = SQ // BM * BM
        if CAUSAL:
            # At least one tile, so that keys that no row sees get zeros.
            first = tl.minimum(tl.maximum(col - SHIFT, 0) // BM * BM, full - BM)
            middle = tl.minimum((tl.maximum(col + BN - 1 - SHIFT, 0) + BM - 1) // BM * BM, full)
        else:
            middle = 0
        for g in range(GROUP):
            i_h = i_hk * GROUP + g
            q_head = q + i_z.to(tl.int64) * stride_qz + i_h.to(tl.int64) * stride_qh
            dout_head = dout + i_z.to(tl.int64) * stride_dz + i_h.to(tl.int64) * stride_dh
            lse_head = lse + (i_z * HK * GROUP + i_h).to(tl.int64) * SQ
            delta_head = delta + (i_z * HK * GROUP + i_h).to(tl.int64) * SQ
            if CAUSAL:
                b_dk, b_dv = _attention_bwd_inner_dkdv(
                    b_dk, b_dv, q_head, dout_head, p_k, p_v, lse_head, delta_head, stride_qn, stride_dn, o_n,
                    scale, first, middle, SQ, SHIFT, True, False, BM, D, DV,
                )  # fmt: skip
            b_dk, b_dv = _attention_bwd_inner_dkdv(
                b_dk, b_dv, q_head, dout_head, p_k, p_v, lse_head, delta_head, stride_qn, stride_dn, o_n,
                scale, middle, full, SQ, SHIFT, False, False, BM, D, DV,
            )  # fmt: skip
            if TAIL_M:
                b_dk, b_dv = _attention_bwd_inner_dkdv(
                    b_dk, b_dv, q_head, dout_head, p_k, p_v, lse_head, delta_head, stride_qn, stride_dn, o_n,
                    scale, full, SQ, SQ, SHIFT, CAUSAL, True, BM, D, DV,
                )  # fmt: skip
        b_dk_out = (b_dk * scale).to(dk.type.element_ty)
        b_dv_out = b_dv.to(dv.type.element_ty)
        if TAIL_N:
            tl.store(p_dk, b_dk_out, boundary_check=(0,))
            tl.store(p_dv, b_dv_out, boundary_check=(0,))
        else:
            tl.store(p_dk, b_dk_out)
            tl.store(p_dv, b_dv_out)


@triton.jit
def _attention_bwd_inner_dq(
    b_dq, p_q, p_do, k_head, v_head, b_lse, b_delta, stride_kn, stride_vn, o_m, scale, low, high, SK, VALID,
    MASK_CAUSAL: tl.constexpr, MASK_TAIL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """A query tile against the keys from `low` (a multiple of BN) to `high`.

    MASK_TAIL: the last tile is moved back so that it ends at the last key, and hides the keys
    that it shares with the tile before; keys from VALID on are padding.
    """
    for n in range(low, high, BN):
        start = n
        if MASK_TAIL:
            start = tl.minimum(n, SK - BN)
        p_k = tl.make_block_ptr(k_head, (SK, D), (stride_kn, 1), (start, 0), (BN, D), (1, 0))
        p_v = tl.make_block_ptr(v_head, (SK, DV), (stride_vn, 1), (start, 0), (BN, DV), (1, 0))
        b_s = tl.dot(tl.load(p_q), tl.trans(tl.load(p_k))) * scale  # [BM, BN]
        b_p = tl.exp(b_s - b_lse[:, None])
        if MASK_CAUSAL or MASK_TAIL:
            # Hidden keys too: their exp(s - lse) may overflow, and infinity times zero is NaN.
            o_n = (start + tl.arange(0, BN)).to(tl.float32)
            if MASK_TAIL:
                o_n = tl.where(o_n >= n, o_n, float("inf"))
                o_n = tl.where(o_n < VALID, o_n, float("inf"))
            if MASK_CAUSAL:
                b_p = tl.where(o_m[:, None] >= o_n[None, :], b_p, 0.0)
            else:
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
    stride_dqz, stride_dqh, stride_dqn,
    scale, Z, H, SQ, SK, VALID, SHIFT,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, TAIL_M: tl.constexpr, TAIL_N: tl.constexpr, EMPTY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """dq, one query tile at a time; constants as in `forward.attention_fwd_kernel_general`."""
    heads = Z * H
    for t in range(tl.program_id(0), tl.cdiv(SQ, BM) * heads, tl.num_programs(0)):
        row = t // heads * BM
        rows = SQ  # this tile stores its rows below `rows`
        if TAIL_M:
            if row + BM > SQ:
                row = SQ - BM
            else:
                rows = SQ - BM
        i_head = t % heads
        i_z = i_head // H
        i_h = i_head % H
        i_hk = i_h // GROUP
        q_head = q + i_z.to(tl.int64) * stride_qz + i_h.to(tl.int64) * stride_qh
        k_head = k + i_z.to(tl.int64) * stride_kz + i_hk.to(tl.int64) * stride_kh
        v_head = v + i_z.to(tl.int64) * stride_vz + i_hk.to(tl.int64) * stride_vh
        dout_head = dout + i_z.to(tl.int64) * stride_dz + i_h.to(tl.int64) * stride_dh
        dq_head = dq + i_z.to(tl.int64) * stride_dqz + i_h.to(tl.int64) * stride_dqh
        p_q = tl.make_block_ptr(q_head, (SQ, D), (stride_qn, 1), (row, 0), (BM, D), (1, 0))
        p_do = tl.make_block_ptr(dout_head, (SQ, DV), (stride_dn, 1), (row, 0), (BM, DV), (1, 0))
        p_dq = tl.make_block_ptr(dq_head, (rows, D), (stride_dqn, 1), (row, 0), (BM, D), (1, 0))
        p_lse = tl.make_block_ptr(lse + i_head.to(tl.int64) * SQ, (SQ,), (1,), (row,), (BM,), (0,))
        p_delta = tl.make_block_ptr(delta + i_head.to(tl.int64) * SQ, (SQ,), (1,), (row,), (BM,), (0,))
        o_m = (row + SHIFT + tl.arange(0, BM)).to(tl.float32)
        b_lse = tl.load(p_lse)  # [BM]
        b_delta = tl.load(p_delta)  # [BM]
        b_dq = tl.zeros([BM, D], tl.float32)
        if CAUSAL:
            middle = tl.minimum(row + SHIFT + 1, VALID)
            end = tl.minimum(row + SHIFT + BM, VALID)
            if EMPTY:  # at least one tile, so that rows that see no key get zeros
                middle = tl.maximum(middle, 0)
                end = tl.maximum(end, 1)
            middle = middle // BN * BN
        else:
            middle = VALID // BN * BN
            end = VALID
        b_dq = _attention_bwd_inner_dq(
            b_dq, p_q, p_do, k_head, v_head, b_lse, b_delta, stride_kn, stride_vn, o_m, scale, 0, middle, SK, VALID,
            False, False, BN, D, DV,
        )  # fmt: skip
        if CAUSAL or TAIL_N:
            b_dq = _attention_bwd_inner_dq(
                b_dq, p_q, p_do, k_head, v_head, b_lse, b_delta, stride_kn, stride_vn, o_m, scale,
                middle, end, SK, VALID, CAUSAL, TAIL_N, BN, D, DV,
            )  # fmt: skip
        b_dq_out = (b_dq * scale).to(dq.type.element_ty)
        if TAIL_M:
            tl.store(p_dq, b_dq_out, boundary_check=(0,))
        else:
            tl.store(p_dq, b_dq_out)


ROWS = tl.constexpr(1 << 20)


@triton.jit
def _tile(base, COLS: tl.constexpr, row, col, BR: tl.constexpr, BC: tl.constexpr):
    """Block pointer to a tile of a row-major scratch with COLS columns."""
    return tl.make_block_ptr(base, (ROWS, COLS), (COLS, 1), (row, col), (BR, BC), (1, 0))


@triton.jit
def _rows(base, row, BR: tl.constexpr):
    """Block pointer to BR elements of a vector."""
    return tl.make_block_ptr(base, (ROWS,), (1,), (row,), (BR,), (0,))


@triton.jit
def _input(base, N, stride, row, BR: tl.constexpr, D: tl.constexpr):
    """Block pointer to BR rows of one head of an input."""
    return tl.make_block_ptr(base, (N, D), (stride, 1), (row, 0), (BR, D), (1, 0))


@triton.jit
def _probability_rows(
    scores, probs, lse, o_n, scale, r,
    MASK: tl.constexpr, KG: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """P = exp(S scale - lse) of R rows from r on."""
    b_s = tl.load(_tile(scores, KG, r, 0, R, KG))  # [R, KG]
    b_p = tl.exp(b_s * scale - tl.load(_rows(lse, r, R))[:, None])
    if MASK:
        o_m = (r + tl.arange(0, R)).to(tl.float32)
        b_p = tl.where(o_m[:, None] >= o_n[None, :], b_p, 0.0)
    tl.store(_tile(probs, KG, r, 0, R, KG), b_p.to(probs.type.element_ty))


@triton.jit
def _group(ds, g, N: tl.constexpr, KG: tl.constexpr, KQ: tl.constexpr):
    """Where the columns of the g-th KG keys begin in dS, which lies in blocks [N, KQ]."""
    return ds + g * KG // KQ * (N * KQ) + g * KG % KQ


@triton.jit
def _gradient_rows(
    dprobs, probs, ds, delta, scale, r,
    FOLD: tl.constexpr, KQ: tl.constexpr, KG: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """dS = P (dP - delta) of R rows from r on; FOLD: times the scale."""
    b_dp = tl.load(_tile(dprobs, KG, r, 0, R, KG))  # [R, KG]
    b_p = tl.load(_tile(probs, KG, r, 0, R, KG))  # [R, KG]
    b_ds = b_p.to(tl.float32) * (b_dp - tl.load(_rows(delta, r, R))[:, None])
    if FOLD:
        b_ds *= scale
    tl.store(_tile(ds, KQ, r, 0, R, KG), b_ds.to(ds.type.element_ty))


@triton.jit
def _products(
    a, b, out, out1, row: tl.constexpr, MI: tl.constexpr, BT: tl.constexpr, KG: tl.constexpr, D: tl.constexpr
):
    """A B^T, [MI, KG], to rows of a scratch from `row` on; A as `_packed` loads it."""
    F: tl.constexpr = MI // BT
    # Two results live in L0C at once: one is drained while the other is computed.
    for f in range(0, F // 2 * 2, 2):
        b_x = tl.dot(_slice(a, (0, f * D), (BT, D), (1, 1)), tl.trans(b))
        b_y = tl.dot(_slice(a, (0, f * D + D), (BT, D), (1, 1)), tl.trans(b))
        tl.store(_tile(out, F * KG, row // F, f * KG, BT, KG), b_x)
        tl.store(_tile(out1, F * KG, row // F, f * KG + KG, BT, KG), b_y)
    if F % 2:
        b_z = tl.dot(_slice(a, (0, F * D - D), (BT, D), (1, 1)), tl.trans(b))
        tl.store(_tile(out, F * KG, row // F, F * KG - KG, BT, KG), b_z)


@triton.jit
def _packed(base, N: tl.constexpr, row: tl.constexpr, MOST: tl.constexpr, BT: tl.constexpr, D: tl.constexpr):
    """Block pointer to MOST rows of one head of an input from `row` on, or those that are left,
    as a tile [BT, F D] whose column block f has rows f, f + F, ...: of a tile in L1 only columns
    can be cut, since the matrix unit's loads take their pitch from the slice."""
    F: tl.constexpr = (MOST if row + MOST <= N else N - row) // BT
    return tl.make_block_ptr(base, (N // F, F * D), (F * D, 1), (row // F, 0), (BT, F * D), (1, 0))


@triton.jit
def _left(base, N: tl.constexpr, stride, row: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr):
    """Block pointer to rows of one head of an input from `row` on: MOST, or those that are left."""
    SIZE: tl.constexpr = MOST if row + MOST <= N else N - row
    return _input(base, N, stride, row, SIZE, D)


@triton.jit
def _piece(base, COLS: tl.constexpr, N: tl.constexpr, row: tl.constexpr, MOST: tl.constexpr, BC: tl.constexpr):
    """Block pointer to rows of a scratch [N, COLS] from `row` on: MOST, or those that are left."""
    SIZE: tl.constexpr = MOST if row + MOST <= N else N - row
    return _tile(base, COLS, row, 0, SIZE, BC)


@triton.jit
def _score_phase(
    b_a, b_b, a, out, out1, p_a0, p_a1, p_x0, p_x1, p_n1,
    EVENT: tl.constexpr, LOW: tl.constexpr, N: tl.constexpr, MI: tl.constexpr, BT: tl.constexpr, KG: tl.constexpr,
    AHEAD: tl.constexpr, TWO: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A B^T for the queries from LOW on, in pieces of MI rows, each followed by an event; the
    first piece is loaded already. Loads the next phase's first tiles meanwhile: one of A and one of
    X, with AHEAD = 2 two of A, with AHEAD = 0 two of X (if there are TWO) and the right operand of
    the scores after it."""
    b_a0 = b_a
    b_a1 = b_a
    b_x0 = b_a
    b_x1 = b_a
    b_n1 = b_a
    for row in tl.static_range(LOW, N, MI):
        if row + MI < N:
            b_n = tl.load(_packed(a, N, row + MI, MI, BT, D))
        else:
            b_n = b_a
            b_a0 = tl.load(p_a0)
            b_x0 = tl.load(p_x0)
            if AHEAD == 2:
                b_a1 = tl.load(p_a1)
            elif AHEAD == 0:
                if TWO:
                    b_x1 = tl.load(p_x1)
                b_n1 = tl.load(p_n1)
        _products(b_a, b_b, out, out1, row, MI if row + MI <= N else N - row, BT, KG, D)
        _sync_set("cube", "vector", EVENT)
        b_a = b_n
    return b_a0, b_a1, b_x0, b_x1, b_n1


@triton.jit
def _gradient_phase(
    b_a, b_a1, b_x, b_x1, b_n1, a, x, out, stride_x, p_n0, p_n1,
    NEXT: tl.constexpr, LOW: tl.constexpr, PITCH: tl.constexpr, N: tl.constexpr, KG: tl.constexpr, KP: tl.constexpr,
    AHEAD: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A^T X over the queries from LOW on, [KG, D], to out, in pieces of KP rows; the first tiles
    are loaded already. Loads the next phase's first tiles meanwhile."""
    b_n0 = b_a
    for row in tl.static_range(LOW, N, KP):
        b_m = b_x
        if AHEAD == 0:
            if row + KP < N:
                b_a1 = tl.load(_piece(a, PITCH, N, row + KP, KP, KG))
            b_m = b_x1
            if row + 2 * KP < N:
                b_x1 = tl.load(_left(x, N, stride_x, row + 2 * KP, KP, D))
        elif row + KP < N:
            b_m = tl.load(_left(x, N, stride_x, row + KP, KP, D))
        b_a2 = b_a
        if AHEAD == 2:
            if row + 2 * KP < N:
                b_a2 = tl.load(_piece(a, PITCH, N, row + 2 * KP, KP, KG))
        elif AHEAD and row + KP < N:
            b_a1 = tl.load(_piece(a, PITCH, N, row + KP, KP, KG))
        if NEXT and row + KP >= N:
            b_n0 = tl.load(p_n0)
            if AHEAD:
                b_n1 = tl.load(p_n1)
        if SPLIT:
            # Two results of half the keys: one is drained while the other is multiplied.
            b_l = tl.trans(_slice(b_a, (0, 0), (b_a.shape[0], KG // 2), (1, 1)))
            b_r = tl.trans(_slice(b_a, (0, KG // 2), (b_a.shape[0], KG // 2), (1, 1)))
            if row == LOW:
                b_g = tl.dot(b_l, b_x)
            else:
                b_g = tl.dot(b_l, b_x, b_g)
            if row + KP >= N:
                tl.store(_tile(out, D, 0, 0, KG // 2, D), b_g.to(out.type.element_ty))
            if row == LOW:
                b_h = tl.dot(b_r, b_x)
            else:
                b_h = tl.dot(b_r, b_x, b_h)
            if row + KP >= N:
                tl.store(_tile(out, D, KG // 2, 0, KG // 2, D), b_h.to(out.type.element_ty))
        else:
            if row == LOW:
                b_g = tl.dot(tl.trans(b_a), b_x)
            else:
                b_g = tl.dot(tl.trans(b_a), b_x, b_g)
            if row + KP >= N:
                tl.store(_tile(out, D, 0, 0, KG, D), b_g.to(out.type.element_ty))
        b_a = b_a1
        b_a1 = b_a2
        b_x = b_m
    return b_n0, b_n1


@triton.jit
def _finished(part, dk, g, FOLD: tl.constexpr, KG: tl.constexpr, D: tl.constexpr):
    """Where dK of group g goes: to its place (FOLD), or to a slot of scratch, to be scaled."""
    if FOLD:
        p = dk + g * KG * D
    else:
        p = part + g % 2 * KG * D
    return p


@triton.jit
def _cube_step(
    b_qa, b_k, q0, v0, do0, q1, do1, dv1, dk1, scores, scores1, dprobs, dprobs1, probs, ds, part,
    stride_qn, stride_vn, stride_dn, p_n0, p_n1, g, g1,
    NEXT: tl.constexpr, LOW: tl.constexpr, LOW1: tl.constexpr, N: tl.constexpr, KG: tl.constexpr,
    BT: tl.constexpr, MI: tl.constexpr, KP: tl.constexpr, AHEAD: tl.constexpr,
    SPLIT: tl.constexpr, KQ: tl.constexpr, D: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The cube's work on group g of the keys: its scores, and the key gradients of the group
    before, g1 (q1, do1, dv1, dk1: of that group's head). LOW, LOW1: first query that sees this group,
    and the one before. p_n0 and p_n1: tiles for what comes next, loaded and returned if NEXT."""
    SECOND: tl.constexpr = LOW1 + KP if LOW1 + KP < N else LOW1
    p_p = probs + g1 % 2 * N * KG
    p_ds = _group(ds, g1, N, KG, KQ)
    _sync_wait("vector", "cube", 1)
    b_a0, b_a1, b_x0, b_x1, b_n1 = _score_phase(
        b_qa, b_k, q0, scores, scores1,
        _piece(p_p, KG, N, LOW1, KP, KG), _piece(p_p, KG, N, SECOND, KP, KG), _left(do1, N, stride_dn, LOW1, KP, D),
        _left(do1, N, stride_dn, SECOND, KP, D), _input(v0, N, stride_vn, g * KG, KG, D),
        0, LOW, N, MI, BT, KG, AHEAD, LOW1 + KP < N, D,
    )  # fmt: skip
    b_da, b_v = _gradient_phase(
        b_a0, b_a1, b_x0, b_x1, b_n1, p_p, do1, dv1 + g1 * KG * D, stride_dn,
        _packed(do0, N, LOW, MI, BT, D), _input(v0, N, stride_vn, g * KG, KG, D),
        True, LOW1, KG, N, KG, KP, AHEAD, SPLIT, D,
    )  # fmt: skip
    _sync_wait("vector", "cube", 3)
    b_a0, b_a1, b_x0, b_x1, b_n1 = _score_phase(
        b_da, b_v, do0, dprobs, dprobs1,
        _piece(p_ds, KQ, N, LOW1, KP, KG), _piece(p_ds, KQ, N, SECOND, KP, KG), _left(q1, N, stride_qn, LOW1, KP, D),
        _left(q1, N, stride_qn, SECOND, KP, D), p_n1,
        4, LOW, N, MI, BT, KG, AHEAD, LOW1 + KP < N, D,
    )  # fmt: skip
    b_n0, b_n1 = _gradient_phase(
        b_a0, b_a1, b_x0, b_x1, b_n1, p_ds, q1, _finished(part, dk1, g1, FOLD, KG, D), stride_qn, p_n0, p_n1,
        NEXT, LOW1, KQ, N, KG, KP, AHEAD, SPLIT, D,
    )  # fmt: skip
    if not FOLD:
        _sync_set("cube", "vector", 2)
    return b_n0, b_n1


@triton.jit
def _mixed_piece(
    b_a, b_l, b_r, b_w, b_x, b_g, out, out1, row: tl.constexpr,
    SCORES: tl.constexpr, GRADIENT: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, KG: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Scores A B^T of F BT queries, B in halves, and b_g + W^T X; one may be left out. A, W and X
    as `_packed` loads them. The scores are drained while the gradient is multiplied."""
    H: tl.constexpr = KG // 2
    for f in range(0, F):
        if SCORES:
            b_s = tl.dot(_slice(b_a, (0, f * D), (BT, D), (1, 1)), tl.trans(b_l))
            b_t = tl.dot(_slice(b_a, (0, f * D), (BT, D), (1, 1)), tl.trans(b_r))
        if GRADIENT:
            b_wf = _slice(b_w, (0, f * KG), (BT, KG), (1, 1))
            b_g = tl.dot(tl.trans(b_wf), _slice(b_x, (0, f * D), (BT, D), (1, 1)), b_g)
        if SCORES:
            tl.store(_tile(out, F * KG, row // F, f * KG, BT, H), b_s)
            tl.store(_tile(out1, F * KG, row // F, f * KG + H, BT, H), b_t)
    return b_g


@triton.jit
def _mixed_phase(
    b_a, b_l, b_r, b_w, b_x, a, w, x, out, out1, target, p_a, p_l, p_r, p_w, p_x,
    EVENT: tl.constexpr, AWAIT: tl.constexpr, NEXT_A: tl.constexpr, NEXT_W: tl.constexpr, NEXT_X: tl.constexpr,
    LOW: tl.constexpr, LOW1: tl.constexpr, N: tl.constexpr, MI: tl.constexpr, BT: tl.constexpr, KG: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Scores A B^T for the queries from LOW on to `out`, mixed with W^T X over those from LOW1 on,
    [KG, D], to `target`, in pieces of MI queries that are loaded a piece ahead; an event after
    each piece of scores. At the end the first tiles of what comes next, after event AWAIT."""
    F: tl.constexpr = MI // BT
    b_g = tl.zeros([KG, D], tl.float32)
    b_an = b_a
    b_wn = b_w
    b_xn = b_x
    b_ln = b_l
    b_rn = b_r
    for row in tl.static_range(LOW if LOW < LOW1 else LOW1, N, MI):
        if row + MI < N:
            if row + MI >= LOW:
                b_an = tl.load(_packed(a, N, row + MI, MI, BT, D))
            if row + MI >= LOW1:
                b_wn = tl.load(_packed(w, N, row + MI, MI, BT, KG))
                b_xn = tl.load(_packed(x, N, row + MI, MI, BT, D))
        else:
            if NEXT_A:
                b_an = tl.load(p_a)
            b_ln = tl.load(p_l)
            if NEXT_X:
                b_rn = tl.load(p_r)
            if AWAIT >= 0:
                _sync_wait("vector", "cube", AWAIT)
            if NEXT_W:
                b_wn = tl.load(p_w)
            if NEXT_W and NEXT_X:
                b_xn = tl.load(p_x)
        b_g = _mixed_piece(b_a, b_l, b_r, b_w, b_x, b_g, out, out1, row, row >= LOW, row >= LOW1, F, BT, KG, D)
        if row >= LOW:
            _sync_set("cube", "vector", EVENT)
        b_a = b_an
        b_w = b_wn
        b_x = b_xn
    tl.store(_tile(target, D, 0, 0, KG, D), b_g.to(target.type.element_ty))
    return b_a, b_ln, b_rn, b_w, b_x


@triton.jit
def _mixed_tail(
    w, x, target,
    LOW: tl.constexpr, N: tl.constexpr, MI: tl.constexpr, BT: tl.constexpr, KG: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """W^T X as `_mixed_phase` sums it, without scores."""
    b_g = tl.zeros([KG, D], tl.float32)
    for row in tl.static_range(LOW, N, MI):
        b_w = tl.load(_packed(w, N, row, MI, BT, KG))
        b_x = tl.load(_packed(x, N, row, MI, BT, D))
        b_g = _mixed_piece(b_x, b_x, b_x, b_w, b_x, b_g, target, target, row, False, True, MI // BT, BT, KG, D)
    tl.store(_tile(target, D, 0, 0, KG, D), b_g.to(target.type.element_ty))


@triton.jit
def _mixed_step(
    b_a, b_l, b_r, b_w, b_x, q0, k0, v0, do0, q1, do1, dv1, dk1, scores, scores1, dprobs, dprobs1, probs, ds, part,
    stride_kn, stride_vn, g: tl.constexpr, g1: tl.constexpr,
    LOW: tl.constexpr, LOW1: tl.constexpr, N: tl.constexpr, MI: tl.constexpr, BT: tl.constexpr, KG: tl.constexpr,
    BQ: tl.constexpr, KQ: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """`_cube_step` with the scores between the parts of the gradients. A head's last step loads the
    first tiles of dQ: K twice, and dS."""
    H: tl.constexpr = KG // 2
    LAST: tl.constexpr = (g + 1) * KG >= N
    FIRST_A: tl.constexpr = LOW <= LOW1
    FIRST_W: tl.constexpr = LOW1 <= LOW
    p_w = _packed(_group(ds, g1, N, KG, KQ), N, LOW1, MI, BT, KG)
    p_x = _packed(q1, N, LOW1, MI, BT, D)
    b_a, b_l, b_r, b_w, b_x = _mixed_phase(
        b_a, b_l, b_r, b_w, b_x, q0, probs + g1 % 2 * N * KG, do1, scores, scores1, dv1 + g1 * KG * D,
        _packed(do0, N, LOW, MI, BT, D),
        _input(v0, N, stride_vn, g * KG, H, D), _input(v0, N, stride_vn, g * KG + H, H, D), p_w, p_x,
        0, 3, FIRST_A, FIRST_W, True, LOW, LOW1, N, MI, BT, KG, D,
    )  # fmt: skip
    if LAST:
        b_a, b_l, b_r, b_w, b_x = _mixed_phase(
            b_a, b_l, b_r, b_w, b_x, do0, _group(ds, g1, N, KG, KQ), q1, dprobs, dprobs1,
            _finished(part, dk1, g1, FOLD, KG, D),
            _input(k0, N, stride_kn, 0, KQ, D), _input(k0, N, stride_kn, KQ, KQ, D), k0,
            _tile(ds, KQ, 0, 0, BQ, KQ), k0,
            4, -1, True, True, False, LOW, LOW1, N, MI, BT, KG, D,
        )  # fmt: skip
    else:
        b_a, b_l, b_r, b_w, b_x = _mixed_phase(
            b_a, b_l, b_r, b_w, b_x, do0, _group(ds, g1, N, KG, KQ), q1, dprobs, dprobs1,
            _finished(part, dk1, g1, FOLD, KG, D),
            _packed(q0, N, LOW, MI, BT, D),
            _input(k0, N, stride_kn, g * KG + KG, H, D), _input(k0, N, stride_kn, g * KG + KG + H, H, D),
            _packed(probs + g % 2 * N * KG, N, LOW, MI, BT, KG), _packed(do0, N, LOW, MI, BT, D),
            4, 1, not CAUSAL, True, True, LOW, LOW1, N, MI, BT, KG, D,
        )  # fmt: skip
    if not FOLD:
        _sync_set("cube", "vector", 2)
    return b_a, b_l, b_r, b_w, b_x


@triton.jit
def _keys(
    k,
    stride,
    i: tl.constexpr,
    column: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    DQ: tl.constexpr,
    D: tl.constexpr,
):
    """Block pointer to the i-th KQ keys of a head, DQ columns."""
    return tl.make_block_ptr(k, (N, D), (stride, 1), (i * KQ, column), (KQ, DQ), (1, 0))


@triton.jit
def _query_phase(
    b_k0, b_k1, b_ds, k, stride_k, ds, dq_part, column: tl.constexpr,
    CAUSAL: tl.constexpr, N: tl.constexpr, BQ: tl.constexpr, KQ: tl.constexpr, DQ: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dS K of one head, DQ columns, in tiles of BQ queries and four steps of KQ keys. The first
    two of the keys' tiles are loaded already."""
    b_k2 = b_k0
    b_k3 = b_k0
    for m in tl.static_range(0, N, BQ):
        for n in tl.static_range(0, m + BQ if CAUSAL else N, KQ):
            b_n = b_ds
            if n + KQ < (m + BQ if CAUSAL else N):
                if (n + 2 * KQ == N and column == 0) and m == (N - BQ if CAUSAL else 0):
                    # The last group's score gradients are the last to come.
                    _sync_wait("vector", "cube", 5)
                b_n = tl.load(_tile(ds + (n + KQ) * N, KQ, m, 0, BQ, KQ))
            elif m + BQ < N:
                b_n = tl.load(_tile(ds, KQ, m + BQ, 0, BQ, KQ))
            if (m == BQ and n == 0) if CAUSAL else (m == 0 and n == 0):
                b_k2 = tl.load(_keys(k, stride_k, 2, column, N, KQ, DQ, D))
            if (m == 2 * BQ and n == 0) if CAUSAL else (m == 0 and n == KQ):
                b_k3 = tl.load(_keys(k, stride_k, 3, column, N, KQ, DQ, D))
            if n == 0:
                b_dq = tl.dot(b_ds, b_k0)
            elif n == KQ:
                b_dq = tl.dot(b_ds, b_k1, b_dq)
            elif n == 2 * KQ:
                b_dq = tl.dot(b_ds, b_k2, b_dq)
            else:
                b_dq = tl.dot(b_ds, b_k3, b_dq)
            b_ds = b_n
        tl.store(_tile(dq_part, D, m, column, BQ, DQ), b_dq.to(dq_part.type.element_ty))


@triton.jit
def _delta_rows(
    out, dout, delta, h, H, stride_oz, stride_oh, stride_on, stride_dz, stride_dh, stride_dn,
    N: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout) of one head."""
    o = out + (h // H).to(tl.int64) * stride_oz + (h % H).to(tl.int64) * stride_oh
    do = dout + (h // H).to(tl.int64) * stride_dz + (h % H).to(tl.int64) * stride_dh
    for r in range(0, N, R):
        b_o = tl.load(_input(o, N, stride_on, r, R, D)).to(tl.float32)
        b_do = tl.load(_input(do, N, stride_dn, r, R, D)).to(tl.float32)
        tl.store(_rows(delta, r, R), tl.sum(b_o * b_do, 1))


@triton.jit
def _finish_rows(part, out, scale, COUNT: tl.constexpr, RO: tl.constexpr, D: tl.constexpr):
    """COUNT rows of a finished gradient, fp32, scaled, to an output."""
    for r in range(0, COUNT, RO):
        b_o = tl.load(_tile(part, D, r, 0, RO, D))
        tl.store(_tile(out, D, r, 0, RO, D), (b_o * scale).to(out.type.element_ty))


@triton.jit
def attention_bwd_kernel_pipeline(
    q, k, v, out, dout, lse, dq, dk, dv, delta, scores, scores1, dprobs, dprobs1, probs, ds, part, dq_part,
    stride_qz, stride_qh, stride_qn, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_on, stride_dz, stride_dh, stride_dn,
    scale, H, HEADS,
    CAUSAL: tl.constexpr, N: tl.constexpr, KG: tl.constexpr, BT: tl.constexpr, MI: tl.constexpr, KP: tl.constexpr,
    AHEAD: tl.constexpr, SPLIT: tl.constexpr, MIX: tl.constexpr, FOLD: tl.constexpr,
    UNROLL: tl.constexpr, LB: tl.constexpr, BQ: tl.constexpr, KQ: tl.constexpr, DQ: tl.constexpr,
    R: tl.constexpr, RD: tl.constexpr, RO: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """All three gradients with cube and vector cores at work at once; whole heads to a program.

    An item is a group of KG keys against all queries that see it. For item i of a head
      cube    S = Q K^T to scores, event 0 after each piece of MI rows; dV of item i - 1; dP = dO V^T
              to dprobs, event 4 after each piece; dK of item i - 1 to part, event 2;
              after the head's last item dQ of the head to dq_part, event 6
      vector  waits for event 0: P, event 1; waits for event 4: dS, event 3 (event 5: of the whole
              head); waits for event 2: dK of item i - 1, scaled, to dk; once a head event 6: dq
    Scratch, for each core: scores, dprobs [N, KG] fp32; probs two slots [N, KG] and ds [N, N] in
    q's dtype; part two slots [KG, D] and dq_part [N, D] fp32; delta [N] fp32. The cube writes
    scores again after event 1 of the item before, dprobs after event 3; events of one core's
    later items order the rest.

    No two k parts of a product may use the same half of L0 in turn, and a loop that loads drains
    at its end: phases are straight code, their loads stand a phase ahead (AHEAD: tiles of P or
    dS; 0: one, and the place of a second one goes to the tile of K or V that the next scores need and
    to one more of Q or dO), and only products of tiles that are on chip stand in loops. SPLIT: dV and dK in two halves
    of the keys, so that one is drained while the other is multiplied. MIX (D = 64, where L0C has
    room for both): scores are drained while a gradient is multiplied, S with dV, dP with dK; the
    waits for P and dS then stand at the end of the phase before, at the first load. FOLD: dS
    carries the scale, so dK and dQ leave the cube finished; part, dq_part, events 2 and 6 fall away.
    The scores have two names, and so have the dprobs: bishengir drains fixpipe between any two
    stores to one argument, though they go to different bytes; results that follow each other go
    through different arguments.
    UNROLL: items in one loop body; with a causal mask all, since each has a length of its own. The
    first item of a program multiplies what it finds in scratch; the true dV and dK are written over
    the result later.
    """
    GROUPS: tl.constexpr = N // KG
    pid = tl.program_id(0)
    first = pid * HEADS // tl.num_programs(0)
    last = (pid + 1) * HEADS // tl.num_programs(0)
    delta += pid * N
    scores += pid * N * KG
    scores1 += pid * N * KG
    dprobs += pid * N * KG
    dprobs1 += pid * N * KG
    probs += pid * 2 * N * KG
    ds += pid * N * N
    part += pid * 2 * KG * D
    dq_part += pid * N * D
    _sync_set("vector", "cube", 1)
    _sync_set("vector", "cube", 3)
    if first < last:
        _delta_rows(
            out, dout, delta, first, H, stride_oz, stride_oh, stride_on, stride_dz, stride_dh, stride_dn, N, R, D
        )
    for h in range(first, last):
        h1 = tl.maximum(h - 1, first)
        q0 = q + (h // H).to(tl.int64) * stride_qz + (h % H).to(tl.int64) * stride_qh
        k0 = k + (h // H).to(tl.int64) * stride_kz + (h % H).to(tl.int64) * stride_kh
        v0 = v + (h // H).to(tl.int64) * stride_vz + (h % H).to(tl.int64) * stride_vh
        do0 = dout + (h // H).to(tl.int64) * stride_dz + (h % H).to(tl.int64) * stride_dh
        q1 = q + (h1 // H).to(tl.int64) * stride_qz + (h1 % H).to(tl.int64) * stride_qh
        do1 = dout + (h1 // H).to(tl.int64) * stride_dz + (h1 % H).to(tl.int64) * stride_dh
        dv0 = dv + h.to(tl.int64) * N * D
        dv1 = dv + h1.to(tl.int64) * N * D
        dk0 = dk + h.to(tl.int64) * N * D
        dk1 = dk + h1.to(tl.int64) * N * D
        dq0 = dq_part
        if FOLD:
            dq0 = dq + h.to(tl.int64) * N * D
        # The key gradients run one group behind: the first ones are those of the last head.
        if MIX:
            _sync_wait("vector", "cube", 1)
            LAST1: tl.constexpr = N - KG if CAUSAL else 0
            b_a = tl.load(_packed(q0, N, 0, MI, BT, D))
            b_l = tl.load(_input(k0, N, stride_kn, 0, KG // 2, D))
            b_r = tl.load(_input(k0, N, stride_kn, KG // 2, KG // 2, D))
            b_w = b_a
            b_x = b_a
            if not CAUSAL:
                b_w = tl.load(_packed(probs + (GROUPS - 1) % 2 * N * KG, N, 0, MI, BT, KG))
                b_x = tl.load(_packed(do1, N, 0, MI, BT, D))
            b_a, b_l, b_r, b_w, b_x = _mixed_step(
                b_a, b_l, b_r, b_w, b_x, q0, k0, v0, do0, q1, do1, dv1, dk1,
                scores, scores1, dprobs, dprobs1, probs, ds, part,
                stride_kn, stride_vn, 0, GROUPS - 1, 0, LAST1,
                N, MI, BT, KG, BQ, KQ, D, CAUSAL, FOLD,
            )  # fmt: skip
            for g in tl.static_range(1, GROUPS):
                b_a, b_l, b_r, b_w, b_x = _mixed_step(
                    b_a, b_l, b_r, b_w, b_x, q0, k0, v0, do0, q0, do0, dv0, dk0,
                    scores, scores1, dprobs, dprobs1, probs, ds, part,
                    stride_kn, stride_vn, g, g - 1, g * KG if CAUSAL else 0, (g - 1) * KG if CAUSAL else 0,
                    N, MI, BT, KG, BQ, KQ, D, CAUSAL, FOLD,
                )  # fmt: skip
            b_k0 = b_a
            b_k1 = b_l
            b_ds = b_w
        elif UNROLL == GROUPS:
            b_qa = tl.load(_packed(q0, N, 0, MI, BT, D))
            b_k = tl.load(_input(k0, N, stride_kn, 0, KG, D))
            b_qa, b_k = _cube_step(
                b_qa, b_k, q0, v0, do0, q1, do1, dv1, dk1, scores, scores1, dprobs, dprobs1, probs, ds, part,
                stride_qn, stride_vn, stride_dn,
                _packed(q0, N, KG // LB * LB if CAUSAL else 0, MI, BT, D), _input(k0, N, stride_kn, KG, KG, D),
                0, GROUPS - 1, True, 0, (N - KG) // LB * LB if CAUSAL else 0,
                N, KG, BT, MI, KP, AHEAD, SPLIT, KQ, D, FOLD,
            )  # fmt: skip
            for g in tl.static_range(1, GROUPS - 1):
                b_qa, b_k = _cube_step(
                    b_qa, b_k, q0, v0, do0, q0, do0, dv0, dk0, scores, scores1, dprobs, dprobs1, probs, ds, part,
                    stride_qn, stride_vn, stride_dn,
                    _packed(q0, N, (g + 1) * KG // LB * LB if CAUSAL else 0, MI, BT, D),
                    _input(k0, N, stride_kn, (g + 1) * KG, KG, D),
                    g, g - 1, True, g * KG // LB * LB if CAUSAL else 0, (g - 1) * KG // LB * LB if CAUSAL else 0,
                    N, KG, BT, MI, KP, AHEAD, SPLIT, KQ, D, FOLD,
                )  # fmt: skip
            b_k0, b_k1 = _cube_step(
                b_qa, b_k, q0, v0, do0, q0, do0, dv0, dk0, scores, scores1, dprobs, dprobs1, probs, ds, part,
                stride_qn, stride_vn, stride_dn,
                _keys(k0, stride_kn, 0, 0, N, KQ, DQ, D), _keys(k0, stride_kn, 1, 0, N, KQ, DQ, D),
                GROUPS - 1, GROUPS - 2, True,
                (N - KG) // LB * LB if CAUSAL else 0, (N - 2 * KG) // LB * LB if CAUSAL else 0,
                N, KG, BT, MI, KP, AHEAD, SPLIT, KQ, D, FOLD,
            )  # fmt: skip
        else:
            for u in range(0, GROUPS, 2):
                hu = tl.where(u == 0, h1, h)
                qu = q + (hu // H).to(tl.int64) * stride_qz + (hu % H).to(tl.int64) * stride_qh
                dou = dout + (hu // H).to(tl.int64) * stride_dz + (hu % H).to(tl.int64) * stride_dh
                b_qa = tl.load(_packed(q0, N, 0, MI, BT, D))
                b_k = tl.load(_input(k0, N, stride_kn, u * KG, KG, D))
                b_qa, b_k = _cube_step(
                    b_qa, b_k, q0, v0, do0, qu, dou,
                    dv + hu.to(tl.int64) * N * D, dk + hu.to(tl.int64) * N * D,
                    scores, scores1, dprobs, dprobs1, probs, ds, part,
                    stride_qn, stride_vn, stride_dn,
                    _packed(q0, N, 0, MI, BT, D), _input(k0, N, stride_kn, (u + 1) * KG, KG, D),
                    u, (u + GROUPS - 1) % GROUPS, True, 0, 0, N, KG, BT, MI, KP, AHEAD, SPLIT, KQ, D, FOLD,
                )  # fmt: skip
                _cube_step(
                    b_qa, b_k, q0, v0, do0, q0, do0, dv0, dk0, scores, scores1, dprobs, dprobs1, probs, ds, part,
                    stride_qn, stride_vn, stride_dn,
                    _packed(q0, N, 0, MI, BT, D), _input(k0, N, stride_kn, u * KG, KG, D),
                    u + 1, u, False, 0, 0, N, KG, BT, MI, KP, AHEAD, SPLIT, KQ, D, FOLD,
                )  # fmt: skip
            b_k0 = tl.load(_keys(k0, stride_kn, 0, 0, N, KQ, DQ, D))
            b_k1 = tl.load(_keys(k0, stride_kn, 1, 0, N, KQ, DQ, D))
        if not MIX:
            b_ds = tl.load(_tile(ds, KQ, 0, 0, BQ, KQ))
        _query_phase(b_k0, b_k1, b_ds, k0, stride_kn, ds, dq0, 0, CAUSAL, N, BQ, KQ, DQ, D)
        for d in tl.static_range(DQ, D, DQ):
            b_k0 = tl.load(_keys(k0, stride_kn, 0, d, N, KQ, DQ, D))
            b_k1 = tl.load(_keys(k0, stride_kn, 1, d, N, KQ, DQ, D))
            b_ds = tl.load(_tile(ds, KQ, 0, 0, BQ, KQ))
            _query_phase(b_k0, b_k1, b_ds, k0, stride_kn, ds, dq0, d, CAUSAL, N, BQ, KQ, DQ, D)
        if not FOLD:
            _sync_set("cube", "vector", 6)

        lse0 = lse + h.to(tl.int64) * N
        for g in range(0, GROUPS):
            p0 = probs + g % 2 * N * KG
            ds0 = _group(ds, g, N, KG, KQ)
            low = 0
            if CAUSAL:
                low = g * KG // LB * LB
            pieces = (N - low + MI - 1) // MI
            o_n = (g * KG + tl.arange(0, KG)).to(tl.float32)
            for c in range(0, pieces):
                _sync_wait("cube", "vector", 0)
                start = low + c * MI
                stop = tl.minimum(start + MI, N)
                if CAUSAL:
                    diagonal = LB * (c == 0).to(tl.int32)
                    for r in range(start, start + diagonal, RD):
                        _probability_rows(scores, p0, lse0, o_n, scale, r, True, KG, RD)
                    start += diagonal
                for r in range(start, stop, 2 * R):
                    _probability_rows(scores, p0, lse0, o_n, scale, r, False, KG, R)
                    _probability_rows(scores, p0, lse0, o_n, scale, r + R, False, KG, R)
            _sync_set("vector", "cube", 1)
            for c in range(0, pieces):
                _sync_wait("cube", "vector", 4)
                start = low + c * MI
                for r in range(start, tl.minimum(start + MI, N), 2 * R):
                    _gradient_rows(dprobs, p0, ds0, delta, scale, r, FOLD, KQ, KG, R)
                    _gradient_rows(dprobs, p0, ds0, delta, scale, r + R, FOLD, KQ, KG, R)
            _sync_set("vector", "cube", 3)
            if not FOLD:
                # The key gradient of the group before.
                _sync_wait("cube", "vector", 2)
                g1 = (g + GROUPS - 1) % GROUPS
                dk1 = dk + (h - (g == 0).to(tl.int32)).to(tl.int64) * N * D
                live = ((h > first) | (g > 0)).to(tl.int32)
                for r in range(0, KG * live, RO):
                    b_o = tl.load(_tile(part + g1 % 2 * KG * D, D, r, 0, RO, D))
                    tl.store(_tile(dk1, D, g1 * KG + r, 0, RO, D), (b_o * scale).to(dk.type.element_ty))
                # The query gradients of the last head: late, so that they hold up nothing.
                if (g == 0) & (h > first):
                    _sync_wait("cube", "vector", 6)
                    _finish_rows(dq_part, dq + h1.to(tl.int64) * N * D, scale, N, RO, D)
        _sync_set("vector", "cube", 5)
        _delta_rows(
            out,
            dout,
            delta,
            tl.minimum(h + 1, last - 1),
            H,
            stride_oz,
            stride_oh,
            stride_on,
            stride_dz,
            stride_dh,
            stride_dn,
            N,
            R,
            D,
        )
    # The key gradients of the last group, summed in the same order as those of the steps.
    _sync_wait("vector", "cube", 1)
    _sync_wait("vector", "cube", 3)
    live = tl.minimum(last - first, 1)
    h1 = last - 1
    q1 = q + (h1 // H).to(tl.int64) * stride_qz + (h1 % H).to(tl.int64) * stride_qh
    do1 = dout + (h1 // H).to(tl.int64) * stride_dz + (h1 % H).to(tl.int64) * stride_dh
    end1 = N - KG
    p1 = probs + (GROUPS - 1) % 2 * N * KG
    ds1 = _group(ds, GROUPS - 1, N, KG, KQ)
    part1 = _finished(part, dk + h1.to(tl.int64) * N * D, GROUPS - 1, FOLD, KG, D)
    low = 0
    if CAUSAL:
        low = end1 // LB * LB
    LAST: tl.constexpr = N - (N - KG) // LB * LB if CAUSAL else N
    KE: tl.constexpr = KP if KP < LAST else LAST
    KH: tl.constexpr = KG // 2 if SPLIT else KG
    for _ in range(0, live):
        if MIX:
            _mixed_tail(p1, do1, dv + h1.to(tl.int64) * N * D + end1 * D, N - LAST, N, MI, BT, KG, D)
            _mixed_tail(ds1, q1, part1, N - LAST, N, MI, BT, KG, D)
        else:
            for half in tl.static_range(0, KG, KH):
                b_g = tl.zeros([KH, D], tl.float32)
                for m in range(low, N, KE):
                    b_p = tl.load(_tile(p1, KG, m, half, KE, KH))
                    b_g = tl.dot(tl.trans(b_p), tl.load(_input(do1, N, stride_dn, m, KE, D)), b_g)
                p_dv = _tile(dv + h1.to(tl.int64) * N * D, D, end1 + half, 0, KH, D)
                tl.store(p_dv, b_g.to(dv.type.element_ty))
                b_h = tl.zeros([KH, D], tl.float32)
                for m in range(low, N, KE):
                    b_ds = tl.load(_tile(ds1, KQ, m, half, KE, KH))
                    b_h = tl.dot(tl.trans(b_ds), tl.load(_input(q1, N, stride_qn, m, KE, D)), b_h)
                tl.store(_tile(part1, D, half, 0, KH, D), b_h.to(part1.type.element_ty))
    if not FOLD:
        _sync_set("cube", "vector", 2)
        _sync_wait("cube", "vector", 2)
    if first < last and not FOLD:
        _finish_rows(part1, dk + h1.to(tl.int64) * N * D + end1 * D, scale, KG, RO, D)
        _sync_wait("cube", "vector", 6)
        _finish_rows(dq_part, dq + h1.to(tl.int64) * N * D, scale, N, RO, D)


def _prepare_device(q: torch.Tensor) -> None:
    """CPU tensors run on the virtual NPU, which is imported only then."""
    if q.device.type not in ("cpu", "npu", "cuda"):
        raise ValueError(f"q must be on an NPU, a CUDA GPU, or on the CPU for the virtual NPU, got {q.device}")
    if q.device.type == "cpu":
        from harness import virtual_npu

        virtual_npu.install()


def _active_counts() -> tuple[int, int]:
    """AI cores of the active device, and its vector cores."""
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(driver.get_current_device())
    return int(properties["num_aicore"]), int(properties.get("num_vectorcore", 2 * properties["num_aicore"]))


@functools.lru_cache
def _chip_counts(device: torch.device) -> tuple[int, int]:
    return _active_counts()


def _device_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """`_active_counts`, kept for a chip, which answers in a millisecond; the virtual NPU's may
    change. On CUDA no limit: one tile for each program."""
    if not ASCEND.value:
        return 1 << 30, 1 << 30
    return _active_counts() if tensor.device.type == "cpu" else _chip_counts(tensor.device)


@functools.lru_cache
def _compiler_release(device: int) -> str:
    """Release of the bishengir-compile on PATH, "1.1.0" (the contest's) where it does not say."""
    compiler = shutil.which("bishengir-compile")
    if compiler is None:
        return "1.1.0"
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"bishengir-compile (\d+(?:\.\d+)+)", text)
    return match[1] if match else "1.1.0"


def _check_tensor(name: str, tensor: torch.Tensor, like: torch.Tensor | None) -> None:
    """One input by itself; `like` is the first one, q."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor (torch.strided), got {tensor.layout}")
    if tensor.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions [Z, H, N, D], got shape {list(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be torch.float16 or torch.bfloat16, got {tensor.dtype}")
    if 0 in tensor.shape:
        raise ValueError(f"{name} must not be empty, got shape {list(tensor.shape)}")
    if not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must have a head dimension from 1 to {MAX_HEAD_DIM}, got {tensor.shape[3]}")
    if like is None:
        return
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of q, {like.dtype}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of q, {like.device}, got {tensor.device}")


def _check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> list[torch.Tensor]:
    """q, k and v as [Z, H, N, D] views, after the checks of `attention_bwd` on them."""
    if not isinstance(layout, str):
        raise TypeError(f"layout must be a str, got {type(layout).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, None if name == "q" else q)
    if layout == "BSND":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    for name, tensor in (("q", q), ("k", k)):
        z, h, n, _ = tensor.shape
        if n > MAX_LENGTH:  # masks compare positions as floats
            raise ValueError(f"{name} must have a length up to {MAX_LENGTH}, got {n}")
        if z * h * ((n + 15) // 16) > MAX_TILES:  # the kernels count tiles in 32 bits
            raise ValueError(f"{name} must have up to {MAX_TILES} tiles of 16 rows in all heads, got shape {[z, h, n]}")
    for name, tensor, other, like, axis, what in (
        ("k", k, "q", q, 0, "batch size"),
        ("k", k, "q", q, 3, "head dimension"),
        ("v", v, "k", k, 0, "batch size"),
        ("v", v, "k", k, 1, "number of heads"),
        ("v", v, "k", k, 2, "length"),
    ):
        if tensor.shape[axis] != like.shape[axis]:
            raise ValueError(f"{name} must have the {what} of {other}, {like.shape[axis]}, got {tensor.shape[axis]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k must have a number of heads that divides that of q, {q.shape[1]}, got {k.shape[1]}")
    for name, tensor in (("q", q), ("v", v)):
        d = tensor.shape[3]
        if tensor.is_cuda and (d < 16 or d & (d - 1)):  # blocks of upstream Triton are powers of two
            raise ValueError(f"{name} must have a head dimension of 16, 32, 64, 128 or 256 on CUDA, got {d}")
    return [q, k, v]


def _check_options(causal: bool | str, sm_scale: float | None) -> None:
    if not isinstance(causal, (bool, str)):
        raise TypeError(f"causal must be a bool or a str, got {type(causal).__name__}")
    if isinstance(causal, str) and causal not in ("top-left", "bottom-right"):
        raise ValueError(f'causal must be False, True, "top-left" or "bottom-right", got {causal!r}')
    if sm_scale is None:
        return
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)):
        raise TypeError(f"sm_scale must be a float or None, got {type(sm_scale).__name__}")
    if not abs(sm_scale) <= FP32_MAX:
        raise ValueError(f"sm_scale must be finite in fp32, got {sm_scale}")


def _check_result(name: str, tensor: torch.Tensor, q: torch.Tensor, shape: tuple[int, ...]) -> None:
    """out or dout, of the given shape."""
    _check_tensor(name, tensor, q)
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def _check_lse(lse: torch.Tensor, q: torch.Tensor) -> None:
    if not isinstance(lse, torch.Tensor):
        raise TypeError(f"lse must be a torch.Tensor, got {type(lse).__name__}")
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse must have shape {list(q.shape[:3])}, got {list(lse.shape)}")
    if lse.dtype != torch.float32:
        raise TypeError(f"lse must be torch.float32, got {lse.dtype}")
    if lse.device != q.device:
        raise ValueError(f"lse must be on the device of q, {q.device}, got {lse.device}")


def _shift(causal: bool | str, sq: int, sk: int) -> int | None:
    """Row i sees the keys up to i + shift; None: every row sees every key."""
    shift = sk - sq if causal == "bottom-right" else 0
    return shift if causal and shift < sk - 1 else None


def _rows_apart(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy where its last dimension is not unit-stride or its rows are one row."""
    unit = x.stride(3) == 1 or x.shape[3] == 1
    apart = x.stride(2) != 0 or x.shape[2] == 1
    return x if unit and apart else x.contiguous()


def _pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [Z, H, N, D] itself, or zeros after it where N < rows."""
    return x if x.shape[2] >= rows else torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[2]))


def _empty(z: int, h: int, n: int, d: int, layout: str, like: torch.Tensor) -> torch.Tensor:
    """Memory for a result in the given layout, as a view [Z, H, N, D]."""
    if layout == "BSND":
        return torch.empty((z, n, h, d), dtype=like.dtype, device=like.device).transpose(1, 2)
    return torch.empty((z, h, n, d), dtype=like.dtype, device=like.device)


def _in_layout(x: torch.Tensor, n: int, layout: str) -> torch.Tensor:
    """The first n rows of a result [Z, H, N, D], contiguous in the given layout."""
    x = x[:, :, :n]
    return (x.transpose(1, 2) if layout == "BSND" else x).contiguous()


def _fitting(size: int, length: int, least: int) -> int:
    """A power of two up to `size` that is not longer than `length`, `least` for short lengths."""
    return min(size, max(least, 1 << (length.bit_length() - 1)))


# bishengir 1.2.0 cuts vector loops in two and then fails to split them over the two vector
# cores: every store lands under a sub-block-0 guard and the second core repeats the first one's
# work. One loop keeps the split. 1.1.0 compiles to the same either way.
_OPTIONS = {"tile_mix_vector_loop": 1}

# (BM, BN) of the dk/dv kernel and of the dq kernel, by the head dimension rounded up: of the
# tiles that fit on chip with both vector cores at work, the fastest on the virtual NPU.
_TILES_DKDV = {16: (128, 128), 32: (128, 128), 64: (128, 128), 128: (128, 64), 256: (128, 32)}
_TILES_DQ = {16: (128, 128), 32: (128, 128), 64: (128, 128), 128: (128, 128), 256: (64, 128)}


# (BM, BN), warps and stages on a CUDA GPU, measured on an H200.
_TILES_CUDA_DKDV = {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)}
_TILES_CUDA_DQ = {64: (128, 128, 8, 3), 128: (128, 32, 4, 3), 256: (128, 32, 8, 3)}


def _tiling_cuda(sq: int, sk: int, d: int) -> list[tuple[int, int, dict[str, int]]]:
    """Tile sizes of the dk/dv kernel and of the dq kernel on CUDA, with their launch options."""
    both = (table[max(64, triton.next_power_of_2(d))] for table in (_TILES_CUDA_DKDV, _TILES_CUDA_DQ))
    return [
        (_fitting(bm, sq, 16), _fitting(bn, sk, 16), {"num_warps": warps, "num_stages": stages})
        for bm, bn, warps, stages in both
    ]


def get_tiling_bwd(N_CTX: int, HEAD_DIM: int, causal: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tile sizes (BM, BN) of the dk/dv kernel and of the dq kernel for long rows.

    Raises:
        ValueError: HEAD_DIM is not from 1 to 256.
    """
    if not 1 <= HEAD_DIM <= MAX_HEAD_DIM:
        raise ValueError(f"HEAD_DIM must be from 1 to {MAX_HEAD_DIM}, got {HEAD_DIM}")
    width = max(16, triton.next_power_of_2(HEAD_DIM))
    return _TILES_DKDV[width], _TILES_DQ[width]


# The pipeline's settings by head dimension and causal: groups of KG keys, scores in tiles of
# BT x KG out of pieces of MI queries, key gradients in pieces of KP queries, loaded AHEAD pieces
# ahead (0: P and dS one, Q and dO two, and K or V of the next scores during those before), in
# halves of the keys with SPLIT, between the scores with MIX (in pieces of MI then; BT x KG tiles
# come in halves); FOLD: dS carries a scale that
# `_folds`; UNROLL groups in a loop body, with a causal mask LB queries at a time on the diagonal; dq
# in tiles of BQ queries and KQ keys, DQ columns at a time; vector work in chunks of R rows (RD on
# the diagonal), results in chunks of RO rows. MI / BT divides the first query of each piece.
_SETTINGS = ("KG", "BT", "MI", "KP", "AHEAD", "BQ", "KQ", "DQ", "UNROLL", "SPLIT", "MIX", "FOLD")
_PIPELINES: dict[tuple[int, bool], dict[str, int]] = {
    case: dict(zip(_SETTINGS, values, strict=True)) | {"LB": values[0], "R": 64, "RD": 64, "RO": 64}
    for case, values in {
        (64, False): (256, 64, 256, 256, 1, 256, 256, 64, 4, 0, 1, 1),
        (64, True): (256, 64, 512, 256, 0, 256, 256, 64, 4, 0, 0, 0),
        (128, False): (256, 64, 512, 256, 0, 256, 256, 128, 4, 1, 0, 1),
        (128, True): (256, 64, 256, 256, 1, 256, 256, 128, 4, 0, 0, 1),
        (256, False): (128, 128, 256, 256, 1, 256, 256, 128, 2, 0, 0, 1),
        (256, True): (128, 128, 256, 256, 1, 256, 256, 128, 8, 0, 0, 1),
    }.items()
}
_PIPELINE_LENGTHS = (1024,)
# The order of the scratch among the kernel's arguments; some have two names there.
_SCRATCH_NAMES = ("delta", "scores", "scores", "dprobs", "dprobs", "probs", "ds", "part", "dq_part")
_PIPELINE_OPTIONS = {
    "disable_auto_inject_block_sync": True,  # the events in the kernel are the whole hand-over
    "sync_solver": False,  # the default solver lets every product wait for the last one
    "multibuffer": False,  # tiles are loaded ahead by hand; doubled ones run out of event ids
}


def get_path_bwd(Z: int, H: int, N_CTX: int, HEAD_DIM: int, causal: bool, cores: int, release: str = "1.1.0") -> str:
    """Which kernels a shape takes: "pipeline" or "general".

    The pipeline needs a length whose score gradients of one head for each core stay in L2
    (1024), a head for each core, and a bishengir before 1.2 (see `forward.get_path`).
    """
    fits = (HEAD_DIM, causal) in _PIPELINES and N_CTX in _PIPELINE_LENGTHS and cores <= Z * H
    return "pipeline" if fits and release.startswith(("1.0", "1.1")) else "general"


def _folds(scale: float) -> bool:
    """Whether dS may carry the scale to dK and dQ: a power of two that costs dS, in fp16, no more than
    the last bit of its smallest numbers."""
    return scale in (0.5, 1.0, 2.0)


def pipeline_scratch(N_CTX: int, HEAD_DIM: int, causal: bool, cores: int, sm_scale: float) -> dict[str, int]:
    """Elements of the pipeline's scratch buffers, all cores together: in fp32 delta, scores,
    dprobs, part and dq_part (these two where dS does not carry the scale), in q's dtype probs and ds."""
    n, group = N_CTX, _PIPELINES[HEAD_DIM, causal]["KG"]
    fold = _PIPELINES[HEAD_DIM, causal]["FOLD"] and _folds(sm_scale)
    for_one = {
        "delta": n,
        "scores": n * group,
        "dprobs": n * group,
        "probs": 2 * n * group,
        "ds": n * n,
        "part": 1 if fold else 2 * group * HEAD_DIM,
        "dq_part": 1 if fold else n * HEAD_DIM,
    }
    return {name: cores * elements for name, elements in for_one.items()}


def scratch_bytes(Z: int, H: int, N_CTX: int, HEAD_DIM: int, causal: bool, sm_scale: float) -> int:
    """Bytes of global memory that the kernels need on the active device beside inputs and outputs."""
    cores, release = _active_counts()[0], _compiler_release(triton.runtime.driver.active.get_current_device())
    if get_path_bwd(Z, H, N_CTX, HEAD_DIM, causal, cores, release) == "general":
        return 4 * Z * H * N_CTX  # delta
    sizes = pipeline_scratch(N_CTX, HEAD_DIM, causal, cores, sm_scale)
    return sum(elements * (2 if name in ("probs", "ds") else 4) for name, elements in sizes.items())


def _backward_pipeline(dout, q, k, v, out, lse, causal, scale, cores):
    """Launch of the pipeline; its scratch depends on the cores only."""
    z, h, n, d = q.shape
    # Several rows are loaded as one of L1, so they must have no gaps.
    q, dout = (x if x.stride(2) == d else x.contiguous() for x in (q, dout))
    dq, dk, dv = (torch.empty((z, h, n, d), dtype=q.dtype, device=q.device) for _ in range(3))
    fold = _PIPELINES[d, causal]["FOLD"] and _folds(scale)
    # dq reads whole blocks of dS on the diagonal, of which tiles above it are never written.
    scratch = {
        name: (torch.zeros if name == "ds" and causal else torch.empty)(
            elements, dtype=q.dtype if name in ("probs", "ds") else torch.float32, device=q.device
        )
        for name, elements in pipeline_scratch(n, d, causal, cores, scale).items()
    }
    attention_bwd_kernel_pipeline[(cores,)](
        q, k, v, out, dout, lse, dq, dk, dv, *(scratch[name] for name in _SCRATCH_NAMES),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *dout.stride()[:3],
        scale, h, z * h, CAUSAL=causal, N=n, D=d, **_PIPELINES[d, causal] | {"FOLD": int(fold)},
        **_PIPELINE_OPTIONS,
    )  # fmt: skip
    return dq, dk, dv


def attention_bwd(dout, q, k, v, out, lse, causal=False, sm_scale=None, *, layout="BNSD"):
    """Gradients of `forward.attention_fwd`.

    Args:
        dout: gradient of out, with its shape and dtype, any strides.
        q, k, v, out, lse: as given to and returned by the forward; the same limits. Each of
            dout, q, k, v and out whose last dimension is not unit-stride, or whose rows are
            all one row, is copied once; so is lse if it is not contiguous, and out and dout
            whose Dv is 1.
        causal, sm_scale, layout: as in the forward.

    Returns:
        dq, dk, dv: gradients with the shapes of q, k and v, contiguous, in q's dtype. A key
        head's gradient is the sum over the query heads that share it. Rows that see no key,
        and keys that no row sees, have zeros.

    fp16: P (dout vᵀ - delta) is rounded to fp16 on its way to the matrix unit. Where it exceeds
    65504, the gradients that it enters become infinite or NaN, as a loss scaler expects; they
    are not clamped. bf16 has no such limit.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    views = _check_inputs(q, k, v, layout)
    for name, tensor in (("dout", dout), ("out", out)):
        _check_result(name, tensor, q, (*q.shape[:3], v.shape[3]))
    q, k, v = views
    _check_lse(lse, q)
    _check_options(causal, sm_scale)
    if layout == "BSND":
        dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    scale = q.shape[3] ** -0.5 if sm_scale is None else float(sm_scale)
    shift = _shift(causal, q.shape[2], k.shape[2])
    _prepare_device(q)
    q, k, v, out, dout = (_rows_apart(x) for x in (q, k, v, out, dout))
    lse = lse.contiguous()
    if ASCEND.value and q.shape == k.shape == v.shape:
        release = _compiler_release(triton.runtime.driver.active.get_current_device())
        cores, _ = _device_counts(q)
        if get_path_bwd(*q.shape, shift is not None, cores, release) == "pipeline":
            grads = _backward_pipeline(dout, q, k, v, out, lse, shift is not None, scale, cores)
            return tuple(_in_layout(x, q.shape[2], layout) for x in grads)
    return _backward_general(dout, q, k, v, out, lse, shift, scale, layout)


def _backward_general(dout, q, k, v, out, lse, shift, scale, layout):
    """Launch of the three kernels; [Z, H, N, D] views in, gradients in `layout` out."""
    z, h, sq, d = q.shape
    hk, sk, dv = k.shape[1], k.shape[2], v.shape[3]
    masked = shift is not None
    if ASCEND.value:
        (dkdv_m, dkdv_n), (dq_m, dq_n) = get_tiling_bwd(sq, max(d, dv), masked)
        dkdv_m, dkdv_n = _fitting(dkdv_m, sq, 16), _fitting(dkdv_n, sk, 64)
        dq_m, dq_n = _fitting(dq_m, sq, 16), _fitting(dq_n, sk, 64)
        dkdv_options = dq_options = _OPTIONS
    else:
        (dkdv_m, dkdv_n, dkdv_options), (dq_m, dq_n, dq_options) = _tiling_cuda(sq, sk, max(d, dv))
    # Rows and keys of zeros: their dout is 0, and the dq kernel masks such keys.
    q, out, dout = (_pad_rows(x, max(dkdv_m, dq_m)) for x in (q, out, dout))
    k, v = (_pad_rows(x, max(dkdv_n, dq_n)) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    if dv == 1:  # the vector cores load a column only where its elements are neighbours
        out, dout = out.contiguous(), dout.contiguous()
    if rows > sq:
        lse = torch.nn.functional.pad(lse, (0, rows - sq))
    cores, vector_cores = _device_counts(q)
    delta = torch.empty((z, h, rows), dtype=torch.float32, device=q.device)
    grad_q = _empty(z, h, rows, d, layout, q)
    grad_k, grad_v = _empty(z, hk, keys, d, layout, q), _empty(z, hk, keys, dv, layout, q)
    block = min(32, rows)
    attention_bwd_kernel_delta[(min(vector_cores, triton.cdiv(rows, block) * z * h),)](
        out, dout, delta, *out.stride()[:3], *dout.stride()[:3], z, h, rows, TAIL=rows % block != 0, BM=block, D=dv
    )
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    attention_bwd_kernel_dkdv[(min(cores, triton.cdiv(keys, dkdv_n) * z * hk),)](
        q, k, v, dout, lse, delta, grad_k, grad_v, *strides, *grad_k.stride()[:3], *grad_v.stride()[:3],
        scale, z, hk, rows, keys, shift or 0,
        CAUSAL=masked, GROUP=h // hk, TAIL_M=rows % dkdv_m != 0, TAIL_N=keys % dkdv_n != 0,
        BM=dkdv_m, BN=dkdv_n, D=d, DV=dv, **dkdv_options,
    )  # fmt: skip
    attention_bwd_kernel_dq[(min(cores, triton.cdiv(rows, dq_m) * z * h),)](
        q, k, v, dout, lse, delta, grad_q, *strides, *grad_q.stride()[:3],
        scale, z, h, rows, keys, sk, shift or 0,
        CAUSAL=masked, GROUP=h // hk, TAIL_M=rows % dq_m != 0, TAIL_N=sk % dq_n != 0, EMPTY=masked and shift < 0,
        BM=dq_m, BN=dq_n, D=d, DV=dv, **dq_options,
    )  # fmt: skip
    return tuple(_in_layout(x, n, layout) for x, n in ((grad_q, sq), (grad_k, sk), (grad_v, sk)))


@torch.library.custom_op(
    "ascend_attention::backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str causal='', "
    "float? sm_scale=None, str layout='BNSD') -> (Tensor, Tensor, Tensor)",
)
def attention_bwd_op(dout, q, k, v, out, lse, causal="", sm_scale=None, layout="BNSD"):
    """`attention_bwd` as one op for torch.compile and export; causal is "", "top-left" or
    "bottom-right"."""
    return attention_bwd(dout, q, k, v, out, lse, causal or False, sm_scale, layout=layout)


@attention_bwd_op.register_fake
def _(dout, q, k, v, out, lse, causal="", sm_scale=None, layout="BNSD"):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))
