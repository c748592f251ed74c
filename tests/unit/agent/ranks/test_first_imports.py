"""What is read of a program's first imports, and where the reading ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.agent.ranks import first_imports


def _imports(text: str) -> list[str]:
    return [":".join((one.module, *one.names)) for one in first_imports.parse_top_imports(text.encode())]


TOP = '''"""A training."""
from __future__ import annotations
import a, b.c as d
from e.f import (
    g as h,
    i,
)
from j import *
"a text"
import k
'''


def test_import_lines_at_top_are_read_in_order() -> None:
    assert _imports(TOP) == ["__future__:annotations", "a", "b.c", "e.f:g:i", "j", "k"]


@pytest.mark.parametrize(
    "line",
    [
        "sys.path.insert(0, 'vendor')",
        "os.environ['ONE'] = '1'",
        "a.limit = 4",
        "LIMIT = 4",
        "load_dotenv()",
        "if a.is_old: import b",
        "try: import b\nexcept ImportError: pass",
        "def main(): import b",
        "from . import sibling",
    ],
)
def test_reading_stops_at_first_other_statement(line: str) -> None:
    assert _imports(f"import a\n{line}\nimport z\n") == ["a"]


def test_unreadable_script_imports_nothing_long_one_limited(
    tmp_path: Path,
) -> None:
    """A script that cannot be read imports nothing, and a long one is read to a limit."""
    assert _imports("what is this") == _imports("import a\0") == []
    assert len(_imports("import a\n" * (first_imports.IMPORTS_MAX + 1))) == first_imports.IMPORTS_MAX
    with pytest.raises(ValueError, match="not a Python with a script or module"):
        first_imports.read_program((sys.executable, "absent.py"), tmp_path)


def test_no_other_file_of_program_is_read(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/train.py").write_text("import a\nimport own\n")
    (tmp_path / "own.py").write_text("import torch\nimport os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    source = first_imports.read_program((sys.executable, "-m", "pack.train"), tmp_path)
    assert [one.module for one in source.imports] == ["a", "own"]
    assert (source.script.name, source.imports_torch, source.sets_variable) == ("train.py", False, "")


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
def test_torch_and_its_settings_are_found_anywhere(tmp_path: Path, line: str, sets: str) -> None:
    """Torch and what it may read are found anywhere in the script."""
    (tmp_path / "train.py").write_text(f"import os\nbegin()\n{line}\nimport torch\n")
    source = first_imports.read_program((sys.executable, "train.py"), tmp_path)
    assert (source.imports_torch, source.sets_variable) == (True, sets)
