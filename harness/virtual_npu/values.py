"""Values mode: executes the cores of a block and computes what the kernel computes.

Each core runs its instructions in program order; a core that waits for another one's
cross-core flag lets the others go on. Faults that show at once are reported here: a wait
that never comes, flags left over, bytes nobody wrote, accesses out of bounds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import ops_cube, ops_dma, ops_vector  # noqa: F401 - they register their ops
from .errors import DeadlockError, HazardError, UnknownOpError, VirtualNPUError
from .hardware import LOCAL_BYTES
from .hazards import Tracker
from .hivm import Function, MemRef, Op
from .lower import SILENT, Lowering, as_tuple, is_pure, mixed, static_shape
from .memory import (
    POISON,
    Memory,
    View,
    bitcast,
    bytes_as,
    collapse,
    contiguous_strides,
    expand,
    reinterpret,
    subview,
)
from .ops import PIPES, lookup
from .ops_cube import sync_texts
from .scalars import HELPERS
from .split import STORE

EVENTS = 8  # event ids for each pair of pipes (CANN SetFlag/WaitFlag)
BLOCK_FLAGS = 16  # cross-core flag ids (AscendNPU-IR, kBlockSyncSetWaitEventIdNum)
MAX_OUTSTANDING = 15  # sets of a cross-core flag that may wait to be consumed (CANN 8.5)

SYNC = tuple(
    f"hivm.hir.{name}" for name in ("set_flag", "wait_flag", "pipe_barrier", "sync_block_set", "sync_block_wait")
)

# Index of event 0 of each pair of pipes among a core's flags.
PAIR = {(a, b): (i * len(PIPES) + j) * EVENTS for i, a in enumerate(PIPES) for j, b in enumerate(PIPES)}
FLAGS = len(PIPES) ** 2 * EVENTS


def pipe_name(text: str) -> str:
    """A pipe's short name from its attribute."""
    name = text.removeprefix("PIPE_")
    if name not in PIPES and name != "ALL":
        raise UnknownOpError(f"pipe {text}")
    return name


def flag_base(op: Op) -> int:
    """Index of event 0 of a set_flag's or wait_flag's pair of pipes."""
    return PAIR[pipe_name(op.attrs["set_pipe"]), pipe_name(op.attrs["wait_pipe"])]


def flag_name(index: int) -> str:
    """What an index into a core's flags means."""
    pair, event = divmod(index, EVENTS)
    source, target = divmod(pair, len(PIPES))
    return f"flag {PIPES[source]}->{PIPES[target]} event {event}"


def event_text(op: Op, ref: Any, base: int) -> str:
    """Text of the flag index of a set_flag or wait_flag."""
    if "static_event_id" in op.attrs:
        return str(base + int(str(op.attrs["static_event_id"]).removeprefix("EVENT_ID")))
    return f"{base} + {ref(op.operands[0])}"


def block_flag_text(op: Op, ref: Any) -> str:
    """Text of the flag id of a sync_block_set or sync_block_wait."""
    mode = str(op.attrs.get("tsync_instr_mode", "INTRA_BLOCK_SYNCHRONIZATION"))
    if "INTRA_BLOCK" not in mode:
        raise UnknownOpError(f"{op}: synchronisation mode {mode}")
    if "static_flag_id" in op.attrs:
        return str(op.attrs["static_flag_id"])
    return str(ref(op.operands[0]))


