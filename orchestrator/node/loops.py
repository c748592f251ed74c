"""Can the loop around a line end? Pure: source text in, what can be read off it out.

Rules: only what is plain to see counts. A loop never ends when all of it is known to be harmless: plain statements, and
calls of functions that return and leave nothing, under the names that Python and the imports give them (`harmless`), and
the module's own functions that are as harmless. Of a loop that calls anything else nothing is known. One of which nothing
but an error can leave ends the rank with it, unless somebody catches that.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.node import harmless
from orchestrator.node.endless import Endless
from orchestrator.node.harmless import Care
from orchestrator.node.lasting import LONG_S, Lasting
from orchestrator.node.settled import Settled
from orchestrator.node.written import POWER_MAX, Names


class Ending(enum.Enum):
    """What is known of the end of a loop."""

    UNKNOWN = "it may end or not, or there is no loop"
    NEVER = "nothing in it can leave it"
    BY_OTHERS = "nothing in it can leave it, but another thread could let it end"
    BY_ERROR = "nothing but an error in it can leave it"
    LONG = "it takes longer than a minute by what is written in it"
    SURE = "it goes over data, counts to an end, or looks at a clock"


_DIVISIONS = (ast.Div, ast.FloorDiv, ast.Mod)
_BLOCKS = ("body", "orelse", "finalbody")
_LEAVES = (ast.Break, ast.Return, ast.Raise)

MODULES_KEPT = 4
PLACES_KEPT = 64

ROUNDS_MAX = 8
"""Functions that call each other deeper than this, down to one that may not return, are not followed."""


@functools.lru_cache(PLACES_KEPT)
def ending(text: str, row: int) -> Ending:
    """Say what is known of the end of the loop around line `row` of a module, 1 being its first."""
    try:
        return _ending(_parsed(text), row)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Ending.UNKNOWN


@functools.lru_cache(PLACES_KEPT)
def lasts_s(text: str, row: int) -> float:
    """Return how many seconds the loops around a line take at least whose `ending` is LONG; 0 where it is not."""
    return _lasts_s(_parsed(text), row) if ending(text, row) is Ending.LONG else 0.0


def caught(text: str, row: int) -> Ending:
    """Say how far the module lets its line `row` be left by an exception, and goes on: NEVER; only by an interrupt, and so
    BY_OTHERS; or UNKNOWN."""
    try:
        tree = _parsed(text).tree
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Ending.UNKNOWN
    return least(kind for node in ast.walk(tree) for kind in _catches(node, row))


def least(endings: Iterable[Ending]) -> Ending:
    """Return what is known where all of these hold: UNKNOWN first, and NEVER only where there is nothing else."""
    found, less = set(endings), (Ending.UNKNOWN, Ending.BY_OTHERS, Ending.BY_ERROR, Ending.LONG)
    return next((one for one in less if one in found), Ending.NEVER)


def _catches(node: ast.AST, row: int) -> Iterator[Ending]:
    match node:
        case ast.Try(body=body, handlers=handlers, finalbody=last) if any(_covers(one, row) for one in body):
            if any(isinstance(one, _GOES_ON) for statement in last for one in ast.walk(statement)):
                yield Ending.UNKNOWN
            for handler in handlers:
                if not _raises(handler):
                    interrupt = isinstance(handler.type, ast.Name) and handler.type.id == "KeyboardInterrupt"
                    yield Ending.BY_OTHERS if interrupt else Ending.UNKNOWN
        case ast.With(items=items) if _covers(node, row):
            for word in (part for item in items for part in ast.walk(item.context_expr)):
                name = word.attr if isinstance(word, ast.Attribute) else getattr(word, "id", "")
                if _SUPPRESSES.search(name):
                    yield Ending.UNKNOWN


_GOES_ON = (ast.Return, ast.Break, ast.Continue)


def _raises(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler lets go on nobody: it raises at its end, and nothing in it comes before that."""
    inside = any(isinstance(one, _GOES_ON) for statement in handler.body for one in ast.walk(statement))
    return isinstance(handler.body[-1], ast.Raise) and not inside


_SUPPRESSES = re.compile(r"(?i)suppress|raises|timeout|time_limit|alarm|deadline")
"""How context managers are called that swallow what their block raises, or that raise in it."""


