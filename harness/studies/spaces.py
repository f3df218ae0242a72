"""What the tuner may change: the kernels' settings, their neighbours, and what cannot fit on chip.

A kernel becomes searchable by one more entry in SPACES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from ..configs import input_rule
from ..virtual_npu.costs import default_constants
from ..virtual_npu.driver import CORES, state

Settings = dict[str, int]
Inputs = dict[str, torch.Tensor]
SCRATCH_LIMIT = 128 << 20  # bytes of global memory on all cores: well inside L2


@dataclass(frozen=True)
class Shape:
    """What is tuned: [z, h, n, d], mask, dtype."""

    z: int
    h: int
    n: int
    d: int
    causal: bool
    dtype: str = "fp16"

    def __str__(self) -> str:
        return f"{self.z},{self.h},{self.n},{self.d} {'causal' if self.causal else 'full'} {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp16": torch.float16, "bf16": torch.bfloat16}[self.dtype]

    def inputs(self, heads: int | None = None) -> Inputs:
        """q, k, v, out, dout and lse whose contents do not matter; `heads` replaces z and h."""
        z, h = (self.z, self.h) if heads is None else (1, heads)
        names = ("q", "k", "v", "out", "dout")
        found = {name: torch.empty(z, h, self.n, self.d, dtype=self.torch_dtype) for name in names}
        return found | {"lse": torch.empty(z, h, self.n)}


@dataclass(frozen=True)
class Space:
    """One kernel's settings.

    Attributes:
        shipped: the settings that a shape has now; None where the kernel does not take it.
        choices: groups of settings that change together, each with its possible values.
        needs: bytes that settings surely need, by the name of a memory (a key of [memory] in
            hardware.toml without "_bytes", or "scratch"); ValueError if they are impossible.
        call: the kernel's results with the settings for inputs as `Shape.inputs` gives them, on
            the cores of the run.
        scratch: bytes of scratch, on all cores, that a shape may have.
    """

    shipped: Callable[[Shape], Settings | None]
    choices: Callable[[Shape], list[list[Settings]]]
    needs: Callable[[Shape, Settings], dict[str, int]]
    call: Callable[[Shape, Settings, Inputs], Sequence[torch.Tensor]]
    scratch: Callable[[Shape], int] = lambda shape: SCRATCH_LIMIT


def _pipeline_shipped(shape: Shape) -> Settings | None:
    import forward

    found = forward.get_path(shape.z, shape.h, shape.n, shape.d, shape.causal, input_rule().sm_scale, CORES)
    return forward._pipeline_settings(shape.n, shape.d, shape.causal) if found == "pipeline" else None


def _pipeline_choices(shape: Shape) -> list[list[Settings]]:
    tiles = [
        {"HALVES": halves, "BH": bh, "BN": bn, "F": f}
        for halves, bh in ((1, 128), (2, 128), (4, 64))
        for bn in (128, 256)
        for f in (1, 2, 4)
    ]
    return [
        tiles,
        [{"KG": kg, "R": r} for kg in (512, 1024, 2048, 4096) for r in ((32, 64) if shape.causal else (4, 8, 16, 32))],
        [{"RO": ro} for ro in (32, 64, 128, 256)],
        [{"RQ": rq} for rq in (64, 128)],
        [{"U": u, "MB": mb} for u in (1, 2) for mb in (0, 1)],
        [{"FOLD": fold} for fold in (0, 1)],
        [{"WP": wp, "KEEP": keep} for wp in (128, 256, 512) for keep in (0, 1)] if shape.causal else [],
    ]


def _pipeline_needs(shape: Shape, s: Settings) -> dict[str, int]:
    import forward

    rows, width, d = s["HALVES"] * s["BH"], s["BN"] * s["F"], shape.d
    step = s["WP"] if shape.causal else width * s["U"]
    if shape.causal and (s["U"] > 1 or (s["F"] > 1 and s["HALVES"] > 1)):
        raise ValueError("the kernel has no such causal form")
    if shape.n % rows or shape.n % (step if shape.causal else s["KG"]) or s["KG"] % step or step % width:
        raise ValueError("does not divide the shape")
    if s["HALVES"] == 1 and (s["F"] != 2 or (shape.causal and s["WP"] != width)):
        raise ValueError("the kernel has no such form")
    if rows % (2 * s["R"] if shape.causal else s["R"]) or rows % s["RO"] or rows % s["RQ"] or rows > 256:
        raise ValueError("does not divide the rows")
    scratch = forward._scratch(s, shape.n, d, shape.causal, shape.torch_dtype, CORES)
    half = s["R"] // 2  # rows of one vector core
    softmax = 4 * half * 2 * s["R"] * 6 if shape.causal else (4 * 2 + 2) * half * s["KG"]
    return {
        "l1": 2 * max(rows * d + width * d, rows * step + width * d if shape.causal else step * (rows + d)),
        "l0c": 4 * max(2 * s["BH"] * s["BN"], rows * d),
        "ub": max(softmax, 4 * s["RO"] // 2 * d),
        "scratch": forward._bytes_of(scratch),
    }


def _pipeline_call(shape: Shape, settings: Settings, inputs: Inputs) -> Sequence[torch.Tensor]:
    import forward

    q, k, v = (inputs[name] for name in "qkv")
    found = forward._forward_pipeline(q, k, v, shape.causal, input_rule().sm_scale, state().cores, settings)
    return tuple(found)


def _general_shipped(shape: Shape) -> Settings | None:
    import forward

    bm, bn = forward.get_tiling(shape.z, shape.h, shape.n, shape.d, shape.causal)
    return {"block_m": bm, "block_n": bn}


def _general_call(shape: Shape, settings: Settings, inputs: Inputs) -> Sequence[torch.Tensor]:
    import forward

    q, k, v = (inputs[name] for name in "qkv")
    return tuple(forward.attention_fwd(q, k, v, shape.causal, input_rule().sm_scale, **settings))


def _backward_shipped(shape: Shape) -> Settings | None:
    import backward

    found = backward.get_path_bwd(shape.z, shape.h, shape.n, shape.d, shape.causal, CORES)
    return dict(backward._PIPELINES[shape.d, shape.causal]) if found == "pipeline" else None


def _backward_choices(shape: Shape) -> list[list[Settings]]:
    # Groups with the body that takes a head at once; without a mask also that of two groups.
    groups = [
        {"KG": kg, "LB": kg, "BT": bt, "UNROLL": unroll}
        for kg, bt in ((128, 64), (128, 128), (256, 64))
        for unroll in ((shape.n // kg,) if shape.causal else (2, shape.n // kg))
    ]
    pieces = [
        {"MI": mi, "KP": kp, "AHEAD": ahead, "SPLIT": split, "MIX": 0}
        for mi in (256, 512)
        for kp in (256, 512)
        for ahead in (0, 1, 2)
        for split in (0, 1)
    ]
    mixed = [{"MI": mi, "KP": mi, "AHEAD": 1, "SPLIT": 0, "MIX": 1} for mi in (128, 256)]
    return [
        [{"RO": ro} for ro in (32, 64, 128)],
        [{"FOLD": fold} for fold in (0, 1)],
        [{"R": r, "RD": rd} for r in (32, 64, 128) for rd in ((32, 64, 128) if shape.causal else (64,))],
        [{"BQ": bq, "DQ": dq} for bq in (128, 256) for dq in (64, 128, 256)],
        pieces + mixed,
        groups,
    ]


def _backward_needs(shape: Shape, s: Settings) -> dict[str, int]:
    import backward

    n, d, kg, kp, mi = shape.n, shape.d, s["KG"], s["KP"], s["MI"]
    if n % kg or n % mi or n % kp or n != 4 * s["KQ"] or s["KQ"] % kg or n % s["BQ"] or d % s["DQ"]:
        raise ValueError("does not divide the shape")
    if mi % s["BT"] or kg % (mi // s["BT"]) or s["LB"] % kg or s["LB"] > mi or kg % s["RO"]:
        raise ValueError("does not divide the piece")
    if mi % (2 * s["R"]) or s["LB"] % (2 * s["R"]) or s["LB"] % s["RD"]:
        raise ValueError("does not divide the rows")
    whole = s["UNROLL"] == n // kg
    if not (whole or (s["UNROLL"] == 2 and not shape.causal and not s["MIX"])):
        raise ValueError("the kernel has no such body")
    if s["MIX"] and ((kp, s["AHEAD"], s["SPLIT"]) != (mi, 1, 0) or s["LB"] != kg):
        raise ValueError("the kernel has no such mixed form")
    if shape.causal and s["BQ"] > s["KQ"]:
        raise ValueError("the kernel has no such causal form")
    count = n // kp  # pieces of a gradient; so many of their tiles lie on chip at once
    if s["MIX"]:
        phases = [2 * (2 * mi * d + mi * kg) + kg * d]
    elif not s["AHEAD"]:
        phases = [mi * d + 2 * kg * d + kp * kg + 2 * kp * d, 2 * kp * kg + min(3, count) * kp * d + kg * d]
    else:
        phases = [
            mi * d + kg * d + min(s["AHEAD"], count) * kp * kg + kp * d,
            min(1 + s["AHEAD"], count) * kp * kg + min(2, count) * kp * d,
        ]
    phases.append(2 * s["BQ"] * s["KQ"] + 4 * s["KQ"] * s["DQ"])
    scores, half = (1 if s["MIX"] else 2) * s["BT"] * kg, 2 if s["SPLIT"] else 1
    with mock.patch.dict(backward._PIPELINES, {(d, shape.causal): s}):
        scratch = backward.pipeline_scratch(n, d, shape.causal, CORES, input_rule().sm_scale)
    return {
        "l1": 2 * max(phases),
        "l0c": 4 * max(scores + (kg * d if s["MIX"] else 0), kg * d // half, s["BQ"] * s["DQ"]),
        "ub": 2 * (s["R"] // 2) * (4 + 2) * kg,  # two chunks: scores in fp32, what leaves in 16 bits
        "scratch": sum(size * (2 if name in ("probs", "ds") else 4) for name, size in scratch.items()),
    }


def _gradients(shape: Shape, inputs: Inputs) -> Sequence[torch.Tensor]:
    import backward

    dout, q, k, v, out, lse = (inputs[name] for name in ("dout", "q", "k", "v", "out", "lse"))
    return tuple(backward.attention_bwd(dout, q, k, v, out, lse, shape.causal, input_rule().sm_scale))


def _backward_call(shape: Shape, settings: Settings, inputs: Inputs) -> Sequence[torch.Tensor]:
    import backward

    with mock.patch.dict(backward._PIPELINES, {(shape.d, shape.causal): settings}):
        return _gradients(shape, inputs)


def _backward_general_shipped(shape: Shape) -> Settings | None:
    import backward

    (m, n), (dq_m, dq_n) = backward.get_tiling_bwd(shape.n, shape.d, shape.causal)
    return {"DKDV_M": m, "DKDV_N": n, "DQ_M": dq_m, "DQ_N": dq_n}


def _backward_general_choices(shape: Shape) -> list[list[Settings]]:
    return [
        [{f"{kernel}_M": m, f"{kernel}_N": n} for m in (32, 64, 128, 256) for n in (32, 64, 128, 256)]
        for kernel in ("DKDV", "DQ")
    ]


def _backward_general_needs(shape: Shape, s: Settings) -> dict[str, int]:
    d, pairs = shape.d, [(s["DKDV_M"], s["DKDV_N"]), (s["DQ_M"], s["DQ_N"])]
    results = (2 * s["DKDV_N"] * d, s["DQ_M"] * d)
    return {
        "l1": max(2 * 2 * d * (m + n) for m, n in pairs),
        "l0c": max(4 * (m * n + result) for (m, n), result in zip(pairs, results, strict=True)),
        "ub": max(4 * (m // 2) * n for m, n in pairs),
    }


def _backward_general_call(shape: Shape, s: Settings, inputs: Inputs) -> Sequence[torch.Tensor]:
    import backward

    width = max(16, 1 << (shape.d - 1).bit_length())
    with (
        mock.patch.dict(backward._TILES_DKDV, {width: (s["DKDV_M"], s["DKDV_N"])}),
        mock.patch.dict(backward._TILES_DQ, {width: (s["DQ_M"], s["DQ_N"])}),
        mock.patch.object(backward, "_PIPELINE_LENGTHS", ()),
    ):
        return _gradients(shape, inputs)


SPACES: dict[str, Space] = {
    "forward pipeline": Space(
        _pipeline_shipped,
        _pipeline_choices,
        _pipeline_needs,
        _pipeline_call,
        lambda shape: SCRATCH_LIMIT if shape.n > 1024 else SCRATCH_LIMIT // 2,
    ),
    "forward general": Space(
        _general_shipped,
        lambda shape: [[{"block_m": m, "block_n": n} for m in (32, 64, 128, 256) for n in (64, 128, 256, 512)]],
        lambda shape, s: {
            "l1": 2 * shape.d * (s["block_m"] + 2 * s["block_n"]),
            "l0c": 4 * s["block_m"] * max(s["block_n"], shape.d),
            "ub": 4 * s["block_m"] // 2 * s["block_n"],
        },
        _general_call,
    ),
    "backward pipeline": Space(_backward_shipped, _backward_choices, _backward_needs, _backward_call),
    "backward general": Space(
        _backward_general_shipped, _backward_general_choices, _backward_general_needs, _backward_general_call
    ),
}


def excess(space: Space, shape: Shape, settings: Settings) -> str:
    """Why settings need not be compiled, "" if they may fit."""
    try:
        needs = space.needs(shape, settings)
    except ValueError as error:
        return str(error)
    memory = default_constants()["memory"]
    for name, size in needs.items():
        limit = space.scratch(shape) if name == "scratch" else memory[f"{name}_bytes"]
        if size > limit:
            return f"{name} needs {size} bytes of {limit}"
    return ""


def variants(space: Space, shape: Shape, settings: Settings, group: list[Settings]) -> list[Settings]:
    """Settings with one group changed that may fit."""
    changed = [settings | change for change in group]
    return [other for other in changed if other != settings and not excess(space, shape, other)]


def neighbours(space: Space, shape: Shape, settings: Settings) -> Iterator[Settings]:
    """Settings with any one group changed that may fit."""
    for group in space.choices(shape):
        yield from variants(space, shape, settings, group)
