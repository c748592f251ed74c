"""Which copies are under way, of which checkpoint, and what has this turn brought so far? Bookkeeping, no decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.backends import Copy, Direction
from orchestrator.brain import events as e

News: TypeAlias = e.CheckpointComing | e.CheckpointFound | e.CheckpointSpoiled


@dataclass(frozen=True, slots=True)
class Turn:
    """What follows from one word: what the brain is to learn, which copies to begin and which to give up (by their
    keys), and lines for the supervisor's log."""

    news: tuple[News, ...]
    begin: tuple[Copy, ...]
    drop: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Travel:
    """A copy under way, for people; `done_bytes` is None while it is not known."""

    name: str
    node: str
    direction: Direction
    size_bytes: int
    done_bytes: int | None


@dataclass(frozen=True, slots=True)
class Trip:
    """A copy that was begun, and of what."""

    copy: Copy
    name: str
    size_bytes: int

    @property
    def is_send(self) -> bool:
        return self.copy.direction is Direction.SEND


class Trips:
    """The copies under way, and the turn that is being made."""

    def __init__(self) -> None:
        self._trips: dict[str, Trip] = {}
        self._news: list[News] = []
        self._begin: list[Copy] = []
        self._drop: list[str] = []
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Add a line for people."""
        self._notes.append(text)

    def tell(self, news: News) -> None:
        """Add what the brain is to learn."""
        self._news.append(news)

    def begin(self, copy: Copy, name: str, size_bytes: int) -> None:
        """Begin a copy of (a part of) the checkpoint `name`."""
        self.count(copy, name, size_bytes)
        self._begin.append(copy)

    def count(self, copy: Copy, name: str, size_bytes: int) -> None:
        """Enter a copy that somebody else begins."""
        self._trips[copy.key] = Trip(copy, name, size_bytes)

    def end(self, key: str) -> Trip | None:
        """Return the copy that ended; None when it was given up before."""
        return self._trips.pop(key, None)

    def drop_fetches(self, name: str) -> None:
        """Give up what is being fetched of a checkpoint."""
        self._drop_all([key for key, trip in self._trips.items() if trip.name == name and not trip.is_send])

    def drop_sends(self, node: str) -> tuple[str, ...]:
        """Give up what is being sent to a node; return the names of the checkpoints."""
        keys = [key for key, trip in self._trips.items() if trip.copy.node == node and trip.is_send]
        names = tuple(self._trips[key].name for key in keys)
        self._drop_all(keys)
        return names

    def is_sent(self, name: str) -> bool:
        """Tell whether a checkpoint is being sent to a host."""
        return any(trip.is_send and trip.name == name for trip in self._trips.values())

    def status(self, done_bytes: Mapping[str, int]) -> list[Travel]:
        """Return what travels; `done_bytes` by the copies' keys."""
        return [
            Travel(trip.name, trip.copy.node, trip.copy.direction, trip.size_bytes, done_bytes.get(key))
            for key, trip in self._trips.items()
        ]

    def turn(self) -> Turn:
        """Close the turn: return all that was added since the last one."""
        turn = Turn(tuple(self._news), tuple(self._begin), tuple(self._drop), tuple(self._notes))
        self._news, self._begin, self._drop, self._notes = [], [], [], []
        return turn

    def _drop_all(self, keys: list[str]) -> None:
        for key in keys:
            del self._trips[key]
        begun = [copy.key for copy in self._begin]
        self._drop += [key for key in keys if key not in begun]
        self._begin = [copy for copy in self._begin if copy.key not in keys]
