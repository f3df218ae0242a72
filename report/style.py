"""One look for all figures: readable on white and on dark, the same bytes on every run."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

TEXT = "#77818d"  # readable on white and on near-black
GRID = "#8b949e"
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL = "#4a8bdb", "#d98a2b", "#42a565", "#d65c5c", "#9a72d6", "#2fa3a3"
MOST_BYTES = 300_000
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "flash-attention",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.alpha": 0.25,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def svg(figure: Figure) -> str:
    """A figure as SVG text with coordinates of two decimals; closes it.

    Raises:
        ValueError: it is larger than 300 KB.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight", pad_inches=0.05)
    plt.close(figure)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", out.getvalue())
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"figure must have at most {MOST_BYTES} bytes, got {len(text.encode())}")
    return text
