"""Traces of predicted launches."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import triton.language as tl

from harness import virtual_npu
from harness.studies import trace
from harness.virtual_npu.hardware import default_constants
from harness.virtual_npu.timing import Timed

from . import kernels

CLOCK = default_constants()["chip"]["clock_hz"]
STEPS, N = 6, 64


def handover() -> None:
    a, f = torch.empty(STEPS, N, N, dtype=torch.float16), torch.empty(STEPS, N, N)
    kernels.handover_kernel[(1,)](a, a, f, f, STEPS, 2, N, False, True, disable_auto_inject_block_sync=True)


def matmul() -> None:
    a = torch.empty(256, 512, dtype=torch.float16)
    kernels.matmul_kernel[(2,)](a, a, a, 256, 256, 512, 128, 128, 64, tl.float16)


def traced(call: Any, release: str = "1.1.0") -> tuple[Any, Timed, virtual_npu.Recording]:
    found: list[Any] = []
    with virtual_npu.run("timing", release=release, trace=found) as record:
        call()
    ((program, timed),) = found
    return program, timed, record


def by_lane(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lanes: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(names[event["tid"]], []).append(event)
    return lanes


@pytest.mark.parametrize("call", [handover, matmul])
def test_tracing_predicts_the_same_time(call, release) -> None:
    _, timed, record = traced(call, release)
    assert timed.cycles == record.kernels[0].report["core_cycles"] > 0


@pytest.mark.parametrize("call", [handover, matmul])
def test_lanes_have_the_profilers_names_and_no_overlaps(call, release) -> None:
    _, timed, _ = traced(call, release)
    events = trace.chrome_events(timed, "test", CLOCK)
    json.dumps(events)
    lanes = by_lane(events)
    assert {"aic_scalar", "aic_mte2", "aic_mte1", "aic_mac", "aic_fixpipe"} <= set(lanes)
    for name, slices in lanes.items():
        end = 0.0
        for event in sorted((e for e in slices if e["cat"] != "flag"), key=lambda e: (e["ts"], e["dur"])):
            assert event["ts"] >= end - 1e-6, (name, event)
            end = event["ts"] + event["dur"]
        assert end <= timed.cycles * 1e6 / CLOCK + 1e-6


def masked_add() -> None:
    x = torch.empty(40 * 4096)
    kernels.add_kernel[(40,)](x, x, x, 40 * 4096 - 5, 4096)


@pytest.mark.parametrize(
    ("call", "lanes"),
    [
        (matmul, {"aic_mac", "aic_mte1", "aic_mte2", "aic_fixpipe"}),
        (masked_add, {"aiv_mte2 0", "aiv_vec 0", "aiv_mte3 0"}),
    ],
)
def test_busy_slices_add_up_to_the_report(call, lanes) -> None:
    """Busy times once left out the stretch of transfers by contention, and whatever has a dynamic size."""
    _, timed, record = traced(call)
    report = record.kernels[0].report
    assert report["l2_stretch"] > 1
    slices = by_lane(trace.chrome_events(timed, "test", CLOCK))
    for name in lanes:
        found = sum(event["dur"] for event in slices[name] if event["cat"] == "run") * CLOCK / 1e6
        assert found == pytest.approx(report["busy"][name.replace(" ", "")]) and found > 0


def test_arrows_lead_from_a_set_to_the_wait_it_ends() -> None:
    _, timed, _ = traced(handover)
    latency = default_constants()["sync"]["cross_core_cycles"]
    arrows = trace.flows(timed)
    assert arrows
    for set_at, source, end, target, flag in arrows:
        assert end - set_at == pytest.approx(latency)
        assert (source.split()[0], target.split()[0], flag) in {
            ("aic_fixpipe", "aiv_scalar", 0),
            ("aiv_mte3", "aic_scalar", 1),
        }
    events = trace.chrome_events(timed, "test", CLOCK)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == len(arrows)
    assert all(ends[number]["ts"] > start["ts"] for number, start in starts.items())


def test_waits_are_named_by_their_cause() -> None:
    _, timed, _ = traced(handover)
    names = {event["name"] for slices in by_lane(trace.chrome_events(timed, "t", CLOCK)).values() for event in slices}
    assert "wait for cross-core flag 0 from the cube core" in names
    assert any(name.startswith("wait for aiv_") for name in names)


def test_a_trace_is_bounded() -> None:
    _, timed, _ = traced(handover)
    events = trace.chrome_events(timed, "test", CLOCK, max_events=50)
    assert sum(event["ph"] == "X" and event["cat"] != "flag" for event in events) == 50
    assert "first" in events[0]["args"]["name"]


def test_picture(tmp_path) -> None:
    _, timed, _ = traced(handover)
    path = tmp_path / "trace.png"
    trace.picture(timed, "test", path)
    assert path.read_bytes()[:4] == b"\x89PNG"
