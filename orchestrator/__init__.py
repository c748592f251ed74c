"""orch: run one PyTorch training job on many machines, and keep it running.

The rooms, in the order of a job's way. A room imports only itself and rooms further down, and a test holds that:

    cli/            what one can type: verbs by kind, exit codes, terminal, notebook
    views/          how results look: JSON objects in, lines out; pure
    client/         what one can do with a job: Job, status, logs, why, stacks, collect, check
    submission/     job file -> plan -> scripts -> job folder -> started or queued
    spec/           the job file: fields, rules, all faults at once
    supervisor/     one per job: the loop, connections, executor, status
      journal/        the append-only journal, and all that is rebuilt from it
      transfers/      logs and checkpoints between hosts and job folder
    brain/          pure: events in, decisions out
      diagnosis/      what went wrong, and who: crash, node lost, hang, desync, stragglers
      scheduling/     hosts, allocations, rendezvous, resume checkpoint, restart policy, fence
      model/          events, decisions, facts
    backends/       how an agent gets onto a node: api, local
      slurm/          srun, the allocation, why it ends
      ssh/            launch, host workers, fan-out; connect/ one connection, copy/ bulk copies
    agent/          one per node: ranks, heartbeats, evidence, leases, preparation
      bootstrap/      how a job comes to a host, and leaves it
      evidence/       all ranks sampled, compared, described
      outputs/        checkpoints found and hashed, logs shipped
      probes/         one source of facts each: stacks, kernel waits, open files
      rank/           a rank: process, hook, step counter, flight recorder, error file
    core/           what two processes share; imports nothing above
      jobdir/         "a job is a folder": layout, plan, locks, requests, durable files
      wire/           messages, TLS connections, bootstrap of a host
      host/           this machine: /proc, interfaces, GPUs
      slurm/          Slurm's own words: states, options, commands and their output

`core`, `agent`, `backends`, `brain` and `supervisor` travel to the nodes as one zip and are standard library only,
except paramiko and cryptography in `backends/ssh`, which runs on the submit machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.version import VERSION as __version__

if TYPE_CHECKING:
    from orchestrator.cli.notebook import follow, run
    from orchestrator.client.job import Job, find, submit
    from orchestrator.core.errors import ClusterError, OrchError, UserError

__all__ = ["ClusterError", "Job", "OrchError", "UserError", "__version__", "find", "follow", "run", "submit"]

_WHERE = {
    "Job": "client.job",
    "find": "client.job",
    "submit": "client.job",
    "run": "cli.notebook",
    "follow": "cli.notebook",
    "OrchError": "core.errors",
    "UserError": "core.errors",
    "ClusterError": "core.errors",
}


def __getattr__(name: str) -> Any:
    """Load what a script asks for when it asks: nodes and quick verbs need none of it."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