class ValueLowering(Lowering):
    """Writes the values-mode Python of a function; with `hazards`, each instruction and
    each synchronisation is also reported to the core's tracker."""

    def __init__(self, function: Function, *, hazards: bool = False) -> None:
        super().__init__(function)
        self.hazards = hazards

    def track(self, indent: int, text: str, op: Op) -> None:
        """A line for the tracker, where there is one."""
        if self.hazards:
            self.emit(indent, f"tracker.{text}", op)

    def parameters(self) -> str:
        names = [arg.name for arg in self.function.args]
        return ", ".join(["core", "block", "blocks", "sub", *names])

    def prologue(self) -> Iterable[str]:
        yield "flags = core.flags"
        yield "counters = core.counters"
        if self.hazards:
            yield "tracker = core.tracker"
            yield "ops = core.code.ops"
        self.kernels = {op.number: op for op in self.function.walk() if self.is_device(op)}
        for number in self.kernels:
            yield f"k{number} = core.kernel({number})"

    def epilogue(self) -> Iterable[str]:
        if self.hazards:
            yield "tracker.finished()"

    @staticmethod
    def is_device(op: Op) -> bool:
        """Whether the op has an entry in the registry (it is no scalar, view or sync op)."""
        return op.name.startswith("hivm.hir.") and op.name not in SYNC and op.name not in SILENT and not is_pure(op)

    def view(self, op: Op) -> str:
        result = op.results[0]
        assert isinstance(result.type, MemRef)
        name = op.name.rsplit(".", 1)[1]
        operands = [self.ref(operand) for operand in op.operands]
        if name in ("cast", "memory_space_cast"):
            return operands[0]
        if name == "pointer_cast":
            parts = op.segments()
            if len(parts[0]) != 1 or (len(parts) > 1 and parts[1]):
                raise UnknownOpError(f"{op}: {len(op.operands)} operands")
            shape = static_shape(op, result)
            return f"core.pointer({op.number}, {operands[0]}, {result.type.space!r}, {result.type.dtype!r}, {shape})"
        if name == "bitcast":
            return f"bitcast({operands[0]}, {result.type.dtype!r})"
        if name == "collapse_shape":
            return f"collapse({operands[0]}, {op.attrs['reassociation']})"
        if name == "expand_shape":
            shape_text = as_tuple(mixed(op.attrs["static_output_shape"], operands[1:]))
            return f"expand({operands[0]}, {op.attrs['reassociation']}, {shape_text})"
        if name == "view":
            sizes = iter(operands[2:])
            shape_text = as_tuple([str(dim) if dim is not None else next(sizes) for dim in result.type.shape])
            return f"bytes_as({operands[0]}, {result.type.dtype!r}, {operands[1]}, {shape_text})"
        _, offsets, sizes_, strides = op.segments()
        texts = [
            mixed(op.attrs[f"static_{key}"], [self.ref(v) for v in part])
            for key, part in (("offsets", offsets), ("sizes", sizes_), ("strides", strides))
        ]
        if name == "reinterpret_cast":
            return f"reinterpret({operands[0]}, {texts[0][0]}, {as_tuple(texts[1])}, {as_tuple(texts[2])})"
        rank = len(result.type.shape)
        return f"subview({operands[0]}, {', '.join(as_tuple(t) for t in texts)}, {rank})"

    def device(self, op: Op, indent: int) -> None:
        name = op.name
        operands = [self.ref(operand) for operand in op.operands]
        if name == "hivm.hir.set_flag":
            index = event_text(op, self.ref, flag_base(op))
            self.emit(indent, f"flags[{index}] += 1", op)
            self.track(indent, f"set_flag({index}, {PIPES.index(pipe_name(op.attrs['set_pipe']))})", op)
        elif name == "hivm.hir.wait_flag":
            index = event_text(op, self.ref, flag_base(op))
            self.emit(indent, f"if not flags[{index}]: core.never_set({index})", op)
            self.emit(indent, f"flags[{index}] -= 1", op)
            self.track(indent, f"wait_flag({index}, {PIPES.index(pipe_name(op.attrs['wait_pipe']))})", op)
        elif name == "hivm.hir.pipe_barrier":
            self.track(indent, f"barrier({pipe_name(op.attrs['pipe'])!r})", op)
        elif name == "hivm.hir.sync_block_set":
            flag = block_flag_text(op, self.ref)
            self.emit(indent, f"core.block_set({flag})", op)
            self.track(indent, f"block_set({flag}, {PIPES.index(pipe_name(op.attrs['tpipe']))}, sub)", op)
        elif name == "hivm.hir.sync_block_wait":
            flag = block_flag_text(op, self.ref)
            if self.hazards:  # each wait is a point where another core may run first
                self.emit(indent, f"yield {op.number}, {flag}", op)
            if self.function.core == "AIC":
                self.emit(
                    indent, f"while not (counters[0][{flag}] and counters[1][{flag}]): yield {op.number}, {flag}", op
                )
                self.emit(indent, f"counters[0][{flag}] -= 1; counters[1][{flag}] -= 1", op)
            else:
                self.emit(indent, f"while not counters[{flag}]: yield {op.number}, {flag}", op)
                self.emit(indent, f"counters[{flag}] -= 1", op)
            self.track(indent, f"block_wait({flag}, {2 if self.function.core == 'AIC' else 1})", op)
        elif name == "memref.load":
            self.track(indent, f"access(ops[{op.number}], 'S', [{operands[0]}], [])", op)
            self.emit(indent, f"{op.results[0].name} = load_scalar({operands[0]}, {as_tuple(operands[1:])})", op)
        elif name == "memref.store":
            self.track(indent, f"access(ops[{op.number}], 'S', [], [{operands[1]}])", op)
            self.emit(indent, f"store_scalar({operands[0]}, {operands[1]}, {as_tuple(operands[2:])})", op)
        elif name == "hivm.hir.mmadL1":
            self._mmad(op, operands, indent)
        else:
            lookup(op)
            self.track(indent, f"device(ops[{op.number}], ({', '.join(operands)},))", op)
            self.emit(indent, f"k{op.number}({', '.join(operands)})", op)
            if op.name == STORE:
                self.track(indent, "compare_repeats()", op)

    def _mmad(self, op: Op, operands: list[str], indent: int) -> None:
        """The macro raises flags inside itself (its trailing operands: waits for A and B,
        sets for A and B, loop parity, two M->MTE1 events). Those that come in pairs inside
        the macro cancel; -1 stands for none. Without these operands it drains L0 itself."""
        sync = sync_texts(op, self.ref)
        waits, sets, backs = sync[0:2], sync[2:4], sync[5:7]
        forward, backward = PAIR["MTE2", "MTE1"], PAIR["MTE1", "MTE2"]
        bases = f"{forward}, {backward}, {PAIR['M', 'MTE1']}"
        for event in waits:
            if event != "-1":
                self.emit(indent, f"core.macro_wait({forward}, {event})", op)
        for event in backs:
            if event != "-1":
                self.emit(indent, f"core.macro_present({PAIR['M', 'MTE1']}, {event})", op)
        self.track(indent, f"mmad(ops[{op.number}], ({', '.join([*operands[:7], *sync])},), {bases})", op)
        self.emit(indent, f"k{op.number}({', '.join(operands)})", op)
        for event in sets:
            if event != "-1":
                self.emit(indent, f"core.macro_set({backward}, {event})", op)


