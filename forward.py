"""FlashAttention forward in Triton-Ascend for Ascend 910B.

Supported: q, k, v of shape [Z, H, N, D] or [Z, N, H, D] in fp16 or bf16, any strides, any
lengths (also different ones), head dimensions 1 to 256, grouped and multi-query heads, two
causal alignments; `attention_fwd` has the limits. Softmax is exact: fp32 statistics, a
running maximum, fp32 accumulators.

Runs on triton-ascend 3.2.0 and later; needs only torch and triton-ascend on an NPU. CPU
tensors run on the virtual NPU of this repository's harness.

Versions
  1  FA-2 as in the textbook: one program for each core, tiles before the diagonal without a
     mask, NaN-propagating maximum (one vmax instead of five ops), masks from float compares
     (integer ones fall to the scalar unit), wide key tiles.
  2  An explicit pipeline for long rows: while the vector cores take the softmax of one item
     (a block of query rows against a group of keys), the cube computes the scores of the
     next one and the output of the last. The running maximum and the rescale come once for
     each group instead of once for each tile; P V of a group never leaves the matrix unit.
  3  The same, denser: several keys as one row of L1 (fewer load start-ups), score tiles whose
     products have two k parts (both halves of L0 at work), causal items of exactly the keys
     that a block sees with a mask on the diagonal tile only, q scaled once instead of the
     scores. results/forward_steps.json has every step, also those dropped.
  4  The general path takes every shape: tiles with the exact head dimension (bishengir and
     the matrix unit pad it to the fractal on chip), the last tile of rows or keys moved back
     so that no load leaves the tensor and nothing has to be filled with zeros.
"""

import functools
import math
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

# Upstream Triton, for CUDA, has no extensions: there one core does all parts, in program order,
# and a barrier makes what one thread wrote to scratch visible to the others.
ASCEND = tl.constexpr(hasattr(al, "sync_block_set"))
if ASCEND.value:
    _sync_set, _sync_wait, _hint = al.sync_block_set, al.sync_block_wait, al.compile_hint
else:

    @triton.jit
    def _sync_set(sender: tl.constexpr, receiver: tl.constexpr, event: tl.constexpr):
        pass

    @triton.jit
    def _sync_wait(sender: tl.constexpr, receiver: tl.constexpr, event: tl.constexpr):
        tl.debug_barrier()

    @triton.jit
    def _hint(tile, name: tl.constexpr, value: tl.constexpr):
        pass


HEAD_DIMS = (16, 32, 64, 128, 256)  # those of the tables below; every other one is rounded up to find its tiles
MAX_HEAD_DIM = 256
MAX_LENGTH = 1 << 24
MAX_TILES = (1 << 31) - 1
LAYOUTS = ("BNSD", "BSND")
DTYPES = (torch.float16, torch.bfloat16)
FP32_MAX = (2 - 2**-23) * 2.0**127


