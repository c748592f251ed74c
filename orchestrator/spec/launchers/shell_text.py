"""Shell text taken apart into its simple commands, each with its words and their places in the text.

Only as much of the shell's grammar is read as it takes to tell where a command begins and ends, and whether it stands in a
loop, a condition or a subshell. Nothing is filled in: a word that the shell would change says so.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

_REDIRECTION = re.compile(r"(?:\d*(?:>>|>&|>\||>|<<<|<<-?|<&|<>|<)|&>>?)")
_OPENERS = ("for", "while", "until", "if", "case", "select", "function", "{")
_CLOSERS = ("done", "fi", "esac", "}")
_MIDDLES = ("do", "then", "else", "elif", "!")
_CHANGED = re.compile(r"[*?\[]")
_ANSI_QUOTED = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)
_OPERATOR = re.compile(r"\|\|?|&&?|;|<|(?:\d|&)?>>?(?:&\d|\S*)")
_UNCLOSED = "has a quote or bracket that is not closed"


@dataclass(frozen=True, slots=True)
class Word:
    """A word without its quotes, and where it stands. `is_plain`: the shell would leave it as it is."""

    text: str
    start: int
    end: int
    is_plain: bool


@dataclass(slots=True)
class Command:
    """A simple command. `depth` counts the loops, conditions, functions and subshells around it."""

    depth: int
    words: list[Word] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShellText:
    """A text taken apart: its commands, the texts of its substitutions, and whether it needs a shell at all."""

    commands: tuple[Command, ...]
    # What stands in $( ) and in backquotes
    inner: tuple[str, ...]
    is_plain: bool
    has_operators: bool
    # Loops, conditions, functions and subshells that are not closed
    open_depth: int = 0


def parsed(text: str) -> ShellText:
    """Take a text apart. Raises ValueError for a quote or bracket that is not closed."""
    return _Parser(text).run()


def last_command(text: str) -> str:
    """Return the name of the command that stands last in a text, empty where it cannot be seen."""
    try:
        commands = parsed(text).commands
    except ValueError:
        return ""
    return commands[-1].words[0].text.rpartition("/")[2] if commands else ""


def first_operator(text: str) -> str:
    """Return the first word of a text that is nothing but an operator to a shell, or a redirection; empty where there is
    none."""
    try:
        words = shlex.split(text.replace("\\\n", " "), posix=False)
    except ValueError:
        return ""
    return next((word for word in words[1:] if _OPERATOR.fullmatch(word)), "")


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._commands = [Command(0)]
        self._inner: list[str] = []
        self._heredocs: list[str] = []
        self._has_operators = False
        self._brackets = 0

    def run(self) -> ShellText:
        while self._at < len(self._text):
            self._step()
        commands = tuple(command for command in self._commands if command.words)
        words = [word for command in commands for word in command.words]
        is_plain = len(commands) == 1 and not self._has_operators and all(word.is_plain for word in words)
        return ShellText(commands, tuple(self._inner), is_plain, self._has_operators, self._depth)

    def _step(self) -> None:
        text, at = self._text, self._at
        char = text[at]
        if text.startswith("\\\n", at):
            self._at += 2
        elif char == "\n":
            self._at += 1
            self._skip_heredocs()
            self._next_command()
        elif char.isspace():
            self._at += 1
        elif char == "#":
            end = text.find("\n", at)
            self._at = len(text) if end < 0 else end
        elif match := _REDIRECTION.match(text, at):
            self._redirect(match)
        elif char == "(" and text[at - 1 : at] == "=":  # the values of an array
            self._at = self._behind(at, "(", ")")
        elif char in ";&|()":
            change = {"(": 1, ")": -1}.get(char, 0)
            if char == ")" and not self._brackets:
                self._commands[-1].words.clear()  # a pattern of `case`
                change = 0
            self._brackets += change
            self._at += 1
            self._has_operators = True
            self._depth = max(0, self._depth + change)
            self._next_command()
        else:
            self._word()

    def _next_command(self) -> None:
        if self._commands[-1].words:
            self._commands.append(Command(self._depth))
        self._commands[-1].depth = self._depth

    def _redirect(self, match: re.Match[str]) -> None:
        self._has_operators = True
        self._at = match.end()
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        target = self._read()
        if match.group().rstrip("-").endswith("<<"):
            self._heredocs.append(target.text)

    def _skip_heredocs(self) -> None:
        for delimiter in self._heredocs:
            end = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(self._text, self._at)
            self._at = end.end() if end else len(self._text)
        self._heredocs = []

    def _word(self) -> None:
        word, command = self._read(), self._commands[-1]
        if word.text == "[[" and not command.words:
            end = re.compile(r"\s\]\](?=[\s;&|)]|$)").search(self._text, self._at)
            self._at = end.end() if end else len(self._text)
            self._has_operators = True
        if not command.words and word.is_plain:
            self._depth = max(0, self._depth + (word.text in _OPENERS) - (word.text in _CLOSERS))
            command.depth = self._depth
            if word.text in (*_OPENERS, *_CLOSERS, *_MIDDLES):
                self._has_operators = True
                return
        command.words.append(word)

    def _read(self) -> Word:
        """Read one word, whose first character is not blank."""
        text, start = self._text, self._at
        parts: list[str] = []
        is_plain = not text.startswith("~", start)
        while self._at < len(text) and not text[self._at].isspace() and text[self._at] not in ";&|()<>":
            char = text[self._at]
            if char == "\\":
                parts.append(text[self._at + 1 : self._at + 2].replace("\n", ""))
                self._at += 2
            elif char == "'":
                parts.append(self._until("'"))
            elif char == '"':
                piece, fixed = self._double_quoted()
                parts.append(piece)
                is_plain &= fixed
            elif char in "$`":
                parts.append(self._expansion())
                is_plain = False
            else:
                is_plain &= not _CHANGED.match(char)
                parts.append(char)
                self._at += 1
        if self._at == start:  # an operator where a word should stand
            self._at += 1
        return Word("".join(parts), start, self._at, is_plain)

    def _until(self, mark: str) -> str:
        end = self._text.find(mark, self._at + 1)
        if end < 0:
            raise ValueError(_UNCLOSED)
        piece = self._text[self._at + 1 : end]
        self._at = end + 1
        return piece

    def _double_quoted(self) -> tuple[str, bool]:
        parts: list[str] = []
        is_plain = True
        self._at += 1
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == '"':
                self._at += 1
                return "".join(parts), is_plain
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                parts.append(self._text[self._at + 1].replace("\n", ""))
                self._at += 2
            elif char in "$`":
                parts.append(self._expansion())
                is_plain = False
            else:
                parts.append(char)
                self._at += 1
        raise ValueError(_UNCLOSED)

    def _expansion(self) -> str:
        """Read what begins with a dollar or a backquote, as it is written."""
        text, start = self._text, self._at
        if text[start] == "`":
            self._inner.append(self._until("`"))
        elif text.startswith("$(", start):
            self._at = self._behind(start + 1, "(", ")")
            self._inner.append(text[start + 2 : self._at - 1])
        elif text.startswith("$'", start):
            end = _ANSI_QUOTED.match(text, start)
            if end is None:
                raise ValueError(_UNCLOSED)
            self._at = end.end()
        elif text.startswith("${", start):
            self._at = self._behind(start + 1, "{", "}")
        else:
            self._at += 1
        return text[start : self._at]

    def _behind(self, start: int, opener: str, closer: str) -> int:
        """Return the position behind the bracket that closes the one at `start`; brackets within quotes are none."""
        depth, at, quote = 0, start, ""
        while at < len(self._text):
            char = self._text[at]
            if char == "\\" and quote != "'":
                at += 2
                continue
            if char in "'\"" and quote in ("", char):
                quote = "" if quote else char
            elif not quote:
                depth += (char == opener) - (char == closer)
            at += 1
            if depth == 0:
                return at
        raise ValueError(_UNCLOSED)
