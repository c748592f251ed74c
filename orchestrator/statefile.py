"""What did the supervisor last say of its job? The status file of a job folder: its words, and how old they are by now.

It is the same object as one of `orch status --json`. Nothing of the brain is needed to read it, so that `orch status`
is quick.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, TypeAlias

from orchestrator.errors import ClusterError
from orchestrator.wire.paths import JobDir

Json: TypeAlias = dict[str, Any]

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
"""The states that a job ends in."""

OF_SILENCE = ("supervisor", "full_disk", "written_s")
"""The keys that tell how long nothing was heard of the supervisor, and why."""

_NEEDED = frozenset((
    "id", "name", "backend", "state", "attempt", "restarts", "step", "steps_per_s", "world_size", "reason",
    "created_at", "started_at", "ended_at", "checkpoint", "nodes", "ranks",
))  # fmt: skip
_OF_NODES = frozenset(("name", "host", "state", "seen_s"))
_OF_RANKS = frozenset(("rank", "node", "pid", "state", "step", "beat_s", "exit"))


def iso(wall_s: float) -> str:
    """Return seconds since 1970 as UTC in ISO 8601, to the millisecond."""
    moment = datetime.datetime.fromtimestamp(wall_s, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def seconds(text: str) -> float:
    """Return what `iso` was given. Raises ValueError."""
    # Not strptime: it loads half a dozen modules.
    return datetime.datetime.fromisoformat(text.removesuffix("Z") + "+00:00").timestamp()


def read(job: JobDir, wall_s: float) -> Json:
    """Return the job's status with its ages as they are at `wall_s`.

    Raises FileNotFoundError when none was written yet, and ClusterError when the file cannot be read.
    """
    fix = "`orch why` reads the journal, and a running job's supervisor writes the file anew"
    try:
        known = json.loads(job.state.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as err:
        raise ClusterError(f"the status file cannot be read: {err.strerror}", str(job.state)) from err
    except ValueError as err:
        raise ClusterError("the status file is damaged", str(job.state), fix) from err
    if not _is_whole(known):
        raise ClusterError("the status file is damaged", str(job.state), fix)
    return refreshed(known, wall_s)


def _is_whole(known: Any) -> bool:
    """Tell whether this is a status as the contract has it, as far as showing it needs."""
    if not isinstance(known, dict) or not known.keys() >= _NEEDED:
        return False
    lists = ((known["nodes"], _OF_NODES), (known["ranks"], _OF_RANKS))
    return all(
        isinstance(held, list) and all(isinstance(one, dict) and one.keys() >= needed for one in held)
        for held, needed in lists
    )


def refreshed(known: Json, wall_s: float) -> Json:
    """Return a status that was written a while ago with its ages as they are now; an ended job's do not grow."""
    written = known.get("written_at")
    if not isinstance(written, str) or known["state"] in ENDED:
        return known
    late_s = max(0.0, wall_s - seconds(written))
    nodes = [{**node, "seen_s": _later(node["seen_s"], late_s)} for node in known["nodes"]]
    ranks = [{**rank, "beat_s": _later(rank["beat_s"], late_s)} for rank in known["ranks"]]
    return {**known, "nodes": nodes, "ranks": ranks, "written_s": round(late_s, 1)}


def _later(age_s: float | None, late_s: float) -> float | None:
    return None if age_s is None else round(age_s + late_s, 1)
