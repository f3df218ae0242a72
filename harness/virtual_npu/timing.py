"""Timing mode: predicts the cycles of a launch without touching data.

Pipes are in order, so an instruction starts when its pipe is free, the scalar unit has
issued it and the flags it waits for are up: the maximum of times that are all known when
the program is walked in order. Each core becomes a Python function over the time of its
pipes; flags carry times. What another core has not reached yet is waited for by a yield.

Cost of a run: control flow of these kernels does not depend on data, so only scalars that
steer it are computed; the rest of the scalar code is counted.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .costs import Costs
from .driver import KernelRun, State
from .errors import DeadlockError, LaunchError, UnknownOpError
from .hivm import DYNAMIC, Function, MemRef, Op, Region, Value
from .lower import AFFINE, Lowering, is_pure, mixed
from .memory import DTYPES
from .ops import lookup
from .ops_cube import sync_arguments, sync_texts
from .program import Program
from .scalars import HELPERS
from .values import BLOCK_FLAGS, EVENTS, FLAGS, PAIR, block_flag_text, event_text, flag_base, pipe_name

PIPE_TIMES = {"V": "tV", "MTE1": "t1", "MTE2": "t2", "MTE3": "t3", "M": "tM", "FIX": "tF", "S": "s"}
# The profiler's names of the pipes (msprof: aic_* on the cube core, aiv_* on a vector core).
PROFILER_NAMES = {
    "AIC": {"M": "aic_mac", "MTE1": "aic_mte1", "MTE2": "aic_mte2", "FIX": "aic_fixpipe", "S": "aic_scalar"},
    "AIV": {"V": "aiv_vec", "MTE2": "aiv_mte2", "MTE3": "aiv_mte3", "S": "aiv_scalar"},
}
_TRANSFERS = {
    "hivm.hir.load": ("gm_to_ub", "MTE2"),
    "hivm.hir.store": ("ub_to_gm", "MTE3"),
    "hivm.hir.nd2nz": ("nd2nz", "MTE2"),
}
Dim = int | str
L2_CHUNK = 65536  # bytes; the L2 model's unit


@dataclass
class Step:
    """What one execution of an op adds: busy cycles of a pipe, bytes moved, multiply time."""

    op: Op
    pipe: str
    cycles: float = 0.0  # with the memory to itself
    moving: float = 0.0  # of these, those that contention stretches
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    argument: int | None = None
    mac_cycles: float = 0.0
    l1_bytes: float = 0.0  # from L1 to L0A and L0B


@dataclass
class Count:
    """Steps that run together, once for each execution of a straight piece of code."""

    steps: list[Step] = field(default_factory=list)


class TimingLowering(Lowering):
    """Writes the timing Python of a function.

    Stretch factors are run-time parameters: `kl` of the time that bytes take through L2,
    `ka[i]` of reads from argument i (its share that comes from HBM).
    """

    def __init__(self, function: Function, costs: Costs) -> None:
        super().__init__(function)
        self.costs = costs
        self.flag_cycles = costs.constants["sync"]["flag_cycles"]
        self.cross = costs.constants["sync"]["cross_core_cycles"]
        self.issue = costs.constants["scalar"]["issue_cycles"]
        self.op_cycles = costs.constants["scalar"]["op_cycles"]
        self.counts: list[Count] = []
        self.current: Count | None = None
        self.pending_scalar = 0.0
        self.dynamic: list[Step] = []
        self.functions: dict[str, Any] = {}
        self.carriers = self._carriers()
        self.needed = self._needed()

    # What steers control flow or costs.

    def _carriers(self) -> dict[Value, list[Value]]:
        """For each value that control flow passes on: the values it may come from."""
        sources: dict[Value, list[Value]] = {}

        def link(targets: list[Value], values: list[Value]) -> None:
            for target, value in zip(targets, values, strict=True):
                sources.setdefault(target, []).append(value)

        for op in self.function.walk():
            if op.name == "scf.for":
                body = op.regions[0]
                link(body.args[1:], op.operands[3:])
                link(body.args[1:], body.ops[-1].operands)
                link(op.results, body.args[1:])
            elif op.name == "scf.if":
                for region in op.regions:
                    if region.ops and region.ops[-1].name == "scf.yield":
                        link(op.results, region.ops[-1].operands)
            elif op.name == "scf.while":
                before, after = op.regions
                link(before.args, op.operands)
                link(op.results, before.ops[-1].operands[1:])
                link(after.args, before.ops[-1].operands[1:])
                link(before.args, after.ops[-1].operands)
        return sources

    def _roots(self) -> Iterable[Value]:
        for op in self.function.walk():
            if op.name == "scf.for":
                yield from op.operands[:3]
            elif op.name in ("scf.if", "scf.condition"):
                yield op.operands[0]
            elif op.name in ("hivm.hir.set_flag", "hivm.hir.wait_flag"):
                yield from op.operands
            elif op.name in ("hivm.hir.sync_block_set", "hivm.hir.sync_block_wait"):
                if "static_flag_id" not in op.attrs:
                    yield op.operands[0]
            elif op.name == "hivm.hir.mmadL1":
                yield from op.operands[3:6]
                yield from sync_arguments(op)
            elif not is_pure(op) and op.name.startswith("hivm.hir.") and op.results == []:
                for operand in op.operands:
                    if isinstance(operand.type, MemRef):
                        yield from self._dynamic_dims(operand)

    def _needed(self) -> set[Value]:
        needed: set[Value] = set()
        todo = list(self._roots())
        while todo:
            value = todo.pop()
            if value in needed:
                continue
            needed.add(value)
            todo += self.carriers.get(value, [])
            op = self.definitions.get(value)
            if op is not None and (is_pure(op) or op.name == "memref.load"):
                if isinstance(value.type, MemRef):
                    continue
                todo += [v for v in op.operands if not isinstance(v.type, MemRef)]
        return needed

    def wanted(self, value: Value) -> bool:
        return value in self.needed and not isinstance(value.type, MemRef)

    def dims(self, value: Value) -> list[Value | int]:
        """The sizes of a memref: static, or the value that gives it."""
        kind = value.type
        assert isinstance(kind, MemRef)
        if None not in kind.shape:
            return [dim for dim in kind.shape if dim is not None]
        op = self.definitions.get(value)
        if op is None:
            sources = self.carriers.get(value, [])
            if sources:
                return self.dims(sources[0])
            raise UnknownOpError(f"{self.function.name}: a memref of unknown size {kind}")
        if op.name in ("memref.cast", "memref.memory_space_cast", "hivm.hir.bitcast"):
            return self.dims(op.operands[0])
        if op.name == "arith.select":
            return self.dims(op.operands[1])
        if op.name in ("memref.subview", "memref.reinterpret_cast"):
            _, _, sizes, _ = op.segments()
            rest = iter(sizes)
            found: list[Value | int] = [next(rest) if s == DYNAMIC else s for s in op.attrs["static_sizes"]]
            while len(found) > len(kind.shape):
                found.remove(1)
            return found
        if op.name == "memref.collapse_shape":
            inner = self.dims(op.operands[0])
            out: list[Value | int] = []
            for group in op.attrs["reassociation"]:
                members = [inner[i] for i in group]
                values = [m for m in members if isinstance(m, Value)]
                product = math.prod(m for m in members if isinstance(m, int))
                if not values:
                    out.append(product)
                elif len(values) == 1 and product == 1:
                    out.append(values[0])
                else:
                    raise UnknownOpError(f"{op}: a dynamic size times {product}")
            return out
        if op.name == "memref.expand_shape":
            given = iter(op.operands[1:])
            return [next(given) if s == DYNAMIC else s for s in op.attrs["static_output_shape"]]
        raise UnknownOpError(f"{op}: the size of its result is not known")

    def _dynamic_dims(self, value: Value) -> list[Value]:
        kind = value.type
        if not isinstance(kind, MemRef) or None not in kind.shape:
            return []
        return [dim for dim in self.dims(value) if isinstance(dim, Value)]

    def argument(self, value: Value) -> int | None:
        """The function argument that a global-memory memref is a window of."""
        for _ in range(100):
            if value in self.function.args:
                return self.function.args.index(value)
            op = self.definitions.get(value)
            if op is not None:
                value = op.operands[1] if op.name == "arith.select" else op.operands[0]
            elif value in self.carriers:
                value = self.carriers[value][0]
            else:
                return None
        return None

    # Text.

    def parameters(self) -> str:
        names = [arg.name for arg in self.function.args]
        return ", ".join(["core", "block", "blocks", "sub", "kl", "ka", *names])

    def prologue(self) -> Iterable[str]:
        yield "s = core.start"
        yield "tV = t1 = t2 = t3 = tM = tF = s"
        yield "flags = core.flags"
        yield "rx = core.received"
        yield "tx = core.targets"
        yield "n = core.counts"
        yield "d = core.dynamic"
        yield "cross_wait = 0.0"

    def epilogue(self) -> Iterable[str]:
        yield "core.finish(max(s, tV, t1, t2, t3, tM, tF), cross_wait)"

    def view(self, op: Op) -> str:
        return "None"

    def block(self, region: Region, indent: int) -> None:
        self._begin(indent)
        for op in region.ops:
            if op.regions:
                self._flush(indent)
                before = self.current
                single = Region(region.args, [op])
                super().block(single, indent)
                self.current = before
                continue
            super().block(Region(region.args, [op]), indent)
            if is_pure(op) and op not in self.hoisted and not isinstance(op.results[0].type, MemRef):
                # A cast between integer widths is free, an affine map is a few instructions.
                if op.name in AFFINE:
                    self.pending_scalar += 2 * self.op_cycles
                elif not op.name.startswith(("arith.index_cast", "arith.ext")):
                    self.pending_scalar += self.op_cycles
        self._flush(indent)

    def _begin(self, indent: int) -> None:
        self.counts.append(Count())
        self.current = self.counts[-1]
        self.emit(indent, f"n[{len(self.counts) - 1}] += 1")

    def _flush(self, indent: int) -> None:
        if self.pending_scalar:
            self.emit(indent, f"s += {self.pending_scalar!r}")
            assert self.current is not None
            self.current.steps.append(Step(self.function.body.ops[0], "S", self.pending_scalar))
            self.pending_scalar = 0.0

    def _step(self, step: Step) -> None:
        assert self.current is not None
        self.current.steps.append(step)

    def _sizes(self, op: Op, position: int) -> tuple[list[Dim], bool]:
        dims = self.dims(op.operands[position])
        texts: list[Dim] = [self.ref(d) if isinstance(d, Value) else d for d in dims]
        static = all(isinstance(t, int) or t.lstrip("-").isdigit() for t in texts)
        return ([int(t) for t in texts] if static else texts), static

    def device(self, op: Op, indent: int) -> None:
        name = op.name
        if name == "memref.load":
            if op.results[0] in self.needed:
                self.emit(indent, f"core.data_dependent({op.number})", op)
                self.emit(indent, f"{op.results[0].name} = 0")
            self.pending_scalar += self.costs.constants["scalar"]["store_cycles"]
            return
        if name == "memref.store":
            self.pending_scalar += self.costs.constants["scalar"]["store_cycles"]
            return
        self.pending_scalar += self.issue
        self._flush(indent)
        if name == "hivm.hir.set_flag":
            time = PIPE_TIMES[pipe_name(op.attrs["set_pipe"])]
            index = event_text(op, self.ref, flag_base(op))
            later = f"({time} if {time} > s else s)" if time != "s" else "s"
            self.emit(indent, f"flags[{index}].append({later} + {self.flag_cycles!r})", op)
        elif name == "hivm.hir.wait_flag":
            time = PIPE_TIMES[pipe_name(op.attrs["wait_pipe"])]
            index = event_text(op, self.ref, flag_base(op))
            self.emit(indent, f"t = flags[{index}].popleft()", op)
            self.emit(indent, f"if t > {time}: {time} = t")
        elif name == "hivm.hir.pipe_barrier":
            self._barrier(op, indent)
        elif name == "hivm.hir.sync_block_set":
            time = PIPE_TIMES[pipe_name(op.attrs["tpipe"])]
            flag = block_flag_text(op, self.ref)
            self.emit(indent, f"t = ({time} if {time} > s else s) + {self.cross!r}", op)
            self.emit(indent, f"for q in tx: q[{flag}].append(t)", op)
        elif name == "hivm.hir.sync_block_wait":
            flag = block_flag_text(op, self.ref)
            if self.function.core == "AIC":
                self.emit(indent, f"while not (rx[0][{flag}] and rx[1][{flag}]): yield {op.number}, {flag}", op)
                self.emit(indent, f"t = max(rx[0][{flag}].popleft(), rx[1][{flag}].popleft())", op)
            else:
                self.emit(indent, f"while not rx[0][{flag}]: yield {op.number}, {flag}", op)
                self.emit(indent, f"t = rx[0][{flag}].popleft()", op)
            # On A2 the wait stops the whole scalar issue (pto-isa, wait-flag-dev.md).
            self.emit(indent, "if t > s: cross_wait += t - s; s = t")
        elif name == "hivm.hir.mmadL1":
            self._mmad(op, indent)
        elif name == "hivm.hir.fixpipe":
            self._fixpipe(op, indent)
        elif name in _TRANSFERS:
            self._transfer(op, indent)
        elif lookup(op).pipe(op) == "MTE2":
            self._fill_l1(op, indent)
        else:
            self._vector(op, indent)

    def _fill_l1(self, op: Op, indent: int) -> None:
        """A constant written to an L1 tile by MTE2."""
        dims, static = self._sizes(op, 1)
        kind = op.operands[1].type
        assert isinstance(kind, MemRef)
        if not static:
            raise UnknownOpError(f"{op}: an L1 fill of dynamic size")
        rate = self.costs.constants["l1_fill"]["bytes_per_cycle"]
        cycles = math.prod(int(d) for d in dims) * DTYPES[kind.dtype].itemsize / rate
        self.emit(indent, f"t2 = (t2 if t2 > s else s) + {cycles!r}", op)
        self._step(Step(op, "MTE2", cycles))

    def _barrier(self, op: Op, indent: int) -> None:
        pipe = pipe_name(op.attrs["pipe"])
        if pipe == "ALL":
            self.emit(indent, "s = tV = t1 = t2 = t3 = tM = tF = max(s, tV, t1, t2, t3, tM, tF)", op)
        elif pipe == "V":
            self.emit(indent, f"tV = (tV if tV > s else s) + {self.costs.barrier!r}", op)
            self._step(Step(op, "V", self.costs.barrier))
        elif pipe == "M":
            cycles = self.costs.constants["cube"]["barrier_cycles"]
            self.emit(indent, f"tM = (tM if tM > s else s) + {cycles!r}", op)
            self._step(Step(op, "M", cycles))
        elif pipe == "S":
            raise UnknownOpError(f"{op}: a barrier of the scalar pipe")
        else:
            # Transfers occupy their pipe until they are done in this model: nothing to add.
            self.emit(indent, "pass", op)

    def _vector(self, op: Op, indent: int) -> None:
        shapes: list[list[Dim] | None] = []
        static = True
        for position, operand in enumerate(op.operands):
            if isinstance(operand.type, MemRef):
                dims, fixed = self._sizes(op, position)
                shapes.append(dims)
                static = static and fixed
            else:
                shapes.append(None)
        if static:
            cost = self.costs.vector(op, shapes)  # type: ignore[arg-type]
            cycles, scalar = cost.vector, cost.scalar
            self._step(Step(op, "V", cycles))
            if scalar:
                self._step(Step(op, "S", scalar))
                self._round_trip(op, indent, repr(scalar))
            if cycles:
                self.emit(indent, f"tV = (tV if tV > s else s) + {cycles!r}", op)
            return
        name = f"c{op.number}"
        costs = self.costs

        def cost_of(*sizes: Any) -> Any:
            return costs.vector(op, list(sizes))

        self.functions[name] = cost_of
        texts = ", ".join("None" if s is None else "(" + "".join(f"{d}, " for d in s) + ")" for s in shapes)
        index = self._dynamic_step(Step(op, "V", 1.0))
        self.emit(indent, f"c = {name}({texts})", op)
        self.emit(indent, "if c.scalar:")
        self._round_trip(op, indent + 1, "c.scalar")
        self.emit(indent, f"tV = (tV if tV > s else s) + c.vector; d[{index}] += c.vector")

    def _round_trip(self, op: Op, indent: int, cycles: str) -> None:
        self.emit(indent, f"if tV + {self.flag_cycles!r} > s: s = tV + {self.flag_cycles!r}", op)
        self.emit(indent, f"s += {cycles}")
        self.emit(indent, f"tV = s + {self.flag_cycles!r}")

    def _dynamic_step(self, step: Step) -> int:
        self.dynamic.append(step)
        return len(self.dynamic) - 1

    def _transfer(self, op: Op, indent: int) -> None:
        path, pipe = _TRANSFERS[op.name]
        time = PIPE_TIMES[pipe]
        gm = 1 if op.name == "hivm.hir.store" else 0
        dims, static = self._sizes(op, gm)
        kind = op.operands[gm].type
        assert isinstance(kind, MemRef)
        size = DTYPES[kind.dtype].itemsize
        argument = self.argument(op.operands[gm])
        factor = "kl" if pipe == "MTE3" else f"ka[{argument}]"
        if static:
            total = math.prod(int(d) for d in dims) * size
            latency, cycles = self.costs.transfer(path, total)
            if total:
                self.emit(indent, f"{time} = ({time} if {time} > s else s) + {latency!r} + {cycles!r} * {factor}", op)
            step = Step(op, pipe, latency + cycles, cycles, argument=argument)
            if pipe == "MTE3":
                step.write_bytes = total
            else:
                step.read_bytes = total
            self._step(step)
            return
        name = f"c{op.number}"
        costs = self.costs
        self.functions[name] = lambda *sizes: costs.transfer(path, math.prod(sizes) * size)
        rate = self.costs.constants[path]["bytes_per_cycle"]
        step = Step(op, pipe, 1.0 / rate, 1.0 / rate, argument=argument)
        index = self._dynamic_step(step)
        start = self._dynamic_step(Step(op, pipe, 1.0))
        step.read_bytes, step.write_bytes = (0.0, 1.0) if pipe == "MTE3" else (1.0, 0.0)
        self.emit(indent, f"c, b = {name}({', '.join(str(d) for d in dims)})", op)
        self.emit(indent, f"{time} = ({time} if {time} > s else s) + c + b * {factor}; d[{index}] += b * {rate!r}")
        self.emit(indent, f"d[{start}] += c")

    def _fixpipe(self, op: Op, indent: int) -> None:
        dims, static = self._sizes(op, 1)
        kind = op.operands[1].type
        assert isinstance(kind, MemRef)
        size = DTYPES[kind.dtype].itemsize
        head = self.costs.constants["fixpipe"]["head_cycles"]
        if static:
            rows, cols = (int(d) for d in dims)
            cycles = self.costs.fixpipe(rows, cols)
            self.emit(indent, f"tF = (tF if tF > s else s) + {head!r} + {cycles - head!r} * kl", op)
            argument = self.argument(op.operands[1])
            self._step(Step(op, "FIX", cycles, cycles - head, write_bytes=rows * cols * size, argument=argument))
            return
        name = f"c{op.number}"
        costs = self.costs

        def drain(rows: int, cols: int) -> tuple[float, float]:
            cycles = costs.fixpipe(rows, cols)
            return (head, cycles - head) if cycles else (0.0, 0.0)

        self.functions[name] = drain
        written = self._dynamic_step(Step(op, "FIX", write_bytes=1.0))
        start = self._dynamic_step(Step(op, "FIX", 1.0))
        moving = self._dynamic_step(Step(op, "FIX", 1.0, 1.0))
        self.emit(indent, f"r, c = {', '.join(str(d) for d in dims)}", op)
        self.emit(indent, f"h, b = {name}(r, c)")
        self.emit(indent, "tF = (tF if tF > s else s) + h + b * kl")
        self.emit(indent, f"d[{written}] += r * c * {size}; d[{start}] += h; d[{moving}] += b")

    def _mmad(self, op: Op, indent: int) -> None:
        """The macro's own loop (ops_cube.k_parts) with its events."""
        texts = [self.ref(operand) for operand in op.operands]
        a, b, c = (op.operands[i].type for i in (0, 1, 6))
        assert isinstance(a, MemRef) and isinstance(b, MemRef) and isinstance(c, MemRef)
        tiles = [self._sizes(op, position) for position in (0, 1, 6)]
        sizes = texts[3:6]
        dynamic = not all(t.lstrip("-").isdigit() for t in sizes) or not all(fixed for _, fixed in tiles)
        sync = sync_texts(op, self.ref)
        size = DTYPES[a.dtype].itemsize
        if dynamic:
            self._mmad_dynamic(op, indent, sizes, sync, size)
            return
        m, k, n = (int(t) for t in sizes)
        if 0 in (m, k, n):
            raise UnknownOpError(f"{op}: an empty matrix product")
        (da, db, dc) = ([int(x) for x in tile] for tile, _ in tiles)
        m0 = da[0] * da[3] if "a_transpose" in op.attrs else da[1] * da[2]
        n0 = db[1] * db[2] if "b_transpose" in op.attrs else db[0] * db[3]
        rows = dc[1] * dc[2]
        parts, double = self.costs.mmad_parts(max(m0, rows), n0, n, k, size)
        head = self.costs.constants["cube"]["mad_head_cycles"]
        barrier = self.costs.constants["cube"]["barrier_cycles"]
        rate_a, rate_b = (self.costs.constants["cube"][f"l0{side}_bytes_per_cycle"] for side in "ab")
        flag = self.flag_cycles
        forward, backward, back = self._macro_bases()
        a_wait, b_wait, a_set, b_set, parity, back0, back1 = sync
        local0, local1 = back0 == "-1", back1 == "-1"
        self.emit(indent, f"e0 = e1 = (tM if tM > s else s) + {flag!r}", op)
        if not local0:
            self.emit(indent, f"e0 = flags[{back} + {back0}].popleft()", op)
        if not local1:
            self.emit(indent, f"e1 = flags[{back} + {back1}].popleft()", op)
        swap = double and parity != "-1" and len(parts) % 2 == 1
        if swap:
            self.emit(indent, f"if {parity} & 1: e0, e1 = e1, e0", op)
        self.emit(indent, "if s > t1: t1 = s")
        for index, part in enumerate(parts):
            event = ("e1" if index % 2 else "e0") if double else "e0"
            self.emit(indent, f"if {event} > t1: t1 = {event}", op)
            if not double:
                self.emit(indent, "if e1 > t1: t1 = e1", op)
            if index == 0:
                self._macro_wait(indent, forward, a_wait)
            self.emit(indent, f"t1 += {part['a']!r}")
            last = index == len(parts) - 1
            if last:
                self._macro_set(indent, backward, a_set)
            if index == 0:
                self._macro_wait(indent, forward, b_wait)
            self.emit(indent, f"t1 += {part['b']!r}")
            if last:
                self._macro_set(indent, backward, b_set)
            cycles = head + part["mad"] + (barrier if part["barrier"] else 0.0)
            self.emit(indent, f"t = t1 + {flag!r}")
            self.emit(indent, f"tM = (tM if tM > t else t) + {cycles!r}", op)
            self.emit(indent, f"{event} = tM + {flag!r}" if double else f"e0 = e1 = tM + {flag!r}")
            self._step(Step(op, "M", cycles, mac_cycles=self.costs.mad(m, n, k, size) / len(parts)))
            l1_bytes = part["a"] * rate_a + part["b"] * rate_b
            self._step(Step(op, "MTE1", part["a"] + part["b"], l1_bytes=l1_bytes))
        if swap:
            self.emit(indent, f"if {parity} & 1: e0, e1 = e1, e0", op)
        for number, local, text in ((0, local0, back0), (1, local1, back1)):
            if local:
                self.emit(indent, f"if e{number} > t1: t1 = e{number}", op)
            else:
                self.emit(indent, f"flags[{back} + {text}].append(e{number})", op)

    @staticmethod
    def _macro_bases() -> tuple[int, int, int]:
        return PAIR["MTE2", "MTE1"], PAIR["MTE1", "MTE2"], PAIR["M", "MTE1"]

    def _macro_wait(self, indent: int, base: int, event: str) -> None:
        if event != "-1":
            guard = "" if event.isdigit() else f"if {event} >= 0: "
            self.emit(indent, f"{guard}t1 = max(t1, flags[{base} + {event}].popleft())")

    def _macro_set(self, indent: int, base: int, event: str) -> None:
        if event != "-1":
            guard = "" if event.isdigit() else f"if {event} >= 0: "
            self.emit(indent, f"{guard}flags[{base} + {event}].append(t1 + {self.flag_cycles!r})")

    def _mmad_dynamic(self, op: Op, indent: int, sizes: list[str], sync: list[str], itemsize: int) -> None:
        """A product whose sizes are known only at run time: the same steps in a helper."""
        a, b, c = (op.operands[i] for i in (0, 1, 6))
        tiles = []
        for operand in (a, b, c):
            found = self.dims(operand)
            if any(isinstance(d, Value) for d in found):
                raise UnknownOpError(f"{op}: an L1 tile of dynamic size")
            tiles.append([int(d) for d in found if isinstance(d, int)])
        da, db, dc = tiles
        m0 = da[0] * da[3] if "a_transpose" in op.attrs else da[1] * da[2]
        n0 = db[1] * db[2] if "b_transpose" in op.attrs else db[0] * db[3]
        rows = max(m0, dc[1] * dc[2])
        costs, flag = self.costs, self.flag_cycles
        head = costs.constants["cube"]["mad_head_cycles"]
        barrier = costs.constants["cube"]["barrier_cycles"]
        forward, backward, back = self._macro_bases()

        def macro(
            s: float, t1: float, tm: float, m: int, k: int, n: int, flags: Any, d: Any, *events: int
        ) -> tuple[float, float]:
            a_wait, b_wait, a_set, b_set, parity, back0, back1 = events
            for event in (a_wait, b_wait) if 0 in (m, k, n) else ():
                if event >= 0:
                    t1 = max(t1, flags[forward + event].popleft())
            if 0 in (m, k, n):
                for event in (a_set, b_set):
                    if event >= 0:
                        flags[backward + event].append(t1 + flag)
                return t1, tm
            parts, double = costs.mmad_parts(rows, n0, n, k, itemsize)
            e = [max(tm, s) + flag] * 2
            for i, event in enumerate((back0, back1)):
                if event >= 0:
                    e[i] = flags[back + event].popleft()
            t1 = max(t1, s)
            for index, part in enumerate(parts):
                half = ((parity * len(parts) if parity != -1 else 0) + index) % 2 if double else 0
                t1 = max(t1, e[half]) if double else max(t1, *e)
                if index == 0 and a_wait >= 0:
                    t1 = max(t1, flags[forward + a_wait].popleft())
                t1 += part["a"]
                if index == len(parts) - 1 and a_set >= 0:
                    flags[backward + a_set].append(t1 + flag)
                if index == 0 and b_wait >= 0:
                    t1 = max(t1, flags[forward + b_wait].popleft())
                t1 += part["b"]
                if index == len(parts) - 1 and b_set >= 0:
                    flags[backward + b_set].append(t1 + flag)
                cycles = head + part["mad"] + (barrier if part["barrier"] else 0.0)
                tm = max(tm, t1 + flag) + cycles
                d[first] += cycles
                d[second] += part["a"] + part["b"]
                if double:
                    e[half] = tm + flag
                else:
                    e = [tm + flag] * 2
            d[third] += costs.mad(m, n, k, itemsize)
            for i, event in enumerate((back0, back1)):
                if event >= 0:
                    flags[back + event].append(e[i])
                else:
                    t1 = max(t1, e[i])
            return t1, tm

        first = self._dynamic_step(Step(op, "M", 1.0))
        second = self._dynamic_step(Step(op, "MTE1", 1.0))
        third = self._dynamic_step(Step(op, "M", mac_cycles=1.0))
        name = f"c{op.number}"
        self.functions[name] = macro
        m, k, n = sizes
        self.emit(indent, f"t1, tM = {name}(s, t1, tM, {m}, {k}, {n}, flags, d, {', '.join(sync)})", op)


