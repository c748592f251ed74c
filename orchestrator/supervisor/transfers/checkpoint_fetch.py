"""Checkpoint transfer over SSH: fetches finished checkpoints from hosts into the job folder, and sends the resume
checkpoint to the hosts of the next attempt.

A state machine: agents' reports and ended copies go in; `news` for the brain, `notes` for the log, and copies that the
`BulkCopier` begins and gives up come out. It knows neither threads nor SSH, and its own work on the disk is quick.

Rules
- A version is an attempt, a name and its steps. It is fetched when every host that may have a part in it has reported
  all that was complete at later steps, or has stopped the attempt; at once, if only one host can have a part.
- A report of a name whose earlier version is being fetched waits until that has ended. A file that was written again
  before it was copied does not have the sha256 that its host reported: its version is dropped, and the next one counts.
- A version that may be mixed, or lacks a piece, is dropped. So is one that waits for a node that will never report: the
  node was lost, or its ranks ended before its part was known to be whole.
- Every `CheckpointFetchStarted` is followed by one end: `CheckpointFound`, or `CheckpointInvalidated` when it cannot
  come. The version before it in the job folder stays until the new one is there and verified.
- Nothing is installed over a checkpoint, or deleted, while it is being sent to a host.
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
from orchestrator.agent.outputs.checkpoint_step import stated_step
from orchestrator.backends.api import BulkCopier, Copied, Copy, Direction
from orchestrator.brain.model import events as e
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m
from orchestrator.supervisor.transfers.checkpoint_store import CheckpointStore, files_of
from orchestrator.supervisor.transfers.checkpoint_versions import NodeReports, Part, Version, VersionState

COMING_MAX = 100
"""The most checkpoints on their way at once. Past it more are written than the connection can take: the oldest is
given up."""

Task: TypeAlias = Callable[[], object]
News: TypeAlias = e.CheckpointFetchStarted | e.CheckpointFound | e.CheckpointInvalidated


@dataclass(frozen=True, slots=True)
class CopyInFlight:
    """A copy that was begun, and the checkpoint that it is of."""

    copy: Copy
    name: str
    size_bytes: int
    is_send: bool = False


@dataclass(slots=True)
class _Entry:
    """All versions of one name."""

    latest: Version  # as the hosts have reported it
    fetched: Version | None = None  # the one that is being copied; the latest may be newer
    installed: Version | None = None  # the one in the job folder
    is_announced: bool = False  # the brain waits for an end


class CheckpointFetch:
    """All transfers of checkpoints of one job."""

    def __init__(
        self,
        job: JobDir,
        carrier: BulkCopier,
        keep: int | None,
        resume_point: Callable[[], str],
        later: Callable[[Task], object],
        place: str = "checkpoints",
    ) -> None:
        """Take up what the manifests tell. `keep`: the number of checkpoints of each series that stay in the job
        folder, in addition to `resume_point()`, the path that the next attempt starts from. `later` runs a task that
        may take long (deleting) off the loop. `place`: the folder of the checkpoints on a host, in that of the job."""
        self._store = CheckpointStore(job)
        self.carrier = carrier
        self._keep = keep
        self._resume_point = resume_point
        self._later = later
        self._place = place
        self._book: dict[str, _Entry] = {}
        for version in self._store.load():
            is_installed = version.state is VersionState.INSTALLED and self._store.path(version.name).exists()
            self._book[version.name] = _Entry(version, installed=version if is_installed else None)
        self._reports = NodeReports(self._store.lost())
        self._copies: dict[str, CopyInFlight] = {}
        self._sends = 0
        self.news: list[News] = []
        self.notes: list[str] = []

    # What happens

    def begin(self, at: float, awaited: tuple[str, ...], stopped: Mapping[str, int]) -> None:
        """Go on where the previous supervisor left off. `awaited`: the paths that the brain still waits for;
        `stopped`: the last attempt that each node is known to have stopped."""
        for node, attempt in stopped.items():
            self._reports.stop(node, attempt)
        for path in awaited:
            entry = self._book.get(self._store.name_of(path))
            if entry is not None and entry.latest.is_open:
                entry.is_announced = True
            elif entry is not None and entry.installed is not None:
                self._tell(_found(at, entry.latest, path))
            else:
                self._tell(e.CheckpointInvalidated(at, "", 0, path))
        for version in self._open():
            self._announce(at, version)
            self._try(at, version.name)

    def found(
        self, at: float, node: str, root: str, report: m.ManifestReported, placed: tuple[str, ...]
    ) -> None:
        """Take a host's report of its part of a complete checkpoint; `placed` are the nodes of that attempt.
        What must be remembered is on disk when this returns, so that the report may be acknowledged."""
        name, part = report.name, Part(node, root, report.steps, report.manifest)
        is_file = part.is_all_of(name)
        flaw = self._store.flaw(name, report.manifest) if report.manifest else ""
        if self._reports.is_lost(node, report.attempt) and not is_file:
            flaw = flaw or "what it had not reported before it was lost is given up"
        if flaw:
            self._note(f"{node} reports a checkpoint {name!r} that is not fetched: {flaw}")
            return
        before = self._book[name].latest if name in self._book else None
        if before is None or before.attempt < report.attempt:
            nodes = (node,) if is_file else tuple(dict.fromkeys((*placed, node)))
            is_slot = not checkpoint_series.member(Path(name), 0, is_folder=not is_file).order
            self._enter(at, Version(report.attempt, name, nodes, (part,), is_slot))
        elif before.attempt == report.attempt and before.may_take(part):
            if before.seems_whole_without(part) and not self._is_copied(name):
                self._remove(at, before)
            self._enter(at, before.with_part(part))

    def scanned(self, at: float, node: str, attempt: int, steps: int) -> None:
        """Note that a node has reported all that was complete when its ranks had made `steps` steps."""
        if self._reports.scan(node, attempt, steps):
            self._try_all(at)

    def stopped(self, at: float, node: str, attempt: int) -> None:
        """Note that a node has stopped an attempt, and has reported all that this leaves behind."""
        self._reports.stop(node, attempt)
        self._try_all(at)

    def lost(self, at: float, node: str, attempt: int) -> None:
        """A node's agent has died, or was given up for its silence, in this attempt. What it has not reported is not
        waited for; what it has is still fetched, and nothing more is sent there. Must be called before the reports of
        the node's next agent."""
        if self._reports.lose(node, attempt):
            self._store.note_lost(self._reports.lost)
        self.end_sends(at, node)
        self._try_all(at)

    def tidy(self, at: float) -> None:
        """Delete what `keep` does not keep, once the brain has got all news."""
        if self._keep is not None and not self.news:
            self._prune(at, self._keep)

    def copied(self, at: float, done: Copied) -> None:
        """Take the result of a copy that ended. One that was given up before changes nothing."""
        in_flight = self._copies.pop(done.copy.key, None)
        if in_flight is None:
            return
        if not in_flight.is_send and done.error:
            self._give_up(at, in_flight.name, done.error)
        self._finish(at, in_flight.name)  # also what waited for the end of its sending

    # Sending

    def send(self, at: float, path: str, node: str, root: str) -> Copy:
        """Begin to bring a checkpoint from the job folder to `resume_path` on a host, and return the copy, or the one
        that is under way; no other is brought there any more. Raises ClusterError when there is no such checkpoint."""
        name, top = self._store.name_of(path), self._store.top_of(path)
        for one in self._sends_to(node):
            if (one.name, one.copy.local_dir) == (name, top):
                return one.copy
        self.end_sends(at, node)
        files = files_of(Path(path))
        names = tuple(str(file.relative_to(top)) for file, _ in files)
        self._sends += 1
        copy = Copy(f"send {self._sends} {node}", node, Direction.SEND, f"{root}/{self._place}", top, names)
        size_bytes = sum(size_bytes for _, size_bytes in files)
        self._copies[copy.key] = CopyInFlight(copy, name, size_bytes, is_send=True)
        self.carrier.copy(copy)
        return copy

    def end_sends(self, at: float, node: str) -> None:
        """Give up what is being sent to a host."""
        sends = self._sends_to(node)
        self._drop(sends)
        for send in sends:
            self._finish(at, send.name)

    def _sends_to(self, node: str) -> list[CopyInFlight]:
        return [one for one in self._copies.values() if one.copy.node == node and one.is_send]

    def resume_path(self, path: str, root: str) -> str:
        """Return where a checkpoint lies on a host to which it was sent."""
        return f"{root}/{self._place}/{self._store.name_of(path)}"

    def pieces(self, path: str) -> tuple[m.ManifestEntry, ...]:
        """Return the files of a checkpoint in the job folder, by their names on a host; one that was not fetched is
        read whole, so call this off the loop. Raises ClusterError."""
        return self._store.pieces(path)

    @property
    def copies(self) -> tuple[CopyInFlight, ...]:
        """The copies under way."""
        return tuple(self._copies.values())

    # Versions

    def _open(self) -> list[Version]:
        return [entry.latest for entry in self._book.values() if entry.latest.is_open]

    def _enter(self, at: float, new: Version) -> None:
        """Take what a host has reported under a name."""
        self._book.setdefault(new.name, _Entry(new)).latest = new
        try:
            self._store.note(new)
        except OSError as err:
            self._give_up(at, new.name, f"{err.filename}: {err.strerror} on this machine")
            return
        self._announce(at, new)
        waiting = self._open()
        if len(waiting) > COMING_MAX:
            self._give_up(at, waiting[0].name, f"more than {COMING_MAX} checkpoints are on their way at once")
        self._try(at, new.name)

    def _announce(self, at: float, version: Version) -> None:
        """Tell the brain that a checkpoint is on its way, unless it waits for it already."""
        entry = self._book[version.name]
        if not entry.is_announced and any(part.pieces for part in version.parts):
            entry.is_announced = True
            path = str(self._store.path(version.name))
            self._tell(e.CheckpointFetchStarted(at, version.node, version.attempt, path))

    def _try_all(self, at: float) -> None:
        for version in self._open():
            self._try(at, version.name)

    def _try(self, at: float, name: str) -> None:
        """Begin to fetch a version if all hosts have reported on it; give it up if they never will."""
        entry = self._book[name]
        version = entry.latest
        if entry.fetched is not None or not version.is_open:
            return
        if version.state is VersionState.EXPECTED:
            pending = self._reports.pending(version)
            why = self._reports.why_never(version, pending)
            if why:
                self._give_up(at, name, why)
            if why or pending or version.lacks_metadata:
                return
            version = self._become(version, VersionState.FETCHING)
        entry.fetched = version
        for part in version.parts:
            self._fetch(version, part)
        self._finish(at, name)

    def _become(self, version: Version, state: VersionState) -> Version:
        """Write down the state of a version; if the disk refuses, only this process remembers it."""
        self._book[version.name].latest = version = dataclasses.replace(version, state=state)
        with contextlib.suppress(OSError):
            self._store.note(version)
        return version

    def _fetch(self, version: Version, part: Part) -> None:
        pieces = version.taken_from(part.node)
        if pieces:
            names = tuple(piece.name for piece in pieces)
            stage, key = self._store.stage(version), f"fetch {version.key} {part.node}"
            there = f"{part.root}/{self._place}"
            copy = Copy(key, part.node, Direction.FETCH, there, stage, names, pieces)
            size_bytes = sum(piece.size_bytes for piece in pieces)
            self._copies[key] = CopyInFlight(copy, version.name, size_bytes)
            self.carrier.copy(copy)

    def _finish(self, at: float, name: str) -> None:
        """Install the version that was fetched, if it is whole and the previous one is not being read."""
        entry = self._book.get(name)
        if entry is None or entry.fetched is None or self._is_copied(name):
            return
        version = entry.fetched
        flaw = self._store.flaw(name, version.pieces)
        flaw = flaw or ("pieces that it names are on no host" if self._store.lacks_pieces(version) else "")
        try:
            if not flaw:
                self._store.install(version)
        except OSError as err:
            flaw = f"{err.filename}: {err.strerror} on this machine"
        if flaw:
            self._give_up(at, name, flaw)
            return
        entry.installed = version
        self._end(at, version, VersionState.INSTALLED, _found(at, version, str(self._store.path(name))))

    def _give_up(self, at: float, name: str, why: str) -> None:
        """End a version that cannot come: the installed one stays, and the brain need not wait."""
        version = self._book[name].fetched or self._book[name].latest
        self._note(f"checkpoint {name} of attempt {version.attempt} does not come home: {why}")
        self._drop([one for one in self._copies.values() if one.name == name and not one.is_send])
        path = str(self._store.path(name))
        invalidated = e.CheckpointInvalidated(at, version.node, version.attempt, path)
        self._end(at, version, VersionState.GIVEN_UP, invalidated)

    def _end(self, at: float, version: Version, state: VersionState, news: News) -> None:
        """Finish with a version, and go on with what was reported of its name in the meantime."""
        entry = self._book[version.name]
        latest = entry.latest
        if entry.fetched is not None:
            entry.fetched = None
            self._delete(self._store.stage(version))
        if entry.is_announced:
            entry.is_announced = False
            self._tell(news)
        if latest.parts == version.parts:
            self._become(version, state)
        else:
            self._announce(at, latest)
            self._try(at, version.name)

    def _is_copied(self, name: str) -> bool:
        """Tell whether something of a checkpoint is being fetched, or sent to a host."""
        return any(one.name == name for one in self._copies.values())

    # In the job folder

    def _prune(self, at: float, keep: int) -> None:
        """Delete installed versions that are old and not needed; their order is by attempts and steps, not by hosts'
        clocks."""
        installed = [entry.installed for entry in self._book.values() if entry.installed is not None]
        times = sorted({(version.attempt, version.steps_begun) for version in installed})
        members = [
            checkpoint_series.member(
                self._store.path(version.name),
                times.index((version.attempt, version.steps_begun)),
                version.pieces[0].name != version.name,
            )
            for version in installed
        ]
        needed = {self._store.name_of(self._resume_point()), *(version.name for version in self._open())}
        by_name = {version.name: version for version in installed}
        for member in checkpoint_series.old(members, keep, lambda before, after: before < after):
            name = self._store.name_of(str(member.path))
            if name not in needed and not self._is_copied(name):
                self._remove(at, by_name[name])

    def _remove(self, at: float, version: Version) -> None:
        """Delete an installed version; the brain is not to start from it."""
        path = str(self._store.path(version.name))
        try:
            self._delete(self._store.take_away(version))
        except OSError as err:
            self._note(f"the checkpoint {path} cannot be deleted: {err.strerror}")
        del self._book[version.name]
        self._tell(e.CheckpointInvalidated(at, version.node, version.attempt, path))

    def _delete(self, path: Path) -> None:
        self._later(lambda: shutil.rmtree(path, ignore_errors=True))

    def _drop(self, copies: Iterable[CopyInFlight]) -> None:
        """Give up copies."""
        for one in copies:
            del self._copies[one.copy.key]
            self.carrier.drop(one.copy.key)

    def _tell(self, news: News) -> None:
        self.news.append(news)

    def _note(self, text: str) -> None:
        self.notes.append(text)


def _found(at: float, version: Version, path: str) -> e.CheckpointFound:
    stated = stated_step(Path(path))
    return e.CheckpointFound(at, version.node, version.attempt, path, version.steps_begun, stated)
