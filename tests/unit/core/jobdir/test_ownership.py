"""Whose code runs: nothing of a job folder that is not the caller's alone is executed, loaded or written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.backends.ssh.launch import CodeArchive
from orchestrator.cli import app
from orchestrator.client import slurm_status
from orchestrator.client.job import Job
from orchestrator.core.errors import OrchError, UserError
from orchestrator.core.jobdir import home, ownership, requests, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.spec.load import load
from orchestrator.submission import bundle, submit, supervisor_process
from orchestrator.submission.supervisor_process import restart_supervisor
from tests.support import fake_host, fake_slurm, folders, jobs
from tests.support.fake_host import FakeHost
from tests.support.fake_slurm import FakeSlurm

RUNNING = [*jobs.submitted(), *jobs.running(1, 1.0, 7)]
MALLORY = 12345
RUNS = "import pathlib, sys; pathlib.Path({!r}).touch(); sys.exit(0)\n"

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def _give(*paths: Path) -> None:
    for path in paths:
        for one in (path, *path.rglob("*")) if path.is_dir() and not path.is_symlink() else (path,):
            os.chown(one, MALLORY, MALLORY, follow_symlinks=False)


def _link(path: Path, goal: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(goal)


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """Return a running job of another user in a shared job home, made to pass for one of ours; its code would leave
    the file `ran`."""
    mine = folders.make(tmp_path / "mine", RUNNING)
    job = folders.make(tmp_path / "home", RUNNING)
    job.bundle.write_text(RUNS.format(str(tmp_path / "ran")))
    for folder in (job.root, job.requests, job.scripts):
        folder.chmod(0o777)
    (job.root.parent).chmod(0o1777)
    _give(job.root)
    for name in ("plan.json", "job.yaml", "orch.pyz"):
        path = job.root / name
        if name != "orch.pyz":
            _link(path, mine.root / name)
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_COLOR", "1")
    return job


def _state(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


LOOKS = (
    "status",
    "status --all",
    "why",
    "logs",
    "checkpoints",
    "collect",
    "clean --older-than 1s --yes",
)
ACTS = ("cancel", "restart", "resume", "stacks", "clean JOB")


@root_only
@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
@pytest.mark.parametrize("verb", [*LOOKS, *ACTS])
def test_no_verb_runs_or_writes_in_others_job(
    theirs: JobDir, tmp_path: Path, verb: str, ended: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """No verb runs or writes anything in another user's job."""
    if ended:
        done = folders.succeeded(tmp_path / "other")
        shutil.copy(done.state, theirs.state)
        theirs.ended.touch()
        theirs.archive.touch()
        os.utime(theirs.ended, (1, 1))
        _give(theirs.ended, theirs.archive, theirs.state)
    before = _state(theirs.root)
    code = app.run(verb.replace("JOB", theirs.id).split())
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert not (tmp_path / "ran").exists()
    assert _state(theirs.root) == before
    assert code == (2 if verb in ACTS else 0), said
    if verb in ACTS and not (ended and verb in ("cancel", "restart", "stacks")):
        assert f"this job belongs to user {MALLORY}" in said.err


@root_only
def test_slurm_state_of_others_job_is_not_applied(theirs: JobDir) -> None:
    """Slurm's state for another user's job is neither applied nor stored."""
    theirs.slurm.write_text('["7"]')
    before = _state(theirs.root)
    slurm_status.SlurmSource(theirs).settle()
    with pytest.raises(UserError, match="this job belongs to user"):
        slurm_status.SlurmSource(theirs).cancel()
    assert _state(theirs.root) == before


def _unsafe_root(job: JobDir) -> None:
    job.root.chmod(0o775)


def _linked_root(job: JobDir) -> None:
    elsewhere = job.root.parent.parent / "elsewhere"
    job.root.rename(elsewhere)
    job.root.symlink_to(elsewhere)


def _journal_is_a_pipe(job: JobDir) -> None:
    job.journal.unlink()
    os.mkfifo(job.journal)


def _code_is_a_link(job: JobDir) -> None:
    shutil.rmtree(job.code)
    job.code.symlink_to("/")


def _give_sticky(folder: Path) -> None:
    folder.chmod(0o1777)
    os.chown(folder, MALLORY, MALLORY)


