"""Launcher calls of the scripts that nodes run (`launch` of a job file): when the gang starts again, and what goes wrong.

1. Each node runs the script once in an attempt. Where it calls a launcher, the node is prepared for that call; its ranks
   start when every node has reached the same call.
2. When all ranks of a call have ended well and every node has reached the next call, the same gang starts again.
3. The attempt has succeeded when the scripts of all nodes have ended with code 0 after their ranks.
4. A script that ends with another code has failed. So has a gang of which some nodes come to a call, and others do not.
"""

from __future__ import annotations

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import (
    Decision,
    Evidence,
    EvidenceKind,
    FailureCause,
    Verdict,
    VerdictKind,
)
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.node_facts import AgentState, NodeFacts

_NO_CALL = "the script ended without a call of torchrun, accelerate launch, deepspeed, srun or another launcher that orch knows"
_NO_RANK_STARTED = Evidence(
    "no rank was started",
    fix="a program that trains without a launcher is entrypoint: train.py; for one that starts its processes itself write "
    "procs_per_node: 1, too",
)


def next_call(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[Decision]:
    """Return the decision that the gang starts again: all of it has ended well, and has reached the next call."""
    number, gang = attempt.call + 1, facts.gang
    if not (facts.runs_launch_script and facts.are_ranks_done):
        return []
    if any(node.launcher_call < number or node.agent_state is not AgentState.UP for node in gang):
        return []
    why = f"every node's script has reached launcher call {number}"
    return [d.NextCall(deadlines.now_s, why, attempt.number, number)]


def verdict(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on scripts that failed, or that reached different calls; None while there is no failure."""
    if facts.limits is None or not facts.limits.launches:
        return None
    gang = facts.gang
    for node in gang:
        if node.script_end is not None and node.script_end.code != 0:
            return _failed_script_verdict(facts, node)
    awaited = attempt.call + 1 if attempt.phase is Phase.RUN and attempt.running_at is not None else attempt.call
    arrived = [node for node in gang if node.launcher_call >= awaited]
    ended = [node for node in gang if node.launcher_call < awaited and node.script_end is not None]
    if arrived and ended:
        return _split_verdict(facts, awaited, arrived, ended, "ended without it", retry=False)
    if ended and len(ended) == len(gang) and awaited == 1:
        return facts.verdict_on(
            VerdictKind.LAUNCH, f"{ended[0].name}: {_NO_CALL}", node=ended[0].name, cause=FailureCause.SETUP, place=(_NO_CALL,),
            proof=(_NO_RANK_STARTED, *_output(ended[0])), since_s=ended[0].contact_at,
            retry=False,
        )  # fmt: skip
    late = [node for node in gang if node not in arrived]
    if not arrived or not late or awaited == 1 or not facts.are_ranks_done:
        return None  # the limit for the first start is that of the attempt
    since_s = max(*(node.launcher_call_at for node in arrived), facts.ended_well_at or 0.0, attempt.watched_at)
    limit_s = facts.limits.start_timeout_s
    if not deadlines.passed(since_s + limit_s):
        return None
    return _split_verdict(facts, awaited, arrived, late, f"did not reach it within {limit_s:g} s", retry=True)


def _failed_script_verdict(facts: Facts, node: NodeFacts) -> Verdict:
    end = node.script_end
    assert end is not None
    how = f"code {end.code}" if end.code > 0 else f"signal {-end.code}"
    when = f"after launcher call {end.calls}" if end.calls else "before it called a launcher"
    kind = VerdictKind.CRASH if end.calls else VerdictKind.LAUNCH
    cause, place = (FailureCause.EXIT_CODE, how) if end.calls else (FailureCause.SETUP, "the script")
    return facts.verdict_on(
        kind, f"{node.name}: the script ended with {how}, {when}", node=node.name, cause=cause, place=(place, how),
        proof=_output(node) if end.calls else (_NO_RANK_STARTED, *_output(node)), since_s=node.contact_at,
    )  # fmt: skip


def _split_verdict(
    facts: Facts, call: int, arrived: list[NodeFacts], others: list[NodeFacts], how: str, *, retry: bool
) -> Verdict:
    """Return the verdict on a gang of which only some nodes have reached a call."""
    names = [", ".join(node.name for node in nodes) for nodes in (arrived, others)]
    fix = "every node runs the script: a launcher must be called on all of them, not behind a test of the node's number"
    return facts.verdict_on(
        VerdictKind.RENDEZVOUS, f"launcher call {call}: {names[0]} reached it, {names[1]} {how}",
        node=others[0].name if len(others) == 1 < len(arrived) else "", cause=FailureCause.OTHER,
        proof=(Evidence("ranks start when all nodes have reached the same call", fix=fix), *_output(others[0])),
        since_s=others[0].contact_at, retry=retry,
    )  # fmt: skip


def _output(node: NodeFacts) -> tuple[Evidence, ...]:
    tail = node.script_end.tail if node.script_end is not None else ""
    return (Evidence(tail, EvidenceKind.OUTPUT, node.name),) if tail else ()
