"""Is everything that can be refused refused before a folder exists, and does a resume plan what it should?

No supervisor is started here; a whole submit is tested with real processes in tests/integration/test_cli.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from orchestrator.client.job import Job
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.spec.load import load
from orchestrator.submission import resume, snapshot, supervisor_process
from orchestrator.submission import submit as submission
from orchestrator.submission.inventory import local_inventory
from orchestrator.submission.submit import make_plan, render_scripts, submit
from tests.support import folders, jobs
from tests.support.unprivileged import unprivileged

SPEC = "name: gpt\nnodes: 2\nprocs_per_node: 2\nentrypoint: train.py\n"
UUIDS = ("GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3", "GPU-aadd-4")


def _spec(tmp_path: Path, text: str = SPEC) -> Path:
    (tmp_path / "train.py").write_text("print('hi')\n")
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def _smi(tmp_path: Path, said: str, code: int = 0) -> dict[str, str]:
    """Return an environment whose nvidia-smi says this."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nprintf '{said}'\nexit {code}\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:/usr/bin:/bin"}


LISTED = "".join(f"{number}, {uuid}\\n" for number, uuid in enumerate(UUIDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, (0, 1, 2, 3)), ("", ()), ("-1", ()), ("2", (2,)), ("3, 1", (3, 1)), ("1,-1,2", (1,)), ("2,2", (2,)),
        ("GPU-bbbb-2,GPU-cc", (1, 2)),
    ],
)  # fmt: skip
def test_gpus_are_those_visible_to_cuda(tmp_path: Path, visible: str | None, gpus: tuple[int, ...]) -> None:
    """The GPUs are those that CUDA may see."""
    more = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_inventory({**_smi(tmp_path, LISTED), **more}).gpus == gpus


@pytest.mark.slow
@pytest.mark.parametrize("visible", ["4", "GPU-zz", "GPU-aa", "MIG-1234"])
def test_missing_gpu_is_error_not_cpu_job(tmp_path: Path, visible: str) -> None:
    with pytest.raises(ClusterError, match="is not one of the 4 GPUs") as told:
        local_inventory({**_smi(tmp_path, LISTED), "CUDA_VISIBLE_DEVICES": visible})
    assert told.value.where == f"CUDA_VISIBLE_DEVICES={visible}"


@pytest.mark.slow
def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    assert local_inventory({"PATH": "/nonexistent"}).gpus == ()
    assert local_inventory(_smi(tmp_path, "No devices were found\\n", 6)).gpus == ()


@pytest.mark.slow
def test_failing_nvidia_smi_is_error_not_cpu_job(tmp_path: Path) -> None:
    environ = _smi(tmp_path, "Failed to initialize NVML: Driver/library version mismatch\\n", 18)
    with pytest.raises(ClusterError, match="Driver/library version mismatch"):
        local_inventory(environ)
    assert local_inventory(environ, asks_gpus=False).gpus == ()


@pytest.mark.slow
def test_unstartable_nvidia_smi_is_an_error(tmp_path: Path) -> None:
    """An nvidia-smi that cannot be started is an error."""
    environ = _smi(tmp_path, "")
    (tmp_path / "bin/nvidia-smi").write_bytes(b"\x7fELF not a program")
    with pytest.raises(ClusterError, match="nvidia-smi does not answer"):
        local_inventory(environ)


def test_missing_secrets_are_all_named_together(tmp_path: Path) -> None:
    file = load(_spec(tmp_path, SPEC + "secrets: [HF_TOKEN, WANDB_API_KEY]\n"))
    with pytest.raises(UserError, match="HF_TOKEN, WANDB_API_KEY listed in secrets") as told:
        make_plan(file, {"PATH": ""}, jobs.ID, 0.0)
    assert told.value.where.endswith("job.yaml:5: secrets")


def test_slurm_plan_needs_no_slurm(tmp_path: Path) -> None:
    """A plan for Slurm needs no Slurm and takes the submitter's defaults."""
    environ = {"PATH": "", "SBATCH_ACCOUNT": "lab"}
    plan = make_plan(load(_spec(tmp_path, SPEC + "backend: slurm\n")), environ, jobs.ID, 0.0)
    assert plan.slurm is not None and "--account=lab" in plan.slurm.options and plan.nodes == ()


