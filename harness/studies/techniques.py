"""The techniques of the kernels and how each is switched off: the rows of results/ablation.json.

A row for another technique is one more `Technique` below. Settings are given relative to those
of the kernel (`Times`, `Like`) wherever that can be, so that tuning does not break a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..configs import Case

SHIPPED = "as shipped"


@dataclass(frozen=True)
class Times:
    """A setting multiplied by a factor; a table's entry without the setting stays without it."""

    factor: float


@dataclass(frozen=True)
class Like:
    """The settings of another entry of the table, but for those named, which stay."""

    key: Any
    but: tuple[str, ...] = ()


@dataclass(frozen=True)
class Empty:
    """No settings in any entry of a table."""


@dataclass(frozen=True)
class Technique:
    """A technique and its switch.

    Attributes:
        suite: "forward" or "backward"; the switch acts on that kernel file.
        name: short and unique within the suite.
        off: what the kernel does instead when it is switched off.
        code: a piece of the kernel file by which a reader finds the technique; it must be there.
        edits: pairs (text, its replacement); each text must be in the kernel file.
        settings: by the name of a table of the module, what it gets; see `ablation.switched`.
        replace: module attributes; where one is a function it gives the value from now on.
        options: compile options of the launches that give them, and their other values; None
            leaves the option out.
        causal: another mask for the call.
        on: "causal" or "full": the cases with that mask only.
        dims: the cases with these head dimensions only.
        only: these cases only.
        small: (N, D) of the check of the values, if not (1024, 64).
        stds: deviations of the inputs of that check; the first one decides.
        of: a technique that is switched off too, and whose time this one's is set beside.
        needs: a piece of the kernel file without which the technique is not there yet.
    """

    suite: str
    name: str
    off: str
    code: str
    edits: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    replace: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    causal: bool | None = None
    on: str = ""
    dims: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    small: tuple[int, int] = (1024, 64)
    stds: tuple[float, ...] = (0.5,)
    of: str = ""
    needs: str = ""

    def applies(self, case: Case) -> bool:
        """Whether the case is one of this technique's."""
        mask = "causal" if case.causal else "full"
        return (
            case.suite == self.suite
            and self.on in ("", mask)
            and case.d in (self.dims or (case.d,))
            and case.name in (self.only or (case.name,))
        )


OVERLAP = "overlap of cube and vector cores"
HALF = Times(0.5)
STDS = (0.5, 5.0, 20.0)
# A compile option matters alike for all cases of a mask, and each costs a compilation.
_OPTION_CASES = {"forward": ("P1", "P4", "P6"), "backward": ("C2-fp16", "C5-fp16")}


def _option(suite: str, name: str, off: str, code: str, **switch: Any) -> Technique:
    """A technique that is a compile option."""
    return Technique(suite, name, off, code, only=_OPTION_CASES[suite], small=(1024, 128), **switch)


