"""Does an expression never come to its end? Pure: what is written is all that counts.

`sum(itertools.repeat(1))` takes all of what has no end, `3 ** 10**10` makes a number of more digits than anybody waits for,
and `re.match("(a+)+$", "a" * 64 + "b")` tries more ways than that.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.node import patterns
from orchestrator.node.harmless import of
from orchestrator.node.written import Names

ENDLESS = 10**11
"""Whatever goes over so many items takes more than 10 minutes at the 6 ns that Python's fastest loops have for each."""

POWER_BITS_MAX = 2 * 10**8
"""A power of so many bits takes some 3 minutes: 3·10⁷ bits took 9 s, and the time of Karatsuba's multiplication grows
with the power 1.58 of the digits."""

FACTORIAL_MAX = 10**7
"""Takes some 8 minutes: that of 10⁶ took 10 s, and ten times the number takes some 50 times as long."""

HASHES_MAX = 10**9
"""So many rounds of a key's derivation take some 5 minutes: the fastest hash takes 0.3 us."""


_CONSUMERS = (
    of("builtins", "bytearray bytes frozenset list max min set sorted sum tuple")
    | of("collections", "Counter deque")
    | of("math", "fsum prod")
    | {"operator.countOf"}
)
"""What takes all of its first argument."""

_KEEP_ALL = of("builtins", "enumerate") | of("itertools", "accumulate pairwise")
"""What goes on as long as its first argument does."""

_SUMS = of("operator", "add and_ mul or_ sub xor")
_TYPES = of("builtins", "int float bool object")
_MATCHERS = of("re", "findall fullmatch match search split")
_SUBSTITUTES = of("re", "sub subn")

Harmless = Callable[[ast.AST], bool]
"""Tells of an expression whether it is known to return and to raise nothing."""


