"""Is what a loop asks for settled once and for all? Pure: what is written is all that counts.

`while not is_ready(path)` never ends where `is_ready` only looks into a set that nothing in the module ever puts anything
into: a flag that nobody sets, behind a function. Only such functions, expressions and uses are understood as are named here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orchestrator.node.harmless import of
from orchestrator.node.written import Names

_DEPTH_MAX = 8
_MEDDLES = (
    "exec",
    "eval",
    "globals",
    "locals",
    "vars",
    "setattr",
    "delattr",
    "__import__",
    "import_module",
    "reload",
)
_CONTAINERS = of("builtins", "set frozenset dict list tuple")
_MEDDLES_OF_MODULES = (
    "import_module",
    "reload",
    "modules",
    "__dict__",
    "__main__",
    "__setattr__",
    "f_globals",
    "__globals__",
    "__code__",
)
"""What may change any name of a module without naming it."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What of a module never changes. `data`: its names that are bound once, to a constant, or to what is empty and then
    only compared, counted or negated; `answers`: what its functions return that do nothing else, by their arguments;
    `meddled`: it may change any name without naming it."""

    names: Names
    data: frozenset[str]
    answers: Mapping[str, tuple[frozenset[str], ast.expr]]
    meddled: bool = False

    @classmethod
    def of(cls, tree: ast.Module, names: Names) -> Settled:
        """Read a module."""
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        known = {id(call.func): name for call in calls if (name := _named(call)) is not None}
        if any(_meddles(node) for node in ast.walk(tree) if id(node) not in known):
            return cls(names, frozenset(), {}, meddled=True)
        plain = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in names.once)
        answers = {one.name: found for one in plain if (found := _answer(one)) is not None}
        return cls(names, _data(tree, names) - set(known.values()), answers)

    def is_fixed(self, test: ast.expr) -> bool:
        """Tell whether an expression comes out the same whenever it is asked, and at once."""
        return self._is_fixed(test, frozenset(), _DEPTH_MAX)

    def _is_fixed(self, node: ast.expr, own: frozenset[str], depth: int) -> bool:
        match node:
            case _ if not depth:
                return False
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name in own or name in self.data
            case ast.UnaryOp(op=ast.Not(), operand=one):
                return self._is_fixed(one, own, depth - 1)
            case ast.BoolOp(values=parts):
                return all(self._is_fixed(one, own, depth - 1) for one in parts)
            case ast.Compare(left=left, comparators=others):
                return all(self._is_fixed(one, own, depth - 1) for one in (left, *others))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                if not all(self._is_fixed(one, own, depth - 1) for one in args):
                    return False
                if name not in self.answers:
                    return self.names.called(node.func) == "builtins.len"
                takes, answer = self.answers[name]
                return len(takes) == len(args) and self._is_fixed(answer, takes, depth - 1)
        return False


def _named(call: ast.Call) -> str | None:
    """Return the name that `setattr` sets where it is written there, none for `vars` of a thing; None for other calls."""
    match call:
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return name
        case ast.Call(func=ast.Name(id="vars"), args=[_]):
            return ""
    return None


def _meddles(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return name in _MEDDLES
        case ast.Attribute(attr=name):
            return name in _MEDDLES_OF_MODULES
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return any(one.name in (*_MEDDLES, *_MEDDLES_OF_MODULES, "*") for one in names)
    return False


def _answer(function: ast.FunctionDef) -> tuple[frozenset[str], ast.expr] | None:
    """Return the arguments of a function, and what it returns at once; None for one that does anything else."""
    takes = function.args
    others = (
        takes.posonlyargs,
        takes.kwonlyargs,
        takes.vararg,
        takes.kwarg,
        takes.defaults,
        function.decorator_list,
    )
    match [one for one in function.body if not _is_doc(one)]:
        case [ast.Return(value=ast.expr() as answer)] if not any(others):
            return frozenset(one.arg for one in takes.args), answer
    return None


def _is_doc(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _data(tree: ast.Module, names: Names) -> frozenset[str]:
    kept = {id(node) for one in ast.walk(tree) for node in _asked(one, names)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {node.id for node in nodes if not isinstance(node.ctx, ast.Store) and id(node) not in kept}
    return frozenset(
        name
        for name, value in names.values.items()
        if isinstance(value, ast.Constant) or (_is_empty(value, names) and name not in used)
    )


def _asked(node: ast.AST, names: Names) -> Iterator[ast.expr]:
    """Return the operands of what tells something of them, and keeps none of them."""
    match node:
        case ast.Compare(left=left, comparators=others):
            yield from (left, *others)
        case ast.UnaryOp(op=ast.Not(), operand=one):
            yield one
        case ast.Call(func=ast.Name() as func, args=[one]) if names.called(func) == "builtins.len":
            yield one


def _is_empty(value: ast.expr, names: Names) -> bool:
    match value:
        case ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=func, args=[], keywords=[]):
            return names.called(func) in _CONTAINERS
    return False
