"""Fan-out: the submit side asks many hosts at once, and one bad host delays no other."""

from __future__ import annotations

import dataclasses
import json
import os
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout
from orchestrator.backends.ssh.connect.connection import Connection
from orchestrator.brain.checks.finding import Finding
from orchestrator.brain.model import decisions as d
from orchestrator.client import preflight, remote_files
from orchestrator.client.cleanup import clean_hosts, summarize_cleaned
from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import PlannedSsh
from orchestrator.journal import journal_file
from orchestrator.spec.load import load
from orchestrator.submission import bundle, planner, render
from orchestrator.submission.planner import Inventory
from tests.support import jobs
from tests.support.cluster import small_torch
from tests.support.sshd import Desk, Sshd, free_port, needs_sshd

pytestmark = needs_sshd

SSH = PlannedSsh(None, None, "strict", "~/.orch", (), None)


def _configure(desk: Desk, **servers: Sshd) -> None:
    """Let names lead to servers; `gone` leads to a port that nobody listens on."""
    desk.know(*servers.values())
    ports = {**{name: server.port for name, server in servers.items()}, "gone": free_port()}
    desk.configure("".join(f"Host {name}\n HostName 127.0.0.1\n Port {port}\n" for name, port in ports.items()))


def _start(desk: Desk, settings: str = "", environ: str = "") -> Sshd:
    """Start a server whose shells have the home of the test, and read nobody's .bashrc."""
    return desk.start(f"SetEnv HOME={desk.home} {environ}\n{settings}")


def _with_gpus(desk: Desk, folder: Path, said: str, code: int = 0) -> Sshd:
    """Start a server on which nvidia-smi says this, and the shell something before."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{said}'\nexit {code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    noise = 'ForceCommand echo noise; eval "$SSH_ORIGINAL_COMMAND"'
    return _start(desk, noise, f"PATH={folder}:/usr/bin:/bin")


def _name(there: Connection, host: str) -> str:
    remote = there.run(f"echo this is {host}")
    said = remote.line(10.0)
    assert said is not None
    return said.decode()


def test_every_host_answers_in_the_users_order(desk: Desk) -> None:
    """Every host answers, or its fault is reported, in the user's order."""
    one, two = _start(desk), _start(desk)
    _configure(desk, one=one, two=two)
    said = fanout.run_on_each(["two", "gone", "one", "two"], SSH, _name)
    assert list(said) == ["two", "gone", "one"]
    assert (said["two"], said["one"]) == ("this is two", "this is one")
    failed = said["gone"]
    assert isinstance(failed, LaunchError) and failed.stage == "connect"
    assert "gone: connect: " in fanout.format_failures(said) and "two:" not in fanout.format_failures(said)


def test_host_that_never_answers_costs_only_the_limit(desk: Desk) -> None:
    """A host that never answers costs no more than the time limit."""
    _configure(desk, one=_start(desk))

    def work(there: Connection, host: str) -> str:
        if host == "one":
            there.run("sleep 20").line(20.0)
        return host

    began_s = time.monotonic()
    said = fanout.run_on_each(["one"], SSH, work, limit_s=1.5)
    assert time.monotonic() - began_s < 10.0
    assert isinstance(said["one"], LaunchError) and "no answer within 1.5 s" in str(said["one"])


