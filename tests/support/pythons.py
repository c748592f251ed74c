"""Interpreters of this machine: those of other versions, and whether one has this tree's orch installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

START_S_MAX = 60.0
MINORS = range(10, 15)
"""Of Python 3, the versions that orch supports."""

PYTHONS_ENV = "ORCH_PYTHONS"
"""Names interpreters beside those that are found, separated by colons."""


def find() -> dict[str, str]:
    """Return the interpreters that are here and do run by their versions, the oldest first."""
    found = {}
    named = [Path(place) for place in os.environ.get(PYTHONS_ENV, "").split(os.pathsep) if place]
    for minor in MINORS:
        name = f"python3.{minor}"
        versions = Path("~/.pyenv/versions").expanduser().glob(f"3.{minor}.*/bin/{name}")
        own = [str(place) for place in named if place.resolve().name == name]
        places = [*own, shutil.which(name), *(str(path) for path in sorted(versions))]
        running = next((place for place in places if place and _runs(place)), None)
        if running is not None:
            found[f"3.{minor}"] = running
    return found


def other_pythons() -> list[str]:
    """Return interpreters of other versions than this one that are here and do run, the oldest first."""
    own = f"3.{sys.version_info.minor}"
    return [python for version, python in find().items() if version != own]


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
        return subprocess.run([python, "-I", "-S", "-c", ""], capture_output=True, timeout=START_S_MAX).returncode == 0
    except OSError:
        return False