_ADVANCE = re.compile(r"(t[V123MF]) = \(\1 if \1 > (s|t) else \2\) \+ ")
_INCREASE = re.compile(r"(t1) \+= ")
_WAIT = re.compile(r"if (t|e0|e1) > (t[V123MF]): \2 = \1$")
_CROSS = "if t > s: cross_wait += t - s; s = t"
_SCALAR = re.compile(r"s \+= ")
_RAISE = re.compile(r"for q in tx: q\[(.+)\]\.append\(t\)$")
_MACRO = re.compile(r"t1, tM = c\d+\(")
_PIPE_OF = {time: pipe for pipe, time in PIPE_TIMES.items()}


class TracingLowering(TimingLowering):
    """The timing code with a record of each instruction's start and end on its pipe, of each
    wait with its cause, and of each cross-core set and wait. Slower; for traces of a few tiles."""

    def prologue(self) -> Iterable[str]:
        yield from super().prologue()
        yield "event = core.events.append"
        yield "signal = core.signals.append"

    def emit(self, indent: int, text: str, op: Op | None = None) -> None:
        op = op or self._op
        number = op.number if op is not None else -1
        wait = _WAIT.match(text)
        if wait is not None:
            pipe = _PIPE_OF[wait[2]]
            kind = "wait" if wait[1] == "t" else "wait for L0"
            super().emit(
                indent, f"if {wait[1]} > {wait[2]}: event(({kind!r}, {pipe!r}, {wait[2]}, {wait[1]}, {number}))"
            )
        raised = _RAISE.match(text)
        if raised is not None and op is not None:
            pipe = pipe_name(op.attrs["tpipe"])
            super().emit(indent, f"signal((True, {raised[1]}, t - {self.cross!r}, {pipe!r}))")
        if text == _CROSS and op is not None:
            super().emit(indent, f"signal((False, {block_flag_text(op, self.ref)}, t if t > s else s, 'S'))")
            super().emit(indent, f"if t > s: event(('cross-core wait', 'S', s, t, {number}))")
        scalar = _SCALAR.match(text)
        macro = _MACRO.match(text)
        if scalar is not None:
            super().emit(indent, "begin = s")
        if macro is not None:
            super().emit(indent, "begin, begin_m = max(t1, s), max(tM, s)")
        advance = _ADVANCE.match(text) or _INCREASE.match(text)
        if advance is not None:
            other = advance[2] if advance.re is _ADVANCE else advance[1]
            super().emit(indent, f"begin = max({advance[1]}, {other})")
        super().emit(indent, text, op)
        if advance is not None:
            super().emit(indent, f"event(('run', {_PIPE_OF[advance[1]]!r}, begin, {advance[1]}, {number}))")
        if scalar is not None:
            super().emit(indent, "event(('run', 'S', begin, s, -1))")
        if macro is not None:
            super().emit(
                indent, f"event(('run', 'MTE1', begin, t1, {number})); event(('run', 'M', begin_m, tM, {number}))"
            )

    def device(self, op: Op, indent: int) -> None:
        self._op = op
        super().device(op, indent)

    _op: Op | None = None


