"""Use of paramiko's public names alone: a release could break anything else."""

from __future__ import annotations

import ast

from orchestrator.submission import bundle

PACKAGE = bundle.PACKAGE
DOCUMENTED = ("paramiko", "paramiko.pkey", "paramiko.ssh_exception")
"""What names are imported from; the modules are for those that paramiko's type stubs do not offer at the top."""

DERIVED = ("paramiko.PKey",)
"""What may be derived from: it is made for that."""


def test_only_public_part_of_paramiko_is_used() -> None:
    users = {path: text for path in PACKAGE.rglob("*.py") if "import paramiko" in (text := path.read_text())}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} has {ast.unparse(node).splitlines()[0]}"
        for path, text in users.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.stmt, ast.expr)) and _is_private(node)
    ]
    assert users and wrong == []


def _is_private(node: ast.stmt | ast.expr) -> bool:
    match node:
        case ast.Import(names):
            return any(one.name.startswith("paramiko.") for one in names)
        case ast.ImportFrom(str(module), names) if module.split(".")[0] == "paramiko":
            return module not in DOCUMENTED or any(one.name.startswith("_") for one in names)
        case ast.ClassDef(_, bases):
            names_of = [ast.unparse(base) for base in bases]
            return any(name.startswith("paramiko.") and name not in DERIVED for name in names_of)
        case ast.Attribute(ast.Name("paramiko"), name):
            return name.islower()  # one of its modules
        case ast.Attribute(owner, name):
            is_own = ast.unparse(owner) in ("self", "cls") or name.startswith("__")
            return name.startswith("_") and not is_own
    return False
