"""Command-line options of another program: a table of them, and their parser. Standard library only, and pure.

Rules, those of getopt_long: an option that is not in the table is an error. A long name may be abbreviated while it is
unique. Short options without a value may be combined. In long names `_` and `-` are equal, as in many argparse programs.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it was written; `name` is the first of its names, without dashes."""

    name: str
    value: str
    text: str


def list_names(options: str) -> list[str]:
    """Return all names of options, written as for an `OptionTable`, without dashes."""
    return [name.lstrip("-") for text in options.split() for name in text.rstrip("=").split("/")]


class OptionTable:
    """Options of a program. Each is written `--tee/-t=`: all of its names, and an `=` for each word that always follows."""

    def __init__(self, program: str, options: str, *, abbreviates: bool = True) -> None:
        self._program, self._abbreviates = program, abbreviates
        self._known: dict[str, tuple[str, int]] = {}
        for text in options.split():
            written = text.rstrip("=").split("/")
            self._known |= dict.fromkeys(written, (written[0].lstrip("-"), text.count("=")))

    def find(self, name: str) -> str:
        """Return an option's name as the table has it; empty for another word."""
        plain = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
        if plain in self._known or not (self._abbreviates and plain.startswith("--")):
            return plain if plain in self._known else ""
        meant = [full for full in self._known if full.startswith(plain)]
        return meant[0] if len({self._known[full][0] for full in meant}) == 1 else ""

    def read(self, args: Sequence[str], at: int) -> tuple[list[Option], int]:
        """Read options from a position on. Return them, and the position of the first word that is none. Raises ValueError."""
        options: list[Option] = []
        while at < len(args) and args[at].startswith("-") and args[at] != "-":
            if args[at] == "--":
                return options, at + 1
            more, at = self.take_option(args, at)
            options += more
        return options, at

    def take_option(self, args: Sequence[str], at: int) -> tuple[list[Option], int]:
        """Read the word at a position, which may hold several options. Return them, and the position behind. Raises ValueError."""
        word, at = args[at], at + 1
        name, equals, value = word.partition("=")
        full = self.find(name)
        if not full and not word.startswith("--") and word[:2] in self._known:  # -N2, -K1, -lu
            full, equals, value = word[:2], "=", word[2:]
        if not full:
            near = difflib.get_close_matches(name, self._known, n=1)
            meant = f"; did you mean {near[0]}?" if near else " that orch knows"
            raise ValueError(f"{self._program} has no option {name}{meant}")
        first, follow = self._known[full]
        if not follow and full == word[:2] and value[:1].isalpha():
            more, end = self.take_option([f"-{value}", *args[at:]], 0)
            return [Option(first, "", full), *more], at + end - 1
        if follow and not equals:
            if at + follow > len(args):
                raise ValueError(f"{self._program} {word} needs a value")
            behind, at = args[at : at + follow], at + follow
            value, word = "=".join(behind), " ".join([word, *behind])
        return [Option(first, value, word)], at
