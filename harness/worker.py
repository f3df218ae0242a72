"""The child process that runs submissions. The parent sends one JSON line a request on stdin;
the answer is one JSON line on the pipe whose number is the first argument.

    {"op": "describe"}
    {"op": "values", "suite", "path" | "baseline", "causal", "sm_scale", "cores", "inputs", "outputs", "expected",
     "twice"}
    {"op": "time", "suite", "path" | "baseline", "causal", "sm_scale", "shapes"}      virtual NPU
    {"op": "ready", "key", as "time", "samples", "places", "options"}                 accelerator
    {"op": "repeat", "key"}
    {"op": "finish", "key", "outputs"}

`inputs`, `outputs` and `samples` name files of tensors. Nothing here decides whether an output
is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .measured import TimedCall

MESSAGE_LIMIT = 4000
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """The kernel ends this process when the parent dies, also in an endless loop (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Failure(Exception):
    """An answer that is a status and a message."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: BaseException) -> str:
    """The status that an exception of a submission stands for."""
    from triton.compiler import errors

    from . import virtual_npu

    compile_errors = [virtual_npu.CompileError, errors.CompilationError]
    compile_errors += [getattr(errors, "MLIRCompilationError", errors.CompilationError)]  # of triton-ascend only
    if isinstance(error, tuple(compile_errors)):
        return "compile error"
    if isinstance(error, (virtual_npu.HazardError, virtual_npu.UninitialisedReadError)):
        return "hazard"
    return "runtime error"


def _describe_error(error: BaseException) -> str:
    """Type, message and the last place in the submission's own files."""
    text = f"{type(error).__name__}: {error}".strip()
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).resolve().parent)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(here)
        and "site-packages" not in frame.filename
        and frame.filename.endswith(".py")
    ]
    if own:
        text += f" ({Path(own[-1].filename).name}:{own[-1].lineno})"
    return text[:MESSAGE_LIMIT]


