"""`python -m harness.studies.surveys`: the mutation test of the shipped kernels.

For the forward (both paths), the backward and the textbook kernels, on small shapes in
which each program steps over several heads, every synchronisation of each compiled program
is deleted in turn. Writes results/mutation.json: for each kernel how many were deleted, how
many noticed, and each that was not with the argument why it is redundant. The file is
written after each subject; subjects that are in it, of the same sources, are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..results import write_json
from ..virtual_npu.driver import run
from ..virtual_npu.launch import Launch
from ..virtual_npu.mutation import NOT_REACHED, survey
from .sources import KERNELS, MACHINE, fingerprint

SCALE = 0.5
CORES = 2
WANTED = 0.97
SOURCES = (*KERNELS, "harness/textbook.py", *MACHINE, "harness/studies/surveys.py")


@dataclass(frozen=True)
class Shape:
    n: int
    d: int
    causal: bool
    heads: int
    dtype: str = "float16"


def _tensors(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (1, shape.heads, shape.n, shape.d)
    q, k, v = ((torch.randn(size, generator=generator) * 0.5).to(getattr(torch, shape.dtype)) for _ in range(3))
    return q, k, v


def _forward(shape: Shape) -> None:
    from forward import attention_fwd

    attention_fwd(*_tensors(shape), shape.causal, SCALE)


def _backward(shape: Shape) -> None:
    from backward import attention_bwd

    q, k, v = _tensors(shape)
    lse = torch.logsumexp(q.float() @ k.float().transpose(-1, -2) * SCALE, -1)
    attention_bwd(v, q, k, v, q, lse, shape.causal, SCALE)


def _textbook(shape: Shape) -> None:
    from ..textbook import textbook_bwd, textbook_fwd

    q, k, v = _tensors(shape)
    out, lse = textbook_fwd(q, k, v, shape.causal, SCALE)
    textbook_bwd(v, q, k, v, out, lse, shape.causal, SCALE)


@dataclass(frozen=True)
class Subject:
    """What is surveyed: the kernels that a call launches on these shapes. A program that
    several shapes launch is surveyed once, with all of these launches.

    Attributes:
        call: runs the kernels on a shape.
        shapes: the shapes.
        beyond: a subject whose kernels are left out here, by name: a path of its own appears
            as soon as these shapes take one.
    """

    call: Callable[[Shape], None]
    shapes: tuple[Shape, ...]
    beyond: str | None = None


SUBJECTS: dict[str, Subject] = {
    "forward general": Subject(_forward, (Shape(512, 32, True, 3),)),
    "forward general full": Subject(_forward, (Shape(320, 128, False, 3),)),
    "forward pipeline": Subject(_forward, (Shape(3072, 64, True, 1),), "forward general"),
    "forward pipeline full": Subject(_forward, (Shape(3072, 256, False, 1),), "forward general full"),
    "forward pipeline short": Subject(_forward, (Shape(1024, 128, False, 1),), "forward general full"),
    "backward": Subject(_backward, (Shape(256, 64, True, 3),)),
    "backward full": Subject(_backward, (Shape(256, 128, False, 3),)),
    "backward pipeline": Subject(_backward, (Shape(1024, 64, True, 6),), "backward"),
    "backward pipeline full": Subject(_backward, (Shape(1024, 128, False, 6),), "backward full"),
    "textbook": Subject(_textbook, (Shape(256, 64, True, 3),)),
}


def _captured(call: Callable[[Shape], None], shapes: Iterable[Shape], release: str) -> list[tuple[Launch, Shape]]:
    found: list[tuple[Launch, Shape]] = []
    for shape in shapes:
        captured: list[Launch] = []
        with run("values", hazards=True, cores=CORES, release=release, capture=captured):
            call(shape)
        found += [(launch, shape) for launch in captured]
    return found


def survey_subject(name: str, release: str) -> dict[str, dict[str, Any]]:
    """The surveys of all kernels that a subject launches, by "subject: kernel"."""
    subject = SUBJECTS[name]
    captured = _captured(subject.call, subject.shapes, release)
    if subject.beyond is not None:
        other = SUBJECTS[subject.beyond]
        known = {launch.program.name for launch, _ in _captured(other.call, other.shapes, release)}
        captured = [(launch, shape) for launch, shape in captured if launch.program.name not in known]
    programs: dict[str, list[tuple[Launch, Shape]]] = {}
    for launch, shape in captured:
        programs.setdefault(launch.program.key, []).append((launch, shape))
    found: dict[str, dict[str, Any]] = {}
    for launches in programs.values():
        outcomes = survey([launch for launch, _ in launches])
        key = f"{name}: {launches[0][0].program.name}"
        found[key if key not in found else f"{key} ({len(found) + 1})"] = {
            "shapes": [asdict(shape) for shape in dict.fromkeys(shape for _, shape in launches)],
            "deleted": len(outcomes),
            "noticed": sum(outcome.noticed for outcome in outcomes),
            "proven": sum(outcome.proven for outcome in outcomes),
            "not_reached": sum(outcome.argument == NOT_REACHED for outcome in outcomes),
            "argued": [
                {"core": o.core, "op": o.op, "detail": o.detail, "argument": o.argument, "proven": o.proven}
                for o in outcomes
                if not o.noticed
            ],
        }
    return found


def totals(kernels: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over kernels, the share noticed, and that of the deletions that are not proven redundant."""
    sums: dict[str, Any] = {
        key: sum(row[key] for row in kernels.values()) for key in ("deleted", "noticed", "proven", "not_reached")
    }
    sums["share"] = round(sums["noticed"] / sums["deleted"], 4) if sums["deleted"] else None
    needed = sums["deleted"] - sums["proven"]
    sums["share_of_needed"] = round(sums["noticed"] / needed, 4) if needed else None
    return sums


