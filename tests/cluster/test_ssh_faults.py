"""What if a host, its processes, its sshd or the supervisor is lost? The job goes on where it can, and says where not.

The ranks make steps without torch (see `TOGETHER`): what is tried here is everything around them.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from orchestrator.core.host import procfs
from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, TOGETHER, Desk, Job
from tests.support.cluster.host import wait_for

GATED = (
    TOGETHER
    + """
checkpoints = Path(os.environ["ORCH_CHECKPOINT_DIR"])
gate = checkpoints.parent / "gate"
resume_from = os.environ.get("ORCH_RESUME_FROM", "")
start = int(Path(resume_from).read_text()) if resume_from else 0


def at_step(step):
    if rank == 0 and step % 10 == 1 and step > 1:
        part = checkpoints / ".part"
        part.write_text(str(step - 1))
        part.replace(checkpoints / f"step-{step - 1}")
    while not together(step != 50 or gate.exists()):
        optimizer.step()
        if rank == 3:
            os.write(1, b"waits\\n")
        time.sleep(0.02)


meet()
run(60, at_step=at_step, start=start)
"""
)
"""Counts to 60, all ranks together, saves every ten steps, and waits before step 50 for the file `gate` on rank 0's host,
with steps of which rank 3 alone prints a word."""

STEPS = list(range(1, 61))

LEAVE_S_MAX = 60.0


def gated(desk: Desk, **spec: Any) -> Job:
    """Submit the job that waits before step 50."""
    return desk.submit({**FAKE_TORCH, "train.py": GATED}, checkpoint={"path": "step-*"}, **spec)


def open_gate(job: Job) -> None:
    """Let the ranks go on, on all hosts that have the job's folder."""
    for host in job.desk.box.nodes:
        root = job.on_host(host.name).root
        if root.exists():
            (root / "gate").touch()


def wait_for_last_steps(job: Job) -> None:
    """Wait until all ranks on node1 and node2 have made their last step, whatever is known of it at home."""
    for rank, name in enumerate(("node1", "node1", "node2", "node2")):
        log = job.on_host(name).rank_log(1, rank)
        job.wait_until(lambda log=log: "step 60\n" in log.read_text(), f"the last step of rank {rank}")


def take_leave(job: Job) -> None:
    """Mend all wires and clean: the agent of a host that nobody reached at the job's end would wait for an hour."""
    job.desk.box.heal()
    job.desk.orch("clean", "--yes")


def assert_unharmed(job: Job, ranks: int = 4) -> None:
    """The job succeeded in its first attempt, and every line is at home once."""
    open_gate(job)
    status = job.wait()
    assert (status["state"], status["restarts"], job.kinds()) == ("SUCCEEDED", 0, [None])
    for rank in range(ranks):
        assert job.steps_logged(rank) == STEPS


@pytest.mark.soak
def test_permanently_lost_host_is_replaced_by_free_one(desk: Desk, box: Box) -> None:
    job = gated(desk, ssh={"hosts": "node[1-3]"})
    job.wait_for_step(50)
    job.until(lambda seen: seen["checkpoint"] is not None, "a checkpoint at home")
    box.power_off("node2")
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "RUNNING", "the second attempt")
    assert job.placed() == ["node1", "node3"]
    open_gate(job)
    status = job.wait()
    assert (status["state"], job.kinds()) == ("SUCCEEDED", ["node_lost", None])
    assert job.note("node2")
    assert job.why()[1]["resumed_from"] is not None


@pytest.mark.soak
def test_host_back_in_time_is_used_again(desk: Desk, box: Box) -> None:
    job = gated(desk, monitor={"heartbeat_s": 0.2, "node_timeout": 20})
    job.wait_for_step(50)
    box.power_off("node2")
    box.power_on("node2")
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "RUNNING", "the second attempt")
    open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.placed() == ["node1", "node2"]


def test_partitioned_host_fences_ranks_before_replacement_starts(desk: Desk, box: Box) -> None:
    """A partitioned host has fenced its ranks before others take over."""
    job = gated(desk, ssh={"hosts": "node[1-3]"}, spares=1, setup=["echo set up"])
    job.wait_for_step(50)
    box.cut("node2")
    job.until(lambda seen: seen["attempt"] == 2 and any(one["pid"] for one in seen["ranks"]), "new ranks")
    alive = [one.command for one in box.host("node2").processes() if "train.py" in one.command]
    assert not alive
    logs = [job.on_host("node3").node_log(attempt, "node3") for attempt in (1, 2)]
    assert [log.exists() and "set up" in log.read_text() for log in logs] == [False, True], "not beside ranks"
    open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"
    take_leave(job)