def test_rendering_changes_nothing(tmp_path: Path) -> None:
    files = render_scripts(_spec(tmp_path), None, ("nodes=3",), {"PATH": "", "ORCH_HOME": str(tmp_path / "home")})
    assert [file.name for file in files] == ["node-0.sh", "node-1.sh", "node-2.sh"]
    assert not (tmp_path / "home").exists()


def test_home_that_is_file_leaves_nothing(tmp_path: Path) -> None:
    """A home folder that is a file leaves nothing behind."""
    (tmp_path / "home").write_text("")
    with pytest.raises(ClusterError, match="the job folder cannot be made") as told:
        submit(load(_spec(tmp_path)), {"PATH": "/usr/bin:/bin", "ORCH_HOME": str(tmp_path / "home")})
    assert "ORCH_HOME" in told.value.fix


def test_unwritable_home_leaves_nothing(tmp_path: Path) -> None:
    """A home folder that cannot be written leaves nothing behind."""
    (tmp_path / "home").mkdir(mode=0o500)
    with unprivileged(tmp_path), pytest.raises(ClusterError, match="the job folder cannot be made"):
        submit(load(_spec(tmp_path)), {"PATH": "/usr/bin:/bin", "ORCH_HOME": str(tmp_path / "home")})


def test_oversized_snapshot_leaves_nothing(tmp_path: Path) -> None:
    """A snapshot over the limit leaves nothing behind."""
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(2_000_000)
    spec = _spec(tmp_path, SPEC + "snapshot: {limit_mb: 1}\n")
    with pytest.raises(UserError, match=r"data\.bin"):
        submit(load(spec), {"PATH": "/usr/bin:/bin", "ORCH_HOME": str(tmp_path / "home")})
    assert not (tmp_path / "home").exists()


def _replan(job: JobDir, overrides: tuple[str, ...], environ: dict[str, str]) -> None:
    resume.replan(job, Job(job).plan(), overrides, environ)


def _argv(job: JobDir) -> list[str]:
    return list(json.loads(job.plan.read_text())["argv"])