class CountingLowering(TimingLowering):
    """Counts executions only: no times, no flags. It finds the busiest program cheaply."""

    def _roots(self) -> Iterable[Value]:
        for op in self.function.walk():
            if op.name == "scf.for":
                yield from op.operands[:3]
            elif op.name in ("scf.if", "scf.condition"):
                yield op.operands[0]

    def prologue(self) -> Iterable[str]:
        yield "n = core.counts"

    def epilogue(self) -> Iterable[str]:
        return ()

    def _flush(self, indent: int) -> None:
        self.pending_scalar = 0.0

    def device(self, op: Op, indent: int) -> None:
        if op.name == "memref.load":
            super().device(op, indent)
            return
        length = len(self.lines)
        super().device(op, indent)
        del self.lines[length:]

    def _for(self, op: Op, indent: int) -> None:
        """A loop that only counts is one addition."""
        start = len(self.lines)
        super()._for(op, indent)
        body = [line.strip() for line in self.lines[start + 1 :]]
        if self.lines[start].strip().startswith("for ") and all(
            line == "pass" or re.fullmatch(r"n\[\d+\] \+= 1", line) for line in body
        ):
            lower, upper, step = (self.ref(operand) for operand in op.operands[:3])
            del self.lines[start:]
            for line in body:
                if line != "pass":
                    self.emit(indent, line.replace("+= 1", f"+= len(range({lower}, {upper}, {step}))"))


