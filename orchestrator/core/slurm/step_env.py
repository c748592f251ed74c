"""Slurm's variables as a rank gets them. A step has one task a node, the agent's; the ranks are not Slurm's tasks.

What scripts and frameworks read of a step (its number of tasks, the rank's own number among them, its nodes) is set as
srun would set it, had it started the ranks itself; variables by which a program would try to speak to srun are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NODE_NAME = "SLURMD_NODENAME"
"""The variable with Slurm's name of this node, which need not be its host name."""

LAUNCHER_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
"""The variable with the address of srun's host, which is the supervisor's, as slurmd has it."""

UP = ("orch", "agent", "on")
"""The text that an agent monitor prints when it is up, before the name of its node."""

_CPUS = "SLURM_CPUS_PER_TASK"
_CPUS_KEPT = "ORCH_CPUS_PER_TASK"
"""The cores that sbatch gives the task of a node, and the variable's name on the way past srun, which would read the first
as an option of its own."""

_RANKS_ON_NODE = "SLURM_NTASKS_PER_NODE"

_AGENT_ONLY = re.compile(
    r"PMI_|PMIX_|PMI2_|SLURM_PMI|SLURM_MPI|SRUN_|SLURM_(CPU_BIND|DISTRIBUTION|GTIDS|LABELIO|LAUNCH_NODE|MEM_BIND"
    r"|OVERLAP|PRIO_PROCESS|SRUN_COMM|STEP_GPUS|STEP_LAUNCHER|STEP_RESV|STEPMGR|TASK_PID|TOPOLOGY|UMASK)"
)
"""Variables that hold for the agent's task alone, or say how to speak to its srun."""

READ_BY_SRUN = re.compile(
    r"ORCH_|SRUN_|SLURM_(CONTIGUOUS|CORE_SPEC|CPU_BIND|CPU_FREQ|CPUS_PER|DISTRIBUTION|EXACT|EXCLUSIVE|EXPORT_ENV|GPU_|GPUS_PER"
    r"|GPUS$|GRES|HINT|IMMEDIATE|KILL_BAD|LABELIO|MEM_|MPI_TYPE|NETWORK|NNODES$|NO_KILL|NPROCS$|NTASKS|OVERCOMMIT|OVERLAP"
    r"|PLANE|PROFILE|RELATIVE|REMOTE|STDERRMODE|STDINMODE|STDOUTMODE|STEP_|TASKS_PER|THREAD|TIMELIMIT|TRES|UNBUFFERED"
    r"|WAIT$|WHOLE)"
)
"""Variables that sbatch sets for an srun that starts the ranks: for one that starts agents, on some nodes, they are wrong."""


def allocation_id(environ: Mapping[str, str]) -> str:
    """Return the name of the allocation that a process of Slurm is in, as `backends.slurm.allocation.Grant.id` has it;
    empty outside of Slurm. A requeued job keeps its number, and counts its restarts."""
    job_id, restarts = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "")
    return f"{job_id}.{restarts if restarts.isdigit() else '0'}" if job_id else ""


def job_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the agent's environment without what holds for the agent alone."""
    kept = {name: value for name, value in environ.items() if not _AGENT_ONLY.match(name)}
    cpus = kept.pop(_CPUS_KEPT, "")
    return {**kept, _CPUS: cpus} if cpus else kept


def srun_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an srun that gets all its options as arguments."""
    kept = {name: value for name, value in environ.items() if not READ_BY_SRUN.match(name)}
    cpus = environ.get(_CPUS, "")
    return {**kept, _CPUS_KEPT: cpus} if cpus else kept


def cpu_share_env(env: Mapping[str, str], rank_variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that divide the cores of this node's one task among its ranks; `rank_variables`: those of `rank_step_env`."""
    cpus, ranks = env.get(_CPUS, ""), rank_variables.get(_RANKS_ON_NODE, "")
    return {_CPUS: str(max(1, int(cpus) // int(ranks)))} if cpus.isdigit() and ranks else {}


def rank_step_env(rank: int, local_rank: int, nodes: Sequence[tuple[str, Sequence[int]]]) -> dict[str, str]:
    """Return the variables of one rank. `nodes`: those of the gang in order, each with its ranks."""
    world = str(sum(len(ranks) for _, ranks in nodes))
    index = next(number for number, (_, ranks) in enumerate(nodes) if rank in ranks)
    names = ",".join(name for name, _ in nodes)
    each = _tasks_per_node([len(ranks) for _, ranks in nodes])
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(index),
        "SLURM_GTIDS": ",".join(str(node) for node in nodes[index][1]),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), world),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), str(len(nodes))),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), names),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), each),
        _RANKS_ON_NODE: str(len(nodes[index][1])),
    }


def _tasks_per_node(counts: Sequence[int]) -> str:
    """Write counts as Slurm does: `2(x3),1`."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
