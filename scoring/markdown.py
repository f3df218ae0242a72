"""`python -m scoring.markdown`: writes the tables of results/score.json into REPORT.md,
between its two marker lines, so that no figure there is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.configs import cases
from harness.evaluator import PUBLISHED

from .interval import Timed, interval_text, recorded
from .rules import Entry

REPOSITORY = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- begin: make report -->", "<!-- end: make report -->"


def _cell(value: float | None, form: str = "{:.3g}") -> str:
    return "-" if value is None else form.format(value)


def _lines(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _interval(document: Mapping[str, Any], suite: str) -> str:
    """How far a suite's predicted score can be trusted."""
    names = {(c.kind, c.z, c.h, c.n, c.d, c.causal, c.dtype): c.name for c in cases(suite)}
    correctness, timed = [], []
    for row in document["cases"]:
        if row["suite"] != suite:
            continue
        own = Entry(row["status"] == "passed", row["ms"], row["baseline_ms"])
        if row["kind"] == "correctness":
            correctness.append(own)
        else:
            name = names[tuple(row[key] for key in ("kind", "z", "h", "n", "d", "causal", "dtype"))]
            timed.append(Timed(name, own, row["baseline"] != PUBLISHED))
    return interval_text(suite, correctness, timed, recorded())


def tables(document: Mapping[str, Any]) -> str:
    """Scores of each suite and its timed cases, in Markdown.

    Args:
        document: the content of results/score.json; suites without a score are left out.

    Raises:
        ValueError: no suite has a score.
    """
    time_word = document["device"]["time"]
    scored = {name: suite for name, suite in document["suites"].items() if suite["score"] is not None}
    if not scored:
        raise ValueError("document must have a suite with a score; make score writes one")
    text = [f"`make score` on {document['device']['name']}, {document['device']['compiler']}; times {time_word}:", ""]
    text += _lines(
        ["suite", "cases passed", "correctness", "performance", "score", "geometric mean of speed-ups"],
        [
            [
                name,
                "{} of {}".format(
                    sum(case["status"] == "passed" for case in document["cases"] if case["suite"] == name),
                    sum(case["suite"] == name for case in document["cases"]),
                ),
                f"{suite['correctness_points']:.1f}/40",
                f"{suite['performance_points']:.1f}/60",
                f"{suite['score']:.1f}/100",
                _cell(suite["geomean_speedup"]),
            ]
            for name, suite in scored.items()
        ],
    )
    if time_word == "predicted":
        text += [line for name in scored for line in ("", _interval(document, name))]
    for name in scored:
        timed = [case for case in document["cases"] if case["suite"] == name and case["kind"] == "performance"]
        baselines = ", ".join(sorted({case["baseline"] for case in timed if case["baseline"]}))
        text += ["", f"Performance cases of the {name}; baseline: {baselines or 'none'}; times in ms:", ""]
        text += _lines(
            [
                *("Z,H,N,D", "mask", "dtype", "status", "heads checked"),
                *(f"own, {time_word}", "baseline", f"textbook, {time_word}", "speed-up", "cube busy"),
            ],
            [
                [
                    f"{case['z']},{case['h']},{case['n']},{case['d']}",
                    "causal" if case["causal"] else "full",
                    case["dtype"],
                    case["status"],
                    f"{case['heads_checked']} of {case['heads']}",
                    _cell(case["ms"]),
                    _cell(case["baseline_ms"]),
                    _cell(case["textbook_ms"]),
                    _cell(case["speedup"]),
                    _cell(case["cube_utilisation"], "{:.0%}"),
                ]
                for case in timed
            ],
        )
    return "\n".join(text)


def insert(report: str, block: str) -> str:
    """The report with what stands between its marker lines replaced.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    if report.count(BEGIN) != 1 or report.count(END) != 1 or report.index(BEGIN) > report.index(END):
        raise ValueError(f"report must have the lines {BEGIN} and {END} once each, in this order")
    head, rest = report.split(BEGIN)
    return f"{head}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Rewrite the block of REPORT.md."""
    document = json.loads((REPOSITORY / "results" / "score.json").read_text())
    path = REPOSITORY / "REPORT.md"
    path.write_text(insert(path.read_text(), tables(document)))


if __name__ == "__main__":
    main()
