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
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from ..configs import SUITES, Case, cases, input_rule
from ..reference import reference_bwd, reference_fwd
from ..virtual_npu.driver import run
from ..virtual_npu.errors import CompileError, VirtualNPUError
from .rows import REPOSITORY, Kept, digest, progress, sources

RESULTS = REPOSITORY / "results" / "ablation.json"
COPIES = REPOSITORY / ".cache" / "ablation"
SHIPPED = "as shipped"
RIGHT = 2.0**-7  # largest relative L2 error of values that count as right
SMALL_N, SMALL_D = 1024, 64
SMALL_CORES = {"forward": 2, "backward": 1}  # few enough that the pipelines run


@dataclass(frozen=True)
class Technique:
    """A technique and its switch.

    Attributes:
        suite: "forward" or "backward"; the switch acts on that kernel file.
        name: short and unique within the suite.
        off: what the kernel does instead when it is switched off.
        code: a piece of the kernel file by which a reader finds the technique; it must be there.
        edits: pairs (text, its replacement); each text must be in the kernel file.
        settings: by the name of a table of the module, what it gets; see `_set`.
        replace: module attributes; where one is a function it gives the value from now on.
        options: compile options of the launches that give them, and their other values; None
            leaves the option out.
        causal: another mask for the call.
        on: "causal" or "full": the cases with that mask only.
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
    of: str = ""
    needs: str = ""

    def applies(self, case: Case) -> bool:
        """Whether the case is one of this technique's."""
        mask = "causal" if case.causal else "full"
        return case.suite == self.suite and self.on in ("", mask)


_OVERLAP = "overlap of cube and vector cores"
TECHNIQUES = (
    Technique("forward", SHIPPED, "", "def attention_fwd("),
    Technique(
        "forward",
        _OVERLAP,
        "general path: the compiler's split, no overlap across tiles",
        "def get_path(",
        replace={"get_path": "general"},
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
        settings={"_LONG_GROUP": {"KG": 1024}},
    ),
    Technique(
        "forward",
        "256 query rows a block",
        "blocks of 128 rows (as at D=256): K and V are loaded twice as often",
        "query rows of an item, as tiles",
        settings={
            "_PIPELINES": {
                (64, False): {"BH": 64},
                (64, True): {"HALVES": 2},
                (128, False): {"HALVES": 2},
                (128, True): {"HALVES": 2, "BH": 64},
            }
        },
    ),
    Technique(
        "forward",
        "several keys in one row of L1",
        "one key in a row (D=64 without a mask): twice the loads",
        "def _packed(",
        settings={"_PIPELINES": {(64, False): {"F": 1}}},
        on="full",
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
        settings={
            "_PIPELINES": {
                (64, False): {"R": 8, "RO": 64},
                (64, True): {"R": 32, "RO": 64},
                (128, False): {"R": 8, "RO": 32},
                (128, True): {"R": 32, "RO": 64},
                (256, False): {"R": 8, "RO": 32},
                (256, True): {"R": 32, "RO": 32},
            }
        },
    ),
    Technique(
        "forward",
        "events only where written",
        "the compiler adds its own cross-core events",
        "disable_auto_inject_block_sync",
        options={"disable_auto_inject_block_sync": None},
    ),
    Technique(
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
        of=_OVERLAP,
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
        of=_OVERLAP,
    ),
    Technique("backward", SHIPPED, "", "def attention_bwd("),
    Technique(
        "backward",
        _OVERLAP,
        "general path: three kernels, the compiler's split",
        "def get_path_bwd(",
        replace={"get_path_bwd": "general"},
        needs="def get_path_bwd(",
    ),
    Technique(
        "backward",
        "chunks of rows that fill the buffer",
        "vector work in chunks of 32 rows",
        "_PIPELINES: dict",
        settings={"_PIPELINES": {"R": 32, "RD": 32}},
        needs="def get_path_bwd(",
    ),
    Technique(
        "backward",
        "events only where written",
        "the compiler adds its own cross-core events",
        "disable_auto_inject_block_sync",
        options={"disable_auto_inject_block_sync": None},
        needs="def get_path_bwd(",
    ),
    Technique(
        "backward",
        "older solver of events on the cube core",
        "the default solver: every product waits for the last one",
        "sync_solver",
        options={"sync_solver": None},
        needs="def get_path_bwd(",
    ),
    Technique(
        "backward",
        "tiles loaded ahead by hand",
        "the compiler double-buffers",
        "multibuffer",
        options={"multibuffer": None},
        needs="def get_path_bwd(",
    ),
    Technique(
        "backward",
        "causal skipping",
        "all tiles are computed (timed without a mask)",
        "if CAUSAL:",
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
        of=_OVERLAP,
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
        of=_OVERLAP,
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
        of=_OVERLAP,
    ),
)


