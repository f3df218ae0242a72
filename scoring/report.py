"""Results as a table, as progress, and as results/score.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.configs import SUITES, Case, cases
from harness.evaluator import PUBLISHED, TEXTBOOK
from harness.results import CaseResult, Status

from .interval import Timed, interval_text, recorded
from .rules import Entry, Score, suite_score

WIDTH = 120


def make_console() -> Console:
    """A console that is never too narrow for the table."""
    console = Console(highlight=False)
    return Console(highlight=False, width=max(WIDTH, console.width if console.is_terminal else 0))


def entry(result: CaseResult) -> Entry:
    """What the rules need of a result."""
    return Entry(result.status is Status.PASSED, result.ms, result.baseline_ms)


def suite_scores(results: Sequence[CaseResult]) -> dict[str, Score | None]:
    """Score of each suite that occurs; None while cases of the suite are missing."""
    scores: dict[str, Score | None] = {}
    for suite in SUITES:
        own = {result.case: result for result in results if result.case.suite == suite}
        if not own:
            continue
        if any(case not in own for case in cases(suite)):
            scores[suite] = None
            continue
        by_kind = {
            kind: [entry(own[case]) for case in cases(suite) if case.kind == kind]
            for kind in ("correctness", "performance")
        }
        scores[suite] = suite_score(by_kind["correctness"], by_kind["performance"])
    return scores


def document(device: dict[str, str], results: Sequence[CaseResult], timed: bool = True) -> dict[str, Any]:
    """The content of results/score.json.

    Args:
        device: kind, name, compiler and time ("predicted" or "measured").
        results: in any order; cases that have not run are left out.
        timed: False for a check: no performance points and no score.
    """
    suites: dict[str, Any] = {}
    for suite, score in suite_scores(results).items():
        suites[suite] = {
            "correctness_points": score.correctness_points if score else None,
            "performance_points": score.performance_points if score and timed else None,
            "score": score.score if score and timed else None,
            "geomean_speedup": score.geomean_speedup if score and timed else None,
        }
    ordered = sorted(results, key=lambda result: (SUITES.index(result.case.suite), result.case.number))
    return {"device": device, "suites": suites, "cases": [_row(result) for result in ordered]}


def _row(result: CaseResult) -> dict[str, Any]:
    case = result.case
    return {
        "suite": case.suite,
        "kind": case.kind,
        "z": case.z,
        "h": case.h,
        "n": case.n,
        "d": case.d,
        "causal": case.causal,
        "dtype": case.dtype,
        "status": result.status.value,
        "heads_checked": result.heads_checked,
        "heads": case.heads,
        "ms": result.ms,
        "baseline": result.baseline or None,
        "baseline_ms": result.baseline_ms,
        "textbook_ms": result.textbook_ms,
        "speedup": result.speedup,
        "cube_utilisation": result.cube_utilisation,
        "scratch_bytes": result.scratch_bytes,
        "max_abs_error": result.max_abs_error,
        "rms_error": result.rms_error,
    }


def _number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, "-" for None."""
    if value is None:
        return "-"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0}f}"


