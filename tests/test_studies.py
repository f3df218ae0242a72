"""The studies behind REPORT.md: kept rows, ablation, roofline, timelines, accuracy."""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch

from harness.configs import SUITES, Case, cases
from harness.studies import ablation, accuracy, roofline, timelines
from harness.studies.rows import Kept
from harness.studies.techniques import OVERLAP, SHIPPED, TECHNIQUES, Like, Technique, Times
from harness.virtual_npu.driver import run
from harness.virtual_npu.errors import HazardError, VirtualNPUError

SMALL = Case("forward", "performance", 1, "S1", 1, 10, 1024, 64, False, "fp16", "public")
WRONG = Technique(
    "forward",
    "right softmax",
    "half of the scale",
    "b_p = tl.exp(b_s - b_m_new[:, None])",
    edits=(("b_p = tl.exp(b_s - b_m_new[:, None])", "b_p = tl.exp((b_s - b_m_new[:, None]) * 0.5)"),),
    replace={"get_path": "general"},
)


def test_rows_are_kept_while_their_sources_hold(tmp_path) -> None:
    path = tmp_path / "rows.json"
    first = Kept(path, {"a": "1", "b": "2"})
    assert first.missing() == ["a", "b"]
    first.add("b", {"ms": 2.0}, head="h")  # an interrupted run has this much
    again = Kept(path, {"a": "1", "b": "2"})
    assert again.missing() == ["a"]
    again.add("a", {"ms": 1.0}, head="h")
    content = json.loads(path.read_text())
    assert content["head"] == "h"
    assert [row["key"] for row in content["rows"]] == ["a", "b"]
    changed = Kept(path, {"b": "3", "a": "1"})
    assert changed.missing() == ["b"]
    assert [row["ms"] for row in changed.ordered()] == [1.0]
    assert Kept(path, {}).ordered() == []


@pytest.mark.parametrize("item", [item for suite in SUITES for item in ablation.available(suite)],
                         ids=lambda item: f"{item.suite}: {item.name}")  # fmt: skip
def test_every_technique_is_in_its_kernel(item) -> None:
    """An edit that finds no text would time the shipped kernel under another name.

    When this fails the kernel has changed: mend the technique of this name in
    harness/studies/techniques.py, or drop it.
    """
    text = ablation.edited(item)
    switched = bool(item.edits or item.settings or item.replace or item.options or item.causal is not None)
    assert switched == (item.name != SHIPPED)
    written = "".join(new for _, new in item.edits)
    assert all(old in written or old not in text for old, _ in item.edits)
    ablation.module(item)
    concerned = [case for case in cases(item.suite) if case.kind == "performance" and ablation.concerns(item, case)]
    assert concerned, "it changes nothing for any official case"


def test_technique_names_are_unique() -> None:
    assert len({(item.suite, item.name) for item in TECHNIQUES}) == len(TECHNIQUES)
    assert not any(": " in item.name for item in TECHNIQUES)  # what separates the parts of a key


def test_a_technique_of_a_kernel_that_is_not_there_is_left_out(monkeypatch) -> None:
    text = ablation.source("backward").replace("def get_path_bwd(", "def another(")
    monkeypatch.setattr(ablation, "source", lambda suite: text)
    names = {item.name: item for item in ablation.available("backward")}
    assert OVERLAP not in names
    assert names["large tiles"].of == ""  # of the shipped kernel then
    monkeypatch.setattr(ablation, "source", lambda suite: text + "def get_path_bwd(")
    names = {item.name: item for item in ablation.available("backward")}
    assert names["large tiles"].of == OVERLAP in names


def test_what_is_not_in_the_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the text 'no such line'"):
        ablation.edited(dataclasses.replace(WRONG, code="no such line"))
    with pytest.raises(ValueError, match="must have '_NO_TABLE'"):
        ablation.module(dataclasses.replace(WRONG, settings={"_NO_TABLE": 1}))


def test_settings() -> None:
    table = {(64, False): {"KG": 1024, "R": 16}, (64, True): {"KG": 512, "R": 64}}
    switched = ablation.switched
    assert switched(table, {"KG": 256}) == {(64, False): {"KG": 256, "R": 16}, (64, True): {"KG": 256, "R": 64}}
    assert switched({64: (128, 64), 32: (64, 64)}, (16, 16)) == {64: (16, 16), 32: (16, 16)}
    assert switched({64: (128, 64), 32: (64, 64)}, {64: (16, 16)}) == {64: (16, 16), 32: (64, 64)}
    some = switched(table, {(64, True): {"R": 8}})
    assert some == {(64, False): {"KG": 1024, "R": 16}, (64, True): {"KG": 512, "R": 8}}
    half = switched({1: {"R": 8}, 2: {"KG": 4}}, {"R": Times(0.5)})
    assert half == {1: {"R": 4}, 2: {"KG": 4}}  # an entry without the setting stays without it
    assert switched(table, {(64, True): Like((64, False), but=("KG",))})[64, True] == {"KG": 512, "R": 16}


