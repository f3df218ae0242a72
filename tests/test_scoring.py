"""The contest's rules, the report and score.json, with times made up here."""

from __future__ import annotations

import dataclasses
import json
import math
import os

import pytest
from rich.console import Console

from harness.configs import cases
from harness.evaluator import PUBLISHED, TEXTBOOK
from harness.results import CaseResult, Status, write_json
from scoring import report
from scoring.__main__ import main
from scoring.rules import Entry, correctness_points, geomean_speedup, performance_points, suite_score

DEVICE = {"kind": "virtual", "name": "fake", "compiler": "none", "time": "predicted"}
FAST = Entry(True, 1.0, 2.0)
SLOW = Entry(True, 4.0, 2.0)
EQUAL = Entry(True, 2.0, 2.0)
FAILED = Entry(False, 1.0, 2.0)
UNTIMED = Entry(True)


def test_correctness_points() -> None:
    assert correctness_points([EQUAL] * 18) == 40
    assert correctness_points([EQUAL] * 9 + [FAILED] * 9) == 20
    assert correctness_points([FAILED]) == 0
    with pytest.raises(ValueError, match="entries must not be empty"):
        correctness_points([])


@pytest.mark.parametrize(
    ("entries", "points"),
    [
        ([EQUAL] * 6, 60),
        ([FAST] * 6, 60),  # capped
        ([SLOW] * 6, 30),
        ([FAST, SLOW], 45),  # a fast case does not make up for a slow one
        ([EQUAL] * 5 + [FAILED], 50),
        ([EQUAL] * 5 + [UNTIMED], 50),
        ([FAILED] * 6, 0),
    ],
)
def test_performance_points(entries, points) -> None:
    assert performance_points(entries) == pytest.approx(points)


def test_ten_points_a_case() -> None:
    entries = [Entry(True, 10.0, 10.0 * share) for share in (0.286, 0.291, 0.327, 0.488, 0.408, 0.451)]
    assert performance_points(entries) == pytest.approx(10 * (0.286 + 0.291 + 0.327 + 0.488 + 0.408 + 0.451))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, None])
def test_impossible_times_give_nothing(bad) -> None:
    for entry in (Entry(True, bad, 2.0), Entry(True, 1.0, bad)):
        assert entry.speedup is None
        assert performance_points([entry]) == 0
        assert geomean_speedup([entry]) is None


def test_geomean_is_uncapped_and_of_logs() -> None:
    assert geomean_speedup([FAST, FAST]) == pytest.approx(2)
    assert geomean_speedup([FAST, SLOW]) == pytest.approx(1)
    many = [Entry(True, 1.0, 1e300), Entry(True, 1.0, 1e300), Entry(True, 1.0, 1e300)]
    assert geomean_speedup(many) == pytest.approx(1e300, rel=1e-9)  # a product would overflow
    assert geomean_speedup([]) is None


def test_leaving_a_case_out_never_helps() -> None:
    for gone in (FAILED, UNTIMED):
        assert geomean_speedup([FAST, gone]) is None
        assert performance_points([FAST, gone]) < performance_points([FAST, SLOW])


def test_suite_score() -> None:
    forward = suite_score([EQUAL, FAILED], [EQUAL, SLOW])
    assert (forward.correctness_points, forward.performance_points, forward.score) == (20, 45, 65)
    backward = suite_score([], [EQUAL, FAILED])
    assert (backward.correctness_points, backward.performance_points) == (20, 30)
    with pytest.raises(ValueError, match="entries must not be empty"):
        suite_score([EQUAL], [])


def test_order_does_not_matter() -> None:
    entries = [Entry(True, 0.1 * i + 0.3, 0.7) for i in range(12)] + [FAILED]
    assert suite_score(entries, entries) == suite_score(entries[::-1], entries[::-1])


