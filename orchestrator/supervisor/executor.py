"""Execution of decisions: orders over nodes' connections, launches by the backend, transfers of files; and when the
supervisor of an ended job may shut down.

What can fail at once comes back as events; everything else arrives later, from agents or from the backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from orchestrator.backends.api import Backend, LaunchError
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.model.rank_facts import RankState
from orchestrator.core import plan_types
from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.observations import Retryable
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.agent_config import AgentConfig
from orchestrator.supervisor import translation
from orchestrator.supervisor.agent_connections import AgentConnections
from orchestrator.supervisor.transfers import memory_copies
from orchestrator.supervisor.transfers.checkpoint_tracker import CheckpointTracker
from orchestrator.supervisor.transfers.completion import CheckpointGang

DISMISS_S_MAX = 5.0
"""How long agents of an ended job may take to leave once nothing is being transferred."""

TRANSFER_S_MAX = 300.0
"""How long after the job's end transfers are waited for; `orch collect` brings the rest. Before nodes are given back: until nothing of
the job is in their memory."""

LINGER_S_MAX = 600.0
"""How long after the job's end the supervisor tries to reach hosts whose agents could not be dismissed."""


def may_shut_down(ended_at: float, moved_at: float, has_connections: bool, now_s: float) -> bool:
    """Return whether all agents of an ended job have left, or have had the time to. `moved_at`: the last time (job
    clock) at which transferred data arrived."""
    last_s = min(max(ended_at, moved_at), ended_at + TRANSFER_S_MAX)
    return not has_connections or now_s > last_s + DISMISS_S_MAX


def undismissed_hosts(facts: Facts, now_s: float) -> tuple[str, ...]:
    """Return the hosts on which an agent may still run after the job's end, since it could not be dismissed; none after
    `LINGER_S_MAX`.

    An agent must not be left running when its host comes back. A queue system ends by itself what is left on its nodes.
    """
    if facts.pool is None or facts.queue is not None or facts.ended_at is None:
        return ()
    if now_s > facts.ended_at + LINGER_S_MAX:
        return ()
    return tuple(
        node.name for node in facts.every_node() if node.agent_present or node.agent_state is AgentState.LAUNCHING
    )


def current_gang(facts: Facts) -> plan_types.Gang:
    """Return the nodes of the current attempt, each with its ranks."""
    return tuple((node.name, node.ranks) for node in facts.gang)


def checkpoint_gang(facts: Facts) -> CheckpointGang:
    """Return what the completion of checkpoints needs to know about the current attempt."""
    attempt, limits = facts.attempt, facts.limits
    if attempt is None or limits is None:
        return CheckpointGang(0, 0, 0, ())
    nodes = [node for node in facts.gang if node.may_run_attempt == attempt.number]
    silent = (
        attempt.verdict.node if attempt.verdict is not None and attempt.verdict.kind is d.VerdictKind.NODE_LOST else ""
    )
    return CheckpointGang(
        attempt.number,
        attempt.call_step,
        len(facts.ranks),
        tuple(node.name for node in nodes),
        frozenset(node.name for node in nodes if node.is_clear(attempt.number)),
        frozenset(node.name for node in nodes if node.agent_loss is not None or node.name == silent),
        frozenset(node.name for node in nodes if all(facts.ranks[rank].ended_well for rank in node.ranks)),
        {
            node.name: min((facts.ranks[rank].steps for rank in node.ranks), default=0)
            for node in nodes
            if all(facts.ranks[rank].rank_state is RankState.EXITED for rank in node.ranks)
        },
    )


