"""Host worker: launches once, keeps the connection open, reports what it sees. Over fake sessions and a fake clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import paramiko
import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import host_worker as w
from orchestrator.backends.ssh import retry_schedule
from orchestrator.backends.ssh.connect.port_forward import FORWARDS_MAX
from orchestrator.core.observations import Retryable
from tests.support.fake_session import CONFIG, REST_S_MAX, World


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    for worker in one.workers:
        worker.close()
        worker.join(REST_S_MAX)


def test_launch_connects_forwards_and_starts_with_host_address(world: World) -> None:
    """A launch connects, forwards a port and starts the agent with the host's own address."""
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    assert world.host.calls == ["open", "forward", "launch 127.0.0.1:30000"]
    assert (worker.take_failure(), worker.take_evidence(), worker.reason) == (None, None, "")
    world.dial()
    assert world.forwards[0][0] == "127.0.0.1:4000"


def test_launch_under_way_is_not_repeated(world: World) -> None:
    """A launch that is under way is not started twice."""
    world.host.may_launch = threading.Semaphore(0)
    worker = world.worker()
    worker.launch(CONFIG)
    assert world.host.in_launch.acquire(timeout=REST_S_MAX)
    worker.launch(CONFIG)
    world.clock.until_rest(world.host.may_launch.release)
    assert world.host.calls == ["open", "forward", "launch 127.0.0.1:30000"]


@pytest.mark.parametrize("trouble", list(Retryable))
def test_failed_launch_is_reported_once_and_not_retried(world: World, trouble: Retryable) -> None:
    """A failed launch is reported once and not tried again."""
    world.host.launch_error = LaunchError("folder", "no space", "make some", trouble)
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    assert worker.take_failure() is world.host.launch_error
    assert worker.take_failure() is None
    assert (world.woken, worker.reason) == (1, "folder: no space")
    assert world.host.since(lambda: world.clock.advance(50.0)) == []
    kept = trouble is Retryable.BUSY  # the next try, when a GPU comes free, needs no new connection
    assert world.host.sessions[-1].closed is not kept
    world.host.launch_error = None
    again = world.host.since(lambda: world.clock.until_rest(lambda: worker.launch(CONFIG)))
    begin = ["ask"] if kept else ["open", "forward"]
    assert again == [*begin, f"launch 127.0.0.1:{30_000 if kept else 30_001}"]
    assert worker.reason == ""


def test_unreachable_host_is_a_failed_launch(world: World) -> None:
    """A host that cannot be reached is a failed launch."""
    world.host.refuses = LaunchError("connect", "no route")
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    assert worker.take_failure() is world.host.refuses


def test_bug_is_failed_launch_not_dead_thread(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.host.launch_error = ZeroDivisionError("oh")
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    failure = worker.take_failure()
    assert failure is not None
    assert "ZeroDivisionError: oh" in failure.reason
    assert "Traceback" in capsys.readouterr().err
    world.host.launch_error = None
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    assert worker.take_failure() is None


def test_dead_connection_is_reopened_and_agent_given_port(world: World) -> None:
    """A dead connection is opened again, and the agent is given the new port."""
    worker = world.launched()
    world.host.answers = False
    world.clock.advance(11.0)

    def heal_and_ask() -> None:
        world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT))

    assert world.host.since(heal_and_ask) == ["ask", "close", "open", "forward", "reach 127.0.0.1:30001"]
    assert worker.take_evidence() is None


def test_closed_connection_is_retried_with_backoff_while_wanted(
    world: World,
) -> None:
    """A connection that stays closed is retried at growing intervals for as long as it is wanted."""
    world.host.refuses = LaunchError("connect", "no route")
    worker = world.worker()
    world.clock.until_rest(lambda: worker.keep_reachable(CONFIG))
    assert worker.reason == "connect: no route"
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0):
        assert world.host.since(lambda: world.clock.advance(pause_s - 0.1)) == []  # noqa: B023
        assert world.host.since(lambda: world.clock.advance(0.11)) == ["open"]
    world.host.refuses = None
    world.clock.advance(10.0)
    assert world.host.calls[-2:] == ["forward", "reach 127.0.0.1:30000"]
    assert (worker.reason, worker.take_failure()) == ("", None)


