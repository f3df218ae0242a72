"""`python -m harness.studies.tiles`: does the choice of tiles hang on constants that nobody has settled?

For each official case the shipped settings of its pipeline and a few others are timed under the
model's constants and under other published ones (hardware.md, section 2.2, and the range of the
cross-core latency, which has no source). Writes results/tiles.json after each case: predicted ms
of each, which is the fastest under which constants, and by how much the shipped ones miss it.
Rows of the same sources are kept.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..configs import Case
from ..virtual_npu.driver import install, run
from ..virtual_npu.errors import VirtualNPUError
from ..virtual_npu.hardware import default_constants
from .rows import Kept, digest, progress, sources
from .sensitivity import timed_cases
from .spaces import SPACES, Settings, Shape, excess

RESULTS = Path("results/tiles.json")
RELEASE = "1.1.0"
HEADS = 260  # 13 for each core
OTHERS = 4  # settings of a case beside the shipped ones
BASE = "the model's"
# Constants by name: what is other than in hardware.toml.
CONSTANTS: dict[str, dict[tuple[str, str], float]] = {
    BASE: {},
    "L1 to L0 at 256 and 128 B/cycle": {("cube", "l0a_bytes_per_cycle"): 256.0, ("cube", "l0b_bytes_per_cycle"): 128.0},
    "fixpipe head 35": {("fixpipe", "head_cycles"): 35.0},
    "fixpipe 55 + B/182": {
        ("fixpipe", "head_cycles"): 55.0,
        ("fixpipe", "row_cycles"): 0.0,
        ("fixpipe", "odd_cycles"): 0.0,
        ("fixpipe", "bytes_per_cycle"): 182.0,
    },
    "cross-core latency 100": {("sync", "cross_core_cycles"): 100.0},
    "cross-core latency 500": {("sync", "cross_core_cycles"): 500.0},
    "GM to L1 latency 187": {("nd2nz", "latency_cycles"): 187.0},
}
# Changes that give other tiles, tried in this order; those that a case's shipped settings have
# already, or that cannot fit, are passed over.
CHANGES: dict[str, tuple[Settings, ...]] = {
    "forward pipeline": (
        {"HALVES": 4, "BH": 64, "BN": 256, "F": 1},
        {"HALVES": 2, "BH": 128, "BN": 128, "F": 1},
        {"HALVES": 2, "BH": 128, "BN": 128, "F": 2},
        {"HALVES": 1, "BH": 128, "BN": 128, "F": 2},
        {"KG": 1024, "R": 16},
        {"KG": 512, "R": 32},
        {"KG": 512},
        {"RO": 64},
        {"RO": 128},
    ),
    "backward pipeline": (
        {"KG": 128, "LB": 128, "BT": 128, "UNROLL": 8, "SPLIT": 0},
        {"KG": 256, "LB": 256, "BT": 64, "UNROLL": 4},
        {"MIX": 0},
        {"SPLIT": 1},
        {"SPLIT": 0},
        {"MI": 512},
        {"MI": 256},
        {"BQ": 128},
        {"R": 32, "RD": 32},
    ),
}


def constants_of(changes: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """The shipped constants with some replaced."""
    constants = copy.deepcopy(default_constants())
    for (section, name), value in changes.items():
        if name not in constants[section]:
            raise KeyError(f"{section}.{name}")
        constants[section][name] = value
    return constants


def shape_of(case: Case) -> Shape:
    return Shape(case.z, case.h, case.n, case.d, case.causal, case.dtype)


def candidates(case: Case) -> tuple[str, list[Settings]]:
    """The space of a case's pipeline; its shipped settings and others, those first. Without
    settings where the case takes no pipeline."""
    name, shape = f"{case.suite} pipeline", shape_of(case)
    shipped = SPACES[name].shipped(shape)
    if shipped is None:
        return name, []
    found = [shipped]
    for change in CHANGES[name]:
        other = shipped | change
        if other not in found and not excess(SPACES[name], shape, other) and len(found) <= 2 * OTHERS:
            found.append(other)
    return name, found


def timed(name: str, shape: Shape, settings: Settings) -> dict[str, float] | None:
    """Predicted ms under each of CONSTANTS; None where the compiler refuses the settings."""
    found = {}
    for label, changes in CONSTANTS.items():
        try:
            with run("timing", release=RELEASE, constants=constants_of(changes)) as record:
                SPACES[name].call(shape, settings, shape.inputs(HEADS))
        except VirtualNPUError:
            return None
        found[label] = round(record.ms * shape.z * shape.h / HEADS, 4)
    return found


def judged(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each of CONSTANTS the number of the fastest row, and by what share the shipped one, row
    0, is slower."""
    found = {}
    for label in CONSTANTS:
        times = [row["ms"][label] for row in rows]
        best = times.index(min(times))
        found[label] = {"fastest": best, "shipped_slower": round(times[0] / times[best] - 1, 4)}
    return found