def returns(text: str, function: str) -> bool:
    """Tell whether a function of a module is known to return unless it fails; so are generators within a call."""
    try:
        return (
            function in ("<genexpr>", "<listcomp>", "<setcomp>") or function in _parsed(text).less.functions
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


@functools.lru_cache(MODULES_KEPT)
def _parsed(text: str) -> _Parsed:
    """Read a module; the frames of a stack, and the ranks of a node, mostly are in the same few."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has told the script's own log what it thinks of it
        tree = ast.parse(text)
    names = Names.of(tree)
    modules = (_Module.of(tree, names, care) for care in (Care.SURE, Care.UNLESS_IT_FAILS))
    return _Parsed(tree, Settled.of(tree, names), *modules)


def _ending(parsed: _Parsed, row: int) -> Ending:
    module = parsed.sure
    around = [node for node in ast.walk(parsed.tree) if isinstance(node, ast.stmt) and _covers(node, row)]
    loops = [
        node
        for node in around
        if isinstance(node, ast.While | ast.For) and row <= (node.body[-1].end_lineno or 0)
    ]
    if any(map(module.never_ends, loops)) or any(module.endless.is_in(one, row) for one in around):
        return Ending.NEVER
    if any(module.stands(loop, parsed.settled) for loop in loops):
        return Ending.BY_OTHERS
    if any(map(parsed.less.never_ends, loops)):
        return Ending.BY_ERROR
    if not parsed.settled.meddled and _lasts_s(parsed, row) > LONG_S:
        return Ending.LONG
    inner = loops[-1:]  # `walk` comes from the outside
    return Ending.SURE if inner and _innermost_ends(module, inner[0], around) else Ending.UNKNOWN


def _lasts_s(parsed: _Parsed, row: int) -> float:
    """Return how long the longest of the loops around a line takes at least."""
    lasting, longest_s = parsed.sure.lasting, 0.0
    for node in ast.walk(parsed.tree):
        for block in (getattr(node, name, ()) for name in _BLOCKS):
            for at, one in enumerate(block if isinstance(block, list) else []):
                if isinstance(one, ast.While | ast.For) and _covers(one, row):
                    longest_s = max(longest_s, lasting.loop_s(one, block[:at]))
    return longest_s


def _covers(node: ast.stmt, row: int) -> bool:
    return node.lineno <= row <= (node.end_lineno or 0)


def _innermost_ends(module: _Module, loop: ast.While | ast.For, around: list[ast.stmt]) -> bool:
    """Tell whether a loop has an end, and the line is not in a function that is only defined in it."""
    if any(isinstance(node, ast.FunctionDef) for node in around[around.index(loop) :]):
        return False
    return (
        not module.endless.is_endless(loop.iter) if isinstance(loop, ast.For) else module.looks_at_clock(loop)
    )


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A module, and what is known of it for `sure`, and with `less` care."""

    tree: ast.Module
    settled: Settled
    sure: _Module
    less: _Module


@dataclass(frozen=True, slots=True)
class _Module:
    """What is known of a module. `names`: what they stand for; `functions`: those of its own that return, as sure as
    `care` says."""

    names: Names
    care: Care
    functions: frozenset[str]

    @classmethod
    def of(cls, tree: ast.Module, names: Names, care: Care) -> _Module:
        """Read a module."""
        functions = {
            node.name: node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name in names.once
        }
        return cls(names, care, frozenset(functions))._with_those_that_return(functions)

    def _with_those_that_return(self, functions: Mapping[str, ast.FunctionDef]) -> _Module:
        """Take them all to return, and then leave out those that do not if the others do, until that says no more."""
        module = self
        for _ in range(ROUNDS_MAX):
            left = [
                name for name in module.functions if module._are_harmless(functions[name].body, inside=True)
            ]
            if len(left) == len(module.functions):
                return module
            module = dataclasses.replace(module, functions=frozenset(left))
        return dataclasses.replace(module, functions=frozenset())

    @property
    def endless(self) -> Endless:
        """What of its expressions never ends."""
        return Endless(self.names, self._is_harmless)

    @property
    def lasting(self) -> Lasting:
        """How long its loops take."""
        return Lasting(self.names)

    def never_ends(self, loop: ast.While | ast.For) -> bool:
        """Tell whether a loop goes on for ever, whatever happens elsewhere."""
        if isinstance(loop, ast.For):
            endless = self.endless.is_endless(loop.iter)
        else:
            endless = isinstance(loop.test, ast.Constant) and bool(loop.test.value)
        return endless and self._stays(loop)

    def stands(self, loop: ast.While | ast.For, settled: Settled) -> bool:
        """Tell whether a loop that was entered goes on for ever unless another thread changes what it looks at."""
        if isinstance(loop, ast.For) or not self._is_harmless(loop.test) or not self._stays(loop):
            return False
        if settled.meddled:
            return False
        if any(isinstance(node, ast.Call) for node in ast.walk(loop.test)):
            return settled.is_fixed(loop.test)
        looked_at = set(_names(loop.test, ast.Load))
        own = self.names.plain - self.names.shared - set(self.names.imports)
        elsewhere = any(isinstance(node, ast.Attribute) for node in ast.walk(loop.test))
        return bool(looked_at) and not elsewhere and looked_at <= own - set(_names(loop, ast.Store))

    def looks_at_clock(self, loop: ast.While) -> bool:
        """Tell whether a loop is left by the clock: in its condition, or where something in it leaves."""
        leaving = [
            node.test
            for node in ast.walk(loop)
            if isinstance(node, ast.If) and any(isinstance(one, _LEAVES) for one in ast.walk(node))
        ]
        compared = (
            node for test in (loop.test, *leaving) for node in ast.walk(test) if isinstance(node, ast.Compare)
        )
        calls = (node for one in compared for node in ast.walk(one) if isinstance(node, ast.Call))
        return any(self.names.called(call.func) in harmless.CLOCKS for call in calls)

    def _stays(self, loop: ast.While | ast.For) -> bool:
        """Tell whether nothing in the body of a loop leaves it."""
        return all(map(self._stays_in, loop.body))

    def _stays_in(self, statement: ast.stmt) -> bool:
        return self._is_harmless(statement) and not _breaks(statement)

    def _is_harmless(self, node: ast.AST, inside: bool = False) -> bool:
        """`inside`: of a function, which `return` leaves, and no loop around its call."""
        match node:
            case ast.Call(func=func, args=args, keywords=keywords):
                given = (*args, *(word.value for word in keywords))
                if self._takes_all_of_a_thing(func, args):
                    return False
                return self._returns(func, inside) and self._are_harmless(given, inside)
            case ast.With(items=items):
                plain = all(self._is_plain_context(one) for one in items)
                return plain and self._are_harmless(node.body, inside)
            case ast.For():
                parts = (node.iter, node.target, *node.body, *node.orelse)
                return self._ends(node.iter) and self._are_harmless(parts, inside)
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
                over = all(self._ends(one.iter) and not one.is_async for one in node.generators)
                parts = (node.elt, *(part for one in node.generators for part in (one.iter, *one.ifs)))
                return over and self._are_harmless(parts, inside)
            case ast.BinOp(op=op, right=by) | ast.AugAssign(op=op, value=by):
                if harmless.may_raise(op, self.care) and not _divides(op, by):
                    return False
            case ast.Return(value=value):
                return inside and (value is None or self._is_harmless(value))
            case ast.Break():
                return True  # see `_breaks`
        return harmless.is_plain(node, self.care) and self._are_harmless(ast.iter_child_nodes(node), inside)

    def _takes_all_of_a_thing(self, func: ast.expr, args: list[ast.expr]) -> bool:
        """Tell whether a call goes over something that is not known: a loader of data does its work by that."""
        match args:
            case [ast.Name() | ast.Attribute() | ast.Subscript()]:
                return self.names.called(func) in harmless.CONSUMERS
        return False

    def _are_harmless(self, nodes: Iterable[ast.AST], inside: bool) -> bool:
        return all(self._is_harmless(node, inside) for node in nodes)

    def _ends(self, taken: ast.expr) -> bool:
        """Tell whether going over an iterable comes to its end, and raises nothing on the way."""
        return isinstance(taken, ast.Tuple | ast.List) or (
            isinstance(taken, ast.Call) and self.names.called(taken.func) == "builtins.range"
        )

    def _is_plain_context(self, item: ast.withitem) -> bool:
        called = item.context_expr.func if isinstance(item.context_expr, ast.Call) else item.context_expr
        return item.optional_vars is None and harmless.is_plain_context(self.names.called(called), self.care)

    def _returns(self, func: ast.expr, inside: bool) -> bool:
        """Tell whether a function that is called returns, whatever happens."""
        name = self.names.called(func)
        if name:
            return harmless.comes_back(name, self.care)
        if isinstance(func, ast.Attribute):
            of_data = harmless.is_method_of_data(func.attr, self.care)
            return of_data and self._is_harmless(func.value, inside)
        return isinstance(func, ast.Name) and func.id in self.functions


def _breaks(node: ast.AST) -> bool:
    """Tell whether a `break` in a statement of a loop leaves that loop, and not one inside it."""
    if isinstance(node, ast.While | ast.For):
        return any(_breaks(one) for one in node.orelse)
    return isinstance(node, ast.Break) or any(_breaks(one) for one in ast.iter_child_nodes(node))


def _divides(op: ast.operator, by: ast.expr) -> bool:
    """Tell whether it is a division by a number that is written there, and not 0; or a small power."""
    number = by.value if isinstance(by, ast.Constant) else None
    if isinstance(op, ast.Pow):
        return isinstance(number, int) and 0 <= number <= POWER_MAX
    return isinstance(op, _DIVISIONS) and isinstance(number, int | float) and bool(number)


def _names(node: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context))
