"""Does what a loop asks for come out the same each time? Pure: what is written is all that counts.

`while not is_ready(path)` never ends where `is_ready` only looks into a set of the script, and nothing that the loop does
puts anything into one: unless another thread does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.node.written import Names

_PURE = ("builtins.", "math.")
_BODIES = (ast.Lambda, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a module's loops look at. `functions`: its own that are known to return; `exposed`: names that others may
    change at any time, see there."""

    names: Names
    functions: Mapping[str, ast.FunctionDef]
    exposed: frozenset[str]

    def is_fixed(self, loop: ast.While) -> bool:
        """Tell whether the test of a loop that was entered holds for ever, unless another thread changes what it looks at.
        It is known that all parts of the loop return, and that nothing in it leaves it."""
        asked = self._called(loop.test)
        done = [loop.test, *loop.body, *self._bodies(asked), *self._bodies(self._called(*loop.body))]
        if not all(map(_changes_nothing, done)):
            return False
        changed = {node.id for one in loop.body for node in _names(one, ast.Store)}
        known = self.names.data - self.exposed - changed - self.names.imports.keys()
        return self._looks_only_at(known, loop.test) and all(
            self._looks_only_at(known | _own(one), part) for one in asked for part in one.body
        )

    def _called(self, *parts: ast.AST) -> list[ast.FunctionDef]:
        """Return the functions of the module that parts of it may come to call."""
        found: dict[str, ast.FunctionDef] = {}
        waiting = list(parts)
        while waiting:
            for node in _names(waiting.pop(), ast.Load):
                if node.id in self.functions and node.id not in found:
                    found[node.id] = self.functions[node.id]
                    waiting += found[node.id].body
        return list(found.values())

    def _bodies(self, functions: Iterable[ast.FunctionDef]) -> list[ast.stmt]:
        return [statement for one in functions for statement in one.body]

    def _looks_only_at(self, known: frozenset[str], part: ast.AST) -> bool:
        """Tell whether a part reads no other names, and calls only what tells of the same data the same each time."""
        funcs = [node.func for node in ast.walk(part) if isinstance(node, ast.Call)]
        for func in funcs:
            ours = isinstance(func, ast.Name) and func.id in self.functions
            if not ours and not self.names.called(func).startswith(_PURE):
                return False
        called = {id(node) for func in funcs for node in ast.walk(func)}
        return all(node.id in known for node in _names(part, ast.Load) if id(node) not in called)


def exposed(tree: ast.Module, names: Names) -> frozenset[str]:
    """Return the names that others than the lines which are seen to do so may change at any time."""
    return _callable_any_time(tree) | (_handed_on(tree, names) - names.plain)


def _callable_any_time(tree: ast.Module) -> frozenset[str]:
    """Return the names that stand in what may be called at any time, and not only by the lines that are seen to call it:
    functions that are handed on, as to a thread or for a signal, methods, lambdas, functions within functions; and in what
    those call."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    plain = {
        one.name: one for one in tree.body if isinstance(one, ast.FunctionDef) and not one.decorator_list
    }
    handed = {node.id for node in _names(tree, ast.Load) if id(node) not in called}
    waiting: list[ast.AST] = [plain[name] for name in handed & plain.keys()]
    waiting += [one for one in ast.walk(tree) if isinstance(one, _BODIES) and one not in plain.values()]
    found: set[str] = set()
    while waiting:
        new = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)} - found
        found |= new
        waiting += [plain[name] for name in new & plain.keys()]
    return frozenset(found)


def _handed_on(tree: ast.Module, names: Names) -> frozenset[str]:
    """Return the names whose lists, sets and the like others may come to hold: all that are not only asked, compared,
    indexed, gone through, given to Python's own functions, and used by methods of theirs."""
    kept: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=func, args=args):
                kept |= set(map(id, args)) if names.called(func).startswith("builtins.") else set()
                kept.add(id(func.value) if isinstance(func, ast.Attribute) else id(func))
            case ast.Compare(left=left, comparators=others):
                kept |= {id(left), *map(id, others)}
            case ast.Subscript(value=one) | ast.UnaryOp(op=ast.Not(), operand=one):
                kept.add(id(one))
            case ast.For(iter=one) | ast.comprehension(iter=one) | ast.If(test=one) | ast.While(test=one):
                kept.add(id(one))
    return frozenset(node.id for node in _names(tree, ast.Load) if id(node) not in kept)


def _changes_nothing(part: ast.AST) -> bool:
    """Tell whether a part of a program gives only names of its own other values."""
    called = {
        id(child) for node in ast.walk(part) if isinstance(node, ast.Call) for child in ast.walk(node.func)
    }
    for node in ast.walk(part):
        match node:
            case ast.Global() | ast.Nonlocal():
                return False
            case ast.Attribute() if id(node) not in called:
                return False
            case ast.AugAssign(value=value) if not isinstance(value, ast.Constant):
                return False  # `+=` puts more into a list
    return True


def _own(function: ast.FunctionDef) -> frozenset[str]:
    """Return the names that a function has for itself: its arguments, and what it binds. What is left out of a call, or put
    together from it, is not known."""
    taken = function.args
    if taken.defaults or taken.kw_defaults or taken.vararg or taken.kwarg:
        return frozenset()
    bound = {node.id for node in _names(function, ast.Store)}
    return frozenset(bound | {one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)})


def _names(part: ast.AST, context: type[ast.expr_context]) -> Iterator[ast.Name]:
    return (node for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, context))
