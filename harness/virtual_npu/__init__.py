"""A 910B3 in Python: compiles with the real toolchain, executes the compiled HIVM program."""

from .driver import CORES, KernelRun, Recording, install, run, state
from .errors import (
    CompileError,
    DeadlockError,
    DroppedSyncError,
    HazardError,
    LaunchError,
    LostValueError,
    OutOfBoundsError,
    ToolchainError,
    UninitialisedReadError,
    UnknownOpError,
    VirtualNPUError,
)
from .toolchain import CONTEST_RELEASE, RELEASES, available_releases, find_release

__all__ = [
    "CONTEST_RELEASE",
    "CORES",
    "RELEASES",
    "CompileError",
    "DeadlockError",
    "DroppedSyncError",
    "HazardError",
    "KernelRun",
    "LaunchError",
    "LostValueError",
    "OutOfBoundsError",
    "Recording",
    "ToolchainError",
    "UninitialisedReadError",
    "UnknownOpError",
    "VirtualNPUError",
    "available_releases",
    "find_release",
    "install",
    "run",
    "state",
]
