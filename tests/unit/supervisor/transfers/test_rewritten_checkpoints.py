"""A file that is written over at every step never settles: its format shows that it is whole, and it is copied before it counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.agent.outputs.checkpoint_watch import REWRITTEN_BYTES_PER_S, REWRITTEN_S
from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints.checkpoint import CheckpointState, CompletionReason
from orchestrator.core.wire import reports
from tests.support.desk_world import DeskWorld
from tests.support.saved_files import S, torch_save
from tests.unit.agent.outputs.test_checkpoint_watch import Place, begun
from tests.unit.supervisor.transfers.test_checkpoint_tracker import state

WHOLE, OPEN, TORN, GONE = (
    CheckpointState.WHOLE,
    CheckpointState.OPEN,
    CheckpointState.TORN,
    CheckpointState.GONE,
)


def written_over(place: Place, name: str, times: int, data: bytes) -> list[tuple[str, CompletionReason]]:
    """Write a file at each of so many steps, with a look behind each; return what is reported."""
    found = []
    for number in range(times):
        place.write(name, at_ns=number * S, data=data)
        found += [(change.group.main, change.closed_by) for change in place.look()]
    return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = begun(tmp_path)
    place.look()  # a first step is made
    return place


def test_file_rewritten_every_step_is_reported_rarely(
    place: Place,
) -> None:
    """A file that is overwritten at every step is reported by its format now and then."""
    data = torch_save({"step": 5})
    assert written_over(place, "last.pt", int(3 * REWRITTEN_S), data) == [("last.pt", CompletionReason.FINAL_FILE)] * 2
    assert place.looks(2) == ["last.pt"], "it has settled"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("last.pt", torch_save({"step": 5})[:-30]),
        ("last.pkl", b"a format that shows nothing"),
        ("a_5.pt", torch_save({"step": 5})),
    ],
    ids=["cut off", "unknown", "of one step"],
)
def test_other_files_are_not_reported_so(place: Place, name: str, data: bytes) -> None:
    assert written_over(place, name, int(3 * REWRITTEN_S), data) == []


def test_large_rewritten_file_is_reported_rarely(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large rewritten file is reported so rarely that its copies cost little."""
    data = torch_save({"step": 5})
    monkeypatch.setattr("orchestrator.agent.outputs.checkpoint_watch.REWRITTEN_BYTES_PER_S", len(data) / 20)
    assert REWRITTEN_BYTES_PER_S > 1e6
    assert len(written_over(place, "last.pt", 26, data)) == 2, "after 5 s, and 20 s after that"


@pytest.fixture
def world(tmp_path: Path) -> DeskWorld:
    return DeskWorld(tmp_path, "n0", "n1")


def test_rewritten_file_counts_once_copied_despite_later_kill(
    world: DeskWorld,
) -> None:
    """A rewritten file counts once it is copied; a kill during the next write costs no more."""
    world.write({"last.pt": state(10)})
    world.report("last.pt", steps=10, closed_by=CompletionReason.FINAL_FILE)
    world.settle()
    assert world.states() == [WHOLE] and world.saves[1].closed_by is CompletionReason.FINAL_FILE
    world.write({"last.pt": b"cut off"})
    world.report("last.pt", steps=20, closed_by=CompletionReason.NONE)
    world.stop()
    assert world.compare(1) == "" and world.states() == [WHOLE, TORN]
    assert (world.job.checkpoints / "last.pt").read_bytes() == state(10)


def test_file_rewritten_before_copy_does_not_count(world: DeskWorld) -> None:
    """A file that was overwritten before it was copied does not count."""
    world.write({"last.pt": state(10)})
    seen = world.seen("last.pt", closed_by=CompletionReason.FINAL_FILE)
    world.write({"last.pt": b"cut off"})
    world.desk.enter_report(world.at, "n0", seen, world.gang)
    world.settle()
    assert world.states() == [OPEN]
    world.write({"last.pt": state(20)})
    world.report("last.pt", steps=20, closed_by=CompletionReason.FINAL_FILE)
    world.settle()
    assert world.states() == [WHOLE] and world.saves[1].steps == 20
    world.write({"last.pt": state(30)})
    world.report("last.pt", steps=30, closed_by=CompletionReason.FINAL_FILE)
    world.settle()
    assert world.states() == [GONE, WHOLE], "one entry for each that counted"
    assert [path.name for path in (world.job.checkpoints / ".kept").iterdir()] == ["2"]


def test_step_counts_from_other_jobs_file(world: DeskWorld, tmp_path: Path) -> None:
    other = tmp_path / "other" / "net_0060.pth"
    other.parent.mkdir()
    other.write_bytes(state(60))
    for node in world.nodes:
        world.desk.enter_reads(world.at, node, reports.CheckpointsRead(1, (str(other),), True), world.gang)
    world.settle()
    world.save({"net_0080.pth": state(80)}, steps=20)
    (began,) = [one for one in world.events if isinstance(one, e.ResumedElsewhere)]
    assert (began.step, began.attempt) == (60, 1) and world.saves[1].step == 80


def test_copy_of_earlier_write_does_not_replace_current(world: DeskWorld) -> None:
    """A copy of an earlier write does not stand for the one that counts."""
    world.write({"last.pt": state(10)})
    seen = world.seen("last.pt", closed_by=CompletionReason.FINAL_FILE)
    world.desk.enter_report(world.at, "n0", seen, world.gang)  # its copy is begun
    world.desk.close()  # and done
    kept = world.job.checkpoints / ".kept/1/last.pt"
    deadline_s = time.monotonic() + 20
    while not kept.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert kept.read_bytes() == state(10)
    world.restart()  # a supervisor that does not know of the copy
    world.save({"last.pt": state(20)}, steps=20)
    assert world.states() == [WHOLE]
    assert kept.read_bytes() == state(20)
