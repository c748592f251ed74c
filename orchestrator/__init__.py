"""orch: run one PyTorch training job on many machines, and keep it running.

The map of the code, in the order of a job's life; imports point from later to earlier, and a test holds them:

    spec       what may a job file say?            spec.py, spec_model.py, spec_rules.py, specfile.py
    plan       where does every rank go?           plan.py, planning.py, hosts.py, sbatch.py
    render     which scripts will run?             render.py, templates/
    submit     how does a job begin?               submission.py, credentials.py, certificate.py, snapshot.py,
                                                   bundle.py, provenance.py, home.py, slurm/submitting.py
    supervise  what happens, and what is done?     supervise.py, journal.py, record.py, factsfile.py, joblock.py,
                                                   requests.py, asked.py, tickets.py, links.py, orders.py, deeds.py,
                                                   notify.py, memory.py, stay.py
      ferry.py   what travels?                     intake.py, carry.py, shelf.py
      brain/     what does it mean?                pure: events in, decisions out
      backends/  how does an agent get there?      thin, no decisions
      wire/      what both ends share              messages, codec, lines, paths, durable files
      node/      what runs on a node               landing, keeper, agent, ranks, hook, checkpoints; looks:
                                                   evidence, stacks, frames, source, loops, endless, lasting, settled,
                                                   kernel, flight, tracer, opcodes, sight, examine
    story      how is it?                          story.py, statefile.py
    collect    what came of it?                    collect.py, logs.py, logcut.py
    postmortem what went wrong?                    postmortem.py
    show       how does it look?                   show.py, whyview.py, stackview.py, listview.py, logview.py, follow.py,
                                                   terminal.py
      queued.py  and in Slurm's queue?             slurm/: sbatch, squeue, sacct; closing.py
    job, cli   what can one do with it?            job.py, looks.py, preflight.py, cli.py, params.py

Standard library only, and travelling to the nodes as one zip: brain, wire, node, supervise and what they use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.version import VERSION as __version__

if TYPE_CHECKING:
    from orchestrator.client.job import Job, find, submit
    from orchestrator.core.errors import ClusterError, OrchError, UserError

__all__ = ["ClusterError", "Job", "OrchError", "UserError", "__version__", "find", "submit"]

_WHERE = {
    "Job": "job",
    "find": "job",
    "submit": "job",
    "OrchError": "errors",
    "UserError": "errors",
    "ClusterError": "errors",
}


def __getattr__(name: str) -> Any:
    """Load what a script asks for when it asks: nodes and quick verbs need none of it."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
