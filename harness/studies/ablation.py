"""`python -m harness.studies.ablation`: each technique of the kernels switched off alone.

A technique is switched off in a copy of the kernel's file: by replaced text, by other values
of its settings, or by another call (the techniques are in techniques.py). Each copy is timed
(predicted) on the official performance cases in fp16 at their full size, and its values are
checked on a small shape, those of scratch in fewer bits on larger inputs too.

Writes results/ablation.json after each row; rows whose sources have not changed are kept, so a
run that was ended (or that --minutes ended) goes on with the next call. A row that takes longer
than --limit seconds says so and ends nothing else.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from ..configs import SUITES, Case, cases, input_rule
from ..reference import reference_bwd, reference_fwd
from ..virtual_npu.driver import run
from ..virtual_npu.errors import VirtualNPUError
from .rows import REPOSITORY, Kept, digest, progress, sources
from .techniques import SHIPPED, TECHNIQUES, Empty, Like, Technique, Times

RESULTS = REPOSITORY / "results" / "ablation.json"
COPIES = REPOSITORY / ".cache" / "ablation"
RIGHT = 2.0**-7  # largest relative L2 error of values that count as right
SMALL_CORES = {"forward": 2, "backward": 1}  # few enough that the pipelines run
ROW_LIMIT = 300.0  # seconds for one row


def source(suite: str) -> str:
    """The text of a kernel file."""
    return (REPOSITORY / f"{suite}.py").read_text()


def available(suite: str) -> list[Technique]:
    """The techniques of a suite whose kernel is in the file, the shipped kernel first. Where that
    of which one is a part is not there, it is a part of the shipped kernel."""
    text = source(suite)
    found = [item for item in TECHNIQUES if item.suite == suite and item.needs in text]
    names = {item.name for item in found}
    return [item if item.of in names else replace(item, of="") for item in found]


def technique(suite: str, name: str) -> Technique:
    """One of the techniques that are available."""
    return next(item for item in available(suite) if item.name == name)


def edited(chosen: Technique) -> str:
    """The kernel file's text with the technique switched off.

    Raises:
        ValueError: a text to replace, or the piece of code that names the technique, is not in
            the file (the kernel has changed: mend or drop the row), or a text whose replacement
            adds lines is there more than once.
    """
    text = source(chosen.suite)
    edits = (*technique(chosen.suite, chosen.of).edits, *chosen.edits) if chosen.of else chosen.edits
    for piece in (chosen.code, *(old for old, _ in edits)):
        if piece not in text:
            raise ValueError(f"{chosen.suite}.py must have the text {piece!r} of technique {chosen.name!r}")
    for old, new in edits:
        if new.count("\n") > old.count("\n") and text.count(old) != 1:
            raise ValueError(
                f"{chosen.suite}.py has the text {old!r} of technique {chosen.name!r} {text.count(old)} times"
            )
        text = text.replace(old, new)
    return text


_MADE: dict[str, ModuleType] = {}


def module(chosen: Technique) -> ModuleType:
    """A copy of the kernel's module with the technique, and that of which it is a part, switched off.

    Raises:
        ValueError: as `edited`, or a table or attribute that the module does not have.
    """
    text = edited(chosen)
    parts = (technique(chosen.suite, chosen.of), chosen) if chosen.of else (chosen,)
    # One module for each technique: Triton keeps what it compiled for the launches of a module.
    name = f"{chosen.suite}_{digest(text, parts)}"
    if name in _MADE:
        return _MADE[name]
    path = COPIES / f"{name}.py"
    if not path.is_file():
        COPIES.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_text(text)
        os.replace(whole, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # Triton finds the source of a kernel through its module
    spec.loader.exec_module(made)
    for item in parts:
        for attribute in (*item.settings, *item.replace):
            if not hasattr(made, attribute):
                raise ValueError(f"{item.suite}.py must have {attribute!r} for technique {item.name!r}")
        for attribute, value in item.settings.items():
            setattr(made, attribute, switched(getattr(made, attribute), value))
        for attribute, value in item.replace.items():
            function = callable(getattr(made, attribute))
            setattr(made, attribute, (lambda *_, _value=value, **__: _value) if function else value)
        if item.options:
            for kernel in vars(made).values():
                if isinstance(kernel, JITFunction):
                    _relaunch(kernel, item.options)
    _MADE[name] = made
    return made


def _relaunch(kernel: Any, options: Mapping[str, Any]) -> None:
    """Let the launches of a kernel that give these compile options have other ones."""
    original = kernel.run

    def run(*args: Any, **given: Any) -> Any:
        other = {name: value for name, value in options.items() if name in given}
        kept = {name: value for name, value in (given | other).items() if name not in other or value is not None}
        return original(*args, **kept)

    kernel.run = run


def switched(table: Mapping[Any, Any], value: Any) -> dict[Any, Any]:
    """A table with other settings: `value` in every entry; or, where it is by key of the table, in
    those entries; or, where it is by setting, in each entry that is a table of settings."""
    if isinstance(value, Empty):
        return {key: {} for key in table}
    if not isinstance(value, Mapping):
        return dict.fromkeys(table, value)
    if not all(key in table for key in value):
        return {key: _entry(table, entry, value) for key, entry in table.items()}
    return {**table, **{key: _entry(table, table[key], new) for key, new in value.items()}}


def _entry(table: Mapping[Any, Any], old: Any, new: Any) -> Any:
    """An entry of a table of settings, or a setting of an entry, with other values."""
    if isinstance(new, Like):
        return {**table[new.key], **{name: old[name] for name in new.but}}
    if isinstance(new, Times):
        return max(1, int(old * new.factor))
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        kept = {name: value for name, value in new.items() if name in old or not isinstance(value, Times)}
        return {**old, **{name: _entry(old, old.get(name), value) for name, value in kept.items()}}
    return new


def _used(kernel: ModuleType, case: Case) -> Any:
    """The settings with which the pipeline of a kernel's module runs a case."""
    if case.suite == "forward":
        return kernel._pipeline_settings(case.n, case.d, case.causal)
    return kernel._PIPELINES.get((case.d, case.causal))


