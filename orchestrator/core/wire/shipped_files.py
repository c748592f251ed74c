"""Files of a node that an agent sends to the supervisor: only those that are append-only.

Both ends go by this list: an agent sends the files named here, and the supervisor accepts no others. The ranks of a node
are known from the folders that the agent makes for them, `nodes/NODE/attempt-NNN/rank-NNNNN`; the supervisor makes the
same ones in the job folder.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from orchestrator.core.jobdir.layout import JobDir, attempt_name, attempt_of, rank_name

ATTEMPTS_MAX = 64
"""For how many attempts back a connection searches for files: their sizes in the job folder go into one message."""

_RANK_DIR = re.compile(r"rank-([0-9]{5,9})")
_RANK_FILE = re.compile(
    r"(?:logs/attempt-([0-9]{3,9})/rank-([0-9]{5,9})\.(?:log|idx)"
    r"|evidence/attempt-([0-9]{3,9})/rank-([0-9]{5,9})-(?:stacks\.txt|flight\.jsonl|nccl\.log))"
)


def list_attempts(job: JobDir, node: str) -> list[int]:
    """Return the latest attempts that have left files of the node here, in order."""
    numbers = {attempt_of(Path(name)) for folder in (job.node(node), job.logs) for name in _names(folder)}
    return sorted(attempt for attempt in numbers if attempt is not None)[-ATTEMPTS_MAX:]


def list_files(job: JobDir, node: str, attempt: int) -> list[str]:
    """Return the paths below the job folder that may exist of the node for one attempt."""
    logs, evidence = f"logs/{attempt_name(attempt)}", f"evidence/{attempt_name(attempt)}"
    paths = [f"{logs}/node-{node}.log", f"{evidence}/node-{node}-gpus.txt"]
    for rank in _ranks(job, node, attempt):
        name = rank_name(rank)
        paths += [f"{logs}/{name}.log", f"{logs}/{name}.idx"]
        paths += [f"{evidence}/{name}-{what}" for what in ("stacks.txt", "flight.jsonl", "nccl.log")]
    return paths


def agent_log(node: str) -> str:
    """Return the path of the output of the node's agent and agent monitor, below the job folder."""
    return f"nodes/{node}/agent.log"


def rank_of(path: str) -> tuple[int, int] | None:
    """Return attempt and rank of a rank's file, None for another path."""
    match = _RANK_FILE.fullmatch(path)
    if match is None:
        return None
    attempt, rank = (number for number in match.groups() if number is not None)
    return int(attempt), int(rank)


def may_send(node: str, path: str) -> bool:
    """Tell whether this node may send the file `path`, which leads nowhere else."""
    return rank_of(path) is not None or _node_pattern(node).fullmatch(path) is not None


@functools.cache
def _node_pattern(node: str) -> re.Pattern[str]:
    name = re.escape(node)
    number = "attempt-[0-9]{3,9}"
    return re.compile(
        rf"logs/{number}/node-{name}\.log|evidence/{number}/node-{name}-gpus\.txt|nodes/{name}/agent\.log"
    )


def _ranks(job: JobDir, node: str, attempt: int) -> list[int]:
    matches = map(_RANK_DIR.fullmatch, _names(job.node(node) / attempt_name(attempt)))
    return sorted(int(match.group(1)) for match in matches if match is not None)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 -- once a second for each rank's folder
    except OSError:
        return []
