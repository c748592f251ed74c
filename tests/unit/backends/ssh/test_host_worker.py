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


def test_a_launch_connects_forwards_and_lands_with_the_hosts_own_address(world: World) -> None:
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    assert world.host.calls == ["open", "forward", "launch 127.0.0.1:30000"]
    assert (worker.take_failure(), worker.take_evidence(), worker.reason) == (None, None, "")
    world.dial()
    assert world.forwards[0][0] == "127.0.0.1:4000"


def test_a_launch_that_is_under_way_is_not_begun_twice(world: World) -> None:
    world.host.may_launch = threading.Semaphore(0)
    worker = world.worker()
    worker.launch(CONFIG)
    assert world.host.in_launch.acquire(timeout=REST_S_MAX)
    worker.launch(CONFIG)
    world.clock.until_rest(world.host.may_launch.release)
    assert world.host.calls == ["open", "forward", "launch 127.0.0.1:30000"]


@pytest.mark.parametrize("trouble", list(Retryable))
def test_a_failed_landing_is_told_once_and_not_tried_again(world: World, trouble: Retryable) -> None:
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


def test_a_host_that_cannot_be_reached_is_a_failed_launch(world: World) -> None:
    world.host.refuses = LaunchError("connect", "no route")
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    assert worker.take_failure() is world.host.refuses


def test_a_bug_is_a_failed_launch_and_not_a_dead_thread(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_dead_connection_is_opened_again_and_the_agent_told_the_new_port(world: World) -> None:
    worker = world.launched()
    world.host.answers = False
    world.clock.advance(11.0)

    def heal_and_ask() -> None:
        world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT))

    assert world.host.since(heal_and_ask) == ["ask", "close", "open", "forward", "reach 127.0.0.1:30001"]
    assert worker.take_evidence() is None


def test_a_way_that_stays_closed_is_tried_at_growing_distances_for_as_long_as_it_is_wanted(
    world: World,
) -> None:
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


def test_a_way_that_breaks_as_soon_as_it_is_open_is_opened_again_after_a_pause(world: World) -> None:
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


def test_an_agent_that_cannot_be_looked_for_keeps_its_way(world: World) -> None:
    worker = world.launched()
    world.clock.advance(3.0)
    world.host.unseen = LaunchError("folder", "no space")
    looked = world.host.since(lambda: world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT)))
    assert looked == ["ask", "reach 127.0.0.1:30000", "ask"]
    assert worker.reason == "folder: no space"
    assert not world.host.sessions[-1].closed


def test_a_host_that_refuses_for_good_is_tried_slowly_and_the_reason_is_kept(world: World) -> None:
    world.host.refuses = LaunchError("host key", "its key changed", "", Retryable.PERMANENT)
    worker = world.worker()
    world.clock.until_rest(lambda: worker.keep_reachable(CONFIG))
    assert world.host.since(lambda: world.clock.advance(29.0)) == []
    assert world.host.since(lambda: world.clock.advance(1.1)) == ["open"]
    assert worker.reason == "host key: its key changed"


def test_news_from_the_supervisor_ends_a_pause(world: World) -> None:
    world.host.refuses = LaunchError("connect", "no route")
    worker = world.worker()
    world.clock.until_rest(lambda: worker.keep_reachable(CONFIG))
    for _ in range(6):
        world.clock.advance(10.0)
    world.clock.advance(3.0)
    asked = world.host.since(lambda: world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT)))
    assert asked == ["open"]


def test_an_agent_that_is_gone_is_told_once_and_no_way_kept_for_it(world: World) -> None:
    worker = world.launched()
    world.host.agent = False
    world.clock.advance(3.0)
    world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT))
    assert worker.take_evidence() == "its agent is no longer running; no output"
    assert worker.take_evidence() is None
    assert world.woken == 1
    world.clock.advance(61.0)
    assert world.host.sessions[-1].closed


