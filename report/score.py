"""Blocks of `make score`: points, cases, comparison with published times."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.configs import Case
from harness.evaluator import PUBLISHED
from harness.studies.calibration import MEASUREMENTS
from scoring.interval import score_interval
from scoring.rules import Entry, Score

from .blocks import block
from .markdown import figure, number, percent, span, table
from .records import Records, named_cases

TEAMS = Path(__file__).with_name("published.toml")
Rows = list[tuple[Case, dict[str, Any]]]


def shape(case: Case) -> str:
    """Z,H,N,D and mask of a case."""
    return f"{case.z},{case.h},{case.n},{case.d} {'causal' if case.causal else 'full'}"


def timed(records: Records, suite: str) -> Rows:
    """The performance cases of a suite."""
    return [(c, row) for c, row in named_cases(records["score"]) if c.suite == suite and c.kind == "performance"]


def is_predicted(records: Records) -> bool:
    """Whether the times of results/score.json are predictions."""
    return records["score"]["device"]["time"] == "predicted"


def interval_note(records: Records) -> str:
    """What the interval of a predicted time is."""
    if records.error is None:
        return "No interval: `make calibrate` has not been run."
    low, high = records.error.calibration
    text = f"Interval: true over predicted time of the calibration, 10th to 90th percentile ({low:.2f} to {high:.2f})"
    if records.error.effects:
        text += ", joined with the constants that no published time tests, halved and doubled"
    else:
        text += "; the constants that no published time tests are left out (`make sensitivity`)"
    if records.error.stale:
        text += " (for other sources than these)"
    return f"{text}. Where a baseline is predicted too, the calibration's error counts for both sides of the ratio."


def bounds(records: Records, suite: str) -> tuple[Score, Score] | None:
    """The scores of a suite at the slow and at the fast end of every case's interval; None where
    times are measured or there is no calibration."""
    if not is_predicted(records) or records.error is None:
        return None
    entries: dict[str, list[Entry]] = {"correctness": [], "performance": []}
    ranges = []
    for case, row in named_cases(records["score"]):
        if case.suite == suite:
            entries[case.kind].append(Entry(row["status"] == "passed", row["ms"], row["baseline_ms"]))
            if case.kind == "performance":
                ranges.append(records.error.of(case.name, baseline_predicted=row["baseline"] != PUBLISHED))
    return score_interval(entries["correctness"], entries["performance"], ranges)


def _scored(records: Records) -> dict[str, dict[str, Any]]:
    return {name: suite for name, suite in records["score"]["suites"].items() if suite["score"] is not None}


def summary_rows(records: Records) -> list[list[str]]:
    """One row for each suite: passed, points, score, geometric mean, and their intervals."""
    rows = []
    for name, suite in _scored(records).items():
        own = [row for row in records["score"]["cases"] if row["suite"] == name]
        ends = bounds(records, name)
        mean = None if ends is None else (ends[0].geomean_speedup, ends[1].geomean_speedup)
        rows.append(
            [
                name,
                f"{sum(row['status'] == 'passed' for row in own)} of {len(own)}",
                f"{suite['correctness_points']:.1f}/40",
                f"{suite['performance_points']:.1f}/60",
                f"{suite['score']:.1f}/100",
                "-" if ends is None else f"{ends[0].score:.1f} to {ends[1].score:.1f}",
                number(suite["geomean_speedup"]),
                "-" if mean is None or None in mean else span((mean[0] or 0.0, mean[1] or 0.0)),
            ]
        )
    return rows


@block("score", "score")
def score(records: Records) -> str:
    """The points of each suite."""
    device = records["score"]["device"]
    word = device["time"]
    header = ["suite", "cases passed", "correctness", "performance", "score", "interval", "geometric mean", "interval"]
    text = f"{device['name']}, {device['compiler']}; every time {word}.\n\n" + table(header, summary_rows(records))
    if is_predicted(records):
        text += f"\n\n{interval_note(records)}"
    return text + "\n\n" + figure("score", f"Speed-up of each performance case over its baseline, {word}.")


def _case_table(records: Records, suite: str) -> str:
    word = records["score"]["device"]["time"]
    header = ["case", "Z,H,N,D", "dtype", "status", "heads checked", f"ms, {word}"]
    rows = []
    with_scratch = any(row.get("scratch_bytes") is not None for _, row in timed(records, suite))
    for case, row in timed(records, suite):
        found = records.interval(case.name, row["ms"]) if row["ms"] is not None else None
        cells = [case.name, shape(case), case.dtype, row["status"], f"{row['heads_checked']} of {row['heads']}"]
        cells.append(number(row["ms"]))
        if is_predicted(records):
            cells.append(span(found))
        cells += [number(row["textbook_ms"]), number(row["baseline_ms"]), number(row["speedup"])]
        cells += [percent(row["cube_utilisation"]), number(row["max_abs_error"], 2), number(row["rms_error"], 2)]
        if with_scratch:
            cells.append("-" if row.get("scratch_bytes") is None else f"{row['scratch_bytes'] / 2**20:.0f}")
        rows.append(cells)
    if is_predicted(records):
        header.append("interval")
    names = sorted({row["baseline"] for _, row in timed(records, suite) if row["baseline"]})
    header += [f"textbook, {word}", f"baseline: {', '.join(names) or 'none'}", "speed-up", "cube busy"]
    header += ["max abs error", "rms error", *(["scratch MiB"] if with_scratch else [])]
    return table(header, rows, left=(0, 1, 2, 3))


@block("cases-forward", "score")
def cases_forward(records: Records) -> str:
    """The timed cases of the forward."""
    return _case_table(records, "forward")


@block("cases-backward", "score")
def cases_backward(records: Records) -> str:
    """The timed cases of the backward."""
    return _case_table(records, "backward")


@block("correctness", "score")
def correctness(records: Records) -> str:
    """Errors of the forward's correctness cases."""
    rows = [
        [
            case.name,
            shape(case),
            case.dtype,
            row["status"],
            f"{row['heads_checked']} of {row['heads']}",
            number(row["max_abs_error"], 2),
            number(row["rms_error"], 2),
        ]
        for case, row in named_cases(records["score"])
        if case.kind == "correctness"
    ]
    header = ["case", "Z,H,N,D", "dtype", "status", "heads checked", "max abs error", "rms error"]
    return table(header, rows, left=(0, 1, 2, 3))


