"""Placement of an attempt on a pool of hosts: which hosts are launched, used, kept as spares or released, and the verdict if too few can be used.

Hosts are taken in the user's order; a rank stays on its host as long as that host is up; spares run next to the gang and
replace a lost host at once. A job holds no host while it waits for another one that is busy, so two jobs cannot block
each other; earlier jobs of the same submit machine go first. Nothing here applies to nodes whose ranks the plan has fixed.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Decision, EvidenceKind, FailureCause, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.node_facts import LAUNCH_FAILURES_MAX, AgentState, NodeFacts
from orchestrator.core.backoff import Backoff
from orchestrator.core.errors import Fault
from orchestrator.core.plan_types import Gang
from orchestrator.core.wire.orders import Dismiss

HOST_START_S_MAX = 10.0
"""How long a host may take to come up before the first placement is made without it, if there are others."""

BUSY_PAUSE_S = 2.0
BUSY_PAUSE_S_MAX = 60.0
BUSY_PAUSE_SHARE = 0.05
"""How long to wait before busy hosts are asked again: this share of the time already waited, between these
limits; up to a second more, by the job's seed."""

LAUNCH_S_MAX = 60.0
"""How long an agent may take from its launch to its first contact before that counts as a failure."""

LAUNCH_PAUSES = Backoff(first_s=1.0, factor=2.0, max_s=30.0)
"""Pauses from one launch that failed to the next."""

RETURN_TIMEOUTS = 3.0
"""How many times `node_timeout_s` a lost host without a substitute has to come back: a machine takes minutes to boot."""

REASONS_SHOWN = 8


