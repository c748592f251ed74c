"""Plan of a job: everything decided before the first process starts. Made by `submission.planner`, pure.

The supervisor works from the plan, so its types are plain data of the standard library. What differs between attempts
(the port, the checkpoint) is added by `core.settings.rank_env` when an attempt starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.plan_types import Limits, PlannedNode, PlannedPool
from orchestrator.core.text import format_count


@dataclass(frozen=True, slots=True)
class PlannedSsh:
    """Access to hosts over SSH, and the job's folder on them. `copy_mb_s` limits bulk copies, None: not limited."""

    user: str | None
    port: int | None
    host_keys: str
    remote_dir: str
    sync: tuple[str, ...]
    copy_mb_s: float | None


@dataclass(frozen=True, slots=True)
class PlannedSlurm:
    """Slurm options of a job, and the warning of its ranks before they lose their nodes.

    `options` are those of sbatch, one argument each. `signal` (a name, without SIG) goes to the ranks before Slurm takes the
    nodes. Such a plan has no nodes: they are known in the allocation.
    """

    options: tuple[str, ...]
    signal: str


@dataclass(frozen=True, slots=True)
class PlannedNotify:
    """Notifications of a job, see `supervisor.notifications`."""

    # argv
    command: tuple[str, ...]
    # The webhook's host alone: the rest may be a token, and is kept with the secrets
    url: str | None
    # The names of events in `notify.on`
    occasions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Batch of the user's script for one optimizer step: samples per device, and how often gradients are accumulated."""

    per_device: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before the first process starts."""

    FORMER: ClassVar[dict[str, str]] = {"set_aside": "avoided_hosts"}

    id: str
    name: str
    backend: str
    created_at: float
    nodes: tuple[PlannedNode, ...]
    argv: tuple[str, ...]
    resume_args: tuple[str, ...]
    shell: bool
    setup: tuple[str, ...]
    env: dict[str, str]
    # PYTHONUNBUFFERED is set, unless anything else sets it
    unbuffered: bool
    secrets: tuple[str, ...]
    rendezvous_port: int | None
    heartbeat_s: float
    limits: Limits
    checkpoint_glob: str
    checkpoint_keep: int | None
    checkpoint_keep_every: int | None
    total_steps: int | None
    pool: PlannedPool | None = None
    ssh: PlannedSsh | None = None
    slurm: PlannedSlurm | None = None
    # The candidates for the job's Python, the best first; its folder comes first in PATH
    pythons: tuple[str, ...] = ()
    notify: PlannedNotify | None = None
    # Each rank is a new interpreter; else a fork of its node's template where that can be
    starts_fresh: bool = False
    # The place of each variable of `env` in the job file
    origins: dict[str, str] = field(default_factory=dict)
    batch: PlannedBatch | None = None
    # Hosts that are used only when no others are left, since they failed recently; each with the reason
    avoided_hosts: dict[str, str] = field(default_factory=dict)
    # The last item of `argv` is a script that each node runs once; its launcher calls start the ranks
    launches: bool = False
    # How much memory of each node its checkpoints may take, 0: they are written to disk; and the folder for them
    memory_bytes: int = 0
    memory_dir: str = ""

    @property
    def effective_batch(self) -> int | None:
        """The samples of one optimizer step of the whole job; None where the job file does not say."""
        if self.batch is None:
            return None
        return self.batch.per_device * self.batch.accumulation * self.world_size

    @property
    def batch_text(self) -> str:
        """The effective batch size with its factors; empty where the job file does not say."""
        if self.batch is None:
            return ""
        factors = f"{self.batch.per_device} per device × {self.batch.accumulation} accumulated"
        return f"{self.effective_batch} = {factors} × {format_count(self.world_size, 'rank')}"

    @property
    def world_size(self) -> int:
        if self.pool is not None:
            return self.pool.nodes * self.pool.ranks_each
        return sum(len(node.ranks) for node in self.nodes)

    def for_node(self, name: str) -> Plan:
        """Return the plan as a node is sent it: without the other hosts of a pool, and what the supervisor alone acts on."""
        nodes = self.nodes if self.pool is None else tuple(node for node in self.nodes if node.name == name)
        return replace(self, nodes=nodes, avoided_hosts={}, notify=None)

    def checkpoint_location(self, job: JobDir) -> tuple[Path, str]:
        """Return where the checkpoints are in the job folder on the submit machine: those of hosts that do not see it
        are fetched into one folder, wherever the ranks have them."""
        folder, glob = job.checkpoint_location(self.checkpoint_glob)
        return (job.checkpoints if self.ssh is not None else folder), glob

    @property
    def program(self) -> str:
        """The program that every node must have: the interpreter, or the shell."""
        return self.argv[0]

    @property
    def programs(self) -> tuple[str, ...]:
        """The candidates for that program on a node, the best first."""
        return self.pythons if self.pythons[:1] == self.argv[:1] else (self.program,)

    @property
    def size_text(self) -> str:
        """Size of the job as text: `4 ranks on 2 nodes, on CPUs`."""
        gpus, nodes, chosen = sum(len(node.gpus) for node in self.nodes), len(self.nodes), ""
        if self.pool is not None:
            gpus, nodes = self.pool.nodes * self.pool.gpus_each, self.pool.nodes
            spares = f", {format_count(self.pool.spares, 'spare')}" if self.pool.spares else ""
            hosts = f", out of {format_count(len(self.nodes), 'host')}"
            chosen = f"{spares}{'' if self.slurm else hosts}"
        ranks, on_nodes = format_count(self.world_size, "rank"), format_count(nodes, "node")
        return f"{ranks} on {on_nodes}{chosen}, on {format_count(gpus, 'GPU') if gpus else 'CPUs'}"
