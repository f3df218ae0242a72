"""A run that was ended goes on: no finished case runs twice, none is lost."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.configs import cases
from harness.evaluator import Settings
from harness.journal import Journal, fingerprint
from harness.results import CaseResult, Status

ROOT = Path(__file__).resolve().parent.parent
SMALL = ROOT / "tests" / "submissions" / "right" / "small_triton.py"
RUN = {"submissions": {"forward": "a"}, "device": {"name": "x"}}
FIRST, SECOND = cases("forward")[:2]


def _result(case, **fields) -> CaseResult:
    return CaseResult(case, Status.PASSED, "a note", 4, ms=0.1 + 0.2, vs_torch=1.5, **fields)


def test_results_come_back_as_they_were(tmp_path) -> None:
    journal = Journal(tmp_path / "deep" / "j", RUN)
    assert journal.start(resume=False) == []
    first, second = _result(FIRST), CaseResult(SECOND, Status.TIMEOUT, "slow")
    journal.add(first)
    journal.add(second)
    assert Journal(tmp_path / "deep" / "j", RUN).start(resume=True) == [first, second]


def test_a_line_that_was_being_written_is_dropped(tmp_path) -> None:
    """A kill in the middle of a write must cost that case only, and not spoil the lines behind it."""
    path = tmp_path / "j"
    journal = Journal(path, RUN)
    journal.start(resume=False)
    journal.add(_result(FIRST))
    whole = path.read_bytes()
    journal.add(_result(SECOND))
    for cut in range(len(whole), len(path.read_bytes())):
        half = tmp_path / f"half{cut}"
        half.write_bytes(path.read_bytes()[:cut])
        again = Journal(half, RUN)
        assert [result.case for result in again.start(resume=True)] == [FIRST]
        again.add(_result(SECOND))
        assert [result.case for result in again.start(resume=True)] == [FIRST, SECOND]
    for cut in range(len(whole.splitlines()[0])):
        path.write_bytes(whole[:cut])
        again = Journal(path, RUN)
        assert again.start(resume=True) == []
        again.add(_result(FIRST))
        assert [result.case for result in again.start(resume=True)] == [FIRST]


def test_without_resume_a_run_starts_anew(tmp_path) -> None:
    journal = Journal(tmp_path / "j", RUN)
    journal.start(resume=False)
    journal.add(_result(FIRST))
    assert journal.start(resume=False) == []
    assert Journal(tmp_path / "j", RUN).start(resume=True) == []
    assert Journal(tmp_path / "other", RUN).start(resume=True) == []


def test_another_run_is_not_gone_on_with(tmp_path) -> None:
    Journal(tmp_path / "j", RUN).start(resume=False)
    other = RUN | {"submissions": {"forward": "b"}}
    with pytest.raises(ValueError, match=r"--resume: .*j is of a run with other submissions; start anew without"):
        Journal(tmp_path / "j", other).start(resume=True)


def test_not_a_number_is_refused(tmp_path) -> None:
    journal = Journal(tmp_path / "j", RUN)
    journal.start(resume=False)
    with pytest.raises(ValueError, match="JSON"):
        journal.add(_result(FIRST, spread=math.nan))


def test_fingerprint_sees_a_changed_submission_and_option(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = 1")
    before = fingerprint({"forward": path}, Settings(secret_seed=1), {})
    assert before == fingerprint({"forward": path}, Settings(secret_seed=2), {})
    assert "secret" not in json.dumps(before)
    assert before != fingerprint({"forward": path}, Settings(mode="score"), {})
    (tmp_path / "helper.py").write_text("y = 1")
    assert before != fingerprint({"forward": path}, Settings(), {})


def test_kill_and_resume(tmp_path) -> None:
    out, journal = tmp_path / "out.json", tmp_path / "out.json.journal"
    command = [sys.executable, "-m", "scoring", "--suite", "forward", "--mode", "check", "--jobs", "1"]
    command += ["--forward", str(SMALL), "--json", str(out), *(f"--case=F{i}" for i in range(1, 5))]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while run.poll() is None and time.monotonic() < deadline:
            if journal.exists() and len(journal.read_bytes().splitlines()) > 1:
                break
            time.sleep(0.05)
        children = psutil.Process(run.pid).children(recursive=True)
        os.kill(run.pid, signal.SIGKILL)
        run.communicate(timeout=30)
    finally:
        run.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    finished = {json.loads(line)["case"][1] for line in journal.read_text().splitlines()[1:]}
    assert 1 <= len(finished) < 4
    again = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resumed: {len(finished)} of 4 cases are finished" in again.stdout
    ran = re.findall(r"^\[(\d)/4\] forward (F\d) ", again.stdout, re.MULTILINE)
    assert [int(number) for number, _ in ran] == list(range(len(finished) + 1, 5))
    assert {name for _, name in ran} == {"F1", "F2", "F3", "F4"} - finished
    assert [row["status"] for row in json.loads(out.read_text())["cases"]] == ["passed"] * 4
    none_left = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert none_left.returncode == 0
    assert "resumed: 4 of 4 cases are finished" in none_left.stdout
    assert not re.search(r"^\[\d/4\]", none_left.stdout, re.MULTILINE)
