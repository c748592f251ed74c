"""In any order of words, copies, broken copies and revivals: is what is at home whole, and the brain told its end?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.brain import events as e
from orchestrator.wire.paths import JobDir
from tests.support.fake_carrier import GANG, Files, World


@dataclass
class Truth:
    """What the hosts really wrote, and what their agents have still to say, in order."""

    versions: dict[str, list[Files]] = field(default_factory=dict)
    said: dict[str, list[Callable[[], object]]] = field(default_factory=lambda: {node: [] for node in GANG})
    counts: dict[str, int] = field(default_factory=dict)
    count: int = 0


def save_everywhere(world: World, truth: Truth, name: str, writers: tuple[str, ...], gap: int) -> None:
    """All writers save their part of one version; each agent will report, then go on scanning."""
    truth.count += 10 + gap
    number = len(truth.versions.setdefault(name, []))
    whole: Files = {}
    for node in GANG:
        count = truth.count + (gap % 3 if node == "n1" else 0)
        if node in writers:
            files = {f"{name}/{node}.pt": f"{node} {number}".encode()}
            whole.update(files)
            pieces = world.write(node, files)
            truth.said[node].append(lambda n=node, c=count, p=pieces: world.found(n, name, c, p))  # type: ignore[misc]
        truth.said[node].append(lambda n=node, c=truth.count + 3: world.scanned(n, c))  # type: ignore[misc]
    truth.versions[name].append(whole)


def check(world: World, truth: Truth) -> None:
    """At home is only what was written so, and every promise to the brain has one end at most."""
    for name, versions in truth.versions.items():
        assert world.home(name) in [{}, *versions]
    waits: dict[str, bool] = {}
    for event in world.news:
        if isinstance(event, e.CheckpointComing):
            assert not waits.get(event.path)
            waits[event.path] = True
        elif isinstance(event, (e.CheckpointFound, e.CheckpointSpoiled)):
            assert waits.get(event.path) or (isinstance(event, e.CheckpointSpoiled) and event.path in waits)
            waits[event.path] = False
    assert sorted(path for path, waiting in waits.items() if waiting) == sorted(world.carry.coming)


SAVES = st.tuples(
    st.just("save"), st.sampled_from(["last", "s1", "s2"]), st.sampled_from([GANG, ("n0",), ("n0", "n2")])
)
MOVES = st.one_of(
    SAVES,
    st.tuples(st.just("say"), st.sampled_from(GANG)),
    st.tuples(st.just("arrive"), st.integers(0, 5)),
    st.tuples(st.just("break"), st.integers(0, 5)),
    st.tuples(st.just("revive")),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(MOVES, st.integers(0, 40)), max_size=40))
def test_whatever_happens_home_has_whole_versions_and_the_brain_is_told_their_end(
    tmp_path: Path, moves: list[tuple[tuple[object, ...], int]]
) -> None:
    shutil.rmtree(tmp_path / "job", ignore_errors=True)
    world, truth = World(JobDir(tmp_path / "job")), Truth()
    unbroken, writers_of = True, dict[str, tuple[str, ...]]()
    for move, gap in moves:
        match move:
            case ("save", str(name), tuple(writers)):
                save_everywhere(world, truth, name, writers_of.setdefault(name, writers), gap)
            case ("say", str(node)) if truth.said[node]:
                truth.said[node].pop(0)()
            case ("arrive", int(n)) if world.copies:
                world.arrive(list(world.copies)[n % len(world.copies)])
            case ("break", int(n)) if world.copies:
                unbroken = False
                world.arrive(list(world.copies)[n % len(world.copies)], "no space")
            case ("revive",):
                waits = world.carry.coming
                world.revive()
                world.take(world.carry.begin(2.0, waits, {}))
            case _:
                pass
        check(world, truth)
    for node in GANG:
        for say in truth.said[node]:
            say()
        world.stopped(node)
    world.arrive_all()
    check(world, truth)
    assert world.carry.coming == ()
    for name, versions in truth.versions.items():
        assert not unbroken or world.home(name) == versions[-1]
