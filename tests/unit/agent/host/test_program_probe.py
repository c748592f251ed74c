"""Which imports count, which are missing, and is code compiled without being run? The probe's functions, in this process."""

from __future__ import annotations

import ast

from orchestrator.agent.host import program_probe as probe

SCRIPT = """
import os, no_such_a
from no_such_b.part import thing
from . import sibling
try:
    import no_such_c
except ImportError:
    no_such_c = None
if TYPE_CHECKING:
    import no_such_d
def late():
    import no_such_e
import model
raise SystemExit("it was run")
"""


def said(text: str, *own: str) -> dict[str, object]:
    return probe.probe_code([{"path": "train.py", "text": text}], list(own))


def test_required_imports_are_checked_with_their_lines() -> None:
    found = said(SCRIPT, "model")
    assert found["missing"] == [
        {"module": "no_such_a", "file": "train.py", "line": 2},
        {"module": "no_such_b", "file": "train.py", "line": 3},
    ]
    assert not found["syntax"] and not found["changes_path"]


def test_uncompilable_code_is_named_with_line() -> None:
    assert str(said("x = 1\ny = (\n")["syntax"]).startswith("train.py:2: SyntaxError: ")
    assert str(said("return 1\n")["syntax"]).startswith("train.py:1: SyntaxError: "), "what only compile() refuses"


def test_changed_path_is_seen() -> None:
    """A change of the module path is seen."""
    assert said("import sys\nsys.path.insert(0, 'lib')\nimport lib_x\n")["changes_path"] == "train.py:2"
    assert probe.find_path_change(ast.parse("import os\nos.path.join('a')\n")) == 0


def test_module_missing_in_two_files_is_reported_once() -> None:
    sources = [{"path": path, "text": "import no_such_a\n"} for path in ("a.py", "b.py")]
    assert [one["file"] for one in probe.probe_code(sources, [])["missing"]] == ["a.py"]
