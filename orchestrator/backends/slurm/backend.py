"""Backend `slurm`: agents as tasks of sruns in the allocation that this process is in. It makes no decisions.

The launches of one round become one srun. One bad node makes srun give up all of its nodes. So a node that nothing was
reported against is started again without a report of failure, and a node that has failed once is started alone from
then on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.backends.api import Backend, LaunchError, Wake
from orchestrator.backends.slurm import end_causes
from orchestrator.backends.slurm.allocation import Grant, SlurmAllocation, find_grant
from orchestrator.backends.slurm.srun_step import SrunStep, TaskState
from orchestrator.core import codec
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.durable import make_subfolders, replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.observations import Retryable
from orchestrator.core.slurm import step_env
from orchestrator.core.wire.agent_config import AgentConfig

AGENT_SCRIPT = "agent.sh"

STEP_S_MAX = 50.0
"""How long an agent may take from its srun's start to its first line: less than the brain waits for it."""

OPTIONS = (
    "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1", "--mem=0", "--cpu-bind=none",
    "--mpi=none", "--input=all", "--label", "--export=ALL",
)  # fmt: skip
"""One task on each node, in addition to what runs there, with all resources of the job there, and each independent."""

_PERMANENT = re.compile(r"not available|invalid node|More processors requested", re.IGNORECASE)
"""Slurm has taken the node out of the allocation; it does not come back to it."""


