"""What was decided before the first process starts, and what does a rank get of it? Made by `planning`, pure.

The plan is what the supervisor works from, so its types are plain data of the standard library. What differs between
attempts (the port, the checkpoint) is added by `rank_env` and `arguments` when an attempt starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.wire.paths import JobDir


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
class PlannedLimits:
    """Every limit of the job, in seconds unless named otherwise; None is no limit.

    `fence_s` is None on this machine, where locks tell of agents. `hang_s` is 0 where it follows from what the job has shown, within `hang_floor_s` and `hang_ceiling_s`; `patience_s` is
    0 for the plain one.
    """

    start_s: float
    hang_s: float | None
    node_silent_s: float
    fence_s: float | None
    stop_grace_s: float
    break_grace_s: float
    restarts: int
    backoff_s: float
    backoff_s_max: float
    never_on_exit_codes: tuple[int, ...]
    time_s: float | None
    on_hang: str
    on_desync: str = "fail"
    rendezvous_s: float | None = None
    first_step_s: float | None = None
    hang_floor_s: float = 5.0
    hang_ceiling_s: float = 600.0
    queue_s: float | None = None
    patience_s: float | None = 0.0


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
    limits: PlannedLimits
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


def arguments(plan: Plan, resume_from: str) -> tuple[str, ...]:
    """Return a rank's command for an attempt; the resume arguments only when there is something to resume from."""
    if not resume_from or not plan.resume_args:
        return plan.argv
    extra = tuple(word.replace("{path}", resume_from) for word in plan.resume_args)
    if plan.shell:
        return (*plan.argv[:-1], f"{plan.argv[-1]} {shlex.join(extra)}")
    return plan.argv + extra


def node_env(
    plan: Plan, node: PlannedNode, outer: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment that a node's setup lines and ranks start from: the submitter's, then the user's.

    Over SSH it is added to the host's own: the submitter's is that of another machine. On Slurm the step's own choice of
    GPUs stands, whatever the submitter had chosen on his machine.
    """
    ours = {} if plan.ssh else outer
    if plan.slurm:
        ours = {name: value for name, value in outer.items() if name not in GPU_NAMES}
    env = {**ours, **plan.env, **secrets}
    if node.gpus and "CUDA_VISIBLE_DEVICES" not in plan.env:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in node.gpus)
    return env


GPU_NAMES = frozenset(
    [
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
        *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    ]
)
"""What chooses GPUs, or says which were chosen."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits in the gang of an attempt."""

    rank: int
    node: str
    node_rank: int
    nodes: int
    local_rank: int
    local_world_size: int


def rank_env(
    plan: Plan, job: JobDir, seat: Seat, attempt: int, meet: tuple[str, int], resume_from: str
) -> dict[str, str]:
    """Return the variables that are one rank's own: torchrun's contract, then ours.

    `job` is the job's folder as the rank's host sees it, `meet` address and port. TORCHELASTIC_USE_AGENT_STORE is
    never set: rank 0 itself serves the store, a new one for each attempt.
    """
    rank, world = str(seat.rank), str(plan.world_size)
    error_file = job.rank_run(seat.node, attempt, seat.rank) / "torchelastic-error.json"
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "GROUP_RANK": str(seat.node_rank),
        "GROUP_WORLD_SIZE": str(seat.nodes),
        "NODE_RANK": str(seat.node_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": meet[0],
        "MASTER_PORT": str(meet[1]),
        "TORCHELASTIC_RUN_ID": plan.id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.limits.restarts),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "ORCH_JOB_ID": plan.id,
        "ORCH_JOB_NAME": plan.name,
        "ORCH_ATTEMPT": str(attempt),
        "ORCH_CHECKPOINT_DIR": str(job.checkpoints),
        "ORCH_RESUME_FROM": resume_from,
        "ORCH_TAG": f"{plan.id}/{seat.node}",
    }


FOREIGN_PREFIXES = ("TORCHELASTIC_", "SLURM_", "SLURMD_", "PMI_", "PMIX_", "OMPI_", "PET_", "ORCH_")
FOREIGN_NAMES = frozenset(
    [
        *(
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "NODE_RANK",
        ),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("OLDPWD", "PWD", "SHLVL", "_"),
    ]
)


def outer_env(environ: Mapping[str, str], secrets: tuple[str, ...]) -> dict[str, str]:
    """Return what ranks inherit of the submitter's environment: all but what another launcher left there, and
    the secrets, which are kept apart."""
    return {
        name: value
        for name, value in environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES) and name not in secrets
    }
