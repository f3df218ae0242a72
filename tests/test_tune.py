"""The tuner: what it tries, what it drops unseen, what it keeps."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest

from harness.studies import tune
from harness.studies.tune import SPACES, Rows, Shape, Space, climb, excess, measure, neighbours

SHAPE = Shape(1, 40, 1024, 128, True)


class Here:
    """A pool that works in this process."""

    def submit(self, function, *arguments):
        future: Future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("shape", [SHAPE, Shape(128, 8, 8192, 64, False), Shape(128, 8, 2048, 256, False)])
def test_shipped_settings_fit(name, shape) -> None:
    shipped = SPACES[name].shipped(shape)
    assert shipped is not None
    assert excess(SPACES[name], shape, shipped) == ""
    assert all(excess(SPACES[name], shape, changed) == "" for changed in neighbours(SPACES[name], shape, shipped))


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


def test_climbs_to_the_best_and_writes_every_row(tmp_path, monkeypatch) -> None:
    """From a = 0 up to a = 3; a = 5 does not fit and a = 4 does not compile."""
    space = Space(
        shipped=lambda shape: {"a": 0, "b": 1},
        choices=lambda shape: [[{"a": a} for a in range(6)], [{"b": b} for b in (0, 1)]],
        needs=lambda shape, s: {"ub": 10**9 if s["a"] == 5 else 1},
        call=lambda shape, settings, heads: None,
    )
    tried = []

    def fake(name, shape, settings, heads, release):
        tried.append(settings)
        row = {"space": name, "settings": settings, "heads": heads}
        if settings["a"] == 4:
            return row | {"status": "CompileError", "message": "ub overflow"}
        return row | {"status": "timed", "ms": abs(settings["a"] - 3) + settings["b"]}

    monkeypatch.setitem(SPACES, "fake", space)
    monkeypatch.setattr(tune, "measure", fake)
    path = tmp_path / "tune.json"
    rows = climb("fake", SHAPE, 40, "1.1.0", 100, Rows(path, SHAPE, "1.1.0"), Here(), lambda *_: None)
    assert rows[0]["settings"] == {"a": 3, "b": 0}
    assert all(settings["a"] != 5 for settings in tried)
    assert len(tried) == len({json.dumps(settings) for settings in tried})
    (entry,) = json.loads(path.read_text()).values()
    assert len(entry["rows"]) == len(tried)
    again = Rows(path, Shape(1, 1, 512, 64, False), "1.1.0")
    again.save()
    assert len(json.loads(path.read_text())) == 2, "other shapes stay in the file"


def test_a_trial_has_a_time_or_the_compilers_word() -> None:
    space = SPACES["forward pipeline"]
    shipped = space.shipped(SHAPE)
    row = measure("forward pipeline", SHAPE, shipped, 20, "1.1.0")
    assert row["status"] == "timed"
    assert row["ms"] > 0
    row = measure("forward general", SHAPE, {"block_m": 512, "block_n": 512}, 20, "1.1.0")
    assert row["status"] == "CompileError"
    assert "overflow" in row["message"]
