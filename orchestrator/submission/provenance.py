"""Provenance of a job: commit, uncommitted changes and versions at submit, written next to the code for later readers.

Listing packages takes a moment of a core, and starting ranks want every core: so a process of its own does it a while
later, with the interpreter that the ranks use.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

from orchestrator.core.jobdir.durable import replace_bytes, replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.version import VERSION

GIT_S_MAX = 10.0
DIFF_BYTES_MAX = 8 << 20

LIST_AFTER_S = 20.0
"""When the packages are listed: after most jobs have made their first step."""

_LIST_PACKAGES = """
import os, sys, time
time.sleep(float(sys.argv[2]))
os.path.isdir(os.path.dirname(sys.argv[1])) or sys.exit()  # the job has been deleted meanwhile
import json
from importlib.metadata import distributions
found = sorted({(d.metadata["Name"], d.version) for d in distributions() if d.metadata["Name"]})
text = json.dumps({"python": sys.version, "executable": sys.executable, "packages": dict(found)}, indent=1)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(text)
os.replace(sys.argv[1] + ".part", sys.argv[1])
"""


def record(job: JobDir, workdir: Path) -> None:
    """Write all but the packages. Never fails a submit."""
    diff = _git(workdir, "diff", "--no-color", "--no-ext-diff", "--binary", "HEAD")
    commit = _git(workdir, "rev-parse", "HEAD")
    facts = {
        "orch": VERSION,
        "git_commit": commit.decode().strip() if commit else None,
        "git_dirty": bool(diff) if commit else None,
        "git_diff_cut": diff is not None and len(diff) > DIFF_BYTES_MAX,
        "submitted_from": str(workdir),
        "host": platform.node(),
        "kernel": platform.release(),
        "orch_python": sys.version.split()[0],
        "packages": "packages.json",
    }
    replace_text(job.provenance, json.dumps(facts, indent=1), durable=False)
    if diff:
        replace_bytes(job.dirty_diff, diff[:DIFF_BYTES_MAX], mode=0o600, durable=False)


def list_packages(job: JobDir, program: str, after_s: float = LIST_AFTER_S) -> subprocess.Popen[bytes] | None:
    """Start the process that writes `packages.json` in `after_s` seconds; None when `program` is not a Python."""
    if "python" not in Path(program).name:
        return None
    try:
        return subprocess.Popen(
            [program, "-c", _LIST_PACKAGES, str(job.root / "packages.json"), str(after_s)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            cwd=job.root,
        )  # fmt: skip
    except OSError:
        return None


def _git(workdir: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(workdir), *words], capture_output=True, timeout=GIT_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
