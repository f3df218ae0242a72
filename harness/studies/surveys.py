"""`python -m harness.studies.surveys`: the mutation test of the shipped kernels.

For the forward (both paths), the backward and the textbook kernels, on a small shape in
which each program steps over several heads, every synchronisation of the compiled program
is deleted in turn. Writes results/mutation.json: for each kernel how many were deleted, how
many noticed, and each that was not with the argument why it is redundant.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from ..results import write_json
from ..virtual_npu.driver import run
from ..virtual_npu.mutation import NOT_REACHED, survey

SCALE = 0.5
CORES = 2


def _tensors(n: int, d: int, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((torch.randn(1, heads, n, d, generator=generator) * 0.5).half() for _ in range(3))
    return q, k, v


def _forward(n: int, d: int, causal: bool, heads: int) -> Callable[[], object]:
    from forward import attention_fwd

    q, k, v = _tensors(n, d, heads)
    return lambda: attention_fwd(q, k, v, causal, SCALE)


def _backward(n: int, d: int, causal: bool, heads: int) -> Callable[[], object]:
    from backward import attention_bwd

    q, k, v = _tensors(n, d, heads)
    lse = torch.logsumexp(q.float() @ k.float().transpose(-1, -2) * SCALE, -1)
    return lambda: attention_bwd(v, q, k, v, q, lse, causal, SCALE)


def _textbook(n: int, d: int, causal: bool, heads: int) -> Callable[[], object]:
    from ..textbook import textbook_bwd, textbook_fwd

    q, k, v = _tensors(n, d, heads)

    def call() -> None:
        out, lse = textbook_fwd(q, k, v, causal, SCALE)
        textbook_bwd(v, q, k, v, out, lse, causal, SCALE)

    return call


# What is surveyed: a name, the maker of its call, its shape (n, d, causal, heads).
SUBJECTS: dict[str, tuple[Callable[..., Callable[[], object]], tuple[int, int, bool, int]]] = {
    "forward general": (_forward, (512, 32, True, 3)),
    "forward general full": (_forward, (320, 128, False, 3)),
    "forward pipeline": (_forward, (1536, 64, True, 1)),
    "forward pipeline full": (_forward, (3072, 256, False, 1)),
    "backward": (_backward, (256, 64, True, 3)),
    "backward full": (_backward, (256, 128, False, 3)),
    "textbook": (_textbook, (256, 64, True, 3)),
}


def survey_subject(name: str, release: str) -> dict[str, dict[str, Any]]:
    """The surveys of all kernels that a subject launches, by "subject: kernel"."""
    make, shape = SUBJECTS[name]
    captured: list[Any] = []
    with run("values", hazards=True, cores=CORES, release=release, capture=captured):
        make(*shape)()
    found = {}
    for launch in captured:
        outcomes = survey(launch)
        found[f"{name}: {launch.program.name}"] = {
            "shape": dict(zip(("n", "d", "causal", "heads"), shape, strict=True)),
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Delete each synchronisation of each kernel in turn.")
    parser.add_argument("--release", default="1.1.0", help="bishengir release")
    parser.add_argument("--only", choices=sorted(SUBJECTS), action="append", help="these subjects (may repeat)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, default=Path("results/mutation.json"))
    arguments = parser.parse_args()
    names = arguments.only or list(SUBJECTS)
    kernels: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(survey_subject, name, arguments.release): name for name in names}
        for future in as_completed(futures):
            for kernel, row in future.result().items():
                kernels[kernel] = row
                print(f"{kernel}: {row['noticed']} of {row['deleted']} deletions noticed", flush=True)
    deleted = sum(row["deleted"] for row in kernels.values())
    noticed = sum(row["noticed"] for row in kernels.values())
    print(f"all kernels: {noticed} of {deleted} deletions noticed ({noticed / deleted:.1%})")
    proven, unreached = (sum(row[key] for row in kernels.values()) for key in ("proven", "not_reached"))
    rest = deleted - noticed - proven - unreached
    print(f"not noticed: {proven} redundant by the log of the run, {unreached} never reached, {rest} without evidence")
    for kernel, row in kernels.items():
        for item in row["argued"]:
            print(f"  not noticed, {kernel}: {item['core']} {item['op']} ({item['detail']}): {item['argument']}")
    result = {"release": arguments.release, "deleted": deleted, "noticed": noticed, "kernels": kernels}
    write_json(arguments.json, result)
    print(f"wrote {arguments.json}")
    if noticed < 0.97 * deleted:
        sys.exit("less than 97 % of the deletions were noticed")


if __name__ == "__main__":
    main()
