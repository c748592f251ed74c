"""Heartbeats and inspections of ranks, folded into their facts, and heartbeats coalesced for the journal.

A coalesced heartbeat holds all that the facts hold, so that replaying it gives the same facts.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

from orchestrator.brain.diagnosis import suspicion
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.core import observations
from orchestrator.core.wire.reports import Heartbeat, RankHeartbeat, SignTimes

_SIGN_TIMES = tuple(field.name for field in fields(SignTimes))


def fold(rank: RankFacts, beat: RankHeartbeat, at: float, watched_at: float) -> None:
    """Fold what a beat says of a living rank; `suspicion.SIGNS` defines which parts of it are signs of life."""
    rank.usage = rank.usage if beat.usage is None else beat.usage
    if beat.training is not None:
        _fold_loss(rank, beat.training.loss, beat.steps)
        rank.training = beat.training
    if beat.seen is not None:
        rank.steps, rank.state, rank.log_bytes, rank.cpu_s = (
            beat.steps,
            beat.state,
            beat.log_bytes,
            beat.cpu_s,
        )
        for name in _SIGN_TIMES:
            setattr(rank, name, getattr(beat.seen, name))
        rank.beat = replace(beat, seen=None, usage=None, training=None)
        return
    if suspicion.is_busy(rank, beat, at):
        rank.busy_at = at
    signs = suspicion.signs(rank, beat)
    if signs:
        rank.sign_at = at
    if any(sign.weight is not suspicion.Weight.START for sign in signs):
        rank.activity_at = at
    rank.cpu_s = max(rank.cpu_s, beat.cpu_s)
    if beat.state != rank.state:
        rank.state, rank.state_at = beat.state, at
    if beat.steps > rank.steps or beat.optimizer_steps > rank.beat.optimizer_steps:
        if rank.steps:  # time without a supervisor is not a pause
            rank.pause_s = max(rank.pause_s, at - max(rank.step_at, watched_at))
        rank.steps, rank.step_at = max(beat.steps, rank.steps), at
    if beat.passes > rank.beat.passes:
        rank.pass_at = at
    if beat.has_group and not rank.group_at:
        rank.group_at = at
    rank.log_bytes = max(rank.log_bytes, beat.log_bytes)
    rank.beat_at = at
    if beat.groups or beat.usage is not None or beat.training is not None or beat.parameter_sums:
        beat = replace(beat, groups=(), collective_counts=(), usage=None, training=None, parameter_sums=())
    rank.beat = beat


def _fold_loss(rank: RankFacts, loss: float | None, steps: int) -> None:
    """Fold a report of a loss at this step. Reports repeat the last loss until there is another: only one that differs shows
    that the weights were sound at the report before."""
    if loss is None:
        return
    is_new = rank.training is None or rank.training.loss != loss
    if is_new and math.isfinite(loss):
        rank.finite_loss, rank.finite_steps = loss, rank.loss_steps
    rank.loss_steps = max(rank.loss_steps, steps)


def coalesce_heartbeats(facts: Facts, node: str, at: float) -> e.FromNode:
    """Return the beat, heard `at`, that says of the node's living ranks all that the facts hold."""
    ranks = tuple(
        replace(
            rank.beat,
            rank=rank.rank,
            steps=rank.steps,
            state=rank.state,
            log_bytes=rank.log_bytes,
            cpu_s=rank.cpu_s,
            usage=rank.usage,
            training=rank.training,
            seen=SignTimes(*(getattr(rank, name) for name in _SIGN_TIMES)),
        )
        for rank in facts.ranks_on(node)
        if rank.rank_state is RankState.ALIVE
    )
    return e.FromNode(at, node, Heartbeat(facts.attempt.number if facts.attempt else 0, ranks))


def has_entered_new_collective(rank: RankFacts, inspection: observations.RankInspection, quiet_since_s: float) -> bool:
    """Return whether a rank has entered another collective since the previous inspection, in the present silence: those
    that were entered before the silence say nothing."""
    if rank.inspection is None or rank.inspected_at < quiet_since_s:
        return False
    previous_numbers = {
        (collective.group, collective.ranks): collective.number for collective in rank.inspection.collectives
    }
    return any(
        collective.number > previous_numbers.get((collective.group, collective.ranks), collective.number)
        for collective in inspection.collectives
    )