class Worker:
    """Holds the device and the loaded submissions."""

    def __init__(self, kind: str, release: str) -> None:
        from . import poison
        from .devices import open_device

        poison.install()  # before any submission can import torch.empty by name
        self.device = open_device(kind, release)
        self.loaded: dict[tuple[str, str], Callable[..., Any]] = {}
        self.timed: dict[str, TimedCall] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request; exceptions of the submission become a status."""
        try:
            if request["op"] == "describe":
                return {"device": self.device.describe()}
            steps = {
                "values": self.values,
                "time": self.time,
                "ready": self.ready,
                "repeat": self.repeat,
                "finish": self.finish,
            }
            if request["op"] not in steps:
                raise ValueError(f"op must be describe, {', '.join(steps)}, got {request['op']!r}")
            return steps[request["op"]](request)
        except Failure as failure:
            return {"status": failure.status, "message": str(failure)[:MESSAGE_LIMIT]}
        except BaseException as error:  # a submission may raise anything, SystemExit too
            return {"status": status_of(error), "message": _describe_error(error)}

    def _function(self, request: Mapping[str, Any]) -> Callable[..., Any]:
        from .submissions import load

        key = (request["path"], request["suite"])
        if key not in self.loaded:
            try:
                self.loaded[key] = load(Path(request["path"]), request["suite"])
            except BaseException as error:
                raise Failure(status_of(error), f"import failed: {_describe_error(error)}") from error
        return self.loaded[key]

    def _call(self, request: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
        from .baselines import baseline, outputs

        causal, sm_scale = bool(request["causal"]), float(request["sm_scale"])
        if request.get("baseline"):
            name, suite, kind = request["baseline"], request["suite"], self.device.kind
            call = baseline(name, suite, causal, sm_scale, kind, request.get("options"))
            return (lambda x: outputs(name, suite, kind, call(x))) if request["op"] == "values" else call
        function = self._function(request)
        if request["suite"] == "forward":
            return lambda x: function(x["q"], x["k"], x["v"], causal, sm_scale)
        return lambda x: function(x["dout"], x["q"], x["k"], x["v"], x["out"], x["lse"], causal, sm_scale)

    def values(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run on real values with fresh memory poisoned; write outputs, and inputs as they are afterwards."""
        import torch

        from .poison import poisoned_memory

        call = self._call(request)
        inputs = torch.load(request["inputs"], weights_only=True)
        cores, twice = int(request["cores"]), list(request.get("twice") or ())
        again = [
            {name: x[: twice[0], : twice[1]].clone() for name, x in inputs.items()} for _ in range(2 if twice else 0)
        ]
        with poisoned_memory():
            returned, kernels = self.device.values(call, inputs, cores)
        described = _describe_returned(returned)
        if described != request["expected"]:
            return {"returned": described, "kernels": kernels}
        outputs = [tensor.detach().cpu().contiguous().clone() for tensor in returned]
        torch.save({"outputs": outputs, "inputs": inputs}, request["outputs"])
        whole = twice == described[0][0][:2]  # then the first call is one of the two
        both: list[Any] = [outputs] if whole else []
        for part in again[len(both) :]:
            with poisoned_memory():
                both.append(self.device.values(call, part, cores)[0])
        repeats = not both or (
            _describe_returned(both[0]) == _describe_returned(both[1])
            and all(same_bits(a, b) for a, b in zip(*both, strict=True))
        )
        return {"returned": described, "kernels": kernels, "repeats": repeats}

    def time(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Predict the time on inputs of the given shapes."""
        from .devices import VirtualDevice

        if not isinstance(self.device, VirtualDevice):
            raise ValueError(f"op time needs the virtual NPU, got {self.device.kind}")
        timing = self.device.time(self._call(request), _shapes(request))
        return {**dataclasses.asdict(timing), "scratch_bytes": self._scratch_bytes(request)}

    def _scratch_bytes(self, request: Mapping[str, Any]) -> int | None:
        """What a submission's `scratch_bytes` says of the shape; None where it has none."""
        scratch = None if request.get("baseline") else self._function(request).__globals__.get("scratch_bytes")
        if scratch is None:
            return None
        return int(scratch(*request["shapes"]["q"][0], bool(request["causal"]), float(request["sm_scale"])))

    def ready(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Get a call ready to be timed, under a key: inputs on the device, warmed up."""
        import torch

        from .measured import MeasuredDevice

        if not isinstance(self.device, MeasuredDevice):
            raise ValueError(f"op ready needs an accelerator, got {self.device.kind}")
        self.timed.pop(request["key"], None)
        samples = torch.load(request["samples"], weights_only=True)
        call = self._call(request)
        self.timed[request["key"]] = self.device.ready(call, _shapes(request), samples, request["places"])
        return {"peak_flops": self.device.accelerator.peak_flops()}

    def repeat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One timed repeat."""
        one = self.timed[request["key"]].repeat()
        return {"ms": one.ms, "fault": one.fault}

    def finish(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Write the outputs of the planted heads and let go of the call."""
        import torch

        outputs = self.timed.pop(request["key"]).outputs()
        torch.save(outputs, request["outputs"])
        return {"returned": [_describe_returned(one) for one in outputs]}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits; -0 is not 0, a NaN is itself."""
    import torch

    first, second = (x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)


def _shapes(request: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    import torch

    return {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in request["shapes"].items()}


def _describe_returned(returned: Any) -> Any:
    """One [shape, dtype] for each returned tensor, [None, type] for what is none."""
    import torch

    if isinstance(returned, torch.Tensor):
        return f"one tensor of shape {list(returned.shape)}"
    if not isinstance(returned, (tuple, list)):
        return f"a {type(returned).__name__}"
    return [
        [list(value.shape), str(value.dtype)] if isinstance(value, torch.Tensor) else [None, type(value).__name__]
        for value in returned
    ]


def main() -> None:
    """Serve requests until stdin ends."""
    _die_with_parent()
    faulthandler.enable()
    out_fd, kind, release, threads = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    requests = io.TextIOWrapper(os.fdopen(os.dup(0), "rb"))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a submission that reads stdin gets its end
    import torch

    torch.set_num_threads(threads)
    worker: Worker | None = None
    with os.fdopen(out_fd, "w") as answers:
        for line in requests:
            try:
                if worker is None:
                    worker = Worker(kind, release)
            except Exception as error:
                answer = {"status": "runtime error", "message": f"device {kind}: {_describe_error(error)}"}
            else:
                answer = worker.answer(json.loads(line))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
