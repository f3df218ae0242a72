"""`python -m harness.studies.roofline`: how far each case is from each limit of the chip.

For the official performance cases in fp16, at full size, two kinds of time in ms:

* floors, below which no exact kernel can be: the useful products at the cube's peak (half of
  them when causal), the fewest fp32 passes over the scores on the vector cores (forward:
  maximum, subtraction, exp, sum, cast; backward: subtraction, exp, subtraction, product, two
  casts), and the inputs and outputs once through HBM;
* what each pipe of the busiest core needs for this kernel as it is written, if it never
  waited, and the kernel's own traffic at the rate of L2.

The predicted time of the case is at least each of them. Writes results/roofline.json.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from ..configs import Case
from ..virtual_npu.driver import Recording, run
from ..virtual_npu.hardware import default_constants
from .rows import REPOSITORY, Kept, digest, progress, sources
from .sensitivity import timed_cases
from .trace import case_call

RESULTS = REPOSITORY / "results" / "roofline.json"
PIPES = ("aic_mac", "aic_mte1", "aic_mte2", "aic_fixpipe", "aiv_vec", "aiv_mte2", "aiv_mte3")
LANES_FP32 = 64  # of a vector instruction's repeat


def vector_passes(suite: str) -> float:
    """Vector cycles for each 64 scores of the fewest fp32 passes."""
    slope = default_constants()["vector"]["slope_cycles"]
    if suite == "forward":
        return slope["vmax"] + slope["vsub"] + slope["vexp"] + slope["vadd"] + slope["vcast"]
    return 2 * slope["vsub"] + slope["vexp"] + slope["vmul"] + 2 * slope["vcast"]


def compulsory_bytes(case: Case) -> float:
    """Inputs read once and outputs written once; lse is fp32."""
    tensor = case.heads * case.n * case.d * 2.0
    lse = case.heads * case.n * 4.0
    return (4 if case.suite == "forward" else 8) * tensor + lse


def floors(case: Case) -> dict[str, float]:
    """Times in ms below which no exact kernel can be."""
    constants = default_constants()
    chip, clock = constants["chip"], constants["chip"]["clock_hz"]
    scores = case.heads * case.n**2 / (2 if case.causal else 1)
    vector_cores = chip["cores"] * chip["vector_cores"]
    return {
        "cube": case.flops / chip["peak_fp16_flops"] * 1e3,
        "vector": scores / LANES_FP32 * vector_passes(case.suite) / vector_cores / clock * 1e3,
        "HBM": compulsory_bytes(case) / constants["shared"]["hbm_bytes_per_cycle"] / clock * 1e3,
    }


def needs(record: Recording) -> dict[str, float]:
    """What each pipe of the busiest core, and L2, need in ms for the launches as they are."""
    constants = default_constants()
    clock, cores = constants["chip"]["clock_hz"], constants["chip"]["cores"]
    pipes = dict.fromkeys(PIPES, 0.0)
    traffic = 0.0
    for kernel in record.kernels:
        busy = kernel.report["busy"]
        for pipe in PIPES:
            pipes[pipe] += busy.get(pipe if pipe.startswith("aic") else f"{pipe}0", 0.0)
        # A kernel of vector cores only is reported for one of its 40 cores.
        units = cores if any(name.startswith("aic") for name in busy) else cores * constants["chip"]["vector_cores"]
        traffic += (kernel.report["read_bytes"] + kernel.report["write_bytes"]) * min(kernel.grid[0], units)
    found = {pipe: cycles / clock * 1e3 for pipe, cycles in pipes.items()}
    found["L2"] = traffic / constants["shared"]["l2_bytes_per_cycle"] / clock * 1e3
    return found


def measure(case: Case) -> dict[str, Any]:
    """The row of a case."""
    with run("timing") as record:
        case_call(case.suite, case, None)()
    clock = default_constants()["chip"]["clock_hz"]
    return {
        "suite": case.suite,
        "case": case.name,
        "ms": round(record.ms, 4),
        "flops": case.flops,
        "floors_ms": {name: round(ms, 4) for name, ms in floors(case).items()},
        "needs_ms": {name: round(ms, 4) for name, ms in needs(record).items()},
        "issued_mac_ms": round(sum(k.report["mac_cycles"] for k in record.kernels) / clock * 1e3, 4),
        "compulsory_bytes": compulsory_bytes(case),
        "l2_stretch": round(max(k.report["l2_stretch"] for k in record.kernels), 4),
        "kernels": [{"name": k.name, "ms": round(k.ms or 0.0, 4)} for k in record.kernels],
    }


def wanted() -> dict[str, str]:
    """Key to digest of every row of results/roofline.json."""
    made = {
        suite: sources(f"{suite}.py", "harness/studies/roofline.py", "harness/configs.toml")
        for suite in ("forward", "backward")
    }
    return {case.name: digest(made[case.suite], case) for case in timed_cases()}


def do(name: str) -> dict[str, Any]:
    """The row of a case by its name."""
    torch.set_num_threads(1)
    return measure(next(case for case in timed_cases() if case.name == name))


def main() -> None:
    parser = argparse.ArgumentParser(description="Each case beside each limit of the chip.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kept = Kept(arguments.json, wanted())
    missing = kept.missing()
    print(f"{len(kept.rows)} rows kept, {len(missing)} to make", flush=True)
    chip = default_constants()
    head = {
        "peak_flops": chip["chip"]["peak_fp16_flops"],
        "l2_bytes_per_s": chip["shared"]["l2_bytes_per_cycle"] * chip["chip"]["clock_hz"],
        "hbm_bytes_per_s": chip["shared"]["hbm_bytes_per_cycle"] * chip["chip"]["clock_hz"],
    }
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(do, name): name for name in missing}
        for done, future in enumerate(as_completed(futures), 1):
            name, row = futures[future], future.result()
            kept.add(name, row, **head)
            nearest = max(row["needs_ms"], key=row["needs_ms"].__getitem__)
            share = row["needs_ms"][nearest] / row["ms"]
            progress(done, len(missing), f"{name}: {row['ms']:.2f} ms, predicted; {nearest} {share:.0%} of it")
    kept.write(**head)
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
