"""The folders in which ranks save: what lies where, and how the keys of saves tell it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.agent.outputs import checkpoint_folders
from orchestrator.agent.outputs.checkpoint_folders import CheckpointFolders, find_checkpoints_folder
from orchestrator.agent.ranks.hook.layout import FILES_FILE
from orchestrator.core.checkpoints.checkpoint import CompletionReason
from orchestrator.core.jobdir.layout import JobDir
from tests.support.save_bench import Bench, bench, play
from tests.support.saved_files import torch_save, write


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/s/run/a.pt", "/s/run"), ("/s/run/checkpoint-500/model.pt", "/s/run"), ("/s/run/step_10/rank_0/a.pt", "/s/run"),
        ("/s/run/epoch=1-step=5/model/w.pt", "/s/run"), ("/s/mp_rank_01/a.pt", "/s/mp_rank_01"), ("/s/step_5/a/b/c.pt", "/s"),
        ("/s/step_5/a/b/c/d.pt", "/s/step_5/a/b/c"), ("/a.pt", "/"), ("/checkpoint-500/a.pt", "/"),
    ],
)  # fmt: skip
def test_the_outer_folder_is_the_one_that_holds_checkpoints(path: str, folder: str) -> None:
    assert find_checkpoints_folder(path) == folder


@pytest.mark.parametrize(
    ("glob", "path", "name"),
    [
        ("*", "checkpoints/step-1.pt", "step-1.pt"), ("*", "code/out/a.pt", "./out/a.pt"), ("*", "logs/a.pt", "{}/logs/a.pt"),
        ("run/*", "checkpoints/run/a.pt", "run/a.pt"), ("{job_dir}/code/out/*", "code/out/a.pt", "out/a.pt"),
        ("{job_dir}/code/out/*", "code/a.pt", "./a.pt"),
    ],
)  # fmt: skip
def test_a_file_is_named_by_where_it_lies(tmp_path: Path, glob: str, path: str, name: str) -> None:
    assert CheckpointFolders(JobDir(tmp_path), glob).checkpoint_name(f"{tmp_path}/{path}") == name.format(
        tmp_path
    )


def test_a_file_is_named_alike_behind_a_link_to_the_job_home(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    places = CheckpointFolders(JobDir(tmp_path / "home"), "*")
    assert {places.checkpoint_name(f"{tmp_path}/{home}/code/a.pt") for home in ("home", "real")} == {"./a.pt"}


@pytest.mark.parametrize("ships", [True, False])
def test_what_a_link_leads_out_of_the_job_lies_there_where_the_folder_is_copied(
    tmp_path: Path, ships: bool
) -> None:
    code, data = tmp_path / "job/code", tmp_path / "data"
    for folder in (code / "out", data):
        folder.mkdir(parents=True)
    (code / "results").symlink_to(data)
    (code / "inner").symlink_to("out")
    places = CheckpointFolders(JobDir(tmp_path / "job"), "*", ships=ships)
    assert places.resolve_link(f"{code}/results/run/a.pt") == (
        f"{data}/run/a.pt" if ships else f"{code}/results/run/a.pt"
    )
    for path in (f"{code}/inner/a.pt", f"{code}/out/a.pt", "/elsewhere/a.pt"):
        assert places.resolve_link(path) == path


def test_folders_elsewhere_are_watched_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folders, "ELSEWHERE_MAX", 2)
    places = CheckpointFolders(JobDir(tmp_path), "*")
    paths = {f"/s/{name}/step_{step}.pt": step for name in "abc" for step in (1, 2)}
    assert len(places.assign_files(paths, 1, finds_more=False)) == 2
    found = {watch.prefix: own for watch, own in places.assign_files(paths, 1, finds_more=True)}
    assert found == {"": {}, "./": {}, **{f"/s/{name}/": {"step_1.pt": 1, "step_2.pt": 2} for name in "ab"}}


def test_another_agent_goes_on_with_the_folders_elsewhere(tmp_path: Path) -> None:
    places, other = CheckpointFolders(JobDir(tmp_path), "*"), CheckpointFolders(JobDir(tmp_path), "*")
    places.assign_files({"/s/a/step_1.pt": 1, "/s/b/step_1.pt": 1}, 3, finds_more=True)
    other.load(places.dump())
    assert [(watch.prefix, watch.root) for watch in other.watches] == [
        (watch.prefix, watch.root) for watch in places.watches
    ]
    assert [watch["attempt"] for watch in json.loads(other.dump())["watches"]] == [0, 0, 3, 3]
    other.begin(4)
    assert len(other.watches) == 2, "they are the attempt's"


# As the scanner reports them


def _note(bench: Bench, *lines: str) -> None:
    with (bench.ranks.processes[0].folder / FILES_FILE).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def _written(step: int, path: Path, *, is_new: bool = True) -> str:
    return f"written {step} {int(is_new)} {str(path)!a}"


async def _save(bench: Bench, *paths: Path) -> None:
    """Let the rank write files after its step 5, and let them be seen and known to be done."""
    await bench.look()
    bench.step(5, 10.0)
    for path in paths:
        write(path, torch_save({"step": 5}), bench.at(11.0))
    bench.step(6, 12.0)
    await bench.look(3)


def test_a_save_where_ranks_start_has_a_key_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "code" / "pretrained.pt")

    async def act(bench: Bench) -> None:
        await _save(bench, tmp_path / "code/step_5.pt", tmp_path / "checkpoints/step_5.pt")

    found = {seen.key: seen for seen in play(tmp_path, act).seen}
    assert sorted(found) == ["#5", "./#5"]
    own = found["./#5"]
    assert (own.series, own.main, own.part.root) == ("./#", "step_5.pt", str(tmp_path / "code"))


def test_what_fits_checkpoint_path_where_ranks_start_is_reported_once(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        await _save(bench, tmp_path / "code/out/step_5.pt", tmp_path / "code/step_5.pt")

    seen = play(tmp_path, act, checkpoint_glob="{job_dir}/code/out/*").seen
    assert sorted((one.key, one.main) for one in seen) == [("./#5", "step_5.pt"), ("out/#5", "out/step_5.pt")]


def test_a_save_elsewhere_is_known_from_the_hook_alone(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    write(scratch / "step_1.pt", torch_save({"step": 1}))

    async def act(bench: Bench) -> None:
        _note(bench, _written(4, scratch / "step_5.pt"))
        await _save(bench, scratch / "step_5.pt", tmp_path / "unseen" / "step_5.pt")

    (seen,) = play(tmp_path, act).seen
    assert (seen.key, seen.series, seen.main) == (f"{scratch}/#5", f"{scratch}/#", "step_5.pt")
    assert (seen.part.root, seen.part.steps, seen.part.is_new) == (str(scratch), 4, True)


def test_a_name_that_was_there_before_is_not_new(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        _note(bench, _written(5, tmp_path / "code/last.pt", is_new=False))
        await _save(bench, tmp_path / "code/last.pt")

    assert [seen.part.is_new for seen in play(tmp_path, act).seen] == [False]


def test_what_ranks_had_read_before_their_first_step_is_told_once(tmp_path: Path) -> None:
    paths = [tmp_path / "checkpoints/step_1.pt", tmp_path / "code/a.pt", Path("/else/b.pt")]

    async def act(bench: Bench) -> None:
        _note(bench, f"pid {os.getpid()} 0 ''", *(f"read 0 0 {str(path)!a}" for path in paths))
        await bench.look()
        assert bench.beginnings == [], "its step is not in a heartbeat yet"
        bench.ranks.processes[0].steps = 1
        await bench.look(2)

    (told,) = play(tmp_path, act).beginnings
    assert (told.attempt, told.names, told.is_known) == (1, ("step_1.pt", "./a.pt", "/else/b.pt"), True)


def test_ranks_that_end_without_a_step_tell_what_they_had_read(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.ranks.processes[0].exit_code = 1
        await bench.finish()

    (told,) = play(tmp_path, act).beginnings
    assert (told.names, told.is_known) == ((), False), "no hook was at work"


def test_what_a_dead_agent_had_seen_elsewhere_is_reported_by_the_next(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"

    async def act(dead: Bench) -> None:
        _note(dead, _written(5, scratch / "step_5.pt"), _written(9, scratch / "step_9.pt"))
        await _save(dead, scratch / "step_5.pt")
        write(scratch / "step_9.pt", torch_save({"step": 9}), dead.at(20.0))
        dead.scanner._release()  # as the kernel does
        later = bench(tmp_path)
        await later.scanner.recover()
        later.scanner.close()
        assert [(one.attempt, one.key, one.part.closed_by) for one in later.seen] == [
            (1, f"{scratch}/#9", CompletionReason.NONE)
        ]

    play(tmp_path, act)
