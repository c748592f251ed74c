"""What do the names and the expressions of a module stand for, as far as that is written in it? Pure.

A name is believed to be what an import or its only binding says; whatever is bound twice, or comes from a `*`, is not known.
"""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

POWER_MAX = 64
TEXT_CHARS_MAX = 10_000
NUMBER_DEPTH_MAX = 8

_FOLDED: dict[type[ast.operator], Callable[[int, int], int | None]] = {
    ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__,
    ast.Pow: lambda number, by: number**by if 0 <= by <= POWER_MAX else None,
    ast.LShift: lambda number, by: number << by if 0 <= by <= POWER_MAX else None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a module. `imports`: what each imported name stands for; `bound`: names with a meaning of its own
    somewhere in it; `shared`: those that functions rebind for others; `plain`: those that are never anything but numbers,
    texts, truth values or None, which nobody changes from afar; `values`: what those stand for that are bound once;
    `once`: names that are bound once, and not by an import; `all_known`: no name comes from a `*`; `replaces`: it puts
    something else in the place of what it has imported, such as a clock of its own."""

    imports: Mapping[str, str]
    bound: frozenset[str]
    shared: frozenset[str]
    plain: frozenset[str]
    values: Mapping[str, ast.expr]
    once: frozenset[str]
    all_known: bool
    replaces: bool

    @classmethod
    def of(cls, tree: ast.Module) -> Names:
        """Read the names off a module."""
        imported: list[tuple[str, str]] = []
        bound: collections.Counter[str] = collections.Counter()
        shared: set[str] = set()
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    for one in names:
                        first = one.name.partition(".")[0]
                        imported.append((one.asname or first, one.name if one.asname else first))
                case ast.ImportFrom(module=source, names=names, level=level):
                    package = "." * level + (source or "")
                    imported += [(one.asname or one.name, f"{package}.{one.name}") for one in names]
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    bound[name] += 1
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    bound[name] += 1
                case (
                    ast.ExceptHandler(name=str(name))
                    | ast.MatchAs(name=str(name))
                    | ast.MatchStar(name=str(name))
                ):
                    bound[name] += 1
                case ast.MatchMapping(rest=str(name)):
                    bound[name] += 1
                case ast.Global(names=shared_names) | ast.Nonlocal(names=shared_names):
                    shared |= set(shared_names)
        imports = dict(imported)
        bound.update({name for name, target in imported if imports[name] != target})  # nobody knows which
        once = frozenset(name for name, times in bound.items() if times == 1 and name not in imports)
        values = {name: value for name, value in _given(tree) if name in once}
        plain = _plain(tree, bound)
        known = "*" not in imports
        replaces = not known or any(_replaces(node, imports) for node in ast.walk(tree))
        return cls(imports, frozenset(bound), frozenset(shared), plain, values, once, known, replaces)

    def called(self, func: ast.expr) -> str:
        """Return the full name of what is called, `time.sleep`; empty where that is not plain to see."""
        match func:
            case ast.Name(id=name) if name not in self.bound:
                return self.imports.get(name) or (f"builtins.{name}" if self.all_known else "")
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name not in self.bound:
                return f"{self.imports[name]}.{attr}" if name in self.imports else ""
            case ast.Attribute(value=ast.Attribute() as module, attr=attr):
                return f"{within}.{attr}" if (within := self.called(module)) else ""
        return ""

    def value(self, node: ast.expr) -> ast.expr:
        """Return what a name stands for; anything else stands for itself."""
        if isinstance(node, ast.Name) and self.all_known:
            return self.values.get(node.id, node)
        return node

    def number(self, node: ast.expr) -> int:
        """Return the whole number that is written there, such as `10**12`; 0 for anything else."""
        return self._number(node, NUMBER_DEPTH_MAX) or 0

    def _number(self, node: ast.expr, depth: int) -> int | None:
        if not depth:
            return None
        match self.value(node):
            case ast.Constant(value=int(number)):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                whole = self._number(operand, depth - 1)
                return None if whole is None else -whole
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _FOLDED:
                one, other = self._number(left, depth - 1), self._number(right, depth - 1)
                if one is None or other is None or max(abs(one), abs(other)).bit_length() > POWER_MAX:
                    return None
                return _FOLDED[type(op)](one, other)
        return None

    def is_number(self, node: ast.expr) -> bool:
        """Tell whether a whole number is written there, be it 0."""
        return self._number(node, NUMBER_DEPTH_MAX) is not None

    def text(self, node: ast.expr) -> str | bytes | None:
        """Return the text that is written there, such as `"a" * 64 + "b"`; None for anything else, or a long one."""
        match self.value(node):
            case ast.Constant(value=str(text) | bytes(text)):
                return text
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                for one, by in ((left, right), (right, left)):
                    repeated, times = self.text(one), self.number(by)
                    if repeated is not None and 0 < times * len(repeated) <= TEXT_CHARS_MAX:
                        return repeated * times
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                match self.text(left), self.text(right):
                    case (str(first), str(second)):
                        return first + second
                    case (bytes(first_bytes), bytes(second_bytes)):
                        return first_bytes + second_bytes
        return None

    def items(self, args: list[ast.expr]) -> int:
        """Return how many items a `range` has whose limits are written there; 0 when that is not plain to see."""
        if not all(self.is_number(one) for one in args):
            return 0
        try:
            counted = range(*(self.number(one) for one in args))
        except (TypeError, ValueError):
            return 0
        return max(0, (counted.stop - counted.start) // counted.step)  # `len` has a limit


def _given(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _plain(tree: ast.Module, bound: Mapping[str, int]) -> frozenset[str]:
    """Return the names that only statements like `done = False` or `rank, count = int(text), 0` bind."""
    found: collections.Counter[str] = collections.Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(name for target in targets for name in _made_plain(target, node.value))
    return frozenset(name for name, times in found.items() if times == bound[name])


def _made_plain(target: ast.expr, value: ast.expr) -> Iterator[str]:
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            for one, its in zip(targets, values, strict=True):
                yield from _made_plain(one, its)
        case ast.Name(id=name), ast.Constant():
            yield name
        case ast.Name(id=name), ast.Call(func=ast.Name(id="int" | "float" | "str" | "bool" | "len")):
            yield name


def _replaces(node: ast.AST, imports: Mapping[str, str]) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store()):
            return name in imports
        case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), *_]):
            return name in imports
        case ast.Call(func=ast.Attribute(attr="setattr" | "patch" | "__setattr__")):
            return True
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return any(_FAKES.search(f"{getattr(node, 'module', '')}.{one.name}") for one in names)
    return False


_FAKES = re.compile(r"mock|freez|time_machine")
"""What modules are called that replace the clock."""