def load_scalar(view: View, indices: tuple[int, ...]) -> Any:
    """`memref.load`: one element, as a Python int or a numpy float."""
    element = subview(view, indices, (1,) * len(indices), (1,) * len(indices), len(indices))
    element.check_written()
    if view.dtype == "i1":
        return int(element.load_bits().ravel()[0])
    value = element.array().ravel()[0]
    if value.dtype.kind == "i":
        return int(value)
    return np.float16(value) if view.dtype == "f16" else np.float32(value)


def store_scalar(value: Any, view: View, indices: tuple[int, ...]) -> None:
    """`memref.store`: one element."""
    element = subview(view, indices, (1,) * len(indices), (1,) * len(indices), len(indices))
    element.mark_written()
    element.array()[...] = value


NAMESPACE: dict[str, Any] = {
    **HELPERS,
    "bitcast": bitcast,
    "bytes_as": bytes_as,
    "collapse": collapse,
    "expand": expand,
    "load_scalar": load_scalar,
    "reinterpret": reinterpret,
    "store_scalar": store_scalar,
    "subview": subview,
}


@dataclass(eq=False)
class Code:
    """A function in executable form. `filename` marks its frames in tracebacks."""

    function: Function
    run: Any
    filename: str
    line_ops: dict[int, Op]
    ops: dict[int, Op]
    text: str


