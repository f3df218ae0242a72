"""`python -m harness.studies.tune`: the fastest settings for a shape on the virtual NPU.

    make tune CASE=P5
    make tune CASE=C1
    make tune CASE=all
    make tune SHAPE=1,16,4096,128 CAUSAL=1 SUITE=backward

Starts from the shipped settings and climbs: each step tries every change of one group of
settings, several at a time on `--jobs` processes, and goes on from the best, until a round over
all groups makes nothing better or `--budget` seconds are over. Settings whose tiles cannot fit
on chip are dropped before they are compiled. Times are predicted, with few heads; of the best ones
the values are computed and compared with an fp64 reference (few heads, hazards reported), the best
right ones and the shipped ones are timed again at the full size, so what is reported is the shipped
settings or better ones that are right. Every tried setting is a row of results/tune.json, which
is written after each one; rows of the same sources are not made again.

What may change is in `spaces`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..configs import SUITES, Case, cases, input_rule, select
from ..reference import reference_bwd, reference_fwd
from ..results import write_json
from ..virtual_npu.driver import install, run
from ..virtual_npu.errors import VirtualNPUError
from .ablation import RIGHT, worst_error
from .sources import CLOCK, fingerprint
from .spaces import SPACES, Settings, Shape, variants

HEADS = 260  # of a trial: 13 for each core
TOP = 3  # right ones, timed again at full size
CHECKED = 12  # values of so many are computed, at most
BUDGET = 300.0  # seconds of trials for a shape
Row = dict[str, Any]


def measure(name: str, shape: Shape, settings: Settings, heads: int | None, release: str) -> Row:
    """One trial as a row of the table; a compiler's refusal is an outcome like any other."""
    start = time.perf_counter()
    row: Row = {"space": name, "settings": settings, "heads": heads or shape.z * shape.h}
    try:
        with run("timing", release=release) as record:
            SPACES[name].call(shape, settings, shape.inputs(heads))
    except VirtualNPUError as error:
        row |= {"status": type(error).__name__, "message": str(error).splitlines()[-1][:200]}
    else:
        # Whole milliseconds of the shape: the cores' share of the heads is what grows.
        row |= {"status": "timed", "ms": record.ms * shape.z * shape.h / row["heads"]}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def verify(name: str, shape: Shape, settings: Settings, release: str) -> str:
    """What is wrong with the values of settings, "" if they are right: two heads on one core (long
    rows: one), hazards reported."""
    heads = 2 if shape.n <= 2048 else 1
    rule, generator = input_rule(), torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn((1, heads, shape.n, shape.d), generator=generator) for _ in range(4))
    q, k, v, dout = (x.to(shape.torch_dtype) for x in (q * rule.std, k * rule.std, v * rule.std, dout * rule.dout_std))
    out, lse = reference_fwd(q, k, v, shape.causal, rule.sm_scale)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out.to(shape.torch_dtype), "lse": lse.float()}
    exact: tuple[torch.Tensor, ...] = (out, lse)
    if name.startswith("backward"):
        exact = reference_bwd(dout, q, k, v, shape.causal, rule.sm_scale, out=inputs["out"])
    try:
        with run("values", release=release, cores=1, hazards=True):
            found = SPACES[name].call(shape, settings, inputs)
    except VirtualNPUError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    worst = worst_error(found, exact)
    return "" if worst <= RIGHT else f"wrong values: relative L2 error {worst:.2g}"


def key(settings: Mapping[str, int]) -> str:
    return json.dumps(settings, sort_keys=True)


class Rows:
    """The rows of one shape and suite, kept in the file of all.

    Args:
        path: the file; a missing one is empty.
        shape, suite, release: whose rows these are.
        mark: of the sources; rows that others made are dropped.
    """

    def __init__(self, path: Path, shape: Shape, release: str, suite: str = "forward", mark: str = "") -> None:
        self.path, self.name = path, f"{suite} {shape} bishengir {release}"
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        entry = {"suite": suite, "shape": asdict(shape), "release": release, "sources": mark, "rows": []}
        found = self.content.get(self.name, {})
        self.entry: dict[str, Any] = found if found.get("sources") == mark else entry

    def known(self, name: str, settings: Settings, heads: int | None) -> Row | None:
        """The row of a trial, if there is one."""
        wanted = (name, key(settings), heads)
        rows = (row for row in self.entry["rows"] if (row["space"], key(row["settings"]), row["heads"]) == wanted)
        return next(rows, None)

    def add(self, row: Row) -> None:
        self.entry["rows"].append(row)
        self.save()

    def save(self) -> None:
        self.content[self.name] = self.entry
        write_json(self.path, self.content)


