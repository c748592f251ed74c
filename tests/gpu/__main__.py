"""`make test-gpu`: say what is here, run the tests that need it, and say what they found; without a GPU, one line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.gpu import machine

ROOT = Path(__file__).parents[2]
RUN_S_MAX = 900.0
"""Three times what all of them take; each job in them has a limit of its own."""
END_S_MAX = 60.0
"""How long pytest may take to clear up after that."""

OTHERS = (
    "tests/integration/test_flight_nccl.py",
    "tests/integration/test_local_warm.py::test_gpu_contexts_are_created_in_ranks_only",
)
"""Tests that need a GPU and are skipped elsewhere."""


def main() -> int:
    """Return the exit code: that of pytest, and 0 where there is nothing to try."""
    if why := machine.missing():
        print(
            f"make test-gpu: nothing to try here: {why} ({machine.VARIABLE}=cpu tries on CPUs what makes sense there)"
        )
        return 0
    print(f"make test-gpu: on {machine.found()}", flush=True)
    words = ["-q", "-rs", "-p", "no:cacheprovider", "-m", "not soak", "--durations=5", "tests/gpu"]
    words += OTHERS if machine.DEVICE == "cuda" else ()
    process = subprocess.Popen([sys.executable, "-m", "pytest", *words], cwd=ROOT)
    for limit_s, signum in ((RUN_S_MAX, signal.SIGINT), (END_S_MAX, signal.SIGKILL)):
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signum)
    return process.wait(END_S_MAX)


if __name__ == "__main__":
    sys.exit(main())
