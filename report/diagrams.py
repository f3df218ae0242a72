"""Drawings of the machine and of the data flow of both kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from .style import BLUE, GREEN, GRID, ORANGE, PURPLE, RED, TEXT

Point = tuple[float, float]
DIAGRAMS: dict[str, Callable[[], Figure]] = {}


def diagram(name: str) -> Callable[[Callable[[], Figure]], Callable[[], Figure]]:
    """Register a drawing."""

    def register(make: Callable[[], Figure]) -> Callable[[], Figure]:
        DIAGRAMS[name] = make
        return make

    return register


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A drawing area whose unit is about a line of text, y downward."""
    figure, axis = plt.subplots(figsize=(width / 10, height / 10))
    axis.set_xlim(0, width)
    axis.set_ylim(height, 0)
    axis.set_axis_off()
    return figure, axis


def _box(axis: Axes, x: float, y: float, w: float, h: float, text: str, colour: str, size: float = 9) -> None:
    """A box with its text in the middle."""
    patch = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.8", linewidth=1.3, edgecolor=colour,
                           facecolor=(*plt.matplotlib.colors.to_rgb(colour), 0.12))  # fmt: skip
    axis.add_patch(patch)
    axis.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size, linespacing=1.35)


def _arrow(axis: Axes, start: Point, end: Point, text: str, colour: str = TEXT,
           offset: Point = (0.6, 0.0), ha: str = "left") -> None:  # fmt: skip
    """An arrow with a text beside its middle."""
    axis.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.3})
    x, y = (start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1]
    axis.text(x, y, text, fontsize=8.5, color=colour, ha=ha, va="center", linespacing=1.3)


@diagram("machine")
def machine() -> Figure:
    """One AI core of twenty."""
    figure, axis = _canvas(98, 42)
    _box(axis, 1, 1, 96, 6, "global memory: HBM 64 GiB, in front of it L2 192 MiB, shared by 20 AI cores", GRID)
    _box(axis, 1, 15, 46, 26, "", BLUE)
    axis.text(3, 39, "cube core (aic)", fontsize=10, color=BLUE)
    _box(axis, 4, 19, 12, 7, "L1\n512 KB", BLUE)
    _box(axis, 22, 19, 12, 7, "L0A, L0B\n64 KB each", BLUE)
    _box(axis, 22, 31, 12, 6, "cube\n16x16x16", GREEN)
    _box(axis, 37, 25, 8, 7, "L0C\n128 KB", BLUE)
    _arrow(axis, (10, 7), (10, 19), "MTE2 (nd2nz)", offset=(0.8, -2))
    _arrow(axis, (16, 22.5), (22, 22.5), "MTE1", offset=(0, -1.4), ha="center")
    _arrow(axis, (28, 26), (28, 31), "")
    _arrow(axis, (34, 35), (40, 32), "mmad", offset=(0.6, 1.8))
    _arrow(axis, (41, 25), (41, 7), "fixpipe", offset=(-0.8, -5), ha="right")
    _box(axis, 51, 15, 46, 26, "", ORANGE)
    axis.text(53, 39, "two vector cores (aiv)", fontsize=10, color=ORANGE)
    _box(axis, 55, 22, 14, 9, "UB\n192 KB each", ORANGE)
    _box(axis, 76, 22, 18, 9, "vector unit\n256 bytes a repeat", ORANGE)
    _arrow(axis, (59, 7), (59, 22), "MTE2", offset=(-0.8, -3.5), ha="right")
    _arrow(axis, (65, 22), (65, 7), "MTE3", offset=(0.8, -3.5))
    _arrow(axis, (69, 25), (76, 25), "")
    _arrow(axis, (76, 28), (69, 28), "")
    _arrow(axis, (47, 33), (51, 33), "", RED)
    _arrow(axis, (51, 35), (47, 35), "", RED)
    axis.text(53, 34, "cross-core flags; data only through global memory", fontsize=8.5, color=RED, va="center")
    return figure


ROWS = {"cube": (3.0, 9.0), "scratch": (20.0, 7.0), "vector": (35.0, 9.0)}  # top and height
LEFT = 15.0


def _lanes(axis: Axes) -> None:
    """The names of the three rows."""
    texts = (("cube", "cube core", BLUE), ("scratch", "global memory\n(scratch in L2)", PURPLE),
             ("vector", "vector cores", ORANGE))  # fmt: skip
    for row, text, colour in texts:
        top, height = ROWS[row]
        axis.text(1, top + height / 2, text, fontsize=9.5, color=colour, va="center", linespacing=1.3)


def _stage(axis: Axes, row: str, x: float, w: float, text: str) -> None:
    """A box in a row."""
    colour = {"cube": GREEN, "scratch": PURPLE, "vector": ORANGE}[row]
    _box(axis, x, ROWS[row][0], w, ROWS[row][1], text, colour)


def _move(axis: Axes, x: float, start: str, end: str, text: str, colour: str = TEXT) -> None:
    """A vertical arrow from one row to another."""
    (top0, height0), (top1, height1) = ROWS[start], ROWS[end]
    down = top1 > top0
    _arrow(axis, (x, top0 + height0 if down else top0), (x, top1 if down else top1 + height1), text, colour)


