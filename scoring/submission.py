"""`python -m scoring.submission`: the two files that a contest grader takes, alone in a folder,
and a proof that they import and run there without this repository.

The proof runs in a process of its own in that folder, where an import of this repository's
packages by one of the two files is an error. It runs on an NPU where there is one, else on
the fake of harness/fake_npu, whose kernels run on the virtual NPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness import fake_npu, npu

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = ("forward.py", "backward.py")
PROOF_SECONDS = 300.0

PROOF = """
import builtins, pathlib, sys
folder, fake = pathlib.Path.cwd(), sys.argv[1]
sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(folder)))] + [fake] * bool(fake)
original = builtins.__import__

def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    place = (globals or {}).get("__file__") or ""
    if pathlib.Path(place).parent == folder and name.split(".")[0] in ("harness", "scoring", "tests"):
        raise ImportError(f"{pathlib.Path(place).name} imports {name}, which a grader does not have")
    return original(name, globals, locals, fromlist, level)

builtins.__import__ = guarded
import torch, torch_npu
import forward, backward

for module, names in (
    (forward, ("attention_fwd", "attention", "_attention", "get_tiling")), (backward, ("attention_bwd",))
):
    assert pathlib.Path(module.__file__).parent == folder, module.__file__
    for name in names:
        assert hasattr(module, name), f"{module.__name__} has no {name}"
assert issubclass(forward._attention, torch.autograd.Function)

class Context:
    "What autograd hands to forward and backward."
    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

torch.manual_seed(0)
for causal in (False, True):
    z, h, n, d = 1, 2, 128, 64
    host = [torch.empty(z, h, n, d).normal_(0, 0.5).half() for _ in range(4)]
    dout, q, k, v = (x.to("npu") for x in host)
    block_m, block_n = forward.get_tiling(z, h, n, d, causal)
    context = Context()
    out = forward._attention.forward(context, q, k, v, causal, 0.5, block_m, block_n)
    assert torch.equal(out, forward.attention(q, k, v, causal, 0.5, block_m, block_n))
    grads = forward._attention.backward(context, dout)
    exact_q, exact_k, exact_v = (x.float().requires_grad_() for x in host[1:])
    scores = exact_q @ exact_k.transpose(-1, -2) * 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    exact = scores.softmax(-1) @ exact_v
    exact.backward(host[0].float())
    pairs = [(out, exact), *zip(grads[:3], (exact_q.grad, exact_k.grad, exact_v.grad))]
    errors = [float((a.detach().cpu().float() - b.detach()).abs().max()) for a, b in pairs]
    text = ", ".join(f"{name} {error:.1e}" for name, error in zip(("out", "dq", "dk", "dv"), errors))
    print(f"{'causal' if causal else 'full'} {z},{h},{n},{d}: largest errors {text}")
    assert all(error < 1e-2 for error in errors), "errors above 1e-2"
"""


def write(folder: Path, source: Path = REPOSITORY) -> None:
    """Copy the two files into a folder that holds nothing else.

    Raises:
        ValueError: the folder holds something else.
    """
    if folder.exists():
        others = sorted(path.name for path in folder.iterdir() if path.name not in (*FILES, "__pycache__"))
        if others:
            raise ValueError(f"--out must name an empty or new folder, got {folder} with {', '.join(others)}")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(source / name, folder / name)


def prove(folder: Path, on_npu: bool) -> str:
    """Import and run the two files where they are.

    Returns:
        What the proof printed.

    Raises:
        RuntimeError: they do not import or run, or are wrong, with the end of the output.
    """
    hidden = ("PYTHONPATH", "DEVICE", "FAKE_NPU", "FAKE_NPU_RECORD")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-s", "-c", PROOF, "" if on_npu else str(fake_npu.FOLDER)]
    try:
        run = subprocess.run(
            command, cwd=folder.resolve(), env=environment, capture_output=True, text=True, timeout=PROOF_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the files in {folder} did not end within {PROOF_SECONDS:g} s") from None
    if run.returncode:
        tail = "\n".join((run.stdout + run.stderr).strip().splitlines()[-6:])
        raise RuntimeError(f"the files in {folder} do not run alone:\n{tail}")
    return "\n".join(line for line in run.stdout.splitlines() if "largest errors" in line)


def main(argv: list[str] | None = None) -> int:
    """Write and prove; returns 0, or 1 with the reason when the proof fails."""
    parser = argparse.ArgumentParser(prog="python -m scoring.submission", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist" / "submission", metavar="FOLDER")
    arguments = parser.parse_args(argv)
    try:
        write(arguments.out)
        on_npu = npu.present()
        print(prove(arguments.out, on_npu))
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(arguments.out / "__pycache__", ignore_errors=True)
    where = "the NPU" if on_npu else "a fake torch_npu over the virtual NPU: no NPU here"
    print(f"{', '.join(FILES)} in {os.path.relpath(arguments.out)} import and run alone, on {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
