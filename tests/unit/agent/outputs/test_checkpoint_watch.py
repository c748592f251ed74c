"""The watch over a checkpoint place: looked at again and again as the agent does, what has been written, and is it over?"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.agent.outputs import checkpoint_watch
from orchestrator.agent.outputs.checkpoint_watch import (
    UNFINISHED_S_MAX,
    CheckpointWatch,
    GroupChange,
    ScanContext,
)
from orchestrator.core.checkpoints.checkpoint import CheckpointFile, CompletionReason
from tests.support.saved_files import SAVED_NS, Model, S, adam, distributed, torch_save, write, write_all
from tests.support.unprivileged import unprivileged


@dataclass(slots=True)
class Place:
    """A place with its watch, and a rank that makes a step before each look while it `steps`."""

    root: Path
    watch: CheckpointWatch
    made: int = 1
    steps: bool = True
    now_s: float = 1000.0
    written: dict[str, int] = field(default_factory=dict)

    def write(self, *names: str, at_ns: int = SAVED_NS, data: bytes = torch_save({"step": 5})) -> None:
        for name in names:
            write(self.root / name, data, at_ns)

    def look(self, **moment: bool) -> list[GroupChange]:
        self.made += self.steps
        self.now_s += 1.0
        return self.watch.scan(ScanContext(self.now_s, lambda: {0: self.made}, **moment), self.written)

    def looks(self, count: int = 2) -> list[str]:
        """Look so many times; return what was reported."""
        return [change.group.main for _ in range(count) for change in self.look()]

    def end(self, *, well: bool = False) -> dict[str, CompletionReason]:
        """Look a last time."""
        return {change.group.main: change.closed_by for change in self.look(ended=True, ended_well=well)}


def begun(root: Path, glob: str = "*") -> Place:
    watch = CheckpointWatch(root, glob)
    watch.begin(1)
    return Place(root, watch)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return begun(tmp_path)


def test_checkpoint_counts_after_every_rank_has_stepped(place: Place) -> None:
    place.write("step_10/a.pt", "step_10/b.pt")
    place.steps = False
    assert place.looks(3) == [] and place.watch.is_unfinished
    place.made += 1
    (change,) = place.look()
    assert (change.group.main, change.closed_by, change.stale) == ("step_10", CompletionReason.STEPS, ())
    assert [piece.name for piece in change.pieces] == ["step_10/a.pt", "step_10/b.pt"]
    assert (change.steps, change.reading.step) == (1, 10)
    assert place.looks(2) == [] and not place.watch.is_unfinished


@pytest.mark.parametrize("late_s", [-3600, -2, -0.2, 0.2, 2, 3600])
def test_file_server_clock_does_not_matter(place: Place, late_s: float) -> None:
    now_ns = time.time_ns() + int(late_s * S)
    place.write("snap_a_20.pt", at_ns=now_ns)
    assert place.looks(2) == ["snap_a_20.pt"]
    place.steps = False
    place.write("snap_a_40.pt", at_ns=now_ns)
    assert place.looks(3) == [], "no step since"
    place.write("snap_b_40.pt", at_ns=now_ns - 9 * S)
    place.steps = True
    (change,) = [*place.look(), *place.look()]
    assert [piece.name for piece in change.pieces] == ["snap_a_40.pt", "snap_b_40.pt"]


def test_hook_gives_step_of_file_write(place: Place) -> None:
    place.made = 90
    place.write("net.pt")
    place.written = {"net.pt": 42}
    (change,) = [*place.look(), *place.look()]
    assert change.steps == 42


def test_files_opened_per_hook_count_after_next_step(tmp_path: Path) -> None:
    for noted, closing in (
        ({"a_7.pt": 7}, CompletionReason.STEPS),
        ({"a_7.pt": 9}, CompletionReason.NONE),
        ({}, CompletionReason.NONE),
    ):
        place = begun(tmp_path / str(len(noted) + max(noted.values(), default=0)))
        place.made, place.written = 8, noted
        place.write("a_7.pt")
        assert place.end() == {"a_7.pt": closing}
    place = begun(tmp_path / "two")
    place.made, place.written = 8, {"step_7/a.pt": 7}
    place.write("step_7/a.pt", "step_7/b.pt")
    assert place.end() == {"step_7": CompletionReason.NONE}, "nobody has seen the other one opened"


def test_change_between_scans_does_not_count_yet(place: Place) -> None:
    for size in (1, 2, 3):
        place.write("ckpt.pt", data=b"x" * size)
        assert place.look() == [] and place.watch.is_unfinished
    assert place.looks(1) == ["ckpt.pt"]


def test_earlier_attempts_files_are_theirs_until_rewritten(tmp_path: Path) -> None:
    write(tmp_path / "step_10/a.pt")
    write(tmp_path / "last/model.pt")
    write(tmp_path / "last/optimizer.pt")
    place = begun(tmp_path)
    assert place.looks() == [] and place.end(well=True) == {} and not place.watch.is_unfinished
    place.write("last/model.pt", at_ns=SAVED_NS + S)
    (change,) = [*place.look(), *place.look()]
    assert (change.group.main, change.stale) == ("last/model.pt", ("last/optimizer.pt",))


def test_files_before_first_step_are_no_checkpoint(place: Place) -> None:
    """Files written before the first step are no checkpoint, however the attempt ends."""
    place.write("vocab.pt", "tokenizer.model", "model_000000.pt")
    place.made, place.steps = 0, False
    assert place.looks(2) == []
    place.steps = True
    assert place.looks(3) == [] and not place.watch.is_unfinished
    assert place.end(well=True) == {}
    place.write("model_000000.pt", at_ns=SAVED_NS + 1)
    assert place.looks() == ["model_000000.pt"]


@pytest.mark.parametrize(("step", "mains"), [(0, []), (1, ["model_1.pt"]), (-1, ["model_1.pt"])])
def test_hook_decides_whether_file_precedes_first_step(place: Place, step: int, mains: list[str]) -> None:
    place.made, place.steps = 0, False
    assert place.looks(1) == []
    place.write("model_1.pt")
    place.written, place.steps = {"model_1.pt": step}, True
    assert place.looks(3) == mains


def test_second_file_of_series_shows_checkpoints_without_steps(place: Place) -> None:
    place.made, place.steps = 0, False
    place.write("vocab.pt", "step_1.pt")
    assert place.looks(4) == [] and not place.watch.is_unfinished
    place.write("step_2.pt", at_ns=SAVED_NS + S)
    assert place.looks(2) == [], "the second may still be written"
    first, second = place.look()
    assert (first.group.main, second.group.main) == ("step_1.pt", "step_2.pt")
    assert second.closed_by is CompletionReason.NO_WRITES
    assert place.end(well=True) == {"vocab.pt": CompletionReason.END}


def test_rewritten_name_is_checkpoint_without_steps(place: Place) -> None:
    place.made, place.steps = 0, False
    place.write("ckpt.pt")
    assert place.looks(4) == []
    place.write("ckpt.pt", at_ns=SAVED_NS + 4 * S)
    assert place.looks(3) == ["ckpt.pt"]


@pytest.mark.parametrize(
    ("made", "steps", "looks", "well", "closed_by"),
    [
        (1, True, 1, False, CompletionReason.STEPS),
        (1, False, 1, True, CompletionReason.END),
        (1, False, 99, False, CompletionReason.NONE),
        (0, False, 0, True, CompletionReason.END),
        (0, False, 1, False, CompletionReason.NONE),
        (0, False, 3, False, CompletionReason.NO_WRITES),
    ],
)
def test_end_scan_reports_everything_new(
    place: Place, made: int, steps: bool, looks: int, well: bool, closed_by: CompletionReason
) -> None:
    place.made, place.steps = made, steps
    place.write("ckpt.pt")
    place.looks(looks)
    assert place.end(well=well) == {"ckpt.pt": closed_by}
    assert place.end(well=well) == {}


def test_checkpoints_are_reported_in_order_of_writing(place: Place) -> None:
    place.steps = False
    for name in ("ckpt_9.pt", "b.pt", "a.pt", "ckpt_10.pt"):
        place.write(name)
        assert place.looks(1) == []
    place.made += 1
    assert place.looks(1) == ["ckpt_9.pt", "b.pt", "a.pt", "ckpt_10.pt"]
    place.write("step-110.pt", "step-99.pt", "x.pt")
    place.written = {"x.pt": 1, "step-99.pt": 2, "step-110.pt": 2}
    place.steps = True
    assert place.looks() == ["x.pt", "step-99.pt", "step-110.pt"], "seen at once: as hooks and numbers say"


# Written in the background, and written again


def test_background_checkpoint_is_reported_as_it_grows(
    place: Place,
) -> None:
    """A checkpoint written in the background delays the supervisor for a while and is reported as it grows."""
    files = distributed("step_10")
    write_all(place.root, dict(list(files.items())[:2]))
    assert place.looks(1) == [] and place.watch.is_unfinished
    (first,) = place.look()
    assert place.watch.is_unfinished is False and first.reading.needs[0].name == "step_10/.metadata"
    place.write("step_10/.metadata", data=files["step_10/.metadata"], at_ns=SAVED_NS + 5 * S)
    place.steps = False
    assert place.looks(2) == [] and place.watch.is_unfinished
    place.now_s += UNFINISHED_S_MAX
    assert place.looks(1) == [] and not place.watch.is_unfinished, "whatever it is, nobody waits for it"
    place.made += 1
    (change,) = place.look()
    assert len(change.pieces) == 3 and change.reading.is_proved


@pytest.mark.parametrize("name", ["step_10", "latest"])
def test_first_files_are_not_taken_for_another_checkpoint(tmp_path: Path, name: str) -> None:
    older, newer = distributed(name), list(distributed(name, values=3).items())
    if name == "latest":
        write_all(tmp_path, older, SAVED_NS - 9 * S)
    place = begun(tmp_path)
    for count, at_ns in ((1, 0), (2, S), (3, 2 * S)):
        write_all(tmp_path, dict(newer[:count][-1:]), SAVED_NS + at_ns)
        (change,) = [*place.look(), *place.look()]
        assert (f"{name}/.metadata" in change.stale) == (name == "latest" and count < 3)
    assert change.stale == ()


def test_unwritten_slot_files_belong_to_previous_checkpoint(place: Place) -> None:
    for number, names in enumerate((("model.pt", "optimizer.pt"), ("model.pt",), ("model.pt", "optimizer.pt"))):
        place.write(*names, at_ns=SAVED_NS + number * S)
        (change,) = [*place.look(), *place.look()]
        assert change.stale == (("optimizer.pt",) if number == 1 else ())


def test_numbered_checkpoint_of_earlier_attempt_is_stale(
    tmp_path: Path,
) -> None:
    """A numbered checkpoint of an earlier attempt is stale where it is not written again."""
    for name in ("step_10/model.pt", "step_10/optim.pt"):
        write(tmp_path / name, torch_save(adam()))
    place = begun(tmp_path)
    place.write("step_10/model.pt", at_ns=SAVED_NS + S)
    place.steps = False
    assert place.looks(3) == []
    assert place.look(ended=True)[0].stale == ("step_10/optim.pt",)


# What counts


def test_default_path_counts_only_checkpoint_like_files(place: Place) -> None:
    place.write(
        "metrics.json",
        "loss.png",
        "plots/loss.png",
        "hf/model.safetensors",
        "a.ckpt",
        "x.pt.tmp",
        ".y.pt",
        data=b"x",
    )
    assert sorted(place.looks()) == ["a.ckpt", "hf/model.safetensors"]


def test_an_explicit_path_may_name_anything(tmp_path: Path) -> None:
    place = begun(tmp_path, "run-*/state.json")
    place.write("run-1/state.json", "run-1/ckpt.pt", data=b"{}")
    assert place.looks() == ["run-1/state.json"]


def test_link_to_checkpoint_is_no_second_one(place: Place) -> None:
    place.write("step-1.pt")
    (place.root / "last.pt").symlink_to("step-1.pt")
    assert place.looks() == ["step-1.pt"]


# What disks and scripts do


def test_newest_of_many_checkpoints_are_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest of many checkpoints of like names count; the others are reported as left out."""
    monkeypatch.setattr(checkpoint_watch, "ALIKE_DONE_MAX", 2)
    place.write("model_7.ckpt", *(f"step_{number}.pt" for number in range(1, 6)))
    assert place.looks() == ["step_4.pt", "step_5.pt", "model_7.ckpt"]
    assert place.watch.incomplete_reason == "3 of 6 checkpoints written at once are left out, the oldest"
    assert place.looks() == [], "for good"


