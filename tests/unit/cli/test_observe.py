"""What the verbs that show a job print of its checkpoints, and those that show all jobs of one that is closed to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli import app
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


def test_a_checkpoint_is_adopted_once_and_has_a_number_to_begin_from(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["checkpoints"]) == 0
    assert "      orch checkpoints gpt --adopt mine.pt\n" in capsys.readouterr().out
    for done in ("was read, and is in the ledger now", "is in the ledger already"):
        assert app.run(["checkpoints", "--adopt", "mine.pt"]) == 0
        said = capsys.readouterr().out
        assert said == f"save 1, mine.pt, {done}\n  go on   orch resume gpt --from 1\n"
    assert app.run(["checkpoints"]) == 0
    assert "→  1   7" in capsys.readouterr().out


def test_a_damaged_line_of_the_ledger_is_told_beside_the_table(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    job.ledger.write_text("garbage\n")
    assert app.run(["checkpoints", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == f"{job.ledger}:1 cannot be read\n"
    assert [one["save"] for one in json.loads(said.out)] == [None]


def test_why_says_what_a_resume_would_begin_from_as_files_are_now(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["why"]) == 0
    assert "orch checkpoints shows 1 file that it could begin from\n" in capsys.readouterr().out
    app.run(["checkpoints", "--adopt", "mine.pt"])
    assert app.run(["why"]) == 0
    assert "orch resume would begin at step 7 (mine.pt)" in capsys.readouterr().out
    (job.checkpoints / "mine.pt").unlink()
    assert app.run(["why", "--json"]) == 0
    why = json.loads(capsys.readouterr().out)
    assert (why["checkpoint"], why["passed"][0]["why"]) == (None, "gone: mine.pt is gone")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("gpt", 0, "WHAT IT IS"),
        ("--all --by job --since 99999d", 0, "2 jobs  goodput"),
        ("gpt --by host", 0, "node-0"),
        ("done --by cause", 0, "no failure has cost anything"),
        ("--by rank", 2, "is not one of"),
        ("--all done", 2, "leave out JOB, or --all"),
    ],
)
def test_goodput_is_told_of_one_job_or_of_all(
    job: JobDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, text: str
) -> None:
    folders.succeeded(tmp_path, "done")
    assert app.run(["goodput", *words.split()]) == code
    said = capsys.readouterr()
    assert text in said.out + said.err


def test_a_job_that_cannot_be_read_does_not_hide_the_goodput_of_others(
    job: JobDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders.succeeded(tmp_path, "done")
    job.journal.write_text("garbage\n")
    job.facts.unlink(missing_ok=True)
    assert app.run(["goodput", "--all", "--json"]) == 0
    said = capsys.readouterr()
    assert str(job.journal) in said.err
    assert [one["id"][:4] for one in json.loads(said.out)["jobs"]] == ["done"]


@pytest.mark.parametrize("words", ["status --all", "status --all --json", "goodput --all --json"])
def test_a_job_whose_folder_may_not_be_entered_hides_no_other(
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
