"""`python -m harness.studies.surveys`: the mutation test of the shipped kernels.

For the forward and the backward (both paths, the pipelines with the settings of the official
cases) and the textbook kernels, on small shapes in which each program steps over several items,
every synchronisation of each compiled program is deleted in turn. Writes results/mutation.json:
for each kernel how many were deleted, how many noticed, and each that was not with the argument
why it is redundant and the place in the compiler that such ones come from. Two shares are stated:
of all deletions, and of those that the log of a run does not prove redundant; no check can notice
the others, so where they are many, the first share has a bound, which is printed. The file is
written after each subject; subjects that are in it, of the same sources, are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..results import write_json
from ..virtual_npu.driver import run
from ..virtual_npu.launch import Launch
from ..virtual_npu.mutation import NOT_REACHED, Outcome, survey
from ..virtual_npu.redundancy import REASONS
from .sources import MACHINE, fingerprint

SCALE = 0.5
CORES = 2
WANTED = 0.97
# A subject's result belongs to its own kernels: its name begins with one of these.
KERNELS = {"forward": "forward.py", "backward": "backward.py", "textbook": "harness/textbook.py"}


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
        kernels: a part of the names of those that are meant; a shape that takes others (an older
            or newer compiler, other settings) leaves the subject empty.
        cores: of the virtual NPU; each program of the grid must step over several heads or tiles.
        parts: of its mutants, for processes to share.
    """

    call: Callable[[Shape], None]
    shapes: tuple[Shape, ...]
    kernels: str = ""
    cores: int = CORES
    parts: int = 1


def _pipeline(call: Callable[[Shape], None], parts: int, *shapes: Shape) -> Subject:
    """One core steps over all items: half the work of two cores, the same hand-overs."""
    return Subject(call, shapes, "pipeline", 1, parts)


# With the settings of the official cases, on as few heads and keys as give each program several
# items (two heads, or one long one). P6's settings are those of any number of groups above two.
SUBJECTS: dict[str, Subject] = {
    "forward general": Subject(_forward, (Shape(512, 32, True, 3),), "general"),
    "forward general full": Subject(_forward, (Shape(320, 128, False, 3),), "general"),
    "forward pipeline P1": _pipeline(_forward, 2, Shape(1024, 128, True, 2)),
    "forward pipeline P2": _pipeline(_forward, 2, Shape(1024, 256, True, 2)),
    "forward pipeline P3": _pipeline(_forward, 2, Shape(2048, 128, True, 1)),
    "forward pipeline P4": _pipeline(_forward, 2, Shape(2048, 256, False, 1)),
    "forward pipeline P5": _pipeline(_forward, 4, Shape(4096, 128, False, 1)),
    "forward pipeline P6": _pipeline(_forward, 4, Shape(6144, 64, False, 1)),
    "forward pipeline F12": _pipeline(_forward, 1, Shape(1024, 64, False, 2)),
    "forward pipeline F13": _pipeline(_forward, 1, Shape(1024, 64, True, 2)),
    "backward general": Subject(_backward, (Shape(256, 64, True, 3),)),
    "backward general full": Subject(_backward, (Shape(256, 128, False, 3),)),
    "backward pipeline C1": _pipeline(_backward, 8, Shape(1024, 64, False, 2)),
    "backward pipeline C2": _pipeline(_backward, 8, Shape(1024, 128, False, 2)),
    "backward pipeline C3": _pipeline(_backward, 8, Shape(1024, 256, False, 2)),
    "backward pipeline C4": _pipeline(_backward, 8, Shape(1024, 64, True, 2)),
    "backward pipeline C5": _pipeline(_backward, 8, Shape(1024, 128, True, 2)),
    "backward pipeline C6": _pipeline(_backward, 8, Shape(1024, 256, True, 2)),
    "textbook": Subject(_textbook, (Shape(256, 64, True, 3),)),
    "textbook full": Subject(_textbook, (Shape(256, 128, False, 3),)),
    "textbook wide": Subject(_textbook, (Shape(256, 256, False, 3),)),
    "textbook wide causal": Subject(_textbook, (Shape(256, 256, True, 3),)),
}


