"""Tests on several versions of Python: `python -m tests.pythons [--ends] [PYTHON...]`, which `make pythons` calls.

Each interpreter that is found, or named, gets a virtual environment of its own (`.venv-3.10`, without torch), and runs the
suite `pythons` of `tests.run` there: the quick tests, and whole jobs with the oldest and newest other Python beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.pythons import MINORS, PYTHONS_ENV, find

ROOT = Path(__file__).parents[1]
INSTALL_S_MAX = 900.0
SUITE_S_MAX = 3600.0
SUPPORTED = [f"3.{minor}" for minor in MINORS]


def main(words: Sequence[str]) -> int:
    """Run the suite on each interpreter, print which were not there, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.pythons")
    parser.add_argument("--ends", action="store_true", help="only the oldest and the newest that are found")
    parser.add_argument("--strict", action="store_true", help="fail when a test is skipped")
    parser.add_argument("pythons", nargs="*", help="interpreters; without any, all that are found")
    asked = parser.parse_args(words)
    found = {_version(python): python for python in asked.pythons} or find()
    if asked.ends:
        found = {version: found[version] for version in (min(found, key=_order), max(found, key=_order))}
    failed = [version for version, python in found.items() if not _run(version, python, asked.strict)]
    print(f"\nPython {', '.join(found)}: {f'failed on {chr(44).join(failed)}' if failed else 'all passed'}")
    if missing := [version for version in SUPPORTED if version not in found]:
        print(f"Not tested: Python {', '.join(missing)}")
    return 1 if failed else 0


def _order(version: str) -> int:
    return int(version.partition(".")[2].rstrip("t"))


def _version(python: str) -> str:
    """Return the version of an interpreter, with a `t` for a free-threaded one."""
    code = "import sys; print('%d.%d%s' % (*sys.version_info[:2], sys.abiflags))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _run(version: str, python: str, strict: bool) -> bool:
    """Run the suite on an interpreter; tell whether all was well."""
    print(f"\n=== Python {version}: {python}", flush=True)
    folder = ROOT / f".venv-{version}"
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S_MAX)
    install = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt", "-e", ".[checks]"]  # fmt: skip
    if subprocess.run(install, cwd=ROOT, timeout=INSTALL_S_MAX, check=False).returncode:
        return False
    others = os.pathsep.join(path for path in (python, os.environ.get(PYTHONS_ENV, "")) if path)
    suite = [str(own), "-m", "tests.run", "pythons", *(["--strict"] if strict else [])]
    done = subprocess.run(suite, cwd=ROOT, env={**os.environ, PYTHONS_ENV: others}, timeout=SUITE_S_MAX, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
