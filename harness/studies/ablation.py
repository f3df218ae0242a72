"""`python -m harness.studies.ablation`: each technique of the kernels switched off alone.

A technique is switched off in a copy of the kernel's file: by replaced text, by other values
of its settings, or by another call. Each copy is timed (predicted) on the official
performance cases in fp16 at their full size, and its values are checked on a small shape.
Writes results/ablation.json; rows whose sources have not changed are kept.

A row for another technique is one more `Technique` below.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..configs import Case, cases, input_rule
from ..reference import reference_bwd, reference_fwd
from ..virtual_npu.driver import run
from ..virtual_npu.errors import CompileError, VirtualNPUError
from .rows import REPOSITORY, Kept, digest, progress, sources

RESULTS = REPOSITORY / "results" / "ablation.json"
COPIES = REPOSITORY / ".cache" / "ablation"
SHIPPED = "as shipped"
RIGHT = 2.0**-7  # largest relative L2 error of values that count as right
SMALL_N, SMALL_D, SMALL_CORES = 1024, 64, 2


@dataclass(frozen=True)
class Technique:
    """A technique and its switch.

    Attributes:
        suite: "forward" or "backward"; the switch acts on that kernel file.
        name: short and unique within the suite.
        off: what the kernel does instead when it is switched off.
        code: a piece of the kernel file by which a reader finds the technique; it must be there.
        edits: pairs (text, its replacement); each text must be in the kernel file.
        settings: by the name of a table {key: {setting: value}} or {key: value}, the settings
            that every entry gets, or the value of every entry.
        replace: module attributes; where one is a function it gives the value from now on.
        causal: another mask for the call.
        on: "causal" or "full": the cases with that mask only.
        of: a technique that is switched off too, and whose time this one's is set beside.
    """

    suite: str
    name: str
    off: str
    code: str
    edits: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    replace: Mapping[str, Any] = field(default_factory=dict)
    causal: bool | None = None
    on: str = ""
    of: str = ""

    def applies(self, case: Case) -> bool:
        """Whether the case is one of this technique's."""
        mask = "causal" if case.causal else "full"
        return case.suite == self.suite and self.on in ("", mask)


