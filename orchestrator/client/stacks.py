"""Live stacks of a running job's ranks: a request to its supervisor, which asks every node; the job is not changed.

A numbered request goes into the job's folder; the journal shows when the supervisor read it, which nodes it asked, and
their answers. Where one inspection leaves a rank's activity unknown, a second shows what has moved.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import requests
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import ENDED, Status
from orchestrator.core.wire.orders import Inspect
from orchestrator.core.wire.reports import Inspected
from orchestrator.journal import journal_file

ANSWER_S_MAX = 15.0
"""How long the nodes may take to answer an inspection."""

APART_S = 1.0
"""The time between two inspections: a working rank has moved by then."""

POLL_S = 0.05

NODES_NAMED_MAX = 8

_ALIVE = ("running", "stopped", "traced", "zombie", "disk wait", "dead")
"""The states of a rank that has a process, as the status names them."""


@dataclass(frozen=True, slots=True)
class InspectionAnswers:
    """The answers to one inspection, and the nodes that were asked for one."""

    attempt: int
    asked: tuple[str, ...]
    inspected: tuple[tuple[str, Inspected], ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """The nodes that have not answered."""
        return tuple(node for node in self.asked if node not in dict(self.inspected))


def inspect_stacks(job: JobDir, status: Status, answer_s_max: float = ANSWER_S_MAX) -> Json:
    """Return what `orch stacks --json` prints.

    Raises UserError when no rank of the job runs, and ClusterError when no node answers.
    """
    _refuse_if_nothing_runs(status)
    answers, inspections, began_s = _inspect(job, answer_s_max), 1, time.monotonic()
    ranks = [rank for _, answer in answers.inspected for rank in answer.ranks]
    if any(rank.activity is observations.Activity.UNKNOWN and rank.pid for rank in ranks):
        time.sleep(APART_S)
        answers, inspections = _inspect(job, answer_s_max), 2
    shown = [rank_json(rank, node) for node, answer in answers.inspected for rank in answer.ranks]
    return {
        "id": status.id,
        "name": status.name,
        "state": status.state,
        "attempt": answers.attempt,
        "step": status.step,
        "dir": str(job.root),
        "looks": inspections,
        "apart_s": round(time.monotonic() - began_s, 1) if inspections > 1 else None,
        "ranks": sorted(shown, key=lambda rank: int(rank["rank"])),
        "unanswered": list(answers.missing),
        "pages": str(job.evidence(answers.attempt)),
    }


def _refuse_if_nothing_runs(status: Status) -> None:
    state = status.state
    if state in ENDED:
        fix = f"orch why {status.id} explains how it ended, with the stacks of a hang"
        raise UserError(f"the job has ended: {state}, so there are no stacks", status.id, fix)
    if not any(rank.state in _ALIVE for rank in status.ranks):
        why = f" ({status.reason})" if status.reason else ""
        fix = f"orch status --watch {status.id} shows when they start"
        raise UserError(f"no rank is running: the job is {state}{why}", status.id, fix)


def _inspect(job: JobDir, answer_s_max: float) -> InspectionAnswers:
    """Request one inspection and return the answers. Raises ClusterError when there is none in time."""
    offset = job.journal.stat().st_size
    number = requests.send(job.requests, "look")
    deadline_s = time.monotonic() + answer_s_max
    entries: list[journal_file.JournalEntry] = []
    while True:
        newest, offset = journal_file.read_tail(job.journal, offset)
        entries += newest
        answers = _find_answers(entries, number)
        if answers is not None and answers.inspected and not answers.missing:
            return answers
        if time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    if answers is not None and answers.inspected:
        return answers
    raise _no_answer_error(job, entries, number, answers, f"within {answer_s_max:g} s")


def _find_answers(entries: list[journal_file.JournalEntry], number: int) -> InspectionAnswers | None:
    """Return the answers to request `number`: to the first inspection ordered after the supervisor read it."""
    news = [entry.news for entry in entries]
    start = next((at for at, new in enumerate(news) if _is_request(new, number)), len(news))
    orders = [new for new in news[start:] if isinstance(new, d.To)]
    given = next((new.order for new in orders if isinstance(new.order, Inspect)), None)
    if given is None:
        return None
    attempt, inspection = given.attempt, given.inspection
    asked = [new.node for new in orders if new.order == given]
    inspected = [
        (new.node, new.report)
        for new in news[start:]
        if isinstance(new, e.FromNode)
        and isinstance(new.report, Inspected)
        and (new.report.attempt, new.report.inspection) == (attempt, inspection)
    ]
    return InspectionAnswers(attempt, tuple(dict.fromkeys(asked)), tuple(inspected))


def _is_request(news: object, number: int) -> bool:
    return isinstance(news, e.InspectRequested) and news.request >= number


def _no_answer_error(
    job: JobDir,
    entries: list[journal_file.JournalEntry],
    number: int,
    answers: InspectionAnswers | None,
    when: str,
) -> ClusterError:
    """Return the error for a missing answer, by how far the request came."""
    if answers is not None:
        more = len(answers.missing) - NODES_NAMED_MAX
        names = ", ".join(answers.missing[:NODES_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        what = f"{names} did not answer {when}"
        return ClusterError(what, job.id, f"orch status {job.id} shows the state of its nodes")
    if any(_is_request(entry.news, number) for entry in entries):
        what = "no rank was left to inspect"
        return ClusterError(what, job.id, f"orch status {job.id} or orch why {job.id} shows what happened meanwhile")
    what = f"its supervisor did not read the request {when}"
    return ClusterError(what, job.id, f"orch status {job.id} shows whether it is alive; see {job.supervisor_log}")


def rank_json(rank: observations.RankInspection, node: str) -> Json:
    """Return the inspection of a rank as `orch stacks --json` prints it."""
    return {
        "rank": rank.rank,
        "node": node,
        "pid": rank.pid or None,
        "state": rank.state,
        "activity": rank.activity.value,
        "still_s": round(rank.still_s, 1),
        "where": str(rank.where or ""),
        "line": rank.line,
        "why": rank.why,
        "phase": rank.phase,
        "stack": list(rank.stack),
        "inside": rank.inside,
        "collectives": [
            {
                "group": collective.group,
                "label": collective.label,
                "ranks": list(collective.ranks),
                "number": collective.number,
                "what": collective.what,
                "shape": collective.shape,
                "entered_s": round(collective.entered_s, 1),
            }
            for collective in rank.collectives
        ],
        "gpu_use": rank.gpu_use,
        "unavailable": list(rank.unavailable),
    }
