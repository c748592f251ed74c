"""Can the loop around a line end? Pure: source text in, what can be read off it out.

Rules: only what is plain to see counts. A loop never ends when all of it is known to be harmless: plain statements, and
calls of functions that return and leave nothing: `HARMLESS_CALLS`, under the names that Python and the imports give them,
and the module's own functions that are as harmless. Whatever else is called could raise, and so leave the loop: of such a
loop nothing is known.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass


class Ending(enum.Enum):
    """What is known of the end of a loop."""

    UNKNOWN = "it may end or not, or there is no loop"
    NEVER = "nothing in it can leave it"
    BY_OTHERS = "nothing in it can leave it, but another thread could let it end"
    SURE = "it goes over data, counts to an end, or looks at a clock"


_HARMLESS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass, ast.If, ast.Continue, ast.Expr, ast.Name, ast.Constant,
    ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp, ast.expr_context, ast.boolop, ast.unaryop, ast.cmpop,
    ast.operator, ast.While, ast.Tuple, ast.List, ast.Attribute, ast.JoinedStr, ast.FormattedValue,
    ast.Global, ast.Nonlocal,
)  # fmt: skip
"""What a loop may consist of, for it to be known that nothing in it leaves it, calls aside: no indices."""

_CAN_RAISE = (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift, ast.MatMult)
_DIVISIONS = (ast.Div, ast.FloorDiv, ast.Mod)


def _of(module: str, names: str) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for name in names.split())


_CLOCKS = _of("time", "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns")
_CONSUMERS = _of("builtins", "list max min set sorted sum tuple") | {"collections.deque"}
HARMLESS_CALLS = (
    _of(
        "builtins",
        "abs all any bool divmod enumerate float hash id int isinstance len list max min range round set sorted str",
    )
    | _of("builtins", "sum tuple type zip")
    | _of(
        "torch",
        "add arange bmm cos empty exp eye full log matmul mean mm mul ones rand randint randn relu sigmoid sin",
    )
    | _of("torch", "softmax sqrt sum tanh tensor zeros")
    | _CLOCKS
    | {"time.sleep"}
)
"""Functions that return, and that no loop is left by: what they could raise they would have raised the first time."""

_HARMLESS_MODULES = ("math.", "random.")
_LEAVES = (ast.Break, ast.Return, ast.Raise)

ENDLESS = 10**11
"""Whatever goes over so many items takes more than 10 minutes at the 6 ns that Python's fastest loops have for each."""

POWER_MAX = 64
_FOLDED: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__,
    ast.Pow: lambda number, by: number**by if 0 <= by <= POWER_MAX else 0,
    ast.LShift: lambda number, by: number << by if 0 <= by <= POWER_MAX else 0,
}  # fmt: skip

MODULES_KEPT = 4
PLACES_KEPT = 64

ROUNDS_MAX = 8
"""Functions that call each other deeper than this, down to one that may not return, are not followed."""


@functools.lru_cache(PLACES_KEPT)
def ending(text: str, row: int) -> Ending:
    """Say what is known of the end of the loop around line `row` of a module, 1 being its first."""
    try:
        return _ending(*_parsed(text), row)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Ending.UNKNOWN


