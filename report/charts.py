"""Figures of the results, each an SVG text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from harness.evaluator import PUBLISHED
from harness.studies.accuracy import STDS
from harness.studies.roofline import PIPES
from harness.studies.timelines import LANES

from . import diagrams
from .records import Records
from .score import is_predicted, timed
from .studies import WHO, ablated, accuracy_errors, geomean, slowdowns
from .style import BLUE, GREEN, GRID, ORANGE, PURPLE, RED, SETTINGS, TEAL, TEXT, svg

Maker = Callable[[Records], Figure | None]
FIGURES: dict[str, tuple[Maker, tuple[str, ...]]] = {}


def chart(name: str, *needs: str) -> Callable[[Maker], Maker]:
    """Register a figure and the results files that it needs."""

    def register(make: Maker) -> Maker:
        FIGURES[name] = make, needs
        return make

    return register


def draw(records: Records) -> dict[str, str]:
    """Every figure whose results are there and show something, by name, as SVG."""
    with plt.rc_context(SETTINGS):
        found = {name: svg(make()) for name, make in diagrams.DIAGRAMS.items()}
        for name, (make, needs) in FIGURES.items():
            figure = make(records) if all(records.has(need) for need in needs) else None
            if figure is not None:
                found[name] = svg(figure)
    return found


def _plain_log(axis: Any, ticks: list[float]) -> None:
    """A logarithmic axis with plain numbers at the ticks given."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


@chart("score", "score")
def score(records: Records) -> Figure:
    """Speed-ups over the baselines, with intervals where only one side is predicted."""
    panels = [suite for suite in ("forward", "backward") if timed(records, suite)]
    figure, axes = plt.subplots(1, len(panels), figsize=(9.5, 3.4), squeeze=False)
    word = records["score"]["device"]["time"]
    for axis, suite in zip(axes[0], panels, strict=True):
        rows = [(case, row) for case, row in timed(records, suite) if case.dtype == "fp16"]
        names = [
            f"{case.name.split('-')[0]}\n{case.n}x{case.d}\n{'causal' if case.causal else 'full'}" for case, _ in rows
        ]
        values = [row["speedup"] or 0.0 for _, row in rows]
        axis.bar(names, values, color=BLUE if suite == "forward" else TEAL, width=0.62)
        top = max(values)
        for index, (case, row) in enumerate(rows):
            label = values[index]
            if is_predicted(records) and row["speedup"] and records.error is not None:
                slow, fast = records.error.of(case.name, baseline_predicted=row["baseline"] != PUBLISHED)
                low, high = values[index] / fast, values[index] / slow
                axis.plot([index, index], [low, high], color=ORANGE, linewidth=2)
                label, top = high, max(top, high)
            axis.annotate(f"{values[index]:.2f}", (index, label), (0, 3), textcoords="offset points", ha="center")
        axis.axhline(1.0, color=RED, linewidth=1, linestyle="--")
        axis.set_ylim(0, top * 1.15)
        baseline = {"forward": "vendor, published", "backward": f"textbook, {word}"}
        used = sorted({row["baseline"] for _, row in rows if row["baseline"]})
        told = baseline[suite] if len(used) == 1 else ", ".join(used)
        axis.set_title(f"{suite} fp16: times faster than {told}")
        axis.tick_params(axis="x", length=0, labelsize=8.5)
    figure.tight_layout()
    return figure


@chart("calibration", "calibration")
def calibration(records: Records) -> Figure:
    """Published times and their predictions."""
    rows = records["calibration"]["rows"]
    figure, axis = plt.subplots(figsize=(5.2, 4.6))
    low, high = 9.0, 1000.0
    line = np.array([low, high])
    axis.plot(line, line, color=GRID, linewidth=1)
    axis.fill_between(line, line * 0.9, line * 1.1, color=GRID, alpha=0.18, linewidth=0)
    for mask, colour in (("causal", ORANGE), ("full", BLUE)):
        chosen = [row for row in rows if f" {mask} " in row["name"]]
        x, y = [row["measured_ms"] for row in chosen], [row["predicted_ms"] for row in chosen]
        axis.scatter(x, y, s=34, color=colour, label=mask, alpha=0.85, linewidths=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    for direction in (axis.xaxis, axis.yaxis):
        _plain_log(direction, [10, 20, 50, 100, 200, 500, 1000])
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_xlabel("ms, measured by others on a 910B3")
    axis.set_ylabel("ms, predicted")
    axis.legend(title="band: 10 % either way", title_fontsize=9, loc="upper left")
    axis.grid(True)
    return figure


def _ablation(records: Records, suite: str) -> Figure | None:
    items = [(item, slowdowns(records, item)) for item in ablated(suite)]
    items = [(item, found) for item, found in items if found]
    if not items:
        return None
    cases = sorted({case for _, found in items for case in found})
    colours = dict(zip(cases, (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL), strict=False))
    figure, axis = plt.subplots(figsize=(8.6, 0.46 * len(items) + 1.3))
    largest = max((value for _, found in items for value in found.values()), default=1.0)
    smallest = min((value for _, found in items for value in found.values()), default=1.0)
    for index, (_, found) in enumerate(items):
        mean = geomean(found.values())
        axis.barh(index, mean - 1.0, left=1.0, height=0.55, color=GRID, alpha=0.35, linewidth=0)
        for case, value in found.items():
            axis.plot(value, index, "o", color=colours[case], markersize=6, alpha=0.9)
        axis.annotate(f"{mean:.2f}", (max(*found.values(), mean), index), (9, -3.5), textcoords="offset points")
    axis.axvline(1.0, color=TEXT, linewidth=1)
    axis.set_yticks(range(len(items)), [item.name + (" (general path)" if item.of else "") for item, _ in items])
    axis.invert_yaxis()
    axis.set_xscale("log")
    ticks = [t for t in (0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12) if smallest * 0.9 <= t <= largest * 1.25]
    _plain_log(axis.xaxis, ticks)
    axis.set_xlim(smallest * 0.93, largest * 1.2)
    axis.grid(True, axis="x")
    axis.set_xlabel("predicted time switched off / as shipped (bar: geometric mean)")
    handles = [plt.Line2D([], [], marker="o", linestyle="", color=colours[case], label=case) for case in cases]
    axis.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6)
    return figure


