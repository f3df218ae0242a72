"""Error measures and the rule that passes or fails an output.

The rule, for out, dq, dk and dv against the fp64 reference of the same inputs:

1. every element is finite;
2. every element is within the contest's tolerance, |error| <= t * max(1, |reference|), with
   t = 2^-8 for fp16 below 2048 operations (the rows that a sum runs over), 2^-7 from there
   on, and 2^-7 for bf16. Whatever passes this passes allclose(atol=1e-2, rtol=1e-2) too.
   For gradients, where plain PyTorch in the same precision is itself off by more than t/2 on
   the same inputs, twice its largest error takes the place of t (bf16, whose terms are large;
   the rule of the flash-attention tests);
3. the relative RMS error of each block of 64 rows of each head, |error| / |reference| in the
   2-norm, is at most 2^-8 for fp16 and 2^-6 for bf16. Attention outputs are small (a zero
   output nearly passes 2), and a wrong tile hides in an average over all heads; this catches
   both. A right kernel has a tenth to a fifth of it.

lse is checked by 1 and by |error| <= 2^-8 * max(1, |reference|).

How the largest error compares with that of a plain PyTorch run in the same precision is
reported beside it (`vs_torch`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK_ROWS = 64
GRADIENTS = ("dq", "dk", "dv")
LSE_TOLERANCE = 2.0**-8
BLOCK_TOLERANCE = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6}


@dataclass(frozen=True)
class Measures:
    """How far an output is from its reference. Every number is NaN when not finite.

    Attributes:
        finite: no NaN and no infinity in the output.
        elements: how many were compared.
        max_abs: largest absolute error.
        max_scaled: largest |error| / max(1, |reference|).
        rms: root of the mean squared error.
        worst_block: largest relative RMS error of a block of 64 rows of one head; None for lse.
        vs_torch: max_abs over that of a same-precision PyTorch run; None when not measured.
        torch_scaled: max_scaled of that run; None when not measured.
    """

    finite: bool
    elements: int
    max_abs: float
    max_scaled: float
    rms: float
    worst_block: float | None = None
    vs_torch: float | None = None
    torch_scaled: float | None = None


def tolerance(dtype: torch.dtype, operations: int) -> float:
    """The contest's tolerance.

    Args:
        dtype: torch.float16 or torch.bfloat16.
        operations: how many products a sum runs over; for attention the number of rows.

    Raises:
        ValueError: another dtype, or fewer than one operation.
    """
    if operations < 1:
        raise ValueError(f"operations must be at least 1, got {operations}")
    if dtype == torch.float16:
        return 2.0**-8 if operations < 2048 else 2.0**-7
    if dtype == torch.bfloat16:
        return 2.0**-7
    raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype}")


def measure(actual: torch.Tensor, reference: torch.Tensor, same_precision: torch.Tensor | None = None) -> Measures:
    """Compare an output with its reference.

    Args:
        actual: [Z, H, N, D], or [Z, H, N] for lse; any floating dtype.
        reference: same shape, fp32 or fp64.
        same_precision: what plain PyTorch gives in `actual`'s dtype, same shape, or None.

    Raises:
        ValueError: shapes differ, or the reference is not finite.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"actual must have the reference's shape {list(reference.shape)}, got {list(actual.shape)}")
    if not bool(torch.isfinite(reference).all()):
        raise ValueError("reference must be finite")
    if not bool(torch.isfinite(actual).all()):
        nan = math.nan
        return Measures(False, actual.numel(), nan, nan, nan)
    reference = reference.double()
    error = (actual.double() - reference).abs_()
    largest = reference.abs().clamp_min_(1.0)
    max_abs = float(error.max())
    worst_block = None
    if actual.dim() == 4:
        worst_block = float((_block_norms(error) / _block_norms(reference).clamp_min(1e-300)).max())
    vs_torch = torch_scaled = None
    if same_precision is not None:
        plain = (same_precision.double() - reference).abs_()
        plain_max = float(plain.max())
        vs_torch = max_abs / plain_max if plain_max > 0 else math.inf if max_abs > 0 else 1.0
        torch_scaled = float((plain / largest).max())
    return Measures(
        finite=True,
        elements=actual.numel(),
        max_abs=max_abs,
        max_scaled=float((error / largest).max()),
        rms=float(error.square().mean().sqrt()),
        worst_block=worst_block,
        vs_torch=vs_torch,
        torch_scaled=torch_scaled,
    )


def _block_norms(tensor: torch.Tensor) -> torch.Tensor:
    """2-norm of each block of BLOCK_ROWS rows of each head; a short last block joins the one before."""
    heads = tensor.reshape(-1, *tensor.shape[2:])
    rows = heads.square().sum(2)  # [heads, N]
    blocks = max(1, rows.shape[1] // BLOCK_ROWS)
    whole = rows[:, : (blocks - 1) * BLOCK_ROWS].reshape(len(rows), blocks - 1, BLOCK_ROWS).sum(2)
    last = rows[:, (blocks - 1) * BLOCK_ROWS :].sum(1, keepdim=True)
    return torch.cat([whole, last], dim=1).sqrt_()


def merge(parts: list[Measures]) -> Measures:
    """The measures of several parts of one output (chunks of heads, or dq, dk and dv) taken together.

    Raises:
        ValueError: no parts.
    """
    if not parts:
        raise ValueError("parts must not be empty")
    elements = sum(part.elements for part in parts)
    blocks = [part.worst_block for part in parts if part.worst_block is not None]
    against = [part.vs_torch for part in parts if part.vs_torch is not None]
    plain = [part.torch_scaled for part in parts if part.torch_scaled is not None]
    return Measures(
        finite=all(part.finite for part in parts),
        elements=elements,
        max_abs=_max([part.max_abs for part in parts]),
        max_scaled=_max([part.max_scaled for part in parts]),
        rms=math.sqrt(sum(part.rms**2 * part.elements for part in parts) / elements),
        worst_block=_max(blocks) if blocks else None,
        vs_torch=_max(against) if against else None,
        torch_scaled=_max(plain) if plain else None,
    )


def _max(values: list[float]) -> float:
    """The largest; NaN when one is NaN (the built-in max may drop it)."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def fault(name: str, measures: Measures, dtype: torch.dtype, operations: int) -> str | None:
    """Why an output fails, or None when it passes. A comparison with NaN never passes.

    Args:
        name: "lse", or the name of a gradient or output, for the message.
        measures: of that output.
        dtype: of q, k and v.
        operations: as for `tolerance`.
    """
    if not measures.finite:
        return f"{name} has NaN or infinite elements"
    limit = LSE_TOLERANCE if name == "lse" else tolerance(dtype, operations)
    if name in GRADIENTS and measures.torch_scaled is not None and 2 * measures.torch_scaled > limit:
        limit = 2 * measures.torch_scaled
    if not measures.max_scaled <= limit:
        return f"{name}: an element is off by {measures.max_scaled:.3g} of max(1, |reference|), allowed {limit:.3g}"
    if name == "lse":
        return None
    block_limit = BLOCK_TOLERANCE[dtype]
    if measures.worst_block is None or not measures.worst_block <= block_limit:
        got = "nothing" if measures.worst_block is None else f"{measures.worst_block:.3g}"
        return f"{name}: relative RMS error of a block of {BLOCK_ROWS} rows is {got}, allowed {block_limit:.3g}"
    return None
