"""Is a job resumed by one command at a time, and are the others told so?"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.brain.model import events as e
from orchestrator.client.job import Job
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import locks, requests
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.journal.journal_file import Journal
from orchestrator.submission import resume as resume_module
from tests.support import folders
from tests.support.fake_slurm import FakeSlurm, installed, job, tell

PENDING = "8|PENDING|2026-11-21T06:26:01|2||Resources"
AT_ONCE = 4

SBATCH = """#!/bin/sh
echo sbatch >>{folder}/calls
sleep 0.3
echo Submitted batch job 8
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Return a Slurm that takes its time to take a job, as number 8."""
    there = installed(tmp_path, monkeypatch)
    for name, text in (("sbatch", SBATCH.format(folder=there.folder)), ("srun", "#!/bin/sh\n")):
        (there.folder / name).write_text(text)
        (there.folder / name).chmod(0o755)
    there.queue(PENDING)
    return there


@pytest.mark.slow
def test_only_one_of_concurrent_resumes_succeeds(slurm: FakeSlurm, tmp_path: Path) -> None:
    """One of several concurrent resumes succeeds, and the others are refused."""
    folder = job(tmp_path, "7")
    (folder.scripts / "slurm.sh").write_text("#!/bin/sh\n")
    Journal(folder.journal, "boot", 0).write(e.SupervisorStarted(0.0, 1))
    tell(folder, "FAILED")
    folder.ended.touch()

    def resume(_: int) -> OrchError | None:
        try:
            Job(folder).resume()
        except OrchError as err:
            return err
        return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends = list(pool.map(resume, range(AT_ONCE)))
    refused = [err for err in ends if err is not None]
    assert len(refused) == AT_ONCE - 1
    assert all(isinstance(err, UserError) and err.what == "the job is QUEUED" for err in refused)
    assert (slurm.calls("sbatch"), json.loads(folder.slurm.read_text())) == (["sbatch"], ["7", "8"])


def test_resume_waiting_too_long_for_another_is_refused(tmp_path: Path) -> None:
    folder = folders.failed(tmp_path)
    with locks.hold(folder.resume_lock, 0.0) as mine, locks.hold(folder.resume_lock, 0.0) as other:
        assert (mine, other) == (True, False)
    with locks.hold(folder.resume_lock, 0.0) as later:
        assert later


def test_resume_with_failing_supervisor_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.failed(tmp_path)
    folder.scripts.mkdir(exist_ok=True)
    folder.cleaned_hosts.write_text("[]")
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}

    def refuse(_: JobDir) -> None:
        raise ClusterError("the supervisor did not start", "here", "see there")

    monkeypatch.setattr(resume_module, "start_supervisor", refuse)
    with pytest.raises(ClusterError, match="did not start"):
        resume_module.resume(folder, Job(folder).plan(), 0, (), {}, print)
    assert list(requests.read_after(folder.requests, 0)) == []
    after = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    assert {path: data for path, data in after.items() if path.parent != folder.requests} == before
    assert folder.ended.exists() and requests.send(folder.requests, "resume", save="0") == 2


def test_resume_may_turn_checkpoints_in_memory_on(tmp_path: Path) -> None:
    """A resume that turns checkpoints in memory on gives the agents their certificate, and keeps the job's own."""
    folder = folders.failed(tmp_path)
    old, key = Job(folder).plan(), folder.secrets / "key.pem"
    before = key.read_bytes() if key.exists() else b""
    memory = ("checkpoint.keep=3", "checkpoint.memory=64M", f"checkpoint.memory_dir={tmp_path}")
    new = resume_module.replan(folder, old, memory, {"PATH": "/usr/bin:/bin"})
    assert (old.memory_bytes, new.memory_bytes, new.memory_dir) == (0, 64 * 10**6, str(tmp_path))
    assert {path.name for path in folder.secrets.glob("peer*")} == {"peer_certificate.pem", "peer_key.pem"}
    assert (key.read_bytes() if key.exists() else b"") == before
    with pytest.raises(UserError, match=r"checkpoint\.memory is 900000\.0 GB"):
        resume_module.replan(folder, new, (*memory, "checkpoint.memory=900T"), {"PATH": "/usr/bin:/bin"})
