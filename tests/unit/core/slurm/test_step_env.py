"""Are the variables of Slurm true of each rank, and those of the agent's own task kept from it?"""

from __future__ import annotations

import pytest

from orchestrator.core.slurm import step_env

GANG = (("n2", (0, 1)), ("n1", (2, 3)), ("n7", (4,)))


@pytest.mark.parametrize(("rank", "local", "node"), [(0, 0, 0), (3, 1, 1), (4, 0, 2)])
def test_rank_is_numbered_like_srun_task(rank: int, local: int, node: int) -> None:
    env = step_env.rank_step_env(rank, local, GANG)
    assert (env["SLURM_PROCID"], env["SLURM_LOCALID"], env["SLURM_NODEID"]) == (
        str(rank),
        str(local),
        str(node),
    )
    assert {env[name] for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")} == {"5"}
    assert {env[name] for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES")} == {"3"}
    assert {env[name] for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")} == {"2(x2),1"}
    assert {env[name] for name in ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")} == {"n2,n1,n7"}


def test_agent_only_variables_are_not_passed_on() -> None:
    agents = {
        "SLURM_LAUNCH_NODE_IPADDR": "1",
        "PMI_RANK": "0",
        "PMIX_X": "1",
        "SLURM_CPU_BIND": "x",
        "SLURM_TASK_PID": "1",
        "SLURM_LABELIO": "1",
    }
    jobs = {
        "SLURM_JOB_ID": "8",
        "SLURM_CLUSTER_NAME": "c",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "TMPDIR": "/scratch/8",
    }
    assert step_env.job_env({**agents, **jobs}) == jobs


def test_agent_srun_gets_no_rank_launch_options() -> None:
    options = ("SLURM_NTASKS", "SLURM_MEM_PER_CPU", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_CPUS_PER_GPU", "SRUN_CPUS_PER_TASK",
               "SLURM_EXPORT_ENV", "SLURM_CPU_BIND", "SLURM_TASKS_PER_NODE", "SLURM_EXACT", "SLURM_NNODES", "ORCH_ENDING")  # fmt: skip
    kept = {
        "SLURM_JOB_ID": "8",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_CONF": "/c",
        "HOME": "/h",
    }
    assert step_env.srun_env({**dict.fromkeys(options, "1"), **kept}) == kept


def test_task_processors_survive_srun() -> None:
    passed = step_env.srun_env({"SLURM_CPUS_PER_TASK": "8", "HOME": "/h"})
    assert "SLURM_CPUS_PER_TASK" not in passed
    assert step_env.job_env(passed) == {"SLURM_CPUS_PER_TASK": "8", "HOME": "/h"}
    assert step_env.job_env(step_env.srun_env({"HOME": "/h"})) == {"HOME": "/h"}


def test_task_processors_are_divided_among_ranks() -> None:
    own = step_env.rank_step_env(0, 0, [("n1", range(4))])
    assert step_env.cpu_share_env({"SLURM_CPUS_PER_TASK": "8"}, own) == {"SLURM_CPUS_PER_TASK": "2"}
    assert step_env.cpu_share_env({"SLURM_CPUS_PER_TASK": "1"}, own) == {"SLURM_CPUS_PER_TASK": "1"}
    assert step_env.cpu_share_env({}, own) == {}
    assert step_env.cpu_share_env({"SLURM_CPUS_PER_TASK": "8"}, {}) == {}, "the template is of no rank"
