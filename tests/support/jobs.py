"""Jobs that tests look at: a spec without a disk, a plan, and tales as journals have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.brain.fold_events import fold
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, News
from orchestrator.client import post_mortem
from orchestrator.core import observations
from orchestrator.core.checkpoints.checkpoint import FileLocation, StepSource
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import Status
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.journal.job_record import Record
from orchestrator.journal.journal_file import JournalEntry
from orchestrator.spec.load import JobSpec, SpecFile
from orchestrator.submission import planner
from orchestrator.submission.planner import Inventory
from orchestrator.supervisor.status import Now
from orchestrator.supervisor.status import status as job_status
from tests.support import saved_files
from tests.support.frames import frame

ID = "gpt-20261120-224605123-k3"
BEGAN_S = 1_795_000_000.0
"""Submit, in seconds since 1970: 2026-11-18T11:06:40Z."""

MINIMAL: dict[str, Any] = {"name": "gpt", "nodes": 2, "procs_per_node": 2, "entrypoint": "train.py --lr 0.1"}
ROOT = "/home/me/.orch/jobs/" + ID
CKPT = f"{ROOT}/checkpoints/step-20.pt"


def spec_file(**fields: Any) -> SpecFile:
    """Return a job file with these fields over `MINIMAL`, as if it lay in /home/me/work."""
    data = {key: value for key, value in {**MINIMAL, **fields}.items() if value is not None}
    folder = Path("/home/me/work")
    return SpecFile(folder / "job.yaml", "", JobSpec.model_validate(data), folder, folder)


def plan(gpus: Sequence[int] = (), **fields: Any) -> Plan:
    """Return the plan of `spec_file(**fields)` on a machine with these GPUs."""
    there = Inventory("host-1", tuple(gpus), "/usr/bin/python3")
    return planner.plan_job(spec_file(**fields), there, ID, BEGAN_S)


def entries(news: Sequence[News]) -> list[JournalEntry]:
    """Return news as a journal hands them out."""
    return [JournalEntry(n, BEGAN_S + one.at, one.at, "boot", "", 0, one) for n, one in enumerate(news, 1)]


def record(entries: Iterable[JournalEntry]) -> Record:
    """Return what a journal comes to."""
    record = Record()
    for entry in entries:
        record.learn(entry)
    return record


def told(news: Sequence[News], of: Plan | None = None) -> dict[str, Any]:
    """Return the object of `orch why --json`, with the folder that `Job.why` adds."""
    return {**post_mortem.why(of or plan(), record(entries(news))), "dir": ROOT}


def status(news: Sequence[News], at: float = 12.0) -> Status:
    """Return the status of a job of which these news were heard, `at` this time of its clock."""
    facts = Facts()
    for one in news:
        fold(facts, one)
    return replace(job_status(plan(total_steps=1000), facts, moment(at), {}), dir=ROOT)


def moment(job_s: float) -> Now:
    """Return the moment at which the job's clock says this."""
    return Now(job_s, BEGAN_S + job_s)


def planned(of: Plan, at: float = 0.0) -> e.Planned:
    """Return the event that tells the brain of a plan."""
    return e.Planned(at, of.nodes, of.limits, of.pool)


def submitted(at: float = 0.0) -> list[News]:
    """A job that was just submitted, and its first attempt begun."""
    return [
        planned(plan(), at),
        e.SupervisorStarted(at, 4000),
        d.BeginAttempt(at + 0.1, "submitted", 1, None),
    ]


def running(attempt: int, at: float, count: int = 0) -> list[News]:
    """Both nodes up and prepared, all four ranks started, and `count` steps made three seconds later."""
    told: list[News] = []
    for number in (0, 1):
        node = f"node-{number}"
        told += [
            d.Launch(at, "needed", attempt, node),
            e.AgentUp(at + 0.2, node, f"boot-{number}", 0, 0, "127.0.0.1", 0, ()),
            e.FromNode(at + 0.3, node, reports.Prepared(attempt, "127.0.0.1", 29500, ())),
        ]
    for number in (0, 1):
        node, pids = f"node-{number}", (5000 + 2 * number, 5001 + 2 * number)
        told.append(d.To(at + 0.4, "all are ready", node, orders.Start(attempt, "127.0.0.1", 29500, "")))
        told.append(e.FromNode(at + 0.5, node, reports.Started(attempt, pids)))
    return [*told, *(beats(attempt, at + 3, count) if count else [])]


