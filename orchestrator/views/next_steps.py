"""Last lines of a post-mortem: where a resume would start, and the next commands, ready to copy. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.core.codec import Json
from orchestrator.core.text import format_count
from orchestrator.views.cells import Cell, Line, line, shorten_paths
from orchestrator.views.checkpoint_table import passed_text

_PAD = "  "
PASSED_SHOWN = 3
"""How many checkpoints that a restart skips are named."""

LOG_RANKS_MAX = 4
"""How many of the ranks at fault are in the `orch logs` command."""


def has_culprit(verdict: Json | None) -> bool:
    """Return whether a verdict names culprit and waiting ranks, and so is shown in labelled lines."""
    return verdict is not None and bool(verdict.get("culprit") or verdict.get("waiting"))


def next_steps(why: Json, job: str) -> Iterator[Line]:
    """Yield where a resume would start and the next commands; `job`: the job's name in them."""
    rows = commands(why, job)
    if not rows:
        return
    yield ()
    if why["state"] != "SUCCEEDED" and why["attempts"]:
        yield line(_resume_text(why))
        for loser in why.get("passed", ())[:PASSED_SHOWN]:
            yield line(f"{_PAD}skipped: ", Cell(passed_text(loser["path"], loser["step"], loser["why"]), "yellow"))
    for label, command in rows:
        yield line(f"{_PAD}{label:<8}", Cell(command, "cyan"))


def commands(why: Json, job: str) -> list[tuple[str, str]]:
    """Return the next commands, each with a label; `job`: the job's name in them."""
    return [*_inspect_commands(why, job), *_job_commands(why, job)]


def _resume_text(why: Json) -> str:
    """Say where the next attempt would start, and how many steps it would repeat."""
    saved, has_ended = why.get("checkpoint"), why["state"] in ("FAILED", "CANCELLED")
    code = ", with the code as submitted," if why["state"] == "FAILED" else ""
    who = f"orch resume{code}" if has_ended else "a restart"
    if misfit := why.get("misfit"):
        return f"a restart is refused: {shorten_paths(misfit['path'], why.get('dir', ''))} {misfit['why']}"
    if not saved:
        files = format_count(len(why.get("offered", ())), "file")
        more = f"; orch checkpoints shows {files} that it could start from" if why.get("offered") else ""
        return f"there is no checkpoint: {who} would start from the beginning{more}"
    path, step = shorten_paths(saved["path"], why.get("dir", "")), saved["step"]
    if step is None:
        return f"{who} would continue from {path}"
    made = [attempt["last_step"] for attempt in why["attempts"] if attempt["last_step"] is not None]
    after = made[-1] - step if made else 0
    lost = f" and repeat {after:,} step{'s' if after != 1 else ''}" if after > 0 else ""
    return f"{who} would continue at step {step:,} ({path}){lost}"


def _inspect_commands(why: Json, job: str) -> Iterator[tuple[str, str]]:
    judged = [attempt for attempt in why["attempts"] if attempt["verdict"]]
    if not judged or (why["state"] == "CANCELLED" and judged[-1] is not why["attempts"][-1]):
        return
    number, verdict = judged[-1]["attempt"], judged[-1]["verdict"]
    attempt_option = f"--attempt {number}"
    if verdict["ranks"]:
        culprits = " ".join(f"--rank {rank}" for rank in verdict["ranks"][:LOG_RANKS_MAX])
        yield "logs", f"orch logs {job} {culprits} {attempt_option}"
    elif verdict["node"]:
        yield "logs", f"orch logs {job} --node {verdict['node']} {attempt_option}"
    elif verdict["kind"] == "launch":
        yield "status", f"orch status {job}"  # no host printed anything
    elif verdict["kind"] not in ("time_limit", "preempted"):
        yield "logs", f"orch logs {job} {attempt_option}"
    if (verdict["kind"] in ("hang", "desync") or has_culprit(verdict)) and why.get("dir"):
        yield "stacks", f"ls {why['dir']}/evidence/attempt-{number:03d}"


def _job_commands(why: Json, job: str) -> Iterator[tuple[str, str]]:
    match why["state"]:
        case "SUCCEEDED":
            return
        case "FAILED" | "CANCELLED":
            yield "resume", f"orch resume {job}"
        case _:
            if why.get("suspicion"):
                yield "stacks", f"orch stacks {job}"
                yield "restart", f"orch restart {job}"
            yield "watch", f"orch status --watch {job}"
            yield "cancel", f"orch cancel {job}"
