"""Deleted synchronisations are noticed, and the arguments for those that are not hold."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from harness import virtual_npu
from harness.results import write_json
from harness.studies import surveys
from harness.virtual_npu import mutation, redundancy
from harness.virtual_npu.hazards import INDEX, Region
from harness.virtual_npu.hivm import Function, Op
from harness.virtual_npu.hivm import Region as Body
from harness.virtual_npu.launch import Launch
from harness.virtual_npu.redundancy import Cross, Flag, Log, Mark, Touch

from . import kernels

RESULTS = Path(__file__).parents[1] / "results"
VECTOR, CUBE = "vector core 0", "cube core"
V, MTE3 = (VECTOR, INDEX["V"]), (VECTOR, INDEX["MTE3"])


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


def numbers_of(launch: Launch) -> list[tuple[int, int | None]]:
    return [(sync.op.number, sync.operand) for sync in mutation.syncs(launch.program)]


def check(launch: Launch) -> list[mutation.Outcome]:
    outcomes = mutation.survey([launch])
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
    ops = numbers_of(handover)
    before = handover.again(handover.program)
    mutation.survey([handover])
    assert numbers_of(handover) == ops
    assert handover.again(handover.program) == before


def test_an_abandoned_mutant_puts_its_op_back(matmul) -> None:
    before = numbers_of(matmul)
    texts = {core: len(function.body.ops) for core, function in matmul.program.functions.items()}
    for position in range(len(before)):
        some = mutation.mutants(matmul.program)
        mutant = next(itertools.islice(some, position, None))
        assert (mutant.sync.op.number, mutant.sync.operand) == before[position]
        assert before[position] not in numbers_of(matmul)
        some.close()
        assert numbers_of(matmul) == before
    assert texts == {core: len(function.body.ops) for core, function in matmul.program.functions.items()}


def test_flags_inside_a_matrix_macro_are_deleted_too(matmul) -> None:
    """They are operands of mmadL1, not ops, and were left out of the survey."""
    inside = [outcome for outcome in check(matmul) if "mmadL1" in outcome.op]
    assert {outcome.detail for outcome in inside} >= {"wait for A", "wait for B"}
    assert all(outcome.noticed for outcome in inside)


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
    monkeypatch.setattr(mutation, "mutants", lambda program, part, of: iter([one]))
    (outcome,) = mutation.survey([matmul], seconds=0.2)
    some.close()
    assert outcome.noticed
    assert outcome.error == "TimeoutError: not at its end after 0.2 s"


# The log search, on logs written by hand.

BARRIER, OTHER = Mark(VECTOR, 1), Mark(VECTOR, 2)
numbers = itertools.count()


def touch(low: int, high: int, *, write: bool, place: tuple[str, int] = V) -> Touch:
    return Touch(place, next(numbers), _op(9), 0, Region(low, high, (low, high - low, ())), write)


def _op(number: int, pipe: str = "PIPE_V") -> Op:
    return Op("hivm.hir.pipe_barrier", [], [], {"pipe": pipe}, [], "k.py:1", number)


def evidence(entries: list[Touch | Flag | Cross | Mark], pipe: str = "PIPE_V") -> redundancy.Evidence | None:
    ops = [_op(BARRIER.number, pipe), _op(OTHER.number)]
    function = Function("f", "AIV", False, [], [], Body([], ops))
    return redundancy.argument([Log(entries)], {"AIV": function}, ops[0])


def argument(entries: list[Touch | Flag | Cross | Mark], pipe: str = "PIPE_V") -> str | None:
    found = evidence(entries, pipe)
    return None if found is None else found.text


W, R = touch(0, 64, write=True), touch(32, 96, write=False)


@pytest.mark.parametrize("pair", [(W, R), (R, W), (W, touch(0, 32, write=True))])
def test_a_barrier_between_accesses_that_conflict_is_needed(pair) -> None:
    assert argument([pair[0], BARRIER, pair[1]]) is None


def test_two_reads_need_no_barrier() -> None:
    assert argument([R, BARRIER, touch(32, 96, write=False)]) is not None


def test_a_barrier_between_disjoint_bytes_is_redundant() -> None:
    text = argument([W, BARRIER, touch(64, 96, write=False)])
    assert text is not None and "ran 1 times; of 1 pairs" in text and "none conflict" in text


def test_another_barrier_in_between_is_enough() -> None:
    assert argument([W, OTHER, BARRIER, R]) is not None
    assert argument([W, BARRIER, OTHER, R]) is not None


def test_a_pair_over_several_executions_counts() -> None:
    assert argument([W, BARRIER, touch(128, 160, write=True), BARRIER, R]) is None


def test_what_other_pipes_and_cores_touch_is_not_its_business() -> None:
    assert argument([W, BARRIER, touch(0, 64, write=False, place=MTE3)]) is not None
    assert argument([W, BARRIER, touch(0, 64, write=False, place=("vector core 1", V[1]))]) is not None
    assert argument([W, BARRIER, Mark("vector core 1", OTHER.number), R]) is None


def test_a_round_trip_of_flags_orders_a_pair() -> None:
    out = [Flag(V, 0, set=True), Flag(MTE3, 0, set=False)]
    back = [Flag(MTE3, 1, set=True), Flag(V, 1, set=False)]
    text = argument([W, BARRIER, *out, *back, R])
    assert text is not None and "1 conflict, each ordered by flags" in text
    assert argument([W, BARRIER, *out, R]) is None
    assert argument([*out, W, BARRIER, *back, R]) is None  # set before the write: carries nothing


def test_a_wait_takes_the_oldest_set() -> None:
    """The wait consumes the set from before the write, so it orders nothing."""
    back = [Flag(MTE3, 1, set=True), Flag(V, 1, set=False)]
    early = [Flag(V, 0, set=True), W, BARRIER, Flag(V, 0, set=True), Flag(MTE3, 0, set=False)]
    assert argument([*early, *back, R]) is None


def test_a_round_trip_through_the_cube_core_orders_a_pair() -> None:
    """Vector barriers before a rescale of the accumulator had no argument: the product that
    they precede waits for the cube, which waited for the vector core's probabilities."""
    scalar = INDEX["S"]
    out = [Cross(V, (1,), set=True), Cross((CUBE, scalar), (1,), set=False)]
    back = [Cross((CUBE, INDEX["FIX"]), (2,), set=True), Cross((VECTOR, scalar), (2,), set=False)]
    assert argument([W, BARRIER, *out, *back, R]) is not None
    assert argument([W, BARRIER, *back, R]) is None
    assert argument([W, BARRIER, Cross(MTE3, (1,), set=True), *out[1:], *back, R]) is None
    other = [Cross((CUBE, INDEX["FIX"]), (2,), set=True), Cross(("vector core 1", scalar), (2,), set=False)]
    assert argument([W, BARRIER, *out, *other, R]) is None


