"""Does `make test-gpu` say what is missing, where there is no GPU?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import fake_nvidia_smi

ROOT = Path(__file__).parents[2]
RUN_S_MAX = 60.0


def test_machine_without_a_gpu_is_told_in_one_line_and_is_no_failure(tmp_path: Path) -> None:
    fake_nvidia_smi.install(tmp_path, fake_nvidia_smi.NO_DEVICES)
    env = {name: value for name, value in os.environ.items() if name != "ORCH_GPU_TESTS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=ROOT, env={**env, "PATH": f"{tmp_path}:{env['PATH']}"},
        capture_output=True, text=True, check=False, timeout=RUN_S_MAX,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("make test-gpu: nothing to try here: ") and "No devices were found" in line
