"""At which step is a rank, how fast, where was it at some moment, and how many collectives had it entered by then?

Read from the file its hook counts in. The agent makes the file (`create`) before the rank starts; `node/hook.py` in the
rank writes it through a mapping and states its layout. Writer and reader share memory and no lock: the time of a step
and its counts are in the ring before the step is counted, so what is counted can be read.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.rank.hook import (
    BEAT_BYTES,
    BEAT_MAGIC,
    BEAT_VERSION,
    COUNTS_WORD,
    GROUPS_FILE,
    GROUPS_MAX,
    GROUPS_WORD,
    LEFT_PID_WORD,
    LEFT_WORD,
    OPTIMIZERS_MAX,
    PID_WORD,
    RING_STEPS,
    RING_WORD,
    ROW_WORDS,
    STEP_WORD,
    THREAD_WORD,
)
from orchestrator.core import codec, observations

RATE_STEPS_MAX = 32
RATE_WINDOW_NS = 10_000_000_000
USUAL_STEPS_MAX = 128
USUAL_STEPS_MIN = 3
USUAL_SHORT = 0.25
"""Steps shorter than this part of the long ones belong to the same turn of the training loop: where several optimizers
step one after the other, the silence that is usual is that between two turns."""

MARKS_MAX = 4
HISTORY_MARKS_MAX = 64
MTIME_LAG_NS = 10_000_000
"""A file's mtime comes from the kernel's coarse clock, up to one tick (10 ms at 100 Hz) behind the clock of a step.
Add it to an mtime before asking `step_at`."""

_HEADER = struct.Struct("<8Q")
_RING = struct.Struct(f"<{RING_STEPS}Q")
_ROW = struct.Struct(f"<{ROW_WORDS}Q")


@dataclass(frozen=True, slots=True)
class LastStep:
    """The last step a rank has finished, when (wall clock of its node), and which process and thread of it made that
    step (the kernel's ids); all 0 before the first step.

    `step` counts the optimizer steps of that process: a script that restarts its trainer counts from 1 again.
    """

    step: int
    time_ns: int
    pid: int
    tid: int = 0


NO_BEAT = LastStep(step=0, time_ns=0, pid=0)


@dataclass(frozen=True, slots=True)
class Group:
    """One of torch's process groups: its name and purpose as torch has them, the global ranks in it, its column."""

    name: str
    label: str
    ranks: tuple[int, ...]
    column: int

    @property
    def key(self) -> str:
        """Return what all members call it, and no other group of the job is called."""
        return f"{zlib.crc32(f'{self.name} {self.ranks}'.encode()):08x}"


@dataclass(frozen=True, slots=True)
class StepEnd:
    """When a step ended (wall clock), and how many collectives each group had entered by then; None: not known."""

    step: int
    time_ns: int
    counts: tuple[int, ...] | None

    @property
    def count(self) -> int | None:
        """Return how many that are in all."""
        return None if self.counts is None else sum(self.counts)


def create(path: Path) -> None:
    """Make an empty beat file. Its blocks are written, not left as a hole: storing into a hole on a full disk kills."""
    path.write_bytes(bytes(BEAT_BYTES))


class StepCounter:
    """One rank's beat file, mapped for reading. Raises OSError or ValueError when it is missing or too short."""

    def __init__(self, path: Path) -> None:
        self._groups_file = path.with_name(GROUPS_FILE)
        self._groups: tuple[Group, ...] = ()
        self._generation = 0
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), BEAT_BYTES, access=mmap.ACCESS_READ)
        self._words = memoryview(self._map).cast("Q")

    def read(self) -> LastStep:
        """Return the last step with its time."""
        words = _HEADER.unpack_from(self._map)
        if words[0] != BEAT_MAGIC | BEAT_VERSION << 32 or words[STEP_WORD] == 0:
            return NO_BEAT
        step = words[STEP_WORD]
        # From the ring, not from the header: the header's time may already be that of the next step.
        (time_ns,) = struct.unpack_from("<Q", self._map, 8 * (RING_WORD + step % RING_STEPS))
        return LastStep(step=step, time_ns=time_ns, pid=words[PID_WORD], tid=words[THREAD_WORD])

    def left_pid(self) -> int | None:
        """Return the process that has said the rank's last word: it has nothing left to do but to end."""
        words = _HEADER.unpack_from(self._map)
        return words[LEFT_PID_WORD] if words[LEFT_WORD] else None

    def rate_per_s(self) -> float | None:
        """Return steps per second over the last 32 steps, of them only those of its last 10 s; None before two steps."""
        step = self.read().step
        times_ns = self._times_ns(max(1, step - RATE_STEPS_MAX), step)
        rate = None
        for back in range(1, len(times_ns)):
            before_ns = times_ns[-1 - back]
            elapsed_ns = times_ns[-1] - before_ns
            if before_ns == 0 or elapsed_ns <= 0:  # not this counter's step, or the clock was set back
                break
            if elapsed_ns > RATE_WINDOW_NS and rate is not None:
                break
            rate = back * 1e9 / elapsed_ns
        return rate

    def usual_s(self) -> float | None:
        """Return the median time between the last 128 steps, a turn's short steps left out; None before 3 of them."""
        last = self.read().step
        times_ns = [time_ns for time_ns in self._times_ns(max(1, last - USUAL_STEPS_MAX), last) if time_ns]
        took_ns = sorted(b - a for a, b in itertools.pairwise(times_ns) if b > a)
        if len(took_ns) < USUAL_STEPS_MIN:
            return None
        short_ns = USUAL_SHORT * took_ns[len(took_ns) * 9 // 10]
        long_ns = took_ns[bisect.bisect_left(took_ns, short_ns) :]
        return long_ns[len(long_ns) // 2] / 1e9

    def step_at(self, time_ns: int) -> int | None:
        """Return the last step finished at or before that moment of the node's wall clock.

        None when there was no step yet or the ring, 1,024 steps long, no longer knows.
        """
        beat = self.read()
        ring = _RING.unpack_from(self._map, 8 * RING_WORD)
        for step in range(beat.step, max(0, beat.step - RING_STEPS), -1):
            if 0 < ring[step % RING_STEPS] <= time_ns:
                return step
        return None

    def groups(self) -> tuple[Group, ...]:
        """Return the rank's groups, as far as they are counted; none while they change, or before the first step."""
        generation = _HEADER.unpack_from(self._map)[GROUPS_WORD]
        if generation != self._generation:
            found = _read_groups(self._groups_file, generation)
            if found is None:
                return ()
            self._groups, self._generation = found, generation
        return self._groups

    def marks(self, since: int, last: int) -> tuple[observations.CollectiveCounts, ...]:
        """Return some marks of the steps after `since` up to `last`, at most 4, at steps that other ranks choose too.

        Their optimizer's turns are multiples of a power of two, the largest that has two of them there: ranks that are
        some steps apart, or beat at other moments, still have turns in common.
        """
        since = since if since <= last else 0  # a counter that began anew
        words, at = self._words, COUNTS_WORD + GROUPS_MAX
        steps = range(max(since, last - RING_STEPS + 1) + 1, last + 1)  # the oldest is being overwritten
        turns = [(words[at + step % RING_STEPS * ROW_WORDS] // OPTIMIZERS_MAX, step) for step in steps]
        chosen, stride = [one for one in turns if one[0]], 1
        while len(fewer := [one for one in chosen if one[0] % (2 * stride) == 0]) >= 2:
            chosen, stride = fewer, 2 * stride
        return self._marks([step for _, step in chosen[-MARKS_MAX:]])

    def history(self) -> tuple[observations.CollectiveCounts, ...]:
        """Return the last steps at which a count grew by another number than at the same optimizer's step before, 64
        at most.

        With the first step that the ring still knows, and the last one.
        """
        last = self.read().step
        marks = self._marks(range(max(1, last - RING_STEPS + 2), last + 1))  # the oldest is being overwritten
        odd: set[observations.CollectiveCounts] = set()
        for number in {mark.optimizer for mark in marks}:
            own = [mark for mark in marks if mark.optimizer == number]
            grown = [
                [b - a for a, b in zip(one.counts, two.counts, strict=True)]
                for one, two in itertools.pairwise(own)
            ]
            odd.update(
                mark for mark, (a, b) in zip(own[2:], itertools.pairwise(grown), strict=True) if a != b
            )
        steps = [mark for mark in marks if mark in odd][-HISTORY_MARKS_MAX:]
        return tuple(dict.fromkeys((*marks[:1], *steps, *marks[-1:])))

    def step_ends(self, steps_max: int) -> tuple[StepEnd, ...]:
        """Return the last steps, oldest first."""
        last = self.read().step
        columns = [group.column for group in self.groups()]
        found = []
        for step in range(max(1, last - min(steps_max, RING_STEPS - 1) + 1), last + 1):
            (time_ns,) = struct.unpack_from("<Q", self._map, 8 * (RING_WORD + step % RING_STEPS))
            found.append(StepEnd(step, time_ns, _counts(self._row(step), columns) or None))
        return tuple(found)

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def _marks(self, steps: Iterable[int]) -> tuple[observations.CollectiveCounts, ...]:
        """Return the marks of those of the steps at which all of the present groups were counted."""
        columns = [group.column for group in self.groups()]
        if not columns:
            return ()
        rows = ((step, self._row(step)) for step in steps)
        return tuple(
            observations.CollectiveCounts(step, row[-1] % OPTIMIZERS_MAX, row[-1] // OPTIMIZERS_MAX, counts)
            for step, row in rows
            if row[-1] and (counts := _counts(row, columns)) is not None
        )

    def _row(self, step: int) -> tuple[int, ...]:
        return _ROW.unpack_from(self._map, 8 * (COUNTS_WORD + step % RING_STEPS * ROW_WORDS))

    def _times_ns(self, first: int, last: int) -> list[int]:
        """Return when each of these steps ended, 0 for one of an earlier counter; empty before the first step."""
        begin, end = first % RING_STEPS, last % RING_STEPS + 1
        spans = ((begin, end),) if begin < end else ((begin, RING_STEPS), (0, end))
        times_ns: list[int] = []
        for at, until in spans if last else ():
            times_ns += struct.unpack_from(f"<{until - at}Q", self._map, 8 * (RING_WORD + at))
        return times_ns


def _counts(row: tuple[int, ...], columns: list[int]) -> tuple[int, ...] | None:
    """Return a row's counts in these columns; None where one of them is not known."""
    counts = tuple(row[column] - 1 for column in columns)
    return None if -1 in counts else counts


def _read_groups(file: Path, generation: int) -> tuple[Group, ...] | None:
    """Return the groups of that generation; None when the file is of another, or not (yet) to be read."""
    try:
        data = codec.loads_plain(file.read_bytes())
        if data["generation"] != generation:
            return None
        return tuple(
            Group(str(one["name"]), str(one["label"]), tuple(map(int, one["ranks"])), int(one["column"]))
            for one in data["groups"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
