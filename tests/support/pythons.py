"""Interpreters of this machine: those of other versions, and whether one has this tree's orch installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

START_S_MAX = 60.0
MINORS = range(10, 16)
"""Of Python 3, the versions that are looked for on this machine."""


def other_pythons() -> list[str]:
    """Return interpreters of other versions than this one that are here and do run."""
    found = []
    for minor in MINORS:
        name = f"python3.{minor}"
        versions = Path("~/.pyenv/versions").expanduser().glob(f"3.{minor}.*/bin/{name}")
        places = [shutil.which(name), *(str(path) for path in sorted(versions))]
        running = [place for place in places if place and minor != sys.version_info.minor and _runs(place)]
        found += running[:1]
    return found


def wrong_install(python: str, repository: Path) -> str | None:
    """Return what is wrong with the `orchestrator` that a Python has installed, None when it is the repository's.

    Hosts of the cluster in a box run what is installed; pytest itself imports what lies in its folder.
    """
    code = "import orchestrator; print(orchestrator.__file__)"
    ran = subprocess.run(
        [python, "-E", "-c", code], cwd="/", capture_output=True, text=True, timeout=START_S_MAX, check=False
    )
    found = Path(ran.stdout.strip() or "/nothing").resolve().parent
    if found == (repository / "orchestrator").resolve():
        return None
    what = f"the orchestrator of {found.parent}" if ran.returncode == 0 else "no orchestrator"
    fix = f"{python} -m pip install -e {repository}"
    return f"{python} has {what} installed, so these tests would not test {repository}: {fix}"


def _runs(python: str) -> bool:
    try:
        return (
            subprocess.run(
                [python, "-I", "-S", "-c", ""], capture_output=True, timeout=START_S_MAX
            ).returncode
            == 0
        )
    except OSError:
        return False
