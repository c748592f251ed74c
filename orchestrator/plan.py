"""Where does every rank go, and with which settings? Pure: spec and inventory in, a Plan out.

The plan is what the supervisor works from, so its types are plain data of the standard library. What differs between
attempts (the port, the checkpoint) is added by `rank_env` and `arguments` when an attempt starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import UserError
from orchestrator.wire.paths import JobDir

if TYPE_CHECKING:
    from orchestrator.spec import JobSpec, SpecFile

FENCE_SHARE = 0.6
"""The part of `monitor.node_timeout` after which an agent without contact and progress stops its ranks; the
supervisor waits the whole of it, so that a new attempt never meets the old one."""

BREAK_GRACE_S_MAX = 5.0
"""TERM to KILL for ranks of a broken gang, which has nothing left to save."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What there is to place a job on. `gpus` are those of this machine, by index; only backend local uses them."""

    host: str
    gpus: tuple[int, ...]
    python: str


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node: its place in the job, the host it is on, and what of the host it uses."""

    name: str
    host: str
    address: str
    gpus: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedLimits:
    """Every limit of the job, in seconds unless named otherwise; None is no limit."""

    start_s: float
    hang_s: float | None
    node_silent_s: float
    fence_s: float
    stop_grace_s: float
    break_grace_s: float
    restarts: int
    backoff_s: float
    backoff_s_max: float
    never_on_exit_codes: tuple[int, ...]
    time_s: float | None
    on_hang: str


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

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def program(self) -> str:
        """What must exist on every node: the interpreter, or the shell."""
        return self.argv[0]

    @property
    def size(self) -> str:
        """What the job runs on, for people: `4 ranks on 2 nodes, on CPUs`."""
        gpus, nodes = sum(len(node.gpus) for node in self.nodes), len(self.nodes)
        ranks = f"{self.world_size} rank{'s' if self.world_size != 1 else ''}"
        return f"{ranks} on {nodes} node{'s' if nodes != 1 else ''}, on {f'{gpus} GPUs' if gpus else 'CPUs'}"

    def node_of(self, rank: int) -> PlannedNode:
        """Return the node on which a rank lives."""
        return next(node for node in self.nodes if rank in node.ranks)


def make(file: SpecFile, inventory: Inventory, job_id: str, created_at: float) -> Plan:
    """Place a job. Raises UserError when the inventory cannot hold it."""
    spec = file.spec
    argv, shell = _argv(spec, inventory)
    resume_args = tuple(shlex.split(spec.checkpoint.resume_args)) if spec.checkpoint.resume_args else ()
    return Plan(
        id=job_id,
        name=spec.name,
        backend=spec.backend,
        created_at=created_at,
        nodes=_place_local(file, inventory),
        argv=argv,
        resume_args=resume_args,
        shell=shell,
        setup=tuple(spec.setup),
        env={**_chosen_env(spec), **spec.env},
        defaults=_defaults(spec),
        secrets=tuple(spec.secrets),
        rendezvous_port=spec.rendezvous.port,
        heartbeat_s=spec.monitor.heartbeat_s,
        limits=_limits(spec),
        checkpoint_glob=spec.checkpoint.path,
        checkpoint_keep=spec.checkpoint.keep,
        total_steps=spec.total_steps,
    )


def _argv(spec: JobSpec, inventory: Inventory) -> tuple[tuple[str, ...], bool]:
    """Return a rank's command, and whether its last word is shell text to which arguments are appended."""
    entry = spec.entry
    python = spec.python or inventory.python
    match entry.kind:
        case "script":
            return (python, entry.target, *entry.args), False
        case "module":
            return (python, "-m", entry.target, *entry.args), False
        case _:
            return (tuple(entry.args), False) if entry.args else (("bash", "-c", entry.target), True)


def _place_local(file: SpecFile, inventory: Inventory) -> tuple[PlannedNode, ...]:
    """Make each node a slice of this machine: its GPUs in turn, or CPU ranks."""
    spec = file.spec
    per_node = _gpus_per_node(file, inventory)
    ranks_per_node = per_node or spec.procs_per_node or 1
    nodes = []
    for index in range(spec.nodes):
        gpus = inventory.gpus[index * per_node : (index + 1) * per_node]
        ranks = tuple(range(index * ranks_per_node, (index + 1) * ranks_per_node))
        nodes.append(PlannedNode(f"node-{index}", inventory.host, "127.0.0.1", gpus, ranks))
    return tuple(nodes)


