"""make npu-doctor, on the fake torch_npu and without one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness import doctor, fake_npu
from harness.configs import Case
from harness.studies import calibration

ROW = {"kernel": "textbook", "z": "1", "h": "2", "n": "128", "d": "64", "causal": "0", "bm": "64", "bn": "64"}
ROW |= {"acc": "ub", "order": "hz", "ms": "1.0"}


def _pretend(monkeypatch, **pretend) -> None:
    monkeypatch.setenv("PYTHONPATH", str(fake_npu.FOLDER))
    monkeypatch.setenv("FAKE_NPU", json.dumps(pretend))


def test_all_steps_on_the_fake(monkeypatch) -> None:
    _pretend(monkeypatch, slow={"textbook_fwd_kernel": 7.0})
    small = Case("forward", "performance", 1, "T1", 1, 2, 128, 64, True, "fp16", "public", 9.0)
    monkeypatch.setattr(doctor, "cases", lambda suite: [small] if suite == "forward" else [])
    monkeypatch.setattr(doctor, "published_rows", lambda: [ROW])
    monkeypatch.setattr(doctor, "_small", lambda suite, causal: replace(small, suite=suite, causal=causal, n=64, d=32))
    kept = ("stack", "cores", "memory")  # each is a process of its own; the other ones are below
    monkeypatch.setattr(doctor, "PROBES", {name: doctor.PROBES[name] for name in kept})
    said: list[str] = []
    found = doctor.examine(quick=True, say=said.append)
    status = {step["name"]: step["status"] for step in found["steps"]}
    assert list(status) == [*doctor.PROBES, "vendor", "textbook", "forward", "backward", "times"]
    texts = {step["name"]: step["text"] for step in found["steps"]}
    # triton-ascend 3.2.0 of PyPI is not the contest's 3.2.1
    assert {name for name, one in status.items() if one != "ok"} == {"stack"}, said
    assert "triton-ascend 3.2.0 is not the contest's 3.2.1" in texts["stack"]
    assert texts["cores"] == "torch.npu.get_device_properties: 20, torch.npu.get_device_limit: 20, triton: 20"
    assert "agree with fp64" in texts["vendor"]
    assert found["stack"]["chip"] == "Ascend910B3"
    (case,) = found["cases"]
    assert (case["name"], case["status"], case["baseline"]) == ("T1", "passed", "vendor, same run")
    (row,) = found["times"]
    assert row["ms"] == pytest.approx(7.0, abs=0.2)
    assert {key: row[key] for key in doctor.ROW_KEYS} == {key: ROW[key] for key in doctor.ROW_KEYS}
    json.dumps(found, allow_nan=False)


def test_without_torch_npu_it_says_what_to_do(tmp_path, capsys) -> None:
    assert doctor.main(["--out", str(tmp_path / "d.json")]) == 1
    printed = capsys.readouterr().out
    assert "failed   torch_npu: No module named 'torch_npu': install torch_npu 2.7.1.post4" in printed
    assert "skipped  all behind torch_npu" in printed
    assert [step["status"] for step in json.loads((tmp_path / "d.json").read_text())["steps"]] == ["ok", "failed"]


def test_a_step_that_breaks_is_a_failed_step(monkeypatch) -> None:
    _pretend(monkeypatch, fail=["torch.npu.Event.elapsed_time"])
    answer = doctor.probe("events")
    assert answer["status"] == "failed"
    assert "torch.npu.Event.elapsed_time: the fake was told to fail" in answer["text"]
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.01)
    assert doctor.probe("torch") == {"status": "failed", "text": "did not end within 0.01 s"}


def _file(**changed) -> dict:
    times = [{key: ROW[key] for key in doctor.ROW_KEYS} | {"ms": 12.3456, "spread": 0.01, "repeats": 30}]
    return {"written": "2026-12-01T05:00:00+00:00", "stack": {"chip": "Ascend910B3"}, "times": times} | changed


def test_times_become_rows_that_calibrate_reads(tmp_path, monkeypatch) -> None:
    measurements, file = tmp_path / "measurements.csv", tmp_path / "d.json"
    shutil.copy(doctor.MEASUREMENTS, measurements)
    file.write_text(json.dumps(_file()))
    assert doctor.take_rows(file, measurements) == 1
    monkeypatch.setattr(calibration, "MEASUREMENTS", measurements)
    before, after = len(doctor.published_rows()), calibration.published()
    last = after[-1]
    assert (last.z, last.h, last.n, last.d, last.causal, last.block_m, last.acc) == (1, 2, 128, 64, False, 64, "ub")
    assert last.ms == 12.35
    assert len(after) > before
    with pytest.raises(ValueError, match="has been taken before"):
        doctor.take_rows(file, measurements)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stack": {"chip": "Ascend910B2"}}, "the file must be of an Ascend910B3, got Ascend910B2"),
        ({"stack": {}}, "the file must be of an Ascend910B3, got None"),
        ({"times": []}, "the file must hold times, got none"),
        ({"times": [ROW | {"ms": -1.0}]}, "ms must be a time in milliseconds, got -1.0"),
        ({"times": [ROW | {"ms": float("nan")}]}, "ms must be a time in milliseconds, got nan"),
        ({"times": [ROW | {"acc": "ub,x"}]}, "a row must be of plain words"),
    ],
)
def test_files_that_are_not_taken(changed, message) -> None:
    with pytest.raises(ValueError, match=message):
        doctor.new_rows(_file(**changed))


def test_published_rows_are_those_of_the_textbook() -> None:
    rows = doctor.published_rows()
    assert {row["kernel"] for row in rows} == {"textbook"}
    assert len({tuple(row[key] for key in doctor.ROW_KEYS) for row in rows}) == len(rows)
    assert Path(doctor.MEASUREMENTS).is_file()
