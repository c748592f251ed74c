"""Copies of checkpoints that ranks have written to the memory of their hosts: to another host's memory, to the disk, and back.

Rules
- The newest checkpoint goes first, to another host and to the disk at the same time; of each node one goes to the disk at a time.
- Older ones that no longer fit into the memory with the next one, and are not on the disk by then, are skipped.
- A spare keeps copies before other nodes; without one, or if it has no room, the next node of the gang. It stores them if the hosts
  that wrote them are away.
- One whose names are overwritten replaces the last one on the disk only once another host has it, if one can.
- What an agent was asked for is asked for again when it has connected again; what failed, after a pause.
- An agent compares each file before it uses or copies it: a location may be stale, and costs time, never a wrong file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from orchestrator.core.checkpoints import memory
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState, CopyTarget, FileLocation
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire import orders, reports
from orchestrator.supervisor.transfers.checkpoint_copies import shares_files
from orchestrator.supervisor.transfers.checkpoint_disk import LocalCheckpointFolders

NEIGHBOUR_MAX = 2
"""How many of the newest checkpoints are copied to another host's memory."""

RETRY_S = 30.0
"""The pause before a copy that failed is ordered again."""

_Key = tuple[int, str, CopyTarget]


class MemoryCopies:
    """Copies of the checkpoints of one job between memory, hosts and disk; does nothing where the job has none in memory."""

    def __init__(
        self,
        plan: Plan,
        folders: LocalCheckpointFolders,
        checkpoints: Mapping[int, Checkpoint],
        enter: Callable[[float, Checkpoint], None],
        discard: Callable[[Checkpoint], None],
        notes: list[str],
    ) -> None:
        """`checkpoints`: those of the ledger; `enter` enters one whose locations have changed; `discard` has one deleted where hosts have
        it; `notes`: messages for people are appended there."""
        self.is_used = plan.memory_bytes > 0
        self._bytes_max, self._is_shared = plan.memory_bytes, plan.ssh is None
        self._folders, self._checkpoints = folders, checkpoints
        self._enter, self._discard, self._notes = enter, discard, notes
        # By node: the greetings of the agents that are connected
        self.hosts: Callable[[], Mapping[str, reports.Hello]] = dict
        self._pending: dict[_Key, orders.CopyCheckpoint] = {}
        self._retry_at: dict[_Key, float] = {}
        self._orders: list[tuple[str, orders.CopyCheckpoint]] = []
        self._gang: tuple[str, ...] = ()
        self.attempt_over = 0  # the last attempt of which nothing more is hashed
        self.finished_restores: list[
            tuple[str, str]
        ] = []  # a node, and why its checkpoint was not restored; empty if it was

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether checkpoints like this one are written to memory."""
        return self.is_used and checkpoint.is_named

    def find_fault(self, checkpoint: Checkpoint) -> str:
        """Return why a checkpoint in memory can be had neither from connected hosts nor here; empty if it can."""
        if not self.holds(checkpoint):
            return ""
        there = memory.available_locations(checkpoint, self.hosts())
        missing = memory.find_missing(checkpoint, there)
        away = sorted({one.host for one in checkpoint.locations} - {one.host for one in there})
        return f"{min(missing)} is only on {', '.join(away)}, which cannot be reached" if missing else ""

    def is_available(self, checkpoint: Checkpoint) -> bool:
        """Return whether all files of a checkpoint can be had from hosts that are connected."""
        return self.holds(checkpoint) and not memory.find_missing(checkpoint, self._on_hosts(checkpoint))

    def _on_hosts(self, checkpoint: Checkpoint) -> list[FileLocation]:
        return [one for one in memory.available_locations(checkpoint, self.hosts()) if one.host]

    # Changes of locations

    def displace(self, at: float, checkpoint: Checkpoint, host: str, root: str) -> None:
        """Note that files of a checkpoint have replaced those of the same names in a folder."""
        for other in list(self._checkpoints.values()):
            if other.number < checkpoint.number and self.holds(other) and shares_files(checkpoint, other):
                left = tuple(one for one in other.locations if (one.host, one.root) != (host, root))
                self._relocate(at, other, left, f"was overwritten by checkpoint {checkpoint.number}")

    def connected(self, at: float, hello: reports.Hello) -> None:
        """Note that an agent has connected: what it was asked for may be lost, and its memory is empty if it is a new one."""
        for (_, node, _), order in self._pending.items():
            if node == hello.node:
                self._orders.append((node, order))
        if not hello.is_memory_empty:
            return
        for checkpoint in list(self._checkpoints.values()):
            left = tuple(one for one in checkpoint.locations if not (one.is_memory and one.host == hello.node))
            self._relocate(at, checkpoint, left, f"was in the memory of {hello.node}, whose agent has died")

    def enter_copied(self, at: float, node: str, copied: reports.CheckpointCopied) -> None:
        """Enter what an agent has copied, or could not copy."""
        key = copied.number, node, copied.target
        order = self._pending.pop(key, None)
        if copied.target is CopyTarget.MEMORY and order is not None:
            self.finished_restores.append((node, copied.error))
        checkpoint_copied = self._checkpoints.get(copied.number)
        if copied.error:
            self._retry_at[key] = at + RETRY_S
            self._notes.append(
                f"checkpoint {copied.number} on {node}: not copied to {copied.target.value}: {copied.error}"
            )
        elif checkpoint_copied is not None:
            is_disk = copied.target is CopyTarget.DISK
            place = (
                self._disk_location(node, copied) if is_disk else FileLocation(node, copied.root, copied.names, True)
            )
            self.displace(at, checkpoint_copied, place.host, place.root)
            why, locations = checkpoint_copied.why, _add_location(checkpoint_copied, place)
            if checkpoint_copied.state is CheckpointState.GONE and is_disk and order is not None:
                # An agent that has died had copied them before, and the next one has found them
                checkpoint_copied = dataclasses.replace(checkpoint_copied, state=CheckpointState.WHOLE, why="")
            self._relocate(at, checkpoint_copied, locations, why)
        for checkpoint in list(self._checkpoints.values()):
            self._enter_evicted(at, checkpoint, node, copied)

    def _disk_location(self, node: str, copied: reports.CheckpointCopied) -> FileLocation:
        """Return where files are that an agent has copied to the disk: on a shared one for all."""
        if self._is_shared:
            return FileLocation("", str(self._folders.checkpoint_folder), copied.names)
        return FileLocation(node, copied.root, copied.names)

    def _enter_evicted(self, at: float, checkpoint: Checkpoint, node: str, copied: reports.CheckpointCopied) -> None:
        """Enter that files have left a host's memory, those of the host or copies for another; if its agent leaves, its own are on
        its disk."""
        number, kept = checkpoint.number, list[FileLocation]()
        for one in checkpoint.locations:
            numbers = copied.evicted if _is_original(one) else copied.dropped
            if not (one.is_memory and one.host == node and (number in numbers or not copied.number)):
                kept.append(one)
        moved = dataclasses.replace(checkpoint, locations=tuple(kept))
        if not copied.number and checkpoint.state is CheckpointState.WHOLE:
            for one in checkpoint.locations:
                if one not in kept and _is_original(one):
                    place = self._disk_location(node, dataclasses.replace(copied, names=one.names))
                    moved = dataclasses.replace(moved, locations=_add_location(moved, place))
        self._relocate(at, checkpoint, moved.locations, f"has left the memory of {node}")

    def _relocate(self, at: float, checkpoint: Checkpoint, locations: tuple[FileLocation, ...], why: str) -> None:
        """Enter the locations of a checkpoint; without one of its files it is gone, for this reason."""
        if locations == checkpoint.locations:
            return
        checkpoint = dataclasses.replace(checkpoint, locations=locations)
        if checkpoint.state is CheckpointState.WHOLE and memory.find_missing(checkpoint, locations):
            checkpoint = dataclasses.replace(checkpoint, state=CheckpointState.GONE, why=why, is_in_transit=False)
        self._enter(at, checkpoint)

    # Orders

    def take_orders(self, at: float, gang: tuple[str, ...]) -> list[tuple[str, orders.CopyCheckpoint]]:
        """Return what agents are to copy now, by node. `gang`: the nodes of the attempt, in the order of their ranks."""
        self._gang = gang
        if self.is_used:
            self._order_copies(at)
        taken, self._orders = self._orders, []
        return taken

    def note_failed_fetch(self, at: float, number: int) -> None:
        """Note that a checkpoint could not be fetched from the disks of hosts: it is tried again later."""
        self._retry_at[number, "", CopyTarget.DISK] = at + RETRY_S

    def may_fetch(self, at: float, checkpoint: Checkpoint) -> bool:
        """Return whether a complete checkpoint is on the disks of hosts, not here, and has not just failed to be fetched."""
        on_disk = [place for place in checkpoint.locations if not place.is_memory]
        is_whole = checkpoint.state is CheckpointState.WHOLE and not memory.find_missing(checkpoint, on_disk)
        is_due = at >= self._retry_at.get((checkpoint.number, "", CopyTarget.DISK), at)
        is_wanted = is_whole and is_due and self.holds(checkpoint) and not checkpoint.is_in_transit
        return is_wanted and all(one.host for one in checkpoint.locations)

    def _order_copies(self, at: float) -> None:
        hosts = self.hosts()
        for checkpoint in list(self._checkpoints.values()):
            if self.may_fetch(at, checkpoint):
                self._enter(at, checkpoint)
        newest_first = sorted(self._checkpoints.values(), key=lambda one: -one.number)
        complete = [checkpoint for checkpoint in newest_first if checkpoint.state is CheckpointState.WHOLE]
        waiting = [one for one in complete if any(place.is_memory for place in one.locations)]
        kept_bytes, newest_safe = _bytes_per_host(waiting[0]) if waiting else 0, self._newest_safe
        for place, checkpoint in enumerate(waiting):
            kept_bytes += _bytes_per_host(checkpoint)
            on_disk = [one for one in checkpoint.locations if not one.is_memory]
            unstored = memory.find_missing(checkpoint, on_disk)
            is_begun = any(
                number == checkpoint.number for number, _, target in self._pending if target is CopyTarget.DISK
            )
            is_kept = place < NEIGHBOUR_MAX or is_begun or checkpoint.number == newest_safe
            if unstored and kept_bytes > self._bytes_max and not is_kept:
                self._skip(at, checkpoint)
                continue
            if place < NEIGHBOUR_MAX:
                self._order_neighbours(at, checkpoint, hosts)
            is_awaited = checkpoint.is_overwritten and not memory.is_safe(checkpoint)
            is_copied = all(key[::2] != (checkpoint.number, CopyTarget.NEIGHBOUR) for key in self._pending)
            if is_awaited and (self.find_fault(checkpoint) or not is_copied):
                continue
            held = [one for one in checkpoint.locations if one.is_memory and one.host in hosts]
            orphans = unstored & memory.find_missing(checkpoint, filter(_is_original, held))
            if any(other.number > checkpoint.number and shares_files(checkpoint, other) for other in complete):
                orphans = frozenset()
            for one in held:
                sources = () if _is_original(one) else (one,)
                names = (orphans if sources else unstored).intersection(one.names)
                if names and not self._is_storing(one.host):
                    self._order(at, one.host, checkpoint, names, CopyTarget.DISK, sources)

    @property
    def _newest_safe(self) -> int:
        """The number of the newest complete checkpoint that outlives any one host; 0 for none."""
        whole = (one for one in self._checkpoints.values() if one.state is CheckpointState.WHOLE)
        return max((one.number for one in whole if memory.is_safe(one)), default=0)

    def _is_storing(self, node: str) -> bool:
        return any(host == node and target is CopyTarget.DISK for _, host, target in self._pending)

    def _order_neighbours(self, at: float, checkpoint: Checkpoint, hosts: Mapping[str, reports.Hello]) -> None:
        """Order a copy of each node's files on another host, unless they are on one."""
        wanted: dict[str, tuple[set[str], list[FileLocation]]] = {}
        for one in checkpoint.locations:
            if one.is_memory and one.host in hosts and _is_original(one):
                others = [other for other in checkpoint.locations if other.host != one.host]
                names = memory.find_missing(checkpoint, others).intersection(one.names)
                if names and (holder := self._find_holder(at, checkpoint, one.host)):
                    all_names, sources = wanted.setdefault(holder, (set(), []))
                    all_names.update(names)
                    sources.append(one)
        for holder, (all_names, sources) in wanted.items():
            self._order(at, holder, checkpoint, all_names, CopyTarget.NEIGHBOUR, tuple(sources))

    def _find_holder(self, at: float, checkpoint: Checkpoint, node: str) -> str:
        """Return which other host keeps copies of a node's files: a spare, else the next of the gang, one that has not just failed,
        as for lack of room; empty for none."""
        hosts, place = self.hosts(), self._gang.index(node) if node in self._gang else 0
        ring = (*(name for name in hosts if name not in self._gang), *self._gang[place + 1 :], *self._gang[:place])
        others = (name for name in ring if name in hosts and name != node and hosts[name].memory_addresses)
        keys = ((checkpoint.number, name, CopyTarget.NEIGHBOUR) for name in others)
        return next((key[1] for key in keys if at >= self._retry_at.get(key, at)), "")

    def _order(
        self,
        at: float,
        node: str,
        checkpoint: Checkpoint,
        names: Iterable[str],
        target: CopyTarget,
        sources: tuple[FileLocation, ...] = (),
    ) -> None:
        key, wanted, hosts = (checkpoint.number, node, target), frozenset(names), self.hosts()
        is_ready = checkpoint.is_hashed or sources or checkpoint.attempt <= self.attempt_over
        if key in self._pending or at < self._retry_at.get(key, at) or not is_ready:
            return
        files = tuple(piece for piece in checkpoint.files if piece.name in wanted)
        addresses = {one.host: hosts[one.host].memory_addresses for one in sources if one.host in hosts}
        safe = self._newest_safe
        order = orders.CopyCheckpoint(
            checkpoint.number, files, target, sources, addresses, checkpoint.is_overwritten, safe
        )
        self._pending[key] = order
        self._orders.append((node, order))

    def _skip(self, at: float, checkpoint: Checkpoint) -> None:
        """Give up a checkpoint that would take the room of the next one: the script saves faster than the disk writes."""
        why = (
            "was skipped: newer ones were complete before it was on the disk, and checkpoint.memory has no room for all"
        )
        self._notes.append(f"checkpoint {checkpoint.number}, {checkpoint.main}, {why}")
        in_memory = tuple(one for one in checkpoint.locations if one.is_memory)
        self._discard(dataclasses.replace(checkpoint, locations=in_memory))
        self._enter(at, dataclasses.replace(checkpoint, state=CheckpointState.GONE, why=why))

    def restore(self, at: float, checkpoint: Checkpoint, node: str) -> bool:
        """Have a checkpoint brought into the memory of a node that is to resume from it, from the nearest hosts; False if hosts do
        not have all of it."""
        hello = self.hosts().get(node)
        if not self.is_available(checkpoint) or hello is None or not hello.memory_addresses:
            return False
        self.cancel_restore(node)
        places = sorted(self._on_hosts(checkpoint), key=lambda one: (one.host != node, not one.is_memory))
        sources = tuple(dataclasses.replace(one, host="" if one.host == node else one.host) for one in places)
        self._order(at, node, checkpoint, {piece.name for piece in checkpoint.files}, CopyTarget.MEMORY, sources)
        return True

    def cancel_restore(self, node: str) -> None:
        """Forget what a node was to restore: its ranks have started, or it is to restore another checkpoint."""
        for key in [key for key in self._pending if key[1:] == (node, CopyTarget.MEMORY)]:
            del self._pending[key]

    @property
    def is_unsaved(self) -> bool:
        """Whether a complete checkpoint is in memory only, and the hosts that have it are connected."""
        hosts = self.hosts() if self.is_used else {}
        return any(
            checkpoint.state is CheckpointState.WHOLE
            and memory.find_missing(checkpoint, [one for one in checkpoint.locations if not one.is_memory])
            and not memory.find_missing(checkpoint, memory.available_locations(checkpoint, hosts))
            for checkpoint in self._checkpoints.values()
        )


