"""Texts and whole numbers of a pickle, in order, without executing it.

A pickle is a program that can run anything. Here its opcodes are read and none is carried out: only texts, whole
numbers, the memo that names earlier texts again, and how many marks are open. That is enough to find `step` with the
number behind it, or which files a `.metadata` of torch.distributed.checkpoint names, with their lengths.

Source: the opcodes of the standard library's `pickletools`, protocols 0 to 5.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator

Token = tuple[int, "str | int"]
"""How many marks were open (the depth of a value in containers), and a text or a number."""

LONG_BYTES_MAX = 8
"""A longer number is no step and no length, and does not fit into a message."""

_STRINGS = {0x8C: "<B", 0x58: "<I", 0x8D: "<Q"}  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
_INTS = {0x4B: "<B", 0x4D: "<H", 0x4A: "<i"}  # BININT1, BININT2, BININT
_PUTS = {0x71: "<B", 0x72: "<I"}  # BINPUT, LONG_BINPUT
_GETS = {0x68: "<B", 0x6A: "<I"}  # BINGET, LONG_BINGET
_MARK, _MEMOIZE, _STOP, _LONG1 = 0x28, 0x94, 0x2E, 0x8A
_CLOSES = frozenset(b"1etdlui\x6f\x90\x91")
"""Opcodes that use up a mark: POP_MARK, APPENDS, TUPLE, DICT, LIST, SETITEMS, INST, OBJ, ADDITEMS, FROZENSET."""

_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: "<B",
    pickletools.TAKEN_FROM_ARGUMENT4: "<i",
    pickletools.TAKEN_FROM_ARGUMENT4U: "<I",
    pickletools.TAKEN_FROM_ARGUMENT8U: "<Q",
}
_LINES = {"stringnl_noescape_pair": 2}
_OPCODES = {ord(info.code): info.arg for info in pickletools.opcodes}


class PickleError(ValueError):
    """The bytes are not those of a pickle."""


def tokens(data: bytes) -> Iterator[Token]:
    """Yield the texts and numbers of the pickle at the beginning of `data`. Raises PickleError, also for one that is
    cut off."""
    memo: dict[int, str] = {}
    at, depth = 0, 0
    last: str | None = None
    count = 0  # of memo entries, which MEMOIZE numbers
    try:
        while True:
            code = data[at]
            at += 1
            if code in _STRINGS:
                at, last = _text(data, at, _STRINGS[code])
                yield depth, last
            elif code in _INTS:
                (number,) = struct.unpack_from(_INTS[code], data, at)
                at += struct.calcsize(_INTS[code])
                yield depth, number
                last = None
            elif code == _MEMOIZE:
                if last is not None:
                    memo[count] = last
                count, last = count + 1, None
            elif code in _PUTS:
                (index,) = struct.unpack_from(_PUTS[code], data, at)
                at += struct.calcsize(_PUTS[code])
                if last is not None:
                    memo[index] = last
                last = None
            elif code in _GETS:
                (index,) = struct.unpack_from(_GETS[code], data, at)
                at += struct.calcsize(_GETS[code])
                if index in memo:
                    yield depth, memo[index]
                last = None
            elif code == _STOP:
                return
            else:
                last = None
                if code == _MARK:
                    depth += 1
                elif code in _CLOSES:
                    depth = max(0, depth - 1)
                if code == _LONG1 and data[at] <= LONG_BYTES_MAX:
                    yield depth, int.from_bytes(data[at + 1 : at + 1 + data[at]], "little", signed=True)
                at = _after_argument(data, at, code)
    except (IndexError, struct.error, UnicodeDecodeError) as err:
        raise PickleError(str(err)) from err


def _text(data: bytes, at: int, length: str) -> tuple[int, str]:
    """Return where a text ends, and the text. Raises IndexError when it is cut off."""
    (size,) = struct.unpack_from(length, data, at)
    begin = at + struct.calcsize(length)
    return _within(data, begin + size), data[begin : begin + size].decode("utf-8", "surrogatepass")


def _after_argument(data: bytes, at: int, code: int) -> int:
    """Return where the argument of an opcode ends. Raises PickleError, IndexError."""
    if code not in _OPCODES:
        raise PickleError(f"no opcode: {code}")
    argument = _OPCODES[code]
    if argument is None:
        return at
    if argument.n >= 0:
        return _within(data, at + argument.n)
    if argument.n in _LENGTHS:
        (size,) = struct.unpack_from(_LENGTHS[argument.n], data, at)
        if size < 0:
            raise PickleError("a negative length")
        return _within(data, at + struct.calcsize(_LENGTHS[argument.n]) + size)
    for _ in range(_LINES.get(argument.name, 1)):
        at = data.find(b"\n", at) + 1
        if not at:
            raise PickleError("a line without an end")
    return at


def _within(data: bytes, end: int) -> int:
    if end > len(data):
        raise IndexError(f"{end - len(data)} bytes are missing")
    return end