def test_vanished_or_replaced_file_is_no_change(place: Place) -> None:
    place.write("step_1/a.pt", "step_2/a.pt", "step_3/a.pt", "step_4/a.pt")
    assert place.looks(1) == []
    shutil.rmtree(place.root / "step_1")
    shutil.move(place.root / "step_2", place.root.parent / "elsewhere")
    (place.root / "step_2").symlink_to(place.root.parent / "elsewhere")
    (place.root / "step_3/a.pt").unlink()
    os.mkfifo(place.root / "step_3/a.pt")
    assert place.looks(1) == ["step_2", "step_4"], "a folder on another disk is seen through its link"
    assert place.end() == {}
    shutil.rmtree(place.root.parent / "elsewhere")


def test_unreadable_file_is_named_and_reported_later(place: Place) -> None:
    place.write("step_1/a.pt", "step_2/a.pt")
    with unprivileged(place.root):
        (place.root / "step_1").chmod(0)
        assert place.looks() == ["step_2"] and place.watch.incomplete_reason == "step_1: Permission denied"
        (place.root / "step_1").chmod(0o755)
        (place.root / "step_1/a.pt").chmod(0)
        (change,) = [*place.look(), *place.look()]
        assert change.reading.faults or change.reading.is_unsure
    assert place.watch.incomplete_reason == ""


