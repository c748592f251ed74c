"""Step counter of a rank: its steps with their times, its speed, and its collective counts at each step.

A step is one of the script's loop, in which several optimizers may step (`hook.steps.ScriptSteps`). The file has a row for
each step of any optimizer.

Read from the step file, in which the rank's hook counts. The agent makes the file (`create_step_file`) before the rank starts;
the hook writes it through a mapping, and `hook/layout.py` states its layout. Writer and reader share memory without a lock:
the time of a step and its counts are in the ring before the step is counted, so what is counted can be read.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import struct
import zlib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.ranks.hook.layout import (
    COUNTS_WORD,
    EXITING_PID_WORD,
    EXITING_WORD,
    FORMED_WORD,
    FRAMEWORKS,
    GROUPS_FILE,
    GROUPS_WORD,
    MAGIC_WORD,
    NO_GROUP_WORD,
    NO_STEP_WORD,
    NORMS_WORD,
    OPTIMIZER_COLUMN,
    OPTIMIZERS_MAX,
    PASSES_WORD,
    PID_WORD,
    RING_STEPS,
    RING_WORD,
    ROW_WORDS,
    SCRIPT_STEP_COLUMN,
    STEP_FILE,
    STEP_FILE_BYTES,
    STEP_FILE_MAGIC,
    STEP_FILE_VERSION,
    STEP_WORD,
    SUM_COLUMNS,
    SUMS_MADE_WORD,
    SUMS_MAX,
    SUMS_WORD,
    THREAD_WORD,
)
from orchestrator.core import codec, observations
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir, attempt_name
from orchestrator.core.status_types import ReportedNumber

RATE_STEPS_MAX = 32
RATE_WINDOW_NS = 10_000_000_000
MEDIAN_STEPS_MAX = 128
MEDIAN_STEPS_MIN = 3
PASSES_MIN = 16
"""Backward passes of a rank without steps count from here on: an optimizer may step only after some of them."""
USUAL_INTERVALS_MIN = 5
"""How many intervals without a checkpoint must be known to say how long one usually is."""

SHORT_SHARE = 0.25
"""Steps shorter than this part of the long ones belong to the same iteration of the training loop: where several
optimizers step one after the other, the median is that of the time between two iterations."""

COUNTS_MAX = 4
SUMS_REPORTED_MAX = 8
HISTORY_COUNTS_MAX = 64
_HEADER = struct.Struct("<8Q")
_RING = struct.Struct(f"<{RING_STEPS}Q")
_ROW = struct.Struct(f"<{ROW_WORDS}Q")


@dataclass(frozen=True, slots=True)
class LastStep:
    """The last step that a rank has finished; all 0 before the first step."""

    # Steps of that process: a script that restarts its trainer counts from 1 again.
    step: int
    # Wall clock of its node.
    time_ns: int
    # The process and the thread that made the step (the kernel's ids).
    pid: int
    tid: int = 0
    # Rows of the file: steps of all its optimizers together.
    rows: int = 0


NO_STEP = LastStep(step=0, time_ns=0, pid=0)


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One of torch's process groups: name and label (its purpose) as torch has them, global ranks, column."""

    name: str
    label: str
    ranks: tuple[int, ...]
    column: int

    @property
    def key(self) -> str:
        """Return the group's key: the same on all its ranks, and different from any other group's of the job."""
        return f"{zlib.crc32(f'{self.name} {self.ranks}'.encode()):08x}"


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a step of any optimizer (wall clock) and how many collectives each group had entered by then; None:
    not known."""

    step: int
    time_ns: int
    counts: tuple[int, ...] | None

    @property
    def total(self) -> int | None:
        """Return the sum of the counts."""
        return None if self.counts is None else sum(self.counts)


def create_step_file(path: Path) -> None:
    """Make an empty step file. Its blocks are written, not left as a hole: storing into a hole on a full disk kills."""
    path.write_bytes(bytes(STEP_FILE_BYTES))


def read_last_steps(job: JobDir, attempt: int) -> dict[int, int]:
    """Return how many steps each rank of an attempt had made, as their files still say."""
    steps_by_rank = {}
    for path in job.root.glob(f"nodes/*/{attempt_name(attempt)}/rank-*/{STEP_FILE}"):
        with contextlib.suppress(OSError, ValueError):
            counter = StepCounter(path)
            steps_by_rank[int(path.parent.name.removeprefix("rank-"))] = counter.read().step
            counter.close()
    return steps_by_rank


class StepCounter:
    """One rank's step file, mapped for reading. Raises OSError or ValueError when it is missing or too short."""

    def __init__(self, path: Path) -> None:
        self._groups_file = path.with_name(GROUPS_FILE)
        self._groups: tuple[ProcessGroup, ...] = ()
        self._generation = 0
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), STEP_FILE_BYTES, access=mmap.ACCESS_READ)
        self._words = memoryview(self._map).cast("Q")

    def read(self) -> LastStep:
        """Return the last step, `NO_STEP` before the first or in a file of another layout."""
        words = _HEADER.unpack_from(self._map)
        if words[0] != STEP_FILE_MAGIC | STEP_FILE_VERSION << 32 or words[STEP_WORD] == 0:
            return NO_STEP
        row = words[STEP_WORD]
        # From the ring, not from the header: the header's time may already be that of the next step.
        (time_ns,) = struct.unpack_from("<Q", self._map, 8 * (RING_WORD + row % RING_STEPS))
        return LastStep(self._script_step(row), time_ns, words[PID_WORD], words[THREAD_WORD], row)

    def framework_without_group(self) -> observations.Framework | None:
        """Return what is to form the rank's process group, where it trains and has formed none; None where it has, or
        that is not known."""
        number = self._words[NO_GROUP_WORD]
        return observations.Framework(FRAMEWORKS[number - 1]) if 0 < number <= len(FRAMEWORKS) else None

    def has_formed_group(self) -> bool:
        """Return whether the rank has formed torch's default process group."""
        return self._words[FORMED_WORD] == 1

    def made_no_step(self) -> bool:
        """Return whether the rank ends without a step though its script trains, and not with an update of its own."""
        return self._words[NO_STEP_WORD] == 1 and self.read() == NO_STEP and not self.backward_passes()[0]

    def exiting_pid(self) -> int | None:
        """Return the process that is exiting: it has nothing left to do but to end. None while the rank runs."""
        words = _HEADER.unpack_from(self._map)
        return words[EXITING_PID_WORD] if words[EXITING_WORD] else None

    def rate_per_s(self) -> float | None:
        """Return steps per second over the last 32 steps, and no more than the last 10 s; None before two steps."""
        last = self.read().rows
        times_ns = self._times_ns(max(1, last - RATE_STEPS_MAX), last)
        rate = None
        for back in range(1, len(times_ns)):
            before_ns = times_ns[-1 - back]
            elapsed_ns = times_ns[-1] - before_ns
            if before_ns == 0 or elapsed_ns <= 0:  # not this counter's step, or the clock was set back
                break
            if elapsed_ns > RATE_WINDOW_NS and rate is not None:
                break
            rate = (self._script_step(last) - self._script_step(last - back)) * 1e9 / elapsed_ns
        return rate

    def median_step_s(self) -> float | None:
        """Return the median time between the last 128 steps, without an iteration's short ones; None before 3."""
        return self._median_s(self.read().rows)

    def backward_passes(self) -> tuple[int, float | None]:
        """Return how many backward passes a rank without steps has begun, and their median time; 0 before `PASSES_MIN`."""
        count = 0 if self._words[MAGIC_WORD] else self._words[PASSES_WORD]
        return (count, self._median_s(count)) if count >= PASSES_MIN else (0, None)

    def _median_s(self, last: int) -> float | None:
        times_ns = [time_ns for time_ns in self._times_ns(max(1, last - MEDIAN_STEPS_MAX), last) if time_ns]
        durations_ns = sorted(b - a for a, b in itertools.pairwise(times_ns) if b > a)
        if len(durations_ns) < MEDIAN_STEPS_MIN:
            return None
        short_ns = SHORT_SHARE * durations_ns[len(durations_ns) * 9 // 10]
        long_ns = durations_ns[bisect.bisect_left(durations_ns, short_ns) :]
        return long_ns[len(long_ns) // 2] / 1e9

    def stall_s(self, step: int, write_steps: Set[int]) -> float | None:
        """Return for how much longer than usual the rank took from this step of the script to the next one; None where that
        cannot be told. `write_steps`: at which checkpoints were written, so that what follows them is not usual."""
        last = self.read().rows
        first = max(1, last - RING_STEPS + 2)  # the oldest is being overwritten
        begins_ns: dict[int, int] = {}
        for row, time_ns in enumerate(self._times_ns(first, last), first):
            begins_ns.setdefault(self._script_step(row), time_ns)
        if first > 1:
            del begins_ns[min(begins_ns)]  # of which earlier rows may be gone
        intervals_ns = {
            one: begins_ns[one + 1] - at_ns for one, at_ns in begins_ns.items() if 0 < at_ns < begins_ns.get(one + 1, 0)
        }
        usual_ns = sorted(length for one, length in intervals_ns.items() if one not in write_steps)
        if step not in intervals_ns or len(usual_ns) < USUAL_INTERVALS_MIN:
            return None
        return max(0, intervals_ns[step] - usual_ns[len(usual_ns) // 2]) / 1e9

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return the rank's groups that are counted; none while they change, or before the first step."""
        generation = _HEADER.unpack_from(self._map)[GROUPS_WORD]
        if generation != self._generation:
            groups = _read_groups(self._groups_file, generation)
            if groups is None:
                return ()
            self._groups, self._generation = groups, generation
        return self._groups

    def collective_counts(self, since: int, last: int) -> tuple[observations.CollectiveCounts, ...]:
        """Return the counts at up to 4 rows after `since` and up to `last`, chosen as all other ranks choose them.

        The optimizer steps are multiples of a power of two, the largest with two multiples in the range: ranks that are
        some steps apart, or send heartbeats at different moments, still choose steps in common.
        """
        since = since if since <= last else 0  # a trainer that was restarted
        words, at = self._words, COUNTS_WORD + OPTIMIZER_COLUMN
        steps = range(max(since, last - RING_STEPS + 1) + 1, last + 1)  # the oldest is being overwritten
        pairs = [(words[at + step % RING_STEPS * ROW_WORDS] // OPTIMIZERS_MAX, step) for step in steps]
        chosen = _in_common([pair for pair in pairs if pair[0]])
        return self._collective_counts([step for _, step in chosen[-COUNTS_MAX:]])

    def parameter_sums(self, since: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Return how many sums were made, and up to 8 of those after the first `since`, chosen as counts are: each the
        optimizer, its step, the script's step, the sum."""
        made = self._words[SUMS_MADE_WORD]
        oldest = max(since if since <= made else 0, made - SUMS_MAX // 2)  # older ones are being overwritten
        rows = (SUMS_WORD + number % SUMS_MAX * SUM_COLUMNS for number in range(oldest, made))
        pairs = _in_common([(self._words[row] // OPTIMIZERS_MAX, row) for row in rows])
        words = self._words
        return made, tuple(
            (words[row] % OPTIMIZERS_MAX, step, words[row + 1], words[row + 2])
            for step, row in pairs[-SUMS_REPORTED_MAX:]
        )

    def nonfinite_norms(self) -> tuple[int, tuple[tuple[int, ReportedNumber], ...]]:
        """Return how many norms of gradients in a row, up to the last, are not finite; and where there are some, step and norm
        of the first of them, and of the last finite one."""
        count, step, norm, finite_step, finite = struct.unpack_from("<2QdQd", self._map, 8 * NORMS_WORD)
        pairs = ((step, norm), (finite_step, finite)) if count else ()
        return count, tuple((at, ReportedNumber(one)) for at, one in pairs if at)

    def history(self) -> tuple[observations.CollectiveCounts, ...]:
        """Return the counts at the last steps, 64 at most, at which a count grew by a different number than at the
        same optimizer's previous step; in addition, the counts at the oldest step in the ring and at the last
        step."""
        last = self.read().rows
        first = max(1, last - RING_STEPS + 2)  # the oldest is being overwritten
        entries = self._collective_counts(range(first, last + 1))
        changes: set[observations.CollectiveCounts] = set()
        for number in {entry.optimizer for entry in entries}:
            own = [entry for entry in entries if entry.optimizer == number]
            grown = [
                [b - a for a, b in zip(before.counts, after.counts, strict=True)]
                for before, after in itertools.pairwise(own)
            ]
            changes.update(entry for entry, (a, b) in zip(own[2:], itertools.pairwise(grown), strict=True) if a != b)
        last_changes = [entry for entry in entries if entry in changes][-HISTORY_COUNTS_MAX:]
        return tuple(dict.fromkeys((*entries[:1], *last_changes, *entries[-1:])))

    def step_ends(self, steps_max: int) -> tuple[StepEnd, ...]:
        """Return the last steps of any optimizer, oldest first."""
        last = self.read().rows
        columns = [group.column for group in self.groups()]
        ends = []
        for step in range(max(1, last - min(steps_max, RING_STEPS - 1) + 1), last + 1):
            (time_ns,) = struct.unpack_from("<Q", self._map, 8 * (RING_WORD + step % RING_STEPS))
            ends.append(StepEnd(step, time_ns, _counts(self._row(step), columns) or None))
        return tuple(ends)

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._map.close()

    def _collective_counts(self, steps: Iterable[int]) -> tuple[observations.CollectiveCounts, ...]:
        columns = [group.column for group in self.groups()]
        if not columns:
            return ()
        rows = ((step, self._row(step)) for step in steps)
        return tuple(
            observations.CollectiveCounts(
                row[SCRIPT_STEP_COLUMN] or number, own % OPTIMIZERS_MAX, own // OPTIMIZERS_MAX, counts
            )
            for number, row in rows
            if (own := row[OPTIMIZER_COLUMN]) and (counts := _counts(row, columns)) is not None
        )

    def _script_step(self, row: int) -> int:
        return self._words[COUNTS_WORD + row % RING_STEPS * ROW_WORDS + SCRIPT_STEP_COLUMN] or row

    def _row(self, step: int) -> tuple[int, ...]:
        return _ROW.unpack_from(self._map, 8 * (COUNTS_WORD + step % RING_STEPS * ROW_WORDS))

    def _times_ns(self, first: int, last: int) -> list[int]:
        """Return when each of these steps ended, 0 for a step of an earlier process; empty before the first step."""
        begin, end = first % RING_STEPS, last % RING_STEPS + 1
        spans = ((begin, end),) if begin < end else ((begin, RING_STEPS), (0, end))
        times_ns: list[int] = []
        for at, until in spans if last else ():
            times_ns += struct.unpack_from(f"<{until - at}Q", self._map, 8 * (RING_WORD + at))
        return times_ns


def _in_common(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs whose first, a step, is a multiple of the largest power of two that has two multiples."""
    stride = 1
    while len(fewer := [pair for pair in pairs if pair[0] % (2 * stride) == 0]) >= 2 and stride < 1 << 40:
        pairs, stride = fewer, 2 * stride
    return pairs


def _counts(row: tuple[int, ...], columns: list[int]) -> tuple[int, ...] | None:
    """Return a row's counts in these columns; None where a count is not known."""
    counts = tuple(row[column] - 1 for column in columns)
    return None if -1 in counts else counts


def _read_groups(file: Path, generation: int) -> tuple[ProcessGroup, ...] | None:
    """Return the groups of that generation; None when the file is of another one, or cannot be read (yet)."""
    try:
        data = codec.loads_plain(ownership.read_regular(file))
        if data["generation"] != generation:
            return None
        return tuple(
            ProcessGroup(str(item["name"]), str(item["label"]), tuple(map(int, item["ranks"])), int(item["column"]))
            for item in data["groups"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
