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


def has_culprit(verdict: Json | None) -> bool:
    """Tell whether a verdict says who waits for whom, and is shown in labelled lines."""
    return verdict is not None and bool(verdict.get("culprit") or verdict.get("waiting"))


def next_steps(why: Json) -> Iterator[Line]:
    """Yield what is safe and what can be done now, as commands to copy."""
    rows = [*_look_closer(why), *_go_on(why)]
    if not rows:
        return
    yield ()
    if why["state"] != "SUCCEEDED" and why["attempts"]:
        yield line(_saved(why))
        for one in why.get("passed", ())[:PASSED_SHOWN]:
            yield line(f"{_PAD}passed over: ", Cell(passed(one["path"], one["step"], one["why"]), "yellow"))
    for label, command in rows:
        yield line(f"{_PAD}{label:<8}", Cell(command, "cyan"))


def _saved(why: Json) -> str:
    """Say where the next attempt would start, and what it would have to make again."""
    saved = why.get("checkpoint")
    if misfit := why.get("misfit"):
        return f"a restart is refused: {short(misfit['path'], why.get('dir', ''))} {misfit['why']}"
    if not saved:
        files = counted(len(why.get("offered", ())), "file")
        more = f"; orch checkpoints shows {files} that it could begin from" if why.get("offered") else ""
        return f"there is no checkpoint: a restart begins at the beginning{more}"
    path, step = short(saved["path"], why.get("dir", "")), saved["step"]
    if step is None:
        return f"a restart begins at {path}"
    made = [one["last_step"] for one in why["attempts"] if one["last_step"] is not None]
    after = made[-1] - step if made else 0
    lost = f"; {after:,} step{'s' if after != 1 else ''} after it would be made again" if after > 0 else ""
    return f"a restart begins at step {step:,} ({path}){lost}"


def _look_closer(why: Json) -> Iterator[tuple[str, str]]:
    judged = [attempt for attempt in why["attempts"] if attempt["verdict"]]
    if not judged:
        return
    number, verdict = judged[-1]["attempt"], judged[-1]["verdict"]
    of = f"--attempt {number}"
    if verdict["ranks"]:
        yield "look", f"orch logs {why['id']} --rank {verdict['ranks'][0]} {of}"
    elif verdict["node"]:
        yield "look", f"orch logs {why['id']} --node {verdict['node']} {of}"
    elif verdict["kind"] == "launch":
        yield "look", f"orch status {why['id']}"  # no host printed anything
    elif verdict["kind"] not in ("time_limit", "preempted"):
        yield "look", f"orch logs {why['id']} {of}"
    if (verdict["kind"] in ("hang", "desync") or has_culprit(verdict)) and why.get("dir"):
        yield "stacks", f"ls {why['dir']}/evidence/attempt-{number:03d}"


def _go_on(why: Json) -> Iterator[tuple[str, str]]:
    match why["state"]:
        case "SUCCEEDED":
            return
        case "FAILED" | "CANCELLED":
            yield "go on", f"orch resume {why['id']}"
        case _:
            if why.get("suspicion"):
                yield "stacks", f"orch stacks {why['id']}"
                yield "restart", f"orch restart {why['id']}"
            yield "watch", f"orch status --watch {why['id']}"
            yield "stop", f"orch cancel {why['id']}"
