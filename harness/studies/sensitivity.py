"""`python -m harness.studies.sensitivity`: what predicted times hang on.

Halves and doubles each uncertain constant of the cost model and predicts the six official
forward cases and the six backward configurations (fp16) again, with fewer heads. What comes
from HBM is taken from the full case: a few heads would all stay in L2. Writes
results/sensitivity.json after each case: for each constant the time over the unchanged one.
Cases that are in it, of the same sources, are not repeated. `scoring.interval` joins this
with the calibration error.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..configs import Case, cases
from ..results import write_json
from ..virtual_npu.driver import run
from ..virtual_npu.hardware import default_constants
from .sources import TIMES, fingerprint
from .trace import case_call

# Each with its factors; for the MTE1 rates the other published values instead.
UNCERTAIN: dict[str, tuple[tuple[str, ...], tuple[float, float]]] = {
    "cross-core latency": (("sync", "cross_core_cycles"), (0.5, 2.0)),
    "flag latency": (("sync", "flag_cycles"), (0.5, 2.0)),
    "GM to L1 (nd2nz) latency": (("nd2nz", "latency_cycles"), (0.5, 2.0)),
    "GM to L1 rate": (("nd2nz", "bytes_per_cycle"), (0.5, 2.0)),
    "GM to UB rate": (("gm_to_ub", "bytes_per_cycle"), (0.5, 2.0)),
    "UB to GM rate": (("ub_to_gm", "bytes_per_cycle"), (0.5, 2.0)),
    "L2 bandwidth": (("shared", "l2_bytes_per_cycle"), (0.5, 2.0)),
    "HBM bandwidth": (("shared", "hbm_bytes_per_cycle"), (0.5, 2.0)),
    "fixpipe head": (("fixpipe", "head_cycles"), (0.5, 2.0)),
    "fixpipe row": (("fixpipe", "row_cycles"), (0.5, 2.0)),
    "L1 to L0A rate": (("cube", "l0a_bytes_per_cycle"), (0.5, 256 / 129.7)),
    "L1 to L0B rate": (("cube", "l0b_bytes_per_cycle"), (0.5, 128 / 85.4)),
    "vector barrier": (("vector", "barrier_cycles"), (0.5, 2.0)),
    "scalar issue": (("scalar", "op_cycles"), (0.5, 2.0)),
}
HEADS = 40  # two for each core
# What the published textbook rows hardly feel, because nothing overlaps in them: the
# calibration error says nothing about these.
UNCONSTRAINED = ("cross-core latency", "L2 bandwidth", "HBM bandwidth")
Shares = Mapping[str, Mapping[str, float]]


def changed(path: tuple[str, ...], factor: float) -> dict[str, Any]:
    """The shipped constants with one multiplied."""
    constants = copy.deepcopy(default_constants())
    place: Any = constants
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] *= factor
    return constants


def timed_cases() -> list[Case]:
    """The official forward performance cases and the backward configurations in fp16."""
    return [
        c for suite in ("forward", "backward") for c in cases(suite) if c.kind == "performance" and c.dtype == "fp16"
    ]


def predicted(
    call: Callable[[], object], constants: Mapping[str, Any] | None = None, shares: Shares | None = None
) -> float:
    """Predicted ms of a call; `shares` of each kernel's reads come from HBM (default: found out)."""
    options: dict[str, Any] = {} if constants is None else {"constants": constants}
    if shares is not None:
        options["hbm_share"] = shares
    with run("timing", **options) as record:
        call()
    return record.ms


def full_run(case: Case) -> tuple[float, Shares]:
    """Predicted ms of the whole case, and for each kernel the share of each argument that
    comes from HBM."""
    with run("timing") as record:
        case_call(case.suite, case, None)()
    return record.ms, {kernel.name: kernel.report["hbm_share"] for kernel in record.kernels}


def survey(name: str) -> dict[str, Any]:
    """One case: predicted ms of the whole case and of the few heads, and the effects."""
    (case,) = (case for case in timed_cases() if case.name == name)
    full_ms, shares = full_run(case)
    call = case_call(case.suite, case, HEADS)
    base = predicted(call, shares=shares)
    effects = {
        label: [round(predicted(call, changed(path, factor), shares) / base, 4) for factor in factors]
        for label, (path, factors) in UNCERTAIN.items()
    }
    return {"full_ms": full_ms, "base_ms": base, "effects": effects}


def _earlier(path: Path, mark: str) -> dict[str, Any]:
    """Cases in the file that these sources made."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    if content.get("heads") != HEADS or content.get("factors") != _factors():
        return {}
    return {name: row for name, row in content.get("cases", {}).items() if row["sources"] == mark}


def _factors() -> dict[str, list[float]]:
    return {label: list(factors) for label, (_, factors) in UNCERTAIN.items()}


def show(rows: Mapping[str, Any], console: Console) -> None:
    """Print a line for each constant, a column for each case."""
    table = Table(box=None)
    for heading in ("predicted time over unchanged: low / high", *rows):
        table.add_column(heading, no_wrap=True)
    for label, (_, factors) in UNCERTAIN.items():
        cells = ["/".join(f"{value:.2f}" for value in row["effects"][label]) for row in rows.values()]
        table.add_row(f"{label} x{factors[0]:g} / x{factors[1]:.2g}", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Effect of halving and doubling each uncertain constant.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--fresh", action="store_true", help="also the cases that the file has")
    parser.add_argument("--json", type=Path, default=Path("results/sensitivity.json"))
    arguments = parser.parse_args()
    mark = fingerprint(TIMES)
    names = [case.name for case in timed_cases()]
    rows = {} if arguments.fresh else _earlier(arguments.json, mark)
    left = [name for name in names if name not in rows]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(survey, name): name for name in left}
        for done, future in enumerate(as_completed(futures), 1):
            rows[futures[future]] = {**future.result(), "sources": mark}
            rows = {name: rows[name] for name in names if name in rows}
            write_json(
                arguments.json,
                {"heads": HEADS, "factors": _factors(), "unconstrained": UNCONSTRAINED, "cases": rows},
            )
            print(f"[{done}/{len(left)}] {futures[future]}: done", flush=True)
    show(rows, Console(width=185))
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
