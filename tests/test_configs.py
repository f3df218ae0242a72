"""The contest's configurations as data, and the inputs made for them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from harness.configs import Case, cases, heads_to_check, input_rule, make_inputs, seed_for, select, work_of_head


def test_counts_and_names() -> None:
    kinds = Counter((case.suite, case.kind) for suite in ("forward", "backward") for case in cases(suite))
    assert kinds == {("forward", "correctness"): 18, ("forward", "performance"): 6, ("backward", "performance"): 12}
    for suite in ("forward", "backward"):
        assert [case.number for case in cases(suite)] == list(range(1, len(cases(suite)) + 1))
        assert len({case.name for case in cases(suite)}) == len(cases(suite))


def test_published_baselines() -> None:
    rows = [(c.z, c.h, c.n, c.d, c.causal, c.baseline_ms, c.level) for c in cases("forward") if c.kind == "performance"]
    assert rows == [
        (128, 8, 1024, 128, True, 2.99, "public"),
        (128, 8, 1024, 256, True, 4.93, "public"),
        (128, 8, 2048, 128, True, 10.44, "public"),
        (128, 8, 2048, 256, False, 34.9, "public"),
        (128, 8, 4096, 128, False, 62.2, "public"),
        (128, 8, 8192, 64, False, 232.0, "public"),
    ]


def test_backward_is_inferred_and_has_both_dtypes() -> None:
    rows = cases("backward")
    assert {case.level for case in rows} == {"inferred"}
    assert {case.baseline_ms for case in rows} == {None}
    for dtype in ("fp16", "bf16"):
        own = {case.name: (case.d, case.causal) for case in rows if case.dtype == dtype}
        assert own == {
            f"C{i}-{dtype}": shape
            for i, shape in enumerate([(d, causal) for causal in (False, True) for d in (64, 128, 256)], start=1)
        }


def test_correctness_cases() -> None:
    rows = [case for case in cases("forward") if case.kind == "correctness"]
    assert [case.dtype for case in rows] == ["fp16"] * 17 + ["bf16"]
    assert Counter((case.z, case.h) for case in rows) == {(1, 1): 4, (1, 2): 2, (4, 32): 11, (128, 8): 1}


def test_select() -> None:
    assert [case.name for case in select("forward", ["3", "P1"])] == ["F3", "P1"]
    assert [case.name for case in select("forward", ["19"])] == ["P1"]
    assert [case.name for case in select("backward", ["c2"])] == ["C2-fp16", "C2-bf16"]
    assert [case.name for case in select("backward", ["C2-bf16"])] == ["C2-bf16"]
    assert select("forward", []) == list(cases("forward"))
    with pytest.raises(ValueError, match=r"case must be 1 to 24 or one of F1, .* got 'F19'"):
        select("forward", ["F19"])
    with pytest.raises(ValueError, match=r"suite must be one of forward, backward, got 'sideways'"):
        select("sideways", [])


def test_inputs_follow_the_rule_and_the_seed() -> None:
    case = select("backward", ["C1-bf16"])[0]
    inputs = make_inputs(case, 2, 3, 5)
    forms = {name: (tuple(x.shape), x.dtype) for name, x in inputs.items()}
    assert forms == dict.fromkeys(("q", "k", "v", "dout"), ((2, 3, 1024, 64), torch.bfloat16))
    assert abs(float(inputs["q"].float().std()) - 0.5) < 5e-3
    assert abs(float(inputs["dout"].float().std()) - 1.0) < 1e-2
    assert all(torch.equal(x, make_inputs(case, 2, 3, 5)[name]) for name, x in inputs.items())
    assert not torch.equal(inputs["q"], make_inputs(case, 2, 3, 6)["q"])
    assert not torch.equal(inputs["q"], inputs["k"])
    assert input_rule().sm_scale == 0.5
    large = make_inputs(case, 2, 3, 5, large=True)
    assert torch.equal(large["q"][-1, -1, -64:], inputs["q"][-1, -1, -64:] * 64)
    assert torch.equal(large["q"][..., :-64, :], inputs["q"][..., :-64, :])
    assert torch.equal(large["k"], inputs["k"])
    with pytest.raises(ValueError, match=r"z must be 1 to 128 .* got 0"):
        make_inputs(case, 0, 1, 1)


def test_seed_depends_on_all_of_its_parts() -> None:
    one, two = cases("forward")[:2]
    seeds = {
        seed_for(one, 0, 0),
        seed_for(two, 0, 0),
        seed_for(one, 1, 0),
        seed_for(one, 0, 1),
        seed_for(one, 0, 0, part=1),
    }
    assert len(seeds) == 5
    assert seed_for(one, 3, 4) == seed_for(one, 3, 4)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("suite", ["forward", "backward"])
def test_heads_stay_within_the_case_and_the_work(suite: str) -> None:
    for case in cases(suite):
        z, h = heads_to_check(case, 6.0)
        assert 1 <= z <= case.z
        assert 1 <= h <= case.h
        assert z * h == 1 or z * h * work_of_head(case) <= 6.0
        assert z * h <= 16


def test_both_strides_matter_where_there_is_room() -> None:
    case = select("forward", ["F7"])[0]
    z, h = heads_to_check(case, 6.0)
    assert z >= 2
    assert h >= 2


def test_flops_convention() -> None:
    case = Case("forward", "performance", 1, "X", 2, 3, 64, 16, False, "fp16", "public")
    assert case.flops == 4 * 6 * 64 * 64 * 16
    causal_backward = Case("backward", "performance", 1, "X", 2, 3, 64, 16, True, "fp16", "public")
    assert causal_backward.flops == case.flops / 2 * 2.5