@dataclass(frozen=True, slots=True)
class Endless:
    """What of a module's expressions never ends. `harmless`: what is known to come back and to raise nothing."""

    names: Names
    harmless: Harmless

    def is_in(self, statement: ast.stmt, row: int) -> bool:
        """Tell whether what a statement evaluates at line `row`, come what may, has a part that never ends."""
        return any(self._takes_for_ever(node) for node in _evaluated(statement, row))

    def is_endless(self, taken: ast.expr) -> bool:
        """Tell whether an iterable has no end."""
        match taken:
            case ast.Call(func=func, args=args, keywords=keywords):
                return self._goes_on(self.names.called(func), args, keywords)
            case ast.GeneratorExp(elt=elt, generators=[ast.comprehension(iter=inner, ifs=ifs, is_async=0)]):
                return self.is_endless(inner) and all(self.harmless(node) for node in (elt, *ifs))
            case ast.Name():
                value = self.names.value(taken)
                return value is not taken and self.is_endless(value)
        return False

    def _goes_on(self, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> bool:
        """Tell whether an iterable has no end by the call that makes it."""
        match name, args:
            case "builtins.iter", [made, ast.Constant(value=ends_at)]:
                return self.names.called(made) in _TYPES and bool(ends_at)
            case "builtins.iter" | "builtins.reversed", [only]:
                return self.is_endless(only)
            case "itertools.repeat", _:
                counted = [*args[1:], *(word.value for word in keywords)]
                return not counted or self.names.number(counted[0]) >= ENDLESS
            case "builtins.range", _:
                return self.names.items(args) >= ENDLESS
            case "builtins.map" | "builtins.filter" | "itertools.filterfalse", [does, *taken]:
                return bool(taken) and self._returns(does) and all(self.is_endless(one) for one in taken)
            case "builtins.zip", [_, *_]:
                return all(self.is_endless(one) for one in args)
            case "itertools.chain", _:
                return any(self.is_endless(one) for one in args)
            case "itertools.islice", [taken, *limits]:
                return self.is_endless(taken) and self._slice_is_long(limits)
            case _, [taken, *_] if name in _KEEP_ALL:
                return self.is_endless(taken)
        return name in ("itertools.count", "itertools.cycle")

    def _slice_is_long(self, limits: list[ast.expr]) -> bool:
        stops = limits[:1] if len(limits) == 1 else limits[1:2]
        return any(_is_none(stop) or self.names.number(stop) >= ENDLESS for stop in stops)

    def _takes_for_ever(self, node: ast.expr) -> bool:
        """Tell whether one part of an expression never ends."""
        match node:
            case ast.Call(func=func, args=args):
                return self._call_takes_for_ever(func, args)
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[taken]):
                return self.is_endless(taken) and self._is_never_among(left, taken)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self._power_bits(left, right) > POWER_BITS_MAX
            case ast.ListComp() | ast.SetComp() | ast.DictComp():
                inner, *more = node.generators
                parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                return (
                    not more and self.is_endless(inner.iter) and all(map(self.harmless, (*parts, *inner.ifs)))
                )
        return False

    def _call_takes_for_ever(self, func: ast.expr, args: list[ast.expr]) -> bool:
        name = self.names.called(func)
        match name, args:
            case _, [taken, *_] if name in _CONSUMERS:
                return self.is_endless(taken)
            case "functools.reduce", [does, taken, *_]:
                return self.is_endless(taken) and self._reduces(does)
            case "builtins.any" | "builtins.all", [ast.Call(func=made, args=[ast.Constant(value=item), *_])]:
                # `any(repeat(0))`: what is repeated is never what it looks for.
                repeats = self.names.called(made) == "itertools.repeat" and self.is_endless(args[0])
                return repeats and bool(item) == (name == "builtins.all")
            case "builtins.pow", [left, right]:
                return self._power_bits(left, right) > POWER_BITS_MAX
            case "math.factorial", [number]:
                return self.names.number(number) >= FACTORIAL_MAX
            case "hashlib.pbkdf2_hmac", [_, _, _, rounds, *_]:
                return self.names.number(rounds) >= HASHES_MAX
        return self._matches_for_ever(func, name, args)

    def _reduces(self, does: ast.expr) -> bool:
        return self._returns(does) or self.names.called(does) in _SUMS

    def _returns(self, does: ast.expr) -> bool:
        """Tell whether what is called for each item is known to return, whatever the item: None calls nothing."""
        if isinstance(does, ast.Lambda):
            return self.harmless(does.body)
        return _is_none(does) or self.harmless(ast.Call(does, [], []))

    def _is_never_among(self, item: ast.expr, taken: ast.expr) -> bool:
        """Tell whether a number, text or None is not among what an endless iterable goes through."""
        item = ast.Constant(self.names.number(item)) if self.names.is_number(item) else item
        match item, taken:
            case ast.Constant(value=wanted), ast.Call(func=func, args=args):
                made = self.names.called(func)
                if made == "itertools.count":
                    return isinstance(wanted, str | None) or (
                        isinstance(wanted, int) and not args and wanted < 0
                    )
                return (
                    made == "itertools.repeat"
                    and isinstance(args[0], ast.Constant)
                    and args[0].value != wanted
                )
        return False

    def _power_bits(self, left: ast.expr, right: ast.expr) -> int:
        """Return the length of a power in bits; 0 where its numbers are not written there."""
        base, by = abs(self.names.number(left)), self.names.number(right)
        return int(math.log2(base) * min(by, ENDLESS)) if base > 1 and by > 0 else 0

    def _matches_for_ever(self, func: ast.expr, name: str, args: list[ast.expr]) -> bool:
        """The same of a call that matches a regular expression, by `re` or by one that was compiled before."""
        if isinstance(func, ast.Attribute) and not name:
            match self.names.value(func.value):
                case ast.Call(func=made, args=[pattern, *_]) if self.names.called(made) == "re.compile":
                    name, args = f"re.{func.attr}", [pattern, *args]
        if name in _SUBSTITUTES:
            args = [*args[:1], *args[2:]]
        elif name not in _MATCHERS:
            return False
        if len(args) < 2:
            return False
        pattern_text, text = self.names.text(args[0]), self.names.text(args[1])
        return pattern_text is not None and text is not None and patterns.takes_for_ever(pattern_text, text)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _evaluated(statement: ast.stmt, row: int) -> Iterator[ast.expr]:
    """Return the parts of an expression at a line that are evaluated whatever comes of the others."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.expr) and node.lineno <= row <= (node.end_lineno or 0):
            yield from _parts(node)


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    yield node
    match node:
        case ast.Lambda() | ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            return
        case ast.IfExp(test=first) | ast.BoolOp(values=[first, *_]):
            yield from _parts(first)
            return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _parts(child)
        elif isinstance(child, ast.keyword):
            yield from _parts(child.value)
