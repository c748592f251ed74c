"""What if an agent dies, its keeper, or both? No orphan stays, whoever they are, and the job goes on."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable

import pytest

from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc
from tests.support.local import FAKE_TORCH, STEPPER, Desk, Sight, kill, proc_of, wait_until

FAMILY = (
    STEPPER
    + """
import multiprocessing, subprocess


def tell(pid):
    os.write(1, f"kin {pid}\\n".encode())  # in one write: an unbuffered print is two, and others write between


def idle(number):
    tell(os.getpid())
    time.sleep(3600)


if __name__ == "__main__":
    if attempt == 1:
        if rank == 0:
            multiprocessing.get_context("fork").Process(target=idle, args=(0,), daemon=True).start()
            run(10)
            sleep = subprocess.Popen(["setsid", "sleep", "3600"])
            tell(sleep.pid)
            daemon = "setsid sh -c 'echo kin $$; exec sleep 3600' &"
            subprocess.run(["sh", "-c", daemon], check=True)
        run(1000000, start=10)
    run(20)
"""
)
"""In its first attempt rank 0 has a worker like DataLoader's, a child in a session of its own, and a daemon."""

RUN_SH = """
trap '' TERM
python=$1
"$python" train.py &
wait
wait
"""


def _family(desk: Desk) -> Sight:
    files = {**FAKE_TORCH, "train.py": FAMILY, "run.sh": RUN_SH}
    return desk.submit(
        files,
        nodes=2,
        command='bash run.sh "$PYTHON"; true',
        env={"PYTHON": sys.executable},
        monitor={"stop_grace": 1},
    )


def _both(job: Sight) -> list[Proc]:
    return [job.keeper(), job.agent()]


VICTIMS: dict[str, Callable[[Sight], list[Proc]]] = {
    "agent": lambda job: [job.agent()],
    "keeper": lambda job: [job.keeper()],
    "both": _both,
}


@pytest.mark.parametrize("victim", list(VICTIMS))
def test_orphans_die_with_agent_and_job_resumes(desk: Desk, victim: str) -> None:
    job = _family(desk)
    wait_until(lambda: len(re.findall(r"kin \d+\n", job.log())) == 3, f"the whole family\n{job.log()[:300]}")
    kin = [proc_of(int(pid)) for pid in re.findall(r"kin (\d+)\n", job.log())]
    assert set(kin) <= set(job.processes())
    job.wait_for_step(12)
    for proc in VICTIMS[victim](job):
        kill(proc)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.kinds() == ["node_lost", None]
    assert job.verdict()["node"] == "node-0"
    assert not [proc for proc in kin if procfs.is_alive(proc)]


@pytest.mark.parametrize("victim", ["agent", "keeper"])
def test_agent_asked_to_end_stops_ranks(desk: Desk, victim: str) -> None:
    """An agent that is asked to end stops its ranks, and the job resumes."""
    script = STEPPER + "run(1000000 if attempt == 1 else 20)"
    job = desk.submit({**FAKE_TORCH, "train.py": script}, nodes=2, entrypoint="train.py")
    job.wait_for_step(3)
    kill(VICTIMS[victim](job)[0], signal.SIGTERM)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.kinds() == ["node_lost", None]
    assert job.verdict()["node"] == "node-0"


def test_agent_killed_before_ranks_start_costs_no_attempt(desk: Desk) -> None:
    script = STEPPER + "run(5)"
    job = desk.submit({**FAKE_TORCH, "train.py": script}, entrypoint="train.py", setup=["sleep 1"])
    wait_until(lambda: (job.job.folder.node("node-0") / "setup.sh").exists(), "the setup lines")
    kill(job.agent())
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.kinds() == [None]


def test_agent_stopped_for_long_is_continued_and_obeys(desk: Desk) -> None:
    """Else its ranks would outlive the attempt, and no other agent could be started beside it."""
    script = STEPPER + "run(1000000 if attempt == 1 else 20)"
    job = desk.submit({**FAKE_TORCH, "train.py": script}, nodes=2, entrypoint="train.py")
    job.wait_for_step(3)
    kill(job.agent("node-1"), signal.SIGSTOP)
    kill(job.rank_procs()[0])
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.kinds() == ["crash", None]
    said = (job.job.folder.node("node-1") / "agent.log").read_text()
    assert "continued" in said and "died" not in said


def test_stopped_agent_that_continues_does_not_fence_ranks(desk: Desk) -> None:
    """The fence must not kill a gang that has gone on while only its agent stood still."""
    script = STEPPER + "run(1000000)"
    job = desk.submit(
        {**FAKE_TORCH, "train.py": script},
        entrypoint="train.py",
        monitor={"node_timeout": 12, "hang_timeout": 60},
    )
    job.wait_for_step(3)
    agent, steps = job.agent(), len(job.steps_logged())
    kill(agent, signal.SIGSTOP)
    stopped_at = time.monotonic()
    wait_until(lambda: time.monotonic() > stopped_at + 7.8, "longer than the fence's 7.2 s")
    went_on = len(job.steps_logged())
    assert went_on > steps + 100
    kill(agent, signal.SIGCONT)
    wait_until(lambda: (job.seen()["step"] or 0) > went_on, "news of the steps")
    assert job.seen()["restarts"] == 0
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
