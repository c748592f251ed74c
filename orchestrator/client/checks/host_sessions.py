"""Sessions to all hosts of a job at once, over SSH or by srun: each host is surveyed, then runs steps, and is left unchanged.

Every wait is bounded: by the limits of each session, and by `SESSIONS_S_MAX` for all. A host that fails is a result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from types import TracebackType
from typing import TypeAlias, TypeVar

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout, launch
from orchestrator.backends.ssh.bootstrap_session import HostConnection
from orchestrator.backends.ssh.connect.connection import Connection
from orchestrator.core.jobdir.plan import PlannedSsh
from orchestrator.core.wire import bootstrap as w

SESSIONS_S_MAX = 900.0
"""Limit on a check of all hosts."""

CLOSE_S_MAX = 5.0
"""Limit on closing all connections; after that the exit of this process closes them."""

STEP_S_MAX = 30.0
"""Default limit on a step, and the margin beyond a step's own limit."""

T = TypeVar("T")
ReachHosts: TypeAlias = Callable[
    [Sequence[str], Callable[[HostConnection, str], None], Callable[[str, LaunchError], None]], None
]
"""Opens a session to each host at the same time and reports the hosts that fail; returns when all
sessions have ended."""


def reach_by_ssh(ssh: PlannedSsh, limit_s: float = SESSIONS_S_MAX) -> ReachHosts:
    """Return the function that opens sessions over SSH, for at most `limit_s`."""

    def reach(
        names: Sequence[str],
        visit: Callable[[HostConnection, str], None],
        failed: Callable[[str, LaunchError], None],
    ) -> None:
        def work(connection: Connection, name: str) -> None:
            connection.forward(lambda channel: channel.close())
            visit(connection, name)

        fanout.run_on_each(names, ssh, work, limit_s=limit_s, at_once=len(names), on_failure=failed)

    return reach


class HostSessions:
    """Sessions to hosts, as a context manager."""

    def __init__(
        self,
        reach: ReachHosts,
        launchers: Mapping[str, launch.Launcher],
        root: str,
        programs: tuple[str, ...],
        limit_s: float = SESSIONS_S_MAX,
    ) -> None:
        self._limit_s = limit_s
        self._launchers = launchers
        self._root = root
        self._programs = programs
        self._visits: dict[str, futures.Future[launch.HostSession]] = {name: futures.Future() for name in launchers}
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=reach, args=(list(launchers), self._open_session, self._fail), name="visits", daemon=True
        )

    def __enter__(self) -> HostSessions:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(CLOSE_S_MAX)

    def surveys(self) -> dict[str, launch.Survey | LaunchError]:
        """Return every host's survey, or why there is none."""
        return self._run_each(list(self._visits), lambda name, visit: visit.survey, fanout.WORK_S_MAX)

    def ask(
        self, steps: Mapping[str, w.CheckStep], answer_type: type[T], limit_s: float = STEP_S_MAX
    ) -> dict[str, T | LaunchError]:
        """Run a step on each host, all at the same time; return their answers."""
        return self._run_each(
            list(steps),
            lambda name, visit: visit.run_step(steps[name], answer_type, limit_s),
            limit_s + STEP_S_MAX,
        )

    def _run_each(
        self, names: Sequence[str], work: Callable[[str, launch.HostSession], T], limit_s: float
    ) -> dict[str, T | LaunchError]:
        """Run a function in the session of each of these hosts; it fails for a host without a session."""
        return fanout.fan_out(names, lambda name: work(name, self._visits[name].result()), limit_s, len(names))

    def _open_session(self, line: HostConnection, name: str) -> None:
        with launch.open_host_session(line, self._launchers[name], self._root, self._programs) as visit:
            self._visits[name].set_result(visit)
            self._over.wait(self._limit_s)

    def _fail(self, name: str, error: LaunchError) -> None:
        if not self._visits[name].done():
            self._visits[name].set_exception(error)


def split_answers(answers: Mapping[str, T | LaunchError]) -> tuple[dict[str, T], dict[str, LaunchError]]:
    """Return the answers, and the failures."""
    good = {name: answer for name, answer in answers.items() if not isinstance(answer, LaunchError)}
    return good, {name: answer for name, answer in answers.items() if isinstance(answer, LaunchError)}
