"""Is what could never run refused at submit and at resume, with its place and its remedy, and is nothing else?"""

from __future__ import annotations

import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.client.job import Job
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.spec.load import load
from orchestrator.submission import refusals, submit
from orchestrator.submission.snapshot import Snapshot
from tests.support import folders, jobs

SPEC = "name: gpt\nprocs_per_node: 2\n"


def _submit(tmp_path: Path, *overrides: str, entry: str = "entrypoint: train.py") -> None:
    """Submit a job; it must be refused, and leave nothing in its home."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(f"{SPEC}{entry}\n")
    home = tmp_path / "home"
    environ = {"ORCH_HOME": str(home), "PATH": "/usr/bin:/bin"}
    try:
        submit.submit(load(tmp_path / "job.yaml", overrides=overrides), environ)
    finally:
        assert not home.exists()


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ("", ("accelerate.config_file=fdsp.yaml",), r"no file fdsp\.yaml in .*; did you mean fsdp\.yaml\?"),
        ("- a\n", (), r"fsdp\.yaml is not a configuration of Accelerate"),
        ("a: [\n", (), r"fsdp\.yaml is not a configuration of Accelerate: while parsing"),
        ("a: 1\n", ("backend=ssh", "ssh.hosts=h", "accelerate.config_file=/etc/hostname"), r"/etc/hostname lies outside workdir"),
    ],
)  # fmt: skip
def test_a_configuration_of_accelerate_that_cannot_be_is_refused_at_submit(
    tmp_path: Path, config: str, overrides: tuple[str, ...], said: str
) -> None:
    (tmp_path / "fsdp.yaml").write_text(config)
    with pytest.raises(UserError, match=said) as told:
        _submit(tmp_path, "accelerate.config_file=fsdp.yaml", *overrides)
    assert told.value.fix
    assert "accelerate.config_file" in told.value.where


def test_a_configuration_of_accelerate_that_git_ignores_does_not_reach_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "fsdp.yaml").write_text("num_processes: 2\n")
    (tmp_path / "job.yaml").write_text(
        f"{SPEC}entrypoint: train.py\naccelerate: {{config_file: fsdp.yaml}}\n"
    )
    file, code = load(tmp_path / "job.yaml"), Snapshot(tmp_path, (Path("train.py"),), (Path("fsdp.yaml"),), 0)
    with pytest.raises(UserError, match=r"git ignores fsdp\.yaml, so it is not copied to the hosts"):
        refusals.refuse_uncopied(file, code)
    refusals.refuse_uncopied(file, replace(code, synced=(Path("fsdp.yaml"),)))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("python=/no/such/python",), r"--set python=/no/such/python: there is no /no/such/python on this"),
        (("python=pithon3",), r"--set python=pithon3: there is no pithon3 on this"),
        (("python=train.py",), r"there is no train\.py on this"),  # it is no program
        (("entrypoint={command: [nosuch, -x]}",), r"--set entrypoint=.*: there is no nosuch on this"),
        (("rendezvous.interface=eth99",), r"--set rendezvous\.interface=eth99: there is no interface eth99; there are .*lo"),
    ],
)  # fmt: skip
def test_what_this_machine_lacks_is_refused_at_submit(
    tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said) as told:
        _submit(tmp_path, *overrides)
    assert told.value.fix


def test_what_setup_lines_may_bring_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(
        f"{SPEC}entrypoint: train.py\npython: venv/bin/python\nsetup: make venv\n"
    )
    file = load(tmp_path / "job.yaml")
    refusals.refuse_missing(file, submit.plan_for(file, {}, "gpt-1", 0.0), {})


@pytest.mark.parametrize(
    ("named", "is_missing"),
    [
        (None, False), ("eth0", False), ("eth", False), ("=eth0", False), ("ib0,eth0", False), ("^docker", False),
        ("eth9", True), ("ib", True), ("ETH0", True),
    ],
)  # fmt: skip
def test_an_interface_is_named_as_nccl_takes_it(named: str | None, is_missing: bool) -> None:
    assert bool(refusals.missing_interface(named, ["lo", "eth0"])) == is_missing


def _ended(tmp_path: Path) -> JobDir:
    job = folders.failed(tmp_path / "home")
    for name in ("good.pt", "torn.pt"):
        with zipfile.ZipFile(job.checkpoints / name, "w") as archive:
            archive.writestr("data", "x" * 1000)
    (job.checkpoints / "torn.pt").write_bytes((job.checkpoints / "torn.pt").read_bytes()[:500])
    (job.checkpoints / "empty.pt").touch()
    (job.checkpoints / "folder").mkdir()
    (job.checkpoints / "notes.txt").write_text("x")
    (job.checkpoints / "step-5").write_text("x")
    (tmp_path / "other.ckpt").write_text("x")
    return job


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("nosuch", "there is no such checkpoint"), ("x" * 5000, "there is no such checkpoint"), (".", "checkpoints are in it"),
        ("..", "checkpoints are in it"), ("/", "checkpoints are in it"), ("empty.pt", "holds nothing"),
        ("folder", "holds nothing"), ("/dev/null", "holds nothing"), ("notes.txt", "has an ending of checkpoints"),
        (sys.executable, "has an ending of checkpoints"), ("torn.pt", "was cut off"),
    ],
)  # fmt: skip
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, named: str, said: str) -> None:
    job = _ended(tmp_path)
    before = sorted(job.root.rglob("*"))
    with pytest.raises(UserError, match=said) as told:
        Job(job).resume(named)
    assert told.value.fix
    job.resume_lock.unlink()
    assert sorted(job.root.rglob("*")) == before


def test_a_checkpoint_may_be_one_that_the_glob_finds_or_that_looks_like_one(tmp_path: Path) -> None:
    job = _ended(tmp_path)
    every, numbered = jobs.plan(), jobs.plan(checkpoint={"path": "step-*"})
    assert refusals.existing(job, "good.pt", every) == job.checkpoints / "good.pt"
    assert refusals.existing(job, "step-5", numbered) == job.checkpoints / "step-5"
    assert refusals.existing(job, str(tmp_path / "other.ckpt"), every) == tmp_path / "other.ckpt"


@pytest.mark.parametrize("override", ["workdir=.", "snapshot.limit_mb=5", "ssh.sync=data/", " workdir = x"])
def test_an_override_that_a_resume_could_not_heed_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="has no effect on a resume"):
        Job(_ended(tmp_path)).resume("", (override, "restart.max=1"))
