"""Evaluates submissions case by case in child processes: check first, then time.

The parent makes the inputs from a seed that the child never sees, computes the reference
and judges; the child only calls the submission. The textbook is timed in a child of its
own, where no submission was ever imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import random
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .checks import OUTPUTS, Verdict, expected, form_fault, judge
from .configs import Case, heads_to_check, input_rule, make_inputs, seed_for, work_of_head
from .measured import ACCELERATORS, SPREAD, enough, spread
from .measures import Measures, merge
from .process import Child, ChildCrash, ChildTimeout
from .reference import reference_fwd
from .results import CaseResult, Status
from .static_check import refusals

MODES = ("check", "score")
WORK = 40.0  # bound of the values of a case, in heads with n=1024 and d=64; see heads_to_check
CHUNK_ELEMENTS = 1 << 24  # of one tensor, when all heads are checked chunk by chunk
MOST_REFUSALS = 5  # in one message
PLACES, SAMPLES = 1 << 20, 2  # of timed calls: first part of their seeds, inputs that take turns
PEAK_FLOPS = 294.9e12  # of the chip that the virtual NPU models
LEAST_WORK = 0.98  # of a case's multiply-adds must be seen in a timed call on the virtual NPU
PUBLISHED = "vendor, published"
MEASURED = "vendor, same run"
TEXTBOOK = "textbook, same run"


@dataclass(frozen=True)
class Settings:
    """How to evaluate.

    Attributes:
        device: "virtual" or an accelerator, see `devices.KINDS`.
        release: bishengir release of the virtual NPU, "1.1.0" or "1.2.0".
        mode: "check", or "score" to time what passed too.
        full: check all heads.
        jobs: cases at a time; an accelerator takes one.
        seconds: time limit of one call of a child.
        memory_bytes: memory limit of one child.
        public_seed, secret_seed: of the inputs.
        work: bound of the values computed for a case, see `configs.heads_to_check`.
        kernels_required: a submission that launches no kernel does not pass.
        static_check: a submission that `static_check.refusals` finds fault with is not run.
    """

    device: str = "virtual"
    release: str = "1.1.0"
    mode: str = "check"
    full: bool = False
    jobs: int = 2
    seconds: float = 180.0
    memory_bytes: int = 6 << 30
    public_seed: int = 0
    secret_seed: int = field(default_factory=lambda: secrets.randbits(63))
    work: float = WORK
    kernels_required: bool = True
    static_check: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        if self.memory_bytes < 1 << 30:
            raise ValueError(f"memory_bytes must be at least 1 GiB, got {self.memory_bytes}")


def judges(device: str) -> bool:
    """Whether inputs are made and references computed on the device, so that all heads can be checked."""
    return device in ACCELERATORS and ACCELERATORS[device].judges


class _Fault(Exception):
    """A status that ends a case."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Evaluator:
    """Evaluates one case after another in its own children; use one for each thread.

    Args:
        submissions: the file of each suite.
        settings: how to evaluate.
    """

    def __init__(self, submissions: dict[str, Path], settings: Settings) -> None:
        self.submissions, self.settings = submissions, settings
        threads = max(1, torch.get_num_threads())
        options = (settings.device, settings.release, threads, settings.memory_bytes)
        self.child, self.trusted = Child(*options), Child(*options)
        self.place = settings.device if judges(settings.device) else "cpu"  # of inputs and references
        self.checked_kernels: set[str] = set()  # of the current case
        self.notes: list[str] = []  # of the current case

    def close(self) -> None:
        """End the children."""
        self.child.close()
        self.trusted.close()

    def kill(self) -> None:
        """End the children from another thread."""
        self.child.kill()
        self.trusted.kill()

    def describe(self) -> dict[str, str]:
        """The device, as `devices.Device.describe` tells it.

        Raises:
            RuntimeError: the device cannot be opened.
        """
        try:
            answer = self._ask(self.trusted, {"op": "describe"})
        except _Fault as fault:
            raise RuntimeError(str(fault)) from None
        return dict(answer["device"])

    def evaluate(self, case: Case) -> CaseResult:
        """Check a case and, in mode "score" and when it passed, time it. Never raises for what
        a submission does."""
        start = time.monotonic()
        self.checked_kernels, self.notes = set(), []
        result = self._checked(case)
        if result.status is Status.PASSED and self.settings.mode == "score" and case.kind == "performance":
            try:
                result = self._predicted(result) if self.settings.device == "virtual" else self._measured(result)
            except _Fault as fault:
                result = dataclasses.replace(result, status=fault.status, message=f"when timed: {fault}")
            except Exception as error:  # what a child wrote is not to be trusted
                text = f"when timed: its answer could not be used: {type(error).__name__}: {error}"
                result = dataclasses.replace(result, status=Status.RUNTIME_ERROR, message=text)
        return dataclasses.replace(result, seconds=time.monotonic() - start)

    def _ask(self, child: Child, request: dict[str, Any], calls: int = 1) -> dict[str, Any]:
        """The child's answer; `calls` long calls in it have their limit each."""
        try:
            answer = child.request(request, self.settings.seconds * calls)
        except ChildTimeout as error:
            raise _Fault(Status.TIMEOUT, str(error)) from None
        except ChildCrash as error:
            raise _Fault(Status.RUNTIME_ERROR, str(error)) from None
        if "status" in answer:
            raise _Fault(Status(answer["status"]), str(answer.get("message", "")))
        return answer

    def _request(self, op: str, case: Case) -> dict[str, Any]:
        return {
            "op": op,
            "suite": case.suite,
            "path": str(self.submissions[case.suite].resolve()),
            "causal": case.causal,
            "sm_scale": input_rule().sm_scale,
        }

    def _checked(self, case: Case) -> CaseResult:
        """Values of some heads, or of all in chunks, against the reference."""
        verdict, heads = Verdict(Status.PASSED), 0
        measured: list[Measures] = []
        try:
            parts = list(chunks(case, self.settings))
            for part, (z, h) in enumerate(parts):
                large = case.suite == "forward" and part == len(parts) - 1
                verdict = self._check_part(case, part, z, h, large)
                heads += z * h
                if verdict.measures is not None:
                    measured.append(verdict.measures)
                if verdict.status is not Status.PASSED:
                    break
        except _Fault as fault:
            verdict = Verdict(fault.status, str(fault))
        except Exception as error:  # what a child wrote is not to be trusted
            verdict = Verdict(Status.RUNTIME_ERROR, f"its outputs could not be judged: {type(error).__name__}: {error}")
        together = merge(measured) if measured else None
        return CaseResult(
            case,
            verdict.status,
            "; ".join([*filter(None, [verdict.message]), *self.notes]),
            heads_checked=min(heads, case.heads),
            max_abs_error=_finite(together.max_abs) if together else None,
            rms_error=_finite(together.rms) if together else None,
            vs_torch=_finite(together.vs_torch) if together else None,
        )

    def _inputs(self, case: Case, part: int, z: int, h: int, large: bool = False) -> dict[str, torch.Tensor]:
        """Fresh inputs, in the backward with the forward's exact results."""
        seed = seed_for(case, self.settings.public_seed, self.settings.secret_seed, part)
        inputs = make_inputs(case, z, h, seed, large, self.place)
        if case.suite == "backward":
            out, lse = reference_fwd(inputs["q"], inputs["k"], inputs["v"], case.causal, input_rule().sm_scale)
            inputs |= {"out": out.to(case.torch_dtype), "lse": lse.float()}
        return inputs

    def _check_part(self, case: Case, part: int, z: int, h: int, large: bool) -> Verdict:
        settings = self.settings
        inputs = self._inputs(case, part, z, h, large)
        form = [[list(shape), str(dtype)] for shape, dtype in expected(case, z, h).values()]
        with tempfile.TemporaryDirectory(prefix="check-") as folder:
            files = {"inputs": f"{folder}/inputs.pt", "outputs": f"{folder}/outputs.pt"}
            torch.save({name: x.cpu() for name, x in inputs.items()}, files["inputs"])
            request = {**self._request("values", case), **files, "expected": form, "cores": _cores(z * h)}
            request["twice"] = self._repeated(case, z, h) if part == 0 else None
            answer = self._ask(self.child, request, calls=2 if self._costly(case, z, h) else 1)
            wrong = form_fault(case, z, h, answer["returned"])
            if wrong is not None:
                return wrong
            saved = torch.load(files["outputs"], weights_only=True, map_location=self.place)
            self.checked_kernels |= set(answer["kernels"] or ())
            outputs = dict(zip(OUTPUTS[case.suite], saved["outputs"], strict=True))
            verdict = judge(case, inputs, saved["inputs"], outputs)
            if verdict.status is Status.PASSED and not answer["repeats"]:
                text = "two calls on the same inputs gave different outputs"
                return Verdict(Status.NUMERICAL, text, verdict.measures)
            if verdict.status is Status.PASSED and part == 0 and settings.device != "virtual" and self.place == "cpu":
                self.notes += self._second_opinions(case, inputs)
        if verdict.status is Status.PASSED and settings.kernels_required and answer["kernels"] == []:
            return Verdict(Status.RUNTIME_ERROR, "no Triton kernel was launched", verdict.measures)
        return verdict

    def _costly(self, case: Case, z: int, h: int) -> bool:
        """Whether the values of so many heads take long."""
        return self.settings.device == "virtual" and z * h * work_of_head(case) > self.settings.work / 4

    def _repeated(self, case: Case, z: int, h: int) -> tuple[int, int]:
        """Of how many batches and heads the outputs of two calls are compared: all of them where
        that is cheap, else one."""
        return (1, 1) if self._costly(case, z, h) else (z, h)

    def _second_opinions(self, case: Case, inputs: dict[str, torch.Tensor]) -> Iterator[str]:
        """What plain fp32 attention on the device and the vendor's operator make of the inputs,
        where it is not what the reference says. Neither changes a verdict."""
        for name in ("reference", "vendor"):
            verdict = self.baseline_verdict(case, name, inputs)
            if verdict.status in (Status.RUNTIME_ERROR, Status.TIMEOUT, Status.COMPILE_ERROR):
                yield f"no second opinion: {name} on the device: {verdict.status.value}: {verdict.message}"
            elif verdict.status is not Status.PASSED:
                yield f"second opinion: {name} on the device is {verdict.status.value}: {verdict.message}"

    def baseline_verdict(self, case: Case, name: str, inputs: dict[str, torch.Tensor] | None = None) -> Verdict:
        """Judge the values of a baseline ("textbook", "vendor", "reference") as a submission's.

        Args:
            inputs: [z, h, ...]; by default fresh ones for two heads.
        """
        inputs = self._inputs(case, 0, 1, min(2, case.h)) if inputs is None else inputs
        z, h = inputs["q"].shape[:2]
        with tempfile.TemporaryDirectory(prefix="check-") as folder:
            files = {"inputs": f"{folder}/inputs.pt", "outputs": f"{folder}/outputs.pt"}
            torch.save(inputs, files["inputs"])
            form = [[list(shape), str(dtype)] for shape, dtype in expected(case, z, h).values()]
            request = {**self._request("values", case), **files, "path": "", "baseline": name}
            try:
                answer = self._ask(self.trusted, {**request, "expected": form, "cores": _cores(z * h)})
            except _Fault as fault:
                return Verdict(fault.status, str(fault))
            wrong = form_fault(case, z, h, answer["returned"])
            if wrong is not None:
                return wrong
            outputs = torch.load(files["outputs"], weights_only=True)["outputs"]
        return judge(case, inputs, inputs, dict(zip(OUTPUTS[case.suite], outputs, strict=True)))

    def baseline_times(self, case: Case, name: str, **options: Any) -> list[float]:
        """Times of a baseline on an accelerator, in ms; `options` are the textbook's.

        Raises:
            RuntimeError: it cannot be timed.
        """
        with tempfile.TemporaryDirectory(prefix="time-") as folder:
            files = {"samples": f"{folder}/samples.pt", "outputs": f"{folder}/outputs.pt"}
            sample = {name: x.flatten(0, 1) for name, x in self._inputs(case, PLACES, 1, 1).items()}
            torch.save([sample], files["samples"])
            request = {**self._time_request(case), "op": "ready", "key": name, "path": "", "baseline": name}
            times: dict[str, list[float]] = {name: []}
            try:
                self._ask(self.trusted, {**request, **files, "places": [0], "options": options})
                self._take_turns(times, {name: self.trusted}, [])
                self._ask(self.trusted, {"op": "finish", "key": name, **files})
            except _Fault as fault:
                raise RuntimeError(f"{fault.status.value}: {fault}") from None
        return times[name]

    def _time_request(self, case: Case) -> dict[str, Any]:
        dtype = str(case.torch_dtype).removeprefix("torch.")
        full = (case.z, case.h, case.n, case.d)
        shapes: dict[str, Any] = dict.fromkeys(("q", "k", "v"), (full, dtype))
        if case.suite == "backward":
            shapes |= {"dout": (full, dtype), "out": (full, dtype), "lse": (full[:3], "float32")}
        return {**self._request("time", case), "shapes": shapes}

    def _predicted(self, result: CaseResult) -> CaseResult:
        """Predict the time of the submission and of the textbook on the virtual NPU."""
        case, request = result.case, self._time_request(result.case)
        own = self._ask(self.child, request)
        unchecked = sorted(set(own["kernels"] or ()) - self.checked_kernels)
        if unchecked:
            text = f"ran {', '.join(unchecked)}, which the check on fewer heads did not run"
            raise _Fault(Status.RUNTIME_ERROR, text)
        ms, share = _time(own["ms"]), float(own["cube_utilisation"])
        done = share * ms * 1e-3 * PEAK_FLOPS / case.flops
        if done < LEAST_WORK:
            text = f"the matrix unit did {done:.1%} of the multiply-adds that the case needs"
            raise _Fault(Status.RUNTIME_ERROR, text)
        notes, textbook_ms = [*self.notes, *own["notes"]], None
        try:
            textbook_ms = float(self._ask(self.trusted, {**request, "path": "", "baseline": "textbook"})["ms"])
        except _Fault as fault:
            notes.append(f"no textbook time: {fault.status.value}: {fault}")
        timed = _with_baseline(result, case.baseline_ms, PUBLISHED, textbook_ms)
        return dataclasses.replace(
            timed, ms=ms, cube_utilisation=share, scratch_bytes=own["scratch_bytes"], message="; ".join(notes)
        )

    def _measured(self, result: CaseResult) -> CaseResult:
        """Time the submission, the vendor's operator and the textbook, repeat by repeat in turn,
        and compare the outputs of the timed calls with the reference."""
        case = result.case
        generator = random.Random(seed_for(case, self.settings.public_seed, self.settings.secret_seed, PLACES))
        z, h = heads_to_check(case, self.settings.work / 4, most=4)
        inputs = [self._inputs(case, PLACES + sample + 1, z, h) for sample in range(SAMPLES)]
        places = generator.sample(range(case.heads), z * h)
        baselines = ACCELERATORS[self.settings.device].baselines
        children = {"own": self.child, **dict.fromkeys(baselines, self.trusted)}
        notes = self.notes
        times: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory(prefix="time-") as folder:
            files = {name: f"{folder}/{name}.pt" for name in ("samples", *children)}
            torch.save([{name: x.flatten(0, 1).cpu() for name, x in one.items()} for one in inputs], files["samples"])
            request = {**self._time_request(case), "op": "ready", "samples": files["samples"], "places": places}
            peak = self._ask(self.child, {**request, "key": "own"})["peak_flops"]
            times["own"] = []
            for key in baselines:
                try:
                    self._ask(self.trusted, {**request, "key": key, "path": "", "baseline": key})
                    times[key] = []
                except _Fault as fault:
                    notes.append(f"no {key} time: {fault.status.value}: {fault}")
            self._take_turns(times, children, notes)
            self._ask(self.child, {"op": "finish", "key": "own", "outputs": files["own"]})
            for key in set(times) - {"own"}:
                with contextlib.suppress(_Fault):  # only to let go of its memory
                    self._ask(self.trusted, {"op": "finish", "key": key, "outputs": files[key]})
            verdict = self._judge_timed(case, (z, h), inputs, files["own"])
        if verdict.status is not Status.PASSED:
            raise _Fault(verdict.status, verdict.message)
        medians = {key: statistics.median(own) for key, own in times.items()}
        share = case.flops / (medians["own"] * 1e-3 * peak) if peak else None
        if share is not None and share > 1:
            raise _Fault(Status.RUNTIME_ERROR, f"{medians['own']:.3g} ms are faster than the chip's peak allows")
        notes += [
            f"times of {key} spread {spread(own):.0%} over {len(own)} repeats"
            for key, own in times.items()
            if spread(own) > SPREAD
        ]
        return dataclasses.replace(
            _with_baseline(result, medians.get("vendor"), MEASURED, medians.get("textbook")),
            ms=medians["own"],
            spread=spread(times["own"]),
            cube_utilisation=share,
            message="; ".join(notes),
        )

    def _take_turns(self, times: dict[str, list[float]], children: dict[str, Child], notes: list[str]) -> None:
        """Time repeats of several calls in turn until there are enough. One that fails is left out
        with a note, unless it is "own"."""
        rounds = 0
        while not enough(times):
            rounds += 1
            for key in list(times)[:: 1 if rounds % 2 else -1]:  # a drift favours none
                try:
                    one = self._ask(children[key], {"op": "repeat", "key": key})
                except _Fault as fault:
                    if key == "own" or len(times) == 1:
                        raise
                    notes.append(f"no {key} time: {fault.status.value}: {fault}")
                    del times[key]
                    continue
                if key == "own" and one["fault"]:
                    raise _Fault(Status.NUMERICAL, str(one["fault"]))
                times[key].append(_time(one["ms"]))

    def _judge_timed(
        self, case: Case, heads: tuple[int, int], inputs: Sequence[dict[str, torch.Tensor]], path: str
    ) -> Verdict:
        """Outputs of the timed calls, for the heads whose inputs the parent chose."""
        saved = torch.load(path, weights_only=True, map_location=self.place)
        for given, outputs in zip(inputs, saved, strict=True):
            wrong = form_fault(case, *heads, [[[*heads, *x.shape[1:]], str(x.dtype)] for x in outputs])
            if wrong is not None:
                return wrong
            shaped = [x.unflatten(0, heads) for x in outputs]
            verdict = judge(case, given, given, dict(zip(OUTPUTS[case.suite], shaped, strict=True)))
            if verdict.status is not Status.PASSED:
                return verdict
        return Verdict(Status.PASSED)


