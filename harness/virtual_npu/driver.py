"""A Triton driver whose device is the virtual NPU.

`install()` makes `kernel[grid](...)` with CPU tensors compile through the real toolchain
and run on the model. It replaces two things inside Triton, both needed only because CANN
is absent: the active driver, and the class that the A2/A3 stage asks for the chip's name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import toolchain
from .errors import CompileError, LaunchError

CORES = 20  # AI cores of a 910B3: one cube core and two vector cores each (hardware.toml)
MAX_GRID = 65535  # triton-ascend refuses more blocks than this


@dataclass
class KernelRun:
    """What one kernel launch did: `cycles` and `ms` are predictions of the model (None in
    values mode), `busy` maps pipe name to busy cycles of the busiest core."""

    name: str
    grid: tuple[int, int, int]
    cycles: float | None = None
    ms: float | None = None
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recording:
    """What ran inside one `run(...)` block, launch by launch."""

    kernels: list[KernelRun] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """Predicted milliseconds of all launches together."""
        return sum(kernel.ms or 0.0 for kernel in self.kernels)

    @property
    def cycles(self) -> float:
        """Predicted cycles of all launches together."""
        return sum(kernel.cycles or 0.0 for kernel in self.kernels)

    @property
    def notes(self) -> list[str]:
        """What the launches say beside values and times (lost time), each once."""
        return list(
            dict.fromkeys(
                f"{kernel.name}: {text}" for kernel in self.kernels for text in kernel.report.get("notes", ())
            )
        )

    @property
    def cube_utilisation(self) -> float | None:
        """Ideal multiply-accumulate cycles over all cycles of the busiest core, 0 to 1."""
        if not self.cycles:
            return None
        return sum(kernel.report.get("mac_cycles", 0.0) for kernel in self.kernels) / self.cycles


@dataclass
class State:
    """Settings of the device; `run` changes them for a block."""

    release: toolchain.Release
    mode: str = "values"
    cores: int = CORES
    recording: Recording | None = None
    options: dict[str, Any] = field(default_factory=dict)


_state: State | None = None
MODES = ("values", "timing")


def state() -> State:
    """The current settings (installs the device on first use)."""
    if _state is None:
        install()
    assert _state is not None
    return _state


class _ChipName:
    """Answers what `NPUUtils` would ask CANN during compilation."""

    def get_arch(self) -> str:
        return toolchain.ARCH


class _Utils:
    def load_binary(self, name: str, kernel: Any, shared: int, device: int) -> tuple[Any, Any, int, int]:
        from .program import load_program

        text = kernel.decode() if isinstance(kernel, bytes) else kernel
        program = load_program(name.split()[0], text)
        return program, program, 0, 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        cores = state().cores
        return {"max_shared_mem": 1, "num_aicore": cores, "num_vectorcore": 2 * cores}

    def get_aicore_num(self) -> int:
        return state().cores

    def get_aivector_core_num(self) -> int:
        return 2 * state().cores


class _Launcher:
    """Called by Triton with the launch; hands the arguments that the compiled function
    takes to the model."""

    def __init__(self, src: Any, metadata: Any) -> None:
        names = src.fn.arg_names
        constants = {names.index(key) if isinstance(key, str) else key for key in src.constants}
        constexprs = {param.num for param in src.fn.params if param.is_constexpr}
        passed = [i for i in range(len(names)) if i not in constexprs]
        types = {names.index(key) if isinstance(key, str) else key: ty for key, ty in src.signature.items()}
        self.arguments = [
            (position, names[index], types[index]) for position, index in enumerate(passed) if index not in constants
        ]

    def __call__(self, *args: Any) -> None:
        from .launch import launch

        grid_x, grid_y, grid_z, _stream, program, _metadata, _launch_metadata, _enter, _exit = args[:9]
        values = args[9:]
        grid = (int(grid_x), int(grid_y), int(grid_z))
        if min(grid) < 1 or grid[0] * grid[1] * grid[2] > MAX_GRID:
            raise LaunchError(f"{program.name}: grid {grid} must have 1 to {MAX_GRID} blocks")
        arguments = []
        for position, name, type_ in self.arguments:
            value = values[position]
            if type_.startswith("*"):
                if not isinstance(value, torch.Tensor):
                    raise LaunchError(f"{program.name}: argument {name} must be a tensor, got {type(value).__name__}")
                if value.device.type != "cpu":
                    raise LaunchError(f"{program.name}: argument {name} must be a CPU tensor, got {value.device}")
            arguments.append((name, type_, value))
        current = state()
        run = launch(program, arguments, grid, current)
        if current.recording is not None:
            current.recording.kernels.append(run)


class VirtualDriver:
    """What Triton asks of a driver."""

    launcher_cls = _Launcher

    def __init__(self) -> None:
        self.utils = _Utils()

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", toolchain.ARCH, 0)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device: one number for each compiler release.
        return toolchain.RELEASES.index(state().release.version)

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _describe(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Kernel name, constexpr values (the tile) and tensor shapes of a launch."""
    try:
        bound = inspect.signature(fn.fn).bind_partial(
            *args, **{key: value for key, value in kwargs.items() if key in fn.arg_names}
        )
    except TypeError:
        return fn.__name__
    constexprs = {param.name for param in fn.params if param.is_constexpr}
    tile = ", ".join(f"{key}={value}" for key, value in bound.arguments.items() if key in constexprs)
    shapes = ", ".join(
        f"{key}{list(value.shape)}" for key, value in bound.arguments.items() if isinstance(value, torch.Tensor)
    )
    return f"kernel {fn.__name__} with {shapes or 'no tensors'}; {tile or 'no constexprs'}"


