"""How do checkpoints come home from hosts that share no disk with it, and how do they get to where they are wanted?

A state machine: agents' words and ended copies in; news for the brain, copies to begin and to give up out (a `Turn`).
It knows neither threads nor ssh; what it does itself on the disk is quick (manifests, renames).

Rules
- A checkpoint is whole when each node of its attempt either has a part in it that has come, or is settled: has
  reported everything up to later steps than this one, or has stopped the attempt.
- Every `CheckpointComing` is followed by one end: `CheckpointFound`, or `CheckpointSpoiled` when it cannot come. What
  was at home under its name before stays until the new one is there and verified.
- A name that is written again is fetched again: the newest version follows the one on its way, which may yet arrive
  (where scripts replace files, an open one stays as it was), so that a slow line brings some versions, not none.
- Nothing is put into its place, or deleted, while it is being sent to a host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from orchestrator.backends import Copied, Copy, Direction
from orchestrator.brain import events as e
from orchestrator.shelf import Shelf, Way, files_of
from orchestrator.trips import Travel, Trips, Turn
from orchestrator.versions import Doubt, Part, Version, Words, following, taker
from orchestrator.wire import messages as m
from orchestrator.wire.paths import JobDir

COMING_MAX = 100
"""How many checkpoints may be on their way at once; more are written than the line can take, so the oldest is left."""

Deed: TypeAlias = Callable[[], object]


class Carry:
    """All checkpoints of one job that travel."""

    def __init__(
        self, job: JobDir, keep: int | None, resume_point: Callable[[], str], later: Callable[[Deed], object]
    ) -> None:
        """Take up what the manifests tell. `keep`: so many stay at home, and `resume_point()` in any case, the path
        of what the next attempt starts from. `later` does a deed that may take long (deleting) off the loop."""
        self._shelf = Shelf(job)
        self._keep = keep
        self._resume_point = resume_point
        self._later = later
        home, coming, dead = self._shelf.load()
        self._dead = {version.name: version for version in dead}  # given up before all had told their parts
        self._home = {version.name: version for version in home}
        self._coming = {way.version.name: way for way in coming}
        known = [*home, *dead, *(one for way in coming for one in (way.version, way.following) if one)]
        self._number = max((version.number for version in known), default=0)
        self._arrived: dict[int, tuple[str, ...]] = {}  # nodes whose part has come, by the version's number
        self._trips = Trips()
        self._sends = 0
        gaps = self._shelf.gaps()
        self._words = Words({}, {}, dict(gaps.lost), dict(gaps.silent), list(gaps.doubts))
        self._latest = 0  # attempt
        self._came = False  # in this turn a version came home

    # What happens

    def begin(self, at: float, coming: tuple[str, ...], stopped: Mapping[str, int]) -> Turn:
        """Go on where the supervisor before left off. `coming`: the paths that the brain still waits for; `stopped`:
        the last attempt that each node is known to have stopped."""
        self._words.note_stopped(stopped)
        for way in list(self._coming.values()):
            self._coming[way.version.name] = self._settled(way)
            for part in way.version.parts:
                self._fetch(way.version, part)
        for path in coming:
            name = self._shelf.name_of(path)
            home = self._home.get(name)
            if name in self._coming:
                continue
            if home is not None:
                self._trips.tell(e.CheckpointFound(at, home.node, home.attempt, path, home.count))
            else:
                self._trips.tell(e.CheckpointSpoiled(at, "", 0, path))
        return self._end(at)

    def found(self, at: float, node: str, root: str, report: m.PiecesFound, placed: tuple[str, ...]) -> Turn:
        """A host reports its part of a complete checkpoint; `placed` are the nodes of that attempt. What must be
        remembered is on disk when this returns, so that the report may be acknowledged."""
        if not report.pieces:
            self._words.note_doubt(Doubt(node, report.attempt, report.name))
            self._shelf.note_gaps(self._words.gaps)
            return self._give_up_all_unknown(at)
        flaw = self._shelf.flaw(report.name, report.pieces)
        if flaw:
            self._trips.note(f"{node} reports a checkpoint {report.name!r} that is not fetched: {flaw}")
            return self._end(at)
        self._latest = max(self._latest, report.attempt)
        part, name = Part(node, root, report.count, report.pieces), report.name
        if self._words.is_lost(node, report.attempt) and not part.is_all_of(name):
            self._trips.note(
                f"{node} tells of its part of checkpoint {name} after it was given up: not fetched"
            )
            return self._end(at)
        way, dead = self._coming.get(name), self._dead.get(name)
        before = (way.following or way.version) if way else self._home.get(name, dead)
        self._number += 1
        new = following(before, self._number, name, report.attempt, part)
        if not part.is_all_of(name):
            new = dataclasses.replace(new, placed=placed if node in placed else (*placed, node))
        self._sort_in(at, part, new)
        return self._end(at)

    def scanned(self, at: float, node: str, attempt: int, count: int) -> Turn:
        """A node has reported all that was complete when its ranks had made `count` steps."""
        self._latest = max(self._latest, attempt)
        if self._words.note_scanned(node, attempt, count):
            for way in list(self._coming.values()):
                self._coming[way.version.name] = self._settled(way)
                self._finish(at, way.version.name)
        return self._end(at)

    def stopped(self, at: float, node: str, attempt: int) -> Turn:
        """A node has stopped an attempt, and has reported all that this leaves behind."""
        self._words.note_stopped({node: attempt})
        for way in list(self._coming.values()):
            settled = self._settled(way)
            # A supervisor that is revived does not hear of it again.
            if settled == way or self._remember(at, settled):
                self._finish(at, way.version.name)
        return self._end(at)

    def lost(self, at: float, node: str, attempt: int | None = None) -> Turn:
        """A node's agent is no more, in this attempt (None: the latest that was heard of). What it has not reported
        never will be; what it has is still fetched, and nothing more is sent there. To be said before anything that
        another agent of the same node says."""
        self._words.note_lost(node, self._latest if attempt is None else attempt)
        return self._gone(at, node)

    def silent(self, at: float, node: str, attempt: int) -> Turn:
        """A node has not been heard of for too long: nobody waits for what it has not reported of this attempt."""
        self._words.silent[node] = attempt
        return self._gone(at, node)

    def back(self, node: str) -> None:
        """The agent of a node that had fallen silent is there again, and tells all that it had kept."""
        if self._words.silent.pop(node, None) is not None:
            self._shelf.note_gaps(self._words.gaps)

    def _gone(self, at: float, node: str) -> Turn:
        self._shelf.note_gaps(self._words.gaps)
        for name in self._trips.drop_sends(node):
            self._finish(at, name)
        return self._give_up_all_unknown(at)

    def tidy(self, at: float) -> Turn:
        """Time has passed: delete what `keep` does not keep."""
        return self._end(at)

    def copied(self, at: float, done: Copied) -> Turn:
        """A copy ended. One that was given up before changes nothing."""
        trip = self._trips.end(done.copy.key)
        way = self._coming.get(trip.name) if trip is not None else None
        if trip is None or way is None:
            return self._end(at)
        if not trip.is_send and done.error:
            self._give_up(at, way.version, done.error)
        elif not trip.is_send:
            self._arrive(way.version, trip.copy.node)
        self._finish(at, trip.name)  # also what waited for the end of its sending
        return self._end(at)

    # Sending

    def send(self, path: str, node: str, root: str) -> Copy:
        """Return the copy that brings a checkpoint from home to `resume_path` on a host; it counts as begun. Raises
        ClusterError when there is no such checkpoint."""
        files, top = files_of(Path(path)), self._shelf.top_of(path)
        names = tuple(str(file.relative_to(top)) for file, _ in files)
        self._sends += 1
        copy = Copy(f"send {self._sends} {node}", node, Direction.SEND, f"{root}/checkpoints", top, names)
        self._trips.count(copy, self._shelf.name_of(path), sum(size_bytes for _, size_bytes in files))
        return copy

    def resume_path(self, path: str, root: str) -> str:
        """Return where a checkpoint lies on a host that it was sent to."""
        return f"{root}/checkpoints/{self._shelf.name_of(path)}"

    def pieces(self, path: str) -> tuple[m.Piece, ...]:
        """Return the files of a checkpoint at home, as their names on a host are; one that did not come by this way
        is read whole: to be called off the loop. Raises ClusterError."""
        version = self._home.get(self._shelf.name_of(path))
        inside = version is not None and Path(path) == self._shelf.path(version.name)
        return self._shelf.pieces(path, version if inside else None)

    # Looking

    @property
    def coming(self) -> tuple[str, ...]:
        """The paths at home of what is on its way."""
        return tuple(str(self._shelf.path(name)) for name in self._coming)

    def status(self, done_bytes: Mapping[str, int]) -> list[Travel]:
        """Return what travels; `done_bytes` by the copies' keys, as the carrier tells."""
        return self._trips.status(done_bytes)

    # Versions

    def _sort_in(self, at: float, part: Part, new: Version) -> None:
        """Give a host's word to the version that it is of, or begin a version with it."""
        way, home, dead = self._known(new.name)
        version, after = (way.version, way.following) if way else (None, None)
        of = taker((version, after, dead, home), new)
        if of is None:
            self._begin_version(at, new)
        elif way is None or of is dead or of is home:
            self._sort_in_late(at, part, new, of is home)
        elif of is after:
            self._remember(at, Way(way.version, of.joined(part)))
        elif self._remember(at, Way(of.joined(part), after)):
            self._fetch(of.joined(part), part)
        way = self._coming.get(new.name)
        if way is not None and way.version.is_missed_by(new):
            self._give_up(at, way.version, f"{part.node} wrote its part again before it had told it")

    def _known(self, name: str) -> tuple[Way | None, Version | None, Version | None]:
        return self._coming.get(name), self._home.get(name), self._dead.get(name)

    def _begin_version(self, at: float, new: Version) -> None:
        """A host's word is of a version that nobody knew; what was taken for an earlier one's may be of it too."""
        name = new.name
        way, home, dead = self._known(name)
        newest = (way.following or way.version) if way else home
        if newest is not None and not newest.is_before(new):
            return
        whole = new.joined(*(part for one in (dead, newest) if one is not None for part in one.mistaken(new)))
        if way is None:
            if home is not None and home.mistaken(new):
                self._remove(at, home)
            self._expect(at, whole)
        elif self._remember(at, Way(way.version, whole)) and way.version.mistaken(new):
            self._give_up(at, way.version, f"{new.node} wrote its part again before it was whole")

    def _sort_in_late(self, at: float, part: Part, new: Version, is_home: bool) -> None:
        """A host's word is of a version that is dead, or that is at home and seemed to be whole: a write in the
        background may end long after the step that began it."""
        version = (self._home if is_home else self._dead)[new.name]
        if is_home:
            self._remove(at, version)
        if is_home and new.name not in self._coming:
            self._expect(at, dataclasses.replace(version.joined(part), number=new.number))
        else:
            self._bury(version.joined(part))

    def _bury(self, version: Version) -> None:
        """Keep in mind a version that was given up, for as long as parts of it may be heard of: they must not pass for
        another one's."""
        self._dead.pop(version.name, None)
        if not self._words.may_tell(version):
            self._shelf.forget_dead(version.name)
            return
        while len(self._dead) >= COMING_MAX:
            oldest = next(iter(self._dead))
            del self._dead[oldest]
            self._shelf.forget_dead(oldest)
        self._dead[version.name] = version
        with contextlib.suppress(OSError):  # it only outlives this process
            self._shelf.note_dead(version)

    def _expect(self, at: float, version: Version) -> None:
        """Begin to fetch a version, of a name of which nothing is on its way."""
        if len(self._coming) >= COMING_MAX:
            oldest = next(iter(self._coming.values())).version
            self._give_up(at, oldest, f"more than {COMING_MAX} checkpoints are on their way at once")
        path = str(self._shelf.path(version.name))
        self._trips.tell(e.CheckpointComing(at, version.node, version.attempt, path))
        way = self._settled(Way(version, None))
        if self._remember(at, way):
            for part in version.parts:
                self._fetch(version, part)
            self._give_up_unknown(at, way.version)
            self._finish(at, version.name)

    def _remember(self, at: float, way: Way) -> bool:
        """Write down what is on its way; when the disk refuses, it cannot come."""
        self._coming[way.version.name] = way
        try:
            self._shelf.note_coming(way)
        except OSError as err:
            self._coming[way.version.name] = Way(way.version, None)
            self._give_up(at, way.version, f"{err.filename}: {err.strerror} on this machine")
            return False
        return True

    def _settled(self, way: Way) -> Way:
        after = self._words.settle(way.following) if way.following else None
        return Way(self._words.settle(way.version), after)

    def _arrive(self, version: Version, node: str) -> None:
        self._arrived[version.number] = (*self._arrived.get(version.number, ()), node)

    def _fetch(self, version: Version, part: Part) -> None:
        pieces = version.taken_from(part.node)
        if not pieces:
            self._arrive(version, part.node)
            return
        names = tuple(piece.name for piece in pieces)
        key, stage = f"fetch {version.number} {part.node}", self._shelf.stage(version)
        copy = Copy(key, part.node, Direction.FETCH, f"{part.root}/checkpoints", stage, names, pieces)
        self._trips.begin(copy, version.name, sum(piece.size_bytes for piece in pieces))

    def _finish(self, at: float, name: str) -> None:
        """Put what is on its way in its place, if it is whole and nobody reads the one before."""
        way = self._coming.get(name)
        if way is None or self._trips.is_sent(name):
            return
        if not way.version.is_whole(self._arrived.get(way.version.number, ())):
            return
        version = way.version
        flaw = self._shelf.flaw(name, version.pieces)
        flaw = flaw or ("pieces that it names are on no host" if self._shelf.lacks_pieces(version) else "")
        try:
            if not flaw:
                self._shelf.install(version)
        except OSError as err:
            flaw = f"{err.filename}: {err.strerror} on this machine"
        if flaw:
            self._give_up(at, version, flaw)
            return
        self._home[name] = version
        path = str(self._shelf.path(name))
        self._trips.tell(e.CheckpointFound(at, version.node, version.attempt, path, version.count))
        self._came = True
        self._leave(at, way)

    def _give_up_all_unknown(self, at: float) -> Turn:
        for way in list(self._coming.values()):
            self._give_up_unknown(at, way.version)
        return self._end(at)

    def _give_up_unknown(self, at: float, version: Version) -> None:
        """Give up a version of which nobody will ever know whether it is whole."""
        why = self._words.why_never(version)
        if why:
            self._give_up(at, version, why)

    def _give_up(self, at: float, version: Version, why: str) -> None:
        """A version cannot come: what was at home before stays, and the brain need not wait."""
        self._trips.note(f"checkpoint {version.name} of attempt {version.attempt} does not come home: {why}")
        path = str(self._shelf.path(version.name))
        self._trips.tell(e.CheckpointSpoiled(at, version.node, version.attempt, path))
        self._bury(version)
        self._leave(at, self._coming[version.name])

    def _leave(self, at: float, way: Way) -> None:
        """Be done with a version that was on its way, and begin the one that follows."""
        name, number = way.version.name, way.version.number
        self._trips.drop_fetches(name)
        self._coming.pop(name)
        self._arrived.pop(number, None)
        self._delete(self._shelf.stage(way.version))
        if way.following is not None:
            self._expect(at, way.following)
        else:
            self._shelf.forget_coming(name)

    def _delete(self, path: Path) -> None:
        self._later(lambda: shutil.rmtree(path, ignore_errors=True))

    def _prune(self, at: float, keep: int) -> None:
        """Delete all but the newest at home that nobody needs."""
        newest = sorted(self._home.values(), key=lambda one: (one.attempt, one.count, one.number))
        needed = {self._shelf.name_of(self._resume_point()), *self._coming}
        for version in newest[: max(0, len(newest) - keep)]:
            if version.name not in needed and not self._trips.is_sent(version.name):
                self._remove(at, version)

    def _remove(self, at: float, version: Version) -> None:
        """Delete a version at home; the brain is not to start from it."""
        path = str(self._shelf.path(version.name))
        try:
            self._delete(self._shelf.take_away(version))
        except OSError as err:
            self._trips.note(f"the checkpoint {path} cannot be deleted: {err.strerror}")
        del self._home[version.name]
        spoiled = e.CheckpointSpoiled(at, version.node, version.attempt, path)
        way = self._coming.get(version.name)
        if way is not None:  # the first word would be taken for the end of what is coming
            self._trips.tell(spoiled)
        self._trips.tell(spoiled)
        if way is not None:
            self._trips.tell(e.CheckpointComing(at, way.version.node, way.version.attempt, path))

    def _end(self, at: float) -> Turn:
        """Close the turn. Old ones go one turn after a new one came: by then the brain may have adopted that."""
        if self._keep is not None and len(self._home) > self._keep and not self._came:
            self._prune(at, self._keep)
        self._came = False
        return self._trips.turn()