def measure(case_name: str) -> dict[str, Any]:
    """The row of a case by its name."""
    torch.set_num_threads(1)
    install()
    case = next(case for case in timed_cases() if case.name == case_name)
    name, settings = candidates(case)
    rows: list[dict[str, Any]] = []
    for one in settings:
        if len(rows) <= OTHERS and (ms := timed(name, shape_of(case), one)) is not None:
            rows.append({"settings": one, "ms": ms})
    return {"case": case.name, "space": name, "rows": rows, "under": judged(rows) if rows else {}}


def wanted() -> dict[str, str]:
    """Key to digest of every row of results/tiles.json."""
    made = {
        suite: sources(f"{suite}.py", "harness/studies/tiles.py", "harness/studies/spaces.py", "harness/configs.toml")
        for suite in ("forward", "backward")
    }
    return {case.name: digest(made[case.suite], case) for case in timed_cases()}


def difference(shipped: Settings, other: Settings) -> str:
    """What an alternative has that the shipped settings have not."""
    return " ".join(f"{name}={value}" for name, value in other.items() if shipped[name] != value)


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each case and each of CONSTANTS: case, constants, shipped ms, best other ms, which, slower."""
    found = []
    for row in rows:
        if not row["rows"]:
            continue
        shipped, *others = row["rows"]
        for label, verdict in row["under"].items():
            other = min(others, key=lambda one: one["ms"][label], default=None)
            cells = ["-", "-"]
            if other is not None:
                cells = [f"{other['ms'][label]:.3g}", difference(shipped["settings"], other["settings"])]
            slower = f"{verdict['shipped_slower']:.1%}" if verdict["fastest"] else "fastest"
            found.append([row["case"], label, f"{shipped['ms'][label]:.3g}", *cells, slower])
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """How often the shipped settings are the fastest, and how far they are behind at most."""
    verdicts = [(row["case"], label, v) for row in rows for label, v in row["under"].items()]
    if not verdicts:
        return "no case takes a pipeline"
    won = sum(verdict["fastest"] == 0 for _, _, verdict in verdicts)
    case, label, worst = max(verdicts, key=lambda item: item[2]["shipped_slower"])
    text = (
        f"The shipped settings are the fastest of those tried in {won} of {len(verdicts)} pairs of case and constants"
    )
    if worst["shipped_slower"] > 0:
        text += f"; at most they are {worst['shipped_slower']:.1%} behind ({case}, {label})"
    return f"{text}."


def main() -> None:
    parser = argparse.ArgumentParser(description="Tiles under other published constants.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--fresh", action="store_true", help="also the cases that the file has")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kept = Kept(arguments.json, wanted())
    if arguments.fresh:
        kept.rows.clear()
    missing = kept.missing()
    print(f"{len(kept.rows)} rows kept, {len(missing)} to make", flush=True)
    changed = {
        label: {".".join(path): value for path, value in changes.items()} for label, changes in CONSTANTS.items()
    }
    head = {"release": RELEASE, "heads": HEADS, "constants": changed}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(measure, key): key for key in missing}
        for done, future in enumerate(as_completed(futures), 1):
            kept.add(futures[future], future.result(), **head)
            progress(done, len(missing), futures[future])
    kept.write(**head)
    table = Table(box=None)
    for heading in ("case", "constants", "shipped ms", "best other ms", "which", "shipped behind by"):
        table.add_column(heading)
    for line in lines(kept.ordered()):
        table.add_row(*line)
    Console(width=180).print(table)
    print(summary(kept.ordered()))
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
