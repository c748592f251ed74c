"""Reader of a job's logs: of one rank or a thousand, merged by time, from the end, or as they grow.

Rules: attempts follow one another, inside an attempt lines are merged by the time their last byte was written (the
index next to a log; what it does not cover, and node logs, by the file's own mtime), then by rank, then by file order.
A log is read, merged and handed on in blocks of lines, which is many times faster than line by line, and opened per
block, so neither a log's length nor the number of ranks costs memory or open files. The lines of one rank are never
reordered, lost or duplicated.

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

from orchestrator.client.logs.lines import (
    CUT_MARK,
    LINE_BYTES_MAX,
    CutLines,
    LineCutter,
    LogBlock,
    LogLine,
    block_at,
    cut_backward,
    filter_lines,
    line_start,
    lines,
)
from orchestrator.core.jobdir.layout import JobDir, attempt_of, rank_of
from orchestrator.core.jobdir.log_index import IndexCursor, offset_at
from orchestrator.core.secret_mask import Mask

__all__ = [
    "BAR_S", "CUT_MARK", "LINE_BYTES_MAX", "Follower", "LogBlock", "LogLine", "LogQuery", "attempts", "blocks",
    "has_rank_lines", "lines", "nodes", "read",
]  # fmt: skip

FLUSH_S = 1.0
BAR_S = 5.0
"""A progress bar that is being redrawn is shown this often while it is followed."""
POLL_BYTES_MAX = 4 << 20
_DRAIN_POLLS_MAX = 100_000
_READ_BYTES_MAX = 16 << 20
_BLOCK_BYTES_MIN = 8 << 10
_NO_LIMIT = 1 << 64
NO_SECRETS = Mask(())
_NODE_LOG = re.compile(r"node-(.+)\.log$")
_BLOCK_TIME = attrgetter("time_ns")


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Selection of log lines; without `ranks` and `nodes`, those of every rank."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes whose node log (agent and setup output) is read; with `nodes` alone no rank's log is read."""
    attempt: int | None = None
    tail: int | None = None
    """The number of last lines, over all logs together, counted after `grep`."""
    since_s: float | None = None
    """Only lines of the last seconds, this many."""
    grep: re.Pattern[str] | None = None
    """Only lines that match."""


@dataclass(frozen=True, slots=True)
class _LogFile:
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
class _Scan:
    """Parameters of a read: block size, the times between which lines count, whether times matter, and the secrets."""

    block_bytes: int
    is_timed: bool
    after_ns: int
    now_ns: int
    mask: Mask


def attempts(job: JobDir) -> tuple[int, ...]:
    """Return the attempts that have a log folder, rising."""
    numbers = (attempt_of(path) for path in _entries(job.logs))
    return tuple(sorted(attempt for attempt in numbers if attempt is not None))


def nodes(job: JobDir) -> list[str]:
    """Return the nodes that have a node log, in any attempt."""
    names = [path.name for attempt in attempts(job) for path in _entries(job.attempt_logs(attempt))]
    return sorted({match.group(1) for name in names if (match := _NODE_LOG.match(name))})


def has_rank_lines(job: JobDir) -> bool:
    """Return whether any rank has written anything, in any attempt."""
    return any(source.size_bytes for source in _sources(job, LogQuery()))


def read(job: JobDir, query: LogQuery, now_ns: int, mask: Mask = NO_SECRETS) -> Iterator[LogLine]:
    """Yield the lines that `query` asks for, oldest first, as the files are now. `now_ns` is the wall time.

    Lines are not masked, but cut so that `mask` finds every secret in them.
    """
    return lines(blocks(job, query, now_ns, mask))


def blocks(
    job: JobDir, query: LogQuery, now_ns: int, mask: Mask = NO_SECRETS, *, is_timed: bool = True
) -> Iterator[LogBlock]:
    """Yield blocks of the lines that `read` yields. Without `is_timed`, times are read only where they decide."""
    return _read(_sources(job, query), query, now_ns, mask, is_timed)


