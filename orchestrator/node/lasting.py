"""How long does a loop take at least that has an end? Pure: what is written is all that counts.

`while time.time() < until` takes what was added to the clock just before, `for _ in range(600): time.sleep(1)` ten minutes.
Only loops of a few kinds of statements are understood, with numbers that are written where they are used: a constant of the
module may be another one by then.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.node.harmless import of
from orchestrator.node.written import Names

LONG_S = 60.0
"""A loop or a sleep that takes longer is as good as one that never ends."""

_CLOCKS_S = of("time", "time monotonic perf_counter")
_NUMBER_MAX = 1e15
_QUICK = (ast.Add, ast.Sub, ast.Mult)
_EARLIER, _LATER = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a clock shows so many seconds after the loop has begun, or began."""

    clock: str
    after_s: float


Known = Mapping[str, "Moment | float"]
"""What names stand for when a loop begins."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """How long a module's loops take at least."""

    names: Names

    def loop_s(self, loop: ast.While | ast.For, before: Sequence[ast.stmt]) -> float:
        """Return the seconds that a loop takes at least; 0 where that is not plain to see. `before`: the statements of the
        same block ahead of it."""
        if loop.orelse or self.names.replaces:
            return 0.0
        if isinstance(loop, ast.For):
            return max(self._statement_s(loop), 0.0)
        leaving = [one for one in loop.body if isinstance(one, ast.If) and _leaves(one)]
        rest = [one for one in loop.body if one not in leaving]
        asked = set().union(*(_read(test) for test in (loop.test, *(one.test for one in leaving))))
        if self._round_s(rest) < 0 or _stored(rest) & asked:
            return 0.0
        known = self._known(before)
        until = [self._span_s(one.test, _LATER, known) for one in leaving]
        if not (isinstance(loop.test, ast.Constant) and loop.test.value):
            until.append(self._span_s(loop.test, _EARLIER, known))
        return min(until, default=0.0)

    def _rounds(self, loop: ast.For) -> float:
        """Return how often a loop goes round over a `range` of numbers that are written there."""
        match loop:
            case ast.For(target=ast.Name(), iter=ast.Call(func=func, args=[only], keywords=[])):
                rounds = _number(only) if self.names.called(func) == "builtins.range" else None
                return max(rounds or 0.0, 0.0)
        return 0.0

    def _round_s(self, body: Sequence[ast.stmt]) -> float:
        """Return how long the statements of a round sleep; less than 0 where they may do anything else."""
        whole_s = 0.0
        for statement in body:
            took_s = self._statement_s(statement)
            if took_s < 0:
                return -math.inf
            whole_s += took_s
        return whole_s

    def _statement_s(self, statement: ast.stmt) -> float:
        match statement:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return 0.0
            case ast.Assign(targets=[ast.Name()], value=value) if _is_plain(value):
                return 0.0
            case ast.AugAssign(target=ast.Name(), op=op, value=value) if _is_plain(value):
                return 0.0 if isinstance(op, _QUICK) else -math.inf
            case ast.Expr(value=ast.Call(func=func, args=[span], keywords=[])):
                span_s = _number(span) if self.names.called(func) == "time.sleep" else None
                return -math.inf if span_s is None else span_s
            case ast.For(orelse=[]):
                rounds, round_s = self._rounds(statement), self._round_s(statement.body)
                return rounds * round_s if rounds and round_s >= 0 else -math.inf
        return -math.inf

    def _known(self, before: Sequence[ast.stmt]) -> Known:
        """Return what names stand for by the statements just before a loop, those alone that take no time."""
        quick = list(itertools.takewhile(self._is_quick, reversed(before)))
        known: dict[str, Moment | float] = {}
        for statement in reversed(quick):
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found = self._value(value, known)
                    known.pop(name, None)
                    if found is not None and name not in self.names.shared:
                        known[name] = found
        return known

    def _is_quick(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Pass():
                return True
            case ast.Assign(targets=[ast.Name()], value=value):
                return self._is_soon_known(value)
            case ast.Expr(value=ast.Call(func=func, args=args, keywords=words)):
                given = (*args, *(word.value for word in words))
                return self.names.called(func) == "builtins.print" and all(
                    isinstance(one, ast.Constant) for one in given
                )
        return False

    def _is_soon_known(self, value: ast.expr) -> bool:
        if isinstance(value, ast.BinOp) and isinstance(value.op, _QUICK):
            return self._is_soon_known(value.left) and self._is_soon_known(value.right)
        return _is_plain(value) or self._reads_clock(value)

    def _reads_clock(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Call)
            and not node.args
            and not node.keywords
            and self.names.called(node.func) in _CLOCKS_S
        )

    def _value(self, node: ast.expr, known: Known) -> Moment | float | None:
        """Return what an expression stands for; None where it is not known."""
        match node:
            case ast.Call(func=func) if self._reads_clock(node):
                return Moment(self.names.called(func), 0.0)
            case ast.Name(id=name):
                return known.get(name)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                match self._value(left, known), self._value(right, known):
                    case (Moment() as moment, float(span_s)) | (float(span_s), Moment() as moment):
                        return Moment(moment.clock, moment.after_s + span_s)
                    case float(one), float(other):
                        return one + other
                return None
        return _number(node)

    def _span_s(self, test: ast.expr, ops: tuple[type[ast.cmpop], ...], known: Known) -> float:
        """Return after how long a clock is no more earlier, or is later, than what it is compared with."""
        match test:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(
                op, (*_EARLIER, *_LATER)
            ):
                now, until = (left, right) if isinstance(op, ops) else (right, left)
            case _:
                return 0.0
        match now:
            case ast.Call(func=func) if self._reads_clock(now):
                end = self._value(until, known)
                is_then = isinstance(end, Moment) and end.clock == self.names.called(func)
                return end.after_s if isinstance(end, Moment) and is_then else 0.0
            case ast.BinOp(left=ast.Call(func=func) as clock, op=ast.Sub(), right=ast.Name(id=name)):
                start, span_s = known.get(name), self._value(until, known)
                if self._reads_clock(clock) and isinstance(start, Moment) and isinstance(span_s, float):
                    return start.after_s + span_s if start.clock == self.names.called(func) else 0.0
        return 0.0


def _leaves(statement: ast.If) -> bool:
    """Tell whether a statement does nothing but leave the loop or its function, and that only if its test holds."""
    match statement:
        case ast.If(body=[ast.Break() | ast.Return(value=None | ast.Constant())], orelse=[]):
            return True
    return False


def _stored(body: Sequence[ast.stmt]) -> set[str]:
    nodes = (node for one in body for node in ast.walk(one))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _read(test: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}


def _is_plain(value: ast.expr) -> bool:
    """Tell whether an expression is a number or a name, or adds, subtracts or multiplies such."""
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _QUICK):
            return _is_plain(left) and _is_plain(right)
    return False


def _number(node: ast.expr) -> float | None:
    """Return the number that is written there, such as `10 * 60`; None for anything else, and below 0."""
    match node:
        case ast.Constant(value=int(number) | float(number)) if not isinstance(number, bool):
            return float(number) if 0 <= number <= _NUMBER_MAX else None
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _number(left), _number(right)
            return None if one is None or other is None else min(one * other, _NUMBER_MAX)
        case ast.BinOp(left=ast.Constant(value=10), op=ast.Pow(), right=ast.Constant(value=int(by))):
            return 10.0**by if 0 <= by <= 15 else None
    return None