@triton.jit
def _attention_fwd_inner(
    b_acc, b_l, b_m, b_q, k, v, stride_kn, stride_vn, o_m, scale, low, high, SK, VALID,
    MASK_CAUSAL: tl.constexpr, MASK_TAIL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One query tile against the keys from `low` (a multiple of BN) to `high`.

    MASK_TAIL: the last tile is moved back so that it ends at the last key, and hides the keys
    that it shares with the tile before; keys from VALID on are padding. So no load needs a
    bound or a fill (bishengir's fill of a tile in L1 races with the matrix unit).
    """
    for n in range(low, high, BN):
        start = n
        if MASK_TAIL:
            start = tl.minimum(n, SK - BN)
        p_k = tl.make_block_ptr(k, (SK, D), (stride_kn, 1), (start, 0), (BN, D), (1, 0))
        p_v = tl.make_block_ptr(v, (SK, DV), (stride_vn, 1), (start, 0), (BN, DV), (1, 0))
        b_k = tl.load(p_k)  # [BN, D]
        b_v = tl.load(p_v)  # [BN, DV]
        b_s = tl.dot(b_q, tl.trans(b_k)) * scale  # [BM, BN]
        if MASK_CAUSAL or MASK_TAIL:
            # Compared as floats: integer compares of tensors fall to the scalar unit.
            o_n = (start + tl.arange(0, BN)).to(tl.float32)
            if MASK_TAIL:
                o_n = tl.where(o_n >= n, o_n, float("inf"))
                o_n = tl.where(o_n < VALID, o_n, float("inf"))
            if MASK_CAUSAL:
                b_s = tl.where(o_m[:, None] >= o_n[None, :], b_s, float("-inf"))
            else:
                b_s = tl.where(o_n[None, :] < VALID, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1), propagate_nan=tl.PropagateNan.ALL)
        b_p = tl.exp(b_s - b_m_new[:, None])
        b_alpha = tl.exp(b_m - b_m_new)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = b_acc * b_alpha[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)  # [BM, DV]
        b_m = b_m_new
    return b_acc, b_l, b_m


@triton.jit
def attention_fwd_kernel_general(
    q, k, v, out, lse,
    stride_qz, stride_qh, stride_qn, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_on,
    scale, Z, H, SQ, SK, VALID, SHIFT,
    STAGE: tl.constexpr, GROUP: tl.constexpr, TAIL_M: tl.constexpr, TAIL_N: tl.constexpr, EMPTY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Forward for every supported shape; SQ >= BM and SK >= BN.

    STAGE is a bit mask: 1 for keys that need no causal mask, 2 for those on the diagonal
    (causal is 3; row i sees the keys up to i + SHIFT). TAIL_M: BM does not divide SQ; the last
    tile then overlaps the one before, and its rows belong to it alone. TAIL_N: BN does not
    divide VALID. EMPTY: some rows see no key (SHIFT < 0). GROUP query heads share a key head.
    Each program takes query tiles in turn, tiles of one position after another
    (query-tile-major), so that causal work is balanced.
    """
    heads = Z * H
    for t in range(tl.program_id(0), tl.cdiv(SQ, BM) * heads, tl.num_programs(0)):
        i_m = t // heads
        i_z = (t % heads) // H
        i_h = (t % heads) % H
        i_hk = i_h // GROUP
        row = i_m * BM
        rows = SQ  # this tile stores its rows below `rows`
        if TAIL_M:
            if row + BM > SQ:
                row = SQ - BM
            else:
                rows = SQ - BM
        q_head = q + i_z.to(tl.int64) * stride_qz + i_h.to(tl.int64) * stride_qh
        k_head = k + i_z.to(tl.int64) * stride_kz + i_hk.to(tl.int64) * stride_kh
        v_head = v + i_z.to(tl.int64) * stride_vz + i_hk.to(tl.int64) * stride_vh
        o_head = out + i_z.to(tl.int64) * stride_oz + i_h.to(tl.int64) * stride_oh
        p_q = tl.make_block_ptr(q_head, (SQ, D), (stride_qn, 1), (row, 0), (BM, D), (1, 0))
        p_out = tl.make_block_ptr(o_head, (rows, DV), (stride_on, 1), (row, 0), (BM, DV), (1, 0))
        p_lse = tl.make_block_ptr(lse + (t % heads).to(tl.int64) * SQ, (rows,), (1,), (row,), (BM,), (0,))
        b_q = tl.load(p_q)  # [BM, D]
        o_m = (row + SHIFT + tl.arange(0, BM)).to(tl.float32)
        # The lowest float, not -inf: a row that sees no key then sums to 0 and not to NaN.
        b_m = tl.full([BM], -3.4028234663852886e38, tl.float32)
        b_l = tl.zeros([BM], tl.float32)
        b_acc = tl.zeros([BM, DV], tl.float32)
        if STAGE & 2:
            middle = tl.minimum(row + SHIFT + 1, VALID)
            if EMPTY:
                middle = tl.maximum(middle, 0)
            middle = middle // BN * BN
            end = tl.minimum(row + SHIFT + BM, VALID)
        else:
            middle = VALID // BN * BN
            end = VALID
        b_acc, b_l, b_m = _attention_fwd_inner(
            b_acc, b_l, b_m, b_q, k_head, v_head, stride_kn, stride_vn, o_m, scale, 0, middle, SK, VALID,
            False, False, BN, D, DV,
        )  # fmt: skip
        if STAGE & 2 or TAIL_N:
            b_acc, b_l, b_m = _attention_fwd_inner(
                b_acc, b_l, b_m, b_q, k_head, v_head, stride_kn, stride_vn, o_m, scale, middle, end, SK, VALID,
                STAGE & 2, TAIL_N, BN, D, DV,
            )  # fmt: skip
        b_lse = b_m + tl.log(b_l)
        if EMPTY:
            b_l = tl.where(b_l > 0, b_l, 1.0)
        b_out = (b_acc / b_l[:, None]).to(out.type.element_ty)
        if TAIL_M:
            tl.store(p_out, b_out, boundary_check=(0,))
            tl.store(p_lse, b_lse, boundary_check=(0,))
        else:
            tl.store(p_out, b_out)
            tl.store(p_lse, b_lse)


@triton.jit
def _tile(base, ROWS: tl.constexpr, COLS: tl.constexpr, row, col, BR: tl.constexpr, BC: tl.constexpr):
    """Block pointer to a tile of a row-major [ROWS, COLS] scratch."""
    return tl.make_block_ptr(base, (ROWS, COLS), (COLS, 1), (row, col), (BR, BC), (1, 0))


@triton.jit
def _rows(base, ROWS: tl.constexpr, row, BR: tl.constexpr):
    """Block pointer to some elements of a vector with ROWS elements."""
    return tl.make_block_ptr(base, (ROWS,), (1,), (row,), (BR,), (0,))


@triton.jit
def _block(t, blocks, CAUSAL: tl.constexpr):
    """Query block of step t: up through one head and down through the next, so that (causal)
    consecutive items are about equally long: the cube works on one while the vector cores
    work on the other."""
    i_m = t % blocks
    if CAUSAL:
        i_m += t // blocks % 2 * (blocks - 1 - 2 * i_m)
    return i_m


@triton.jit
def _head(base, i_head, H, stride_z, stride_h):
    """The head's first element."""
    return base + (i_head // H).to(tl.int64) * stride_z + (i_head % H).to(tl.int64) * stride_h


@triton.jit
def _scale_rows(q_head, scaled, scale, row, stride_n, N, BM: tl.constexpr, D: tl.constexpr, RQ: tl.constexpr):
    """q times the scale of a query block, to `scaled` [BM, D]."""
    for r in range(0, BM, RQ):
        b_x = tl.load(tl.make_block_ptr(q_head, (N, D), (stride_n, 1), (row + r, 0), (RQ, D), (1, 0)))  # [RQ, D]
        tl.store(_tile(scaled, BM, D, r, 0, RQ, D), (b_x * scale).to(scaled.type.element_ty))


@triton.jit
def _columns(tile, column, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Columns of a tile in L1. Only columns: the matrix unit's loads take the pitch of a
    fractal column from the tile's size, which a slice of rows would falsify."""
    if ASCEND:
        return al.extract_slice(tile, (0, column), (ROWS, COLS), (1, 1))
    parts: tl.constexpr = tile.shape[1] // COLS
    wanted = (tl.arange(0, parts) == column // COLS)[None, :, None]
    return tl.sum(tl.where(wanted, tl.reshape(tile, (ROWS, parts, COLS)), 0), 1).to(tile.dtype)


@triton.jit
def _packed(base, N, row, B: tl.constexpr, F: tl.constexpr, D: tl.constexpr):
    """Block pointer to B F rows as a tile [B, F D]: column block f has rows f, f + F, ..."""
    return tl.make_block_ptr(base, (N // F, F * D), (F * D, 1), (row // F, 0), (B, F * D), (1, 0))


@triton.jit
def _softmax_rows(
    scores, probs, stats, sums, scale, r,
    BM: tl.constexpr, KG: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """exp((s - m) scale) of R rows of a group of scores; m and the row sums go to `stats`, here
    also `sums`."""
    b_s = tl.load(_tile(scores, BM, KG, r, 0, R, KG))  # [R, KG]
    _hint(b_s, "hivm.multi_buffer", 2)  # in a mixed kernel only the cube's loads are double-buffered by default
    b_m = tl.max(b_s, 1)
    # The small stores come before the large one: the next rows wait for them only.
    tl.store(_rows(stats, BM, r, R), b_m)
    b_p = tl.exp((b_s - b_m[:, None]) * scale)
    tl.store(_rows(sums + BM, BM, r, R), tl.sum(b_p, 1))
    tl.store(_tile(probs, BM, KG, r, 0, R, KG), b_p.to(probs.type.element_ty))


@triton.jit
def _softmax_causal(
    scores, probs, probs1, probs2, probs3, stats, stats1, sums, sums1,
    b_bias0, b_bias1, seen, keys, scale, r,
    BM: tl.constexpr, KG: tl.constexpr, R: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The same for 2 R rows that see `seen` of `keys` columns, the last 2 R of which take `bias`
    [2 R, 2 R]; the probs of the others are zero. Two passes over the scores in tiles of 2 R
    columns: how many there are is known only at run time. The last tile stays on chip between
    the passes; KEEP: so does the one before.

    Two chunks of rows take turns, which does what double-buffered loads would do: a hint in a
    nested loop makes bishengir give up the split over the vector cores.
    """
    C: tl.constexpr = 2 * R
    r1 = r + R
    body = seen - C
    b_t0 = tl.load(_tile(scores, BM, KG, r, body, R, C)) + b_bias0  # [R, C]
    b_t1 = tl.load(_tile(scores, BM, KG, r1, body, R, C)) + b_bias1
    b_e0 = b_t0
    b_e1 = b_t1
    if KEEP:
        # Where there is no such tile, another one is hidden, and its probs, stored first, give
        # way to the right ones.
        body = tl.maximum(body - C, 0)
        hide = tl.where(seen > C, 0.0, float("-inf"))
        b_x0 = tl.load(_tile(scores, BM, KG, r, body, R, C)) + hide
        b_x1 = tl.load(_tile(scores, BM, KG, r1, body, R, C)) + hide
        b_e0 = tl.maximum(b_t0, b_x0, propagate_nan=tl.PropagateNan.ALL)
        b_e1 = tl.maximum(b_t1, b_x1, propagate_nan=tl.PropagateNan.ALL)
    for c in range(0, body, C):
        b_e0 = tl.maximum(b_e0, tl.load(_tile(scores, BM, KG, r, c, R, C)), propagate_nan=tl.PropagateNan.ALL)
        b_e1 = tl.maximum(b_e1, tl.load(_tile(scores, BM, KG, r1, c, R, C)), propagate_nan=tl.PropagateNan.ALL)
    b_m0 = tl.max(b_e0, 1)
    b_m1 = tl.max(b_e1, 1)
    tl.store(_rows(stats, BM, r, R), b_m0)
    tl.store(_rows(stats1, BM, r1, R), b_m1)
    if KEEP:
        b_l0 = tl.exp((b_x0 - b_m0[:, None]) * scale)
        tl.store(_tile(probs, BM, KG, r, body, R, C), b_l0.to(probs.type.element_ty))
        b_l1 = tl.exp((b_x1 - b_m1[:, None]) * scale)
        tl.store(_tile(probs1, BM, KG, r1, body, R, C), b_l1.to(probs.type.element_ty))
        b_p0 = tl.exp((b_t0 - b_m0[:, None]) * scale)
        b_l0 += b_p0
        tl.store(_tile(probs, BM, KG, r, seen - C, R, C), b_p0.to(probs.type.element_ty))
        b_p1 = tl.exp((b_t1 - b_m1[:, None]) * scale)
        b_l1 += b_p1
        tl.store(_tile(probs1, BM, KG, r1, seen - C, R, C), b_p1.to(probs.type.element_ty))
    else:
        b_l0 = tl.exp((b_t0 - b_m0[:, None]) * scale)
        tl.store(_tile(probs, BM, KG, r, body, R, C), b_l0.to(probs.type.element_ty))
        b_l1 = tl.exp((b_t1 - b_m1[:, None]) * scale)
        tl.store(_tile(probs1, BM, KG, r1, body, R, C), b_l1.to(probs.type.element_ty))
    for c in range(0, body, C):
        b_p0 = tl.exp((tl.load(_tile(scores, BM, KG, r, c, R, C)) - b_m0[:, None]) * scale)
        b_l0 += b_p0
        tl.store(_tile(probs2, BM, KG, r, c, R, C), b_p0.to(probs.type.element_ty))
        b_p1 = tl.exp((tl.load(_tile(scores, BM, KG, r1, c, R, C)) - b_m1[:, None]) * scale)
        b_l1 += b_p1
        tl.store(_tile(probs3, BM, KG, r1, c, R, C), b_p1.to(probs.type.element_ty))
    tl.store(_rows(sums + BM, BM, r, R), tl.sum(b_l0, 1))
    tl.store(_rows(sums1 + BM, BM, r1, R), tl.sum(b_l1, 1))
    for c in range(seen, keys, C):
        for z in range(0, C, 32):  # a small tile: it is kept on chip
            tl.store(_tile(probs2, BM, KG, r + z, c, 32, C), tl.zeros([32, C], probs.type.element_ty))


@triton.jit
def _weights(stats, stats_before, scale, r, BM: tl.constexpr, RO: tl.constexpr):
    """Of RO rows: maximum and sum over a group and what came before, and the factors of the
    two results."""
    b_m1 = tl.load(_rows(stats, BM, r, RO))
    b_l1 = tl.load(_rows(stats + BM, BM, r, RO))
    b_m0 = tl.load(_rows(stats_before, BM, r, RO))
    b_l0 = tl.load(_rows(stats_before + BM, BM, r, RO))
    b_m = tl.maximum(b_m0, b_m1, propagate_nan=tl.PropagateNan.ALL)
    b_f0 = tl.exp((b_m0 - b_m) * scale)
    b_f1 = tl.exp((b_m1 - b_m) * scale)
    if not ASCEND:
        tl.debug_barrier()  # no thread stores running ones before all have loaded theirs
    return b_m, b_l0 * b_f0 + b_l1 * b_f1, b_f0, b_f1


@triton.jit
def attention_fwd_kernel_pipeline(
    q, k, v, out, lse, scaled, scaled1, scores, scores1, probs, probs1, probs2, probs3, partial,
    stats, stats1, sums, sums1, bias,
    stride_qz, stride_qh, stride_qn, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_on,
    scale, H, TILES, N,
    CAUSAL: tl.constexpr, GROUPS: tl.constexpr, FOLD: tl.constexpr, PARTIALS: tl.constexpr,
    HALVES: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, F: tl.constexpr,
    U: tl.constexpr, WP: tl.constexpr, KG: tl.constexpr, R: tl.constexpr, RQ: tl.constexpr, RO: tl.constexpr,
    KEEP: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Forward with cube and vector cores on different items; q, k, v have rows without gaps,
    N is a multiple of BM and, causal, of WP, or else of KG.

    An item is a block of BM = HALVES * BH query rows against a group of at most KG keys. In step i
      cube    scores(i) = Q K^T to scratch, event 0; waits for event 1; P V of item i - 1, event 2
      vector  waits for event 0; P(i) and its row statistics, event 1; waits for event 2; merges
              item i - 1 into the rows' running result, or finishes them
    and sets event 4 after that, for which the cube waits before it stores the next partial result.
    Scratch, for each core: two slots of scores [BM, KG] fp32 and of probs [BM, KG]; scaled q
    [BM, D] (FOLD); PARTIALS results [BM, D] fp32: one, or with GROUPS two slots (a block's first
    result waits for its second), the merged one and zeros; seven stats [2, BM] fp32 (maximum,
    sum): five slots, since one vector core may be two items ahead of the other, the merged one,
    and an empty one (-inf, 0).
    Other slots are free in time without further events: the cube reuses slot i of the scores
    after it waited for event 1 of item i - 2, which both vector cores set after reading them,
    and so on.

    One load of K or V brings W = BN F keys, those of one row of L1 (see `_packed`) in column
    blocks of their own; without a mask the columns of the scores stand in that order, which
    P V undoes. Tiles of scores hold every HALVES-th row.

    FOLD: the scale is a power of two; the vector cores scale the next item's q, event 3 (vector
    to cube), instead of the scores.

    Each program takes a run of query blocks, of equal length to one block; GROUPS says
    that a block can have more than one group.

    Scratch has several names (scores1; probs1 to probs3; stats1, sums, sums1; scaled1: the same
    tensors): bishengir waits between any two stores to one argument, though they go to different
    bytes. So stores that follow each other go through different arguments. It sees no order
    between those, so what is loaded on the core that stored it must be ordered by events.

    A causal item ends with the last keys that its rows see (rounded up to WP); `bias` [2, 2 R, 2 R]
    hides what is above the diagonal, or nothing.
    """
    BM: tl.constexpr = HALVES * BH
    W: tl.constexpr = BN * F
    SLOTS: tl.constexpr = 5
    pid = tl.program_id(0)
    first = pid * TILES // tl.num_programs(0)
    last = (pid + 1) * TILES // tl.num_programs(0)
    blocks = N // BM
    scaled += pid * BM * D
    scaled1 += pid * BM * D
    scores += pid * 2 * BM * KG
    scores1 += pid * 2 * BM * KG
    probs += pid * 2 * BM * KG
    probs1 += pid * 2 * BM * KG
    probs2 += pid * 2 * BM * KG
    probs3 += pid * 2 * BM * KG
    partial += pid * PARTIALS * BM * D
    acc = partial + 2 * BM * D
    stats += pid * (SLOTS + 2) * 2 * BM
    stats1 += pid * (SLOTS + 2) * 2 * BM
    sums += pid * (SLOTS + 2) * 2 * BM
    sums1 += pid * (SLOTS + 2) * 2 * BM
    running = stats + SLOTS * 2 * BM
    items = (last - first) * (N // KG)
    if CAUSAL:
        items = 0
        for t in range(first, last):
            items += (_block(t, blocks, CAUSAL) * BM + BM + KG - 1) // KG
    # Query block and group of this step's item and of the last one.
    i_t = first
    i_g = 0
    i_t0 = first - 1  # of its own: Triton 3.6 would not carry a copy of `first` through the loop
    i_g0 = 0
    if FOLD:
        if items > 0:
            q_head1 = _head(q, first // blocks, H, stride_qz, stride_qh)
            _scale_rows(q_head1, scaled1, scale, _block(first, blocks, CAUSAL) * BM, stride_qn, N, BM, D, RQ)
            _sync_set("vector", "cube", 3)
    if CAUSAL and not GROUPS:  # once
        b_bias0 = tl.load(_tile(bias, 2 * R, 2 * R, 0, 0, R, 2 * R))
        b_bias1 = tl.load(_tile(bias, 2 * R, 2 * R, R, 0, R, 2 * R))
    factor = scale
    if FOLD:
        factor = 1.0
    for i in range(0, items + 1):
        # bishengir keeps the events of a loop body that stands under one `if` (1.2.0 drops
        # those of a plain body) and still double-buffers the loads in it.
        if items > 0:
            if i < items:
                i_head = i_t // blocks
                row = _block(i_t, blocks, CAUSAL) * BM
                q_head = _head(q, i_head, H, stride_qz, stride_qh)
                k_head = _head(k, i_head, H, stride_kz, stride_kh)
                scores_slot = scores + i % 2 * BM * KG
                scores_slot1 = scores1 + i % 2 * BM * KG
                if FOLD:
                    _sync_wait("vector", "cube", 3)
                    b_q = tl.load(_tile(scaled, BH, HALVES * D, 0, 0, BH, HALVES * D))
                else:
                    b_q = tl.load(_packed(q_head, N, row, BH, HALVES, D))  # [BH, HALVES D]
                keys = KG
                if CAUSAL:
                    keys = tl.minimum(KG, (row + BM + WP - 1) // WP * WP - i_g * KG)
                # Two results live in L0C at once: one is drained while the other is computed.
                for n in range(0, keys, W):
                    if HALVES == 1:
                        if CAUSAL:  # in their order
                            p_k0 = tl.make_block_ptr(k_head, (N, D), (D, 1), (i_g * KG + n, 0), (BN, D), (1, 0))
                            p_k1 = tl.advance(p_k0, (BN, 0))
                        else:  # in that of V
                            p_k0 = tl.make_block_ptr(
                                k_head, (N // 2, 2 * D), (2 * D, 1), ((i_g * KG + n) // 2, 0), (BN, D), (1, 0)
                            )
                            p_k1 = tl.advance(p_k0, (0, D))
                        b_s0 = tl.dot(b_q, tl.trans(tl.load(p_k0)))  # [BH, BN]
                        if CAUSAL:
                            tl.store(_tile(scores_slot, BM, KG, 0, n, BH, BN), b_s0)
                            if i_g * KG + n + BN < row + BM:  # else hidden from all rows
                                b_s1 = tl.dot(b_q, tl.trans(tl.load(p_k1)))  # [BH, BN]
                                tl.store(_tile(scores_slot1, BM, KG, 0, n + BN, BH, BN), b_s1)
                        else:
                            b_s1 = tl.dot(b_q, tl.trans(tl.load(p_k1)))  # [BH, BN]
                            tl.store(_tile(scores_slot, BM, KG, 0, n, BH, BN), b_s0)
                            tl.store(_tile(scores_slot1, BM, KG, 0, n + BN, BH, BN), b_s1)
                    else:
                        b_k = tl.load(_packed(k_head, N, i_g * KG + n, BN, F, D))  # [BN, F D]
                        for f in tl.static_range(F):
                            for h in tl.static_range(0, HALVES, 2):
                                b_s0 = tl.dot(_columns(b_q, h * D, BH, D), tl.trans(_columns(b_k, f * D, BN, D)))
                                b_s1 = tl.dot(_columns(b_q, h * D + D, BH, D), tl.trans(_columns(b_k, f * D, BN, D)))
                                # [BH, BN]: rows h, h + HALVES, ...
                                tl.store(_tile(scores_slot, BH, HALVES * KG, 0, h * KG + n + f * BN, BH, BN), b_s0)
                                p_s1 = _tile(scores_slot1, BH, HALVES * KG, 0, h * KG + KG + n + f * BN, BH, BN)
                                tl.store(p_s1, b_s1)
                _sync_set("cube", "vector", 0)
                _sync_wait("cube", "vector", 0)
                if FOLD:
                    count1 = N // KG
                    if CAUSAL:
                        count1 = (row + BM + KG - 1) // KG
                    i_t1 = tl.minimum(i_t + (i_g + 1 == count1).to(tl.int32), last - 1)
                    q_head1 = _head(q, i_t1 // blocks, H, stride_qz, stride_qh)
                    _scale_rows(q_head1, scaled, scale, _block(i_t1, blocks, CAUSAL) * BM, stride_qn, N, BM, D, RQ)
                    _sync_set("vector", "cube", 3)
                probs_at = i % 2 * BM * KG
                stats_at = i % SLOTS * 2 * BM
                if CAUSAL:
                    for r in range(0, BM, 2 * R):
                        visible = row + r + 2 * R - i_g * KG
                        seen = tl.minimum(keys, visible)
                        if GROUPS:
                            shown = (seen < visible).to(tl.int32)  # not the row's last group: nothing is hidden
                            b_bias0 = tl.load(_tile(bias + shown * 4 * R * R, 2 * R, 2 * R, 0, 0, R, 2 * R))
                            b_bias1 = tl.load(_tile(bias + shown * 4 * R * R, 2 * R, 2 * R, R, 0, R, 2 * R))
                        _softmax_causal(
                            scores_slot, probs + probs_at, probs1 + probs_at, probs2 + probs_at, probs3 + probs_at,
                            stats + stats_at, stats1 + stats_at, sums + stats_at, sums1 + stats_at,
                            b_bias0, b_bias1, seen, keys, factor, r,
                            BM, KG, R, KEEP,
                        )  # fmt: skip
                else:
                    for r in range(0, BM, R):
                        _softmax_rows(
                            scores_slot, probs + probs_at, stats + stats_at, sums + stats_at, factor, r, BM, KG, R
                        )
                _sync_set("vector", "cube", 1)
            if i > 0:
                i_head0 = i_t0 // blocks
                row0 = _block(i_t0, blocks, CAUSAL) * BM
                v_head = _head(v, i_head0, H, stride_vz, stride_vh)
                o_head = _head(out, i_head0, H, stride_oz, stride_oh)
                lse_rows = lse + i_head0.to(tl.int64) * N + row0
                probs_slot0 = probs + (i + 1) % 2 * BM * KG
                partial_slot = partial + ((i + 1) % 2 if GROUPS else 0) * BM * D
                _sync_wait("vector", "cube", 1)
                b_pv = tl.zeros([BM, D], tl.float32)
                keys0 = KG
                if CAUSAL:
                    keys0 = tl.minimum(KG, (row0 + BM + WP - 1) // WP * WP - i_g0 * KG)
                for n in range(0, keys0, WP if CAUSAL else W * U):
                    for u in tl.static_range(U):
                        if CAUSAL and HALVES == 1:
                            # V's first part before P: it is free one product earlier.
                            p_v = tl.make_block_ptr(v_head, (N, D), (D, 1), (i_g0 * KG + n, 0), (BN, D), (1, 0))
                            b_v0 = tl.load(p_v)  # [BN, D]
                            b_p = tl.load(_tile(probs_slot0, BM, KG, 0, n, BM, W))  # [BM, W]
                            b_v1 = tl.load(tl.advance(p_v, (BN, 0)))
                            b_pv = tl.dot(_columns(b_p, 0, BM, BN), b_v0, b_pv)
                            b_pv = tl.dot(_columns(b_p, BN, BM, BN), b_v1, b_pv)
                        elif CAUSAL:
                            # Longer loads of P than of V, of which L1 holds two each.
                            b_p = tl.load(_tile(probs_slot0, BM, KG, 0, n, BM, WP))  # [BM, WP]
                            for c in range(0, WP, W):
                                b_v = tl.load(_packed(v_head, N, i_g0 * KG + n + c, W, 1, D))  # [W, D]
                                b_pv = tl.dot(_columns(b_p, c, BM, W), b_v, b_pv)
                        else:
                            b_v = tl.load(_packed(v_head, N, i_g0 * KG + n + u * W, BN, F, D))  # [BN, F D]
                            b_p = tl.load(_tile(probs_slot0, BM, KG, 0, n + u * W, BM, W))  # [BM, W]
                            if F == 1:
                                b_pv = tl.dot(b_p, b_v, b_pv)
                            else:
                                for f in tl.static_range(F):
                                    b_pv = tl.dot(_columns(b_p, f * BN, BM, BN), _columns(b_v, f * D, BN, D), b_pv)
                if i > 1:
                    _sync_wait("vector", "cube", 4)
                tl.store(_tile(partial_slot, BM, D, 0, 0, BM, D), b_pv)
                _sync_set("cube", "vector", 2)
                _sync_wait("cube", "vector", 2)
                stats_slot0 = stats + (i + SLOTS - 1) % SLOTS * 2 * BM
                if GROUPS:
                    groups = N // KG
                    if CAUSAL:
                        groups = (row0 + BM + KG - 1) // KG
                    # What came before: the partial result of the first group, the merged one
                    # (slot 2), or nothing (zeros and maximum -inf, slot 3).
                    first_group = (i_g0 == 0).to(tl.int32)
                    second_group = (i_g0 == 1).to(tl.int32)
                    others = 1 - first_group - second_group
                    before = partial + (3 * first_group + i % 2 * second_group + 2 * others) * BM * D
                    slot = (SLOTS + 1) * first_group + (i + SLOTS - 2) % SLOTS * second_group + SLOTS * others
                    stats_before = stats + slot * 2 * BM
                    closes = (i_g0 == groups - 1).to(tl.int32)
                    merges = (1 - closes) * (i_g0 > 0).to(tl.int32)
                    merged_rows = 0
                    if PARTIALS > 2:  # a third group merges with what two have left
                        merged_rows = BM * merges
                    for r in range(0, merged_rows, RO):
                        b_m, b_l, b_f0, b_f1 = _weights(stats_slot0, stats_before, factor, r, BM, RO)
                        tl.store(_rows(running, BM, r, RO), b_m)
                        tl.store(_rows(running + BM, BM, r, RO), b_l)
                        b_o0 = tl.load(_tile(before, BM, D, r, 0, RO, D))
                        b_o1 = tl.load(_tile(partial_slot, BM, D, r, 0, RO, D))
                        tl.store(_tile(acc, BM, D, r, 0, RO, D), b_o0 * b_f0[:, None] + b_o1 * b_f1[:, None])
                    for r in range(0, BM * closes, RO):
                        b_m, b_l, b_f0, b_f1 = _weights(stats_slot0, stats_before, factor, r, BM, RO)
                        tl.store(_rows(lse_rows, BM, r, RO), b_m * factor + tl.log(b_l))
                        b_o0 = tl.load(_tile(before, BM, D, r, 0, RO, D))
                        b_o1 = tl.load(_tile(partial_slot, BM, D, r, 0, RO, D))
                        p_out = tl.make_block_ptr(o_head, (N, D), (stride_on, 1), (row0 + r, 0), (RO, D), (1, 0))
                        b_o = b_o0 * (b_f0 / b_l)[:, None] + b_o1 * (b_f1 / b_l)[:, None]
                        tl.store(p_out, b_o.to(out.type.element_ty))
                else:
                    for r in range(0, BM, RO):
                        b_m = tl.load(_rows(stats_slot0, BM, r, RO))
                        b_l = tl.load(_rows(stats_slot0 + BM, BM, r, RO))
                        tl.store(_rows(lse_rows, BM, r, RO), b_m * factor + tl.log(b_l))
                        b_o = tl.load(_tile(partial_slot, BM, D, r, 0, RO, D))
                        p_out = tl.make_block_ptr(o_head, (N, D), (stride_on, 1), (row0 + r, 0), (RO, D), (1, 0))
                        tl.store(p_out, (b_o * (1 / b_l)[:, None]).to(out.type.element_ty))
                _sync_set("vector", "cube", 4)
            i_t0 = i_t
            i_g0 = i_g
            count = N // KG
            if CAUSAL:
                count = (_block(i_t, blocks, CAUSAL) * BM + BM + KG - 1) // KG
            done = (i_g + 1 == count).to(tl.int32)
            i_t += done
            i_g = (i_g + 1) * (1 - done)
    if items > 0:
        _sync_wait("vector", "cube", 4)
        if FOLD:
            _sync_wait("vector", "cube", 3)


def _prepare_device(q: torch.Tensor) -> None:
    """CPU tensors run on the virtual NPU, which is imported only then."""
    if q.device.type not in ("cpu", "npu", "cuda"):
        raise ValueError(f"q must be on an NPU, a CUDA GPU, or on the CPU for the virtual NPU, got {q.device}")
    if q.device.type == "cpu":
        from harness import virtual_npu

        virtual_npu.install()


def _device_index() -> int:
    return triton.runtime.driver.active.get_current_device()


def _active_core_count() -> int:
    """AI cores of the active device (one cube core and two vector cores each); on CUDA its multiprocessors."""
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(driver.get_current_device())
    return int(properties["num_aicore" if ASCEND.value else "multiprocessor_count"])


@functools.lru_cache
def _chip_core_count(device: torch.device) -> int:
    return _active_core_count()


def _core_count(tensor: torch.Tensor) -> int:
    """`_active_core_count`, kept for a chip, which answers in a millisecond; the virtual NPU's may change."""
    return _active_core_count() if tensor.device.type == "cpu" else _chip_core_count(tensor.device)


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
    """q, k and v as [Z, H, N, D] views, after all checks of `attention_fwd` on them."""
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


def _causal_name(causal: bool | str) -> str:
    """causal as the ops take it: "", "top-left" or "bottom-right"."""
    return causal if isinstance(causal, str) else "top-left" if causal else ""


def _check_block(name: str, size: int | None) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} must be an int or None, got {type(size).__name__}")
    if size < 16 or size & (size - 1):
        raise ValueError(f"{name} must be a power of two, 16 or larger, got {size}")


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


# Of the tiles that fit on chip with both vector cores at work, the fastest on the virtual NPU,
# by the head dimension rounded up.
_TILES = {16: (128, 256), 32: (128, 256), 64: (128, 256), 128: (128, 256), 256: (64, 128)}
_TILES_MASKED = {16: (64, 256), 32: (64, 256), 64: (64, 256), 128: (64, 256), 256: (32, 128)}


def _fitting(size: int, length: int, least: int) -> int:
    """A power of two up to `size` that is not longer than `length`, `least` for short lengths."""
    return min(size, max(least, 1 << (length.bit_length() - 1)))


def _tiling(sq: int, sk: int, d: int, causal: bool) -> tuple[int, int]:
    """Tile sizes (BM, BN) of the general path; d is the larger head dimension.

    A mask needs room on chip, so shapes that need one (causal, or keys that do not fill the
    last tile) take smaller tiles. Tiles of fewer than 64 keys would make the compiler give
    up the split of a tile over the two vector cores.
    """
    width = max(16, triton.next_power_of_2(d))
    bm, bn = _TILES[width]
    bm, bn = _fitting(bm, sq, 16), _fitting(bn, sk, 64)
    if causal or sk % bn:
        bm, bn = _TILES_MASKED[width]
        bm, bn = _fitting(bm, sq, 16), _fitting(bn, sk, 64)
        if bm == bn:  # bishengir 1.1.0 does not split a square masked tile either
            bm //= 2
    return bm, bn


def get_tiling(Z: int, H: int, N_CTX: int, HEAD_DIM: int, causal: bool) -> tuple[int, int]:
    """Tile sizes (BM, BN) of the general path for a shape with as many keys as queries.

    Raises:
        ValueError: HEAD_DIM is not from 1 to 256.
    """
    if not 1 <= HEAD_DIM <= MAX_HEAD_DIM:
        raise ValueError(f"HEAD_DIM must be from 1 to {MAX_HEAD_DIM}, got {HEAD_DIM}")
    return _tiling(N_CTX, N_CTX, HEAD_DIM, bool(causal))


# (BM, BN), warps and stages of the general path on a CUDA GPU, measured on an H200.
_TILES_CUDA = {64: (128, 64, 4, 3), 128: (128, 128, 8, 3), 256: (128, 32, 8, 3)}


def _tiling_cuda(sq: int, sk: int, d: int) -> tuple[int, int, dict[str, int]]:
    """Tile sizes of the general path on CUDA, and its launch options."""
    bm, bn, warps, stages = _TILES_CUDA[max(64, triton.next_power_of_2(d))]
    return _fitting(bm, sq, 16), _fitting(bn, sk, 16), {"num_warps": warps, "num_stages": stages}


# The pipeline's settings by head dimension and causal:
#   HALVES, BH   query rows of an item, as tiles of BH rows
#   BN, F        keys of a tile of scores, and how many such tiles one load of K or V brings
#   U            steps of P V in one loop body
#   WP           causal: keys of a load of P
#   KG           largest group of keys
#   R, RO, RQ    rows of a step of the softmax, of the results, of the scaling of q
#   MB           the compiler double-buffers the cube's tiles (else those of a body take turns)
#   FOLD         the vector cores scale q where the scale is a power of two
#   KEEP         causal, one group: one more tile of scores stays on chip between the passes
# Found on the virtual NPU (make tune).
_SETTINGS = ("HALVES", "BH", "BN", "F", "U", "WP", "KG", "R", "RO", "RQ", "MB", "FOLD", "KEEP")
_PIPELINES: dict[tuple[int, bool], dict[str, int]] = {
    case: dict(zip(_SETTINGS, values, strict=True))
    for case, values in {
        (64, False): (2, 128, 128, 2, 1, 256, 1024, 16, 128, 128, 1, 1, 0),
        (64, True): (4, 64, 256, 1, 1, 256, 1024, 64, 256, 128, 1, 0, 1),
        (128, False): (4, 64, 256, 1, 1, 256, 1024, 16, 64, 128, 1, 1, 0),
        (128, True): (2, 128, 128, 1, 1, 256, 1024, 64, 128, 128, 1, 0, 1),
        (256, False): (1, 128, 128, 2, 2, 256, 1024, 16, 64, 128, 0, 1, 0),
        (256, True): (1, 128, 128, 2, 1, 256, 1024, 64, 128, 128, 0, 1, 1),
    }.items()
}
# Long rows, where they fill them: larger groups, fewer merges.
_LONG_GROUP: dict[tuple[int, bool], dict[str, int]] = {
    (64, False): {"KG": 2048, "R": 16, "RO": 64, "RQ": 64, "HALVES": 4, "BH": 64, "BN": 256, "F": 1},
    (64, True): {"KG": 2048},
    (128, False): {"KG": 2048, "R": 8, "RO": 32, "RQ": 64},
    (128, True): {"KG": 2048},
    (256, False): {"KG": 2048, "R": 8},
    (256, True): {"KG": 2048},
}
_SCRATCH_LIMIT = 128 << 20  # bytes on all cores, half of it up to N = 1024: well inside L2


def _scratch(settings, n, d, causal, dtype, cores) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the pipeline's scratch; see the kernel."""
    rows, group = settings["HALVES"] * settings["BH"], settings["KG"]
    groups = -(-n // group)
    partials = 1 if groups == 1 else 4 if causal else min(groups, 3)
    return {
        "scaled": ((cores, settings["FOLD"], rows, d), dtype),
        "scores": ((cores, 2, rows, group), torch.float32),
        "probs": ((cores, 2, rows, group), dtype),
        "partial": ((cores, partials, rows, d), torch.float32),
        "stats": ((cores, 7, 2, rows), torch.float32),
    }


# The order of the scratch among the kernel's arguments; some have two names there.
_SCRATCH_NAMES = ("scaled",) * 2 + ("scores",) * 2 + ("probs",) * 4 + ("partial",) + ("stats",) * 4


def _bytes_of(scratch: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in scratch.values())


_PIPELINE_OPTIONS = {
    "disable_auto_inject_block_sync": True,  # the kernel's events are the whole hand-over
    "sync_solver": False,  # the default solver lets every product wait for the last one
}
_CUDA_OPTIONS = {"num_warps": 8, "num_stages": 1}


def _pipeline_settings(n: int, d: int, causal: bool) -> dict[str, int] | None:
    """The pipeline's settings for a shape, or None where it does not apply."""
    if (d, causal) not in _PIPELINES or n < 512:  # short rows: too little work for an item
        return None
    base = _PIPELINES[d, causal]
    long = base | _LONG_GROUP[d, causal]
    limit = _SCRATCH_LIMIT if n > 1024 else _SCRATCH_LIMIT // 2
    for settings in (long, long | {"FOLD": 0}, base, base | {"FOLD": 0}):
        rows, group = settings["HALVES"] * settings["BH"], settings["KG"]
        if n % rows or n % (settings["WP"] if causal else group) or (group > 1024 and n % group):
            continue
        if _bytes_of(_scratch(settings, n, d, causal, torch.float16, 20)) <= limit:
            return settings
    return None


def get_path(
    Z: int, H: int, N_CTX: int, HEAD_DIM: int, causal: bool, sm_scale: float, cores: int, release: str = "1.1.0"
) -> str:
    """Which kernel a shape takes: "pipeline" or "general".

    The pipeline needs whole query blocks and key groups, a positive scale (the maximum is
    taken before the scale is applied), at least two query blocks for each core, and a
    bishengir before 1.2: that release gives some of the row loops to one vector core only,
    whose rows the other one then reads without an event between them, and it overlaps the
    general kernel by itself.
    """
    settings = _pipeline_settings(N_CTX, HEAD_DIM, causal)
    if settings is None or sm_scale <= 0 or not release.startswith(("1.0", "1.1")):
        return "general"
    blocks = N_CTX // (settings["HALVES"] * settings["BH"]) * Z * H
    return "pipeline" if blocks >= 2 * cores else "general"


@functools.lru_cache
def _causal_bias(rows: int, device: torch.device) -> torch.Tensor:
    """[2, rows, rows]: what to add to a tile on the diagonal, and to one below it."""
    bias = torch.zeros(2, rows, rows)
    for row in range(rows):
        bias[0, row, row + 1 :] = -math.inf
    return bias.to(device)


def scratch_bytes(Z: int, H: int, N_CTX: int, HEAD_DIM: int, causal: bool, sm_scale: float) -> int:
    """Bytes of global memory that the kernel needs on the active device beside inputs and outputs."""
    cores, release = _active_core_count(), _compiler_release(_device_index())
    if get_path(Z, H, N_CTX, HEAD_DIM, causal, sm_scale, cores, release) == "general":
        return 0
    settings = _pipeline_settings(N_CTX, HEAD_DIM, causal)
    assert settings is not None
    return _bytes_of(_scratch(settings, N_CTX, HEAD_DIM, causal, torch.float16, cores))


def _forward_pipeline(q, k, v, causal, scale, cores, settings):
    """Launch of the pipeline; its scratch depends on the cores only."""
    z, h, n, d = q.shape
    # The pipeline loads several keys as one row of L1, so it needs rows without gaps.
    q, k, v = (x if x.stride(2) == d else x.contiguous() for x in (q, k, v))
    kernel = {name: value for name, value in settings.items() if name not in ("FOLD", "KEEP", "MB")}
    # A power of two scales q without rounding (down to the subnormals; never to infinity).
    fold = bool(settings["FOLD"]) and scale <= 1 and math.frexp(scale)[0] == 0.5
    out = torch.empty((z, h, n, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((z, h, n), dtype=torch.float32, device=q.device)
    shapes = _scratch(settings, n, d, causal, q.dtype, cores)
    scratch = {name: torch.empty(shape, dtype=dtype, device=q.device) for name, (shape, dtype) in shapes.items()}
    groups = n > settings["KG"]
    if groups:  # what a first group merges with
        if causal:
            scratch["partial"][:, 3] = 0
        scratch["stats"][:, 6, 0] = -math.inf
        scratch["stats"][:, 6, 1] = 0
    attention_fwd_kernel_pipeline[(cores,)](
        q, k, v, out, lse,
        *(scratch[name] for name in _SCRATCH_NAMES), _causal_bias(2 * settings["R"], q.device),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        scale, h, z * h * n // (settings["HALVES"] * settings["BH"]), n,
        CAUSAL=causal, GROUPS=groups, FOLD=fold, PARTIALS=scratch["partial"].shape[1],
        KEEP=bool(settings["KEEP"]) and not groups, D=d, **kernel,
        **(_PIPELINE_OPTIONS | {"multibuffer": bool(settings["MB"])} if ASCEND.value else _CUDA_OPTIONS),
    )  # fmt: skip
    return out, lse


def attention_fwd(q, k, v, causal=False, sm_scale=None, *, block_m=None, block_n=None, layout="BNSD"):
    """softmax(q kᵀ · sm_scale) v and its log-sum-exp.

    Args:
        q: [Z, H, Sq, D], fp16 or bf16; D from 1 to 256.
        k: [Z, Hk, Sk, D] with q's dtype and device; Hk divides H, and each key head serves
            H / Hk query heads in a row (grouped-query and multi-query attention).
        v: [Z, Hk, Sk, Dv]; Dv from 1 to 256.
            q, k and v may have any strides. One whose last dimension is not unit-stride, or
            whose rows are all one row (an expanded Sq or Sk), is copied once.
        causal: False; True or "top-left": row i sees keys 0 to i; "bottom-right": the last row
            sees the last key, row i sees keys 0 to i + Sk - Sq.
        sm_scale: factor on the scores, any finite float; default 1 / sqrt(D).
        block_m, block_n: tile sizes for the general path, instead of those of `get_tiling`;
            giving one of them selects that path.
        layout: "BNSD", the above, or "BSND": q, k, v and out are [Z, S, H, D].

    Returns:
        out [Z, H, Sq, Dv] in q's dtype and layout, contiguous, and lse [Z, H, Sq], fp32,
        natural logarithm. A row that sees no key has out 0 and lse -inf.

    Limits: Sq and Sk up to 2^24, fewer than 2^31 tiles of 16 rows in all heads, offsets in 64
    bits. Fewer rows than a tile has (16 queries, 64 keys) are padded in a copy; longer tails
    and all head dimensions are handled on chip.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    q, k, v = _check_inputs(q, k, v, layout)
    _check_options(causal, sm_scale)
    _check_block("block_m", block_m)
    _check_block("block_n", block_n)
    z, h, sq, d = q.shape
    hk, sk, dv = k.shape[1], k.shape[2], v.shape[3]
    scale = d**-0.5 if sm_scale is None else float(sm_scale)
    shift = _shift(causal, sq, sk)
    masked = shift is not None
    _prepare_device(q)
    cores, release = _core_count(q), _compiler_release(_device_index())
    q, k, v = (_rows_apart(x) for x in (q, k, v))
    plain = ASCEND.value and block_m is None and block_n is None and (h, sq, d) == (hk, sk, dv)
    if plain and get_path(z, h, sq, d, masked, scale, cores, release) == "pipeline":
        out, lse = _forward_pipeline(q, k, v, masked, scale, cores, _pipeline_settings(sq, d, masked))
        return _in_layout(out, sq, layout), lse
    if ASCEND.value:
        (tile_m, tile_n), options = _tiling(sq, sk, max(d, dv), masked), {}
    else:
        tile_m, tile_n, options = _tiling_cuda(sq, sk, max(d, dv))
    bm, bn = block_m or tile_m, block_n or tile_n
    q, k, v = _pad_rows(q, bm), _pad_rows(k, bn), _pad_rows(v, bn)
    rows, keys = q.shape[2], k.shape[2]
    out = _empty(z, h, rows, dv, layout, q)
    lse = torch.empty((z, h, rows), dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(rows, bm) * z * h
    programs = min(cores, tiles) if ASCEND.value else tiles
    attention_fwd_kernel_general[(programs,)](
        q, k, v, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        scale, z, h, rows, keys, sk, shift or 0,
        STAGE=3 if masked else 1, GROUP=h // hk, TAIL_M=rows % bm != 0, TAIL_N=sk % bn != 0,
        EMPTY=masked and shift < 0, BM=bm, BN=bn, D=d, DV=dv, **options,
    )  # fmt: skip
    return _in_layout(out, sq, layout), lse[:, :, :sq].contiguous()


@torch.library.custom_op(
    "ascend_attention::forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, str causal='', float? sm_scale=None, int? block_m=None, "
    "int? block_n=None, str layout='BNSD') -> (Tensor, Tensor)",
)
def attention_fwd_op(q, k, v, causal="", sm_scale=None, block_m=None, block_n=None, layout="BNSD"):
    """`attention_fwd` as one differentiable op (`torch.ops.ascend_attention.forward`) for
    torch.compile and export; causal is "", "top-left" or "bottom-right". lse has no gradient."""
    return attention_fwd(q, k, v, causal or False, sm_scale, block_m=block_m, block_n=block_n, layout=layout)


@attention_fwd_op.register_fake
def _(q, k, v, causal="", sm_scale=None, block_m=None, block_n=None, layout="BNSD"):
    q, k, v = _check_inputs(q, k, v, layout)
    _check_options(causal or False, sm_scale)
    z, h, n, _ = q.shape
    shape = (z, n, h, v.shape[3]) if layout == "BSND" else (z, h, n, v.shape[3])
    return q.new_empty(shape), q.new_empty((z, h, n), dtype=torch.float32)


def _op_setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.sm_scale, _, _, ctx.layout = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _op_backward(ctx, dout, _):
    from backward import attention_bwd_op

    grads = attention_bwd_op(dout, *ctx.saved_tensors, ctx.causal, ctx.sm_scale, ctx.layout)
    return *grads, None, None, None, None, None


attention_fwd_op.register_autograd(_op_backward, setup_context=_op_setup_context)


class _attention(torch.autograd.Function):
    """Differentiable attention; its first arguments are those that the contest's grader passes.

    Tiles that are just those of `get_tiling` do not keep a shape from its fastest path. Under
    torch.compile and export the two ops stand in the graph.
    """

    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, BM=None, BN=None, layout="BNSD"):
        _check_tensor("q", q, None)
        _check_options(causal, sm_scale)
        ctx.causal, ctx.sm_scale, ctx.layout = causal, sm_scale, layout
        if torch.compiler.is_compiling():
            out, lse = attention_fwd_op(q, k, v, _causal_name(causal), sm_scale, BM, BN, layout)
        else:
            if BM and BN and layout == "BNSD" and get_tiling(*q.shape, causal) == (BM, BN):
                BM = BN = None
            out, lse = attention_fwd(q, k, v, causal, sm_scale, block_m=BM, block_n=BN, layout=layout)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        from backward import attention_bwd, attention_bwd_op

        if torch.compiler.is_compiling():
            grads = attention_bwd_op(dout, *ctx.saved_tensors, _causal_name(ctx.causal), ctx.sm_scale, ctx.layout)
        else:
            grads = attention_bwd(dout, *ctx.saved_tensors, ctx.causal, ctx.sm_scale, layout=ctx.layout)
        return *grads, None, None, None, None, None


attention = _attention.apply
