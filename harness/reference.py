"""Reference attention in PyTorch, by blocks of rows, so that memory stays bounded.

`reference_fwd` and `reference_bwd` compute in fp64 (or fp32) from the inputs as they are;
`same_precision_fwd` and `same_precision_bwd` are what a plain PyTorch program in the
inputs' own dtype gives, and tell how much error that precision costs by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

BLOCK_ELEMENTS = 1 << 22  # scores held at once: 32 MB in fp64


def _check(named: dict[str, torch.Tensor], sm_scale: float | None) -> float:
    shape = named["q"].shape
    if len(shape) != 4:
        raise ValueError(f"q must be [Z, H, N, D], got shape {list(shape)}")
    for name, tensor in named.items():
        wanted = shape[:3] if name == "lse" else shape
        if tensor.shape != wanted:
            raise ValueError(f"{name} must have shape {list(wanted)}, got {list(tensor.shape)}")
    return 1.0 / math.sqrt(shape[-1]) if sm_scale is None else float(sm_scale)


def _row_blocks(heads: int, n: int) -> Iterator[tuple[int, slice]]:
    rows = max(1, min(n, BLOCK_ELEMENTS // n))
    for head in range(heads):
        for start in range(0, n, rows):
            yield head, slice(start, min(start + rows, n))


def _heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[Z, H, ...] as [Z*H, ...]."""
    return [tensor.reshape(-1, *tensor.shape[2:]) for tensor in tensors]


def _keys(rows: slice, n: int, causal: bool) -> int:
    """How many keys a block of rows sees at most."""
    return rows.stop if causal else n


def _mask(scores: torch.Tensor, rows: slice, causal: bool) -> torch.Tensor:
    """Minus infinity above the diagonal. scores: [rows, keys]."""
    if not causal:
        return scores
    row = torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(1)
    return scores.masked_fill_(torch.arange(scores.shape[1], device=scores.device) > row, -torch.inf)


def reference_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ sm_scale) v and the log of the softmax denominators.

    Args:
        q, k, v: [Z, H, N, D], any floating dtype, on one device.
        causal: row i sees keys 0 to i.
        sm_scale: factor of the scores; default 1/sqrt(D).
        dtype: of the computation and of the results.

    Returns:
        out [Z, H, N, D] and lse [Z, H, N] (natural log), both in `dtype`.

    Raises:
        ValueError: shapes that do not fit together.
    """
    sm_scale = _check({"q": q, "k": k, "v": v}, sm_scale)
    n = q.shape[2]
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    b_q, b_k, b_v = _heads(q, k, v)
    b_out, b_lse = _heads(out, lse)
    for head, rows in _row_blocks(len(b_q), n):
        keys = _keys(rows, n, causal)
        scores = (b_q[head, rows].to(dtype) * sm_scale) @ b_k[head, :keys].to(dtype).T  # [rows, keys]
        _mask(scores, rows, causal)
        b_lse[head, rows] = torch.logsumexp(scores, dim=1)
        probabilities = scores.sub_(b_lse[head, rows].unsqueeze(1)).exp_()
        b_out[head, rows] = probabilities @ b_v[head, :keys].to(dtype)
    return out, lse


def reference_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of attention for the output gradient `dout`.

    Args:
        dout, q, k, v: [Z, H, N, D], any floating dtype, on one device.
        causal, sm_scale, dtype: as for `reference_fwd`.
        out: the forward's output as the backward gets it, [Z, H, N, D], rounded to the inputs'
            dtype; the gradients are exact for that. Default: the exact output, which gives what
            autograd gives in fp64.

    Returns:
        dq, dk, dv: [Z, H, N, D] in `dtype`.

    Raises:
        ValueError: shapes that do not fit together.
    """
    given = {} if out is None else {"out": out}
    sm_scale = _check({"q": q, "k": k, "v": v, "dout": dout, **given}, sm_scale)
    n = q.shape[2]
    exact, lse = reference_fwd(q, k, v, causal, sm_scale, dtype)
    out = exact if out is None else out
    grads = [torch.zeros(q.shape, dtype=dtype, device=q.device) for _ in range(3)]
    b_dq, b_dk, b_dv = _heads(*grads)
    b_dout, b_q, b_k, b_v, b_out, b_lse = _heads(dout, q, k, v, out, lse)
    for head, rows in _row_blocks(len(b_q), n):
        keys = _keys(rows, n, causal)
        q_rows, dout_rows = b_q[head, rows].to(dtype), b_dout[head, rows].to(dtype)
        k_rows, v_rows = b_k[head, :keys].to(dtype), b_v[head, :keys].to(dtype)
        scores = _mask((q_rows * sm_scale) @ k_rows.T, rows, causal)
        probabilities = scores.sub_(b_lse[head, rows].unsqueeze(1)).exp_()  # [rows, keys]
        b_dv[head, :keys] += probabilities.T @ dout_rows
        delta = (dout_rows * b_out[head, rows].to(dtype)).sum(1, keepdim=True)
        d_scores = (dout_rows @ v_rows.T).sub_(delta).mul_(probabilities).mul_(sm_scale)
        b_dq[head, rows] = d_scores @ k_rows
        b_dk[head, :keys] += d_scores.T @ q_rows
    return grads[0], grads[1], grads[2]


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A matrix product in the operands' dtype: fp32 inside, rounded once, as every backend does."""
    return (a.float() @ b.float()).to(a.dtype)


def same_precision_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, sm_scale: float | None = None
) -> torch.Tensor:
    """Plain PyTorch attention in q's dtype: scores, probabilities and output rounded to it.

    Shapes and errors as for `reference_fwd`; returns out only.
    """
    sm_scale = _check({"q": q, "k": k, "v": v}, sm_scale)
    n = q.shape[2]
    out = torch.empty_like(q)
    b_q, b_k, b_v = _heads(q, k, v)
    (b_out,) = _heads(out)
    for head, rows in _row_blocks(len(b_q), n):
        keys = _keys(rows, n, causal)
        scores = _mask(_dot(b_q[head, rows], b_k[head, :keys].T) * sm_scale, rows, causal)
        b_out[head, rows] = _dot(torch.softmax(scores, dim=1), b_v[head, :keys])
    return out


def same_precision_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by plain PyTorch ops in q's dtype; sums over row blocks in fp32.

    Shapes and errors as for `reference_bwd`.
    """
    sm_scale = _check({"q": q, "k": k, "v": v, "dout": dout}, sm_scale)
    n = q.shape[2]
    grads = [torch.zeros(q.shape, device=q.device) for _ in range(3)]
    b_dq, b_dk, b_dv = _heads(*grads)
    b_dout, b_q, b_k, b_v = _heads(dout, q, k, v)
    for head, rows in _row_blocks(len(b_q), n):
        keys = _keys(rows, n, causal)
        scores = _mask(_dot(b_q[head, rows], b_k[head, :keys].T) * sm_scale, rows, causal)
        probabilities = torch.softmax(scores, dim=1)
        b_dv[head, :keys] += probabilities.T.float() @ b_dout[head, rows].float()
        d_probabilities = _dot(b_dout[head, rows], b_v[head, :keys].T).float()
        weights = probabilities.float()
        delta = (d_probabilities * weights).sum(1, keepdim=True)
        d_scores = ((d_probabilities - delta) * weights).to(q.dtype).float() * sm_scale
        b_dq[head, rows] = d_scores @ b_k[head, :keys].float()
        b_dk[head, :keys] += d_scores.T @ b_q[head, rows].float()
    return grads[0].to(q.dtype), grads[1].to(q.dtype), grads[2].to(q.dtype)