def result_of(release: str, subjects: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of results/mutation.json."""
    kernels = {key: row for name in SUBJECTS if name in subjects for key, row in subjects[name]["kernels"].items()}
    groups = {
        group: totals({key: row for key, row in kernels.items() if key.startswith(group)})
        for group in ("forward", "backward", "textbook")
    }
    return {"release": release, **totals(kernels), "groups": groups, "kernels": kernels, "subjects": subjects}


def _earlier(path: Path, release: str, mark: str) -> dict[str, dict[str, Any]]:
    """Surveys in the file that these sources made."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    if content.get("release") != release:
        return {}
    subjects: dict[str, dict[str, Any]] = content.get("subjects", {})
    return {name: row for name, row in subjects.items() if name in SUBJECTS and row["sources"] == mark}


def show(result: Mapping[str, Any]) -> None:
    """Print shares and what went unnoticed."""
    for kernel, row in result["kernels"].items():
        print(f"{kernel}: {row['noticed']} of {row['deleted']} deletions noticed, {row['proven']} proven redundant")
        for item in row["argued"]:
            print(f"  not noticed: {item['core']} {item['op']} ({item['detail']}): {item['argument']}")
    for name, row in (*result["groups"].items(), ("all kernels", result)):
        if not row["deleted"]:
            continue
        rest = row["deleted"] - row["noticed"] - row["proven"] - row["not_reached"]
        print(
            f"{name}: {row['noticed']} of {row['deleted']} deletions noticed ({row['share']:.1%}); "
            f"{row['proven']} proven redundant by the log of a run, {row['not_reached']} never reached, "
            f"{rest} without evidence; of those not proven redundant {row['share_of_needed']:.1%} noticed"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Delete each synchronisation of each kernel in turn.")
    parser.add_argument("--release", default="1.1.0", help="bishengir release")
    parser.add_argument("--subject", choices=sorted(SUBJECTS), action="append", help="these only (may repeat)")
    parser.add_argument("--fresh", action="store_true", help="also those that the file has")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, default=Path("results/mutation.json"))
    arguments = parser.parse_args()
    mark = fingerprint(SOURCES, arguments.release)
    earlier = _earlier(arguments.json, arguments.release, mark)
    names = [name for name in arguments.subject or SUBJECTS if arguments.fresh or name not in earlier]
    start = time.monotonic()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(survey_subject, name, arguments.release): name for name in names}
        for done, future in enumerate(as_completed(futures), 1):
            name = futures[future]
            kernels = future.result()
            earlier[name] = {"sources": mark, "kernels": kernels}
            write_json(arguments.json, result_of(arguments.release, earlier))
            sums = totals(kernels)
            found = f"{sums['noticed']} of {sums['deleted']} noticed" if kernels else "no kernel of its own"
            print(f"[{done}/{len(names)}] {name}: {found}; {time.monotonic() - start:.0f} s", flush=True)
    result = result_of(arguments.release, earlier)
    write_json(arguments.json, result)
    show(result)
    print(f"wrote {arguments.json}")
    if result["deleted"] and result["noticed"] < WANTED * result["deleted"]:
        sys.exit(f"less than {WANTED:.0%} of the deletions were noticed")


if __name__ == "__main__":
    main()
