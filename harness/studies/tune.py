"""`python -m harness.studies.tune`: the fastest settings for a shape on the virtual NPU.

    make tune CASE=P5
    make tune SHAPE=1,16,4096,128 CAUSAL=1

Starts from the shipped settings and climbs: each round tries every change of one group of
settings, several at a time on `--jobs` processes, and goes on from the best, until nothing is
better. Settings whose tiles cannot fit on chip are dropped before they are compiled. Times
are predicted, with few heads; the best ones are timed again at the full size. Values are not
computed: run the tests before shipping what it finds. Every tried setting is a row of
results/tune.json, which is written after each one.

A kernel becomes searchable by one more entry in SPACES.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..configs import input_rule, select
from ..results import write_json
from ..virtual_npu.costs import default_constants
from ..virtual_npu.driver import CORES, install, run
from ..virtual_npu.errors import VirtualNPUError

Settings = dict[str, int]
HEADS = 260  # of a trial: 13 for each core
TOP = 3  # timed again at full size


@dataclass(frozen=True)
class Shape:
    """What is tuned: [z, h, n, d], mask, dtype."""

    z: int
    h: int
    n: int
    d: int
    causal: bool
    dtype: str = "fp16"

    def __str__(self) -> str:
        return f"{self.z},{self.h},{self.n},{self.d} {'causal' if self.causal else 'full'} {self.dtype}"

    def tensor(self, heads: int | None = None) -> torch.Tensor:
        """A tensor of the shape whose contents do not matter; `heads` replaces z and h."""
        z, h = (self.z, self.h) if heads is None else (1, heads)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[self.dtype]
        return torch.empty(z, h, self.n, self.d, dtype=dtype)


@dataclass(frozen=True)
class Space:
    """One kernel's settings.

    Attributes:
        shipped: the settings that a shape has now; None where the kernel does not take it.
        choices: groups of settings that change together, each with its possible values.
        needs: bytes that settings surely need, by the name of a memory (a key of [memory] in
            hardware.toml without "_bytes", or "scratch"); ValueError if they are impossible.
        call: runs the kernel with the settings on `heads` heads (None: all).
    """

    shipped: Callable[[Shape], Settings | None]
    choices: Callable[[Shape], list[list[Settings]]]
    needs: Callable[[Shape, Settings], dict[str, int]]
    call: Callable[[Shape, Settings, int | None], object]


def _pipeline_shipped(shape: Shape) -> Settings | None:
    import forward

    found = forward.get_path(shape.z, shape.h, shape.n, shape.d, shape.causal, input_rule().sm_scale, CORES)
    return forward._pipeline_settings(shape.n, shape.d, shape.causal) if found == "pipeline" else None


def _pipeline_choices(shape: Shape) -> list[list[Settings]]:
    tiles = [
        {"HALVES": halves, "BH": bh, "BN": bn, "F": f}
        for halves, bh in ((1, 128), (2, 128), (4, 64))
        for bn in (128, 256)
        for f in (1, 2, 4)
    ]
    return [
        tiles,
        [{"KG": kg, "R": r} for kg in (512, 1024, 2048, 4096) for r in ((32, 64) if shape.causal else (4, 8, 16, 32))],
        [{"RO": ro} for ro in (32, 64, 128, 256)],
        [{"RQ": rq} for rq in (64, 128)],
        [{"U": u, "MB": mb} for u in (1, 2) for mb in (0, 1)],
        [{"FOLD": fold} for fold in (0, 1)],
        [{"WP": wp, "KEEP": keep} for wp in (128, 256, 512) for keep in (0, 1)] if shape.causal else [],
    ]


def _pipeline_needs(shape: Shape, s: Settings) -> dict[str, int]:
    import forward

    rows, width, d = s["HALVES"] * s["BH"], s["BN"] * s["F"], shape.d
    step = s["WP"] if shape.causal else width * s["U"]
    if shape.causal and (s["U"] > 1 or (s["F"] > 1 and s["HALVES"] > 1)):
        raise ValueError("the kernel has no such causal form")
    if shape.n % rows or shape.n % (step if shape.causal else s["KG"]) or s["KG"] % step or step % width:
        raise ValueError("does not divide the shape")
    if s["HALVES"] == 1 and s["F"] != 2:
        raise ValueError("the kernel has no such form")
    if rows % (2 * s["R"] if shape.causal else s["R"]) or rows % s["RO"] or rows % s["RQ"] or rows > 256:
        raise ValueError("does not divide the rows")
    scratch = forward._scratch(s, shape.n, d, shape.causal, shape.tensor(1).dtype, CORES)
    half = s["R"] // 2  # rows of one vector core
    softmax = 4 * half * 2 * s["R"] * 6 if shape.causal else (4 * 2 + 2) * half * s["KG"]
    return {
        "l1": 2 * max(rows * d + width * d, rows * step + width * d if shape.causal else step * (rows + d)),
        "l0c": 4 * max(2 * s["BH"] * s["BN"], rows * d),
        "ub": max(softmax, 4 * s["RO"] // 2 * d),
        "scratch": forward._bytes_of(scratch),
    }


def _pipeline_call(shape: Shape, settings: Settings, heads: int | None) -> object:
    import forward

    x = shape.tensor(heads)
    return forward._forward_pipeline(x, x, x, shape.causal, input_rule().sm_scale, CORES, settings)


def _general_shipped(shape: Shape) -> Settings | None:
    import forward

    bm, bn = forward.get_tiling(shape.z, shape.h, shape.n, shape.d, shape.causal)
    return {"block_m": bm, "block_n": bn}


def _general_call(shape: Shape, settings: Settings, heads: int | None) -> object:
    import forward

    x = shape.tensor(heads)
    return forward.attention_fwd(x, x, x, shape.causal, input_rule().sm_scale, **settings)


SPACES: dict[str, Space] = {
    "forward pipeline": Space(_pipeline_shipped, _pipeline_choices, _pipeline_needs, _pipeline_call),
    "forward general": Space(
        _general_shipped,
        lambda shape: [[{"block_m": m, "block_n": n} for m in (32, 64, 128, 256) for n in (64, 128, 256, 512)]],
        lambda shape, s: {
            "l1": 2 * shape.d * (s["block_m"] + 2 * s["block_n"]),
            "l0c": 4 * s["block_m"] * max(s["block_n"], shape.d),
            "ub": 4 * s["block_m"] // 2 * s["block_n"],
        },
        _general_call,
    ),
}
SCRATCH_LIMIT = 128 << 20


def excess(space: Space, shape: Shape, settings: Settings) -> str:
    """Why settings need not be compiled, "" if they may fit."""
    try:
        needs = space.needs(shape, settings)
    except ValueError as error:
        return str(error)
    memory = default_constants()["memory"]
    for name, size in needs.items():
        limit = SCRATCH_LIMIT if name == "scratch" else memory[f"{name}_bytes"]
        if size > limit:
            return f"{name} needs {size} bytes of {limit}"
    return ""


def measure(name: str, shape: Shape, settings: Settings, heads: int | None, release: str) -> dict[str, Any]:
    """One trial as a row of the table; a compiler's refusal is an outcome like any other."""
    start = time.perf_counter()
    row: dict[str, Any] = {"space": name, "settings": settings, "heads": heads or shape.z * shape.h}
    try:
        with run("timing", release=release) as record:
            SPACES[name].call(shape, settings, heads)
    except VirtualNPUError as error:
        row |= {"status": type(error).__name__, "message": str(error).splitlines()[-1][:200]}
    else:
        # Whole milliseconds of the shape: the cores' share of the heads is what grows.
        row |= {"status": "timed", "ms": record.ms * shape.z * shape.h / row["heads"]}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def neighbours(space: Space, shape: Shape, settings: Settings) -> Iterator[Settings]:
    """Settings with one group changed that may fit."""
    for group in space.choices(shape):
        for change in group:
            changed = settings | change
            if changed != settings and not excess(space, shape, changed):
                yield changed


