"""A job whose journal is lost: it is recognised, and nothing begins from nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.client import remote_files
from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.checkpoints.ledger import Ledger
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import PlannedSsh
from orchestrator.journal import facts_file, journal_file, journal_integrity
from orchestrator.journal.journal_integrity import JournalError
from tests.support import folders, jobs
from tests.support.saved_files import saved

SSH = PlannedSsh(None, None, "", "~/.orch", (), None)


def _saved(job: JobDir) -> None:
    ledger = Ledger(job.root, job.ledger)
    ledger.put(saved(1, state=CheckpointState.WHOLE))
    ledger.flush()


TRACES: dict[str, Callable[[JobDir], object]] = {
    "logs": lambda job: job.attempt_logs(7).mkdir(parents=True),
    "evidence": lambda job: job.evidence(3).mkdir(parents=True),
    "a checkpoint": _saved,
    "an end": lambda job: job.ended.touch(),
}


@pytest.mark.parametrize("trace", TRACES)
def test_job_with_leftovers_does_not_start_over(tmp_path: Path, trace: str) -> None:
    """A job that has left anything does not start from scratch."""
    job = _without_journal(tmp_path)
    journal_integrity.require_journal(job)  # it may begin
    TRACES[trace](job)
    for how in ("is gone", "is empty"):
        with pytest.raises(JournalError, match=f"the journal {how}") as told:
            journal_integrity.require_journal(job)
        assert f"orch resume it --from a checkpoint in {job.checkpoints}" in told.value.fix
        job.journal.write_text('{"news": {"attempt":9, "ki')  # a line that was never finished


def test_running_agents_are_named_with_ending_command(tmp_path: Path) -> None:
    """Agents that still run are named with the command that ends them."""
    job = _without_journal(tmp_path)
    job.ended.touch()
    lock = job.node("node-0") / "agent.lock"
    lock.parent.mkdir(parents=True)
    with locks.hold(lock, 1.0), pytest.raises(JournalError) as told:
        journal_integrity.require_journal(job)
    who = locks.read_holder(lock)
    assert who is not None and f"stop what still runs: kill {who.pid} on {who.host}" in told.value.fix


@pytest.mark.parametrize("cut", [slice(1, None), slice(0, 3)], ids=["its first line", "lines in its middle"])
def test_journal_missing_lines_is_damaged(tmp_path: Path, cut: slice) -> None:
    job = folders.failed(tmp_path)
    lines = job.journal.read_bytes().splitlines(keepends=True)
    job.journal.write_bytes(b"".join([*lines[cut], *lines[-2:]]))
    with pytest.raises(JournalError, match="this is entry") as told:
        list(journal_file.read(job.journal))
    assert "orch resume it --from" in told.value.fix
    with pytest.raises(ClusterError, match="entry"):
        facts_file.read(job)


def test_journal_shorter_than_facts_is_lost_unless_torn(
    tmp_path: Path,
) -> None:
    """A journal shorter than the facts know is lost; one that grows or ends torn is not."""
    job = folders.failed(tmp_path)
    lines = job.journal.read_bytes().splitlines(keepends=True)
    facts_file.write(job, facts_file.read(job), job.journal.stat().st_size)
    for whole in ([*lines, b'{"n":'], [*lines, lines[-1]]):
        job.journal.write_bytes(b"".join(whole))
        assert not journal_integrity.find_loss(job)
    job.journal.write_bytes(b"".join(lines[:-1]))
    assert "the journal was cut: it has" in journal_integrity.find_loss(job)
    with pytest.raises(JournalError, match="was cut"):
        Job(job).resume()
    job.journal.unlink()
    job.ended.unlink()
    assert journal_integrity.find_loss(job) == "the journal is gone", "the facts outlive it"


def test_journal_ending_before_visible_attempt_is_truncated(tmp_path: Path) -> None:
    """A journal that ends before an attempt that the folder shows is truncated."""
    job = folders.failed(tmp_path)
    job.attempt_logs(1).mkdir(parents=True, exist_ok=True)
    job.facts.unlink(missing_ok=True)
    assert facts_file.read(job).attempts
    job.attempt_logs(3).mkdir(parents=True)
    with pytest.raises(JournalError, match="the journal was cut: its last attempt is 1"):
        facts_file.read(job)


def test_unknown_hosts_may_have_leftovers(tmp_path: Path) -> None:
    """On hosts of which nothing is known something may be left."""
    job = folders.failed(tmp_path)
    job.plan.write_text(codec.dumps(dataclasses.replace(Job(job).plan(), ssh=SSH)))
    assert remote_files.hosts_used(Job(job)) == ("node-0", "node-1")
    job.journal.unlink()
    job.cleaned_hosts.write_text('["node-1"]')
    assert remote_files.hosts_used(Job(job)) == ("node-0",)


def _without_journal(tmp_path: Path) -> JobDir:
    job = folders.make(tmp_path, jobs.submitted())
    for path in (job.journal, job.state):
        path.unlink()
    return job