def _home_link_of_another(job: JobDir) -> None:
    place = job.root.parent.parent
    place.rename(place.with_name("real"))
    place.symlink_to("real")
    _give(place)


UNSAFE: dict[str, tuple[Callable[[JobDir], object], str]] = {
    "the folder is a link": (_linked_root, "is a symbolic link"),
    "the folder is open to a group": (_unsafe_root, "other users can write to it (mode 775)"),
    "the folder is another's": (lambda job: _give(job.root), f"this job belongs to user {MALLORY}"),
    "jobs is open to all": (lambda job: job.root.parent.chmod(0o777), "chmod +t"),
    "the home is open to all": (lambda job: job.root.parent.parent.chmod(0o777), "chmod +t"),
    "jobs is another's": (lambda job: os.chown(job.root.parent, MALLORY, -1), "who can replace its content"),
    "jobs is another's, though sticky": (lambda job: _give_sticky(job.root.parent), "who can replace its content"),
    "the home is another's, though sticky": (lambda job: _give_sticky(job.root.parent.parent), "who can replace"),
    "the home is another's link": (_home_link_of_another, "who can lead it elsewhere"),
    "the bundle is a link": (lambda job: _link(job.bundle, job.plan), "orch.pyz: it is a symbolic link"),
    "the bundle is another's": (lambda job: _give(job.bundle), f"orch.pyz: it belongs to user {MALLORY}"),
    "the bundle is open to all": (lambda job: job.bundle.chmod(0o666), "orch.pyz: other users can write"),
    "the plan is a link": (lambda job: _link(job.plan, job.spec), "plan.json: it is a symbolic link"),
    "the journal is a link": (lambda job: _link(job.journal, job.spec), "journal.jsonl: it is a symbolic link"),
    "the journal is a pipe": (_journal_is_a_pipe, "neither a file nor a folder"),
    "the token is another's": (lambda job: _give(job.secrets / "token"), f"token: it belongs to user {MALLORY}"),
    "a script is open to all": (lambda job: (job.scripts / "n.sh").chmod(0o777), "n.sh: other users can write"),
    "the scripts are open to all": (lambda job: job.scripts.chmod(0o777), "scripts: other users can write"),
    "code is a link": (_code_is_a_link, "code: it is a symbolic link"),
}  # fmt: skip


@root_only
@pytest.mark.slow
@pytest.mark.parametrize("name", UNSAFE)
def test_no_supervisor_starts_in_folder_others_could_change(tmp_path: Path, name: str) -> None:
    """No supervisor is started and nothing requested where another user could have changed files."""
    job = folders.make(tmp_path / "home", RUNNING)
    job.bundle.write_text(RUNS.format(str(tmp_path / "ran")))
    (job.secrets / "token").write_text("f" * 64)
    (job.scripts / "n.sh").touch()
    change, words = UNSAFE[name]
    change(job)
    with pytest.raises(UserError) as told:
        supervisor_process.start_supervisor(job)
    assert words in str(told.value) and told.value.fix
    assert revive_says(job) in ("", str(told.value))
    assert not (tmp_path / "ran").exists()
    if ownership.find_fault(job.root):
        with pytest.raises(OrchError):
            requests.send(job.requests, "cancel")


def revive_says(job: JobDir) -> str:
    """Return what a revival ends with: nothing for another's job, else why not."""
    try:
        return restart_supervisor(job)
    except UserError as err:
        return str(err)


def test_sticky_shared_home_and_own_links_are_accepted(tmp_path: Path) -> None:
    """A shared sticky home folder and the user's own links are accepted."""
    job = folders.make(tmp_path / "home", RUNNING)
    for folder in (job.root.parent, job.root.parent.parent):
        folder.chmod(0o1777)
    (tmp_path / "link").symlink_to("home")
    job.checkpoints.rmdir()
    job.checkpoints.symlink_to(tmp_path)
    home.require_own_job(job)
    home.require_own_job(JobDir(tmp_path / "link" / "jobs" / job.id))


@root_only
def test_root_is_trusted_but_third_user_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of root in a user's job are trusted, and those of a third user are not."""
    job = folders.make(tmp_path / "home", RUNNING)
    _give(job.root)
    os.chown(job.journal, 0, 0)
    monkeypatch.setattr(os, "geteuid", lambda: MALLORY)
    assert ownership.find_fault_within(job.root) is None
    os.chown(job.journal, MALLORY + 1, MALLORY)
    found = ownership.find_fault_within(job.root)
    assert found and found.where == str(job.journal) and str(MALLORY + 1) in found.what


