"""Reader of a job's logs: of one rank or a thousand, merged by time, from the end, or as they grow.

Rules: attempts follow one another, inside an attempt lines are merged by the time their last byte was written (the
index next to a log; what it does not cover, and node logs, by the file's own mtime), then by rank, then by file order.
A log is read in blocks and opened per block, so neither a log's length nor the number of ranks costs memory or open
files. The lines of one rank are never reordered, lost or duplicated.

A query without `attempt` reads the newest attempt with any output; with `tail`, earlier ones too until there are enough
lines; with `since_s`, or with `grep` and no `tail`, all attempts.
"""

from __future__ import annotations

import heapq
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from orchestrator.client.log_lines import (
    CUT_MARK,
    LINE_BYTES_MAX,
    Cut,
    Cutter,
    block_at,
    cut_backward,
    line_start,
)
from orchestrator.core.jobdir.layout import JobDir, attempt_of, rank_of
from orchestrator.core.jobdir.log_index import IndexCursor, offset_at
from orchestrator.core.mask import Mask

__all__ = [
    "BAR_S", "CUT_MARK", "LINE_BYTES_MAX", "Follower", "LogLine", "LogQuery", "attempts", "has_rank_lines", "nodes",
    "read",
]  # fmt: skip

FLUSH_S = 1.0
BAR_S = 5.0
"""A progress bar that is being redrawn is shown this often while it is followed."""
POLL_BYTES_MAX = 16 << 20
_DRAIN_POLLS_MAX = 100_000
_READ_BYTES_MAX = 16 << 20
_BLOCK_BYTES_MIN = 8 << 10
_FAR = 1 << 64
NO_SECRETS = Mask(())
_NODE_LOG = re.compile(r"node-(.+)\.log$")
_TIME = attrgetter("time_ns")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Selection of log lines; without `ranks` and `nodes`, those of every rank."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes whose own log (agent and setup output) is read; with `nodes` alone no rank's log is."""
    attempt: int | None = None
    tail: int | None = None
    """The number of last lines, over all logs together, counted after `grep`."""
    since_s: float | None = None
    """Only lines of the last seconds, this many."""
    grep: re.Pattern[str] | None = None
    """Only lines that match."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a rank's log, or of a node's; exactly one of `rank` and `node` is set."""

    time_ns: int
    """When its end had been written: wall clock of the node, never later than the reader's."""
    attempt: int
    rank: int | None
    text: str
    node: str | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """One log file, with its size and time when it was listed."""

    attempt: int
    rank: int | None
    node: str | None
    path: Path
    size_bytes: int
    mtime_ns: int

    @property
    def order(self) -> tuple[int, int, str]:
        return self.attempt, -1 if self.rank is None else self.rank, self.node or ""

    @property
    def index(self) -> Path | None:
        return None if self.rank is None else self.path.with_suffix(".idx")


@dataclass(frozen=True, slots=True)
class _Run:
    """Lines of one log that share a time: merging runs instead of lines is several times faster."""

    time_ns: int
    source: _Source
    lines: list[bytes]


@dataclass(frozen=True, slots=True)
class _Scan:
    """Parameters of a read: block size, the times between which lines count, and the secrets."""

    block_bytes: int
    after_ns: int
    now_ns: int
    mask: Mask


def attempts(job: JobDir) -> tuple[int, ...]:
    """Return the attempts that have a log folder, rising."""
    numbers = (attempt_of(path) for path in _entries(job.logs))
    return tuple(sorted(attempt for attempt in numbers if attempt is not None))


def nodes(job: JobDir) -> list[str]:
    """Return the nodes that have a log of their own, in any attempt."""
    names = [path.name for attempt in attempts(job) for path in _entries(job.attempt_logs(attempt))]
    return sorted({match.group(1) for name in names if (match := _NODE_LOG.match(name))})


def has_rank_lines(job: JobDir) -> bool:
    """Tell whether any rank has written anything, in any attempt."""
    return any(source.size_bytes for source in _sources(job, LogQuery()))


def read(job: JobDir, query: LogQuery, now_ns: int, mask: Mask = NO_SECRETS) -> Iterator[LogLine]:
    """Yield the lines that `query` asks for, oldest first, as the files stand now. `now_ns` is the wall time.

    Lines are not masked, but cut so that `mask` finds every secret in them.
    """
    return _read(_sources(job, query), query, now_ns, mask)


