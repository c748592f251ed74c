"""Is the Slurm of the cluster in a box a real one? Jobs run, are cancelled, preempted and requeued; nodes are lost."""

from __future__ import annotations

import pytest

from orchestrator.core.host import procfs
from tests.support.cluster.box import inside
from tests.support.cluster.host import wait_for
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.slurmconf import ACCOUNT, GRACE_S, KILL_WAIT_S, SLURMD_TIMEOUT_S
from tests.support.cluster.slurmqueue import QUEUE_S_MAX

pytestmark = pytest.mark.soak

OUT = "/home/trainer/out.txt"
LOST_S_MAX = 3.0 * SLURMD_TIMEOUT_S
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture(autouse=True)
def no_output(request: pytest.FixtureRequest) -> None:
    """Let no test read what another has printed."""
    names = set(request.fixturenames) & {"slurm", "accounting_slurm"}
    for name in names:
        request.getfixturevalue(name).login.path(OUT).unlink(missing_ok=True)


def printed(box: SlurmBox) -> str:
    """Return what the jobs have printed."""
    path = box.login.path(OUT)
    return path.read_text() if path.exists() else ""


def runs(box: SlurmBox, script: str, *options: str) -> str:
    """Return what a job prints that must succeed."""
    id = box.queue.sbatch(script, f"--output={OUT}", *options)
    known = box.queue.wait_for_state(id, *FINAL)
    assert known["JobState"] == "COMPLETED", f"{known}\n{printed(box)}"
    return printed(box)


def sleeps(box: SlurmBox, *options: str, script: str = "srun sleep 600") -> str:
    """Return the id of a job that runs and does not end."""
    id = box.queue.sbatch(f"echo restart ${{SLURM_RESTART_COUNT:-0}}\n{script}", f"--output={OUT}", *options)
    box.queue.wait_for_state(id, "RUNNING")
    wait_for(lambda: "restart 0" in printed(box), "the job's first words", QUEUE_S_MAX)
    return id


# --- jobs


def test_box_job_has_one_task_per_node(slurm: SlurmBox) -> None:
    """A job of two nodes has a task on each."""
    assert sorted(runs(slurm, "srun hostname", "--nodes=2").split()) == ["node1", "node2"]


def test_box_job_sees_the_gpus_it_requested(slurm: SlurmBox) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES; ls /dev/nvidia*"
    assert runs(slurm, script, "--gpus-per-node=2").split() == ["0,1", "/dev/nvidia0", "/dev/nvidia1"]
    done = slurm.login.run(["sbatch", "--gpus-per-node=3", "--wrap", "true"], user="trainer", check=False)
    assert done.returncode == 1
    assert "Requested node configuration is not available" in done.stderr


def test_box_job_file_is_users_on_all_hosts(slurm: SlurmBox) -> None:
    """A file of a job belongs to the user and is on all hosts at once."""
    words = runs(slurm, "id -un >~/mark; srun cat ~/mark; rm ~/mark", "--nodes=2").split()
    assert words == ["trainer"] * 2
    assert slurm.login.path(OUT).stat().st_uid == 2000


def test_box_job_waits_for_resources_then_starts(slurm: SlurmBox) -> None:
    first = sleeps(slurm, "--nodes=4", "--exclusive")
    second = slurm.queue.sbatch("true", "--nodes=1", f"--output={OUT}")
    wait_for(lambda: slurm.queue.job(second)["Reason"] in ("Resources", "Priority"), "a reason")
    assert slurm.queue.state(second) == "PENDING"
    slurm.queue.scancel(first)
    slurm.queue.wait_for_state(second, "COMPLETED")


@pytest.mark.parametrize(
    ("option", "words"),
    [("--partition=nope", "invalid partition specified"), ("--constraint=nope", "Invalid feature")],
)
def test_box_request_beyond_the_cluster_is_refused(slurm: SlurmBox, option: str, words: str) -> None:
    done = slurm.login.run(["sbatch", option, "--wrap", "true"], user="trainer", check=False)
    assert done.returncode == 1
    assert words in done.stderr


# --- the ends that Slurm makes


def test_scancel_ends_a_job_and_all_its_processes(slurm: SlurmBox) -> None:
    id = sleeps(slurm, "--nodes=2")
    wait_for(lambda: all(at_work(slurm, name) for name in ("node1", "node2")), "tasks", QUEUE_S_MAX)
    slurm.queue.scancel(id)
    slurm.queue.wait_for_state(id, "CANCELLED")
    wait_for(lambda: not any(at_work(slurm, host.name) for host in slurm.nodes), "silence", 2 * KILL_WAIT_S)


