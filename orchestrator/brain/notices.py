"""Notices: remarks for a person on how a job is set up or ended. They affect no rank; each is given once.

Independent ranks: the job has several ranks, each makes steps, and none has formed a process group with another, so that
each trains its own copy. There is no notice once one rank has a group, or where that is unknown: a script may form its
group late, some ranks may work alone on purpose, and other libraries connect ranks without torch.distributed.

Steps: a checkpoint contains another step than orch counted.

Loss: the loss that ranks print, or the norm of their gradients, is not finite.

Replicas: see `replicas`.

Memory: checkpoints of nodes are written to disk, although the job wants them in memory.

End: every rank exited with code 0, and a log ends with a traceback, the ranks made fewer steps than they have printed, or
none though the script trains. The job has succeeded all the same: exit codes say that.
"""

from __future__ import annotations

import math
from itertools import islice

from orchestrator.brain import replicas, training
from orchestrator.brain.checks.finding import join_names
from orchestrator.brain.diagnosis import divergence
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import NoticeTopic
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.rank_facts import REPORTING_RANKS_MAX, RankFacts
from orchestrator.core.errors import Fault
from orchestrator.core.observations import Framework
from orchestrator.core.status_types import NOT_REPORTED
from orchestrator.core.text import ranks_label, shorten_list

INDEPENDENT_STEPS = 30
"""Steps without a process group after which a rank counts as independent. A rank that has ended well forms none later."""

FINISHED_SHARE = 0.9
"""Below this share of the printed total, training counts as unfinished: some scripts print rarely, some skip steps."""

REASONS_SHOWN = 3
"""How many reasons are named for which checkpoints are not in memory."""

RANKS_CONNECTED = "the ranks no longer train alone"


def decide(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[d.Decision]:
    """Give the notices that are due, and withdraw that on ranks that are alone when it no longer holds."""
    now_s, number = deadlines.now_s, attempt.number
    if attempt.phase is Phase.RUN:
        independent = independent_ranks_fault(facts)
        if independent and attempt.last_notice(NoticeTopic.ALONE) is None:
            return [d.Notice(now_s, independent.what, number, NoticeTopic.ALONE, fix=independent.fix)]
        if attempt.active_notice(NoticeTopic.ALONE) and not independent:
            return [d.Notice(now_s, RANKS_CONNECTED, number, NoticeTopic.ALONE, withdrawn=True)]
        if loss := _loss_notice(facts, attempt, now_s):
            return [loss]
        if full := _memory_notice(attempt, now_s):
            return [full]
        if drift := replicas.notice(facts, attempt, now_s):
            return [drift]
        if facts.is_done and attempt.last_notice(NoticeTopic.END) is None and (doubts := find_contradictions(facts)):
            return [d.Notice(now_s, f"every rank exited with code 0, and {'; '.join(doubts)}", number, NoticeTopic.END)]
    if attempt.step_mismatch and not any(one.last_notice(NoticeTopic.STEPS) for one in _all_attempts(facts, attempt)):
        return [d.Notice(now_s, attempt.step_mismatch, number, NoticeTopic.STEPS)]
    return []


def independent_ranks_fault(facts: Facts) -> Fault | None:
    """Return the fault that all ranks train alone, with its fix; None where they do not."""
    ranks = list(facts.ranks.values())
    if len(ranks) < 2 or not all(_is_independent(rank) for rank in ranks):
        return None
    steps = min(rank.steps for rank in ranks)
    after_steps = f"after {steps:,} steps" if steps > 1 else "after a step"
    observation = (
        "Accelerate has connected none of them"
        if ranks[0].beat.alone is Framework.ACCELERATE
        else "none has formed a process group"
    )
    return Fault("", f"{len(ranks)} ranks train alone: {observation} {after_steps}", _fix_text(facts, ranks[0]))


def find_contradictions(facts: Facts) -> list[str]:
    """Return the signs that a job is not finished though all ranks exited with code 0."""
    reported = training.reported_training(facts)
    failures = {rank.rank: rank.failure for rank in facts.ranks.values() if rank.failure is not None}
    texts = dict.fromkeys(failure.text for failure in failures.values() if failure.type)
    doubts = [
        f"the log of {ranks_label([rank for rank, failure in failures.items() if failure.text == text])} ends with {text}"
        for text in texts
    ]
    total = training.total_steps(facts.step, training.rate_per_s(facts), reported)
    if facts.steps_made and facts.step and total and facts.step < FINISHED_SHARE * total:
        doubts.append(f"it made {facts.step:,} of the {total:,} steps that it printed")
    if failures and not texts and not facts.step and not facts.checkpoints and reported == NOT_REPORTED:
        log_ends = [
            f": the log of {ranks_label([rank])} ends with: {one.text}" for rank, one in failures.items() if one.text
        ]
        doubts.append(f"no step was made{''.join(log_ends[:1])}")
    return doubts


def _loss_notice(facts: Facts, attempt: AttemptFacts, now_s: float) -> d.Notice | None:
    """Return the notice of a loss, or norm, that is not finite, or its withdrawal."""
    ranks = list(islice(facts.ranks.values(), REPORTING_RANKS_MAX))
    losses = (rank.training.loss for rank in ranks if rank.training)
    loss, active = (
        next((loss for loss in losses if loss is not None), None),
        attempt.active_notice(NoticeTopic.LOSS),
    )
    norm = next((text for rank in ranks if (text := divergence.describe_norm(attempt, rank))), "")
    is_odd = loss is not None and not math.isfinite(loss)
    if (is_odd or bool(norm)) == (active is not None):
        return None
    since = f", seen from step {facts.step:,} on" if facts.step else ""
    again = "gradient norm is finite again" if loss is None else f"loss is {loss:.4g} again"
    why = again if active else f"loss is {loss}{since}" if is_odd else norm
    return d.Notice(now_s, why, attempt.number, NoticeTopic.LOSS, withdrawn=active is not None)


def _memory_notice(attempt: AttemptFacts, now_s: float) -> d.Notice | None:
    """Return the notice of nodes that write their checkpoints to disk, once in each attempt."""
    faults = attempt.memory_faults
    if not faults or attempt.last_notice(NoticeTopic.MEMORY):
        return None
    reasons = shorten_list(list(dict.fromkeys(faults.values())), REASONS_SHOWN, "reasons")
    why = f"{join_names(list(faults))}: checkpoints are written to disk: {'; '.join(reasons)}"
    return d.Notice(now_s, why, attempt.number, NoticeTopic.MEMORY)


def _all_attempts(facts: Facts, attempt: AttemptFacts) -> list[AttemptFacts]:
    return [*(past.attempt for past in facts.past_attempts), attempt]


def _is_independent(rank: RankFacts) -> bool:
    return rank.beat.alone is not None and (rank.steps >= INDEPENDENT_STEPS or (rank.ended_well and rank.steps > 0))


def _fix_text(facts: Facts, rank: RankFacts) -> str:
    condition = "if they are to train together,"
    match rank.beat.alone:
        case Framework.LIGHTNING:
            devices, nodes = len(facts.gang[0].ranks), len(facts.gang)
            return f"{condition} Trainer(strategy='ddp', devices={devices}, num_nodes={nodes}) in Lightning, or the same in Fabric"
        case Framework.ACCELERATE:
            return f"{condition} env: {{ACCELERATE_USE_CPU: 'true'}}, without it Accelerate and transformers connect no ranks on CPUs"
        case Framework.TORCH | None:
            return f"{condition} torch.distributed.init_process_group() and DistributedDataParallel(model)"