def test_a_row_is_made_where_the_switch_changes_something() -> None:
    p1, p6 = (next(case for case in cases("forward") if case.name == name) for name in ("P1", "P6"))
    groups = ablation.technique("forward", "larger groups of long rows")
    assert not ablation.concerns(groups, p1)  # 1024 rows are one group either way
    assert ablation.concerns(groups, p6)
    few = dataclasses.replace(groups, only=("P3",))
    assert not ablation.concerns(few, p6)
    assert not ablation.concerns(dataclasses.replace(groups, dims=(128,)), p6)


def test_a_technique_that_is_gone_is_left_out_and_said(monkeypatch) -> None:
    text = ablation.source("forward").replace("def _block(", "def _another_block(")
    original = ablation.source
    monkeypatch.setattr(ablation, "source", lambda suite: text if suite == "forward" else original(suite))
    ablation.gone.cache_clear()
    ablation.work.cache_clear()
    try:
        (name,) = (name for name, reason in ablation.gone().items() if "_block(" in reason and "next" in name)
        assert name == "forward: query blocks up one head and down the next"
        assert not any(key.startswith(name) for key in ablation.wanted())
        assert any(key.startswith("forward: wide key tiles") for key in ablation.wanted())
    finally:
        ablation.gone.cache_clear()
        ablation.work.cache_clear()


def test_a_row_has_a_time_limit(monkeypatch) -> None:
    with pytest.raises(TimeoutError, match="longer than 0 s"), ablation.limited(0.05):
        time.sleep(5)
    with ablation.limited(5):
        pass
    monkeypatch.setattr(ablation, "time_case", lambda *_: time.sleep(5))
    row = ablation.do("forward: as shipped: P6", 0.05, time.time() + 60)
    assert row is not None
    assert (row["ms"], row["fault"]) == (None, "timeout")
    assert ablation.do("forward: as shipped: P6", 60, time.time() - 1) is None  # the run is over


def test_why_there_is_no_time() -> None:
    error = type("MLIRCompilationError", (Exception,), {})("a\nloc(1): error: cbuf overflow, requires 9 bits\nb")
    assert ablation.told(error) == ("does not compile", "cbuf overflow, requires 9 bits")
    crash = type("CompileError", (Exception,), {})(
        "opt: /home/me/opt failed\n#30 0x00 main\n#31 0x01 (/home/me/opt+0x1)"
    )
    assert ablation.told(crash) == ("does not compile", "opt: opt failed"), "a stack with folders of the machine"
    assert ablation.told(HazardError("race\nmore")) == ("HazardError", "race")
    assert ablation.told(VirtualNPUError("no such op")) == ("not modelled", "no such op")


def test_nan_is_the_largest_error() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert ablation.worst_error([exact.half(), torch.tensor([3.0, 4.5])], [exact, exact]) == pytest.approx(0.1)
    assert ablation.worst_error([torch.tensor([3.0, float("nan")])], [exact]) == float("inf")


def test_lines_are_added_at_one_place() -> None:
    """A line of a technique was added at a second place that looked the same, and its rows did not compile."""
    item = Technique("forward", "twice", "", "", edits=(("    if FOLD:\n", "    if FOLD:\n        pass\n"),))
    with pytest.raises(ValueError, match=r"'twice' \d+ times"):
        ablation.edited(item)


def test_a_switch_reaches_the_launch() -> None:
    from forward import get_path

    assert get_path(1, 10, 1024, 64, False, 0.5, 20) == "pipeline"
    kernel = ablation.module(ablation.technique("forward", OVERLAP))
    assert kernel.get_path(1, 10, 1024, 64, False, 0.5, 20) == "general"
    shipped = ablation.time_case(ablation.technique("forward", SHIPPED), SMALL)
    general = ablation.time_case(ablation.technique("forward", OVERLAP), SMALL)
    assert shipped["fault"] == general["fault"] == ""
    assert shipped["ms"] != general["ms"]


def test_options_of_a_launch() -> None:
    seen = []
    kernel = SimpleNamespace(run=lambda *args, **given: seen.append((args, given)))
    ablation._relaunch(kernel, {"sync_solver": None, "multibuffer": True})
    kernel.run(1, grid=(1,), sync_solver=False)
    kernel.run(2, grid=(1,), multibuffer=False, other=3)
    assert seen == [((1,), {"grid": (1,)}), ((2,), {"grid": (1,), "multibuffer": True, "other": 3})]


def test_what_does_not_compile_is_said() -> None:
    huge = dataclasses.replace(WRONG, settings={"_TILES": (512, 512)}, edits=())
    row = ablation.time_case(huge, SMALL)
    assert row["ms"] is None
    assert row["fault"] == "does not compile"
    assert "overflow" in row["detail"]


