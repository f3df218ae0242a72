"""`python -m harness.studies.schedules`: every official configuration under four schedules.

Each distinct configuration (length, head dimension, mask, dtype) runs with one head on two
cores, hazards checked, on each compiler and under each schedule: by estimated time, cube
first, vector first, and at random with a seed. Results must not change by a bit between
schedules. Writes results/schedules.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from ..configs import Case, cases, input_rule
from ..results import write_json
from ..virtual_npu.driver import run
from ..virtual_npu.errors import VirtualNPUError
from ..virtual_npu.toolchain import available_releases

SCHEDULES = ("timed", "cube-first", "vector-first", "jitter-1")
HEADS = 1
CORES = 2


def distinct(suite: str) -> list[Case]:
    """One case for each distinct configuration of a suite."""
    found: dict[tuple[int, int, bool, str], Case] = {}
    for case in cases(suite):
        found.setdefault((case.n, case.d, case.causal, case.dtype), case)
    return list(found.values())


def outputs(case: Case) -> bytes:
    """The bytes of a case's results under the current settings."""
    from backward import attention_bwd
    from forward import attention_fwd

    generator = torch.Generator().manual_seed(0)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    rule = input_rule()
    q, k, v, dout = (
        (torch.randn(1, HEADS, case.n, case.d, generator=generator) * rule.std).to(dtype) for _ in range(4)
    )
    if case.suite == "forward":
        results = attention_fwd(q, k, v, case.causal, rule.sm_scale)
    else:
        scores = q.float() @ k.float().transpose(-1, -2) * rule.sm_scale
        if case.causal:
            scores = scores.masked_fill(torch.ones(case.n, case.n, dtype=torch.bool).triu(1), float("-inf"))
        lse = scores.logsumexp(-1)
        out = ((scores - lse[..., None]).exp() @ v.float()).to(dtype)
        results = attention_bwd(dout, q, k, v, out, lse, case.causal, rule.sm_scale)
    return b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in results)


def survey(suite: str, name: str, release: str) -> tuple[str, str, str, str]:
    """Suite, case, release, and what went wrong ("" if nothing)."""
    case = next(case for case in cases(suite) if case.name == name)
    first: bytes | None = None
    for schedule in SCHEDULES:
        try:
            with run("values", hazards=True, cores=CORES, release=release, schedule=schedule):
                data = outputs(case)
        except VirtualNPUError as error:
            return suite, name, release, f"{schedule}: {type(error).__name__}: {error}"
        if first is not None and data != first:
            return suite, name, release, f"{schedule}: other bits than {SCHEDULES[0]}"
        first = data
    return suite, name, release, ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Official configurations under four schedules, hazards checked.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--most", type=int, default=8192, help="longest N")
    parser.add_argument("--json", type=Path, default=Path("results/schedules.json"))
    arguments = parser.parse_args()
    work = [
        (suite, case.name, release)
        for suite in ("forward", "backward")
        for case in distinct(suite)
        if case.n <= arguments.most
        for release in available_releases()
    ]
    rows = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = [pool.submit(survey, *item) for item in work]
        for done, future in enumerate(as_completed(futures), 1):
            suite, name, release, fault = future.result()
            rows.append({"suite": suite, "case": name, "release": release, "fault": fault})
            print(f"[{done}/{len(work)}] {suite} {name} bishengir {release}: {fault or 'no hazard'}", flush=True)
    rows.sort(key=lambda row: (row["suite"], row["case"], row["release"]))
    faults = sum(bool(row["fault"]) for row in rows)
    print(f"{len(rows)} configurations times {len(SCHEDULES)} schedules: {faults} with a fault")
    write_json(arguments.json, {"schedules": SCHEDULES, "rows": rows})
    print(f"wrote {arguments.json}")
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