@chart("ablation-forward", "ablation")
def ablation_forward(records: Records) -> Figure | None:
    """What each technique of the forward gains."""
    return _ablation(records, "forward")


@chart("ablation-backward", "ablation")
def ablation_backward(records: Records) -> Figure | None:
    """What each technique of the backward gains."""
    return _ablation(records, "backward")


@chart("roofline", "roofline")
def roofline(records: Records) -> Figure:
    """Predicted speed over arithmetic intensity."""
    found = records["roofline"]
    figure, axis = plt.subplots(figsize=(8.4, 4.4))
    x = np.geomspace(8, 8000, 100)
    roofs = (("HBM", found["hbm_bytes_per_s"], ORANGE), ("L2", found["l2_bytes_per_s"], BLUE))
    peak = found["peak_flops"] / 1e12
    for label, rate, colour in roofs:
        axis.plot(x, np.minimum(x * rate / 1e12, peak), color=colour, linewidth=1.6)
        at = peak * 1e12 / rate
        axis.annotate(f"{label} {rate / 1e12:.1f} TB/s", (at * 0.16, peak * 0.16), (-6, 4), textcoords="offset points",
                      rotation=42, rotation_mode="anchor", color=colour)  # fmt: skip
    axis.annotate(f"cube {peak:.0f} TFLOP/s", (7800, peak), (0, 4), textcoords="offset points", ha="right")
    marks = {"forward": "o", "backward": "s"}
    labels: list[tuple[float, float, str]] = []
    for row in found["rows"]:
        speed = row["flops"] / row["ms"] / 1e9
        through_l2 = row["needs_ms"]["L2"] / 1e3 * found["l2_bytes_per_s"]
        points = [row["flops"] / through_l2, row["flops"] / row["compulsory_bytes"]]
        axis.plot(points, [speed, speed], color=GRID, linewidth=0.8, alpha=0.6)
        for value, (_, _, colour) in zip(points[::-1], roofs, strict=True):
            axis.plot(value, speed, marks[row["suite"]], color=colour, markersize=6.5, alpha=0.9)
        labels.append((speed, points[1], row["case"].split("-")[0]))
    placed: list[tuple[float, float]] = []
    for speed, at, label in sorted(labels):  # upward, so that no label covers another
        height = speed
        while any(abs(math.log(at / x)) < 0.4 and abs(math.log(height / y)) < 0.12 for x, y in placed):
            height *= 1.02
        placed.append((at, height))
        axis.annotate(label, (at, height), (8, -3), textcoords="offset points", fontsize=8.5)
    axis.set_xscale("log")
    axis.set_yscale("log")
    _plain_log(axis.xaxis, [10, 30, 100, 300, 1000, 3000])
    _plain_log(axis.yaxis, [10, 20, 50, 100, 200, 300])
    axis.set_xlim(8, 8000)
    axis.set_ylim(10, 420)
    axis.grid(True)
    axis.set_xlabel("useful FLOP for each byte (blue: bytes through L2, orange: compulsory bytes from HBM)")
    axis.set_ylabel("TFLOP/s, predicted")
    handles = [plt.Line2D([], [], marker=mark, linestyle="", color=TEXT, label=suite) for suite, mark in marks.items()]
    axis.legend(handles=handles, loc="lower right")
    return figure


