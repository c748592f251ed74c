"""Is what users get wrong on Slurm said at once and clearly, and do unusual submits work? Through `orch` on a real Slurm."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster.desk import FAKE_TORCH, LAUNCHED, TOGETHER, Desk, Job
from tests.support.cluster.host import wait_for
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.small_torch import install

from .conftest import using

SOON_S_MAX = 60.0
FIRST_S_MAX = 30.0
"""How long a fault of the very first second may take to be told on a busy machine."""

OBLIVION_S_MAX = 120.0
"""How long slurmctld may take to forget a job beyond MinJobAge: it looks every so often."""

HOME = "/home/trainer/desk/home"
OUT = "/home/trainer/desk/outer.txt"
HELLO = {"train.py": 'print("hello", flush=True)\n'}
TELLS = {
    "train.py": "import json, os\n"
    'print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("SLURM")}), flush=True)\n'
}
STEPS = {"train.py": TOGETHER + "\nmeet()\nrun(60, 0.05, lambda step: together(True))\n", **FAKE_TORCH}
ENOUGH = "/home/trainer/desk/enough"
TRAINS = {
    "train.py": TOGETHER
    + f"""
def at_step(step):
    if together(os.path.exists({ENOUGH!r})):
        sys.exit(0)

meet()
run(100_000, 0.05, at_step)
""",
    **FAKE_TORCH,
}
"""Steps together, until a file is there."""


@pytest.fixture
def accounted(accounting_slurm: SlurmBox) -> Iterator[Desk]:
    """Give a desk on a Slurm that keeps accounts, and lets only known ones submit."""
    yield from using(accounting_slurm)


def refused(desk: Desk, **spec: Any) -> tuple[str, str]:
    """Submit a job that must be refused as the user's mistake; return what was said, and its place in the job file.

    Nothing of it may be left: no folder, no entry in the queue.
    """
    path = desk.write(HELLO, **spec)
    done = desk.orch("submit", path, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "fix: " in done.stderr
    jobs = desk.box.login.path(HOME) / "jobs"
    assert not jobs.exists() or list(jobs.iterdir()) == []
    assert isinstance(desk.box, SlurmBox) and desk.box.queue.entries() == []
    lines = desk.box.login.path(path).read_text().splitlines()
    where = done.stderr.split("job.yaml:", 1)[1]
    return done.stderr, lines[int(where.partition(":")[0]) - 1].strip()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"slurm": {"partition": "nope"}}, "Invalid partition name specified"),
        ({"slurm": {"mem": "900G"}}, "Memory specification can not be satisfied"),
        ({"slurm": {"extra": ["--licenses=nope"]}}, "Invalid license specification"),
        ({"slurm": {"extra": ["--tmp=900T"]}}, "Requested node configuration is not available"),
    ],
)
def test_impossible_request_is_refused_in_sbatch_words(
    slurm: SlurmBox, desk: Desk, spec: dict[str, Any], said: str
) -> None:
    """A request beyond the cluster is refused in sbatch's words."""
    words, place = refused(desk, **spec)
    assert said in words and place == "slurm:"


def test_with_accounts_an_unknown_account_is_refused(accounted: Desk) -> None:
    words, place = refused(accounted, slurm={"account": "nope"})
    assert "Invalid account" in words and place == "slurm:"


# What Slurm takes and never starts


def test_too_large_job_is_reported_and_resumes_smaller(desk: Desk) -> None:
    """A job that is too large is reported at submit and in status, and resumes with a smaller size."""
    path = desk.write(HELLO, nodes=5, env=install([desk.box.login]))
    checked = desk.orch("check", path, check=False)
    assert checked.returncode == 2
    assert "sbatch refuses the job: " in checked.stdout
    assert "ok    queue" in desk.orch("check", path, "--set", "nodes=2").stdout
    submitted = desk.orch("submit", path, check=False)
    if submitted.returncode:  # Slurm 24.11 refuses what those before and after it queue
        assert submitted.returncode == 2 and "sbatch refuses the job: " in submitted.stderr
        return
    said = submitted.stdout
    assert "cannot start as it is: Partition" in said and "fix: orch cancel" in said
    wait_for(lambda: "PartitionNodeLimit" in desk.orch("status").stdout, "Slurm's reason", SOON_S_MAX)
    (status,) = json.loads(desk.orch("status", "--json").stdout)
    job = Job(desk, status["id"], status["dir"])
    desk.jobs.append(job)
    assert status["state"] == "QUEUED" and f"orch resume {status['id']} --set nodes=" in status["reason"]
    desk.orch("cancel")
    desk.orch("resume", "--set", "nodes=2")
    assert job.status()["world_size"] == 4
    assert job.wait()["state"] == "SUCCEEDED"


