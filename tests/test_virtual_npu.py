"""Kernels through the whole virtual NPU: values, and each kind of error."""

from __future__ import annotations

import re

import pytest
import torch
import triton.language as tl

from harness import virtual_npu
from harness.virtual_npu.hivm import Op, Value
from harness.virtual_npu.launch import Launch
from harness.virtual_npu.program import Program

from . import kernels

TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "block", "grid"), [(1000, 256, 3), (17, 64, 1), (1025, 64, 40)])
def test_vector_kernel(dtype, n, block, grid, release, rng, poisoned) -> None:
    x, y = torch.randn(n, generator=rng).to(dtype), torch.randn(n, generator=rng).to(dtype)
    out = poisoned(n, dtype=dtype)
    with virtual_npu.run(release=release, hazards=True):
        kernels.add_kernel[(grid,)](x, y, out, n, block)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_matmul_kernel(dtype, release, rng, poisoned) -> None:
    m, n, k = 128, 96, 256
    a, b = torch.randn(m, k, generator=rng).to(dtype), torch.randn(k, n, generator=rng).to(dtype)
    out = poisoned(m, n, dtype=dtype)
    with virtual_npu.run(release=release, hazards=True, cores=3):
        kernels.matmul_kernel[(3,)](a, b, out, m, n, k, 64, 32, 64, TL[dtype])
    expected = (a.double() @ b.double()).to(dtype)
    torch.testing.assert_close(out, expected, rtol=2**-7 if dtype == torch.bfloat16 else 2**-9, atol=2e-4)


def run_handover(rng, poisoned, *, extra=False, sets=True, **options) -> float:
    """Largest error of the hand-over kernel; raises what the virtual NPU reports."""
    steps, slots, n = 5, 2, 64
    a, b = (torch.randn(steps, n, n, generator=rng).half() * 0.1 for _ in range(2))
    scratch, out = poisoned(slots, n, n), poisoned(steps, n, n)
    with virtual_npu.run(**options):
        kernels.handover_kernel[(1,)](
            a, b, scratch, out, steps, slots, n, extra, sets, disable_auto_inject_block_sync=True
        )
    error = (out - (a.float() @ b.float()).exp()).abs().max().item()
    return error if error == error else float("inf")


@pytest.mark.parametrize("schedule", ["cube-first", "vector-first", "alternate", "timed", "jitter-1", "jitter-2"])
def test_explicit_handover(schedule, release, rng, poisoned) -> None:
    assert run_handover(rng, poisoned, release=release, schedule=schedule, hazards=True) < 1e-5


def test_one_wait_too_many_is_a_deadlock_report(release, rng, poisoned) -> None:
    with pytest.raises(virtual_npu.DeadlockError) as caught:
        run_handover(rng, poisoned, release=release, extra=True)
    text = str(caught.value)
    assert "handover_kernel, block 0: no core can go on" in text
    assert re.search(r"vector core 0 waits for cross-core flag 5 from the cube core .*kernels\.py:\d+", text)


def test_missing_answer_is_a_race(release, rng, poisoned) -> None:
    """Without the vector cores' answers the cube overwrites a slot that is being read."""
    with pytest.raises(virtual_npu.HazardError, match=r"race on bytes .* of tensor scratch: .*kernels\.py:\d+"):
        run_handover(rng, poisoned, release=release, sets=False, hazards=True)


def test_missing_answer_shows_in_the_values_too(release, rng, poisoned) -> None:
    assert run_handover(rng, poisoned, release=release, sets=False, schedule="cube-first") > 0.01


