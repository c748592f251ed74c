"""Checkpoints on their way home from hosts that share no disk with it, and out again to where they are wanted.

A state machine: agents' words and ended copies in; out come `news` for the brain, `notes` for the log, and copies that the
carrier begins and gives up. It knows neither threads nor ssh; what it does itself on the disk is quick.

Rules
- A version is an attempt, a name and its steps. It is fetched when every host that may have a part in it has told of all
  that was complete at later steps than these, or has stopped the attempt; at once, if only one host can have a part.
- What a host says of a name while a version of it is on its way waits until that has ended. What was written again before
  it was copied is not what its host has said, by its sha256: it is dropped, and the next version counts.
- What may be mixed, or lacks a piece, is dropped. What a node will never tell, since it was lost or its ranks ended
  before its part was known to be whole, is not waited for: that version is dropped.
- Every `CheckpointFetchStarted` is followed by one end: `CheckpointFound`, or `CheckpointInvalidated` when it cannot come. What
  was at home under its name before stays until the new one is there and verified.
- Nothing is put into its place, or deleted, while it is being sent to a host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from orchestrator.agent.outputs import checkpoint_series
from orchestrator.backends.api import BulkCopier, Copied, Copy, Direction
from orchestrator.brain.model import events as e
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m
from orchestrator.supervisor.transfers.checkpoint_store import CheckpointStore, files_of
from orchestrator.supervisor.transfers.checkpoint_versions import Part, Version, VersionState

COMING_MAX = 100
"""How many checkpoints may be on their way at once; more are written than the line can take, so the oldest is left."""

Deed: TypeAlias = Callable[[], object]
News: TypeAlias = e.CheckpointFetchStarted | e.CheckpointFound | e.CheckpointInvalidated


@dataclass(frozen=True, slots=True)
class CopyInFlight:
    """A copy that was begun, and of what."""

    copy: Copy
    name: str
    size_bytes: int
    is_send: bool = False


class CheckpointFetch:
    """All checkpoints of one job that travel."""

    def __init__(
        self,
        job: JobDir,
        carrier: BulkCopier,
        keep: int | None,
        resume_point: Callable[[], str],
        later: Callable[[Deed], object],
    ) -> None:
        """Take up what the manifests tell. `keep`: so many of each series stay at home, and `resume_point()` in any
        case, the path of what the next attempt starts from. `later` does a deed that may take long (deleting) off the
        loop."""
        self._shelf = CheckpointStore(job)
        self.carrier = carrier
        self._keep = keep
        self._resume_point = resume_point
        self._later = later
        self._latest = {version.name: version for version in self._shelf.load()}
        self._home = {
            name: version
            for name, version in self._latest.items()
            if version.state is VersionState.HOME and self._shelf.path(name).exists()
        }
        self._fetched: dict[str, Version] = {}  # what is being copied
        self._promised: set[str] = set()  # names of which the brain waits for an end
        self._trips: dict[str, CopyInFlight] = {}
        self._sends = 0
        self._scanned: dict[
            str, tuple[int, int]
        ] = {}  # by node: the last attempt and steps of which it told all
        self._stopped: dict[str, int] = {}
        self._lost = self._shelf.lost()  # the last attempt of which a node that is no more had not told all
        self.news: list[News] = []
        self.notes: list[str] = []

    # What happens

    def begin(self, at: float, coming: tuple[str, ...], stopped: Mapping[str, int]) -> None:
        """Go on where the supervisor before left off. `coming`: the paths that the brain still waits for; `stopped`:
        the last attempt that each node is known to have stopped."""
        self._stopped.update(stopped)
        for path in coming:
            name = self._shelf.name_of(path)
            version = self._latest.get(name)
            if version is not None and version.state in (VersionState.OPEN, VersionState.TOLD):
                self._promised.add(name)
            elif version is not None and name in self._home:
                self._tell(_found(at, version, path))
            else:
                self._tell(e.CheckpointInvalidated(at, "", 0, path))
        for version in self._open():
            self._promise(at, version)
            self._try(at, version.name)

    def found(
        self, at: float, node: str, root: str, report: m.ManifestReported, placed: tuple[str, ...]
    ) -> None:
        """A host reports its part of a complete checkpoint; `placed` are the nodes of that attempt. What must be
        remembered is on disk when this returns, so that the report may be acknowledged."""
        name, part = report.name, Part(node, root, report.steps, report.manifest)
        is_file = part.is_all_of(name)
        flaw = self._shelf.flaw(name, report.manifest) if report.manifest else ""
        if self._lost.get(node, 0) >= report.attempt and not is_file:
            flaw = flaw or "what it had not told before it was lost is given up"
        if flaw:
            self._note(f"{node} reports a checkpoint {name!r} that is not fetched: {flaw}")
            return
        before = self._latest.get(name)
        if before is None or before.attempt < report.attempt:
            nodes = (node,) if is_file else tuple(dict.fromkeys((*placed, node)))
            is_slot = not checkpoint_series.member(Path(name), 0, is_folder=not is_file).order
            self._enter(at, Version(report.attempt, name, nodes, (part,), is_slot))
        elif before.attempt == report.attempt and before.may_take(part):
            if before.seems_whole_without(part) and not self._is_copied(name):
                self._remove(at, before)
            self._enter(at, before.with_part(part))

    def scanned(self, at: float, node: str, attempt: int, count: int) -> None:
        """A node has reported all that was complete when its ranks had made `count` steps."""
        if self._lost.get(node, 0) < attempt and (attempt, count) > self._scanned.get(node, (0, -1)):
            self._scanned[node] = (attempt, count)
            self._try_all(at)

    def stopped(self, at: float, node: str, attempt: int) -> None:
        """A node has stopped an attempt, and has reported all that this leaves behind."""
        self._stopped[node] = max(attempt, self._stopped.get(node, 0))
        self._try_all(at)

    def lost(self, at: float, node: str, attempt: int) -> None:
        """A node's agent is no more, or was given up for its silence, in this attempt. What it has not reported is not
        waited for; what it has is still fetched, and nothing more is sent there. To be said before anything that
        another agent of the node says."""
        if self._stopped.get(node, 0) < attempt:
            self._lost[node] = max(attempt, self._lost.get(node, 0))
            self._shelf.note_lost(self._lost)
        sends = [trip for trip in self._trips.values() if trip.copy.node == node and trip.is_send]
        self._drop(sends)
        for trip in sends:
            self._finish(at, trip.name)
        self._try_all(at)

    def tidy(self, at: float) -> None:
        """Time has passed: delete what `keep` does not keep, once the brain has been told of all that came."""
        if self._keep is not None and not self.news:
            self._prune(at, self._keep)

    def copied(self, at: float, done: Copied) -> None:
        """A copy ended. One that was given up before changes nothing."""
        trip = self._trips.pop(done.copy.key, None)
        if trip is None:
            return
        if not trip.is_send and done.error:
            self._give_up(at, trip.name, done.error)
        self._finish(at, trip.name)  # also what waited for the end of its sending

    # Sending

    def send(self, path: str, node: str, root: str) -> Copy:
        """Begin to bring a checkpoint from home to `resume_path` on a host, and return the copy. Raises ClusterError
        when there is no such checkpoint."""
        files, top = files_of(Path(path)), self._shelf.top_of(path)
        names = tuple(str(file.relative_to(top)) for file, _ in files)
        self._sends += 1
        copy = Copy(f"send {self._sends} {node}", node, Direction.SEND, f"{root}/checkpoints", top, names)
        size_bytes = sum(size_bytes for _, size_bytes in files)
        self._trips[copy.key] = CopyInFlight(copy, self._shelf.name_of(path), size_bytes, is_send=True)
        self.carrier.copy(copy)
        return copy

    def resume_path(self, path: str, root: str) -> str:
        """Return where a checkpoint lies on a host that it was sent to."""
        return f"{root}/checkpoints/{self._shelf.name_of(path)}"

    def pieces(self, path: str) -> tuple[m.ManifestEntry, ...]:
        """Return the files of a checkpoint at home, as their names on a host are; one that did not come by this way
        is read whole: to be called off the loop. Raises ClusterError."""
        return self._shelf.pieces(path)

    # Looking

    @property
    def trips(self) -> tuple[CopyInFlight, ...]:
        """The copies under way."""
        return tuple(self._trips.values())

    # Versions

    def _open(self) -> list[Version]:
        return [
            version
            for version in self._latest.values()
            if version.state in (VersionState.OPEN, VersionState.TOLD)
        ]

    def _enter(self, at: float, new: Version) -> None:
        """Take what a host has said of a name."""
        self._latest[new.name] = new
        try:
            self._shelf.note(new)
        except OSError as err:
            self._give_up(at, new.name, f"{err.filename}: {err.strerror} on this machine")
            return
        self._promise(at, new)
        waiting = self._open()
        if len(waiting) > COMING_MAX:
            self._give_up(at, waiting[0].name, f"more than {COMING_MAX} checkpoints are on their way at once")
        self._try(at, new.name)

    def _promise(self, at: float, version: Version) -> None:
        """Tell the brain that a checkpoint is on its way, unless it waits for it already."""
        if version.name not in self._promised and any(part.pieces for part in version.parts):
            self._promised.add(version.name)
            path = str(self._shelf.path(version.name))
            self._tell(e.CheckpointFetchStarted(at, version.node, version.attempt, path))

    def _try_all(self, at: float) -> None:
        for version in self._open():
            self._try(at, version.name)

    def _try(self, at: float, name: str) -> None:
        """Begin to fetch a version if all hosts have told of it, give it up if they never will."""
        version = self._latest[name]
        if name in self._fetched or version not in self._open():
            return
        if version.state is VersionState.OPEN:
            alone = version.placed == (version.node,)
            waits = [] if alone else [node for node in version.placed if not self._is_past(node, version)]
            why = self._why_never(version, waits)
            if why:
                self._give_up(at, name, why)
            if why or waits or version.lacks_metadata:
                return
            version = self._become(version, VersionState.TOLD)
        self._fetched[name] = version
        for part in version.parts:
            self._fetch(version, part)
        self._finish(at, name)

    def _become(self, version: Version, state: VersionState) -> Version:
        """Write down what came of a version; if the disk refuses, that is forgotten with this process."""
        self._latest[version.name] = version = dataclasses.replace(version, state=state)
        with contextlib.suppress(OSError):
            self._shelf.note(version)
        return version

    def _is_past(self, node: str, version: Version) -> bool:
        """Tell whether the node has told of whatever part it has in a version."""
        attempt, count = self._scanned.get(node, (0, -1))
        if attempt == version.attempt and count > version.steps:
            return True
        return self._has_stopped(node, version) and self._lost.get(node, 0) < version.attempt

    def _has_stopped(self, node: str, version: Version) -> bool:
        return self._stopped.get(node, 0) >= version.attempt

    def _why_never(self, version: Version, waits: list[str]) -> str:
        """Say why it will never be known that a version is whole; empty while that is not so."""
        for part in version.parts:
            if not part.pieces:
                return f"the ranks on {part.node} ended before their part in it was known to be whole"
        for node in waits:
            if self._lost.get(node, 0) >= version.attempt:
                return f"{node} was lost before it had told whether it has a part in it"
        if not waits and version.may_be_mixed:
            return "its parts were written at different steps"
        if all(self._has_stopped(node, version) for node in version.placed) and version.lacks_metadata:
            return "it was cut off before its .metadata was written"
        return ""

    def _fetch(self, version: Version, part: Part) -> None:
        pieces = version.taken_from(part.node)
        if pieces:
            names = tuple(piece.name for piece in pieces)
            stage, key = self._shelf.stage(version), f"fetch {version.key} {part.node}"
            there = f"{part.root}/checkpoints"
            copy = Copy(key, part.node, Direction.FETCH, there, stage, names, pieces)
            size_bytes = sum(piece.size_bytes for piece in pieces)
            self._trips[key] = CopyInFlight(copy, version.name, size_bytes)
            self.carrier.copy(copy)

    def _finish(self, at: float, name: str) -> None:
        """Put what has come in its place, if it is whole and the one before is not being read."""
        version = self._fetched.get(name)
        if version is None or self._is_copied(name):
            return
        flaw = self._shelf.flaw(name, version.pieces)
        flaw = flaw or ("pieces that it names are on no host" if self._shelf.lacks_pieces(version) else "")
        try:
            if not flaw:
                self._shelf.install(version)
        except OSError as err:
            flaw = f"{err.filename}: {err.strerror} on this machine"
        if flaw:
            self._give_up(at, name, flaw)
            return
        self._home[name] = version
        self._end(at, version, VersionState.HOME, _found(at, version, str(self._shelf.path(name))))

    def _give_up(self, at: float, name: str, why: str) -> None:
        """A version cannot come: what was at home before stays, and the brain need not wait."""
        version = self._fetched.get(name, self._latest[name])
        self._note(f"checkpoint {name} of attempt {version.attempt} does not come home: {why}")
        self._drop([trip for trip in self._trips.values() if trip.name == name and not trip.is_send])
        path = str(self._shelf.path(name))
        self._end(
            at, version, VersionState.GONE, e.CheckpointInvalidated(at, version.node, version.attempt, path)
        )

    def _end(self, at: float, version: Version, state: VersionState, news: News) -> None:
        """Be done with a version, and go on with what was said of its name meanwhile."""
        name, latest = version.name, self._latest[version.name]
        if self._fetched.pop(name, None) is not None:
            self._delete(self._shelf.stage(version))
        if name in self._promised:
            self._promised.remove(name)
            self._tell(news)
        if latest.parts == version.parts:
            self._become(version, state)
        else:
            self._promise(at, latest)
            self._try(at, name)

    def _is_copied(self, name: str) -> bool:
        """Tell whether something of a checkpoint is being fetched, or sent to a host."""
        return any(trip.name == name for trip in self._trips.values())

    # At home

    def _prune(self, at: float, keep: int) -> None:
        """Delete what is old at home and not needed; time is told by attempts and steps, not by hosts' clocks."""
        times = sorted({(one.attempt, one.count) for one in self._home.values()})
        members = [
            checkpoint_series.member(
                self._shelf.path(name), times.index((one.attempt, one.count)), one.pieces[0].name != name
            )
            for name, one in self._home.items()
        ]
        needed = {self._shelf.name_of(self._resume_point()), *(one.name for one in self._open())}
        for member in checkpoint_series.old(members, keep, lambda before, after: before < after):
            name = self._shelf.name_of(str(member.path))
            if name not in needed and not self._is_copied(name):
                self._remove(at, self._home[name])

    def _remove(self, at: float, version: Version) -> None:
        """Delete a version at home; the brain is not to start from it."""
        path = str(self._shelf.path(version.name))
        try:
            self._delete(self._shelf.take_away(version))
        except OSError as err:
            self._note(f"the checkpoint {path} cannot be deleted: {err.strerror}")
        del self._home[version.name]
        self._latest.pop(version.name, None)
        self._tell(e.CheckpointInvalidated(at, version.node, version.attempt, path))

    def _delete(self, path: Path) -> None:
        self._later(lambda: shutil.rmtree(path, ignore_errors=True))

    def _drop(self, trips: Iterable[CopyInFlight]) -> None:
        """Give up copies."""
        for trip in trips:
            del self._trips[trip.copy.key]
            self.carrier.drop(trip.copy.key)

    def _tell(self, news: News) -> None:
        self.news.append(news)

    def _note(self, text: str) -> None:
        self.notes.append(text)


def _found(at: float, version: Version, path: str) -> e.CheckpointFound:
    return e.CheckpointFound(at, version.node, version.attempt, path, version.count)