def test_wrong_values_are_said() -> None:
    assert ablation.check_values(WRONG)["values"].startswith("wrong: relative L2 error")


def test_work_is_all_techniques_on_their_cases() -> None:
    work = ablation.work()
    assert list(work) == list(ablation.wanted())
    assert "forward: as shipped: P6" in work
    assert "backward: as shipped: C6-fp16" in work
    assert "forward: causal skipping: P1" in work
    assert "forward: causal skipping: P6" not in work


def test_floors() -> None:
    p1 = next(case for case in cases("forward") if case.name == "P1")
    c1 = next(case for case in cases("backward") if case.name == "C1-fp16")
    assert roofline.vector_passes("forward") == 9.0  # max 2, sub 2, exp 2, add 2, cast 1
    assert roofline.vector_passes("backward") == 10.0
    tensor = 1024 * 1024 * 128 * 2
    assert roofline.compulsory_bytes(p1) == 4 * tensor + 1024 * 1024 * 4
    found = roofline.floors(p1)
    assert found["cube"] == pytest.approx(4 * 1024 * 1024**2 * 128 / 2 / 294.9e12 * 1e3)
    assert found["vector"] == pytest.approx(1024 * 1024**2 / 2 / 64 * 9 / 40 / 1.8e9 * 1e3)
    assert found["HBM"] == pytest.approx(roofline.compulsory_bytes(p1) / (600 * 1.8e9) * 1e3)
    assert roofline.floors(c1)["cube"] == pytest.approx(2.5 * 4 * 1024 * 1024**2 * 64 / 294.9e12 * 1e3)


def test_no_time_is_below_what_a_pipe_needs() -> None:
    import torch

    from forward import attention_fwd

    x = torch.empty(1, 10, 1024, 64, dtype=torch.float16)
    with run("timing") as record:
        attention_fwd(x, x, x, False, 0.5)
    found = roofline.needs(record)
    assert all(0 < found[pipe] <= record.ms for pipe in roofline.PIPES)
    (kernel,) = record.kernels
    moved = (kernel.report["read_bytes"] + kernel.report["write_bytes"]) * 20
    assert found["L2"] == pytest.approx(moved / (2300 * 1.8e9) * 1e3)


def test_spans_are_cut_and_joined() -> None:
    events = [
        ("run", "M", 90.0, 110.0, 0),  # cut at the left
        ("run", "M", 110.5, 120.0, 0),  # closer than a cell: joined
        ("wait", "M", 120.0, 150.0, 0),
        ("run", "M", 150.0, 160.0, 0),
        ("run", "M", 690.0, 720.0, 0),  # cut at the right
        ("run", "M", 800.0, 900.0, 0),  # outside
    ]
    core = SimpleNamespace(kind="AIC", sub=0, events=events)
    found = timelines.spans(SimpleNamespace(cores=[core]), 100.0, 700.0)
    assert found["aic_mac"] == [[0, 20], [50, 60], [590, 600]]
    assert set(found) == set(timelines.LANES)
    assert found["aiv_vec 0"] == []


def test_accuracy_of_a_point() -> None:
    point = accuracy.Point("forward", "fp16", 64, True, 5.0)
    assert point in accuracy.points()
    found = accuracy.errors(point)["out"]
    assert set(found) == {"ours", "textbook", "torch"}
    assert 0 < found["ours"] < 1e-3 < found["torch"]  # scores rounded to fp16 cost the rest
    assert len({point.key for point in accuracy.points()}) == len(accuracy.points()) == 96 + 24
    assert list(accuracy.wanted()) == [point.key for point in accuracy.points()]


def test_dout_is_scaled_for_the_smallest_deviation_only() -> None:
    scaled = [point for point in accuracy.points() if point.exponent]
    assert {(point.suite, point.std) for point in scaled} == {("backward", 0.5)}
    assert {point.exponent for point in scaled} == {-10, 10}


def test_relative_error_is_none_when_not_finite() -> None:
    import torch

    one = torch.ones(4)
    assert accuracy.relative(one * 1.5, one.double()) == 0.5
    assert accuracy.relative(one / 0.0, one.double()) is None
    assert accuracy.relative(one * float("nan"), one.double()) is None


def test_a_technique_switched_off_still_gives_right_values() -> None:
    """An edit that no longer fits the kernel can still be valid code: after the backward's scratch became a
    dictionary, "Delta inside the pipeline" was timed with NaN for results, and only the report said so."""
    rows = json.loads(ablation.RESULTS.read_text())["rows"]
    values = {f"{row['suite']}: {row['technique']}": row["values"] for row in rows if "values" in row}
    assert len(values) > 20
    assert [name for name, value in values.items() if value.startswith("wrong")] == []
