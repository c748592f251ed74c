"""Time series of a job folder: measurements of its ranks, for curves. `series.jsonl`, one sample a line.

Rules:
1. The supervisor alone writes it. It is for charts only: a damaged or torn line is skipped, and a job is complete without
   the file. On a full disk only samples are lost.
2. A sample is written every 10 s, in the first hour at most 5 MB of them, then at most 6.5 MB a day. After three days the
   time between two samples grows with the age of the job.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.status_types import NOT_MEASURED, Usage

SAMPLE_S = 10.0
HOUR_S, LONG_S = 3600.0, 3 * 86_400.0
FIRST_BYTES_PER_S, BYTES_PER_S = 5e6 / HOUR_S, 6.5e6 / 86_400
LINE_BYTES_MAX = 8 << 20
DIGITS = 6

RANK_FIELDS = 6
"""How many values of a row are fields of `RankMeasurement`; the others are those of `Usage`."""


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """One rank at one time. None: not known."""

    rank: int
    # The job's step, as status shows it
    step: int | None = None
    steps_per_s: float | None = None
    # Median of its last step times
    step_s: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    usage: Usage = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Measurement:
    """All ranks at one time, in seconds since 1970."""

    wall_s: float
    attempt: int
    ranks: tuple[RankMeasurement, ...]


class SeriesWriter:
    """Writer of a job's time series. No call fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Of the first sample, and of the next one
        self._began_wall_s: float | None = None
        self._due_wall_s = 0.0

    def is_due(self, wall_s: float) -> bool:
        """Return whether it is time for a sample; also where the clock was set back."""
        return not self._due_wall_s - LONG_S < wall_s < self._due_wall_s

    def add(self, sample: Measurement) -> None:
        """Append a sample, as far as the disk takes it."""
        line = _pack_line(sample)
        try:
            written_bytes = self._append(line)
        except OSError:
            written_bytes = 0
        if self._began_wall_s is None:
            self._began_wall_s = next((one.wall_s for one in read(self._path)), sample.wall_s)
        age_s = sample.wall_s - self._began_wall_s
        self._due_wall_s = sample.wall_s + pause_s(max(written_bytes, len(line)), age_s)

    def _append(self, line: bytes) -> int:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            size_bytes = os.fstat(fd).st_size
            is_torn = size_bytes > 0 and os.pread(fd, 1, size_bytes - 1) != b"\n"
            return os.write(fd, b"\n" + line if is_torn else line)
        finally:
            os.close(fd)


def pause_s(line_bytes: int, age_s: float) -> float:
    """Return the time from a sample of this size to the next one, in a series of this age."""
    rate = FIRST_BYTES_PER_S if age_s < HOUR_S else BYTES_PER_S
    return max(SAMPLE_S, line_bytes / rate) * max(1.0, age_s / LONG_S)


def read(path: Path, interval_s: float = 0.0) -> Iterator[Measurement]:
    """Yield the samples of a series in the order of their lines; none where there is no file that can be read. Those less
    than `interval_s` after the one before are left out unread: a curve needs a thousand, and a month has many more."""
    try:
        fd = ownership.open_regular(path)
    except OSError:
        return
    last_wall_s = -math.inf
    with os.fdopen(fd, "rb") as file:
        while line := file.readline(LINE_BYTES_MAX):
            try:
                wall_s = float(line[1 : line.find(b",")])
                # A clock that was set back begins again.
                if last_wall_s <= wall_s < last_wall_s + interval_s:
                    continue
                yield _parse_sample(json.loads(line))
                last_wall_s = wall_s
            except (ValueError, TypeError, IndexError, RecursionError):
                continue


def _pack_line(sample: Measurement) -> bytes:
    """Return a line: time, attempt, and of each rank its values in the order of `RankMeasurement`, without the last unknown ones."""
    rows = []
    for rank in sample.ranks:
        own = (rank.rank, rank.step, rank.steps_per_s, rank.step_s, rank.loss, rank.learning_rate)
        row = [_shorten(value) for value in (*own, *codec.pack(rank.usage).values())]
        while row[-1] is None:
            row.pop()
        rows.append(row)
    return (codec.dumps_plain([round(sample.wall_s, 1), sample.attempt, rows]) + "\n").encode()


def _shorten(value: float | None) -> float | str | None:
    """Return a number with few digits, a whole one with all; as a text where JSON has no number for it."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(float(value))


def _parse_sample(data: list[Any]) -> Measurement:
    """Return the sample of a line. Raises ValueError or TypeError when it is damaged."""
    wall_s, attempt, rows = data
    if not isinstance(wall_s, (int, float)) or not isinstance(attempt, int) or not isinstance(rows, list):
        raise ValueError("no sample")
    # All rows at once: a long job has hundreds of thousands.
    types = set(map(type, itertools.chain.from_iterable(rows)))
    if str in types:
        rows = [[float(item) if type(item) is str else item for item in row] for row in rows]
    if not types <= _TYPES or not {type(row[0]) for row in rows} <= {int}:
        raise ValueError("no numbers of ranks")
    rows = [[*row[:RANK_FIELDS], Usage(*row[RANK_FIELDS:])] if len(row) > RANK_FIELDS else row for row in rows]
    return Measurement(float(wall_s), attempt, tuple([RankMeasurement(*row) for row in rows]))


_TYPES = frozenset((int, float, str, type(None)))