def test_connection_breaking_at_once_is_reopened_after_pause(world: World) -> None:
    """A connection that breaks as soon as it is open is opened again after a pause."""
    worker = world.launched()
    world.clock.advance(3.0)
    world.host.answers = False
    broken = lambda: world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_CONNECTION))  # noqa: E731
    assert world.host.since(broken) == ["ask", "close"]
    assert world.host.since(lambda: world.clock.advance(0.6)) == ["open", "forward", "reach 127.0.0.1:30001"]
    world.clock.advance(0.6)
    assert world.host.since(broken) == ["ask", "close"]
    assert world.host.since(lambda: world.clock.advance(0.6)) == []
    assert world.host.since(lambda: world.clock.advance(0.6)) == ["open", "forward", "reach 127.0.0.1:30002"]


def test_agent_that_cannot_be_checked_keeps_connection(world: World) -> None:
    worker = world.launched()
    world.clock.advance(3.0)
    world.host.unseen = LaunchError("folder", "no space")
    looked = world.host.since(lambda: world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT)))
    assert looked == ["ask", "reach 127.0.0.1:30000", "ask"]
    assert worker.reason == "folder: no space"
    assert not world.host.sessions[-1].closed


def test_refusing_host_is_retried_slowly_with_reason_kept(world: World) -> None:
    """A host that refuses for good is tried slowly, and the reason is kept."""
    world.host.refuses = LaunchError("host key", "its key changed", "", Retryable.PERMANENT)
    worker = world.worker()
    world.clock.until_rest(lambda: worker.keep_reachable(CONFIG))
    assert world.host.since(lambda: world.clock.advance(29.0)) == []
    assert world.host.since(lambda: world.clock.advance(1.1)) == ["open"]
    assert worker.reason == "host key: its key changed"


def test_supervisor_request_ends_a_pause(world: World) -> None:
    world.host.refuses = LaunchError("connect", "no route")
    worker = world.worker()
    world.clock.until_rest(lambda: worker.keep_reachable(CONFIG))
    for _ in range(6):
        world.clock.advance(10.0)
    world.clock.advance(3.0)
    asked = world.host.since(lambda: world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT)))
    assert asked == ["open"]


def test_gone_agent_is_reported_once_and_disconnected(world: World) -> None:
    """An agent that is gone is reported once, and no connection is kept for it."""
    worker = world.launched()
    world.host.agent = False
    world.clock.advance(3.0)
    world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT))
    assert worker.take_evidence() == "its agent is no longer running; no output"
    assert worker.take_evidence() is None
    assert world.woken == 1
    world.clock.advance(61.0)
    assert world.host.sessions[-1].closed


def test_rebooted_host_is_reported(world: World) -> None:
    worker = world.launched()
    world.host.agent, world.host.boot, world.host.answers = False, "boot-2", False
    world.clock.advance(11.0)
    world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT))
    assert worker.take_evidence() == "the host was restarted"


def test_agent_is_checked_at_most_every_two_seconds(world: World) -> None:
    worker = world.launched()
    world.clock.advance(2.0)
    ask = lambda: world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT))  # noqa: E731
    assert world.host.since(ask) == ["ask", "reach 127.0.0.1:30000"]
    assert world.host.since(ask) == []
    assert world.host.since(lambda: world.clock.advance(0.6)) == ["ask"]  # which costs next to nothing
    assert world.host.since(lambda: world.clock.advance(1.3)) == []
    assert world.host.since(lambda: world.clock.advance(0.2)) == ["ask", "reach 127.0.0.1:30000"]


