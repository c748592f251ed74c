"""Preparation of a node for an attempt: environment, setup lines (run once), program, resume checkpoint, port.

Nothing here blocks: the report on setup lines follows when the agent reaps them, and a thread reads the checkpoint. A port
that other nodes probe is held until the ranks start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.agent.host import rendezvous, setup_script
from orchestrator.agent.outputs.checkpoint_memory import CheckpointMemory
from orchestrator.agent.outputs.checkpoint_scanner import Hasher
from orchestrator.agent.ranks import warm_start
from orchestrator.agent.ranks.rank_start import NodeEnvironment, RankCall, RankStart
from orchestrator.core import codec, observations
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.errors import Cancelled, HostError
from orchestrator.core.host import hardware, interfaces, process_tags, procfs
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.settings import rank_env
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import EnvLayers, Setting, decide_settings
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.agent_config import AgentConfig

FOLDER_S_MAX = 600.0
"""How long the job's folder may be missing before an attempt: an automounter or a file server may be slow."""

_GPUS = "CUDA_VISIBLE_DEVICES"


class Preparation:
    """State of one node's preparation: what is ready, and what is in progress."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        environ: Mapping[str, str],
        hasher: Hasher,
        report: Callable[[reports.ReliableReport], None],
        note: Callable[[str], None],
        launch: Callable[[NodePlan, EnvLayers], None],
        memory: CheckpointMemory | None = None,
    ) -> None:
        """`environ` is the agent's own environment, the base of the ranks' unless the submitter's is; `note` writes to the
        node's log, from any thread; `launch` runs the script of an order, and `called` follows for each launcher that it calls."""
        self._note = note
        self._launch = launch
        self._call = 0
        self._memory = memory
        self._config = config
        self._job = JobDir.at(config.root)
        self._incarnation = incarnation
        self._environ = environ
        self._hasher = hasher
        self._report = report
        self._setup: setup_script.SetupRun | None = None
        self._order: orders.PrepareNode | None = None
        # Of that order: with the path that the checkpoint has in memory, if it is there
        self._resume: ResumePoint | None = None
        # The environment that setup lines made, by the lines: of the last that ran.
        self._setup_env: dict[tuple[str, ...], dict[str, str]] = {}
        # What the setup lines have left running, such as a mounted file system: it is there for all attempts.
        self._daemons: tuple[procfs.Proc, ...] = ()
        self._verify_task: asyncio.Task[None] | None = None
        self._listener: rendezvous.Listener | None = None
        self._probe_tasks: set[asyncio.Task[None]] = set()
        self._program = ""
        self.starter = warm_start.RankStarter()
        # The job's folder was not there: the order, and how long that is waited for
        self._awaiting_folder: tuple[orders.PrepareNode, float] | None = None
        # All is ready but the template: the order, and the port that is held for it
        self._awaiting_template: tuple[orders.PrepareNode, socket.socket | None] | None = None
        self.layers = EnvLayers({}, {}, {})
        self.ready = reports.Prepared(0, "", 0, ())

    @property
    def setup_pid(self) -> int | None:
        """The pid of the setup lines' shell while it runs."""
        return self._setup.pid if self._setup else None

    @property
    def is_importing(self) -> bool:
        """Whether the node is ready but for the template that its ranks are forked from."""
        return self._awaiting_template is not None

    def environment(
        self,
        interface: str,
        evidence: Path,
        more: tuple[Setting, ...] = (),
    ) -> NodeEnvironment:
        """Return the environment of the ranks of the latest order, from what the host has now and from what else is set."""
        assert self._order is not None
        at = self._node_plan(self._order)
        decided = decide_settings(hardware.gather(self.layers.given), at, self.layers, interface, evidence)
        return NodeEnvironment(
            at, self.layers, (*decided, *more), self._program, self._config.tag, self._submitted_from()
        )

    def rank_starts(
        self, order: orders.Start, call: RankCall | None, more: tuple[Setting, ...]
    ) -> tuple[NodeEnvironment, tuple[RankStart, ...]]:
        """Return the ranks that an order starts, and what their environments are made of. `call`: the launcher call of a script."""
        interface = order.interface or ("lo" if order.address == "127.0.0.1" else "")
        environment = self.environment(interface, self._job.evidence(order.attempt), more)
        return environment, environment.rank_starts((order.address, order.port), call)

    def _submitted_from(self) -> str:
        """Return the folder that the job was submitted from, where this node has it; empty where it has not, or that is not known."""
        with contextlib.suppress(OSError, codec.CodecError, KeyError):
            path = Path(
                codec.unpack(str, codec.loads_plain(ownership.read_regular(self._job.provenance))["submitted_from"])
            )
            if path.is_dir() and path.resolve() != self._job.code.resolve():
                return str(path)
        return ""

    def _node_plan(self, order: orders.PrepareNode) -> NodePlan:
        path, step = (self._resume.path, self._resume.step) if self._resume is not None else ("", None)
        folder = str(self._memory.folder) if self._memory is not None else ""
        return NodePlan(order.plan, self._job, self._config.node, order.attempt, order.nodes, path, step, folder)

    @property
    def save_signal(self) -> str:
        """The signal (a name, without SIG) at which the job's ranks save a checkpoint and end."""
        slurm = self._order.plan.slurm if self._order is not None else None
        return slurm.signal if slurm is not None else "TERM"

    @property
    def pids(self) -> set[int]:
        """The processes of the preparation that live on when ranks are stopped."""
        daemons = [daemon.pid for daemon in self._daemons if procfs.is_alive(daemon)]
        return {self.setup_pid or 0, self.starter.pid, *daemons}

    def begin(self, order: orders.PrepareNode) -> None:
        """Prepare `order.attempt`; report `Prepared` or `PrepareFailed`, now or later."""
        if self.ready.attempt == order.attempt:
            self._report(self.ready)
            return
        if self._verify_task is not None and self._order == order:
            return  # the same order again, while the checkpoint is verified
        if self._awaiting_template is not None and self._awaiting_template[0] == order:
            return  # the same, while the template imports
        if self._awaiting_folder is not None and self._awaiting_folder[0] == order and not self._job.root.exists():
            return  # the same, while the job's folder is missing
        self.release()
        self._order, self._resume, self._call = order, order.resume, 0
        self._awaiting_folder = None
        if not self._job.root.exists():
            self._note(f"{self._job.root} does not exist: waiting for it, up to {FOLDER_S_MAX:g} s")
            self._awaiting_folder = order, time.monotonic() + FOLDER_S_MAX
            return
        if self._setup is not None:
            return  # setup lines of an earlier order still run: their end continues with this order
        if not order.plan.setup or order.plan.setup in self._setup_env:
            self._check_resume(order)
        else:
            self._run_setup(order)

    def probe(self, order: orders.Probe) -> None:
        """Probe which of these addresses lead to the first node; report `Probed` later."""
        task = asyncio.get_running_loop().create_task(self._probe(order))
        self._probe_tasks.add(task)
        task.add_done_callback(self._probe_tasks.discard)

    async def _probe(self, order: orders.Probe) -> None:
        reached, missed = await rendezvous.probe(order.addresses, order.port, self._config.token, order.attempt)
        hits = ", ".join(f"{hit.address} over {hit.interface or '?'}" for hit in reached)
        self._note(f"the first node is reached at {hits or 'none of its addresses'}; {'; '.join(missed)}")
        self._report(reports.Probed(order.attempt, reached, missed))

    def release(self) -> None:
        """Release the held port, and stop waiting; what is ready stays ready."""
        self._awaiting_folder = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._verify_task is not None:
            self._verify_task.cancel()
            self._verify_task = None
        if self._awaiting_template is not None:
            if self._awaiting_template[1] is not None:
                self._awaiting_template[1].close()
            self._awaiting_template = None

    def poll(self) -> None:
        """Continue once the job's folder exists and the template has imported, or the limits of these waits have passed."""
        self.starter.poll()
        if self._awaiting_folder is not None:
            order, due_s = self._awaiting_folder
            if self._job.root.exists():
                self.begin(order)
            elif time.monotonic() > due_s:
                self._awaiting_folder = None
                what = f"{self._job.root} no longer exists"
                self._report(reports.PrepareFailed(order.attempt, what, ""))
        if self._awaiting_template is not None and not self.starter.is_importing:
            (order, held), self._awaiting_template = self._awaiting_template, None
            self._finish(order, held)

    def note_exit(self, pid: int, status: int) -> bool:
        """Take the wait status of a reaped process, if it belongs to the preparation."""
        if pid == self.setup_pid:
            self.note_setup_exit(status)
            return True
        return self.starter.note_exit(pid)

    def close(self) -> None:
        """Release the port and end the template."""
        self.release()
        self.starter.close()

    def _build_layers(self, order: orders.PrepareNode) -> EnvLayers:
        """Return what ranks are given, after setup lines that have run; with the leased GPUs unless the user chose some."""
        plan = order.plan
        host = self._environ if plan.backend != "local" else {}
        job = rank_env.node_env(self._node_plan(order), order.outer, order.secrets)
        if plan.setup in self._setup_env:
            return EnvLayers(host, job, self._setup_env[plan.setup])
        # The first marks the processes of this job on this node
        node = {process_tags.NAME: self._config.tag}
        if self._config.gpus and _GPUS not in job:
            node[_GPUS] = ",".join(self._config.gpus)
        layers = EnvLayers.before_setup(host, job, node)
        path = setup_script.extended_path(plan.pythons, layers.given, self._job.code)
        if path and "PATH" in plan.env:
            self._note(f"PATH is set by env in the job file: {path.partition(os.pathsep)[0]} is not put first")
        elif path:
            layers = EnvLayers.before_setup(host, job, {**node, "PATH": path})
        return layers

    def _run_setup(self, order: orders.PrepareNode) -> None:
        log = self._job.node_log(order.attempt, self._config.node)
        folder = self._job.node(self._config.node)
        try:
            env = self._build_layers(order).given
            self._setup = setup_script.SetupRun(order.plan.setup, env, self._job.code, folder, log)
        except HostError as err:
            self._report(reports.PrepareFailed(order.attempt, err.reason, err.tail))

    def note_setup_exit(self, status: int) -> None:
        """Take the wait status of the setup lines' process."""
        setup, order = self._setup, self._order
        assert setup is not None and order is not None
        self._setup = None
        try:
            self._setup_env = {order.plan.setup: setup.result(status)}
        except HostError as err:
            self._report(reports.PrepareFailed(order.attempt, err.reason, err.tail))
            return
        survivors = [(pid, procfs.stat(pid)) for pid in procfs.descendants(os.getpid())]
        self._daemons = tuple(procfs.Proc(pid, stat.start_ticks) for pid, stat in survivors if stat is not None)
        self._check_resume(order)

    def _check_resume(self, order: orders.PrepareNode) -> None:
        """Move torn checkpoints out of the way, and compare the checkpoint to resume from on this host; then finish."""
        if order.checkpoint is None and not order.torn and self._memory is None:
            self._make_ready(order)
        else:
            self._verify_task = asyncio.get_running_loop().create_task(self._verify(order))

    async def _verify(self, order: orders.PrepareNode) -> None:
        self._hasher.is_unthrottled = True
        try:
            done = await asyncio.wrap_future(self._hasher.run(lambda pace: self._open_checkpoint(order, pace)))
        except Cancelled:
            return
        except OSError as err:  # of the folder in memory
            self._verify_task = None
            reason = f"checkpoints cannot be put into memory: {err.strerror}: {err.filename}"
            self._report(reports.PrepareFailed(order.attempt, reason, ""))
            return
        self._verify_task = None
        fault, self._resume = done
        if fault:
            reason = f"the checkpoint to resume from is not complete on this host: {fault}"
            is_copy = (
                order.checkpoint is not None and order.checkpoint.locations[0].host and self._resume is order.resume
            )
            number = order.checkpoint.number if order.checkpoint is not None and not is_copy else 0
            self._report(reports.PrepareFailed(order.attempt, reason, "", number))
        else:
            self._make_ready(order)

    def _open_checkpoint(self, order: orders.PrepareNode, pace: disk.Pace) -> tuple[str, ResumePoint | None]:
        """Return how the checkpoint to resume from differs here from the ledger, empty for nothing; and what ranks resume from: in
        memory, if it can be put there."""
        checkpoint, resume, memory = order.checkpoint, order.resume, self._memory
        if memory is None:
            return self._compare_checkpoint(order, pace), resume
        is_in_memory = checkpoint is not None and checkpoint.locations[0].is_memory
        on_disk = replace(order, checkpoint=None) if is_in_memory else order
        if fault := self._compare_checkpoint(on_disk, pace):
            return fault, resume
        opened = memory.open(checkpoint if checkpoint is not None and checkpoint.is_named else None)
        if resume is not None and opened is not None and opened is not checkpoint:
            resume = replace(resume, path=opened.path)
        in_memory = replace(order, checkpoint=opened, torn=(), deep=order.deep and is_in_memory)
        return self._compare_checkpoint(in_memory, pace), resume

    def _compare_checkpoint(self, order: orders.PrepareNode, pace: disk.Pace) -> str:
        """Return how the checkpoint to resume from differs here from the ledger; empty for nothing."""
        on_disk = () if self._memory is None else (self._job.checkpoints,)
        for checkpoint in order.torn:
            for root in (Path(checkpoint.locations[0].root), *on_disk):
                for name, to in disk.quarantine(root, checkpoint):
                    self._note(f"{name} is torn ({checkpoint.why}): moved to {to}")
        if order.checkpoint is None:
            return ""
        root = Path(order.checkpoint.locations[0].root)
        is_in_memory = self._memory is not None and root == self._memory.folder
        if is_in_memory or Path(os.path.realpath(order.checkpoint.path)).is_relative_to(
            os.path.realpath(self._job.root)
        ):
            for name, to in disk.quarantine_unfinished(root, order.checkpoint, order.attempt - 1):
                self._note(f"{name} is torn (has no file yet): moved to {to}")
        comparison = disk.compare(order.checkpoint, deep=order.deep, pace=pace)
        if comparison.fault and not comparison.is_unsure and order.checkpoint.locations[0].host:
            self._delete_stale_copies(order.checkpoint, order, pace)
        return comparison.fault

    def _delete_stale_copies(self, checkpoint: Checkpoint, order: orders.PrepareNode, pace: disk.Pace) -> None:
        """Delete the files of a checkpoint that differ on this host from the job folder, so that they are copied again."""
        for file in checkpoint.files:
            comparison = disk.compare(replace(checkpoint, files=(file,)), deep=order.deep, pace=pace)
            path = Path(checkpoint.locations[0].root) / file.name
            if comparison.fault and not comparison.is_unsure and path.exists():
                with contextlib.suppress(OSError):
                    path.unlink()
                    self._note(f"deleted, to be copied again: {comparison.fault}")

    def _make_ready(self, order: orders.PrepareNode) -> None:
        """Find the program, begin its template, and hold the port."""
        self.layers, plan = self._build_layers(order), order.plan
        if plan.launches:
            self._launch(self._node_plan(order), self.layers)
        else:
            self._hold_port(order, () if plan.starts_fresh else plan.argv, self._job.code)

    def prepare_call(self, call: RankCall) -> None:
        """Make the node ready for a launcher call of its script: the template and the port, then `Prepared`."""
        order = self._order
        assert order is not None
        self._call = call.number
        self.layers = EnvLayers(self.layers.host, self.layers.job, call.env)
        self._hold_port(order, () if order.plan.starts_fresh else call.rank_argv(0, ()), call.cwd)

    def _hold_port(self, order: orders.PrepareNode, argv: tuple[str, ...], cwd: Path) -> None:
        try:
            self._program = setup_script.find_first_program(order.plan.programs, self.layers.given, self._job.code)
            # Never the port of the previous attempt: another process may have it.
            candidates = rendezvous.PORT_RANGE[(order.attempt + self._call) % 2 :: 2]
            seed = f"{self._incarnation} {order.attempt} {self._call}"
            is_first = order.nodes[:1] == (self._config.node,)
            port_socket = rendezvous.hold_port(seed, order.plan.rendezvous_port, candidates) if is_first else None
        except HostError as err:
            self._report(reports.PrepareFailed(order.attempt, str(err), ""))
            return
        if argv:
            shared = self.environment("", Path("evidence")).build_env({})
            template_argv = argv if self._call else (self._program, *argv[1:])
            self.starter.prepare(template_argv, shared, self._job, self._config.node, cwd)
        self._awaiting_template = order, port_socket
        self.poll()

    def _finish(self, order: orders.PrepareNode, port_socket: socket.socket | None) -> None:
        """Report that the node is ready."""
        port = port_socket.getsockname()[1] if port_socket is not None else 0
        self.ready = reports.Prepared(order.attempt, "", port, self._listen(port_socket, order), self._call)
        if self._memory is not None:
            self.ready = replace(self.ready, memory_fault=self._memory.fault)
        self._report(self.ready)

    def _listen(self, port_socket: socket.socket | None, order: orders.PrepareNode) -> tuple[observations.Address, ...]:
        """Listen for probes on the port until the ranks start, if ordered; return the addresses to probe."""
        if port_socket is None:
            return ()
        # The first call of a script has found the way for the later ones
        if order.plan.pool is None or len(order.nodes) == 1 or self._call > 1:
            port_socket.close()
            return ()
        self._listener = rendezvous.Listener(port_socket, self._config.token, order.attempt)
        return interfaces.list_addresses()