def test_resume_with_set_plans_over_submit_overrides(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    job.overrides.write_text(json.dumps(["entrypoint=train.py --lr 7", "restart.max=9"]))
    _replan(job, ("nodes=1",), {"PATH": ""})
    plan = json.loads(job.plan.read_text())
    assert (plan["argv"][1:], plan["limits"]["restarts_max"], len(plan["nodes"])) == (
        ["train.py", "--lr", "7"],
        9,
        1,
    )
    assert json.loads(job.overrides.read_text()) == ["entrypoint=train.py --lr 7", "restart.max=9", "nodes=1"]
    _replan(job, ("restart.max=1",), {"PATH": ""})
    assert json.loads(job.plan.read_text())["limits"]["restarts_max"] == 1
    assert len(json.loads(job.plan.read_text())["nodes"]) == 1
    assert [path.name for path in sorted(job.root.glob("plan.*.json"))] == ["plan.1.json", "plan.2.json"]


def test_resume_renders_scripts_again(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    _replan(job, ("entrypoint=train.py --longer",), {"PATH": ""})
    assert "--longer" in (job.scripts / "node-1.sh").read_text()


def test_resume_does_not_need_secrets_again(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    plan = json.loads(job.plan.read_text())
    job.plan.write_text(json.dumps({**plan, "secrets": ["HF_TOKEN"]}))
    job.spec.write_text(SPEC + "secrets: [HF_TOKEN]\n")
    _replan(job, ("restart.max=1",), {"PATH": ""})
    assert json.loads(job.plan.read_text())["secrets"] == ["HF_TOKEN"]


@pytest.mark.parametrize("change", ["name=other", "secrets=[NEW]", "backend=ssh"])
def test_name_secrets_and_backend_are_fixed_at_resume(tmp_path: Path, change: str) -> None:
    """Name, secrets and backend cannot change at a resume."""
    job = folders.failed(tmp_path)
    before = job.plan.read_bytes()
    changes = ("backend=ssh", "ssh.hosts=[a, b]") if change == "backend=ssh" else (change,)
    with pytest.raises(UserError, match="cannot change"):
        _replan(job, changes, {"PATH": "", "NEW": "x"})
    assert job.plan.read_bytes() == before


def test_resume_reads_jobs_code_not_workdir(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    (job.code / "other.py").write_text("")
    _replan(job, ("entrypoint=other.py",), {"PATH": ""})
    assert _argv(job)[1] == "other.py"
    with pytest.raises(UserError, match=r"no file nope\.py"):
        _replan(job, ("entrypoint=nope.py",), {"PATH": ""})


def test_resume_with_checkpoint_misfit_changes_nothing(tmp_path: Path) -> None:
    """A resume whose checkpoint does not fit the new number of ranks changes nothing."""
    job = folders.failed(tmp_path)
    before = {path: path.read_bytes() for path in job.root.rglob("*") if path.is_file()}

    def fit(world_size: int) -> None:
        raise UserError(f"it does not fit {world_size} ranks", "step-5", "go on with 4")

    with pytest.raises(UserError, match="does not fit 2 ranks"):
        resume.resume(job, Job(job).plan(), 0, ("nodes=1",), {"PATH": ""}, fit)
    assert {path: path.read_bytes() for path in job.root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("damage", ["", "{", "7"])
def test_damaged_overrides_are_an_error(tmp_path: Path, damage: str) -> None:
    job = folders.failed(tmp_path)
    job.overrides.write_text(damage)
    with pytest.raises(ClusterError, match="damaged"):
        _replan(job, ("nodes=1",), {"PATH": ""})


# Over SSH

OVER_SSH = SPEC + "backend: ssh\nssh: {hosts_file: lab.txt, sync: data}\n"


def _over_ssh(tmp_path: Path) -> JobDir:
    """Make the folder of a job over SSH, without starting its supervisor."""
    work = tmp_path / "work"
    work.mkdir()
    path = _spec(work, OVER_SSH)
    (work / "lab.txt").write_text("gpu[1-3] slots=4 labels=a\ngpu4 slots=1\n")
    (work / ".gitignore").write_text("data\n")
    (work / "data").mkdir()
    (work / "data" / "corpus").write_text("text")
    subprocess.run(["git", "init", "-q", work], check=True)
    file = load(path)
    made = make_plan(file, {"PATH": ""}, jobs.ID, jobs.BEGAN_S)
    code = snapshot.plan_snapshot(file.workdir, 500, tmp_path / "home")
    code = snapshot.add_synced(code, ["data"], 500, tmp_path / "home")
    return submission._make_folder(tmp_path / "home", file, made, code, {"PATH": "/usr/bin:/bin"}, ())


@pytest.mark.slow
def test_ssh_job_has_code_archive_with_synced_files(tmp_path: Path) -> None:
    """A job over SSH has its code as an archive with what sync names."""
    job = _over_ssh(tmp_path)
    with tarfile.open(job.archive) as archive:
        assert archive.getnames() == [".gitignore", "data/corpus", "job.yaml", "lab.txt", "train.py"]
    assert (job.code / "data").is_symlink() and (job.code / "train.py").exists()
    assert [node.name for node in Job(job).plan().nodes] == ["gpu1", "gpu2", "gpu3"]


@pytest.mark.slow
def test_ssh_resume_reads_hosts_of_submit(tmp_path: Path) -> None:
    job = _over_ssh(tmp_path)
    shutil.rmtree(tmp_path / "work")
    _replan(job, ("nodes=1",), {"PATH": ""})
    assert [node.name for node in Job(job).plan().nodes] == ["gpu1", "gpu2", "gpu3"]
    other = tmp_path / "other.txt"
    other.write_text("z1\nz2\n")
    _replan(job, (f"ssh.hosts_file={other}",), {"PATH": ""})
    other.unlink()
    _replan(job, ("ssh.hosts=z2",), {"PATH": ""})
    assert [node.name for node in Job(job).plan().nodes] == ["z2"]


def test_missing_sync_path_leaves_nothing(tmp_path: Path) -> None:
    spec = _spec(tmp_path, SPEC + "backend: ssh\nssh: {hosts: 'a b', sync: nope}\n")
    with pytest.raises(UserError, match="there is no nope"):
        submit(load(spec), {"PATH": "/usr/bin:/bin", "ORCH_HOME": str(tmp_path / "home")})
    assert not (tmp_path / "home").exists()


def test_slurm_example_becomes_batch_script(tmp_path: Path) -> None:
    spec = Path(submission.__file__).resolve().parents[2] / "jobs" / "slurm.yaml"
    on_gpus, on_cpus = (
        render_scripts(spec, None, changes, {"PATH": "", "ORCH_HOME": str(tmp_path)})[0].text
        for changes in ((), ("gpus_per_node=null", "procs_per_node=2"))
    )
    assert "--nodes=3" in on_gpus and "--gpus-per-node=2" in on_gpus and "--time=00:30:00" in on_gpus
    assert "--gpus-per-node" not in on_cpus and "--cpus-per-task=2" in on_cpus


@pytest.mark.slow
def test_failed_supervisor_start_leaves_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed supervisor start leaves no job; the supervisor got only the environment that it needs."""
    job = folders.make(tmp_path, jobs.submitted())
    job.bundle.write_text("import os, sys; sys.exit(' '.join(sorted(os.environ)))")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    with pytest.raises(ClusterError, match="the supervisor did not start: ") as told:
        submission._start_job(job)
    assert set(told.value.what.split()[6:]) <= {*supervisor_process.SUPERVISOR_ENV, "ORCH_TAG", "LC_CTYPE"}
    assert not job.root.exists() and Path(told.value.where).exists()


# A webhook's address

HOOK = "https://hooks.example.com/services/t0ken-of-mine"
SHOWN = "https://hooks.example.com/***"


def _holding(job: JobDir, text: str) -> list[str]:
    files = [path for path in job.root.rglob("*") if path.is_file() and path.name != job.bundle.name]
    return sorted(str(path.relative_to(job.root)) for path in files if text.encode() in path.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("by_set", [False, True])
def test_webhook_address_is_kept_only_with_secrets(tmp_path: Path, by_set: bool) -> None:
    said = (f"notify.url={HOOK}",) if by_set else ()
    (tmp_path / "work").mkdir()
    spec = _spec(tmp_path / "work", SPEC if by_set else f"{SPEC}notify: {{url: '{HOOK}'}}\n")
    file, environ = load(spec, overrides=said), {"PATH": "/usr/bin:/bin"}
    made = make_plan(file, environ, jobs.ID, 0.0)
    code = snapshot.plan_snapshot(file.workdir, 1, tmp_path / "home")
    job = submission._make_folder(tmp_path / "home", file, made, code, environ, said)
    given = [] if by_set else ["code/job.yaml", "job.yaml"]  # as the user wrote it
    assert _holding(job, "t0ken") == sorted([*given, "secrets/webhook"])
    own = [job.webhook, *([] if by_set else [job.spec, job.code / "job.yaml"])]
    assert {path.stat().st_mode & 0o077 for path in own} == {0}
    assert json.loads(job.plan.read_text())["notify"]["url"] == SHOWN
    assert Job(job).mask().apply(f"POST {HOOK}: services/t0ken-of-mine") == "POST https://***: ***"

    _replan(job, ("restart.max=1",), environ)
    assert job.webhook.read_text() == HOOK
    _replan(job, (f"notify.url={HOOK}-2",), environ)
    assert job.webhook.read_text() == f"{HOOK}-2" and job.webhook.stat().st_mode & 0o077 == 0
    _replan(job, ("restart.max=2",), environ)
    assert job.webhook.read_text() == f"{HOOK}-2"
    assert _holding(job, "t0ken") == sorted([*given, "secrets/webhook"])
