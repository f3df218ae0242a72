"""What an evaluation gives: a status, errors, times."""

from __future__ import annotations

import enum
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .configs import Case


class Status(enum.Enum):
    """Outcome of one case; of several faults the first in this order is reported."""

    PASSED = "passed"
    REFUSED = "refused"
    WRONG_SHAPE = "wrong shape"
    WRONG_DTYPE = "wrong dtype"
    NON_FINITE = "non-finite"
    NUMERICAL = "numerical"
    COMPILE_ERROR = "compile error"
    HAZARD = "hazard"
    RUNTIME_ERROR = "runtime error"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class CaseResult:
    """One evaluated case.

    Attributes:
        case: the configuration.
        status: outcome; only a passed case has a time.
        message: what is wrong; for a passed case empty, or notes: lost time, a missing comparison time.
        heads_checked: how many of case.heads had their values compared.
        ms: milliseconds of the submission at the full official shape, or None.
        spread: of measured times, distance between the quartiles over the median; else None.
        baseline: what baseline_ms is, in words; "" when there is none.
        baseline_ms, textbook_ms: milliseconds, or None.
        cube_utilisation: ideal cube time over all time, 0 to 1, or None.
        scratch_bytes: global memory of the kernels beside inputs and outputs, as the
            submission's `scratch_bytes` tells it, or None.
        max_abs_error, rms_error: over all outputs but lse, against fp64; None when not finite
            or not computed.
        vs_torch: largest error over that of a same-precision PyTorch run, or None.
        seconds: wall time that the evaluation took.
    """

    case: Case
    status: Status
    message: str = ""
    heads_checked: int = 0
    ms: float | None = None
    spread: float | None = None
    baseline: str = ""
    baseline_ms: float | None = None
    textbook_ms: float | None = None
    cube_utilisation: float | None = None
    scratch_bytes: int | None = None
    max_abs_error: float | None = None
    rms_error: float | None = None
    vs_torch: float | None = None
    seconds: float = 0.0

    @property
    def speedup(self) -> float | None:
        """Baseline over own time; None without either."""
        if self.status is not Status.PASSED or not self.ms or not self.baseline_ms:
            return None
        return self.baseline_ms / self.ms


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that the file is always whole, also when interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
