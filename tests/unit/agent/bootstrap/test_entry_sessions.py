"""Is an agent found again, a host surveyed, and what is left of a job swept? Real scripts, real processes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.agent.bootstrap import job_folder
from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.launch import (
    CodeArchive,
    clean_up,
    launch_agent,
    open_host_session,
    redirect_agent,
    survey,
)
from orchestrator.core.host import process_tags, procfs
from orchestrator.core.host_facts import HostFacts, Link
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import bootstrap as w
from tests.support import fake_host, jobs
from tests.support.fake_host import FakeHost

pytestmark = pytest.mark.slow


def test_agent_gets_new_address_and_liveness_is_reported(host: FakeHost, code: CodeArchive) -> None:
    """An agent is given its new address and is found alive or dead."""
    launch_agent(host, fake_host.launch(code))
    endpoint = host.job.node("node-0") / "endpoint"
    assert endpoint.read_text() == "127.0.0.1:9\n"
    seen = redirect_agent(host, fake_host.launcher(), fake_host.config(address="127.0.0.1:7"))
    assert seen.alive and seen.boot_id == procfs.boot_id() and endpoint.read_text() == "127.0.0.1:7\n"
    log = host.job.node("node-0") / "agent.log"
    fake_host.wait_for(lambda: "Connect call failed" in log.read_text(), "the agent's first call")
    fake_host.end_all(host.home)
    seen = redirect_agent(host, fake_host.launcher(), fake_host.config())
    assert not seen.alive and "Connect call failed" in seen.last_line


def test_visit_without_job_creates_nothing(host: FakeHost) -> None:
    """Connecting to a host without the job creates nothing there."""
    assert not redirect_agent(host, fake_host.launcher(), fake_host.config()).alive
    assert list(host.home.iterdir()) == []


def test_survey_reports_host_and_leaves_nothing(host: FakeHost) -> None:
    found = survey(host, fake_host.launcher(), "~/.orch/jobs/x", ("no-such-python", ".venv/bin/python"))
    assert found.host.root == str(host.home / ".orch/jobs/x") and found.host.fault == ""
    assert found.host.cores == os.cpu_count() and found.host.free_bytes > 0
    assert "lo" in found.host.interfaces
    assert found.host.program == ".venv/bin/python"
    assert list(host.home.iterdir()) == []


def test_host_session_answers_requests_and_leaves_nothing(host: FakeHost, tmp_path: Path) -> None:
    answer = '{"python": "3.11.7", "torch": "9.9.9", "missing": [{"module": "m", "file": "t.py", "line": 3}]}'
    python = fake_host.program(tmp_path, "py", f"#!/bin/sh\ncat >/dev/null; echo noise; echo '{answer}'\n")
    broken = fake_host.program(tmp_path, "no", "#!/bin/sh\necho 'libpython is missing' >&2; exit 1\n")
    with open_host_session(host, fake_host.launcher(), "~/x/jobs/y", (str(python),)) as visit:
        assert visit.survey.host.program == str(python)
        assert abs(visit.survey.clock_s) <= visit.survey.clock_error_s + 0.1
        for program, torch, fault in ((str(python), "9.9.9", ""), (str(broken), "", "libpython is missing")):
            step = w.GatherFacts(program, {}, (), (), ("~/x",), (), False)
            facts = visit.run_step(step, HostFacts, 30)
            assert facts.program is not None
            assert (facts.program.torch, facts.program.fault) == (torch, fault)
            assert facts.folders[0].path == str(host.home / "x") and not facts.folders[0].fault
        opened = visit.run_step(w.OpenPorts("t", None), w.PortsOpened, 10)
        step2 = w.MeasurePeer(("127.0.0.1",), opened.ports, "t", 0.05)
        link = visit.run_step(step2, Link, 10)
        assert (link.address, link.faults) == ("127.0.0.1", ("", "")) and link.bytes_per_s > 0
        other = w.MeasurePeer(("127.0.0.1",), opened.ports, "another token", 0.05)
        assert visit.run_step(other, Link, 10).faults[0].endswith("another machine answered")
    assert list(host.home.iterdir()) == []


def test_survey_reports_uncreatable_folder(host: FakeHost) -> None:
    """A survey reports a folder that cannot be created."""
    (host.home / ".orch").write_text("a file")
    looked = survey(host, fake_host.launcher(), "~/.orch/jobs/x", ()).host
    assert "not a directory" in looked.fault and "ssh.remote_dir" in looked.fix


def test_cleanup_ends_processes_and_removes_folder(host: FakeHost, code: CodeArchive) -> None:
    launched = launch_agent(host, fake_host.launch(code))
    swept = clean_up(host, fake_host.launcher(), fake_host.config().root, jobs.ID)
    assert swept == w.CleanedUp("")
    fake_host.wait_gone([launched.pid])
    assert fake_host.keepers(host.home) == [] and not host.jobs.exists()
    assert clean_up(host, fake_host.launcher(), fake_host.config().root, jobs.ID) == w.CleanedUp("")


def test_cleanup_kills_leftovers_of_agent(host: FakeHost, code: CodeArchive) -> None:
    host.job.node("node-0").mkdir(parents=True)
    orphan = subprocess.Popen(["sleep", "600"], env={process_tags.NAME: process_tags.make_tag(host.job.root, "node-0")})
    clean_up(host, fake_host.launcher(), fake_host.config().root, jobs.ID)
    assert orphan.wait(fake_host.GONE_S_MAX) == -9


def test_cleanup_keeps_submit_folder(host: FakeHost) -> None:
    host.job.secrets.mkdir(parents=True)
    assert not clean_up(host, fake_host.launcher(), fake_host.config().root, jobs.ID).kept_reason
    assert host.job.secrets.is_dir()


def test_cleanup_keeps_folder_with_another_hosts_agent(host: FakeHost) -> None:
    node = host.job.node("other-host")
    node.mkdir(parents=True)
    (node / "agent.json").write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1, "boot_id": "elsewhere"}))
    with (node / "agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "other-host" in clean_up(host, fake_host.launcher(), fake_host.config().root, jobs.ID).kept_reason
    assert node.is_dir()


def test_cleanup_refuses_folder_of_another_job(host: FakeHost) -> None:
    (host.home / "precious").mkdir()
    with pytest.raises(LaunchError, match="is not the folder of job"):
        clean_up(host, fake_host.launcher(), "~/precious", jobs.ID)
    assert (host.home / "precious").is_dir()


def test_folder_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is absolute, however it was written."""
    monkeypatch.setenv("HOME", "/home/me")
    assert job_folder.resolve("~/.orch/jobs/x") == JobDir(Path("/home/me/.orch/jobs/x"))
    assert job_folder.resolve("scratch/jobs/x") == JobDir(Path("/home/me/scratch/jobs/x"))
    assert job_folder.resolve("/big/jobs/x") == JobDir(Path("/big/jobs/x"))
