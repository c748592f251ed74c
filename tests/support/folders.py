"""Job folders as a supervisor leaves them, without one: plan, journal, status, logs, secrets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import News
from orchestrator.core import codec
from orchestrator.core.jobdir import home, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.journal.journal_file import Journal
from orchestrator.supervisor import status as status_object
from tests.support import jobs

SECRET = "hf_0123456789abcdef"


def make(place: Path, news: Sequence[News], name: str = "gpt", at_s: float = jobs.BEGAN_S) -> JobDir:
    """Make a job's folder in the home `place`, with this tale in its journal; it has ended if the tale has."""
    taken = home.list_ids(place)  # two of the same millisecond may get the same letters
    job = JobDir(place / "jobs" / next(one for one in iter(lambda: home.new_id(name, at_s), "") if one not in taken))
    plan = jobs.plan(name=name)
    for folder in (job.root, job.code, job.checkpoints, job.logs, job.requests, job.scripts):
        folder.mkdir(parents=True)
    job.secrets.mkdir(mode=0o700)
    (job.secrets / "secrets.json").write_text(json.dumps({"HF_TOKEN": SECRET}))
    job.spec.write_text("name: gpt\nnodes: 2\nprocs_per_node: 2\nentrypoint: train.py\n")
    (job.code / "train.py").write_text("print('hi')\n")
    job.overrides.write_text("[]")
    job.plan.write_text(codec.dumps(_renamed(plan, job.id)))
    journal = Journal(job.journal, "boot", 0)
    brain = Brain()
    for one in news:
        journal.write(one)
        brain.learn(one)
    journal.close()
    last_s = max([one.at for one in news], default=0.0)
    status = status_object.status(_renamed(plan, job.id), brain.facts, jobs.moment(last_s + 1), {})
    status_file.write(job, status, durable=False)
    if brain.facts.end is not None:
        job.ended.touch()
    return job


def _renamed(plan: Plan, job_id: str) -> Plan:
    return codec.unpack(Plan, {**codec.pack(plan), "id": job_id})


def succeeded(place: Path, name: str = "gpt", at_s: float = jobs.BEGAN_S) -> JobDir:
    """Make a job that has succeeded."""
    news = [*jobs.submitted(), *jobs.running(1, 1.0, 7)]
    return make(place, [*news, jobs.end(1, 9.0, d.JobEnd.SUCCEEDED, "every rank exited with code 0")], name, at_s)


def failed(place: Path, name: str = "gpt", at_s: float = jobs.BEGAN_S) -> JobDir:
    """Make a job whose rank 1 crashed, with the logs of it."""
    news = [*jobs.submitted(), *jobs.running(1, 1.0, 7), *jobs.crash(1, 5.0, 8, 8)]
    job = make(place, [*news, jobs.end(1, 6.0, d.JobEnd.FAILED, "crash: rank 1")], name, at_s)
    write_log(job, 0, f"rank 0 logs in with {SECRET}\n")
    write_log(job, 1, "RuntimeError: loss is NaN\n")
    return job


def write_log(job: JobDir, rank: int, text: str, attempt: int = 1) -> None:
    """Write what a rank printed."""
    job.attempt_logs(attempt).mkdir(parents=True, exist_ok=True)
    job.rank_log(attempt, rank).write_text(text)
