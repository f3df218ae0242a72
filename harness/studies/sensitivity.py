"""`python -m harness.studies.sensitivity`: what predicted times hang on.

Halves and doubles each uncertain constant of the cost model and predicts the six official
forward cases and the six backward configurations (fp16) again, with fewer heads. What comes
from HBM is taken from the full case: a few heads would all stay in L2. Writes
results/sensitivity.json: for each case and constant the time over the unchanged one.

`interval` joins this with the calibration error.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..configs import Case, cases
from ..results import write_json
from ..virtual_npu.costs import default_constants
from ..virtual_npu.driver import run
from .calibration import interval as calibration_interval
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


def interval(ms: float, ratios: Iterable[float], effects: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """The range in ms that a predicted time stands for.

    Two parts, joined as independent (root of the sum of squares of their logarithms): the
    10th to 90th percentile of the calibration's predicted over measured, and the effect of
    halving and doubling each constant that the calibration hardly feels (`UNCONSTRAINED`).

    Args:
        ms: predicted time.
        ratios: predicted over measured of the published rows (results/calibration.json).
        effects: by constant, predicted times over the unchanged one (results/sensitivity.json, rows).
    """
    low, high = calibration_interval(1.0, ratios)
    down, up = min(0.0, math.log(low)) ** 2, max(0.0, math.log(high)) ** 2
    for label in UNCONSTRAINED:
        logs = [math.log(value) for value in effects[label]]
        down += min(0.0, *logs) ** 2
        up += max(0.0, *logs) ** 2
    return ms * math.exp(-math.sqrt(down)), ms * math.exp(math.sqrt(up))


def recorded_interval(case: str, ms: float, results: Path = Path("results")) -> tuple[float, float] | None:
    """`interval` from the records of `make calibrate` and `make sensitivity`; None without them
    or for a case that they do not have (bf16 takes the fp16 case of the same name)."""
    try:
        calibration = json.loads((results / "calibration.json").read_text())
        rows = json.loads((results / "sensitivity.json").read_text())["rows"]
    except FileNotFoundError:
        return None
    name = case.replace("-bf16", "-fp16")
    if any(name not in row for row in rows.values()):
        return None
    effects = {label: row[name] for label, row in rows.items()}
    return interval(ms, [row["ratio"] for row in calibration["rows"]], effects)


def main() -> None:
    parser = argparse.ArgumentParser(description="Effect of halving and doubling each uncertain constant.")
    parser.add_argument("--json", type=Path, default=Path("results/sensitivity.json"))
    arguments = parser.parse_args()
    console = Console(width=185)
    chosen = timed_cases()
    calls = {case.name: case_call(case.suite, case, HEADS) for case in chosen}
    full = {case.name: full_run(case) for case in track(chosen, "cases", disable=not console.is_terminal)}
    base = {name: predicted(call, shares=full[name][1]) for name, call in calls.items()}
    rows: dict[str, dict[str, list[float]]] = {}
    for label, (path, factors) in track(
        UNCERTAIN.items(), "constants", disable=not console.is_terminal, transient=True
    ):
        rows[label] = {
            name: [round(predicted(call, changed(path, factor), full[name][1]) / base[name], 4) for factor in factors]
            for name, call in calls.items()
        }
        if not console.is_terminal:
            print(f"{label}: done", flush=True)
    table = Table(box=None)
    for heading in ("predicted time over unchanged: low / high", *base):
        table.add_column(heading, no_wrap=True)
    for label, (_, factors) in UNCERTAIN.items():
        cells = ["/".join(f"{value:.2f}" for value in rows[label][name]) for name in base]
        table.add_row(f"{label} x{factors[0]:g} / x{factors[1]:.2g}", *cells)
    console.print(table)
    result = {
        "heads": HEADS,
        "base_ms": base,
        "full_ms": {name: ms for name, (ms, _) in full.items()},
        "factors": {k: v[1] for k, v in UNCERTAIN.items()},
        "rows": rows,
    }
    write_json(arguments.json, result)
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
