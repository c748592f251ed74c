"""Divergence: a loss, or norm of gradients, that is not finite, as the verdict `monitor.on_nan: rollback` or `fail` asks for.

Rules:
1. Two losses in a row that are not finite: a GradScaler skips a step on purpose, and such a loss comes alone. Or two norms
   in a row, see `GradientNorms`.
2. Weights count as sound up to the step of the report before the last finite loss: a loss is read some seconds late.
   A norm is known with its step, and is of the gradients at the weights of the step before.
3. Checkpoints after that step are distrusted. Where an attempt has shown no finite one, that is the one it began from.
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
    """Return the verdict on a loss, or norm, that stays not finite, or None."""
    assert facts.limits is not None
    rank = _diverged(facts)
    if facts.limits.on_nan == "notify" or attempt.phase is not Phase.RUN or rank is None:
        return None
    loss = rank.training.loss if rank.training is not None else None
    sound, was_finite = sound_step(facts, attempt), _finite_steps(rank) is not None
    before = "" if rank.finite_loss is None else f", and was {rank.finite_loss:.4g} before"
    norm = describe_norm(attempt, rank)
    retry = facts.limits.on_nan == "rollback"
    proof = [Evidence(f"the loss was finite up to step {sound:,}")] if was_finite and not norm else []
    if not was_finite and attempt.resume is None:
        proof.append(Evidence(f"no {'norm' if norm else 'loss'} of it was finite, from the first step on"))
        retry = False
    for past in (past for past in facts.past_attempts if past.number > facts.resumed_after):
        is_same = past.verdict is not None and past.verdict.kind is VerdictKind.DIVERGED
        if is_same and was_finite and sound <= (past.failed_step or 0):
            proof.append(
                Evidence(f"attempt {past.number} diverged at the same place: the script or its data is the cause")
            )
            retry = False
    return facts.verdict_on(
        VerdictKind.DIVERGED, f"rank {rank.rank} on {rank.node}: {norm or f'the loss is {loss}{before}'}",
        ranks=(rank.rank,), node=rank.node, proof=tuple(proof), retry=retry,
    )  # fmt: skip


def sound_step(facts: Facts, attempt: AttemptFacts) -> int:
    """Return the job's last step whose weights are known to give a finite loss, or norm: one before the step that the attempt
    began from where none was finite."""
    rank = _diverged(facts)
    steps = None if rank is None else _finite_steps(rank)
    return attempt.base_step - 1 if steps is None else attempt.call_step + steps


def describe_norm(attempt: AttemptFacts, rank: RankFacts) -> str:
    """Return from which step on the norms of a rank's gradients are not finite; empty where that is not known of them."""
    if not rank.beat.gradient_norms or rank.beat.nonfinite_losses < LOSSES_MIN:
        return ""
    (step, norm), *finite = ((attempt.call_step + step, norm) for step, norm in rank.beat.gradient_norms)
    return f"gradient norm is {norm} at step {step:,}" + "".join(
        f" (last finite {one:.4g} at step {at:,})" for at, one in finite
    )


def _finite_steps(rank: RankFacts) -> int | None:
    """Return the last of a rank's steps whose weights are known to give a finite loss, or norm; None where none was finite."""
    if rank.beat.gradient_norms[1:]:
        return rank.beat.gradient_norms[-1][0] - 1
    return None if rank.finite_loss is None else rank.finite_steps


def _diverged(facts: Facts) -> RankFacts | None:
    ranks = islice(facts.ranks.values(), REPORTING_RANKS_MAX)
    return next((rank for rank in ranks if rank.beat.nonfinite_losses >= LOSSES_MIN), None)
