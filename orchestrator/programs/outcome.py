"""Outcome of `orch wait`, as JSON and text: the job's state, the culprits, and the next commands."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.codec import Json
from orchestrator.programs import waiting
from orchestrator.programs.waiting import WaitResult
from orchestrator.views.cells import STYLES, Cell, Line, line, shorten_paths
from orchestrator.views.next_steps import commands
from orchestrator.views.status import notice_lines


def wait_for_outcome(job: Job, timeout_s: float | None) -> Json:
    """Wait for a job, see `waiting.wait`, and return what `orch wait --json` prints. Raises OrchError."""
    waited = waiting.wait(job, timeout_s)
    return outcome(waited, job.why(), job.reference)


def outcome(waited: WaitResult, why: Json, reference: str) -> Json:
    """Return what `orch wait --json` prints. `why`: the post-mortem; `reference`: the job's name in commands."""
    status, need, saved = waited.status, waited.need, why.get("checkpoint")
    verdict = _verdict(why) if status.state in ("FAILED", "CANCELLED") else None
    return {
        "id": status.id,
        "name": status.name,
        "dir": status.dir,
        "state": status.state,
        "reason": status.reason,
        "ended": waited.has_ended,
        "needs": {"kind": need.kind.value, "what": need.what, "fix": need.fix} if need else None,
        "attempt": status.attempt,
        "restarts": status.restarts,
        "step": status.step,
        "verdict": verdict,
        "culprits": _culprits(waited, verdict),
        "notices": list(status.notices),
        "checkpoint": {"path": saved["path"], "step": saved["step"]} if saved else None,
        "next": [{"label": label, "command": command} for label, command in commands(why, reference)],
    }


def lines(outcome: Json) -> list[Line]:
    """Return the outcome as lines of text."""
    state, folder = outcome["state"], outcome["dir"]
    step = f"  step {outcome['step']:,}" if outcome["step"] is not None else ""
    shown = [line(Cell(outcome["id"], "bold"), "  ", Cell(state, STYLES.get(state, "")), step)]
    if need := outcome["needs"]:
        shown.append(line("needs you   ", Cell(shorten_paths(need["what"], folder), "yellow")))
        shown += [line(f"            fix: {need['fix']}")] if need["fix"] else []
    elif not outcome["ended"]:
        shown.append(line("            still running: the wait timed out"))
    elif outcome["verdict"]:
        shown.append(line(Cell(shorten_paths(outcome["verdict"]["head"], folder), "red")))
    elif outcome["reason"]:
        shown.append(line(shorten_paths(outcome["reason"], folder)))
    shown += [one for notice in outcome["notices"] for one in notice_lines(notice, folder)]
    if saved := outcome["checkpoint"]:
        step = f"step {saved['step']:,}, " if saved["step"] is not None else ""
        shown.append(line(f"checkpoint  {step}{shorten_paths(saved['path'], folder)}"))
    return [
        *shown,
        *(line(f"  {step['label']:<8}", Cell(step["command"], "cyan")) for step in outcome["next"]),
    ]


def _verdict(why: Json) -> Json | None:
    """Return a short form of the last attempt's verdict; None if the job ended for another reason."""
    verdict = why["attempts"][-1]["verdict"] if why["attempts"] else None
    if verdict is None:
        return None
    keys = ("kind", "summary", "head", "culprit", "waiting", "ranks", "node", "step", "frame")
    _, cause, *places = verdict["signature"]
    return {**{key: verdict[key] for key in keys}, "cause": cause, "places": places}


def _culprits(waited: WaitResult, verdict: Json | None) -> list[Json]:
    """Return the ranks at fault, each with its host and the source line where it failed or is stuck."""
    status, suspected = waited.status, waited.status.suspected
    if verdict is not None:
        ranks: Sequence[int] = verdict["ranks"]
        node, frame = verdict["node"], verdict["frame"] or {}
    elif waited.need is not None and suspected is not None:
        ranks, node, frame = suspected.ranks, suspected.node, codec.pack(suspected.frame) or {}
    else:
        return []
    hosts = {one.name: one.host for one in status.nodes}
    nodes = {rank: one.name for one in status.nodes for rank in one.ranks}
    return [
        {
            "rank": rank,
            "node": node or nodes.get(rank, ""),
            "host": hosts.get(node or nodes.get(rank, ""), ""),
            "file": frame.get("file"),
            "line": frame.get("line"),
            "function": frame.get("function") or None,
        }
        for rank in ranks
    ]