class Follower:
    """Follower of a job's logs: the blocks that `blocks` yields, then what is added, over all ranks and attempts.

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
        self._past = _read(past, query, clock_ns(), mask, is_timed=True)
        self._tails = {source.path: _Tail(source, mask) for source in past}
        self.is_behind = True
        """Whether the next poll has more without a wait."""

    def poll(self) -> list[LogBlock]:
        """Return the lines since the last poll, about `POLL_BYTES_MAX` at most; the next poll continues."""
        now_ns = self._clock_ns()
        past = self._take_past()
        if past:
            return past
        new: list[LogBlock] = []
        sources = _sources(self._job, self._query)
        share_bytes = max(_BLOCK_BYTES_MIN, POLL_BYTES_MAX // max(1, len(sources)))
        self.is_behind = False
        for source in sources:
            tail = self._tails.get(source.path)
            if tail is None:
                tail = self._tails[source.path] = _Tail(replace(source, size_bytes=0), self._mask)
            new += tail.more(source, share_bytes, now_ns)
            self.is_behind |= tail.offset < source.size_bytes
        return self._merged(new)

    def drain(self) -> Iterator[LogBlock]:
        """Yield the rest, unfinished lines too, once no process still writes."""
        for _ in range(_DRAIN_POLLS_MAX):
            new = self.poll()
            yield from new
            if not new and not self.is_behind:
                break
        now_ns = self._clock_ns()
        tails = sorted(self._tails.values(), key=lambda tail: tail.source.order)
        yield from self._merged([block for tail in tails for block in tail.flush(now_ns)])

    def _take_past(self) -> list[LogBlock]:
        past, left_bytes = [], POLL_BYTES_MAX
        for block in self._past:
            past.append(block)
            left_bytes -= len(block.data) + 200  # what a block costs in addition to its lines
            if left_bytes < 0:
                break
        return past

    def _merged(self, new: list[LogBlock]) -> list[LogBlock]:
        new.sort(key=lambda block: (block.attempt, block.time_ns))
        return list(filter_lines(new, self._query.grep, self._mask))


def _sources(job: JobDir, query: LogQuery) -> list[_LogFile]:
    """Return the logs that `query` wants, by attempt, node logs first, then by rank."""
    numbers = attempts(job) if query.attempt is None else (query.attempt,)
    sources = [source for attempt in numbers for source in _attempt_sources(job, query, attempt)]
    return sorted(sources, key=attrgetter("order"))


def _attempt_sources(job: JobDir, query: LogQuery, attempt: int) -> Iterator[_LogFile]:
    for node in sorted(set(query.nodes)):
        yield from _stat_log(job.node_log(attempt, node), attempt, None, node)
    if query.ranks or query.nodes:
        for rank in sorted(set(query.ranks)):
            yield from _stat_log(job.rank_log(attempt, rank), attempt, rank, None)
        return
    for path in _entries(job.attempt_logs(attempt)):
        rank_number = rank_of(path)
        if rank_number is not None:
            yield from _stat_log(path, attempt, rank_number, None)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _stat_log(path: Path, attempt: int, rank: int | None, node: str | None) -> Iterator[_LogFile]:
    """Yield the log at `path`, or nothing when there is none (yet)."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return
    yield _LogFile(attempt, rank, node, path, about.st_size, about.st_mtime_ns)


