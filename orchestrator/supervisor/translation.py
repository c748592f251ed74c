"""Translation of messages to and from agents, for the brain, and the secrets of a job.

The brain knows no plan: the order `Prepare` gets what a node needs for it here, and a report of an agent becomes an event,
with secrets masked before anything is remembered.
"""

from __future__ import annotations

import dataclasses
import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.brain.model import events as e
from orchestrator.core import codec, observations
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import Gang
from orchestrator.core.secret_mask import Mask, make_mask
from orchestrator.core.settings import rank_env
from orchestrator.core.wire import connection, orders, reports
from orchestrator.core.wire.agent_config import AgentConfig, LeaseNeeds
from orchestrator.core.wire.tokens import is_token

T = TypeVar("T")

_REPORTS: dict[str, type[reports.NodeReport]] = codec.classes_by_kind(reports.NodeReport)


@dataclass(frozen=True, slots=True)
class JobSecrets:
    """Secrets of the job's own processes. `environment`: the submitter's environment; `webhook`: its address; `peer_key`,
    `peer_certificate`: of the agents among themselves, where checkpoints are written to memory."""

    token: str
    certificate: str
    environment: dict[str, str]
    secrets: dict[str, str]
    webhook: str = ""
    peer_key: str = ""
    peer_certificate: str = ""

    @property
    def mask(self) -> Mask:
        """The mask that hides the secrets in the journal, in notifications and in what is shown."""
        return make_mask(self.secrets.values(), self.webhook)


def read_secrets(job: JobDir) -> JobSecrets:
    """Read the job's private files. Raises ClusterError when one is missing or damaged."""
    certificate, key = job.secrets / "certificate.pem", job.secrets / "key.pem"
    texts = functools.partial(codec.loads, dict[str, str])
    _read_private(key, str)
    _read_private(certificate, lambda _: connection.server_context(certificate, key))
    return JobSecrets(
        token=_read_private(job.secrets / "token", _token),
        certificate=_read_private(certificate, str),
        environment=_read_private(job.secrets / "environment.json", texts),
        secrets=_read_private(job.secrets / "secrets.json", texts),
        webhook=_read_optional(job.webhook),
        peer_key=_read_optional(job.secrets / "peer_key.pem"),
        peer_certificate=_read_optional(job.secrets / "peer_certificate.pem"),
    )


def _read_optional(path: Path) -> str:
    return _read_private(path, str) if path.exists() else ""


def _read_private(path: Path, parse: Callable[[str], T]) -> T:
    fix = "a job cannot continue without its secrets: submit it again; its checkpoints stay where they are"
    try:
        return parse(path.read_text())
    except ssl.SSLError as err:
        raise ClusterError(f"is damaged, or its key is: {err.reason}", str(path), fix) from err
    except OSError as err:
        raise ClusterError(f"cannot be read: {err.strerror}", str(path), fix) from err
    except ValueError as err:
        raise ClusterError("is damaged or incomplete", str(path), fix) from err


def _token(text: str) -> str:
    if not is_token(text.strip()):
        raise ValueError("not the form of a token")
    return text.strip()


# From agents


def to_agent_up(plan: Plan, hello: reports.Hello, at: float) -> e.AgentUp:
    """Return a greeting as the brain's event."""
    address = hello.address or _address(plan, hello.node) or "127.0.0.1"
    return e.AgentUp(at, hello.node, hello.incarnation, hello.running, hello.ready, address, hello.port, hello.ranks)


def to_event(plan: Plan, envelope: reports.Envelope, mask: Mask, at: float) -> e.FromNode:
    """Return a reliable report as the brain's event. Raises CodecError when it cannot be read."""
    report = codec.unpack_kind(_REPORTS, mask.mask_json(envelope.data))
    if isinstance(report, reports.Prepared):
        report = _limit_addresses(plan, envelope.node, report)
    return e.FromNode(at, envelope.node, report)


def unpack_report(cls: type[T], report: reports.Envelope) -> T:
    """Return a report as it was sent. Raises CodecError when it cannot be read."""
    return codec.unpack(cls, {key: value for key, value in report.data.items() if key != "kind"})


def _limit_addresses(plan: Plan, node: str, prepared: reports.Prepared) -> reports.Prepared:
    """Return the report with the addresses that may be used: the one in the plan, else those of the interface that the
    user chose, else all. Where the node reports none, its address in the plan."""
    planned_address, chosen = _address(plan, node), plan.env.get("GLOO_SOCKET_IFNAME", "")
    if not prepared.addresses:
        return dataclasses.replace(prepared, address=prepared.address or planned_address or "127.0.0.1")
    if planned_address:
        interface = next((own.interface for own in prepared.addresses if own.ip == planned_address), "")
        return dataclasses.replace(prepared, addresses=(observations.Address(planned_address, interface),))
    usable = tuple(own for own in prepared.addresses if own.interface == chosen)
    return dataclasses.replace(prepared, addresses=usable or prepared.addresses)


def _address(plan: Plan, node: str) -> str:
    """Return the address of a node in the plan; empty for none, and for a node that the plan has dropped."""
    return next((planned.address for planned in plan.nodes if planned.name == node), "")


# To agents


def agent_config(plan: Plan, job: JobDir, job_secrets: JobSecrets, node: str, address: str) -> AgentConfig:
    """Return the configuration of a node's agent. On shared disks one agent scans for checkpoints.

    Over SSH `root` begins with the folder that the spec names, such as `~/.orch`, which the host itself resolves.
    """
    pool, ssh = plan.pool, plan.ssh
    slots = next((planned.slots for planned in plan.nodes if planned.name == node), 0)
    return AgentConfig(
        job=plan.id,
        node=node,
        root=f"{ssh.remote_dir.rstrip('/')}/jobs/{plan.id}" if ssh else str(job.root),
        token=job_secrets.token,
        certificate=job_secrets.certificate,
        address=address,
        heartbeat_s=plan.heartbeat_s,
        node_timeout_s=plan.limits.node_timeout_s,
        fence_s=plan.limits.fence_s,
        disconnected_timeout_s=plan.limits.disconnected_timeout_s,
        checkpoint_glob=plan.checkpoint_glob,
        finds_checkpoints=ssh is not None or plan.slurm is not None or node == plan.nodes[0].name,
        ships=ssh is not None,
        needs=_needs(pool.gpus_each, pool.ranks_each, slots) if pool and ssh else LeaseNeeds(0, 0, 0),
        allocated=plan.slurm is not None,
        memory_bytes=plan.memory_bytes,
        memory_dir=plan.memory_dir,
        peer_key=job_secrets.peer_key,
        peer_certificate=job_secrets.peer_certificate,
        copy_mb_s=ssh.copy_mb_s if ssh is not None else None,
    )


def _needs(gpus: int, ranks: int, slots_there: int) -> LeaseNeeds:
    return LeaseNeeds(gpus, 0, 0) if gpus else LeaseNeeds(0, ranks, slots_there)


def prepare_node(
    plan: Plan, node: str, order: orders.Prepare, gang: Gang, job_secrets: JobSecrets
) -> orders.PrepareNode:
    """Return the order with what a node needs for it, as far as that does not depend on the checkpoint to start from."""
    outer, secrets = rank_env.inherited_env(plan, job_secrets.environment), job_secrets.secrets
    names = tuple(name for name, _ in gang)
    return orders.PrepareNode(order.attempt, order.resume, plan.for_node(node), names, outer, secrets)
