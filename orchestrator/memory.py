"""What does a supervisor know, and what of it is on disk? The brain, and the journal that it can be rebuilt from.

Rules: whatever the brain learns is journaled, beats in a fold; a kept report that is on disk is known by its number.
While the disk is full the brain goes on learning and decides nothing; what it had decided when that began is done when
it is on disk.
"""

from __future__ import annotations

import time

from orchestrator.brain import decisions as d
from orchestrator.brain import events as e
from orchestrator.brain.brain import Brain
from orchestrator.brain.facts import Facts, News
from orchestrator.journal import Entry, JobClock, Journal, read
from orchestrator.statefile import iso
from orchestrator.wire import room
from orchestrator.wire.paths import JobDir

BEATS_S = 60.0
"""How often heartbeats are journaled when nothing else is."""

OWED_BYTES_MAX = 16 << 20
"""How much is learned while the disk is full; past it nobody is listened to until there is room."""


class Memory:
    """The brain of one job, as the journal has left it, and the journal."""

    def __init__(self, job: JobDir, machine: str) -> None:
        """Learn the journal anew. `machine` names this boot of this machine."""
        self._brain = Brain()
        self.stopped: dict[str, int] = {}  # the last attempt that each node said to be over
        self.requeue: d.Requeue | None = None  # decided, and no allocation has begun since
        self._acked: dict[str, tuple[str, int]] = {}  # the last kept report of each node
        self._held: list[d.Decision] = []  # decided, and not on disk yet
        self._wake_s = 0.0
        self._full_since: float | None = None
        self._waited_s = 0.0
        self._beats_due_s = 0.0
        self._stepped = 0  # the latest attempt whose first step is written down
        last_n, latest = self._replay(job)
        self._clock = JobClock(machine, latest)
        self._journal = Journal(job.journal, machine, last_n)
        self._safe = dict(self._acked)  # the last kept report of each node that is on disk

    def _replay(self, job: JobDir) -> tuple[int, Entry | None]:
        """Return the journal's last number and its latest entry."""
        last_n, latest = 0, None
        for entry in read(job.journal):
            self._brain.learn(entry.news)
            last_n = entry.n
            if latest is None or entry.news.at >= latest.news.at:
                latest = entry
            match entry.news:
                case e.Stopped(node=node, attempt=attempt):
                    self.stopped[node] = attempt
                case d.Requeue() as requeue:
                    self.requeue = requeue
                case e.AllocationBegan():
                    self.requeue = None
                case _:
                    pass
            if entry.seq:
                self._acked[getattr(entry.news, "node", "")] = (entry.boot, entry.seq)
        self._brain.beats()  # those of the journal are in it already
        return last_n, latest

    @property
    def facts(self) -> Facts:
        """All that is known."""
        return self._brain.facts

    def now_s(self) -> float:
        """Return the job clock."""
        return self._clock.now_s()

    def learn(self, news: News) -> None:
        """Journal and learn. Beats are learned at once and journaled in a fold, before any other news."""
        if isinstance(news, e.Beat):
            self._brain.learn(news)
            is_due = self.now_s() >= self._beats_due_s and not self._journal.is_full
            if is_due or self._is_first_step(news):
                self._write_beats()
            return
        self._write_beats()
        self._journal.write(news)
        self._brain.learn(news)

    def learn_kept(self, news: list[e.Event], node: str, boot: str, seq: int) -> None:
        """Journal and learn what a kept report of a node says, with its number."""
        self._acked[node] = (boot, seq)
        for one in news:
            self._write_beats()
            self._journal.write(one, boot, seq)
            self._brain.learn(one)

    def has(self, node: str, boot: str, seq: int) -> bool:
        """Tell whether a kept report was learned before: it may be said again after a broken line."""
        known_boot, known_seq = self._acked.get(node, ("", 0))
        return boot == known_boot and seq <= known_seq

    def acked(self, node: str, boot: str) -> int:
        """Return the number of the last kept report of an agent that is on disk."""
        known_boot, seq = self._safe.get(node, ("", 0))
        return seq if boot == known_boot else 0

    def decide(self) -> tuple[list[d.Decision], float]:
        """Return what is to be done, journaled and on disk; and the job clock at which to ask again.

        While the disk is full that is nothing; nor is it when there is room again, see `waited`.
        """
        if self.is_full:
            return [], self.now_s() + (0.0 if self.sync() else room.RETRY_S)
        if not self._held:
            self._held, self._wake_s = self._brain.decide(self.now_s())
            for decision in self._held:
                self.learn(decision)
        if not self.sync():
            return [], self.now_s() + room.RETRY_S
        decisions, self._held = self._held, []
        return decisions, self._wake_s

    @property
    def is_full(self) -> bool:
        """Tell whether something waits for room on the disk."""
        return self._journal.is_full

    def sync(self) -> bool:
        """Make all that is known durable; False while the disk is full."""
        is_done = self._journal.sync()
        while not is_done and self._journal.owed_bytes > OWED_BYTES_MAX:
            time.sleep(room.RETRY_S)
            is_done = self._journal.sync()
        if is_done:
            self._safe = dict(self._acked)
        self._note(is_done)
        return is_done

    def waited(self, worth_s: float) -> bool:
        """Tell once that there is room again on a disk that was full for longer than that."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s > worth_s

    def _note(self, has_room: bool) -> None:
        """Print when the disk is full, and when it is not any more."""
        began_s = self._full_since
        if not has_room and began_s is None:
            self._full_since = time.monotonic()
            print(
                f"{iso(time.time())} the disk is full: the journal waits, and so do all decisions", flush=True
            )
        elif has_room and began_s is not None:
            self._full_since, self._waited_s = None, time.monotonic() - began_s
            print(
                f"{iso(time.time())} there is room on the disk again after {self._waited_s:.0f} s", flush=True
            )

    def close(self) -> None:
        """Give the journal back."""
        self._journal.close()

    def _write_beats(self) -> None:
        self._beats_due_s = self.now_s() + BEATS_S
        for beat in self._brain.beats():
            self._journal.write(beat)

    def _is_first_step(self, beat: e.Beat) -> bool:
        """Tell whether this is the first step of its attempt, whose moment the post-mortem tells."""
        if beat.attempt <= self._stepped or not any(rank.count for rank in beat.ranks):
            return False
        self._stepped = beat.attempt
        return True
