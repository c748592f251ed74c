"""Execution of decisions: agents find the supervisor, also when it came up on a full disk, what backends say is masked, and
the supervisor of an ended job stays as long as it is needed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.core import observations
from orchestrator.core.checkpoints.checkpoint import CopyTarget
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports
from orchestrator.supervisor import translation
from orchestrator.supervisor.agent_connections import AgentConnections
from orchestrator.supervisor.allocation_claim import AllocationSession
from orchestrator.supervisor.executor import LINGER_S_MAX, TRANSFER_S_MAX, Executor, may_shut_down, undismissed_hosts
from orchestrator.supervisor.transfers.checkpoint_tracker import CheckpointTracker
from tests.support import jobs
from tests.support.brain_story import Story
from tests.support.desk_world import DeskWorld
from tests.support.fake_backend import SECRET, Backend
from tests.support.saved_files import torch_save
from tests.unit.supervisor.test_supervisor import Lent
from tests.unit.supervisor.transfers.test_memory_copies import MemoryWorld

OLD, NEW = "127.0.0.1:4000", "127.0.0.1:4001"


def _executor(job: JobDir, backend: Backend, world: DeskWorld | None = None) -> Executor:
    """Return an executor, of the job, the plan and the saves of a `world` if there is one."""
    plan = world.plan if world is not None else jobs.plan()
    desk = world.desk if world is not None else CheckpointTracker(job, plan, None, lambda: None)
    secrets = translation.JobSecrets("token", "", {}, {"HF_TOKEN": SECRET})
    return Executor(job, plan, secrets, backend, AgentConnections(plan.id, "token", ()), desk)


def test_valid_endpoint_is_renewed_on_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An endpoint that is still valid is renewed without space on the disk."""
    job = JobDir(tmp_path)
    job.endpoint.write_text(OLD)
    os.utime(job.endpoint, (1.0, 1.0))
    executor = _executor(job, Backend())
    executor.endpoint = OLD
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _refuse)
        executor.publish_endpoint()
    assert job.endpoint.stat().st_mtime > 1.0 and job.endpoint.read_text() == OLD
    executor.endpoint = NEW
    executor.publish_endpoint()
    assert job.endpoint.read_text() == NEW
    executor.close()


