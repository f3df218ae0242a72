"""The evaluator against right and wrong submissions. They are plain PyTorch, so that nothing
here depends on the kernels; each wrong one is wrong for causal calls only."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from harness.configs import SUITES, Case, cases
from harness.devices import choose
from harness.evaluator import Evaluator, Settings, chunks, evaluate
from harness.measured import ACCELERATORS
from harness.process import Child, ChildCrash, ChildTimeout
from harness.results import Status
from harness.worker import same_bits

ROOT = Path(__file__).resolve().parent.parent
SUBMISSIONS = Path(__file__).parent / "submissions"
RIGHT = SUBMISSIONS / "right" / "plain_torch.py"
MEMORY = 3 << 30
S = Status


def _case(suite: str, number: int, causal: bool, dtype: str = "fp16", n: int = 64) -> Case:
    return Case(suite, "correctness", number, f"T{number}", 2, 2, n, 32, causal, dtype, "public")


def _three(suite: str) -> list[Case]:
    """One causal case between two that are not."""
    return [_case(suite, 1, False), _case(suite, 2, True), _case(suite, 3, False, "bf16")]


def _settings(**options) -> Settings:
    lenient = {"kernels_required": False, "static_check": False}
    return Settings(**{"jobs": 1, "memory_bytes": MEMORY, "seconds": 60.0, **lenient, **options})


WRONG = {
    # file: (status in the forward, status in the backward, a part of the message)
    "zeros": (S.NUMERICAL, S.NUMERICAL, "relative RMS|off by"),
    "nan": (S.NON_FINITE, S.NON_FINITE, "NaN or infinite"),
    "unwritten": (S.NON_FINITE, S.NON_FINITE, "NaN or infinite"),
    "wrong_dtype": (S.WRONG_DTYPE, S.WRONG_DTYPE, "has dtype torch.float32, expected torch.float16"),
    "wrong_shape": (S.WRONG_SHAPE, S.WRONG_SHAPE, r"has shape \[2, .*expected \[2, 2, 64, 32\]"),
    "too_few": (S.WRONG_SHAPE, S.WRONG_SHAPE, "expected .(out, lse|dq, dk, dv)"),
    "raises": (S.RUNTIME_ERROR, S.RUNTIME_ERROR, r"RuntimeError: no such luck \(raises.py:\d+\)"),
    "exits": (S.RUNTIME_ERROR, S.RUNTIME_ERROR, "exited with code 3"),
    "segfault": (S.RUNTIME_ERROR, S.RUNTIME_ERROR, "ended by SIGSEGV"),
    "leaves": (S.RUNTIME_ERROR, S.RUNTIME_ERROR, "SystemExit"),
    "overwrites_input": (S.NUMERICAL, S.NUMERICAL, "input overwritten: (q|v)"),
    "no_mask": (S.NUMERICAL, S.NUMERICAL, "off by"),
    "wrong_lse": (S.NUMERICAL, S.NUMERICAL, "lse|dk"),
    "lazy": (S.NON_FINITE, S.PASSED, "NaN or infinite|^$"),
    "wrong_tile": (S.NUMERICAL, S.NUMERICAL, "off by|relative RMS"),
    "cached": (S.NUMERICAL, S.NUMERICAL, "off by"),
    "not_repeatable": (S.NUMERICAL, S.NUMERICAL, "two calls on the same inputs gave different outputs"),
    "last_bit": (S.NUMERICAL, S.NUMERICAL, "two calls on the same inputs gave different outputs"),
    "skips_tail": (S.NUMERICAL, S.NUMERICAL, "relative RMS|off by"),
    "sleeps": (S.NON_FINITE, S.NON_FINITE, "NaN or infinite"),
    "prints": (S.RUNTIME_ERROR, S.RUNTIME_ERROR, "answer|exited|judged"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_submission_gets_its_status_for_that_case_only(name: str) -> None:
    forward, backward, message = WRONG[name]
    path = SUBMISSIONS / "wrong" / f"{name}.py"
    cases = _three("forward") + _three("backward")
    results = evaluate(cases, {"forward": path, "backward": path}, _settings())
    wanted = [S.PASSED, forward, S.PASSED, S.PASSED, backward, S.PASSED]
    assert [result.status for result in results] == wanted, [result.message for result in results]
    assert 0 < results[0].max_abs_error < 1e-2
    for result in (results[1], results[4]):
        assert_matches(message, result.message)
        assert result.speedup is None


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_is_repeated_for_a_head_at_least(suite) -> None:
    """Costly cases (P4, P5, P6, C3) were never repeated: two calls could differ there unseen."""
    evaluator = Evaluator({}, Settings(device="virtual"))
    for case in cases(suite):
        (z, h), *_ = chunks(case, evaluator.settings)
        repeated = evaluator._repeated(case, z, h)
        assert repeated == (z, h) or (repeated == (1, 1) and evaluator._costly(case, z, h))


def test_outputs_are_compared_by_their_bits() -> None:
    """A submission that multiplied its fp16 outputs by 1 + 1e-3 randn() was seen as equal once in
    about twelve runs, rightly: a factor within half a unit in the last place of 1 rounds back to
    the same bits. `torch.equal` is not the same: it takes -0 for 0, and a NaN for different."""
    x = torch.tensor([0.0, float("nan"), 1.0]).half()
    assert same_bits(x, x.clone())
    assert same_bits(torch.ones(2, 3).half().T, torch.ones(3, 2).half())
    assert not same_bits(x[:1], -x[:1])
    assert not same_bits(x[2:], (x[2:].view(torch.int16) ^ 1).view(torch.half))
    small = torch.tensor([1.0, 1.5, 1.999]).half()
    assert same_bits(small, (small.float() * (1 + 2e-4)).half())


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


@pytest.mark.parametrize("name", ["hangs", "hangs_again"])
def test_an_endless_loop_costs_its_time_limit(name: str, tmp_path, monkeypatch) -> None:
    """A submission used to survive as a process that it started between the end of its first
    one and its own, or that it had orphaned."""
    monkeypatch.setenv("TEST_RUN", str(tmp_path))  # marks what this run starts; others may test beside it
    start = time.monotonic()
    settings = _settings(seconds=8.0)
    results = evaluate(_three("forward"), {"forward": SUBMISSIONS / "wrong" / f"{name}.py"}, settings)
    assert [result.status for result in results] == [S.PASSED, S.TIMEOUT, S.PASSED]
    assert results[1].message == "no result within 8 s"
    assert time.monotonic() - start < 40
    started = [
        p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TEST_RUN") == str(tmp_path)
    ]
    _, left = psutil.wait_procs([p for p in started if p.pid != os.getpid()], timeout=5)
    assert not left


def test_memory_limit() -> None:
    results = evaluate(_three("forward"), {"forward": SUBMISSIONS / "wrong" / "huge.py"}, _settings())
    assert [result.status for result in results] == [S.PASSED, S.RUNTIME_ERROR, S.PASSED]
    assert "GiB of memory, allowed 3.0" in results[1].message


@pytest.mark.parametrize("suite", ["forward", "backward"])
def test_right_submission_in_parallel(suite: str) -> None:
    cases = [_case(suite, i, bool(i % 2), ("fp16", "bf16")[i % 3 == 0], 64 + 32 * (i % 3)) for i in range(6)]
    seen: list[int] = []
    started: list[int] = []
    results = evaluate(
        cases,
        {suite: RIGHT},
        _settings(jobs=2),
        on_result=lambda result: seen.append(result.case.number),
        on_start=lambda case: started.append(case.number),
    )
    assert [result.case for result in results] == cases
    assert {result.status for result in results} == {S.PASSED}
    assert sorted(seen) == sorted(started) == list(range(6))
    assert all(result.heads_checked == 4 for result in results)
    assert all(0 < result.rms_error <= result.max_abs_error for result in results)
    assert all(result.ms is None and result.message == "" for result in results)


# Wrong submissions that launch kernels: what only the compiler or the virtual NPU can see.
WRONG_KERNELS = {
    "overflow": (S.COMPILE_ERROR, r"kernel small_fwd_kernel with q\[2, 2, 64, 32\].*BM=256, BN=512(.|\n)*overflow"),
    "deadlock": (S.HAZARD, r"DeadlockError: waiting_kernel.*5"),
    "race": (S.HAZARD, "racing_kernel"),
}


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_wrong_kernel(name: str) -> None:
    status, message = WRONG_KERNELS[name]
    results = evaluate(
        _three("forward"), {"forward": SUBMISSIONS / "wrong" / f"{name}.py"}, _settings(kernels_required=True)
    )
    assert [result.status for result in results] == [S.PASSED, status, S.PASSED], [r.message for r in results]
    assert_matches(message, results[1].message)


def _timed_case() -> Case:
    return Case("forward", "performance", 1, "T1", 6, 8, 256, 64, False, "fp16", "public", 1.0)


def test_a_right_kernel_is_checked_and_timed() -> None:
    path = SUBMISSIONS / "right" / "small_triton.py"
    settings = _settings(mode="score", kernels_required=True)
    before = dataclasses.replace(_timed_case(), kind="correctness", number=2, name="T2", n=512, causal=True)
    (first,) = evaluate([_timed_case()], {"forward": path}, settings)
    _, second = evaluate([before, _timed_case()], {"forward": path}, settings)  # n=512 goes first
    assert (first.status, first.message) == (S.PASSED, "")
    assert first.heads_checked == 16
    assert first.baseline == "vendor, published"
    assert first.speedup == pytest.approx(1.0 / first.ms)
    assert 0 < first.cube_utilisation < 1
    assert first.textbook_ms > 0
    assert (first.ms, first.textbook_ms) == (second.ms, second.textbook_ms)


def test_lost_time_is_noted() -> None:
    case = Case("forward", "performance", 1, "T1", 1, 8, 128, 64, True, "fp16", "public", 1.0)
    path = SUBMISSIONS / "right" / "unsplit.py"
    (result,) = evaluate([case], {"forward": path}, _settings(mode="score", kernels_required=True))
    assert result.status is S.PASSED and result.ms is not None
    assert_matches(
        r"textbook_fwd_kernel: lost time: both vector cores do all rows .* at textbook.py:\d+", result.message
    )


def test_only_kernels_that_were_checked_are_timed() -> None:
    path = SUBMISSIONS / "wrong" / "other_when_timed.py"
    (result,) = evaluate([_timed_case()], {"forward": path}, _settings(mode="score", kernels_required=True))
    assert result.status is S.RUNTIME_ERROR
    assert result.ms is None
    assert "ran copying_kernel(BLOCK=4096), which the check on fewer heads did not run" in result.message


def test_less_work_when_timed_has_no_time() -> None:
    """The same kernel for one head instead of all used to get its short predicted time: the
    virtual NPU computes no values at the full shape."""
    path = SUBMISSIONS / "wrong" / "fewer_heads_when_timed.py"
    (result,) = evaluate([_timed_case()], {"forward": path}, _settings(mode="score", kernels_required=True))
    assert result.status is S.RUNTIME_ERROR
    assert result.ms is None
    assert re.search(r"the matrix unit did \d+\.\d% of the multiply-adds that the case needs", result.message)


@pytest.mark.parametrize(
    ("name", "suites", "message"),
    [
        ("vendor", ["forward"], r"vendor\.py:4: imports torch_npu \(import\)"),
        ("atomics", ["backward"], r"atomics\.py:17: uses tl\.atomic_add; results must repeat bit for bit \(atomic\)"),
        ("sleeps", ["forward", "backward"], r"imports time \(import\)"),
        ("dummy_kernel", ["forward", "backward"], r"dummy_kernel\.py:3: imports sys \(import\)"),
        ("huge", ["forward", "backward"], r"has no function under @triton\.jit \(kernel\)"),
    ],
)
def test_refused_source_is_never_run(name, suites, message) -> None:
    path = SUBMISSIONS / "wrong" / f"{name}.py"
    cases = [case for suite in suites for case in _three(suite)]
    started, seen = [], []
    results = evaluate(cases, dict.fromkeys(suites, path), _settings(static_check=True), seen.append, started.append)
    assert {result.status for result in results} == {S.REFUSED}
    assert started == cases and seen == results
    for result in results:
        assert_matches(message, result.message)


def test_a_refused_suite_does_not_spoil_the_other() -> None:
    submissions = {"forward": SUBMISSIONS / "right" / "small_triton.py", "backward": RIGHT}
    settings = _settings(static_check=True, kernels_required=True)
    results = evaluate([_case("forward", 1, True), _case("backward", 1, True)], submissions, settings)
    assert [result.status for result in results] == [S.PASSED, S.REFUSED]
    assert "plain_torch.py" in results[1].message


def test_atomics_do_not_pass_without_the_static_check_either() -> None:
    path = SUBMISSIONS / "wrong" / "atomics.py"
    (result,) = evaluate([_case("backward", 1, True)], {"backward": path}, _settings())
    assert result.status is not S.PASSED
    assert "atomic" in result.message


def test_all_heads() -> None:
    case = Case("forward", "correctness", 1, "T1", 3, 2, 1024, 64, False, "fp16", "public")
    assert list(chunks(case, _settings(full=True))) == [(3, 2)]
    assert sum(z * h for z, h in chunks(case, _settings(full=True, work=0.3))) == 6
    (result,) = evaluate([case], {"forward": RIGHT}, _settings(full=True, work=0.3))
    assert (result.status, result.heads_checked) == (S.PASSED, 6)


def test_the_check_is_made_twice_on_other_inputs() -> None:
    case = _case("forward", 1, False)
    assert len(list(chunks(case, _settings()))) == 2


def test_a_kernel_must_be_launched() -> None:
    (result,) = evaluate([_case("forward", 1, False)], {"forward": RIGHT}, _settings(kernels_required=True))
    assert result.status is S.RUNTIME_ERROR
    assert result.message == "no Triton kernel was launched"


def test_nothing_is_timed_without_a_kernel() -> None:
    case = Case("forward", "performance", 1, "T1", 2, 2, 64, 32, False, "fp16", "public", 1.0)
    (result,) = evaluate([case], {"forward": RIGHT}, _settings(mode="score"))
    assert result.status is S.RUNTIME_ERROR
    assert result.ms is None
    assert "no Triton kernel was launched" in result.message


def test_torch_ops_are_not_left_out_of_a_predicted_time() -> None:
    case = Case("forward", "performance", 1, "T1", 2, 2, 1024, 64, False, "fp16", "public", 1.0)
    (result,) = evaluate([case], {"forward": RIGHT}, _settings(mode="score"))
    assert result.status is S.RUNTIME_ERROR
    assert "the virtual NPU predicts the time of kernels and fills only" in result.message


def test_a_kernel_for_the_look_of_it_gives_no_time() -> None:
    path = SUBMISSIONS / "wrong" / "dummy_kernel.py"
    case = Case("forward", "performance", 1, "T1", 2, 2, 1024, 64, False, "fp16", "public", 1.0)
    (result,) = evaluate([case], {"forward": path}, _settings(mode="score", kernels_required=True))
    assert (result.status, result.ms) == (S.RUNTIME_ERROR, None)
    assert "the virtual NPU predicts the time of kernels and fills only" in result.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "must define attention_fwd"),
        ("import no_such_module\n", "import failed: ModuleNotFoundError"),
        ("def attention_fwd(:\n", "import failed: SyntaxError"),
        ("import os\nos._exit(1)\n", "exited with code 1"),
        ("def attention_fwd():\n    pass\n", "TypeError"),
    ],
)
def test_a_file_that_is_no_submission(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    (result,) = evaluate([_case("forward", 1, False)], {"forward": path}, _settings())
    assert result.status is S.RUNTIME_ERROR
    assert message in result.message


def test_a_missing_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="submissions must have a file for suite backward"):
        evaluate(_three("backward"), {"forward": RIGHT}, _settings())
    with pytest.raises(ValueError, match="mode must be one of check, score, got 'guess'"):
        Settings(mode="guess")
    with pytest.raises(ValueError, match="seconds must be above 0, got 0"):
        Settings(seconds=0)


def test_describe() -> None:
    evaluator = Evaluator({"forward": RIGHT}, _settings())
    try:
        described = evaluator.describe()
    finally:
        evaluator.close()
    assert described["kind"] == "virtual"
    assert described["time"] == "predicted"
    assert "bishengir 1.1.0" in described["compiler"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_its_results_and_no_process(number: int, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--suite", "forward", "--mode", "check", "--case", "F1", "--case", "F2", "--jobs", "1"]
    arguments += ["--forward", str(SUBMISSIONS / "wrong" / "hangs.py"), "--json", str(path), "--no-static-check"]
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"from scoring.__main__ import main; sys.exit(main({arguments}))"
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        children = psutil.Process(run.pid).children(recursive=True)
        assert children
        run.send_signal(number)
        output, _ = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGINT:
        assert "interrupted after 1 of 2 cases" in output
    content = json.loads(path.read_text())
    assert [(row["n"], row["causal"]) for row in content["cases"]] == [(64, False)]
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_child_limits_and_restart() -> None:
    child = Child("virtual", "1.1.0")
    try:
        with pytest.raises(ChildTimeout, match=r"no result within 0\.01 s"):
            child.request({"op": "describe"}, 0.01)
        assert child.request({"op": "describe"}, 60)["device"]["kind"] == "virtual"
        assert "op must be" in child.request({"op": "dance"}, 60)["message"]
        process = child._process
        assert process is not None
        os.kill(process.pid, 9)
        with pytest.raises(ChildCrash, match="ended by SIGKILL"):
            child.request({"op": "describe"}, 60)
        assert child.request({"op": "describe"}, 60)["device"]["kind"] == "virtual"
    finally:
        child.close()
    assert not psutil.pid_exists(process.pid)


def _npu_is(present: bool, monkeypatch) -> None:
    npu = dataclasses.replace(ACCELERATORS["npu"], present=lambda: present)
    monkeypatch.setitem(ACCELERATORS, "npu", npu)


@pytest.mark.parametrize(("wanted", "kind"), [("virtual", "virtual"), ("", "virtual")])
def test_device_choice(wanted: str, kind: str, monkeypatch) -> None:
    monkeypatch.setenv("DEVICE", wanted)
    _npu_is(False, monkeypatch)
    assert choose() == kind


def test_device_choice_npu(monkeypatch) -> None:
    _npu_is(True, monkeypatch)
    monkeypatch.delenv("DEVICE", raising=False)
    assert choose() == "npu"
    monkeypatch.setenv("DEVICE", "virtual")
    assert choose() == "virtual"
    _npu_is(False, monkeypatch)
    monkeypatch.setenv("DEVICE", "npu")
    with pytest.raises(ValueError, match="DEVICE is npu, but torch sees no such device"):
        choose()
    monkeypatch.setenv("DEVICE", "tpu")
    with pytest.raises(ValueError, match=r"DEVICE must be one of npu, .*virtual, got 'tpu'"):
        choose()
