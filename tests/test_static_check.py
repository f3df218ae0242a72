"""What the static check refuses, rule by rule, and what it lets pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.static_check import main, refusals

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "import triton, torch\nimport triton.language as tl\n@triton.jit\ndef kernel(x): pass\n"

REFUSED = [
    ("import", "import os"),
    ("import", "import time"),
    ("import", "import torch_npu"),
    ("import", "import ctypes"),
    ("import", "from harness import reference"),
    ("import", "import harness.textbook"),
    ("import", "from harness.virtual_npu import driver"),
    ("import", "from . import other"),
    ("import", "from math import *"),
    ("torch", "torch.matmul(q, k)"),
    ("torch", "f = torch.softmax"),
    ("torch", "from torch import bmm"),
    ("torch", "import torch.nn.functional as F; F.scaled_dot_product_attention(q, k, v)"),
    ("torch", "from torch.nn import functional as F; F.softmax(q)"),
    ("torch", "torch.ops.npu.npu_fusion_attention(q)"),
    ("torch", "torch.compile(f)"),
    ("torch", "torch.randn(3)"),
    ("method", "q.matmul(k)"),
    ("method", "(q + k).softmax(-1)"),
    ("method", "out.copy_(q)"),
    ("method", "x.view(-1).sum(0)"),
    ("matmul", "x = q @ k"),
    ("matmul", "q @= k"),
    ("process", "import subprocess; subprocess.Popen(['x'])"),
    ("process", "import subprocess; subprocess.run(['sh', '-c'])"),
    ("process", "import subprocess; subprocess.run(['x', '--version'], shell=True)"),
    ("process", "from subprocess import Popen; Popen(['x'])"),
    ("process", "import shutil; shutil.rmtree('x')"),
    ("builtin", "open('x')"),
    ("builtin", "exec('x')"),
    ("builtin", "f = eval"),
    ("builtin", "__import__('os')"),
    ("builtin", "setattr(torch, 'empty', f)"),
    ("builtin", "getattr(q, name)"),
    ("builtin", "getattr(q, 'matmul')"),
    ("attribute", "f.__globals__"),
    ("attribute", "().__class__.__bases__"),
    ("attribute", "__builtins__"),
    ("patch", "torch.empty = f"),
    ("patch", "triton.runtime.driver.active = f"),
    ("patch", "for triton.x in y: pass"),
    ("patch", "del torch.empty"),
    ("patch", "(a, torch.empty) = 1, f"),
    ("harness", "from harness import virtual_npu; virtual_npu.run(mode='values')"),
    ("harness", "from harness import virtual_npu as v; v.driver"),
    ("atomic", "@triton.jit\ndef other(p, x):\n    tl.atomic_add(p, x)"),
    ("atomic", "@triton.jit\ndef other(p, x):\n    tl.atomic_cas(p, x, x)"),
]

ALLOWED = [
    "import math; x = math.exp(1) + math.log(2) + max(1, 2) + sum([1])",
    "out = torch.empty_like(q); lse = torch.empty((1,), dtype=torch.float32, device=q.device)",
    "q = torch.nn.functional.pad(q, (0, 0, 0, 3))",
    "import torch.nn.functional as F; q = F.pad(q, (0, 3))",
    "from torch import Tensor; import torch.autograd",
    "class A(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, q):\n        ctx.scale = 1",
    "from harness import virtual_npu; virtual_npu.install()",
    "import subprocess, shutil; subprocess.run([shutil.which('x'), '--version'], capture_output=True)",
    "@triton.jit\ndef other(x):\n    y = tl.dot(x, x); y = tl.sum(tl.exp(y)); z = x @ y",
    "kernel[(1,)](q.transpose(1, 2).contiguous(), q.stride(0), q.reshape(-1), out.zero_())",
    "getattr(triton, 'jit')",
]


@pytest.mark.parametrize(("rule", "line"), REFUSED)
def test_refused(rule, line, tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{KERNEL}{line}\n")
    found = refusals(path)
    assert {one.rule for one in found} == {rule}, found
    assert all(one.file == "mine.py" and one.line >= 5 for one in found), found


@pytest.mark.parametrize("line", ALLOWED)
def test_allowed(line, tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{KERNEL}{line}\n")
    assert refusals(path) == []


def test_own_files_are_read_too(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("from other import attention_fwd\nimport other\n")
    (tmp_path / "other.py").write_text(f"{KERNEL}import third\n")
    (tmp_path / "third.py").write_text("import other\nq = q @ k\n")
    assert [str(one) for one in refusals(tmp_path / "mine.py")] == [
        "third.py:2: uses q @ k; only a Triton kernel may compute (matmul)"
    ]


def test_no_kernel(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def attention_fwd(q, k, v): return q\n")
    assert [one.rule for one in refusals(path)] == ["kernel"]


def test_what_cannot_be_parsed_is_left_to_the_import(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def attention_fwd(:\n")
    assert refusals(path) == []


@pytest.mark.parametrize("name", ["forward.py", "backward.py", "tests/submissions/right/small_triton.py"])
def test_right_submissions_are_not_refused(name) -> None:
    assert refusals(ROOT / name) == []


def test_every_rule_is_listed_and_tested() -> None:
    from harness import static_check

    listed = {
        line.split()[0]
        for line in (static_check.__doc__ or "").splitlines()
        if line.startswith("    ") and line[4] != " "
    }
    assert listed == {rule for rule, _ in REFUSED} | {"kernel"}


def test_command_line(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{KERNEL}import os\n")
    monkeypatch.setattr("sys.argv", ["static_check", str(path)])
    assert main() == 1
    assert capsys.readouterr().out == "mine.py:5: imports os (import)\n"
    path.write_text(KERNEL)
    assert main() == 0
    assert capsys.readouterr().out == "nothing is refused\n"