# Unusual submits


@pytest.mark.soak
def test_two_jobs_on_same_nodes_both_finish(slurm: SlurmBox, desk: Desk) -> None:
    """Two jobs on the same nodes at once both train to the end."""
    jobs = [desk.submit(TRAINS, name=name, slurm={"extra": ["--nodelist=node[1-2]"]}) for name in ("a", "b")]
    for job in jobs:
        job.wait_for_step(5)
    steps = [job.seen()["step"] for job in jobs]
    for job, step in zip(jobs, steps, strict=True):
        job.wait_for_step(step + 5)
    assert [job.placed() for job in jobs] == [["node1", "node2"]] * 2
    slurm.login.write(ENOUGH, "", user="trainer")
    for job in jobs:
        ended = job.wait()
        assert (ended["state"], ended["restarts"]) == ("SUCCEEDED", 0)
        logged = [job.steps_logged(rank) for rank in range(4)]
        assert logged == [list(range(1, len(logged[0]) + 1))] * 4


@pytest.mark.parametrize("step", ["", "srun --ntasks=1 --nodes=1 --overlap "])
def test_nested_submit_has_its_own_nodes_and_tasks(slurm: SlurmBox, desk: Desk, step: str) -> None:
    """A job submitted from within a job has nodes and tasks of its own."""
    path = desk.write(TELLS, slurm={"exclude": "node1"})
    submit = shlex.join([sys.executable, "-m", "orchestrator.cli", "submit", path, "--json"])
    outer = slurm.queue.sbatch(
        f"export ORCH_HOME={HOME}\n{step}{submit}",
        *("--nodes=3", "--ntasks=5", "--cpus-per-task=1", "--mem=100", "--job-name=outer", "--partition=low"),
        *("--nodelist=node1", f"--output={OUT}"),
        cwd="/home/trainer/desk",
    )
    slurm.queue.wait_for_state(outer, "COMPLETED", "FAILED")
    told = json.loads(slurm.login.path(OUT).read_text().splitlines()[-1])
    job = Job(desk, told["id"], told["dir"])
    desk.jobs.append(job)
    assert job.wait()["state"] == "SUCCEEDED"
    env = json.loads(job.log(3).splitlines()[-1])
    assert env["SLURM_JOB_ID"] == job.slurm_id() != outer
    assert (env["SLURM_NTASKS"], env["SLURM_NNODES"], env["SLURM_JOB_PARTITION"]) == ("4", "2", "main")
    assert "node1" not in env["SLURM_JOB_NODELIST"] and "SLURM_MEM_PER_NODE" not in env


# Nodes that are short of something


@pytest.mark.parametrize(
    "short", ["tmp", *(pytest.param(limit, marks=pytest.mark.soak) for limit in ("nofile", "memlock"))]
)
def test_node_with_full_tmp_and_low_limits_trains(slurm: SlurmBox, desk: Desk, short: str) -> None:
    """A node without space in /tmp or with low limits still trains."""
    for node in ("node1", "node2"):
        if short == "tmp":
            slurm.full_tmp(node)
        else:
            slurm.limit(node, short, 64 if short == "nofile" else 0)
    job = desk.submit(STEPS, slurm={"extra": ["--nodelist=node[1-2]"]})
    assert job.wait()["state"] == "SUCCEEDED"


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_node_out_of_processes_is_named(slurm: SlurmBox, desk: Desk, node: str) -> None:
    """A node that cannot start any more processes is named."""
    slurm.limit(node, "nproc", 3)
    job = desk.submit(HELLO, slurm={"extra": ["--nodelist=node[1-2]"]}, restart={"max": 0})
    wait_for(lambda: job.status()["state"] == "FAILED", "the end of the job", SOON_S_MAX)
    reason = str(job.status()["reason"])
    words = (
        "Resource temporarily unavailable",
        "Cannot fork",
    )  # there the batch script itself may be the one
    assert node in reason and any(word in reason for word in words), reason