def _with_baseline(result: CaseResult, vendor_ms: float | None, vendor: str, textbook_ms: float | None) -> CaseResult:
    """The vendor's time where there is one, else the textbook's. A measured time is never
    compared with one that was measured elsewhere."""
    baseline, baseline_ms = (vendor, vendor_ms) if vendor_ms is not None else (TEXTBOOK, textbook_ms)
    if baseline_ms is None:
        baseline = ""
    return dataclasses.replace(result, baseline=baseline, baseline_ms=baseline_ms, textbook_ms=textbook_ms)


def _time(value: Any) -> float:
    """A time that a child reports, in ms."""
    ms = float(value)
    if not (math.isfinite(ms) and ms > 0):
        raise _Fault(Status.RUNTIME_ERROR, f"its time is {ms} ms")
    return ms


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _cores(heads: int) -> int:
    """Few enough simulated cores that a persistent program steps over several heads."""
    return max(1, min(3, heads // 2))


def chunks(case: Case, settings: Settings) -> Iterator[tuple[int, int]]:
    """Batches and heads of each call that checks a case. Two calls on different inputs where
    the bound allows it: what was kept from the first must not matter in the second."""
    if not settings.full:
        z, h = heads_to_check(case, settings.work / 2, most=8)
        for _ in range(2 if 2 * z * h * work_of_head(case) <= settings.work else 1):
            yield z, h
        return
    elements, (z, h) = CHUNK_ELEMENTS, heads_to_check(case, 4 * settings.work, most=128)
    if judges(settings.device):
        elements, z, h = 4 * CHUNK_ELEMENTS, case.z, case.h
    h = case.h if z > 1 else h
    z = max(1, min(z, elements // (h * case.n * case.d)))
    for start_z in range(0, case.z, z):
        for start_h in range(0, case.h, h):
            yield min(z, case.z - start_z), min(h, case.h - start_h)


def evaluate(
    cases: Sequence[Case],
    submissions: dict[str, Path],
    settings: Settings,
    on_result: Callable[[CaseResult], None] | None = None,
    on_start: Callable[[Case], None] | None = None,
) -> list[CaseResult]:
    """Evaluate cases, some at a time; a hang or crash costs that case only.

    Args:
        cases: what to evaluate; long ones are started first.
        submissions: the file of each suite that occurs in `cases`.
        settings: how.
        on_result, on_start: called in this thread when a case ends or starts.

    Returns:
        Results in the order of `cases`.

    Raises:
        ValueError: a suite without a file.
    """
    for suite in sorted({case.suite for case in cases}):
        if suite not in submissions:
            raise ValueError(f"submissions must have a file for suite {suite}, got {sorted(submissions)}")
    results: dict[Case, CaseResult] = {}
    if settings.static_check:
        found = {suite: refusals(submissions[suite]) for suite in sorted({case.suite for case in cases})}
        for case in dict.fromkeys(cases):
            if found[case.suite]:
                text = "; ".join(map(str, found[case.suite][:MOST_REFUSALS]))
                results[case] = CaseResult(case, Status.REFUSED, text)
                if on_start:
                    on_start(case)
                if on_result:
                    on_result(results[case])
    given, cases = cases, [case for case in cases if case not in results]
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in sorted(cases, key=lambda case: -case.flops / case.heads):
        waiting.put(case)
    events: queue.SimpleQueue[Case | CaseResult | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    jobs = min(settings.jobs, len(cases)) if settings.device == "virtual" else min(1, len(cases))
    evaluators = [Evaluator(submissions, settings) for _ in range(jobs)]

    def serve(evaluator: Evaluator) -> None:
        try:
            while not stop.is_set():
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                events.put(case)
                events.put(evaluator.evaluate(case))
        except BaseException as error:
            events.put(error)
        finally:
            evaluator.close()

    threads = [threading.Thread(target=serve, args=(evaluator,), daemon=True) for evaluator in evaluators]
    try:
        for thread in threads:
            thread.start()
        while any(case not in results for case in cases):
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, CaseResult):
                results[event.case] = event
                if on_result:
                    on_result(event)
            elif on_start:
                on_start(event)
    finally:
        stop.set()
        if any(case not in results for case in cases):
            for evaluator in evaluators:
                evaluator.kill()
        for thread in threads:
            thread.join(timeout=10)
    return [results[case] for case in given]
