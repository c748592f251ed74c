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
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.supervisor import translation
from orchestrator.supervisor.agent_connections import AgentConnections
from orchestrator.supervisor.executor import LINGER_S_MAX, Executor, may_shut_down, undismissed_hosts
from orchestrator.supervisor.transfers.transfers import Transfers
from tests.support import jobs
from tests.support.brain_story import Story
from tests.support.fake_backend import SECRET, Backend

OLD, NEW = "127.0.0.1:4000", "127.0.0.1:4001"


def _executor(job: JobDir, backend: Backend) -> Executor:
    plan = jobs.plan()
    connections, transfers = AgentConnections(plan.id, "token", ()), Transfers(job, plan, None, lambda: "")
    return Executor(
        job,
        plan,
        translation.JobSecrets("token", "", {}, {"HF_TOKEN": SECRET}),
        backend,
        connections,
        transfers,
    )


def _refuse(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_an_old_word_that_still_holds_is_renewed_and_another_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = JobDir(tmp_path)
    job.endpoint.write_text(OLD)
    os.utime(job.endpoint, (1.0, 1.0))
    executor = _executor(job, Backend())
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _refuse)
        executor.endpoint = OLD
        executor.publish_endpoint()
        assert job.endpoint.stat().st_mtime > 1.0 and job.endpoint.read_text() == OLD
        executor.endpoint = NEW
        executor.publish_endpoint()
        executor.resume(tuple, 1.0)
        assert job.endpoint.read_text() == OLD
    executor.resume(tuple, 2.0)
    assert job.endpoint.read_text() == NEW
    executor.close()


def test_a_spare_looks_for_no_port_even_where_it_would_be_the_first_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    executor, sent = _executor(JobDir(tmp_path), Backend()), {}
    monkeypatch.setattr(AgentConnections, "send", lambda _, node, order: sent.update({node: order}))
    for node in ("node-0", "node-1"):
        executor.carry_out(d.Prepare(1.0, "why", 1, node, None), (("node-0", (0, 1)),), 1.0)
    assert [sent[node].wants_port for node in ("node-0", "node-1")] == [True, False]
    executor.close()


def test_nothing_is_sent_any_more_to_a_node_whose_ranks_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    executor, let_go = _executor(JobDir(tmp_path), Backend()), []
    monkeypatch.setattr(AgentConnections, "send", lambda *_: True)
    monkeypatch.setattr(Transfers, "let_go", lambda _, node, at: let_go.append(node))
    start = d.Start(1.0, "why", 1, "node-0", "127.0.0.1", 29500, "", None)
    executor.carry_out(start, (("node-0", (0, 1)),), 1.0)
    assert let_go == ["node-0"]
    executor.close()


def test_what_a_backend_says_of_a_node_is_masked(tmp_path: Path) -> None:
    brain, words = Brain(), f"its last words: no access with {SECRET}"
    for news in (*jobs.submitted(), d.Launch(1.0, "needed", 1, "node-0")):
        brain.learn(news)
    executor = _executor(
        JobDir(tmp_path), Backend([], [("node-1", LaunchError("process", words))], words, words)
    )
    failed, gone = executor.poll(brain.facts, 2.0)
    masked = "its last words: no access with ***"
    assert isinstance(failed, e.LaunchFailed) and failed.reason == masked
    assert gone == e.AgentDied(2.0, "node-0", masked)
    assert set(executor.reasons(brain.facts).values()) == {masked}
    executor.close()


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


def test_it_goes_when_all_agents_have_left() -> None:
    assert may_shut_down(100.0, 0.0, False, 100.1)


def test_agents_have_a_moment_to_leave() -> None:
    assert not may_shut_down(100.0, 0.0, True, 104.9)
    assert may_shut_down(100.0, 0.0, True, 105.1)


def test_what_still_comes_home_is_waited_for_but_not_for_ever() -> None:
    assert not may_shut_down(100.0, 130.0, True, 134.0)
    assert may_shut_down(100.0, 130.0, True, 135.1)
    assert may_shut_down(100.0, 1000.0, True, 405.1)


def test_a_host_whose_agent_could_not_be_dismissed_is_tried_for_a_while() -> None:
    story = Story(hosts=2)
    facts = story.brain.facts
    story.hear(story.up(0), e.AgentDisconnected(0.0, "n0"))
    facts.ended_at = 100.0
    facts.nodes["n1"].agent_state = AgentState.ABSENT
    assert undismissed_hosts(facts, 100.0 + LINGER_S_MAX) == ("n0",)
    assert undismissed_hosts(facts, 100.1 + LINGER_S_MAX) == ()


def test_one_that_is_still_coming_up_is_waited_for_too() -> None:
    facts = Story(hosts=1).brain.facts
    facts.ended_at, facts.nodes["n0"].agent_state = 100.0, AgentState.LAUNCHING
    assert undismissed_hosts(facts, 101.0) == ("n0",)


def test_an_agent_that_was_told_to_leave_is_waited_for_until_it_says_that_it_does() -> None:
    ahead = e.QueueSeen(0.0, ("job-1",))  # so it is dismissed
    assert _left(ahead) == ("n0",)
    assert _left(ahead, e.AgentDisconnected(0.0, "n0")) == ("n0",)
    assert _left(ahead, e.AgentDisconnected(0.0, "n0", left=True)) == ()


def test_an_agent_that_could_not_be_reached_again_may_still_be_there() -> None:
    silent, failed = (
        e.AgentDisconnected(0.0, "n0"),
        e.LaunchFailed(0.0, "n0", "connect", "no", observations.Retryable.TRANSIENT),
    )
    assert _left(silent, failed) == ("n0",)
    assert _left(silent, failed, e.AgentDied(0.0, "n0", "the host was restarted")) == ()
