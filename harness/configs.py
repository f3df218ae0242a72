"""The contest's configurations, read from configs.toml, and inputs made for them."""

from __future__ import annotations

import hashlib
import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).resolve().with_name("configs.toml")
SUITES = ("forward", "backward")
KINDS = ("correctness", "performance")
BACKWARD_WORK = 4.0  # values of a backward head over those of a forward head
LARGE_ROWS, LARGE_STD = 64, 64.0  # rows whose logits have a deviation beyond what exp holds in fp32
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One row of configs.toml.

    Attributes:
        suite: "forward" or "backward".
        kind: "correctness" or "performance" (checked too before it is timed).
        number: position within the suite, from 1.
        name: short unique name within the suite, as F3, P1 or C2-bf16.
        z, h, n, d: batches, heads, rows, head dimension.
        causal: lower triangular mask.
        dtype: "fp16" or "bf16".
        level: "public" or "inferred".
        baseline_ms: published vendor time in milliseconds, or None.
    """

    suite: str
    kind: str
    number: int
    name: str
    z: int
    h: int
    n: int
    d: int
    causal: bool
    dtype: str
    level: str
    baseline_ms: float | None = None

    @property
    def heads(self) -> int:
        """Batches times heads."""
        return self.z * self.h

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return DTYPES[self.dtype]

    @property
    def flops(self) -> float:
        """Useful floating point operations: forward 4 z h n² d, half when causal; backward 2.5 times that."""
        forward = 4.0 * self.heads * self.n**2 * self.d / (2 if self.causal else 1)
        return forward if self.suite == "forward" else 2.5 * forward

    def __str__(self) -> str:
        causal = "causal" if self.causal else "full"
        return f"{self.suite} {self.name} ({self.z}, {self.h}, {self.n}, {self.d}) {causal} {self.dtype}"


@dataclass(frozen=True)
class InputRule:
    """How inputs are drawn: q, k, v normal_(mean, std), dout normal_(0, dout_std)."""

    mean: float
    std: float
    sm_scale: float
    dout_std: float


@lru_cache
def _document() -> dict[str, Any]:
    with CONFIGS.open("rb") as file:
        return tomllib.load(file)


def input_rule() -> InputRule:
    """The contest's input distribution and softmax scale."""
    return InputRule(**_document()["inputs"])


@lru_cache
def cases(suite: str) -> tuple[Case, ...]:
    """All cases of a suite, correctness first, numbered from 1.

    Raises:
        ValueError: a suite that is not "forward" or "backward".
    """
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    found: list[Case] = []
    for kind in KINDS:
        table = _document()[suite].get(kind)
        if table is None:
            continue
        seen: dict[tuple[int, int, bool], int] = {}
        for index, row in enumerate(table["cases"], start=1):
            name = f"{table['prefix']}{index}"
            if suite == "backward":  # C1 to C6 by shape, with the dtype behind it
                shape = (row["n"], row["d"], row["causal"])
                name = f"{table['prefix']}{seen.setdefault(shape, len(seen) + 1)}-{row['dtype']}"
            found.append(Case(suite=suite, kind=kind, number=len(found) + 1, name=name, level=table["level"], **row))
    return tuple(found)


def select(suite: str, wanted: list[str]) -> list[Case]:
    """The cases of a suite that `wanted` names, by number ("3") or name ("P1", "C2-bf16", and
    "C2" for both dtypes), in the suite's order; all of them when `wanted` is empty.

    Raises:
        ValueError: a suite or case that does not exist.
    """
    available = cases(suite)
    if not wanted:
        return list(available)
    chosen: set[int] = set()
    for word in wanted:
        key = word.lower()
        hits = {
            case.number
            for case in available
            if key in (str(case.number), case.name.lower(), case.name.lower().split("-")[0])
        }
        if not hits:
            names = ", ".join(case.name for case in available)
            raise ValueError(f"case must be 1 to {len(available)} or one of {names} in suite {suite}, got {word!r}")
        chosen |= hits
    return [case for case in available if case.number in chosen]


def seed_for(case: Case, public_seed: int, secret_seed: int, part: int = 0) -> int:
    """A 63-bit seed of a case's inputs. The secret part is drawn for each run and never
    shown to the submission, so that outputs cannot be prepared beforehand."""
    text = f"{public_seed}/{secret_seed}/{case.suite}/{case.name}/{part}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def large_factor(d: int) -> float:
    """Factor on q, a power of two, that gives logits a standard deviation of about LARGE_STD."""
    rule = input_rule()
    return float(2.0 ** round(math.log2(LARGE_STD / (rule.sm_scale * rule.std**2 * math.sqrt(d)))))


def make_inputs(
    case: Case, z: int, h: int, seed: int, large: bool = False, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Inputs of a case for z times h of its heads.

    Args:
        case: the configuration.
        z, h: batches and heads to make.
        seed: see `seed_for`.
        large: multiply the last rows of q in the last head, so that a softmax without a
            running maximum overflows there, as real inputs would make it.
        device: where to make them; each kind of device draws its own numbers from a seed.

    Returns:
        q, k, v, and dout in the backward suite: [z, h, n, d] in the case's dtype, on `device`.

    Raises:
        ValueError: z or h outside of 1 to the case's own.
    """
    for name, value, limit in (("z", z, case.z), ("h", h, case.h)):
        if not 1 <= value <= limit:
            raise ValueError(f"{name} must be 1 to {limit} for {case}, got {value}")
    rule = input_rule()
    generator = torch.Generator(device).manual_seed(seed)
    names = ["q", "k", "v"] + (["dout"] if case.suite == "backward" else [])
    inputs = {}
    for name in names:
        mean, std = (0.0, rule.dout_std) if name == "dout" else (rule.mean, rule.std)
        drawn = torch.empty(z, h, case.n, case.d, device=device).normal_(mean, std, generator=generator)
        if large and name == "q":
            drawn[-1, -1, -LARGE_ROWS:] *= large_factor(case.d)
        inputs[name] = drawn.to(case.torch_dtype)
    return inputs


def work_of_head(case: Case) -> float:
    """Cost of the values of one head, in units of one with n=1024 and d=64, not causal, forward."""
    work = (case.n / 1024) ** 2 * (case.d + 64) / 128 * (0.55 if case.causal else 1.0)
    return work if case.suite == "forward" else BACKWARD_WORK * work


def heads_to_check(case: Case, work: float, most: int = 16) -> tuple[int, int]:
    """How many batches and heads of a case to check with real values.

    Args:
        case: the configuration; its n, d, causal and dtype are always kept.
        work: bound of the cost, see `work_of_head`. One head is the least.
        most: bound of the number of heads.

    Returns:
        (z, h), with two batches where there is room for four heads or more, so that the
        strides of both dimensions matter.
    """
    heads = min(case.heads, max(1, min(most, int(work / work_of_head(case)))))
    h = min(case.h, heads // 2 if case.z > 1 and heads >= 4 else heads)
    return min(case.z, heads // h), h
