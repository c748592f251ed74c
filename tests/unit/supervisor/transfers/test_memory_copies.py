"""Are checkpoints in memory copied to another host and to the disk, and resumed from the nearest place that has all of one?"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from orchestrator.core.checkpoints import memory
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState, CopyTarget, FileLocation
from orchestrator.core.wire import orders, reports
from tests.support.desk_world import DeskWorld
from tests.support.saved_files import adam, torch_save

GONE_WITH_N0 = "was in the memory of n0, whose agent has died"
DISK, MEMORY, NEIGHBOUR = CopyTarget.DISK, CopyTarget.MEMORY, CopyTarget.NEIGHBOUR


class MemoryWorld(DeskWorld):
    """A world whose ranks write to the memory of their hosts; agents do what a test lets them do."""

    def __init__(
        self, folder: Path, *nodes: str, has_hosts: bool = True, limit: int = 1 << 30, spares: tuple[str, ...] = ()
    ) -> None:
        self.shm = folder / "shm"
        super().__init__(folder, *nodes, has_hosts=has_hosts, memory_bytes=limit, memory_dir=str(self.shm))
        self.up = {node: self.hello(node) for node in (*self.nodes, *spares)}
        self.desk.memory.hosts = lambda: self.up
        if not has_hosts:
            self.desk.is_remote = lambda node: False

    def hello(self, node: str, **fields: object) -> reports.Hello:
        root = str(self.far / node) if self.copier is not None else str(self.job.root)
        hello = reports.Hello(
            reports.PROTOCOL, self.job.id, "", node, "i", node, 1, 0, 0, "", 0, (), 0, root, self.copier is not None, (),
            (f"{node}:1",),
        )  # fmt: skip
        return dataclasses.replace(hello, **fields)  # type: ignore[arg-type]

    def place(self, node: str = "n0") -> Path:
        return memory.memory_folder(str(self.shm), self.job.id, node) / memory.CHECKPOINTS

    def orders(self) -> list[tuple[str, CopyTarget, int]]:
        """Return what agents are to copy now: node, target, number."""
        self.given = self.desk.memory.take_orders(self.at, self.nodes)
        return [(node, order.target, order.number) for node, order in self.given]

    def copied(
        self, node: str, target: CopyTarget, save: Checkpoint, names: tuple[str, ...] = (), **fields: object
    ) -> None:
        """An agent has copied files of a checkpoint, all of its own if none is named."""
        own = names or tuple(name for one in save.locations if one.root == str(self.place(node)) for name in one.names)
        roots = {
            DISK: self.disk(node),
            MEMORY: str(self.place(node)),
            NEIGHBOUR: f"{self.shm}/{node}/neighbours/{save.number}",
        }
        for name in own if target is DISK and "error" not in fields else ():
            goal = Path(roots[DISK]) / name
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.place(node) / name, goal)
        report = reports.CheckpointCopied(save.number, target, roots[target], own)
        report = dataclasses.replace(report, **fields)  # type: ignore[arg-type]
        self.desk.memory.enter_copied(self.at, node, report)
        self.learn()

    def disk(self, node: str) -> str:
        return str(self.job.checkpoints if self.copier is None else self.far / node / "checkpoints")

    def save_all(self, name: str, steps: int = 10) -> Checkpoint:
        """Each node writes its own file of a checkpoint folder, and all go on."""
        for rank, node in enumerate(self.nodes):
            self.write({f"{name}/rank{rank}.pt": torch_save(adam(steps))}, node)
            self.report(name, node, steps)
        self.go_on()
        self.settle()
        return self.latest()


def test_complete_checkpoint_goes_to_neighbour_and_disk_and_is_then_fetched(tmp_path: Path) -> None:
    """A checkpoint in memory is complete at once, safe with its neighbour, and comes home from the disks of its hosts."""
    world = MemoryWorld(tmp_path, "n0", "n1", "n2")
    save = world.save_all("step-10")
    assert save.state is CheckpointState.WHOLE
    assert not memory.is_safe(save)
    copies = [*((node, DISK, 1) for node in world.nodes), *((node, NEIGHBOUR, 1) for node in world.nodes)]
    assert set(world.orders()) == set(copies)
    assert world.orders() == []
    for node, name in (("n1", "step-10/rank0.pt"), ("n2", "step-10/rank1.pt"), ("n0", "step-10/rank2.pt")):
        world.copied(node, NEIGHBOUR, save, (name,))
    save = world.latest()
    assert memory.is_safe(save)
    for node in world.nodes:
        world.copied(node, DISK, save)
    assert world.latest().is_in_transit
    world.arrive()
    world.settle()
    save = world.latest()
    assert (save.state, save.is_in_transit) == (CheckpointState.WHOLE, False)
    assert save.locations[0] == FileLocation("", str(world.job.checkpoints))


def test_lost_host_leaves_what_its_neighbour_has(tmp_path: Path) -> None:
    """The next attempt begins from a checkpoint whose writer is lost, as its neighbour has the files."""
    world = MemoryWorld(tmp_path, "n0", "n1", spares=("n9",))
    save = world.save_all("step-10")
    assert {("n9", NEIGHBOUR, 1)} == {order for order in world.orders() if order[1] is NEIGHBOUR}
    world.copied("n9", NEIGHBOUR, save, ("step-10/rank0.pt", "step-10/rank1.pt"))
    del world.up["n0"]
    world.stop("n1")
    world.lose("n0")
    assert world.compare(1) == ""
    world.up["n9"] = world.hello("n9")
    assert world.desk.memory.restore(world.at, world.latest(), "n9")
    (order,) = [order for _, order in world.desk.memory.take_orders(world.at, ("n1", "n9")) if order.target is MEMORY]
    assert [one.host for one in order.sources] == ["", "n1"]
    assert order.addresses == {"n1": ("n1:1",)}
    world.copied("n9", MEMORY, save, tuple(piece.name for piece in save.files))
    assert world.desk.memory.finished_restores == [("n9", "")]


def test_spare_without_room_leaves_copies_to_the_gang(tmp_path: Path) -> None:
    """A spare would keep the files of all nodes; what does not fit there goes to the next node at once."""
    world = MemoryWorld(tmp_path, "n0", "n1", spares=("n9",))
    save = world.save_all("step-10")
    world.orders()
    world.copied("n9", NEIGHBOUR, save, ("step-10/rank0.pt",), error="9.0 GB do not fit into 5.0 GB")
    assert {order for order in world.orders() if order[1] is NEIGHBOUR} == {("n0", NEIGHBOUR, 1), ("n1", NEIGHBOUR, 1)}
    world.copied("n1", NEIGHBOUR, save, ("step-10/rank0.pt",))
    world.copied("n0", NEIGHBOUR, save, ("step-10/rank1.pt",))
    assert memory.is_safe(world.latest())


def test_neighbour_stores_on_a_shared_disk_what_a_lost_host_has_written(tmp_path: Path) -> None:
    """The nodes may be given back next; of files that their writer stores nothing is copied twice."""
    world = MemoryWorld(tmp_path, "n0", "n1", has_hosts=False)
    save = world.save_all("step-10")
    world.orders()
    world.copied("n1", NEIGHBOUR, save, ("step-10/rank0.pt",))
    world.copied("n1", DISK, save, ("step-10/rank1.pt",))
    assert world.orders() == [], "n0 does it"
    del world.up["n0"]
    assert world.desk.is_saving and world.orders() == [("n1", DISK, 1)]
    (source,) = world.given[0][1].sources
    assert source.root.endswith("neighbours/1") and [one.name for one in world.given[0][1].files] == [
        "step-10/rank0.pt"
    ]
    shutil.copy2(world.place("n0") / "step-10/rank0.pt", world.job.checkpoints / "step-10")
    world.desk.memory.enter_copied(
        world.at, "n1", reports.CheckpointCopied(1, DISK, world.disk("n1"), ("step-10/rank0.pt",))
    )
    assert world.saves[1].locations[0] == FileLocation("", str(world.job.checkpoints)) and not world.desk.is_saving


def test_what_only_lost_hosts_have_is_not_waited_for(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0", "n1", has_hosts=False)
    world.save_all("step-10")
    assert world.desk.is_saving
    del world.up["n0"]
    assert not world.desk.is_saving


def test_checkpoint_that_only_lost_hosts_have_is_gone(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0", "n1")
    world.save_all("step-10")
    del world.up["n0"]
    world.stop("n1")
    world.lose("n0")
    assert world.compare(1) == "step-10/rank0.pt is only on n0, which cannot be reached"
    assert world.latest().state is CheckpointState.GONE


def test_checkpoint_stays_for_the_older_name_until_the_newer_is_here(tmp_path: Path) -> None:
    """A name that is overwritten: the older checkpoint counts from the disk until the newer one is there, too."""
    world = MemoryWorld(tmp_path, "n0", has_hosts=False)
    world.write({"last.pt": torch_save(adam(1))})
    world.report("last.pt")
    world.go_on()
    world.settle()
    first = world.latest()
    assert world.orders() == [("n0", DISK, 1)]
    world.copied("n0", DISK, first)
    world.write({"last.pt": torch_save(adam(22))}, replaces=True)
    world.report("last.pt", steps=20)
    assert [(one.host, one.is_memory) for one in world.saves[1].locations] == [("", False)]
    world.go_on()
    world.settle()
    assert world.states() == [CheckpointState.WHOLE, CheckpointState.WHOLE]
    world.orders()
    world.copied("n0", DISK, world.saves[2])
    assert world.states() == [CheckpointState.GONE, CheckpointState.WHOLE]


def test_agent_that_died_has_an_empty_memory(tmp_path: Path) -> None:
    """Files in the memory of an agent that has died are no more; those on its disk are."""
    world = MemoryWorld(tmp_path, "n0", has_hosts=False)
    world.save_all("step-10")
    world.orders()
    world.copied("n0", DISK, world.latest())
    world.save_all("step-20", 20)
    world.desk.memory.connected(world.at, world.hello("n0", is_memory_empty=True))
    assert world.states() == [CheckpointState.WHOLE, CheckpointState.GONE]
    assert world.saves[2].why == "was in the memory of n0, whose agent has died"


def test_copy_on_the_disk_counts_although_its_agent_died_before_it_said_so(tmp_path: Path) -> None:
    """The next agent, asked again, says that the files are there: the checkpoint is not gone."""
    world = MemoryWorld(tmp_path, "n0", "n1")
    save = world.save_all("step-10")
    world.orders()
    for node in ("n0", "n1"):
        world.desk.memory.connected(world.at, world.hello(node, is_memory_empty=True))
    world.learn()
    assert world.states() == [CheckpointState.GONE]
    assert {("n0", DISK, 1), ("n1", DISK, 1)} <= set(world.orders())
    world.copied("n0", DISK, save)
    assert (world.latest().state, world.latest().why) == (CheckpointState.GONE, GONE_WITH_N0)
    world.copied("n1", DISK, save)
    assert (world.latest().state, world.latest().why) == (CheckpointState.WHOLE, "")
    assert world.compare(1) == ""


def test_lost_order_is_given_again_and_failed_one_later(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0", has_hosts=False)
    save = world.save_all("step-10")
    assert world.orders() == [("n0", DISK, 1)]
    world.desk.memory.connected(world.at, world.hello("n0"))
    assert world.orders() == [("n0", DISK, 1)]
    world.copied("n0", DISK, save, error="No space left on device")
    assert world.orders() == []
    assert "checkpoint 1 on n0: not copied to disk: No space left on device" in world.notes
    world.at += 60.0
    assert world.orders() == [("n0", DISK, 1)]


def test_checkpoint_is_skipped_when_memory_has_no_room_for_the_next(tmp_path: Path) -> None:
    """A script that saves faster than the disk writes: the newest go there first, and older ones are given up, said so."""
    size = len(torch_save(adam(10)))
    world = MemoryWorld(tmp_path, "n0", has_hosts=False, limit=4 * size - 1)
    world.save_all("step-10")
    assert world.orders() == [("n0", DISK, 1)]
    for step in (20, 30, 40):
        world.save_all(f"step-{step}", step)
    assert world.orders() == []
    world.learn()
    assert world.states() == [CheckpointState.WHOLE, CheckpointState.GONE, CheckpointState.WHOLE, CheckpointState.WHOLE]
    assert "was skipped" in world.saves[2].why
    assert [(node, one.number) for node, one in world.desk.copies.discards] == [("n0", 2)]


def test_leaving_agent_has_moved_everything_to_its_disk(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0", has_hosts=False)
    world.save_all("step-10")
    assert world.desk.is_saving
    world.desk.memory.enter_copied(world.at, "n0", reports.CheckpointCopied(0, DISK, world.disk("n0"), ()))
    world.learn()
    assert world.latest().locations == (FileLocation("", str(world.job.checkpoints)),)
    assert not world.desk.is_saving


@pytest.mark.parametrize("has_hosts", [True, False])
def test_nothing_is_ordered_without_memory(tmp_path: Path, has_hosts: bool) -> None:
    world = MemoryWorld(tmp_path, "n0", has_hosts=has_hosts, limit=0)
    assert not world.desk.memory.is_used
    assert world.orders() == []
    assert isinstance(orders.CopyCheckpoint(1, (), DISK), orders.CopyCheckpoint)


def test_neighbour_stores_what_its_writer_cannot(tmp_path: Path) -> None:
    """A job that ends after the loss of a host has its newest checkpoint on disk, from the copies of the neighbour."""
    world = MemoryWorld(tmp_path, "n0", "n1", spares=("n9",))
    save = world.save_all("step-10")
    world.orders()
    world.copied("n9", NEIGHBOUR, save, ("step-10/rank0.pt", "step-10/rank1.pt"))
    assert world.orders() == []
    del world.up["n0"]
    assert world.orders() == [("n9", DISK, 1)]
    ((_, order),) = world.given
    assert [piece.name for piece in order.files] == ["step-10/rank0.pt"]
    assert [(one.host, Path(one.root).name) for one in order.sources] == [("n9", "1")]


def test_neighbour_stores_no_older_version_over_a_newer_one(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0", spares=("n9",))
    for number in (1, 2):
        world.write({"last.pt": torch_save(adam(number))}, replaces=True)
        world.report("last.pt", steps=10 * number)
        world.go_on()
        world.settle()
        world.orders()
        world.copied("n9", NEIGHBOUR, world.saves[number], ("last.pt",))
    assert world.states() == [CheckpointState.WHOLE, CheckpointState.WHOLE]
    del world.up["n0"]
    assert world.orders() == [("n9", DISK, 2)]


def test_names_are_overwritten_on_disk_once_another_host_has_the_files(tmp_path: Path) -> None:
    """Of several hosts each replaces its own file on the disk: until all have, neither version is whole there."""
    world = MemoryWorld(tmp_path, "n0", "n1")
    for rank, node in enumerate(world.nodes):
        world.write({f"last/rank{rank}.pt": torch_save(adam(1))}, node)
        world.report(f"last/rank{rank}.pt", node)
    world.go_on()
    world.settle()
    save = world.latest()
    assert set(world.orders()) == {("n1", NEIGHBOUR, 1), ("n0", NEIGHBOUR, 1)}
    world.copied("n1", NEIGHBOUR, save, ("last/rank0.pt",))
    assert world.orders() == []
    world.copied("n0", NEIGHBOUR, save, ("last/rank1.pt",), error="0.1 GB do not fit into 0.0 GB")
    away = world.up.pop("n1")  # with the only copy of its file
    assert world.orders() == []
    world.up["n1"] = away
    assert set(world.orders()) == {("n0", DISK, 1), ("n1", DISK, 1)}


def test_what_is_not_hashed_is_stored_after_its_attempt(tmp_path: Path) -> None:
    """An agent that is killed hashes nothing any more; the files that a neighbour has are stored all the same."""
    world = MemoryWorld(tmp_path, "n0", has_hosts=False)
    world.write({"step-10.pt": torch_save(adam(10))})
    world.desk.enter_report(world.at, "n0", world.seen("step-10.pt"), world.gang)
    world.go_on()
    world.settle()
    world.desk.close_stopped(world.at, world.gang)
    assert not world.latest().is_hashed
    assert world.orders() == []
    world.stop()
    assert world.orders() == [("n0", DISK, 1)]


def test_order_names_the_newest_safe_checkpoint(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0", "n1")
    save = world.save_all("step-10")
    world.orders()
    world.copied("n1", NEIGHBOUR, save, ("step-10/rank0.pt",))
    world.copied("n0", NEIGHBOUR, save, ("step-10/rank1.pt",))
    world.save_all("step-20", 20)
    world.orders()
    assert {order.safe for _, order in world.given} == {1}


def test_checkpoint_of_memory_is_kept_until_the_next_one_is_on_disk(tmp_path: Path) -> None:
    """An agent that is killed while it replaces files on the disk leaves two versions there: the older one is kept, too."""
    world = MemoryWorld(tmp_path, "n0", has_hosts=False)
    world.write({"last.pt": torch_save(adam(1))})
    world.report("last.pt")
    world.go_on()
    world.settle()
    world.orders()
    world.copied("n0", DISK, world.latest())
    world.settle()
    assert world.kept() == ["1"]


def test_checkpoint_that_is_nowhere_any_more_is_not_sent(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0")
    world.save_all("step-10")
    world.desk.memory.connected(world.at, world.hello("n0", is_memory_empty=True))
    assert (world.latest().state, world.latest().locations) == (CheckpointState.GONE, ())
    assert not world.desk.copies.send(world.latest(), "n0", "/far")


def test_part_on_a_shared_disk_is_not_all(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0", "n1", has_hosts=False)
    for rank, node in enumerate(world.nodes):
        world.write({f"step-10/rank{rank}.pt": torch_save(adam(10))}, node)
        world.report(f"step-10/rank{rank}.pt", node)
    world.go_on()
    world.settle()
    world.orders()
    world.copied("n0", DISK, world.latest())
    assert world.latest().locations[0] == FileLocation("", str(world.job.checkpoints), ("step-10/rank0.pt",))
    assert not memory.is_safe(world.latest())
    world.copied("n1", DISK, world.latest())
    assert world.latest().locations[0] == FileLocation("", str(world.job.checkpoints))
    assert memory.is_safe(world.latest())


def test_checkpoint_on_disks_of_hosts_stays_complete_when_it_cannot_be_fetched(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0")
    save = world.save_all("step-10")
    world.orders()
    world.copied("n0", DISK, save)
    world.arrive("n0", "the connection has ended")
    assert (world.latest().state, world.latest().is_in_transit) == (CheckpointState.WHOLE, False)
    world.at += 60.0
    world.orders()
    assert world.latest().is_in_transit