_GENERAL = "overlap of cube and vector cores"
_TILE_ORDER_FORWARD = (
    ("        i_m = t // heads\n", "        i_m = t % (N // BM)\n"),
    ("        i_z = (t % heads) // H\n", "        i_z = t // (N // BM) // H\n"),
    ("        i_h = (t % heads) % H\n", "        i_h = t // (N // BM) % H\n"),
    ("lse + (t % heads).to(tl.int64)", "lse + (t // (N // BM)).to(tl.int64)"),
)
TECHNIQUES = (
    Technique("forward", SHIPPED, "", "def attention_fwd("),
    Technique(
        "forward",
        _GENERAL,
        "general path: the compiler's split, no overlap across tiles",
        "def get_path(",
        replace={"get_path": "general"},
    ),
    Technique(
        "forward",
        "groups of keys",
        "groups of 256 keys: a maximum and a merge four to eight times as often",
        '"KG": 1024',
        settings={"_PIPELINES": {"KG": 256}, "_LONG_GROUP": {"KG": 256}},
    ),
    Technique(
        "forward",
        "larger groups of long rows",
        "the groups of short rows",
        "_LONG_GROUP",
        edits=(("settings = settings | _LONG_GROUP", "settings = settings"),),
        on="full",
    ),
    Technique(
        "forward",
        "256 query rows a block",
        "blocks of 128 rows: K and V are loaded twice as often",
        '"HALVES": 2',
        settings={"_PIPELINES": {"HALVES": 1, "RO": 64}},
    ),
    Technique(
        "forward",
        "double-buffered scores on the vector cores",
        "the next rows are loaded after the last ones are done",
        '_hint(b_s, "hivm.multi_buffer", 2)',
        edits=(('        _hint(b_s, "hivm.multi_buffer", 2)', "        pass"),),
    ),
    Technique(
        "forward",
        "chunks of rows that fill the buffer",
        "softmax in chunks of 8 rows, results in chunks of 32",
        '"RO": 256',
        settings={"_PIPELINES": {"R": 8, "RD": 8, "RO": 32}},
    ),
    Technique(
        "forward",
        "events only where written",
        "the compiler adds its own cross-core events",
        "disable_auto_inject_block_sync=True",
        edits=(("disable_auto_inject_block_sync=True", "disable_auto_inject_block_sync=False"),),
    ),
    Technique(
        "forward",
        "older solver of events on the cube core",
        "the default solver: every product waits for the last one",
        "sync_solver=False",
        edits=(("        sync_solver=False,", "        "),),
    ),
    Technique(
        "forward",
        "causal skipping",
        "all groups are computed (timed without a mask)",
        "count = (i_t % blocks * BM + BM + KG - 1) // KG",
        causal=False,
        on="causal",
    ),
    Technique(
        "forward",
        "query-tile-major order",
        "the tiles of a head one after another",
        "i_m = t // heads",
        edits=_TILE_ORDER_FORWARD,
        of=_GENERAL,
        on="causal",
        replace={"get_path": "general"},
    ),
    Technique(
        "forward",
        "maximum that propagates NaN",
        "the default maximum: five operations instead of one",
        "propagate_nan=tl.PropagateNan.ALL",
        edits=((", propagate_nan=tl.PropagateNan.ALL)", ")"),),
        of=_GENERAL,
        replace={"get_path": "general"},
    ),
    Technique(
        "forward",
        "wide key tiles",
        "key tiles of 128 (64 at D=256)",
        "_TILES_MASKED",
        settings={
            "_TILES": {64: (128, 128), 128: (128, 128), 256: (64, 64)},
            "_TILES_MASKED": {64: (64, 128), 128: (64, 128), 256: (32, 64)},
        },
        of=_GENERAL,
        replace={"get_path": "general"},
    ),
    Technique("backward", SHIPPED, "", "def attention_bwd("),
    Technique(
        "backward",
        "large tiles",
        "tiles of 64 x 64",
        "_TILES_DKDV",
        settings={"_TILES_DKDV": (64, 64), "_TILES_DQ": (64, 64)},
    ),
    Technique(
        "backward",
        "scale on finished tiles",
        "each tile of dS is scaled before its product",
        "tl.store(p_dk, (b_dk * scale).to(dk.type.element_ty))",
        edits=(
            ("(b_dp - tl.load(p_delta)[:, None])", "(b_dp - tl.load(p_delta)[:, None]) * scale"),
            ("(b_dp - b_delta[:, None])", "(b_dp - b_delta[:, None]) * scale"),
            ("(b_dk * scale)", "b_dk"),
            ("(b_dq * scale)", "b_dq"),
        ),
    ),
    Technique(
        "backward",
        "tile-major order",
        "the tiles of a head one after another",
        "i_n = t // heads",
        edits=(
            (
                "        i_n = t // heads\n        i_head = t % heads\n",
                "        i_n = t % (N // BN)\n        i_head = t // (N // BN)\n",
            ),
            (
                "        i_m = t // heads\n        i_head = t % heads\n",
                "        i_m = t % (N // BM)\n        i_head = t // (N // BM)\n",
            ),
        ),
    ),
    Technique(
        "backward",
        "causal skipping",
        "all tiles are computed (timed without a mask)",
        "first = i_n * BN // BM * BM",
        causal=False,
        on="causal",
    ),
)


def technique(suite: str, name: str) -> Technique:
    """One of TECHNIQUES."""
    return next(t for t in TECHNIQUES if (t.suite, t.name) == (suite, name))


def edited(chosen: Technique) -> str:
    """The kernel file's text with the technique switched off.

    Raises:
        ValueError: a text to replace, or the piece of code that names the technique, is not in
            the file (the kernel has changed: mend or drop the row).
    """
    text = (REPOSITORY / f"{chosen.suite}.py").read_text()
    for piece in (chosen.code, *(old for old, _ in chosen.edits)):
        if piece not in text:
            raise ValueError(f"{chosen.suite}.py must have the text {piece!r} of technique {chosen.name!r}")
    for old, new in chosen.edits:
        text = text.replace(old, new)
    return text


