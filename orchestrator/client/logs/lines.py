"""Lines of a log, in blocks that are cut from its bytes: forward as it grows, or backward from its end.

Rules: many lines come at once, with the offset of their last byte, by which the index finds when they were written. A
line too long is cut between characters and never inside a secret (the mask would not know the halves); what a progress
bar has written over is dropped first. A file that shrinks or vanishes ends the reading without an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from orchestrator.core.jobdir import ownership
from orchestrator.core.secret_mask import SECRET_CHARS_MIN, Mask

LINE_BYTES_MAX = 64 << 10
CUT_MARK = " …"
_BAR_END = re.compile(r"\d/\d+ \[\d+:\d\d(?::\d\d)?<[^\]]*\](?=\S)")
"""The end of a tqdm bar with other text right after it: a bar has no newline until it is done."""

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

CutLines: TypeAlias = list[tuple[int, bytes]]
"""Whole lines, each ended by a newline, and the offset of the last newline in the file; the others lie as far before it as
in the file. The pieces of a line too long come one by one."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a rank's log, or of a node's; exactly one of `rank` and `node` is set."""

    time_ns: int
    """When its end was written: wall clock of the node, never later than the reader's."""
    attempt: int
    rank: int | None
    text: str
    node: str | None = None


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Whole lines of one log that share a time; as for a line, exactly one of `rank` and `node` is set."""

    time_ns: int
    attempt: int
    rank: int | None
    node: str | None
    data: bytes
    """The lines, each ended by a newline."""

    def texts(self) -> list[str]:
        """Return the lines, without their newlines."""
        return self.data.decode("utf-8", "replace").split("\n")[:-1]


def lines(blocks: Iterable[LogBlock]) -> Iterator[LogLine]:
    """Yield the lines of blocks."""
    for block in blocks:
        for text in block.texts():
            yield LogLine(block.time_ns, block.attempt, block.rank, text, block.node)


def filter_lines(blocks: Iterable[LogBlock], grep: re.Pattern[str] | None, mask: Mask) -> Iterator[LogBlock]:
    """Yield the lines as a terminal shows them once progress bars are done; with `grep`, those that match."""
    for block in blocks:
        if grep is not None or b"\r" in block.data:
            # Masked first: part of a secret may be written over.
            displayed = [_displayed_lines(mask.apply(text)) if "\r" in text else [text] for text in block.texts()]
            kept = [text for texts in displayed for text in texts if grep is None or grep.search(text)]
            if not kept:
                continue
            block = replace(block, data="\n".join((*kept, "")).encode())
        yield block


def _displayed_lines(text: str) -> list[str]:
    """Return what a terminal shows at the end of a line that returned to its start, as progress bars do; what was printed right
    behind an unfinished bar is a line of its own."""
    shown = _terminal_text(text)
    bar = _BAR_END.search(shown)
    return [shown[: bar.end()], shown[bar.end() :]] if bar else [shown]


def _terminal_text(text: str) -> str:
    parts = text.split("\r")
    if "\x1b" in text:  # columns cannot be counted: the last part that shows anything
        return next((part for part in reversed(parts) if _ESCAPE.sub("", part).strip()), parts[-1])
    shown = ""
    for part in reversed(parts):
        shown += part[len(shown) :]
    return shown.rstrip()


class LineCutter:
    """Cutter of a log into lines, block by block; it holds the unfinished last line."""

    __slots__ = ("_mask", "continued", "offset", "rest")

    def __init__(self, offset: int, mask: Mask) -> None:
        self._mask = mask
        self.offset = offset
        self.rest = b""
        self.continued = False
        """The beginning of the line was returned already."""

    def add(self, block: bytes) -> CutLines:
        """Take the next bytes, at most `LINE_BYTES_MAX`; return the lines that they end."""
        self.offset += len(block)
        raw = self.rest + block
        stop = raw.rfind(b"\n") + 1
        if not stop:
            *pieces, self.rest = _cut_pieces(raw, self._mask)
            return [(self.offset - 1, piece + b"\n") for piece in pieces]
        self.rest = raw[stop:]
        begin = 0
        cut: CutLines = []
        first_stop = raw.find(b"\n") + 1
        if first_stop > LINE_BYTES_MAX + 1:
            begin, end = first_stop, self.offset - len(raw) + first_stop - 1
            cut += [(end, piece + b"\n") for piece in _cut_pieces(raw[: begin - 1], self._mask)]
        elif self.continued and raw[:first_stop] in (b"\n", b"\r\n"):
            begin = first_stop  # the line was complete when it was returned
        self.continued = False
        if begin < stop:
            cut.append((self.offset - len(self.rest) - 1, raw[begin:stop]))
        return cut

    def flush(self) -> CutLines:
        """Return the unfinished line, whole characters of it; the next call continues there."""
        whole = self._mask.find_safe_cut(self.rest, _char_boundary(self.rest, len(self.rest)))
        given, self.rest = self.rest[:whole], self.rest[whole:]
        if not given:
            return []
        self.continued = True
        return [(self.offset - 1, given + b"\n")]

    def end(self) -> CutLines:
        """Return the rest, without a secret at its end of which only a part was written."""
        given, self.rest = self.rest, b""
        whole = self._mask.find_safe_cut(given, len(given), SECRET_CHARS_MIN)
        if whole < len(given):
            given = given[:whole] + CUT_MARK.encode()
        return [(self.offset - 1, given + b"\n")] if given else []


def cut_backward(path: Path, size_bytes: int, block_bytes: int, mask: Mask) -> Iterator[CutLines]:
    """Yield a file's lines block by block from its end, rising within a block; the block size bounds memory.

    A line too long is cut from its end here, so its pieces can differ from those of reading forward.
    """
    start, rest, rest_end = size_bytes, b"", size_bytes - 1
    while start > 0:
        want_bytes = min(block_bytes, start)
        start -= want_bytes
        block = block_at(path, start, want_bytes)
        if len(block) < want_bytes:  # cut off while it was read
            return
        if start + want_bytes == size_bytes:
            block = block.removesuffix(b"\n")
        first, newline, others = block.partition(b"\n")
        cut: CutLines = []
        if newline:
            end, stop = start + len(first), others.rfind(b"\n") + 1
            if stop:
                cut.append((end + stop, others[:stop]))
            cut += [(rest_end, piece + b"\n") for piece in _cut_pieces(others[stop:] + rest, mask)]
            rest, rest_end = first, end
        else:
            rest = _drop_overwritten(first + rest)
            if len(rest) > LINE_BYTES_MAX + mask.bytes_max:  # or a secret may begin before what was read
                at = _cut_offset(rest, len(rest) - LINE_BYTES_MAX, mask)
                cut.append((rest_end, rest[at:] + b"\n"))
                rest_end -= len(rest) - at
                rest = rest[:at] + CUT_MARK.encode()
        if start == 0:
            cut[:0] = [(rest_end, piece + b"\n") for piece in _cut_pieces(rest, mask)]
        yield cut


def _cut_pieces(raw: bytes, mask: Mask) -> list[bytes]:
    """Cut a line that is too long at whole characters, all pieces but the last marked."""
    if len(raw) <= LINE_BYTES_MAX:
        return [raw]
    raw = _drop_overwritten(raw)
    pieces = []
    while len(raw) > LINE_BYTES_MAX:
        at = _cut_offset(raw, LINE_BYTES_MAX, mask)
        pieces.append(raw[:at] + CUT_MARK.encode())
        raw = raw[at:]
    return [*pieces, raw]


def _drop_overwritten(raw: bytes) -> bytes:
    """Drop from a line that is too long what a progress bar has written over since."""
    return raw if len(raw) <= LINE_BYTES_MAX else raw[max(0, raw.rfind(b"\r", 0, len(raw) - 1)) :]


def _cut_offset(raw: bytes, at: int, mask: Mask) -> int:
    """Return the last place up to `at` that is neither inside a character nor, where there is one, inside a secret."""
    return mask.find_safe_cut(raw, _char_boundary(raw, at)) or at


def _char_boundary(raw: bytes, at: int) -> int:
    """Return the last place up to `at` that is not inside a UTF-8 character."""
    for back in range(1, min(4, at) + 1):
        byte = raw[at - back]
        if byte < 0x80:
            return at
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return at - back if width > back else at
    return at


def line_start(path: Path, offset: int, mask: Mask) -> int:
    """Return where the line at `offset` begins; when it is longer than a line may be, where it can be cut."""
    start = max(0, offset - LINE_BYTES_MAX)
    block = block_at(path, start, offset - start)
    cut = block.rfind(b"\n")
    return start + cut + 1 if cut >= 0 else start + mask.find_safe_cut(block, len(block)) if start else 0


def block_at(path: Path, offset: int, size_bytes: int) -> bytes:
    """Open a file, read from it and close it; return nothing when the file is gone."""
    try:
        fd = ownership.open_inside(path)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, size_bytes, offset)
    finally:
        os.close(fd)
