"""Are jobs found by what people type, and in the order in which they were submitted?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.layout import JobDir

T = 1_795_000_000.0
JOB = home.new_id("gpt", T)


def _home(tmp_path: Path, *ids: str) -> Path:
    for job_id in ids:
        (tmp_path / "jobs" / job_id).mkdir(parents=True)
    return tmp_path


def test_home_is_from_environment_or_dot_orch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The home folder is what the environment says, and ~/.orch otherwise."""
    monkeypatch.setenv("HOME", "/home/me")
    assert home.job_home({"ORCH_HOME": "/x/y"}) == Path("/x/y")
    assert home.job_home({"ORCH_HOME": "~/jobs"}) == Path("/home/me/jobs")
    assert home.job_home({}) == home.job_home({"ORCH_HOME": ""}) == Path("/home/me/.orch")
    assert home.job_home({"ORCH_HOME": "rel"}).is_absolute()


def test_home_of_unknown_user_is_a_user_error() -> None:
    """A home folder of an unknown user is the user's mistake."""
    with pytest.raises(UserError, match="home"):
        home.job_home({"ORCH_HOME": "~no-such-user-here/jobs"})


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True), st.floats(1e9, 4e9))
def test_name_is_parsed_from_any_id(name: str, wall_s: float) -> None:
    """A name is known from the ID, whatever dashes and digits it has."""
    assert home.name_of(home.new_id(name, wall_s)) == name


def test_ids_sort_by_submit_time_for_any_name(tmp_path: Path) -> None:
    """IDs sort by the time of submit, whatever their names."""
    made = [home.new_id(name, T + at) for at, name in enumerate(["z", "a-20991231-235959999-zz", "m", "a", "7"])]
    assert home.list_ids(_home(tmp_path, *made)) == made


def test_submits_within_a_second_sort_by_millisecond(tmp_path: Path) -> None:
    made = [home.new_id("x", T + at / 1000) for at in (1, 9, 10, 100, 999)]
    assert home.list_ids(_home(tmp_path, *reversed(made))) == made


def _placed(folder: Path) -> JobDir:
    job = JobDir(_home(folder, JOB) / "jobs" / JOB)
    job.plan.write_text("{}")
    home.record_origin(job, job.root)
    return job


def test_copy_is_recognised_while_original_exists(tmp_path: Path) -> None:
    job = _placed(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = JobDir(tmp_path / "b" / "jobs" / JOB)
    assert (home.find_original(job), home.find_original(copy)) == (None, job.root)
    assert home.is_own_job(job) and not home.is_own_job(copy)
    with pytest.raises(UserError, match=f"it is a copy of {job.root}"):
        home.require_own_job(copy)
    shutil.rmtree(tmp_path / "a")
    home.require_own_job(copy)


@pytest.mark.parametrize("is_linked", [False, True])
def test_moved_home_is_no_copy(tmp_path: Path, is_linked: bool) -> None:
    _placed(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    if is_linked:
        (tmp_path / "a").symlink_to(tmp_path / "b")
    job = JobDir(tmp_path / "b" / "jobs" / JOB)
    home.require_own_job(job)


def test_other_folder_is_no_job(tmp_path: Path) -> None:
    """A folder that is not a job is not listed as one."""
    good = home.new_id("gpt", T)
    folder = _home(tmp_path, good, f".{good}", "lost+found", "gpt", "gpt-20261120", "-20261120-224605123-k3")
    (folder / "jobs" / home.new_id("file", T)).write_text("not a folder")
    assert [job.id for job in home.list_jobs(folder)] == [good]


def test_empty_or_missing_home_has_no_jobs(tmp_path: Path) -> None:
    assert home.list_ids(tmp_path) == [] == home.list_ids(tmp_path / "none")
    with pytest.raises(UserError) as told:
        home.find_job(tmp_path, None)
    assert "no jobs yet" in told.value.what and "orch submit" in told.value.fix


def test_home_that_is_file_is_an_error(tmp_path: Path) -> None:
    """A home folder that is a file is an error and not an empty one."""
    (tmp_path / "home").write_text("")
    with pytest.raises(ClusterError) as told:
        home.list_ids(tmp_path / "home")
    assert "ORCH_HOME" in told.value.fix


def test_job_is_found_by_id_name_part(tmp_path: Path) -> None:
    first, second, other = (home.new_id(name, T + at) for at, name in enumerate(["gpt", "gpt", "bert-2"]))
    folder = _home(tmp_path, first, second, other)
    assert home.find_job(folder, first).id == first
    assert home.find_job(folder, "gpt").id == second
    assert home.find_job(folder, None).id == other
    assert home.find_job(folder, other[:12]).id == home.find_job(folder, other[-9:]).id == other


def test_running_job_verb_finds_latest_unfinished_of_name(tmp_path: Path) -> None:
    first, second, third = (home.new_id("gpt", T + at) for at in range(3))
    folder = _home(tmp_path, first, second, third)
    (folder / "jobs" / third / "ended").touch()
    assert home.find_job(folder, "gpt", running=True).id == second
    assert home.find_job(folder, "gpt").id == home.find_job(folder, None, running=True).id == third
    assert home.find_job(folder, third, running=True).id == third
    for job in home.unfinished_jobs(folder):
        job.ended.touch()
    assert home.find_job(folder, "gpt", running=True).id == third


def test_commands_use_name_if_unique(tmp_path: Path) -> None:
    """Commands call a job by its name where no other has it."""
    twins, alone = [home.new_id("gpt", T), home.new_id("gpt", T + 1)], home.new_id("gpt-2", T)
    folder = _home(tmp_path, *twins, alone)
    assert {home.reference(job) for job in home.list_jobs(folder)} == {*twins, "gpt-2"}


def test_name_inside_longer_name_means_itself(tmp_path: Path) -> None:
    short, longer = home.new_id("gpt", T), home.new_id("gpt-large", T + 1)
    folder = _home(tmp_path, short, longer)
    assert home.find_job(folder, "gpt").id == short


@pytest.mark.parametrize("other", ["nanogpt", "gpt10", "gpt-10"])
def test_part_of_name_means_no_job(tmp_path: Path, other: str) -> None:
    folder = _home(tmp_path, home.new_id(other, T))
    with pytest.raises(UserError, match="no job has the id or name 'gpt'"):
        home.find_job(folder, "gpt")


def test_ambiguous_part_is_refused(tmp_path: Path) -> None:
    """A part that several IDs have is refused with a question."""
    ids = [home.new_id("gpt", T), home.new_id("gpt", T + 1)]
    with pytest.raises(UserError, match="2 job ids begin or end with 'gpt-'") as told:
        home.find_job(_home(tmp_path, *ids), "gpt-")
    assert all(job_id in told.value.fix for job_id in ids)


@pytest.mark.parametrize("wanted", ["gtp", "", "../x", "*", "gpt/"])
def test_missing_job_error_lists_existing_ones(tmp_path: Path, wanted: str) -> None:
    folder = _home(tmp_path, home.new_id("gpt", T), home.new_id("bert", T + 1))
    with pytest.raises(UserError) as told:
        home.find_job(folder, wanted)
    assert "gpt" in told.value.fix


def test_unended_jobs_lack_the_end_mark(tmp_path: Path) -> None:
    ids = [home.new_id("gpt", T + at) for at in range(3)]
    folder = _home(tmp_path, *ids)
    (folder / "jobs" / ids[1] / "ended").touch()
    assert [job.id for job in home.unfinished_jobs(folder)] == [ids[0], ids[2]]
