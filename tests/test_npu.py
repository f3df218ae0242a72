"""The path of a real NPU, driven by a fake torch_npu (harness/fake_npu): the calls, their
order and arguments, what is done with what they return. It proves nothing about the chip."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness import fake_npu
from harness.configs import Case
from harness.evaluator import Settings, evaluate
from harness.fake_npu.check import faults
from harness.measured import REPEATS, WARM_UPS
from harness.npu import CONTEST, mismatches, queue_warning
from harness.results import CaseResult, Status

ROOT = Path(__file__).resolve().parent.parent
SUBMISSIONS = Path(__file__).parent / "submissions"
SMALL = SUBMISSIONS / "right" / "small_triton.py"
TABLE = tomllib.loads(fake_npu.SIGNATURES.read_text())


def _environment(record: Path | None = None, **pretend: Any) -> dict[str, str]:
    given = {"PYTHONPATH": str(fake_npu.FOLDER), "FAKE_NPU": json.dumps(pretend), "DEVICE": ""}
    return given | ({"FAKE_NPU_RECORD": str(record)} if record else {})


def _python(code: str, **pretend: Any) -> dict[str, str]:
    """Run code on the fake; it fills `said` with texts."""
    code = f"import json, torch, torch_npu\nsaid = {{}}\n{code}\nprint(json.dumps(said))"
    environment = {**os.environ, **_environment(**pretend)}
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=environment, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    return dict(json.loads(run.stdout.splitlines()[-1]))


# The table of interfaces


def _wheel(folder: Path) -> Path:
    """A wheel with nothing but what the table says."""
    texts: dict[str, str] = {}
    for entry in TABLE["operator"]:
        texts[entry["source"]] = texts.get(entry["source"], "") + f"- func: {entry['schema']}\n"
    methods = "class Event:\n"
    for entry in TABLE["function"]:
        line = f"def {entry.get('signature')}: return {entry.get('contains', 0)}\n"
        if ".Event." in entry["name"]:
            methods += f"    {line}"
        elif "signature" in entry:
            texts[entry["source"]] = texts.get(entry["source"], "") + line
    texts["torch_npu/npu/streams.py"] = methods
    texts["torch_npu/version.py"] = f"__version__ = '{TABLE['version']}'\n"
    for entry in TABLE["attribute"]:
        texts[entry["source"]] = texts.get(entry["source"], f"\0{entry['class']}\0") + f"{entry['string']}\0"
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


@pytest.mark.parametrize(
    ("source", "before", "after", "message"),
    [
        ("torch_npu/version.py", "2.7.1.post4", "2.9.0", "version: the table is of 2.7.1.post4"),
        (
            "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml",
            "float scale=1.",
            "float scale=2.",
            "another schema",
        ),
        ("torch_npu/npu/streams.py", "enable_timing=False", "timing=False", "torch.npu.Event.__new__: expected"),
        ("torch_npu/npu/utils.py", "def synchronize", "def wait", "no such function"),
        ("torch_npu/npu/npu_config.py", '"cube_core_num"', '"cubes"', "does not occur in"),
        ("torch_npu/lib/libtorch_npu.so", "L2_cache_size", "L2_size", "not among the strings"),
    ],
)
def test_a_wheel_with_another_interface_is_noticed(source, before, after, message, tmp_path) -> None:
    wheel = _wheel(tmp_path)
    assert faults(wheel) == []
    path = wheel / source
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    assert any(message in fault for fault in faults(wheel)), faults(wheel)
    path.unlink()
    if source != "torch_npu/version.py":
        assert any("is not in the wheel" in fault for fault in faults(wheel))


def test_a_folder_that_is_no_wheel(tmp_path) -> None:
    with pytest.raises(ValueError, match="WHEEL must be a folder with an unpacked torch_npu wheel"):
        faults(tmp_path)


@pytest.mark.skipif("TORCH_NPU_WHEEL" not in os.environ, reason="TORCH_NPU_WHEEL names no unpacked wheel")
def test_the_table_is_that_of_the_wheel() -> None:
    assert faults(Path(os.environ["TORCH_NPU_WHEEL"])) == []


def _used(file: str) -> set[str]:
    """Names of torch_npu and torch.npu that a file of the harness uses, as `name` or `name.name`."""
    holders = {"torch_npu", "api", "npu"} if file == "npu.py" else {"torch_npu", "api"}
    found = set()
    for node in ast.walk(ast.parse((ROOT / "harness" / file).read_text())):
        if isinstance(node, ast.Attribute):
            base = node.value.func if isinstance(node.value, ast.Call) else node.value
            name = getattr(base, "id", None) or getattr(base, "attr", None)
            if name in holders:
                found.add(node.attr)
    return found


def test_every_interface_that_is_used_is_in_the_table() -> None:
    used = set.union(*(_used(file) for file in ("npu.py", "measured.py", "baselines.py", "doctor.py", "msprof.py")))
    listed = {word for entry in (*TABLE["operator"], *TABLE["function"]) for word in entry["name"].split(".")}
    assert {"synchronize", "Event", "npu_fusion_attention", "npu_fusion_attention_grad", "get_device_name"} <= used
    assert used <= listed, f"not in signatures.toml: {used - listed}"


# The fake is as strict as it says


@pytest.fixture(scope="module")
def strict() -> dict[str, str]:
    return _python(
        """
