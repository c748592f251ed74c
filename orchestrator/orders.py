"""How do the brain's words and the wire's words map onto each other? Translation only, with the plan at hand.

The brain knows neither plan nor wire: what it calls `Start` becomes an order with commands and environments here, and
what an agent reports becomes an event of the same name here, with secrets masked before anything is remembered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from orchestrator import plan as planning
from orchestrator.brain import decisions as d
from orchestrator.brain import events as e
from orchestrator.links import Said
from orchestrator.node import procfs
from orchestrator.plan import Plan
from orchestrator.wire import codec
from orchestrator.wire import messages as m
from orchestrator.wire.mask import Mask
from orchestrator.wire.paths import JobDir

_EVENTS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        e.Prepared, e.PrepareFailed, e.Started, e.Exited, e.Stopped, e.StacksTaken, e.CheckpointFound,
        e.CheckpointSpoiled,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Private:
    """What only the job's own processes may know: the token, the submitter's environment, the secrets."""

    token: str
    certificate: str
    outer: dict[str, str]
    secrets: dict[str, str]


def private(job: JobDir) -> Private:
    """Read the job's private files."""
    folder = job.secrets
    return Private(
        token=(folder / "token").read_text().strip(),
        certificate=(folder / "certificate.pem").read_text(),
        outer=_texts((folder / "environment.json").read_text()),
        secrets=_texts((folder / "secrets.json").read_text()),
    )


def _texts(text: str) -> dict[str, str]:
    return {str(name): str(value) for name, value in json.loads(text).items()}


def machine() -> str:
    """Return the name of this boot of this machine."""
    return procfs.boot_id()


def planned(plan: Plan, at: float) -> e.Planned:
    """Return the plan as the brain needs it."""
    limits = plan.limits
    return e.Planned(
        at,
        tuple(e.NodePlan(node.name, node.ranks) for node in plan.nodes),
        e.Limits(
            start_s_max=limits.start_s,
            hang_s_max=limits.hang_s,
            node_silent_s_max=limits.node_silent_s,
            stop_grace_s=limits.stop_grace_s,
            break_grace_s=limits.break_grace_s,
            restarts_max=limits.restarts,
            backoff_s=limits.backoff_s,
            backoff_s_max=limits.backoff_s_max,
            never_on_exit_codes=limits.never_on_exit_codes,
            time_s_max=limits.time_s,
            on_hang=limits.on_hang,
        ),
    )


# What agents say


def agent_up(plan: Plan, hello: m.Hello, at: float) -> e.AgentUp:
    """Return a greeting as the brain's event."""
    ranks = tuple(e.RankSeen(seen.rank, seen.pid, seen.exited) for seen in hello.ranks)
    address = hello.address or _address(plan, hello.node)
    return e.AgentUp(at, hello.node, hello.boot, hello.running, hello.ready, address, hello.port, ranks)


def beat(node: str, said: m.Beat, at: float) -> e.Beat:
    """Return a heartbeat as the brain's event."""
    ranks = tuple(e.RankBeat(r.rank, r.count, r.state, r.log_bytes, r.cpu_s) for r in said.ranks)
    return e.Beat(at, node, said.attempt, ranks)


def event(plan: Plan, said: Said, mask: Mask, at: float) -> Any:
    """Return a kept report as the brain's event of the same name. Raises CodecError when it cannot be read."""
    data = {**_masked(said.data, mask), "at": at, "node": said.node}
    if data.get("kind") == "Prepared" and not data.get("address"):
        data["address"] = _address(plan, said.node)
    return codec.unpack_kind(_EVENTS, data)


def _masked(data: Any, mask: Mask) -> Any:
    """Return plain data with the secrets masked in all its texts."""
    if isinstance(data, str):
        return mask.apply(data)
    if isinstance(data, dict):
        return {key: _masked(value, mask) for key, value in data.items()}
    if isinstance(data, list):
        return [_masked(value, mask) for value in data]
    return data


def _address(plan: Plan, node: str) -> str:
    """Return where a node is; a node that the plan has dropped meets nobody any more."""
    return next((planned.address for planned in plan.nodes if planned.name == node), "")


# What agents are told


def agent_config(plan: Plan, job: JobDir, private: Private, node: str, address: str) -> m.AgentConfig:
    """Return all that a node's agent is told at its start. On shared disks one agent looks for checkpoints."""
    return m.AgentConfig(
        job=plan.id,
        node=node,
        root=str(job.root),
        token=private.token,
        certificate=private.certificate,
        address=address,
        heartbeat_s=plan.heartbeat_s,
        fence_s=plan.limits.fence_s,
        checkpoint_glob=plan.checkpoint_glob,
        checkpoint_keep=plan.checkpoint_keep,
        finds_checkpoints=node == plan.nodes[0].name,
    )


def prepare(plan: Plan, decision: d.Prepare, private: Private) -> m.Prepare:
    """Return the order to make a node ready."""
    node = next(planned for planned in plan.nodes if planned.name == decision.node)
    return m.Prepare(
        attempt=decision.attempt,
        env=planning.node_env(plan, node, private.outer, private.secrets),
        setup=plan.setup,
        program=plan.program,
        wants_port=node is plan.nodes[0],
        port=plan.rendezvous_port,
    )


def start(plan: Plan, job: JobDir, decision: d.Start) -> m.Start:
    """Return the order to start a node's ranks."""
    node = next(planned for planned in plan.nodes if planned.name == decision.node)
    resume_from = decision.resume.path if decision.resume else ""
    meet = (decision.address, decision.port)
    ranks = tuple(
        m.RankStart(rank, local, planning.rank_env(plan, job, rank, decision.attempt, meet, resume_from))
        for local, rank in enumerate(node.ranks)
    )
    return m.Start(decision.attempt, planning.arguments(plan, resume_from), plan.defaults, ranks)
