"""The tuner: what it tries, what it drops unseen, what it keeps."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest

from harness.studies import tune
from harness.studies.spaces import SPACES, Shape, Space, excess, neighbours
from harness.studies.tune import TOP, Rows, Search, case_of, measure, right_ones, verify

SHAPE = Shape(1, 40, 1024, 128, True)
OFFICIAL = [Shape(128, 8, 1024, d, causal) for d in (64, 128, 256) for causal in (False, True)]


class Here:
    """A pool that works in this process."""

    def submit(self, function, *arguments):
        future: Future = Future()
        future.set_result(function(*arguments))
        return future


def climb(name: str, path, most: int = 100, until: float = float("inf"), mark: str = "x") -> list[dict]:
    rows = Rows(path, SHAPE, "1.1.0", mark=mark)
    return Search(name, SHAPE, 40, "1.1.0", rows, Here(), lambda *_: None, most=most, until=until).climb()


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize(
    "shape", [SHAPE, Shape(128, 8, 8192, 64, False), Shape(128, 8, 2048, 256, False), *OFFICIAL], ids=str
)
def test_shipped_settings_fit(name, shape) -> None:
    space = SPACES[name]
    shipped = space.shipped(shape)
    if shipped is None:
        assert name == "backward pipeline" and shape.n != 1024
        return
    assert excess(space, shape, shipped) == ""
    assert all(excess(space, shape, changed) == "" for changed in neighbours(space, shape, shipped))


@pytest.mark.parametrize("shape", OFFICIAL, ids=str)
def test_every_setting_of_the_backward_has_its_say(shape) -> None:
    """A setting that the tuner never changes would never be found wrong."""
    space = SPACES["backward pipeline"]
    shipped = space.shipped(shape)
    assert shipped is not None
    named = {name for group in space.choices(shape) for change in group for name in change}
    assert named >= set(shipped) - {"KQ"}  # of four steps over the keys
    changed = {name for other in neighbours(space, shape, shipped) for name in other if other[name] != shipped[name]}
    assert changed >= {"R", "RO", "BQ"} and changed & {"KG", "MI", "AHEAD", "SPLIT", "MIX"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"HALVES": 2, "BH": 128, "BN": 256}, "l0c needs 262144 bytes of 131072"),
        ({"KG": 4096}, "scratch needs"),
        ({"BN": 256, "F": 4, "HALVES": 2}, "no such causal form"),
        ({"R": 256}, "does not divide the rows"),
    ],
)
def test_what_cannot_fit_is_not_compiled(change, text) -> None:
    space = SPACES["forward pipeline"]
    assert text in excess(space, SHAPE, space.shipped(SHAPE) | change)


BODY = {
    "KG": 256, "BT": 64, "MI": 256, "KP": 256, "AHEAD": 1, "BQ": 256, "KQ": 256, "DQ": 128, "UNROLL": 4, "SPLIT": 0,
    "MIX": 0, "FOLD": 1, "LB": 256, "R": 64, "RD": 64, "RO": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"KP": 512}, "l1 needs"),
        ({"BT": 128}, "l0c needs 262144 bytes of 131072"),
        ({"MIX": 1}, "l1 needs"),
        ({"MIX": 1, "SPLIT": 1}, "no such mixed form"),
        ({"UNROLL": 2}, "no such body"),
        ({"KG": 512, "LB": 512}, "does not divide the shape"),
        ({"LB": 128}, "does not divide the piece"),
        ({"R": 256}, "does not divide the rows"),
    ],
)
def test_what_cannot_fit_in_the_backward_is_not_compiled(change, text) -> None:
    found = excess(SPACES["backward pipeline"], Shape(128, 8, 1024, 128, True), BODY | change)
    assert text in found and bool(text) == bool(found)


@pytest.fixture
def fake(monkeypatch) -> list:
    """A space in which a = 3 is best, a = 5 does not fit and a = 4 does not compile; what was tried."""
    space = Space(
        shipped=lambda shape: {"a": 0, "b": 1},
        choices=lambda shape: [[{"a": a} for a in range(6)] * 2, [{"b": b} for b in (0, 1)]],
        needs=lambda shape, s: {"ub": 10**9 if s["a"] == 5 else 1},
        call=lambda shape, settings, heads: None,
    )
    tried = []

    def measured(name, shape, settings, heads, release):
        tried.append(settings)
        row = {"space": name, "settings": settings, "heads": heads}
        if settings["a"] == 4:
            return row | {"status": "CompileError", "message": "ub overflow"}
        return row | {"status": "timed", "ms": abs(settings["a"] - 3) + settings["b"]}

    monkeypatch.setitem(SPACES, "fake", space)
    monkeypatch.setattr(tune, "measure", measured)
    return tried


def test_climbs_to_the_best_and_writes_every_row(tmp_path, fake) -> None:
    """From a = 0 up to a = 3; a = 5 does not fit and a = 4 does not compile."""
    path = tmp_path / "tune.json"
    rows = climb("fake", path)
    assert rows[0]["settings"] == {"a": 3, "b": 0}
    assert all(settings["a"] != 5 for settings in fake)
    assert len(fake) == len({json.dumps(settings) for settings in fake})
    (entry,) = json.loads(path.read_text()).values()
    assert len(entry["rows"]) == len(fake)
    Rows(path, Shape(1, 1, 512, 64, False), "1.1.0").save()
    Rows(path, SHAPE, "1.1.0", "backward").save()
    assert len(json.loads(path.read_text())) == 3, "other shapes and suites stay in the file"


def test_known_rows_are_not_made_again(tmp_path, fake) -> None:
    path = tmp_path / "tune.json"
    first = climb("fake", path)
    tried = len(fake)
    assert climb("fake", path) == first and len(fake) == tried
    assert climb("fake", path, mark="other sources") == first and len(fake) == 2 * tried


def test_without_time_left_the_shipped_settings_are_the_result(tmp_path, fake) -> None:
    rows = climb("fake", tmp_path / "tune.json", until=0.0)
    assert [row["settings"] for row in rows] == fake == [{"a": 0, "b": 1}]


def test_a_case_goes_by_its_name_alone() -> None:
    assert case_of("P1", None).suite == "forward"
    assert (case_of("C4", None).suite, case_of("C4", None).dtype) == ("backward", "fp16")
    with pytest.raises(ValueError, match="'C7'"):
        case_of("C7", None)


def test_a_trial_has_a_time_or_the_compilers_word() -> None:
    space = SPACES["forward pipeline"]
    shipped = space.shipped(SHAPE)
    row = measure("forward pipeline", SHAPE, shipped, 20, "1.1.0")
    assert row["status"] == "timed"
    assert row["ms"] > 0
    row = measure("forward general", SHAPE, {"block_m": 512, "block_n": 512}, 20, "1.1.0")
    assert row["status"] == "CompileError"
    assert "overflow" in row["message"]


def test_a_trial_of_the_backward_leaves_the_tables_as_they_were() -> None:
    import backward

    before = dict(backward._PIPELINES[128, True])
    space = SPACES["backward pipeline"]
    wrong = space.shipped(SHAPE) | {"BQ": 512}
    row = measure("backward pipeline", SHAPE, wrong, 20, "1.1.0")
    assert row["status"] == "CompileError" and "overflow" in row["message"]
    assert backward._PIPELINES[128, True] == before


@pytest.mark.parametrize("name", ["forward pipeline", "backward pipeline"])
def test_values_of_settings_are_computed(name) -> None:
    assert verify(name, SHAPE, SPACES[name].shipped(SHAPE), "1.1.0") == ""


def test_a_faster_kernel_that_skips_work_is_not_a_result() -> None:
    """The tuner once named WP = 512 the best settings of P2: with one tile of rows the kernel
    then left out half of P V."""
    name, shape = "forward pipeline", Shape(1, 40, 1024, 256, True)
    settings = SPACES[name].shipped(shape) | {"WP": 512}
    assert excess(SPACES[name], shape, settings) == "the kernel has no such form"
    assert "wrong values" in verify(name, shape, settings, "1.1.0")


def test_wrong_settings_are_passed_over(monkeypatch) -> None:
    monkeypatch.setattr(tune, "verify", lambda name, shape, settings, release: "bad" if settings["a"] < 2 else "")
    rows = [{"settings": {"a": a}} for a in range(2 + TOP + 2)]
    right, wrong = right_ones("fake", SHAPE, rows, "1.1.0", Here())
    assert right == [{"a": a} for a in range(2, 2 + TOP)]
    assert [row["settings"]["a"] for row in wrong] == [0, 1] and wrong[0]["message"] == "bad"
