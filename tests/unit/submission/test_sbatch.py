"""Does a job get into Slurm's queue whole, or not at all, with a word on what is wrong? sbatch is a small script here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.client.job import Job
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.spec.load import load
from orchestrator.submission import resume, sbatch, submit
from tests.support import fake_sbatch
from tests.support.fake_sbatch import FakeSbatch

pytestmark = pytest.mark.slow

SPEC = """name: gpt
backend: slurm
nodes: 2
procs_per_node: 2
entrypoint: train.py
slurm:
  partition: gpu
  account: lab
  extra: ["--nodelist=n[1-2]", --licenses=foo]
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSbatch:
    """Slurm's commands; nobody waits between tries."""
    monkeypatch.setattr(sbatch, "PAUSE_S", 0.0)
    return fake_sbatch.make(tmp_path / "bin")


def _submit(tmp_path: Path, slurm: FakeSbatch, text: str = SPEC, **environ: str) -> JobDir:
    (tmp_path / "train.py").write_text("print('hi')\n")
    spec = tmp_path / "job.yaml"
    spec.write_text(text)
    home = str(tmp_path / "home")
    return submit.submit(load(spec), {**slurm.environ, "ORCH_HOME": home, **environ})


def _refusal(tmp_path: Path, slurm: FakeSbatch, said: str) -> OrchError:
    slurm.answer("", f"sbatch: error: {said}", 1)
    with pytest.raises(OrchError) as told:
        _submit(tmp_path, slurm)
    assert list((tmp_path / "home" / "jobs").iterdir()) == [], "and no job is left behind"
    return told.value


def test_submit_passes_script_to_sbatch_and_keeps_id(tmp_path: Path, slurm: FakeSbatch) -> None:
    job = _submit(tmp_path, slurm)
    assert json.loads(job.slurm.read_text()) == ["7"]
    assert slurm.seen("argv") == ["--parsable", str(job.scripts / "slurm.sh")]
    assert sorted(path.name for path in job.scripts.iterdir()) == ["agent.sh", "slurm.sh"]
    assert not job.supervisor_log.exists() and not job.endpoint.exists()


def test_submit_inside_job_passes_none_of_its_variables(tmp_path: Path, slurm: FakeSbatch) -> None:
    around = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8", "SBATCH_NO_REQUEUE": "1", "SLURM_CONF": "/etc/s.conf"}
    job = _submit(tmp_path, slurm, **around, HF_HOME="/data/hf", TMPDIR="/tmp")
    given = {line.partition("=")[0] for line in slurm.seen("env")} - {"PWD", "SHLVL", "_", "OLDPWD"}
    assert given == {"PATH", "HOME", "SLURM_CONF", "TMPDIR"}
    assert json.loads((job.secrets / "environment.json").read_text())["HF_HOME"] == "/data/hf"


def test_sbatch_refusal_is_user_error_verbatim(tmp_path: Path, slurm: FakeSbatch) -> None:
    """A refusal by sbatch is the user's error in sbatch's own words."""
    said = "Batch job submission failed: Invalid partition name specified"
    err = _refusal(tmp_path, slurm, said)
    assert isinstance(err, UserError) and err.where.endswith("job.yaml:6: slurm")
    assert err.what == f"sbatch refuses the job: {said}" and err.fix
    assert slurm.calls == 1


def test_job_with_unwritable_id_is_cancelled_again(tmp_path: Path, slurm: FakeSbatch) -> None:
    """A job whose ID cannot be written is taken out of the queue again."""
    (slurm.folder / "say").write_text("mkdir ${2%/scripts/*}/slurm.json; echo Submitted batch job 7\n")
    with pytest.raises(ClusterError, match="cannot be written"):
        _submit(tmp_path, slurm)
    assert slurm.seen("scancel.told") == ["7"]
    assert list((tmp_path / "home" / "jobs").iterdir()) == []


def test_authentication_failure_is_cluster_error(tmp_path: Path, slurm: FakeSbatch) -> None:
    """A Slurm that rejects the credential is the cluster's error."""
    assert isinstance(_refusal(tmp_path, slurm, "Invalid authentication credential"), ClusterError)


@pytest.mark.parametrize(
    "answer", ["12", "12;east", "Submitted batch job 12", "Submitted batch job 12 on cluster east"]
)
def test_id_is_found_in_sbatchs_own_line(tmp_path: Path, slurm: FakeSbatch, answer: str) -> None:
    slurm.answer(f"Hint: your job 7 of yesterday used little of its memory\n{answer}\njob 3 may be next")
    assert json.loads(_submit(tmp_path, slurm).slurm.read_text()) == ["12"]