def test_a_host_that_was_restarted_is_told(world: World) -> None:
    worker = world.launched()
    world.host.agent, world.host.boot, world.host.answers = False, "boot-2", False
    world.clock.advance(11.0)
    world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT))
    assert worker.take_evidence() == "the host was restarted"


def test_an_agent_is_not_looked_for_oftener_than_every_two_seconds(world: World) -> None:
    worker = world.launched()
    world.clock.advance(2.0)
    ask = lambda: world.clock.until_rest(lambda: worker.check(w.HostAction.CHECK_AGENT))  # noqa: E731
    assert world.host.since(ask) == ["ask", "reach 127.0.0.1:30000"]
    assert world.host.since(ask) == []
    assert world.host.since(lambda: world.clock.advance(0.6)) == ["ask"]  # which costs next to nothing
    assert world.host.since(lambda: world.clock.advance(1.3)) == []
    assert world.host.since(lambda: world.clock.advance(0.2)) == ["ask", "reach 127.0.0.1:30000"]


def test_an_agent_that_does_not_dial_is_looked_for(world: World) -> None:
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    world.host.agent = False
    assert world.host.since(lambda: world.clock.advance(retry_schedule.UNUSED_S)) == [
        "ask",
        "reach 127.0.0.1:30000",
    ]
    assert worker.take_evidence() == "its agent is no longer running; no output"


def test_an_agent_that_hangs_up_has_its_connection_asked(world: World) -> None:
    worker = world.worker()
    world.clock.until_rest(lambda: worker.launch(CONFIG))
    hang_up = world.dial()
    world.clock.advance(5.0)
    assert world.host.since(lambda: world.clock.until_rest(hang_up)) == ["ask"]


def test_a_dismissed_agents_way_is_kept_a_while_and_as_long_as_copies_use_it(world: World) -> None:
    worker = world.launched()
    world.clock.until_rest(worker.release)
    world.busy = True
    world.clock.advance(w.RELEASE_S + 1)
    assert not world.host.sessions[-1].closed
    world.busy = False
    world.clock.advance(w.BUSY_S)
    assert world.host.sessions[-1].closed
    assert world.host.since(lambda: world.clock.until_rest(lambda: worker.launch(CONFIG)))[0] == "open"


def test_a_connection_is_lent_for_copies_after_the_agent_has_left(world: World) -> None:
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


def test_closing_ends_the_thread_and_hangs_up(world: World) -> None:
    worker = world.launched()
    worker.close()
    worker.join(REST_S_MAX)
    assert world.host.calls == ["close"]
    assert worker.borrow_session() is None


def test_no_more_hosts_launch_at_once_than_have_turns(world: World) -> None:
    world.host.may_launch = threading.Semaphore(0)
    workers = [world.worker() for _ in range(3)]
    for worker in workers:
        worker.launch(CONFIG)
    assert all(world.host.in_launch.acquire(timeout=REST_S_MAX) for _ in range(2))
    assert not world.host.in_launch.acquire(blocking=False)
    world.host.may_launch.release(3)
    assert world.host.in_launch.acquire(timeout=REST_S_MAX)


def test_a_host_that_is_let_go_while_it_is_launched_gets_no_agent(world: World) -> None:
    world.host.may_launch = threading.Semaphore(0)
    worker = world.worker()
    worker.launch(CONFIG)
    assert world.host.in_launch.acquire(timeout=REST_S_MAX)
    worker.release()
    world.clock.until_rest(world.host.may_launch.release)
    assert (world.host.started, worker.take_failure()) == (0, None)


def test_a_launch_that_is_not_wanted_any_more_gives_up_its_place(world: World) -> None:
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


def test_a_connection_too_many_is_closed(world: World) -> None:
    world.launched()
    for _ in range(FORWARDS_MAX - 1):
        world.dial()
    closed, taker = threading.Event(), world.host.sessions[-1].taker
    assert taker is not None
    taker(cast(paramiko.Channel, SimpleNamespace(close=closed.set)))
    assert closed.wait(REST_S_MAX)
    assert len(world.forwards) == FORWARDS_MAX