def test_box_batch_shell_can_be_signalled_without_tasks(slurm: SlurmBox) -> None:
    script = "trap 'echo warned; exit 0' USR1\necho ready\nsrun sleep 600 &\nfor _ in {1..3}; do wait; done"
    id = sleeps(slurm, script=script)
    wait_for(lambda: "ready" in printed(slurm), "the trap", QUEUE_S_MAX)
    slurm.queue.warn(id)
    slurm.queue.wait_for_state(id, "COMPLETED")
    assert "warned" in printed(slurm)


def test_box_time_limit_is_announced_then_ends_job(slurm: SlurmBox) -> None:
    script = "trap 'echo warned' USR1\nsrun sleep 600 &\nfor _ in {1..3}; do wait; done"
    id = sleeps(slurm, "--time=10", "--signal=B:USR1@5", "--no-requeue", script=script)
    slurm.queue.end_in(id, 40)  # slurmctld looks every 30 s: before the end, for sure
    slurm.queue.wait_for_state(id, "TIMEOUT", limit_s=120)
    assert "warned" in printed(slurm)


def test_a_requeued_job_starts_again_under_its_id(slurm: SlurmBox) -> None:
    id = sleeps(slurm, "--requeue", "--open-mode=append")
    slurm.queue.requeue(id)
    wait_for(lambda: "restart 1" in printed(slurm), "the second start", 60)
    assert slurm.queue.job(id)["Restarts"] == "1"


def test_box_held_job_starts_after_release(slurm: SlurmBox) -> None:
    id = slurm.queue.sbatch("true", "--hold", f"--output={OUT}")
    assert slurm.queue.job(id)["Reason"] == "JobHeldUser"
    slurm.queue.release(id)
    slurm.queue.wait_for_state(id, "COMPLETED")


@pytest.mark.parametrize(("partition", "grace_s"), [("main", 0), ("low", GRACE_S)])
def test_box_higher_priority_job_preempts_by_requeue(slurm: SlurmBox, partition: str, grace_s: int) -> None:
    """A job of higher priority sends others back to the queue."""
    script = "trap 'echo told; exit' TERM\nwhile :; do sleep 600 & wait; done"
    id = sleeps(slurm, "--requeue", "--open-mode=append", "--nodes=4", f"--partition={partition}", script=script)
    other = slurm.queue.preempt(4)
    slurm.queue.wait_for_state(id, "PENDING", limit_s=60 + grace_s)
    assert "told" in printed(slurm)
    slurm.queue.wait_for_state(other, "RUNNING")
    slurm.queue.scancel(other, user="root")
    wait_for(lambda: "restart 1" in printed(slurm), "the second start", 60)


# --- nodes


def at_work(box: SlurmBox, name: str) -> list[str]:
    return [one.command for one in box.host(name).processes() if one.uid == 2000]


@pytest.mark.parametrize("fault", ["power", "slurmd"])
def test_a_job_outlives_a_node_that_is_lost(slurm: SlurmBox, fault: str) -> None:
    script = "srun --no-kill --kill-on-bad-exit=0 sleep 600"
    id = sleeps(slurm, "--no-kill", "--nodes=3", script=script)
    wait_for(lambda: at_work(slurm, "node3"), "a task", QUEUE_S_MAX)
    if fault == "power":
        slurm.power_off("node3")
    else:
        slurm.kill_slurmd("node3")
    wait_for(lambda: slurm.queue.job(id)["NodeList"] == "node[1-2]", "the loss", LOST_S_MAX)
    assert slurm.queue.state(id) == "RUNNING"
    assert slurm.queue.nodes()["node3"].startswith("down")
    assert at_work(slurm, "node2")
    slurm.heal()
    slurm.queue.wait_for_node("node3", "idle")


def test_box_drained_node_gets_no_job_until_resumed(slurm: SlurmBox) -> None:
    slurm.queue.drain("node1", "a loose cable")
    assert runs(slurm, "hostname") == "node2\n"
    slurm.queue.resume("node1")
    slurm.queue.wait_for_node("node1", "idle")


