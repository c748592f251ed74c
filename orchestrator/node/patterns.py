"""Does matching a regular expression take longer than anybody waits? Pure: pattern and text in, a lower bound out.

Python's engine goes back over every way to divide a text before it gives up. `(a+)+$` has 2^(n-1) ways to take n times
"a", so it never comes to the end of 64 of them. Counted are the ways in which the rounds of one repeat share a run of one
character; what the engine tries is more. Whether it comes to that run at all is not asked: who does not is done at once.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

WAYS_MAX = 10**12
"""Ways that take hours: the engine tries some 10⁸ a second."""

PATTERN_CHARS_MAX = 1_000
ROUND_CHARS_MAX = 8
"""How much of a run one round of a repeat is tried on; longer rounds only add ways."""


def takes_for_ever(pattern: str | bytes, text: str | bytes) -> bool:
    """Tell whether a repeat without a limit in `pattern` has more than `WAYS_MAX` ways to take a run of one character of
    `text`."""
    if len(pattern) > PATTERN_CHARS_MAX:
        return False
    words = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    chars = text.decode("latin-1") if isinstance(text, bytes) else text
    runs = [(char, len(list(run))) for char, run in itertools.groupby(chars)]
    try:
        bodies = list(_repeated(_engine("parser").parse(words)))
        return any(_ways(body, char, length) > WAYS_MAX for char, length in runs for body in bodies)
    except (re.error, ValueError, OverflowError, RecursionError, LookupError):
        return False  # not as Python knows it, or no part that stands by itself


def _engine(part: str) -> Any:
    """Return a part of the engine under the name that this Python has for it (before 3.11: `sre_parse`)."""
    return getattr(re, f"_{part}", None) or importlib.import_module(f"sre_{part.removesuffix('r')}")


def _repeated(pattern: Any) -> Iterator[re.Pattern[str]]:
    """Return what is repeated without a limit in a parsed pattern, each as a pattern of its own."""
    for operation, given in pattern.data:
        parts = given if isinstance(given, tuple | list) else (given,)
        if str(operation) in ("MAX_REPEAT", "MIN_REPEAT") and given[1] == _engine("parser").MAXREPEAT:
            yield _engine("compiler").compile(given[2], pattern.state.flags)
        for part in itertools.chain.from_iterable(one if isinstance(one, list) else [one] for one in parts):
            if isinstance(part, type(pattern)):
                yield from _repeated(part)


def _ways(body: re.Pattern[str], char: str, length: int) -> int:
    """Return in how many ways rounds of `body` take `length` times `char`; no more than are of interest."""
    rounds = [size for size in range(1, min(length, ROUND_CHARS_MAX) + 1) if body.fullmatch(char * size)]
    ways = [1]
    for taken in range(1, length + 1):
        ways.append(sum(ways[taken - size] for size in rounds if size <= taken))
        if ways[-1] > WAYS_MAX:
            return ways[-1]
    return ways[-1]