class FootprintLowering(CountingLowering):
    """Walks a program once and notes which bytes of which argument it touches, in order.

    An innermost loop runs its first iteration only; what it touches there stands for
    `trips` windows one after another (block pointers advance through a tensor in order). A
    loop over a program's tiles or heads, at the top of the function, runs whole: what one
    iteration reads again, the next one does not.
    The result feeds the L2 model, not the times.
    """

    def _roots(self) -> Iterable[Value]:
        yield from super()._roots()
        for op in self.function.walk():
            if op.name in _GM_SIDE:
                yield from self._offset_values(op.operands[_GM_SIDE[op.name]])

    def _offset_values(self, value: Value) -> list[Value]:
        """Values in the byte offset of a window of an argument."""
        found: list[Value] = []
        for _ in range(100):
            op = self.definitions.get(value)
            if op is None:
                if value in self.carriers:
                    value = self.carriers[value][0]
                    continue
                return found
            if op.name in ("memref.reinterpret_cast", "memref.subview"):
                _, offsets, _, strides = op.segments()
                found += offsets + strides
            elif op.name == "arith.select":
                value = op.operands[1]
                continue
            elif op.name == "memref.view":
                found.append(op.operands[1])
            value = op.operands[0]
        return found

    def _offset_text(self, value: Value) -> str:
        """Element offset of a window of an argument, as Python text."""
        terms: list[str] = []
        for _ in range(100):
            op = self.definitions.get(value)
            if op is None:
                if value in self.carriers:
                    value = self.carriers[value][0]
                    continue
                break
            if op.name in ("memref.reinterpret_cast", "memref.subview"):
                _, offsets, _, _ = op.segments()
                texts = mixed(op.attrs["static_offsets"], [self.ref(v) for v in offsets])
                if op.name == "memref.reinterpret_cast":
                    terms.append(texts[0])
                else:
                    strides = self._stride_texts(op.operands[0])
                    terms += [f"{t} * {stride}" for t, stride in zip(texts, strides, strict=True) if t != "0"]
            elif op.name == "arith.select":
                value = op.operands[1]
                continue
            value = op.operands[0]
        return " + ".join(terms) or "0"

    def _stride_texts(self, value: Value) -> list[str]:
        op = self.definitions.get(value)
        kind = value.type
        assert isinstance(kind, MemRef)
        if op is not None and op.name == "memref.reinterpret_cast":
            _, _, _, strides = op.segments()
            return mixed(op.attrs["static_strides"], [self.ref(v) for v in strides])
        if op is not None and op.name in ("memref.cast", "memref.subview"):
            return self._stride_texts(op.operands[0])
        strides_, stride = [], 1
        for dim in reversed(kind.shape):
            strides_.append(str(stride))
            stride *= dim or 1
        return strides_[::-1]

    def prologue(self) -> Iterable[str]:
        yield "n = core.counts"
        yield "touch = core.touch"
        yield "trips = 1"

    def device(self, op: Op, indent: int) -> None:
        super().device(op, indent)
        if op.name not in _GM_SIDE:
            return
        operand = op.operands[_GM_SIDE[op.name]]
        argument = self.argument(operand)
        if argument is None or self.function.arg_kinds[argument] != "kernel":
            return
        kind = operand.type
        assert isinstance(kind, MemRef)
        size = DTYPES[kind.dtype].itemsize
        dims = self.dims(operand)
        total = math.prod(d for d in dims if isinstance(d, int)) * size
        write = op.name in ("hivm.hir.store", "hivm.hir.fixpipe")
        self.emit(indent, f"touch({argument}, ({self._offset_text(operand)}) * {size}, {total} * trips, {write})", op)

    def _for(self, op: Op, indent: int) -> None:
        body = op.regions[0]
        nested = any(inner.regions for inner in body.ops)
        # A loop that touches nothing may count the trips of a later one: it runs whole.
        if nested or op in self.function.body.ops or not any(inner.name in _GM_SIDE for inner in body.ops):
            TimingLowering._for(self, op, indent)
            return
        lower, upper, step = (self.ref(operand) for operand in op.operands[:3])
        self._assign(indent, body.args[1:], op.operands[3:], op)
        self.emit(indent, f"trips = len(range({lower}, {upper}, {step}))", op)
        self.emit(indent, "if trips:")
        self.emit(indent + 1, f"{body.args[0].name} = {lower}")
        self.block(body, indent + 1)
        self.emit(indent + 1, "pass")
        # What the loop carries on is unknown after one iteration; the first value stands in.
        self._assign(indent, op.results, body.args[1:], op)
        self.emit(indent, "trips = 1")


