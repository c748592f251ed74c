"""Reports, copies, failures, lost hosts and new supervisors in any order: one whole version is installed, and the brain
learns its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.jobdir.layout import JobDir
from tests.support.fake_carrier import GANG, Files, World

LATER_STEPS = 3
"""How much later than the others a host may be done that writes in the background."""


@dataclass
class Truth:
    """What the hosts really wrote, and what their agents have still to say, in order."""

    versions: dict[str, list[list[Files]]] = field(
        default_factory=dict
    )  # of each name, and which may come of each
    writers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    said: dict[str, list[Callable[[], object]]] = field(default_factory=lambda: {node: [] for node in GANG})
    unseen: dict[tuple[str, str], Callable[[], object]] = field(default_factory=dict)  # by node and name
    is_certain: dict[str, bool] = field(default_factory=dict)  # the last version of a name must come
    count: int = 0

    def save(
        self, world: World, name: str, writers: tuple[str, ...], later: tuple[int, int], is_unseen: bool
    ) -> None:
        """All writers save their part of one version, and each agent will report it, or the first may not see it
        before it is written again; then they tell that it was all."""
        self.count += 10
        writers = self.writers.setdefault(name, writers)
        number = len(self.versions.setdefault(name, []))
        is_folder = not name.endswith(".pt")
        wholes: list[Files] = [{}] if is_folder else []
        counts = {node: self.count + n for node, n in zip(GANG, (0, *later), strict=True)}
        for node in writers:
            files = {f"{name}/{node}.pt" if is_folder else name: f"{node} {number}".encode()}
            wholes = [wholes[0] | files] if is_folder else [*wholes, files]
            pieces, count = world.write(node, files), counts[node]
            self.unseen[node, name] = lambda n=node, c=count, p=pieces: world.found(n, name, c, p)  # type: ignore[misc]
            if not is_unseen or node != writers[0]:
                self.said[node].append(self.unseen.pop((node, name)))
        for node in (node for node in GANG if all(node != one for one, _ in self.unseen)):
            self.said[node].append(lambda n=node, c=self.count + LATER_STEPS + 1: world.scanned(n, c))  # type: ignore[misc]
        self.versions[name].append(wholes)
        is_written_once = number == 0 and name != "last"
        self.is_certain[name] = (
            not is_folder or is_written_once or len({counts[node] for node in writers}) == 1
        )

    def check(self, world: World) -> None:
        """At home is only what was written so; `waits` sees to it that the brain waits for one end at a time."""
        for name, versions in self.versions.items():
            assert world.home(name) in [{}, *(whole for wholes in versions for whole in wholes)]
        world.waits()


MOVES = st.one_of(
    st.tuples(
        st.just("save"),
        st.sampled_from(["last", "s1", "new", "snapshot.pt", "s1.pt"]),
        st.sampled_from([GANG, ("n0",), ("n0", "n2")]),
        st.sampled_from([(0, 0), (0, 0), (0, LATER_STEPS), (2, 1)]),
        st.sampled_from([False, False, True]),
    ),
    st.tuples(st.just("say"), st.sampled_from(GANG)),
    st.tuples(st.just("arrive"), st.integers(0, 5)),
    st.tuples(st.just("break"), st.integers(0, 5)),
    st.tuples(st.just("lose"), st.sampled_from(GANG)),
    st.tuples(st.just("revive")),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MOVES, max_size=40))
def test_whatever_happens_home_has_whole_versions_and_the_brain_is_told_their_end(
    tmp_path: Path, moves: list[tuple[object, ...]]
) -> None:
    shutil.rmtree(tmp_path / "job", ignore_errors=True)
    world, truth, unbroken = World(JobDir(tmp_path / "job")), Truth(), True
    lost: set[str] = set()
    for move in moves:
        match move:
            case ("save", str(name), writers, later, bool(is_unseen)):
                name = f"step-{truth.count}" if name == "new" else name
                truth.save(world, name, writers, later, is_unseen)  # type: ignore[arg-type]
            case ("say", str(node)) if truth.said[node]:
                truth.said[node].pop(0)()
            case ("arrive", int(n)) if world.copies:
                world.arrive(list(world.copies)[n % len(world.copies)])
            case ("break", int(n)) if world.copies:
                unbroken = False
                world.arrive(list(world.copies)[n % len(world.copies)], "no space")
            case ("lose", str(node)):
                unbroken = False
                lost.add(node)
                world.carry.lost(1.0, node, 1)
                world.take()
                truth.said[node].clear()
            case ("revive",):
                waits = world.waits()
                world.revive()
                world.carry.begin(2.0, waits, {})
                world.take()
            case _:
                pass
        truth.check(world)
    for node in GANG:
        last = [say for (one, _), say in truth.unseen.items() if one == node and node not in lost]
        for say in [*truth.said[node], *last]:
            say()
        world.stopped(node)
    world.arrive_all()
    truth.check(world)
    assert world.waits() == ()
    for name, versions in truth.versions.items():
        assert not (unbroken and truth.is_certain[name]) or world.home(name) in versions[-1]
