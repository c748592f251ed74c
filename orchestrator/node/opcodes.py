"""Can a loop of machine code be left? Pure: instructions in, what is known of them out.

Rules: code is followed only as long as every instruction leads to one other, whatever the data: a straight one to the
next, a direct jump to its target. What comes back to where it was is left by nothing in it, and by no other thread. At
a branch, a call, a return, a system call, and whatever is not known here, nothing is known of the rest. A fault is no way
out: it kills the process.

The tables are those of the Intel manual (volume 2, appendix A) and of the Arm manual (C4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

LENGTH_MAX = 15
"""How long an instruction may be in bytes; on x86_64 the processor takes no more."""

INSTRUCTIONS_MAX = 4096
"""How far code is followed; loops that were unrolled have some hundreds."""

_ADDRESSES = 1 << 64

_ONE_BYTE = (
    "mmmmbz..mmmmbz.. mmmmbz..mmmmbz.. mmmmbz..mmmmbz.. mmmmbz..mmmmbz.. "
    "................ nnnnnnnnnnnnnnnn ...m....zZbM.... ................ "
    "MZ.Mmmmmmmmmmm.. nnnnnnnnnn.n..nn aaaannnnbznnnnnn bbbbbbbbvvvvvvvv "
    "MM....MZen...... mmmm...nmmmmmmmm .........J.j.... .....ntTnn..nnmm "
).replace(" ", "")
"""What follows each opcode of x86_64. `.`: it leads elsewhere, or is not known; `n`: nothing; `m`: an operand (ModRM); a
number of 1 byte `b`, 4 bytes `z` (2 with the prefix 66), 2, 4 or 8 bytes `v`, 3 bytes `e`; an address `a`; `M`, `Z`: an
operand and `b`, `z`; `t`, `T`: the same where the operand's register is 0 or 1, else `m`; `j`, `J`: a jump by 1 or 4 bytes."""

_TWO_BYTES = (
    ".............m.. mmmmmmmmmmmmmmmm ........mmmmmmmm .n.............. "
    "mmmmmmmmmmmmmmmm mmmmmmmmmmmmmmmm mmmmmmmmmmmmmmmm MMMMmmmn....mmmm "
    "................ mmmmmmmmmmmmmmmm ..nmMm.....mMmmm mm.m..mmm.Mmmmmm "
    "mmMmMMMmnnnnnnnn mmmmmmmmmmmmmmmm mmmmmmmmmmmmmmmm mmmmmmmmmmmmmmm. "
).replace(" ", "")
"""The same for the opcodes after 0F."""

_PREFIXES = b"\x66\x67\xf0\xf2\xf3\x2e\x36\x3e\x26\x64\x65"
_NARROW, _SHORT, _WIDE = 0x66, 0x67, 8
_REGISTERS: Mapping[int, tuple[int, ...]] = {0xC6: (0,), 0xC7: (0,), 0xFE: (0, 1), 0xFF: (0, 1, 6)}
"""Opcodes that are as the table says only where the operand's register is one of these: FF also calls and jumps."""

_VEX = b"\xc5\xc4\x62"
_VEX_WITH_BYTE = b"\x70\x71\x72\x73\xc2\xc4\xc5\xc6"


def never_leaves(read: Callable[[int], bytes], address: int, machine: str) -> bool:
    """Tell whether whoever is at `address` goes round in a loop for ever. `read`: what stands at an address, at least
    `LENGTH_MAX` bytes where there are so many; `machine`: as `platform.machine` calls it."""
    follow = _FOLLOW.get(machine)
    if follow is None:
        return False
    seen: set[int] = set()
    for _ in range(INSTRUCTIONS_MAX):
        if address in seen:
            return True
        seen.add(address)
        distance = follow(read(address)[:LENGTH_MAX])
        if distance is None:
            return False
        address = (address + distance) % _ADDRESSES
    return False