def attempt(name, function):
    try:
        said[name] = str(function())
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"

host = torch.randn(1, 2, 64, 16).half()
x = host.to("npu")
mask = torch.ones(2048, 2048, dtype=torch.bool).triu_(1).to("npu")
event = lambda **options: torch.npu.Event(**options)
fa = torch_npu.npu_fusion_attention
zeros = torch.zeros(3, device="npu")
attempt("device", lambda: (x.device, x.is_cpu, x.cpu().device, (x + x)[:, :1].device, zeros.device))
attempt("mixed", lambda: x + host)
attempt("fresh", lambda: torch.empty(2, device="npu").cpu().isnan().all().item())
attempt("keyword", lambda: fa(x, x, x, 2, "BNSD", sm_scale=0.5))
attempt("missing", lambda: fa(x, x, x, 2))
attempt("host", lambda: fa(host, x, x, 2, "BNSD"))
attempt("heads", lambda: fa(x, x, x, 3, "BNSD"))
attempt("mask shape", lambda: fa(x, x, x, 2, "BNSD", atten_mask=mask[:64, :64], sparse_mode=2))
attempt("untimed", lambda: event().elapsed_time(event()))

def too_early():
    a, b = event(enable_timing=True), event(enable_timing=True)
    a.record(); b.record()
    return a.elapsed_time(b)

attempt("too early", too_early)

def attention(scale, hidden=None):
    s = x.cpu().float() @ x.cpu().float().transpose(-1, -2) * scale
    if hidden is not None:
        s = s.masked_fill(hidden, -torch.inf)
    return s.softmax(-1) @ x.cpu().float()

def same(returned, wanted):
    return float((returned[0].cpu().float() - wanted).abs().max()) < 2e-3