def compile_values(function: Function, *, hazards: bool = False) -> Code:
    """Write and compile the values-mode Python of a function."""
    lowering = ValueLowering(function, hazards=hazards)
    text = lowering.generate("core_program")
    filename = f"<hivm {'hazards' if hazards else 'values'} {function.name}>"
    namespace = dict(NAMESPACE)
    exec(compile(text, filename, "exec"), namespace)  # noqa: S102 - text written by this module
    ops = {op.number: op for op in function.walk()}
    return Code(function, namespace["core_program"], filename, lowering.line_ops, ops, text)


class Core:
    """One cube core or one vector core: its memories, its flags, its place in the block."""

    def __init__(self, kernel: str, code: Code, kind: str, sub: int) -> None:
        self.kernel_name = kernel
        self.code = code
        self.kind = kind
        self.sub = sub
        self.name = "cube core" if kind == "AIC" else f"vector core {sub}"
        spaces = ("cbuf", "cc") if kind == "AIC" else ("ub",)
        self.memories = {space: Memory(f"{space} of {self.name}", space, LOCAL_BYTES[space]) for space in spaces}
        self.flags = [0] * FLAGS
        # Sets that arrived: for the cube core one list for each vector core.
        self.counters: list[Any] = [[0] * BLOCK_FLAGS for _ in range(2)] if kind == "AIC" else [0] * BLOCK_FLAGS
        self.peers: list[Core] = []
        self.pointers: dict[tuple[Any, ...], View] = {}
        self.kernels: dict[int, Any] = {}
        self.tracker: Tracker | None = None
        self.turns = 0

    def kernel(self, number: int) -> Any:
        """The function that executes op `number`."""
        if number not in self.kernels:
            op = self.code.ops[number]
            self.kernels[number] = lookup(op).build(op)
        return self.kernels[number]

    def pointer(self, number: int, address: int, space: str, dtype: str, shape: tuple[int, ...]) -> View:
        """The view of the on-chip buffer that op `number` places at an address."""
        key = (number, address)
        found = self.pointers.get(key)
        if found is None:
            if space not in self.memories:
                raise UnknownOpError(f"{self.name} has no memory {space}")
            home = self.memories[space]
            offset = address * 8 if dtype == "i1" else address
            strides = contiguous_strides(shape)
            low, high = View(home, dtype, offset, shape, strides).hull()
            buffer = home.buffer(f"{home.name}, buffer of {self.code.ops[number]}", low, high)
            for other in {id(view.memory): view.memory for view in self.pointers.values()}.values():
                if other.home is home and other.low < high and low < other.high:
                    buffer.share(other)
            found = View(buffer, dtype, offset, shape, strides)
            self.pointers[key] = found
        return found

    def never_set(self, index: int) -> None:
        raise DeadlockError(f"{self.name} waits for {flag_name(index)}, which nothing sets before")

    def macro_present(self, base: int, event: int) -> None:
        if event >= 0 and not self.flags[base + event]:
            self.never_set(base + event)

    def macro_wait(self, base: int, event: int) -> None:
        self.macro_present(base, event)
        if event >= 0:
            self.flags[base + event] -= 1

    def macro_set(self, base: int, event: int) -> None:
        if event >= 0:
            self.flags[base + event] += 1

    def block_set(self, flag: int) -> None:
        """A cube core's set reaches both vector cores; a vector core's set reaches the cube."""
        if not self.peers:
            raise HazardError(f"{self.name} sets cross-core flag {flag}, but the kernel has no other core")
        for peer in self.peers:
            counters = peer.counters[self.sub] if peer.kind == "AIC" else peer.counters
            counters[flag] += 1
            if counters[flag] > MAX_OUTSTANDING:
                raise HazardError(
                    f"{self.name} sets cross-core flag {flag} while {MAX_OUTSTANDING} sets of it wait to be "
                    f"consumed by the {peer.name}: the hardware counter has 4 bits"
                )

    def ready(self, wait: tuple[int, int] | None) -> bool:
        """Whether the core can go on from the cross-core wait it stands at."""
        if wait is None:
            return True
        flag = wait[1]
        if self.kind == "AIC":
            return bool(self.counters[0][flag] and self.counters[1][flag])
        return bool(self.counters[flag])

    def leftovers(self) -> list[str]:
        """Flags that are still up."""
        left = [f"{self.name}: {flag_name(i)} ({n} left)" for i, n in enumerate(self.flags) if n]
        lists = self.counters if self.kind == "AIC" else [self.counters]
        for sub, counters in enumerate(lists):
            origin = f" from vector core {sub}" if self.kind == "AIC" else ""
            left += [f"{self.name}: cross-core flag {i}{origin} ({n} left)" for i, n in enumerate(counters) if n]
        return left

    def reset(self) -> None:
        """Before the next program on the same core: on-chip contents are unknown again."""
        for memory in self.memories.values():
            memory.data.fill(POISON)
        self.pointers.clear()