def caught(text: str, row: int) -> Ending:
    """Say how far the module lets its line `row` be left by an exception, and goes on: NEVER; only by an interrupt, and so
    BY_OTHERS; or UNKNOWN."""
    try:
        tree = _parsed(text)[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Ending.UNKNOWN
    return least(kind for node in ast.walk(tree) for kind in _catches(node, row))


def least(endings: Iterable[Ending]) -> Ending:
    """Return what is known where all of these hold: UNKNOWN before BY_OTHERS, and NEVER only where there is neither."""
    found = set(endings)
    return next((one for one in (Ending.UNKNOWN, Ending.BY_OTHERS) if one in found), Ending.NEVER)


def _catches(node: ast.AST, row: int) -> Iterator[Ending]:
    match node:
        case ast.Try(body=body, handlers=handlers) if any(_covers(one, row) for one in body):
            for handler in handlers:
                if not isinstance(handler.body[-1], ast.Raise):
                    interrupt = isinstance(handler.type, ast.Name) and handler.type.id == "KeyboardInterrupt"
                    yield Ending.BY_OTHERS if interrupt else Ending.UNKNOWN
        case ast.With(items=items) if _covers(node, row):
            for word in (part for item in items for part in ast.walk(item.context_expr)):
                name = word.attr if isinstance(word, ast.Attribute) else getattr(word, "id", "")
                if _SUPPRESSES.search(name):
                    yield Ending.UNKNOWN


_SUPPRESSES = re.compile(r"(?i)suppress|raises|timeout|time_limit|alarm|deadline")
"""How context managers are called that swallow what their block raises, or that raise in it."""


def returns(text: str, function: str) -> bool:
    """Tell whether a function of a module is known to return, whatever happens; so are generators within a call."""
    try:
        return function in ("<genexpr>", "<listcomp>", "<setcomp>") or function in _parsed(text)[1].functions
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


@functools.lru_cache(MODULES_KEPT)
def _parsed(text: str) -> tuple[ast.Module, _Module]:
    """Read a module; the frames of a stack, and the ranks of a node, mostly are in the same few."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has told the script's own log what it thinks of it
        tree = ast.parse(text)
    return tree, _Module.of(tree)


def _ending(tree: ast.Module, module: _Module, row: int) -> Ending:
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _covers(node, row)]
    loops = [node for node in around if isinstance(node, ast.While | ast.For)]
    if any(module.never_ends(loop) for loop in loops) or any(module.takes_for_ever(one) for one in around):
        return Ending.NEVER
    if any(module.stands(loop) for loop in loops):
        return Ending.BY_OTHERS
    inner = loops[-1:]  # `walk` comes from the outside
    return Ending.SURE if inner and _innermost_ends(module, inner[0], around) else Ending.UNKNOWN


def _covers(node: ast.stmt, row: int) -> bool:
    return node.lineno <= row <= (node.end_lineno or 0)


def _innermost_ends(module: _Module, loop: ast.While | ast.For, around: list[ast.stmt]) -> bool:
    """Tell whether a loop has an end, and the line is not in a function that is only defined in it."""
    if any(isinstance(node, ast.FunctionDef) for node in around[around.index(loop) :]):
        return False
    return not module.is_endless(loop.iter) if isinstance(loop, ast.For) else module.looks_at_clock(loop)


@dataclass(frozen=True, slots=True)
class _Module:
    """The names of a module. `imports`: what each imported name stands for; `bound`: names with a meaning of its own
    somewhere in it; `shared`: those that functions rebind for others; `plain`: those that are never anything but numbers,
    texts, truth values or None, which nobody changes from afar; `functions`: its own that return, whatever
    happens; `all_known`: no name comes from a `*`."""

    imports: dict[str, str]
    bound: frozenset[str]
    shared: frozenset[str]
    plain: frozenset[str]
    functions: frozenset[str]
    all_known: bool

    @classmethod
    def of(cls, tree: ast.Module) -> _Module:
        """Read the names off a module."""
        imports: dict[str, str] = {}
        bound: collections.Counter[str] = collections.Counter()
        shared: set[str] = set()
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    imports |= {(one.asname or one.name.partition(".")[0]): one.name for one in names}
                case ast.ImportFrom(module=source, names=names):
                    imports |= {(one.asname or one.name): f"{source}.{one.name}" for one in names}
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    bound[name] += 1
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    bound[name] += 1
                case ast.Global(names=shared_names) | ast.Nonlocal(names=shared_names):
                    shared |= set(shared_names)
        functions = {
            node.name: node
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and not node.decorator_list
            and bound[node.name] == 1
            and node.name not in imports
        }
        plain = _plain(tree, bound)
        module = cls(
            imports, frozenset(bound), frozenset(shared), plain, frozenset(functions), "*" not in imports
        )
        return module._with_those_that_return(functions)

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

    def called(self, func: ast.expr) -> str:
        """Return the full name of what is called, `time.sleep`; empty where that is not plain to see."""
        match func:
            case ast.Name(id=name) if name not in self.bound:
                return self.imports.get(name) or (f"builtins.{name}" if self.all_known else "")
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name not in self.bound:
                return f"{self.imports[name]}.{attr}" if name in self.imports else ""
        return ""

    def never_ends(self, loop: ast.While | ast.For) -> bool:
        """Tell whether a loop goes on for ever, whatever happens elsewhere."""
        if isinstance(loop, ast.For):
            endless = self.is_endless(loop.iter)
        else:
            endless = isinstance(loop.test, ast.Constant) and bool(loop.test.value)
        return endless and self._stays(loop)

    def stands(self, loop: ast.While | ast.For) -> bool:
        """Tell whether a loop that was entered goes on for ever unless another thread changes what it looks at."""
        if isinstance(loop, ast.For) or not self._is_harmless(loop.test) or not self._stays(loop):
            return False
        looked_at = set(_names(loop.test, ast.Load))
        own = self.plain - self.shared - set(self.imports)
        elsewhere = any(isinstance(node, ast.Call | ast.Attribute) for node in ast.walk(loop.test))
        return bool(looked_at) and not elsewhere and looked_at <= own - set(_names(loop, ast.Store))

    def takes_for_ever(self, statement: ast.stmt) -> bool:
        """Tell whether a statement is one call that takes all of what never ends: `sum(itertools.repeat(1))`."""
        if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Return):
            return False
        match statement.value:
            case ast.Call(func=func, args=[taken, *_]):
                return self.called(func) in _CONSUMERS and self.is_endless(taken)
        return False

    def is_endless(self, taken: ast.expr) -> bool:
        """Tell whether an iterable has no end."""
        match taken:
            case ast.Call(func=func, args=args, keywords=keywords):
                name = self.called(func)
                types = ("builtins.int", "builtins.float", "builtins.bool", "builtins.object")
                if name == "builtins.iter" and len(args) == 2:
                    ends_at = args[1]
                    return (
                        self.called(args[0]) in types
                        and isinstance(ends_at, ast.Constant)
                        and bool(ends_at.value)
                    )
                if name == "itertools.repeat":
                    counted = [*args[1:], *(word.value for word in keywords)]
                    return not counted or _number(counted[0]) >= ENDLESS
                if name == "builtins.range":
                    return _items(args) >= ENDLESS
                return name in ("itertools.count", "itertools.cycle")
            case ast.GeneratorExp(elt=elt, generators=[ast.comprehension(iter=inner, ifs=ifs, is_async=0)]):
                return self.is_endless(inner) and all(self._is_harmless(node) for node in (elt, *ifs))
        return False

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
        return any(self.called(call.func) in _CLOCKS for call in calls)

    def _stays(self, loop: ast.While | ast.For) -> bool:
        """Tell whether nothing in the body of a loop leaves it."""
        return all(self._is_harmless(one) for one in loop.body) and not any(_breaks(one) for one in loop.body)

    def _is_harmless(self, node: ast.AST, inside: bool = False) -> bool:
        """`inside`: of a function, which `return` leaves, and no loop around its call."""
        match node:
            case ast.Call(func=func, args=args, keywords=keywords):
                given = (*args, *(word.value for word in keywords))
                return self._returns(func) and self._are_harmless(given, inside)
            case ast.For():
                parts = (node.iter, node.target, *node.body, *node.orelse)
                return self._ends(node.iter) and self._are_harmless(parts, inside)
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
                over = all(self._ends(one.iter) and not one.is_async for one in node.generators)
                parts = (node.elt, *(part for one in node.generators for part in (one.iter, *one.ifs)))
                return over and self._are_harmless(parts, inside)
            case ast.BinOp(op=op, right=by) | ast.AugAssign(op=op, value=by) if isinstance(op, _CAN_RAISE):
                if not _divides(op, by):
                    return False
            case ast.Return(value=value):
                return inside and (value is None or self._is_harmless(value))
            case ast.Break():
                return True  # see `_breaks`
        return isinstance(node, _HARMLESS) and self._are_harmless(ast.iter_child_nodes(node), inside)

    def _are_harmless(self, nodes: Iterable[ast.AST], inside: bool) -> bool:
        return all(self._is_harmless(node, inside) for node in nodes)

    def _ends(self, taken: ast.expr) -> bool:
        """Tell whether going over an iterable comes to its end, and raises nothing on the way."""
        return isinstance(taken, ast.Tuple | ast.List) or (
            isinstance(taken, ast.Call) and self.called(taken.func) == "builtins.range"
        )

    def _returns(self, func: ast.expr) -> bool:
        """Tell whether a function that is called returns, whatever happens."""
        name = self.called(func)
        own = isinstance(func, ast.Name) and func.id in self.functions
        return own or name in HARMLESS_CALLS or name.startswith(_HARMLESS_MODULES)


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


def _items(args: list[ast.expr]) -> int:
    """Return how many items a `range` has whose limits are written there; 0 when that is not plain to see."""
    numbers = [_number(one) for one in args]
    plain = all(isinstance(one, ast.Constant) or number for one, number in zip(args, numbers, strict=True))
    try:
        counted = range(*numbers) if plain else range(0)
    except (TypeError, ValueError):
        return 0
    return max(0, (counted.stop - counted.start) // counted.step)  # `len` has a limit


def _number(node: ast.expr) -> int:
    """Return the whole number that is written there, such as `10**12`; 0 for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _FOLDED:
            sides = _number(left), _number(right)
            small = all(abs(side).bit_length() <= POWER_MAX for side in sides)
            return _FOLDED[type(op)](*sides) if small else 0
    return 0


def _names(node: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context))