def test_arguments_of_one_tensor_are_one_memory(release, rng, poisoned) -> None:
    """A store through one argument and a load through another one of the same tensor: the compiler
    puts no order between them, and the hazard check, which took each argument for a memory of
    its own, saw none missing. An argument may also begin within the tensor."""
    n = 256
    x, scratch, out = torch.randn(n, generator=rng), poisoned(2 * n), poisoned(n)
    for here, there in ((scratch, scratch), (scratch[n // 2 :], scratch[: 2 * n - 64])):
        with (
            virtual_npu.run(release=release, hazards=True),
            pytest.raises(virtual_npu.HazardError, match=r"race on bytes .* of tensor here, there: .*kernels\.py:\d+"),
        ):
            kernels.two_names_kernel[(1,)](x, here, there, out, n)
    with virtual_npu.run(release=release, hazards=True):  # parts that do not meet
        kernels.two_names_kernel[(1,)](x, scratch[:n], torch.cat([x, x])[n:], out, n)
    assert torch.equal(out, x)


@pytest.mark.parametrize("hazards", [False, True])
def test_a_buffer_overwritten_while_it_is_needed(hazards, rng, poisoned) -> None:
    """A wrong memory plan: the tile of x is placed where that of y comes to lie, and every order is kept.
    Nothing noticed that x was gone."""
    n = 256
    x, y, out = torch.randn(n, generator=rng), torch.randn(n, generator=rng), poisoned(n)
    captured: list[Launch] = []
    with virtual_npu.run(release="1.1.0", capture=captured, hazards=hazards):
        kernels.add_kernel[(1,)](x, y, out, n, n)
    (launch,) = captured
    program = Program(launch.program.name, launch.program.text)  # of its own, to be changed
    launch.again(program)
    walked = list(program.functions["AIV"].walk())
    made = {result: op for op in walked for result in op.results}

    def places(tile: Value) -> list[Op]:
        op = made[tile]
        if op.name == "hivm.hir.pointer_cast":
            return [op]
        sources = op.operands[1:] if op.name == "arith.select" else op.operands[:1]
        return [place for source in sources for place in places(source)]

    first, second = (places(op.operands[1]) for op in walked if op.name == "hivm.hir.load")
    for place, other in zip(first, second, strict=True):
        place.operands[:] = other.operands
    changed = Program(program.name, program.text)
    changed.__dict__["module"] = program.module
    with pytest.raises(virtual_npu.VirtualNPUError) as caught:
        launch.again(changed)
    if not hazards:
        text = str(caught.value)
        assert isinstance(caught.value, virtual_npu.LostValueError)
        assert text.count("buffer of hivm.hir.pointer_cast at kernels.py:") == 2 and "are lost" in text


@pytest.mark.parametrize("guarded", [False, True])
def test_syncs_that_the_compiler_drops_are_refused(guarded, release) -> None:
    """bishengir 1.2.0 drops a kernel's own events in a plain `for` loop that it pipelines; the
    program then runs without them, and wrong."""
    n, steps = 64, 4
    a, out = torch.empty(steps, n, n, dtype=torch.float16), torch.empty(steps, n, n)

    def launch() -> None:
        with virtual_npu.run("timing", release=release):
            kernels.dropped_syncs_kernel[(1,)](a, a, a, out, steps, n, guarded, disable_auto_inject_block_sync=True)

    if release == "1.2.0" and not guarded:
        with pytest.raises(virtual_npu.DroppedSyncError) as caught:
            launch()
        assert "sync_block_set on the vector side, id 5 (0 of 1 arrived)" in str(caught.value)
        assert "write the loop as `while`" in str(caught.value)
    else:
        launch()


def test_reading_past_the_end_names_tensor_and_bytes() -> None:
    x = torch.ones(100)
    out = torch.empty(128)
    with pytest.raises(virtual_npu.OutOfBoundsError) as caught:
        kernels.add_unmasked_kernel[(1,)](x, x, out, 128)
    text = str(caught.value)
    assert text.startswith("add_unmasked_kernel: hivm.hir.load at kernels.py:")
    assert "tensor x, y (400 bytes): bytes 0 to 512 are accessed" in text  # one tensor, passed twice


def test_a_tile_that_does_not_fit_gives_the_compilers_message(release) -> None:
    a = torch.zeros(1024, 1024, dtype=torch.float16)
    with virtual_npu.run(release=release), pytest.raises(virtual_npu.CompileError) as caught:
        kernels.matmul_kernel[(1,)](a, a, a, 1024, 1024, 1024, 512, 512, 64, tl.float16)
    text = str(caught.value)
    assert text.startswith("kernel matmul_kernel with a[1024, 1024]")
    assert "BM=512, BN=512" in text
    assert re.search(r"overflow, requires \d+ bits while \d+ bits available", text)


def test_too_large_a_grid_is_refused() -> None:
    x = torch.ones(4)
    with pytest.raises((virtual_npu.LaunchError, RuntimeError), match="65536|65535"):
        kernels.add_kernel[(70000,)](x, x, x.clone(), 4, 64)


def test_run_refuses_unknown_settings() -> None:
    with pytest.raises(ValueError, match="mode must be one of values, timing, got 'speed'"), virtual_npu.run("speed"):
        pass
    with pytest.raises(ValueError, match=r"release must be one of 1\.1\.0, 1\.2\.0, got '9'"):  # noqa: SIM117
        with virtual_npu.run(release="9"):
            pass
    with pytest.raises(ValueError, match="schedule must be one of cube-first"), virtual_npu.run(schedule="fast"):
        x = torch.ones(64)
        kernels.add_kernel[(1,)](x, x, torch.empty(64), 64, 64)
    with pytest.raises(ValueError, match="cores must be at least 1, got 0"), virtual_npu.run(cores=0):
        pass


def test_the_device_reports_the_cores_that_were_set() -> None:
    from triton.runtime import driver

    with virtual_npu.run(cores=3):
        assert driver.active.utils.get_device_properties(0)["num_aicore"] == 3
    assert driver.active.utils.get_device_properties(0)["num_aicore"] == virtual_npu.CORES


def test_timing_touches_no_data_and_repeats(poisoned) -> None:
    n = 1 << 16
    x, out = torch.ones(n), poisoned(n)
    with virtual_npu.run("timing") as first:
        kernels.add_kernel[(40,)](x, x, out, n, 1024)
    with virtual_npu.run("timing") as second:
        kernels.add_kernel[(40,)](x, x, out, n, 1024)
    assert out.isnan().all()
    assert first.ms == second.ms > 0
    assert first.kernels[0].report["busy"]["aiv_vec0"] > 0


def test_timing_grows_with_work() -> None:
    def ms(k: int) -> float:
        a, b = torch.empty(512, k, dtype=torch.float16), torch.empty(k, 512, dtype=torch.float16)
        out = torch.empty(512, 512, dtype=torch.float16)
        with virtual_npu.run("timing") as record:
            kernels.matmul_kernel[(16,)](a, b, out, 512, 512, k, 128, 128, 64, tl.float16)
        return record.ms

    assert ms(1024) < ms(4096) < ms(16384)


def test_cube_utilisation_is_a_share() -> None:
    a = torch.empty(4096, 4096, dtype=torch.float16)
    with virtual_npu.run("timing") as record:
        kernels.matmul_kernel[(20,)](a, a, a, 4096, 4096, 4096, 128, 256, 64, tl.float16)
    assert record.cube_utilisation is not None
    assert 0.2 < record.cube_utilisation < 1.0


def test_a_program_that_reads_its_tiles_twice_finds_them_in_l2() -> None:
    """A loop over tiles without a loop inside was walked as if each of its loads ran through one
    stretch of memory before the next load started: here 1.5 % of the reads came from HBM instead
    of half, in the D=256 causal backward 79 % of q instead of 11 %."""
    block = 16384
    tiles = 256 * 1024 * 1024 // (2 * block)  # 256 MiB of fp16, more than L2 holds
    x, out = torch.empty((tiles + 1) * block, dtype=torch.float16), torch.empty(block, dtype=torch.float16)
    with virtual_npu.run("timing") as record:
        kernels.halves_kernel[(40,)](x, out, tiles, block)
    (share,) = record.kernels[0].report["hbm_share"].values()  # of the only tensor that is read
    assert share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("offset", "wanted"), [(None, (1.0, 1.0)), (0, (1.0, 0.0)), (1 << 19, (0.5, 1.0))])
def test_arguments_of_one_tensor_share_l2(offset, wanted) -> None:
    """What one argument brought into L2, another one of the same tensor finds there; each counted
    for itself. offset: where in the first argument's tensor the second one begins, in elements
    (None: it is another tensor)."""
    n = 1 << 20
    x = torch.empty(2 * n)
    y = torch.empty(n) if offset is None else x[offset:]
    with virtual_npu.run("timing") as record:
        kernels.add_unmasked_kernel[(n // 1024,)](x, y, torch.empty(n), 1024)
    assert tuple(record.kernels[0].report["hbm_share"].values()) == pytest.approx(wanted, abs=0.03)
