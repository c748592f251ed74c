"""Does every rank get its place and its settings? Plans are pure: spec and inventory in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from orchestrator.core import codec
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import PlannedNode
from orchestrator.core.settings import rank_env
from orchestrator.core.settings.rank_env import NodePlan, inherited_env, submitter_env
from orchestrator.spec.limits import BREAK_GRACE_S_MAX
from tests.support import jobs

JOB = JobDir.at(jobs.ROOT)
CONTRACT = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_RANK",
    "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE", "ORCH_JOB_ID", "ORCH_JOB_NAME", "ORCH_ATTEMPT",
    "ORCH_CHECKPOINT_DIR", "ORCH_RESUME_FROM", "ORCH_RESUME_STEP",
}  # fmt: skip
"""The variables of the contract that are a rank's own; OMP_NUM_THREADS is a default that anybody may set."""


def _env(plan: Plan, rank: int, attempt: int = 1, resume: str = "", step: int | None = None) -> dict[str, str]:
    node = next(node for node in plan.nodes if rank in node.ranks)
    nodes = tuple(node.name for node in plan.nodes)
    return rank_env.rank_env(NodePlan(plan, JOB, node.name, attempt, nodes, resume, step), rank, ("10.0.0.7", 29511))


def _node_env(
    plan: Plan,
    node: PlannedNode,
    outer: Mapping[str, str] = MappingProxyType({}),
    secrets: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    return rank_env.node_env(NodePlan(plan, JOB, node.name, 1), inherited_env(plan, outer), secrets)


def _arguments(plan: Plan, attempt: int, resume: str, job: JobDir = JOB) -> tuple[str, ...]:
    return rank_env.rank_arguments(NodePlan(plan, job, "node-0", attempt, (), resume))


@pytest.mark.parametrize("rank", range(6))
def test_every_rank_gets_full_launcher_contract(rank: int) -> None:
    env = _env(
        jobs.plan(nodes=2, procs_per_node=3, restart={"max": 5}),
        rank,
        attempt=3,
        resume="/c/step-9.pt",
        step=9,
    )
    assert env.keys() == CONTRACT
    node = rank // 3
    assert {name: env[name] for name in sorted(CONTRACT) if name != "TORCHELASTIC_ERROR_FILE"} == {
        "RANK": str(rank), "WORLD_SIZE": "6", "LOCAL_RANK": str(rank % 3), "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": "2", "NODE_RANK": str(node), "ROLE_RANK": str(rank),
        "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29511",
        "TORCHELASTIC_RUN_ID": jobs.ID, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "5",
        "ORCH_JOB_ID": jobs.ID, "ORCH_JOB_NAME": "gpt", "ORCH_ATTEMPT": "3",
        "ORCH_CHECKPOINT_DIR": f"{jobs.ROOT}/checkpoints", "ORCH_RESUME_FROM": "/c/step-9.pt",
        "ORCH_RESUME_STEP": "9",
    }  # fmt: skip
    error_file = f"{jobs.ROOT}/nodes/node-{node}/attempt-003/rank-{rank:05d}/torchelastic-error.json"
    assert env["TORCHELASTIC_ERROR_FILE"] == error_file


def test_torchrun_agent_store_is_never_claimed() -> None:
    plan = jobs.plan()
    for env in (_env(plan, 0), _node_env(plan, plan.nodes[0])):
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env


def test_resume_from_is_empty_but_set_without_checkpoint() -> None:
    env = _env(jobs.plan(), 0)
    assert env["ORCH_RESUME_FROM"] == env["ORCH_RESUME_STEP"] == ""
    assert _env(jobs.plan(), 0, resume="/c/best.pt")["ORCH_RESUME_STEP"] == "", "its step is not known"


def test_resume_arguments_may_name_the_step() -> None:
    plan = jobs.plan(checkpoint={"resume_args": "--resume-from-step={resume_step}"})
    at = NodePlan(plan, JOB, "node-0", 2, (), "/c/model_000160.pt", 160)
    assert rank_env.rank_arguments(at)[-1] == "--resume-from-step=160"


def test_gpus_are_divided_among_nodes_of_one_machine() -> None:
    plan = jobs.plan(gpus=range(8), procs_per_node=None, gpus_per_node=3)
    assert [node.gpus for node in plan.nodes] == [(0, 1, 2), (3, 4, 5)]
    assert [node.ranks for node in plan.nodes] == [(0, 1, 2), (3, 4, 5)]
    shown = [_node_env(plan, node)["CUDA_VISIBLE_DEVICES"] for node in plan.nodes]
    assert shown == ["0,1,2", "3,4,5"]


def test_auto_uses_all_gpus_with_equal_counts() -> None:
    """auto takes all GPUs that exist and leaves no node with another count."""
    plan = jobs.plan(gpus=(1, 3, 4, 6, 7), procs_per_node=None, gpus_per_node="auto")
    assert [node.gpus for node in plan.nodes] == [(1, 3), (4, 6)]
    assert plan.world_size == 4


def test_auto_without_gpus_uses_requested_cpu_ranks() -> None:
    plan = jobs.plan(gpus_per_node="auto", procs_per_node=3)
    assert (plan.world_size, plan.nodes[0].gpus) == (6, ())
    assert "CUDA_VISIBLE_DEVICES" not in _node_env(plan, plan.nodes[0])


def test_default_is_one_cpu_rank_per_node() -> None:
    assert jobs.plan(procs_per_node=None).world_size == 2


def test_too_many_gpus_is_an_error_with_counts() -> None:
    """More GPUs than there are is an error with numbers."""
    with pytest.raises(UserError) as told:
        jobs.plan(gpus=range(4), procs_per_node=None, gpus_per_node=4)
    assert "8 GPUs wanted (2 nodes × 4), 4 found" in told.value.what
    assert "gpus_per_node" in told.value.where and "procs_per_node" in told.value.fix


def test_user_values_override_all_but_contract() -> None:
    """Values of the user override everything but the launcher's contract."""
    plan = jobs.plan(
        gpus=range(2), procs_per_node=None, gpus_per_node=1, nccl={"debug": "WARN"}, rendezvous={"interface": "eth1"},
        env={"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "9", "HOME": "/h"},
    )  # fmt: skip
    env = _node_env(plan, plan.nodes[0], {"HOME": "/root", "TOKEN": "old", "LANG": "C"}, {"TOKEN": "secret"})
    assert {name: env[name] for name in ("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HOME")} == {
        "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "9", "HOME": "/h",
    }  # fmt: skip
    assert (env["TOKEN"], env["LANG"]) == ("secret", "C")
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("eth1", "eth1")


def test_user_variable_is_known_with_its_field() -> None:
    plan = jobs.plan(nccl={"debug": "WARN"}, rendezvous={"interface": "eth1"}, env={"NCCL_DEBUG": "INFO", "A": "b"})
    fields = {name: where.rpartition(" ")[2] for name, where in plan.origins.items()}
    assert fields == {
        "NCCL_DEBUG": "env.NCCL_DEBUG", "A": "env.A", "GLOO_SOCKET_IFNAME": "rendezvous.interface",
        "NCCL_SOCKET_IFNAME": "rendezvous.interface",
    }  # fmt: skip
    assert plan.origins.keys() == plan.env.keys()


def test_output_is_unbuffered_unless_job_file_differs() -> None:
    """Lines are unbuffered unless the job file says otherwise."""
    assert jobs.plan().unbuffered and not jobs.plan(logs={"unbuffered": "no"}).unbuffered


def test_effective_batch_is_that_of_all_ranks() -> None:
    plan = jobs.plan(batch={"per_device": 16, "accumulation": 4})
    assert (plan.effective_batch, plan.batch_text) == (256, "256 = 16 per device × 4 accumulated × 4 ranks")
    assert (jobs.plan().effective_batch, jobs.plan().batch_text) == (None, "")


def test_ranks_inherit_no_other_launcher_or_secret() -> None:
    outer = {
        "PATH": "/bin", "LANG": "C", "RANK": "3", "MASTER_PORT": "1", "SLURM_PROCID": "3", "PMI_RANK": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "PET_NPROC_PER_NODE": "8", "ORCH_HOME": "/x", "HF_TOKEN": "hf",
        "OMPI_COMM_WORLD_RANK": "2", "PWD": "/here", "RANKING": "kept",
    }  # fmt: skip
    assert submitter_env(outer, ("HF_TOKEN",)) == {"PATH": "/bin", "LANG": "C", "RANKING": "kept"}


def test_nested_job_inherits_nothing_of_outer_one() -> None:
    """Ranks of a job that a rank submitted have no hook, evidence files or endpoint of the outer job."""
    outer = {
        "ORCH_RANK_DIR": "/j/nodes/n/attempt-001/rank-00000", "PYTHONPATH": "/j/nodes/n/hook:/j/code/src:",
        "NCCL_DEBUG_FILE": "/j/evidence/attempt-001/x", "WEIGHTS": "/j/checkpoints/step-1.pt",
    }  # fmt: skip
    kept = {"PYTHONPATH": "/j/code/src:", "WEIGHTS": "/j/checkpoints/step-1.pt"}
    url, token = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"
    assert submitter_env({**outer, url: "http://127.0.0.1:1/ranks/0", token: "/j/nodes/n/trainer-token"}, ()) == kept
    theirs = {url: "https://trainer", token: "/var/run/token"}
    assert submitter_env({**outer, **theirs}, ()) == {**kept, **theirs}


@pytest.mark.parametrize(
    ("fields", "argv", "shell"),
    [
        ({}, ("/usr/bin/python3", "train.py", "--lr", "0.1"), False),
        (
            {"entrypoint": "-m pkg.train --x 'a b'"},
            ("/usr/bin/python3", "-m", "pkg.train", "--x", "a b"),
            False,
        ),
        ({"python": ".venv/bin/python"}, (".venv/bin/python", "train.py", "--lr", "0.1"), False),
        ({"entrypoint": None, "command": "make $X | tee"}, ("bash", "-c", "make $X | tee"), True),
        ({"entrypoint": None, "command": ["make", "a b"]}, ("make", "a b"), False),
    ],
)
def test_command_of_a_rank(fields: dict[str, Any], argv: tuple[str, ...], shell: bool) -> None:
    """The command that a rank runs."""
    plan = jobs.plan(**fields)
    assert (plan.argv, plan.shell) == (argv, shell)


def test_resume_arguments_need_checkpoint_and_shell_quoting() -> None:
    """Resume arguments come only with a checkpoint, and quoted where a shell reads them."""
    words = jobs.plan(checkpoint={"resume_args": "--resume {path} --strict"})
    assert _arguments(words, 1, "") == words.argv
    assert _arguments(words, 2, "/c/a b.pt") == (*words.argv, "--resume", "/c/a b.pt", "--strict")
    shell = jobs.plan(entrypoint=None, command="run.sh", checkpoint={"resume_args": "--resume {path}"})
    assert _arguments(shell, 2, "/c/$(a) b.pt")[-1] == "run.sh --resume '/c/$(a) b.pt'"
    assert _arguments(jobs.plan(), 2, "/c/x.pt") == jobs.plan().argv


def test_resume_arguments_need_no_path() -> None:
    plan = jobs.plan(checkpoint={"resume_args": "--init_from=resume"})
    assert _arguments(plan, 1, "") == plan.argv
    assert _arguments(plan, 2, "/c/x.pt") == (*plan.argv, "--init_from=resume")


def test_placeholders_use_paths_of_the_node() -> None:
    """Placeholders are filled in as the node sees the job."""
    entry = "train.py --out_dir={checkpoint_dir}/x $ORCH_CHECKPOINT_DIR ${ORCH_JOB_ID} --from={resume_from} a={b:1} ${now:%Y}"
    plan = jobs.plan(entrypoint=entry, checkpoint={"resume_args": "--go {attempt} {path} {resume_from}"})
    there = JobDir.at("/scratch/me/jobs/x")
    folder = "/scratch/me/jobs/x/checkpoints"
    words = [f"--out_dir={folder}/x", folder, jobs.ID]
    assert _arguments(plan, 1, "", there)[2:] == (*words, "--from=", "a={b:1}", "${now:%Y}")
    resumed = (
        *words,
        "--from=/c/{attempt}.pt",
        "a={b:1}",
        "${now:%Y}",
        "--go",
        "2",
        *["/c/{attempt}.pt"] * 2,
    )
    assert _arguments(plan, 2, "/c/{attempt}.pt", there)[2:] == resumed, "values are not filled in once more"


def test_shell_text_is_kept_and_resume_arguments_quoted() -> None:
    """Shell text is left to the shell; its resume arguments are filled in and quoted."""
    plan = jobs.plan(
        entrypoint=None,
        command="cd x && ./run.sh $ORCH_CHECKPOINT_DIR",
        checkpoint={"resume_args": "-o {job_dir}/o"},
    )
    assert _arguments(plan, 1, "") == plan.argv
    assert _arguments(plan, 2, "/c.pt", JobDir.at("/a b"))[-1] == f"{plan.argv[-1]} -o '/a b/o'"


def test_user_variables_are_expanded_attempt_ones_for_ranks() -> None:
    plan = jobs.plan(env={"HYDRA_OUT": "{job_dir}/h", "RUN": "{attempt}-$ORCH_JOB_NAME", "RAW": "${x} {epoch}"})
    env = _node_env(plan, plan.nodes[0])
    home = str(JOB.root.parent.parent)
    assert env == {"HYDRA_OUT": f"{jobs.ROOT}/h", "RAW": "${x} {epoch}", "ORCH_HOME": home}
    assert _env(plan, 0, attempt=3)["RUN"] == "3-gpt"


def test_fence_precedes_node_loss_by_supervisor() -> None:
    """The fence comes before the supervisor gives a node up."""
    for nodes, heartbeat_s, times in (
        (2, 1, (60.0, 16.0, 48.0)),
        (1, 1, (60.0, 48.0, 48.0)),
        (2, 20, (100.0, 80.0, 80.0)),
    ):
        auto = jobs.plan(backend="slurm", nodes=nodes, monitor={"heartbeat_s": heartbeat_s}).limits
        assert (auto.node_timeout_s, auto.fence_s, auto.disconnected_timeout_s) == times
    limits = jobs.plan(backend="slurm", monitor={"node_timeout": "50s"}).limits
    assert limits.fence_s is not None and limits.fence_s < limits.node_timeout_s == 50.0
    assert jobs.plan().limits.fence_s is None, "on this machine locks tell of agents"
    assert limits.break_grace_s <= BREAK_GRACE_S_MAX


def test_plan_round_trips_through_its_file() -> None:
    """A plan is the same after it was written and read."""
    plan = jobs.plan(env={"A": 'é "$(x)\n'}, secrets=["HF_TOKEN"], time_limit="2h", total_steps=10)
    assert codec.loads(Plan, codec.dumps(plan)) == plan


def test_active_conda_does_not_block_setup_activation() -> None:
    """An active conda environment does not keep setup lines from activating theirs."""
    outer = {"CONDA_PREFIX": "/a", "CONDA_SHLVL": "1", "CONDA_EXE": "/conda", "PATH": "/a/bin"}
    for setup, names in (("conda activate a", {"CONDA_EXE", "PATH"}), ("ulimit -n 9", outer.keys())):
        assert inherited_env(jobs.plan(setup=[setup]), outer).keys() == names