_FORWARD = (
    Technique("forward", SHIPPED, "", "def attention_fwd(", stds=STDS),
    Technique(
        "forward",
        OVERLAP,
        "general path: the compiler's split, no overlap across tiles",
        "def get_path(",
        replace={"get_path": "general"},
    ),
    Technique(
        "forward",
        "two slots, the cube an item ahead",
        "cube and vector cores take turns: P V waits for the softmax of the same step",
        "two slots of scores",
        edits=(
            ('                _sync_wait("vector", "cube", 1)\n', ""),
            (
                '                _sync_set("vector", "cube", 1)\n',
                '                _sync_set("vector", "cube", 1)\n                _sync_wait("vector", "cube", 1)\n',
            ),
        ),
    ),
    Technique(
        "forward",
        "groups of 1024 keys and more",
        "groups of 512 keys: more maxima, sums and merges",
        "largest group of keys",
        settings={"_PIPELINES": {"KG": 512}, "_LONG_GROUP": {"KG": 512}},
    ),
    Technique(
        "forward",
        "larger groups of long rows",
        "the groups of short rows",
        "_LONG_GROUP",
        settings={"_LONG_GROUP": Empty()},
        small=(2048, 64),
    ),
    Technique(
        "forward",
        "scores in fp32",
        "scores in the input's dtype: half the traffic of S, and rounded before the maximum is taken off",
        '"scores": (',
        edits=(
            ('"scores": ((cores, 2, rows, group), torch.float32)', '"scores": ((cores, 2, rows, group), dtype)'),
            ("BH, BN), b_s0)", "BH, BN), b_s0.to(scores.type.element_ty))"),
            ("BH, BN), b_s1)", "BH, BN), b_s1.to(scores.type.element_ty))"),
            ("tl.store(p_s1, b_s1)", "tl.store(p_s1, b_s1.to(scores.type.element_ty))"),
        ),
        stds=STDS,
    ),
    Technique(
        "forward",
        "row sums by the cube",
        "the vector cores sum each row of P",
        '"SUM"',
        settings={"_PIPELINES": {"SUM": 0}},
        needs='"SUM"',
    ),
    Technique(
        "forward",
        "256 query rows a block",
        "blocks of 128 rows (as at D=256): K and V are loaded twice as often",
        "query rows of an item, as tiles",
        settings={
            "_PIPELINES": {
                (64, False): {"BH": HALF},
                (64, True): {"HALVES": HALF, "RO": HALF},
                (128, False): {"HALVES": HALF},
                (128, True): {"BH": HALF, "RO": HALF},
            }
        },
        dims=(64, 128),
    ),
    Technique(
        "forward",
        "settings of its own for each head dimension",
        "D=64 and 256 with those of D=128, D=128 with those of D=64",
        "_PIPELINES: dict",
        settings={
            "_PIPELINES": {
                (64, False): Like((128, False)),
                (64, True): Like((128, True)),
                (128, False): Like((64, False)),
                (128, True): Like((64, True)),
                (256, False): Like((128, False)),
                (256, True): Like((128, True)),
            }
        },
    ),
    Technique(
        "forward",
        "score tiles of 64 x 256 for long rows of D=64",
        "tiles of 128 x 128, two keys in one row of L1",
        "_LONG_GROUP: dict",
        settings={"_LONG_GROUP": {(64, False): {"HALVES": 2, "BH": 128, "BN": 128, "F": 2}}},
        on="full",
        dims=(64,),
    ),
    Technique(
        "forward",
        "two steps of P V in a loop body",
        "one step (D=256 without a mask): the loads of P and V wait for the products",
        "steps of P V in one loop body",
        settings={"_PIPELINES": {(256, False): {"U": 1}}},
        on="full",
        dims=(256,),
        small=(1024, 256),
    ),
    Technique(
        "forward",
        "long loads of P",
        "P comes in loads as wide as those of V",
        "causal: keys of a load of P",
        settings={"_PIPELINES": {(128, True): {"WP": HALF}}},
        needs='"WP"',
        dims=(128,),
        on="causal",
        small=(1024, 128),
    ),
    Technique(
        "forward",
        "last tiles of scores stay on chip between the passes",
        "one tile stays, the one before is read twice",
        "if KEEP:",
        settings={"_PIPELINES": {"KEEP": 0}},
        needs='"KEEP"',
        on="causal",
    ),
    Technique(
        "forward",
        "scale folded into q",
        "every score is multiplied",
        "the vector cores scale q where",
        settings={"_PIPELINES": {"FOLD": 0}},
    ),
    Technique(
        "forward",
        "double-buffered scores on the vector cores",
        "the next rows are loaded after the last ones are done",
        '_hint(b_s, "hivm.multi_buffer", 2)',
        edits=(('    _hint(b_s, "hivm.multi_buffer", 2)', "    pass"),),
        on="full",
    ),
    Technique(
        "forward",
        "chunks of rows that fill the buffer",
        "chunks of half as many rows",
        "rows of a step of the softmax",
        settings={"_PIPELINES": {"R": HALF, "RO": HALF}, "_LONG_GROUP": {"R": HALF}},
    ),
    Technique(
        "forward",
        "tiles of the cube that the compiler double-buffers",
        "one buffer for each",
        "the compiler double-buffers the cube's tiles",
        settings={"_PIPELINES": {"MB": 0}},
    ),
    Technique(
        "forward",
        "stores under names of their own",
        "stores to one tensor go through one argument, so the compiler waits between them",
        "_SCRATCH_NAMES",
        edits=(
            ("_tile(probs1, ", "_tile(probs, "),
            ("_tile(probs2, ", "_tile(probs, "),
            ("_tile(probs3, ", "_tile(probs, "),
            ("_tile(scores_slot1, ", "_tile(scores_slot, "),
            ("_rows(stats1, ", "_rows(stats, "),
            ("_rows(sums + ", "_rows(stats + "),
            ("_rows(sums1 + ", "_rows(stats + "),
        ),
        needs="_SCRATCH_NAMES",
        only=("P1", "P4", "P6"),
    ),
    _option(
        "forward",
        "events only where written",
        "the compiler adds its own cross-core events",
        "disable_auto_inject_block_sync",
        options={"disable_auto_inject_block_sync": None},
    ),
    _option(
        "forward",
        "older solver of events on the cube core",
        "the default solver: every product waits for the last one",
        "sync_solver",
        options={"sync_solver": None},
    ),
    Technique(
        "forward",
        "maximum that propagates NaN",
        "the default maximum: five operations instead of one",
        "propagate_nan=tl.PropagateNan.ALL",
        edits=((", propagate_nan=tl.PropagateNan.ALL)", ")"),),
        on="causal",
    ),
    Technique(
        "forward",
        "query blocks up one head and down the next",
        "up through every head: a short item beside a long one",
        "def _block(",
        edits=(("        i_m += t // blocks % 2 * (blocks - 1 - 2 * i_m)", "        i_m += 0"),),
        on="causal",
    ),
    Technique(
        "forward",
        "head after head",
        "the first query blocks of all heads, then the second ones: K and V of a head come back later",
        "Each program takes a run of query blocks",
        edits=(
            ("i_t // blocks", "i_t % (TILES // blocks)"),
            ("i_t0 // blocks", "i_t0 % (TILES // blocks)"),
            ("i_t1 // blocks", "i_t1 % (TILES // blocks)"),
            ("first // blocks", "first % (TILES // blocks)"),
            ("_block(i_t,", "_block(i_t // (TILES // blocks),"),
            ("_block(i_t0,", "_block(i_t0 // (TILES // blocks),"),
            ("_block(i_t1,", "_block(i_t1 // (TILES // blocks),"),
            ("_block(first,", "_block(first // (TILES // blocks),"),
            ("items += (_block(t,", "items += (_block(t // (TILES // blocks),"),
        ),
        on="full",  # with a mask the runs of the cores would differ in length
    ),
    Technique(
        "forward",
        "causal skipping",
        "all groups are computed (timed without a mask)",
        "A causal item ends with the last keys that its rows see",
        causal=False,
        on="causal",
    ),
    Technique(
        "forward",
        "query-tile-major order",
        "the tiles of a head one after another",
        "i_m = t // heads",
        edits=(
            ("        i_m = t // heads\n", "        i_m = t % tl.cdiv(SQ, BM)\n"),
            ("        i_z = (t % heads) // H\n", "        i_z = t // tl.cdiv(SQ, BM) // H\n"),
            ("        i_h = (t % heads) % H\n", "        i_h = t // tl.cdiv(SQ, BM) % H\n"),
            ("lse + (t % heads).to(tl.int64)", "lse + (t // tl.cdiv(SQ, BM)).to(tl.int64)"),
        ),
        of=OVERLAP,
    ),
    Technique(
        "forward",
        "wide key tiles",
        "key tiles of 128 (64 at D=256)",
        "_TILES_MASKED = ",
        settings={
            "_TILES": {64: (128, 128), 128: (128, 128), 256: (64, 64)},
            "_TILES_MASKED": {64: (64, 128), 128: (64, 128), 256: (32, 64)},
        },
        of=OVERLAP,
    ),
)

