"""Notices: what a person should know about how a job is set up. They affect no rank; each is given once.

Independent ranks: the job has several ranks, each makes steps, and none has formed a process group with another, so that
each trains its own copy. There is no notice once one rank has a group, or where that is unknown: a script may form its
group late, some ranks may work alone on purpose, and other libraries connect ranks without torch.distributed.

Steps: a checkpoint contains another step than orch counted.

Loss: the loss that ranks print is not finite.

End: every rank exited with code 0, and a log ends with a traceback, the ranks made fewer steps than they have printed, or
none though the script trains. The job has succeeded all the same: exit codes say that.
"""

from __future__ import annotations

import math
from itertools import islice

from orchestrator.brain import training
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Topic
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.rank_facts import RankFacts
from orchestrator.core.errors import Fault
from orchestrator.core.observations import Framework
from orchestrator.core.shown import NOT_TOLD
from orchestrator.core.text import named

ALONE_STEPS = 30
"""Steps without a process group after which a rank counts as independent. A rank that has ended well forms none later."""

DONE_SHARE = 0.9
"""Below this share of the printed total, training counts as unfinished: some scripts print rarely, some skip steps."""

NO_LONGER_ALONE = "the ranks no longer train alone"


def decide(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> list[d.Decision]:
    """Give the notices that are due, and withdraw that on ranks that are alone when it no longer holds."""
    now_s, number = deadlines.now_s, attempt.number
    if attempt.phase is Phase.RUN:
        alone = alone_fault(facts)
        if alone and attempt.noticed(Topic.ALONE) is None:
            return [d.Notice(now_s, alone.what, number, Topic.ALONE, fix=alone.fix)]
        if attempt.standing(Topic.ALONE) and not alone:
            return [d.Notice(now_s, NO_LONGER_ALONE, number, Topic.ALONE, withdrawn=True)]
        if loss := _loss(facts, attempt, now_s):
            return [loss]
        if facts.done and attempt.noticed(Topic.END) is None and (doubts := contradictions(facts)):
            return [
                d.Notice(now_s, f"every rank exited with code 0, and {'; '.join(doubts)}", number, Topic.END)
            ]
    if attempt.differing and not any(one.noticed(Topic.STEPS) for one in _attempts(facts, attempt)):
        return [d.Notice(now_s, attempt.differing, number, Topic.STEPS)]
    return []


def alone_fault(facts: Facts) -> Fault | None:
    """Return the fault that all ranks train alone, with its fix; None where they do not."""
    ranks = list(facts.ranks.values())
    if len(ranks) < 2 or not all(_is_alone(rank) for rank in ranks):
        return None
    steps = min(rank.steps for rank in ranks)
    after = f"after {steps:,} steps" if steps > 1 else "after a step"
    seen = (
        "Accelerate has connected none of them"
        if ranks[0].beat.alone is Framework.ACCELERATE
        else "none has formed a process group"
    )
    return Fault("", f"{len(ranks)} ranks train alone: {seen} {after}", _mend(facts, ranks[0]))


def contradictions(facts: Facts) -> list[str]:
    """Return the signs that a job is not finished though all ranks exited with code 0."""
    told = training.told(facts)
    left = {rank.rank: rank.failure for rank in facts.ranks.values() if rank.failure is not None}
    texts = dict.fromkeys(failure.text for failure in left.values() if failure.type)
    found = [
        f"the log of {named([rank for rank, failure in left.items() if failure.text == text])} ends with {text}"
        for text in texts
    ]
    total = training.total_steps(facts.step, training.rate_per_s(facts), told)
    if facts.made and facts.step and total and facts.step < DONE_SHARE * total:
        found.append(f"it made {facts.step:,} of the {total:,} steps that it printed")
    if left and not texts and not facts.step and not facts.saves and told == NOT_TOLD:
        last = [
            f": the log of {named([rank])} ends with: {one.text}" for rank, one in left.items() if one.text
        ]
        found.append(f"no step was made{''.join(last[:1])}")
    return found


def _loss(facts: Facts, attempt: AttemptFacts, now_s: float) -> d.Notice | None:
    """Return the notice of a loss that is not finite, or its withdrawal."""
    told = (rank.training.loss for rank in islice(facts.ranks.values(), training.TOLD_MAX) if rank.training)
    loss, standing = next((loss for loss in told if loss is not None), None), attempt.standing(Topic.LOSS)
    if loss is None or math.isfinite(loss) == (standing is None):
        return None
    since = f", seen from step {facts.step:,} on" if facts.step else ""
    why = f"loss is {loss:.4g} again" if standing else f"loss is {loss}{since}"
    return d.Notice(now_s, why, attempt.number, Topic.LOSS, withdrawn=standing is not None)


def _attempts(facts: Facts, attempt: AttemptFacts) -> list[AttemptFacts]:
    return [*(past.attempt for past in facts.past), attempt]


def _is_alone(rank: RankFacts) -> bool:
    return rank.beat.alone is not None and (rank.steps >= ALONE_STEPS or (rank.ended_well and rank.steps > 0))


def _mend(facts: Facts, rank: RankFacts) -> str:
    together = "if they are to train together,"
    match rank.beat.alone:
        case Framework.LIGHTNING:
            devices, nodes = len(facts.gang[0].ranks), len(facts.gang)
            return f"{together} Trainer(strategy='ddp', devices={devices}, num_nodes={nodes}) in Lightning, or the same in Fabric"
        case Framework.ACCELERATE:
            return f"{together} env: {{ACCELERATE_USE_CPU: 'true'}}, without it Accelerate and transformers connect no ranks on CPUs"
        case Framework.TORCH | None:
            return f"{together} torch.distributed.init_process_group() and DistributedDataParallel(model)"
