"""The virtual journal: lines of JSON through the real codec, and the facts that they fold to."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.brain.decisions import Decision
from orchestrator.brain.events import Event
from orchestrator.brain.facts import Facts, News
from orchestrator.brain.fold import fold
from orchestrator.wire import codec

from .ledger import Violation

_CLASSES = {**codec.by_kind(Event), **codec.by_kind(Decision)}


class Journal:
    """`sequences`: the last report of each agent process that is in the journal."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shadow = Facts()
        self.sequences: dict[str, int] = {}

    def write(self, news: News) -> None:
        line = codec.dumps_kind(news)
        self.lines.append(line)
        fold(self.shadow, codec.loads_kind(_CLASSES, line))

    def replay(self) -> Iterator[News]:
        for line in self.lines:
            yield codec.loads_kind(_CLASSES, line)

    def check(self, facts: Facts) -> None:
        """Raise when the journal does not fold to the facts that decisions are made on."""
        if facts != self.shadow:
            raise Violation(f"the journal folds to other facts:\n  journal {self.shadow}\n  brain   {facts}")