def measured_textbook(case: Case) -> float | None:
    """The fastest published time of a textbook kernel (with a running maximum) of a case, in ms."""
    lines = [line for line in MEASUREMENTS.read_text().splitlines() if not line.startswith("#")]
    wanted = [str(case.z), str(case.h), str(case.n), str(case.d), str(int(case.causal))]
    found = [
        float(row["ms"])
        for row in csv.DictReader(lines)
        if row["kernel"] == "textbook" and [row[key] for key in ("z", "h", "n", "d", "causal")] == wanted
    ]
    return min(found, default=None)


@block("comparison", "score")
def comparison(records: Records) -> str:
    """The forward beside published times on a 910B3."""
    team: dict[str, float] = tomllib.loads(TEAMS.read_text())["best_public_triton_kernel"]["share_of_vendor"]
    word = records["score"]["device"]["time"]
    header = ["case", "Z,H,N,D", "vendor, published", "textbook, published", "best public Triton kernel, published"]
    header += [f"this project, {word}", *(["interval"] if is_predicted(records) else [])]
    rows = []
    for case, row in timed(records, "forward"):
        share = team.get(case.name)
        public = None if share is None or case.baseline_ms is None else case.baseline_ms / share
        cells = [case.name, shape(case), number(case.baseline_ms), number(measured_textbook(case)), number(public)]
        cells.append(number(row["ms"]))
        if is_predicted(records):
            cells.append(span(records.interval(case.name, row["ms"]) if row["ms"] else None))
        rows.append(cells)
    return "Milliseconds of one call; published times were measured by others on a 910B3.\n\n" + table(
        header, rows, left=(0, 1)
    )


@block("short", "score")
def short(records: Records) -> str:
    """The short table of README."""
    word = records["score"]["device"]["time"]
    header: Sequence[str] = ["suite", "cases passed", "score", "interval", "geometric mean of speed-ups", "baseline"]
    rows = []
    for row in summary_rows(records):
        names = sorted({r["baseline"] for _, r in timed(records, row[0]) if r["baseline"]})
        rows.append([row[0], row[1], row[4], row[5], row[6], ", ".join(names)])
    text = f"`make score` on {records['score']['device']['name']}, every time {word}:\n\n" + table(header, rows)
    return text + "\n\n![Speed-up of each performance case over its baseline](figures/score.svg)"
