"""Which verdicts make the supervisor record a host as failed, for later jobs?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import Facts
from orchestrator.core.host import host_health
from orchestrator.supervisor.supervisor import Supervisor

CRASH = dataclasses.replace(Facts().verdict_on(d.VerdictKind.CRASH, "rank 1 on n1: SIGSEGV"), node="n1")
SICK = dataclasses.replace(CRASH, host_fault="its GPU 3 wants a reset since 14:02:11 UTC")
LOST = dataclasses.replace(Facts().verdict_on(d.VerdictKind.NODE_LOST, "n1: no heartbeat"), node="n1")


@pytest.mark.parametrize(
    ("verdict", "backend", "fault"),
    [
        (SICK, "ssh", "crash: its GPU 3 wants a reset since 14:02:11 UTC"),
        (LOST, "slurm", "node_lost: n1: no heartbeat"),
        (CRASH, "ssh", None),
        (SICK, "local", None),
        (dataclasses.replace(SICK, node=""), "ssh", None),
        (None, "ssh", None),
    ],
)
def test_lost_host_and_host_with_sick_gpu_are_recorded(
    tmp_path: Path, verdict: d.Verdict | None, backend: str, fault: str | None
) -> None:
    job = tmp_path / "jobs" / "job-1"
    supervisor: Any = SimpleNamespace(
        _plan=SimpleNamespace(backend=backend, id="job-1"), _job=SimpleNamespace(root=job)
    )
    Supervisor._record_failed_host(supervisor, verdict)
    known = host_health.read_all(tmp_path)
    assert [(note.host, note.fault, note.job) for note in known.values()] == ([("n1", fault, "job-1")] if fault else [])
