"""A program's first imports: read from its source by AST, never run.

The walk goes through the program's own modules in the order in which Python would, and ends at the first statement that may
change what a later import does. Variables that are set on the way are part of what it finds: a module that reads one is
not the same when it is imported earlier.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

FILES_MAX = 64
FILE_BYTES_MAX = 1 << 20
STEPS_MAX = 400

HARMLESS = ("warnings", "logging")
"""Modules whose calls change nothing that an import depends on but what it prints."""

TORCH = re.compile(
    rb"^\s*(?:import\s+(?:[\w.]+(?:\s+as\s+\w+)?\s*,\s*)*|from\s+)(?:torch|accelerate|lightning|pytorch_lightning|transformers)\b",
    re.M,
)
"""A line that imports torch, or what imports it."""

SETS = re.compile(
    rb"environ\s*(?:\[\s*|\.setdefault\(\s*|\.update\([^)]*?|\|=[^}]*?)[\"']?"
    rb"((?:G?OMP_|KMP_|MKL_|OPENBLAS_|(?:PY)?TORCH)\w+)(?:[\"']?\s*(?:\]\s*=(?!=)|[,:=](?!=)))"
)
"""What sets a variable which torch and its libraries may read when they are loaded."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a program does first: it imports a module, and names of it, or sets a variable of the environment."""

    module: str = ""
    names: tuple[str, ...] = ()
    sets: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of a program from its source."""

    script: Path
    steps: tuple[Step, ...]
    imports_torch: bool
    # A file that sets what torch may read when it is loaded, with the variable; "" for none
    sets: str


def folder_of(argv: tuple[str, ...], cwd: Path) -> Path:
    """Return the folder that Python imports from first when it runs `argv`."""
    return cwd if argv[1] == "-m" else (cwd / argv[1]).resolve().parent


def read(argv: tuple[str, ...], cwd: Path) -> Source:
    """Read the program of a Python's command line. Raises ValueError, with the reason, where it is no Python with a script or
    module of the code; a script in Python's place may do something for each rank, such as to bind it to cores."""
    try:
        with (cwd / argv[0]).open("rb") as file:
            if file.read(4) != b"\x7fELF":
                raise ValueError(f"{argv[0]} is a script")
        is_module = argv[1] == "-m"
        script = cwd.joinpath(*argv[2].split(".")).with_suffix(".py") if is_module else cwd / argv[1]
        if script.suffix != ".py":
            raise ValueError(f"{argv[1]} is no Python file")
        walk = _Walk(folder_of(argv, cwd))
        walk.note(script)
    except (OSError, IndexError):
        raise ValueError("its command is not a Python with a script or module of the code") from None
    if is_module:
        walk.enter(argv[2])
    else:
        walk.read(script)
    return Source(script, tuple(walk.steps), walk.imports_torch, walk.sets)


@dataclass(slots=True)
class _Walk:
    """The walk through a program; most methods tell whether it goes on."""

    folder: Path
    steps: list[Step] = field(default_factory=list)
    imports_torch: bool = False
    sets: str = ""
    _seen: set[Path] = field(default_factory=set)
    _functions: set[str] = field(default_factory=set)

    def note(self, file: Path) -> bytes:
        """Return a file's text, and note what it imports and sets anywhere. Raises OSError."""
        with file.open("rb") as stream:
            text = stream.read(FILE_BYTES_MAX)
        self.imports_torch = self.imports_torch or bool(TORCH.search(text))
        if found := SETS.search(text):
            self.sets = self.sets or f"{file.name} sets {found[1].decode()}"
        return text

    def read(self, file: Path, package: str = "") -> bool:
        """Go through a file of the program, a module of `package`."""
        if file in self._seen:
            return True
        self._seen.add(file)
        if len(self._seen) > FILES_MAX:
            return False
        try:
            return self._all(ast.parse(self.note(file)).body, package)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return False

    def _all(self, body: list[ast.stmt], package: str) -> bool:
        return all(self._one(node, package) for node in body)

    def _one(self, node: ast.stmt, package: str) -> bool:
        match node:
            case ast.Import():
                return all(self.enter(alias.name) for alias in node.names)
            case ast.ImportFrom():
                return self._enter_from(node, package)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._functions.add(node.name)
                return True
            case ast.ClassDef() | ast.Pass() | ast.If(ast.Compare(ast.Name("__name__"))):
                return True
            case ast.Assign(targets=[ast.Subscript(ast.Attribute(ast.Name("os"), "environ"), name)]):
                return self._set(name)
            case ast.Assign() | ast.AnnAssign():
                return self._only_binds(node)
            case ast.Try():
                return all(self._all(body, package) for body in (node.body, node.orelse, node.finalbody))
            case ast.If(ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                return self._all(node.orelse, package)
            case ast.Expr(ast.Constant()):
                return True
            case ast.Expr(
                ast.Call(ast.Attribute(ast.Attribute(ast.Name("os"), "environ"), "setdefault"), [name, *_])
            ):
                return self._set(name)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(module)))):
                return module in HARMLESS
        return False

    def _set(self, name: ast.expr) -> bool:
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            return False
        return self._add(Step(sets=name.value))

    def _add(self, step: Step) -> bool:
        self.steps.append(step)
        return len(self.steps) < STEPS_MAX

    def _enter_from(self, node: ast.ImportFrom, package: str) -> bool:
        names = tuple(alias.name for alias in node.names if alias.name != "*")
        module = node.module or ""
        if node.level:
            parts = package.split(".")
            if not package or node.level > len(parts):
                return False
            module = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [module])])
        if not self.enter(module, names):
            return False
        submodules = [f"{module}.{name}" for name in names if self._file_of(f"{module}.{name}")]
        return all(self.enter(name) for name in submodules)

    def enter(self, module: str, names: tuple[str, ...] = ()) -> bool:
        """Go through a module of the program's own with the packages around it, or note another."""
        parts = module.split(".")
        if self._file_of(parts[0]) is None and not (self.folder / parts[0]).is_dir():
            return module == "__future__" or self._add(Step(module, names))
        for count in range(1, len(parts) + 1):
            file = self._file_of(".".join(parts[:count]))
            inner = parts[:count] if file is not None and file.name == "__init__.py" else parts[: count - 1]
            if file is not None and not self.read(file, ".".join(inner)):
                return False
        return True

    def _file_of(self, module: str) -> Path | None:
        path = self.folder.joinpath(*module.split("."))
        files = (path / "__init__.py", path.with_name(path.name + ".py"))
        return next((file for file in files if file.is_file()), None)

    def _only_binds(self, node: ast.Assign | ast.AnnAssign) -> bool:
        """Tell whether an assignment binds names, calls no function of the program, and does not touch the environment."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(
            isinstance(one, ast.Attribute | ast.Subscript) for target in targets for one in ast.walk(target)
        ):
            return False
        parts = list(ast.walk(node))
        words = {one.attr for one in parts if isinstance(one, ast.Attribute)}
        words |= {one.id for one in parts if isinstance(one, ast.Name)}
        return words.isdisjoint(("environ", "putenv", *self._functions))
