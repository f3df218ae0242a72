"""Errors of the virtual NPU. Each message names the kernel, the op and the place."""

from __future__ import annotations


class VirtualNPUError(Exception):
    """Base of everything that the virtual NPU reports about a kernel."""


class ToolchainError(VirtualNPUError):
    """The compiler is not installed, or not usable on this machine."""


class CompileError(VirtualNPUError):
    """The real compiler refused the kernel; the message is the compiler's own."""


class UnknownOpError(VirtualNPUError):
    """An op or an attribute of the compiled program that the model does not know."""


class OutOfBoundsError(VirtualNPUError):
    """An access outside of the tensor's storage or of an on-chip memory."""


class TilePitchError(VirtualNPUError):
    """The matrix unit would load a slice of an L1 tile with the pitch of the slice, not of the tile."""


class UninitialisedReadError(VirtualNPUError):
    """Bytes were read that nobody wrote."""


class HazardError(VirtualNPUError):
    """A synchronisation fault: a race, a flag left over, too many outstanding sets."""


class LostValueError(HazardError):
    """Bytes of an on-chip buffer were read after another buffer had taken them over."""


class DeadlockError(HazardError):
    """No core can go on: each waits for a flag that nobody will set."""


class LaunchError(VirtualNPUError):
    """A launch that a 910B3 would refuse (grid, argument type, device)."""


class DroppedSyncError(HazardError):
    """The compiler left out a synchronisation that the kernel asked for."""