@chart("pipes", "roofline")
def pipes(records: Records) -> Figure:
    """Share of the predicted time in which each pipe works."""
    rows = records["roofline"]["rows"]
    columns = [*PIPES, "useful cube work"]
    figure, axis = plt.subplots(figsize=(9.2, 0.36 * len(rows) + 0.9))
    for y, row in enumerate(rows):
        shares = [row["needs_ms"][pipe] / row["ms"] for pipe in PIPES] + [row["floors_ms"]["cube"] / row["ms"]]
        for x, (name, share) in enumerate(zip(columns, shares, strict=True)):
            colour = GREEN if name == "useful cube work" else BLUE if name.startswith("aic") else ORANGE
            axis.barh(y, 0.94, left=x, height=0.72, color=GRID, alpha=0.14, linewidth=0)
            axis.barh(y, 0.94 * min(share, 1.0), left=x, height=0.72, color=colour, alpha=0.5, linewidth=0)
            axis.annotate(
                f"{share:.0%}", (x + 0.97, y), (-6, -3.5), textcoords="offset points", ha="right", fontsize=8.5
            )
    axis.set_yticks(range(len(rows)), [row["case"].split("-")[0] for row in rows])
    axis.set_xticks([x + 0.47 for x in range(len(columns))], [name.replace("useful ", "useful\n") for name in columns])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    axis.set_xlim(0, len(columns))
    axis.set_ylim(len(rows) - 0.5, -0.5)
    return figure


def _lanes(axis: Axes, row: dict[str, Any], window: float) -> None:
    for index, name in enumerate(LANES):
        colour = {"aic_mac": GREEN, "aiv_vec 0": ORANGE}.get(name, BLUE)
        bars = [(start, end - start) for start, end in row["spans"][name]]
        axis.broken_barh(bars, (index - 0.36, 0.72), facecolors=colour, linewidth=0, alpha=0.85)
        share = row["busy"][name]
        axis.annotate(f"{share:.0%}", (window, index), (6, -3.5), textcoords="offset points", annotation_clip=False)
    axis.set_yticks(range(len(LANES)), [name.removesuffix(" 0") for name in LANES])
    axis.set_xlim(0, window)
    axis.set_ylim(len(LANES) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)


def _timeline(records: Records, suite: str) -> Figure:
    found = records["timelines"]
    rows = {row["key"]: row for row in found["rows"]}
    figure, axes = plt.subplots(2, 1, figsize=(9.2, 5.2), sharex=True)
    for axis, when in zip(axes, ("before", "after"), strict=True):
        row = rows[f"{suite} {when}"]
        _lanes(axis, row, found["window"])
        axis.set_title(f"{when}: {row['kernel']}, {row['case']} in {row['ms']:.3g} ms, predicted (right: busy)")
    axes[1].set_xlabel("cycles of a stretch from the middle of the run (1.8 GHz)")
    figure.tight_layout()
    return figure


@chart("timeline-forward", "timelines")
def timeline_forward(records: Records) -> Figure:
    """The forward's pipes."""
    return _timeline(records, "forward")


@chart("timeline-backward", "timelines")
def timeline_backward(records: Records) -> Figure:
    """The backward's pipes."""
    return _timeline(records, "backward")


@chart("accuracy", "accuracy")
def accuracy(records: Records) -> Figure:
    """Errors over input scales."""
    colours = dict(zip(WHO, (BLUE, ORANGE, GRID), strict=True))
    labels = {"ours": "this project", "textbook": "textbook", "torch": "PyTorch, same precision"}
    styles = {"ours": ("o", "-"), "textbook": ("s", "--"), "torch": ("^", ":")}
    figure, axes = plt.subplots(1, 4, figsize=(10, 3.2), sharey=True)
    for axis, (dtype, outputs, title) in zip(
        axes,
        [
            (dtype, outputs, f"{dtype}, {title}")
            for dtype in ("fp16", "bf16")
            for outputs, title in ((("out",), "output"), (("dq", "dk", "dv"), "gradients"))
        ],
        strict=True,
    ):
        for who in WHO:
            points = []
            for std in STDS:
                errors = [e for e in accuracy_errors(records, dtype, outputs, std, who) if e > 0]
                if errors:
                    points.append((std, geomean(errors), max(errors)))
            if not points:
                continue
            x, middle, worst = zip(*points, strict=True)
            marker, line = styles[who]
            axis.plot(x, middle, marker + line, color=colours[who], label=labels[who], markersize=5, alpha=0.9)
            axis.fill_between(x, middle, worst, color=colours[who], alpha=0.13, linewidth=0)
        axis.set_xscale("log")
        axis.set_yscale("log")
        _plain_log(axis.xaxis, list(STDS))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_title(title)
        axis.grid(True)
    axes[0].set_ylabel("relative L2 error")
    figure.supxlabel("standard deviation of q, k, v (line: mean, band: up to the largest)", fontsize=10, color=TEXT)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.06))
    figure.tight_layout()
    return figure