_GM_SIDE = {"hivm.hir.load": 0, "hivm.hir.nd2nz": 0, "hivm.hir.store": 1, "hivm.hir.fixpipe": 1}


class TimedCore:
    """Run-time state of one core in timing mode."""

    def __init__(self, code: TimingCode, kind: str, sub: int) -> None:
        self.code = code
        self.kind = kind
        self.sub = sub
        self.start = 0.0
        self.flags: list[deque[float]] = [deque() for _ in range(FLAGS)]
        self.received: list[list[deque[float]]] = [
            [deque() for _ in range(BLOCK_FLAGS)] for _ in range(2 if kind == "AIC" else 1)
        ]
        self.targets: list[list[deque[float]]] = []
        self.counts = [0] * len(code.counts)
        self.dynamic = [0.0] * len(code.dynamic)
        self.end = 0.0
        self.cross_wait = 0.0
        self.touches: list[tuple[int, int, int, bool]] = []
        self.events: list[tuple[str, str, float, float, int]] = []  # kind, pipe, start, end, op
        self.signals: list[tuple[bool, int, float, str]] = []  # cross-core: set?, flag, raised or gone on, pipe

    def finish(self, end: float, cross_wait: float) -> None:
        self.end = end
        self.cross_wait += cross_wait

    def touch(self, argument: int, offset: int, size: int, write: bool) -> None:
        self.touches.append((argument, offset, size, write))

    def data_dependent(self, number: int) -> None:
        op = self.code.ops[number]
        raise UnknownOpError(f"{op}: control flow depends on data, timing mode has none")

    def ready(self, wait: tuple[int, int] | None) -> bool:
        return wait is None or all(queues[wait[1]] for queues in self.received)

    def instructions(self) -> int:
        """Executed instructions of the pipes; those of dynamic size are left out."""
        pieces = zip(self.code.counts, self.counts, strict=True)
        return sum(number * sum(step.pipe != "S" for step in count.steps) for count, number in pieces)

    def steps(self) -> Iterable[tuple[Step, float]]:
        """Each step with its number of executions (for dynamic ones: its amount)."""
        for count, number in zip(self.code.counts, self.counts, strict=True):
            if number:
                for step in count.steps:
                    yield step, number
        for step, amount in zip(self.code.dynamic, self.dynamic, strict=True):
            if amount:
                yield step, amount


