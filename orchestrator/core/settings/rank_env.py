"""Environment and arguments of a rank: torchrun's contract, from the plan and the rank's numbers in the gang. Pure."""

from __future__ import annotations

import os
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core import placeholders
from orchestrator.core.jobdir.layout import TORCHELASTIC_ERROR_FILE, JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import Gang, PlannedNode
from orchestrator.core.slurm import step_env


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Plan of a job for one node of an attempt."""

    plan: Plan
    # The job's folder as the node sees it
    job: JobDir
    node: str
    attempt: int
    # The nodes of the gang, in the order of their ranks; a spare is none of them
    nodes: tuple[str, ...] = ()
    # The checkpoint as the node sees it; empty for none
    resume_from: str = ""
    # Its step in the job, where that is known
    resume_step: int | None = None
    # The folder that ranks are given for checkpoints, in memory; empty: that of the job
    checkpoint_dir: str = ""

    @property
    def index(self) -> int:
        """The node's place in the gang; of a spare the last."""
        return self.nodes.index(self.node) if self.node in self.nodes else max(0, len(self.nodes) - 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self._ranks_of(self.index)

    def _ranks_of(self, index: int) -> tuple[int, ...]:
        plan = self.plan
        return plan.pool.node_ranks(index) if plan.pool is not None else plan.nodes[index].ranks

    @property
    def gang(self) -> Gang:
        """The nodes of the gang, each with its ranks."""
        return tuple((name, self._ranks_of(index)) for index, name in enumerate(self.nodes))

    @property
    def planned_node(self) -> PlannedNode:
        """The node in the plan; a default one if the plan does not have it."""
        there = (node for node in self.plan.nodes if node.name == self.node)
        return next(there, PlannedNode(self.node, self.node, "", (), ()))

    @property
    def gpus(self) -> int:
        """How many GPUs of the node are the job's; 0: CPU ranks."""
        return self.plan.pool.gpus_each if self.plan.pool is not None else len(self.planned_node.gpus)

    def placeholder_values(self) -> dict[str, str]:
        """Return the values of placeholders in this attempt."""
        number, step = str(self.attempt), "" if self.resume_step is None else str(self.resume_step)
        return {
            **_values(self),
            "resume_from": self.resume_from,
            "resume_step": step,
            "attempt": number,
            "ORCH_RESUME_FROM": self.resume_from,
            "ORCH_RESUME_STEP": step,
            "ORCH_ATTEMPT": number,
        }


def rank_arguments(at: NodePlan) -> tuple[str, ...]:
    """Return a rank's command for an attempt, with the resume arguments only when there is a checkpoint to resume from.

    Shell text stays as it is: there the shell fills in what the rank's environment has. Of a script that calls a launcher
    only the resume arguments are returned: what the launcher starts is not known here.
    """
    plan, values = at.plan, {**at.placeholder_values(), placeholders.PATH: at.resume_from}
    extra = tuple(placeholders.fill(word, values) for word in plan.resume_args) if at.resume_from else ()
    if plan.launches:
        return extra
    if plan.shell:
        return (*plan.argv[:-1], f"{plan.argv[-1]} {shlex.join(extra)}") if extra else plan.argv
    del values[placeholders.PATH]
    return tuple(placeholders.fill(word, values) for word in plan.argv) + extra


def _values(at: NodePlan) -> dict[str, str]:
    folder = at.checkpoint_dir or str(at.job.checkpoints)
    return {
        "checkpoint_dir": folder,
        "job_dir": str(at.job.root),
        "ORCH_CHECKPOINT_DIR": folder,
        "ORCH_JOB_ID": at.plan.id,
        "ORCH_JOB_NAME": at.plan.name,
    }


def node_env(at: NodePlan, outer: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a node's setup lines and ranks start from: what they inherit, then the user's.

    What the user's variables say of an attempt is left to `rank_env`: setup lines run once for all attempts.

    Over SSH and on Slurm it is added to the host's own.
    """
    plan, gpus = at.plan, at.planned_node.gpus
    env = {**outer, **_user_env(plan, _values(at), of_attempt=False), **secrets}
    if plan.ssh is None:
        env["ORCH_HOME"] = str(at.job.root.parent.parent)  # a job that a rank submits is found where this one is
    if gpus and "CUDA_VISIBLE_DEVICES" not in plan.env:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
    return env


def _user_env(plan: Plan, values: Mapping[str, str], *, of_attempt: bool) -> dict[str, str]:
    """Return the user's variables; those `of_attempt`, or the others. Of a job with checkpoints in memory, variables with the folder
    for them are both: it may be another one in the next attempt."""
    both = placeholders.FOLDER_NAMES if plan.memory_bytes and of_attempt else frozenset[str]()
    return {
        name: placeholders.fill(text, values)
        for name, text in plan.env.items()
        if of_attempt != (placeholders.ATTEMPT_NAMES | both).isdisjoint(placeholders.find_names(text))
    }


NODE_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES"),
    *("NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("TMPDIR", "XDG_RUNTIME_DIR"),
)
"""Variables that mean something else on the submit machine of Slurm, so that the node's own count: its GPUs and folders."""


_ACTIVATES_CONDA = re.compile(r"\b(?:conda|mamba|micromamba)\b.*\bactivate\b")

_CONDA_MARK = re.compile(r"CONDA_(?:SHLVL|DEFAULT_ENV|PREFIX(?:_[0-9]+)?|PROMPT_MODIFIER)")
"""By these conda takes an environment for active, and then leaves PATH as it is."""


def inherited_env(plan: Plan, outer: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks inherit of the submitter's environment: nothing over SSH, where it is that of another machine.

    Setup lines that activate an environment of conda find none active: `conda activate` of one that is would do nothing.
    """
    if plan.ssh is not None:
        return {}
    activates = any(map(_ACTIVATES_CONDA.search, plan.setup))
    return {
        name: value
        for name, value in outer.items()
        if (plan.slurm is None or name not in NODE_VARIABLES) and not (activates and _CONDA_MARK.fullmatch(name))
    }


def rank_env(at: NodePlan, rank: int, rendezvous_address: tuple[str, int]) -> dict[str, str]:
    """Return the variables that are one rank's own: on Slurm those of its step, the user's that name the attempt, torchrun's
    contract, then ours.

    `rendezvous_address`: address and port. TORCHELASTIC_USE_AGENT_STORE is never set: rank 0 itself serves the store, a new one for each
    attempt.
    """
    plan, ranks, values = at.plan, at.ranks, at.placeholder_values()
    local, number, world = ranks.index(rank), str(rank), str(plan.world_size)
    error_file = at.job.rank_run(at.node, at.attempt, rank) / TORCHELASTIC_ERROR_FILE
    return {
        **(step_env.rank_step_env(rank, local, at.gang) if plan.slurm is not None else {}),
        **_user_env(plan, values, of_attempt=True),
        "RANK": number,
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(at.index),
        "GROUP_WORLD_SIZE": str(len(at.nodes)),
        "NODE_RANK": str(at.index),
        "ROLE_RANK": number,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": rendezvous_address[0],
        "MASTER_PORT": str(rendezvous_address[1]),
        "TORCHELASTIC_RUN_ID": plan.id,
        "TORCHELASTIC_RESTART_COUNT": str(at.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.limits.restarts_max),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        **{name: values[name] for name in placeholders.VARIABLES},
    }


def script_env(at: NodePlan) -> dict[str, str]:
    """Return the variables of a node's script: the user's that depend on the attempt, orch's, and those that people use in
    launcher lines. The rendezvous address is not known yet; orch decides it, whatever such a line says."""
    plan, values = at.plan, at.placeholder_values()
    return {
        "MASTER_ADDR": at.nodes[0] if plan.backend != "local" else "127.0.0.1",
        "MASTER_PORT": "29500",
        **_user_env(plan, values, of_attempt=True),
        **dict.fromkeys(("GROUP_RANK", "NODE_RANK"), str(at.index)),
        **dict.fromkeys(("GROUP_WORLD_SIZE", "NNODES"), str(len(at.nodes))),
        **dict.fromkeys(("LOCAL_WORLD_SIZE", "NPROC_PER_NODE"), str(len(at.ranks))),
        **{name: values[name] for name in placeholders.VARIABLES},
        **_sbatch_env(at),
    }


def _sbatch_env(at: NodePlan) -> dict[str, str]:
    """Return those of sbatch's variables that have a plain meaning for the gang. On Slurm the allocation may have spare nodes,
    and has one task a node, which is the agent."""
    plan, gpus = at.plan, at.gpus
    variables = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(len(at.nodes))),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), str(at.index)),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), ",".join(at.nodes)),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": str(plan.world_size),
        "SLURM_NTASKS_PER_NODE": str(len(at.ranks)),
    }
    if plan.slurm is not None:
        return variables
    # Scripts make port numbers of the first, which is a number.
    here = {"SLURM_JOB_ID": str(zlib.crc32(plan.id.encode()) % 10**8)}
    return {**variables, **here, **({"SLURM_GPUS_ON_NODE": str(gpus)} if gpus else {})}


RANK_DIR = "ORCH_RANK_DIR"
"""The variable with a rank's own folder, `nodes/NODE/ATTEMPT/RANK` in that of its job."""

TRAINER_URL, TRAINER_TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"
"""The variables with the address that trainers report to, and with the file of the token for it."""

FOREIGN_PREFIXES = ("TORCHELASTIC_", "SLURM_", "SLURMD_", "PMI_", "PMIX_", "OMPI_", "PET_", "ORCH_")

FOREIGN_NAMES = frozenset(
    [
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("OLDPWD", "PWD", "SHLVL", "_"),
    ]
)


def submitter_env(environ: Mapping[str, str], secrets: tuple[str, ...]) -> dict[str, str]:
    """Return what ranks inherit of the submitter's environment: all but the variables that another launcher left there,
    and the secrets, which are kept apart. Of a submitter that is itself a rank neither the hook nor the evidence
    files nor what takes its trainer's reports."""
    inherited = {
        name: value
        for name, value in environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES) and name not in secrets
    }
    if RANK_DIR not in environ:
        return inherited
    root = Path(environ[RANK_DIR]).parent.parent.parent.parent
    if environ.get(TRAINER_TOKEN, "").startswith(f"{root}/nodes/"):
        inherited.pop(TRAINER_URL, None)
    return dict(_without_paths_in(inherited, (f"{root}/nodes/", f"{root}/evidence/")))


def _without_paths_in(environ: Mapping[str, str], folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield variables without the paths in some folders, and without those that are nothing else."""
    for name, value in environ.items():
        paths = value.split(os.pathsep)
        if kept := [path for path in paths if not path.startswith(folders)]:
            yield name, os.pathsep.join(kept)
