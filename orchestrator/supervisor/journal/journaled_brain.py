"""The brain of a job and the journal that it is rebuilt from: learns, decides, and writes both down before anything is
done.

Rules: all that the brain learns is journaled, heartbeats coalesced. A reliable report that is on disk is known by its
number. What the journal comes to is written to the facts file from time to time, so that the next supervisor need not
read all of it. While the disk is full the brain goes on learning and decides nothing; decisions made just before are
carried out once they are on disk.
"""

from __future__ import annotations

import contextlib
import time

from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, News
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import iso
from orchestrator.supervisor.journal import facts_file
from orchestrator.supervisor.journal.journal_file import JobClock, Journal

FACTS_S = 10.0
"""How often the facts are written down."""

FACTS_SHARE_MAX = 0.01
"""The share of the time that writing the facts may take: the more there is to write, the less often."""

OWED_BYTES_MAX = 16 << 20
"""How much is learned while the disk is full; past it the supervisor waits for room."""


class JournaledBrain:
    """The brain of one job, as the journal has left it, and the journal."""

    def __init__(self, job: JobDir, machine: str) -> None:
        """Learn what the journal comes to. `machine` names this boot of this machine."""
        self._job = job
        self._record = facts_file.read(job)
        self._brain = Brain(self._record.facts, self._record.beaten_at)
        self._held: list[d.Decision] = []  # decided, and not on disk yet
        self._wake_s = 0.0
        self._full_since: float | None = None
        self._waited_s = 0.0
        self._clock = JobClock(machine, self._record.latest)
        self._journal = Journal(job.journal, machine, self._record.last_n)
        self._safe = dict(self._record.received)  # the last kept report of each agent process that is on disk
        self._facts_due_s = 0.0  # by the monotonic clock

    @property
    def facts(self) -> Facts:
        """All that is known."""
        return self._brain.facts

    @property
    def stopped(self) -> dict[str, int]:
        """The last attempt that each node has stopped."""
        return self._record.stopped

    @property
    def requeue(self) -> d.Requeue | None:
        """The requeue that was decided, if no allocation has begun since."""
        return self._record.requeue

    def now_s(self) -> float:
        """Return the job clock."""
        return self._clock.now_s()

    def learn(self, news: News) -> None:
        """Journal and learn. Heartbeats are learned at once and journaled coalesced, see `Brain.beats_before`."""
        if not isinstance(news, e.Heartbeat):
            self._write(news)
            return
        self._brain.learn(news)
        if self._record.is_first_step:
            for beat in self._brain.beats():
                self._record.learn(self._journal.write(beat))

    def learn_kept(self, news: list[e.Event], incarnation: str, seq: int) -> None:
        """Journal and learn the events of a reliable report of an agent process, with its number."""
        self._record.received[incarnation] = seq
        for event in news:
            self._write(event, incarnation, seq)

    def _write(self, news: News, incarnation: str = "", seq: int = 0) -> None:
        for beat in self._brain.beats_before(news):
            self._record.learn(self._journal.write(beat))
        self._record.learn(self._journal.write(news, incarnation, seq))

    def has(self, incarnation: str, seq: int) -> bool:
        """Tell whether a reliable report was learned before: it may come again after a broken connection."""
        return seq <= self._record.received.get(incarnation, 0)

    def acked(self, incarnation: str) -> int:
        """Return the number of the last reliable report of an agent process that is on disk."""
        return self._safe.get(incarnation, 0)

    def decide(self) -> tuple[list[d.Decision], float]:
        """Return the decisions to carry out, already durable, and the job clock (s) at which to call again.

        Returns no decisions while the disk is full; check `waited` before the first call after that.
        """
        if self.is_full:
            return [], self.now_s() + (0.0 if self.sync() else full_disk.RETRY_S)
        if not self._held:
            self._held, self._wake_s = self._brain.decide(self.now_s())
            for decision in self._held:
                self.learn(decision)
        if not self.sync():
            return [], self.now_s() + full_disk.RETRY_S
        decisions, self._held = self._held, []
        return decisions, self._wake_s

    @property
    def is_full(self) -> bool:
        """Tell whether something waits for room on the disk."""
        return self._journal.is_full

    def sync(self) -> bool:
        """Make all that was learned and decided durable; False while the disk is full."""
        is_done = self._journal.sync()
        while not is_done and self._journal.owed_bytes > OWED_BYTES_MAX:
            time.sleep(full_disk.RETRY_S)
            is_done = self._journal.sync()
        if is_done:
            self._safe = dict(self._record.received)
            if time.monotonic() >= self._facts_due_s:
                self._write_facts()
        self._note(is_done)
        return is_done

    def waited(self, worth_s: float) -> bool:
        """Tell, once, whether there is room again on a disk that was full for longer than `worth_s`."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s > worth_s

    def _note(self, has_room: bool) -> None:
        """Print when the disk becomes full, and when there is room again."""
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
        """Close the journal."""
        if self._journal.sync():
            self._write_facts()
        self._journal.close()

    def _write_facts(self) -> None:
        """Write the facts file: what the journal on disk comes to, and what heartbeats have reported since its last
        line."""
        began_s = time.monotonic()
        self._record.latest = self._clock.stamp()
        self._record.keep_up(self._record.facts.heard_at)
        with contextlib.suppress(OSError):  # the journal knows all that matters
            facts_file.write(self._job, self._record, self._journal.safe_bytes)
        ended_s = time.monotonic()
        self._facts_due_s = ended_s + max(FACTS_S, (ended_s - began_s) / FACTS_SHARE_MAX)
