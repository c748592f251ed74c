"""Loss of the supervisor on Slurm: only a job whose batch host is lost is requeued, and an agent whose job has a newer
allocation leaves."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from orchestrator.agent.process.lost_supervisor import (
    ORPHANED_S,
    RETRY_S,
    STAGGER_S,
    LostSupervisor,
    NewerAllocation,
)
from orchestrator.backends.slurm.allocation import Grant
from orchestrator.brain.model import decisions as d
from orchestrator.core.errors import OwnershipLostError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.slurm import step_env
from orchestrator.core.slurm.scontrol import is_orphaned
from orchestrator.supervisor import allocation_claim
from tests.support import fake_host, fake_slurm

FENCE_S = 36.0

SHOWN = {"JobState": "RUNNING", "Restarts": "1", "BatchHost": "node1", "NodeList": "node[2-3]"}
ENVIRON = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1", "SLURM_NODEID": "1"}


def test_only_allocation_without_batch_host_is_orphaned() -> None:
    assert is_orphaned(SHOWN, "1")
    assert not is_orphaned({**SHOWN, "NodeList": "node[1-3]"}, "1")
    assert not is_orphaned(SHOWN, "0"), "another stay: this one is over already"
    assert not is_orphaned({**SHOWN, "JobState": "COMPLETING"}, "1")
    assert not is_orphaned({**SHOWN, "NodeList": "(null)"}, "1") and not is_orphaned({}, "1")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an scontrol first in PATH that writes down what it is asked."""
    shown = " ".join(f"{name}={value}" for name, value in SHOWN.items())
    fake_host.program(tmp_path / "bin", "scontrol", f"#!/bin/sh\necho \"$@\" >>{tmp_path}/asked\necho '{shown}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "asked"


@pytest.mark.slow
def test_agent_without_contact_requeues_once_in_turn(asked: Path) -> None:
    """An agent without contact asks Slurm in its turn and requeues the job once."""
    notes: list[str] = []
    lost_supervisor = LostSupervisor(ENVIRON, NewerAllocation(asked, ENVIRON), 1e9, notes.append)
    lost_supervisor.check(ORPHANED_S + STAGGER_S - 0.1)
    lost_supervisor.check(0.0)
    lost_supervisor.check(ORPHANED_S + STAGGER_S)
    fake_host.wait_for(lambda: notes, "the note")
    lost_supervisor.check(ORPHANED_S + STAGGER_S + RETRY_S - 0.1)
    assert asked.read_text().splitlines() == ["--oneliner show job 8", "requeue 8"]
    assert notes == ["node1 is lost, and the supervisor with it: Slurm job 8 is requeued"]


# The job goes on in another allocation


def _seen(newer_allocation: NewerAllocation, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what two looks bring: the first one reads."""
    monkeypatch.setattr("orchestrator.agent.process.lost_supervisor.CHECK_S", 0.0)
    newer_allocation.check()
    fake_host.wait_for(lambda: not _readers(), "the end of reading")
    return newer_allocation.check()


def _readers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "newer-allocation"]


@pytest.fixture(autouse=True)
def _no_reader_of_an_earlier_test() -> None:
    fake_host.wait_for(lambda: not _readers(), "the end of what an earlier test's last look reads")


def test_agent_recognises_its_allocation_by_supervisor_name() -> None:
    assert step_env.allocation_id(ENVIRON) == Grant("8", 1, ()).id
    assert step_env.allocation_id({"SLURM_JOB_ID": "8"}) == Grant("8", 0, ()).id
    assert step_env.allocation_id({}) == ""


@pytest.mark.parametrize(
    ("job_id", "restarts", "other"), [("8", 1, ""), ("8", 2, "8.2"), ("8", 0, "8.0"), ("9", 0, "9.0")]
)
def test_only_other_allocation_is_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_id: str, restarts: int, other: str
) -> None:
    """Only another allocation in the job folder is a successor."""
    job = JobDir(tmp_path)
    allocation_claim.claim(job, Grant(job_id, restarts, ()).id)
    assert _seen(NewerAllocation(job.allocation, ENVIRON), monkeypatch) == other


@pytest.mark.parametrize("raw", [None, b"", b"\n", b"\xff\xfe"])
def test_unreadable_allocation_file_stops_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes | None
) -> None:
    """A job folder that names no allocation makes no agent exit."""
    file = JobDir(tmp_path).allocation
    if raw is not None:
        file.write_bytes(raw)
    assert _seen(NewerAllocation(file, ENVIRON), monkeypatch) == ""


def test_superseded_agent_exits_after_fence_time_with_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent exits only after the fence time and says where its job is."""
    job, notes = JobDir(tmp_path), list[str]()
    newer_allocation = NewerAllocation(job.allocation, ENVIRON)
    lost_supervisor = LostSupervisor({**ENVIRON, "SLURM_NODEID": "999"}, newer_allocation, FENCE_S, notes.append)
    allocation_claim.claim(job, "8.2")
    assert _seen(newer_allocation, monkeypatch) == "8.2"
    assert not lost_supervisor.check(FENCE_S) and notes == []
    assert lost_supervisor.check(FENCE_S + 1.0)
    assert notes == ["no contact for 37 s, and the job now runs in allocation 8.2: leaving"]


def test_unresponsive_job_folder_stops_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job folder that does not answer makes no agent exit."""
    file = JobDir(tmp_path).allocation
    os.mkfifo(file)  # reading waits, as on a folder whose server is gone
    monkeypatch.setattr("orchestrator.agent.process.lost_supervisor.CHECK_S", 0.0)
    newer_allocation = NewerAllocation(file, ENVIRON)
    assert [newer_allocation.check() for _ in range(3)] == ["", "", ""]
    assert len(_readers()) == 1, "one reader at a time"
    with file.open("w") as writer:
        writer.write("8.2\n")
    fake_host.wait_for(lambda: newer_allocation.check() == "8.2", "the answer")
    fake_host.wait_for(lambda: _is_let_go(file), "the end of the last reader")


def _is_let_go(file: Path) -> bool:
    """Let a reader that waits for a writer go; tell whether there is none any more."""
    with contextlib.suppress(OSError):
        os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
    return not _readers()


def test_supervisor_claims_job_but_not_from_later_allocation(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    for name in ("8.0", "8.0", "8.9", "8.10", "9.0", "3.0"):  # numbers begin anew some day
        allocation_claim.claim(job, name)
        assert allocation_claim.newer_allocation(job, name) == ""
    allocation_claim.claim(job, "8.10")
    with pytest.raises(OwnershipLostError, match=r"this is allocation 8\.9, and the job continues in allocation 8\.10"):
        allocation_claim.claim(job, "8.9")
    assert allocation_claim.newer_allocation(job, "8.9") == "8.10"


def test_supervisor_releasing_nodes_names_those_to_avoid() -> None:
    asked: list[object] = []

    class Lent:
        id, nodes = "8.1", ("n1", "n2")

        def requeue(self, avoid: object) -> str:
            asked.append(avoid)
            return ""

    requeue = d.Requeue(0.0, "too few nodes", 1, {"n2": "its disk is full"})
    assert allocation_claim.leave_allocation(Lent(), requeue, None) == allocation_claim.REQUEUED  # type: ignore[arg-type]
    assert asked == [{"n2": "its disk is full"}]
    assert allocation_claim.leave_allocation(Lent(), None, d.JobEnd.FAILED) == allocation_claim.OVER  # type: ignore[arg-type]
    assert len(asked) == 1


def test_supervisor_without_allocation_claims_nothing(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    allocation_claim.claim(job, "")
    assert not job.allocation.exists() and allocation_claim.newer_allocation(job, "8.0") == ""
    allocation_claim.claim(job, "8.1")
    assert allocation_claim.newer_allocation(job, "") == ""


@pytest.mark.parametrize(("there", "after"), [("8.0", "8.1"), ("8.2", "8.2")])
def test_taken_lock_notifies_holder_of_moved_job(tmp_path: Path, there: str, after: str) -> None:
    """A supervisor that finds the lock taken notifies the holder that the job is elsewhere."""
    folder = fake_slurm.job(tmp_path, "8")
    allocation_claim.claim(folder, there)
    assert allocation_claim.announce_allocation(folder, "8.1") == allocation_claim.LOCK_HELD
    assert folder.allocation.read_text() == f"{after}\n"
