"""Versions of Python that this machine has, for what must run on each of them."""

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
