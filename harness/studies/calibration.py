"""How far predicted times can be trusted: the published 910B3 times, predicted.

`python -m harness.studies.calibration` predicts every published time of the textbook
kernel (measurements.csv, source A) with the project's own textbook kernel at the published
tile sizes, tile order and place of the accumulator, and writes results/calibration.json.

The shipped constants are published ones, none is fitted on these rows. To see how much a
fit could change, the three constants with the widest published or unknown ranges are
fitted on every other row and judged on the rest, both ways round.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import lsq_linear
from scipy.stats import spearmanr

from ..results import write_json
from ..virtual_npu.driver import run
from ..virtual_npu.hardware import default_constants

MEASUREMENTS = Path(__file__).with_name("measurements.csv")
SM_SCALE = 0.5  # of the published runs
CORES = 20

# Fitted on half of the rows: where the constant stands, and its published or plausible range.
FITTED: dict[tuple[str, ...], tuple[float, float]] = {
    ("nd2nz", "latency_cycles"): (187.0, 767.0),  # msKPP, with and without the layout change
    ("sync", "flag_cycles"): (1.0, 40.0),  # no source
    ("vector", "slope_cycles", "vcadd"): (3.0, 7.0),  # msKPP, pto-isa
}


@dataclass(frozen=True)
class Row:
    """A published time of a textbook kernel, in ms."""

    z: int
    h: int
    n: int
    d: int
    causal: bool
    block_m: int
    block_n: int
    acc: str
    order: str
    lazy: bool
    ms: float

    @property
    def name(self) -> str:
        lazy = " lazy" if self.lazy else ""
        mask = "causal" if self.causal else "full"
        return f"{self.n}x{self.d} {mask} {self.block_m}x{self.block_n} {self.acc} {self.order}{lazy}"

    def tiles_per_core(self, z: int) -> int:
        """Query tiles of the busiest of the 20 programs."""
        return -(-z * self.h * (self.n // self.block_m) // CORES)


def published() -> list[Row]:
    """The textbook rows of measurements.csv."""
    lines = (line for line in MEASUREMENTS.read_text().splitlines() if not line.startswith("#"))
    return [
        Row(
            int(row["z"]),
            int(row["h"]),
            int(row["n"]),
            int(row["d"]),
            row["causal"] == "1",
            int(row["bm"]),
            int(row["bn"]),
            row["acc"],
            row["order"],
            row["kernel"] == "textbook_lazy",
            float(row["ms"]),
        )
        for row in csv.DictReader(lines)
        if row["kernel"] in ("textbook", "textbook_lazy")
    ]


def predict(row: Row, constants: Mapping[str, Any] | None = None, *, z: int | None = None) -> float:
    """Predicted ms of a row. With a smaller z fewer heads run and the time is scaled by the
    tiles of the busiest program (within 2 % of the full run; what L2 holds is kept)."""
    from ..textbook import textbook_fwd

    heads = z or row.z
    q, k, v = (torch.empty(heads, row.h, row.n, row.d, dtype=torch.float16) for _ in range(3))
    options: dict[str, Any] = {} if constants is None else {"constants": constants}
    if heads != row.z:
        options["hbm_share"] = _shares(row)
    with run("timing", **options) as record:
        textbook_fwd(
            q, k, v, row.causal, SM_SCALE,
            block_m=row.block_m, block_n=row.block_n, acc=row.acc, order=row.order, lazy=row.lazy,
        )  # fmt: skip
    if heads == row.z:
        return record.ms
    chip = (constants or default_constants())["chip"]
    launch = (constants or default_constants())["launch"]["kernel_cycles"] / chip["clock_hz"] * 1e3
    return launch + (record.ms - launch) * row.tiles_per_core(row.z) / row.tiles_per_core(heads)


_SHARES: dict[Row, Mapping[str, float]] = {}


def _shares(row: Row) -> Mapping[str, float]:
    """Which share of each argument comes from HBM in the full run."""
    if row not in _SHARES:
        from ..textbook import textbook_fwd

        q, k, v = (torch.empty(row.z, row.h, row.n, row.d, dtype=torch.float16) for _ in range(3))
        with run("timing") as record:
            textbook_fwd(
                q, k, v, row.causal, SM_SCALE,
                block_m=row.block_m, block_n=row.block_n, acc=row.acc, order=row.order, lazy=row.lazy,
            )  # fmt: skip
        _SHARES[row] = record.kernels[0].report["hbm_share"]
    return _SHARES[row]


def _with(path: tuple[str, ...], value: float, constants: Mapping[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(constants))
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def _value(path: tuple[str, ...], constants: Mapping[str, Any]) -> float:
    place: Any = constants
    for key in path:
        place = place[key]
    return float(place)


def mape(ratios: Iterable[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(np.asarray(list(ratios)) - 1.0)))


def holdout(rows: list[Row], z: int) -> tuple[float, dict[str, list[float]]]:
    """Error on rows that the fit did not see, and the fitted values of both halves.

    The prediction is linearised in the three constants around the shipped ones.
    """
    base = default_constants()
    small = [min(row.z, max(1, z * 1024 // row.n)) for row in rows]
    plain = np.array([predict(row, base, z=size) for row, size in zip(rows, small, strict=True)])
    measured = np.array([row.ms for row in rows])
    slopes, lower, upper = [], [], []
    for path, (low, high) in FITTED.items():
        value = _value(path, base)
        other = high if abs(high - value) >= abs(low - value) else low
        changed = _with(path, other, base)
        moved = np.array([predict(row, changed, z=size) for row, size in zip(rows, small, strict=True)])
        slopes.append((moved - plain) / measured / (other - value))
        lower.append(low - value)
        upper.append(high - value)
    matrix = np.array(slopes).T
    residual = 1.0 - plain / measured
    errors = []
    fitted: dict[str, list[float]] = {".".join(path): [] for path in FITTED}
    for half in (0, 1):
        seen = np.arange(len(rows)) % 2 == half
        span = np.array(upper) - np.array(lower)
        bounds = (np.array(lower) / span, np.array(upper) / span + 1e-9)
        fit = lsq_linear(matrix[seen] * span, residual[seen], bounds).x * span
        ratios = plain[~seen] / measured[~seen] + matrix[~seen] @ fit
        errors += np.abs(ratios - 1.0).tolist()
        for path, step in zip(FITTED, fit, strict=True):
            fitted[".".join(path)].append(round(_value(path, base) + float(step), 2))
    return float(np.mean(errors)), fitted


def calibrate(*, z: int | None = None, with_holdout: bool = True) -> dict[str, Any]:
    """Predict all rows. `z` shrinks the runs (see `predict`).

    Returns:
        rows (name, measured_ms, predicted_ms, ratio), mape, worst, spearman, holdout_mape,
        fitted.
    """
    rows = published()
    console = Console()
    predicted = [
        predict(row, z=None if z is None else min(row.z, max(1, z * 1024 // row.n)))
        for row in track(rows, "predicting", disable=not console.is_terminal, transient=True)
    ]
    ratios = [p / row.ms for p, row in zip(predicted, rows, strict=True)]
    result: dict[str, Any] = {
        "rows": [
            {"name": row.name, "measured_ms": row.ms, "predicted_ms": round(p, 3), "ratio": round(ratio, 4)}
            for row, p, ratio in zip(rows, predicted, ratios, strict=True)
        ],
        "mape": round(mape(ratios), 4),
        "worst": round(max(abs(ratio - 1) for ratio in ratios), 4),
        "spearman": round(float(spearmanr(predicted, [row.ms for row in rows]).statistic), 4),
    }
    if with_holdout:
        error, fitted = holdout(rows, z or 16)
        result["holdout_mape"] = round(error, 4)
        result["fitted"] = {"shipped": "none: the constants are published ones", "on_each_half": fitted}
    return result


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the table."""
    table = Table("textbook kernel, 910B3", "measured ms", "predicted ms", "ratio", box=None)
    for row in result["rows"]:
        table.add_row(row["name"], f"{row['measured_ms']:g}", f"{row['predicted_ms']:.2f}", f"{row['ratio']:.3f}")
    console.print(table)
    console.print(
        f"MAPE {result['mape']:.1%}, worst row {result['worst']:.1%}, rank correlation {result['spearman']:.3f}"
    )
    if "holdout_mape" in result:
        console.print(
            f"held-out MAPE {result['holdout_mape']:.1%} with constants fitted on the other half of the rows:"
        )
        for name, values in result["fitted"]["on_each_half"].items():
            console.print(f"  {name}: {values[0]:g} and {values[1]:g}")
        console.print("the shipped constants are published ones; none is fitted on these rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("results/calibration.json"), help="where to write")
    arguments = parser.parse_args()
    result = calibrate()
    if any(not math.isfinite(row["ratio"]) for row in result["rows"]):
        raise SystemExit("a prediction is not finite")
    show(result, Console())
    write_json(arguments.json, result)
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
