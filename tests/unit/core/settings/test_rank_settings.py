"""Does every node get the settings that its hardware and the job call for, and does what is set already stand?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.host_facts import HardwareFacts
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import PlannedSlurm, PlannedSsh
from orchestrator.core.observations import Address
from orchestrator.core.plan_types import PlannedNode, PlannedPool
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import (
    EnvLayers,
    SetBy,
    Setting,
    added_variables,
    decide_settings,
    is_watched,
)
from tests.support import jobs

LAPTOP = HardwareFacts(cpus=8, cores=4, interfaces=(Address("192.168.1.7", "wlan0"),))
GPUS = tuple(f"0000:{bus:02x}:00.0" for bus in range(8))
DGX = HardwareFacts(
    cpus=192, cores=96, gpus=GPUS,
    interfaces=(Address("10.0.0.1", "eth0"),),
)  # fmt: skip
EVIDENCE = Path("/job/evidence")
NOTHING = EnvLayers({}, {}, {})


def node(backend: str = "local", ranks: int = 1, gpus: int = 0, slots: int = 0, **fields: Any) -> NodePlan:
    """Return the first node of a job with so many ranks on it. On backend local it has half of them, if it is not the only."""
    made = dataclasses.replace(jobs.plan(), id="gpt-1", backend=backend, unbuffered=False, **fields)
    if backend == "local":
        each = max(1, ranks // 2)
        shares = (range(each), range(each, ranks)) if ranks > 1 else (range(1),)
        nodes = tuple(
            PlannedNode(f"node-{n}", "", "", tuple(share) if gpus else (), tuple(share))
            for n, share in enumerate(shares)
        )
        made = dataclasses.replace(made, nodes=nodes)
    else:
        ssh = PlannedSsh(None, None, "strict", "~/.orch", (), None) if backend == "ssh" else None
        slurm = PlannedSlurm((), "TERM") if backend == "slurm" else None
        hosts = (PlannedNode("node-0", "", "", (), (), slots),)
        pool = PlannedPool(2, ranks, gpus, 0)
        made = dataclasses.replace(made, nodes=hosts, pool=pool, ssh=ssh, slurm=slurm)
    return NodePlan(made, JobDir(Path("/job")), "node-0", 1, ("node-0", "node-1"))


EIGHT = node("ssh", 8, 8)
FOUR_CPU = node("local", 4)


def with_plan(at: NodePlan, **fields: Any) -> NodePlan:
    """Return a node of a plan with other fields."""
    return dataclasses.replace(at, plan=dataclasses.replace(at.plan, **fields))


def _by_name(
    facts: HardwareFacts | None, at: NodePlan, given: EnvLayers = NOTHING, interface: str | None = "eth0"
) -> dict[str, Setting]:
    decided = decide_settings(facts, at, given, interface, EVIDENCE)
    names = [one.name for one in decided]
    assert len(names) == len(set(names)), "each variable is decided once"
    assert all(one.reason for one in decided), "and has its reason"
    return {one.name: one for one in decided}


def _given(**values: str) -> EnvLayers:
    return EnvLayers({}, values, values)


def test_laptop_gets_loopback_and_no_gpu_settings() -> None:
    """A laptop gets its loopback interface and nothing about GPUs."""
    decided = _by_name(LAPTOP, FOUR_CPU, interface="lo")
    assert {name: one.value for name, one in decided.items()} == {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/job/evidence/torch-trace-of-rank-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/job/evidence/torch-trace-of-rank-",
        "TORCH_INCLUDE_STACK_TRACE": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": "/job/evidence/rank-{rank}-nccl.log", "WANDB_RUN_ID": "gpt-1-{rank}", "WANDB_RESUME": "allow",
        "MLFLOW_RUN_NAME": "gpt-1",
    }  # fmt: skip
    assert {one.set_by for one in decided.values()} == {SetBy.ORCH}


@pytest.mark.parametrize(
    ("facts", "of", "threads", "reason"),
    [
        (LAPTOP, {"ranks": 2}, "2", "4 cores shared by 2 ranks of the job here"),
        (LAPTOP, {"ranks": 9}, "1", "4 cores shared by 9 ranks of the job here"),
        (dataclasses.replace(LAPTOP, quota_cpus=2.5), {"ranks": 1}, "2", "a cgroup's limit of 2.5 CPUs shared by 1 rank of the job here"),
        (dataclasses.replace(LAPTOP, quota_cpus=0.5), {"ranks": 1}, "1", "a cgroup's limit of 0.5 CPUs shared by 1 rank of the job here"),
        (dataclasses.replace(LAPTOP, quota_cpus=64.0), {"ranks": 1}, "4", "4 cores shared by 1 rank of the job here"),
        # Over SSH a rank on a CPU leases one slot, and others may lease the rest
        (LAPTOP, {"backend": "ssh", "ranks": 2}, "1", "4 cores shared by 8 slots of the host, one for each CPU"),
        (LAPTOP, {"backend": "ssh", "ranks": 2, "slots": 2}, "2", "4 cores shared by 2 slots of the host, from hosts_file"),
        # Others may lease the GPUs that this job leaves
        (DGX, {"backend": "ssh", "ranks": 2, "gpus": 2}, "12", "96 cores shared by 8 GPUs of the host"),
        (DGX, {"backend": "local", "ranks": 4, "gpus": 4}, "12", "96 cores shared by 8 GPUs of the host"),
        # Parts of one GPU
        (dataclasses.replace(DGX, gpus=GPUS[:1]), {"backend": "ssh", "ranks": 4, "gpus": 4}, "24", "96 cores shared by 4 ranks of the job here"),
        # What Slurm gives is the job's alone
        (dataclasses.replace(DGX, cpus=32, cores=32, slurm_cpus=32), {"backend": "slurm", "ranks": 2, "gpus": 2}, "16", "32 CPUs from Slurm shared by 2 ranks of the job here"),
        (dataclasses.replace(DGX, slurm_cpus=16), {"backend": "slurm", "ranks": 2, "gpus": 2}, "8", "16 CPUs from Slurm shared by 2 ranks of the job here"),
    ],
)  # fmt: skip
def test_rank_gets_its_share_of_cores(facts: HardwareFacts, of: dict[str, Any], threads: str, reason: str) -> None:
    decided = _by_name(facts, node(**of))["OMP_NUM_THREADS"]
    assert (decided.value, decided.reason) == (threads, reason)


def test_interface_to_peers_is_named_exactly_to_nccl() -> None:
    """The interface that reaches the others is given to NCCL by its exact name."""
    decided = _by_name(DGX, EIGHT)
    assert (decided["GLOO_SOCKET_IFNAME"].value, decided["NCCL_SOCKET_IFNAME"].value) == ("eth0", "=eth0")
    unknown = _by_name(DGX, EIGHT, interface="")
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & unknown.keys()


def test_existing_setting_stays_with_its_origin() -> None:
    host = {"NCCL_IB_TIMEOUT": "22", "OMP_NUM_THREADS": "6", "NCCL_DEBUG": "TRACE", "PATH": "/bin"}
    added = {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5_0",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "9",
        "HF_TOKEN": "x",
    }
    given = EnvLayers(host, added, {**host, **added, "GLOO_SOCKET_IFNAME": "ib0"})
    origins = {"NCCL_DEBUG": "job.yaml:12: env.NCCL_DEBUG", "NCCL_IB_HCA": "job.yaml:3: nccl.ib_hca"}
    decided = _by_name(DGX, with_plan(EIGHT, origins=origins), given)
    assert {name: (decided[name].value, decided[name].set_by, decided[name].reason) for name in (
        "NCCL_DEBUG", "NCCL_IB_HCA", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "OMP_NUM_THREADS", "NCCL_IB_TIMEOUT", "GLOO_SOCKET_IFNAME"
    )} == {
        "NCCL_DEBUG": ("INFO", SetBy.YOU, "job.yaml:12: env.NCCL_DEBUG"),
        "NCCL_IB_HCA": ("mlx5_0", SetBy.YOU, "job.yaml:3: nccl.ib_hca"),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": ("9", SetBy.SHELL, "set in the shell that submitted the job"),
        "OMP_NUM_THREADS": ("6", SetBy.HOST, "it is set in the host's environment"),
        "NCCL_IB_TIMEOUT": ("22", SetBy.HOST, "it is set in the host's environment"),
        "GLOO_SOCKET_IFNAME": ("ib0", SetBy.SETUP, "the setup lines of the job file set it"),
    }  # fmt: skip
    assert not {"PATH", "HF_TOKEN"} & decided.keys(), "the others are not the business of NCCL and torch"
    added_by_orch = added_variables(tuple(decided.values()), 3)
    assert not added_by_orch.keys() & given.given.keys()


def test_nccl_output_goes_where_user_expects_if_requested() -> None:
    assert "NCCL_DEBUG_FILE" not in _by_name(LAPTOP, FOUR_CPU, _given(NCCL_DEBUG="INFO"))
    ours = _by_name(LAPTOP, FOUR_CPU, _given(NCCL_DEBUG_FILE="/tmp/nccl.%h"))
    assert (ours["NCCL_DEBUG"].value, ours["NCCL_DEBUG_FILE"].value) == ("WARN", "/tmp/nccl.%h")


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_user_flight_recorder_size_holds_under_both_names(name: str) -> None:
    decided = _by_name(LAPTOP, FOUR_CPU, _given(**{name: "20000"}))
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    assert {decided[one].value for one in names} == {"20000"}


def test_torch_timeout_is_longer_than_orchs() -> None:
    limits = dataclasses.replace(EIGHT.plan.limits, hang_timeout_s=3600.5)
    patient = with_plan(EIGHT, limits=limits)
    assert _by_name(DGX, patient)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"].value == "7201"


def test_a_secret_is_never_shown() -> None:
    at = with_plan(FOUR_CPU, secrets=("NCCL_NET_PLUGIN_KEY",))
    decided = _by_name(LAPTOP, at, _given(NCCL_NET_PLUGIN_KEY="s3cret"))["NCCL_NET_PLUGIN_KEY"]
    assert "s3cret" not in decided.text


def test_attempt_only_values_are_marked_and_unset() -> None:
    """Values that only an attempt knows are marked so and not set."""
    decided = _by_name(None, node("slurm", 8, 8), interface=None)
    later = [name for name, one in decided.items() if one.set_by is SetBy.LATER]
    assert later == ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    assert not added_variables(tuple(decided.values()), 0).keys() & set(later)


def test_every_rank_has_own_nccl_output_file() -> None:
    decided = decide_settings(LAPTOP, FOUR_CPU, NOTHING, "lo", EVIDENCE)
    files = [added_variables(decided, rank)["NCCL_DEBUG_FILE"] for rank in (0, 12)]
    assert files == ["/job/evidence/rank-00000-nccl.log", "/job/evidence/rank-00012-nccl.log"]


@pytest.mark.parametrize("mine", ["WANDB_RUN_ID", "WANDB_RESUME"])
def test_tracker_run_is_continued_unless_user_chose(mine: str) -> None:
    """A tracker recognises a rank again unless the user has configured it."""
    ours = added_variables(decide_settings(LAPTOP, FOUR_CPU, NOTHING, "lo", EVIDENCE), 3)
    assert (ours["WANDB_RUN_ID"], ours["WANDB_RESUME"]) == ("gpt-1-00003", "allow")
    theirs = added_variables(decide_settings(LAPTOP, FOUR_CPU, _given(**{mine: "x"}), "lo", EVIDENCE), 3)
    assert not {"WANDB_RUN_ID", "WANDB_RESUME"} & theirs.keys() and theirs["MLFLOW_RUN_NAME"] == "gpt-1"


def test_setting_is_one_log_line_for_any_value() -> None:
    setting = Setting("NCCL_X", "a\nb", SetBy.YOU, "job.yaml:3: env.NCCL_X")
    assert setting.text == "NCCL_X=a b (you: job.yaml:3: env.NCCL_X)"


def test_equal_nodes_get_equal_settings() -> None:
    other = dataclasses.replace(EIGHT, node="node-1")
    decided = [decide_settings(DGX, at, NOTHING, "eth0", EVIDENCE) for at in (EIGHT, other)]
    assert decided[0] == decided[1]


@pytest.mark.parametrize(
    ("name", "watched"), [("NCCL_IB_HCA", True), ("PYTHONUNBUFFERED", True), ("PATH", False), ("CUDA_VISIBLE_DEVICES", False)]
)  # fmt: skip
def test_variables_that_affect_training(name: str, watched: bool) -> None:
    assert is_watched(name) is watched