@dataclass(eq=False)
class TimingCode:
    function: Function
    run: Any
    counts: list[Count]
    dynamic: list[Step]
    ops: dict[int, Op]
    text: str


def compile_timing(
    function: Function, costs: Costs, lowering_class: type[TimingLowering] = TimingLowering
) -> TimingCode:
    """Write and compile the timing Python of a function (or its counting or footprint)."""
    lowering = lowering_class(function, costs)
    text = lowering.generate("core_program")
    namespace = {**HELPERS, **lowering.functions, "max": max, "min": min}
    filename = f"<hivm {lowering_class.__name__} {function.name}>"
    exec(compile(text, filename, "exec"), namespace)  # noqa: S102 - text written by this module
    ops = {op.number: op for op in function.walk()}
    return TimingCode(function, namespace["core_program"], lowering.counts, lowering.dynamic, ops, text)


Running = Generator[tuple[int, int], None, None]


@dataclass
class Timed:
    """Result of one core's programs: end times, the cores with their counters, and the stretch of
    transfers by contention: `kl` of what is written, `ka` of what is read, by argument."""

    cycles: float
    cores: list[TimedCore]
    kl: float
    ka: Any

    def cycles_of(self, step: Step) -> float:
        """Cycles that one execution of a step keeps its pipe busy."""
        factor = self.kl if step.pipe in ("MTE3", "FIX") else self.ka[step.argument]
        return step.cycles + step.moving * (factor - 1.0)