@pytest.mark.soak
def test_killing_all_processes_of_host_costs_one_restart(desk: Desk, box: Box) -> None:
    job = gated(desk)
    job.wait_for_step(50)
    box.kill_all("node2", "trainer")
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "RUNNING", "the second attempt")
    open_gate(job)
    assert job.wait()["state"] == "SUCCEEDED"
    kinds = job.kinds()
    assert kinds[0] in ("node_lost", "crash") and kinds[1:] == [None]
    assert job.why()[0]["verdict"]["node"] == "node2"
    assert job.placed() == ["node1", "node2"]


@pytest.mark.soak
def test_a_restarted_sshd_disturbs_nothing(desk: Desk, box: Box) -> None:
    job = gated(desk)
    job.wait_for_step(20)
    box.restart_sshd("node1")
    box.restart_sshd("node2", sessions=True)
    job.wait_for_step(50)
    assert_unharmed(job)


def test_killed_supervisor_sshd_and_laptop_lose_no_line(desk: Desk, box: Box) -> None:
    """A killed supervisor, a stopped sshd and a closed laptop harm no rank and lose no log line."""
    job = gated(desk)
    job.wait_for_step(50)
    for _ in range(2):
        before = job.seen()["ranks"]
        job.kill_supervisor()
        job.status()  # revives it
        job.until(lambda seen: all(one["state"] == "up" for one in seen["nodes"]), "both hosts")
        assert [one["pid"] for one in job.seen()["ranks"]] == [one["pid"] for one in before]

    box.stop_sshd("node2")
    box.break_ssh("node2")
    job.until(lambda seen: seen["nodes"][1]["state"] != "up", "word of the silence")
    step = job.seen()["ranks"][0]["step"]
    job.until(lambda seen: (seen["ranks"][0]["step"] or 0) > step + 20, "progress elsewhere")
    box.start_sshd("node2")
    job.until(lambda seen: seen["nodes"][1]["state"] == "up", "the host's return")

    box.freeze("login")
    for host in box.nodes:
        box.cut_between("login", host.name)
    open_gate(job)
    wait_for_last_steps(job)
    box.heal()
    assert_unharmed(job)


@pytest.mark.soak
def test_a_cancel_ends_the_ranks_on_all_hosts(desk: Desk) -> None:
    job = gated(desk, nodes=4, ssh={"hosts": "node[1-4]"})
    job.wait_for_step(50)
    desk.orch("cancel", job.id)
    assert job.wait()["state"] == "CANCELLED"


def test_permanently_lost_host_fails_job_then_is_released(desk: Desk, box: Box) -> None:
    """A lost host fails the job by name; when it comes back, it is released and its files are collected."""
    job = gated(desk)
    job.wait_for_step(50)
    job.wait_for_line("waits", rank=3)
    box.cut("node2")
    assert "waits" in desk.orch("logs", job.id, "--rank", "3").stdout
    status = job.wait()
    verdict = job.why()[0]["verdict"]
    assert (status["state"], verdict["kind"], verdict["node"]) == ("FAILED", "node_lost", "node2")
    assert "node2" in status["reason"]
    supervisor = job.supervisor()
    late = f"import pathlib, orchestrator.core.jobdir.requests as r; r.send(pathlib.Path('{job.inside}/requests'), 'cancel')"
    box.login.run([sys.executable, "-c", late], user="trainer")  # who read the status a moment before its end
    journal_says = lambda: "CancelRequested" in job.folder.journal.read_text()  # noqa: E731
    job.wait_until(journal_says, "the late request to be taken")
    box.heal("node2")
    desk.orch("collect", job.id)
    assert job.folder.rank_log(1, 3).read_bytes() == job.on_host("node2").rank_log(1, 3).read_bytes()
    wait_for(lambda: not procfs.is_alive(supervisor), "the supervisor to leave", LEAVE_S_MAX)
    wait_for(lambda: not desk.at_work(), "silence on all hosts")


def test_hosts_without_mutual_route_are_named_with_addresses(desk: Desk, box: Box) -> None:
    box.cut_between("node1", "node2")
    job = gated(desk, restart={"max": 0, "backoff": 0})
    status = job.wait()
    assert status["state"] == "FAILED"
    words = f"{status['reason']} {job.why()[-1]['verdict']}"
    for name in ("node1", "node2"):
        assert name in words and box.host(name).address in words
