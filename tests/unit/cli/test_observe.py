"""What the verbs that show a job print of its checkpoints, and those that show all jobs of one that is closed to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli import app
from orchestrator.client import job_checkpoints, job_folders
from orchestrator.client.job import Job
from orchestrator.core.jobdir import start_folder
from orchestrator.core.jobdir.layout import JobDir
from tests.support import folders, saved_files
from tests.support.unprivileged import unprivileged


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """Return the latest job of the home, which has failed and has a checkpoint that is not in its ledger."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    job = folders.failed(tmp_path)
    saved_files.write(job.checkpoints / "mine.pt", saved_files.torch_save({"step": 7}))
    return job


def _adopt(job: JobDir) -> None:
    job_checkpoints.find_checkpoint(job, Job(job).plan(), {}, "mine.pt")


def test_unowned_file_is_offered_with_resume_command(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that no rank wrote is offered with the command that resumes from it."""
    assert app.run(["checkpoints"]) == 0
    assert "      orch resume gpt --from mine.pt\n" in capsys.readouterr().out
    _adopt(job)
    assert app.run(["checkpoints"]) == 0
    said = capsys.readouterr().out
    assert "→  1   7" in said and "orch resume" not in said


def test_folder_shows_locations_of_job_files(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    (job.code / "results").symlink_to(job.root.parents[1])
    start_folder.record_snapshot_files(job, [Path("train.py")])
    saved_files.write(job.code / "out" / "metrics.csv", b"loss")
    _adopt(job)
    assert app.run(["folder"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["folder", str(job.root)],
        ["code", str(job.code), "1", "file", "written", "by", "ranks"],
        f"results -> {job.root.parents[1]}, which jobs of this workdir share".split(),
        ["checkpoints", str(job.checkpoints), "1", "complete", "checkpoint"],
        ["logs", str(job.logs)],
    ]
    assert app.run(["folder", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == job_folders.job_folders(job)


def test_damaged_ledger_line_is_shown_beside_table(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    job.ledger.write_text("garbage\n")
    assert app.run(["checkpoints", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == f"{job.ledger}:1 cannot be read\n"
    assert [one["save"] for one in json.loads(said.out)] == [None]


def test_why_shows_resume_checkpoint_from_current_files(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    """orch why shows what a resume would start from with the files as they are now."""
    assert app.run(["why"]) == 0
    assert "orch checkpoints shows 1 file that it could start from\n" in capsys.readouterr().out
    _adopt(job)
    assert app.run(["why"]) == 0
    assert "would continue at step 7 (mine.pt)" in capsys.readouterr().out
    (job.checkpoints / "mine.pt").unlink()
    assert app.run(["why", "--json"]) == 0
    why = json.loads(capsys.readouterr().out)
    assert (why["checkpoint"], why["passed"][0]["why"]) == (None, "gone: mine.pt is gone")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("gpt", 0, "WHAT IT IS"),
        ("--all --by job --since 99999d", 2, "orch goodput --all --json has each job"),
        ("gpt --by host", 0, "node-0"),
        ("done --by cause", 0, "no failure has cost anything"),
        ("--by rank", 2, "is not one of"),
        ("--all done", 2, "leave out JOB, or --all"),
    ],
)
def test_goodput_is_shown_for_one_or_all_jobs(
    job: JobDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, text: str
) -> None:
    folders.succeeded(tmp_path, "done")
    assert app.run(["goodput", *words.split()]) == code
    said = capsys.readouterr()
    assert text in said.out + said.err


def test_unreadable_job_does_not_hide_others_goodput(
    job: JobDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that cannot be read does not hide the goodput of others."""
    folders.succeeded(tmp_path, "done")
    job.journal.write_text("garbage\n")
    job.facts.unlink(missing_ok=True)
    assert app.run(["goodput", "--all", "--json"]) == 0
    said = capsys.readouterr()
    assert str(job.journal) in said.err
    assert [one["id"][:4] for one in json.loads(said.out)["jobs"]] == ["done"]


@pytest.mark.parametrize("words", ["status --all", "status --all --json", "goodput --all --json"])
def test_job_in_closed_folder_hides_no_other(
    job: JobDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """In a job home that several share, another user's folder may be closed."""
    folders.succeeded(tmp_path, "done")
    with unprivileged(tmp_path):
        job.root.chmod(0)
        code = app.run(words.split())
        job.root.chmod(0o755)
    said = capsys.readouterr()
    assert (code, "done-" in said.out, "Permission denied" in said.err) == (0, True, True)