_PIPELINE = "def get_path_bwd("
_BACKWARD = (
    Technique("backward", SHIPPED, "", "def attention_bwd(", stds=STDS),
    Technique(
        "backward",
        OVERLAP,
        "general path: three kernels, the compiler's split",
        "def get_path_bwd(",
        replace={"get_path_bwd": "general"},
        needs=_PIPELINE,
    ),
    Technique(
        "backward",
        "two slots, the cube a group ahead",
        "cube and vector cores take turns: gradients wait for P and dS of the same step",
        "The key gradients run one group behind",
        edits=(
            ('    _sync_set("vector", "cube", 1)\n    _sync_set("vector", "cube", 3)\n', ""),
            ('    _sync_wait("vector", "cube", 1)\n    _sync_wait("vector", "cube", 3)\n', ""),
            ('    _sync_wait("vector", "cube", 1)\n    b_a0', "    b_a0"),
            ('    _sync_wait("vector", "cube", 3)\n    b_a0', "    b_a0"),
            (
                "    return b_a0, b_a1, b_x0",
                '    _sync_wait("vector", "cube", 1 + EVENT // 2)\n    return b_a0, b_a1, b_x0',
            ),
        ),
        needs=_PIPELINE,
        dims=(128,),
        small=(1024, 128),
    ),
    Technique(
        "backward",
        "large groups of keys",
        "groups of half as many keys",
        "groups of KG keys",
        settings={
            "_PIPELINES": {
                (128, False): {"KG": HALF, "LB": 128, "BT": 64},
                (128, True): {"KG": HALF, "LB": 128, "BT": 64, "UNROLL": Times(2)},
            }
        },
        needs=_PIPELINE,
        dims=(128,),  # at D=64 (MIX) a group must be as wide as the tiles of dQ
        small=(1024, 128),
    ),
    Technique(
        "backward",
        "S and dP in fp32",
        "both in the input's dtype: half their traffic, and rounded before lse and Delta are taken off",
        "scores, dprobs",
        edits=(
            (
                'dtype=q.dtype if name in ("probs", "ds") else',
                'dtype=q.dtype if name in ("probs", "ds", "scores", "dprobs") else',
            ),
            ("tl.store(_tile(out, F * ", "_store(_tile(out, F * "),
            ("tl.store(_tile(out1, F * ", "_store(_tile(out1, F * "),
            (
                "@triton.jit\ndef _products(",
                "@triton.jit\ndef _store(p, x):\n    tl.store(p, x.to(p.type.element_ty.element_ty))\n\n\n"
                "@triton.jit\ndef _products(",
            ),
        ),
        needs=_PIPELINE,
        dims=(64, 128),
        stds=STDS,
    ),
    Technique(
        "backward",
        "K or V of the next scores, and a second tile of Q or dO, loaded during the scores",
        "with the last piece of the gradient between",
        "loaded AHEAD pieces",
        settings={"_PIPELINES": {"AHEAD": 1}},
        needs=_PIPELINE,
        small=(1024, 128),
    ),
    Technique(
        "backward",
        "tiles of V stay in L1 for a group",
        "V is loaded again for each piece of queries",
        "b_da, b_v = _gradient_phase(",
        edits=(
            (
                "    b_a, b_b, a, out, out1, p_a0, p_a1, p_x0, p_x1, p_n1,\n",
                "    b_a, b_b, p_b, a, out, out1, p_a0, p_a1, p_x0, p_x1, p_n1,\n",
            ),
            (
                "        _products(b_a, b_b, out, out1, row,",
                "        if EVENT == 4:\n            b_b = tl.load(p_b)\n        _products(b_a, b_b, out, out1, row,",
            ),
            (
                "        b_qa, b_k, q0, scores, scores1,\n",
                "        b_qa, b_k, _input(v0, N, stride_vn, g * KG, KG, D), q0, scores, scores1,\n",
            ),
            (
                "        b_da, b_v, do0, dprobs, dprobs1,\n",
                "        b_da, b_v, _input(v0, N, stride_vn, g * KG, KG, D), do0, dprobs, dprobs1,\n",
            ),
        ),
        needs=_PIPELINE,
        dims=(64, 128),
    ),
    Technique(
        "backward",
        "Delta inside the pipeline",
        "Delta of all heads by a kernel of its own, before the pipeline",
        "def _delta_rows(",
        edits=(
            ("    delta += pid * N\n", "    delta += first * N\n"),
            (
                "    for r in range(0, N, R):\n        b_o = tl.load(_input(o,",
                "    for r in range(0, 0, R):\n        b_o = tl.load(_input(o,",
            ),
            (
                '        _sync_set("vector", "cube", 5)\n        _delta_rows(\n            out,\n',
                '        _sync_set("vector", "cube", 5)\n        delta += N\n        _delta_rows(\n            out,\n',
            ),
            (
                "    attention_bwd_kernel_pipeline[(cores,)](\n",
                '    scratch["delta"] = torch.empty(z * h * n, dtype=torch.float32, device=q.device)\n'
                "    attention_bwd_kernel_delta[(_device_counts(q)[1],)](\n"
                '        out, dout, scratch["delta"], *out.stride()[:3], *dout.stride()[:3],\n'
                "        z, h, n, TAIL=False, BM=32, D=d\n"
                "    )\n"
                "    attention_bwd_kernel_pipeline[(cores,)](\n",
            ),
        ),
        needs=_PIPELINE,
        dims=(64, 128),
    ),
    Technique(
        "backward",
        "settings of its own for each head dimension",
        "D=64 with those of D=128, D=128 with those of D=256",
        "_PIPELINES: dict",
        settings={
            "_PIPELINES": {
                (64, False): Like((128, False), but=("DQ",)),
                (64, True): Like((128, True), but=("DQ",)),
                (128, False): Like((256, False)),
                (128, True): Like((256, True)),
            }
        },
        needs=_PIPELINE,
        dims=(64, 128),
    ),
    Technique(
        "backward",
        "key gradients in two halves",
        "one result for all keys of a group: its drain ends before the next product begins",
        "if SPLIT:",
        settings={"_PIPELINES": {"SPLIT": 0}},
        needs='"SPLIT"',
        dims=(64, 128),
        small=(1024, 128),
    ),
    Technique(
        "backward",
        "scores drained between the parts of a gradient",
        "scores, then gradients",
        "if MIX:",
        settings={"_PIPELINES": {"MIX": 0}},
        needs='"MIX"',
        dims=(64, 128),
    ),
    Technique(
        "backward",
        "dS carries the scale",
        "dK and dQ to scratch in fp32, scaled by the vector cores",
        "if FOLD:",
        settings={"_PIPELINES": {"FOLD": 0}},
        needs='"FOLD"',
        small=(1024, 128),
    ),
    Technique(
        "backward",
        "chunks of rows that fill the buffer",
        "vector work in chunks of half as many rows",
        "vector work in chunks of R rows",
        settings={"_PIPELINES": {"R": HALF, "RD": HALF}},
        needs=_PIPELINE,
        dims=(64, 128),
    ),
    Technique(
        "backward",
        "stores under names of their own",
        "stores to one tensor go through one argument, so the compiler waits between them",
        "_SCRATCH_NAMES",
        edits=(("tl.store(_tile(out1, F * ", "tl.store(_tile(out, F * "),),
        needs="_SCRATCH_NAMES",
        only=("C1-fp16", "C2-fp16", "C5-fp16"),
    ),
    _option(
        "backward",
        "events only where written",
        "the compiler adds its own cross-core events",
        "disable_auto_inject_block_sync",
        options={"disable_auto_inject_block_sync": None},
        needs=_PIPELINE,
    ),
    _option(
        "backward",
        "older solver of events on the cube core",
        "the default solver: every product waits for the last one",
        "sync_solver",
        options={"sync_solver": None},
        needs=_PIPELINE,
    ),
    _option(
        "backward",
        "tiles loaded ahead by hand",
        "the compiler double-buffers",
        "multibuffer",
        options={"multibuffer": None},
        needs=_PIPELINE,
    ),
    Technique(
        "backward",
        "causal skipping",
        "all tiles are computed (timed without a mask)",
        "low = g * KG // LB * LB",
        causal=False,
        on="causal",
    ),
    Technique(
        "backward",
        "large tiles",
        "tiles of 64 x 64 (32 x 32 at D=256)",
        "_TILES_DKDV = ",
        settings={
            "_TILES_DKDV": {64: (64, 64), 128: (64, 64), 256: (32, 32)},
            "_TILES_DQ": {64: (64, 64), 128: (64, 64), 256: (32, 32)},
        },
        of=OVERLAP,
    ),
    Technique(
        "backward",
        "scale on finished tiles",
        "each tile of dS is scaled before its product",
        "(b_dk * scale)",
        edits=(
            ("(b_dp - tl.load(p_delta)[:, None])", "(b_dp - tl.load(p_delta)[:, None]) * scale"),
            ("(b_dp - b_delta[:, None])", "(b_dp - b_delta[:, None]) * scale"),
            ("(b_dk * scale)", "b_dk"),
            ("(b_dq * scale)", "b_dq"),
        ),
        of=OVERLAP,
    ),
    Technique(
        "backward",
        "tile-major order",
        "the tiles of a head one after another",
        "col = t // heads * BN",
        edits=(
            ("        col = t // heads * BN\n", "        col = t % tl.cdiv(SK, BN) * BN\n"),
            ("        i_z = t % heads // HK\n", "        i_z = t // tl.cdiv(SK, BN) // HK\n"),
            ("        i_hk = t % heads % HK\n", "        i_hk = t // tl.cdiv(SK, BN) % HK\n"),
            ("        row = t // heads * BM\n", "        row = t % tl.cdiv(SQ, BM) * BM\n"),
            ("        i_head = t % heads\n", "        i_head = t // tl.cdiv(SQ, BM)\n"),
        ),
        of=OVERLAP,
    ),
)
TECHNIQUES = (*_FORWARD, *_BACKWARD)
