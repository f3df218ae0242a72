"""Happens-before over (core, pipe): finds accesses that nothing orders.

An instruction starts after the earlier ones of its pipe started; that they have *finished*
is known only from flags, barriers and cross-core flags. Each pipe therefore keeps, for
every other pipe of its AI core, up to which instruction that pipe is known to be done (a
vector clock). Two accesses to common bytes, one of them a write, must be ordered by it.

On one pipe too, a pair needs a barrier, be it a read after a write, a write after a write or
a write after a read: bishengir inserts one for each of the three (AscendNPU-IR,
InjectSync/SyncAnalysis.cpp, IsMemInfoHasDependency), except on the scalar unit and the
matrix unit (IsNoNeedToInsertSync: lib/Template's LocalMmad.cpp places its own barrier, only
for small products). Programs of different blocks are never ordered.

Where the compiler did not split a tile over the two vector cores, both store the same bytes
of global memory without an order between them. That is no race where it is the same store
of both (op and how often it ran), plain and not accumulating, and the second one changes no
byte; a core may then read what it stored itself. Everything else about these bytes needs an
order with both cores.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .costs import Costs
from .errors import HazardError
from .hardware import L0_BYTES
from .hivm import Op
from .memory import Memory, View
from .ops import PIPES, lookup
from .ops_cube import k_parts
from .split import STORE

QUEUES = len(PIPES)
INDEX = {pipe: number for number, pipe in enumerate(PIPES)}
PAGE = 1 << 14  # bytes; regions of a large memory are found by page
ORDERED = (INDEX["M"], INDEX["S"])  # pipes whose own accesses to the same bytes stay in order


@dataclass(eq=False, slots=True)
class Access:
    """An instruction of a pipe, by its number there.

    Attributes:
        store: for a plain store of a vector core that has a twin, the op's number and how
            often the core ran it; for a read, that of the core's own store that it reads.
        stored: the region of that store.
    """

    number: int
    op: Op
    tracker: Tracker
    store: tuple[int, int] | None = None
    stored: Region | None = None


@dataclass(eq=False)
class Region:
    """A set of bytes that ops access as a whole, with its last accesses by (block, pipe)."""

    low: int
    high: int
    key: tuple[Any, ...]
    overlaps: list[Region] = field(default_factory=list)
    writers: dict[int, Access] = field(default_factory=dict)
    readers: dict[int, Access] = field(default_factory=dict)
    own_readers: dict[int, Access] = field(default_factory=dict)  # of what the reading core stored itself

    def forget(self) -> None:
        self.writers.clear()
        self.readers.clear()
        self.own_readers.clear()

    def bytes_of(self, memory: Memory) -> np.ndarray:
        """A copy of the region's bytes."""
        low, run, dims = self.key
        shape, strides = (*(size for size, _ in dims), run), (*(stride for _, stride in dims), 1)
        return np.ndarray(shape, np.uint8, memory.data, low, strides).copy()


def _segments(key: tuple[Any, ...]) -> np.ndarray:
    """Start bytes of the contiguous runs of a strided region, with the run length last."""
    low, run, dims = key
    starts = np.zeros(1, np.int64)
    for size, stride in dims:
        starts = (starts[:, None] + np.arange(size) * stride).ravel()
    return np.append(np.sort(starts + low), run)


def _really_overlap(a: Region, b: Region) -> bool:
    """Whether two strided regions with overlapping hulls have a byte in common."""
    if not a.key[2] and not b.key[2]:
        return True
    first, second = _segments(a.key), _segments(b.key)
    run_a, run_b = int(first[-1]), int(second[-1])
    starts_a, starts_b = first[:-1], second[:-1]
    at = np.searchsorted(starts_b, starts_a + run_a)  # runs of b that begin before a run of a ends
    before = np.searchsorted(starts_b + run_b, starts_a, side="right")  # runs of b that ended by then
    return bool((at > before).any())


def region_key(view: View) -> tuple[int, int, tuple[Any, ...]]:
    """Hull and exact shape of a view's bytes: (low, high, (low, run, ((size, stride), ...)))."""
    if view.dtype == "i1":
        start, stop = view.offset // 8, (view.offset + view.count + 7) // 8
        return start, stop, (start, stop - start, ())
    size = view.itemsize
    run = size
    dims = []
    high = view.offset
    merging = True
    for n, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if n == 1:
            continue
        high += (n - 1) * stride * size
        if merging and stride * size == run:
            run *= n
        else:
            merging = False
            dims.append((n, stride * size))
    return view.offset, high + size, (view.offset, run, tuple(dims))


