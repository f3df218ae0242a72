"""What README shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def _run(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_five_lines() -> None:
    assert len(SCRIPTS) == 2
    assert len(SCRIPTS[0].splitlines()) == 5
    errors = [float(x) for x in _run(SCRIPTS[0]).splitlines()[-1].strip("[]").split(",")]
    assert len(errors) == 3
    assert all(0 < error < 0.05 for error in errors)


def test_prediction_script() -> None:
    text = _run(SCRIPTS[1])
    match = re.search(r"^predicted: ([0-9.]+) ms, cube busy (\d+) %$", text, re.MULTILINE)
    assert match, text
    assert float(match[1]) > 0
    assert 0 < int(match[2]) < 100


@pytest.mark.parametrize(
    "path", [*re.findall(r"`((?:harness|tests|scoring)/[\w/.]+)`", README), "REPORT.md", "LICENSE"]
)
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_named_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"(?:^|`)make\s+([a-z][a-z-]*)", README, re.MULTILINE))
    assert {"setup", "score", "test", "check-full", "lint", "bench"} <= shown
    assert shown <= targets


def test_named_cases_exist() -> None:
    from harness.configs import cases

    names = {case.name for suite in ("forward", "backward") for case in cases(suite)}
    assert {"F1", "F18", "P1", "P6", "C1-fp16", "C6-bf16", "C2-bf16"} <= names
