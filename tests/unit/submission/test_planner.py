"""Does a job over SSH become a pool of the right hosts, and is one that cannot be refused with its numbers?"""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from orchestrator.core import codec
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedSsh
from orchestrator.core.plan_types import PlannedNode, PlannedPool, QueueTerms
from orchestrator.core.settings.rank_env import NodePlan, inherited_env, node_env
from orchestrator.spec.hosts import HostSpec
from orchestrator.spec.load import JobSpec, SpecFile
from orchestrator.submission import planner
from orchestrator.submission.planner import Inventory
from tests.support import jobs

JOB = JobDir.at(jobs.ROOT)
PYTHON = "/opt/venv/bin/python"
SEED = zlib.crc32(jobs.ID.encode())
LAB = (
    HostSpec("gpu1", 8, None, "10.0.0.1"),
    HostSpec("gpu2", 8),
    HostSpec("gpu3", 4),
    HostSpec("cpu1", None, 16),
)


def _file(*hosts: HostSpec, **fields: Any) -> SpecFile:
    given = {**jobs.MINIMAL, "backend": "ssh", "ssh": {"hosts": "x"}, **fields}
    data = {key: value for key, value in given.items() if value is not None}
    old = jobs.spec_file()
    return SpecFile(old.path, "", JobSpec.model_validate(data), old.folder, old.workdir, hosts=hosts or LAB)


def _plan(*hosts: HostSpec, asked: int | None = None, **fields: Any) -> Plan:
    there = Inventory("laptop", (), PYTHON, asked)
    return planner.plan_job(_file(*hosts, **fields), there, jobs.ID, jobs.BEGAN_S)


def test_hosts_keep_user_order_without_ranks_or_gpus() -> None:
    plan = _plan()
    assert plan.nodes == (
        PlannedNode("gpu1", "gpu1", "10.0.0.1", (), (), 0), PlannedNode("gpu2", "gpu2", "", (), (), 0),
        PlannedNode("gpu3", "gpu3", "", (), (), 0), PlannedNode("cpu1", "cpu1", "", (), (), 16),
    )  # fmt: skip
    assert plan.pool == PlannedPool(nodes=2, ranks_each=2, gpus_each=0, spares=0, seed=SEED)
    assert (plan.world_size, plan.size_text) == (4, "4 ranks on 2 nodes, out of 4 hosts, on CPUs")


def test_hosts_known_as_too_small_are_left_out() -> None:
    plan = _plan(procs_per_node=None, gpus_per_node=8, spares=1)
    assert [node.name for node in plan.nodes] == ["gpu1", "gpu2", "cpu1"]
    assert plan.pool == PlannedPool(nodes=2, ranks_each=8, gpus_each=8, spares=1, seed=SEED)
    assert plan.size_text == "16 ranks on 2 nodes, 1 spare, out of 3 hosts, on 16 GPUs"
    assert [node.name for node in _plan(procs_per_node=17).nodes] == ["gpu1", "gpu2", "gpu3"]


def test_recently_failed_hosts_come_last_if_enough_others() -> None:
    there = Inventory("laptop", (), PYTHON, failed={"gpu1": "2 h ago", "elsewhere": "1 h ago"})
    plan = planner.plan_job(_file(), there, jobs.ID, jobs.BEGAN_S)
    assert [node.name for node in plan.nodes] == ["gpu2", "gpu3", "cpu1", "gpu1"]
    assert plan.avoided_hosts == {"gpu1": "2 h ago"}
    plan = planner.plan_job(_file(nodes=4), there, jobs.ID, jobs.BEGAN_S)
    assert [node.name for node in plan.nodes] == ["gpu1", "gpu2", "gpu3", "cpu1"] and not plan.avoided_hosts


def test_too_few_hosts_are_reported_with_counts() -> None:
    with pytest.raises(UserError) as told:
        _plan(nodes=4, spares=1)
    assert told.value.what == "5 hosts wanted (4 nodes and 1 spare), 4 available"
    assert "ssh.hosts" in told.value.where and "lower nodes or spares" in told.value.fix
    with pytest.raises(UserError, match=r"3 hosts wanted \(3 nodes\), 2 available, 2 more have too few GPUs or slots"):
        _plan(LAB[0], LAB[1], LAB[2], LAB[2], procs_per_node=None, gpus_per_node=8, nodes=3)
    with pytest.raises(UserError, match="2 available with the labels a100, ib"):
        _plan(*LAB[:2], nodes=3, ssh={"hosts_file": "x", "labels": ["a100", "ib"]})


@pytest.mark.parametrize("backend", ["local", "ssh", "slurm"])
def test_too_many_ranks_are_refused_before_listing(backend: str) -> None:
    """More ranks than a job may have are refused before they are listed."""
    with pytest.raises(UserError, match=r"262144 ranks \(64 nodes × 4096\), and 65536 are the most"):
        _plan(backend=backend, nodes=64, procs_per_node=4096)


def test_auto_uses_gpus_declared_for_all_hosts() -> None:
    file = _file(*LAB[:2], procs_per_node=None, gpus_per_node="auto")
    assert not planner.must_ask_hosts(file)
    assert _plan(*LAB[:2], procs_per_node=None, gpus_per_node="auto").world_size == 16