def source(suite: str) -> str:
    """The text of a kernel file."""
    return (REPOSITORY / f"{suite}.py").read_text()


def available(suite: str) -> list[Technique]:
    """The techniques of a suite whose kernel is in the file, the shipped kernel first. Where that
    of which one is a part is not there, it is a part of the shipped kernel."""
    text = source(suite)
    found = [item for item in TECHNIQUES if item.suite == suite and item.needs in text]
    names = {item.name for item in found}
    return [item if item.of in names else replace(item, of="") for item in found]


def technique(suite: str, name: str) -> Technique:
    """One of the techniques that are available."""
    return next(item for item in available(suite) if item.name == name)


def edited(chosen: Technique) -> str:
    """The kernel file's text with the technique switched off.

    Raises:
        ValueError: a text to replace, or the piece of code that names the technique, is not in
            the file (the kernel has changed: mend or drop the row).
    """
    text = source(chosen.suite)
    edits = (*technique(chosen.suite, chosen.of).edits, *chosen.edits) if chosen.of else chosen.edits
    for piece in (chosen.code, *(old for old, _ in edits)):
        if piece not in text:
            raise ValueError(f"{chosen.suite}.py must have the text {piece!r} of technique {chosen.name!r}")
    for old, new in edits:
        text = text.replace(old, new)
    return text


def module(chosen: Technique) -> ModuleType:
    """A copy of the kernel's module with the technique, and that of which it is a part, switched off.

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
    for item in [technique(chosen.suite, chosen.of), chosen] if chosen.of else [chosen]:
        for attribute in (*item.settings, *item.replace):
            if not hasattr(made, attribute):
                raise ValueError(f"{item.suite}.py must have {attribute!r} for technique {item.name!r}")
        for attribute, value in item.settings.items():
            setattr(made, attribute, _set(getattr(made, attribute), value))
        for attribute, value in item.replace.items():
            function = callable(getattr(made, attribute))
            setattr(made, attribute, (lambda *_, _value=value, **__: _value) if function else value)
        if item.options:
            for kernel in vars(made).values():
                if isinstance(kernel, JITFunction):
                    _relaunch(kernel, item.options)
    return made


def _relaunch(kernel: Any, options: Mapping[str, Any]) -> None:
    """Let the launches of a kernel that give these compile options have other ones."""
    original = kernel.run

    def run(*args: Any, **given: Any) -> Any:
        other = {name: value for name, value in options.items() if name in given}
        kept = {name: value for name, value in (given | other).items() if name not in other or value is not None}
        return original(*args, **kept)

    kernel.run = run


def _set(table: Mapping[Any, Any], value: Any) -> dict[Any, Any]:
    """A table with other settings: `value` in every entry; or, where it is by key of the table, in
    those entries; or, where it is by setting, in each entry that is a table of settings."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(table, value)
    if not all(key in table for key in value):
        return {key: {**entry, **value} for key, entry in table.items()}
    merged = {
        key: {**table[key], **new} if isinstance(new, Mapping) and isinstance(table[key], Mapping) else new
        for key, new in value.items()
    }
    return {**table, **merged}


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
    except (VirtualNPUError, ValueError) as error:  # of the model or of the kernel's own checks
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
            with run("values", hazards=True, cores=SMALL_CORES[chosen.suite]):
                if chosen.suite == "forward":
                    found, exact = kernel.attention_fwd(q, k, v, causal, rule.sm_scale)[:1], (out,)
                else:
                    found = kernel.attention_bwd(dout, q, k, v, out_half, lse.float(), causal, rule.sm_scale)
                    exact = reference_bwd(dout, q, k, v, causal, rule.sm_scale, out=out_half)
        except (VirtualNPUError, ValueError) as error:
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
    for chosen in (item for suite in SUITES for item in available(suite)):
        found[f"{chosen.suite}: {chosen.name}: values"] = chosen, None
        for case in cases(chosen.suite):
            if case.kind == "performance" and case.dtype == "fp16" and chosen.applies(case):
                found[f"{chosen.suite}: {chosen.name}: {case.name}"] = chosen, case
    return found


def _switches(chosen: Technique) -> list[object]:
    """What a technique sets, beside the edits."""
    items = [technique(chosen.suite, chosen.of), chosen] if chosen.of else [chosen]
    return [value for item in items for value in (item.settings, item.replace, item.options)]


def wanted() -> dict[str, str]:
    """Key to digest of every row of results/ablation.json."""
    model = sources()
    return {
        key: digest(model, edited(chosen), _switches(chosen), chosen.causal, case or SMALL_CORES)
        for key, (chosen, case) in work().items()
    }


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
