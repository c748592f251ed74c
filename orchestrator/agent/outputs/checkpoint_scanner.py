"""Checkpoint scanner of an agent: finds complete checkpoints and reports their paths or their manifests.

Where the supervisor sees this disk, the path is enough (`CheckpointFound`). Where it does not, the checkpoint is
fetched: its files are reported with their sha256 (`ManifestReported`), and `reported_through_step` is the step up to
which everything has been reported. Of the agents that share a disk only one scans: the one that holds the lock
`checkpoints.lock`.
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
from orchestrator.agent.outputs.checkpoint_step import stated_step
from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch, FoundCheckpoint
from orchestrator.agent.outputs.manifest import GivenUp, Hasher
from orchestrator.agent.outputs.saved_outside import SavedOutside
from orchestrator.agent.rank.step_counter import MTIME_LAG_NS
from orchestrator.agent.start.processes import NodeRanks
from orchestrator.core import codec
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.durable import LINE_BYTES_MAX
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m

SCAN_S = 1.0
"""How often the folder is scanned."""

HASH_S_MAX = 600.0
"""How long the end of an attempt waits until all of its checkpoints are hashed."""

UNFINISHED_S_MAX = 60.0
"""An incomplete entry that has not changed for this time does not become a checkpoint: nothing waits for it."""

FETCH_SPARES = 2
"""How many checkpoints more than `checkpoint.keep` stay on their host: old ones may still be in transfer."""

MANIFEST_BYTES_MAX = LINE_BYTES_MAX // 2
"""Size limit of one manifest in a message, some 3,000 files: it comes back in `Prepare`."""

NOT_KNOWN = -1

LOCK_FILE = "checkpoints.lock"


class CheckpointScanner:
    """Scanner for the checkpoints of the attempt that runs here."""

    def __init__(
        self,
        config: m.AgentConfig,
        hasher: Hasher,
        report: Callable[[m.ReliableReport], None],
        note: Callable[[str], None],
    ) -> None:
        self._job = JobDir.at(config.root)
        self._keep = config.checkpoint_keep
        self._is_fetched = config.ships and not Path(config.checkpoint_glob).is_absolute()
        self._ships = config.ships
        self._may_scan = self._scans = config.finds_checkpoints or config.ships
        self._hasher = hasher
        self._report = report
        self._note = note
        self._folder, glob = self._job.checkpoint_place(config.checkpoint_glob)
        self._watch = CheckpointWatch(self._folder, glob, in_parts=self._is_fetched)
        self._outside = SavedOutside(self._job.code)
        self._lock_fd: int | None = None
        self._due_s = 0.0
        self._finish_by_s: float | None = None
        self._reading: deque[asyncio.Task[None]] = deque()
        # How many checkpoints are queued for hashing, and how many of those are done.
        self._queued = self._done = 0
        self._steps_before = NOT_KNOWN
        # (n, step): once n checkpoints are done, all up to `step` are reported.
        self._pending_steps: deque[tuple[int, int]] = deque()
        self.reported_through_step = NOT_KNOWN

    def report_torn(self) -> None:
        """Report the checkpoints that were cut off, since an earlier agent may have died before it reported them."""
        if self._scans and not self._ships:
            self._load_whole()
            for path in self._watch.torn():
                self._report(m.CheckpointInvalidated(0, str(path)))

    def begin(self, scans: bool = True) -> None:
        """Begin an attempt: the entries present now belong to earlier attempts. `scans`: whether this agent scans."""
        self._scans = self._may_scan and scans
        self._finish_by_s = None
        self._steps_before = self.reported_through_step = NOT_KNOWN
        self._pending_steps.clear()
        self._outside.begin(time.time_ns())
        if self._scans:
            self._watch.begin()

    def scan(self, ranks: NodeRanks, now_s: float) -> None:
        """Report the checkpoints that have become complete, every `SCAN_S`."""
        if now_s < self._due_s or not self._scans:
            return
        self._due_s = now_s + SCAN_S
        if self._is_scanner(ranks):
            checkpoints = self._watch.scan(ranks.all_stepped_ns(), time.time_ns())
            for checkpoint in checkpoints:
                self._report_found(ranks, checkpoint)
            if checkpoints:
                self._prune(ranks)
                self._save_whole()
            self._look_outside(ranks)
        elif self._ships:
            self._look_outside(ranks)
        if self._is_fetched:
            self._note_step(ranks)

    def _look_outside(self, ranks: NodeRanks, *, is_last: bool = False) -> None:
        """Report what was saved outside of `checkpoint.path`."""
        if not is_last and not self._outside.is_due(time.monotonic()):
            return
        saved = self._outside.walk(
            self._watch.listed(),
            lambda mtime_ns: _step_at(ranks, mtime_ns),
            time.monotonic,
            is_last=is_last,
        )
        for file, mtime_ns in saved:
            age_s = max(0.0, (time.time_ns() - mtime_ns) / 1e9)
            steps = _step_at(ranks, mtime_ns)
            self._report(m.SavedOutside(ranks.attempt, file, steps, age_s, self._ships))

    def finish(self, ranks: NodeRanks, now_s: float) -> bool:
        """Report what an attempt without processes has saved; return True when all of that is reported."""
        if self._finish_by_s is None:
            self._finish_by_s = now_s + HASH_S_MAX
            self._last_scan(ranks)
        if self._reading and now_s < self._finish_by_s:
            return False
        if self._reading:
            self._note(f"a checkpoint could not be read within {HASH_S_MAX:g} s: it does not count")
            self.give_up()
        self._release()
        self._finish_by_s = None
        # Of the next attempt, which this node may be ready for at once, nothing is told yet.
        self._pending_steps.clear()
        self.reported_through_step = NOT_KNOWN
        return True

    @property
    def is_finishing(self) -> bool:
        """Tell whether the attempt is over here except for checkpoints that are still being hashed."""
        return self._finish_by_s is not None

    def give_up(self) -> None:
        """Cancel all hashing."""
        for task in self._reading:
            task.cancel()

    def _last_scan(self, ranks: NodeRanks) -> None:
        if not self._scans:
            return
        is_scanner = self._is_scanner(ranks)
        if is_scanner or self._ships:
            self._look_outside(ranks, is_last=True)
        if not is_scanner:
            return
        checkpoints, spoiled = self._watch.last_scan(ranks.all_stepped_ns(), ranks.all_ended_well)
        if not self._is_fetched:
            for path in spoiled:
                self._report(m.CheckpointInvalidated(ranks.attempt, str(path)))
        for checkpoint in checkpoints:
            self._report_found(ranks, checkpoint)
        for checkpoint in self._watch.doubtful() if self._is_fetched else []:
            name = self._name(checkpoint.path)
            self._note(f"{name} is not known to be whole: its ranks ended")
            self._report(m.ManifestReported(ranks.attempt, name, _step_at(ranks, checkpoint.mtime_ns), ()))
        self._save_whole()

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def _report_found(self, ranks: NodeRanks, checkpoint: FoundCheckpoint) -> None:
        path, steps = checkpoint.path, _step_at(ranks, checkpoint.mtime_ns)
        if not self._is_fetched:
            self._report(m.CheckpointFound(ranks.attempt, str(path), steps, stated_step(path)))
            return
        shape = inspect_shape(path)
        if shape.mtime_ns != checkpoint.mtime_ns:
            return
        self._queued += 1
        task = asyncio.get_running_loop().create_task(self._read(ranks.attempt, path, shape, steps))
        self._reading.append(task)
        task.add_done_callback(self._was_read)

    async def _read(self, attempt: int, path: Path, shape: Shape, steps: int) -> None:
        try:
            manifest = await self._hasher.manifest(path, shape)
        except GivenUp:
            return
        if manifest is None:
            return  # it is being written again, and a later scan finds it
        report = m.ManifestReported(attempt, self._name(path), steps, manifest)
        if len(codec.dumps(report)) > MANIFEST_BYTES_MAX:
            reason = "too many to fetch: it is not a checkpoint to start from"
            self._note(f"{report.name} has {len(manifest)} files, {reason}")
            report = dataclasses.replace(report, manifest=())
        self._report(report)

    def _was_read(self, task: asyncio.Task[None]) -> None:
        self._reading.remove(task)
        self._done += 1
        self._advance()

    def _note_step(self, ranks: NodeRanks) -> None:
        """Note that every checkpoint complete at the previous scan is queued for hashing by now."""
        steps = [step for process in ranks.processes if (step := process.counter.read().step)]
        before, self._steps_before = self._steps_before, min(steps, default=NOT_KNOWN)
        if not self._is_unfinished():
            self._pending_steps.append((self._queued, before))
            self._advance()

    def _is_unfinished(self) -> bool:
        """Tell whether an entry is being written: a save in the background goes on while steps are made."""
        since_ns = time.time_ns() - int(UNFINISHED_S_MAX * 1e9)
        return any(
            self._watch.reported.get(path) != shape and shape.mtime_ns > since_ns and path.exists()
            for path, shape in self._watch.seen.items()
        )

    def _advance(self) -> None:
        while self._pending_steps and self._pending_steps[0][0] <= self._done:
            self.reported_through_step = max(self.reported_through_step, self._pending_steps.popleft()[1])

    def _prune(self, ranks: NodeRanks) -> None:
        if self._keep is None:
            return

        def has_step_between(before_ns: int, after_ns: int) -> bool:
            return not ranks.all_stepped_ns() or _step_at(ranks, before_ns) < _step_at(ranks, after_ns)

        keep = self._keep + (FETCH_SPARES if self._is_fetched else 0)
        for path in self._watch.prune(keep, has_step_between):
            self._note(f"deleted the old checkpoint {path}")
            if not self._is_fetched:
                self._report(m.CheckpointInvalidated(ranks.attempt, str(path)))

    def _save_whole(self) -> None:
        """Write down what is known to be whole, for the next agent that scans."""
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
                os.pwrite(self._lock_fd, json.dumps(self._watch.whole).encode(), 0)

    def _load_whole(self) -> None:
        """Read what the previous agent that scanned knew to be whole."""
        with contextlib.suppress(OSError, ValueError):
            raw = (self._job.root / LOCK_FILE).read_bytes()
            self._watch.whole = codec.loads(dict[str, tuple[int, int, int]], raw)

    def _is_scanner(self, ranks: NodeRanks) -> bool:
        """Tell whether this agent is the one that scans: it holds the lock, or gets it now.

        An absolute place may be shared by hosts that share nothing else: there, the host of rank 0 scans.
        """
        if self._ships and not self._is_fetched and all(process.rank for process in ranks.processes):
            return False
        if self._lock_fd is not None:
            return True
        try:
            fd = locks.open_file(self._job.root / LOCK_FILE)
        except OSError:
            return True  # a full disk: two reports of a checkpoint are better than none
        if not locks.take(fd, 0.0):
            os.close(fd)
            return False
        self._lock_fd = fd
        self._load_whole()
        return True

    def _release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _step_at(ranks: NodeRanks, mtime_ns: int) -> int:
    """Return how many steps were made when a file was written; a save right after a step counts to that step."""
    return ranks.step_at(mtime_ns + MTIME_LAG_NS)
