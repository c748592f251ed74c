"""The ledger on disk: what is written is read, and damage costs no more than what it hits."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.checkpoints import ledger
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    CompletionReason,
    Content,
    FileLocation,
    Format,
    GroupReading,
    HostPart,
    RequiredFile,
)
from orchestrator.core.checkpoints.ledger import Ledger
from tests.support.fake_disk import FakeDisk
from tests.support.saved_files import saved

JOB = Path("/jobs/gpt")
PIECES = (
    CheckpointFile("run/ckpt_1.pt", 5, 10**18, "0" * 64),
    CheckpointFile("run/\udcff.pt", 6, 10**18 + 1),
)


def book(folder: Path, job: Path | None = None) -> Ledger:
    return Ledger(job or folder, folder / "checkpoints" / "ledger.jsonl")


def read(folder: Path) -> dict[int, Checkpoint]:
    saves, faults = ledger.read(folder, folder / "checkpoints" / "ledger.jsonl")
    assert faults == []
    return saves


def enter(folder: Path, *saves: Checkpoint) -> Path:
    """Write saves down, each by itself; return the file."""
    own = book(folder)
    for save in saves:
        own.put(save)
        own.flush()
    return folder / "checkpoints" / "ledger.jsonl"


def test_checkpoint_round_trips_and_changes_add_up(tmp_path: Path) -> None:
    """A checkpoint is read as it was entered, and changes add up."""
    state = GroupReading(Format.DCP, Content.STATE, True, needs=(RequiredFile("a", 5, "b"),), step=5, cites=("x",))
    part = HostPart("n0", "/data", 5, PIECES, state, CompletionReason.STEPS, ("a",))
    first = saved(
        1,
        state=CheckpointState.OPEN,
        parts=(part,),
        files=PIECES,
        locations=(FileLocation("n0", "/data", ("a",)),),
    )
    whole = dataclasses.replace(first, state=CheckpointState.WHOLE, parts=(), step=5)
    file = enter(tmp_path, first, saved(2), whole)
    assert read(tmp_path) == {1: whole, 2: saved(2)} == book(tmp_path).checkpoints
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert set(lines[2]) == {"number", "state", "parts", "step"}, "only what has changed"
    assert book(tmp_path).next_number == 3 and book(tmp_path / "none").next_number == 1


def test_ledger_of_version_0_1_is_read_and_continued(tmp_path: Path) -> None:
    """Its lines had other names for the files and locations of a checkpoint; a later change counts."""
    old = saved(1, files=PIECES, locations=(FileLocation("n0", "/data", ("a",)),))
    file = enter(tmp_path, old)
    former = {"files": "pieces", "locations": "places", "is_in_transit": "is_coming"}
    line = {former.get(name, name): value for name, value in json.loads(file.read_text()).items()}
    file.write_text(json.dumps(line) + "\n")
    assert read(tmp_path) == {1: old}
    moved = dataclasses.replace(old, locations=(FileLocation("", "/ckpt"),))
    enter(tmp_path, moved)
    assert read(tmp_path) == {1: moved}


def test_unchanged_entry_is_not_written(tmp_path: Path) -> None:
    file = enter(tmp_path, saved(1))
    before = file.read_bytes()
    enter(tmp_path, saved(1), saved(1))
    assert file.read_bytes() == before


def test_moved_job_folder_keeps_checkpoints_and_other_places(tmp_path: Path) -> None:
    """A job folder can move with its checkpoints, and other places stay."""
    (tmp_path / "old").mkdir()
    places = (
        FileLocation("", f"{tmp_path}/old/checkpoints"),
        FileLocation("", "/data/run"),
        FileLocation("n0", f"{tmp_path}/old/x"),
    )
    enter(tmp_path / "old", saved(1, locations=places))
    (tmp_path / "old").rename(tmp_path / "new")
    roots = [place.root for place in read(tmp_path / "new")[1].locations]
    assert roots == [f"{tmp_path}/new/checkpoints", "/data/run", f"{tmp_path}/old/x"]


def test_full_disk_leaves_whole_lines_and_rest_follows(tmp_path: Path, disk: FakeDisk) -> None:
    """A full disk leaves whole lines, and the rest is written when there is space."""
    own = book(tmp_path)
    own.put(saved(1))
    own.flush()
    before = (tmp_path / "checkpoints/ledger.jsonl").read_bytes()
    for room in (0, 1, 700):
        disk.room_bytes = room
        for number in (2, 3):
            own.put(saved(number))
        with pytest.raises(OSError, match="No space"):
            own.flush()
        assert (tmp_path / "checkpoints/ledger.jsonl").read_bytes() == before
    disk.room_bytes = None
    own.flush()
    assert set(read(tmp_path)) == {1, 2, 3}


def test_foreign_file_as_ledger_is_an_error(tmp_path: Path) -> None:
    """A ledger that is something else is an error."""
    file = tmp_path / "checkpoints" / "ledger.jsonl"
    file.parent.mkdir()
    for made in (os.mkfifo, os.mkdir):
        made(file)
        with pytest.raises(OSError):
            ledger.read(tmp_path, file)
        file.rmdir() if file.is_dir() else file.unlink()


def test_incomplete_line_costs_only_its_change(tmp_path: Path) -> None:
    """A line that is not complete costs its own change."""
    file = enter(
        tmp_path,
        saved(1),
        saved(2),
        saved(1, state=CheckpointState.DISTRUSTED),
        saved(1, state=CheckpointState.DISTRUSTED, why="x"),
    )
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:2], lines[2][:-5], lines[3], b""]))
    saves, faults = ledger.read(tmp_path, file)
    assert saves == {1: saved(1, why="x"), 2: saved(2)} and faults == [f"{file}:3 cannot be read"]
    file.write_bytes(b"\n".join([*lines[:2], lines[2].replace(b"distrusted", b"odd"), lines[3], b""]))
    saves, faults = ledger.read(tmp_path, file)
    assert saves == {1: saved(1, why="x"), 2: saved(2)} and "checkpoint 1 cannot be read in part" in faults[0]


@pytest.mark.parametrize(
    "line",
    ["{}", '{"number": 1e999}', '{"number": 1.5}', '{"number": true}', '{"number": "1"}', '{"number": null}', "[]", "null", "",
     "[" * 99, '{"number": 99999999999999999999999}', "\udcff", '{"number": 1, "state": 5}', '{"number": 1, "new": 5}',
     '{"number": 7, "state": "whole"}'],
)  # fmt: skip
def test_invalid_line_is_reported_and_skipped(tmp_path: Path, line: str) -> None:
    file = enter(tmp_path, saved(1))
    with file.open("ab") as out:
        out.write(line.encode("utf-8", "surrogateescape") + b"\n")
    enter(tmp_path, saved(2))
    saves, faults = ledger.read(tmp_path, file)
    assert saves == {1: saved(1), 2: saved(2)} and len(faults) == 1
    assert book(tmp_path).faults == faults


def test_large_ledger_is_rewritten_without_ended_checkpoint_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ledger, "ENDED_MAX", 2)
    ended = [saved(number, state=state, files=PIECES) for number, state in enumerate(ledger.ENDED_STATES * 2, 1)]
    live = [saved(7, files=PIECES), saved(8, state=CheckpointState.OPEN, files=PIECES)]
    file = enter(tmp_path, *ended, *live)
    monkeypatch.setattr(ledger, "COMPACT_BYTES", file.stat().st_size - 1)
    before = file.read_bytes()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        assert book(tmp_path).checkpoints == dict(enumerate((*ended, *live), 1)), "it can wait"
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]
    own = book(tmp_path)
    kept = {
        5: dataclasses.replace(ended[4], files=()),
        6: dataclasses.replace(ended[5], files=()),
        7: live[0],
        8: live[1],
    }
    assert own.checkpoints == kept == read(tmp_path)
    assert len(file.read_bytes().splitlines()) == 4
    own.put(saved(9))
    own.flush()
    assert read(tmp_path) == {**kept, 9: saved(9)}


# Any course of events

FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "state": st.sampled_from(CheckpointState), "why": st.text(max_size=5), "step": st.integers(0, 2**53) | st.none(),
        "files": st.sampled_from([(), PIECES]), "content": st.sampled_from(Content),
        "locations": st.sampled_from([(), (FileLocation("", "/jobs/gpt/checkpoints"),), (FileLocation("n", "/x", ("a",)), FileLocation("", "/y"))]),
    },
)  # fmt: skip
PUTS = st.tuples(st.just("put"), st.integers(1, 4), FIELDS)
EVENTS = PUTS | st.tuples(st.sampled_from(["flush", "reopen", "tear"]), st.integers(1, 300), st.none())
QUICK = settings(database=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a disk that is durable at once."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_disk")
@given(st.lists(EVENTS, max_size=12))
@QUICK
def test_last_flushed_state_survives_any_torn_end(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, Any]]
) -> None:
    """After any sequence of puts, flushes and torn ends the last flushed state is read."""
    folder = tmp_path_factory.mktemp("ledger")
    own, wanted = book(folder, JOB), dict[int, Checkpoint]()
    file = folder / "checkpoints" / "ledger.jsonl"
    for what, number, fields in events:
        match what:
            case "put":
                own.put(dataclasses.replace(own.checkpoints.get(number, saved(number)), **fields))
            case "flush":
                own.flush()
                wanted = dict(own.checkpoints)
            case "tear" if file.exists():  # it dies while it writes a line
                own.flush()
                wanted, before = dict(own.checkpoints), file.stat().st_size
                own.put(saved(number % 4 + 1, why=f"torn {number}"))
                own.flush()
                os.truncate(file, min(before + number, file.stat().st_size - 1))
                own = book(folder, JOB)
            case _:
                own = book(folder, JOB)
        assert ledger.read(JOB, file)[0] == wanted
    own.put(saved(9))
    own.flush()
    assert ledger.read(JOB, file)[0] == own.checkpoints


@pytest.mark.slow
@pytest.mark.usefixtures("quick_disk")
@given(st.lists(PUTS, min_size=1, max_size=10), st.data())
@QUICK
def test_damaged_lines_raise_nothing_and_others_are_right(
    tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[str, int, Any]], data: st.DataObject
) -> None:
    """Reading damaged lines raises nothing, and the other checkpoints are right."""
    folder = tmp_path_factory.mktemp("ledger")
    own = book(folder, JOB)
    for _, number, fields in puts:
        own.put(dataclasses.replace(own.checkpoints.get(number, saved(number)), **fields))
        own.flush()
    file = folder / "checkpoints" / "ledger.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1]
    hit = set()
    for at in data.draw(st.sets(st.integers(0, len(lines) - 1), max_size=3)):
        hit.add(json.loads(lines[at])["number"])
        begin = data.draw(st.integers(0, len(lines[at])))
        new = data.draw(st.binary(max_size=6)).replace(b"\n", b"")
        lines[at] = lines[at][:begin] + new + lines[at][begin + data.draw(st.integers(0, 40)) :]
        found = json.loads(lines[at])["number"] if _is_change(lines[at]) else None
        hit.add(found if type(found) is int else None)
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    saves, _ = ledger.read(JOB, file)
    assert {number: save for number, save in saves.items() if number not in hit} == {
        number: save for number, save in own.checkpoints.items() if number not in hit
    }


def _is_change(line: bytes) -> bool:
    try:
        return "number" in json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return False