def _bytes_per_host(checkpoint: Checkpoint) -> int:
    """Return how much memory a checkpoint takes on a host that has written a part of it."""
    return checkpoint.size_bytes // max(1, sum(one.is_memory and _is_original(one) for one in checkpoint.locations))


def _is_original(place: FileLocation) -> bool:
    """Return whether a location in memory is the folder that ranks write to, not a copy for a neighbour."""
    return Path(place.root).name == memory.CHECKPOINTS


def _add_location(checkpoint: Checkpoint, place: FileLocation) -> tuple[FileLocation, ...]:
    """Return the locations of a checkpoint with one more: names in the same folder are joined, none is named if all are there; the
    supervisor's disk comes first, then those of hosts."""
    same = [one for one in checkpoint.locations if (one.host, one.root) == (place.host, place.root)]
    names = tuple(dict.fromkeys((*(name for one in same for name in one.names), *place.names)))
    is_all_here = not place.host and len(names) == len(checkpoint.files)
    if any(not one.names for one in same):
        return checkpoint.locations
    joined = dataclasses.replace(place, names=() if is_all_here else names)
    others = [one for one in checkpoint.locations if one not in same]
    return tuple(sorted([*others, joined], key=lambda one: (bool(one.host), one.is_memory)))


def mark_memory(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose ranks wrote it to the memory of their hosts."""
    places = tuple(dataclasses.replace(one, is_memory=bool(one.host)) for one in checkpoint.locations)
    return dataclasses.replace(checkpoint, locations=places)


def on_node(checkpoint: Checkpoint, node: str) -> Checkpoint:
    """Return a checkpoint as a node has it in its memory, whose folder the node knows."""
    names = tuple(piece.name for piece in checkpoint.files)
    return dataclasses.replace(checkpoint, locations=(FileLocation(node, "", names, is_memory=True),))
