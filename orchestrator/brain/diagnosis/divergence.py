"""Divergence: a loss that is not finite, as the verdict `monitor.on_nan: rollback` or `fail` asks for.

Rules:
1. Two losses in a row that are not finite: a GradScaler skips a step on purpose, and such a loss comes alone.
2. Weights count as sound up to the step of the report before the last finite loss: a loss is read some seconds late.
3. Checkpoints after that step are distrusted. Where an attempt has shown no finite loss, that is the one it began from.
4. The attempt is the last one where it began from nothing, or did not get past the step at which an earlier one diverged.
"""

from __future__ import annotations

from itertools import islice

from orchestrator.brain.model.deadlines import Deadlines
from orchestrator.brain.model.decisions import Evidence, Verdict, VerdictKind
from orchestrator.brain.model.facts import AttemptFacts, Facts, Phase
from orchestrator.brain.model.rank_facts import REPORTING_RANKS_MAX, RankFacts

LOSSES_MIN = 2
"""How many losses in a row must not be finite."""


def judge(facts: Facts, attempt: AttemptFacts, deadlines: Deadlines) -> Verdict | None:
    """Return the verdict on a loss that stays not finite, or None."""
    assert facts.limits is not None
    rank = _diverged(facts)
    if facts.limits.on_nan == "notify" or attempt.phase is not Phase.RUN or rank is None:
        return None
    loss = rank.training.loss if rank.training is not None else None
    sound = sound_step(facts, attempt)
    before = "" if rank.finite_loss is None else f", and was {rank.finite_loss:.4g} before"
    retry = facts.limits.on_nan == "rollback"
    proof = [] if rank.finite_loss is None else [Evidence(f"the loss was finite up to step {sound:,}")]
    if rank.finite_loss is None and attempt.resume is None:
        proof.append(Evidence("no loss of it was finite, from the first step on"))
        retry = False
    for past in (past for past in facts.past_attempts if past.number > facts.resumed_after):
        is_same = past.verdict is not None and past.verdict.kind is VerdictKind.DIVERGED
        if is_same and rank.finite_loss is not None and sound <= (past.failed_step or 0):
            proof.append(
                Evidence(f"attempt {past.number} diverged at the same place: the script or its data is the cause")
            )
            retry = False
    return facts.verdict_on(
        VerdictKind.DIVERGED, f"rank {rank.rank} on {rank.node}: the loss is {loss}{before}", ranks=(rank.rank,),
        node=rank.node, proof=tuple(proof), retry=retry,
    )  # fmt: skip


def sound_step(facts: Facts, attempt: AttemptFacts) -> int:
    """Return the job's last step whose weights are known to give a finite loss: one before the step that the attempt began
    from where no loss was finite."""
    rank = _diverged(facts)
    if rank is None or rank.finite_loss is None:
        return attempt.base_step - 1
    return attempt.call_step + rank.finite_steps


def _diverged(facts: Facts) -> RankFacts | None:
    ranks = islice(facts.ranks.values(), REPORTING_RANKS_MAX)
    return next((rank for rank in ranks if rank.beat.nonfinite_losses >= LOSSES_MIN), None)
