"""Is what was submitted recorded, and does no lack of git fail a submit?"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.version import VERSION
from orchestrator.submission import provenance

pytestmark = pytest.mark.slow


def _git(folder: Path, *words: str) -> str:
    env = {
        "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    }  # fmt: skip
    done = subprocess.run(
        ["git", "-C", folder, *words], check=True, capture_output=True, text=True, timeout=30, env=env
    )
    return done.stdout.strip()


def _recorded(tmp_path: Path, workdir: Path) -> tuple[JobDir, dict[str, Any]]:
    job = JobDir(tmp_path / "job")
    job.root.mkdir(exist_ok=True)
    provenance.record(job, workdir)
    known: dict[str, Any] = json.loads(job.provenance.read_text())
    return job, known


def _repo(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.py").write_text("a\n")
    _git(tmp_path, "init", "-q", "work")
    _git(work, "add", ".")
    _git(work, "commit", "-q", "-m", "one")
    return work


def test_a_clean_commit_is_recorded(tmp_path: Path) -> None:
    work = _repo(tmp_path)
    job, known = _recorded(tmp_path, work)
    assert (known["git_commit"], known["git_dirty"]) == (_git(work, "rev-parse", "HEAD"), False)
    assert (known["orch"], known["submitted_from"]) == (VERSION, str(work))
    assert not job.dirty_diff.exists()


def test_uncommitted_changes_are_kept_as_applicable_diff(tmp_path: Path) -> None:
    work = _repo(tmp_path)
    (work / "a.py").write_text("b\n")
    job, known = _recorded(tmp_path, work)
    assert known["git_dirty"] is True
    assert job.dirty_diff.stat().st_mode & 0o777 == 0o600  # a changed file may be private, such as a .env
    _git(work, "checkout", "-q", ".")
    _git(work, "apply", str(job.dirty_diff))
    assert (work / "a.py").read_text() == "b\n"


def test_missing_git_gives_no_commit_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    _, known = _recorded(tmp_path, tmp_path / "plain")
    assert (known["git_commit"], known["git_dirty"]) == (None, None)


def test_repository_without_commit_is_no_error(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q", "new")
    _, known = _recorded(tmp_path, tmp_path / "new")
    assert known["git_commit"] is None


def test_packages_are_asked_only_of_python(tmp_path: Path) -> None:
    """Only a Python is asked for its packages, and a missing one is no error."""
    job = JobDir(tmp_path)
    provenance.list_packages(job, "bash")
    provenance.list_packages(job, "/no/such/python3")
    assert list(tmp_path.iterdir()) == []


def test_packages_of_rank_python_are_listed_with_versions(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    process = provenance.list_packages(job, sys.executable, after_s=0.0)
    assert process is not None and process.wait(60) == 0
    listed = json.loads((tmp_path / "packages.json").read_text())
    assert listed["python"] == sys.version
    assert listed["packages"]["pydantic"] == importlib.metadata.version("pydantic")