def _schedule(
    axis: Axes, y: float, width: float, lanes: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]]
) -> None:
    """Lanes of boxes (start, length in 0..1, text, colour) over time."""
    for index, (name, boxes) in enumerate(lanes):
        axis.text(1, y + index * 6 + 2.3, name, fontsize=9, va="center")
        for start, length, text, colour in boxes:
            left = LEFT + start * (width - LEFT - 1)
            _box(axis, left, y + index * 6, length * (width - LEFT - 1) - 0.5, 4.6, text, colour, 8.5)
    end = y + len(lanes) * 6 + 0.6
    axis.annotate("", xy=(width - 1, end), xytext=(LEFT, end), arrowprops={"arrowstyle": "-|>", "color": GRID, "lw": 1})
    axis.text(width - 1, end + 1.8, "time", fontsize=8.5, ha="right", va="center")


@diagram("flow-forward")
def flow_forward() -> Figure:
    """Who computes what in the forward pipeline, where it lies, which event orders it."""
    width = 108.0
    figure, axis = _canvas(width, 66)
    _lanes(axis)
    _stage(axis, "cube", LEFT, 28, "S(i) = Q K$^T$\nquery block x key group")
    _stage(axis, "cube", 51, 56, "P(i-1) V, summed over the whole group in L0C")
    _stage(axis, "scratch", LEFT, 24, "scores, fp32\ntwo slots")
    _stage(axis, "scratch", 51, 24, "probs, fp16 or bf16\ntwo slots")
    _stage(axis, "scratch", 83, 24, "partial results, fp32\none, or two and their sum")
    _stage(axis, "vector", LEFT, 60, "row maximum, exp, row sum of the group (exact, fp32)")
    _stage(axis, "vector", 79, 28, "join with the running result,\nor divide and finish")
    _move(axis, 20, "cube", "scratch", "fixpipe, then event 0", RED)
    _move(axis, 20, "scratch", "vector", "MTE2")
    _move(axis, 56, "vector", "scratch", "MTE3, then event 1", RED)
    _move(axis, 56, "scratch", "cube", "MTE2 (nd2nz)")
    _move(axis, 88, "cube", "scratch", "fixpipe, then event 2", RED)
    _move(axis, 88, "scratch", "vector", "MTE2")
    cube = [(0.0, 0.19, "S(i)", GREEN), (0.19, 0.17, "P(i-1) V", BLUE), (0.36, 0.19, "S(i+1)", GREEN),
            (0.55, 0.17, "P(i) V", BLUE), (0.72, 0.19, "S(i+2)", GREEN)]  # fmt: skip
    vector = [(0.0, 0.19, "softmax(i-1)", ORANGE), (0.19, 0.24, "softmax(i)", ORANGE),
              (0.43, 0.12, "join(i-1)", PURPLE), (0.55, 0.24, "softmax(i+1)", ORANGE),
              (0.79, 0.12, "join(i)", PURPLE)]  # fmt: skip
    _schedule(axis, 49, width, [("cube core", cube), ("vector cores", vector)])
    return figure


@diagram("flow-backward")
def flow_backward() -> Figure:
    """The five products of the backward's pipeline, what lies between them, which event orders it."""
    width = 108.0
    figure, axis = _canvas(width, 66)
    _lanes(axis)
    _stage(axis, "cube", LEFT, 28, "S = Q K$^T$,  dP = dO V$^T$\nof a group of keys")
    _stage(
        axis,
        "cube",
        51,
        56,
        "dV = P$^T$ dO,  dK = dS$^T$ Q  of the group before,\ndQ = dS K  of the head; summed in L0C",
    )
    _stage(axis, "scratch", LEFT, 24, "S and dP, fp32\none slot each")
    _stage(axis, "scratch", 51, 24, "P (two slots), dS (a head)\nfp16 or bf16")
    _stage(axis, "scratch", 83, 24, "dK (two slots), dQ\nfp32")
    _stage(axis, "vector", LEFT, 60, "P = exp(S - lse),  dS = P (dP - Delta);  Delta of the next head")
    _stage(axis, "vector", 79, 28, "scale, round, store:\none writer for each tile")
    _move(axis, 18, "cube", "scratch", "fixpipe, then event 0 (S), 4 (dP)", RED)
    _move(axis, 18, "scratch", "vector", "MTE2")
    _move(axis, 53, "vector", "scratch", "MTE3, then event 1 (P), 3 (dS)", RED)
    _move(axis, 53, "scratch", "cube", "MTE2 (nd2nz)")
    _move(axis, 84.4, "cube", "scratch", "fixpipe, event 2 (dK), 6 (dQ)", RED)
    _move(axis, 84.4, "scratch", "vector", "MTE2")
    cube = [(0.0, 0.13, "S(g)", GREEN), (0.13, 0.13, "dV(g-1)", BLUE), (0.26, 0.13, "dP(g)", GREEN),
            (0.39, 0.13, "dK(g-1)", BLUE), (0.52, 0.13, "S(g+1)", GREEN), (0.65, 0.13, "dV(g)", BLUE),
            (0.78, 0.13, "dP(g+1)", GREEN)]  # fmt: skip
    vector = [(0.06, 0.2, "P(g)", ORANGE), (0.32, 0.2, "dS(g)", ORANGE), (0.52, 0.06, "dK", PURPLE),
              (0.58, 0.2, "P(g+1)", ORANGE), (0.84, 0.15, "dS(g+1)", ORANGE)]  # fmt: skip
    _schedule(axis, 49, width, [("cube core", cube), ("vector cores", vector)])
    return figure