def test_the_reason_is_where_the_compiler_makes_such_a_barrier() -> None:
    def reason(*entries: Touch | Flag | Cross | Mark, pipe: str = "PIPE_V") -> str:
        found = evidence(list(entries), pipe)
        assert found is not None and found.reason in redundancy.REASONS
        return found.reason

    far = touch(128, 160, write=True)
    assert reason(W, BARRIER, far) == "one buffer"
    assert reason(W, BARRIER, OTHER, R) == "another barrier"
    tensor = [Touch(V, next(numbers), _op(9), 1, Region(low, low + 64, (low, 64, ())), True, "gm") for low in (0, 64)]
    assert reason(tensor[0], BARRIER, tensor[1]) == "one tensor"
    trip = [
        Flag(V, 0, set=True), Flag(MTE3, 0, set=False), Flag(MTE3, 1, set=True), Flag(V, 1, set=False)
    ]  # fmt: skip
    assert reason(W, BARRIER, *trip, R) == "flags"
    assert reason(W, BARRIER, pipe="PIPE_ALL") == "end"


def test_the_last_barrier_of_all_pipes() -> None:
    assert argument([W, BARRIER], "PIPE_ALL") is not None
    assert argument([W, BARRIER, touch(512, 544, write=False)], "PIPE_ALL") is None


def test_only_barriers_are_argued_about() -> None:
    flag = Op("hivm.hir.set_flag", [], [], {}, [], "k.py:1", 7)
    assert redundancy.argument([], {}, flag) is None


# The survey's records.


def test_a_deletion_counts_as_noticed_if_one_launch_notices_it(rng) -> None:
    """A loop that one shape never enters says nothing there; another shape runs it."""
    a, b = torch.randn(64, 512, generator=rng).half(), torch.randn(512, 64, generator=rng).half()
    out = torch.empty(64, 64, dtype=torch.float16)

    def launch(m: int) -> Launch:
        return captured(lambda: kernels.matmul_kernel[(1,)](a, b, out, m, 64, 512, 32, 32, 64, tl.float16))

    short, long = launch(0), launch(64)
    assert short.program.key == long.program.key
    alone = sum(outcome.noticed for outcome in mutation.survey([short]))
    assert sum(outcome.noticed for outcome in mutation.survey([short, long])) > alone