def test_cancel_without_journal_writes_nothing_others_can_change(tmp_path: Path) -> None:
    """A cancel of a job without a journal writes nothing where others can write."""
    job = folders.make(tmp_path / "home", RUNNING)
    job.journal.write_text("")
    job.root.chmod(0o777)
    before = _state(job.root)
    with pytest.raises(UserError, match="other users can write to it"):
        Job(job).cancel()
    assert _state(job.root) == before


@pytest.mark.slow
def test_slurm_state_is_not_stored_where_others_write(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = fake_slurm.job(tmp_path, "7")
    job.root.chmod(0o777)
    before = _state(job.root)
    slurm.queue(f"{fake_slurm.RUNNING}|/nfs/jobs/{job.id}")
    assert status_file.to_json(Job(job).source.status())["queue"]["state"] == "RUNNING"
    slurm.queue(f"{fake_slurm.FAILED}|/nfs/jobs/{job.id}")
    slurm_status.QUEUE.invalidate()
    with pytest.raises(UserError, match="other users can write to it"):
        slurm_status.SlurmSource(job).settle()
    assert _state(job.root) == before


@root_only
def test_submit_into_home_others_can_change_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "home"
    (place / "jobs").mkdir(parents=True)
    (place / "jobs").chmod(0o777)
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text("name: gpt\nprocs_per_node: 1\nentrypoint: train.py\n")
    with pytest.raises(UserError, match="other users can write to it"):
        submit.submit(load(tmp_path / "job.yaml"), {"ORCH_HOME": str(place), "PATH": os.defpath})
    assert list((place / "jobs").iterdir()) == []


@pytest.mark.slow
@root_only
def test_foreign_bundle_in_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that another user has put into the cache is not used."""
    package = tmp_path / "package"
    shutil.copytree(bundle.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__pycache__").write_text("no folder, so that the cache of the home is used")
    monkeypatch.setattr(bundle, "PACKAGE", package)
    right = bundle.build(tmp_path)
    (cached,) = (tmp_path / "cache").iterdir()
    mark = cached.read_bytes().partition(b"\n")[0].split()[0]
    cached.write_bytes(mark + b" " + bundle.sha256(b"evil").encode() + b"\nevil")
    _give(cached)
    assert bundle.build(tmp_path) == right
    _give(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o777)
    cached.unlink()
    assert bundle.build(tmp_path) == right and list((tmp_path / "cache").iterdir()) == []


def test_log_outside_folder_or_endless_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log that leads out of the folder or never ends is not shown."""
    job = folders.failed(tmp_path)
    (tmp_path / "private").write_text("my private key\n")
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    log = job.rank_log(1, 1)
    _link(log, tmp_path / "private")
    assert app.run(["logs"]) == 3
    assert "my private key" not in (said := capsys.readouterr()).out and str(log) in said.err
    log.unlink()
    os.mkfifo(log)
    assert app.run(["logs", "--tail", "3"]) in (0, 3)
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(OSError) as told:
        os.close(ownership.open_inside(tmp_path / "nothing"))
    assert told.value.errno == errno.ENOENT


# On hosts


@root_only
@pytest.mark.slow
@pytest.mark.parametrize("name", ["another's folder", "a link", "another's bundle", "a folder open to all"])
def test_agent_is_not_installed_in_folder_of_others(host: FakeHost, code: CodeArchive, name: str) -> None:
    """An agent is not installed in a folder that another user has prepared."""
    root = host.job.root
    root.parent.mkdir(parents=True)
    if name == "a link":
        root.symlink_to("/tmp")
    else:
        root.mkdir()
        host.job.bundle.touch()
    match name:
        case "another's folder":
            _give(root)
        case "another's bundle":
            _give(host.job.bundle)
        case "a folder open to all":
            root.chmod(0o777)
    failure = fake_host.failure(host, code)
    assert failure.stage == "folder" and str(root) in failure.reason and failure.fix
    assert fake_host.keepers(host.home) == []
    assert not host.job.code.exists() and not (root / "nodes").exists()
