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
from orchestrator.backends.slurm.allocation import Grant, SlurmAllocation, grant_of
from orchestrator.backends.slurm.srun_step import Fate, Step
from orchestrator.core import codec
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.durable import make_inside, replace_text
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
        self._slurm = SlurmAllocation(job, grant, end_causes.announced_s(options), lambda: self.wake())
        self.allocation = self._slurm
        self._environ = step_env.for_srun(environ)
        self._wanted: dict[str, AgentConfig] = {}
        self._suspects: set[str] = set()  # nodes to be started alone
        self._configs: dict[str, AgentConfig] = {}
        self._steps: list[Step] = []
        self._latest: dict[str, Step] = {}
        self._failed: list[tuple[str, LaunchError]] = []
        self._reported: set[tuple[str, str]] = set()
        self._number = 0
        self._adopt()
        self._slurm.heed_signals(environ.get("ORCH_ENDING", ""))

    def launch(self, config: AgentConfig) -> None:
        """Request the launch, unless the agent is coming up already; `failures` starts the launches of one round
        together."""
        step = self._latest.get(config.node)
        if step is not None and step.seen[config.node].fate is Fate.COMING:
            return
        self._wanted[config.node] = config
        self.wake()

    def failures(self) -> list[tuple[str, LaunchError]]:
        """Start the requested agents; return the launches, by node, that failed since the last call."""
        for step in self._steps:
            self._poll(step)
        self._steps = [step for step in self._steps if not step.is_over]
        wanted, self._wanted = list(self._wanted.values()), {}
        self._start([config for config in wanted if config.node not in self._suspects])
        for config in wanted:
            if config.node in self._suspects:
                self._start([config])
        failures, self._failed = self._failed, []
        return failures

    def agent_death(self, node: str) -> str | None:
        """Return the evidence that the node's agent died: its srun reports it, or has ended by itself."""
        step = self._latest.get(node)
        if step is None or node in self._wanted:
            return None
        self._poll(step)
        task = step.seen[node]
        return f"srun: {task.word or 'its task ended'}" if task.fate is Fate.ENDED else None

    def reason(self, node: str) -> str:
        """Return what Slurm reports against a node whose agent is not up."""
        step = self._latest.get(node)
        if step is None or step.seen[node].fate in (Fate.UP, Fate.ENDED):
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
                self._fail(
                    config.node, LaunchError("srun", "not in this allocation", "", Retryable.PERMANENT)
                )
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

    def _run(self, name: str, nodes: tuple[str, ...], config: AgentConfig) -> Step:
        """Start srun, in a session of its own; each task learns its name from its node."""
        log = self._job.steps / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        for node in nodes:
            make_inside(self._job.root, self._job.node(node))
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
        full_disk.wait_for(lambda: replace_text(file, json.dumps(record), durable=False))
        return Step(name, nodes, log, time.monotonic(), process.poll, process.send_signal)

    def _send_config(self, process: subprocess.Popen[bytes], config: AgentConfig) -> None:
        """Write the agents' configuration to srun; it fits into a pipe, so this does not block."""
        assert process.stdin is not None
        text = codec.dumps(dataclasses.replace(config, node=""))
        try:
            process.stdin.write(text.encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:
            return  # it has ended already, and its log says why

    def _watch(self, step: Step) -> None:
        self._steps.append(step)
        self._latest.update(dict.fromkeys(step.nodes, step))

    def _poll(self, step: Step) -> None:
        """Read the fates of a step's agents; report each failure once."""
        step.poll()
        if not step.is_over and time.monotonic() > step.begun_s + STEP_S_MAX:
            self._give_up(step)
        failed = [node for node in step.of(Fate.FAILED) if self._is_new(step, node)]
        accused = step.accused
        self._suspects.update(accused or failed)
        for node in failed:
            if node in accused:
                self._report(step, node)
            elif node in self._configs:
                self._wanted[node] = self._configs[node]

    def _give_up(self, step: Step) -> None:
        """Fail the nodes without an agent; end the srun if no node has one."""
        silent = step.of(Fate.COMING)
        for node in silent:
            reason = f": {step.reason(node)}" if step.reason(node) else ""
            step.seen[node].fate = Fate.FAILED
            step.seen[node].word = f"no agent came up within {STEP_S_MAX:g} s{reason}"
        if silent and not step.of(Fate.UP):
            step.give_up()

    def _report(self, step: Step, node: str) -> None:
        reason = step.reason(node) or "it ended without a message"
        is_permanent = len(step.nodes) == 1 and _PERMANENT.search(reason)
        self._fail(
            node,
            LaunchError("srun", reason, "", Retryable.PERMANENT if is_permanent else Retryable.TRANSIENT),
        )

    def _is_new(self, step: Step, node: str) -> bool:
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
                step = _adopted(path)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the file is incomplete
            step.poll()
            self._reported.update((step.name, node) for node in step.of(Fate.FAILED))
            self._watch(step)


def _adopted(path: Path) -> Step:
    record = codec.loads_plain(path.read_bytes())
    srun = procfs.Proc(int(record["pid"]), int(record["start_ticks"]))
    nodes = tuple(str(node) for node in record["nodes"])

    def exit_code() -> int | None:
        return None if procfs.alive(srun) else -1

    def signalled(signum: int) -> None:
        if procfs.alive(srun):
            os.kill(srun.pid, signum)

    return Step(path.stem, nodes, path.with_suffix(".log"), time.monotonic(), exit_code, signalled)


class NoAllocation(Backend):
    """Backend without an allocation: launches nothing, so that a job that is over can be brought to its end."""

    def launch(self, config: AgentConfig) -> None:
        """Raise LaunchError: there are no nodes."""
        raise LaunchError("srun", "the job has no nodes", "", Retryable.PERMANENT)

    def reason(self, node: str) -> str:
        """Return why no node is reachable."""
        return "its allocation is over"


def of_environment(
    job: JobDir, environ: Mapping[str, str], options: Sequence[str]
) -> SlurmBackend | NoAllocation:
    """Return the backend of the allocation that this process is in; `options`: those that sbatch was given. Raises
    NotOursError."""
    grant = grant_of(job, environ)
    return SlurmBackend(job, grant, environ, options=options) if grant is not None else NoAllocation()
