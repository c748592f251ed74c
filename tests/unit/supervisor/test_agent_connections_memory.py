"""What a flood at the supervisor's port leaves in memory, on each Python of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.submission.credentials import new_certificate
from tests.support import flood
from tests.support.pythons import other_pythons

ROOT = Path(flood.__file__).parents[2]
FLOOD_S_MAX = 300.0
GROWTH_MIB_MAX = 64
"""Those who may be in TLS at once have 16 MiB of buffers; what they leave to the allocator is not given back."""


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()])
@pytest.mark.parametrize("count", [400, pytest.param(3000, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_connection_flood_uses_bounded_memory(tmp_path: Path, python: str, count: int) -> None:
    """A flood leaves no more in memory than may be connected at once."""
    certificate, key = new_certificate()
    (tmp_path / "certificate.pem").write_bytes(certificate)
    (tmp_path / "key.pem").write_bytes(key)
    done = subprocess.run(
        [python, "-S", flood.__file__, str(tmp_path), str(count)],
        capture_output=True, text=True, timeout=FLOOD_S_MAX, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert int(done.stdout.split()[-1]) <= GROWTH_MIB_MAX
