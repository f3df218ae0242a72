"""`python -m harness.studies.accuracy`: errors against fp64 over the scale of the inputs.

For both dtypes, three head dimensions, both masks and four standard deviations of q, k and
v, the relative L2 error of the output and of each gradient against fp64: of this project's
kernels, of the textbook kernels and of plain PyTorch in the same precision. For the smallest
deviation also with dout times 2^-10 and 2^10, as a loss scaler makes it. One head at N = 1024,
on so few cores that the pipelines run. Writes results/accuracy.json; rows whose sources have
not changed are kept.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from ..configs import DTYPES, input_rule
from ..reference import reference_bwd, reference_fwd, same_precision_bwd, same_precision_fwd
from ..virtual_npu.driver import run
from ..virtual_npu.errors import VirtualNPUError
from .ablation import worst_error
from .rows import REPOSITORY, Kept, digest, progress, sources

RESULTS = REPOSITORY / "results" / "accuracy.json"
LENGTHS = {"forward": 1024, "backward": 1024}
CORES = {"forward": 2, "backward": 1}
STDS = (0.5, 1.0, 5.0, 20.0)
DOUT_EXPONENTS = (-10, 0, 10)  # of two: factors on dout, beside 0 for the smallest deviation only
HEAD_DIMS = (64, 128, 256)
OUTPUTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Point:
    """One configuration: suite, dtype, head dimension, mask, standard deviation of q, k and v, and
    the power of two that dout is multiplied by."""

    suite: str
    dtype: str
    d: int
    causal: bool
    std: float
    exponent: int = 0

    @property
    def key(self) -> str:
        """A unique name."""
        return " ".join(str(value) for value in astuple(self))


def points() -> list[Point]:
    """All configurations; those of one kernel stand together, so that few processes compile it."""
    return [
        Point(suite, dtype, d, causal, std, exponent)
        for suite, dtype, d, causal, std in itertools.product(LENGTHS, DTYPES, HEAD_DIMS, (False, True), STDS)
        for exponent in DOUT_EXPONENTS
        if exponent == 0 or (suite == "backward" and std == STDS[0])
    ]


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float | None:
    """Relative L2 error; None when it is not finite."""
    error = worst_error([actual], [exact])
    return float(f"{error:.4g}") if math.isfinite(error) else None


def errors(point: Point) -> dict[str, Any]:
    """Relative L2 errors of a configuration: by output, of "ours", "textbook" and "torch"."""
    from backward import attention_bwd
    from forward import attention_fwd

    from ..textbook import textbook_bwd, textbook_fwd

    generator = torch.Generator().manual_seed(0)
    rule, dtype = input_rule(), DTYPES[point.dtype]
    shape = (1, 1, LENGTHS[point.suite], point.d)
    q, k, v = (torch.empty(shape).normal_(0, point.std, generator=generator).to(dtype) for _ in range(3))
    dout_std = rule.dout_std * 2.0**point.exponent
    dout = torch.empty(shape).normal_(0, dout_std, generator=generator).to(dtype)
    out, lse = reference_fwd(q, k, v, point.causal, rule.sm_scale)
    found: dict[str, tuple[torch.Tensor, ...] | str] = {}
    exact: tuple[torch.Tensor, ...]
    if point.suite == "forward":
        exact = (out,)
        calls = {
            "ours": lambda: attention_fwd(q, k, v, point.causal, rule.sm_scale)[:1],
            "textbook": lambda: textbook_fwd(q, k, v, point.causal, rule.sm_scale)[:1],
        }
        found["torch"] = (same_precision_fwd(q, k, v, point.causal, rule.sm_scale),)
    else:
        given = (dout, q, k, v, out.to(dtype), lse.float(), point.causal, rule.sm_scale)
        exact = reference_bwd(dout, q, k, v, point.causal, rule.sm_scale)
        calls = {"ours": lambda: attention_bwd(*given), "textbook": lambda: textbook_bwd(*given)}
        found["torch"] = same_precision_bwd(dout, q, k, v, point.causal, rule.sm_scale)
    for name, call in calls.items():
        try:
            with run("values", cores=CORES[point.suite]):
                found[name] = call()
        except VirtualNPUError as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return {
        output: {
            name: values if isinstance(values, str) else relative(values[index], exact[index])
            for name, values in sorted(found.items())
        }
        for index, output in enumerate(OUTPUTS[point.suite])
    }


def wanted() -> dict[str, str]:
    """Key to digest of every row of results/accuracy.json."""
    model = {
        suite: sources(f"{suite}.py", "harness/textbook.py", "harness/reference.py", "harness/studies/accuracy.py")
        for suite in LENGTHS
    }
    return {point.key: digest(model[point.suite], point) for point in points()}


def do(point: Point) -> dict[str, Any]:
    """The row of a configuration."""
    torch.set_num_threads(1)
    return {**vars(point), "n": LENGTHS[point.suite], "errors": errors(point)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors against fp64 over the scale of the inputs.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", action="append", default=[], help="keys with this in them (may repeat)")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kept = Kept(arguments.json, wanted())
    by_key = {point.key: point for point in points()}
    missing = [key for key in kept.missing() if not arguments.only or any(word in key for word in arguments.only)]
    print(f"{len(kept.rows)} rows kept, {len(missing)} to make", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(do, by_key[key]): key for key in missing}
        for done, future in enumerate(as_completed(futures), 1):
            key, row = futures[future], future.result()
            kept.add(key, row)
            told = "; ".join(
                f"{output}: " + ", ".join(f"{name} {value}" for name, value in values.items())
                for output, values in row["errors"].items()
            )
            progress(done, len(missing), f"{key}: {told}")
    kept.write()
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
