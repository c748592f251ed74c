"""A job whose journal is lost: it is recognised, and can go on from its traces without a second gang at work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.client import remote_files
from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.checkpoints.ledger import Ledger
from orchestrator.core.checkpoints.save import SaveState
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedPool, PlannedSlurm, PlannedSsh
from orchestrator.supervisor.journal import facts_file, journal_file, lost_journal
from orchestrator.supervisor.journal.journal_file import JournalError
from orchestrator.supervisor.journal.planned import planned
from tests.support import folders, jobs
from tests.support.saved_files import saved

SSH = PlannedSsh(None, None, "", "~/.orch", (), None)
SAVED = jobs.saved(100.0)


def _saved(job: JobDir) -> None:
    ledger = Ledger(job.root, job.ledger)
    for number, state in enumerate((SaveState.WHOLE, SaveState.WHOLE, SaveState.TORN), start=1):
        ledger.put(saved(number, state=state))
    ledger.flush()


TRACES: dict[str, tuple[Callable[[JobDir], object], int]] = {
    "logs": (lambda job: job.attempt_logs(7).mkdir(parents=True), 7),
    "evidence": (lambda job: job.evidence(3).mkdir(parents=True), 3),
    "what an agent keeps": (lambda job: (job.node("node-0") / "attempt-005").mkdir(parents=True), 5),
    "a status": (lambda job: job.state.write_text('{"attempt": 1200, "started_at": "x"}'), 1200),
    "a line that was never finished": (lambda job: job.journal.write_text('{"news": {"attempt":9, "ki'), 9),
    "a checkpoint": (_saved, 0),
    "an end": (lambda job: job.ended.touch(), 0),
}


@pytest.mark.parametrize("trace", TRACES)
def test_a_job_that_has_left_anything_does_not_begin_from_nothing(tmp_path: Path, trace: str) -> None:
    job = _without_journal(tmp_path)
    assert lost_journal.lost(job, Job(job).plan()) is None, "it may begin"
    leave, attempt = TRACES[trace]
    leave(job)
    found = lost_journal.lost(job, Job(job).plan())
    assert found is not None and found.attempt == attempt
    fix = lost_journal.refusal(job, found).fix
    assert f"orch resume {job.id} --from CHECKPOINT goes on as attempt {max(1, attempt) + 1}" in fix


def test_of_checkpoints_those_in_the_ledger_are_known_and_files_beside_it_prove_nothing(
    tmp_path: Path,
) -> None:
    job = _without_journal(tmp_path)
    (job.checkpoints / "other.pt").write_text("x")
    assert lost_journal.lost(job, Job(job).plan()) is None
    _saved(job)
    found = lost_journal.lost(job, Job(job).plan())
    assert found is not None and found.checkpoints == ("ckpt_10.pt", "ckpt_20.pt"), "one was torn"
    assert "2 checkpoints (the newest: ckpt_20.pt)" in lost_journal.refusal(job, found).what


@pytest.mark.parametrize("cut", [slice(1, None), slice(0, 3)], ids=["its first line", "lines in its middle"])
def test_a_journal_that_misses_lines_is_damaged(tmp_path: Path, cut: slice) -> None:
    job = folders.failed(tmp_path)
    lines = job.journal.read_bytes().splitlines(keepends=True)
    job.journal.write_bytes(b"".join([*lines[cut], *lines[-2:]]))
    with pytest.raises(JournalError, match="this is entry"):
        list(journal_file.read(job.journal))
    found = lost_journal.lost_or_damaged(job, Job(job).plan())
    assert found is not None and found.attempt == 1
    with pytest.raises(ClusterError, match="entry"):
        Job(job).resume()


def test_a_journal_shorter_than_the_facts_know_it_is_lost_and_one_that_grows_or_ends_torn_is_not(
    tmp_path: Path,
) -> None:
    job = folders.failed(tmp_path)
    plan, lines = Job(job).plan(), job.journal.read_bytes().splitlines(keepends=True)
    facts_file.write(job, facts_file.read(job), job.journal.stat().st_size)
    for whole in ([*lines, b'{"n":'], [*lines, lines[-1]]):
        job.journal.write_bytes(b"".join(whole))
        assert lost_journal.lost(job, plan) is None
    job.journal.write_bytes(b"".join(lines[:-1]))
    found = lost_journal.lost(job, plan)
    assert found is not None and found.attempt == 1 and "the journal was cut: it has" in found.how
    with pytest.raises(JournalError, match="was cut"):
        Job(job).resume()
    job.journal.unlink()
    job.state.unlink()
    assert (gone := lost_journal.lost(job, plan)) is not None and gone.attempt == 1, (
        "the facts outlive the journal"
    )


@pytest.mark.parametrize("what", ["later attempts", "the end"])
def test_a_journal_that_ends_before_what_the_folder_shows_is_cut_though_no_facts_tell(
    tmp_path: Path, what: str
) -> None:
    job = folders.failed(tmp_path)
    job.attempt_logs(1).mkdir(parents=True, exist_ok=True)
    job.facts.unlink(missing_ok=True)
    assert lost_journal.lost_or_damaged(job, Job(job).plan()) is None
    if what == "later attempts":
        job.attempt_logs(3).mkdir(parents=True)
    else:
        job.journal.write_bytes(
            job.journal.read_bytes().partition(b'"kind":"EndJob"')[0].rpartition(b"\n")[0] + b"\n"
        )
    found = lost_journal.lost_or_damaged(job, Job(job).plan())
    assert found is not None and found.how.startswith("the journal was cut")
    with pytest.raises(ClusterError, match="to begin from nothing would write over that"):
        Job(job).resume()


def test_what_there_was_of_a_journal_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    plan = Job(job).plan()
    for number in (1, 2):
        job.journal.write_text(f"damage {number}\n")
        found = lost_journal.lost_or_damaged(job, plan)
        assert found is not None
        lost_journal.rewrite(job, plan, found, is_over=True)
        assert (job.root / f"journal.{number}.damaged").read_text() == f"damage {number}\n"
        assert lost_journal.lost(job, plan) is None and not job.facts.exists()
        still = lost_journal.lost_or_damaged(job, plan)
        assert still is not None and "no attempt has begun since" in still.how, (
            "a plain resume begins from nothing"
        )


def test_on_hosts_of_which_nothing_is_known_something_may_be_left(tmp_path: Path) -> None:
    job = folders.failed(tmp_path)
    job.plan.write_text(codec.dumps(dataclasses.replace(Job(job).plan(), ssh=SSH)))
    assert remote_files.hosts_used(Job(job)) == ("node-0", "node-1")
    job.journal.unlink()
    job.cleaned_hosts.write_text('["node-1"]')
    assert remote_files.hosts_used(Job(job)) == ("node-0",)


# What the brain makes of it


def _salvaged(plan: Plan, job: JobDir, *, is_over: bool) -> tuple[Brain, float]:
    """Return the brain of a job that has left attempt 6."""
    brain, at = Brain(), 100.0
    for news in lost_journal._news(job, plan, lost_journal.Traces("gone", 6, ()), is_over=is_over):
        brain.learn(news)
        at = news.at
    return brain, at


def _decided(brain: Brain, at: float) -> list[d.Decision]:
    said: list[d.Decision] = []
    while decisions := brain.decide(at)[0]:
        for decision in decisions:
            brain.learn(decision)
            if isinstance(decision, d.CompareSave):
                brain.learn(e.SaveCompared(at, decision.attempt, decision.save, ""))
        said += decisions
    return said


@pytest.mark.parametrize("over_ssh", [False, True])
def test_the_next_attempt_begins_once_every_node_has_said_that_nothing_is_left(
    tmp_path: Path, over_ssh: bool
) -> None:
    job = _without_journal(tmp_path)
    plan = Job(job).plan()
    if over_ssh:
        plan = dataclasses.replace(plan, ssh=SSH, pool=PlannedPool(1, 1, 0, 1))
    brain, at = _salvaged(plan, job, is_over=True)
    brain.learn(SAVED)
    brain.learn(e.ResumeRequested(at, 1, 1))
    launched = _decided(brain, at)
    assert {(type(one), one.attempt) for one in launched} == {(d.Launch, 6)} and len(launched) == 2
    for name in ("node-0", "node-1"):
        assert not any(isinstance(one, d.BeginAttempt) for one in _decided(brain, at))
        brain.learn(e.AgentUp(at, name, "boot", 6, 0, "", 0, ()))
        assert [type(one) for one in _decided(brain, at)] == [d.Stop]
        brain.learn(e.Stopped(at, name, 6, "asked"))
    begun = [one for one in _decided(brain, at) if isinstance(one, d.BeginAttempt)]
    assert [(one.attempt, one.resume) for one in begun] == [(7, d.Checkpoint(jobs.CKPT, 20, 1))]


@pytest.mark.parametrize("over_ssh", [False, True])
def test_a_cancel_ends_the_job_once_every_node_has_said_that_nothing_is_left(
    tmp_path: Path, over_ssh: bool
) -> None:
    job = _without_journal(tmp_path)
    plan = Job(job).plan()
    if over_ssh:
        plan = dataclasses.replace(plan, ssh=SSH, pool=PlannedPool(1, 1, 0, 1))
    brain, at = _salvaged(plan, job, is_over=False)
    brain.learn(e.CancelRequested(at, 1))
    decided = _decided(brain, at)
    for name in ("node-0", "node-1"):
        assert not any(isinstance(one, d.EndJob) for one in decided)
        brain.learn(e.AgentUp(at, name, "boot", 6, 0, "", 0, ()))
        decided += _decided(brain, at)
        brain.learn(e.Stopped(at, name, 6, "asked"))
        decided += _decided(brain, at)
    assert [one.node for one in decided if isinstance(one, d.Stop)] == ["node-0", "node-1"]
    assert [one.end for one in decided if isinstance(one, d.EndJob)] == [d.JobEnd.CANCELLED]


def test_in_another_allocation_the_next_attempt_begins_at_once(tmp_path: Path) -> None:
    job = _without_journal(tmp_path)
    slurm = PlannedSlurm((), True, "TERM", 30.0)
    plan = dataclasses.replace(Job(job).plan(), nodes=(), slurm=slurm, pool=PlannedPool(2, 1, 0, 0))
    brain, at = _salvaged(plan, job, is_over=True)
    brain.learn(e.AllocationBegan(at, "9.0"))
    brain.learn(dataclasses.replace(planned(plan, at), nodes=(e.NodePlan("n0", ()), e.NodePlan("n1", ()))))
    brain.learn(SAVED)
    brain.learn(e.ResumeRequested(at, 1, 1))
    begun = [one for one in _decided(brain, at) if isinstance(one, d.BeginAttempt)]
    assert [(one.attempt, one.resume) for one in begun] == [(7, d.Checkpoint(jobs.CKPT, 20, 1))]


def _without_journal(tmp_path: Path) -> JobDir:
    job = folders.make(tmp_path, jobs.submitted())
    for path in (job.journal, job.state):
        path.unlink()
    return job
