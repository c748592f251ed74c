"""How does one host get its agent, and how is the way to it kept open? One thread for each host that is wanted.

Rules: the wish (`_want`, written by others) and what is seen (`_session` and the rest, written by the thread) are kept
apart; `_due` picks the next deed from both, and a deed that fails changes neither what is wished nor other hosts. A
wish that came during a deed outlives it. Nothing is decided here: whether a launch is tried again is the brain's.
"""

from __future__ import annotations

import enum
import sys
import threading
import traceback
from dataclasses import replace

import paramiko

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.port_forward import Forward, admit
from orchestrator.backends.ssh.retry_schedule import RetrySchedule
from orchestrator.backends.ssh.session import AgentPresence, Session, Unwanted, WorkerDependencies
from orchestrator.core.observations import Retryable
from orchestrator.core.wire.messages import AgentConfig

ANSWER_S_MAX = 5.0
"""How long the far end may take to answer before its connection is taken for dead."""

LEAVE_S = 60.0
"""So long a way stays open after it was not needed any more."""

BUSY_S = 10.0
"""How long to wait again for copies that still use a connection."""

REST_S = 60.0
"""How often a thread that has nothing to do looks around; wishes wake it at once."""

LEND_S_MAX = 20.0
"""How long a copy waits for a connection to be opened."""


class HostGoal(enum.Enum):
    """What is wished of a host."""

    NOTHING = "nothing"
    AGENT = "agent"
    WAY = "way"


class HostAction(enum.Enum):
    """What the thread does next."""

    LAUNCH = "launch"
    OPEN = "open"
    ASK = "ask"
    LOOK = "look"
    HANG_UP = "hang up"
    END = "end"


