"""Whatever the order of words, copies, losses and restarts: a save that is whole is of one writing, with all of its parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from orchestrator.core.wire import reports
from tests.support.desk_world import DeskWorld
from tests.support.saved_files import Model, torch_save

NODES = ("n0", "n1", "n2")
FIRST_STEP = 1_000
Stamps = frozenset[tuple[str, int]]


@dataclass
class Training:
    """Ranks that step together, one a node, and what their agents have to say, each in its order."""

    world: DeskWorld
    said: dict[str, list[Callable[[], object]]] = field(default_factory=lambda: {node: [] for node in NODES})
    # By name of the save: what each writing of it may be as a whole
    versions: dict[str, list[list[Stamps]]] = field(default_factory=dict)
    # What an agent has not seen of a name yet, by node and name
    unseen: dict[tuple[str, str], reports.CheckpointSeen] = field(default_factory=dict)
    step: int = FIRST_STEP
    lost: set[str] = field(default_factory=set)

    def save(self, name: str, writers: tuple[str, ...], is_unseen: bool) -> None:
        """All writers write their part. `is_unseen`: the agent of the first has not seen it before it is written again."""
        if self.lost:
            return  # the others wait for the lost rank
        is_single = name.endswith(".pt")
        seen: dict[str, reports.CheckpointSeen] = {}
        for node in writers:
            file = name if is_single else f"{name}/rank_{node[1:]}.pt"
            self.world.write({file: torch_save(Model(), data=bytes([self.step % 251]) * 16)}, node)
            seen[node] = self.world.seen(file, node, self.step)
        stamps = [{(piece.name, piece.mtime_ns) for piece in one.part.files} for one in seen.values()]
        wholes = [frozenset(own) for own in stamps] if is_single else [frozenset[tuple[str, int]]().union(*stamps)]
        self.versions.setdefault(name, []).append(wholes)
        for node, own in seen.items():
            self._beat(node, has_unfinished=True)
            self.unseen[node, name] = own
            if not (is_unseen and node == writers[0]):
                self.see(node, name)
        for _ in range(3):
            self.go_on()

    def see(self, node: str, name: str) -> None:
        """Let an agent see what its host has of a name."""
        self._report(node, self.unseen.pop((node, name)))

    def go_on(self) -> None:
        """All ranks make a step, and agents look twice."""
        if self.lost:
            return
        self.step += 1
        for node in NODES:
            self._beat(node, has_unfinished=any(node == one for one, _ in self.unseen))

    def _beat(self, node: str, *, has_unfinished: bool) -> None:
        count = self.step
        self.said[node].append(lambda: self.world.beat(node, count, has_unfinished=has_unfinished, looks=2 * count))

    def _report(self, node: str, seen: reports.CheckpointSeen) -> None:
        pieces = disk.hash_files(Path(seen.part.root), seen.part.files) or ()
        digests = reports.CheckpointHashed(seen.attempt, seen.key, pieces)

        def report() -> None:
            self.world.desk.enter_report(self.world.at, node, seen, self.world.gang)
            self.world.desk.enter_hashes(self.world.at, node, digests)
            self.world.learn()

        self.said[node].append(report)

    def lose(self, node: str) -> None:
        """A node is lost, and with it what it had not said."""
        self.lost.add(node)
        self.said[node].clear()
        self.world.lose(node)

    def check(self) -> None:
        """A save that is whole, or is fetched as such, is exactly what one writing has left."""
        wholes = [whole for versions in self.versions.values() for version in versions for whole in version]
        for save in self.world.saves.values():
            if save.state is CheckpointState.WHOLE or save.is_in_transit:
                assert stamps_of(save) in wholes, save
            if save.state is CheckpointState.WHOLE:
                assert disk.compare(save, deep=True).fault == "", save


def stamps_of(save: Checkpoint) -> Stamps:
    return frozenset((piece.name, piece.mtime_ns) for piece in save.files)


MOVES = st.one_of(
    st.tuples(
        st.just("save"),
        st.sampled_from(["last", "last", "step", "snapshot.pt"]),
        st.sampled_from([NODES, ("n0",), ("n0", "n1")]),
        st.sampled_from([False, False, True]),
    ),
    st.tuples(st.just("go on")),
    st.tuples(st.just("say"), st.sampled_from(NODES), st.integers(1, 6)),
    st.tuples(st.just("arrive"), st.integers(0, 5)),
    st.tuples(st.just("break"), st.integers(0, 5)),
    st.tuples(st.just("lose"), st.sampled_from(NODES)),
    st.tuples(st.just("revive")),
)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MOVES, max_size=40))
def test_complete_checkpoint_is_one_write_with_all_parts(tmp_path: Path, moves: list[tuple[object, ...]]) -> None:
    """A complete checkpoint is one write and has all its parts, in any order of events."""
    shutil.rmtree(tmp_path / "job", ignore_errors=True)
    shutil.rmtree(tmp_path / "far", ignore_errors=True)
    world = DeskWorld(tmp_path, *NODES, has_hosts=True)
    assert world.copier is not None
    training, writers_of, is_unbroken = Training(world), dict[str, tuple[str, ...]](), True
    for move in moves:
        match move:
            case ("save", str(name), writers, bool(is_unseen)):
                name = f"step_{training.step}" if name == "step" else name
                training.save(name, writers_of.setdefault(name, writers), is_unseen)  # type: ignore[arg-type]
            case ("go on",):
                training.go_on()
            case ("say", str(node), int(count)):
                for _ in range(min(count, len(training.said[node]))):
                    training.said[node].pop(0)()
            case ("arrive", int(number)) if world.copier.begun:
                world.arrive(list(world.copier.begun)[number % len(world.copier.begun)])
            case ("break", int(number)) if world.copier.begun:
                is_unbroken = False
                world.arrive(list(world.copier.begun)[number % len(world.copier.begun)], "no space")
            case ("lose", str(node)) if len(training.lost) < len(NODES) - 1:
                is_unbroken = False
                training.lose(node)
            case ("revive",):
                world.restart()
            case _:
                pass
        training.check()
    for node, name in list(training.unseen):
        if node not in training.lost:
            training.see(node, name)
    for _ in range(3):
        training.go_on()
    for node in NODES:
        for say in training.said[node]:
            say()
            training.check()
    world.stop(*(node for node in NODES if node not in training.lost))
    world.arrive()
    world.compare()
    training.check()
    assert not any(save.is_in_transit for save in world.saves.values())
    home = {stamps_of(save) for save in world.saves.values() if save.state is CheckpointState.WHOLE}
    for versions in training.versions.values() if is_unbroken else ():
        assert home.intersection(versions[-1]), "the last writing of each name is at home"
