"""Brain of a job with the journal that it is rebuilt from: events and decisions are journaled before any action.

Rules: all events are journaled, heartbeats coalesced. A reliable report that is on disk is identified by its number. The
record of the journal is saved in the facts file from time to time, so that the next supervisor need not read all of it.
While the disk is full, all calls wait.
"""

from __future__ import annotations

import contextlib
import time

from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, News
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.journal import facts_file
from orchestrator.journal.journal_file import JobClock, Journal

FACTS_S = 10.0
"""How often the facts are written down."""

FACTS_SHARE_MAX = 0.01
"""The share of the time that writing the facts may take: the more there is to write, the less often."""


class JournaledBrain:
    """Brain of one job, rebuilt from its journal, and the journal."""

    def __init__(self, job: JobDir, machine: str) -> None:
        """Learn what the journal comes to. `machine` names this boot of this machine."""
        self._job = job
        self._record = facts_file.read(job)
        self._brain = Brain(self._record.facts, self._record.heartbeat_at)
        self._clock = JobClock(machine, self._record.latest)
        self._journal = Journal(job.journal, machine, self._record.last_n)
        self._durable_seq = dict(self._record.last_report)  # the last kept report of each agent process that is on disk
        self._facts_due_s = 0.0  # by the monotonic clock

    @property
    def facts(self) -> Facts:
        """All that is known."""
        return self._brain.facts

    @property
    def requeue(self) -> d.Requeue | None:
        """The requeue that was decided, if no allocation has begun since."""
        return self._record.requeue

    def now_s(self) -> float:
        """Return the job clock."""
        return self._clock.now_s()

    def learn(self, news: News) -> None:
        """Journal and learn. Heartbeats are learned at once and journaled coalesced, see `Brain.heartbeats_before`."""
        if not e.is_heartbeat(news):
            self._write(news)
            return
        self._brain.learn(news)
        if self._record.is_first_step:
            for beat in self._brain.take_heartbeats():
                self._record.learn(self._journal.write(beat))

    def learn_reliable(self, news: list[e.Event], incarnation: str, seq: int) -> None:
        """Journal and learn the events of a reliable report of an agent process, with its number."""
        self._record.last_report[incarnation] = seq
        for event in news:
            self._write(event, incarnation, seq)

    def _write(self, news: News, incarnation: str = "", seq: int = 0) -> None:
        for beat in self._brain.heartbeats_before(news):
            self._record.learn(self._journal.write(beat))
        self._record.learn(self._journal.write(news, incarnation, seq))

    def has_report(self, incarnation: str, seq: int) -> bool:
        """Return whether a reliable report was learned before: it may come again after a broken connection."""
        return seq <= self._record.last_report.get(incarnation, 0)

    def acked_seq(self, incarnation: str) -> int:
        """Return the number of the last reliable report of an agent process that is on disk."""
        return self._durable_seq.get(incarnation, 0)

    def decide(self) -> tuple[list[d.Decision], float]:
        """Return the decisions to carry out, already durable, and the job clock (s) at which to call again."""
        decisions, wake_s = self._brain.decide(self.now_s())
        for decision in decisions:
            self.learn(decision)
        self.sync()
        return decisions, wake_s

    def sync(self) -> None:
        """Make all that was learned and decided durable."""
        self._journal.sync()
        self._durable_seq = dict(self._record.last_report)
        if time.monotonic() >= self._facts_due_s:
            self._write_facts()

    def close(self) -> None:
        """Close the journal."""
        self._journal.sync()
        self._write_facts()
        self._journal.close()

    def _write_facts(self) -> None:
        """Write the facts file: what the journal on disk comes to, and what heartbeats have reported since its last
        line."""
        began_s = time.monotonic()
        self._record.latest = self._clock.stamp()
        self._record.keep_up(self._record.facts.last_event_at)
        with contextlib.suppress(OSError):  # the journal knows all that matters
            facts_file.write(self._job, self._record, self._journal.safe_bytes)
        ended_s = time.monotonic()
        self._facts_due_s = ended_s + max(FACTS_S, (ended_s - began_s) / FACTS_SHARE_MAX)
