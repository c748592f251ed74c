"""Is machine code followed rightly, and only where it leads to one place? Bytes as assemblers write them."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from orchestrator.node.opcodes import INSTRUCTIONS_MAX, LENGTH_MAX, never_leaves, on_aarch64, on_x86_64

OBJDUMP_S_MAX = 100.0
DISASSEMBLED_BYTES = 1 << 18

STRAIGHT = {
    "90": "nop",
    "f3 90": "pause",
    "55": "push %rbp",
    "48 89 e5": "mov %rsp,%rbp",
    "48 83 c0 01": "add $1,%rax",
    "48 81 c0 00 01 00 00": "add $256,%rax",
    "66 81 c3 00 01": "add $256,%bx",
    "48 8b 45 f8": "mov -8(%rbp),%rax",
    "48 8b 85 00 ff ff ff": "mov -256(%rbp),%rax",
    "48 8b 05 10 00 00 00": "mov 16(%rip),%rax",
    "48 8b 04 24": "mov (%rsp),%rax",
    "8b 04 25 00 10 00 00": "mov 0x1000,%eax",
    "8b 44 8b 04": "mov 4(%rbx,%rcx,4),%eax",
    "48 b8 00 00 00 00 00 00 00 01": "movabs $0x100000000000000,%rax",
    "66 b8 01 00": "mov $1,%ax",
    "48 a1 00 00 00 00 00 00 00 01": "movabs 0x100000000000000,%rax",
    "a8 01": "test $1,%al",
    "f6 00 01": "testb $1,(%rax)",
    "f7 c0 00 00 00 01": "test $0x1000000,%eax",
    "48 f7 f1": "div %rcx",
    "c7 45 fc 00 00 00 00": "movl $0,-4(%rbp)",
    "ff 00": "incl (%rax)",
    "ff 75 f8": "push -8(%rbp)",
    "f0 48 0f b1 11": "lock cmpxchg %rdx,(%rcx)",
    "f3 48 ab": "rep stos %rax,(%rdi)",
    "0f 1f 84 00 00 00 00 00": "nopl 0(%rax,%rax)",
    "66 2e 0f 1f 84 00 00 00 00 00": "cs nopw 0(%rax,%rax)",
    "f3 0f 1e fa": "endbr64",
    "0f ae f0": "mfence",
    "0f 31": "rdtsc",
    "0f 94 c0": "sete %al",
    "0f 44 c1": "cmove %ecx,%eax",
    "66 0f 70 c0 00": "pshufd $0,%xmm0,%xmm0",
    "66 0f 38 00 c1": "pshufb %xmm1,%xmm0",
    "66 0f 3a 0f c1 08": "palignr $8,%xmm1,%xmm0",
    "f2 0f 58 c1": "addsd %xmm1,%xmm0",
    "d9 c0": "fld %st(0)",
    "c5 f8 77": "vzeroupper",
    "c5 fc 58 c1": "vaddps %ymm1,%ymm0,%ymm0",
    "c4 e2 75 b8 c2": "vfmadd231ps %ymm2,%ymm1,%ymm0",
    "c4 e3 7d 19 c1 01": "vextractf128 $1,%ymm0,%xmm1",
    "62 f1 7c 48 58 c1": "vaddps %zmm1,%zmm0,%zmm0",
    "62 f3 fd 48 1b c1 01": "vextractf64x4 $1,%zmm0,%ymm1",
}
"""Instructions of x86_64 that lead to the next one."""

ELSEWHERE = (
    "74 fe", "0f 84 00 00 00 00", "e2 fe", "e3 fe", "e8 00 00 00 00", "c3", "c2 08 00", "cb", "cf", "ff d0", "ff e0",
    "ff 25 00 00 00 00", "ff 18", "41 ff e3", "f2 c3", "cc", "cd 80", "0f 05", "0f 34", "0f 0b", "f4", "f1",
    "c7 f8 00 00 00 00", "0f 01 d5", "9d", "d5 00 a1", "62 f4 7c 08 01 c1", "66 eb fe", "",
)  # fmt: skip
"""Such as may lead elsewhere, or of which nothing is known."""


@pytest.mark.parametrize("code", STRAIGHT)
def test_a_straight_instruction_leads_to_the_next(code: str) -> None:
    raw = bytes.fromhex(code)
    assert on_x86_64(raw + bytes(LENGTH_MAX)) == len(raw), STRAIGHT[code]
    assert on_x86_64(raw[:-1]) is None, "its end is not there"


@pytest.mark.parametrize("code", ELSEWHERE)
def test_of_what_may_lead_elsewhere_nothing_is_known(code: str) -> None:
    assert on_x86_64(bytes.fromhex(code) + b"\xc3" * 8) is None


def test_a_direct_jump_leads_to_its_target() -> None:
    assert on_x86_64(bytes.fromhex("eb fe")) == 0
    assert on_x86_64(bytes.fromhex("eb 10")) == 0x12
    assert on_x86_64(bytes.fromhex("e9 f6 ff ff ff")) == -5
    assert on_x86_64(bytes.fromhex("f2 e9 00 01 00 00")) == 0x106


@pytest.mark.parametrize(
    ("word", "distance"),
    [
        (0x14000000, 0),  # b .
        (0x17FFFFFE, -8),  # b .-8
        (0x14000004, 16),  # b .+16
        (0x91000400, 4),  # add x0, x0, #1
        (0xF9400000, 4),  # ldr x0, [x0]
        (0x4E21D400, 4),  # fadd v0.4s, v0.4s, v1.4s
        (0xD503201F, 4),  # nop
        (0xD503203F, 4),  # yield
        (0xD5033BBF, 4),  # dmb ish
        (0x94000000, None),  # bl
        (0x54000000, None),  # b.eq
        (0xB4000000, None),  # cbz
        (0x35000000, None),  # cbnz
        (0x36000000, None),  # tbz
        (0xB7000000, None),  # tbnz
        (0xD61F0000, None),  # br x0
        (0xD63F0000, None),  # blr x0
        (0xD65F03C0, None),  # ret
        (0xD4000001, None),  # svc
        (0xD4200000, None),  # brk
        (0xD5233060, None),  # tstart
        (0x00000000, None),  # udf
    ],
)
def test_an_instruction_of_aarch64_is_known_by_its_class(word: int, distance: int | None) -> None:
    assert on_aarch64(word.to_bytes(4, "little") + bytes(8)) == distance
    assert on_aarch64(word.to_bytes(4, "little")[:3]) is None


@pytest.mark.parametrize(
    ("code", "closed"),
    [
        ("eb fe", True),
        ("48 8b 45 f8 48 83 c0 01 48 89 45 f8 eb f2", True),  # what gcc makes of `for (;;) x++`
        ("90 90 eb 02 c3 c3 48 ff c0 eb f7", True),  # two jumps around a return
        ("8b 05 00 10 00 00 85 c0 74 f6", False),  # while (!flag);
        ("48 83 c0 01 e8 00 00 00 00 eb f5", False),  # it calls
        ("90 0f 05 eb fb", False),  # it asks the kernel
        ("90 90 90", False),  # the code ends
    ],
)
def test_only_a_loop_of_which_all_is_known_is_never_left(code: str, closed: bool) -> None:
    raw = bytes.fromhex(code)
    at = 0x7FFF_0000_0000
    assert never_leaves(lambda address: raw[max(0, address - at) :], at, "x86_64") is closed
    assert not never_leaves(lambda address: raw[max(0, address - at) :], at, "riscv64"), "not known there"


def test_code_without_an_end_is_followed_for_a_while_only() -> None:
    asked: list[int] = []

    def read(address: int) -> bytes:
        asked.append(address)
        return b"\x90" * LENGTH_MAX

    assert not never_leaves(read, 0, "x86_64")
    assert len(asked) == INSTRUCTIONS_MAX


def test_any_bytes_at_all_are_read_without_an_error() -> None:
    rng = random.Random(1)
    for _ in range(100_000):
        code = rng.randbytes(rng.randrange(LENGTH_MAX + 1))
        distance = on_x86_64(code)
        assert distance is None or distance <= len(code) or b"\xeb" in code or b"\xe9" in code


_LINE = re.compile(r"^\s*[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(\S[^#<\n]*)", re.MULTILINE)
_FLOW = re.compile(
    r"\b(j\w+|\w*call\w*|l?i?ret\w*|loop\w*|sys\w+|int\d?|ud\d|hlt|x(begin|end|abort))\b|\(bad\)|\.byte"
)


def _instructions() -> list[tuple[bytes, str]]:
    """Return instructions of the C library's code, with what objdump says of each."""
    library = next(iter(sorted(Path("/lib").glob("*-linux-gnu/libc.so.6"))), None)
    machine = sysconfig.get_platform().endswith("x86_64")
    if library is None or shutil.which("objdump") is None or not machine:
        pytest.skip("there is no objdump to compare with, or no x86_64")
    sections = subprocess.run(["objdump", "-h", library], capture_output=True, text=True, check=True).stdout
    start = int(re.findall(r" \.text +\S+ +(\S+)", sections)[0], 16)
    argv = [
        "objdump",
        "-d",
        "-w",
        "--insn-width=15",
        "-j.text",
        f"--stop-address={start + DISASSEMBLED_BYTES}",
    ]
    text = subprocess.run(
        [*argv, library], capture_output=True, text=True, check=True, timeout=OBJDUMP_S_MAX
    ).stdout
    found = [(bytes.fromhex(code), words) for code, words in _LINE.findall(text)]
    return [
        (code, words) for code, words in found if not words.startswith(".byte")
    ]  # the last may be cut off


@pytest.mark.slow
def test_lengths_are_those_of_objdump() -> None:
    found = _instructions()
    assert len(found) > 10_000
    wrong = []
    for code, words in found:
        distance = on_x86_64(code + b"\xcc" * LENGTH_MAX)
        flow = _FLOW.search(words) is not None
        is_jump = re.search(r"\bjmpq? +[0-9a-f]", words) is not None
        if not is_jump and distance not in ((None,) if flow else (None, len(code))):
            wrong.append((code.hex(" "), words, distance))
    assert wrong == []
    known = [code for code, words in found if not _FLOW.search(words) and on_x86_64(code) is not None]
    assert len(known) > 0.99 * sum(not _FLOW.search(words) for _, words in found)
