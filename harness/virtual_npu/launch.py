"""One kernel launch on the virtual NPU: arguments, workspace, the programs of the grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .driver import KernelRun, State
from .errors import LaunchError
from .hazards import Board, Tracker
from .memory import Memory, View
from .program import Program
from .values import Core, run_block

_TORCH_NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i8",
}


def tensor_view(name: str, tensor: torch.Tensor, memories: dict[int, Memory] | None = None) -> View:
    """The memory behind a CPU tensor, from its first element to the end of its storage.

    Arguments that share a storage share a memory: `memories` holds those of the launch by the
    address of their storage.
    """
    dtype = _TORCH_NAMES.get(tensor.dtype)
    if dtype is None:
        raise LaunchError(f"argument {name}: dtype {tensor.dtype} is not supported")
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    data = flat.numpy()
    memories = {} if memories is None else memories
    memory = memories.get(storage.data_ptr())
    if memory is None:
        memory = memories[storage.data_ptr()] = Memory(f"tensor {name}", "gm", data=data)
    else:
        memory.name += f", {name}"
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return View(memory, dtype, offset, ((len(data) - offset) // tensor.element_size(),), (1,))


def scalar_value(type_: str, value: Any) -> Any:
    """A scalar argument as the kernel sees it."""
    if type_ in ("fp32", "f32"):
        return np.float32(value)
    if type_ in ("fp16", "f16"):
        return np.float16(value)
    if type_.startswith(("i", "u")):
        return int(value)
    raise LaunchError(f"scalar argument of type {type_}")


def launch(
    program: Program, arguments: list[tuple[str, str, Any]], grid: tuple[int, int, int], state: State
) -> KernelRun:
    """Run or time one launch.

    Args:
        program: the compiled kernel.
        arguments: name, type and value of each run-time argument, in order.
        grid: blocks along x, y and z.
        state: mode, cores and options of the device.
    """
    if state.mode == "timing":
        from .timing import time_launch

        return time_launch(program, arguments, grid, state)
    memories: dict[int, Memory] = {}
    values = [
        tensor_view(name, value, memories) if type_.startswith("*") else scalar_value(type_, value)
        for name, type_, value in arguments
    ]
    capture = state.options.get("capture")
    if capture is not None:
        capture.append(Launch(program, values, grid, state))
    report: dict[str, Any] = {"notes": program.lost_time, **run_values(program, values, grid, state)}
    return KernelRun(program.name, grid, report=report)


@dataclass(frozen=True)
class Launch:
    """A launch as it reached the machine (`run(capture=[...])` collects them), to run again."""

    program: Program
    values: list[Any]
    grid: tuple[int, int, int]
    state: State

    def memories(self) -> list[Memory]:
        """The tensors' memories, each once."""
        return list({id(v.memory): v.memory for v in self.values if isinstance(v, View)}.values())

    def again(self, program: Program) -> bytes:
        """Run another version of the program on the same arguments; all tensors' bytes after."""
        run_values(program, self.values, self.grid, self.state)
        return b"".join(memory.data.tobytes() for memory in self.memories())


def make_cores(program: Program, board: Board | None = None) -> list[Core]:
    """The cores that one program of the grid runs on; with a board, hazards are tracked."""
    codes = program.values if board is None else program.hazards
    cores = []
    if "AIC" in codes:
        cores.append(Core(program.name, codes["AIC"], "AIC", 0))
    if "AIV" in codes:
        vectors = 1 if program.vector_only else 2
        cores += [Core(program.name, codes["AIV"], "AIV", sub) for sub in range(vectors)]
    cube = [core for core in cores if core.kind == "AIC"]
    for core in cores:
        core.peers = [other for other in cores if other.kind == "AIV"] if core.kind == "AIC" else cube
    if board is not None:
        for core in cores:
            core.tracker = Tracker(board, core.name, program.name)
        for core in cores:
            assert core.tracker is not None
            core.tracker.peers = [peer.tracker for peer in core.peers if peer.tracker is not None]
        twins = [core.tracker for core in cores if core.kind == "AIV" and core.tracker is not None]
        if len(twins) == 2:
            twins[0].twin, twins[1].twin = twins[1], twins[0]
    return cores


def core_arguments(
    program: Program, core: str, workspace: View, lock: View, values: list[Any], grid: tuple[int, int, int]
) -> list[Any]:
    """The arguments of a device function: hidden ones, the kernel's, the grid."""
    function = program.functions[core]
    kinds = function.arg_kinds
    hidden: dict[str, Any] = {"ffts_base_address": 0, "workspace": workspace, "sync_block_lock": lock}
    visible = [*values, *grid]
    kernel = [kind for kind in kinds if kind not in hidden]
    if len(kernel) != len(visible):
        raise LaunchError(
            f"{program.name}: the compiled function takes {len(kernel)} arguments with the grid, "
            f"the launch has {len(visible)}"
        )
    rest = iter(visible)
    return [hidden[kind] if kind in hidden else next(rest) for kind in kinds]


def run_values(program: Program, values: list[Any], grid: tuple[int, int, int], state: State) -> dict[str, Any]:
    """Execute every program of the grid, core by core as the hardware would hand them out.

    Returns:
        With hazards: `instructions`, how many the pipes executed; `repeated_stores`, how often
        both vector cores stored the same, by line.
    """
    blocks = grid[0] * grid[1] * grid[2]
    # The compiled program finds its slice of the workspace by its block number.
    size = max(program.workspace_bytes, 0) * blocks
    schedule = str(state.options.get("schedule", "cube-first"))
    workspace = Memory("workspace", "gm", max(size, 1))
    lock = Memory("sync lock", "gm", 1024)
    workspace_view = View(workspace, "i8", 0, (len(workspace.data),), (1,))
    lock_view = View(lock, "i8", 0, (1024,), (1,))
    board = Board() if state.options.get("hazards") else None
    cores = make_cores(program, board)
    arguments = [core_arguments(program, core.kind, workspace_view, lock_view, values, grid) for core in cores]
    instructions = 0
    with np.errstate(all="ignore"):
        for block in range(blocks):
            for core in cores:
                core.reset()
            if board is not None:
                board.start_block(block, [memory for core in cores for memory in core.memories.values()])
            run_block(cores, arguments, block, blocks, schedule)
            if board is not None:
                instructions += sum(sum(tracker.count) for tracker in board.trackers)
    return {} if board is None else {"instructions": instructions, "repeated_stores": dict(board.repeated)}