def _read(sources: list[_LogFile], query: LogQuery, now_ns: int, mask: Mask, is_timed: bool) -> Iterator[LogBlock]:
    sources = [source for source in sources if source.size_bytes]
    groups = [list(group) for _, group in itertools.groupby(sources, key=attrgetter("attempt"))]
    block_bytes = min(LINE_BYTES_MAX, max(_BLOCK_BYTES_MIN, _READ_BYTES_MAX // max(1, len(sources))))
    after_ns = -1 if query.since_s is None else now_ns - int(query.since_s * 1e9)
    is_timed = is_timed or query.since_s is not None or any(len(group) > 1 for group in groups)
    scan = _Scan(block_bytes, is_timed, after_ns, now_ns, mask)
    if query.tail is not None:
        newest_first = itertools.chain.from_iterable(_merge_backward(group, scan) for group in groups[::-1])
        yield from _last_lines(filter_lines(newest_first, query.grep, mask), query.tail)
        return
    if query.since_s is None and query.grep is None:
        groups = groups[-1:]
    for group in groups:
        merged = heapq.merge(*(_read_forward(one, scan) for one in group), key=_BLOCK_TIME)
        yield from filter_lines(merged, query.grep, mask)


def _merge_backward(group: list[_LogFile], scan: _Scan) -> Iterator[LogBlock]:
    """Merge newest first, in exactly the reverse order of the merge forward; in a block lines keep their order."""
    return heapq.merge(*(_read_backward(one, scan) for one in reversed(group)), key=_BLOCK_TIME, reverse=True)


def _last_lines(newest_first: Iterable[LogBlock], count: int) -> list[LogBlock]:
    """Return the blocks of the last `count` lines, oldest first."""
    kept: list[LogBlock] = []
    for block in newest_first if count else ():
        lines_left = count - block.data.count(b"\n")
        if lines_left < 0:
            parts = block.data.split(b"\n")
            block = replace(block, data=b"\n".join(parts[-count - 1 :]))
        kept.append(block)
        count = lines_left
        if count <= 0:
            break
    return kept[::-1]


def _read_forward(source: _LogFile, scan: _Scan) -> Iterator[LogBlock]:
    """Yield a log's lines in file order, from the first that is later than the scan's start."""
    offset = 0
    if scan.after_ns >= 0 and source.index is not None:
        offset = line_start(source.path, min(source.size_bytes, offset_at(source.index, scan.after_ns)), scan.mask)
    cutter, cursor = LineCutter(offset, scan.mask), IndexCursor(source.index if scan.is_timed else None)
    while cutter.offset < source.size_bytes:
        block_bytes = min(scan.block_bytes, source.size_bytes - cutter.offset)
        block = block_at(source.path, cutter.offset, block_bytes)
        if not block:  # cut off while it was read
            break
        yield from _after_start(_add_times(source, cutter.add(block), cursor, scan.now_ns), scan)
    yield from _after_start(_add_times(source, cutter.end(), cursor, scan.now_ns), scan)


def _after_start(blocks: Iterator[LogBlock], scan: _Scan) -> Iterator[LogBlock]:
    return (block for block in blocks if block.time_ns > scan.after_ns)


def _read_backward(source: _LogFile, scan: _Scan) -> Iterator[LogBlock]:
    """Yield a log's blocks from the last to the first that is later than the scan's start."""
    for cut in cut_backward(source.path, source.size_bytes, scan.block_bytes, scan.mask):
        stamped = list(_add_times(source, cut, IndexCursor(source.index), scan.now_ns))
        for block in reversed(stamped):
            if block.time_ns <= scan.after_ns:
                return
            yield block


def _add_times(source: _LogFile, cut: CutLines, cursor: IndexCursor, now_ns: int) -> Iterator[LogBlock]:
    """Yield lines with their times; lines beyond the index get the file's mtime."""
    for end, data in cut:
        offset, begin = end + 1 - len(data), 0
        while begin < len(data):
            line_end = offset + data.find(b"\n", begin)
            noted_ns, until = cursor.span(line_end) or (max(cursor.time_ns, source.mtime_ns), _NO_LIMIT)
            stop = data.rfind(b"\n", begin, until - offset) + 1
            time_ns = min(noted_ns, now_ns)
            yield LogBlock(time_ns, source.attempt, source.rank, source.node, data[begin:stop])
            begin = stop


class _Tail:
    """One followed log: how far it was read, and the unfinished line that is held back."""

    __slots__ = ("_cursor", "_cutter", "_held_ns", "_mask", "source")

    def __init__(self, source: _LogFile, mask: Mask) -> None:
        self.source = source
        self._mask = mask
        self._cutter = LineCutter(source.size_bytes, mask)
        self._cursor = IndexCursor(source.index)
        self._held_ns: int | None = None

    @property
    def offset(self) -> int:
        return self._cutter.offset

    def more(self, source: _LogFile, limit_bytes: int, now_ns: int) -> Iterator[LogBlock]:
        """Yield the lines added since the last call, up to `limit_bytes`. `source` is the log as it is now."""
        if source.size_bytes < self.offset:  # truncated: it starts again
            yield from self.flush(now_ns)
            self._cutter, self._cursor = LineCutter(0, self._mask), IndexCursor(source.index)
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
            yield from _add_times(source, cut, self._cursor, now_ns)
        if self._is_due(now_ns):
            yield from _add_times(source, self._cutter.flush(), self._cursor, now_ns)
            self._held_ns = None

    def flush(self, now_ns: int) -> list[LogBlock]:
        """Return the unfinished line."""
        self._held_ns = None
        return list(_add_times(self.source, self._cutter.end(), self._cursor, now_ns))

    def _is_due(self, now_ns: int) -> bool:
        if not self._cutter.rest:
            return False
        if self._held_ns is None or self._held_ns > now_ns:  # new, or the clock was set back
            self._held_ns = now_ns
        hold_s = BAR_S if b"\r" in self._cutter.rest else FLUSH_S
        return now_ns - self._held_ns >= hold_s * 1e9