class HostWorker:
    """One host's thread, its wishes and its news."""

    def __init__(self, node: str, means: WorkerDependencies) -> None:
        self._node = node
        self._means = means
        self._clock = means.clock
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        # The wish, written by others.
        self._want = HostGoal.NOTHING
        self._wish = 0  # numbers wishes, so that a deed knows whether it was for the latest
        self._config: AgentConfig | None = None
        self._left_s = 0.0  # since when nothing is wanted
        self._borrowers = 0
        self._closing = False
        # What is seen, written by the thread.
        self._session: Session | None = None
        self._port = 0
        self._flows: list[Forward] = []
        self._boot = ""
        self._pace = RetrySchedule()
        self._failure: LaunchError | None = None
        self._evidence: str | None = None
        self._reason = ""

    # Wishes: called from anywhere, and back at once.

    def launch(self, config: AgentConfig) -> None:
        """Begin to start the agent; not twice when that is under way."""
        with self._news:
            if self._want is not HostGoal.AGENT:
                self._wished(HostGoal.AGENT, config)

    def keep_reachable(self, config: AgentConfig) -> None:
        """Keep a way open to an agent that may be there, and launch none."""
        with self._news:
            if self._want is not HostGoal.WAY:
                self._wished(HostGoal.WAY, config)

    def release(self) -> None:
        """The way is not needed any more, a little later."""
        with self._news:
            self._wished(HostGoal.NOTHING, self._config)
            self._left_s = self._clock.now_s()

    def ask(self, deed: HostAction) -> None:
        """Have the connection asked (ASK), or the agent looked for, too (LOOK), which ends a pause between tries."""
        with self._news:
            if deed is HostAction.LOOK:
                self._pace.wish_to_see()
            else:
                self._pace.wish_to_ask()
            self._news.notify_all()

    def lend(self, wait_s: float = LEND_S_MAX) -> Session | None:
        """Return a session that answers, opening one if need be; None when there is no way within `wait_s`."""
        deadline_s = self._clock.now_s() + wait_s
        with self._news:
            self._borrowers += 1
            self._begin()
        try:
            dead: Session | None = None
            while (session := self._open_session(dead, deadline_s)) is not None:
                if session.is_alive(ANSWER_S_MAX):
                    return session
                dead = session
                self.ask(HostAction.ASK)
            return None
        finally:
            with self._news:
                self._borrowers -= 1
                self._left_s = self._clock.now_s()

    def _open_session(self, other_than: Session | None, deadline_s: float) -> Session | None:
        """Wait until a session is open; None when that is not so until the deadline."""
        with self._news:
            while self._session is None or self._session is other_than:
                rest_s = deadline_s - self._clock.now_s()
                if rest_s <= 0 or self._closing:
                    return None
                self._clock.wait(self._news, rest_s)
            return self._session

    def close(self) -> None:
        """Hang up and end, whatever is under way; the agent stays."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._hang_up()

    def join(self, wait_s: float) -> None:
        """Wait a while for the thread to end."""
        if self._thread is not None:
            self._thread.join(wait_s)

    # News: what was seen.

    def take_failure(self) -> LaunchError | None:
        """Return how the last launch failed, once."""
        with self._news:
            failure, self._failure = self._failure, None
            return failure

    def take_evidence(self) -> str | None:
        """Return what shows that the agent is no more, once."""
        with self._news:
            evidence, self._evidence = self._evidence, None
            return evidence

    @property
    def reason(self) -> str:
        """Why there is no way to the host now; empty when there is one, or none is wanted."""
        return self._reason

    def _wished(self, want: HostGoal, config: AgentConfig | None) -> None:
        """Note a wish; the lock is held."""
        self._want, self._config = want, config
        self._wish += 1
        self._pace.begin()
        self._reason = ""
        if want is not HostGoal.NOTHING:
            self._failure = self._evidence = None
            self._begin()
        self._news.notify_all()

    def _begin(self) -> None:
        """Have a thread, and have it look; the lock is held."""
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name=f"ssh {self._node}", daemon=True)
            self._thread.start()
        self._news.notify_all()

    # The thread.

    def _run(self) -> None:
        while True:
            deed, wish = self._next()
            if deed is HostAction.END:
                break
            try:
                self._do(deed, wish)
            except Unwanted:
                continue
            except LaunchError as err:
                self._missed(deed, wish, err)
            except Exception as err:  # a thread that ended in silence would be a host that nobody sees to
                traceback.print_exc(file=sys.stderr)
                self._missed(deed, wish, LaunchError("connect", f"orch failed: {type(err).__name__}: {err}"))
        self._hang_up()

    def _next(self) -> tuple[HostAction, int]:
        """Wait until something is to be done; return it, and the number of the wish that it is for."""
        with self._news:
            while True:
                deed, wait_s = self._due(self._clock.now_s())
                if deed is not None:
                    return deed, self._wish
                self._clock.wait(self._news, wait_s)

    def _due(self, now_s: float) -> tuple[HostAction | None, float]:
        """Return what is to be done now, or in how many seconds to look again; the lock is held."""
        if self._closing:
            return HostAction.END, 0.0
        if self._want is HostGoal.AGENT:
            return HostAction.LAUNCH, 0.0
        if self._session is None:
            if self._want is HostGoal.NOTHING and not self._borrowers:
                return None, REST_S
            rest_s = self._pace.retry_s - now_s
            return (HostAction.OPEN, 0.0) if rest_s <= 0 else (None, rest_s)
        if self._want is HostGoal.NOTHING:
            return self._due_to_hang_up(now_s)
        ask_s, see_s = self._pace.ask_due_s(), self._pace.see_due_s(is_used=bool(self._flows))
        if now_s >= see_s:
            return HostAction.LOOK, 0.0
        return (HostAction.ASK, 0.0) if now_s >= ask_s else (None, min(ask_s, see_s) - now_s)

    def _due_to_hang_up(self, now_s: float) -> tuple[HostAction | None, float]:
        """A way that is not needed any more stays open for those who may still use it."""
        if now_s >= self._pace.ask_wish_s:
            return HostAction.ASK, 0.0
        rest_s = min(self._pace.ask_wish_s, self._left_s + LEAVE_S) - now_s
        if rest_s > 0:
            return None, rest_s
        if self._borrowers or self._means.busy(self._node):
            return None, BUSY_S
        return HostAction.HANG_UP, 0.0

    def _do(self, deed: HostAction, wish: int) -> None:
        match deed:
            case HostAction.LAUNCH:
                self._launch(wish)
            case HostAction.OPEN:
                self._return(wish)
            case HostAction.ASK | HostAction.LOOK:
                self._look(deed, wish)
            case HostAction.HANG_UP:
                self._hang_up()
            case HostAction.END:
                raise AssertionError("the end is no deed")

    def _launch(self, wish: int) -> None:
        """Connect, forward, land: whatever fails of it is this launch's failure."""
        config = self._wanted_config()
        with self._means.launches.turn(lambda: self._is_wanted(wish)):
            if self._session is not None and not self._session.is_alive(ANSWER_S_MAX):
                self._hang_up()
            session, address = self._open(config)
            if not self._is_wanted(wish):
                raise Unwanted
            seen = session.land(_dialling(config, address), lambda: self._is_wanted(wish))
        with self._news:
            self._boot = seen.boot_id
            self._pace.see(self._clock.now_s())
            if self._wish == wish:
                self._want = HostGoal.WAY

    def _return(self, wish: int) -> None:
        """Open the way again, for an agent that may be there or for whoever wants to copy."""
        with self._means.returns.turn(lambda: self._is_wanted(wish)):
            self._note_look()
            if self._want is HostGoal.NOTHING:
                self._connect()
            else:
                self._see(wish)
        self._reason = ""

    def _look(self, deed: HostAction, wish: int) -> None:
        """See whether the connection still leads there, and whether the agent is there."""
        if deed is HostAction.LOOK:
            self._note_look()
        else:
            with self._news:
                self._pace.ask(self._clock.now_s())
        session = self._session
        if session is None or not session.is_alive(ANSWER_S_MAX):
            raise LaunchError("connect", f"the connection broke, or gave no answer within {ANSWER_S_MAX:g} s")
        if deed is not HostAction.LOOK:
            return
        try:
            self._see(wish)
            self._reason = ""
        except LaunchError as err:
            if not session.is_alive(ANSWER_S_MAX):
                raise
            self._reason = f"{err.stage}: {err.reason}"  # what is not seen may be there: its way stays

    def _note_look(self) -> None:
        with self._news:
            self._pace.see(self._clock.now_s())

    def _see(self, wish: int) -> None:
        """Tell the agent where to dial and see whether it is there; note it when it is certainly not."""
        config = self._wanted_config()
        session, address = self._open(config)
        seen = session.reach(_dialling(config, address))
        known, self._boot = self._boot, seen.boot_id
        if seen.alive or self._wish != wish:
            return
        with self._news:
            self._evidence = _evidence(seen, known)
            self._wished(HostGoal.NOTHING, self._config)
            self._left_s = self._clock.now_s()
        self._means.wake()

    def _open(self, config: AgentConfig) -> tuple[Session, str]:
        """Return an open session, and the host's own address that leads to the supervisor."""
        session = self._connect()
        if not self._port:
            self._port = session.forward(lambda channel: self._take(channel, config.address))
        return session, f"127.0.0.1:{self._port}"

    def _connect(self) -> Session:
        if self._session is None:
            session = self._means.open(self._node)
            with self._news:
                self._session, self._port = session, 0
                self._pace.open(self._clock.now_s())
                self._news.notify_all()
        assert self._session is not None
        return self._session

    def _take(self, channel: paramiko.Channel, goal: str) -> None:
        """The host's agent dials: carry its bytes to the supervisor."""
        flow = self._means.carry(channel, goal, self._flow_ended)
        with self._news:
            self._flows = admit(self._flows, flow)

    def _flow_ended(self) -> None:
        with self._news:
            self._flows = [flow for flow in self._flows if not flow.is_over]
        self.ask(HostAction.ASK)

    def _missed(self, deed: HostAction, wish: int, err: LaunchError) -> None:
        """A deed failed: tell it if it was a launch, else try again after a while."""
        if deed is not HostAction.LAUNCH or err.trouble is not Retryable.BUSY:
            self._hang_up()
        with self._news:
            if self._wish != wish:
                return
            self._reason = f"{err.stage}: {err.reason}"
            now_s = self._clock.now_s()
            if deed is HostAction.LAUNCH:
                self._failure, self._want, self._left_s = err, HostGoal.NOTHING, now_s
            elif deed is HostAction.OPEN:
                self._pace.miss(now_s, err.trouble)
            else:
                self._pace.broke(now_s)
        if deed is HostAction.LAUNCH:
            self._means.wake()

    def _hang_up(self) -> None:
        with self._news:
            session, self._session, self._port = self._session, None, 0
        if session is not None:
            session.close()

    def _is_wanted(self, wish: int) -> bool:
        return self._wish == wish and not self._closing

    def _wanted_config(self) -> AgentConfig:
        assert self._config is not None
        return self._config


def _evidence(seen: AgentPresence, known_boot: str) -> str:
    if known_boot not in ("", seen.boot_id):
        return "the host was restarted"
    return f"its agent is not running any more; {f'its last words: {seen.words}' if seen.words else 'it left no word'}"


def _dialling(config: AgentConfig, address: str) -> AgentConfig:
    return replace(config, address=address)
