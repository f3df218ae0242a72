"""Judges the outputs of one call, in a process that never imports the submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .configs import Case, input_rule
from .measures import Measures, fault, measure, merge
from .reference import reference_bwd, reference_fwd, same_precision_bwd, same_precision_fwd
from .results import Status

OUTPUTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Verdict:
    """Status and message of one call, with the errors where they could be computed."""

    status: Status
    message: str = ""
    measures: Measures | None = None


def expected(case: Case, z: int, h: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each output for z batches and h heads."""
    full = (z, h, case.n, case.d)
    return {
        name: ((full[:3], torch.float32) if name == "lse" else (full, case.torch_dtype)) for name in OUTPUTS[case.suite]
    }


def form_fault(case: Case, z: int, h: int, described: object) -> Verdict | None:
    """Whether what a call returned has the right form.

    Args:
        case: the configuration.
        z, h: batches and heads of the call.
        described: one [shape, dtype name] for each returned value, or [None, type name] for
            what is not a tensor, as the worker reports it.

    Returns:
        A verdict "wrong shape" or "wrong dtype", or None when the form is right.
    """
    wanted = expected(case, z, h)
    names = ", ".join(wanted)
    if not isinstance(described, list) or len(described) != len(wanted):
        got = f"{len(described)} values" if isinstance(described, list) else str(described)
        return Verdict(Status.WRONG_SHAPE, f"returned {got}, expected ({names})")
    pairs = list(zip(wanted.items(), described, strict=True))
    for (name, (shape, _)), (got_shape, _) in pairs:
        if got_shape is not None and tuple(got_shape) != shape:
            return Verdict(Status.WRONG_SHAPE, f"{name} has shape {list(got_shape)}, expected {list(shape)}")
    for (name, (_, dtype)), (got_shape, got_dtype) in pairs:
        if got_shape is None:
            return Verdict(Status.WRONG_DTYPE, f"{name} is a {got_dtype}, expected a tensor of {dtype}")
        if got_dtype != str(dtype):
            return Verdict(Status.WRONG_DTYPE, f"{name} has dtype {got_dtype}, expected {dtype}")
    return None


def judge(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    inputs_after: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
) -> Verdict:
    """Compare outputs of the right form with the reference.

    Args:
        case: the configuration.
        inputs: q, k, v, and in the backward suite dout, out [z, h, n, d] and lse [z, h, n], as
            they were made.
        inputs_after: the same tensors as the submission left them.
        outputs: out and lse, or dq, dk and dv.
    """
    rule = input_rule()
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    references: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]
    if case.suite == "forward":
        out, lse = reference_fwd(q, k, v, case.causal, rule.sm_scale)
        references = {"out": out, "lse": lse}
        plain = {"out": same_precision_fwd(q, k, v, case.causal, rule.sm_scale)}
    else:
        names = OUTPUTS["backward"]
        grads = reference_bwd(inputs["dout"], q, k, v, case.causal, rule.sm_scale, out=inputs["out"])
        references = dict(zip(names, grads, strict=True))
        same = same_precision_bwd(inputs["dout"], q, k, v, case.causal, rule.sm_scale)
        plain = dict(zip(names, same, strict=True))
    measured = {name: measure(outputs[name], references[name], plain.get(name)) for name in references}
    together = merge([part for name, part in measured.items() if name != "lse"])
    faults = {name: fault(name, part, case.torch_dtype, case.n) for name, part in measured.items()}
    for name, part in measured.items():
        if not part.finite:
            return Verdict(Status.NON_FINITE, str(faults[name]), together)
    wrong = [text for text in faults.values() if text is not None]
    if wrong:
        return Verdict(Status.NUMERICAL, "; ".join(wrong), together)
    changed = [name for name, before in inputs.items() if not torch.equal(before, inputs_after[name])]
    if changed:
        return Verdict(Status.NUMERICAL, f"input overwritten: {', '.join(changed)}", together)
    return Verdict(Status.PASSED, measures=together)