def test_late_or_vanishing_place_is_no_error(tmp_path: Path) -> None:
    place = begun(tmp_path / "later")
    assert place.looks() == []
    place.write("ckpt.pt")
    assert place.looks() == ["ckpt.pt"]
    shutil.rmtree(tmp_path / "later")
    assert place.looks() == [] and place.end() == {}


def test_next_agent_continues_where_one_stopped(tmp_path: Path) -> None:
    write(tmp_path / "old.pt")
    place = begun(tmp_path)
    place.write("step_1.pt", "latest/a.pt")
    assert sorted(place.looks()) == ["latest/a.pt", "step_1.pt"]
    place.write("step_2.pt")
    other = Place(tmp_path, CheckpointWatch(tmp_path, "*"))
    other.watch.load(json.loads(json.dumps(place.watch.dump())))
    assert (other.watch.attempt, other.watch.seen) == (1, place.watch.seen)
    other.made = place.made
    assert other.looks() == ["step_2.pt"]
    assert (other.watch.last_complete, other.watch.baseline) == (
        place.watch.last_complete,
        place.watch.baseline,
    )


NAMES = st.sampled_from(
    ["old.pt", "ckpt.pt", "step_1/a.pt", "step_1/b.pt", "step_2/a.pt", "model.pt", "optimizer.pt", "x.txt"]
)
EVENTS = st.tuples(st.sampled_from(["write", "write", "look", "step", "delete", "reload"]), NAMES)


@pytest.mark.slow
@given(st.lists(EVENTS, max_size=14))
@settings(database=None, max_examples=100)
def test_last_version_of_new_files_is_reported_once(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str]]
) -> None:
    root = tmp_path_factory.mktemp("place")
    write(root / "old.pt", at_ns=SAVED_NS)
    place, at_ns, reported = begun(root), SAVED_NS, dict[str, tuple[CheckpointFile, ...]]()
    place.steps = False

    def take(changes: list[GroupChange]) -> None:
        for change in changes:
            assert reported.get(change.group.key) != change.pieces, "the same is not reported twice"
            reported[change.group.key] = change.pieces

    for what, name in events:
        at_ns += S
        match what:
            case "write":
                place.write(name, at_ns=at_ns, data=torch_save(Model()))
            case "step":
                place.made += 1
            case "delete":
                (root / name).unlink(missing_ok=True)
            case "reload":
                place.watch.load(json.loads(json.dumps(place.watch.dump())))
            case _:
                take(place.look())
    take(place.look(ended=True))
    last = {piece.name: piece.mtime_ns for pieces in reported.values() for piece in pieces}
    now = {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*.pt")}
    if now.get("old.pt") == SAVED_NS:
        del now["old.pt"]
    assert now.items() <= last.items()
