"""`python -m harness.studies.timelines`: a steady stretch of each pipe, before and after.

"Before" is the first version of the forward (its general path) and the textbook backward;
"after" is the shipped kernel, of several launches the longest. Traced on a few heads, reads
from HBM as in the full case. Writes results/timelines.json: for each lane the spans in which
the pipe worked, and for the scalar units those in which a core waited for another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..configs import Case, cases, input_rule
from ..virtual_npu.driver import run
from ..virtual_npu.timing import Timed
from .profile import lane
from .rows import REPOSITORY, Kept, digest, progress, sources
from .trace import case_call

RESULTS = REPOSITORY / "results" / "timelines.json"
CASES = {"forward": "P5", "backward": "C2-fp16"}
HEADS = 20
WINDOW = 60_000.0  # cycles
CELLS = 600  # spans closer than a cell of the window are joined
LANES = ("aic_mte2", "aic_mte1", "aic_mac", "aic_fixpipe", "aiv_mte2 0", "aiv_vec 0", "aiv_mte3 0")


def before(case: Case, heads: int | None) -> Callable[[], object]:
    """The call of the version that a case is compared with."""
    z, h = (case.z, case.h) if heads is None else (1, heads)
    q, k, v, out, dout = (torch.empty(z, h, case.n, case.d, dtype=case.torch_dtype) for _ in range(5))
    scale = input_rule().sm_scale
    if case.suite == "forward":
        from forward import attention_fwd, get_tiling

        tile_m, _ = get_tiling(z, h, case.n, case.d, case.causal)
        return lambda: attention_fwd(q, k, v, case.causal, scale, block_m=tile_m)
    from ..textbook import textbook_bwd

    lse = torch.empty(z, h, case.n)
    return lambda: textbook_bwd(dout, q, k, v, out, lse, case.causal, scale)


def spans(timed: Timed, low: float, high: float) -> dict[str, list[list[int]]]:
    """For each lane the stretches [start, end] of work in a window, in cycles from its start."""
    cell = (high - low) / CELLS
    found: dict[str, list[list[float]]] = {name: [] for name in LANES}
    for core in timed.cores:
        for kind, pipe, start, end, _ in core.events:
            name = lane(core.kind, pipe, core.sub)
            if kind == "run" and name in found and end > low and start < high and end > start:
                found[name].append([max(start, low) - low, min(end, high) - low])
    joined: dict[str, list[list[int]]] = {}
    for name, stretches in found.items():
        merged: list[list[float]] = []
        for start, end in sorted(stretches):
            if merged and start - merged[-1][1] < cell:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        joined[name] = [[round(start), round(end)] for start, end in merged]
    return joined


def trace(full: Callable[[], object], part: Callable[[], object]) -> dict[str, Any]:
    """The longest launch of a call: its name, busy shares in the full case, and spans of the part."""
    with run("timing") as record:
        full()
    longest = max(record.kernels, key=lambda kernel: kernel.ms or 0.0)
    traced: list[Any] = []
    with run("timing", trace=traced, hbm_share={k.name: k.report["hbm_share"] for k in record.kernels}):
        part()
    timed = next(timed for program, timed in traced if program.name == longest.name)
    low = max(0.0, timed.cycles / 2 - WINDOW / 2)
    total = longest.report["core_cycles"]
    busy = longest.report["busy"]
    return {
        "kernel": longest.name,
        "ms": round(record.ms, 4),
        "busy": {name: round(busy.get(name.replace(" ", ""), 0.0) / total, 4) for name in LANES},
        "spans": spans(timed, low, min(timed.cycles, low + WINDOW)),
    }


def jobs() -> dict[str, tuple[Case, Callable[[Case, int | None], Callable[[], object]]]]:
    """What is traced, by key."""
    found: dict[str, tuple[Case, Callable[[Case, int | None], Callable[[], object]]]] = {}
    for suite, name in CASES.items():
        case = next(case for case in cases(suite) if case.name == name)
        found[f"{suite} before"] = case, before
        found[f"{suite} after"] = case, lambda case, heads: case_call(case.suite, case, heads)
    return found


def wanted() -> dict[str, str]:
    """Key to digest of every row of results/timelines.json."""
    names = ("forward.py", "backward.py", "harness/textbook.py", "harness/studies/timelines.py")
    return {key: digest(sources(*names), case) for key, (case, _) in jobs().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="A steady stretch of each pipe, before and after.")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kept = Kept(arguments.json, wanted())
    missing = kept.missing()
    for done, key in enumerate(missing, 1):
        case, make = jobs()[key]
        row = trace(make(case, None), make(case, HEADS))
        kept.add(key, {"suite": case.suite, "case": case.name, **row}, window=WINDOW)
        progress(done, len(missing), f"{key}, {case.name}: {row['kernel']}, {row['ms']:.2f} ms, predicted")
    kept.write(window=WINDOW)
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