def test_launches_of_different_programs_are_refused(matmul, handover) -> None:
    with pytest.raises(ValueError, match="launches must be some of one program, got 2"):
        mutation.survey([matmul, handover])


def _row(deleted: int, noticed: int, proven: int) -> dict[str, Any]:
    reasons = {"one tensor": proven} if proven else {}
    row = {"deleted": deleted, "noticed": noticed, "proven": proven, "not_reached": 0}
    return {**row, "reasons": reasons, "argued": []}


def test_both_shares_are_stated() -> None:
    subjects = {"textbook": {"sources": "x", "kernels": {"textbook: a": _row(10, 7, 3), "textbook: b": _row(10, 9, 0)}}}
    result = surveys.result_of("1.1.0", subjects)
    assert result["share"] == 0.8 and result["share_of_needed"] == 0.9412
    assert result["groups"]["textbook"]["deleted"] == 20
    assert result["groups"]["forward"]["share"] is None


def test_a_share_that_the_compiler_bounds_says_so() -> None:
    """Barriers that order nothing cannot be noticed: 98 of 120 is all that there is, 19 below 97 %."""
    row = surveys.totals({"a": _row(120, 98, 22)})
    text = surveys.shortfall(row)
    assert text.startswith("19 short of 97% of all; at most 81.7% can be noticed")
    assert "22 barriers that order nothing (22 one tensor)" in text
    assert surveys.shortfall(surveys.totals({"a": _row(100, 97, 3)})) == ""


def test_parts_of_a_survey_are_the_whole(matmul) -> None:
    whole = mutation.survey([matmul])
    parts = [{"a: k": {"shapes": [], "outcomes": mutation.survey([matmul], part=part, of=3)}} for part in (2, 0, 1)]
    assert sorted((o for part in parts for o in part["a: k"]["outcomes"]), key=lambda o: o.index) == whole
    (row,) = surveys.joined(parts).values()
    assert row["deleted"] == len(whole)
    assert [item["argument"] for item in row["argued"]] == [o.argument for o in whole if not o.noticed]
    assert sum(row["reasons"].values()) == row["proven"]


@pytest.mark.parametrize("suite", ["forward", "backward"])
def test_every_official_pipeline_has_a_subject(suite) -> None:
    """Other settings compile to other programs; the survey had three of the forward's."""
    import backward
    import forward
    from harness.configs import cases

    def settings(n: int, d: int, causal: bool):
        if suite == "backward":
            return backward._PIPELINES[d, causal], n
        found = forward._pipeline_settings(n, d, causal)
        return found, min(3, -(-n // found["KG"]))  # groups: one, two, more

    names = [name for name in surveys.SUBJECTS if name.startswith(f"{suite} pipeline")]
    shapes = [shape for name in names for shape in surveys.SUBJECTS[name].shapes]
    surveyed = [settings(shape.n, shape.d, shape.causal) for shape in shapes]
    for case in cases(suite):
        if case.kind == "performance":
            assert settings(case.n, case.d, case.causal) in surveyed, case.name


def test_a_survey_of_other_sources_is_repeated(tmp_path) -> None:
    path = tmp_path / "mutation.json"
    assert surveys._earlier(path, "1.1.0") == {}
    marks = {"textbook": surveys.mark("textbook", "1.1.0"), "backward general": surveys.mark("textbook", "1.1.0")}
    write_json(path, surveys.result_of("1.1.0", {n: {"sources": m, "kernels": {}} for n, m in marks.items()}))
    assert list(surveys._earlier(path, "1.1.0")) == ["textbook"]
    assert surveys._earlier(path, "1.2.0") == {}


def test_one_deletion_without_evidence_fails_the_survey() -> None:
    """The exit status hung on the plain share, which redundant barriers alone can push below any bound."""
    assert surveys.verdict(surveys.totals({"a": _row(120, 98, 22)})) == ""
    assert surveys.verdict(surveys.totals({"a": _row(1000, 999, 0)})).startswith("1 deletions are neither")


@pytest.mark.parametrize("group", ["forward", "backward", "textbook"])
def test_the_record_notices_what_is_promised(group) -> None:
    """94.2 % of all, 92.7 % of the forward's: the kernels stored to each scratch tensor through one
    argument, which made the compiler add barriers that order nothing."""
    record = json.loads((RESULTS / "mutation.json").read_text())
    assert set(surveys.SUBJECTS) <= set(record["subjects"])
    found = record["groups"][group]
    assert found["noticed"] >= surveys.WANTED * found["deleted"]
    assert found["noticed"] + found["proven"] == found["deleted"]