def _report_compile_errors(jit_function: Any) -> None:
    """Let the compiler's own message reach the caller, with kernel, shape and tile before it."""
    from triton.compiler.errors import MLIRCompilationError

    original = jit_function.run
    if getattr(original, "virtual_npu", False):
        return

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        try:
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        except MLIRCompilationError as error:
            message = toolchain.compiler_message(str(error))
            where = _describe(self, args, kwargs)
            raise CompileError(f"{where}: bishengir {state().release.version} says:\n{message}") from None

    run.virtual_npu = True  # type: ignore[attr-defined]
    jit_function.run = run


def install(release: str = toolchain.CONTEST_RELEASE) -> None:
    """Make the virtual NPU Triton's active device in this process. Calling it again is
    free and keeps the settings.

    Raises:
        ToolchainError: the compiler is not installed.
    """
    global _state
    if _state is not None:
        return
    found = toolchain.find_release(release)
    toolchain.use(found)
    from triton.backends import backends
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    # Triton loads its backends as modules of their own, so the name to replace is the one
    # in the globals of the stage functions.
    backends["ascend"].compiler.add_stages.__globals__["NPUUtils"] = _ChipName
    _report_compile_errors(JITFunction)
    driver.set_active(VirtualDriver())
    _state = State(found)


@contextlib.contextmanager
def run(
    mode: str = "values",
    *,
    release: str | None = None,
    cores: int | None = None,
    **options: Any,
) -> Iterator[Recording]:
    """Settings for the launches of a block, and a record of them.

    Args:
        mode: "values" computes results; "timing" predicts time and touches no data.
        release: bishengir release, "1.1.0" or "1.2.0"; default as before.
        cores: number of AI cores, 1 to 20 on the chip; default as before.
        options: for the machine (`hazards=True`, `schedule=...`), see `launch`.

    Raises:
        ValueError: an unknown mode or release, or cores below 1.
    """
    global _state
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if cores is not None and cores < 1:
        raise ValueError(f"cores must be at least 1, got {cores}")
    before = state()
    found = toolchain.find_release(release) if release else before.release
    recording = Recording()
    _state = State(found, mode, cores or before.cores, recording, options)
    toolchain.use(found)
    try:
        yield recording
    finally:
        _state = before
        toolchain.use(before.release)