class Follower:
    """Follower of a job's logs: the lines that `read` yields, then what is added, over all ranks and attempts.

    The caller polls, sleeps between polls, and drains when the job is over. An unfinished line is held back until it
    ends or `FLUSH_S` have passed; the rest then comes as a line of its own.
    """

    def __init__(
        self,
        job: JobDir,
        query: LogQuery,
        mask: Mask = NO_SECRETS,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`mask`: as for `read`."""
        self._job = job
        self._query = query
        self._mask = mask
        self._clock_ns = clock_ns
        past = [
            replace(source, size_bytes=line_start(source.path, source.size_bytes, mask))
            for source in _sources(job, query)
        ]
        self._past = _read(past, query, clock_ns(), mask)
        self._tails = {source.path: _Tail(source, mask) for source in past}
        self._behind = True

    def poll(self) -> list[LogLine]:
        """Return the lines since the last poll, about `POLL_BYTES_MAX` at most; the next poll goes on."""
        now_ns = self._clock_ns()
        lines = self._take_past()
        if lines:
            return lines
        runs: list[_Run] = []
        sources = _sources(self._job, self._query)
        share_bytes = max(_BLOCK_BYTES_MIN, POLL_BYTES_MAX // max(1, len(sources)))
        self._behind = False
        for source in sources:
            tail = self._tails.get(source.path)
            if tail is None:
                tail = self._tails[source.path] = _Tail(replace(source, size_bytes=0), self._mask)
            runs += tail.more(source, share_bytes, now_ns)
            self._behind |= tail.offset < source.size_bytes
        return self._merged(runs)

    def drain(self) -> Iterator[LogLine]:
        """Yield the rest, unfinished lines too, once no process still writes."""
        for _ in range(_DRAIN_POLLS_MAX):
            lines = self.poll()
            yield from lines
            if not lines and not self._behind:
                break
        now_ns = self._clock_ns()
        tails = sorted(self._tails.values(), key=lambda tail: tail.source.order)
        yield from self._merged([run for tail in tails for run in tail.flush(now_ns)])

    def _take_past(self) -> list[LogLine]:
        lines, left_bytes = [], POLL_BYTES_MAX
        for line in self._past:
            lines.append(line)
            left_bytes -= len(line.text) + 100  # what a line costs in addition to its text
            if left_bytes < 0:
                break
        return lines

    def _merged(self, runs: list[_Run]) -> list[LogLine]:
        runs.sort(key=lambda run: (run.source.attempt, run.time_ns))
        return list(_log_lines(runs, self._query.grep, self._mask))


def _sources(job: JobDir, query: LogQuery) -> list[_Source]:
    """Return the logs that `query` wants, by attempt, node logs first, then by rank."""
    numbers = attempts(job) if query.attempt is None else (query.attempt,)
    sources = [source for attempt in numbers for source in _attempt_sources(job, query, attempt)]
    return sorted(sources, key=attrgetter("order"))


def _attempt_sources(job: JobDir, query: LogQuery, attempt: int) -> Iterator[_Source]:
    for node in sorted(set(query.nodes)):
        yield from _stat(job.node_log(attempt, node), attempt, None, node)
    if query.ranks or query.nodes:
        for rank in sorted(set(query.ranks)):
            yield from _stat(job.rank_log(attempt, rank), attempt, rank, None)
        return
    for path in _entries(job.attempt_logs(attempt)):
        rank_number = rank_of(path)
        if rank_number is not None:
            yield from _stat(path, attempt, rank_number, None)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _stat(path: Path, attempt: int, rank: int | None, node: str | None) -> Iterator[_Source]:
    """Yield the log at `path`, or nothing when there is none (yet)."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return
    yield _Source(attempt, rank, node, path, about.st_size, about.st_mtime_ns)


def _read(sources: list[_Source], query: LogQuery, now_ns: int, mask: Mask) -> Iterator[LogLine]:
    sources = [source for source in sources if source.size_bytes]
    groups = [list(group) for _, group in itertools.groupby(sources, key=attrgetter("attempt"))]
    block_bytes = min(LINE_BYTES_MAX, max(_BLOCK_BYTES_MIN, _READ_BYTES_MAX // max(1, len(sources))))
    after_ns = -1 if query.since_s is None else now_ns - int(query.since_s * 1e9)
    scan = _Scan(block_bytes, after_ns, now_ns, mask)
    if query.tail is not None:
        runs = itertools.chain.from_iterable(_merge_backward(group, scan) for group in reversed(groups))
        newest_first = list(itertools.islice(_log_lines(runs, query.grep, mask), query.tail))
        yield from reversed(newest_first)
        return
    if query.since_s is None and query.grep is None:
        groups = groups[-1:]
    for group in groups:
        yield from _log_lines(
            heapq.merge(*(_forward(one, scan) for one in group), key=_TIME), query.grep, mask
        )


def _merge_backward(group: list[_Source], scan: _Scan) -> Iterator[_Run]:
    """Merge newest first, in exactly the reverse order of the merge forward."""
    return heapq.merge(*(_backward(one, scan) for one in reversed(group)), key=_TIME, reverse=True)


def _log_lines(runs: Iterable[_Run], grep: re.Pattern[str] | None, mask: Mask) -> Iterator[LogLine]:
    for run in runs:
        time_ns, source = run.time_ns, run.source
        for raw in run.lines:
            text = raw.decode("utf-8", "replace")
            if "\r" in text:
                text = _seen(mask.apply(text))  # part of a secret may be written over
            if grep is None or grep.search(text):
                yield LogLine(time_ns, source.attempt, source.rank, text, source.node)


def _seen(text: str) -> str:
    """Return what a terminal shows at the end of a line that returned to its start, as progress bars do."""
    parts = text.split("\r")
    if "\x1b" in text:  # columns cannot be counted: the last part that shows anything
        return next((part for part in reversed(parts) if _ESCAPE.sub("", part).strip()), parts[-1])
    seen = ""
    for part in reversed(parts):
        seen += part[len(seen) :]
    return seen.rstrip()


def _forward(source: _Source, scan: _Scan) -> Iterator[_Run]:
    """Yield a log's lines in file order, from the first that is later than the scan's start."""
    offset = 0
    if scan.after_ns >= 0 and source.index is not None:
        offset = line_start(
            source.path, min(source.size_bytes, offset_at(source.index, scan.after_ns)), scan.mask
        )
    cutter, cursor = Cutter(offset, scan.mask), IndexCursor(source.index)
    while cutter.offset < source.size_bytes:
        block_bytes = min(scan.block_bytes, source.size_bytes - cutter.offset)
        block = block_at(source.path, cutter.offset, block_bytes)
        if not block:  # cut off while it was read
            break
        yield from _later(_stamp(source, cutter.add(block), cursor, scan.now_ns), scan)
    yield from _later(_stamp(source, cutter.end(), cursor, scan.now_ns), scan)


def _later(runs: Iterator[_Run], scan: _Scan) -> Iterator[_Run]:
    return (run for run in runs if run.time_ns > scan.after_ns)


def _backward(source: _Source, scan: _Scan) -> Iterator[_Run]:
    """Yield a log's lines from the last to the first that is later than the scan's start."""
    for cut in cut_backward(source.path, source.size_bytes, scan.block_bytes, scan.mask):
        runs = list(_stamp(source, cut, IndexCursor(source.index), scan.now_ns))
        for run in reversed(runs):
            if run.time_ns <= scan.after_ns:
                return
            yield _Run(run.time_ns, source, run.lines[::-1])


def _stamp(source: _Source, cut: Cut, cursor: IndexCursor, now_ns: int) -> Iterator[_Run]:
    """Yield lines with their times; lines beyond the index get the file's mtime."""
    until, time_ns, lines = 0, 0, list[bytes]()
    for end, raw in cut:
        if end >= until:
            if lines:
                yield _Run(time_ns, source, lines)
            noted_ns, until = cursor.span(end) or (max(cursor.time_ns, source.mtime_ns), _FAR)
            time_ns, lines = min(noted_ns, now_ns), []
        lines.append(raw)
    if lines:
        yield _Run(time_ns, source, lines)


class _Tail:
    """One followed log: how far it was read, and the unfinished line that is held back."""

    __slots__ = ("_cursor", "_cutter", "_held_ns", "_mask", "source")

    def __init__(self, source: _Source, mask: Mask) -> None:
        self.source = source
        self._mask = mask
        self._cutter = Cutter(source.size_bytes, mask)
        self._cursor = IndexCursor(source.index)
        self._held_ns: int | None = None

    @property
    def offset(self) -> int:
        return self._cutter.offset

    def more(self, source: _Source, limit_bytes: int, now_ns: int) -> Iterator[_Run]:
        """Yield the lines added since the last call, up to `limit_bytes`. `source` is the log as it stands now."""
        if source.size_bytes < self.offset:  # truncated: it starts again
            yield from self.flush(now_ns)
            self._cutter, self._cursor = Cutter(0, self._mask), IndexCursor(source.index)
        self.source = source
        self._cursor.refresh()
        end = min(source.size_bytes, self.offset + limit_bytes)
        while self.offset < end:
            block = block_at(source.path, self.offset, min(LINE_BYTES_MAX, end - self.offset))
            if not block:
                break
            cut = self._cutter.add(block)
            if cut:
                self._held_ns = None
            yield from _stamp(source, cut, self._cursor, now_ns)
        if self._is_due(now_ns):
            yield from _stamp(source, self._cutter.flush(), self._cursor, now_ns)
            self._held_ns = None

    def flush(self, now_ns: int) -> list[_Run]:
        """Return the unfinished line."""
        self._held_ns = None
        return list(_stamp(self.source, self._cutter.end(), self._cursor, now_ns))

    def _is_due(self, now_ns: int) -> bool:
        """Tell whether the unfinished line has waited long enough."""
        if not self._cutter.rest:
            return False
        if self._held_ns is None or self._held_ns > now_ns:  # new, or the clock was set back
            self._held_ns = now_ns
        hold_s = BAR_S if b"\r" in self._cutter.rest else FLUSH_S
        return now_ns - self._held_ns >= hold_s * 1e9