def located(error: Exception, core: Core) -> VirtualNPUError:
    """The error with the kernel, the op and its place in front."""
    op: Op | None = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == core.code.filename:
            op = core.code.line_ops.get(traceback.tb_lineno)
        traceback = traceback.tb_next
    place = f"{core.kernel_name}: {op or 'before its first op'} ({core.name}): "
    if isinstance(error, VirtualNPUError):
        return type(error)(place + str(error))
    if isinstance(error, ZeroDivisionError):
        return VirtualNPUError(place + "integer division by zero")
    return VirtualNPUError(f"{place}{type(error).__name__}: {error}")


Program = Generator[tuple[int, int], None, None]


def chooser(schedule: str) -> Callable[[list[Core]], Core]:
    """Which of the cores that can go on runs next.

    Args:
        schedule: "cube-first", "vector-first", "alternate", "timed" (the core with the least
            work behind it, in cycles of the cost model) or "jitter-SEED" (at random).

    Raises:
        ValueError: an unknown schedule.
    """
    if schedule == "cube-first":
        return lambda ready: ready[0]
    if schedule == "vector-first":
        return lambda ready: ready[-1]
    if schedule == "alternate":
        return lambda ready: min(ready, key=lambda core: core.turns)
    if schedule == "timed":
        return lambda ready: min(ready, key=lambda core: core.tracker.cycles if core.tracker else core.turns)
    if re.fullmatch(r"jitter-\d+", schedule):
        return random.Random(schedule).choice
    raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)} or jitter-SEED, got {schedule!r}")


SCHEDULES = ("cube-first", "vector-first", "alternate", "timed")


def run_block(cores: list[Core], arguments: list[list[Any]], block: int, blocks: int, schedule: str) -> None:
    """Run one block's cores to their ends.

    Args:
        cores: the cores of the block.
        arguments: for each core the arguments of its function.
        schedule: which core runs while several can; see `chooser`.

    Raises:
        DeadlockError: every core waits.
        HazardError: a flag is left over at the end.
    """
    choose = chooser(schedule)
    running: dict[Core, Program] = {
        core: core.code.run(core, block, blocks, core.sub, *values)
        for core, values in zip(cores, arguments, strict=True)
    }
    waits: dict[Core, tuple[int, int]] = {}
    while running:
        ready = [core for core in cores if core in running and core.ready(waits.get(core))]
        if not ready:
            break
        core = choose(ready)
        core.turns += 1
        try:
            waits[core] = next(running[core])
        except StopIteration:
            del running[core]
            waits.pop(core, None)
        except (VirtualNPUError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            raise located(error, core) from error
    if running:
        raise DeadlockError(f"{cores[0].kernel_name}, block {block}: no core can go on: " + _who_waits(running, waits))
    left = [text for core in cores for text in core.leftovers()]
    if left:
        raise HazardError(f"{cores[0].kernel_name}, block {block}: flags left over at the end: " + "; ".join(left))


def _who_waits(running: dict[Core, Program], waits: dict[Core, tuple[int, int]]) -> str:
    texts = []
    for core in running:
        number, flag = waits[core]
        op = core.code.ops[number]
        sender = "the vector cores" if core.kind == "AIC" else "the cube core"
        texts.append(f"the {core.name} waits for cross-core flag {flag} from {sender} ({op})")
    return "; ".join(texts)
