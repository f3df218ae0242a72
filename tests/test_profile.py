"""Profiles by source line."""

from __future__ import annotations

import pytest
from rich.console import Console

from harness.studies import profile
from harness.virtual_npu.hivm import Op

from .test_trace import handover, matmul, traced


def test_causes() -> None:
    flag = Op("hivm.hir.wait_flag", [], [], {"set_pipe": "PIPE_V", "wait_pipe": "PIPE_MTE3"}, [], "k.py:1")
    assert profile.cause("wait", "AIV", flag) == "aiv_vec"
    block = Op("hivm.hir.sync_block_wait", [], [], {"static_flag_id": 3}, [], "k.py:2")
    assert profile.cause("cross-core wait", "AIC", block) == "cross-core flag 3 from the vector cores"
    assert profile.cause("wait for L0", "AIC", None) == "L0A/L0B free (aic_mac)"


def test_profile_counts_bytes_and_cycles_by_line() -> None:
    program, timed, record = traced(matmul)
    arguments = {str(index): 0.25 for index in range(20)}
    found = profile.profile(program, timed, arguments)
    lines = {*found.busy, *found.moved}
    assert all(line.startswith("kernels.py:") for line in lines)
    # Program 0 has two tiles of 128x128 in eight steps of 64: each step reads 16 KB of A and of B.
    total = {level: sum(row.get(level, 0.0) for row in found.moved.values()) for level in profile.LEVELS}
    assert total["GM read"] == record.kernels[0].report["read_bytes"] == 2 * 8 * (128 * 64 + 64 * 128) * 2
    assert total["of it HBM"] == total["GM read"] / 4
    assert total["GM write"] == record.kernels[0].report["write_bytes"] == 2 * 128 * 128 * 2
    assert total["L1 to L0"] == pytest.approx(total["GM read"])
    mac = sum(row.get("aic_mac", 0.0) for row in found.busy.values())
    assert mac == pytest.approx(record.kernels[0].report["busy"]["aic_mac"])
    assert sum(found.waits.values()) > 0


def test_profile_prints_lines_and_waits(capsys) -> None:
    ((found, whole),) = profile.run_profile(handover, handover)
    profile.show(found, whole, Console(width=200))
    text = capsys.readouterr().out
    assert "handover_kernel: predicted" in text
    assert "kernels.py:" in text and "waits that cost most" in text
    assert "cross-core flag" in text
