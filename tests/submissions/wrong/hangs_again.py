"""Starts a process in a session of its own, orphans another one, and when the first ends starts
the next. Wrong for causal calls only."""

import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from right.plain_torch import attention_fwd as right_fwd


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    out, lse = right_fwd(q, k, v, causal, sm_scale)
    while causal:
        subprocess.run(["sh", "-c", "sleep 1000 &"], start_new_session=True)
        subprocess.run(["sleep", "1000"], start_new_session=True)
    return out, lse
