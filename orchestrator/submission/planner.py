"""Planner of a job: makes its `Plan` from the job file and the inventory. Pure.

On backend local every node gets its ranks and GPUs here. Over SSH the plan is a pool: hosts in the user's order, and what
an attempt takes of them; the brain chooses the hosts for each attempt. On Slurm the hosts of the pool are unknown until
Slurm has chosen them.
"""

from __future__ import annotations

import os.path
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.plan import (
    Plan,
    PlannedBatch,
    PlannedNotify,
    PlannedSlurm,
    PlannedSsh,
)
from orchestrator.core.plan_types import PlannedNode, PlannedPool, QueueTerms
from orchestrator.core.secret_mask import redact_url
from orchestrator.core.slurm.sbatch_options import MINUTE_S, find_gres, signal_lead_s, whole_minutes_s
from orchestrator.core.text import format_count
from orchestrator.spec.limits import limits_of

if TYPE_CHECKING:
    from orchestrator.spec.load import JobSpec, SpecFile

RANKS_MAX = 65_536
"""Most ranks of a job, checked before they are listed."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Machines that a job can be placed on."""

    host: str
    # Backend local: the GPUs of this machine, by index
    gpus: tuple[int, ...]
    python: str
    # Backend ssh: how many GPUs each host reports; None: the hosts were not asked
    gpus_each: int | None = None
    # Backend slurm: the options that the submitter has set for all jobs
    sbatch: tuple[tuple[str, str], ...] = ()
    # Backend ssh: why hosts failed lately, by host
    failed: Mapping[str, str] = field(default_factory=dict)


def plan_job(file: SpecFile, inventory: Inventory, job_id: str, created_at: float) -> Plan:
    """Place a job. Raises UserError when the inventory cannot hold it."""
    spec = file.spec
    argv, shell = _argv(spec, inventory)
    over_ssh, on_slurm = spec.backend == "ssh", spec.backend == "slurm"
    pool = _pool(file, inventory, job_id) if over_ssh or on_slurm else None
    nodes, avoided = _place_nodes(file, inventory, pool)
    chosen, batch, slurm = _user_env(spec), spec.batch, None
    if on_slurm and pool is not None:
        slurm = PlannedSlurm(sbatch_args(spec, pool, inventory.sbatch), spec.checkpoint.on_preempt.signal)
    return Plan(
        id=job_id,
        name=spec.name,
        backend=spec.backend,
        created_at=created_at,
        nodes=nodes,
        argv=argv,
        resume_args=tuple(shlex.split(spec.checkpoint.resume_args or "")),
        shell=shell,
        launches=spec.entry.kind == "launch",
        memory_bytes=spec.checkpoint.memory or 0,
        memory_dir=os.path.normpath(spec.checkpoint.memory_dir) if spec.checkpoint.memory else "",
        setup=tuple(spec.setup),
        env={name: value for name, (value, _) in chosen.items()},
        unbuffered=spec.logs.unbuffered,
        secrets=tuple(spec.secrets),
        rendezvous_port=spec.rendezvous.port,
        heartbeat_s=spec.monitor.heartbeat_s,
        limits=limits_of(spec),
        checkpoint_glob=spec.checkpoint.path,
        checkpoint_keep=spec.checkpoint.keep,
        checkpoint_keep_every=spec.checkpoint.keep_every,
        total_steps=spec.total_steps,
        pool=pool,
        ssh=make_ssh_plan(spec) if over_ssh else None,
        slurm=slurm,
        pythons=_pythons(spec, inventory),
        notify=_notify(spec),
        starts_fresh=spec.start == "fresh",
        origins={name: file.where(key) for name, (_, key) in chosen.items()},
        batch=None if batch.per_device is None else PlannedBatch(batch.per_device, batch.accumulation),
        avoided_hosts=avoided,
    )


def _notify(spec: JobSpec) -> PlannedNotify | None:
    """Return what the job notifies, None for nothing."""
    notify = spec.notify
    if (notify.command is None and notify.url is None) or not notify.on:
        return None
    entry = notify.command
    command = () if entry is None else tuple(entry.args) or ("sh", "-c", entry.target)
    return PlannedNotify(command, redact_url(notify.url) if notify.url else None, tuple(notify.on))


def _argv(spec: JobSpec, inventory: Inventory) -> tuple[tuple[str, ...], bool]:
    """Return a rank's command, and whether its last word is shell text to which arguments are appended."""
    entry = spec.entry
    python = spec.python or inventory.python
    match entry.kind:
        case "script":
            return (python, entry.target, *entry.args), False
        case "module":
            return (python, "-m", entry.target, *entry.args), False
        case "launch":
            return ("bash", "-c", entry.target), True
        case "command":
            return (tuple(entry.args), False) if entry.args else (("bash", "-c", entry.target), True)