def concerns(chosen: Technique, case: Case) -> bool:
    """Whether the switch changes anything for a case: with the settings of the pipeline only, it
    does where these are others than those shipped."""
    if not chosen.applies(case):
        return False
    only_settings = not (chosen.edits or chosen.replace or chosen.options or chosen.of)
    if not only_settings or not {"_PIPELINES", "_LONG_GROUP"} & set(chosen.settings):
        return True
    return bool(_used(module(chosen), case) != _used(module(technique(chosen.suite, SHIPPED)), case))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """An error if the block takes longer.

    Raises:
        TimeoutError: it did.
    """

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def told(error: Exception) -> tuple[str, str]:
    """What a switched-off technique ended with: a short name and the message's telling line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    kind = type(error).__name__
    if kind.endswith(("CompileError", "CompilationError")):
        lines = [line for line in lines if not re.match(r"#\d+ 0x", line)] or ["the compiler crashed"]  # no stack
        overflows = [line for line in lines if "overflow" in line]
        text = re.sub(r".*error: ", "", (overflows or lines[-1:])[0])
        return "does not compile", re.sub(r"/\S*/", "", text)[:300]  # no folders of this machine
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and Path(frames[-1].filename).parent.name == "virtual_npu"
    if type(error) is VirtualNPUError or (inside and not isinstance(error, VirtualNPUError)):
        return "not modelled", lines[0][:300]  # the virtual NPU itself gave up
    return kind, lines[0][:300]


def time_case(chosen: Technique, case: Case) -> dict[str, Any]:
    """Predicted ms of a case with the technique switched off, or why there is none."""
    kernel = module(chosen)
    causal = case.causal if chosen.causal is None else chosen.causal
    x = [torch.empty(case.z, case.h, case.n, case.d, dtype=case.torch_dtype) for _ in range(5)]
    try:
        with run("timing") as record:
            if case.suite == "forward":
                kernel.attention_fwd(*x[:3], causal, input_rule().sm_scale)
            else:
                lse = torch.empty(case.z, case.h, case.n)
                kernel.attention_bwd(*x, lse, causal, input_rule().sm_scale)
    except TimeoutError:
        raise
    except Exception as error:  # of the front end, the compiler, the model or the kernel's own checks
        fault, detail = told(error)
        return {"ms": None, "fault": fault, "detail": detail}
    kernels = ", ".join(item.name for item in record.kernels)
    if chosen.settings and not chosen.of and "_kernel_pipeline" not in kernels and _is_pipelined(case):
        # It would be the time of other kernels.
        return {"ms": None, "fault": "beyond the scratch limit", "detail": f"{kernels} instead of the pipeline"}
    return {"ms": round(record.ms, 4), "fault": "", "detail": ""}


def _is_pipelined(case: Case) -> bool:
    """Whether the shipped kernel runs a case as a pipeline."""
    return bool(_used(module(technique(case.suite, SHIPPED)), case))


def check_values(chosen: Technique) -> dict[str, Any]:
    """Are the values right with the technique switched off? One head, full and causal, hazards
    checked; the largest relative L2 error by deviation of the inputs."""
    if chosen.causal is not None:
        return {"values": "not checked: another mask"}
    errors: dict[str, float | None] = {}
    for std in chosen.stds:
        try:
            worst = max(_error(chosen, std, causal) for causal in (False, True))
        except TimeoutError:
            raise
        except Exception as error:
            return {"values": ": ".join(told(error))}
        errors[f"{std:g}"] = float(f"{worst:.3g}") if worst < float("inf") else None
    first = errors[f"{chosen.stds[0]:g}"]
    if first is None or first > RIGHT:
        return {"values": f"wrong: relative L2 error {first}"}
    return {"values": "right", "errors": errors}


def worst_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Largest relative L2 error of results beside fp64 ones; infinity for NaN."""
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def _error(chosen: Technique, std: float, causal: bool) -> float:
    """Largest relative L2 error of the results for inputs of a deviation; infinity for NaN."""
    kernel = module(chosen)
    generator = torch.Generator().manual_seed(0)
    scale, (n, d) = input_rule().sm_scale, chosen.small
    q, k, v = ((torch.randn((1, 1, n, d), generator=generator) * std).half() for _ in range(3))
    dout = (torch.randn((1, 1, n, d), generator=generator) * input_rule().dout_std).half()
    out, lse = reference_fwd(q, k, v, causal, scale)
    found: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor, ...]
    with run("values", hazards=True, cores=SMALL_CORES[chosen.suite]):
        if chosen.suite == "forward":
            found, exact = kernel.attention_fwd(q, k, v, causal, scale)[:1], (out,)
        else:
            found = kernel.attention_bwd(dout, q, k, v, out.half(), lse.float(), causal, scale)
            exact = reference_bwd(dout, q, k, v, causal, scale, out=out.half())
    return worst_error(found, exact)


