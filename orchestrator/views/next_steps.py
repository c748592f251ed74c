"""What is safe after a failure, and what can be done now, as commands to copy: the end of a post-mortem. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.core.codec import Json
from orchestrator.core.text import counted
from orchestrator.views.cells import Cell, Line, line, short
from orchestrator.views.saves import passed

_PAD = "  "
PASSED_SHOWN = 3
"""How many saves that a restart passes over are named."""

LOOK_RANKS = 4
"""How many of the ranks at fault are in the command that shows their logs."""


def has_culprit(verdict: Json | None) -> bool:
    """Tell whether a verdict says who waits for whom, and is shown in labelled lines."""
    return verdict is not None and bool(verdict.get("culprit") or verdict.get("waiting"))


def next_steps(why: Json, job: str) -> Iterator[Line]:
    """Yield what is safe and what can be done now, as commands to copy; `job`: the job in them."""
    rows = commands(why, job)
    if not rows:
        return
    yield ()
    if why["state"] != "SUCCEEDED" and why["attempts"]:
        yield line(_saved(why))
        for loser in why.get("passed", ())[:PASSED_SHOWN]:
            yield line(
                f"{_PAD}passed over: ", Cell(passed(loser["path"], loser["step"], loser["why"]), "yellow")
            )
    for label, command in rows:
        yield line(f"{_PAD}{label:<8}", Cell(command, "cyan"))


def commands(why: Json, job: str) -> list[tuple[str, str]]:
    """Return what can be done now, each a word for it and the command; `job`: the job in them."""
    return [*_look_closer(why, job), *_go_on(why, job)]


def _saved(why: Json) -> str:
    """Say where the next attempt would start, and what it would have to make again."""
    saved, has_ended = why.get("checkpoint"), why["state"] in ("FAILED", "CANCELLED")
    begins = "orch resume would begin" if has_ended else "a restart begins"
    if misfit := why.get("misfit"):
        return f"a restart is refused: {short(misfit['path'], why.get('dir', ''))} {misfit['why']}"
    if not saved:
        files = counted(len(why.get("offered", ())), "file")
        more = f"; orch checkpoints shows {files} that it could begin from" if why.get("offered") else ""
        return f"there is no checkpoint: {begins} at the beginning{more}"
    path, step = short(saved["path"], why.get("dir", "")), saved["step"]
    if step is None:
        return f"{begins} at {path}"
    made = [attempt["last_step"] for attempt in why["attempts"] if attempt["last_step"] is not None]
    after = made[-1] - step if made else 0
    lost = f"; {after:,} step{'s' if after != 1 else ''} after it would be made again" if after > 0 else ""
    return f"{begins} at step {step:,} ({path}){lost}"


def _look_closer(why: Json, job: str) -> Iterator[tuple[str, str]]:
    judged = [attempt for attempt in why["attempts"] if attempt["verdict"]]
    if not judged or (why["state"] == "CANCELLED" and judged[-1] is not why["attempts"][-1]):
        return
    number, verdict = judged[-1]["attempt"], judged[-1]["verdict"]
    of = f"--attempt {number}"
    if verdict["ranks"]:
        culprits = " ".join(f"--rank {rank}" for rank in verdict["ranks"][:LOOK_RANKS])
        yield "look", f"orch logs {job} {culprits} {of}"
    elif verdict["node"]:
        yield "look", f"orch logs {job} --node {verdict['node']} {of}"
    elif verdict["kind"] == "launch":
        yield "look", f"orch status {job}"  # no host printed anything
    elif verdict["kind"] not in ("time_limit", "preempted"):
        yield "look", f"orch logs {job} {of}"
    if (verdict["kind"] in ("hang", "desync") or has_culprit(verdict)) and why.get("dir"):
        yield "stacks", f"ls {why['dir']}/evidence/attempt-{number:03d}"


def _go_on(why: Json, job: str) -> Iterator[tuple[str, str]]:
    match why["state"]:
        case "SUCCEEDED":
            return
        case "FAILED" | "CANCELLED":
            yield "go on", f"orch resume {job}"
        case _:
            if why.get("suspicion"):
                yield "stacks", f"orch stacks {job}"
                yield "restart", f"orch restart {job}"
            yield "watch", f"orch status --watch {job}"
            yield "stop", f"orch cancel {job}"