def beats(attempt: int, at: float, count: int) -> list[News]:
    """Every rank has made `count` steps of this attempt."""
    return [
        e.FromNode(
            at,
            f"node-{number}",
            reports.Heartbeat(
                attempt,
                tuple(RankHeartbeat(rank, count, "S", 100, 1.0) for rank in (2 * number, 2 * number + 1)),
            ),
        )
        for number in (0, 1)
    ]


def crash(attempt: int, at: float, count: int, step: int, evidence: str = "") -> list[News]:
    """Rank 1 dies of an exception, is judged, and everything is stopped."""
    where = f"{ROOT}/code/train.py:10 inner"
    traceback = evidence or (
        f'Traceback (most recent call last):\n  File "{ROOT}/code/train.py", line 14, in <module>\n    inner(step)\n'
        f'    ~~~~~^^^^^^\n  File "{ROOT}/code/train.py", line 10, in inner\n    raise RuntimeError("loss is NaN")\n'
        "RuntimeError: loss is NaN\n"
    )
    failure = observations.Failure("RuntimeError", "loss is NaN", traceback, frame(where))
    verdict = d.Verdict(
        d.VerdictKind.CRASH, (1,), "node-0", f"rank 1 on node-0: RuntimeError: loss is NaN at {where}",
        (
            d.Evidence("rank 1 on node-0 (pid 5001) exited with code 1"),
            d.Evidence(traceback, d.EvidenceKind.OUTPUT if evidence else d.EvidenceKind.TRACEBACK),
        ), d.FailureSignature(d.VerdictKind.CRASH), step, at, True,
    )  # fmt: skip
    return [
        e.FromNode(at, "node-0", reports.Exited(attempt, 1, 1, None, count, failure, False, False)),
        d.Judge(at + 0.2, verdict.summary, attempt, verdict),
        *stopped(attempt, at + 0.3),
    ]


def stopped(attempt: int, at: float) -> list[News]:
    """Both nodes were told to stop, and nothing runs on them any more."""
    stops: list[News] = [d.To(at, "stop", f"node-{n}", orders.Stop(attempt, 5.0)) for n in (0, 1)]
    return [*stops, *(e.FromNode(at + 0.4, f"node-{n}", reports.Stopped(attempt, "asked")) for n in (0, 1))]


def saved(at: float, **fields: Any) -> News:
    """Return the news of a whole save of step 20, `CKPT`; `fields` are those that differ."""
    known = {"main": "step-20.pt", "steps": 20, "step": 20, "stated": 20, "step_source": StepSource.STATED}
    place = FileLocation("", f"{ROOT}/checkpoints")
    return e.CheckpointChanged(at, saved_files.saved(**{"number": 1, **known, "locations": (place,), **fields}))


def again(attempt: int, at: float, resume: ResumePoint | None) -> News:
    """Another attempt begins."""
    return d.BeginAttempt(at, "restart after crash", attempt, resume)


def end(attempt: int, at: float, how: d.JobEnd, why: str) -> News:
    """The job ends."""
    return d.EndJob(at, why, attempt, how)


def crashed_once() -> list[News]:
    """One crash at step 23 with a checkpoint of step 20, and an attempt that goes on from there."""
    return [
        *submitted(),
        *running(1, 1.0, 20),
        saved(4.5),
        *beats(1, 5.0, 23),
        *crash(1, 5.5, 23, 23),
        again(2, 7.0, ResumePoint(CKPT, 20, 1)),
        *running(2, 7.1, 5),
    ]
