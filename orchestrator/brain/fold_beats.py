"""Heartbeats and inspections of ranks, folded into their facts, and heartbeats coalesced for the journal.

A coalesced heartbeat holds all that the facts hold, so that replaying it gives the same facts.
"""

from __future__ import annotations

from orchestrator.brain.diagnosis import suspicion
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.core import observations


def take(rank: RankFacts, beat: e.RankHeartbeat, at: float, watched_at: float) -> None:
    """Fold what a beat says of a living rank; `suspicion.SIGNS` defines which parts of it are signs of life."""
    if beat.seen is not None:
        rank.steps, rank.state, rank.log_bytes, rank.cpu_s = (
            beat.steps,
            beat.state,
            beat.log_bytes,
            beat.cpu_s,
        )
        _rest(rank, beat)
        rank.sign_at, rank.step_at = beat.seen.sign_at, beat.seen.step_at
        rank.state_at, rank.beat_at = beat.seen.state_at, beat.seen.beat_at
        rank.busy_at, rank.exiting_at, rank.pause_s = (
            beat.seen.busy_at,
            beat.seen.exiting_at,
            beat.seen.pause_s,
        )
        rank.activity_at = beat.seen.activity_at
        return
    if suspicion.is_busy(rank, beat, at):
        rank.busy_at = at
    signs = suspicion.signs(rank, beat)
    moved = bool(signs)
    if moved:
        rank.sign_at = at
    if any(sign.weight is not suspicion.Weight.START for sign in signs):
        rank.activity_at = at
    rank.cpu_s = max(rank.cpu_s, beat.cpu_s)
    if beat.state != rank.state:
        rank.state, rank.state_at = beat.state, at
    if beat.steps > rank.steps or beat.optimizer_steps > rank.optimizer_steps:
        if rank.steps:  # time without a supervisor is not a pause
            rank.pause_s = max(rank.pause_s, at - max(rank.step_at, watched_at))
        rank.steps, rank.step_at = max(beat.steps, rank.steps), at
    if beat.exiting and not rank.exiting:
        rank.exiting_at = at
    _rest(rank, beat)
    rank.log_bytes = max(rank.log_bytes, beat.log_bytes)
    rank.beat_at = at


def _rest(rank: RankFacts, beat: e.RankHeartbeat) -> None:
    rank.io_bytes, rank.median_step_s, rank.own_work_s, rank.exiting = (
        beat.io_bytes,
        beat.median_step_s,
        beat.own_work_s,
        beat.exiting,
    )
    rank.optimizer_steps, rank.alone, rank.progress = beat.optimizer_steps, beat.alone, beat.progress


def coalesced_beat(facts: Facts, node: str, at: float) -> e.Heartbeat:
    """Return the beat, heard `at`, that says of the node's living ranks all that the facts hold."""
    ranks = tuple(
        e.RankHeartbeat(
            rank.rank, rank.steps, rank.state, rank.log_bytes, rank.cpu_s, rank.io_bytes, rank.median_step_s, rank.own_work_s,
            rank.exiting, optimizer_steps=rank.optimizer_steps, alone=rank.alone, progress=rank.progress,
            seen=e.SignTimes(
                rank.sign_at, rank.step_at, rank.state_at, rank.beat_at, rank.busy_at, rank.exiting_at, rank.pause_s,
                rank.activity_at,
            ),
        )
        for rank in facts.ranks_on(node)
        if rank.rank_state is RankState.ALIVE
    )  # fmt: skip
    return e.Heartbeat(at, node, facts.attempt.number if facts.attempt else 0, ranks)


def entered_another(rank: RankFacts, inspection: observations.RankInspection, quiet_since_s: float) -> bool:
    """Tell whether a rank has entered another collective since the previous inspection, in the present silence: those
    that were entered before the silence say nothing."""
    if rank.inspection is None or rank.inspected_at < quiet_since_s:
        return False
    before = {(one.group, one.ranks): one.number for one in rank.inspection.collectives}
    return any(one.number > before.get((one.group, one.ranks), one.number) for one in inspection.collectives)