@functools.cache
def gone() -> dict[str, str]:
    """Techniques whose text or tables are no longer in the kernel file: name to what is missing."""
    found = {}
    for chosen in (item for suite in SUITES for item in available(suite)):
        try:
            module(chosen)
        except ValueError as error:
            found[f"{chosen.suite}: {chosen.name}"] = str(error)
    return found


@functools.cache
def work() -> dict[str, tuple[Technique, Case | None]]:
    """What there is to do, by key; without a case it is the check of the values. The kernels as
    shipped come first; techniques that are gone are left out."""
    found: dict[str, tuple[Technique, Case | None]] = {}
    items = [item for suite in SUITES for item in available(suite) if f"{item.suite}: {item.name}" not in gone()]
    for chosen in sorted(items, key=lambda item: item.name != SHIPPED):
        found[f"{chosen.suite}: {chosen.name}: values"] = chosen, None
        for case in cases(chosen.suite):
            if case.kind == "performance" and case.dtype == "fp16" and concerns(chosen, case):
                found[f"{chosen.suite}: {chosen.name}: {case.name}"] = chosen, case
    return found


def _switches(chosen: Technique) -> list[object]:
    """What a technique sets, beside the edits."""
    items = [technique(chosen.suite, chosen.of), chosen] if chosen.of else [chosen]
    return [value for item in items for value in (item.settings, item.replace, item.options)]


def wanted() -> dict[str, str]:
    """Key to digest of every row of results/ablation.json."""
    model = sources()
    return {
        key: digest(
            model, edited(chosen), _switches(chosen), chosen.causal, case or (SMALL_CORES, chosen.small, chosen.stds)
        )
        for key, (chosen, case) in work().items()
    }


def do(key: str, limit: float, end: float) -> dict[str, Any] | None:
    """Make the row of a key; None after the end of the run (in the clock of `time.time`)."""
    if time.time() > end:
        return None
    torch.set_num_threads(1)
    chosen, case = work()[key]
    row: dict[str, Any] = {"suite": chosen.suite, "technique": chosen.name}
    if case is not None:
        row["case"] = case.name
    started = time.time()
    try:
        with limited(limit):
            row |= check_values(chosen) if case is None else time_case(chosen, case)
    except TimeoutError as error:
        row |= (
            {"values": f"timeout: {error}"} if case is None else {"ms": None, "fault": "timeout", "detail": f"{error}"}
        )
    return {**row, "seconds": round(time.time() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Each technique of the kernels switched off alone.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", action="append", default=[], help="keys with this in them (may repeat)")
    parser.add_argument("--limit", type=float, default=ROW_LIMIT, help="seconds for one row")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no row later than this")
    parser.add_argument("--list", action="store_true", help="print the keys of the rows to make, and no more")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name, reason in gone().items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    kept = Kept(arguments.json, wanted())
    missing = [key for key in kept.missing() if not arguments.only or any(word in key for word in arguments.only)]
    if arguments.list:
        print("\n".join(missing))
        return 0
    print(f"{len(kept.rows)} rows kept, {len(missing)} to make", flush=True)
    end = time.time() + 60 * arguments.minutes
    left = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(do, key, arguments.limit, end): key for key in missing}
        for done, future in enumerate(as_completed(futures), 1):
            key = futures[future]
            try:
                row = future.result()
            except Exception as error:  # of one row: the others go on
                row = None
                print(f"{key}: {type(error).__name__}: {error}", file=sys.stderr)
            if row is None:
                left += 1
                continue
            seconds = row.pop("seconds")
            kept.add(key, row)
            told = row.get("values") or (f"{row['ms']:.2f} ms, predicted" if row["ms"] else row["fault"])
            progress(done, len(missing), f"{key}: {told} ({seconds:.0f} s)")
    kept.write()
    print(f"wrote {arguments.json}" + (f"; {left} rows are left for another call" if left else ""))
    return 1 if left or gone() else 0


if __name__ == "__main__":
    raise SystemExit(main())
