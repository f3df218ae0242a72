"""Deleted synchronisations are noticed, and the arguments for those that are not hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl

from harness import virtual_npu
from harness.virtual_npu import mutation, redundancy
from harness.virtual_npu.hazards import INDEX, Region
from harness.virtual_npu.hivm import Function, Op
from harness.virtual_npu.hivm import Region as Body
from harness.virtual_npu.launch import Launch
from harness.virtual_npu.redundancy import Flag, Log, Touch

from . import kernels

V, MTE3 = INDEX["V"], INDEX["MTE3"]


def captured(launch) -> Launch:
    found: list[Launch] = []
    with virtual_npu.run("values", hazards=True, cores=1, release="1.1.0", capture=found):
        launch()
    (only,) = found
    return only


@pytest.fixture
def matmul(rng) -> Launch:
    a, b = torch.randn(64, 128, generator=rng).half(), torch.randn(128, 64, generator=rng).half()
    out = torch.empty(64, 64, dtype=torch.float16)
    return captured(lambda: kernels.matmul_kernel[(1,)](a, b, out, 64, 64, 128, 32, 32, 64, tl.float16))


@pytest.fixture
def handover(rng) -> Launch:
    n, steps, slots = 64, 5, 2
    a, b = (torch.randn(steps, n, n, generator=rng).half() * 0.1 for _ in range(2))
    scratch, out = torch.zeros(slots, n, n), torch.zeros(steps, n, n)
    return captured(
        lambda: kernels.handover_kernel[(1,)](
            a, b, scratch, out, steps, slots, n, False, True, disable_auto_inject_block_sync=True
        )
    )


def check(launch: Launch) -> list[mutation.Outcome]:
    outcomes = mutation.survey(launch)
    assert len(outcomes) == len(mutation.syncs(launch.program)) > 10
    for outcome in outcomes:
        assert outcome.noticed or outcome.proven, outcome
        assert outcome.noticed == (not outcome.argument)
    return outcomes


def test_every_deletion_in_a_matmul_is_noticed_or_proven_redundant(matmul) -> None:
    check(matmul)


def test_every_deleted_handover_is_noticed(handover) -> None:
    outcomes = check(handover)
    own = [outcome for outcome in outcomes if "sync_block" in outcome.op]
    assert len(own) == 4
    assert all(outcome.noticed and outcome.error for outcome in own)


def test_a_survey_leaves_program_and_memory_as_they_were(handover) -> None:
    ops = [op.number for _, op in mutation.syncs(handover.program)]
    before = handover.again(handover.program)
    mutation.survey(handover)
    assert [op.number for _, op in mutation.syncs(handover.program)] == ops
    assert handover.again(handover.program) == before


def test_an_abandoned_mutant_puts_its_op_back(matmul) -> None:
    ops = [op.number for _, op in mutation.syncs(matmul.program)]
    some = mutation.mutants(matmul.program)
    mutant = next(some)
    assert mutant.op.number not in [op.number for _, op in mutation.syncs(matmul.program)]
    some.close()
    assert [op.number for _, op in mutation.syncs(matmul.program)] == ops


def test_a_mutant_that_does_not_end_counts_as_noticed(matmul, monkeypatch) -> None:
    again = Launch.again

    def slow(self: Launch, program: Any) -> bytes:
        while program is not self.program and program.__dict__.get("slow", True):
            pass
        return again(self, program)

    monkeypatch.setattr(Launch, "again", slow)
    monkeypatch.setattr(redundancy, "record", lambda launch: [])
    some = mutation.mutants(matmul.program)
    one = next(some)
    monkeypatch.setattr(mutation, "mutants", lambda program: iter([one]))
    (outcome,) = mutation.survey(matmul, seconds=0.2)
    some.close()
    assert outcome.noticed
    assert outcome.error == "TimeoutError: not at its end after 0.2 s"


# The log search, on logs written by hand.

BARRIER, OTHER = 1, 2


def touch(low: int, high: int, *, write: bool, queue: int = V) -> Touch:
    return Touch(queue, 0, _op(9), 0, Region(low, high, (low, high - low, ())), write)


def _op(number: int, pipe: str = "PIPE_V") -> Op:
    return Op("hivm.hir.pipe_barrier", [], [], {"pipe": pipe}, [], "k.py:1", number)


def argument(entries: list[Touch | Flag | int], pipe: str = "PIPE_V") -> str | None:
    ops = [_op(BARRIER, pipe), _op(OTHER)]
    function = Function("f", "AIV", False, [], [], Body([], ops))
    return redundancy.argument([Log("AIV", entries)], {"AIV": function}, "AIV", ops[0])


W, R = touch(0, 64, write=True), touch(32, 96, write=False)


def test_a_barrier_between_a_write_and_a_read_is_needed() -> None:
    assert argument([W, BARRIER, R]) is None


def test_a_barrier_between_disjoint_bytes_is_redundant() -> None:
    text = argument([W, BARRIER, touch(64, 96, write=False)])
    assert text is not None and "ran 1 times; of 1 pairs" in text and "none share bytes" in text


def test_a_read_before_a_write_needs_no_barrier() -> None:
    assert argument([R, BARRIER, W]) is not None


def test_another_barrier_in_between_is_enough() -> None:
    assert argument([W, OTHER, BARRIER, R]) is not None
    assert argument([W, BARRIER, OTHER, R]) is not None


def test_a_pair_over_several_executions_counts() -> None:
    assert argument([W, BARRIER, touch(128, 160, write=True), BARRIER, R]) is None


def test_what_other_pipes_touch_is_not_its_business() -> None:
    assert argument([W, BARRIER, touch(0, 64, write=False, queue=MTE3)]) is not None


def test_a_round_trip_of_flags_orders_a_pair() -> None:
    out = [Flag(V, 0, set=True), Flag(MTE3, 0, set=False)]
    back = [Flag(MTE3, 1, set=True), Flag(V, 1, set=False)]
    text = argument([W, BARRIER, *out, *back, R])
    assert text is not None and "1 share bytes, each ordered by flags" in text
    assert argument([W, BARRIER, *out, R]) is None
    assert argument([*out, W, BARRIER, *back, R]) is None  # set before the write: carries nothing


def test_a_wait_takes_the_oldest_set() -> None:
    """The wait consumes the set from before the write, so it orders nothing."""
    back = [Flag(MTE3, 1, set=True), Flag(V, 1, set=False)]
    early = [Flag(V, 0, set=True), W, BARRIER, Flag(V, 0, set=True), Flag(MTE3, 0, set=False)]
    assert argument([*early, *back, R]) is None


def test_the_last_barrier_of_all_pipes() -> None:
    assert argument([W, BARRIER], "PIPE_ALL") is not None
    assert argument([W, BARRIER, touch(512, 544, write=False)], "PIPE_ALL") is None


def test_only_barriers_are_argued_about() -> None:
    flag = Op("hivm.hir.set_flag", [], [], {}, [], "k.py:1", 7)
    assert redundancy.argument([], {}, "AIV", flag) is None
