"""What if a job's journal is lost? Nothing begins from nothing: what is known is said, and a checkpoint is the way on."""

from __future__ import annotations

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.cli import app
from orchestrator.core.errors import OrchError
from orchestrator.core.host import procfs
from orchestrator.supervisor.journal import journal_file
from tests.support.local import FAKE_TORCH, STEPPER, Desk, Sight, kill, wait_until

SAVER = (
    STEPPER
    + """
folder = Path(os.environ["ORCH_CHECKPOINT_DIR"])
came = os.environ["ORCH_RESUME_FROM"]
print("from", came.rpartition("/")[2] or "nothing", flush=True)
if came:
    sys.exit()
for number in (10, 20):
    run(10)
    if os.environ["RANK"] == "0":
        (folder / f"step-{number}").mkdir(exist_ok=True)
        (folder / f"step-{number}" / "weights.bin").write_text(str(number))
ledger = folder / "ledger.jsonl"
while not ledger.exists() or ledger.read_text().count('"whole"') < 2:
    run(1)
while (folder.parent / "stays").exists():
    optimizer.step()
    time.sleep(0.02)
sys.exit(3)
"""
)


def _submitted(desk: Desk) -> Sight:
    return desk.submit({**FAKE_TORCH, "train.py": SAVER}, nodes=2, entrypoint="train.py", restart={"max": 0})


def _files(job: Sight) -> dict[str, bytes]:
    folder = job.job.folder
    kept = [path for part in (folder.logs, folder.checkpoints) for path in part.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in kept}


@pytest.mark.parametrize("damage", ["gone", "empty", "without its first line", "torn in its middle"])
def test_a_job_without_its_journal_goes_on_only_from_a_checkpoint_and_overwrites_nothing(
    desk: Desk, damage: str
) -> None:
    job = _submitted(desk)
    assert job.wait()["state"] == "FAILED"
    wait_until(job.job.folder.ended.exists, "the supervisor's last line")
    path, before = job.job.folder.journal, _files(job)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = {"empty": b"", "without its first line": b"".join(lines[1:])}
    path.write_bytes(kept.get(damage, b"".join([*lines[:5], lines[5][:20], b"\n", *lines[6:]])))
    if damage == "gone":
        path.unlink()
    with pytest.raises(
        OrchError, match=r"attempts up to 1, and 2 checkpoints \(the newest: step-20\)"
    ) as told:
        job.job.resume(environ=desk.environ)
    assert f"orch resume {job.job.id} --from CHECKPOINT goes on as attempt 2" in told.value.fix
    assert _files(job) == before and job.job.status()["attempt"] == 1
    with pytest.raises(OrchError):
        job.job.why()

    job.job.resume("step-10", environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED"
    assert [job.log(rank, 2).strip() for rank in (0, 1)] == ["from step-10"] * 2
    after = _files(job)
    assert all(after[name].startswith(data) for name, data in before.items())
    assert [(one.attempt, one.resume and one.resume.path[-7:]) for one in job.news(d.BeginAttempt)] == [
        (1, None),
        (2, "step-10"),
    ]
    assert job.attempts()[0]["ended_why"].startswith("what happened up to attempt 1 is not known: ")


@pytest.mark.parametrize("way", ["resume", "cancel"])
def test_a_supervisor_without_its_journal_does_not_begin_from_nothing_beside_ranks_that_run(
    way: str, desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCH_HOME", desk.environ["ORCH_HOME"])
    job = _submitted(desk)
    (job.job.folder.root / "stays").touch()
    wait_until(lambda: (job.job.folder.checkpoints / "step-20" / "weights.bin").exists(), "a checkpoint")
    ranks, supervisor = job.rank_procs(), job.supervisor()
    job.job.folder.journal.unlink()
    kill(supervisor)
    wait_until(lambda: not procfs.alive(supervisor), "the supervisor's end")
    assert app.run(["status", job.job.id]) == 0
    said = capsys.readouterr().err
    assert "the journal is gone" in said and "--from CHECKPOINT goes on as attempt 2" in said
    assert not job.job.folder.journal.exists() and all(procfs.alive(rank) for rank in ranks.values())

    if way == "cancel":
        job.job.cancel()
        assert job.wait()["state"] == "CANCELLED"
        assert not any(procfs.alive(rank) for rank in ranks.values())
        return
    job.job.resume("step-20", environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED"
    assert not any(procfs.alive(rank) for rank in ranks.values())
    assert [entry.n for entry in journal_file.read(job.job.folder.journal)][:3] == [1, 2, 3]
    assert job.log(0, 2).strip() == "from step-20"
