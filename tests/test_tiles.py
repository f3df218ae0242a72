"""The study of settings under other constants."""

from __future__ import annotations

import pytest

from harness.studies import tiles
from harness.studies.sensitivity import timed_cases
from harness.studies.spaces import SPACES, excess
from harness.virtual_npu.hardware import default_constants


@pytest.mark.parametrize("case", timed_cases(), ids=lambda case: case.name)
def test_every_case_has_other_settings_that_fit(case) -> None:
    name, found = tiles.candidates(case)
    shape = tiles.shape_of(case)
    assert found[0] == SPACES[name].shipped(shape)
    assert len(found) >= 3 and len({str(one) for one in found}) == len(found)
    assert all(excess(SPACES[name], shape, one) == "" for one in found)


def test_only_the_named_constants_change() -> None:
    changed = tiles.constants_of({("sync", "cross_core_cycles"): 500.0})
    assert changed["sync"]["cross_core_cycles"] == 500.0 != default_constants()["sync"]["cross_core_cycles"]
    changed["sync"]["cross_core_cycles"] = default_constants()["sync"]["cross_core_cycles"]
    assert changed == default_constants()
    with pytest.raises(KeyError, match=r"sync\.nothing"):
        tiles.constants_of({("sync", "nothing"): 1.0})
    assert all(tiles.constants_of(changes) for changes in tiles.CONSTANTS.values())


def rows(**other: float) -> list[dict]:
    """A case whose shipped settings take 10 ms, and 12 ms with others, or what `other` says."""
    labels = list(tiles.CONSTANTS)
    ms = [dict.fromkeys(labels, 10.0), dict.fromkeys(labels, 12.0) | other]
    found = [{"settings": {"A": 1, "B": 2}, "ms": ms[0]}, {"settings": {"A": 1, "B": 4}, "ms": ms[1]}]
    return [{"case": "P1", "rows": found, "under": tiles.judged(found)}]


def test_the_fastest_under_each_constant() -> None:
    (shipped,), (beaten,) = rows(), rows(**{"fixpipe head 35": 8.0})
    assert all(verdict == {"fastest": 0, "shipped_slower": 0.0} for verdict in shipped["under"].values())
    assert beaten["under"]["fixpipe head 35"] == {"fastest": 1, "shipped_slower": 0.25}
    assert beaten["under"][tiles.BASE] == {"fastest": 0, "shipped_slower": 0.0}
    line = next(line for line in tiles.lines([beaten]) if line[1] == "fixpipe head 35")
    assert line == ["P1", "fixpipe head 35", "10", "8", "B=4", "25.0%"]
    assert "6 of 7 pairs" in tiles.summary([beaten]) and "25.0% behind (P1, fixpipe head 35)" in tiles.summary([beaten])
    assert "behind" not in tiles.summary([shipped])
    assert tiles.summary([]) == "no case takes a pipeline"


def test_settings_are_timed_under_each_constant(monkeypatch) -> None:
    (case,) = (case for case in timed_cases() if case.name == "P1")
    monkeypatch.setattr(tiles, "HEADS", 40)
    name, (shipped, *_) = tiles.candidates(case)
    found = tiles.timed(name, tiles.shape_of(case), shipped)
    assert found is not None and set(found) == set(tiles.CONSTANTS)
    assert found["cross-core latency 500"] >= found[tiles.BASE] >= found["GM to L1 latency 187"] > 0
