"""Do jobs, gangs and ports keep out of each other's way, and does nothing stay behind at the end?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from orchestrator.brain.model import events as e
from orchestrator.core.host import procfs
from orchestrator.core.wire import reports
from tests.support.local import FAKE_TORCH, STEPPER, Desk, kill, wait_until


def test_two_concurrent_jobs_do_not_interfere(desk: Desk) -> None:
    script = STEPPER + "run(1000000 if attempt == 1 and 'TO_BE_KILLED' in os.environ else 300, each_s=0.02)"
    files = {**FAKE_TORCH, "train.py": script}
    first = desk.submit(files, entrypoint="train.py", env={"TO_BE_KILLED": "1"})
    second = desk.submit(files, entrypoint="train.py")
    first.wait_for_step(5)
    second.wait_for_step(5)
    kill(first.rank_procs()[0])
    assert [job.wait()["state"] for job in (first, second)] == ["SUCCEEDED", "SUCCEEDED"]
    assert (first.kinds(), second.kinds()) == (["crash", None], [None])
    ports = [started.port for job in (first, second) for started in job.news(reports.Prepared) if started.port]
    assert len(ports) == 3 and ports[0] != ports[1]  # those of two jobs are drawn at random


def test_three_nodes_with_two_ranks_each(desk: Desk) -> None:
    script = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['NODE_RANK'])"
    job = desk.submit({"train.py": script}, nodes=3, entrypoint="train.py")
    status = job.wait()
    assert (status["state"], status["world_size"]) == ("SUCCEEDED", 6)
    assert [job.log(rank).split() for rank in range(6)] == [
        [str(rank), str(rank % 2), str(rank // 2)] for rank in range(6)
    ]
    assert [one["exit"] for one in status["ranks"]] == [0] * 6


def test_daemon_of_rank_is_gone_after_the_job(desk: Desk) -> None:
    """A daemon that a rank started is gone when the job ends."""
    script = """
import os, subprocess
subprocess.run(["sh", "-c", "setsid sh -c 'echo daemon $$; exec sleep 3600' & sleep 0.5"], check=True)
"""
    job = desk.submit({"train.py": script}, procs_per_node=1, entrypoint="train.py")
    assert job.wait()["state"] == "SUCCEEDED"
    pid = int(next(line.split()[1] for line in job.log().splitlines() if line.startswith("daemon")))
    wait_until(lambda: (stat := procfs.stat(pid)) is None or stat.state in "ZX", "the daemon's end")


def test_late_crash_restarts_ranks_that_had_finished(desk: Desk) -> None:
    """Ranks that finished wait for the others, and a late crash restarts all of them."""
    script = STEPPER + "run(5)\nif rank == 1 and attempt == 1:\n    time.sleep(1)\n    sys.exit(4)\n"
    job = desk.submit({**FAKE_TORCH, "train.py": script}, nodes=2, procs_per_node=1, entrypoint="train.py")
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["crash", None]
    assert job.verdict()["ranks"] == [1]
    assert job.steps_logged(0, 2) == [1, 2, 3, 4, 5]


def test_port_taken_after_probe_is_rendezvous_failure(
    desk: Desk,
) -> None:
    """A port taken between probe and use is a rendezvous failure, and the next attempt uses another."""
    script = """
import os, socket
port = int(os.environ["MASTER_PORT"])
if os.environ["ORCH_ATTEMPT"] == "1":
    other = socket.socket()
    other.bind(("", port))  # somebody else was faster
    other.listen()
if os.environ["RANK"] == "0":
    server = socket.socket()
    server.bind(("", port))
"""
    job = desk.submit({"train.py": script}, procs_per_node=1, entrypoint="train.py")
    assert job.wait()["state"] == "SUCCEEDED"
    assert job.kinds() == ["rendezvous", None]
    first, second = (one.port for one in job.news(reports.Prepared))
    assert first != second


def test_job_with_much_output_loses_no_byte(desk: Desk) -> None:
    script = "import os\nfor number in range(200_000):\n    print(os.environ['RANK'], number)\n"
    job = desk.submit({"train.py": script}, entrypoint="train.py", logs={"unbuffered": False})
    assert job.wait()["state"] == "SUCCEEDED"
    for rank in range(2):
        assert job.log(rank) == "".join(f"{rank} {number}\n" for number in range(200_000))


def test_concurrent_status_commands_revive_one_supervisor(desk: Desk) -> None:
    """Many commands at once start exactly one supervisor."""
    job = desk.submit({**FAKE_TORCH, "train.py": STEPPER + "run(1000000)"}, entrypoint="train.py")
    job.wait_for_step(3)
    job.kill_supervisor()
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(lambda _: job.job.status()["state"], range(4)))
    assert set(states) == {"RUNNING"}
    assert len(job.news(e.SupervisorStarted)) == 2
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
