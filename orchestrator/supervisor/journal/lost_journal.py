"""Traces of a job whose journal is lost: what its folder shows of it, and a journal rebuilt from that alone.

Rules: a supervisor never begins from nothing where something was done before: it would write over checkpoints and
append to old logs. The journal that is made here has one attempt, the latest that has left anything; its nodes are
stopped like those of any other attempt before the next begins. The rest of the old journal is kept in a file of its
own.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core import codec
from orchestrator.core.checkpoints import ledger
from orchestrator.core.checkpoints.save import SaveState
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import sync_folder
from orchestrator.core.jobdir.layout import JobDir, attempt_of
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.requests import number_of
from orchestrator.core.text import counted
from orchestrator.supervisor.journal import facts_file, planned
from orchestrator.supervisor.journal.journal_file import Journal, JournalError

_UNKNOWN = "what happened up to attempt"
_ATTEMPT = re.compile(rb'"attempt":\s?(\d{1,9})\b')


@dataclass(frozen=True, slots=True)
class Traces:
    """What is known without the journal. `how`: what happened to it; `checkpoints`: oldest first."""

    how: str
    attempt: int
    checkpoints: tuple[str, ...]


def lost(job: JobDir, plan: Plan) -> Traces | None:
    """Return the traces of a job whose journal is gone, empty or cut; None if it is whole, or if nothing was done
    yet."""
    how = _lack(job)
    if not how:
        return None
    traces = Traces(how, max(_attempts(job), default=0), _checkpoints(job))
    own = [name for name in traces.checkpoints if not name.startswith("/")]  # elsewhere may be others'
    return traces if traces.attempt or own or job.ended.exists() else None


def require_journal(job: JobDir, plan: Plan) -> None:
    """Raise JournalError where `lost` finds anything."""
    if traces := lost(job, plan):
        raise refusal(job, traces)


def lost_or_damaged(job: JobDir, plan: Plan) -> Traces | None:
    """Return the traces also of a job whose journal cannot be read to its end, ends before what the folder shows, or
    was rebuilt from traces without a checkpoint: unless the user names one, the job would begin from nothing."""
    traces = lost(job, plan)
    if traces is not None:
        return traces
    shown, has_ended = max(_in_folders(job), default=0), job.ended.exists()  # first, since a journal grows
    try:
        record = facts_file.read(job)
        last = record.attempts[-1] if record.attempts else None
        if shown > (last.attempt if last else 0):
            how = f"the journal was cut: it tells of attempts up to {last.attempt if last else 0}"
        elif shown and has_ended and record.facts.end is None:
            how = "the journal was cut: it does not tell of the job's end"
        elif last and last.why.startswith(_UNKNOWN) and record.facts.checkpoint is None:
            how = "the journal was lost, and no attempt has begun since"
        else:
            return None
    except JournalError as err:
        how = f"{err.where}: {err.what}"
    return Traces(how, max(_attempts(job), default=0), _checkpoints(job))


def refusal(job: JobDir, traces: Traces) -> JournalError:
    """Return the error that says why the job cannot go on by itself, what is known of it, and what to do."""
    newest = f" (the newest: {traces.checkpoints[-1]})" if traces.checkpoints else ""
    remains = f"attempts up to {traces.attempt}, and {counted(len(traces.checkpoints), 'checkpoint')}{newest}"
    what = f"{traces.how}; the folder shows {remains}; to begin from nothing would write over that"
    fix = f"restore the file from a backup, or orch resume {job.id} --from CHECKPOINT goes on as attempt {_latest(traces) + 1}"
    stop = "" if job.ended.exists() else f"; orch cancel {job.id} stops what may still run"
    return JournalError(what, str(job.journal), fix + stop)


def rewrite(job: JobDir, plan: Plan, traces: Traces, *, is_over: bool) -> None:
    """Replace the journal by one that is made of the traces, durably. Only for the holder of the job's lock.

    `is_over`: the new journal ends with the job's end, which a resume may follow; else with a running attempt, which a
    cancel may stop.
    """
    part = job.journal.with_suffix(".part")
    part.unlink(missing_ok=True)
    journal = Journal(part, planned.machine(), 0)
    for news in _news(job, plan, traces, is_over=is_over):
        journal.write(news)
    journal.close()
    if job.journal.exists():
        number = len(list(job.root.glob("journal.*.damaged"))) + 1
        job.journal.replace(job.root / f"journal.{number}.damaged")
    part.replace(job.journal)
    job.facts.unlink(missing_ok=True)  # they are of a longer one
    sync_folder(job.root)


def _lack(job: JobDir) -> str:
    """Return what the journal lacks; empty if it is whole. A torn last line, which a crash leaves, is not a lack."""
    recorded_bytes = facts_file.place(job)  # read first, since a journal that is written grows
    try:
        with os.fdopen(ownership.open_regular(job.journal), "rb") as file:
            if not file.readline().endswith(b"\n"):
                return "the journal is empty"
            size_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return "the journal is gone"
    is_cut = size_bytes < recorded_bytes
    return (
        f"the journal was cut: it has {size_bytes} bytes, and {job.facts.name} knows of {recorded_bytes}"
        if is_cut
        else ""
    )


def _news(job: JobDir, plan: Plan, traces: Traces, *, is_over: bool) -> Iterator[News]:
    at, number = max(0.0, time.time() - plan.created_at), _latest(traces)
    why = f"{_UNKNOWN} {number} is not known: {traces.how}"
    yield planned.planned(plan, at)
    last_request = max((number_of(path) for path in job.requests.glob("*.json")), default=0)
    yield e.RestartRequested(at, last_request)  # earlier requests were carried out, or are forgotten
    yield d.BeginAttempt(at, why, number, None)
    for node in plan.nodes:  # it may run on any of them
        yield d.Start(at, why, number, node.name, "", 0, "", None)
    if is_over:
        yield d.Finish(at, why, number)
        yield d.EndJob(at, why, number, d.JobEnd.FAILED)


def _latest(traces: Traces) -> int:
    return max(1, traces.attempt)


def _attempts(job: JobDir) -> Iterator[int]:
    """Yield the attempts that have left anything: folders, the last status, and what there is of the journal."""
    yield from _in_folders(job)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with os.fdopen(ownership.open_regular(job.state), "rb") as file:
            status = codec.loads_plain(file.read())
        yield int(status["attempt"]) if status["started_at"] is not None else 0
    for path in (job.journal, job.facts):
        with contextlib.suppress(OSError), os.fdopen(ownership.open_regular(path), "rb") as file:
            yield from (int(number) for line in file for number in _ATTEMPT.findall(line))


def _in_folders(job: JobDir) -> Iterator[int]:
    for pattern in ("logs/attempt-*", "evidence/attempt-*", "nodes/*/attempt-*"):
        yield from (number for path in job.root.glob(pattern) if (number := attempt_of(path)) is not None)


def _checkpoints(job: JobDir) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        saves, _ = ledger.read(job.root, job.ledger)
        return tuple(save.main for save in saves.values() if save.state is SaveState.WHOLE)
    return ()