def _table(title: str, results: Sequence[CaseResult], columns: dict[str, Callable[[CaseResult], str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    left = {"case", "mask", "dtype", "status"}
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for result in results:
        table.add_row(*(text(result) for text in columns.values()))
    return table


def _case_columns(errors: bool) -> dict[str, Callable[[CaseResult], str]]:
    def status(result: CaseResult) -> str:
        colour = "green" if result.status is Status.PASSED else "red"
        return f"[{colour}]{result.status.value}[/]"

    columns: dict[str, Callable[[CaseResult], str]] = {
        "case": lambda result: result.case.name,
        "Z,H,N,D": lambda result: f"{result.case.z},{result.case.h},{result.case.n},{result.case.d}",
        "mask": lambda result: "causal" if result.case.causal else "full",
        "dtype": lambda result: result.case.dtype,
        "status": status,
        "heads\nchecked": lambda result: f"{result.heads_checked}/{result.case.heads}",
        "max abs\nerror": lambda result: _number(result.max_abs_error),
    }
    if errors:
        columns["rms\nerror"] = lambda result: _number(result.rms_error)
        columns["of plain\ntorch's"] = lambda result: "-" if result.vs_torch is None else f"x {result.vs_torch:.2f}"
    return columns


def _time_columns(time_word: str, baseline_word: str) -> dict[str, Callable[[CaseResult], str]]:
    def cube(result: CaseResult) -> str:
        return "-" if result.cube_utilisation is None else f"{100 * result.cube_utilisation:.1f} %"

    return {
        f"own\n{time_word}": lambda result: _number(result.ms),
        f"baseline\n{baseline_word}": lambda result: _number(result.baseline_ms),
        f"textbook\n{time_word}": lambda result: _number(result.textbook_ms),
        "speed-\nup": lambda result: _number(result.speedup),
        "cube\nbusy": cube,
    }


def _interval(suite: str, own: Sequence[CaseResult]) -> str:
    """How far the predicted score can be trusted, as a line."""
    timed = [
        Timed(result.case.name, entry(result), result.baseline != PUBLISHED)
        for result in own
        if result.case.kind == "performance"
    ]
    return interval_text(suite, [entry(r) for r in own if r.case.kind == "correctness"], timed, recorded())


def print_report(console: Console, device: dict[str, str], results: Sequence[CaseResult], timed: bool) -> None:
    """The tables, the scores and what went wrong, for people."""
    ordered = sorted(results, key=lambda result: (SUITES.index(result.case.suite), result.case.number))
    scores = suite_scores(results)
    for suite in scores:
        own = [result for result in ordered if result.case.suite == suite]
        correctness = [result for result in own if result.case.kind == "correctness"]
        performance = [result for result in own if result.case.kind == "performance"]
        baselines = sorted({result.baseline for result in own if result.baseline})
        if correctness:
            console.print(_table(f"{suite}: correctness cases", correctness, _case_columns(errors=True)))
        if performance:
            level = " (configurations inferred)" if performance[0].case.level == "inferred" else ""
            title = f"{suite}: performance cases{level}, " + ("times in ms" if timed else "checked only")
            columns = _case_columns(errors=not timed)
            if timed:
                published = {PUBLISHED, ""} >= {result.baseline for result in performance}
                columns |= _time_columns(device["time"], "published" if published else device["time"])
            console.print(_table(title, performance, columns))
        if timed and baselines:
            note = f"baseline of {suite}: {', '.join(baselines)}"
            if baselines == [TEXTBOOK]:
                note += f" ({device['time']}; no vendor time of the backward on a 910B has been published)"
            console.print(note)
            told = [r for r in performance if r.scratch_bytes is not None]
            if told:
                sizes = ", ".join(f"{r.case.name} {(r.scratch_bytes or 0) / 2**20:.1f}" for r in told)
                console.print(f"scratch of {suite}'s kernels on all cores, MiB: {sizes}")
        score = scores[suite]
        if score is None:
            console.print(f"{suite}: {len(own)} of {len(cases(suite))} cases ran, so there is no score")
        else:
            text = f"{suite}: correctness {score.correctness_points:.1f}/40"
            if timed:
                geomean = _number(score.geomean_speedup) if score.geomean_speedup else "none (a case has no time)"
                text += f", performance {score.performance_points:.1f}/60, score {score.score:.1f}/100"
                text += f", geometric mean of speed-ups {geomean}"
                text += f" (times {device['time']})"
            console.print(f"[bold]{text}[/]")
            if timed and device["time"] == "predicted":
                console.print(_interval(suite, own))
        console.print()
    failed = [result for result in ordered if result.message]
    for result in failed:
        console.print(f"{result.case}: {result.status.value}: {escape(result.message)}")


class Reporter:
    """Shows progress: a bar on a terminal, one plain line for each finished case elsewhere."""

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        self.console, self.total, self.done = console, total, done
        self.running: list[str] = []
        self.progress: Progress | None = None
        if console.is_terminal:
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
            )
            self.task = self.progress.add_task("", total=total, completed=done)

    def __enter__(self) -> Reporter:
        if self.progress:
            self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.progress:
            self.progress.stop()

    def started(self, case: Case) -> None:
        """A case is being evaluated."""
        self.running.append(f"{case.suite} {case.name}")
        if self.progress:
            self.progress.update(self.task, description=", ".join(self.running))

    def finished(self, result: CaseResult) -> None:
        """A case has its result."""
        self.done += 1
        self.running.remove(f"{result.case.suite} {result.case.name}")
        if self.progress:
            self.progress.update(self.task, advance=1, description=", ".join(self.running))
            if result.status is not Status.PASSED:
                self.progress.console.print(f"{result.case}: {result.status.value}")
        else:
            self.console.print(
                f"[{self.done}/{self.total}] {result.case}: {result.status.value} ({result.seconds:.1f} s)",
                markup=False,
            )