def _gpus_per_node(file: SpecFile, inventory: Inventory) -> int:
    """Return how many GPUs each node gets; 0 when its ranks run on the CPU."""
    spec = file.spec
    there = len(inventory.gpus)
    if spec.gpus_per_node is None:
        return 0
    if spec.gpus_per_node == "auto":
        return there // spec.nodes
    wanted = int(spec.gpus_per_node) * spec.nodes
    if wanted > there:
        what = (
            f"{wanted} GPUs wanted ({spec.nodes} nodes × {spec.gpus_per_node}), {there} found on this machine"
        )
        raise UserError(
            what, file.where("gpus_per_node"), "lower gpus_per_node, or use procs_per_node for CPU ranks"
        )
    return int(spec.gpus_per_node)


def _limits(spec: JobSpec) -> PlannedLimits:
    monitor, restart = spec.monitor, spec.restart
    return PlannedLimits(
        start_s=monitor.start_timeout,
        hang_s=monitor.hang_timeout,
        node_silent_s=monitor.node_timeout,
        fence_s=monitor.node_timeout * FENCE_SHARE,
        stop_grace_s=monitor.stop_grace,
        break_grace_s=min(monitor.stop_grace, BREAK_GRACE_S_MAX),
        restarts=restart.max,
        backoff_s=restart.backoff,
        backoff_s_max=restart.backoff_max,
        never_on_exit_codes=tuple(restart.never_on_exit_codes),
        time_s=spec.time_limit,
        on_hang=monitor.on_hang,
    )


def _chosen_env(spec: JobSpec) -> dict[str, str]:
    """Return the variables that other fields of the spec stand for: what the user chose there is the user's word."""
    env = {f"NCCL_{name.upper()}": value for name, value in spec.nccl.items()}
    if spec.rendezvous.interface:
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = spec.rendezvous.interface
    return env


def _defaults(spec: JobSpec) -> dict[str, str]:
    """Return the settings that hold only where the user, the setup lines or the machine have not set them."""
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # as torchrun sets them
    if spec.logs.unbuffered:
        defaults["PYTHONUNBUFFERED"] = "1"
    if spec.backend == "local":
        defaults["GLOO_SOCKET_IFNAME"] = defaults["NCCL_SOCKET_IFNAME"] = "lo"
    return defaults


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
    """Return the environment that a node's setup lines and ranks start from: the submitter's, then the user's."""
    env = {**outer, **plan.env, **secrets}
    if node.gpus and "CUDA_VISIBLE_DEVICES" not in plan.env:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in node.gpus)
    return env


def rank_env(
    plan: Plan, job: JobDir, rank: int, attempt: int, meet: tuple[str, int], resume_from: str
) -> dict[str, str]:
    """Return the variables that are one rank's own: torchrun's contract, then ours. `meet`: address and port.

    TORCHELASTIC_USE_AGENT_STORE is never set: rank 0 itself serves the store, a new one for each attempt.
    """
    node = plan.node_of(rank)
    index = plan.nodes.index(node)
    local_rank = node.ranks.index(rank)
    local, world, nodes = len(node.ranks), plan.world_size, len(plan.nodes)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(index),
        "GROUP_WORLD_SIZE": str(nodes),
        "NODE_RANK": str(index),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": meet[0],
        "MASTER_PORT": str(meet[1]),
        "TORCHELASTIC_RUN_ID": plan.id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.limits.restarts),
        "TORCHELASTIC_ERROR_FILE": str(job.rank_run(node.name, attempt, rank) / "torchelastic-error.json"),
        "ORCH_JOB_ID": plan.id,
        "ORCH_JOB_NAME": plan.name,
        "ORCH_ATTEMPT": str(attempt),
        "ORCH_CHECKPOINT_DIR": str(job.checkpoints),
        "ORCH_RESUME_FROM": resume_from,
        "ORCH_TAG": f"{plan.id}/{node.name}",
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
