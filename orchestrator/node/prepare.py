"""Is this node ready for an attempt? Its environment, its setup lines (run once), the program, and a port.

Nothing here blocks: when setup lines run, the answer comes when the agent reaps them.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.node import setup
from orchestrator.node.keeper import TAG
from orchestrator.wire import messages as m
from orchestrator.wire.paths import JobDir


class Preparation:
    """What has been made ready on this node, and what is being made ready now."""

    def __init__(self, job: JobDir, node: str, seed: str, report: Callable[[m.KeptReport], None]) -> None:
        self._job = job
        self._node = node
        self._seed = seed
        self._report = report
        self._running: setup.Setup | None = None
        self._order: m.Prepare | None = None
        self._done: tuple[tuple[str, ...], dict[str, str]] | None = None
        self.env: dict[str, str] = {}
        self.ready = m.Prepared(0, "", 0)

    @property
    def setup_pid(self) -> int | None:
        """The pid of the setup lines while they run."""
        return self._running.pid if self._running else None

    def begin(self, order: m.Prepare) -> None:
        """Make ready for `order.attempt`; report `Prepared` or `PrepareFailed`, now or later."""
        if self.ready.attempt == order.attempt:
            self._report(self.ready)
            return
        self._order = order
        if self._running is not None:
            return  # the lines of an earlier order are still at work: their end serves this one
        if not order.setup:
            self._finish(order, dict(order.env))
        elif self._done is not None and self._done[0] == order.setup:
            self._finish(order, self._done[1])
        else:
            self._run_setup(order)

    def _run_setup(self, order: m.Prepare) -> None:
        log = self._job.node_log(order.attempt, self._node)
        folder = self._job.node(self._node)
        try:
            env = {**order.env, TAG: f"{self._job.id}/{self._node}"}
            self._running = setup.Setup(order.setup, env, self._job.code, folder, log)
        except setup.SetupError as err:
            self._report(m.PrepareFailed(order.attempt, err.reason, err.tail))

    def setup_ended(self, status: int) -> None:
        """The setup lines' process was reaped with this wait status."""
        done, order = self._running, self._order
        assert done is not None and order is not None
        self._running = None
        try:
            env = done.result(status)
        except setup.SetupError as err:
            self._report(m.PrepareFailed(order.attempt, err.reason, err.tail))
            return
        self._done = (order.setup, env)
        self._finish(order, env)

    def _finish(self, order: m.Prepare, env: dict[str, str]) -> None:
        self.env = env
        try:
            setup.find_program(order.program, env, self._job.code)
            port = order.port or 0
            if order.wants_port and not port:
                port = setup.free_port(f"{self._seed} {order.attempt}")
        except setup.SetupError as err:
            self._report(m.PrepareFailed(order.attempt, err.reason, err.tail))
            return
        self.ready = m.Prepared(order.attempt, "", port)
        self._report(self.ready)
