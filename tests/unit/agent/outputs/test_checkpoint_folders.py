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
def test_outer_folder_is_the_one_with_checkpoints(path: str, folder: str) -> None:
    assert find_checkpoints_folder(path) == folder


@pytest.mark.parametrize(
    ("glob", "path", "name"),
    [
        ("*", "checkpoints/step-1.pt", "step-1.pt"), ("*", "code/out/a.pt", "./out/a.pt"), ("*", "logs/a.pt", "{}/logs/a.pt"),
        ("run/*", "checkpoints/run/a.pt", "run/a.pt"), ("{job_dir}/code/out/*", "code/out/a.pt", "out/a.pt"),
        ("{job_dir}/code/out/*", "code/a.pt", "./a.pt"),
    ],
)  # fmt: skip
def test_file_is_named_by_its_location(tmp_path: Path, glob: str, path: str, name: str) -> None:
    assert CheckpointFolders(JobDir(tmp_path), glob).checkpoint_name(f"{tmp_path}/{path}") == name.format(tmp_path)


def test_file_name_is_same_behind_linked_home(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    places = CheckpointFolders(JobDir(tmp_path / "home"), "*")
    assert {places.checkpoint_name(f"{tmp_path}/{home}/code/a.pt") for home in ("home", "real")} == {"./a.pt"}


@pytest.mark.parametrize("ships", [True, False])
def test_linked_path_outside_job_is_resolved_where_copied(tmp_path: Path, ships: bool) -> None:
    """A path that a link leads out of the job is resolved where the folder is copied."""
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


def test_external_folders_are_watched_up_to_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders outside the job are watched up to a limit."""
    monkeypatch.setattr(checkpoint_folders, "ELSEWHERE_MAX", 2)
    places = CheckpointFolders(JobDir(tmp_path), "*")
    paths = {f"/s/{name}/step_{step}.pt": step for name in "abc" for step in (1, 2)}
    assert len(places.assign_files(paths, 1, finds_more=False)) == 2
    found = {watch.prefix: own for watch, own in places.assign_files(paths, 1, finds_more=True)}
    assert found == {"": {}, "./": {}, **{f"/s/{name}/": {"step_1.pt": 1, "step_2.pt": 2} for name in "ab"}}


def test_next_agent_continues_with_external_folders(tmp_path: Path) -> None:
    """Another agent continues with the folders outside the job."""
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


def test_checkpoint_in_start_folder_has_own_key(tmp_path: Path) -> None:
    write(tmp_path / "code" / "pretrained.pt")

    async def act(bench: Bench) -> None:
        await _save(bench, tmp_path / "code/step_5.pt", tmp_path / "checkpoints/step_5.pt")

    found = {seen.key: seen for seen in play(tmp_path, act).seen}
    assert sorted(found) == ["#5", "./#5"]
    own = found["./#5"]
    assert (own.series, own.main, own.part.root) == ("./#", "step_5.pt", str(tmp_path / "code"))


def test_checkpoint_path_in_start_folder_is_reported_once(tmp_path: Path) -> None:
    """Files in the start folder that match checkpoint.path are reported once."""

    async def act(bench: Bench) -> None:
        await _save(bench, tmp_path / "code/out/step_5.pt", tmp_path / "code/step_5.pt")

    seen = play(tmp_path, act, checkpoint_glob="{job_dir}/code/out/*").seen
    assert sorted((one.key, one.main) for one in seen) == [("./#5", "step_5.pt"), ("out/#5", "out/step_5.pt")]


def test_external_checkpoint_is_known_from_hook_only(tmp_path: Path) -> None:
    """A checkpoint outside the job is known from the hook alone."""
    scratch = tmp_path / "scratch"
    write(scratch / "step_1.pt", torch_save({"step": 1}))

    async def act(bench: Bench) -> None:
        _note(bench, _written(4, scratch / "step_5.pt"))
        await _save(bench, scratch / "step_5.pt", tmp_path / "unseen" / "step_5.pt")

    (seen,) = play(tmp_path, act).seen
    assert (seen.key, seen.series, seen.main) == (f"{scratch}/#5", f"{scratch}/#", "step_5.pt")
    assert (seen.part.root, seen.part.steps, seen.part.is_new) == (str(scratch), 4, True)


def test_name_that_existed_before_is_not_new(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        _note(bench, _written(5, tmp_path / "code/last.pt", is_new=False))
        await _save(bench, tmp_path / "code/last.pt")

    assert [seen.part.is_new for seen in play(tmp_path, act).seen] == [False]


def test_reads_before_first_step_are_reported_once(tmp_path: Path) -> None:
    """Files that ranks read before their first step are reported once."""
    paths = [tmp_path / "checkpoints/step_1.pt", tmp_path / "code/a.pt", Path("/else/b.pt")]

    async def act(bench: Bench) -> None:
        _note(bench, f"pid {os.getpid()} 0 ''", *(f"read 0 0 {str(path)!a}" for path in paths))
        await bench.look()
        assert bench.beginnings == [], "its step is not in a heartbeat yet"
        bench.ranks.processes[0].steps = 1
        await bench.look(2)

    (told,) = play(tmp_path, act).beginnings
    assert (told.attempt, told.names, told.is_known) == (1, ("step_1.pt", "./a.pt", "/else/b.pt"), True)


def test_ranks_ending_without_step_report_their_reads(tmp_path: Path) -> None:
    async def act(bench: Bench) -> None:
        bench.ranks.processes[0].exit_code = 1
        await bench.finish()

    (told,) = play(tmp_path, act).beginnings
    assert (told.names, told.is_known) == ((), False), "no hook was at work"


def test_next_agent_reports_external_finds_of_dead_one(tmp_path: Path) -> None:
    """The next agent reports the external files that a dead agent had seen."""
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
