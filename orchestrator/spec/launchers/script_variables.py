"""Variables of a shell script as far as its text alone gives their values: what it sets, and the arguments that it is given."""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.spec.launchers import shell_text

_VARIABLE = re.compile(r"\$(?:\{(?P<wrapped>\w+)(?::?-(?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*|[1-9]))")
_ARGUMENTS = re.compile(r"\"\$[@*]\"|\$[@*]|\"\$\{[@*]\}\"")
_LIST = re.compile(r"(?P<quote>\"?)\$\{(?P<name>\w+)\[[@*]\]\}(?P=quote)")
_LIST_WORD = re.compile(r"#[^\n]*|(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\])+", re.DOTALL)
_SUM = re.compile(r"\$\(\(\s*(\w+)\s*([*+/-])\s*(\w+)\s*\)\)")
_SIGNS = {"*": operator.mul, "+": operator.add, "-": operator.sub, "/": operator.floordiv}
SETTERS = ("export", "declare", "local", "readonly")
ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[[^\]]*\])?(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
VALUES_DEEP_MAX = 5
"""How often a value may name another variable, whose value names another."""


@dataclass(slots=True)
class Variables:
    """What is known of a script's variables at one of its lines.

    `unclear`: those that a loop, a condition or a program sets, each with the number of that line.
    """

    arguments: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    lists: dict[str, str] = field(default_factory=dict)
    unclear: dict[str, int] = field(default_factory=dict)

    def filled(self, text: str) -> str:
        """Return a text with the variables filled in that are known, and with sums of numbers."""
        if self.arguments:
            text = _ARGUMENTS.sub(lambda _: shlex.join(self.arguments), text)
        for _ in range(VALUES_DEEP_MAX):
            new = _LIST.sub(lambda match: self.lists.get(match["name"], match[0]), text)
            new = _SUM.sub(self._sum, _VARIABLE.sub(self._value, new))
            if new == text:
                break
            text = new
        return text

    def note(self, name: str, value: str) -> None:
        """Note a variable's value, which other variables may give; one that is made of its own is left to the shell."""
        self.forget(name)
        if all(match["wrapped"] != name != match["bare"] for match in _VARIABLE.finditer(value)):
            self.values[name] = value

    def note_list(self, name: str, text: str, *, is_more: bool) -> None:
        """Note the words between the brackets of a list."""
        if is_more and name not in self.lists:
            return
        words = [word for word in _LIST_WORD.findall(text) if not word.startswith("#")]
        before = [self.lists[name]] if is_more else []
        self.lists[name] = self.filled(" ".join([*before, *words]))

    def forget(self, name: str) -> None:
        """Forget what was known of a variable."""
        self.lists.pop(name, None)
        self.values.pop(name, None)
        self.unclear.pop(name, None)

    def note_unclear(self, number: int, text: str) -> None:
        """Note that the command at a line may set variables. One that it exports, and that had no value, has on each node
        the value that the command gives it there."""
        for command in shell_text.parsed(text).commands:
            words = [word.text for word in command.words]
            for name in _set_by(words):
                is_made_there = words[0] == "export" and name not in self.values and name not in self.unclear
                if not is_made_there:
                    self.forget(name)
                    self.unclear[name] = number

    def require_clear(self, text: str) -> None:
        """Raise ValueError for a text with a variable whose value is unclear, or a list that is not known."""
        for match in _VARIABLE.finditer(text):
            name = match["wrapped"] or match["bare"]
            if name in self.unclear:
                line = self.unclear[name]
                raise ValueError(
                    f"${name} is set in line {line}, and not by {name}=… alone; write its value in its place"
                )
        if (found := _LIST.search(text)) is not None:
            raise ValueError(f"{found[0]} is no list that the script writes out; write what it holds")

    def _value(self, match: re.Match[str]) -> str:
        name, default = match["wrapped"] or match["bare"], match["default"]
        if name.isdigit():
            given = self.arguments[int(name) - 1 : int(name)] if int(name) else []
            return given[0] if given else match[0] if default is None else default
        value = self.values.get(name, match[0]) or default or ""
        return " ".join(value.replace("\\\n", " ").split("\n"))

    def _sum(self, match: re.Match[str]) -> str:
        """Return a product, sum or quotient of two numbers; any other as it is written."""
        left, sign, right = match[1], match[2], match[3]
        left, right = self.values.get(left, left), self.values.get(right, right)
        if not (left.isdecimal() and right.isdecimal()) or (sign == "/" and not int(right)):
            return match[0]
        return str(_SIGNS[sign](int(left), int(right)))


def _set_by(words: Sequence[str]) -> list[str]:
    begin = next((at for at, word in enumerate(words) if not ASSIGNED.fullmatch(word)), len(words))
    rest = words[begin:]
    if not rest or rest[0] in SETTERS:
        return [match["name"] for word in words if (match := ASSIGNED.fullmatch(word))]
    if rest[0] in ("read", "mapfile", "readarray"):
        return [word for word in rest[1:] if word.isidentifier()]
    if rest[0] == "getopts":
        return list(rest[2:3])
    return [rest[0]] if rest[1:2] == ["in"] and rest[0].isidentifier() else []  # `for NAME in`
