"""What a submission is compared with: the textbook kernels, the vendor's operator, and plain
fp32 attention on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

NAMES = ("textbook", "vendor", "reference")
Call = Callable[[Mapping[str, torch.Tensor]], Any]


def baseline(
    name: str,
    suite: str,
    causal: bool,
    sm_scale: float,
    kind: str = "virtual",
    options: Mapping[str, Any] | None = None,
) -> Call:
    """A call on inputs by name (q, k, v, and dout, out, lse in the backward suite).

    Args:
        name: "textbook"; "vendor", the operator of an accelerator's own library; "reference",
            plain torch in fp32.
        suite: "forward" or "backward".
        causal, sm_scale: as for `attention_fwd`.
        kind: of the device, see `devices.KINDS`.
        options: tile sizes and so on, of `textbook_fwd`.

    Returns:
        The call. Of "vendor" it returns what the operator does; `outputs` makes out, lse or
        dq, dk, dv of it.

    Raises:
        ValueError: another name, or a device without a vendor's operator.
    """
    if name == "textbook":
        return _textbook(suite, causal, sm_scale, options or {})
    if name == "reference":
        return _reference(suite, causal, sm_scale)
    if name != "vendor":
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    if kind not in VENDORS:
        raise ValueError(f"kind must be one of {', '.join(VENDORS)} for the vendor's operator, got {kind!r}")
    return VENDORS[kind](suite, causal, sm_scale)


def _textbook(suite: str, causal: bool, sm_scale: float, options: Mapping[str, Any]) -> Call:
    from .textbook import textbook_bwd, textbook_fwd

    if suite == "forward":
        return lambda x: textbook_fwd(x["q"], x["k"], x["v"], causal, sm_scale, **options)
    return lambda x: textbook_bwd(x["dout"], x["q"], x["k"], x["v"], x["out"], x["lse"], causal, sm_scale)


def _reference(suite: str, causal: bool, sm_scale: float) -> Call:
    """fp32 attention in plain torch, for values only: it keeps whole score matrices."""

    def probabilities(x: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        scores = x["q"].float() @ x["k"].float().transpose(-1, -2) * sm_scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(scores, -1)
        return torch.exp(scores - lse.unsqueeze(-1)), lse

    def forward(x: Mapping[str, torch.Tensor]) -> Any:
        p, lse = probabilities(x)
        return (p @ x["v"].float()).to(x["q"].dtype), lse

    def backward(x: Mapping[str, torch.Tensor]) -> Any:
        p, _ = probabilities(x)
        dout = x["dout"].float()
        delta = (dout * (p @ x["v"].float())).sum(-1, keepdim=True)
        ds = p * (dout @ x["v"].float().transpose(-1, -2) - delta) * sm_scale
        grads = ds @ x["k"].float(), ds.transpose(-1, -2) @ x["q"].float(), p.transpose(-1, -2) @ dout
        return tuple(grad.to(x["q"].dtype) for grad in grads)

    return forward if suite == "forward" else backward


COMPRESSED_MASK = 2048  # rows and columns of the mask that sparse_mode 2 wants, whatever N is
LEFT_UP_CAUSAL = 2  # sparse_mode: row i sees keys 0 to i; without atten_mask it would be ignored


def npu_options(causal: bool) -> dict[str, Any]:
    """Options that npu_fusion_attention and its gradient share, but for the name of the scale
    (whose default is 1). In atten_mask True means masked out. To be made before a timed call."""
    if not causal:
        return {"atten_mask": None, "sparse_mode": 0}
    mask = torch.ones(COMPRESSED_MASK, COMPRESSED_MASK, dtype=torch.bool).triu_(1)
    return {"atten_mask": mask.to("npu"), "sparse_mode": LEFT_UP_CAUSAL}


def _npu(suite: str, causal: bool, sm_scale: float) -> Call:
    """torch_npu.npu_fusion_attention and its gradient."""
    import torch_npu

    options = npu_options(causal)

    def forward(x: Mapping[str, torch.Tensor]) -> Any:
        return torch_npu.npu_fusion_attention(
            x["q"], x["k"], x["v"], x["q"].shape[1], "BNSD", scale=sm_scale, **options
        )

    if suite == "forward":
        return forward
    kept: dict[int, Any] = {}

    def backward(x: Mapping[str, torch.Tensor]) -> Any:
        # The forward runs in the first warm-up only: its softmax statistics serve every repeat.
        # Those of heads whose inputs change between repeats are then stale, which costs no time.
        if id(x["q"]) not in kept:
            kept.clear()
            kept[id(x["q"])] = forward(x)
        out, softmax_max, softmax_sum = kept[id(x["q"])][:3]
        return torch_npu.npu_fusion_attention_grad(
            x["q"],
            x["k"],
            x["v"],
            x["dout"],
            x["q"].shape[1],
            "BNSD",
            softmax_max=softmax_max,
            softmax_sum=softmax_sum,
            attention_in=out,
            scale_value=sm_scale,
            **options,
        )

    return backward


def _npu_outputs(suite: str, returned: Any) -> tuple[torch.Tensor, ...]:
    if suite == "backward":
        return tuple(returned[:3])
    out, softmax_max, softmax_sum = returned[:3]  # the statistics are [z, h, n, 8], eight times the same
    return out, softmax_max[..., 0] + softmax_sum[..., 0].log()


def _cuda(suite: str, causal: bool, sm_scale: float) -> Call:
    """torch's scaled_dot_product_attention on its flash kernels, and its gradient."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                x["q"], x["k"], x["v"], is_causal=causal, scale=sm_scale
            )

    if suite == "forward":
        return forward
    kept: dict[int, Any] = {}

    def backward(x: Mapping[str, torch.Tensor]) -> Any:
        if id(x["q"]) not in kept:  # as on an NPU, in the first warm-up only
            kept.clear()
            # Copies: a timed call's inputs change between repeats, which autograd would refuse.
            leaves = {name: x[name].detach().clone().requires_grad_() for name in ("q", "k", "v")}
            kept[id(x["q"])] = forward(leaves), tuple(leaves.values())
        out, leaves = kept[id(x["q"])]
        return torch.autograd.grad(out, leaves, x["dout"], retain_graph=True)

    return backward


def _cuda_outputs(suite: str, returned: Any) -> tuple[torch.Tensor, ...]:
    """Of the forward out only: this operator gives no lse."""
    return (returned,) if suite == "forward" else tuple(returned)


# By kind of device: the vendor's call, and what makes out, lse or dq, dk, dv of what it returns.
VENDORS: dict[str, Callable[[str, bool, float], Call]] = {"npu": _npu, "cuda": _cuda}
OUTPUTS: dict[str, Callable[[str, Any], tuple[torch.Tensor, ...]]] = {
    "npu": _npu_outputs,
    "cuda": _cuda_outputs,
}


def outputs(name: str, suite: str, kind: str, returned: Any) -> Any:
    """out and lse, or dq, dk and dv, of what a baseline's call returned."""
    return OUTPUTS[kind](suite, returned) if name == "vendor" else returned
