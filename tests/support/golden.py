"""Are the texts that people and shells read still the ones that were looked at? Golden files, one for each text.

`ORCH_GOLDEN=1 pytest tests/unit` writes them anew; their diff is then read like code.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str, text: str) -> None:
    """Assert that `text` is what the golden file `name` holds; with `ORCH_GOLDEN` set, write it there instead."""
    path = FOLDER / name
    if os.environ.get("ORCH_GOLDEN"):
        path.write_text(text)
    known = path.read_text()
    changes = "\n".join(difflib.unified_diff(known.splitlines(), text.splitlines(), lineterm="", n=1))
    assert text == known, f"{path} differs; if that is meant, run again with ORCH_GOLDEN=1\n{changes}"
