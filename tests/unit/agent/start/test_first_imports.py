"""What is read of a program's first imports, and where the reading ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.agent.start import first_imports
from orchestrator.agent.start.first_imports import Step


def _steps(folder: Path, *argv: str, **files: str) -> list[str]:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.parent != folder:
            (path.parent / "__init__.py").touch()
    return [
        _text(step) for step in first_imports.read((sys.executable, *(argv or ("train.py",))), folder).steps
    ]


def _text(step: Step) -> str:
    return f"${step.sets}" if step.sets else ":".join((step.module, *step.names))


HARMLESS = '''"""A training."""
from __future__ import annotations
import a, b.c as d
from e.f import g as h, i
from j import *
"a text"
X: int = 3
Y = a.make(4)
def function():
    import never
class Class(d.Base):
    import never
if TYPE_CHECKING:
    import never
try:
    import k
except ImportError as err:
    raise SystemExit("install k") from err
warnings.filterwarnings("ignore")
os.environ["ONE"] = str(7)
os.environ.setdefault("TWO", "x")
from last import one
if __name__ == "__main__":
    import never
'''


def test_imports_and_variables_are_read_in_their_order(tmp_path: Path) -> None:
    assert _steps(tmp_path, train=HARMLESS) == [
        *("a", "b.c", "e.f:g:i", "j", "k", "$ONE", "$TWO", "last:one")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "sys.path.insert(0, 'vendor')",
        "os.environ[name] = '1'",
        "os.environ.update(X='1')",
        "os.environ.setdefault(name, '1')",
        "old = os.environ.pop('X')",
        "os.putenv('X', '1')",
        "a.limit = 4",
        "load_dotenv()",
        "for x in y: pass",
        "if a.is_old: import b",
        "with a.patched(): import b",
        "del a.b",
        "x = prepare()",
        "from . import sibling",
    ],
)
def test_the_reading_ends_where_something_may_change_an_import(tmp_path: Path, line: str) -> None:
    source = f"import a\ndef prepare(): ...\n{line}\nimport z\n"
    assert _steps(tmp_path, train=source) == ["a"]


def test_modules_of_the_program_are_followed_where_they_are_imported(tmp_path: Path) -> None:
    found = _steps(
        tmp_path,
        train="import a\nfrom own import thing\nfrom pack import inner, other\nimport own\nimport z\n",
        own="import b\nimport train\n",
        pack__inner="from .deep import x\nfrom c import y\n",
        pack__deep="import d\n",
    )
    assert found == ["a", "b", "d", "c:y", "z"]


def test_the_reading_ends_with_a_module_that_cannot_be_read_or_does_something(tmp_path: Path) -> None:
    assert _steps(tmp_path, train="import a\nimport own\nimport z\n", own="import b\nmake_it_so()\n") == [
        "a",
        "b",
    ]
    assert _steps(tmp_path, train="import a\nimport own\nimport z\n", own="what is this") == ["a"]
    with pytest.raises(ValueError, match="not a Python with a script or module"):
        _steps(tmp_path, "absent.py")


def test_a_module_is_read_with_the_packages_around_it(tmp_path: Path) -> None:
    files = {
        "pack__train": "from . import own\nimport a\nfrom ..above import it\nimport z\n",
        "pack__own": "import b\n",
    }
    assert _steps(tmp_path, "-m", "pack.train", **files) == ["b", "a"]
    (tmp_path / "pack/__init__.py").write_text("import first\n")
    assert _steps(tmp_path, "-m", "pack.train")[0] == "first"


def test_a_program_without_end_is_read_to_a_limit(tmp_path: Path) -> None:
    files = {f"m{n}": f"import m{n + 1}\n" for n in range(first_imports.FILES_MAX + 5)}
    assert _steps(tmp_path, train="import m0\nimport z\n", **files) == []
    assert _steps(tmp_path, train="import a\n" * (first_imports.STEPS_MAX + 1))[1:] == ["a"] * (
        first_imports.STEPS_MAX - 1
    )


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "1"', "OMP_NUM_THREADS"),
        ("os.environ.setdefault('TORCH_LOGS', 'dynamo')", "TORCH_LOGS"),
        ('os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder', "TORCHINDUCTOR_CACHE_DIR"),
        ('os.environ.update(A="1", OMP_NUM_THREADS="2")', "OMP_NUM_THREADS"),
        ('os.environ |= {\n    "A": "1",\n    "MKL_NUM_THREADS": "2",\n}', "MKL_NUM_THREADS"),
        ('if os.environ["TORCH_HOME"] == "":', ""),
        ('home = os.environ["TORCH_HOME"]', ""),
        ('os.environ["TOKENIZERS_PARALLELISM"] = "false"', ""),
    ],
)
def test_torch_and_what_it_may_read_are_seen_anywhere_in_a_file(tmp_path: Path, line: str, sets: str) -> None:
    (tmp_path / "own.py").write_text(f"import os\nbegin()\n{line}\nimport torch\n")
    (tmp_path / "train.py").write_text("import own\n")
    source = first_imports.read((sys.executable, "train.py"), tmp_path)
    assert (source.imports_torch, source.sets) == (True, f"own.py sets {sets}" if sets else "")
