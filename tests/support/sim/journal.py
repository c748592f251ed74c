"""The virtual journal: lines of JSON through the real codec, what they come to, and that written down now and then."""

from __future__ import annotations

import random
from collections.abc import Iterator

from orchestrator.brain.model.decisions import Decision
from orchestrator.brain.model.events import Event
from orchestrator.brain.model.facts import Facts, News
from orchestrator.core import codec
from orchestrator.journal import facts_file
from orchestrator.journal.job_record import Record
from orchestrator.journal.journal_file import JournalEntry

from .ledger import Violation

_CLASSES = {**codec.classes_by_kind(Event), **codec.classes_by_kind(Decision)}

KEPT_SHARE = 0.05
"""How often what the journal comes to is written down where it could be."""

LOST_SHARE = 0.2
"""How often that is not there when it is wanted."""


class Journal:
    """`sequences`: the last report of each agent process that is in the journal; `shadow`: what all lines come to."""

    def __init__(self, seed: int) -> None:
        self.lines: list[str] = []
        self.shadow = Record()
        self.sequences: dict[str, int] = {}
        self._chance = random.Random(seed ^ 0xFAC7)  # of its own, so that the nights stay what they are
        self._kept = ""

    def write(self, news: News) -> JournalEntry:
        line = codec.dumps_kind(news)
        self.lines.append(line)
        entry = self._entry(len(self.lines))
        self.shadow.learn(entry)
        return entry

    def keep(self, record: Record) -> None:
        """Write down what the journal comes to, by chance."""
        if self._chance.random() < KEPT_SHARE:
            record.keep_up(record.facts.last_event_at)
            self._kept = codec.dumps(record)

    def replay(self) -> Iterator[News]:
        """Yield all lines."""
        for n in range(len(self.lines)):
            yield self._entry(n + 1).news

    def revived(self) -> Record:
        """Return what the journal comes to, from the last writing on if there is one."""
        is_there = self._kept and self._chance.random() >= LOST_SHARE
        if not is_there:
            self._kept = ""  # for good: who goes on without it writes lines that do not fit it
        record = facts_file.unpack_record(self._kept) if is_there else Record()
        for n in range(record.last_n, len(self.lines)):
            record.learn(self._entry(n + 1))
        return record

    def _entry(self, n: int) -> JournalEntry:
        """Return the entry of the line of that number; the simulation has one machine."""
        news = codec.loads_kind(_CLASSES, self.lines[n - 1])
        return JournalEntry(n, news.at, news.at, "machine", "", 0, news)

    def check(self, facts: Facts) -> None:
        """Raise when the journal does not fold to the facts that decisions are made on."""
        shadow = self.shadow.facts
        if facts != shadow:
            raise Violation(f"the journal folds to other facts:\n  journal {shadow}\n  brain   {facts}")

    def check_record(self, record: Record) -> None:
        """Raise when what was written down, and what followed, come to something else than all lines."""
        self.check(record.facts)
        if record.attempts != self.shadow.attempts:
            raise Violation(f"other stories:\n  journal {self.shadow.attempts}\n  record  {record.attempts}")
