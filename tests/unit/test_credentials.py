"""A job's private files: readable by their owner alone, and each secret in one of them only."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from orchestrator import credentials
from tests.support import jobs


def test_private_files_are_private_and_secrets_are_kept_apart_from_the_environment(tmp_path: Path) -> None:
    environ = {"HF_TOKEN": "hf_0123456789abcdef", "HF_HOME": "/data/hf", "RANK": "7"}
    folder = tmp_path / "secrets"
    credentials.fill(folder, jobs.plan(secrets=["HF_TOKEN"]), environ)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert json.loads((folder / "secrets.json").read_text()) == {"HF_TOKEN": environ["HF_TOKEN"]}
    assert json.loads((folder / "environment.json").read_text()) == {"HF_HOME": "/data/hf"}
