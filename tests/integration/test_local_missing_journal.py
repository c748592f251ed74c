"""What if a job's journal is lost? Nothing begins from nothing: the job is refused, and its checkpoints are the way on."""

from __future__ import annotations

import os
import re
import signal

import pytest

from orchestrator.cli import app
from orchestrator.core.errors import OrchError
from orchestrator.core.host import procfs
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


def test_missing_journal_refuses_resume_but_new_job_continues(desk: Desk) -> None:
    """A job without its journal is refused, and a new one resumes from its checkpoint."""
    job = _submitted(desk)
    assert job.wait()["state"] == "FAILED"
    wait_until(job.job.folder.ended.exists, "the supervisor's last line")
    path, before = job.job.folder.journal, _files(job)
    lines = path.read_bytes().splitlines(keepends=True)
    damages = {
        "empty": b"",
        "without its first line": b"".join(lines[1:]),
        "torn in its middle": b"".join([*lines[:5], lines[5][:20], b"\n", *lines[6:]]),
        "gone": None,
    }
    for damage, kept in damages.items():
        path.write_bytes(kept or b"")
        if kept is None:
            path.unlink()
        for way in (lambda: job.job.resume(environ=desk.environ), job.job.why):
            with pytest.raises(OrchError) as told:
                way()
            assert f"orch resume it --from a checkpoint in {job.job.folder.checkpoints}" in told.value.fix, damage
        assert _files(job) == before and job.job.status()["attempt"] == 1, damage

    new = _submitted(desk)
    new.job.cancel()
    new.wait()
    wait_until(new.job.folder.ended.exists, "the supervisor's last line")
    new.job.resume(str(job.job.folder.checkpoints / "step-10"), environ=desk.environ)
    assert new.wait()["state"] == "SUCCEEDED"
    assert [new.log(rank, 2).strip() for rank in (0, 1)] == ["from step-10"] * 2
    assert _files(job) == before


def test_missing_journal_never_starts_over_beside_running_ranks(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A supervisor without its journal does not start from scratch beside running ranks."""
    monkeypatch.setenv("ORCH_HOME", desk.environ["ORCH_HOME"])
    job = _submitted(desk)
    (job.job.folder.root / "stays").touch()
    wait_until(lambda: (job.job.folder.checkpoints / "step-20" / "weights.bin").exists(), "a checkpoint")
    ranks, supervisor = job.rank_procs(), job.supervisor()
    job.job.folder.journal.unlink()
    kill(supervisor)
    wait_until(lambda: not procfs.is_alive(supervisor), "the supervisor's end")
    assert app.run(["status", job.job.id]) == 0
    said = capsys.readouterr().err
    assert "the journal is gone" in said and "stop what still runs: kill" in said
    assert not job.job.folder.journal.exists() and all(procfs.is_alive(rank) for rank in ranks.values())
    for pid in re.findall(r"kill (\d+) on", said):
        os.kill(int(pid), signal.SIGTERM)
    wait_until(lambda: not any(map(procfs.is_alive, ranks.values())), "the ranks' end")
