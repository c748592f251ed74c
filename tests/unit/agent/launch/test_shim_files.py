"""Functions that bash has in launch scripts: a script that asks where Python or a launcher is gets a path."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.agent.launch import shim_files

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('basename "$(command -v torchrun)"', "torchrun"),
        ('dirname "$(command -v torchrun)"', "{folder}"),
        ('dirname "$(command -v python)"', "{bin}"),
        ("command -v ls | xargs basename", "ls"),
        ("command -v no-such-program || echo none", "none"),
        ("command echo hi", "hi"),
        ("python", "the tool"),
    ],
)
def test_program_location_is_a_path(tmp_path: Path, line: str, said: str) -> None:
    folder, own = tmp_path / "stand-ins", tmp_path / "bin"
    (folder / shim_files.SLURM_FOLDER).mkdir(parents=True)
    shim_files.write_shims(folder, "address", "/hook", tmp_path / "bundle", has_slurm_shims=False)
    own.mkdir()
    (own / "python").write_text('#!/bin/sh\ntest "$PYTHONPATH" = /hook && echo the tool\n')
    (own / "python").chmod(0o755)
    env = {"PATH": f"{folder}:{own}:/usr/bin:/bin", "BASH_ENV": str(folder / shim_files.BASH_FILE)}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == said.format(folder=folder, bin=own)
