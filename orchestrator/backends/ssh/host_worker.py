"""Host worker: the thread that launches the agent of one host and keeps the connection to it open.

Rules: the wish (`HostWish`, written by other threads) and the observation (`HostObservation`, written by the worker's
thread) are kept apart; one lock protects both. `_next_due` picks the next action from both. An action that fails
changes neither the wish nor other hosts. A wish that comes during an action outlives it. The worker decides nothing:
whether a launch is tried again is the brain's decision.
"""

from __future__ import annotations

import enum
import sys
import threading
import traceback
from dataclasses import replace

import paramiko

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.port_forward import FORWARDS_MAX
from orchestrator.backends.ssh.retry_schedule import RetrySchedule
from orchestrator.backends.ssh.session import (
    HostGoal,
    HostObservation,
    HostWish,
    Session,
    WorkerDependencies,
)
from orchestrator.core.errors import Cancelled
from orchestrator.core.observations import Retryable
from orchestrator.core.wire.agent_config import AgentConfig
from orchestrator.core.wire.bootstrap import AgentStatus

ANSWER_S_MAX = 5.0
"""How long the far end may take to answer before its connection counts as dead."""

RELEASE_S = 60.0
"""How long a connection stays open after its last use."""

BUSY_S = 10.0
"""How long to wait again for copies that still use a connection."""

IDLE_CHECK_S = 60.0
"""How often a thread without work checks for some; wishes wake it at once."""

BORROW_S_MAX = 20.0
"""How long a copy waits for a connection to be opened."""


class HostAction(enum.Enum):
    """Next action of the thread."""

    LAUNCH = "launch"
    OPEN = "open"
    CHECK_CONNECTION = "check connection"
    CHECK_AGENT = "check agent"
    HANG_UP = "hang up"
    END = "end"