class Executor:
    """Carries out decisions on the nodes of a job. `endpoint`: where it listens, one host:port a line."""

    def __init__(
        self,
        job: JobDir,
        plan: Plan,
        job_secrets: translation.JobSecrets,
        backend: Backend,
        connections: AgentConnections,
        checkpoint_tracker: CheckpointTracker,
    ) -> None:
        self._job = job
        self._plan = plan
        self._job_secrets = job_secrets
        self._backend = backend
        self._connections = connections
        self._checkpoint_tracker = checkpoint_tracker
        checkpoint_tracker.is_remote = lambda node: self._is_remote(node, unknown=True)
        self._memory = checkpoint_tracker.memory
        self._memory.hosts = lambda: {
            node: hello for node, hello in connections.hellos.items() if connections.is_connected(node)
        }
        self._sending: dict[str, orders.Prepare] = {}  # by node, while its checkpoint is on the way
        self._mask = job_secrets.mask
        self.endpoint, self._empty_by_s = "", 0.0

    def begin(self, facts: Facts) -> None:
        """Reconnect to the agents that an earlier supervisor had started."""
        self.keep_reachable(node.name for node in facts.every_node() if node.agent_state is not AgentState.ABSENT)

    def publish_endpoint(self) -> None:
        """Write down where agents are to dial; the process that started this supervisor waits for that. What the file says
        already needs no room on the disk."""
        file = self._job.endpoint
        if file.exists() and file.read_text() == self.endpoint:
            file.touch()
        else:
            full_disk.retry_while_full(lambda: replace_text(file, self.endpoint))

    def carry_out(self, decision: d.Decision, gang: plan_types.Gang, now_s: float) -> list[e.Event]:
        """Carry out one decision for the current gang, and return what failed at once."""
        match decision:
            case d.Launch(node=node):
                return self._launch(node, now_s)
            case d.To(node=node, order=order):
                self._give(node, order, gang, now_s)
            case d.CompareCheckpoint():
                self._checkpoint_tracker.compare(now_s, decision)
            case d.EndJob():
                self._checkpoint_tracker.end_job(now_s)
            case (
                d.BeginAttempt()
                | d.DistrustCheckpoint()
                | d.Place()
                | d.Judge()
                | d.Notice()
                | d.Finish()
                | d.NextCall()
                | d.Requeue()
            ):
                pass  # facts already
        return []

    def _give(self, node: str, order: orders.NodeOrder, gang: plan_types.Gang, now_s: float) -> None:
        """Send an order to a node; one to prepare once the save to start from is there."""
        if isinstance(order, orders.Prepare):
            if self._begin_restore(node, order, now_s):
                self.send_copies(gang, now_s)
            elif not self._begin_send(node, order):
                number = order.resume.save if order.resume is not None else 0
                is_first = node == gang[0][0]  # of those that see one disk, one compares
                self._prepare(
                    node,
                    order,
                    gang,
                    self._checkpoint_tracker.find_on_host_disk(number) if is_first else None,
                )
            return
        if isinstance(order, orders.Start):
            self._cancel_sends(node)
        self._connections.send(node, order)
        if isinstance(order, orders.Dismiss):  # what is still being launched there is no longer wanted
            self._backend.keep_reachable(self._config(node))

    def _resume_checkpoint(self, node: str, resume: ResumePoint | None) -> Checkpoint | None:
        checkpoint = self._checkpoint_tracker.checkpoints.get(resume.save) if resume is not None else None
        if checkpoint is None:
            return None
        # One that a person has named, and a kept copy, are not in the folder for checkpoints, and stay where they are
        own_folder = str(self._job.checkpoints)
        is_elsewhere = any(not place.host and place.root != own_folder for place in checkpoint.locations[:1])
        if self._memory.holds(checkpoint) and not is_elsewhere:
            return memory_copies.on_node(checkpoint, node)
        if not self._is_remote(node):
            return checkpoint
        return self._checkpoint_tracker.copies.locate_on_host(checkpoint, node, str(self._job_folder(node).root))

    def _job_folder(self, node: str) -> JobDir:
        """Return the job's folder as the node sees it."""
        hello = self._connections.hellos.get(node)
        return JobDir.at(hello.root) if hello is not None else self._job

    def _is_remote(self, node: str, *, unknown: bool = False) -> bool:
        """Return whether the node does not see this machine's job folder; `unknown` where its agent has not said so."""
        hello = self._connections.hellos.get(node)
        return hello.ships if hello is not None else unknown

    def _begin_send(self, node: str, order: orders.Prepare) -> bool:
        """Begin to copy the checkpoint of an attempt to a node; return whether it has to be copied."""
        checkpoint = self._checkpoint_tracker.checkpoints.get(order.resume.save) if order.resume is not None else None
        if checkpoint is None or not self._is_remote(node):
            return False
        if not self._checkpoint_tracker.copies.send(checkpoint, node, str(self._job_folder(node).root)):
            return False
        self._sending[node] = order
        return True

    def _begin_restore(self, node: str, order: orders.Prepare, now_s: float) -> bool:
        """Begin to bring the checkpoint of an attempt into a node's memory from hosts; False where it does not come from there."""
        checkpoint = self._checkpoint_tracker.checkpoints.get(order.resume.save) if order.resume is not None else None
        is_begun = checkpoint is not None and self._memory.restore(now_s, checkpoint, node)
        if is_begun:
            self._sending[node] = order
        return is_begun

    def send_copies(self, gang: plan_types.Gang, now_s: float) -> None:
        """Have agents copy checkpoints between memory and disks."""
        for node, copy in self._memory.take_orders(now_s, tuple(name for name, _ in gang)):
            self._connections.send(node, copy)

    def empty_memory(self, attempt: int, now_s: float) -> bool:
        """Have what is in the memory of hosts brought to disk, and dismiss their agents, which delete it; return whether that is
        over, or has taken too long."""
        self._empty_by_s = self._empty_by_s or now_s + TRANSFER_S_MAX
        hosts = self._memory.hosts() if self._memory.is_used and now_s < self._empty_by_s else ()
        for node in hosts if not self._checkpoint_tracker.is_saving else ():
            self._connections.send(node, orders.Dismiss(attempt))
        return not hosts

    def _cancel_sends(self, node: str) -> None:
        """Send nothing more to a node whose ranks are started: it could overwrite what they save."""
        self._memory.cancel_restore(node)
        self._sending.pop(node, None)
        self._checkpoint_tracker.copies.end_sends(node)

    def poll(self, facts: Facts, now_s: float) -> list[e.Event]:
        """Return what is new from the backend: launches, agents, allocation."""
        events = [self._launch_failed(name, err, now_s) for name, err in self._backend.failures()]
        for node in facts.every_node():
            is_expected = node.agent_state in (AgentState.LAUNCHING, AgentState.SILENT) or (
                node.agent_present and node.agent_state is AgentState.ABSENT
            )
            if is_expected and not self._connections.is_connected(node.name):
                evidence = self._backend.agent_death(node.name)
                if evidence is not None:
                    events.append(e.AgentDied(now_s, node.name, self._mask.apply(evidence)))
                    self._cancel_sends(node.name)
        return [*events, *self._allocation_endings(facts, now_s)]

    def _allocation_endings(self, facts: Facts, now_s: float) -> list[e.Event]:
        allocation = self._backend.allocation
        return [
            e.AllocationEnding(
                now_s,
                facts.allocation,
                ending.cause,
                ending.why,
                None if ending.left_s is None else now_s + ending.left_s,
            )
            for ending in (allocation.endings() if allocation is not None else ())
        ]

    def finish_sends(self, gang: plan_types.Gang, now_s: float) -> list[e.Event]:
        """Prepare the nodes whose checkpoint has arrived; return those to which it could not be brought."""
        copies, failed = self._checkpoint_tracker.copies, list[e.Event]()
        restored, self._memory.finished_restores = self._memory.finished_restores, []
        sent, copies.finished_sends = [*copies.finished_sends, *restored], []
        for node, why in sent:
            order = self._sending.pop(node, None)
            if order is None or order.resume is None:
                continue
            if (node, why) in restored and why and self._begin_send(node, order):
                continue  # from here
            if why:
                reason = f"{order.resume.path} could not be copied there: {why}"
                failed.append(e.FromNode(now_s, node, reports.PrepareFailed(order.attempt, reason, "")))
            else:
                self._prepare(node, order, gang, self._resume_checkpoint(node, order.resume))
        for node, checkpoint in copies.discards:
            self._connections.send(node, orders.Discard(checkpoint))
        copies.discards.clear()
        return failed

    def keep_reachable(self, nodes: Iterable[str]) -> None:
        """Keep connections open to nodes where an agent may still run, for as long as it takes."""
        for node in nodes:
            self._backend.keep_reachable(self._config(node))

    def connection_ended(self, node: str, left: bool) -> None:
        """Handle the end of a node's connection. `left`: its agent, which was dismissed, said goodbye before."""
        if left:
            self._backend.release(node)
        else:
            self._backend.check_reachable(node)

    def check_reachable(self, node: str) -> None:
        """Check a node whose connection broke or went silent."""
        self._backend.check_reachable(node)

    def unreachable_reasons(self, facts: Facts) -> dict[str, str]:
        """Return why nodes cannot be reached, by node, of those that are not connected."""
        reasons = {
            n.name: self._backend.reason(n.name) for n in facts.every_node() if n.agent_state is not AgentState.UP
        }
        return {name: self._mask.apply(reason) for name, reason in reasons.items() if reason}

    def close(self) -> None:
        """Release connections and threads; agents stay."""
        self._backend.close()

    def _prepare(self, node: str, order: orders.Prepare, gang: plan_types.Gang, checkpoint: Checkpoint | None) -> None:
        resume = order.resume
        if resume is not None and not any(name == node for name, _ in gang):
            return  # it has lost its place during the transfer
        located = self._resume_checkpoint(node, resume)
        if resume is not None and located is not None:
            resume = dataclasses.replace(resume, path=located.path)
        full = translation.prepare_node(self._plan, node, order, gang, self._job_secrets)
        if located is not None and self._memory.holds(located):
            checkpoint = located
        full = dataclasses.replace(full, resume=resume, checkpoint=checkpoint)
        if self._plan.ssh is not None or self._memory.is_used:
            torn = self._checkpoint_tracker.find_torn_on_host(node, order.attempt)
            full = dataclasses.replace(full, deep=self._checkpoint_tracker.deep, torn=torn)
        self._connections.send(node, full)

    def _config(self, node: str) -> AgentConfig:
        return translation.agent_config(self._plan, self._job, self._job_secrets, node, self.endpoint)

    def _launch(self, node: str, now_s: float) -> list[e.Event]:
        try:
            self._backend.launch(self._config(node))
        except LaunchError as err:
            return [self._launch_failed(node, err, now_s)]
        return []

    def _launch_failed(self, node: str, err: LaunchError, now_s: float) -> e.Event:
        is_busy = err.retryable is Retryable.BUSY  # then the job waits, and there is nothing to fix
        fix = "" if is_busy else self._mask.apply(err.fix)
        return e.LaunchFailed(now_s, node, err.stage, self._mask.apply(err.reason), err.retryable, fix)