def module(chosen: Technique) -> ModuleType:
    """A copy of the kernel's module with the technique switched off.

    Raises:
        ValueError: as `edited`, or a table or attribute that the module does not have.
    """
    text = edited(chosen)
    name = f"{chosen.suite}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    path = COPIES / f"{name}.py"
    if not path.is_file():
        COPIES.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(text)
        os.replace(whole, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # Triton finds the source of a kernel through its module
    spec.loader.exec_module(made)
    for attribute in (*chosen.settings, *chosen.replace):
        if not hasattr(made, attribute):
            raise ValueError(f"{chosen.suite}.py must have {attribute!r} for technique {chosen.name!r}")
    for attribute, value in chosen.settings.items():
        setattr(made, attribute, _set(getattr(made, attribute), value))
    for attribute, value in chosen.replace.items():
        function = callable(getattr(made, attribute))
        setattr(made, attribute, (lambda *_, _value=value, **__: _value) if function else value)
    return made


def _set(table: Mapping[Any, Any], value: Any) -> dict[Any, Any]:
    """A table with other settings: in every entry, of the entries named, or flat."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(table, value)
    if all(key in table for key in value):
        return {**table, **value}
    return {key: {**entry, **value} for key, entry in table.items()}


def time_case(chosen: Technique, case: Case) -> dict[str, Any]:
    """Predicted ms of a case with the technique switched off, or why there is none."""
    kernel = module(chosen)
    causal = case.causal if chosen.causal is None else chosen.causal
    x = torch.empty(case.z, case.h, case.n, case.d, dtype=case.torch_dtype)
    try:
        with run("timing") as record:
            if case.suite == "forward":
                kernel.attention_fwd(x, x, x, causal, input_rule().sm_scale)
            else:
                lse = torch.empty(case.z, case.h, case.n)
                kernel.attention_bwd(x, x, x, x, x, lse, causal, input_rule().sm_scale)
    except CompileError as error:
        return {"ms": None, "fault": "does not compile", "detail": str(error).splitlines()[-1][:300]}
    except VirtualNPUError as error:
        return {"ms": None, "fault": type(error).__name__, "detail": str(error).splitlines()[0][:300]}
    return {"ms": round(record.ms, 4), "fault": "", "detail": ""}


def check_values(chosen: Technique) -> dict[str, Any]:
    """Are the values right with the technique switched off? One head, full and causal, hazards checked."""
    if chosen.causal is not None:
        return {"values": "not checked: another mask"}
    kernel = module(chosen)
    generator = torch.Generator().manual_seed(0)
    rule = input_rule()
    shape = (1, 1, SMALL_N, SMALL_D)
    q, k, v, dout = ((torch.randn(shape, generator=generator) * rule.std).half() for _ in range(4))
    worst = 0.0
    found: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor, ...]
    for causal in (False, True):
        out, lse = reference_fwd(q, k, v, causal, rule.sm_scale)
        out_half = out.half()
        try:
            with run("values", hazards=True, cores=SMALL_CORES):
                if chosen.suite == "forward":
                    found, exact = kernel.attention_fwd(q, k, v, causal, rule.sm_scale)[:1], (out,)
                else:
                    found = kernel.attention_bwd(dout, q, k, v, out_half, lse.float(), causal, rule.sm_scale)
                    exact = reference_bwd(dout, q, k, v, causal, rule.sm_scale, out=out_half)
        except VirtualNPUError as error:
            return {"values": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        for a, b in zip(found, exact, strict=True):
            error_norm = float((a.double() - b).norm() / b.norm())
            if not error_norm <= RIGHT:
                return {"values": f"wrong: relative L2 error {error_norm:.2g}"}
            worst = max(worst, error_norm)
    return {"values": "right", "error": float(f"{worst:.3g}")}


def work() -> dict[str, tuple[Technique, Case | None]]:
    """What there is to do, by key; without a case it is the check of the values."""
    found: dict[str, tuple[Technique, Case | None]] = {}
    for chosen in TECHNIQUES:
        found[f"{chosen.suite}: {chosen.name}: values"] = chosen, None
        for case in cases(chosen.suite):
            if case.kind == "performance" and case.dtype == "fp16" and chosen.applies(case):
                found[f"{chosen.suite}: {chosen.name}: {case.name}"] = chosen, case
    return found


def wanted() -> dict[str, str]:
    """Key to digest of every row of results/ablation.json."""
    model = sources()
    return {key: digest(model, edited(chosen), *vars(chosen).values(), case) for key, (chosen, case) in work().items()}


def do(key: str) -> dict[str, Any]:
    """Make the row of a key."""
    torch.set_num_threads(1)
    chosen, case = work()[key]
    row = {"suite": chosen.suite, "technique": chosen.name}
    return {**row, **(check_values(chosen) if case is None else {"case": case.name, **time_case(chosen, case)})}


def main() -> None:
    parser = argparse.ArgumentParser(description="Each technique of the kernels switched off alone.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", action="append", default=[], help="techniques with this in their name (may repeat)")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kept = Kept(arguments.json, wanted())
    missing = [key for key in kept.missing() if not arguments.only or any(word in key for word in arguments.only)]
    print(f"{len(kept.rows)} rows kept, {len(missing)} to make", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(do, key): key for key in missing}
        for done, future in enumerate(as_completed(futures), 1):
            key, row = futures[future], future.result()
            kept.add(key, row)
            told = row.get("values") or (f"{row['ms']:.2f} ms, predicted" if row["ms"] else row["fault"])
            progress(done, len(missing), f"{key}: {told}")
    kept.write()
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
