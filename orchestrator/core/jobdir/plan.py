"""What was decided before the first process starts, and what does a rank get of it? Made by `planning`, pure.

The plan is what the supervisor works from, so its types are plain data of the standard library. What differs between
attempts (the port, the checkpoint) is added by `rank_env` and `arguments` when an attempt starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.limits import Limits


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node: its place in the job, the host it is on, and what of the host it uses.

    With a pool it is a host that may be used: it has no ranks yet, its GPUs are leased when it is, `address` is where
    other hosts reach it (empty: to be probed), and `slots` how many CPU ranks it takes (0: as many as it has cores).
    """

    name: str
    host: str
    address: str
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]
    slots: int = 0


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """What an attempt takes of the hosts: so many nodes with so many ranks each, and spares. 0 GPUs: CPU ranks."""

    nodes: int
    ranks_each: int
    gpus_each: int
    spares: int


@dataclass(frozen=True, slots=True)
class PlannedSsh:
    """How hosts are reached and where the job lies on them. `copy_mb_s`: limit of bulk copies, None for none."""

    user: str | None
    port: int | None
    host_keys: str
    remote_dir: str
    sync: tuple[str, ...]
    copy_mb_s: float | None


@dataclass(frozen=True, slots=True)
class PlannedSlurm:
    """How a job asks Slurm for nodes, and what its ranks are told before they lose them.

    `options` are those of sbatch, one argument each. `signal` (a name, without SIG) goes to the ranks `grace_s` before
    the nodes are taken away. The plan has no nodes: they are known in the allocation.
    """

    options: tuple[str, ...]
    requeues_at_time_limit: bool
    signal: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class PlannedNotify:
    """Whom to tell of what happens: a command (argv), a webhook (its host alone: the rest may be a token, and is kept
    with the secrets), and of which occasions; see `notify`."""

    command: tuple[str, ...]
    url: str | None
    occasions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before the first process starts."""

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
    defaults: dict[str, str]
    secrets: tuple[str, ...]
    rendezvous_port: int | None
    heartbeat_s: float
    limits: Limits
    checkpoint_glob: str
    checkpoint_keep: int | None
    total_steps: int | None
    pool: PlannedPool | None = None
    ssh: PlannedSsh | None = None
    slurm: PlannedSlurm | None = None
    programs: tuple[str, ...] = ()
    notify: PlannedNotify | None = None

    @property
    def world_size(self) -> int:
        if self.pool is not None:
            return self.pool.nodes * self.pool.ranks_each
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def program(self) -> str:
        """What must exist on every node: the interpreter, or the shell."""
        return self.argv[0]

    @property
    def size(self) -> str:
        """What the job runs on, for people: `4 ranks on 2 nodes, on CPUs`."""
        gpus, nodes, chosen = sum(len(node.gpus) for node in self.nodes), len(self.nodes), ""
        if self.pool is not None:
            gpus, nodes = self.pool.nodes * self.pool.gpus_each, self.pool.nodes
            spares = f" and {self.pool.spares} to spare" if self.pool.spares else ""
            hosts = f" of {len(self.nodes)} host{'s' if len(self.nodes) != 1 else ''}"
            chosen = f"{spares}{'' if self.slurm else hosts}"
        ranks = f"{self.world_size} rank{'s' if self.world_size != 1 else ''}"
        plural = "s" if nodes != 1 else ""
        return f"{ranks} on {nodes} node{plural}{chosen}, on {f'{gpus} GPUs' if gpus else 'CPUs'}"