class Timer:
    """Times launches of one program under one set of constants."""

    def __init__(self, program: Program, costs: Costs, lowering_class: type[TimingLowering] = TimingLowering) -> None:
        self.program = program
        self.costs = costs
        self.codes = {
            core: compile_timing(function, costs, lowering_class) for core, function in program.functions.items()
        }

    def cores(self) -> list[TimedCore]:
        made = []
        if "AIC" in self.codes:
            made.append(TimedCore(self.codes["AIC"], "AIC", 0))
        if "AIV" in self.codes:
            vectors = 1 if self.program.vector_only else 2
            made += [TimedCore(self.codes["AIV"], "AIV", sub) for sub in range(vectors)]
        cube = [core for core in made if core.kind == "AIC"]
        for core in made:
            if core.kind == "AIC":
                core.targets = [other.received[0] for other in made if other.kind == "AIV"]
            else:
                core.targets = [other.received[core.sub] for other in cube]
        return made

    def run(self, programs: list[int], blocks: int, arguments: dict[str, list[Any]], kl: float, ka: Any) -> Timed:
        """Run the given programs one after another on one AI core."""
        cores = self.cores()
        dispatch = self.costs.constants["launch"]["block_dispatch_cycles"]
        start = 0.0
        for index, block in enumerate(programs):
            if index:
                start += dispatch
            running: dict[TimedCore, Running] = {}
            for core in cores:
                core.start = start
                running[core] = core.code.run(core, block, blocks, core.sub, kl, ka, *arguments[core.kind])
            waits: dict[TimedCore, tuple[int, int]] = {}
            while running:
                core_ = next((c for c in running if c.ready(waits.get(c))), None)
                if core_ is None:
                    names = [f"{c.kind}{c.sub} at {c.code.ops[w[0]]} (flag {w[1]})" for c, w in waits.items()]
                    raise DeadlockError(f"{self.program.name}: no core can go on: {'; '.join(names)}")
                try:
                    waits[core_] = next(running[core_])
                except StopIteration:
                    del running[core_]
                    waits.pop(core_, None)
            start = max(core.end for core in cores)
        return Timed(start, cores, kl, ka)


def _timer(program: Program, state: State) -> Timer:
    """The timer of a program, kept with it for one set of constants."""
    constants = state.options.get("constants")
    if constants is not None:
        return Timer(program, Costs(constants))
    timer: Timer | None = program.__dict__.get("_timer")
    if timer is None:
        timer = program.__dict__["_timer"] = Timer(program, Costs())
    return timer


def _arguments(program: Program, values: list[Any], grid: tuple[int, int, int]) -> dict[str, list[Any]]:
    found = {}
    for core, function in program.functions.items():
        hidden = ("ffts_base_address", "workspace", "sync_block_lock")
        kernel = [kind for kind in function.arg_kinds if kind not in hidden]
        visible = [*values, *grid]
        if len(kernel) != len(visible):
            raise LaunchError(
                f"{program.name}: the function takes {len(kernel)} arguments, the launch has {len(visible)}"
            )
        rest = iter(visible)
        found[core] = [None if kind in hidden else next(rest) for kind in function.arg_kinds]
    return found


def time_launch(
    program: Program, arguments: list[tuple[str, str, Any]], grid: tuple[int, int, int], state: State
) -> KernelRun:
    """Predict one launch: its busiest core, with the memory shared by all active cores."""
    from .launch import scalar_value

    timer = _timer(program, state)
    constants = timer.costs.constants
    values = [None if type_.startswith("*") else scalar_value(type_, value) for _, type_, value in arguments]
    per_core = _arguments(program, values, grid)
    places = _arguments(program, [_place(value) for _, _, value in arguments], grid)
    blocks = math.prod(grid)
    units = state.cores * (constants["chip"]["vector_cores"] if program.vector_only else 1)
    active = min(blocks, units)
    chosen = _busiest(program, timer, per_core, blocks, units)
    hidden = len(next(iter(program.functions.values())).arg_kinds) - len(values) - 3
    count_args = hidden + len(values) + 3
    plain = [1.0] * count_args
    first = timer.run(chosen, blocks, per_core, 1.0, _Factors(plain))
    traffic = _traffic(first.cores)
    known = state.options.get("hbm_share")
    if known is not None and program.name in known:  # given by kernel
        known = known[program.name]
    share = (
        {int(key): float(value) for key, value in known.items()}
        if known is not None
        else _hbm_share(program, timer, per_core, places, blocks, units)
    )
    shared = constants["shared"]
    offered = (traffic["read"] + traffic["write"]) * active / first.cycles if first.cycles else 0.0
    load = offered / shared["l2_bytes_per_cycle"]
    exponent = shared["stretch_exponent"]
    stretch = (1.0 + load**exponent) ** (1.0 / exponent) if state.options.get("contention", True) else 1.0
    hbm_rate = shared["hbm_bytes_per_cycle"] / active
    factors = list(plain)
    for index in range(count_args):
        fraction = share.get(index, 0.0) if state.options.get("contention", True) else 0.0
        rate = constants["gm_to_ub" if program.vector_only else "nd2nz"]["bytes_per_cycle"]
        slow = max(1.0, rate / hbm_rate)
        factors[index] = (1.0 - fraction) * stretch + fraction * max(stretch, slow)
    timed = timer.run(chosen, blocks, per_core, stretch, _Factors(factors, stretch))
    trace = state.options.get("trace")
    if trace is not None:
        traced = Timer(program, timer.costs, TracingLowering)
        trace.append((program, traced.run(chosen, blocks, per_core, stretch, _Factors(factors, stretch))))
    # Contention stretches each transfer; however well a kernel hides that, L2 gives no more than its limit.
    least = (traffic["read"] + traffic["write"]) * active / shared["l2_limit_bytes_per_cycle"]
    bound = max(timed.cycles, least) if state.options.get("contention", True) else timed.cycles
    cycles = bound + constants["launch"]["kernel_cycles"]
    report = _report(timed, program, state)
    report.update(
        {
            "offered_l2_bytes_per_cycle": offered,
            "l2_stretch": stretch,
            "programs": chosen[:8],
            "hbm_share": {str(k): round(v, 4) for k, v in share.items()},
            "workspace_bytes": program.workspace_bytes * blocks,
            "lines": _by_line(timed),
            "notes": program.lost_time,
        }
    )
    return KernelRun(program.name, grid, cycles, cycles / constants["chip"]["clock_hz"] * 1e3, report)