def _refuse(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_spare_is_prepared_without_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A spare is prepared without a place in the gang."""
    executor, sent = _executor(JobDir(tmp_path), Backend()), {}
    monkeypatch.setattr(AgentConnections, "send", lambda _, node, order: sent.update({node: order}))
    for node in ("node-0", "node-1"):
        executor.carry_out(d.To(1.0, "why", node, orders.Prepare(1, None)), (("node-0", (0, 1)),), 1.0)
    assert [sent[node].nodes for node in ("node-0", "node-1")] == [("node-0",)] * 2
    executor.close()


def test_host_is_prepared_once_after_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host is prepared once it has its checkpoint, and is sent nothing more when its ranks start."""
    sent: list[object] = []
    monkeypatch.setattr(AgentConnections, "send", lambda _, node, order: sent.append(order))
    world = DeskWorld(tmp_path, "node-0", has_hosts=True)
    world.save({"ckpt_10.pt": torch_save({"step": 10})}, node="node-0")
    world.arrive()
    executor, gang = _executor(world.job, Backend(), world), (("node-0", (0, 1)),)
    executor._connections.hellos["node-0"] = reports.Hello(
        reports.PROTOCOL,
        "id",
        "",
        "node-0",
        "boot",
        "host",
        7,
        0,
        0,
        "",
        0,
        (),
        0,
        str(tmp_path / "there"),
        True,
        (),
    )
    save = world.latest()
    resume = ResumePoint(save.path, 10, save.number)
    executor.carry_out(d.To(1.0, "why", "node-0", orders.Prepare(2, resume)), gang, 1.0)
    assert not sent
    world.arrive()
    assert executor.finish_sends(gang, 2.0) == []
    (prepare,) = sent
    assert isinstance(prepare, orders.PrepareNode) and prepare.checkpoint is not None and prepare.resume is not None
    assert prepare.checkpoint.path == prepare.resume.path == str(tmp_path / "there" / "checkpoints" / "ckpt_10.pt")
    executor.carry_out(d.To(3.0, "why", "node-0", orders.Prepare(3, resume)), gang, 3.0)
    executor.carry_out(d.To(3.5, "why", "node-0", orders.Start(3, "127.0.0.1", 29500, "")), gang, 3.5)
    assert world.copier is not None and len(world.copier.dropped) == 1
    assert [type(order) for order in sent] == [orders.PrepareNode, orders.Start] and prepare.resume.step == 10
    executor.close()


def test_backend_text_about_node_is_masked(tmp_path: Path) -> None:
    brain, words = Brain(), f"its last words: no access with {SECRET}"
    for news in (*jobs.submitted(), d.Launch(1.0, "needed", 1, "node-0")):
        brain.learn(news)
    executor = _executor(JobDir(tmp_path), Backend([], [("node-1", LaunchError("process", words))], words, words))
    failed, gone = executor.poll(brain.facts, 2.0)
    masked = "its last words: no access with ***"
    assert isinstance(failed, e.LaunchFailed) and failed.reason == masked
    assert gone == e.AgentDied(2.0, "node-0", masked)
    assert set(executor.unreachable_reasons(brain.facts).values()) == {masked}
    executor.close()


# Before nodes are given back


def test_nodes_are_emptied_before_they_are_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Agents leave, and delete what is in memory, once it is on the disk; a limit ends that."""
    sent: list[tuple[str, object]] = []
    monkeypatch.setattr(AgentConnections, "send", lambda _, node, order: sent.append((node, order)))
    world = MemoryWorld(tmp_path, "n0", "n1", has_hosts=False)
    executor = _executor(world.job, Backend(), world)
    world.desk.memory.hosts = lambda: world.up
    save = world.save_all("step-10")
    assert not executor.empty_memory(1, 1.0) and sent == []
    for node in world.nodes:
        world.copied(node, CopyTarget.DISK, save)
    assert not executor.empty_memory(1, 2.0)
    assert sent == [("n0", orders.Dismiss(1)), ("n1", orders.Dismiss(1))]
    assert executor.empty_memory(1, 1.0 + TRANSFER_S_MAX), "they did not leave"
    world.up.clear()
    assert executor.empty_memory(1, 3.0)
    executor.close()


def test_nodes_without_checkpoints_in_memory_are_given_back_at_once(tmp_path: Path) -> None:
    world = MemoryWorld(tmp_path, "n0", has_hosts=False, limit=0)
    executor = _executor(world.job, Backend(), world)
    world.desk.memory.hosts = lambda: world.up
    assert executor.empty_memory(1, 1.0)
    executor.close()


def test_supervisor_leaves_when_memory_is_empty_or_the_job_has_moved(tmp_path: Path) -> None:
    job, allocation = JobDir(tmp_path), Lent()
    session = AllocationSession(job, jobs.plan(), allocation)
    assert not session.must_leave(lambda attempt, now_s: True, 1.0)
    session.requeue = d.Requeue(1.0, "preempted", 1, {})
    assert not session.must_leave(lambda attempt, now_s: False, 1.0)
    assert session.must_leave(lambda attempt, now_s: True, 1.0)
    job.allocation.write_text("8.2")
    session.check_replaced()
    assert session.must_leave(lambda attempt, now_s: False, 1.0)


# After the end of the job


def _left(*events: e.Event) -> tuple[str, ...]:
    """Return who is waited for when an agent was up on n0, these events followed, and the job has ended."""
    story = Story(hosts=2)
    facts = story.brain.facts
    for event in (story.up(0), *events):
        story.hear(event)
    facts.ended_at = 100.0
    for node in facts.nodes.values():
        node.agent_state = AgentState.ABSENT if node.agent_state is AgentState.LAUNCHING else node.agent_state
    return undismissed_hosts(facts, 101.0)


def test_supervisor_exits_when_all_agents_have_left() -> None:
    assert may_shut_down(100.0, 0.0, False, 100.1)


def test_agents_have_a_moment_to_leave() -> None:
    assert not may_shut_down(100.0, 0.0, True, 104.9)
    assert may_shut_down(100.0, 0.0, True, 105.1)


def test_pending_transfers_are_waited_for_within_limit() -> None:
    assert not may_shut_down(100.0, 130.0, True, 134.0)
    assert may_shut_down(100.0, 130.0, True, 135.1)
    assert may_shut_down(100.0, 1000.0, True, 405.1)


def test_undismissed_host_is_retried_for_a_while() -> None:
    """A host whose agent could not be dismissed is tried for a while."""
    story = Story(hosts=2)
    facts = story.brain.facts
    story.hear(story.up(0), e.AgentDisconnected(0.0, "n0"))
    facts.ended_at = 100.0
    facts.nodes["n1"].agent_state = AgentState.ABSENT
    assert undismissed_hosts(facts, 100.0 + LINGER_S_MAX) == ("n0",)
    assert undismissed_hosts(facts, 100.1 + LINGER_S_MAX) == ()


def test_starting_agent_is_waited_for() -> None:
    """An agent that is still starting is waited for too."""
    facts = Story(hosts=1).brain.facts
    facts.ended_at, facts.nodes["n0"].agent_state = 100.0, AgentState.LAUNCHING
    assert undismissed_hosts(facts, 101.0) == ("n0",)


def test_dismissed_agent_is_waited_for_until_it_leaves() -> None:
    ahead = e.QueueSeen(0.0, ("job-1",))  # so it is dismissed
    assert _left(ahead) == ("n0",)
    assert _left(ahead, e.AgentDisconnected(0.0, "n0")) == ("n0",)
    assert _left(ahead, e.AgentDisconnected(0.0, "n0", left=True)) == ()


def test_unreachable_agent_may_still_run() -> None:
    """An agent that could not be reached again may still be running."""
    silent, failed = (
        e.AgentDisconnected(0.0, "n0"),
        e.LaunchFailed(0.0, "n0", "connect", "no", observations.Retryable.TRANSIENT),
    )
    assert _left(silent, failed) == ("n0",)
    assert _left(silent, failed, e.AgentDied(0.0, "n0", "the host was restarted")) == ()


def test_node_sees_disk_only_if_agent_reported_it(tmp_path: Path) -> None:
    world = DeskWorld(tmp_path, "n0")
    executor = _executor(world.job, Backend(), world)
    for node, ships in (("n0", False), ("n1", True)):
        executor._connections.hellos[node] = reports.Hello(
            reports.PROTOCOL, "id", "", node, "boot", "host", 7, 0, 0, "", 0, (), 0, str(tmp_path), ships, ()
        )
    assert [world.desk.is_remote(node) for node in ("n0", "n1", "unknown")] == [False, True, True]
    executor.close()
