"""A job whose checkpoints are in memory, one random event after the other; see `copy_world`. `check` holds after each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints import disk, memory
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointFile, CheckpointState, FileLocation
from orchestrator.core.checkpoints.resume_choice import choose_checkpoint
from orchestrator.core.wire import orders, reports
from orchestrator.supervisor.transfers import memory_copies
from orchestrator.supervisor.transfers.checkpoint_copies import shares_files
from orchestrator.supervisor.transfers.checkpoint_tracker import CheckpointTracker
from orchestrator.supervisor.transfers.completion import CheckpointGang
from tests.support.copy_world import Crash, Host, Inline, Save
from tests.support.desk_world import DeskWorld
from tests.support.saved_files import S, write

WHOLE, GONE, PRUNED = CheckpointState.WHOLE, CheckpointState.GONE, CheckpointState.PRUNED
RUN, STOP, CHOOSE, PREPARE = "run", "stop", "choose", "prepare"
BEGAN = 1000
"""The steps of each attempt before the first that counts here: heartbeats of far fewer steps are those of other counters."""

TRIES_MAX = 3
"""How often a checkpoint that cannot be brought to nodes is tried, before it is distrusted."""


class Story(DeskWorld):
    """One job. `faults`: what must not be."""

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
        self.seen = set[tuple[str, int, int, int]]()
        self.log: list[str] = []
        self.ends = False
        self.touched = set[tuple[str, str]]()  # hosts and files that scripts have overwritten or deleted
        self.hidden = set[str]()  # of torn ones
        self.pruned = set[int]()  # by supervisors that were killed
        self.resumed: list[int] = []
        self.wire()
        for name in (*nodes, *(f"s{number}" for number in range(self.random.choice((0, 1, 2))))):
            job = self.job if not self.is_ssh else type(self.job)(self.far / name)
            self.hosts[name] = Host(name, folder / "shm" / name, job, self.is_ssh)
            self.hosts[name].boot()
            self.connect(name)
            self.prepare_memory(name, None)

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

    # Lines, agents, hosts

    def connect(self, name: str) -> None:
        """The agent of a host says hello."""
        host = self.hosts[name]
        assert host.memory is not None
        hello = reports.Hello(
            reports.PROTOCOL, self.job.id, "", name, str(host.incarnation), name, 1, 0, 0, "", 0, (), 0,
            str(host.job.root), self.is_ssh, (), (f"{name}:1",), host.memory.is_empty,
        )  # fmt: skip
        self.up[name] = hello
        self.desk.memory.connected(self.at, hello)
        self.learn()
        if self.chosen is not None and name in self.nodes and name not in self.prepared:
            self.begin_prepare(name)

    def cut(self, name: str) -> None:
        """The line of a host breaks."""
        self.up.pop(name, None)
        host = self.hosts[name]
        host.inbox.clear()
        host.outbox[:] = [one for one in host.outbox if not isinstance(one, reports.Heartbeat)]

    def kill(self, name: str) -> None:
        """The agent of a host dies with the ranks and what is in memory; another one is started."""
        self.lose_memory(name)
        self.hosts[name].boot()
        self.end_attempt(name)

    def lose_host(self, name: str) -> None:
        """A host is lost, with its memory and, until it returns, its disk."""
        self.lose_memory(name)
        self.hosts[name].die()
        self.hosts[name].is_alive = False
        self.end_attempt(name)

    def lose_memory(self, name: str) -> None:
        self.cut(name)
        self.sending.discard(name)
        self.prepared.discard(name)
        for lost in self.promised.values():
            lost.add(name)

    def end_attempt(self, lost: str = "") -> None:
        """Ranks have failed, or a node is lost: all others stop, and scan a last time."""
        if lost and lost not in self.nodes:
            return
        if self.phase is PREPARE:
            self.phase = CHOOSE
            return
        if self.phase not in (RUN, STOP):
            return
        if lost:
            self.gang = dataclasses.replace(self.gang, lost=self.gang.lost | {lost})
        if self.phase is RUN:
            self.phase, self.saving = STOP, None
            for name in self.nodes:
                if name not in self.gang.lost:
                    self.hosts[name].stop(self.gang.attempt)

    # What an agent does

    def prepare_memory(self, name: str, checkpoint: Checkpoint | None, torn: tuple[Checkpoint, ...] = ()) -> str:
        """Make an agent's memory ready for an attempt, compare there what it begins from; return how that differs."""
        host = self.hosts[name]
        assert host.memory is not None
        for one in torn:
            for root in (Path(one.locations[0].root), host.job.checkpoints):
                self.hidden |= {piece.name for piece in one.files} if disk.quarantine(root, one) else set()
        if checkpoint is not None and not checkpoint.locations[0].is_memory:
            if fault := disk.compare(checkpoint, deep=False).fault:
                return fault
        try:
            opened = host.memory.open(checkpoint)
        except OSError as err:
            return str(err)
        if checkpoint is None or opened is None:
            return ""
        fault = disk.compare(opened, deep=False).fault
        if not fault:
            self.expect_one_save(opened, Path(opened.locations[0].root), f"{name} resumes from")
        return fault

    def work(self, name: str) -> None:
        """An agent does the next thing that it was told."""
        host = self.hosts[name]
        what, order = host.inbox.pop(0)
        assert host.memory is not None
        if what == "copy":
            self.trouble["crash"] = self.random.randrange(1, 4) if self.random.random() < 0.05 else 0
            self.trouble["break"] = self.random.randrange(1, 4) if self.random.random() < 0.1 else 0
            try:
                host.memory.copy(order)
                host.memory.poll()
            except Crash:
                self.kill(name)
            finally:
                self.trouble.update({"crash": 0, "break": 0})
        elif what == "discard":
            root = Path(order.locations[0].root)
            if root.is_relative_to(host.memory.folder.parent):
                host.memory.discard(order)
            else:
                disk.delete_checkpoint(order, root)
        else:
            attempt, checkpoint, torn = order
            fault = self.prepare_memory(name, checkpoint, torn)
            host.outbox.append(("prepared", attempt, fault))

    # What the supervisor does

    def deliver(self, name: str) -> None:
        """The supervisor takes the next report; it may die before it is written down."""
        host = self.hosts[name]
        one = host.outbox[0]
        match one:
            case reports.CheckpointSeen():
                self.desk.enter_report(self.at, name, one, self.gang)
            case reports.CheckpointHashed():
                self.desk.enter_hashes(self.at, name, one)
            case reports.CheckpointCopied():
                self.desk.memory.enter_copied(self.at, name, one)
            case reports.Heartbeat():
                self.desk.enter_heartbeat(self.at, name, one, self.gang)
            case ("stopped", attempt) if attempt == self.gang.attempt:
                self.gang = dataclasses.replace(self.gang, stopped=self.gang.stopped | {name})
            case ("prepared", attempt, fault) if attempt == self.gang.attempt and self.phase is PREPARE:
                self.enter_prepared(name, fault)
        if self.random.random() < 0.02:
            self.restart()
            return
        self.learn()
        if host.outbox and host.outbox[0] is one:
            host.last = host.outbox.pop(0)

    def restart(self) -> None:
        """The supervisor is killed, and another one takes over; what it had not written down comes again, some of the rest, too."""
        self.desk.close()
        if self.copier is not None:
            self.copier.begun.clear()
        for name in list(self.up):
            self.cut(name)
            host = self.hosts[name]
            if isinstance(host.last, reports.CheckpointCopied) and self.random.random() < 0.5:
                host.outbox.insert(0, host.last)
        self.sending.clear()
        self.pruned |= self.desk._pruner._begun
        self.desk = CheckpointTracker(self.job, self.plan, self.copier, lambda: None)
        self.wire()
        self.desk.begin(self.facts, self.at)
        self.desk._gang = self.gang
        self.learn()

    def chores(self) -> None:
        """The supervisor gives orders, and closes and chooses checkpoints."""
        self.desk.apply_decisions(self.facts)
        self.desk.close_stopped(self.at, self.gang)
        self.settle()
        self.give_copies()
        restored, self.desk.memory.finished_restores = self.desk.memory.finished_restores, []
        sent, self.desk.copies.finished_sends = [*self.desk.copies.finished_sends, *restored], []
        for name, why in sent:
            if name in self.sending and self.phase is PREPARE:
                self.sending.discard(name)
                if not ((name, why) in restored and why and self.begin_send(name)):
                    self.enter_prepared(name, why) if why else self.order_prepare(name)
        for discards in (self.desk.copies.discards, self.desk.memory.discards):
            for name, checkpoint in discards:
                if name in self.up:
                    self.hosts[name].inbox.append(("discard", checkpoint))
            discards.clear()
        if self.phase is STOP and self.gang.is_over:
            self.phase = CHOOSE
        if self.phase is CHOOSE and not self.ends:
            self.choose()

    def give_copies(self) -> None:
        for name, order in self.desk.memory.take_orders(self.at, self.nodes):
            if name in self.up:
                self.hosts[name].inbox.append(("copy", order))

    def choose(self) -> None:
        """Choose nodes and a checkpoint for the next attempt, as soon as there are enough."""
        ready = [name for name in (*self.nodes, *self.hosts) if name in self.up]
        nodes = tuple(dict.fromkeys(ready))[: self.size]
        if len(nodes) < self.size:
            return
        for name in self.nodes:
            self.desk.memory.cancel_restore(name)
            self.desk.copies.end_sends(name)
        found = self.find_accepted()
        self.note("choose", repr(found and found.number), repr({n: (c.state.value, c.why) for n, c in self.saves.items()}))
        self.expect_kept_promise(found)
        self.chosen, self.phase = found, PREPARE
        self.sending.clear()
        self.prepared.clear()
        self.attempt(self.gang.attempt + 1, *nodes, base_step=found.steps if found is not None else 0)
        self.desk._gang = self.gang
        for name in nodes:
            self.begin_prepare(name)

    def find_accepted(self) -> Checkpoint | None:
        """Return the checkpoint that is chosen and passes the comparison."""
        while True:
            self.learn()
            best = choose_checkpoint(self.facts.checkpoints.values(), self.size).checkpoint
            number = best.number if best is not None else 0
            self.desk.compare(self.at, d.CompareCheckpoint(self.at, "why", self.gang.attempt, number, False))
            self.settle()
            compared = [one for one in self.events if isinstance(one, e.CheckpointCompared)]
            while not compared or compared[-1].at < self.at - 100 or self.desk._comparison._retry is not None:
                self.at += 10.0
                self.settle()
                compared = [one for one in self.events if isinstance(one, e.CheckpointCompared)]
            if not compared[-1].fault:
                return self.saves[number] if number else None

    def begin_prepare(self, name: str) -> None:
        """Bring the checkpoint to a node, and make it ready."""
        checkpoint = self.saves[self.chosen.number] if self.chosen is not None else None
        if checkpoint is not None and self.desk.memory.restore(self.at, checkpoint, name):
            self.sending.add(name)
            self.give_copies()
        elif not self.begin_send(name):
            self.order_prepare(name)

    def begin_send(self, name: str) -> bool:
        if self.chosen is None or not self.is_ssh:
            return False
        if not self.desk.copies.send(self.saves[self.chosen.number], name, str(self.hosts[name].job.root)):
            return False
        self.sending.add(name)
        return True

    def order_prepare(self, name: str) -> None:
        """Tell a node to get ready, as the executor does."""
        if name not in self.up:
            return
        checkpoint = self.saves[self.chosen.number] if self.chosen is not None else None
        if checkpoint is not None:
            home = str(self.job.checkpoints)
            if not any(not place.host and place.root != home for place in checkpoint.locations[:1]):
                checkpoint = memory_copies.on_node(checkpoint, name)
            elif self.is_ssh:
                checkpoint = self.desk.copies.locate_on_host(checkpoint, name, str(self.hosts[name].job.root))
        torn = self.desk.find_torn_on_host(name, self.gang.attempt)
        self.hosts[name].inbox.append(("prepare", (self.gang.attempt, checkpoint, torn)))

    def enter_prepared(self, name: str, fault: str) -> None:
        """A node is ready, or cannot be: then others are chosen, and in the end another checkpoint."""
        if fault:
            self.phase, self.tries = CHOOSE, self.tries + 1
            self.log.append(f"{name} cannot begin from {self.chosen and self.chosen.number}: {fault}")
            if self.tries >= TRIES_MAX and self.chosen is not None:
                self.tries = 0
                known = self.facts.checkpoints[self.chosen.number]
                self.facts.checkpoints[known.number] = dataclasses.replace(
                    known, state=CheckpointState.DISTRUSTED, why=fault
                )
                self.promised.pop(known.number, None)
            return
        self.prepared.add(name)
        if self.prepared >= set(self.nodes):
            for node in self.nodes:
                self.desk.memory.cancel_restore(node)
                self.desk.copies.end_sends(node)
            self.phase, self.tries = RUN, 0
            self.resumed.append(self.chosen.number if self.chosen is not None else 0)
            self.step = BEGAN
            self.chosen = None

    # What ranks do

    def begin_save(self) -> None:
        """Ranks begin to write a checkpoint, under a new name or the same as ever."""
        self.save_count += 1
        step = self.gang.base_step + self.step
        kind = self.random.random()
        if kind < self.overwrites:
            names, key, series, main = {node: f"last/rank{rank}.pt" for rank, node in enumerate(self.nodes)}, "last/.pt", "last/.pt", "last/rank0.pt"  # fmt: skip # noqa: E501
        else:
            names = {node: f"step-{step}/rank{rank}.pt" for rank, node in enumerate(self.nodes)}
            key, series, main = f"step-{step}", "step-#", f"step-{step}"
        self.saving = Save(
            self.save_count, self.gang.attempt, key, series, main, self.step, names, list(self.nodes), set()
        )

    def write_part(self, name: str) -> None:
        """The rank of a node writes its file."""
        save, host = self.saving, self.hosts[name]
        assert save is not None and host.memory is not None
        save.todo.remove(name)
        self.now_ns += S
        path, file = host.memory.folder / save.names[name], save.names[name]
        is_in_place = self.random.random() < 0.5
        reaches = is_in_place and path.exists() and (path.is_symlink() or path.stat().st_nlink > 1)
        for checkpoint in self.saves.values():
            if checkpoint.number in self.promised and any(piece.name == file for piece in checkpoint.files):
                self.promised[checkpoint.number].add(name)
                if reaches:
                    self.promised.pop(checkpoint.number)
        self.touched.add((name, file))
        data = f"save {save.id} {file} ".encode() * self.random.randrange(5, 60)
        new = write(path if is_in_place else path.with_name("new"), data, self.now_ns)
        new.rename(path)
        self.truth[file, len(data), self.now_ns] = save.id, data
        save.stamps.add((file, len(data), self.now_ns))
        host.unseen[save.key] = save
        if not save.todo:
            self.wholes[save.id], self.saving = frozenset(save.stamps), None
            self.step += 1

    def delete_old(self, name: str) -> None:
        """A script deletes all but its newest numbered checkpoint."""
        host = self.hosts[name]
        assert host.memory is not None
        folders = sorted(host.memory.folder.glob("step-*"), key=lambda path: path.lstat().st_mtime_ns)
        for folder in folders[:-1]:
            if self.saving is not None or folder.name in host.unseen:
                continue
            for path in folder.iterdir():
                file = f"{folder.name}/{path.name}"
                self.touched.add((name, file))
                for checkpoint in self.saves.values():
                    if checkpoint.number in self.promised and any(piece.name == file for piece in checkpoint.files):
                        self.promised[checkpoint.number].add(name)
            shutil.rmtree(folder)

    def beat(self, name: str) -> None:
        """A node's ranks have made steps."""
        host = self.hosts[name]
        if name not in self.up:
            return
        rank = reports.RankHeartbeat(self.nodes.index(name), self.step, "S", 0, 0.0)
        host.outbox.append(
            reports.Heartbeat(self.gang.attempt, (rank,), host.scans, host.scans, bool(host.unseen))
        )

    # What must be

    def expect_kept_promise(self, found: Checkpoint | None) -> None:
        """What outlives the loss of any one host has outlived it, unless a newer one is resumed from."""
        down = {name for name in self.hosts if name not in self.up}
        for number, lost in list(self.promised.items()):
            checkpoint = self.saves[number]
            if checkpoint.state is PRUNED or (found is not None and found.number >= number):
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
                    about, name = os.stat(path), path[len(str(root)) + 1 :]
                    found.add(name)
                    seen = path, about.st_ino, about.st_size, about.st_mtime_ns
                    written = self.truth.get((name, about.st_size, about.st_mtime_ns))
                    if written is not None and seen not in self.seen:
                        self.seen.add(seen)
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