class _Factors:
    """Stretch by argument; anything else (the workspace) has the default."""

    def __init__(self, values: list[float], default: float = 1.0) -> None:
        self.values = values
        self.default = default

    def __getitem__(self, index: int | None) -> float:
        return self.default if index is None else self.values[index]


def _busiest(program: Program, timer: Timer, arguments: dict[str, list[Any]], blocks: int, units: int) -> list[int]:
    """The programs of the core with the most work. Programs go to cores in turn."""
    lists = [list(range(core, blocks, units)) for core in range(min(units, blocks))]
    if len(lists) == 1:
        return lists[0]
    counters: dict[str, TimingCode] | None = program.__dict__.get("_counters")
    if counters is None:
        counters = {
            core: compile_timing(function, timer.costs, CountingLowering)
            for core, function in program.functions.items()
        }
        program.__dict__["_counters"] = counters
    best, best_work = lists[0], -1.0
    for programs in lists:
        work = 0.0
        for kind, code in counters.items():
            core = TimedCore(code, kind, 0)
            for block in programs:
                for _ in code.run(core, block, blocks, 0, 1.0, _Factors([1.0] * 64), *arguments[kind]):
                    pass
            work += sum(step.cycles * number for step, number in core.steps())
        if work > best_work * (1 + 1e-9):
            best, best_work = programs, work
    return best


def _place(tensor: Any) -> tuple[int, int] | None:
    """A tensor's storage and its first byte there: two arguments may name the same bytes."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * tensor.element_size()


def _hbm_share(
    program: Program,
    timer: Timer,
    arguments: dict[str, list[Any]],
    places: dict[str, list[tuple[int, int] | None]],
    blocks: int,
    units: int,
) -> dict[int, float]:
    """For each argument the share of its read bytes that L2 does not hold; `places`: where
    each argument's bytes lie (`_place`).

    The cores run in step, so their touches are merged by progress and go through one L2
    of least-recently-used chunks. Compulsory and capacity misses both come out of this.
    """
    codes = {core: compile_timing(f, timer.costs, FootprintLowering) for core, f in program.functions.items()}
    merged: list[tuple[float, int, int, int, int, bool]] = []
    for unit in range(min(units, blocks)):
        for kind, code in codes.items():
            homes = [place or (-index, 0) for index, place in enumerate(places[kind], 1)]
            core = TimedCore(code, kind, 0)
            for block in range(unit, blocks, units):
                for _ in code.run(core, block, blocks, 0, 1.0, None, *arguments[kind]):
                    pass
            total = len(core.touches)
            for i, (argument, offset, size, write) in enumerate(core.touches):
                home, base = homes[argument]
                merged.append(((i + 0.5) / total, argument, home, base + offset, size, write))
    merged.sort(key=lambda touch: touch[0])
    capacity = timer.costs.constants["memory"]["l2_bytes"] // L2_CHUNK
    cache: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
    read: dict[int, float] = {}
    missed: dict[int, float] = {}
    for _, argument, home, offset, size, write in merged:
        end = offset + size
        for chunk in range(offset // L2_CHUNK, (end - 1) // L2_CHUNK + 1):
            low, high = max(offset, chunk * L2_CHUNK), min(end, (chunk + 1) * L2_CHUNK)
            key = (home, chunk)
            held = cache.get(key)
            if held is None:
                absent, union = high - low, (low, high)
                if len(cache) >= capacity:
                    cache.popitem(last=False)
                cache[key] = union
            else:
                # What is held of a chunk is taken as one stretch of bytes.
                union = (min(low, held[0]), max(high, held[1]))
                absent = max(0, union[1] - union[0] - (held[1] - held[0]))
                cache[key] = union
                cache.move_to_end(key)
            if not write:
                read[argument] = read.get(argument, 0.0) + high - low
                missed[argument] = missed.get(argument, 0.0) + absent
    return {argument: min(1.0, missed.get(argument, 0.0) / total) for argument, total in read.items() if total}


def _traffic(cores: list[TimedCore]) -> dict[str, Any]:
    read = write = 0.0
    by_argument: dict[int, float] = {}
    for core in cores:
        for step, number in core.steps():
            read += step.read_bytes * number
            write += step.write_bytes * number
            if step.argument is not None and step.read_bytes:
                by_argument[step.argument] = by_argument.get(step.argument, 0.0) + step.read_bytes * number
    return {"read": read, "write": write, "read_by_argument": by_argument}


def _report(timed: Timed, program: Program, state: State) -> dict[str, Any]:
    """Busy cycles by pipe (profiler names), bytes, waits, ideal multiply cycles."""
    busy: dict[str, float] = {}
    mac = 0.0
    for core in timed.cores:
        names = PROFILER_NAMES[core.kind]
        suffix = "" if core.kind == "AIC" else str(core.sub)
        for step, number in core.steps():
            name = names.get(step.pipe)
            if name is not None:
                busy[name + suffix] = busy.get(name + suffix, 0.0) + timed.cycles_of(step) * number
                mac += step.mac_cycles * number
    traffic = _traffic(timed.cores)
    return {
        "busy": busy,
        "mac_cycles": mac,
        "core_cycles": timed.cycles,
        "read_bytes": traffic["read"],
        "write_bytes": traffic["write"],
        "cross_core_wait": {f"{c.kind}{c.sub}": c.cross_wait for c in timed.cores},
        "instructions": sum(core.instructions() for core in timed.cores),
    }


def _by_line(timed: Timed) -> dict[str, dict[str, float]]:
    """Busy cycles of each pipe and bytes moved, by line of the Python kernel."""
    lines: dict[str, dict[str, float]] = {}
    for core in timed.cores:
        if core.sub:
            continue  # the second vector core does the same work
        for step, number in core.steps():
            if step.pipe == "S":
                continue
            row = lines.setdefault(step.op.place, {})
            name = PROFILER_NAMES[core.kind].get(step.pipe, step.pipe)
            row[name] = row.get(name, 0.0) + timed.cycles_of(step) * number
            moved = (step.read_bytes + step.write_bytes) * number
            if moved:
                key = f"{core.kind.lower()}_gm_bytes"
                row[key] = row.get(key, 0.0) + moved
    return lines


__all__ = ["EVENTS", "Timer", "compile_timing", "time_launch"]