def _place_nodes(
    file: SpecFile, inventory: Inventory, pool: PlannedPool | None
) -> tuple[tuple[PlannedNode, ...], dict[str, str]]:
    match file.spec.backend:
        case "local":
            return _place_local(file, inventory), {}
        case "ssh":
            assert pool is not None
            return _place_ssh(file, pool, inventory.failed)
        case "slurm":
            return (), {}


def _place_local(file: SpecFile, inventory: Inventory) -> tuple[PlannedNode, ...]:
    """Make each node a slice of this machine: its GPUs in turn, or CPU ranks."""
    spec = file.spec
    per_node = _gpus_per_node(file, inventory)
    ranks_per_node = per_node or spec.procs_per_node or 1
    _refuse_too_many(file, ranks_per_node)
    nodes = []
    for index in range(spec.nodes):
        gpus = inventory.gpus[index * per_node : (index + 1) * per_node]
        ranks = tuple(range(index * ranks_per_node, (index + 1) * ranks_per_node))
        nodes.append(PlannedNode(f"node-{index}", inventory.host, "127.0.0.1", gpus, ranks))
    return tuple(nodes)


def must_ask_hosts(file: SpecFile) -> bool:
    """Return whether the hosts must be asked how many GPUs they have."""
    return file.spec.gpus_per_node == "auto" and any(host.gpus is None for host in file.hosts)


def _pool(file: SpecFile, inventory: Inventory, job_id: str) -> PlannedPool:
    """Return what an attempt takes of the hosts. Raises UserError when the number of GPUs is left open."""
    spec = file.spec
    gpus = 0 if spec.gpus_per_node is None else spec.gpus_per_node
    if gpus == "auto":
        counts = sorted({host.gpus for host in file.hosts if host.gpus is not None})
        if len(counts) > 1 and not must_ask_hosts(file):
            what = f"the hosts have different numbers of GPUs: {', '.join(map(str, counts))}"
            fix = "set gpus_per_node; hosts with fewer are then left out"
            raise UserError(what, file.where("gpus_per_node"), fix)
        gpus = (counts[0] if len(counts) == 1 and not must_ask_hosts(file) else inventory.gpus_each) or 0
    ranks_each = int(gpus) or spec.procs_per_node or 1
    _refuse_too_many(file, ranks_each)
    queue = QueueTerms(spec.time_limit_action == "requeue", spec.checkpoint.on_preempt.grace)
    return PlannedPool(
        spec.nodes,
        ranks_each,
        int(gpus),
        spec.spares,
        seed=zlib.crc32(job_id.encode()),
        queue=queue if spec.backend == "slurm" else None,
        # Setup lines could change files that ranks use, where nodes share a disk, or fail for a while and use up all hosts.
        readies_spares=not spec.setup and spec.launch is None,
    )


def _refuse_too_many(file: SpecFile, ranks_each: int) -> None:
    """Raise UserError for more ranks than a job may have."""
    count = file.spec.nodes * ranks_each
    if count > RANKS_MAX:
        what = f"{count} ranks ({format_count(file.spec.nodes, 'node')} × {ranks_each}), and {RANKS_MAX} are the most that a job may have"
        raise UserError(what, file.where("nodes"), "lower nodes, gpus_per_node or procs_per_node")


def _place_ssh(
    file: SpecFile, pool: PlannedPool, failed: Mapping[str, str]
) -> tuple[tuple[PlannedNode, ...], dict[str, str]]:
    """Return the hosts that an attempt may use, in the user's order, without those that are known to be too small; those
    that failed lately come last if there are enough others, with the reasons."""
    spec, hosts_needed = file.spec, pool.nodes + pool.spares
    cores = pool.ranks_each if not pool.gpus_each else 0
    fit = [
        host
        for host in file.hosts
        if (host.gpus is None or host.gpus >= pool.gpus_each) and (host.slots is None or host.slots >= cores)
    ]
    if len(fit) < hosts_needed:
        asked = format_count(spec.nodes, "node")
        asked += f" and {format_count(spec.spares, 'spare')}" if spec.spares else ""
        few = len(file.hosts) - len(fit)
        small = f", {few} more have too few GPUs or slots" if few else ""
        labels = f" with the labels {', '.join(spec.ssh.labels)}" if spec.ssh.labels else ""
        what = f"{format_count(hosts_needed, 'host')} wanted ({asked}), {len(fit)} available{labels}{small}"
        fix = "add hosts to ssh.hosts or ssh.hosts_file, or lower nodes or spares"
        raise UserError(what, file.where("ssh.hosts"), fix)
    nodes = {host.name: PlannedNode(host.name, host.name, host.address, (), (), host.slots or 0) for host in fit}
    avoided = [name for name in nodes if name in failed] if len(nodes.keys() - failed.keys()) >= hosts_needed else []
    order = [*(name for name in nodes if name not in avoided), *avoided]
    return tuple(nodes[name] for name in order), {name: failed[name] for name in avoided}


