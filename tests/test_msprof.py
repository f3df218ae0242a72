"""make npu-profile: an msprof of our own on PATH, the fake torch_npu below it."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from harness import fake_npu, msprof
from harness.configs import select

(CASE,) = select("forward", ["F2"])
NAMES = ["attention_fwd_kernel_general"]
HEADER = ["Op Name", "OP Type", "Task Duration(us)", *(column for column, _ in msprof.PIPES.values())]

MSPROF = f"""#!{sys.executable}
import pathlib, shlex, subprocess, sys
options = dict(word.split("=", 1) for word in sys.argv[1:])
assert options["--ai-core"] == "on" and options["--aic-metrics"] == "PipeUtilization", options
folder = pathlib.Path(options["--output"])
assert folder.stat().st_mode & 0o022 == 0, "msprof refuses a folder that others may write to"
code = subprocess.run(shlex.split(options["--application"])).returncode
out = folder / "PROF_1" / "mindstudio_profiler_output"
out.mkdir(parents=True)
rows = ["{",".join(HEADER)}"]
for i in range(10):
    us = 100 if i < 5 else 20 + i
    rows.append(f"attention_fwd_kernel_general_{{i}},x,{{us}},0.25" + ",0.5" * {len(HEADER) - 5} + ",N/A")
(out / "op_summary_1.csv").write_text("\\ufeff" + "\\n".join(rows))
sys.exit(code)
"""


@pytest.fixture
def on_path(tmp_path, monkeypatch) -> Path:
    tool = tmp_path / "bin" / "msprof"
    tool.parent.mkdir()
    tool.write_text(MSPROF)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(fake_npu.FOLDER))
    monkeypatch.setattr(msprof, "LOCAL", tmp_path)
    return tmp_path


def test_measured_beside_predicted(on_path, capsys) -> None:
    prediction = on_path / "prediction.json"
    assert msprof.main(["--case", "F2", "--predict", str(prediction)]) == 0
    predicted = json.loads(prediction.read_text())["kernels"]
    assert list(predicted) == NAMES
    assert 0 < predicted[NAMES[0]]["pipes"]["cube"] < 1
    assert msprof.main(["--case", "F2", "--prediction", str(prediction)]) == 0
    printed = capsys.readouterr().out
    assert "27.0 us" in printed, printed
    written = json.loads((on_path / "npu-profile-forward-F2.json").read_text())
    assert written["measured"][NAMES[0]]["us"] == 27.0, "the median of the later half"
    pipes = written["measured"][NAMES[0]]["pipes"]
    assert (pipes["cube"], pipes["mte1"], pipes["scalar of vector"]) == (0.25, 0.5, None)
    assert written["predicted"] == predicted


def test_without_msprof(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"msprof is not on PATH: source set_env\.sh"):
        msprof.profile(CASE, NAMES)


def test_an_application_that_fails(on_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_NPU", json.dumps({"fail": ["torch.npu.synchronize"]}))
    with pytest.raises(RuntimeError, match="msprof ended with code 1"):
        msprof.profile(CASE, NAMES)


def test_other_summaries_are_refused() -> None:
    with pytest.raises(ValueError, match="op_summary must have the columns .* missing"):
        msprof.read_summary("Op Name,Task Duration(us)\na,1\n", NAMES)
    row = ",".join(["Add", "x", "1.0", *["0"] * len(msprof.PIPES)])
    with pytest.raises(ValueError, match="op_summary must have rows of attention_fwd_kernel_general, got Add"):
        msprof.read_summary(f"{','.join(HEADER)}\n{row}\n", NAMES)


def test_a_kernel_whose_name_begins_with_anothers() -> None:
    rows = [",".join([name, "x", us, *["0"] * len(msprof.PIPES)]) for name, us in (("k_a", "1"), ("k_a_b", "5"))]
    found = msprof.read_summary("\n".join([",".join(HEADER), *rows]), ["k_a", "k_a_b"])
    assert {name: one["us"] for name, one in found.items()} == {"k_a": 1.0, "k_a_b": 5.0}
