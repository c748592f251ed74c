"""A program's first imports: what the lines at the top of its script name. Read from its source by AST, never run.

No other file of the program is read. The reading ends at the first statement that is no import, since it may change what
a later import does.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.jobdir import ownership

FILE_BYTES_MAX = 1 << 20
IMPORTS_MAX = 100

IMPORTS_TORCH = re.compile(
    rb"^\s*(?:import\s+(?:[\w.]+(?:\s+as\s+\w+)?\s*,\s*)*|from\s+)(?:torch|accelerate|lightning|pytorch_lightning|transformers)\b",
    re.M,
)
"""A line that imports torch, or what imports it."""

SETS_VARIABLE = re.compile(
    rb"environ\s*(?:\[\s*|\.setdefault\(\s*|\.update\([^)]*?|\|=[^}]*?)[\"']?"
    rb"((?:G?OMP_|KMP_|MKL_|OPENBLAS_|(?:PY)?TORCH)\w+)(?:[\"']?\s*(?:\]\s*=(?!=)|[,:=](?!=)))"
)
"""What sets a variable which torch and its libraries may read when they are loaded."""


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a program imports, and names of it."""

    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramSource:
    """What is known of a program from its script."""

    script: Path
    imports: tuple[Import, ...]
    imports_torch: bool
    # A variable that it sets and that torch may read when it is loaded; "" for none
    sets_variable: str


def import_folder(argv: tuple[str, ...], cwd: Path) -> Path:
    """Return the folder that Python imports from first when it runs `argv`."""
    return cwd if argv[1] == "-m" else (cwd / argv[1]).resolve().parent


def read_program(argv: tuple[str, ...], cwd: Path) -> ProgramSource:
    """Read the script of a Python's command line. Raises ValueError, with the reason, where it is no Python with a script or
    module of the code; a script in Python's place may do something for each rank, such as to bind it to cores."""
    try:
        with ownership.open_for_reading(cwd / argv[0]) as file:
            if file.read(4) != b"\x7fELF":
                raise ValueError(f"{argv[0]} is a script")
        is_module = argv[1] == "-m"
        script = cwd.joinpath(*argv[2].split(".")).with_suffix(".py") if is_module else cwd / argv[1]
        if script.suffix != ".py":
            raise ValueError(f"{argv[1]} is no Python file")
        with ownership.open_for_reading(script) as file:
            text = file.read(FILE_BYTES_MAX)
    except (OSError, IndexError):
        raise ValueError("its command is not a Python with a script or module of the code") from None
    sets = SETS_VARIABLE.search(text)
    return ProgramSource(
        script, parse_top_imports(text), bool(IMPORTS_TORCH.search(text)), sets[1].decode() if sets else ""
    )


def parse_top_imports(text: bytes) -> tuple[Import, ...]:
    """Return what the import lines at the top of a script name, up to the first other statement."""
    imports: list[Import] = []
    try:
        for node in ast.parse(text).body:
            match node:
                case ast.Import():
                    imports += [Import(alias.name) for alias in node.names]
                case ast.ImportFrom(module=str(module), level=0):
                    imports.append(Import(module, tuple(alias.name for alias in node.names if alias.name != "*")))
                case ast.Expr(ast.Constant()):
                    pass  # a docstring
                case _:
                    break
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(imports[:IMPORTS_MAX])