def make_ssh_plan(spec: JobSpec) -> PlannedSsh:
    """Return how the hosts are to be reached."""
    ssh, limit_mb = spec.ssh, spec.ssh.copy_limit_mb
    return PlannedSsh(
        user=ssh.user,
        port=ssh.port,
        host_keys=ssh.host_keys,
        remote_dir=ssh.remote_dir,
        sync=tuple(ssh.sync),
        copy_mb_s=None if limit_mb is None else float(limit_mb),
    )


def _pythons(spec: JobSpec, inventory: Inventory) -> tuple[str, ...]:
    """Return the candidates for the job's Python. A command runs what PATH gives it, unless the user names a Python."""
    if spec.python is not None:
        return (spec.python,)
    if spec.entry.kind == "command":
        return ()
    return (inventory.python, "python3") if spec.backend == "ssh" else (inventory.python,)


def _gpus_per_node(file: SpecFile, inventory: Inventory) -> int:
    """Return how many GPUs each node gets; 0 when its ranks run on the CPU."""
    spec = file.spec
    count = len(inventory.gpus)
    if spec.gpus_per_node is None:
        return 0
    if spec.gpus_per_node == "auto":
        if 0 < count < spec.nodes:
            what = f"{format_count(count, 'GPU')} on this machine for {format_count(spec.nodes, 'node')}"
            raise UserError(what, file.where("nodes"), "lower nodes, or use procs_per_node for CPU ranks")
        return count // spec.nodes
    wanted = int(spec.gpus_per_node) * spec.nodes
    if wanted > count:
        each = f"({format_count(spec.nodes, 'node')} × {spec.gpus_per_node})"
        what, fix = (
            f"{format_count(wanted, 'GPU')} wanted {each}, {count} found on this machine",
            "lower gpus_per_node, or use procs_per_node for CPU ranks",
        )
        raise UserError(what, file.where("gpus_per_node"), fix)
    return int(spec.gpus_per_node)


def _user_env(spec: JobSpec) -> dict[str, tuple[str, str]]:
    """Return the variables that the user has chosen, in `env` or by other fields, each with its value and its field."""
    env = {f"NCCL_{name.upper()}": (value, f"nccl.{name}") for name, value in spec.nccl.items()}
    if interface := spec.rendezvous.interface:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        env |= dict.fromkeys(names, (interface, "rendezvous.interface"))
    return env | {name: (value, f"env.{name}") for name, value in spec.env.items()}


def sbatch_args(spec: JobSpec, pool: PlannedPool, chosen: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return the options for sbatch, one argument each; `chosen` are the submitter's defaults."""
    slurm = spec.slurm
    slurm_options = {
        name: value
        for name in ("partition", "account", "qos", "constraint", "exclude", "mem")
        if (value := getattr(slurm, name)) is not None
    }
    slurm_options = {**dict(chosen), **slurm_options}
    return (
        f"--job-name={spec.name}",
        f"--nodes={pool.nodes + pool.spares}",
        "--ntasks-per-node=1",
        *_cpus(spec, pool),
        *([f"--gpus-per-node={pool.gpus_each}"] if pool.gpus_each and not find_gres(slurm.extra) else ()),
        *([f"--time={_time_option(spec.time_limit)}"] if spec.time_limit is not None else ()),
        f"--signal=B:USR1@{signal_lead_s(spec.checkpoint.on_preempt.grace)}",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        *(f"--{name}={value}" for name, value in slurm_options.items()),
        *(["--exclusive"] if slurm.exclusive else ()),
        *slurm.extra,
    )


def _cpus(spec: JobSpec, pool: PlannedPool) -> tuple[str, ...]:
    """Return the option for cores: without it Slurm would give all ranks of a node a single core."""
    each = spec.slurm.cpus_per_task
    if each is None and (
        spec.slurm.exclusive or any(option.startswith("--cpus-per-gpu") for option in spec.slurm.extra)
    ):
        return ()
    return (f"--cpus-per-task={pool.ranks_each * (each or 1)}",)


def _time_option(seconds: float) -> str:
    minutes = whole_minutes_s(seconds) // MINUTE_S
    days, minutes = divmod(minutes, 24 * 60)
    return f"{f'{days}-' if days else ''}{minutes // 60:02d}:{minutes % 60:02d}:00"
