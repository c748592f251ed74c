"""Outline of a job (`orch plan`): its nodes with hosts, ranks and devices, and each node's settings with their reasons.

Starts nothing and leaves nothing behind. The settings come from the function that agents call when an attempt starts; what
is known only in an attempt or an allocation is marked as such.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.backends.api import LaunchError
from orchestrator.client.outline.host_survey import survey_hosts
from orchestrator.core import codec, placeholders
from orchestrator.core.checkpoints import memory
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError
from orchestrator.core.host import hardware
from orchestrator.core.host_facts import HardwareFacts
from orchestrator.core.jobdir import home
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import PlannedNode
from orchestrator.core.settings import rank_env
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import EnvLayers, SetBy, Setting, decide_settings, is_watched
from orchestrator.core.text import format_count, ranks_text
from orchestrator.spec.load import SpecFile
from orchestrator.submission import render, submit, submit_checks

PLACEHOLDER_JOB = JobDir(Path("{job_dir}"))
"""Placeholder for the folder of a job that is not created."""

PLACEHOLDER_EVIDENCE = Path("{job_dir}/evidence/attempt-{attempt}")
"""Placeholder for the evidence folder of such a job."""


@dataclass(frozen=True, slots=True)
class NodeOutline:
    """One node with what is known of it."""

    name: str
    # Empty on Slurm, which chooses it
    host: str
    # None for a host that is only used when others cannot be
    ranks: tuple[int, ...]
    devices: str
    # Why the host cannot be used, and what to do; empty where it can
    fault: str = ""
    fix: str = ""
    facts: HardwareFacts | None = None
    settings: tuple[Setting, ...] = ()
    # Over SSH: the GPUs and slots that jobs hold now, and which jobs of whom
    held: str = ""


@dataclass(frozen=True, slots=True)
class Outline:
    """Data that `orch plan` shows."""

    name: str
    backend: str
    # What it runs on, as text, and the command of a rank
    size: str
    command: str
    world_size: int
    # The effective batch size, as a number and as text
    batch_size: int | None
    batch: str
    nodes: tuple[NodeOutline, ...]
    # Variables of the job file that are not settings
    variables: tuple[Setting, ...]
    # How many others ranks inherit of the submitter's environment
    inherited: int
    notes: tuple[str, ...]
    exit_code: int
    # Each node runs the command once; the launcher that it calls starts the ranks
    launches: bool = False

    def as_json(self) -> Json:
        """Return the object that `orch plan --json` prints."""
        data: Json = codec.pack(self)
        data.pop("exit_code")
        for node in data["nodes"]:
            if node["facts"] is not None:
                node["facts"].pop("environ")  # the settings have it, without secrets
        return data


def make_outline(file: SpecFile, environ: Mapping[str, str]) -> Outline:
    """Return the outline of the job that a submit would start. Raises OrchError as a submit would."""
    wall_s = time.time()
    plan = submit.make_plan(file, environ, home.new_id(file.spec.name, wall_s), wall_s)
    submit_checks.refuse_missing(file, plan, environ)
    render.render(plan, JobDir(home.job_home(environ) / "jobs" / plan.id), sys.executable)  # it may refuse
    nodes, notes = _nodes(plan, environ)
    submit_env = rank_env.submitter_env(environ, plan.secrets)
    answered = sum(not node.fault for node in nodes)
    wanted_hosts = plan.pool.nodes + plan.pool.spares if plan.pool is not None else len(nodes)
    if answered < wanted_hosts:
        notes.append(f"{format_count(answered, 'host')} can be used, {wanted_hosts} needed")
    return Outline(
        name=plan.name,
        backend=plan.backend,
        size=plan.size_text,
        command=plan.argv[-1] if plan.shell else placeholders.quote_command(plan.argv),
        world_size=plan.world_size,
        batch_size=plan.effective_batch,
        batch=plan.batch_text,
        nodes=nodes,
        variables=(
            *(Setting(name, value, SetBy.YOU, plan.origins[name]) for name, value in plan.env.items() if not is_watched(name)),
            *_memory_variable(file, plan),
            *(Setting(name, "(secret)", SetBy.YOU, file.where("secrets")) for name in plan.secrets if not is_watched(name)),
        ),
        inherited=sum(not is_watched(name) and name not in plan.env for name in rank_env.inherited_env(plan, submit_env)),
        notes=tuple(notes),
        exit_code=0 if answered >= wanted_hosts else ClusterError.exit_code,
        launches=plan.launches,
    )  # fmt: skip


def _memory_variable(file: SpecFile, plan: Plan) -> tuple[Setting, ...]:
    """Return the folder of the checkpoints, if it is in memory."""
    folder = str(memory.memory_folder(plan.memory_dir, "{job_id}", "{node}") / memory.CHECKPOINTS)
    where = file.where("checkpoint.memory")
    return (Setting("ORCH_CHECKPOINT_DIR", folder, SetBy.YOU, where),) if plan.memory_bytes else ()


def _nodes(plan: Plan, environ: Mapping[str, str]) -> tuple[tuple[NodeOutline, ...], list[str]]:
    """Return the nodes, and notes on what is not known of them."""
    notes = []
    if plan.setup:
        notes.append(
            "the setup lines run on each node before its ranks, and their variables take precedence; they were not run here"
        )
    if plan.ssh is not None:
        return _ssh_nodes(plan, environ), notes
    if plan.slurm is not None:
        notes.append(
            "Slurm chooses the nodes: their hardware, and the variables that Slurm and its nodes set, are known only in the allocation"
        )
        return _slurm_nodes(plan, environ), notes
    facts = hardware.gather(environ)
    nodes = [
        NodeOutline(
            node.name, node.host, node.ranks, f"GPU {ranks_text(node.gpus)}" if node.gpus else "CPU", facts=facts,
            settings=_node_settings(plan, node, facts, "lo", environ),
        )
        for node in plan.nodes
    ]  # fmt: skip
    return tuple(nodes), notes


def _ssh_nodes(plan: Plan, environ: Mapping[str, str]) -> tuple[NodeOutline, ...]:
    """Return all hosts: the first that can be used get the ranks, as the first attempt would have it if none is busy."""
    assert plan.pool is not None
    answers, nodes, taken = survey_hosts(plan, environ), [], 0
    for node in plan.nodes:
        answer = answers[node.name]
        if isinstance(answer, LaunchError):
            nodes.append(
                NodeOutline(node.name, node.host, (), "", str(answer), answer.fix or "inspect the host, then try again")
            )
            continue
        ranks = plan.pool.node_ranks(taken) if taken < plan.pool.nodes else ()
        taken += bool(ranks)
        interface = None if plan.pool.nodes > 1 else "" if node.address else "lo"
        facts = answer.hardware
        decided = _node_settings(plan, node, facts, interface, environ)
        held = "; ".join(map(str, answer.held))
        nodes.append(
            NodeOutline(node.name, node.host, ranks, _devices_text(plan), facts=facts, settings=decided, held=held)
        )
    return tuple(nodes)


def _slurm_nodes(plan: Plan, environ: Mapping[str, str]) -> tuple[NodeOutline, ...]:
    assert plan.pool is not None
    node = PlannedNode("", "", "", (), ())
    decided = _node_settings(plan, node, None, None if plan.pool.nodes > 1 else "lo", environ)
    return tuple(
        NodeOutline(f"node {index}", "", plan.pool.node_ranks(index), _devices_text(plan), settings=decided)
        for index in range(plan.pool.nodes)
    )


def _devices_text(plan: Plan) -> str:
    assert plan.pool is not None
    return format_count(plan.pool.gpus_each, "GPU") if plan.pool.gpus_each else "CPU"


def _node_settings(
    plan: Plan,
    node: PlannedNode,
    facts: HardwareFacts | None,
    interface: str | None,
    environ: Mapping[str, str],
) -> tuple[Setting, ...]:
    secrets = {name: environ[name] for name in plan.secrets if name in environ}
    host = facts.environ if facts is not None and plan.ssh is not None else {}
    nodes = tuple(planned.name for planned in plan.nodes)
    node_plan = NodePlan(replace(plan, id="{job_id}"), PLACEHOLDER_JOB, node.name, 1, nodes)
    inherited = rank_env.inherited_env(plan, rank_env.submitter_env(environ, plan.secrets))
    job_env = rank_env.node_env(replace(node_plan, plan=plan), inherited, secrets)
    return decide_settings(facts, node_plan, EnvLayers.before_setup(host, job_env, {}), interface, PLACEHOLDER_EVIDENCE)
