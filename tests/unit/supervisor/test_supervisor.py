"""A supervisor's wiring, from the job folder to the orders that agents get. No process is started."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.checkpoints.checkpoint import CheckpointState, CompletionReason, HostPart
from orchestrator.core.jobdir import locks, requests
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.connection import PeerError
from orchestrator.supervisor import allocation_claim, heartbeat_tracker
from orchestrator.supervisor.main_loop import supervise
from tests.support import jobs
from tests.support.fake_backend import ANSWER_S_MAX, SECRET, Backend, Node, folder_of, play
from tests.support.saved_files import sight, torch_save, write
from tests.unit.supervisor.test_notifications import Hook
from tests.unit.supervisor.test_notifications import hook as hook

LOG = "logs/attempt-001/rank-00000.log"
CRASH = reports.Exited(
    1, 0, 1, None, 6, observations.Failure("OSError", f"no access with {SECRET}", "", None), False, False
)


def _saves(node: Node) -> reports.CheckpointSeen:
    """Let the node's rank save its fifth step, and go on; return what its agent reports of that."""
    write(node.job.checkpoints / "step-5.pt", torch_save({"step": 5}))
    found = sight(node.job.checkpoints)
    (key,) = found.groups
    group, pieces = found.groups[key], tuple(found.tree.files.values())
    part = HostPart("", str(node.job.checkpoints), 5, pieces, found.readings[key], CompletionReason.STEPS)
    return reports.CheckpointSeen(1, group.key, group.series, group.main, part)


@pytest.mark.slow
def test_job_crashes_resumes_is_inspected_and_cancelled(tmp_path: Path) -> None:
    path = str(tmp_path / jobs.ID / "checkpoints" / "step-5.pt")

    async def act(node: Node) -> None:
        await node.greet()
        await node.run(1)
        node.say(reports.Heartbeat(1, (reports.RankHeartbeat(0, 5, "S", 0, 0.0),), 1))
        seen = _saves(node)
        node.report(seen)
        node.say(seen, node.seq)  # again, as after a broken line
        node.report(CRASH)
        node.say(CRASH, node.seq)
        assert await node.order() == orders.Stop(1, node.plan.limits.break_grace_s)
        node.report(reports.Stopped(1, "asked"))
        prepare = await node.run(2)
        assert prepare.resume is not None and prepare.resume.path == path
        requests.send(node.job.requests, "look")
        assert await node.order() == orders.Inspect(2, 1)
        requests.send(node.job.requests, "cancel")
        assert (await node.order(), node.acked) == (orders.Stop(2, 77.0), orders.Ack(node.seq, 1))
        node.report(reports.Stopped(2, "asked"))
        await node.leave()

    node = play(tmp_path, act, monitor={"stop_grace": 77}, restart={"backoff": 0})
    (config,) = node.backend.launched
    assert config.fence_s == node.plan.limits.fence_s
    assert [one.save.state for one in node.news(e.CheckpointChanged)][:2] == [
        CheckpointState.OPEN,
        CheckpointState.WHOLE,
    ]
    assert [(one.save, one.fault) for one in node.news(e.CheckpointCompared)] == [(1, "")]
    assert [type(one) for one in node.news(e.Planned, e.SupervisorStarted)] == [
        e.Planned,
        e.SupervisorStarted,
    ]
    (exited,) = node.news(reports.Exited)
    assert exited.failure.message == "no access with ***"
    assert [one.end for one in node.news(d.EndJob)] == [d.JobEnd.CANCELLED]
    assert json.loads(node.job.state.read_text())["state"] == "CANCELLED" and node.job.ended.exists()


def test_job_fails_masked_without_restarts_left(
    tmp_path: Path, hook: tuple[str, type[Hook]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A job fails when its restarts are spent, and the text about that is masked."""
    url, served = hook
    served.codes = [400]
    served.responses = {400: (f"not for {SECRET}", "")}

    async def act(node: Node) -> None:
        await node.greet()
        await node.run(1)
        node.report(CRASH)
        await node.order()
        node.report(reports.Stopped(1, "asked"))
        await node.leave()

    node = play(tmp_path, act, restart={"max": 0}, notify={"url": url, "on": ["failed"]})
    assert [one.end for one in node.news(d.EndJob)] == [d.JobEnd.FAILED]
    assert [told["event"] for told in served.told] == ["failed"]
    assert "notify.url did not get failed: HTTP 400 not for ***" in capsys.readouterr().out


@pytest.mark.slow
def test_log_bytes_are_acknowledged_and_gap_restarts_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a log are acknowledged, and after a gap the node begins again."""
    monkeypatch.setattr(heartbeat_tracker, "SILENT_S_MIN", 10 * ANSWER_S_MAX)  # it is not cut off for having no beat

    async def act(node: Node) -> None:
        await node.greet(ships=True)
        assert await node.order() == orders.ResumeOffsets({})
        await node.run(1)
        node.say(reports.Chunk(LOG, 0), raw=b"step 1\n")
        assert await node.order() == orders.ChunkAck(7)
        node.say(reports.Chunk(LOG, 100), raw=b"step 9\n")
        with pytest.raises(PeerError):
            await node.order()
        await node.greet(ships=True, running=1)
        assert await node.order() == orders.ResumeOffsets({LOG: 7})
        requests.send(node.job.requests, "cancel")
        assert isinstance(await node.order(), orders.Stop)
        node.report(reports.Stopped(1, "asked"))
        await node.leave()

    assert (play(tmp_path, act).job.root / LOG).read_bytes() == b"step 1\n"


# Who may act


@pytest.fixture
def _hangup() -> Iterator[None]:
    """Put back how this process takes the end of its terminal, which a supervisor outlives."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def _none(job: JobDir, plan: Plan) -> Backend:
    raise AssertionError("a supervisor that may not act has no use for a backend")


@pytest.mark.usefixtures("_hangup")
def test_only_lock_holder_supervises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "LOCK_S_MAX", 0.0)
    job, _ = folder_of(tmp_path)
    with locks.hold(job.lock) as mine:
        assert mine and supervise(job.root, _none) == allocation_claim.SUCCEEDED
    assert "another supervisor is running" in capsys.readouterr().err
    assert not job.journal.exists()


@dataclass(frozen=True, slots=True)
class Lent:
    """An allocation that the job has left."""

    id: str = "8.1"
    nodes: tuple[str, ...] = ("node1",)

    def addresses(self) -> list[str]:
        return []

    def check(self) -> None:
        pass

    def endings(self) -> list[Any]:
        return []

    def requeue(self, avoid: Any) -> str:
        return ""


@pytest.mark.usefixtures("_hangup")
def test_supervisor_does_not_act_in_former_allocation(tmp_path: Path) -> None:
    """A supervisor does not act in an allocation that the job has left."""
    job, _ = folder_of(tmp_path)
    allocation_claim.claim(job, "8.2")
    assert supervise(job.root, lambda job, plan: Backend(allocation=Lent())) == allocation_claim.OVER
    assert not job.journal.exists()