upper = torch.ones(64, 64, dtype=torch.bool).triu(1)
attempt("scale defaults to 1", lambda: same(fa(x, x, x, 2, "BNSD"), attention(1.0)))
attempt("no mask, mode ignored", lambda: same(fa(x, x, x, 2, "BNSD", scale=0.5, sparse_mode=2), attention(0.5)))
causal, own = attention(0.5, upper), upper.to("npu")
attempt("causal", lambda: same(fa(x, x, x, 2, "BNSD", scale=0.5, atten_mask=mask, sparse_mode=2), causal))
attempt("true is hidden", lambda: same(fa(x, x, x, 2, "BNSD", scale=0.5, atten_mask=own), causal))
"""
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("device", "(device(type='npu', index=0), False, device(type='cpu'), device(type='npu', index=0), "),
        ("mixed", "RuntimeError: Expected all tensors to be on the same device, but found npu:0 and cpu"),
        ("fresh", "True"),
        ("keyword", "TypeError: torch_npu.npu_fusion_attention: got an unexpected keyword argument 'sm_scale'"),
        ("missing", "TypeError: torch_npu.npu_fusion_attention: missing a required argument: 'input_layout'"),
        ("host", "RuntimeError: query must be on the NPU"),
        ("heads", "RuntimeError: head_num must be 2, got 3"),
        ("mask shape", "RuntimeError: sparse_mode 2 needs the compressed mask [2048, 2048], got [64, 64]"),
        ("untimed", "RuntimeError: elapsed_time needs events with enable_timing=True"),
        ("too early", "RuntimeError: elapsed_time before synchronize"),
        ("scale defaults to 1", "True"),
        ("no mask, mode ignored", "True"),
        ("causal", "True"),
        ("true is hidden", "True"),
    ],
)
def test_the_fake_is_strict(strict, what, message) -> None:
    assert strict[what].startswith(message), strict[what]


# The evaluator on the fake


def _case(suite: str = "forward", kind: str = "performance", causal: bool = True) -> Case:
    return Case(suite, kind, 1, "T1", 2, 3, 128, 64, causal, "fp16", "public", 9.0 if suite == "forward" else None)


def _evaluate(case, path, monkeypatch, record=None, mode="score", **pretend: Any) -> CaseResult:
    for name, value in _environment(record, **pretend).items():
        monkeypatch.setenv(name, value)
    settings = Settings(device="npu", mode=mode, jobs=1, memory_bytes=3 << 30, seconds=60.0, static_check=False)
    return evaluate([case], {case.suite: path}, settings)[0]


def _calls(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


def test_forward_is_checked_and_timed_beside_the_vendor(monkeypatch, tmp_path) -> None:
    record = tmp_path / "calls.jsonl"
    slow = {"small_fwd_kernel": 4.0, "npu_fusion_attention": 3.0, "textbook_fwd_kernel": 8.0}
    result = _evaluate(_case(), SMALL, monkeypatch, record, slow=slow)
    assert (result.status, result.message) == (Status.PASSED, "")
    assert result.baseline == "vendor, same run"
    assert result.ms == pytest.approx(4.0, abs=0.2)
    assert result.baseline_ms == pytest.approx(3.0, abs=0.2)
    assert result.textbook_ms == pytest.approx(8.0, abs=0.2)
    assert result.spread == pytest.approx(0, abs=1e-6)
    assert 0 < result.cube_utilisation < 1
    calls = _calls(record)
    vendor = [call for call in calls if call["call"] == "torch_npu.npu_fusion_attention"]
    assert len(vendor) == 1 + WARM_UPS + REPEATS  # the second opinion, then the timed ones
    for call in vendor:
        assert call["scale"] == 0.5
        assert (call["atten_mask"], call["sparse_mode"]) == ("torch.bool [2048, 2048]", 2)
        assert (call["head_num"], call["input_layout"]) == (3, "BNSD")
    elapsed = [call["pid"] for call in calls if call["call"] == "torch.npu.Event.elapsed_time"]
    own = next(iter(set(elapsed) - {vendor[0]["pid"]}))
    rounds = elapsed[-3 * REPEATS :]
    for start in range(0, len(rounds), 3):
        assert rounds[start : start + 3].count(own) == 1, "every round times each call once: a drift favours none"


def test_no_mask_no_mode(monkeypatch, tmp_path) -> None:
    record = tmp_path / "calls.jsonl"
    result = _evaluate(_case(causal=False), SMALL, monkeypatch, record, mode="check")
    assert (result.status, result.message) == (Status.PASSED, "")
    vendor = [call for call in _calls(record) if call["call"] == "torch_npu.npu_fusion_attention"]
    assert {(call["atten_mask"], call["sparse_mode"]) for call in vendor} == {(None, 0)}


def test_backward_is_checked_and_timed_beside_the_vendor(monkeypatch, tmp_path) -> None:
    record = tmp_path / "calls.jsonl"
    slow = {"npu_fusion_attention_grad": 5.0, "npu_fusion_attention": 100.0}
    result = _evaluate(_case("backward"), ROOT / "backward.py", monkeypatch, record, slow=slow)
    assert (result.status, result.message) == (Status.PASSED, "")
    assert result.baseline == "vendor, same run"
    assert result.baseline_ms == pytest.approx(5.0, abs=0.2), "without the forward"
    calls = _calls(record)
    grads = [call for call in calls if call["call"] == "torch_npu.npu_fusion_attention_grad"]
    assert len(grads) == 1 + WARM_UPS + REPEATS
    for call in grads:
        assert (call["scale_value"], call["sparse_mode"]) == (0.5, 2)
        assert call["softmax_max"].startswith("torch.float32") and call["attention_in"].startswith("torch.float16")


def test_a_vendor_operator_that_fails_is_a_note(monkeypatch) -> None:
    """The vendor's published time, measured on another machine, used to take its place."""
    slow = {"textbook_fwd_kernel": 8.0}
    result = _evaluate(_case(), SMALL, monkeypatch, fail=["torch_npu.npu_fusion_attention"], slow=slow)
    assert result.status is Status.PASSED
    assert "no second opinion: vendor on the device: runtime error" in result.message
    assert "no vendor time: runtime error" in result.message
    assert result.baseline == "textbook, same run"
    assert result.baseline_ms == pytest.approx(8.0, abs=0.2)


