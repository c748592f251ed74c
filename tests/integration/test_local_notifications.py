"""Is a person told what a job does: stacks on demand, a suspicion in the status, notifications of its turning points?"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from orchestrator.brain.model import decisions as d
from orchestrator.programs import outcome
from orchestrator.views import cells, stacks, status
from tests.support.local import FAKE_TORCH, STEPPER, Desk, kill, wait_until

STEPS = STEPPER + "run(1000000 if attempt == 1 else 10)"
WAITER = (
    STEPPER
    + """
def sleep_in_vain(step):
    if rank == 1 and step == 5:
        time.sleep(3600)


run(1000000, at_step=sleep_in_vain)
"""
)


def test_stacks_of_running_job_are_taken_without_change(desk: Desk) -> None:
    """Stacks of a running job are taken, and nothing is changed."""
    job = desk.submit(
        {**FAKE_TORCH, "train.py": WAITER}, nodes=2, procs_per_node=1, entrypoint="train.py", monitor={"hang_timeout": "off"}
    )  # fmt: skip
    job.wait_for_step(20)
    before = job.rank_procs()
    taken = job.job.stacks()
    assert [(one["rank"], one["node"], one["pid"]) for one in taken["ranks"]] == [
        (rank, f"node-{rank}", before[rank].pid) for rank in (0, 1)
    ]
    assert any("sleep_in_vain" in frame for frame in taken["ranks"][1]["stack"])
    text = cells.plain_text(stacks.stacks(taken))
    assert "sleep_in_vain" in text and "rank 1 on node-1" in text
    assert Path(taken["pages"]).is_dir()
    step = job.seen()["step"]
    job.wait_for_step(step + 5)
    assert job.rank_procs() == before
    assert job.seen()["state"] == "RUNNING"
    assert not job.news(d.Judge) and not job.notices(d.NoticeTopic.HANG, d.NoticeTopic.DESYNC)
    job.job.cancel()
    job.wait()


def test_stopped_rank_is_suspected_until_it_continues(desk: Desk) -> None:
    """A stopped rank is a suspicion within seconds, and no longer one once it continues."""
    job = desk.submit(
        {**FAKE_TORCH, "train.py": STEPS}, nodes=2, procs_per_node=1, entrypoint="train.py", monitor={"on_hang": "notify"}
    )  # fmt: skip
    job.wait_for_step(5)
    procs = job.rank_procs()
    began_s = time.monotonic()
    kill(procs[1], signal.SIGSTOP)
    said = wait_until(lambda: job.job.source.status().suspicion, "a suspicion")
    assert time.monotonic() - began_s < 20  # 2 s on a quiet machine
    assert said and "rank 1 on node-1 is stopped (state T)" in said
    assert "suspicion   rank 1" in cells.plain_text(status.job(job.job.source.status()))
    kill(procs[1], signal.SIGCONT)
    wait_until(lambda: not job.job.source.status().suspicion, "the end of the suspicion")
    job.job.cancel()
    job.wait()


def test_hang_restart_and_end_are_notified_in_order(desk: Desk, tmp_path: Path) -> None:
    told = tmp_path / "told.jsonl"
    job = desk.submit(
        {**FAKE_TORCH, "train.py": STEPS}, nodes=2, procs_per_node=1, entrypoint="train.py",
        notify={"command": f"(cat; echo) >> {told}; [ $ORCH_NOTIFY_EVENT != restart ] || exit 9", "on": ["hang", "restart", "succeeded"]},
    )  # fmt: skip
    job.wait_for_step(5)
    kill(job.rank_procs()[1], signal.SIGSTOP)
    assert job.wait()["state"] == "SUCCEEDED"
    wait_until(job.job.folder.ended.exists, "the end of the supervisor's work")
    notes = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(note["event"], note["attempt"]) for note in notes] == [
        ("hang", 1), ("restart", 2), ("succeeded", 2),
    ]  # fmt: skip
    assert notes[0]["verdict"]["ranks"] == [1]
    assert notes[0]["verdict"]["kind"] == notes[1]["verdict"]["kind"] == "hang"
    assert notes[2]["verdict"] is None
    log = job.job.folder.supervisor_log.read_text()
    assert "notify.command did not get restart: it ended with code 9" in log


def test_files_written_by_other_job_are_noticed(desk: Desk, tmp_path: Path) -> None:
    """A job whose files another running job writes ends with a notice."""
    script = f"open({str(tmp_path / 'last.pt')!r}, 'wb').close()\n"
    one = desk.submit({"train.py": f"{script}import time\ntime.sleep(3600)\n"}, procs_per_node=1, entrypoint="train.py")
    wait_until((tmp_path / "last.pt").exists, "the first job's file")
    two = desk.submit({"train.py": script}, procs_per_node=1, entrypoint="train.py")
    ended = outcome.wait_for_outcome(two.job, 60)
    assert ended["state"] == "SUCCEEDED"
    assert [notice for notice in ended["notices"] if one.job.id in notice] == [
        f"{one.job.id} is running, too, and writes the same file, {tmp_path}/last.pt; fix: give each job a folder of its own"
    ]
    one.job.cancel()
    one.wait()


MEETS = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


def test_misplaced_ranks_are_identified_by_their_stacks(desk: Desk) -> None:
    """Ranks that their shell has sent elsewhere are identified by their stacks."""
    files = {
        "train.py": MEETS,
        "run.sh": f"export MASTER_PORT=$((29700 + RANK))\n{sys.executable} train.py\n",
    }
    job = desk.submit(files, procs_per_node=2, command="bash run.sh")

    def said() -> bool:
        ranks = job.job.stacks()["ranks"] if job.seen()["state"] == "RUNNING" else []
        return [f"MASTER_PORT is {29700 + one['rank']} by the script" in one["why"] for one in ranks] == [True] * 2

    wait_until(said, "the ports that the shell has set")
    job.job.cancel()
    job.wait()