class Search:
    """The climb in one space.

    Args:
        name: of the space.
        heads: of a trial.
        most: trials, at most.
        until: `time.monotonic` after which no trial is begun.
        report: called with a line, how many trials are timed and how many are known of.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        heads: int,
        release: str,
        table: Rows,
        pool: ProcessPoolExecutor,
        report: Callable[[str, int, int], None],
        *,
        most: int = 200,
        until: float = float("inf"),
    ) -> None:
        self.name, self.shape, self.heads, self.release = name, shape, heads, release
        self.table, self.pool, self.report, self.most, self.until = table, pool, report, most, until
        self.seen: set[str] = set()
        self.timed: list[Row] = []

    @property
    def best(self) -> Row | None:
        return min(self.timed, key=lambda row: row["ms"], default=None)

    def trials(self, wave: list[Settings]) -> None:
        """Time settings that are new; after the first trial only while time is left."""
        new = {key(settings): settings for settings in wave if key(settings) not in self.seen}
        wave = list(new.values())[: self.most - len(self.seen)]
        self.seen.update(key(settings) for settings in wave)
        futures: list[Future[Row | None]] = []
        for settings in wave:
            row = self.table.known(self.name, settings, self.heads)
            if row is None:
                futures.append(self.pool.submit(_trial, self.until, *self._trial(settings)))
            else:
                self._take(row)
        for future in as_completed(futures):
            row = future.result()
            if row is not None:
                self.table.add(row)
                self._take(row)

    def _trial(self, settings: Settings) -> tuple[str, Shape, Settings, int, str]:
        return self.name, self.shape, settings, self.heads, self.release

    def _take(self, row: Row) -> None:
        if row["status"] == "timed":
            self.timed.append(row)
        shown = f"{row['ms']:.3f} ms" if "ms" in row else row["status"]
        self.report(f"{self.name} {key(row['settings'])}: {shown}", len(self.timed), len(self.seen))

    def climb(self) -> list[Row]:
        """The timed rows, best first."""
        space = SPACES[self.name]
        start = space.shipped(self.shape)
        if start is None:
            return []
        until, self.until = self.until, float("inf")
        self.trials([start])  # whatever it takes
        self.until = until
        before: Row | None = None
        while self.best is not None and self.best is not before:
            before = self.best
            for group in space.choices(self.shape):
                if time.monotonic() >= self.until or len(self.seen) >= self.most:
                    break
                self.trials(variants(space, self.shape, self.best["settings"], group))
        return sorted(self.timed, key=lambda row: row["ms"])


def right_ones(
    name: str, shape: Shape, rows: list[Row], release: str, pool: ProcessPoolExecutor
) -> tuple[list[Settings], list[Row]]:
    """The TOP best settings whose values are right, and the rows of those passed over."""
    right: list[Settings] = []
    wrong: list[Row] = []
    rest = rows[:CHECKED]
    while rest and len(right) < TOP:
        wave, rest = rest[: TOP - len(right)], rest[TOP - len(right) :]
        futures = [pool.submit(verify, name, shape, row["settings"], release) for row in wave]
        for row, future in zip(wave, futures, strict=True):
            fault = future.result()
            if fault:
                wrong.append({"space": name, "settings": row["settings"], "message": fault})
            else:
                right.append(row["settings"])
    return right, wrong


def _trial(until: float, *arguments: Any) -> Row | None:
    """A trial, in a process of the pool; None where its time is over (the clock is the machine's)."""
    return measure(*arguments) if time.monotonic() < until else None


def tune(shape: Shape, suite: str, names: list[str], arguments: argparse.Namespace, console: Console) -> None:
    """Search the spaces of one shape and print the best settings at the full size."""
    mark = fingerprint((f"{suite}.py", *CLOCK, "harness/studies/spaces.py"))
    table = Rows(arguments.json, shape, arguments.release, suite, mark)
    heads = min(arguments.heads, shape.z * shape.h)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    until = time.monotonic() + arguments.budget
    with (
        ProcessPoolExecutor(arguments.jobs, initializer=install) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        found: dict[str, list[Row]] = {}
        for name in names:
            task = progress.add_task(name, total=None)

            def report(line: str, done: int, known: int, task: Any = task) -> None:
                progress.update(task, completed=done, total=known)
                if not console.is_terminal:
                    print(line, flush=True)

            search = Search(
                name, shape, heads, arguments.release, table, pool, report, most=arguments.most, until=until
            )
            found[name] = search.climb()
        best: list[Row] = []
        wrong: list[Row] = []
        for name, rows in found.items():
            if not rows:
                continue
            shipped = SPACES[name].shipped(shape)
            assert shipped is not None
            again, faults = right_ones(name, shape, rows, arguments.release, pool)
            wrong += faults
            again += [shipped] if shipped not in again else []
            for future in [pool.submit(measure, name, shape, s, None, arguments.release) for s in again]:
                best.append(future.result() | {"shipped": future.result()["settings"] == shipped})
    best.sort(key=lambda row: row.get("ms", float("inf")))
    table.entry |= {"best": best, "wrong": wrong}
    table.save()
    for row in wrong:
        console.print(f"left out, {row['message']}: {row['space']} {key(row['settings'])}", highlight=False)
    shown = Table(title=f"{suite} {shape}, all heads, times predicted", box=None)
    for heading in ("kernel", "settings", "ms", ""):
        shown.add_column(heading, justify="right" if heading == "ms" else "left")
    for row in best:
        text = " ".join(f"{name}={value}" for name, value in row["settings"].items())
        ms = f"{row['ms']:.3f}" if "ms" in row else row["status"]
        shown.add_row(row["space"], text, ms, "shipped" if row["shipped"] else "")
    console.print(shown)
    console.print(f"{sum(len(rows) for rows in found.values())} settings timed; rows in {arguments.json}")


def case_of(word: str, suite: str | None) -> Case:
    """The case of a name in a suite, or in the only one that has it; of several dtypes the first.

    Raises:
        ValueError: no suite has it.
    """
    errors = []
    for name in SUITES if suite is None else (suite,):
        try:
            return select(name, [word])[0]
        except ValueError as error:
            errors.append(str(error))
    raise ValueError("; ".join(errors))


def _every_case(suite: str | None) -> list[Case]:
    """The fp16 performance cases, each shape once."""
    found = [case for name in SUITES if suite in (None, name) for case in cases(name)]
    return [case for case in found if case.kind == "performance" and case.dtype == "fp16"]


def _space_of(suite: str, shape: Shape) -> str:
    """The space that a shape takes now; the pipeline stands first."""
    return next(name for name in SPACES if name.startswith(suite) and SPACES[name].shipped(shape) is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Search a shape's settings on the virtual NPU (timing only).")
    parser.add_argument("--case", help="an official case, as `make score` prints it (P1, C2), or all")
    parser.add_argument("--suite", choices=SUITES, help="of the case, or of the shape (default forward)")
    parser.add_argument("--shape", help="Z,H,N,D")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--spaces", nargs="*", help=f"of {', '.join(SPACES)}; default: what the shape takes now")
    parser.add_argument("--heads", type=int, default=HEADS, help="of a trial")
    parser.add_argument("--most", type=int, default=200, help="trials for each kernel")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of trials for each shape")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--release", default="1.1.0", help="of bishengir")
    parser.add_argument("--json", type=Path, default=Path("results/tune.json"))
    arguments = parser.parse_args()
    if (arguments.case is None) == (arguments.shape is None):
        parser.error("give one of --case and --shape")
    work: list[tuple[str, Shape]] = []
    if arguments.shape is not None:
        try:
            z, h, n, d = (int(text) for text in arguments.shape.split(","))
        except ValueError:
            parser.error(f"--shape must be four integers Z,H,N,D, got {arguments.shape!r}")
        work.append((arguments.suite or SUITES[0], Shape(z, h, n, d, arguments.causal, arguments.dtype)))
    else:
        try:
            chosen = (
                _every_case(arguments.suite) if arguments.case == "all" else [case_of(arguments.case, arguments.suite)]
            )
        except ValueError as error:
            parser.error(str(error))
        work += [(case.suite, Shape(case.z, case.h, case.n, case.d, case.causal, case.dtype)) for case in chosen]
    unknown = sorted(set(arguments.spaces or ()) - set(SPACES))
    if unknown:
        parser.error(f"--spaces must be of {', '.join(SPACES)}, got {', '.join(unknown)}")
    install()
    # A terminal has a bar; elsewhere each trial is a line.
    console = Console(width=None if sys.stdout.isatty() else 200)
    for suite, shape in work:
        tune(shape, suite, arguments.spaces or [_space_of(suite, shape)], arguments, console)


if __name__ == "__main__":
    main()