def _captured(subject: Subject, release: str) -> list[tuple[Launch, Shape]]:
    """The launches of a subject's kernels, with their shapes."""
    found: list[tuple[Launch, Shape]] = []
    for shape in subject.shapes:
        captured: list[Launch] = []
        with run("values", hazards=True, cores=subject.cores, release=release, capture=captured):
            subject.call(shape)
        found += [(launch, shape) for launch in captured if subject.kernels in launch.program.name]
    return found


def survey_part(name: str, release: str, part: int) -> dict[str, dict[str, Any]]:
    """A part of the mutants of all kernels that a subject launches, by "subject: kernel"."""
    subject = SUBJECTS[name]
    programs: dict[str, list[tuple[Launch, Shape]]] = {}
    for launch, shape in _captured(subject, release):
        programs.setdefault(launch.program.key, []).append((launch, shape))
    found: dict[str, dict[str, Any]] = {}
    for launches in programs.values():
        outcomes = survey([launch for launch, _ in launches], part=part, of=subject.parts)
        key = f"{name}: {launches[0][0].program.name}"
        found[key if key not in found else f"{key} ({len(found) + 1})"] = {
            "shapes": [asdict(shape) for shape in dict.fromkeys(shape for _, shape in launches)],
            "outcomes": outcomes,
        }
    return found


