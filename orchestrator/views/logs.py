"""Log view: lines under their ranks' names, harmless to a terminal, and on a terminal deduplicated over ranks.

Into a file or a pipe lines go in blocks, and are processed one by one only where there may be something to mask. The
caller chooses the output's style once, in `choose_style`. A log was written by a program on another machine, so its
escape sequences are dropped, except colours where colours are shown.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from orchestrator.client.logs.reader import LogBlock, LogLine, LogQuery, lines
from orchestrator.core.invisible_characters import escape_harmful, escape_invisible
from orchestrator.core.secret_mask import Mask
from orchestrator.core.text import ranks_text

FOLD_WINDOW_NS = 500_000_000
FAR_WINDOW_NS = 2_500_000_000
"""How long a line waits for others like it; over SSH lines come in batches, a second or two after they were written."""

FOLD_LINES_MAX = 10_000
FOLD_CHARS_MAX = 8 << 20
PREFIX_RANGES_MAX = 4
BATCH_BYTES = 32 << 10
"""About how much text is processed at once."""

_RANK_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""ANSI foreground colours a rank can have; red is left to errors."""
_BOLD, _DIM = 1, 2
_RESET = "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROL_BYTES = bytes([*range(9), *range(11, 32), 127])
_CONTROL_C1 = re.compile(rb"\xc2[\x80-\x9f]")
"""The characters of `_CONTROL` in UTF-8."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# ECMA-48: CSI sequences; strings (DCS, SOS, OSC, PM, APC) that are closed; then any other escape; then lone controls.
# A string that is never closed loses its opener only, or it would hide the rest of the line. All begin with a control
# character, which the pattern names first, as `re` searches for one of a set fastest.
_HARMFUL = re.compile(
    _CONTROL.pattern + r"(?:(?:(?<=\x1b)\[|(?<=\x9b))[0-?]*[ -/]*[@-~]"
    r"|(?:(?<=\x1b)[PX\]^_]|(?<=[\x90\x98\x9d-\x9f]))[^\n\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?<=\x1b)[ -/]*[0-~])?"
)
_LOG = attrgetter("attempt", "rank", "node")


@dataclass(frozen=True, slots=True)
class ShownLine:
    """A line and the ranks, rising, that printed it at about the same time; none for a node's line."""

    line: LogLine
    ranks: tuple[int, ...]


class Deduplicator:
    """Deduplicator of a stream of lines: identical lines of several ranks become one.

    A line joins the earliest waiting one of the same text and attempt that comes after all output of its rank,
    so no rank's lines change places. What waits is bounded by `FOLD_LINES_MAX` and `FOLD_CHARS_MAX`.
    """

    def __init__(self, window_ns: int = FOLD_WINDOW_NS) -> None:
        self._window_ns = window_ns
        self._waiting: deque[tuple[LogLine, list[int]]] = deque()
        self._first = 0  # number of the first waiting line; numbers only rise
        self._chars = 0
        self._by_text: dict[str, list[int]] = {}
        self._last_of_rank: dict[int, int] = {}
        self._attempt = 0

    def add(self, line: LogLine) -> Iterator[ShownLine]:
        """Take one line; yield what it pushes out of a full or ended wait, and what came a window before it. Exhaust it
        before the next call."""
        yield from self.ready(line.time_ns)
        if line.attempt != self._attempt:
            yield from self.flush()
            self._attempt = line.attempt
        if not self._join(line):
            self._add_waiting(line)
        while len(self._waiting) > FOLD_LINES_MAX or self._chars > FOLD_CHARS_MAX:
            yield self._release()

    def ready(self, now_ns: int) -> Iterator[ShownLine]:
        """Yield what has waited for the window, by the time of the first of its lines."""
        while self._waiting and self._waiting[0][0].time_ns + self._window_ns <= now_ns:
            yield self._release()

    def flush(self) -> Iterator[ShownLine]:
        """Yield all that waits."""
        while self._waiting:
            yield self._release()
        self._last_of_rank.clear()

    def _join(self, line: LogLine) -> bool:
        numbers = self._by_text.get(line.text) if line.rank is not None else None
        if not numbers or line.rank is None:
            return False
        at = bisect_left(numbers, self._last_of_rank.get(line.rank, -1) + 1)
        if at == len(numbers):
            return False
        self._waiting[numbers[at] - self._first][1].append(line.rank)
        self._last_of_rank[line.rank] = numbers[at]
        return True

    def _add_waiting(self, line: LogLine) -> None:
        number = self._first + len(self._waiting)
        self._chars += len(line.text)
        if line.rank is None:
            self._waiting.append((line, []))
            return
        self._waiting.append((line, [line.rank]))
        self._by_text.setdefault(line.text, []).append(number)
        self._last_of_rank[line.rank] = number

    def _release(self) -> ShownLine:
        line, ranks = self._waiting.popleft()
        self._first += 1
        self._chars -= len(line.text)
        if ranks:
            numbers = self._by_text[line.text]
            del numbers[0]
            if not numbers:
                del self._by_text[line.text]
        return ShownLine(line, tuple(sorted(ranks)))


@dataclass(frozen=True, slots=True)
class LogStyle:
    """Capabilities of an output: whether it takes colours, lines have prefixes, and it is a terminal."""

    colour: bool
    prefix: bool
    terminal: bool = False


