"""Host lists of Slurm, such as `rack[1-2]n[01-16,20],login`, expanded to their nodes. `scontrol show hostnames`, which does
the same, may be missing on compute nodes.
"""

from __future__ import annotations

import itertools
import re

NODES_MAX = 65_536
"""The largest number of nodes that Slurm itself allows (MAX_SLURM_NODES)."""

_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def expand(text: str) -> tuple[str, ...]:
    """Return the nodes of a host list, in its order. Raises ValueError."""
    nodes: list[str] = []
    for word in _split_items(text):
        nodes += _expand_one(word)
        if len(nodes) > NODES_MAX:
            raise ValueError(f"more than {NODES_MAX} nodes in {text[:80]}")
    return tuple(nodes)


def may_contain(text: str, node: str) -> bool:
    """Return whether a host list may contain a node; an empty or unreadable list may contain any."""
    try:
        return not text or node in expand(text)
    except ValueError:
        return True


def _split_items(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    words, depth = [""], 0
    for char in text:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if not 0 <= depth <= 1:
            raise ValueError(f"brackets do not match in {text[:80]}")
        if char == "," and not depth:
            words.append("")
        else:
            words[-1] += char
    if depth:
        raise ValueError(f"brackets do not match in {text[:80]}")
    return [word for word in words if word]


def _expand_one(word: str) -> list[str]:
    """Return all names that a word with brackets expands to; the last bracket counts fastest."""
    parts = _BRACKET.split(word)  # literal, range, literal, range, literal …
    choices = [_numbers(part, word) if index % 2 else [part] for index, part in enumerate(parts)]
    size = 1
    for choice in choices:
        size *= len(choice)
    if size > NODES_MAX:
        raise ValueError(f"more than {NODES_MAX} nodes in {word[:80]}")
    return ["".join(one) for one in itertools.product(*choices)]


def _numbers(ranges: str, word: str) -> list[str]:
    """Return the numbers of `01-03,7`, as wide as the first of each range is written."""
    numbers: list[str] = []
    for span in ranges.split(","):
        low, dash, high = span.partition("-")
        if not (low.isascii() and low.isdigit() and (not dash or (high.isascii() and high.isdigit()))):
            raise ValueError(f"{span or 'nothing'} is not a range of numbers in {word[:80]}")
        first, last = int(low), int(high) if dash else int(low)
        if last < first or last - first >= NODES_MAX:
            raise ValueError(f"{span} is not a range of numbers in {word[:80]}")
        numbers += [f"{number:0{len(low)}d}" for number in range(first, last + 1)]
    return numbers
