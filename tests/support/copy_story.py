"""A job whose checkpoints are in memory, one random event after the other; see `copy_world`. `check` holds after each of them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from orchestrator.core.checkpoints.resume_choice import choose_checkpoint
from orchestrator.core.wire import reports
from orchestrator.supervisor.transfers import memory_copies
from orchestrator.supervisor.transfers.checkpoint_tracker import CheckpointTracker
from tests.support.copy_state import BEGAN, CHOOSE, PREPARE, RUN, STOP, CopyState
from tests.support.copy_world import Crash, Host, Save
from tests.support.saved_files import S, write

TRIES_MAX = 3
"""How often a checkpoint that cannot be brought to nodes is tried, before it is distrusted."""


class Story(CopyState):
    """One job, one random event after the other."""

    def __init__(self, folder: Path, seed: int, trouble: dict[str, int], hosts: dict[str, Host]) -> None:
        """`trouble`: what copies of agents run into, see `copy_world.patched`."""
        super().__init__(folder, seed, trouble, hosts)
        for name in (*self.nodes, *self.spares):
            job = self.job if not self.is_ssh else type(self.job)(self.far / name)
            self.hosts[name] = Host(name, folder / "shm" / name, job, self.is_ssh)
            self.hosts[name].boot()
            self.connect(name)
            self.prepare_memory(name, None)

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
        is_on_disk = checkpoint is not None and not checkpoint.locations[0].is_memory
        if checkpoint is not None and is_on_disk and (fault := disk.compare(checkpoint, deep=False).fault):
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
        for name, checkpoint in self.desk.copies.discards:
            if name in self.up:
                self.hosts[name].inbox.append(("discard", checkpoint))
        self.desk.copies.discards.clear()
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
        self.note(
            "choose", repr(found and found.number), repr({n: (c.state.value, c.why) for n, c in self.saves.items()})
        )
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
            names, key, series, main = {node: f"last/rank{rank}.pt" for rank, node in enumerate(self.nodes)}, "last/.pt", "last/.pt", "last/rank0.pt"  # fmt: skip
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

    def tell_steps(self, name: str) -> None:
        """A node's ranks have made steps."""
        host = self.hosts[name]
        if name not in self.up:
            return
        rank = reports.RankHeartbeat(self.nodes.index(name), self.step, "S", 0, 0.0)
        host.outbox.append(reports.Heartbeat(self.gang.attempt, (rank,), host.scans, host.scans, bool(host.unseen)))
