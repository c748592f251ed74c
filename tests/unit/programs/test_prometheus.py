"""Are GPUs counted as they are held, and as a check has seen them, without a look at a host, and is a job that waits in Slurm's
queue shown?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import prometheus_client

from orchestrator.core import codec
from orchestrator.core.host import host_health
from orchestrator.core.host.host_health import HostHealth
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import CheckpointStatus
from orchestrator.programs.prometheus import make_registry
from tests.support import folders, jobs


def test_checkpoint_in_one_memory_is_not_safe(tmp_path: Path) -> None:
    job = folders.make(tmp_path, [*jobs.submitted(), *jobs.running(1, 1.0, 7)])
    status = status_file.read(job, 1.0)
    for is_safe in (True, False):
        status_file.write(job, replace(status, checkpoint=CheckpointStatus("/c/a.pt", 7, is_safe)), durable=False)
        text = prometheus_client.generate_latest(make_registry(tmp_path)).decode()
        assert f'orch_checkpoint_safe{{job_id="{job.id}"}} {float(is_safe)}' in text


def test_running_jobs_hold_gpus_and_rest_free(tmp_path: Path) -> None:
    """GPUs are held by running jobs, and the rest of what a check saw is free."""
    job = folders.make(tmp_path, [*jobs.submitted(), *jobs.running(1, 1.0, 7)])
    folders.succeeded(tmp_path)
    plan = codec.loads(Plan, job.plan.read_bytes())
    hosts = [node.host for node in plan.nodes]
    job.plan.write_text(codec.dumps(replace(plan, nodes=tuple(replace(node, gpus=(0, 1)) for node in plan.nodes))))
    for host, fault, gpus in (
        (hosts[0], "", 8),
        ("spare", "", 4),
        ("broken", "network: cut", 8),
        ("unseen", "", None),
    ):
        host_health.write(tmp_path, HostHealth(host, 1.0, fault, gpus=gpus))
    waiting = folders.make(tmp_path, [], name="waiting")
    waiting.slurm.write_text('["8"]')
    for file in (waiting.journal, waiting.state):
        file.unlink()
    text = prometheus_client.generate_latest(make_registry(tmp_path)).decode()
    assert f'orch_job_state{{job_id="{waiting.id}",state="QUEUED"}} 1.0' in text
    assert "orch_unreadable_jobs 0.0" in text
    shown = [line.removeprefix("orch_host_gpus") for line in text.splitlines() if line.startswith("orch_host_gpus")]
    held = {host: 2.0 * hosts.count(host) for host in hosts}
    assert shown == [
        *(f'{{host="{host}",state="held"}} {gpus}' for host, gpus in held.items()),
        f'{{host="{hosts[0]}",state="free"}} {8 - held[hosts[0]]}',
        '{host="spare",state="free"} 4.0',
    ]
