"""Which checkpoints does this node tell of? Looks for complete ones, and says where they are or what they consist of.

Where the supervisor sees this disk, a checkpoint's path is all it needs (`CheckpointFound`). Where it does not, the
checkpoint has to travel: then its pieces are named with their sha256 (`ManifestReported`), and `scanned` says up to which
step nothing more is to come. Of agents that share a disk only one looks: it holds the lock `checkpoints.lock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from orchestrator.agent.outputs.checkpoint_formats import Shape, inspect_shape
from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch, FoundCheckpoint
from orchestrator.agent.outputs.manifest import GivenUp, Hasher
from orchestrator.agent.rank.processes import NodeRanks
from orchestrator.agent.rank.step_counter import MTIME_LAG_NS
from orchestrator.core import codec
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.durable import LINE_BYTES_MAX
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m

SCAN_S = 1.0
"""How often checkpoints are looked for."""

HASH_S_MAX = 600.0
"""How long the end of an attempt waits until all of its checkpoints have been read."""

UNFINISHED_S_MAX = 60.0
"""An entry that has stood unchanged and incomplete for so long will not become a checkpoint: nothing waits for it."""

TRAVEL_SPARES = 2
"""How many checkpoints more than `checkpoint.keep` stay where they were saved: old ones may still be on their way."""

MANIFEST_BYTES_MAX = LINE_BYTES_MAX // 2
"""What the pieces of one checkpoint may take in a message, some 3,000 files: they come back in `Prepare`."""

NOT_KNOWN = -1

LOCK_FILE = "checkpoints.lock"


class CheckpointScanner:
    """The checkpoints of the attempt that runs here."""

    def __init__(
        self,
        config: m.AgentConfig,
        hasher: Hasher,
        report: Callable[[m.ReliableReport], None],
        note: Callable[[str], None],
    ) -> None:
        self._job = JobDir.at(config.root)
        self._keep = config.checkpoint_keep
        self._travels = config.ships and not Path(config.checkpoint_glob).is_absolute()
        self._everywhere = config.ships
        self._may_look = self._looks = config.finds_checkpoints or config.ships
        self._hasher = hasher
        self._report = report
        self._note = note
        self._watch = CheckpointWatch(self._job.checkpoints, config.checkpoint_glob, in_parts=self._travels)
        self._lock_fd: int | None = None
        self._due_s = 0.0
        self._finish_by_s: float | None = None
        self._reading: deque[asyncio.Task[None]] = deque()
        self._begun = self._done = 0  # how many checkpoints have been begun to be read, and are done with
        self._steps_before = NOT_KNOWN
        self._marks: deque[tuple[int, int]] = deque()
        self.scanned = NOT_KNOWN

    def tell_torn(self) -> None:
        """Say which checkpoints were cut off: an agent before this one may have died before it could."""
        if self._looks and not self._everywhere:
            self._recall()
            for path in self._watch.torn():
                self._report(m.CheckpointInvalidated(0, str(path)))

    def begin(self, looks: bool = True) -> None:
        """An attempt begins: what is there by now belongs to those before. `looks`: it is for this agent to look."""
        self._looks = self._may_look and looks
        self._finish_by_s = None
        self._steps_before = self.scanned = NOT_KNOWN
        self._marks.clear()
        if self._looks:
            self._watch.begin()

    def look(self, ranks: NodeRanks, now_s: float) -> None:
        """See what has become complete, from time to time."""
        if now_s < self._due_s or not self._looks:
            return
        self._due_s = now_s + SCAN_S
        if self._is_ours(ranks):
            found = self._watch.scan(ranks.all_stepped_ns(), time.time_ns())
            for one in found:
                self._found(ranks, one)
            if found:
                self._prune(ranks)
                self._note_whole()
        if self._travels:
            self._mark(ranks)

    def finish(self, ranks: NodeRanks, now_s: float) -> bool:
        """Nothing of the attempt is left: say what it leaves behind; True when all of that has been said."""
        if self._finish_by_s is None:
            self._finish_by_s = now_s + HASH_S_MAX
            self._last_look(ranks)
        if self._reading and now_s < self._finish_by_s:
            return False
        if self._reading:
            self._note(f"a checkpoint could not be read within {HASH_S_MAX:g} s: it does not count")
            self.give_up()
        self._release()
        self._finish_by_s = None
        return True

    @property
    def is_finishing(self) -> bool:
        """Tell whether the attempt is over here but for what is still being read."""
        return self._finish_by_s is not None

    def give_up(self) -> None:
        """Let go of what is being read."""
        for task in self._reading:
            task.cancel()

    def _last_look(self, ranks: NodeRanks) -> None:
        if not self._looks or not self._is_ours(ranks):
            return
        found, spoiled = self._watch.last_scan(ranks.all_stepped_ns(), ranks.all_ended_well)
        if not self._travels:
            for path in spoiled:
                self._report(m.CheckpointInvalidated(ranks.attempt, str(path)))
        for one in found:
            self._found(ranks, one)
        for one in self._watch.doubtful() if self._travels else []:
            name = self._name(one.path)
            self._note(f"{name} is not known to be whole: its ranks ended")
            self._report(m.ManifestReported(ranks.attempt, name, self._count(ranks, one), ()))
        self._note_whole()

    def _name(self, path: Path) -> str:
        return path.relative_to(self._job.checkpoints).as_posix()

    def _count(self, ranks: NodeRanks, one: FoundCheckpoint) -> int:
        return _step_at(ranks, one.mtime_ns)

    def _found(self, ranks: NodeRanks, one: FoundCheckpoint) -> None:
        count = self._count(ranks, one)
        if not self._travels:
            self._report(m.CheckpointFound(ranks.attempt, str(one.path), count))
            return
        shape = inspect_shape(one.path)
        if shape.mtime_ns != one.mtime_ns:
            return
        self._begun += 1
        task = asyncio.get_running_loop().create_task(self._read(ranks.attempt, one.path, shape, count))
        self._reading.append(task)
        task.add_done_callback(self._was_read)

    async def _read(self, attempt: int, path: Path, shape: Shape, count: int) -> None:
        try:
            pieces = await self._hasher.manifest(path, shape)
        except GivenUp:
            return
        if pieces is None:
            return  # it is being written again, and will be found again
        found = m.ManifestReported(attempt, self._name(path), count, pieces)
        if len(codec.dumps(found)) <= MANIFEST_BYTES_MAX:
            self._report(found)
        else:
            words = "too many to travel: it is not a checkpoint to start from"
            self._note(f"{found.name} has {len(pieces)} files, {words}")
            self._report(dataclasses.replace(found, manifest=()))

    def _was_read(self, task: asyncio.Task[None]) -> None:
        self._reading.remove(task)
        self._done += 1
        self._settle()

    def _mark(self, ranks: NodeRanks) -> None:
        """Note that what was complete at the look before has been begun to be read by now."""
        steps = [count for one in ranks.processes if (count := one.counter.read().step)]
        before, self._steps_before = self._steps_before, min(steps, default=NOT_KNOWN)
        if not self._is_unfinished():
            self._marks.append((self._begun, before))
            self._settle()

    def _is_unfinished(self) -> bool:
        """Tell whether something is being written: a save in the background goes on while steps are made."""
        since_ns = time.time_ns() - int(UNFINISHED_S_MAX * 1e9)
        return any(
            self._watch.reported.get(path) != shape and shape.mtime_ns > since_ns and path.exists()
            for path, shape in self._watch.seen.items()
        )

    def _settle(self) -> None:
        while self._marks and self._marks[0][0] <= self._done:
            self.scanned = max(self.scanned, self._marks.popleft()[1])

    def _prune(self, ranks: NodeRanks) -> None:
        if self._keep is None:
            return

        def has_step_between(before_ns: int, after_ns: int) -> bool:
            return not ranks.all_stepped_ns() or _step_at(ranks, before_ns) < _step_at(ranks, after_ns)

        keep = self._keep + (TRAVEL_SPARES if self._travels else 0)
        for path in self._watch.prune(keep, has_step_between):
            self._note(f"deleted the old checkpoint {path}")
            if not self._travels:
                self._report(m.CheckpointInvalidated(ranks.attempt, str(path)))

    def _note_whole(self) -> None:
        """Write down what is known to be whole, for the agent that looks next."""
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
                os.pwrite(self._lock_fd, json.dumps(self._watch.whole).encode(), 0)

    def _recall(self) -> None:
        """Take over what is known to be whole from the agent that looked before."""
        with contextlib.suppress(OSError, ValueError):
            known = codec.loads(dict[str, tuple[int, int, int]], (self._job.root / LOCK_FILE).read_bytes())
            self._watch.whole = known

    def _is_ours(self, ranks: NodeRanks) -> bool:
        """Tell whether this agent is the one that looks: it holds the lock, which it tries to get each time.

        An absolute place may be shared by hosts that share nothing else: there, the host of rank 0 looks.
        """
        if self._everywhere and not self._travels and all(one.rank for one in ranks.processes):
            return False
        if self._lock_fd is not None:
            return True
        try:
            fd = locks.open_file(self._job.root / LOCK_FILE)
        except OSError:
            return True  # a full disk: to tell of a checkpoint twice is better than not at all
        if not locks.take(fd, 0.0):
            os.close(fd)
            return False
        self._lock_fd = fd
        self._recall()
        return True

    def _release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _step_at(ranks: NodeRanks, mtime_ns: int) -> int:
    """Return how many steps had been made when a file was written; a save right after a step is counted to it."""
    return ranks.step_at(mtime_ns + MTIME_LAG_NS)
