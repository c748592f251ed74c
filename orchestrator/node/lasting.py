"""How long does a loop take at least that has an end? Pure: what is written is all that counts.

`while time.time() < until` takes what was added to the clock before, `for _ in range(600): time.sleep(1)` ten minutes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.node.harmless import of
from orchestrator.node.written import Names

LONG_S = 60.0
"""A loop or a sleep that takes longer is as good as one that never ends."""

ROUND_S = 6e-9
"""What a round of a loop takes at least; that of Python's fastest."""

_MANY = 10**15
_CLOCKS_S = of("time", "time monotonic perf_counter")

_EARLIER, _LATER = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)

Stays = Callable[[ast.stmt], bool]
"""Tells of a statement of a loop whether nothing in it leaves that loop."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """How long a module's loops take at least. `stays`: which statements leave no loop and come back."""

    names: Names
    stays: Stays

    def loop_s(self, loop: ast.While | ast.For, before: Sequence[ast.stmt]) -> float:
        """Return the seconds that a loop takes at least; 0 where that is not plain to see. `before`: the statements of the
        same block ahead of it."""
        leaving = [one for one in loop.body if isinstance(one, ast.If) and _leaves(one)]
        if loop.orelse or not all(one in leaving or self.stays(one) for one in loop.body):
            return 0.0
        if isinstance(loop, ast.For):
            return 0.0 if leaving else self._rounds(loop.iter) * self._round_s(loop)
        begun = {name: value for name, value in _given(before, loop) if name not in self.names.shared}
        until = [self._clock_s(one.test, _LATER, begun) for one in leaving]
        if not (isinstance(loop.test, ast.Constant) and loop.test.value):
            until.append(self._clock_s(loop.test, _EARLIER, begun))
        return min(until, default=0.0)

    def _rounds(self, taken: ast.expr) -> int:
        if isinstance(taken, ast.Call) and self.names.called(taken.func) == "builtins.range":
            return min(self.names.items(taken.args), _MANY)
        return 0

    def _round_s(self, loop: ast.For) -> float:
        """Return what one round takes at least: what it sleeps, and the loops in it."""
        return max(ROUND_S, sum(self._statement_s(one, loop.body[:at]) for at, one in enumerate(loop.body)))

    def _statement_s(self, statement: ast.stmt, before: Sequence[ast.stmt]) -> float:
        match statement:
            case ast.Expr(value=ast.Call(func=func, args=[span])) if self.names.called(func) == "time.sleep":
                return self._seconds(span)
            case ast.For() | ast.While():
                return self.loop_s(statement, before)
        return 0.0

    def _clock_s(
        self, test: ast.expr, ops: tuple[type[ast.cmpop], ...], begun: Mapping[str, ast.expr]
    ) -> float:
        """Return after how long a clock is no more earlier, or is later, than what it is compared with."""
        match test:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(
                op, (*_EARLIER, *_LATER)
            ):
                return self._span_s(*((left, right) if isinstance(op, ops) else (right, left)), begun)
        return 0.0

    def _span_s(self, now: ast.expr, until: ast.expr, begun: Mapping[str, ast.expr]) -> float:
        if isinstance(until, ast.Name) and until.id in begun:
            until = begun[until.id]
        match now, until:
            case ast.Call(), ast.BinOp(left=left, op=ast.Add(), right=right):
                for start, span in ((left, right), (right, left)):
                    if self._is_begin(start, now, begun):
                        return self._seconds(span)
            case ast.BinOp(left=ast.Call() as clock, op=ast.Sub(), right=start), _:
                if self._is_begin(start, clock, begun):
                    return self._seconds(until)
        return 0.0

    def _is_begin(self, start: ast.expr, clock: ast.Call, begun: Mapping[str, ast.expr]) -> bool:
        """Tell whether this is what the same clock showed just before the loop."""
        if isinstance(start, ast.Name):
            start = begun.get(start.id, start)
        name = self.names.called(clock.func)
        return name in _CLOCKS_S and isinstance(start, ast.Call) and self.names.called(start.func) == name

    def _seconds(self, node: ast.expr) -> float:
        """Return a number that is written there; 0 for anything else, and for one that is less."""
        value = self.names.value(node)
        match value:
            case ast.Constant(value=float(number)):
                return max(number, 0.0)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self._seconds(left) * self._seconds(right)
        return float(min(max(self.names.number(value), 0), _MANY))


def _leaves(statement: ast.If) -> bool:
    """Tell whether a statement does nothing but leave the loop or its function, and that only if its test holds."""
    match statement:
        case ast.If(body=[ast.Break() | ast.Return(value=None | ast.Constant())], orelse=[]):
            return True
    return False


def _given(before: Sequence[ast.stmt], loop: ast.While) -> Iterable[tuple[str, ast.expr]]:
    """Return what names were given just before a loop, by statements that take no time, and keep in it."""
    given: dict[str, ast.expr] = {}
    for statement in reversed(before):
        if any(isinstance(node, ast.Call) and not _is_quick(node) for node in ast.walk(statement)):
            break
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                given.setdefault(name, value)
            case ast.Pass() | ast.Expr():
                pass
            case _:
                break
    changed = {
        node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return [(name, value) for name, value in given.items() if name not in changed]


def _is_quick(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("print", "time", "monotonic", "perf_counter")
