"""Environment and arguments of a rank: torchrun's contract, from the plan and the rank's place in the gang."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from orchestrator.core import placeholders
from orchestrator.core.jobdir.layout import TORCHELASTIC_ERROR_FILE, JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedNode
from orchestrator.core.settings.rank_settings import RankRequest


def arguments(plan: Plan, job: JobDir, attempt: int, resume_from: str) -> tuple[str, ...]:
    """Return a rank's command for an attempt, with the resume arguments only when there is a checkpoint to resume from.

    `job` is the job's folder and `resume_from` the checkpoint as the rank's host sees them. Shell text stays as it is:
    there the shell fills in what the rank's environment has.
    """
    values = {**_values(plan, job), **_attempt_values(attempt, resume_from), placeholders.PATH: resume_from}
    extra = tuple(placeholders.fill(word, values) for word in plan.resume_args) if resume_from else ()
    if plan.shell:
        return (*plan.argv[:-1], f"{plan.argv[-1]} {shlex.join(extra)}") if extra else plan.argv
    del values[placeholders.PATH]
    return tuple(placeholders.fill(word, values) for word in plan.argv) + extra


def _values(plan: Plan, job: JobDir) -> dict[str, str]:
    """Return the placeholders that stay the same on a node, with their values."""
    folder = str(job.checkpoints)
    return {
        "checkpoint_dir": folder,
        "job_dir": str(job.root),
        "ORCH_CHECKPOINT_DIR": folder,
        "ORCH_JOB_ID": plan.id,
        "ORCH_JOB_NAME": plan.name,
    }


def _attempt_values(attempt: int, resume_from: str) -> dict[str, str]:
    """Return those that differ between attempts."""
    number = str(attempt)
    return {
        "resume_from": resume_from,
        "attempt": number,
        "ORCH_RESUME_FROM": resume_from,
        "ORCH_ATTEMPT": number,
    }


def node_env(
    plan: Plan, job: JobDir, node: PlannedNode, outer: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment that a node's setup lines and ranks start from: the submitter's, then the user's.

    What the user's variables say of an attempt is left to `rank_env`: setup lines run once for all attempts.

    Over SSH it is added to the host's own, without the submitter's, which is that of another machine. On Slurm the
    step's own choice of GPUs stands, whatever the submitter had chosen on the submit machine.
    """
    ours = {} if plan.ssh else outer
    if plan.slurm:
        ours = {name: value for name, value in outer.items() if name not in GPU_NAMES}
    env = {**ours, **_chosen(plan, _values(plan, job), of_attempt=False), **secrets}
    if node.gpus and "CUDA_VISIBLE_DEVICES" not in plan.env:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in node.gpus)
    return env


def _chosen(plan: Plan, values: Mapping[str, str], *, of_attempt: bool) -> dict[str, str]:
    """Return the user's variables whose values name the attempt, or the others, filled in."""
    return {
        name: placeholders.fill(text, values)
        for name, text in plan.env.items()
        if of_attempt != placeholders.OF_AN_ATTEMPT.isdisjoint(placeholders.named(text))
    }


GPU_NAMES = (
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES"),
    *("NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
"""Variables that choose GPUs, or say which were chosen."""


@dataclass(frozen=True, slots=True)
class RankSlot:
    """Where a rank sits in the gang of an attempt."""

    rank: int
    node: str
    node_rank: int
    nodes: int
    local_rank: int
    local_world_size: int


def rank_env(
    plan: Plan, job: JobDir, seat: RankSlot, attempt: int, meet: tuple[str, int], resume_from: str
) -> dict[str, str]:
    """Return the variables that are one rank's own: the user's that name the attempt, torchrun's contract, then ours.

    `job` is the job's folder as the rank's host sees it, `meet` address and port. TORCHELASTIC_USE_AGENT_STORE is
    never set: rank 0 itself serves the store, a new one for each attempt.
    """
    rank, world = str(seat.rank), str(plan.world_size)
    error_file = job.rank_run(seat.node, attempt, seat.rank) / TORCHELASTIC_ERROR_FILE
    values = {**_values(plan, job), **_attempt_values(attempt, resume_from)}
    return {
        **_chosen(plan, values, of_attempt=True),
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
        "TORCHELASTIC_MAX_RESTARTS": str(plan.limits.restarts_max),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        **{name: values[name] for name in placeholders.VARIABLES},
        "ORCH_TAG": f"{plan.id}/{seat.node}",
    }


def settings_request(plan: Plan, node: str, ranks: int, interface: str | None, evidence: Path) -> RankRequest:
    """Return what settings of a node's ranks follow from: the plan, and the node's share of it.

    `interface` leads to the first node: empty where it is not known, None where it is found when the attempt starts.
    """
    planned = next((one for one in plan.nodes if one.name == node), None)
    return RankRequest(
        backend=plan.backend,
        nodes=plan.pool.nodes if plan.pool is not None else len(plan.nodes),
        ranks=ranks,
        ranks_on_host=plan.world_size if plan.pool is None else ranks,
        gpus=plan.pool.gpus_each if plan.pool is not None else len(planned.gpus) if planned else 0,
        slots=planned.slots if planned else 0,
        interface=interface,
        evidence=str(evidence),
        patience_s=max(plan.limits.hang_ceiling_s, plan.limits.hang_s_max or 0.0),
        defaults=plan.defaults,
        chosen=plan.origins,
        secrets=plan.secrets,
    )


FOREIGN_PREFIXES = ("TORCHELASTIC_", "SLURM_", "SLURMD_", "PMI_", "PMIX_", "OMPI_", "PET_", "ORCH_")

FOREIGN_NAMES = frozenset(
    [
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("OLDPWD", "PWD", "SHLVL", "_"),
    ]
)


def outer_env(environ: Mapping[str, str], secrets: tuple[str, ...]) -> dict[str, str]:
    """Return what ranks inherit of the submitter's environment: all but the variables that another launcher left there,
    and the secrets, which are kept apart."""
    return {
        name: value
        for name, value in environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES) and name not in secrets
    }


Gang: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The nodes of the current attempt in the order of their ranks, each with its ranks."""