class SlurmBackend(Backend):
    """Agents of one job on the nodes of an allocation."""

    def __init__(
        self,
        job: JobDir,
        grant: Grant,
        environ: Mapping[str, str],
        wake: Wake = lambda: None,
        options: Sequence[str] = (),
    ) -> None:
        """`options`: those that sbatch was given."""
        self.wake = wake
        self._job = job
        self._slurm = SlurmAllocation(job, grant, end_causes.read_notice_s(options), lambda: self.wake())
        self.allocation = self._slurm
        self._environ = step_env.srun_env(environ)
        self._requested: dict[str, AgentConfig] = {}
        self._isolated: set[str] = set()  # nodes to be started alone
        self._configs: dict[str, AgentConfig] = {}
        self._steps: list[SrunStep] = []
        self._latest: dict[str, SrunStep] = {}
        self._failed: list[tuple[str, LaunchError]] = []
        self._reported: set[tuple[str, str]] = set()
        self._number = 0
        self._adopt()
        self._slurm.watch_signals(environ.get("ORCH_ENDING", ""))

    def launch(self, config: AgentConfig) -> None:
        """Request the launch, unless the agent is coming up already; `failures` starts the launches of one round
        together."""
        step = self._latest.get(config.node)
        if step is not None and step.tasks[config.node].state is TaskState.COMING:
            return
        self._requested[config.node] = config
        self.wake()

    def failures(self) -> list[tuple[str, LaunchError]]:
        """Start the requested agents; return the launches, by node, that failed since the last call."""
        for step in self._steps:
            self._poll(step)
        self._steps = [step for step in self._steps if not step.is_over]
        requested, self._requested = list(self._requested.values()), {}
        self._start([config for config in requested if config.node not in self._isolated])
        for config in requested:
            if config.node in self._isolated:
                self._start([config])
        failures, self._failed = self._failed, []
        return failures

    def agent_death(self, node: str) -> str | None:
        """Return the evidence that the node's agent died: its srun reports it, or has ended by itself."""
        step = self._latest.get(node)
        if step is None or node in self._requested:
            return None
        self._poll(step)
        task = step.tasks[node]
        return f"srun: {task.message or 'its task ended'}" if task.state is TaskState.ENDED else None

    def reason(self, node: str) -> str:
        """Return what Slurm reports against a node whose agent is not up."""
        step = self._latest.get(node)
        if step is None or step.tasks[node].state in (TaskState.UP, TaskState.ENDED):
            return ""
        reason = step.reason(node)
        return f"srun: {reason}" if reason else ""

    def close(self) -> None:
        """End the thread; agents and their sruns keep running."""
        self._slurm.close()

    def _start(self, configs: Sequence[AgentConfig]) -> None:
        """Start one srun for these nodes."""
        nodes = tuple(node for node in self._slurm.nodes if node in {config.node for config in configs})
        for config in configs:
            self._configs[config.node] = config
            if config.node not in nodes:
                self._fail(config.node, LaunchError("srun", "not in this allocation", "", Retryable.PERMANENT))
        if not nodes:
            return
        self._number += 1
        name = f"{self._slurm.id}-{self._number:03d}"
        try:
            self._watch(self._run(name, nodes, configs[0]))
        except OSError as err:
            reason = f"{err.filename or 'srun'}: {err.strerror}"
            fix = "Slurm's commands must be on the batch host" if isinstance(err, FileNotFoundError) else ""
            for node in nodes:
                self._fail(node, LaunchError("srun", reason, fix))

    def _run(self, name: str, nodes: tuple[str, ...], config: AgentConfig) -> SrunStep:
        """Start srun, in a session of its own; each task learns its name from its node."""
        log = self._job.steps / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        for node in nodes:
            make_subfolders(self._job.root, self._job.node(node))
        count = len(nodes)
        sizes = (f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(nodes)}")
        script = self._job.scripts / AGENT_SCRIPT
        argv = ("srun", *OPTIONS, *sizes, f"--chdir={self._job.root}", "/bin/sh", str(script))
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=output, stderr=output, env=self._environ, start_new_session=True,
                cwd=self._job.root,
            )  # fmt: skip
        self._send_config(process, config)
        stat = procfs.stat(process.pid)
        record = {"pid": process.pid, "start_ticks": stat.start_ticks if stat else 0, "nodes": nodes}
        file = self._job.steps / f"{name}.json"
        full_disk.retry_while_full(lambda: replace_text(file, json.dumps(record), durable=False))
        return SrunStep(name, nodes, log, time.monotonic(), process.poll, process.send_signal)

    def _send_config(self, process: subprocess.Popen[bytes], config: AgentConfig) -> None:
        """Write the agents' configuration to srun; it fits into a pipe, so this does not block."""
        assert process.stdin is not None
        text = codec.dumps(dataclasses.replace(config, node=""))
        try:
            process.stdin.write(text.encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:
            return  # it has ended already, and its log says why

    def _watch(self, step: SrunStep) -> None:
        self._steps.append(step)
        self._latest.update(dict.fromkeys(step.nodes, step))

    def _poll(self, step: SrunStep) -> None:
        """Read the fates of a step's agents; report each failure once."""
        step.poll()
        if not step.is_over and time.monotonic() > step.begun_s + STEP_S_MAX:
            self._give_up(step)
        failed = [node for node in step.nodes_in(TaskState.FAILED) if self._is_first_report(step, node)]
        accused = step.faulty_nodes
        self._isolated.update(accused or failed)
        for node in failed:
            if node in accused:
                self._report(step, node)
            elif node in self._configs:
                self._requested[node] = self._configs[node]

    def _give_up(self, step: SrunStep) -> None:
        """Fail the nodes without an agent; end the srun if no node has one."""
        silent = step.nodes_in(TaskState.COMING)
        for node in silent:
            reason = f": {step.reason(node)}" if step.reason(node) else ""
            step.tasks[node].state = TaskState.FAILED
            step.tasks[node].message = f"no agent came up within {STEP_S_MAX:g} s{reason}"
        if silent and not step.nodes_in(TaskState.UP):
            step.give_up()

    def _report(self, step: SrunStep, node: str) -> None:
        reason = step.reason(node) or "it ended without a message"
        is_permanent = len(step.nodes) == 1 and _PERMANENT.search(reason)
        self._fail(
            node,
            LaunchError("srun", reason, "", Retryable.PERMANENT if is_permanent else Retryable.TRANSIENT),
        )

    def _is_first_report(self, step: SrunStep, node: str) -> bool:
        if (step.name, node) in self._reported or self._latest.get(node) is not step:
            return False
        self._reported.add((step.name, node))
        return True

    def _fail(self, node: str, err: LaunchError) -> None:
        self._failed.append((node, err))

    def _adopt(self) -> None:
        """Watch the sruns of an earlier supervisor of this allocation, which has reported their failures so far."""
        for path in sorted(self._job.steps.glob(f"{self._slurm.id}-*.json")):
            self._number = max(self._number, int(path.stem.rpartition("-")[2]))
            try:
                step = _read_step(path)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the file is incomplete
            step.poll()
            self._reported.update((step.name, node) for node in step.nodes_in(TaskState.FAILED))
            self._watch(step)


def _read_step(path: Path) -> SrunStep:
    record = codec.loads_plain(path.read_bytes())
    srun = procfs.Proc(int(record["pid"]), int(record["start_ticks"]))
    nodes = tuple(str(node) for node in record["nodes"])

    def exit_code() -> int | None:
        return None if procfs.is_alive(srun) else -1

    def send_signal(signum: int) -> None:
        if procfs.is_alive(srun):
            os.kill(srun.pid, signum)

    return SrunStep(path.stem, nodes, path.with_suffix(".log"), time.monotonic(), exit_code, send_signal)


class NoAllocation(Backend):
    """Backend without an allocation: launches nothing, so that a job that is over can be brought to its end."""

    def launch(self, config: AgentConfig) -> None:
        """Raise LaunchError: there are no nodes."""
        raise LaunchError("srun", "the job has no nodes", "", Retryable.PERMANENT)

    def reason(self, node: str) -> str:
        """Return why no node is reachable."""
        return "its allocation is over"


def create_backend(job: JobDir, environ: Mapping[str, str], options: Sequence[str]) -> SlurmBackend | NoAllocation:
    """Return the backend of the allocation that this process is in; `options`: those that sbatch was given. Raises
    NotOursError."""
    grant = find_grant(job, environ)
    return SlurmBackend(job, grant, environ, options=options) if grant is not None else NoAllocation()