def test_job_folder_unseen_by_nodes_is_reported(desk: Desk) -> None:
    """A job folder that no node sees is reported at once."""
    unseen = {"ORCH_HOME": "/tmp/orch"}
    path = desk.write(HELLO)
    try:
        desk.orch("submit", path, env=unseen)

        def failed() -> bool:
            return "FAILED" in desk.orch("status", env=unseen).stdout

        wait_for(failed, "the end of the job", FIRST_S_MAX)
        said = desk.orch("status", env=unseen).stdout
        assert "could not start: its first node" in said and "the job's folder; fix" in said
        assert "fix: submit it again with ORCH_HOME set to a folder that all nodes see" in said
    finally:
        desk.box.login.run(["rm", "-rf", "/tmp/orch"])


def test_nodes_use_the_names_of_slurm(accounted: Desk) -> None:
    """Nodes are called by the names that Slurm gives them."""
    job = accounted.submit(TELLS)
    assert job.wait()["state"] == "SUCCEEDED"
    env = json.loads(job.log(3).splitlines()[-1])
    assert job.placed() == ["gpu-01", "gpu-02"] == env["SLURM_JOB_NODELIST"].split(",")


# Jobs that Slurm has forgotten


def test_accounting_shows_end_of_forgotten_job(accounting_slurm: SlurmBox, accounted: Desk) -> None:
    """With accounting it is shown how a job ended that Slurm forgot."""
    accounting_slurm.configure(MinJobAge=2)
    job = accounted.submit(HELLO, slurm={"extra": ["--hold"]})
    accounting_slurm.queue.scancel(job.slurm_id())
    known = accounting_slurm.queue.job
    wait_for(lambda: not known(job.slurm_id()), "oblivion", OBLIVION_S_MAX, 0.5)
    told = job.status()
    assert told["state"] == "CANCELLED" and "was cancelled by trainer" in str(told["reason"])


def test_plan_of_nodes_matches_what_ranks_get(desk: Desk) -> None:
    """Ranks get exactly what orch plan says about Slurm's nodes."""
    dump = {"train.py": "import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\n"}
    path = desk.write(dump, env={"NCCL_DEBUG": "INFO"})
    data = json.loads(desk.orch("plan", path, "--json").stdout)
    assert [(node["host"], node["ranks"]) for node in data["nodes"]] == [("", [0, 1]), ("", [2, 3])]
    settings = data["nodes"][0]["settings"]
    later = [one["name"] for one in settings if one["set_by"] == "orch, at the start"]
    assert later == ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    assert "2 nodes that Slurm chooses, 2 ranks on CPUs each" in desk.orch("plan", path).stdout

    job = desk.submit(dump, env={"NCCL_DEBUG": "INFO"}, slurm={"cpus_per_task": 1})
    assert job.wait()["state"] == "SUCCEEDED"
    planned = {one["name"]: one["value"] for one in settings if one["value"] is not None}
    plain = {name: value for name, value in planned.items() if "{" not in value}
    found = json.loads(job.log(3).splitlines()[0])
    assert {name: found[name] for name in plain} == plain
    assert found["OMP_NUM_THREADS"] == "1"


def test_script_runs_once_and_called_gangs_restart(
    desk: Desk,
) -> None:
    """Nodes run a script once; its calls of srun and torchrun are gangs that are restarted."""
    script = """
        srun --ntasks-per-node=2 python3 steps.py first || exit
        srun --ntasks-per-node=1 bash -c 'torchrun --nproc-per-node 2 --node_rank $SLURM_NODEID steps.py second' || exit
        echo "over on $SLURM_NODEID of $(scontrol show hostnames "$SLURM_JOB_NODELIST" | wc -l)"
    """
    job = desk.submit(LAUNCHED, entrypoint=None, launch=script, restart={"backoff": 0})
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert job.kinds() == ["crash", None]
    for rank in range(4):
        assert job.log(rank, 2).count("call [") == 2
    for index, node in enumerate(job.placed()):
        assert f"over on {index} of 2" in job.folder.node_log(2, node).read_text()
