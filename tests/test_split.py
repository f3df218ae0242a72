"""Work that both vector cores do twice is told as lost time; a race between them stays an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness import virtual_npu
from harness.reference import reference_fwd
from harness.textbook import textbook_fwd
from harness.virtual_npu.errors import HazardError
from harness.virtual_npu.hazards import INDEX, Board, Tracker
from harness.virtual_npu.hivm import MemRef, Op, Value
from harness.virtual_npu.memory import Memory, View
from harness.virtual_npu.ops import lookup

from . import kernels

SCALE = 0.5
MTE2, MTE3, V = INDEX["MTE2"], INDEX["MTE3"], INDEX["V"]


@pytest.mark.parametrize("mode", ["values", "timing"])
def test_a_tile_that_is_not_split_is_told_and_no_race(release, mode, rng) -> None:
    """bishengir does not split a square masked tile: 1.1.0 lets both vector cores store it,
    which was reported as a race, 1.2.0 puts a guard around the store, which was not told."""
    q, k, v = (torch.randn(1, 2, 128, 64, generator=rng).mul_(0.5).half() for _ in range(3))
    with virtual_npu.run(mode, release=release, hazards=True, cores=2) as record:
        out, _ = textbook_fwd(q, k, v, True, SCALE, block_m=64, block_n=64)
    who = "both store it" if release == "1.1.0" else "only one of them stores it"
    assert any(
        text.startswith("textbook_fwd_kernel: lost time: both vector cores do all rows of the tile stored at textbook")
        and f"({who})" in text
        for text in record.notes
    )
    if mode == "values":
        torch.testing.assert_close(out.double(), reference_fwd(q, k, v, True, SCALE)[0], rtol=2**-7, atol=1e-3)
        repeated = record.kernels[0].report["repeated_stores"]
        assert (sum(repeated.values()) > 0) == (release == "1.1.0")


def test_a_tile_that_is_split_has_no_note(release, rng) -> None:
    q, k, v = (torch.randn(1, 2, 128, 64, generator=rng).half() for _ in range(3))
    with virtual_npu.run("values", release=release, hazards=True, cores=2) as record:
        textbook_fwd(q, k, v, True, SCALE, block_m=64, block_n=128)
    assert record.notes == []
    assert record.kernels[0].report["repeated_stores"] == {}


def test_a_reshape_that_loses_the_split(rng, poisoned) -> None:
    n = 64
    a, b, out = torch.randn(n, n, generator=rng).half(), torch.randn(n, n, generator=rng).half(), poisoned(2 * n)
    with virtual_npu.run("values", release="1.1.0", hazards=True) as record:
        kernels.unsplit_kernel[(1,)](a, b, out, n)
    torch.testing.assert_close(out, (a.float() @ b.float()).reshape(2 * n, n // 2).sum(1), rtol=1e-4, atol=1e-3)
    (note,) = record.notes
    assert "unsplit_kernel: lost time" in note and "kernels.py" in note


def test_one_program_on_each_vector_core_is_no_lost_time(release) -> None:
    x = torch.ones(256)
    with virtual_npu.run("values", release=release, hazards=True) as record:
        kernels.add_kernel[(1,)](x, x, torch.empty(256), 256, 256)
    assert record.notes == []


# The rule itself: a cube core, two vector cores, a tile of global memory.


class Block:
    def __init__(self) -> None:
        self.board = Board()
        self.cube, self.first, self.second = (
            Tracker(self.board, name, "kernel") for name in ("cube core", "vector core 0", "vector core 1")
        )
        self.first.twin, self.second.twin = self.second, self.first
        self.cube.peers, self.first.peers, self.second.peers = [self.first, self.second], [self.cube], [self.cube]
        self.gm = Memory("scratch", "gm", data=np.zeros(4096, np.uint8))
        self.ub = {tracker: Memory("ub", "ub", 4096) for tracker in (self.first, self.second)}
        self.board.start_block(0, self.ub.values())

    def tile(self, offset: int = 0) -> View:
        return View(self.gm, "f32", offset, (64,), (1,))

    def store(self, core: Tracker, value: float, line: int = 1, offset: int = 0, **attrs: str) -> None:
        """`hivm.hir.store` of a core, as the values-mode code runs it."""
        types = [MemRef((64,), "f32", "ub"), MemRef((64,), "f32", "gm")]
        op = Op("hivm.hir.store", [Value(i, t) for i, t in enumerate(types)], [], dict(attrs), [], f"k.py:{line}", line)
        source, target = View(self.ub[core], "f32", 0, (64,), (1,)), self.tile(offset)
        source.mark_written()
        source.array()[...] = value
        core.barrier("ALL")  # its own earlier work is not what is tested
        core.device(op, (source, target))
        lookup(op).build(op)(source, target)
        core.compare_repeats()

    def load(self, core: Tracker, offset: int = 0, line: int = 9) -> None:
        core.barrier("ALL")
        core.access(Op("hivm.hir.load", [], [], {}, [], f"k.py:{line}", line), "MTE2", [self.tile(offset)], [])

    def through_the_cube(self) -> None:
        """Both vector cores tell the cube that they are done, and it answers."""
        for sub, core in enumerate((self.first, self.second)):
            core.barrier("ALL")
            core.block_set(0, MTE3, sub)
        self.cube.block_wait(0, 2)
        self.cube.block_set(1, MTE2, 0)
        for core in (self.first, self.second):
            core.block_wait(1, 1)


@pytest.fixture
def block() -> Block:
    return Block()


def test_the_same_store_of_both_is_counted(block: Block) -> None:
    block.store(block.first, 1.0)
    block.store(block.second, 1.0)
    assert block.board.repeated == {"k.py:1": 1}


def test_other_values_are_a_race(block: Block) -> None:
    block.store(block.first, 1.0)
    with pytest.raises(HazardError, match=r"k.py:1 \(vector core 1, pipe MTE3\) writes them while .*vector core 0"):
        block.store(block.second, 2.0)


def test_another_op_or_another_iteration_is_a_race(block: Block) -> None:
    block.store(block.first, 1.0)
    with pytest.raises(HazardError):
        block.store(block.second, 1.0, line=2)
    block = Block()
    block.store(block.first, 1.0, offset=1024)
    block.store(block.first, 1.0)
    with pytest.raises(HazardError):
        block.store(block.second, 1.0)  # the first run of the store, against the other core's second


def test_other_bytes_of_the_same_store_are_a_race(block: Block) -> None:
    block.store(block.first, 1.0)
    with pytest.raises(HazardError):
        block.store(block.second, 1.0, offset=128)


def test_accumulating_twice_is_a_race(block: Block) -> None:
    block.store(block.first, 0.0, atomic_kind="add")
    with pytest.raises(HazardError):
        block.store(block.second, 0.0, atomic_kind="add")


def test_a_core_reads_what_it_stored_itself(block: Block) -> None:
    for core in (block.first, block.second):
        block.store(core, 1.0)
        block.load(core)


def test_reading_the_other_cores_store_is_a_race(block: Block) -> None:
    """Read, change, write in global memory: the second core reads what the first one made."""
    block.store(block.first, 1.0)
    with pytest.raises(HazardError, match=r"k.py:9 \(vector core 1, pipe MTE2\) reads"):
        block.load(block.second)


def test_the_cube_waits_for_both(block: Block) -> None:
    block.store(block.first, 1.0)
    block.store(block.second, 1.0)
    with pytest.raises(HazardError, match="cube core"):
        block.load(block.cube)
    block = Block()
    block.store(block.first, 1.0)
    block.store(block.second, 1.0)
    block.through_the_cube()
    block.load(block.cube)


def test_a_slot_is_stored_again_only_behind_both(block: Block) -> None:
    """A core that runs ahead overwrites the tile; the other one's late store would bring the
    old values back."""
    for core in (block.first, block.second):
        block.store(core, 1.0)
    with pytest.raises(HazardError):
        block.store(block.first, 2.0)
    block = Block()
    for value in (1.0, 2.0):
        for core in (block.first, block.second):
            block.store(core, value)
        block.through_the_cube()


def test_a_read_of_the_last_values_must_be_over_before_the_other_cores_next_store(block: Block) -> None:
    """Core 0 reads step 1's values; core 1, ahead of it, may already store step 2's."""
    for core in (block.first, block.second):
        block.store(core, 1.0)
    block.through_the_cube()
    block.load(block.first)
    block.store(block.first, 2.0)
    block.load(block.first)  # the later read does not hide the earlier one
    with pytest.raises(HazardError, match=r"k.py:1 \(vector core 1, pipe MTE3\) writes them while .* reads"):
        block.store(block.second, 2.0)
