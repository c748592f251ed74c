"""A job whose checkpoints are in memory, and what must be so at any moment: `check`."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

from orchestrator.core.checkpoints import disk, memory
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointFile, CheckpointState
from orchestrator.core.wire import reports
from tests.support.copy_world import Host, Inline, Save
from tests.support.desk_world import DeskWorld

WHOLE, GONE, PRUNED = CheckpointState.WHOLE, CheckpointState.GONE, CheckpointState.PRUNED
RUN, STOP, CHOOSE, PREPARE = "run", "stop", "choose", "prepare"
BEGAN = 1000
"""The steps of each attempt before the first that counts here: heartbeats of far fewer steps are those of other counters."""


class CopyState(DeskWorld):
    """One job, its hosts, and what is known of what ranks wrote."""

    def __init__(self, folder: Path, seed: int, trouble: dict[str, int], hosts: dict[str, Host]) -> None:
        """`trouble`: what copies of agents run into, see `copy_world.patched`."""
        self.random, self.trouble = random.Random(seed), trouble
        self.is_ssh = seed % 3 != 0
        count = self.random.choice((1, 2, 2, 3))
        nodes = tuple(f"n{number}" for number in range(count))
        limit = self.random.choice((1 << 20, 1 << 20, 1 << 20, 6000))
        keep = self.random.choice((2, 3, 9))
        self.overwrites = self.random.choice((0.0, 0.0, 0.3, 1.0))
        self.hosts, self.up = hosts, dict[str, reports.Hello]()
        super().__init__(folder, *nodes, has_hosts=self.is_ssh, memory_bytes=limit, checkpoint_keep=keep)
        self.size, self.phase, self.step = count, RUN, BEGAN
        self.truth = dict[tuple[str, int, int], tuple[int, bytes]]()
        self.wholes = dict[int, frozenset[tuple[str, int, int]]]()
        self.saving: Save | None = None
        self.save_count = self.tries = 0
        self.chosen: Checkpoint | None = None
        self.sending, self.prepared = set[str](), set[str]()
        self.promised = dict[int, set[str]]()
        self.on_disk = dict[Path, set[str]]()
        self.proved = set[tuple[str, int, int, int]]()
        self.log: list[str] = []
        self.ends = False
        self.touched = set[tuple[str, str]]()  # hosts and files that scripts have overwritten or deleted
        self.hidden = set[str]()  # of torn ones
        self.pruned = set[int]()  # by supervisors that were killed
        self.resumed: list[int] = []
        self.spares = tuple(f"s{number}" for number in range(self.random.choice((0, 1, 2))))
        self.wire()

    def note(self, *what: str) -> None:
        """Remember what happened."""
        self.log.append(" ".join(what))

    def wire(self) -> None:
        """Join the tracker with the lines to agents."""
        self.desk._thread._pool.shutdown()
        self.desk._thread._pool = Inline()  # type: ignore[assignment]
        self.desk.memory.hosts = lambda: self.up
        if not self.is_ssh:
            self.desk.is_remote = lambda node: False

    # What must be

    def expect_kept_promise(self, found: Checkpoint | None) -> None:
        """What outlives the loss of any one host has outlived it, unless a newer one is resumed from."""
        down = {name for name in self.hosts if name not in self.up}
        for number, lost in list(self.promised.items()):
            checkpoint = self.saves[number]
            is_skipped = "was skipped" in checkpoint.why  # there was no room for it
            if checkpoint.state is PRUNED or is_skipped or (found is not None and found.number >= number):
                continue
            if len(lost | down) <= 1:
                at = found.number if found is not None else 0
                why = f"{checkpoint.state.value} {checkpoint.why}"
                self.fail(f"{number} was safe, lost was {sorted(lost | down)}, and {at} is resumed from: {why}")
            self.promised.pop(number)

    def fail(self, text: str) -> None:
        """Say what is so that must not be."""
        raise AssertionError(text)

    def expect_one_save(self, checkpoint: Checkpoint, root: Path, what: str) -> None:
        """All files of a checkpoint are of one save, whole, and to the byte what ranks wrote."""
        saves = set()
        for piece in checkpoint.files:
            written = self.truth.get(piece.stamp)
            if written is None or (root / piece.name).read_bytes() != written[1]:
                self.fail(f"{what} {checkpoint.number}: {piece.name} is not what ranks wrote")
            else:
                saves.add(written[0])
        if len(saves) != 1 or self.wholes[saves.pop()] != checkpoint.stamps:
            self.fail(f"{what} {checkpoint.number}: {checkpoint.main} is mixed or not whole")

    def holders(self, checkpoint: Checkpoint, piece: CheckpointFile) -> set[str]:
        """Return the living hosts (empty for the supervisor's disk) that have a file where the ledger says so."""
        found = set()
        for place in checkpoint.locations:
            is_named = not place.names or piece.name in place.names
            is_alive = not place.host or self.hosts[place.host].is_alive
            if is_named and is_alive and disk.matches_record(Path(place.root), piece):
                found.add(place.host)
        return found

    def check(self) -> None:
        """Everything that must be so at any moment."""
        roots = {self.job.checkpoints, *(host.job.checkpoints for host in self.hosts.values())}
        for root in roots:
            self.expect_disk(root, self.expect_true_bytes(root))
        for host in self.hosts.values():
            for root in host.roots() if host.is_alive else ():
                self.expect_true_bytes(root)
        for checkpoint in self.saves.values():
            if checkpoint.state is WHOLE:
                self.check_whole(checkpoint)

    def check_whole(self, checkpoint: Checkpoint) -> None:
        number = checkpoint.number
        if missing := memory.find_missing(checkpoint, checkpoint.locations):
            self.fail(f"{number} is complete, and nowhere is {sorted(missing)}")
        saves = {self.truth[piece.stamp][0] for piece in checkpoint.files if piece.stamp in self.truth}
        if len(saves) != 1 or self.wholes.get(saves.pop()) != checkpoint.stamps:
            self.fail(f"{number}, {checkpoint.main}, is complete, and ranks never wrote that")
        for place in checkpoint.locations:
            host = self.hosts.get(place.host)
            if host is None or host.memory is None or host.name not in self.up or host.outbox or not place.is_memory:
                continue
            is_copy = Path(place.root).parent.name == memory.NEIGHBOURS
            for piece in checkpoint.files:
                if piece.name in place.names and (is_copy or place.root == str(host.memory.folder)):
                    is_there = disk.matches_record(Path(place.root), piece)
                    if not is_there and (is_copy or (host.name, piece.name) not in self.touched):
                        self.fail(f"{number}: {piece.name} is not in the memory of {host.name}, and no host is lost")
        if memory.is_safe(checkpoint):
            lost = self.promised.setdefault(number, set())
            held = [self.holders(checkpoint, piece) & {"", *self.up} for piece in checkpoint.files]
            if lost and all("" in hosts or len(hosts) > 1 for hosts in held):
                lost.clear()

    def expect_true_bytes(self, root: Path) -> set[str]:
        """What has the name, size and time of a file that ranks wrote has its bytes; return the names."""
        found = set[str]()
        for above, _, files in os.walk(root):
            for file in files:
                path = f"{above}/{file}"
                with contextlib.suppress(FileNotFoundError):  # a link to what `checkpoint.keep` has deleted
                    about, name = Path(path).stat(), path[len(str(root)) + 1 :]
                    found.add(name)
                    seen = path, about.st_ino, about.st_size, about.st_mtime_ns
                    written = self.truth.get((name, about.st_size, about.st_mtime_ns))
                    if written is not None and seen not in self.proved:
                        self.proved.add(seen)
                        if Path(path).read_bytes() != written[1]:
                            self.fail(f"{path} is torn, and looks whole")
        return found

    def expect_disk(self, root: Path, names: set[str]) -> None:
        """Nothing goes from a disk but what `checkpoint.keep` does not keep."""
        if gone := self.on_disk.get(root, set()) - names:
            begun = self.pruned | self.desk._pruner._begun
            pruned = [one for one in self.saves.values() if one.number in begun or one.state is PRUNED]
            gone -= {piece.name for one in pruned for piece in one.files} | self.hidden
            if gone := {name for name in gone if not any(part.startswith(".") for part in name.split("/"))}:
                self.fail(f"{sorted(gone)} went from {root}")
        self.on_disk[root] = names