def on_x86_64(code: bytes) -> int | None:
    """Return how far from an instruction's own the only one is that it can lead to; None where that is not known."""
    try:
        length, jumps = _length(code)
    except IndexError:
        return None
    if length == 0 or length > len(code):
        return None
    target = int.from_bytes(code[length - jumps : length], "little", signed=True) if jumps else 0
    return length + target


def on_aarch64(code: bytes) -> int | None:
    """Return the same for an instruction of aarch64."""
    if len(code) < 4:
        return None
    word = int.from_bytes(code[:4], "little")
    if word >> 26 == 0b000101:  # B
        words = word & 0x3FFFFFF
        return 4 * (words - (1 << 26) if words >> 25 else words)
    is_hint_or_barrier = word >> 16 == 0xD503
    branches_or_traps = word >> 26 & 0b111 == 0b101
    is_reserved = word >> 25 & 0b1111 == 0
    return None if (branches_or_traps and not is_hint_or_barrier) or is_reserved else 4


_FOLLOW: Mapping[str, Callable[[bytes], int | None]] = {"x86_64": on_x86_64, "aarch64": on_aarch64}


def _length(code: bytes) -> tuple[int, int]:
    """Return how long an instruction is, 0 where it may lead elsewhere; and how many bytes at its end say how far it
    jumps. Raises IndexError where it goes on after `code`."""
    at = 0
    while code[at] in _PREFIXES:
        at += 1
    narrow, short = _NARROW in code[:at], _SHORT in code[:at]
    if code[at] in _VEX:
        return _vector_length(code, at), 0
    wide = code[at] >> 4 == 4 and bool(code[at] & _WIDE)
    at += code[at] >> 4 == 4
    opcode, at = code[at], at + 1
    if opcode == 0x0F:
        second, at = code[at], at + 1
        kind, at = {0x38: ("m", at + 1), 0x3A: ("M", at + 1)}.get(second, (_TWO_BYTES[second], at))
    else:
        kind = _ONE_BYTE[opcode]
        if opcode in _REGISTERS and _register(code, at) not in _REGISTERS[opcode]:
            kind = "."
    word = 2 if narrow and not wide else 4
    match kind:
        case ".":
            return 0, 0
        case "j" | "J" if narrow:
            return 0, 0  # AMD and Intel take it differently
        case "j" | "J":
            size = 1 if kind == "j" else 4
            return at + size, size
        case "a":
            return at + (4 if short else 8), 0
        case "v":
            return at + (8 if wide else word), 0
        case "t" | "T" if _register(code, at) > 1:
            kind = "m"
    operand = _operand_bytes(code, at) if kind in "mMZtT" else 0
    return at + operand + {"b": 1, "M": 1, "t": 1, "z": word, "Z": word, "T": word, "e": 3}.get(kind, 0), 0


def _register(code: bytes, at: int) -> int:
    return code[at] >> 3 & 7


def _operand_bytes(code: bytes, at: int) -> int:
    """Return how long the operand is that begins with the ModRM byte at `at`."""
    mode, base = code[at] >> 6, code[at] & 7
    if mode == 3:
        return 1
    size = 1
    if base == 4:  # a SIB byte follows
        base, size = code[at + 1] & 7, 2
    return size + (4 if mode == 2 or (mode == 0 and base == 5) else mode)


def _vector_length(code: bytes, at: int) -> int:
    """Return how long an instruction of AVX (VEX) or AVX-512 (EVEX) is: none of them leads elsewhere."""
    prefix = code[at]
    kind = {0xC5: 1, 0xC4: code[at + 1] & 0x1F, 0x62: code[at + 1] & 0xF}[prefix]
    if kind not in ((1, 2, 3, 5, 6) if prefix == 0x62 else (1, 2, 3)):
        return 0
    at += {0xC5: 2, 0xC4: 3, 0x62: 4}[prefix]
    opcode, at = code[at], at + 1
    if kind == 1 and opcode == 0x77 and prefix != 0x62:  # vzeroupper
        return at
    return at + _operand_bytes(code, at) + (kind == 3 or (kind == 1 and opcode in _VEX_WITH_BYTE))