def test_a_submission_that_calls_the_vendor_is_no_kernel(monkeypatch) -> None:
    result = _evaluate(_case(), SUBMISSIONS / "wrong" / "vendor.py", monkeypatch, mode="check")
    assert result.status is Status.RUNTIME_ERROR
    assert result.message == "no Triton kernel was launched"


def test_launches_beside_the_queue_are_a_warning(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_ENABLE_TASKQUEUE", raising=False)
    assert queue_warning() == []
    monkeypatch.setenv("TRITON_ENABLE_TASKQUEUE", "0")
    assert "the times between events are not those of the kernels" in queue_warning()[0]


def test_the_command_chooses_the_npu_and_says_what_it_is(tmp_path) -> None:
    environment = {**os.environ, **_environment(cann="8.3.0")}
    command = [
        sys.executable,
        "-m",
        "scoring",
        "--suite",
        "forward",
        "--case",
        "F2",
        "--json",
        str(tmp_path / "x.json"),
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    first, second = run.stdout.splitlines()[:2]
    assert first.startswith("device: Ascend910B3 (npu), triton-ascend 3.2.0, bishengir ")
    assert "torch_npu 2.7.1.post4, CANN 8.3.0" in first and first.endswith("times are measured")
    assert second.startswith("warning: CANN 8.3.0 is not the contest's 8.5.0; triton-ascend 3.2.0 is not")
    assert json.loads((tmp_path / "x.json").read_text())["device"]["kind"] == "npu"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({}, ""),
        ({"Python": "3.11.9", "CANN": "8.5.0.RC1"}, ""),
        ({"chip": "Ascend910B2"}, "chip Ascend910B2 is not the contest's Ascend910B3"),
        ({"Python": "3.12.1"}, "Python 3.12.1 is not the contest's 3.11"),
        ({"CANN": "8.5.00"}, "CANN 8.5.00 is not the contest's 8.5.0"),
        ({"bishengir": "unknown"}, "bishengir unknown is not the contest's 1.1.0"),
    ],
)
def test_a_stack_that_is_not_the_contests(found, text) -> None:
    assert "; ".join(mismatches(CONTEST | found)) == text
