"""A machine whose root is that of another suite of Debian: its programs, this machine's kernel, Python and repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .needs import NAMESPACES
from .verbs import REPOSITORY

SOURCES = ("sources.list.d/debian.sources", "sources.list")
MIRROR = re.compile(r"^(?:URIs:|deb(?: \[.*?\])?) *(https?://\S+)", re.MULTILINE)


def missing() -> str:
    """Return in one line what this machine lacks for a root of another suite; empty for nothing."""
    if shutil.which("debootstrap") is None:
        return "a Slurm of another Debian needs debootstrap: apt install debootstrap"
    return "" if mirror() else "a Slurm of another Debian needs a mirror in /etc/apt, over http"


def mirror() -> str:
    """Return the first mirror that this machine itself takes packages from; empty for none."""
    texts = [path.read_text() for name in SOURCES if (path := Path("/etc/apt", name)).exists()]
    return next((found[1] for text in texts if (found := MIRROR.search(text))), "")


def make_root(suite: str, folder: Path, limit_s: float) -> str:
    """Make the root of a suite in a folder; return in one line why there is none, empty where there is."""
    script = str(Path(__file__).with_name("debianroot.sh"))
    argv = ["unshare", "--mount", script, suite, str(folder), mirror()]  # what it mounts goes with it
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"a Slurm of Debian {suite} needs its packages, and they did not come within {limit_s:.0f} s"
    why = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.startswith("E: ")]
    return (
        f"a Slurm of Debian {suite} needs its packages: {why[-1] if why else 'no reason given'}"
        if done.returncode
        else ""
    )


def run(root: Path, argv: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository on a machine with this root; whatever it leaves ends with it."""
    paths = dict.fromkeys((str(REPOSITORY), sys.prefix, sys.base_prefix))
    wrapped = [
        "unshare",
        *NAMESPACES,
        str(Path(__file__).with_name("machine.sh")),
        str(root),
        " ".join(paths),
        *argv,
    ]
    return subprocess.run(
        wrapped, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, timeout=limit_s, check=False
    )  # fmt: skip