def choose_style(query: LogQuery, *, terminal: bool, environ: Mapping[str, str]) -> LogStyle:
    """Return the style for an output. One rank alone, into a file or a pipe, is that rank's bare text.

    Sources: no-color.org (`NO_COLOR` set and not empty); `TERM=dumb` knows no escapes.
    """
    colour = terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    is_single_rank = len(set(query.ranks)) == 1 and not query.nodes
    return LogStyle(colour=colour, prefix=terminal or not is_single_rank, terminal=terminal)


class LogView:
    """Text of a log, in order, with a divider where an attempt begins.

    `transition` returns the text of the divider before an attempt.
    """

    def __init__(
        self,
        style: LogStyle,
        mask: Mask,
        transition: Callable[[int], str] = lambda attempt: "",
        window_ns: int = FOLD_WINDOW_NS,
    ) -> None:
        self._style = style
        self._mask = mask
        self._transition = transition
        self._folding = Deduplicator(window_ns)
        self._attempt: int | None = None

    def add(self, blocks: Iterable[LogBlock]) -> Iterator[str]:
        """Yield the text of the next blocks, its lines ended by newlines. On a terminal some lines wait for others."""
        for batch in _batches(blocks):
            if self._style.terminal:
                yield self._folded_text(one for line in lines(batch) for one in self._folding.add(line))
            else:
                yield self._unfolded_text(batch)

    def ready(self, now_ns: int) -> str:
        """Return the text of lines that have waited for the window."""
        return self._folded_text(self._folding.ready(now_ns))

    def flush(self) -> str:
        """Return the text of all lines that wait."""
        return self._folded_text(self._folding.flush())

    def lines(self, folded: ShownLine) -> list[str]:
        """Return the lines to print, without newlines: the log's line, after a divider where an attempt begins."""
        line = folded.line
        text = self._harmless(line.text)
        if self._style.terminal:
            text = escape_invisible(text)
        if not self._style.prefix:
            return [text]
        return [*self._divider(line.attempt), f"{self._prefix(line.rank, line.node, folded.ranks)} {text}"]

    def _folded_text(self, folded: Iterable[ShownLine]) -> str:
        return "".join(f"{text}\n" for one in folded for text in self.lines(one))

    def _unfolded_text(self, blocks: list[LogBlock]) -> str:
        """Return the text of blocks where nothing is folded."""
        shown = []
        for (attempt, rank, node), run in itertools.groupby(blocks, _LOG):
            text = self._harmless_lines(b"".join(block.data for block in run))
            if self._style.prefix:
                prefix = f"{self._prefix(rank, node, ())} "
                shown += [f"{line}\n" for line in self._divider(attempt)]
                text = prefix + text[:-1].replace("\n", f"\n{prefix}") + "\n"
            shown.append(text)
        return "".join(shown)

    def _harmless_lines(self, data: bytes) -> str:
        """Return many lines as `_harmless` returns each of them, at once where no secret is in sight."""
        text = cleaned = data.decode("utf-8", "replace")
        if any(map(data.__contains__, _CONTROL_BYTES)) or (not data.isascii() and _CONTROL_C1.search(data)):
            cleaned = strip_escapes(text, colour=self._style.colour)
        if not self._mask.may_change(text) and (cleaned is text or not self._mask.may_change(cleaned)):
            return cleaned
        return "".join(f"{self._harmless(line)}\n" for line in text.split("\n")[:-1])

    def _harmless(self, text: str) -> str:
        """Return a line without secrets and what a terminal would obey."""
        # Masked twice: stripping escapes can join the parts of a secret, and can break one that has escapes of its own.
        return self._mask.apply(strip_escapes(self._mask.apply(text), colour=self._style.colour))

    def _divider(self, attempt: int) -> list[str]:
        """Return the line between the previous attempt and this one, if it is another."""
        previous, self._attempt = self._attempt, attempt
        if previous is None or previous == attempt:
            return []
        transition = escape_harmful(self._mask.apply(self._transition(attempt)))
        return [self._paint(f"── attempt {attempt} ── {transition}".rstrip(), _BOLD)]

    def _prefix(self, rank: int | None, node: str | None, ranks: tuple[int, ...]) -> str:
        if rank is None:
            return self._paint(f"[{strip_escapes(node or '', colour=False)}]", _DIM)
        if len(ranks) > 1:
            return self._paint(f"[ranks {_shorten_ranges(ranks_text(ranks))} ×{len(ranks)}]", _BOLD)
        return self._paint(f"[rank {rank}]", _RANK_COLOURS[rank % len(_RANK_COLOURS)])

    def _paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}{_RESET}" if self._style.colour else text


def _batches(blocks: Iterable[LogBlock]) -> Iterator[list[LogBlock]]:
    batch, left_bytes = [], BATCH_BYTES
    for block in blocks:
        batch.append(block)
        left_bytes -= len(block.data)
        if left_bytes <= 0:
            yield batch
            batch, left_bytes = [], BATCH_BYTES
    if batch:
        yield batch


def strip_escapes(text: str, *, colour: bool) -> str:
    """Return text without control characters and escape sequences; tabs and newlines stay, with `colour` the colours
    (SGR) of a line too."""
    if _CONTROL.search(text) is None:
        return text
    if not colour:
        return _HARMFUL.sub("", text)
    kept = _HARMFUL.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", text)
    return kept + _RESET if "\x1b" in kept else kept


def _shorten_ranges(ranges: str) -> str:
    """Shorten ranges that would fill the line."""
    parts = ranges.split(",")
    return ranges if len(parts) <= PREFIX_RANGES_MAX else ",".join([*parts[:PREFIX_RANGES_MAX], "…"])
