"""What a program imports before anything of it runs that could change how: read from its source, never run.

The walk follows the program's own modules in the order in which Python would, and ends at the first statement that may have
an effect on a later import. Variables that are set by name on the way are part of what it finds: a module that reads one
is not the same when it is imported earlier.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.rank.warm import Step

FILES_MAX = 64
FILE_BYTES_MAX = 1 << 20
STEPS_MAX = 400

HARMLESS = ("warnings", "logging")
"""Modules whose calls change nothing that an import depends on but what it prints."""


def first_steps(argv: tuple[str, ...], cwd: Path) -> tuple[Step, ...]:
    """Return the imports of a Python's command line in their order; those of modules outside the program's own folder."""
    is_module = argv[1] == "-m"
    walk = _Walk(cwd if is_module else (cwd / argv[1]).parent)
    if is_module:
        walk.enter(argv[2])
    else:
        walk.read(cwd / argv[1], "")
    return tuple(walk.steps[:STEPS_MAX])


@dataclass(slots=True)
class _Walk:
    """The walk; each method tells whether to go on."""

    folder: Path
    steps: list[Step] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)

    def read(self, file: Path, package: str) -> bool:
        if file in self.seen:
            return True
        self.seen.add(file)
        if len(self.seen) > FILES_MAX:
            return False
        try:
            with file.open("rb") as stream:
                tree = ast.parse(stream.read(FILE_BYTES_MAX))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return self.all(tree.body, package)

    def all(self, body: list[ast.stmt], package: str) -> bool:
        return all(self.one(node, package) for node in body)

    def one(self, node: ast.stmt, package: str) -> bool:
        match node:
            case ast.Import():
                return all(self.enter(alias.name) for alias in node.names)
            case ast.ImportFrom():
                return self.enter_from(node, package)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions.add(node.name)
                return True
            case ast.ClassDef() | ast.Pass() | ast.If(ast.Compare(ast.Name("__name__"))):
                return True
            case ast.Assign(targets=[ast.Subscript(ast.Attribute(ast.Name("os"), "environ"), name)]):
                return self.set(name)
            case ast.Assign() | ast.AnnAssign():
                return self.only_binds(node)
            case ast.Try():
                bodies = [
                    node.body,
                    *(handler.body for handler in node.handlers),
                    node.orelse,
                    node.finalbody,
                ]
                return all(self.all(body, package) for body in bodies)
            case ast.If(ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                return self.all(node.orelse, package)
            case ast.Expr(ast.Constant()):
                return True
            case ast.Expr(
                ast.Call(ast.Attribute(ast.Attribute(ast.Name("os"), "environ"), "setdefault"), [name, *_])
            ):
                return self.set(name)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(module)))):
                return module in HARMLESS
        return False

    def set(self, name: ast.expr) -> bool:
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            return False
        self.steps.append(Step(sets=name.value))
        return True

    def enter_from(self, node: ast.ImportFrom, package: str) -> bool:
        names = tuple(alias.name for alias in node.names if alias.name != "*")
        module = node.module or ""
        if node.level:
            parts = package.split(".")
            if not package or node.level > len(parts):
                return False
            module = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [module])])
        if not self.enter(module, names):
            return False
        submodules = [f"{module}.{name}" for name in names if self.file_of(f"{module}.{name}")]
        return all(self.enter(name) for name in submodules)

    def enter(self, module: str, names: tuple[str, ...] = ()) -> bool:
        """Follow a module of the program's own folder with the packages around it, or note another."""
        parts = module.split(".")
        if self.file_of(parts[0]) is None and not (self.folder / parts[0]).is_dir():
            if parts[0] != "__future__":
                self.steps.append(Step(module, names))
            return True
        for count in range(1, len(parts) + 1):
            file = self.file_of(".".join(parts[:count]))
            inner = parts[:count] if file is not None and file.name == "__init__.py" else parts[: count - 1]
            if file is not None and not self.read(file, ".".join(inner)):
                return False
        return True

    def file_of(self, module: str) -> Path | None:
        path = self.folder.joinpath(*module.split("."))
        files = (path / "__init__.py", path.with_name(path.name + ".py"))
        return next((file for file in files if file.is_file()), None)

    def only_binds(self, node: ast.Assign | ast.AnnAssign) -> bool:
        """Tell whether an assignment binds names, calls no function of the program, and does not touch the environment."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(
            isinstance(one, ast.Attribute | ast.Subscript) for target in targets for one in ast.walk(target)
        ):
            return False
        parts = list(ast.walk(node))
        words = {one.attr for one in parts if isinstance(one, ast.Attribute)}
        words |= {one.id for one in parts if isinstance(one, ast.Name)}
        return words.isdisjoint(("environ", "putenv", *self.functions))