@pytest.mark.parametrize(
    "words", ["job_submit plugin", "ask for your credential", "the scheduler timed out on such jobs"]
)
def test_site_messages_do_not_classify_refusal(tmp_path: Path, slurm: FakeSbatch, words: str) -> None:
    """The messages of a site do not tell which kind of refusal it is."""
    err = _refusal(
        tmp_path,
        slurm,
        f"{words}: every job here must name its --time\nsbatch: error: Batch job submission failed: Unspecified error",
    )
    assert isinstance(err, UserError) and words in err.what and slurm.calls == 1


def test_briefly_unavailable_controller_is_retried(tmp_path: Path, slurm: FakeSbatch) -> None:
    """A controller that is unavailable for a moment is asked again."""
    away = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    slurm.answer("", away, 1, call=1)
    slurm.answer("", "sbatch: error: Socket timed out on send/recv operation", 1, call=2)
    assert json.loads(_submit(tmp_path, slurm).slurm.read_text()) == ["7"] and slurm.calls == 3


def test_unavailable_controller_is_cluster_error(tmp_path: Path, slurm: FakeSbatch) -> None:
    err = _refusal(tmp_path, slurm, "Unable to contact slurm controller (connect failure)")
    assert isinstance(err, ClusterError) and "scontrol ping" in err.fix and slurm.calls == sbatch.TRIES_MAX


def test_hanging_sbatch_times_out(tmp_path: Path, slurm: FakeSbatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that hangs is given up."""
    monkeypatch.setattr(sbatch, "COMMAND_S_MAX", 0.2)
    (slurm.folder / "say").write_text("exec sleep 20\n")
    with pytest.raises(ClusterError, match="gave no answer within"):
        _submit(tmp_path, slurm)
    assert list((tmp_path / "home" / "jobs").iterdir()) == []


def test_sbatch_without_id_is_cluster_error(tmp_path: Path, slurm: FakeSbatch) -> None:
    slurm.answer("thanks")
    with pytest.raises(ClusterError, match="printed no job id: thanks"):
        _submit(tmp_path, slurm)


def test_missing_slurm_refuses_submit(tmp_path: Path, slurm: FakeSbatch) -> None:
    """Without Slurm there is nothing to submit to."""
    (slurm.folder / "sbatch").unlink()
    with pytest.raises(ClusterError, match="not found on this machine: sbatch") as told:
        _submit(tmp_path, slurm, PATH=str(slurm.folder))
    assert told.value.where.endswith("job.yaml:2: backend") and not (tmp_path / "home").exists()


def _ended(tmp_path: Path, slurm: FakeSbatch) -> JobDir:
    job = _submit(tmp_path, slurm)
    job.ended.touch()
    job.state.write_text("{}")
    slurm.answer("Submitted batch job 9")
    return job


def test_resume_requeues_job_and_writes_id_last(tmp_path: Path, slurm: FakeSbatch) -> None:
    """A resume queues the job again and writes the ID last."""
    job, fitted = _ended(tmp_path, slurm), list[int]()
    resume.resume(job, Job(job).plan(), 3, ("nodes=1",), slurm.environ, fitted.append)
    assert json.loads(job.slurm.read_text()) == ["7", "9"]
    asked = json.loads(next(job.requests.iterdir()).read_text())
    assert (asked["ask"], asked["save"], fitted) == ("resume", "3", [2])
    assert not job.ended.exists() and not job.state.exists()
    assert "--nodes=1" in (job.scripts / "slurm.sh").read_text() and slurm.calls == 2


def test_resume_refused_by_sbatch_changes_nothing(tmp_path: Path, slurm: FakeSbatch) -> None:
    job = _ended(tmp_path, slurm)
    before = {path: path.read_bytes() for path in sorted(job.root.rglob("*")) if path.is_file()}
    slurm.answer("", "sbatch: error: Batch job submission failed: Invalid partition name specified", 1)
    with pytest.raises(UserError, match="Invalid partition"):
        resume.resume(job, Job(job).plan(), 0, ("nodes=1", "slurm.partition=nope"), slurm.environ, print)
    after = {path: path.read_bytes() for path in sorted(job.root.rglob("*")) if path.is_file()}
    assert after == before


def test_refused_check_is_reported_like_submit(slurm: FakeSbatch) -> None:
    slurm.answer("", "allocation failure: Memory specification can not be satisfied", 1)
    with pytest.raises(UserError, match="Memory specification can not be satisfied") as told:
        sbatch.test_only("#!/bin/sh\n#SBATCH --mem=900G\n", slurm.environ, lambda key: f"job.yaml:1: {key}")
    assert told.value.where == "job.yaml:1: slurm" and "sinfo" in told.value.fix


def test_check_shows_sbatch_verdict_on_job(tmp_path: Path, slurm: FakeSbatch) -> None:
    slurm.answer("", "sbatch: Job 8 to start at 2026-11-21T06:35:43 using 4 processors on nodes n[1-2]")
    assert sbatch.test_only("#!/bin/sh\n", slurm.environ, str).startswith("Job 8 to start at")
    assert slurm.seen("argv") == ["--test-only"] and slurm.seen("stdin") == ["#!/bin/sh"]