def test_box_full_tmp_and_limit_affect_the_job(slurm: SlurmBox) -> None:
    """A job is subject to a full /tmp and to a limit that the box sets."""
    slurm.full_tmp("node1")
    slurm.limit("node1", "nofile", 64)
    script = "ulimit -n; head -c 99999 /dev/zero 2>&1 >/tmp/x | grep -c 'No space'"
    assert runs(slurm, script, "--nodelist=node1").split() == ["64", "1"]
    slurm.heal()
    assert runs(slurm, "head -c 99999 /dev/zero >/tmp/x && rm /tmp/x; ulimit -n", "-w", "node1").split()[-1] != "64"


def test_box_node_name_may_differ_from_host_name(accounting_slurm: SlurmBox) -> None:
    """Slurm may give a node another name than its host has."""
    script = "srun sh -c 'echo $SLURMD_NODENAME $(hostname)'"
    lines = runs(accounting_slurm, script, "--nodes=2", "--nodelist=gpu-[02-03]").splitlines()
    assert sorted(lines) == ["gpu-02 node2", "gpu-03 node3"]


# --- Slurm's own troubles


def saved_state(box: SlurmBox) -> bytes:
    """Return what slurmctld has saved of the jobs: nothing at the moment in which it puts a new file in place of the old."""
    try:
        return (box.logs / "ctld/job_state").read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.parametrize("kill", [False, True])
def test_job_runs_while_slurmctld_is_down(slurm: SlurmBox, kill: bool) -> None:
    """A job keeps running while slurmctld is down."""
    id = sleeps(slurm, "--nodes=2")
    wait_for(lambda: at_work(slurm, "node2"), "a task", QUEUE_S_MAX)  # it is slurmctld that lets the step begin
    if kill:  # what it has not saved yet would be forgotten: saved is what was said after the job had begun
        slurm.queue.comment(id, said := f"job {id} runs")
        wait_for(lambda: said.encode() in saved_state(slurm), "a saved state", 30)
    slurm.stop_slurmctld(kill=kill)
    assert slurm.login.run(["squeue"], check=False, limit_s=60).returncode == 1
    slurm.start_slurmctld()
    slurm.queue.wait_for_state(id, "RUNNING")
    assert at_work(slurm, "node2")


def test_without_accounting_sacct_fails(slurm: SlurmBox) -> None:
    done = slurm.login.run(["sacct"], user="trainer", check=False)
    assert done.returncode == 1
    assert "accounting storage is disabled" in done.stderr


def test_box_accounting_reports_jobs_and_restricts_accounts(
    accounting_slurm: SlurmBox,
) -> None:
    """With accounting, sacct reports jobs, and only known accounts may submit."""
    queue = accounting_slurm.queue
    id = queue.sbatch("true", f"--output={OUT}", f"--account={ACCOUNT}")
    queue.wait_for_state(id, "COMPLETED")
    argv = ["sacct", "-n", "-X", "-P", "-o", "State", "-j", id]
    wait_for(lambda: accounting_slurm.login.run(argv, user="trainer").stdout == "COMPLETED\n", "its record", 30)
    done = accounting_slurm.login.run(["sbatch", "-A", "nope", "--wrap", "true"], user="trainer", check=False)
    assert "Invalid account" in done.stderr


def test_slurm_can_be_made_to_forget_a_job(accounting_slurm: SlurmBox) -> None:
    queue = accounting_slurm.queue
    id = queue.sbatch("true", f"--output={OUT}")
    queue.wait_for_state(id, "COMPLETED")
    accounting_slurm.configure(MinJobAge=2)
    wait_for(lambda: not queue.job(id), "oblivion", 120)
    assert queue.entries() == []


# --- the box


def test_two_boxes_run_side_by_side_without_leftovers(slurm: SlurmBox) -> None:
    """Two boxes run side by side and leave nothing."""
    with SlurmBox(1, gpus=0) as other:
        id = sleeps(other)
        assert other.queue.job(id)["NodeList"] == "node1"
        assert slurm.queue.entries() == []
        procs = inside({host.namespaces["pid"] for host in other.hosts.values()})
        state = other.state
    assert procs and not any(map(procfs.is_alive, procs))
    assert not state.exists()


def test_clearing_leaves_an_empty_queue_and_idle_nodes(slurm: SlurmBox) -> None:
    slurm.queue.drain("node2")
    sleeps(slurm, "--requeue", script="trap '' TERM\nsleep 600")
    slurm.queue.sbatch("true", "--hold")
    slurm.kill_slurmd("node4")
    slurm.clear()
    assert slurm.queue.entries() == []
    assert set(slurm.queue.nodes().values()) == {"idle"}
    assert not any(at_work(slurm, host.name) for host in slurm.nodes)