def test_agent_that_does_not_connect_is_checked(world: World) -> None:
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    world.host.agent = False
    assert world.host.since(lambda: world.clock.advance(retry_schedule.UNUSED_S)) == [
        "ask",
        "reach 127.0.0.1:30000",
    ]
    assert worker.take_evidence() == "its agent is no longer running; no output"


def test_agent_hangup_triggers_connection_check(world: World) -> None:
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    hang_up = world.dial()
    world.clock.advance(5.0)
    assert world.host.since(lambda: world.clock.until_rest(hang_up)) == ["ask"]


def test_dismissed_agents_connection_stays_while_copies_run(world: World) -> None:
    """A dismissed agent's connection is kept for a while and as long as copies use it."""
    worker = world.launched()
    world.clock.until_rest(worker.release)
    world.busy = True
    world.clock.advance(w.RELEASE_S + 1)
    assert not world.host.sessions[-1].closed
    world.busy = False
    world.clock.advance(w.BUSY_S)
    assert world.host.sessions[-1].closed
    assert world.host.since(lambda: world.clock.until_rest(lambda: worker.launch(CONFIG)))[0] == "open"


def test_connection_is_lent_for_copies_after_agent_exit(world: World) -> None:
    worker = world.launched()
    world.clock.until_rest(worker.release)
    world.clock.advance(w.RELEASE_S + 1)
    assert world.host.sessions[-1].closed
    session = worker.borrow_session()
    assert session is world.host.sessions[-1]
    assert not world.host.sessions[-1].closed
    assert world.host.calls[-2:] == ["open", "ask"]


def test_a_dead_connection_is_not_lent(world: World) -> None:
    worker = world.launched()
    world.clock.advance(retry_schedule.STABLE_S)
    world.host.sessions[-1].closed = True
    assert worker.borrow_session() is world.host.sessions[1]


def test_close_ends_thread_and_disconnects(world: World) -> None:
    worker = world.launched()
    worker.close()
    worker.join(REST_S_MAX)
    assert world.host.calls == ["close"]
    assert worker.borrow_session() is None


def test_concurrent_launches_are_limited(world: World) -> None:
    """No more hosts launch at once than the limit."""
    world.host.may_launch = threading.Semaphore(0)
    workers = [world.worker() for _ in range(3)]
    for worker in workers:
        worker.launch(CONFIG)
    assert all(world.host.in_launch.acquire(timeout=REST_S_MAX) for _ in range(2))
    assert not world.host.in_launch.acquire(blocking=False)
    world.host.may_launch.release(3)
    assert world.host.in_launch.acquire(timeout=REST_S_MAX)


def test_host_released_during_launch_gets_no_agent(world: World) -> None:
    world.host.may_launch = threading.Semaphore(0)
    worker = world.worker()
    worker.launch(CONFIG)
    assert world.host.in_launch.acquire(timeout=REST_S_MAX)
    worker.release()
    world.clock.until_rest(world.host.may_launch.release)
    assert (world.host.started, worker.take_failure()) == (0, None)


def test_cancelled_launch_gives_up_its_slot(world: World) -> None:
    """A launch that is not wanted any more gives up its slot."""
    world.host.may_launch = threading.Semaphore(0)
    workers = [world.worker() for _ in range(3)]
    for worker in workers:
        worker.launch(CONFIG)
    assert all(world.host.in_launch.acquire(timeout=REST_S_MAX) for _ in range(2))
    for worker in workers:
        worker.close()
    world.host.may_launch.release(2)
    for worker in workers:
        worker.join(REST_S_MAX)
    assert world.host.calls.count("open") == 2


def test_surplus_connection_is_closed(world: World) -> None:
    world.launched()
    for _ in range(FORWARDS_MAX - 1):
        world.dial()
    closed, taker = threading.Event(), world.host.sessions[-1].taker
    assert taker is not None
    taker(cast(paramiko.Channel, SimpleNamespace(close=closed.set)))
    assert closed.wait(REST_S_MAX)
    assert len(world.forwards) == FORWARDS_MAX