class HostWorker:
    """One host's wish, observation and thread."""

    def __init__(self, node: str, dependencies: WorkerDependencies) -> None:
        self._node = node
        self._dependencies = dependencies
        self._clock = dependencies.clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wish = HostWish()
        self._observed = HostObservation()
        self._schedule = RetrySchedule()

    # Wishes: called from any thread, never wait unless they say so.

    def launch(self, config: AgentConfig) -> None:
        """Begin to start the agent; does nothing while that is under way."""
        with self._changed:
            if self._wish.goal is not HostGoal.AGENT:
                self._set_wish(HostGoal.AGENT, config)

    def keep_reachable(self, config: AgentConfig) -> None:
        """Keep a connection open to an agent that may be there, and launch none."""
        with self._changed:
            if self._wish.goal is not HostGoal.CONNECTION:
                self._set_wish(HostGoal.CONNECTION, config)

    def release(self) -> None:
        """Let the connection be closed, a little later."""
        with self._changed:
            self._want_nothing()

    def check(self, action: HostAction) -> None:
        """Request CHECK_CONNECTION, or CHECK_AGENT, which checks the connection too and ends a pause between tries."""
        with self._changed:
            if action is HostAction.CHECK_AGENT:
                self._schedule.request_agent_check()
            else:
                self._schedule.request_connection_check()
            self._changed.notify_all()

    def borrow_session(self, wait_s: float = BORROW_S_MAX) -> Session | None:
        """Return a session that answers, opening one if need be; None when there is none within `wait_s`."""
        deadline_s = self._clock.now_s() + wait_s
        with self._changed:
            self._wish.borrowers += 1
            self._begin()
        try:
            dead: Session | None = None
            while (session := self._open_session(dead, deadline_s)) is not None:
                if session.is_alive(ANSWER_S_MAX):
                    return session
                dead = session
                self.check(HostAction.CHECK_CONNECTION)
            return None
        finally:
            with self._changed:
                self._wish.borrowers -= 1
                self._wish.idle_since_s = self._clock.now_s()

    def _open_session(self, other_than: Session | None, deadline_s: float) -> Session | None:
        """Wait until a session is open; None when there is none at the deadline."""
        with self._changed:
            while self._observed.session is None or self._observed.session is other_than:
                rest_s = deadline_s - self._clock.now_s()
                if rest_s <= 0 or self._wish.is_closing:
                    return None
                self._clock.wait(self._changed, rest_s)
            return self._observed.session

    def close(self) -> None:
        """Hang up and end, whatever is under way; the agent stays."""
        with self._changed:
            self._wish.is_closing = True
            self._changed.notify_all()
        self._hang_up()

    def join(self, wait_s: float) -> None:
        """Wait at most `wait_s` for the thread to end."""
        if self._thread is not None:
            self._thread.join(wait_s)

    # Observations.

    def take_failure(self) -> LaunchError | None:
        """Return how the last launch failed, once."""
        with self._changed:
            failure, self._observed.failure = self._observed.failure, None
            return failure

    def take_evidence(self) -> str | None:
        """Return what shows that the agent died, once."""
        with self._changed:
            evidence, self._observed.evidence = self._observed.evidence, None
            return evidence

    @property
    def reason(self) -> str:
        """Why there is no connection to the host now; empty when there is one, or none is wanted."""
        return self._observed.reason

    # Helpers that need the lock to be held.

    def _set_wish(self, goal: HostGoal, config: AgentConfig | None) -> None:
        self._wish.goal, self._wish.config = goal, config
        self._wish.number += 1
        self._schedule.reset()
        self._observed.reason = ""
        if goal is not HostGoal.NOTHING:
            self._observed.failure = self._observed.evidence = None
            self._begin()
        self._changed.notify_all()

    def _want_nothing(self) -> None:
        self._set_wish(HostGoal.NOTHING, self._wish.config)
        self._wish.idle_since_s = self._clock.now_s()

    def _begin(self) -> None:
        """Start the thread if there is none, and wake it."""
        if self._thread is None and not self._wish.is_closing:
            self._thread = threading.Thread(target=self._run, name=f"ssh {self._node}", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _next_due(self, now_s: float) -> tuple[HostAction | None, float]:
        """Return the action that is due now, or in how many seconds to check again."""
        wish, observed = self._wish, self._observed
        if wish.is_closing:
            return HostAction.END, 0.0
        if wish.goal is HostGoal.AGENT:
            return HostAction.LAUNCH, 0.0
        if observed.session is None:
            if wish.goal is HostGoal.NOTHING and not wish.borrowers:
                return None, IDLE_CHECK_S
            rest_s = self._schedule.retry_s - now_s
            return (HostAction.OPEN, 0.0) if rest_s <= 0 else (None, rest_s)
        if wish.goal is HostGoal.NOTHING:
            return self._due_to_hang_up(now_s)
        connection_s = self._schedule.connection_check_due_s()
        agent_s = self._schedule.agent_check_due_s(is_used=bool(observed.forwards))
        if now_s >= agent_s:
            return HostAction.CHECK_AGENT, 0.0
        if now_s >= connection_s:
            return HostAction.CHECK_CONNECTION, 0.0
        return None, min(connection_s, agent_s) - now_s

    def _due_to_hang_up(self, now_s: float) -> tuple[HostAction | None, float]:
        """Like `_next_due` for a connection that is released: it stays open for threads that may still use it."""
        requested_s = self._schedule.connection_check_requested_s
        if now_s >= requested_s:
            return HostAction.CHECK_CONNECTION, 0.0
        rest_s = min(requested_s, self._wish.idle_since_s + RELEASE_S) - now_s
        if rest_s > 0:
            return None, rest_s
        if self._wish.borrowers or self._dependencies.busy(self._node):
            return None, BUSY_S
        return HostAction.HANG_UP, 0.0

    # The thread.

    def _run(self) -> None:
        while True:
            action, number = self._next()
            if action is HostAction.END:
                break
            try:
                self._perform(action, number)
            except Cancelled:
                continue
            except LaunchError as err:
                self._note_failure(action, number, err)
            except Exception as err:  # a thread that ends in silence leaves a host unattended
                traceback.print_exc(file=sys.stderr)
                fault = LaunchError("connect", f"orch failed: {type(err).__name__}: {err}")
                self._note_failure(action, number, fault)
        self._hang_up()

    def _next(self) -> tuple[HostAction, int]:
        """Wait until an action is due; return it, and the number of the wish that it is for."""
        with self._changed:
            while True:
                action, wait_s = self._next_due(self._clock.now_s())
                if action is not None:
                    return action, self._wish.number
                self._clock.wait(self._changed, wait_s)

    def _perform(self, action: HostAction, number: int) -> None:
        match action:
            case HostAction.LAUNCH:
                self._launch(number)
            case HostAction.OPEN:
                self._reconnect(number)
            case HostAction.CHECK_CONNECTION | HostAction.CHECK_AGENT:
                self._check(action, number)
            case HostAction.HANG_UP:
                self._hang_up()
            case HostAction.END:
                raise AssertionError("END ends the loop before")

    def _launch(self, number: int) -> None:
        """Connect, forward a port, launch; a failure of any of these is this launch's failure."""
        config = self._config()
        with self._dependencies.launches.slot(lambda: self._wish.is_latest(number)):
            if self._observed.session is not None and not self._observed.session.is_alive(ANSWER_S_MAX):
                self._hang_up()
            session, address = self._open(config)
            if not self._wish.is_latest(number):
                raise Cancelled
            agent_config = replace(config, address=address)
            presence = session.launch(agent_config, lambda: self._wish.is_latest(number))
        with self._changed:
            self._observed.boot_id = presence.boot_id
            self._schedule.note_agent_check(self._clock.now_s())
            if self._wish.number == number:
                self._wish.goal = HostGoal.CONNECTION

    def _reconnect(self, number: int) -> None:
        """Open the connection again, for an agent that may be there or for a copy."""
        with self._dependencies.reconnects.slot(lambda: self._wish.is_latest(number)):
            self._note_agent_check()
            if self._wish.goal is HostGoal.NOTHING:
                self._connect()
            else:
                self._redirect_agent(number)
        self._observed.reason = ""

    def _check(self, action: HostAction, number: int) -> None:
        """Check that the connection still leads to the host and, for CHECK_AGENT, that the agent is there."""
        if action is HostAction.CHECK_AGENT:
            self._note_agent_check()
        else:
            with self._changed:
                self._schedule.note_connection_check(self._clock.now_s())
        session = self._observed.session
        if session is None or not session.is_alive(ANSWER_S_MAX):
            raise LaunchError("connect", f"the connection broke, or gave no answer within {ANSWER_S_MAX:g} s")
        if action is not HostAction.CHECK_AGENT:
            return
        try:
            self._redirect_agent(number)
            self._observed.reason = ""
        except LaunchError as err:
            if not session.is_alive(ANSWER_S_MAX):
                raise
            # An agent that cannot be seen may still be there: its connection stays open.
            self._observed.reason = f"{err.stage}: {err.reason}"

    def _note_agent_check(self) -> None:
        with self._changed:
            self._schedule.note_agent_check(self._clock.now_s())

    def _redirect_agent(self, number: int) -> None:
        """Send the agent the address to dial; note when the agent is certainly dead."""
        config = self._config()
        session, address = self._open(config)
        presence = session.reach(replace(config, address=address))
        last_boot_id, self._observed.boot_id = self._observed.boot_id, presence.boot_id
        if presence.alive or self._wish.number != number:
            return
        with self._changed:
            self._observed.evidence = _death_evidence(presence, last_boot_id)
            self._want_nothing()
        self._dependencies.wake()

    def _open(self, config: AgentConfig) -> tuple[Session, str]:
        session = self._connect()
        if not self._observed.port:
            self._observed.port = session.forward(lambda channel: self._forward(channel, config.address))
        return session, f"127.0.0.1:{self._observed.port}"

    def _connect(self) -> Session:
        if self._observed.session is None:
            session = self._dependencies.open(self._node)
            with self._changed:
                self._observed.session, self._observed.port = session, 0
                self._schedule.note_open(self._clock.now_s())
                self._changed.notify_all()
        assert self._observed.session is not None
        return self._observed.session

    def _forward(self, channel: paramiko.Channel, address: str) -> None:
        """Forward a connection of the host's agent to the supervisor, unless too many are open."""
        with self._changed:
            forwards = [forward for forward in self._observed.forwards if not forward.is_over]
            if len(forwards) >= FORWARDS_MAX:
                threading.Thread(target=channel.close, daemon=True).start()
                return
            forwards.append(self._dependencies.forward(channel, address, self._forward_ended))
            self._observed.forwards = forwards

    def _forward_ended(self) -> None:
        with self._changed:
            self._observed.forwards = [forward for forward in self._observed.forwards if not forward.is_over]
        self.check(HostAction.CHECK_CONNECTION)

    def _note_failure(self, action: HostAction, number: int, err: LaunchError) -> None:
        """Keep a failed launch for `take_failure`; schedule any other action again."""
        if action is not HostAction.LAUNCH or err.retryable is not Retryable.BUSY:
            self._hang_up()
        with self._changed:
            if self._wish.number != number:
                return
            self._observed.reason = f"{err.stage}: {err.reason}"
            now_s = self._clock.now_s()
            if action is HostAction.LAUNCH:
                self._observed.failure = err
                self._wish.goal, self._wish.idle_since_s = HostGoal.NOTHING, now_s
            elif action is HostAction.OPEN:
                self._schedule.note_failure(now_s, err.retryable)
            else:
                self._schedule.note_break(now_s)
        if action is HostAction.LAUNCH:
            self._dependencies.wake()

    def _hang_up(self) -> None:
        with self._changed:
            session, self._observed.session, self._observed.port = self._observed.session, None, 0
        if session is not None:
            session.close()

    def _config(self) -> AgentConfig:
        assert self._wish.config is not None
        return self._wish.config


def _death_evidence(presence: AgentStatus, last_boot_id: str) -> str:
    if last_boot_id not in ("", presence.boot_id):
        return "the host was restarted"
    last_output = f"its last output: {presence.last_line}" if presence.last_line else "no output"
    return f"its agent is no longer running; {last_output}"
