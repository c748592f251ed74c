"""The tests' power: each broken line of the product must fail the test that is named for it.

The first test here needs no process, so a refactoring carries the list along. The others are for hours when there is
time: `pytest -m soak tests/wiring` breaks a copy of the checkout, line by line, and plays the tests there.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .mutation import Mutation
from .mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
MUTATIONS_MIN = 60
TEST_S_MAX = 300.0
"""How long a test may take in the copy: one that is waiting in vain has limits of its own, up to 90 s each."""

FAILED = 1
"""Pytest's exit code for tests that failed, as against those that could not be collected."""


@functools.cache
def _functions(file: Path) -> frozenset[str]:
    """Return the functions that a file defines at its top."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds))


def test_broken_line_occurs_once_and_names_existing_test() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names)) >= MUTATIONS_MIN
    for mutation in MUTATIONS:
        found = (ROOT / mutation.file).read_text().count(mutation.before)
        assert found == 1, f"{mutation.name}: {mutation.file} has {mutation.before!r} {found} times"
        assert (ROOT / mutation.test_file).is_file(), f"{mutation.name}: there is no {mutation.test_file}"
        assert mutation.test_name in _functions(ROOT / mutation.test_file), f"{mutation.name}: {mutation.killed_by}"


def _copied(to: Path) -> Path:
    """Copy what git holds of the checkout, or would hold, to a folder, and give it an environment that imports from there."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    environment = to / ".venv"
    venv.create(environment, symlinks=True)
    installed = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    Path(own, "copy.pth").write_text(f"{to}\nimport site; site.addsitedir({installed!r})\n")
    return to


def _run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy, so that it, and what it starts, import the product and the tests from there."""
    return subprocess.run(
        [copy / ".venv/bin/python", *words], cwd=copy, capture_output=True, text=True, timeout=TEST_S_MAX, check=False
    )  # fmt: skip


def _play(copy: Path, test: str) -> subprocess.CompletedProcess[str]:
    return _run(copy, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", "--tb=short", test)


@pytest.fixture(scope="module")
def unbroken() -> Iterator[Callable[[str], str]]:
    """Play a test in a copy that is as the checkout is, once, and return what pytest says of it; fail if it fails there."""
    with tempfile.TemporaryDirectory(prefix="orch-unbroken-") as folder:
        copy = _copied(Path(folder))
        imported = _run(copy, "-c", "import orchestrator; print(orchestrator.__file__)").stdout.strip()
        assert Path(imported).is_relative_to(copy), f"{imported} is not of the copy"

        @functools.cache
        def play(test: str) -> str:
            done = _play(copy, test)
            assert done.returncode == 0, f"it fails without the mutation:\n{done.stdout}"
            return done.stdout

        yield play


@pytest.mark.soak
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_broken_line_fails_its_named_test(mutation: Mutation, unbroken: Callable[[str], str]) -> None:
    if not re.search(r"\d+ passed", unbroken(mutation.killed_by)):
        pytest.skip(f"{mutation.killed_by} is skipped on this machine")
    with tempfile.TemporaryDirectory(prefix="orch-broken-") as folder:
        copy = _copied(Path(folder))
        broken = copy / mutation.file
        broken.write_text(broken.read_text().replace(mutation.before, mutation.after))
        done = _play(copy, mutation.killed_by)
    assert done.returncode == FAILED, f"{mutation.killed_by} ended with {done.returncode}:\n{done.stdout}"