class RegionMap:
    """The regions of one memory."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[Any, ...], Region] = {}
        self.pages: dict[int, list[Region]] = {}

    def find(self, low: int, high: int, key: tuple[Any, ...]) -> Region:
        found = self.by_key.get(key)
        if found is not None:
            return found
        region = Region(low, high, key)
        seen: set[int] = set()
        for page in range(low // PAGE, (high - 1) // PAGE + 1):
            others = self.pages.setdefault(page, [])
            for other in others:
                if id(other) in seen:
                    continue
                seen.add(id(other))
                if other.low < high and low < other.high and _really_overlap(region, other):
                    region.overlaps.append(other)
                    other.overlaps.append(region)
            others.append(region)
        region.overlaps.append(region)
        self.by_key[key] = region
        return region

    def forget(self) -> None:
        for region in self.by_key.values():
            region.forget()


class Board:
    """The trackers of one AI core and the regions of all memories, for one launch."""

    def __init__(self) -> None:
        self.maps: dict[int, RegionMap] = {}
        self.trackers: list[Tracker] = []
        self.block = 0
        self.repeated: Counter[str] = Counter()  # stores that both vector cores did, by line

    def map_of(self, memory: Memory) -> RegionMap:
        found = self.maps.get(id(memory))
        if found is None:
            found = self.maps[id(memory)] = RegionMap()
        return found

    def start_block(self, block: int, local: Iterable[Memory]) -> None:
        """A new program on the core: on-chip history is forgotten, that of global memory
        stays, since programs of different blocks are not ordered."""
        self.block = block
        for memory in local:
            self.map_of(memory).forget()
        width = QUEUES * len(self.trackers)
        for tracker in self.trackers:
            tracker.restart(width)


class Tracker:
    """Clocks of one core's pipes."""

    def __init__(self, board: Board, name: str, kernel: str) -> None:
        self.board = board
        self.name = name
        self.kernel = kernel
        self.base = QUEUES * len(board.trackers)
        board.trackers.append(self)
        self.l0 = {side: Memory(f"{side} of {name}", side, L0_BYTES) for side in ("l0a", "l0b")}
        self.peers: list[Tracker] = []
        self.twin: Tracker | None = None  # the other vector core of the block
        self.costs = Costs()
        self.cycles = 0.0  # work behind the core, for the "timed" schedule
        self._cycles: dict[int, float] = {}
        self.restart(QUEUES)

    def restart(self, width: int) -> None:
        self.known = [[0] * width for _ in range(QUEUES)]
        self.count = [0] * QUEUES
        self.flags: dict[int, deque[list[int]]] = {}
        self.received: list[dict[int, deque[list[int]]]] = [{}, {}]
        self.stores: Counter[int] = Counter()
        self.store: tuple[int, int] | None = None  # the plain store that is being looked at
        self.repeats: list[tuple[Memory, Region, np.ndarray, Op, Access]] = []
        for memory in self.l0.values():
            self.board.map_of(memory).forget()

    # Order.

    def _snapshot(self, queue: int) -> list[int]:
        clock = self.known[queue].copy()
        clock[self.base + queue] = self.count[queue]
        return clock

    def _join(self, queue: int, clock: list[int]) -> None:
        if queue == INDEX["S"]:  # what the scalar unit waited for holds for all it issues later
            self.known = [[max(a, b) for a, b in zip(known, clock, strict=True)] for known in self.known]
        else:
            self.known[queue] = [max(a, b) for a, b in zip(self.known[queue], clock, strict=True)]

    def set_flag(self, index: int, source: int) -> None:
        self.flags.setdefault(index, deque()).append(self._snapshot(source))

    def wait_flag(self, index: int, target: int) -> None:
        self._join(target, self.flags[index].popleft())

    def barrier(self, pipe: str) -> None:
        if pipe == "ALL":
            clock = self.known[INDEX["S"]].copy()
            for queue in range(QUEUES):
                clock = [max(a, b) for a, b in zip(clock, self._snapshot(queue), strict=True)]
            self._join(INDEX["S"], clock)
        else:
            queue = INDEX[pipe]
            self._join(queue, self._snapshot(queue))

    def block_set(self, flag: int, pipe: int, sub: int) -> None:
        clock = self._snapshot(pipe)
        for peer in self.peers:
            peer.received[sub].setdefault(flag, deque()).append(clock)

    def block_wait(self, flag: int, senders: int) -> None:
        for sub in range(senders):
            self._join(INDEX["S"], self.received[sub][flag].popleft())

    def finished(self) -> None:
        """At the end of the program: the scalar unit must have waited for every pipe."""
        known = self.known[INDEX["S"]]
        busy = [pipe for i, pipe in enumerate(PIPES) if pipe != "S" and known[self.base + i] < self.count[i]]
        if busy:
            raise HazardError(f"the program of the {self.name} ends while pipe {' and '.join(busy)} may be busy")

    # Accesses.

    def access(self, op: Op, pipe: str, reads: Iterable[View], writes: Iterable[View]) -> None:
        """An instruction on a pipe reads and writes these views."""
        queue = INDEX[pipe]
        self.count[queue] += 1
        # All of it is compared before any of it is noted: an instruction that reads and writes
        # the same bytes must not hide an earlier read of them behind its own.
        touched = [
            (view.memory.home, self.board.map_of(view.memory.home).find(*region_key(view)), write)
            for views, write in ((reads, False), (writes, True))
            for view in views
            if 0 not in view.shape
        ]
        for memory, region, write in touched:
            self._check(memory, region, queue, op, write)
        for memory, region, write in touched:
            self._note(memory, region, queue, op, write)

    def _note(self, memory: Memory, region: Region, queue: int, op: Op, write: bool) -> None:
        """Remember an access."""
        start = self.board.block * len(self.known[queue]) + self.base
        slot = start + queue
        if write:
            region.writers[slot] = Access(self.count[queue], op, self, self.store, region)
            if self.store is not None:  # earlier reads are not of this store
                for other in region.overlaps:
                    for reader in [key for key in other.own_readers if start <= key < start + QUEUES]:
                        other.readers[reader] = other.own_readers.pop(reader)
            return
        read = Access(self.count[queue], op, self)
        if self.twin is not None and memory.space == "gm":
            own = [other.writers.get(start + INDEX["MTE3"]) for other in region.overlaps]
            last = max((found for found in own if found is not None), key=lambda found: found.number, default=None)
            if last is not None and last.store is not None:
                region.own_readers[slot] = Access(read.number, op, self, last.store, last.stored)
                return
        region.readers[slot] = read

    def _check(self, memory: Memory, region: Region, queue: int, op: Op, write: bool) -> None:
        """Compare an access with earlier ones of overlapping regions."""
        block = self.board.block
        known = self.known[queue]
        width = len(known)
        mine = self.base + queue if queue in ORDERED else -1
        for other in region.overlaps:
            readers = (other.readers, other.own_readers) if write else ()
            for kind in (other.writers, *readers):
                for slot, earlier in kind.items():
                    at, index = divmod(slot, width)
                    if at == block and (known[index] >= earlier.number or index == mine):
                        continue
                    writes = kind is other.writers
                    if at == block and self._same_work(memory, region, other, op, write, earlier, writes):
                        continue
                    self._report(memory, region, op, queue, write, earlier, index, writes, at)

    def _same_work(
        self, memory: Memory, region: Region, other: Region, op: Op, write: bool, earlier: Access, earlier_writes: bool
    ) -> bool:
        """Whether two accesses without an order are the same work of both vector cores."""
        if self.twin is None or earlier.tracker is not self.twin or earlier.store is None:
            return False
        if not write:  # the twin's store, after this core's own one
            slot = self.board.block * len(self.known[0]) + self.base + INDEX["MTE3"]
            own = other.writers.get(slot)
            return own is not None and own.store == earlier.store
        if earlier.store != self.store or earlier.stored is not region:
            return False
        if earlier_writes:  # this store must leave every byte as it is
            self.repeats.append((memory, region, region.bytes_of(memory), op, earlier))
        return True

    def compare_repeats(self) -> None:
        """After a store: where the twin did it too, no byte may have changed."""
        for memory, region, before, op, earlier in self.repeats:
            if not np.array_equal(region.bytes_of(memory), before):
                index = earlier.tracker.base + INDEX["MTE3"]
                self._report(memory, region, op, INDEX["MTE3"], True, earlier, index, True, self.board.block)
            self.board.repeated[op.place] += 1
        self.repeats.clear()

    def _report(
        self,
        memory: Memory,
        region: Region,
        op: Op,
        queue: int,
        write: bool,
        earlier: Access,
        index: int,
        earlier_writes: bool,
        block: int,
    ) -> None:
        def doing(writes: bool) -> str:
            return "writes" if writes else "reads"

        where = "" if block == self.board.block else f" in block {block}"
        raise HazardError(
            f"race on bytes {region.low} to {region.high} of {memory.name}: "
            f"{op} ({self.name}, pipe {PIPES[queue]}) {doing(write)} them while "
            f"{earlier.op} ({earlier.tracker.name}, pipe {PIPES[index % QUEUES]}{where}) {doing(earlier_writes)} "
            f"some of them; no flag or barrier orders the two"
        )

    # Instructions with more than one part.

    def device(self, op: Op, operands: tuple[Any, ...]) -> None:
        """An op with one instruction on one pipe."""
        entry = lookup(op)
        if op.number not in self._cycles:
            self._cycles[op.number] = self.costs.rough(op)
        self.cycles += self._cycles[op.number]
        reads, writes, scratch = entry.access(op)
        self.store = None
        if op.name == STORE and self.twin is not None and op.attrs.get("atomic_kind") in (None, "none"):
            self.stores[op.number] += 1
            self.store = (op.number, self.stores[op.number])
        self.access(
            op,
            entry.pipe(op),
            [operands[i] for i in reads],
            [operands[i] for i in (*writes, *scratch)],
        )
        self.store = None

    def _half(self, side: str, half: int, double: bool, op: Op, queue: int, *, write: bool) -> None:
        size = L0_BYTES // 2 if double else L0_BYTES
        low = half * size
        memory = self.l0[side]
        region = self.board.map_of(memory).find(low, low + size, (low, size, ()))
        self._check(memory, region, queue, op, write)
        self._note(memory, region, queue, op, write)

    def mmad(self, op: Op, operands: tuple[Any, ...], forward: int, backward: int, back: int) -> None:
        """The matrix macro: its MTE1 loads and mads with the events inside it."""
        a, b, _init, m, k, n, c = operands[:7]
        a_wait, b_wait, a_set, b_set, parity, back0, back1 = operands[7:14]
        mte1, cube = INDEX["MTE1"], INDEX["M"]
        if 0 in (m, k, n):
            for event in (a_wait, b_wait):
                if event >= 0:
                    self.wait_flag(forward + event, mte1)
            for event in (a_set, b_set):
                if event >= 0:
                    self.set_flag(backward + event, mte1)
            return
        a_rows = a.shape[0] * a.shape[3] if "a_transpose" in op.attrs else a.shape[1] * a.shape[2]
        b_cols = b.shape[1] * b.shape[2] if "b_transpose" in op.attrs else b.shape[0] * b.shape[3]
        parts, double = k_parts(a_rows, b_cols, k, a.itemsize)
        self.cycles += self.costs.mad(m, n, k, a.itemsize)
        events = [back0, back1]
        private = [back - 2, back - 1]  # flags of the macro's own, made and consumed inside
        for i in range(2):
            if events[i] < 0:
                self.set_flag(private[i], cube)
        index = [back + events[i] if events[i] >= 0 else private[i] for i in range(2)]
        for number in range(len(parts)):
            half = ((parity * len(parts) if parity != -1 else 0) + number) % 2 if double else 0
            for i in (half,) if double else (0, 1):
                self.wait_flag(index[i], mte1)
            last = number == len(parts) - 1
            if number == 0 and a_wait >= 0:
                self.wait_flag(forward + a_wait, mte1)
            self.access(op, "MTE1", [a], [])
            self._half("l0a", half, double, op, mte1, write=True)
            if last and a_set >= 0:
                self.set_flag(backward + a_set, mte1)
            if number == 0 and b_wait >= 0:
                self.wait_flag(forward + b_wait, mte1)
            self.access(op, "MTE1", [b], [])
            self._half("l0b", half, double, op, mte1, write=True)
            if last and b_set >= 0:
                self.set_flag(backward + b_set, mte1)
            self.set_flag(back - 3, mte1)
            self.wait_flag(back - 3, cube)
            self.access(op, "M", [], [c])
            self._half("l0a", half, double, op, cube, write=False)
            self._half("l0b", half, double, op, cube, write=False)
            for i in (half,) if double else (0, 1):
                self.set_flag(index[i], cube)
        for i in range(2):
            if events[i] < 0:
                self.wait_flag(private[i], mte1)
