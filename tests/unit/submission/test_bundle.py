"""Does the bundle run anywhere, alone, and is it always the same bytes? Real interpreters, no network."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.core.version import VERSION
from orchestrator.submission import bundle
from tests.support.pythons import other_pythons

pytestmark = pytest.mark.slow

RUN_S_MAX = 60.0


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle in a folder of its own, far from the checkout."""
    path = tmp_path_factory.mktemp("node") / "orch.pyz"
    path.write_bytes(bundle.build())
    return path


def _run(python: str, pyz: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-I", "-S", str(pyz), *words],
        capture_output=True, text=True, timeout=RUN_S_MAX, cwd=pyz.parent, env={}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()])
def test_bundle_runs_without_site_packages_or_environment(python: str, pyz: Path) -> None:
    done = _run(python, pyz, "--selftest")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"orch {VERSION} on Python 3.")


def test_bundle_refuses_unknown_verbs(pyz: Path) -> None:
    done = _run(sys.executable, pyz, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: orch VERB")


def test_bundle_is_reproducible_byte_for_byte(tmp_path: Path) -> None:
    """The bundle has the same bytes for every builder, place and time."""
    sums = {_sha256_built_in(tmp_path / name, name) for name in ("1", "2")}
    assert sums == {bundle.sha256(bundle.build())}


def _sha256_built_in(folder: Path, seed: str) -> str:
    """Build from a copy of the package, in a process of its own: other times and modes, other hashes, other place."""
    shutil.copytree(bundle.PACKAGE, folder / "orchestrator", ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(folder.rglob("*.py"), reverse=seed == "2"):
        path.chmod(0o600 if seed == "2" else 0o755)
        os.utime(path, (1e9 * int(seed), 1e9 * int(seed)))
    code = (
        "import os; from orchestrator.submission import bundle; os.umask(0o077); print(bundle.sha256(bundle.build()))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        capture_output=True, text=True, timeout=RUN_S_MAX, cwd=folder, check=True,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(folder), "TZ": f"UTC+{seed}"},
    )  # fmt: skip
    return done.stdout.strip()


def test_bundle_has_bytecode_without_time_or_path() -> None:
    """The bundle holds sources with their bytecode, and no time or path."""
    archive = zipfile.ZipFile(io.BytesIO(bundle.build()))
    infos = archive.infolist()
    sources = {info.filename for info in infos if info.filename.endswith(".py")}
    is_compiled = sys.version_info >= (3, 11)  # before, code is not the same bytes each time
    compiled = {f"{name}c" for name in sources - {"__main__.py"} if is_compiled}
    assert {info.filename for info in infos} == sources | compiled
    assert [name for name in compiled if str(bundle.PACKAGE).encode() in archive.read(name)] == []
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    assert {info.external_attr >> 16 for info in infos} == {0o644}
    assert archive.read("orchestrator/core/version.py") == (bundle.PACKAGE / "core" / "version.py").read_bytes()


def make_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package be a small one in a folder, which takes no time to compile."""
    for name in ("__init__.py", "__main__.py", "core/version.py"):
        path = folder / "orchestrator" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((bundle.PACKAGE / name).read_bytes())
    monkeypatch.setattr(bundle, "PACKAGE", folder / "orchestrator")


def test_cached_bundle_is_used_only_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(tmp_path, monkeypatch)
    made = bundle.build()
    (kept,) = (tmp_path / "orchestrator/__pycache__").glob("bundle-*.pyz")
    for found in (made[:-1], b"", b"no mark", kept.read_bytes()[:-1], kept.read_bytes()[:-1] + b"x"):
        kept.write_bytes(found)
        assert bundle.build() == made
    (tmp_path / "orchestrator/core/version.py").write_text('VERSION = "0.0.1"\n')
    assert bundle.build() != made
    shutil.rmtree(tmp_path / "orchestrator/__pycache__")
    (tmp_path / "orchestrator/__pycache__").write_text("no folder, as where nothing may be written")
    bundle.build()


def test_uncachable_bundle_is_cached_in_job_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that cannot be cached beside the code is cached in the job home."""
    make_small(tmp_path, monkeypatch)
    (tmp_path / "orchestrator/__pycache__").write_text("no folder, as where nothing may be written")
    home = tmp_path / "home"
    bundle.build(home)
    assert not home.exists()  # it is not for us to make
    home.mkdir()
    made = bundle.build(home)
    monkeypatch.setattr(bundle, "_zip_files", lambda files: pytest.fail("compiled again"))
    assert bundle.build(home) == made


def test_unwritable_bytecode_is_left_to_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytecode that cannot be written is left to the sources."""
    make_small(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("marshal.dumps", _refuse)
        names = zipfile.ZipFile(io.BytesIO(bundle.build())).namelist()
    assert names == ["__main__.py", "orchestrator/__init__.py", "orchestrator/__main__.py", "orchestrator/core/version.py"]  # fmt: skip


def _refuse(code: object, version: object) -> bytes:
    raise ValueError("unmarshallable object")
