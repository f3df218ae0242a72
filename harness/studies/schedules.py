"""`python -m harness.studies.schedules`: every official configuration under four schedules.

Each distinct configuration runs with hazards checked, on each compiler and under each
schedule: by estimated time, cube first, vector first, and at random with a seed. Results
must not change by a bit between schedules. Cases with fewer heads than cores run whole on
all cores, the others with a few heads on two, so that each takes the kernel that it takes
officially. Writes results/schedules.json after each configuration; those that are in it, of
the same sources, are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..configs import Case, cases, input_rule
from ..results import write_json
from ..virtual_npu.driver import CORES, run
from ..virtual_npu.errors import VirtualNPUError
from ..virtual_npu.toolchain import available_releases
from .sources import KERNELS, MACHINE, fingerprint

SCHEDULES = ("timed", "cube-first", "vector-first", "jitter-1")
FEW_CORES = 2
SOURCES = (*KERNELS, *MACHINE, "harness/configs.toml", "harness/studies/schedules.py")


def size(case: Case) -> tuple[int, int]:
    """Heads and cores of a case's runs here."""
    if case.heads < CORES:
        return case.heads, CORES
    return min(4, max(1, 2048 // case.n)), FEW_CORES


def distinct(suite: str) -> list[Case]:
    """One case for each distinct configuration of a suite, short ones first."""
    found: dict[tuple[int, int, bool, str, tuple[int, int]], Case] = {}
    for case in cases(suite):
        found.setdefault((case.n, case.d, case.causal, case.dtype, size(case)), case)
    return sorted(found.values(), key=lambda case: case.n)


def outputs(case: Case, heads: int) -> bytes:
    """The bytes of a case's results under the current settings."""
    from backward import attention_bwd
    from forward import attention_fwd

    generator = torch.Generator().manual_seed(0)
    rule = input_rule()
    q, k, v, dout = (
        (torch.randn(1, heads, case.n, case.d, generator=generator) * rule.std).to(case.torch_dtype) for _ in range(4)
    )
    if case.suite == "forward":
        results = attention_fwd(q, k, v, case.causal, rule.sm_scale)
    else:
        scores = q.float() @ k.float().transpose(-1, -2) * rule.sm_scale
        if case.causal:
            scores = scores.masked_fill(torch.ones(case.n, case.n, dtype=torch.bool).triu(1), float("-inf"))
        lse = scores.logsumexp(-1)
        out = ((scores - lse[..., None]).exp() @ v.float()).to(case.torch_dtype)
        results = attention_bwd(dout, q, k, v, out, lse, case.causal, rule.sm_scale)
    return b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in results)


def survey(suite: str, name: str, release: str) -> dict[str, Any]:
    """One row: what ran, what went wrong ("" if nothing), notes, and how long it took."""
    (case,) = (case for case in cases(suite) if case.name == name)
    heads, cores = size(case)
    start = time.monotonic()
    row: dict[str, Any] = {
        "suite": suite, "case": name, "release": release, "n": case.n, "d": case.d, "causal": case.causal,
        "dtype": case.dtype, "heads": heads, "cores": cores, "kernels": [], "fault": "",
    }  # fmt: skip
    first: bytes | None = None
    for schedule in SCHEDULES:
        try:
            with run("values", hazards=True, cores=cores, release=release, schedule=schedule) as record:
                data = outputs(case, heads)
        except VirtualNPUError as error:
            row["fault"] = f"{schedule}: {type(error).__name__}: {error}"
            break
        row["kernels"] = [kernel.name for kernel in record.kernels]
        if first is not None and data != first:
            row["fault"] = f"{schedule}: other bits than {SCHEDULES[0]}"
            break
        first = data
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def _earlier(path: Path, mark: str) -> list[dict[str, Any]]:
    """Rows in the file that these sources made."""
    if not path.is_file():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row.get("sources") == mark]


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["suite"], row["case"], row["release"]


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print one line for each configuration and compiler."""
    headings = ("case", "N", "D", "causal", "dtype", "bishengir", "heads x cores", "kernels", "s", "fault")
    table = Table(*headings, box=None)
    for row in rows:
        cells = (row["n"], row["d"], row["causal"], row["dtype"], row["release"], f"{row['heads']} x {row['cores']}")
        kernels = ", ".join(row["kernels"])
        name = f"{row['suite']} {row['case']}"
        table.add_row(name, *map(str, cells), kernels, f"{row['seconds']:.0f}", row["fault"] or "none")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Official configurations under four schedules, hazards checked.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--most", type=int, default=8192, help="longest N")
    parser.add_argument("--fresh", action="store_true", help="also those that the file has")
    parser.add_argument("--json", type=Path, default=Path("results/schedules.json"))
    arguments = parser.parse_args()
    mark = fingerprint(SOURCES)
    work = [
        (suite, case.name, release)
        for suite in ("forward", "backward")
        for case in distinct(suite)
        if case.n <= arguments.most
        for release in available_releases()
    ]
    rows = [] if arguments.fresh else [row for row in _earlier(arguments.json, mark) if _key(row) in work]
    left = [item for item in work if item not in {_key(row) for row in rows}]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = [pool.submit(survey, *item) for item in left]
        for done, future in enumerate(as_completed(futures), 1):
            row = {**future.result(), "sources": mark}
            rows = sorted([*rows, row], key=lambda row: work.index(_key(row)))
            write_json(arguments.json, {"schedules": SCHEDULES, "configurations": len(work), "rows": rows})
            found = row["fault"] or "no hazard"
            print(f"[{done}/{len(left)}] {' '.join(_key(row))}: {found}; {row['seconds']:.0f} s", flush=True)
    write_json(arguments.json, {"schedules": SCHEDULES, "configurations": len(work), "rows": rows})
    show(rows, Console(width=200))
    faults = sum(bool(row["fault"]) for row in rows)
    print(f"{len(rows)} configurations and compilers times {len(SCHEDULES)} schedules: {faults} with a fault")
    print(f"wrote {arguments.json}")
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
