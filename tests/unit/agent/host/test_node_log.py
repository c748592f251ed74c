"""Is every note of an agent in its attempt's log, in order, whatever the disk had room for when it was made?"""

from __future__ import annotations

from pathlib import Path

from orchestrator.agent.host import node_log
from orchestrator.agent.host.node_log import NodeLog
from orchestrator.core.jobdir.layout import JobDir


def _texts(job: JobDir, attempt: int) -> list[str]:
    lines = job.node_log(attempt, "node-0").read_text().splitlines()
    return [line.partition("agent: ")[2] for line in lines]


def test_unwritable_note_precedes_the_next_one(tmp_path: Path) -> None:
    """A note that cannot be written is written before the next one."""
    job = JobDir(tmp_path)
    one = NodeLog(job, "node-0")
    one.add(1, "first")
    job.node_log(2, "node-0").mkdir(parents=True)  # nothing can be written there
    one.add(2, "waits")
    one.add(1, "too")
    assert _texts(job, 1) == ["first"]
    job.node_log(2, "node-0").rmdir()
    one.add(2, "last")
    assert _texts(job, 1) == ["first", "too"]
    assert _texts(job, 2) == ["waits", "last"]


def test_pending_notes_are_limited(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    one = NodeLog(job, "node-0")
    job.node_log(1, "node-0").mkdir(parents=True)
    for number in range(node_log.WAITING_MAX + 5):
        one.add(1, str(number))
    job.node_log(1, "node-0").rmdir()
    one.add(1, "lost, too")
    assert _texts(job, 1)[-1] == str(node_log.WAITING_MAX - 1)