def _results(suite: str) -> list[CaseResult]:
    results = []
    for case in cases(suite):
        result = CaseResult(case, Status.PASSED, heads_checked=1, max_abs_error=1e-4, rms_error=1e-5, vs_torch=0.5)
        if case.kind == "performance":
            result = dataclasses.replace(
                result,
                ms=2 * (case.baseline_ms or 3.0),
                baseline_ms=case.baseline_ms or 3.0,
                baseline=PUBLISHED if case.baseline_ms else TEXTBOOK,
                textbook_ms=9.0,
                cube_utilisation=0.25,
            )
        results.append(result)
    return results


def test_document_has_exactly_the_agreed_keys() -> None:
    content = report.document(DEVICE, _results("forward") + _results("backward"))
    assert list(content) == ["device", "suites", "cases"]
    assert set(content["device"]) == {"kind", "name", "compiler", "time"}
    for suite in ("forward", "backward"):
        assert content["suites"][suite] == {
            "correctness_points": 40,
            "performance_points": pytest.approx(30),
            "score": pytest.approx(70),
            "geomean_speedup": pytest.approx(0.5),
        }
    keys = (
        "suite kind z h n d causal dtype status heads_checked heads ms baseline baseline_ms textbook_ms speedup "
        "cube_utilisation scratch_bytes max_abs_error rms_error"
    )
    assert len(content["cases"]) == 36
    assert all(list(row) == keys.split() for row in content["cases"])
    json.dumps(content, allow_nan=False)


def test_no_score_for_a_part_of_a_suite() -> None:
    content = report.document(DEVICE, _results("forward")[:-1])
    assert set(content["suites"]) == {"forward"}
    assert set(content["suites"]["forward"].values()) == {None}
    checked = report.document(DEVICE, _results("backward"), timed=False)
    assert checked["suites"]["backward"]["correctness_points"] == 40
    assert checked["suites"]["backward"]["score"] is None


def test_a_red_check_has_no_speedup() -> None:
    result = dataclasses.replace(_results("forward")[-1], status=Status.NUMERICAL)
    assert result.speedup is None
    assert report.document(DEVICE, [result])["cases"][0]["speedup"] is None


def test_json_is_whole_or_not_there(tmp_path) -> None:
    path = tmp_path / "results" / "score.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": math.nan})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(path.parent) == ["score.json"]


def test_report_says_what_a_reader_must_know() -> None:
    console = Console(width=report.WIDTH, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    results = _results("forward") + _results("backward")
    results[3] = dataclasses.replace(results[3], status=Status.HAZARD, message="race on [L1]")
    report.print_report(console, DEVICE, results, timed=True)
    console.file.close()
    text = console.export_text()
    assert text.count("predicted") >= 8  # three time columns, the scores, one baseline
    assert "baseline of forward: vendor, published" in text
    assert "no vendor time of the backward on a 910B has been published" in text
    assert "configurations inferred" in text
    assert "hazard: race on [L1]" in text
    assert "1/1024" in text
    assert "correctness 37.8/40, performance 30.0/60, score 67.8/100" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (2.987, "2.99"), (232.04, "232"), (0.0312, "0.0312"), (3e-5, "3.0e-05")],
)
def test_numbers(value, text) -> None:
    assert report._number(value) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "forward", "--case", "99"], "case must be 1 to 24"),
        (["--case", "3"], "--case needs --suite"),
        (
            ["--forward", "no/such/file.py", "--suite", "forward"],
            "--forward must name a Python file, got no/such/file.py",
        ),
        (["--jobs", "0", "--suite", "forward"], "jobs must be at least 1, got 0"),
        (["--release", "9.9"], "invalid choice: '9.9'"),
    ],
)
def test_wrong_usage(arguments, message, capsys, tmp_path) -> None:
    stand_in = tmp_path / "file.py"
    stand_in.write_text("")
    with pytest.raises(SystemExit) as stopped:
        main(["--forward", str(stand_in), "--backward", str(stand_in), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
