"""How is a decision carried out? By an order over a node's line, a launch by the backend, or files that travel.

What can fail at once comes back as news; everything else is heard of later, from agents or from the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from orchestrator.backends.api import Backend, LaunchError
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import AgentState, Facts
from orchestrator.core.jobdir import full_disk, rank_env
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.observations import Retryable
from orchestrator.core.wire import messages as m
from orchestrator.supervisor import translation
from orchestrator.supervisor.agent_connections import AgentConnections
from orchestrator.supervisor.transfers.transfers import Transfers


class Executor:
    """What a supervisor can do to the nodes of its job. `endpoint` is where it listens, as host:port."""

    def __init__(
        self,
        job: JobDir,
        plan: Plan,
        private: translation.JobSecrets,
        backend: Backend,
        links: AgentConnections,
        ferry: Transfers,
    ) -> None:
        self._job = job
        self._plan = plan
        self._private = private
        self._backend = backend
        self._links = links
        self._ferry = ferry
        self._mask = private.mask
        self.endpoint = ""
        self._is_unsaid = False  # where agents are to dial

    def begin(self, facts: Facts, stopped: Mapping[str, int], now_s: float) -> None:
        """Take up what an earlier supervisor has under way: agents that may run, checkpoints that travel."""
        self._ferry.begin(facts, stopped, now_s)
        for node in facts.every_node():
            if node.agent_state is not AgentState.ABSENT:
                self._backend.keep_reachable(self._config(node.name))

    def say_where(self) -> None:
        """Write down where agents are to dial; on a full disk `go_on` does, unless that has not changed."""
        file = self._job.endpoint
        try:
            replace_text(file, self.endpoint)
        except OSError as err:
            if not full_disk.is_full(err):
                raise
        self._is_unsaid = not file.exists() or file.read_text() != self.endpoint
        if not self._is_unsaid:
            file.touch()  # whoever has started this supervisor waits for it

    def carry_out(self, decision: d.Decision, gang: rank_env.Gang, now_s: float) -> list[e.Event]:
        """Carry out one decision for the current gang; the rest of the decisions are facts already."""
        match decision:
            case d.Launch(node=node):
                return self._launch(node, now_s)
            case d.Prepare():
                if self._ferry.send(decision, now_s):
                    self._prepare(decision, gang, ())
            case d.Probe(node=node):
                self._links.send(node, m.Probe(decision.attempt, decision.addresses, decision.port))
            case d.Start(node=node):
                resume_from = self._ferry.path_there(node, decision.resume.path) if decision.resume else ""
                self._links.send(
                    node, translation.start(self._plan, decision, self._place(node, gang), resume_from)
                )
            case d.Stop():
                self._links.send(decision.node, translation.stop(self._plan, decision))
            case d.Inspect(node=node, attempt=attempt, inspection=look):
                self._links.send(node, m.Inspect(attempt, look))
            case d.Fence(node=node, attempt=attempt, quiet_s=quiet_s, alone_s=alone_s):
                self._links.send(node, m.Fence(attempt, quiet_s, alone_s))
            case d.Dismiss(node=node):
                self._links.send(node, m.Dismiss())
                self._backend.keep_reachable(
                    self._config(node)
                )  # what is being launched there is not wanted any more
            case (
                d.BeginAttempt()
                | d.Place()
                | d.Judge()
                | d.Alert()
                | d.ResolveAlert()
                | d.Remark()
                | d.Finish()
                | d.EndJob()
                | d.Requeue()
            ):
                pass
        return []

    def judged(self, verdict: d.Verdict, facts: Facts, now_s: float) -> None:
        """A verdict fell: of a node that is lost for its silence nothing more is waited for."""
        node, limits = facts.node(verdict.node), facts.limits
        if verdict.kind is not d.Kind.NODE_LOST or node is None or limits is None:
            return
        if now_s >= node.contact_at + limits.node_silent_s_max:
            self._ferry.lost(node.name, node.ever_started, now_s)

    def look(self, facts: Facts, now_s: float) -> list[e.Event]:
        """Return what the backend knows by now of launches and agents, and what of checkpoints has travelled."""
        events = [self._failed(name, err, now_s) for name, err in self._backend.failures()]
        for node in facts.every_node():
            sought = node.agent_state in (AgentState.LAUNCHING, AgentState.SILENT) or (
                node.agent_present and node.agent_state is AgentState.ABSENT
            )
            if sought and not self._links.connected(node.name):
                evidence = self._backend.agent_death(node.name)
                if evidence is not None:
                    events.append(e.AgentDied(now_s, node.name, self._mask.apply(evidence)))
                    self._ferry.lost(node.name, node.ever_started, now_s)
        return [*events, *self._ferry.news(now_s), *self._endings(facts, now_s)]

    def _endings(self, facts: Facts, now_s: float) -> list[e.Event]:
        """Return what is known by now of the end of the allocation."""
        allocation = self._backend.allocation
        told = allocation.endings() if allocation is not None else []
        return [
            e.AllocationEnding(
                now_s,
                facts.allocation,
                one.cause,
                one.why,
                None if one.left_s is None else now_s + one.left_s,
            )
            for one in told
        ]

    def go_on(self, gang: Callable[[], rank_env.Gang], now_s: float) -> None:
        """Prepare the nodes to which their checkpoint was brought; do what a full disk has kept from being done."""
        if self._is_unsaid:
            self.say_where()
        for decision, pieces in self._ferry.arrived(now_s):
            self._prepare(decision, gang(), pieces)

    def seek(self, nodes: Iterable[str]) -> None:
        """Keep ways open to nodes where an agent may still be, for as long as it takes."""
        for node in nodes:
            self._backend.keep_reachable(self._config(node))

    def line_ended(self, node: str, left: bool) -> None:
        """A node's line is no more; `left`: nor is its agent, which was dismissed."""
        if left:
            self._backend.release(node)
        else:
            self._backend.check_reachable(node)

    def look_after(self, node: str) -> None:
        """A node's line broke, or nothing comes over it any more."""
        self._backend.check_reachable(node)

    def reasons(self, facts: Facts) -> dict[str, str]:
        """Return why there is no way to a node now, of those that are not connected."""
        told = {
            n.name: self._backend.reason(n.name)
            for n in facts.every_node()
            if n.agent_state is not AgentState.UP
        }
        return {name: self._mask.apply(reason) for name, reason in told.items() if reason}

    def close(self) -> None:
        """Give back what was taken; agents stay."""
        self._backend.close()
        self._ferry.close()

    def _place(self, node: str, gang: rank_env.Gang) -> translation.NodeView:
        return translation.NodeView(gang, node, self._ferry.root(node))

    def _prepare(self, decision: d.Prepare, gang: rank_env.Gang, pieces: tuple[m.ManifestEntry, ...]) -> None:
        node = decision.node
        if any(name == node for name, _ in gang):  # it may have lost its place while the checkpoint travelled
            place = self._place(node, gang)
            self._links.send(node, translation.prepare(self._plan, decision, self._private, place, pieces))

    def _config(self, node: str) -> m.AgentConfig:
        return translation.agent_config(self._plan, self._job, self._private, node, self.endpoint)

    def _launch(self, node: str, now_s: float) -> list[e.Event]:
        try:
            self._backend.launch(self._config(node))
        except LaunchError as err:
            return [self._failed(node, err, now_s)]
        return []

    def _failed(self, node: str, err: LaunchError, now_s: float) -> e.Event:
        is_busy = err.trouble is Retryable.BUSY  # then waiting is the remedy, and this job does it by itself
        reason = f"{err.reason}; fix: {err.fix}" if err.fix and not is_busy else err.reason
        return e.LaunchFailed(now_s, node, err.stage, self._mask.apply(reason), err.trouble)