def test_auto_with_differing_hosts_is_refused() -> None:
    with pytest.raises(UserError, match="different numbers of GPUs: 4, 8"):
        _plan(*LAB[:3], procs_per_node=None, gpus_per_node="auto")


def test_auto_asks_hosts_if_one_declares_nothing() -> None:
    file = _file(procs_per_node=None, gpus_per_node="auto")
    assert planner.must_ask_hosts(file) and not planner.must_ask_hosts(_file())
    plan = _plan(asked=4, procs_per_node=None, gpus_per_node="auto")
    assert plan.pool == PlannedPool(2, 4, 4, 0, seed=SEED) and len(plan.nodes) == 4


@pytest.mark.parametrize(("procs", "ranks"), [(None, 1), (3, 3)])
def test_auto_on_hosts_without_gpus_uses_cpu_ranks(procs: int | None, ranks: int) -> None:
    plan = _plan(asked=0, procs_per_node=procs, gpus_per_node="auto")
    assert plan.pool == PlannedPool(2, ranks, 0, 0, seed=SEED)


@pytest.mark.parametrize(
    ("fields", "argv", "programs"),
    [
        ({}, (PYTHON, "train.py", "--lr", "0.1"), (PYTHON, "python3")),
        (
            {"python": ".venv/bin/python"},
            (".venv/bin/python", "train.py", "--lr", "0.1"),
            (".venv/bin/python",),
        ),
        ({"entrypoint": "-m pkg"}, (PYTHON, "-m", "pkg"), (PYTHON, "python3")),
        ({"entrypoint": None, "command": "make"}, ("bash", "-c", "make"), ("bash",)),
        ({"entrypoint": None, "command": ["./run", "x"]}, ("./run", "x"), ("./run",)),
    ],
)
def test_rank_python_is_submitters_if_host_has_it(
    fields: dict[str, Any], argv: tuple[str, ...], programs: tuple[str, ...]
) -> None:
    plan = _plan(**fields)
    assert (plan.argv, plan.programs) == (argv, programs)


def test_connection_settings_come_from_spec() -> None:
    ssh = {
        "hosts": "x", "user": "ml", "port": 2222, "host_keys": "accept-new", "remote_dir": "/data/orch",
        "sync": "data/", "copy_limit_mb": 50,
    }  # fmt: skip
    assert _plan(ssh=ssh).ssh == PlannedSsh("ml", 2222, "accept-new", "/data/orch", ("data/",), 50.0)
    assert _plan().ssh == PlannedSsh(None, None, "strict", "~/.orch", (), None)


def test_ssh_plan_round_trips_through_its_file() -> None:
    """A plan over SSH is the same after it was written and read."""
    plan = _plan()
    assert codec.loads(Plan, codec.dumps(plan)) == plan


def test_a_local_plan_has_no_pool() -> None:
    plan = jobs.plan()
    assert (plan.pool, plan.ssh) == (None, None)


def test_slurm_job_is_pool_without_hosts() -> None:
    plan = jobs.plan(backend="slurm", spares=1, time_limit="2h", procs_per_node=None, gpus_per_node=4)
    assert plan.nodes == () and plan.pool == PlannedPool(
        nodes=2, ranks_each=4, gpus_each=4, spares=1, seed=SEED, queue=QueueTerms(False, 60.0)
    )
    assert (plan.world_size, plan.size_text) == (8, "8 ranks on 2 nodes, 1 spare, on 8 GPUs")
    assert plan.limits.time_limit_s is None, "Slurm keeps that limit"
    assert codec.loads(Plan, codec.dumps(plan)) == plan
    assert jobs.plan(backend="slurm").size_text == "4 ranks on 2 nodes, on CPUs"


def test_slurm_ranks_have_submitters_environment_without_gpus() -> None:
    outer = {"HF_HOME": "/data", "CUDA_VISIBLE_DEVICES": "7", "ROCR_VISIBLE_DEVICES": "7"}
    at = NodePlan(jobs.plan(backend="slurm"), JOB, "n1", 1)
    assert node_env(at, inherited_env(at.plan, outer), {}) == {
        "HF_HOME": "/data",
        "ORCH_HOME": str(JOB.root.parent.parent),
    }


def test_auto_with_fewer_gpus_than_nodes_is_refused() -> None:
    """auto with fewer GPUs here than nodes is refused and trains on no CPU."""
    with pytest.raises(UserError, match=r"2 GPUs on this machine for 4 nodes"):
        jobs.plan((0, 1), nodes=4, procs_per_node=None, gpus_per_node="auto")


def test_checkpoints_are_in_memory_on_request_only() -> None:
    plain = jobs.plan(checkpoint={"keep": 3})
    assert (plain.memory_bytes, plain.memory_dir) == (0, "")
    plan = jobs.plan(checkpoint={"keep": 3, "memory": "64G", "memory_dir": "/mnt/ram/"})
    assert (plan.memory_bytes, plan.memory_dir) == (64 * 10**9, "/mnt/ram")