def key(settings: Mapping[str, int]) -> str:
    return json.dumps(settings, sort_keys=True)


class Rows:
    """The rows of one shape, kept in the file of all shapes."""

    def __init__(self, path: Path, shape: Shape, release: str) -> None:
        self.path, self.name = path, f"{shape} bishengir {release}"
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.entry: dict[str, Any] = {"shape": asdict(shape), "release": release, "rows": []}

    def add(self, row: dict[str, Any]) -> None:
        self.entry["rows"].append(row)
        self.save()

    def save(self) -> None:
        self.content[self.name] = self.entry
        write_json(self.path, self.content)


def climb(
    name: str,
    shape: Shape,
    heads: int | None,
    release: str,
    most: int,
    table: Rows,
    pool: ProcessPoolExecutor,
    report: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    """The timed rows of one space, best first.

    Args:
        heads: of a trial.
        most: trials, at most.
        report: called with a line, how many trials are done and how many are known of.
    """
    space = SPACES[name]
    start = space.shipped(shape)
    if start is None:
        return []
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    wave = [start]
    while wave and len(seen) < most:
        wave = wave[: most - len(seen)]
        seen.update(key(settings) for settings in wave)
        futures = [pool.submit(measure, name, shape, settings, heads, release) for settings in wave]
        before = best
        for future in as_completed(futures):
            row = future.result()
            table.add(row)
            if row["status"] == "timed":
                rows.append(row)
                if best is None or row["ms"] < best["ms"]:
                    best = row
            shown = f"{row['ms']:.3f} ms" if "ms" in row else row["status"]
            report(f"{name} {key(row['settings'])}: {shown}", len(rows), len(seen))
        if best is None or (before is not None and best is before):
            break
        wave = [s for s in neighbours(space, shape, best["settings"]) if key(s) not in seen]
    return sorted(rows, key=lambda row: row["ms"])


def tune(shape: Shape, names: list[str], arguments: argparse.Namespace, console: Console) -> None:
    table = Rows(arguments.json, shape, arguments.release)
    heads = min(arguments.heads, shape.z * shape.h)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(arguments.jobs, initializer=install) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        found: dict[str, list[dict[str, Any]]] = {}
        for name in names:
            task = progress.add_task(name, total=None)

            def report(line: str, done: int, known: int, task: Any = task) -> None:
                progress.update(task, completed=done, total=known)
                if not console.is_terminal:
                    print(line, flush=True)

            found[name] = climb(name, shape, heads, arguments.release, arguments.most, table, pool, report)
        best: list[dict[str, Any]] = []
        for name, rows in found.items():
            if not rows:
                continue
            shipped = SPACES[name].shipped(shape)
            assert shipped is not None
            again = [row["settings"] for row in rows[:TOP]]
            again += [shipped] if shipped not in again else []
            for future in [pool.submit(measure, name, shape, s, None, arguments.release) for s in again]:
                best.append(future.result() | {"shipped": future.result()["settings"] == shipped})
    best.sort(key=lambda row: row.get("ms", float("inf")))
    table.entry["best"] = best
    table.save()
    shown = Table(title=f"{shape}, all heads, times predicted", box=None)
    for heading in ("kernel", "settings", "ms", ""):
        shown.add_column(heading, justify="right" if heading == "ms" else "left")
    for row in best:
        text = " ".join(f"{name}={value}" for name, value in row["settings"].items())
        ms = f"{row['ms']:.3f}" if "ms" in row else row["status"]
        shown.add_row(row["space"], text, ms, "shipped" if row["shipped"] else "")
    console.print(shown)
    console.print(f"{sum(len(rows) for rows in found.values())} settings timed; rows in {arguments.json}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Search a shape's settings on the virtual NPU (timing only).")
    parser.add_argument("--case", help="an official case, as `make score` prints it")
    parser.add_argument("--suite", default="forward", help="of the case")
    parser.add_argument("--shape", help="Z,H,N,D")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--spaces", nargs="*", help=f"of {', '.join(SPACES)}; default: what the shape takes now")
    parser.add_argument("--heads", type=int, default=HEADS, help="of a trial")
    parser.add_argument("--most", type=int, default=200, help="trials for each kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--release", default="1.1.0", help="of bishengir")
    parser.add_argument("--json", type=Path, default=Path("results/tune.json"))
    arguments = parser.parse_args()
    if (arguments.case is None) == (arguments.shape is None):
        parser.error("give one of --case and --shape")
    if arguments.shape is not None:
        try:
            z, h, n, d = (int(text) for text in arguments.shape.split(","))
        except ValueError:
            parser.error(f"--shape must be four integers Z,H,N,D, got {arguments.shape!r}")
        shape = Shape(z, h, n, d, arguments.causal, arguments.dtype)
    else:
        chosen = select(arguments.suite, [arguments.case])
        if len(chosen) != 1:
            parser.error(f"--case must name one case, got {', '.join(case.name for case in chosen)}")
        (case,) = chosen
        shape = Shape(case.z, case.h, case.n, case.d, case.causal, case.dtype)
    unknown = sorted(set(arguments.spaces or ()) - set(SPACES))
    if unknown:
        parser.error(f"--spaces must be of {', '.join(SPACES)}, got {', '.join(unknown)}")
    install()
    names = arguments.spaces or [
        next(name for name in SPACES if name.startswith(arguments.suite) and SPACES[name].shipped(shape) is not None)
    ]
    # A terminal has a bar; elsewhere each trial is a line.
    console = Console(width=None if sys.stdout.isatty() else 160)
    tune(shape, names, arguments, console)


if __name__ == "__main__":
    main()
