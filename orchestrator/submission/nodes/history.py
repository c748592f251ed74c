"""Memory of hosts in the job home: what jobs have seen of them, from their own files, and the last check of each host.

A job's journal is written by its supervisor alone, and holds its verdicts. `nodes/HOST.json` is replaced whole by `orch
check` and `orch nodes --forget`. What cannot be read is passed over: a memory must not keep a job from starting.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.brain.model.decisions import Kind
from orchestrator.core import codec
from orchestrator.core.errors import OrchError
from orchestrator.core.jobdir import home, ownership, status_file
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.submission.nodes.failures import FAILURE_S_MAX, Checked, Failure, latest

JOBS_MAX = 50
"""How many jobs are read, the latest first."""

SEEN_S_MAX = 30 * 24 * 3600.0
"""Jobs that have written nothing for so long are passed over."""

_LOST = b'"node_lost"'


@dataclass(frozen=True, slots=True)
class Host:
    """A host as jobs and checks have last seen it; `failure`: the last one that still counts."""

    name: str
    seen_at: float
    state: str
    job: str
    failure: Failure | None


def failures(folder: Path, wall_s: float) -> dict[str, Failure]:
    """Return the failures of hosts that still count, from a job home."""
    lost = [failure for job in _jobs(folder, wall_s, FAILURE_S_MAX) for failure in _lost(job)]
    return latest(lost, _checks(folder), wall_s)


def hosts(folder: Path, wall_s: float) -> list[Host]:
    """Return all hosts that jobs and checks of a job home have seen, by name."""
    failed, checks = failures(folder, wall_s), _checks(folder)
    found: dict[str, Host] = {}
    for check in checks.values():
        if check.at:
            state = "failed its check" if check.fault else "passed its check"
            found[check.host] = Host(check.host, check.at, state, "", failed.get(check.host))
    for job in _jobs(folder, wall_s, SEEN_S_MAX):
        for host in _seen(job, failed, wall_s):
            if host.name not in found or found[host.name].seen_at < host.seen_at:
                found[host.name] = host
    return sorted(found.values(), key=lambda host: host.name)


def as_json(host: Host) -> codec.Json:
    """Return a host as `orch nodes --json` prints it."""
    failure = host.failure
    return {
        "host": host.name,
        "state": host.state,
        "seen_at": status_file.iso(host.seen_at),
        "job": host.job or None,
        "failed_at": status_file.iso(failure.at) if failure else None,
        "failed_job": (failure.job or None) if failure else None,
        "why": failure.why if failure else None,
    }


def record_checks(folder: Path, faults: Mapping[str, str], wall_s: float) -> None:
    """Keep the results of a check, by host: the fault, empty for one that passed. Raises OSError."""
    known = _checks(folder)
    for host, fault in faults.items():
        old = known.get(host, Checked(host))
        _write(folder, replace(old, at=wall_s, fault=fault))


def forget(folder: Path, host: str, wall_s: float) -> None:
    """Let no failure of a host count any longer. Raises OSError."""
    _write(folder, replace(_checks(folder).get(host, Checked(host)), forgotten_at=wall_s))


def _write(folder: Path, check: Checked) -> None:
    place = folder / "nodes"
    place.mkdir(parents=True, exist_ok=True)
    name = urllib.parse.quote(check.host, safe="")
    replace_text(place / f"{name}.json", codec.dumps(check) + "\n")


def _checks(folder: Path) -> dict[str, Checked]:
    found = {}
    for path in sorted((folder / "nodes").glob("*.json")):
        with contextlib.suppress(OSError, codec.CodecError):
            check = codec.loads(Checked, ownership.read_regular(path))
            found[check.host] = check
    return found


def _jobs(folder: Path, wall_s: float, age_s_max: float) -> list[JobDir]:
    """Return the jobs that have written their journal last, the latest first."""
    dated = []
    for job in home.jobs(folder):
        with contextlib.suppress(OSError):
            dated.append((job.journal.stat().st_mtime, job))
    recent = [(at, job) for at, job in dated if wall_s - at < age_s_max and home.is_ours(job)]
    return [job for _, job in sorted(recent, key=lambda one: one[0], reverse=True)[:JOBS_MAX]]


def _lost(job: JobDir) -> Iterator[Failure]:
    """Yield the verdicts `node_lost` of a job. Most journals hold none, and are searched but not read."""
    from orchestrator.supervisor.journal import facts_file

    try:
        with (
            os.fdopen(ownership.open_regular(job.journal), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            if text.find(_LOST) < 0:
                return
        record = facts_file.read(job)
    except (OSError, ValueError, OrchError):
        return
    for attempt in record.attempts:
        verdict = attempt.verdict
        if verdict is not None and verdict.kind is Kind.NODE_LOST and verdict.node:
            at = attempt.ended_wall_s or attempt.began_wall_s
            yield Failure(verdict.node, at, f"{verdict.kind.value}: {verdict.summary}", job.id)


def _seen(job: JobDir, failed: Mapping[str, Failure], wall_s: float) -> Iterator[Host]:
    try:
        status = status_file.read(job, wall_s)
        at = status_file.seconds(status["written_at"])
    except (OSError, ValueError, OrchError):
        return
    if status["backend"] == "local":
        return
    for node in status["nodes"]:
        host = node["host"] or node["name"]
        yield Host(host, at, node["state"], job.id, failed.get(host))