def test_internal_fault_is_not_blamed_on_host(desk: Desk) -> None:
    _configure(desk, one=_start(desk))

    def work(_there: Connection, _host: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fanout.run_on_each(["one"], SSH, work)


GPUS = "GPU 0: H200 (UUID: GPU-a)\\nGPU 1: H200 (UUID: GPU-b)\\n"


def test_gpus_are_counted_despite_shell_output(desk: Desk, tmp_path: Path) -> None:
    """The GPUs are counted on the hosts, whatever their shells print, and also where nvidia-smi warns of an infoROM."""
    warns = "WARNING: infoROM is corrupted at gpu 0000:19:00.0\\n" + GPUS
    _configure(desk, one=_with_gpus(desk, tmp_path / "one", GPUS), two=_with_gpus(desk, tmp_path / "two", warns, 14))
    assert fanout.count_gpus(["one", "gone", "two"], SSH, "job.yaml") == 2


def test_unequal_gpu_counts_are_named_by_host(desk: Desk, tmp_path: Path) -> None:
    none = _with_gpus(desk, tmp_path / "two", "No devices were found\\n", 6)
    _configure(desk, one=_with_gpus(desk, tmp_path / "one", GPUS), two=none)
    assert fanout.count_gpus(["two"], SSH, "") == 0
    with pytest.raises(UserError, match="different numbers of GPUs: one 2, two 0"):
        fanout.count_gpus(["one", "two"], SSH, "job.yaml:3: gpus_per_node")


def test_silent_hosts_are_named_with_reasons(desk: Desk, tmp_path: Path) -> None:
    _configure(desk, one=_with_gpus(desk, tmp_path / "one", "NVML: Driver/library version mismatch\\n", 18))
    with pytest.raises(ClusterError, match="no host reported how many GPUs") as told:
        fanout.count_gpus(["one", "gone"], SSH, "job.yaml")
    assert "one: shell: nvidia-smi fails: " in told.value.what and "version mismatch" in told.value.what
    assert "gone: connect: " in told.value.what


# orch check


def _check(tmp_path: Path, hosts: str, *overrides: str) -> dict[str, list[Finding]]:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    (work / "train.py").write_text("print(1)\n")
    text = f"name: gpt\nbackend: ssh\nprocs_per_node: 1\nentrypoint: train.py\nssh: {{hosts: {hosts}, remote_dir: {tmp_path}/remote}}\n"
    (work / "job.yaml").write_text(f"{text}env: {json.dumps(small_torch.write(tmp_path / 'torch'))}\n")
    environ = {"PATH": "/usr/bin:/bin", "ORCH_HOME": str(tmp_path / "home")}
    found: dict[str, list[Finding]] = {}
    for one in preflight.check(work / "job.yaml", None, overrides, environ):
        found.setdefault(one.what, []).append(one)
        assert one.ok != bool(one.fix)
    assert not (tmp_path / "home" / "jobs").exists()
    return found


def test_check_inspects_every_host_without_leftovers(desk: Desk, tmp_path: Path) -> None:
    _configure(desk, one=_start(desk), closed=_start(desk, "AllowTcpForwarding no"))
    found = _check(tmp_path, "[one, closed, gone]")
    assert list(found) == ["spec", "plan", "code", "space", "host", "forward", "connect", "hosts"]
    assert found["host"][0].ok and found["host"][0].found.startswith("one: Python 3.")
    assert "AllowTcpForwarding" in found["forward"][0].fix and found["forward"][0].found.startswith("closed: ")
    assert found["connect"][0].found.startswith("gone: ")
    assert (found["hosts"][0].ok, found["hosts"][0].found) == (True, "1 of 3 hosts can be used, 1 needed")
    assert not (tmp_path / "remote").exists()


def test_check_fails_with_too_few_usable_hosts(desk: Desk, tmp_path: Path) -> None:
    _configure(desk, one=_start(desk))
    found = _check(tmp_path, "[one, gone]", "nodes=2")
    last = found["hosts"][0]
    assert (last.ok, last.exit_code, last.found) == (False, 3, "1 of 2 hosts can be used, 2 needed")
    found = _check(tmp_path, "[one]", "gpus_per_node=4", "procs_per_node=null")
    assert "GPUs, and 4 are needed" in found["host"][0].found and not found["hosts"][0].ok


def test_check_reports_missing_python_for_ranks(desk: Desk, tmp_path: Path) -> None:
    _configure(desk, one=_start(desk))
    found = _check(tmp_path, "[one]", "python=/no/such/python")
    assert found["host"][0].found == "one: it has none of /no/such/python"


# orch collect, orch clean


def _ended(
    desk: Desk,
    tmp_path: Path,
    hosts: str = "[one, two, gone]",
    launched: Sequence[str] = ("one", "two", "one"),
) -> tuple[Job, Path]:
    """Make an ended job that was launched on `one` and `two`, which share a disk; return it and its folder there."""
    work = tmp_path / "work"
    work.mkdir()
    ssh = f"{{hosts: {hosts}, remote_dir: {tmp_path}/remote}}"
    (work / "job.yaml").write_text(f"name: gpt\nbackend: ssh\ncommand: 'true'\nssh: {ssh}\n")
    file = load(work / "job.yaml")
    plan = planner.plan_job(file, Inventory("laptop", (), "/usr/bin/python3", 0), jobs.ID, jobs.BEGAN_S)
    job = JobDir(tmp_path / "home" / "jobs" / jobs.ID)
    for folder in (job.scripts, job.checkpoints, job.attempt_logs(1), job.secrets):
        folder.mkdir(parents=True)
    (job.secrets / "token").write_text("ab" * 32)
    job.plan.write_text(codec.dumps(plan))
    job.bundle.write_bytes(bundle.build())
    job.archive.touch()
    job.ended.touch()
    for script in render.render(plan, job, "/usr/bin/python3"):
        (job.scripts / script.name).write_text(script.text)
    book = journal_file.Journal(job.journal, "boot", 0)
    for node in launched:
        book.write(d.Launch(0.0, "needed", 1, node))
    book.close()
    there = JobDir(tmp_path / "remote" / "jobs" / jobs.ID)
    for folder in (there.node("one"), there.checkpoints / "step-2", there.attempt_logs(1), there.evidence(1)):
        folder.mkdir(parents=True)
    there.bundle.write_bytes(job.bundle.read_bytes())
    there.rank_log(1, 0).write_text("all that it said\n")
    job.rank_log(1, 0).write_text("all that")
    (there.node("one") / "agent.log").write_text("bye\n")
    (there.checkpoints / "step-1.pt").write_text("other")
    (job.checkpoints / "step-1.pt").write_text("at home")
    (there.checkpoints / "step-2" / "rank-0.pt").write_bytes(os.urandom(3_000_000))
    (there.checkpoints / ".coming").mkdir()
    (there.checkpoints / ".coming" / "half").write_text("half")
    (there.root / "stranger").write_text("?")
    return Job(job), there.root


def test_collect_fetches_missing_files_without_overwriting(desk: Desk, tmp_path: Path) -> None:
    """orch collect fetches what is missing once and overwrites nothing."""
    server = _start(desk)
    _configure(desk, one=server, two=server)
    job, there = _ended(desk, tmp_path)
    account = remote_files.collect(job)
    assert account.is_complete and list(account.fetched) == ["one", "two"]
    assert remote_files.summarize([account]) == "fetched 5 files (3.0 MB) from 2 hosts"
    home = job.folder
    assert home.rank_log(1, 0).read_text() == "all that it said\n"
    assert (home.root / "nodes/one/agent.log").read_text() == "bye\n"
    assert (home.checkpoints / "step-1.pt").read_text() == "at home"
    beside = {host: home.root / f"from-hosts/{host}/checkpoints/step-1.pt" for host in ("one", "two")}
    assert [path.read_text() for path in beside.values()] == ["other", "other"]
    came = home.checkpoints / "step-2" / "rank-0.pt"
    assert came.read_bytes() == (there / "checkpoints/step-2/rank-0.pt").read_bytes()
    assert abs(came.stat().st_mtime - (there / "checkpoints/step-2/rank-0.pt").stat().st_mtime) < 1
    assert not (home.root / "stranger").exists() and not (home.checkpoints / ".coming").exists()
    assert remote_files.summarize([remote_files.collect(job)]) == "", "nothing comes twice"


@pytest.mark.parametrize("later_s", [-5, 5])
def test_collect_fetches_other_checkpoints_beside_local_one(desk: Desk, tmp_path: Path, later_s: int) -> None:
    """Another checkpoint is fetched beside the local one, older or newer, with its metadata."""
    server = _start(desk)
    _configure(desk, one=server, two=server)
    job, there = _ended(desk, tmp_path)
    at_s = time.time() + later_s
    os.utime(there / "checkpoints/step-1.pt", (at_s, at_s))
    (there / "checkpoints/step-2/.metadata").write_text("which pieces there are")
    account = remote_files.collect(job)
    beside = job.folder.root / "from-hosts/one/checkpoints/step-1.pt"
    assert beside.read_text() == "other" and (job.folder.checkpoints / "step-1.pt").read_text() == "at home"
    assert account.is_complete and account.lines()[0].endswith(f"it was saved as {beside}")
    assert (job.folder.checkpoints / "step-2/.metadata").exists()


def _write_code(job: JobDir, there: Path, *written: str) -> None:
    """Write files where ranks start on a host, beside what the snapshot brought there in its archive."""
    for name in (*written, "data/x.pt", "train.py"):
        (there / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (there / "code" / name).write_text(name)
    with tarfile.open(job.archive, "w:gz") as archive:
        for name in ("data/x.pt", "train.py"):
            os.utime(there / "code" / name, (0, 0))
            archive.add(there / "code" / name, name)


@pytest.mark.parametrize("path", ["*", "{job_dir}/code/out/*"])
def test_collect_fetches_written_files_but_not_copied_ones(desk: Desk, tmp_path: Path, path: str) -> None:
    """Files that ranks wrote in the start folder are fetched, and those that orch copied there are not."""
    server = _start(desk)
    _configure(desk, one=server, two=server)
    job, there = _ended(desk, tmp_path)
    job.folder.plan.write_text(codec.dumps(dataclasses.replace(job.plan(), checkpoint_glob=path)))
    _write_code(job.folder, there, "out/s.pt", "out/step-1/a.pt", "metrics.csv", ".hydra/config.yaml")
    (there / "code/old.csv").write_text("unpacked from another archive")
    os.utime(there / "code/old.csv", (0, 0))
    remote_files.collect(job)
    files = [file.relative_to(job.folder.root) for file in job.folder.root.rglob("*") if file.is_file()]
    came = {str(file) for file in files if file.parts[0] in ("code", "checkpoints")}
    saved = "code" if path == "*" else "checkpoints"
    assert came == {
        f"{saved}/out/s.pt", f"{saved}/out/step-1/a.pt", "code/metrics.csv", "code/.hydra/config.yaml", "code/old.csv",
        "checkpoints/step-1.pt", "checkpoints/step-2/rank-0.pt",
    }  # fmt: skip


def test_clean_keeps_host_with_too_many_other_files(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _configure(desk, one=_start(desk))
    job, there = _ended(desk, tmp_path, launched=["one"])
    _write_code(job.folder, there, "metrics.csv")
    monkeypatch.setattr(remote_files, "OTHERS_BYTES_MAX", 3)
    (line,) = remote_files.clean_hosts(job).fetched["one"].missing
    assert line.endswith("were not copied: code/metrics.csv; orch collect --all copies them") and there.exists()
    account = remote_files.clean_hosts(job, discard=True)
    assert account.clean_hosts == ("one",) and not there.exists()
    assert not (job.folder.code / "metrics.csv").exists()


def test_collect_all_fetches_everything_written(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files that ranks wrote on a host are fetched if the user asks for it."""
    _configure(desk, one=_start(desk))
    job, there = _ended(desk, tmp_path, launched=["one"])
    _write_code(job.folder, there, "metrics.csv")
    monkeypatch.setattr(remote_files, "OTHERS_BYTES_MAX", 3)
    assert remote_files.collect(job, everything=True).is_complete
    assert (job.folder.code / "metrics.csv").read_text() == "metrics.csv"


def test_host_is_not_visited_during_another_command(desk: Desk, tmp_path: Path) -> None:
    """No host is connected to while another command works on the job."""
    _configure(desk, one=_start(desk))
    job, there = _ended(desk, tmp_path, launched=["one"])
    with locks.hold(job.folder.resume_lock, locks.RESUME_S_MAX):
        accounts = [remote_files.collect(job), clean_hosts([job])[job.id]]
    for account in accounts:
        (line,) = account.lines()
        assert line.startswith("its hosts: folder: another command is working on the job (pid ")
        assert not account.is_complete
    job.folder.ended.unlink()
    assert "was resumed" in remote_files.collect(job).lines()[0]
    assert there.exists() and job.folder.rank_log(1, 0).read_text() == "all that"


def test_unreachable_host_is_named_and_others_collected(desk: Desk, tmp_path: Path) -> None:
    _configure(desk, one=_start(desk))
    job, _ = _ended(desk, tmp_path, "[one, gone]")
    book = journal_file.Journal(job.folder.journal, "boot", 3)
    book.write(d.Launch(0.0, "needed", 1, "gone"))
    book.close()
    (desk.home / ".ssh" / "config").write_text((desk.home / ".ssh" / "config").read_text() + "Host two\n Port 1\n")
    account = remote_files.collect(job)
    assert list(account.fetched) == ["one"] and sorted(account.failed) == ["gone", "two"]
    assert not account.is_complete and any(line.startswith("gone: connect: ") for line in account.lines())


def test_submit_folder_is_left_alone(desk: Desk, tmp_path: Path) -> None:
    server = _start(desk)
    _configure(desk, one=server, two=server)
    job, there = _ended(desk, tmp_path)
    (there / "secrets").mkdir()
    (there / "secrets" / "token").write_text("ab" * 32)
    account = remote_files.clean_hosts(job)
    assert account.clean_hosts == ("one", "two") and remote_files.summarize([account]) == ""
    assert (there / "stranger").exists()


def test_clean_fetches_everything_then_removes_folder(desk: Desk, tmp_path: Path) -> None:
    server = _start(desk)
    _configure(desk, one=server, two=server)
    job, there = _ended(desk, tmp_path)
    accounts = clean_hosts([job])
    assert (
        summarize_cleaned(accounts) == f"cleaned up 2 hosts of 1 job ({job.id}); fetched 5 files (3.0 MB) from 2 hosts"
    )
    assert not there.exists()
    assert (job.folder.checkpoints / "step-2" / "rank-0.pt").exists()
    assert json.loads(job.folder.cleaned_hosts.read_text()) == ["one", "two"]
    server.stop()
    assert clean_hosts([job]) == {} and summarize_cleaned({}) == "", "nobody asks twice"


def test_clean_keeps_files_that_cannot_be_fetched(desk: Desk, tmp_path: Path) -> None:
    server = _start(desk)
    _configure(desk, one=server, two=server)
    job, there = _ended(desk, tmp_path)
    job.folder.rank_log(1, 0).unlink()
    job.folder.rank_log(1, 0).mkdir()
    left = clean_hosts([job])
    assert there.exists() and list(left) == [jobs.ID]
    assert any("rank-00000.log could not be fetched" in line for line in left[jobs.ID].lines())


def test_damaged_job_is_named_and_next_is_cleaned(desk: Desk, tmp_path: Path) -> None:
    server = _start(desk)
    _configure(desk, one=server)
    job, there = _ended(desk, tmp_path, launched=["one"])
    damaged = JobDir(job.folder.root.with_name("gpt-20261120-224605124-k3"))
    damaged.root.mkdir()
    damaged.archive.touch()
    damaged.ended.touch()
    accounts = clean_hosts([Job(damaged), job])
    assert [account.is_complete for account in accounts.values()] == [False, True], accounts
    assert not there.exists()
