"""Journal of a job: one line per event and decision, in order, appended and never changed; and the job clock, which
continues from it.

Rules: a decision is on disk before it is carried out. Heartbeats are coalesced to one a node, see
`Brain.heartbeats_before`, so that a replay has the input of each decision without a line per second. Reports lack what
has its default, as on the wire. A torn last line is tolerated, no other damage.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import LineLog, read_lines
from orchestrator.core.jobdir.status_file import OTHER_VERSION_FIX
from orchestrator.core.wire import orders, reports
from orchestrator.journal import old_formats
from orchestrator.journal.journal_integrity import JournalError

FORMAT = 4
"""Number of the format of a journal's lines; each line names it. It rises when older lines need a step in `old_formats`."""

_NEWS: dict[str, type[Any]] = {**codec.classes_by_kind(e.Event), **codec.classes_by_kind(d.Decision)}


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One journaled event or decision."""

    n: int
    wall_s: float  # since 1970
    mono_s: float
    machine: str
    incarnation: str  # the agent process whose reliable report it was; empty for none
    seq: int  # the number of that report
    news: News


@dataclass(frozen=True, slots=True)
class _Head:
    """A line without its news; see `JournalEntry`."""

    n: int
    wall: float
    mono: float
    on: str
    format: int = 0
    incarnation: str = ""
    seq: int = 0


def read(path: Path, offset: int = 0, after_n: int = 0) -> Iterator[JournalEntry]:
    """Yield all entries, or those from byte `offset` on, which follow number `after_n`.

    Raises JournalError, naming the line, when one cannot be read or lines before it are missing.
    """
    if not path.exists():
        return
    for number, text in enumerate(read_lines(path, offset), start=after_n + 1):
        entry = _parse_entry(text, path, number)
        if entry.n != number:
            what = f"this is entry {entry.n} of the journal, expected {number}"
            raise JournalError(path, what, number)
        yield entry


def unwrap_message(news: News) -> News | reports.NodeReport | reports.Heartbeat | orders.NodeOrder:
    """Return the report or the order that news hold, or else the news."""
    match news:
        case e.FromNode(report=report):
            return report
        case d.To(order=order):
            return order
        case _:
            return news


def read_kinds(path: Path, *kinds: type[Any]) -> Iterator[News]:
    """Yield the news of these kinds, or with a report or an order of them. Other lines are not parsed, but of earlier formats.
    Raises JournalError."""
    marks, present = [f'"kind":"{kind.__name__}"' for kind in kinds], f'{{"format":{FORMAT},'
    if not path.exists():
        return
    for number, text in enumerate(read_lines(path), start=1):
        if any(mark in text for mark in marks) or not text.startswith(present):
            news = _parse_entry(text, path, number).news
            if isinstance(unwrap_message(news), kinds):
                yield news


@contextlib.contextmanager
def checked_replay(path: Path) -> Iterator[None]:
    """Context of a replay of the journal at `path`. Raises JournalError for valid entries that contradict each other: only a
    damaged journal names a rank or an attempt that did not exist."""
    try:
        yield
    except (AssertionError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError) as err:
        what = f"the journal is damaged: its entries contradict each other ({type(err).__name__}: {err})"
        raise JournalError(path, what) from err


def read_tail(path: Path, offset: int) -> tuple[list[JournalEntry], int]:
    """Return the entries of the whole lines from byte `offset` on, and the offset of what comes next. Raises
    JournalError when one cannot be read."""
    with os.fdopen(ownership.open_regular(path), "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.decode("utf-8", "surrogateescape").split("\n")[:-1]
    return [_parse_entry(text, path) for text in lines], offset + len(whole)


def _parse_entry(text: str, path: Path, line: int | None = None) -> JournalEntry:
    try:
        data = codec.loads_plain(text)
        found = data.get("format")
        if type(found) is not int or not old_formats.OLDEST <= found <= FORMAT:
            what = f"another version of orch wrote the journal, or it is damaged: it has format {found}, this version reads {FORMAT}"
            raise JournalError(path, what, line, fix=OTHER_VERSION_FIX)
        news = codec.unpack_kind(_NEWS, old_formats.upgrade(data.pop("news"), found))
        head = codec.unpack(_Head, data)
    except (codec.CodecError, KeyError, TypeError) as err:
        raise JournalError(path, f"this line of the journal is damaged: {err}", line) from err
    return JournalEntry(head.n, head.wall, head.mono, head.on, head.incarnation, head.seq, news)


class Journal(LineLog):
    """Writer of the journal: `sync` makes durable what `write` has appended."""

    def __init__(self, path: Path, machine: str, last_n: int) -> None:
        """`machine` names this boot of this machine, so that monotonic times can be compared with earlier ones."""
        super().__init__(path)
        self._machine = machine
        self._n = last_n

    def write(self, news: News, incarnation: str = "", seq: int = 0) -> JournalEntry:
        """Append one event or decision, once the disk has room, and return its entry."""
        self._n += 1
        wall_s, mono_s = round(time.time(), 3), round(time.monotonic(), 3)
        line: dict[str, Any] = {
            "format": FORMAT,
            "n": self._n,
            "wall": wall_s,
            "mono": mono_s,
            "on": self._machine,
            "news": codec.pack_without_defaults(news) if isinstance(news, e.FromNode) else codec.pack_kind(news),
        }
        if seq:
            line["incarnation"], line["seq"] = incarnation, seq
        self.append(codec.dumps_plain(line))
        return JournalEntry(self._n, wall_s, mono_s, self._machine, incarnation if seq else "", seq, news)


@dataclass(frozen=True, slots=True)
class ClockStamp:
    """One moment by the job's clock, and by those of a machine. `machine` names one of its boots."""

    at: float
    wall_s: float
    mono_s: float
    machine: str


class JobClock:
    """Clock that the brain judges by: seconds since submit, never running backwards, also across supervisors.

    Within one boot of a machine it is the monotonic clock; a supervisor on another boot has only the wall clock to
    bridge the gap, and counts a gap that seems negative as none.
    """

    def __init__(self, machine: str, latest: ClockStamp | None) -> None:
        """`latest`: the latest moment that is known of the job."""
        self._machine = machine
        self._start_mono_s = time.monotonic()
        if latest is None:
            self._start_s = 0.0
        elif latest.machine == machine:
            self._start_s = latest.at + max(0.0, time.monotonic() - latest.mono_s)
        else:
            self._start_s = latest.at + max(0.0, time.time() - latest.wall_s)

    def now_s(self) -> float:
        """Return the job clock."""
        return self._start_s + time.monotonic() - self._start_mono_s

    def stamp(self) -> ClockStamp:
        """Return this moment."""
        return ClockStamp(self.now_s(), time.time(), time.monotonic(), self._machine)


class SuspendDetector:
    """Detector of suspends of this machine: the clock that counts such time runs ahead of the one that does not."""

    def __init__(self, suspend_s_min: float) -> None:
        """Shorter sleeps than `suspend_s_min` do not count."""
        self._suspend_s_min = suspend_s_min
        self._ahead_s = self._lead_s()

    def _lead_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()

    def has_suspended(self) -> bool:
        """Return whether the machine was suspended for longer than `suspend_s_min` since the last call."""
        before_s, self._ahead_s = self._ahead_s, self._lead_s()
        return self._ahead_s > before_s + self._suspend_s_min
