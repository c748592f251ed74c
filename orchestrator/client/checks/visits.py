"""Visits to all hosts of a job at once, over SSH or by srun: each is surveyed, then asked step by step, and left as it was.

Every wait is bounded: by the conversation's own limits, and by `VISIT_S_MAX` for all. A host that fails is a result.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout, launch
from orchestrator.backends.ssh.connect.connection import Connection
from orchestrator.backends.ssh.conversation import Line
from orchestrator.core.jobdir.plan import PlannedSsh
from orchestrator.core.wire import bootstrap as w

VISIT_S_MAX = 900.0
"""How long a check of all hosts may take."""

CLOSE_S_MAX = 5.0
"""How long closing all connections may take; after that this process ends and closes them."""

STEP_S_MAX = 30.0
"""How long a step may take that does not say otherwise, beyond what it waits for itself."""

T = TypeVar("T")
Reach: TypeAlias = Callable[
    [Sequence[str], Callable[[Line, str], None], Callable[[str, LaunchError], None]], None
]
"""Visit all hosts at the same time, each over a line of its own, and tell of those that cannot be visited; returns when all
visits have ended."""


def over_ssh(ssh: PlannedSsh) -> Reach:
    """Return how hosts are reached over SSH."""

    def reach(
        names: Sequence[str], visit: Callable[[Line, str], None], failed: Callable[[str, LaunchError], None]
    ) -> None:
        def work(connection: Connection, name: str) -> None:
            connection.forward(lambda channel: channel.close())
            visit(connection, name)

        fanout.each(names, ssh, work, limit_s=VISIT_S_MAX, at_once=len(names), failed=failed)

    return reach


@dataclass(frozen=True, slots=True)
class _Asked:
    """A step that a host is to do, and where its answer goes."""

    step: w.Step
    wanted: type[Any]
    limit_s: float
    answer: futures.Future[Any]


@dataclass(slots=True)
class _Host:
    """A visited host: its survey, and the steps that wait for it; None ends the visit."""

    survey: futures.Future[launch.Survey] = field(default_factory=futures.Future)
    steps: queue.SimpleQueue[_Asked | None] = field(default_factory=queue.SimpleQueue)


class Visits:
    """Visits to hosts, from `with Visits(…)` to its end."""

    def __init__(
        self,
        reach: Reach,
        launchers: Mapping[str, launch.Launcher],
        root: str,
        programs: tuple[str, ...],
    ) -> None:
        self._reach = reach
        self._launchers = launchers
        self._root = root
        self._programs = programs
        self._hosts = {host: _Host() for host in launchers}
        self._thread = threading.Thread(target=self._run, name="visits", daemon=True)

    def __enter__(self) -> Visits:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts.values():
            host.steps.put(None)
        self._thread.join(CLOSE_S_MAX)

    def surveys(self) -> dict[str, launch.Survey | LaunchError]:
        """Return every host's survey, or why there is none."""
        surveys: dict[str, launch.Survey | LaunchError] = {}
        for name, host in self._hosts.items():
            surveys[name] = _result(host.survey, fanout.WORK_S_MAX)
        return surveys

    def ask(
        self, steps: Mapping[str, w.Step], wanted: type[T], limit_s: float = STEP_S_MAX
    ) -> dict[str, T | LaunchError]:
        """Have hosts do a step each, all at the same time; return their answers."""
        waiting: dict[str, futures.Future[T]] = {}
        for name, step in steps.items():
            waiting[name] = futures.Future()
            self._hosts[name].steps.put(_Asked(step, wanted, limit_s, waiting[name]))
        return {name: _result(answer, limit_s + STEP_S_MAX) for name, answer in waiting.items()}

    def _run(self) -> None:
        """Visit all hosts; a host that could not be visited fails its survey, and one that was lost all later steps."""
        self._reach(list(self._hosts), self._visit, self._fail)

    def _visit(self, line: Line, name: str) -> None:
        host = self._hosts[name]
        with launch.visiting(line, self._launchers[name], self._root, self._programs) as visit:
            host.survey.set_result(visit.survey)
            while (asked := host.steps.get()) is not None:
                try:
                    reply = visit.ask(asked.step, asked.wanted, asked.limit_s)
                except LaunchError as err:
                    asked.answer.set_exception(err)
                    raise
                asked.answer.set_result(reply)

    def _fail(self, name: str, error: LaunchError) -> None:
        """Fail the survey of a host, and whatever it is asked later, until the visit ends."""
        host = self._hosts[name]
        if not host.survey.done():
            host.survey.set_exception(error)
        while (asked := host.steps.get()) is not None:
            asked.answer.set_exception(error)


def _result(answer: futures.Future[Any], limit_s: float) -> Any:
    try:
        return answer.result(limit_s)
    except LaunchError as err:
        return err
    except futures.TimeoutError:
        return LaunchError("check", f"no answer within {limit_s:g} s", "look at the host, or try again")


def apart(answers: Mapping[str, T | LaunchError]) -> tuple[dict[str, T], dict[str, LaunchError]]:
    """Return the answers, and the failures."""
    good = {name: answer for name, answer in answers.items() if not isinstance(answer, LaunchError)}
    return good, {name: answer for name, answer in answers.items() if isinstance(answer, LaunchError)}