def joined(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The rows of a subject's kernels from its parts."""
    shapes: dict[str, Any] = {}
    outcomes: dict[str, list[Outcome]] = {}
    for part in parts:
        for key, row in part.items():
            shapes[key] = row["shapes"]
            outcomes.setdefault(key, []).extend(row["outcomes"])
    return {
        key: _row(shapes[key], sorted(outcomes[key], key=lambda outcome: outcome.index)) for key in sorted(outcomes)
    }


def _row(shapes: Any, outcomes: list[Outcome]) -> dict[str, Any]:
    unnoticed = [outcome for outcome in outcomes if not outcome.noticed]
    return {
        "shapes": shapes,
        "deleted": len(outcomes),
        "noticed": len(outcomes) - len(unnoticed),
        "proven": sum(outcome.proven for outcome in unnoticed),
        "not_reached": sum(outcome.argument == NOT_REACHED for outcome in unnoticed),
        "reasons": dict(Counter(outcome.reason for outcome in unnoticed if outcome.proven)),
        "argued": [
            {
                "core": o.core,
                "op": o.op,
                "detail": o.detail,
                "argument": o.argument,
                "reason": o.reason,
                "proven": o.proven,
            }
            for o in unnoticed
        ],
    }


def totals(kernels: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over kernels, the share noticed, and that of the deletions that are not proven redundant."""
    sums: dict[str, Any] = {
        key: sum(row[key] for row in kernels.values()) for key in ("deleted", "noticed", "proven", "not_reached")
    }
    sums["share"] = round(sums["noticed"] / sums["deleted"], 4) if sums["deleted"] else None
    sums["reasons"] = dict(sum((Counter(row["reasons"]) for row in kernels.values()), Counter()))
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
    head = {"release": release, **totals(kernels), "sources_of_redundancy": REASONS}
    return {**head, "groups": groups, "kernels": kernels, "subjects": subjects}


def mark(name: str, release: str) -> str:
    """Of the sources that a subject's result hangs on."""
    return fingerprint((KERNELS[name.split()[0]], *MACHINE, "harness/studies/surveys.py"), release)


def _earlier(path: Path, release: str) -> dict[str, dict[str, Any]]:
    """Surveys in the file that these sources made."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    if content.get("release") != release:
        return {}
    subjects: dict[str, dict[str, Any]] = content.get("subjects", {})
    return {name: row for name, row in subjects.items() if name in SUBJECTS and row["sources"] == mark(name, release)}


def shortfall(row: Mapping[str, Any], wanted: float = WANTED) -> str:
    """What keeps the share of all deletions below the one wanted: "" if nothing does."""
    lacking = math.ceil(wanted * row["deleted"]) - row["noticed"]
    if lacking <= 0:
        return ""
    most = (row["deleted"] - row["proven"]) / row["deleted"]
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(row["reasons"].items(), key=lambda x: -x[1]))
    return (
        f"{lacking} short of {wanted:.0%} of all; at most {most:.1%} can be noticed, since the compiler makes "
        f"{row['proven']} barriers that order nothing ({reasons})"
    )


def verdict(result: Mapping[str, Any]) -> str:
    """Why the survey failed: "" where every deletion is noticed or proven redundant.

    A redundant barrier is what mutation testing calls an equivalent mutant: it counts neither
    for nor against the check, so the plain share does not decide (`shortfall` tells it).
    """
    rest = result["deleted"] - result["noticed"] - result["proven"]
    return f"{rest} deletions are neither noticed nor proven redundant" if rest else ""


def show(result: Mapping[str, Any], *, listed: bool) -> None:
    """Print shares, and what went unnoticed (`listed`: each, else only what has no proof)."""
    for kernel, row in result["kernels"].items():
        print(f"{kernel}: {row['noticed']} of {row['deleted']} deletions noticed, {row['proven']} proven redundant")
        for item in row["argued"]:
            if listed or not item["proven"]:
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
        if text := shortfall(row):
            print(f"  {text}")
    for reason in result["reasons"]:
        print(f"{reason}: {REASONS[reason]}")


def _parts(name: str) -> int:
    return SUBJECTS[name].parts


def main() -> None:
    parser = argparse.ArgumentParser(description="Delete each synchronisation of each kernel in turn.")
    parser.add_argument("--release", default="1.1.0", help="bishengir release")
    parser.add_argument("--subject", choices=sorted(SUBJECTS), action="append", help="these only (may repeat)")
    parser.add_argument("--fresh", action="store_true", help="also those that the file has")
    parser.add_argument("--list", action="store_true", help="print each unnoticed deletion with its argument")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, default=Path("results/mutation.json"))
    arguments = parser.parse_args()
    marks = {name: mark(name, arguments.release) for name in SUBJECTS}  # of what is surveyed, should a file be edited
    earlier = _earlier(arguments.json, arguments.release)
    names = [name for name in arguments.subject or SUBJECTS if arguments.fresh or name not in earlier]
    start = time.monotonic()
    parts: dict[str, list[dict[str, dict[str, Any]]]] = {name: [] for name in names}
    # The longest first, so that no process is left alone at the end.
    work = [(name, part) for name in sorted(names, key=lambda n: -SUBJECTS[n].parts) for part in range(_parts(name))]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(survey_part, name, arguments.release, part): name for name, part in work}
        for done, future in enumerate(as_completed(futures), 1):
            name = futures[future]
            parts[name].append(future.result())
            if len(parts[name]) < _parts(name):
                continue
            kernels = joined(parts[name])
            earlier[name] = {"sources": marks[name], "kernels": kernels}
            write_json(arguments.json, result_of(arguments.release, earlier))
            sums = totals(kernels)
            found = f"{sums['noticed']} of {sums['deleted']} noticed" if kernels else "no kernel of its own"
            print(f"[{done}/{len(work)}] {name}: {found}; {time.monotonic() - start:.0f} s", flush=True)
    result = result_of(arguments.release, earlier)
    write_json(arguments.json, result)
    show(result, listed=arguments.list)
    print(f"wrote {arguments.json}")
    if text := verdict(result):
        sys.exit(text)


if __name__ == "__main__":
    main()
