"""Is this node ready for an attempt? Its environment, its setup lines (run once), the program, the checkpoint, a port.

Nothing here blocks: when setup lines run, the answer comes when the agent reaps them, and a checkpoint is read in a
thread. A port that others are to probe is held until the ranks start.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

from orchestrator.agent import rendezvous_probe, setup_script
from orchestrator.agent.keeper import TAG
from orchestrator.agent.outputs.manifest import GivenUp, Hasher
from orchestrator.core import observations
from orchestrator.core.host import interfaces
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m

_GPUS = "CUDA_VISIBLE_DEVICES"


class Preparation:
    """What has been made ready on this node, and what is being made ready now."""

    def __init__(
        self,
        config: m.AgentConfig,
        boot: str,
        environ: Mapping[str, str],
        hasher: Hasher,
        report: Callable[[m.ReliableReport], None],
    ) -> None:
        """`environ` is the agent's own environment, which ranks start from where the order says so."""
        self._config = config
        self._job = JobDir.at(config.root)
        self._boot = boot
        self._environ = environ
        self._hasher = hasher
        self._report = report
        self._running: setup_script.Setup | None = None
        self._order: m.Prepare | None = None
        self._done: tuple[tuple[str, ...], dict[str, str]] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._listener: rendezvous_probe.Listener | None = None
        self._program = ""
        self.env: dict[str, str] = {}
        self.ready = m.Prepared(0, "", 0, ())

    @property
    def setup_pid(self) -> int | None:
        """The pid of the setup lines while they run."""
        return self._running.pid if self._running else None

    def argv(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return a rank's command with the program that this node has in its first place."""
        return (self._program or wanted[0], *wanted[1:])

    def begin(self, order: m.Prepare) -> None:
        """Make ready for `order.attempt`; report `Prepared` or `PrepareFailed`, now or later."""
        if self.ready.attempt == order.attempt:
            self._report(self.ready)
            return
        if self._reading is not None and self._order == order:
            return  # said again while the checkpoint is read
        self.let_go()
        self._order = order
        if not self._job.root.exists():
            self._report(m.PrepareFailed(order.attempt, f"{self._job.root} is no more", ""))
            return
        if self._running is not None:
            return  # the lines of an earlier order are still at work: their end serves this one
        if not order.setup:
            self._check(order, self._env(order))
        elif self._done is not None and self._done[0] == order.setup:
            self._check(order, self._done[1])
        else:
            self._run_setup(order)

    def let_go(self) -> None:
        """Give up the port, if one is held, and what is being read; whatever is ready stays so."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _env(self, order: m.Prepare) -> dict[str, str]:
        """Return what the setup lines and the ranks start from; the leased GPUs, unless the user has chosen some."""
        env = {**self._environ, **order.env} if order.own_env else dict(order.env)
        if self._config.gpus and _GPUS not in order.env:
            env[_GPUS] = ",".join(self._config.gpus)
        return env

    def _run_setup(self, order: m.Prepare) -> None:
        log = self._job.node_log(order.attempt, self._config.node)
        folder = self._job.node(self._config.node)
        try:
            env = {**self._env(order), TAG: f"{self._config.job}/{self._config.node}"}
            self._running = setup_script.Setup(order.setup, env, self._job.code, folder, log)
        except setup_script.SetupError as err:
            self._report(m.PrepareFailed(order.attempt, err.reason, err.tail))

    def setup_ended(self, status: int) -> None:
        """The setup lines' process was reaped with this wait status."""
        done, order = self._running, self._order
        assert done is not None and order is not None
        self._running = None
        try:
            env = done.result(status)
        except setup_script.SetupError as err:
            self._report(m.PrepareFailed(order.attempt, err.reason, err.tail))
            return
        self._done = (order.setup, env)
        self._check(order, env)

    def _check(self, order: m.Prepare, env: dict[str, str]) -> None:
        """See that the checkpoint to start from is whole here, if there is one."""
        if not order.resume:
            self._finish(order, env)
        else:
            self._reading = asyncio.get_running_loop().create_task(self._read(order, env))

    async def _read(self, order: m.Prepare, env: dict[str, str]) -> None:
        try:
            fault = await self._hasher.fault(order.resume)
        except GivenUp:
            return
        self._reading = None
        if fault:
            reason = f"the checkpoint to start from is not whole on this host: {fault}"
            self._report(m.PrepareFailed(order.attempt, reason, ""))
        else:
            self._finish(order, env)

    def _finish(self, order: m.Prepare, env: dict[str, str]) -> None:
        self.env = env
        try:
            self._program = (
                setup_script.first_program(order.programs, env, self._job.code) if order.programs else ""
            )
            # Never the port of the attempt before: somebody may have it.
            ports = setup_script.PORT_RANGE[order.attempt % 2 :: 2]
            seed = f"{self._boot} {order.attempt}"
            held = setup_script.held_port(seed, order.port, ports) if order.wants_port else None
        except setup_script.SetupError as err:
            self._report(m.PrepareFailed(order.attempt, err.reason, err.tail))
            return
        port = held.getsockname()[1] if held is not None else 0
        self.ready = m.Prepared(order.attempt, "", port, self._listen(held, order))
        self._report(self.ready)

    def _listen(self, held: socket.socket | None, order: m.Prepare) -> tuple[observations.Address, ...]:
        """Answer on the port until the ranks start, where others are to probe it; return where they might reach it."""
        if held is None:
            return ()
        if not order.wants_addresses:
            held.close()
            return ()
        self._listener = rendezvous_probe.Listener(held, self._config.token, order.attempt)
        return interfaces.addresses()
