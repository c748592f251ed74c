"""Contents of an installation: wheels built offline from a copy of the sources, by the build backend itself."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.core.version import VERSION
from tests.support.pythons import wrong_install

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILD_S_MAX = 120.0
SOURCES = ("orchestrator", "templates", "pyproject.toml", "README.md", "LICENSE")


def _built(kind: str, sources: Path, to: Path) -> zipfile.ZipFile:
    """Build a wheel by the PEP 517 or PEP 660 hook `kind` and return it."""
    code = f"import sys; from setuptools import build_meta; build_meta.{kind}(sys.argv[1])"
    to.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(to)],
        capture_output=True, text=True, timeout=BUILD_S_MAX, cwd=sources, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = to.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what git holds of the package, so that a build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skip)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel as it would be published."""
    return _built("build_wheel", sources, tmp_path_factory.mktemp("wheel") / "out")


def test_wheel_holds_modules_templates_and_type_marker(wheel: zipfile.ZipFile) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for folder, pattern in (
            ("orchestrator", "**/*.py"),
            ("orchestrator/templates", "*.j2"),
            ("orchestrator/report", "*.j2"),
            ("orchestrator/report", "*.css"),
            ("orchestrator/report", "*.js"),
            ("orchestrator/programs", "*.md"),
        )
        for path in (ROOT / folder).glob(pattern)
    }
    assert any(name.endswith(".sh.j2") for name in expected)
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == expected | {"orchestrator/py.typed"}


def test_wheel_provides_one_command(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(f"torch_orch-{VERSION}.dist-info/entry_points.txt").decode())
    assert dict(parser["console_scripts"]) == {"orch": "orchestrator.cli:main"}


def test_wheel_requires_torch_only_as_extra(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"torch_orch-{VERSION}.dist-info/METADATA").decode()
    requirements = [line for line in text.splitlines() if line.startswith("Requires-Dist:")]
    plain = [line for line in requirements if "extra ==" not in line]
    assert "Name: torch-orch" in text
    assert not any("torch>" in line or "numpy" in line for line in plain)


def test_editable_install_adds_plain_path_without_startup_code(sources: Path, tmp_path: Path) -> None:
    """A `.pth` line that begins with `import` runs at every start of the interpreter, and costs 10 ms and more."""
    editable = _built("build_editable", sources, tmp_path / "out")
    loaders = [name for name in editable.namelist() if name.endswith((".pth", ".py"))]
    assert len(loaders) == 1
    assert editable.read(loaders[0]).decode().split() == [str(sources)]


def test_only_torch_of_test_machines_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["torch==2.13.0"]


def test_tests_refuse_orch_of_another_tree(tmp_path: Path) -> None:
    """Tests are refused when another tree's orch is installed."""
    assert wrong_install(sys.executable, ROOT) is None
    wrong = wrong_install(sys.executable, tmp_path)
    assert wrong is not None
    assert f"has the orchestrator of {ROOT} installed" in wrong
    assert f"pip install -e {tmp_path}" in wrong
