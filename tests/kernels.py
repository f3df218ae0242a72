"""Small Triton-Ascend kernels that the tests of the virtual NPU run."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y, with masked tails."""
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < n
        b_sum = tl.load(x + offsets, mask=mask, other=0.0) + tl.load(y + offsets, mask=mask, other=0.0)
        tl.store(out + offsets, b_sum, mask=mask)


@triton.jit
def add_unmasked_kernel(x, y, out, BLOCK: tl.constexpr):
    """out = x + y without a mask: reads beyond the tensor's end when it is shorter than a block."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets) + tl.load(y + offsets))


@triton.jit
def matmul_kernel(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr):
    """out = a @ b in tiles; the accumulator stays in L0C."""
    tiles_n = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, tl.num_programs(0)):
        m, n = tile // tiles_n * BM, tile % tiles_n * BN
        p_a = tl.make_block_ptr(a, (M, K), (K, 1), (m, 0), (BM, BK), (1, 0))
        p_b = tl.make_block_ptr(b, (K, N), (N, 1), (0, n), (BK, BN), (1, 0))
        acc = tl.zeros([BM, BN], tl.float32)
        for _ in range(0, K, BK):
            acc = tl.dot(tl.load(p_a), tl.load(p_b), acc)
            p_a = tl.advance(p_a, (0, BK))
            p_b = tl.advance(p_b, (BK, 0))
        p_out = tl.make_block_ptr(out, (M, N), (N, 1), (m, n), (BM, BN), (1, 0))
        tl.store(p_out, acc.to(DTYPE))


@triton.jit
def handover_kernel(
    a,
    b,
    scratch,
    out,
    STEPS: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    EXTRA_WAIT: tl.constexpr,
    SETS: tl.constexpr,
):
    """out[i] = exp(a[i] @ b[i]) with an explicit hand-over through scratch slots.

    The cube waits for a slot from step SLOTS on. EXTRA_WAIT adds a wait that nobody
    answers; SETS=False leaves the vector cores' answers out, so that slots are overwritten
    while they are read.
    """
    for i in range(0, STEPS):
        slot = i % SLOTS
        p_a = tl.make_block_ptr(a + i * N * N, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
        p_b = tl.make_block_ptr(b + i * N * N, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
        p_s = tl.make_block_ptr(scratch + slot * N * N, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
        if SETS:
            if i >= SLOTS:
                tl.sync_block_wait("vector", "cube", 1)
        tl.store(p_s, tl.dot(tl.load(p_a), tl.load(p_b)))
        tl.sync_block_set("cube", "vector", 0)
        tl.sync_block_wait("cube", "vector", 0)
        p_o = tl.make_block_ptr(out + i * N * N, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
        tl.store(p_o, tl.exp(tl.load(p_s)))
        if SETS:
            if i < STEPS - SLOTS:
                tl.sync_block_set("vector", "cube", 1)
    if EXTRA_WAIT:
        tl.sync_block_wait("cube", "vector", 5)


@triton.jit
def _exp_step(p_a, p_b, p_s, p_o):
    """exp(a @ b) @ b, the compiler's own hand-over of both products, and one more by the
    kernel's own events through `p_s`."""
    b_b = tl.load(p_b)
    b_p = tl.exp(tl.dot(tl.load(p_a), b_b)).to(tl.float16)
    tl.store(p_s, b_p)
    tl.sync_block_set("vector", "cube", 5)
    tl.sync_block_wait("vector", "cube", 5)
    tl.store(p_o, tl.dot(b_p, b_b))


@triton.jit
def dropped_syncs_kernel(a, b, scratch, out, STEPS, N: tl.constexpr, GUARDED: tl.constexpr):
    """An event in a plain `for` loop that bishengir 1.2.0 pipelines by itself and then drops;
    GUARDED puts the body under an `if`. (Timed only: the other hand-overs have no events.)"""
    for i in range(0, STEPS):
        p_a = tl.make_block_ptr(a + i * N * N, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
        p_b = tl.make_block_ptr(b + i * N * N, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
        p_s = tl.make_block_ptr(scratch + i * N * N, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
        p_o = tl.make_block_ptr(out + i * N * N, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
        if GUARDED:
            if STEPS > 0:
                _exp_step(p_a, p_b, p_s, p_o)
        else:
            _exp_step(p_a, p_b, p_s, p_o)


@triton.jit
def unsplit_kernel(a, b, out, N: tl.constexpr):
    """out = sum over column halves of a @ b, by a reshape that keeps bishengir from splitting
    the tile over the two vector cores: each does all of it."""
    p_a = tl.make_block_ptr(a, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
    p_b = tl.make_block_ptr(b, (N, N), (N, 1), (0, 0), (N, N), (1, 0))
    p_out = tl.make_block_ptr(out, (2 * N,), (1,), (0,), (2 * N,), (0,))
    b_s = tl.dot(tl.load(p_a), tl.load(p_b))
    tl.store(p_out, tl.sum(tl.reshape(b_s, (2 * N, N // 2)), 1))


@triton.jit
def halves_kernel(x, out, TILES, BLOCK: tl.constexpr):
    """Reads every half block of x twice: as the second half of a block and the first of the next."""
    for t in range(tl.program_id(0), TILES, tl.num_programs(0)):
        p_first = tl.make_block_ptr(x, (TILES * BLOCK + BLOCK,), (1,), (t * BLOCK,), (BLOCK,), (0,))
        p_second = tl.make_block_ptr(x, (TILES * BLOCK + BLOCK,), (1,), (t * BLOCK + BLOCK // 2,), (BLOCK,), (0,))
        p_out = tl.make_block_ptr(out, (BLOCK,), (1,), (0,), (BLOCK,), (0,))
        tl.store(p_out, tl.load(p_first) + tl.load(p_second))


@triton.jit
def two_names_kernel(x, here, there, out, BLOCK: tl.constexpr):
    """out = x + 1 by way of scratch that is stored through `here` and loaded through `there`:
    bishengir orders accesses through one argument only."""
    offsets = tl.arange(0, BLOCK)
    tl.store(here + offsets, tl.load(x + offsets) + 1.0)
    tl.store(out + offsets, tl.load(there + offsets))
