"""Texts and whole numbers of a pickle, in order, without executing it.

A pickle is a program that can run anything. Its opcodes are read here, and none is executed: only texts, whole numbers,
the memo that refers to earlier texts, and the number of open marks. That is enough to find `step` with the number after
it, or the files that a `.metadata` of torch.distributed.checkpoint names, with their lengths.

Source: the standard library's `pickletools`, which reads opcodes of all protocols.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any

Token = tuple[int, "str | int"]
"""The number of open marks (the depth of a value in containers), and a text or a number."""

NUMBER_BITS_MAX = 63
"""A longer number is neither a step nor a length, and does not fit into a message."""

_TEXTS = frozenset(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"))
_NUMBERS = frozenset(("BININT1", "BININT2", "BININT", "LONG1"))
_PUTS, _GETS = frozenset(("BINPUT", "LONG_BINPUT")), frozenset(("BINGET", "LONG_BINGET"))
_CLOSES = frozenset(
    ["POP_MARK", "APPENDS", "TUPLE", "DICT", "LIST", "SETITEMS", "INST", "OBJ", "ADDITEMS", "FROZENSET"]
)
"""Opcodes that use up a mark."""


def read_tokens(data: bytes) -> Iterator[Token]:
    """Yield the texts and numbers of the pickle at the beginning of `data`. Raises ValueError, also for one that is
    cut off."""
    memo: dict[int, str] = {}
    depth = count = 0
    last: str | None = None  # the text on top of the stack, until another opcode has come
    for opcode, raw_argument, _ in pickletools.genops(data):
        name, previous, last = opcode.name, last, None
        argument: Any = raw_argument
        if name in _TEXTS:
            last = argument
            yield depth, argument
        elif name in _NUMBERS:
            if argument.bit_length() <= NUMBER_BITS_MAX:
                yield depth, argument
        elif name in _PUTS or name == "MEMOIZE":
            if previous is not None:
                memo[argument if name in _PUTS else count] = previous
            count += name == "MEMOIZE"
        elif name in _GETS:
            if argument in memo:
                yield depth, memo[argument]
        elif name == "MARK":
            depth += 1
        elif name in _CLOSES:
            depth = max(0, depth - 1)
