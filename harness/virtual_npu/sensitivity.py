"""`python -m harness.virtual_npu.sensitivity`: what predicted times hang on.

Halves and doubles each uncertain constant of the cost model and predicts the six official
forward cases and the six backward configurations (fp16) again, with fewer heads. Writes
results/sensitivity.json: for each case and constant the time over the unchanged one.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..configs import Case, cases
from .costs import default_constants
from .driver import run
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


def predicted(call: Callable[[], object], constants: Mapping[str, Any] | None = None) -> float:
    """Predicted ms of a call."""
    options: dict[str, Any] = {} if constants is None else {"constants": constants}
    with run("timing", **options) as record:
        call()
    return record.ms


def main() -> None:
    parser = argparse.ArgumentParser(description="Effect of halving and doubling each uncertain constant.")
    parser.add_argument("--json", type=Path, default=Path("results/sensitivity.json"))
    arguments = parser.parse_args()
    console = Console(width=150)
    chosen = timed_cases()
    calls = {case.name: case_call(case.suite, case, HEADS) for case in chosen}
    base = {name: predicted(call) for name, call in calls.items()}
    rows: dict[str, dict[str, list[float]]] = {}
    for label, (path, factors) in track(
        UNCERTAIN.items(), "constants", disable=not console.is_terminal, transient=True
    ):
        rows[label] = {
            name: [round(predicted(call, changed(path, factor)) / base[name], 4) for factor in factors]
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
    result = {"heads": HEADS, "base_ms": base, "factors": {k: v[1] for k, v in UNCERTAIN.items()}, "rows": rows}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    partial = arguments.json.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(arguments.json)
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