def gather(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Bring up as many hosts as needed, and place the attempt once enough of them are ready."""
    if facts.jobs_ahead or is_short(facts, deadlines):
        return _dismiss_all(facts, deadlines)
    places = _choose_hosts(facts, deadlines)
    if places:
        return [d.Place(deadlines.now_s, _placement_reason(facts, places), attempt.number, places)]
    excluded = [node for node in facts.nodes.values() if node.excluded and not node.is_excluded_for_gpu]
    let_go = dismissals(facts, excluded, "it cannot be used", deadlines)
    return let_go or _launch_orders(facts, attempt, deadlines)


def keep_spares(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Keep exactly the configured number of spares ready while the gang runs."""
    if facts.pool is None:
        return []
    idle = [node for node in facts.nodes.values() if not node.ranks]
    ready = [node for node in idle if _is_ready(node)]
    dismissed = [*ready[facts.pool.spares :], *(node for node in idle if node.excluded)]
    let_go = dismissals(facts, dismissed, "the job does not need it", deadlines)
    return let_go or _launch_orders(facts, attempt, deadlines)


def is_queued(facts: Facts) -> bool:
    """Return whether the attempt waits for hosts that other jobs use, or for earlier jobs that want them."""
    attempt = facts.attempt
    if facts.pool is None or attempt is None or attempt.placed_at is not None:
        return False
    return bool(facts.jobs_ahead) or (_is_busy_anywhere(facts) and count_free(facts) < facts.pool.nodes)


def is_short(facts: Facts, deadlines: Deadlines) -> bool:
    """Return whether, for now, there cannot be enough hosts, because others use them."""
    assert facts.pool is not None
    if not _is_busy_anywhere(facts) or _count_available(facts, deadlines) >= facts.pool.nodes:
        return False
    return not deadlines.passed(busy_retry_at(facts))


def has_another(facts: Facts) -> bool:
    """Return whether the job could do without one of the hosts that it can use."""
    usable = [node for node in facts.nodes.values() if not (node.excluded or node.lost_earlier)]
    return facts.pool is not None and len(usable) > facts.pool.nodes


def has_substitute(facts: Facts) -> bool:
    """Return whether, as far as is known, a host could take the place of one that the job uses now."""
    return facts.pool is not None and count_free(facts) > facts.pool.nodes


def verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return why the attempt can never be placed, or None while it may be."""
    pool = facts.pool
    if pool is None or attempt.placed_at is not None or facts.jobs_ahead:
        return None
    ready = sum(_is_ready(node) for node in facts.nodes.values())
    usable = sum(
        not node.excluded and (node.agent_state is AgentState.UP or not node.is_unlaunchable)
        for node in facts.nodes.values()
    )
    if ready >= pool.nodes or (usable >= pool.nodes and _is_busy_anywhere(facts)):
        return None
    missing = _missing_hosts(facts)
    if missing and usable >= pool.nodes and _count_available(facts, deadlines) >= pool.nodes:
        return None  # others may take the place of the lost ones
    if missing:
        return _lost_hosts_verdict(facts, attempt, missing, ready, deadlines)
    launching = [node.launched_at for node in facts.nodes.values() if node.agent_state is AgentState.LAUNCHING]
    if usable >= pool.nodes or (launching and not deadlines.passed(max(launching) + LAUNCH_S_MAX)):
        return None  # the user wants to know of all faulty hosts at once
    reasons = _reasons(facts.nodes.values())
    needed = "1 host is" if pool.nodes == 1 else f"{pool.nodes} hosts are"
    head = f"{needed} needed, and {usable} of {len(facts.nodes)} can be used"
    return _verdict(facts, attempt, VerdictKind.LAUNCH, head, reasons, end=f"; {reasons[0]}")


def awaited_host(facts: Facts, attempt: AttemptFacts, now_s: float) -> tuple[NodeFacts, float] | None:
    """Return the lost host that an attempt waits for, as no other can replace it, and until when (job clock)."""
    if facts.pool is None or facts.limits is None or attempt.placed_at is not None:
        return None
    missing = _missing_hosts(facts)
    if not missing or _count_available(facts, Deadlines(now_s)) >= facts.pool.nodes:
        return None
    return missing[0], _return_limit_at(attempt, missing[0], facts.limits.node_timeout_s)


def _missing_hosts(facts: Facts) -> list[NodeFacts]:
    """Return the hosts that were lost and have not come back."""
    return [node for node in facts.nodes.values() if node.lost_earlier and node.agent_state is not AgentState.UP]


def _return_limit_at(attempt: AttemptFacts, node: NodeFacts, timeout_s: float) -> float:
    """Return until when a lost host has time to come back: `node_timeout_s` in this attempt, and a multiple of it since
    its last contact."""
    since_s = max(attempt.began_at, attempt.watched_at, attempt.queued_at)
    return max(since_s + timeout_s, node.contact_at + RETURN_TIMEOUTS * timeout_s)


def queue_timeout_verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on a job that has waited for hosts, or for earlier jobs, for as long as its user allows."""
    limit_s = facts.limits.queue_timeout_s if facts.limits is not None else None
    if limit_s is None or not is_queued(facts) or not deadlines.passed(attempt.began_at + limit_s):
        return None
    free = sum(_is_ready(node) for node in facts.nodes.values())
    busy = [
        d.Evidence(node.host_busy.reason, EvidenceKind.HOST, node.name)
        for node in facts.nodes.values()
        if node.host_busy
    ]
    ahead = [d.Evidence(f"jobs ahead: {', '.join(facts.jobs_ahead)}")] if facts.jobs_ahead else []
    needed = facts.pool.nodes if facts.pool is not None else 0
    summary = (
        f"queued for {deadlines.now_s - attempt.began_at:.0f} s, longer than monitor.queue_timeout: "
        f"{needed} hosts are needed, {free} were free"
    )
    return _verdict(facts, attempt, VerdictKind.START_TIMEOUT, summary, (*ahead, *busy))


def _lost_hosts_verdict(
    facts: Facts, attempt: AttemptFacts, missing: list[NodeFacts], ready: int, deadlines: Deadlines
) -> Verdict | None:
    """Return the verdict on lost hosts without a substitute, once they have had time to come back."""
    assert facts.pool is not None and facts.limits is not None
    node = missing[0]
    if not deadlines.passed(_return_limit_at(attempt, node, facts.limits.node_timeout_s)):
        return None
    summary = (
        f"{node.name} has not come back within {deadlines.now_s - node.contact_at:.0f} s ({node.lost_earlier}), and no other"
        f" host is free: {facts.pool.nodes} are needed, {ready} are ready"
    )
    reasons = _reasons(facts.nodes.values())
    return _verdict(facts, attempt, VerdictKind.NODE_LOST, summary, reasons, node.name)


def _verdict(
    facts: Facts,
    attempt: AttemptFacts,
    kind: VerdictKind,
    head: str,
    reasons: tuple[d.Evidence, ...],
    node: str = "",
    end: str = "",
) -> Verdict:
    return facts.verdict_on(
        kind, head, cause=FailureCause.PLACEMENT, node=node, proof=reasons, end=end,
        since_s=attempt.began_at, retry=facts.queue is not None,  # a queue has other nodes
    )  # fmt: skip


def _reasons(nodes: Iterable[NodeFacts]) -> tuple[d.Evidence, ...]:
    """Return, for each host that is not up, why it is not."""
    faults = [fault for node in nodes if (fault := unused_reason(node))]
    reasons = [d.Evidence(fault.what, EvidenceKind.HOST, fault.where, fault.fix) for fault in faults]
    return tuple(reasons[:REASONS_SHOWN]) or (d.Evidence("no host gave a reason"),)


def unused_reason(node: NodeFacts) -> Fault | None:
    """Return why a host is not used; None if there is no reason."""
    if node.agent_state is AgentState.UP or node.excluded:
        return node.excluded
    if node.lost_earlier:
        return Fault(node.name, node.lost_earlier)
    return Fault(node.name, f"busy: {node.host_busy.reason}") if node.host_busy else node.launch_fault


# Available hosts


def _is_ready(node: NodeFacts) -> bool:
    return node.agent_state is AgentState.UP and not node.ordered.leave and not node.excluded


def _is_available_soon(node: NodeFacts) -> bool:
    """Return whether the host is up, or may soon be if no other job uses it; a lost host is not relied on."""
    if node.agent_state is AgentState.UP:
        return not node.excluded
    if node.agent_state is AgentState.LAUNCHING:
        return not node.lost_earlier
    return not (node.excluded or node.lost_earlier or node.launch_failures >= LAUNCH_FAILURES_MAX)


def count_free(facts: Facts) -> int:
    """Return how many hosts are up, or may soon be as far as is known: those that others used at the last try do not count."""
    return sum(_is_available_soon(node) and not node.host_busy for node in facts.nodes.values())


def _count_available(facts: Facts, deadlines: Deadlines) -> int:
    return sum(_is_available_soon(node) and not _is_known_busy(facts, node, deadlines) for node in facts.nodes.values())


def _is_known_busy(facts: Facts, node: NodeFacts, deadlines: Deadlines) -> bool:
    if node.host_busy is None or node.agent_state is AgentState.LAUNCHING or node.host_busy.at < facts.busy_round_at:
        return False
    return not deadlines.passed(busy_retry_at(facts))


def _is_busy_anywhere(facts: Facts) -> bool:
    return any(node.host_busy for node in facts.nodes.values())


def busy_retry_at(facts: Facts) -> float:
    """Return when (job clock) busy hosts are asked again: all in one round, since a job needs them at the same time."""
    assert facts.pool is not None and facts.attempt is not None
    latest_at = max((node.host_busy.at for node in facts.nodes.values() if node.host_busy), default=0.0)
    pause_s = min(BUSY_PAUSE_SHARE * (latest_at - facts.attempt.began_at), BUSY_PAUSE_S_MAX)
    return latest_at + max(pause_s, BUSY_PAUSE_S) + facts.pool.seed % 1000 / 1000


# Actions


def _choose_hosts(facts: Facts, deadlines: Deadlines) -> Gang:
    pool = facts.pool
    assert pool is not None
    ready = [node.name for node in facts.nodes.values() if _is_ready(node)]
    if len(ready) < pool.nodes:
        return ()
    previous = facts.last_hosts[: pool.nodes]
    others = iter([name for name in ready if name not in previous])
    chosen = [name if name in ready else next(others) for name in previous]
    chosen += [next(others) for _ in range(pool.nodes - len(chosen))]
    if not previous and _is_earlier_host_coming(facts, chosen[-1], deadlines):
        return ()
    return tuple((name, pool.node_ranks(index)) for index, name in enumerate(chosen))


def _is_earlier_host_coming(facts: Facts, last: str, deadlines: Deadlines) -> bool:
    """Return whether a host that the user named earlier is still coming up, and not too slowly."""
    for node in facts.nodes.values():
        if node.name == last:
            return False
        if node.agent_state is AgentState.LAUNCHING and not deadlines.passed(node.launched_at + HOST_START_S_MAX):
            return True
    return False


def _placement_reason(facts: Facts, places: Gang) -> str:
    names = [name for name, _ in places]
    new = [name for name in names if name not in facts.last_hosts]
    removed = [name for name in facts.last_hosts if name not in names]
    if not removed:
        return f"{len(places)} hosts are ready"
    return f"{', '.join(new)} in place of {', '.join(removed)}"


def _launch_orders(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Launch the next hosts in order until as many as are wanted, apart from those with ranks, are up or coming up.

    Before the attempt is placed, lost hosts are tried as well, but not relied on.
    """
    assert facts.pool is not None
    hosts_needed = facts.pool.spares + (facts.pool.nodes if attempt.placed_at is None else 0)
    free = [node for node in facts.nodes.values() if not node.ranks]
    coming = {node.name for node in free if _is_coming(facts, node, deadlines)}
    if attempt.placed_at is not None and len(coming) >= hosts_needed:
        return []
    due = [node for node in free if node.name not in coming and is_launch_due(facts, node, deadlines)]
    lost = [node for node in due if node.lost_earlier and attempt.placed_at is None]
    others = [node for node in due if not node.lost_earlier or attempt.placed_at is not None]
    why = f"attempt {attempt.number} needs {facts.pool.nodes} hosts"
    spare = f" and {facts.pool.spares} spare" if facts.pool.spares else ""
    return [
        d.Launch(deadlines.now_s, why + spare, attempt.number, node.name)
        for node in [*lost, *others[: max(0, hosts_needed - len(coming))]]
    ]


def _is_coming(facts: Facts, node: NodeFacts, deadlines: Deadlines) -> bool:
    """Return whether the host is there, or its agent has just been launched, or may dial again; a gang that runs can
    wait longer for that than one that has no hosts."""
    assert facts.limits is not None and facts.attempt is not None
    if node.lost_earlier or node.excluded:
        return False
    wait_s_max = HOST_START_S_MAX if facts.attempt.placed_at is None else facts.limits.node_timeout_s
    match node.agent_state:
        case AgentState.UP:
            return not node.ordered.leave
        case AgentState.LAUNCHING:
            slow_s = min(wait_s_max, LAUNCH_S_MAX)
            return not deadlines.passed(node.launched_at + slow_s)
        case AgentState.SILENT:
            return not deadlines.passed(node.contact_at + wait_s_max)
        case AgentState.ABSENT:
            return False


def is_launch_due(facts: Facts, node: NodeFacts, deadlines: Deadlines) -> bool:
    """Return whether an agent of this node is to be launched now, if one is wanted there."""
    assert facts.limits is not None
    if node.excluded or (facts.pool is not None and _is_known_busy(facts, node, deadlines)):
        return False
    match node.agent_state:
        case AgentState.UP:
            return False
        case AgentState.LAUNCHING:
            return deadlines.passed(node.launched_at + LAUNCH_S_MAX)
        case AgentState.SILENT:
            return deadlines.passed(node.contact_at + facts.limits.node_timeout_s)
        case AgentState.ABSENT:
            if node.is_unlaunchable:
                return False
            return deadlines.passed(node.launched_at + LAUNCH_PAUSES.pause_s(node.launch_failures))


def _dismiss_all(facts: Facts, deadlines: Deadlines) -> list[Decision]:
    """Release the hosts that are up: other jobs may need them while this job waits."""
    why = (
        "earlier jobs come first"
        if facts.jobs_ahead
        else "not enough hosts are free: the job holds none while it waits"
    )
    return dismissals(facts, facts.nodes.values(), why, deadlines)


def dismissals(facts: Facts, nodes: Iterable[NodeFacts], why: str, deadlines: Deadlines) -> list[Decision]:
    """Return the orders to the agents of these nodes to leave, as far as they are up and were not told so yet."""
    number = facts.attempt.number if facts.attempt else 0
    return [
        d.To(deadlines.now_s, why, node.name, Dismiss(number))
        for node in nodes
        if node.agent_state is AgentState.UP and not node.ordered.leave
    ]
