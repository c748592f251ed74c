"""Checkpoints in the brain: the progress of an attempt by its checkpoints, the notice that steps differ, and checkpoints
that are distrusted. `core.checkpoints.resume_choice` chooses the newest one.

A checkpoint is distrusted when attempts cannot resume from it: a rank raised while loading it, or two attempts from it
failed in the same way before their first step. The next older one is used. If the job ends before an attempt makes
progress from that one, the checkpoints may not have been the cause (a library, the code), and are trusted again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import ActualResume, AttemptFacts, Facts
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState, Content, StepSource
from orchestrator.core.checkpoints.resume_choice import choose_checkpoint
from orchestrator.core.checkpoints.steps import NEAR_STEPS

CHECKPOINTS_MAX = 300
"""How many checkpoints are remembered here; the ledger has all."""

IGNORED_CHECKPOINT = "the script seems to start from scratch instead of resuming from its checkpoint"
IGNORED_CHECKPOINT_HINT = "does it read ORCH_RESUME_FROM, or checkpoint.resume_args?"

STEP_MISMATCH_SHARE = 0.2
STEP_MISMATCH_MIN = 10
"""By which share of the larger, and by how many steps at least, a stated step and a counted one differ when that is
said: a checkpoint in the background ends some steps later."""


@dataclass(frozen=True, slots=True)
class UnloadableCheckpoint:
    """A checkpoint that the attempt could not resume from, and how that is known."""

    save: Checkpoint
    why: str
    is_certain: bool


def fold_checkpoint_changed(facts: Facts, news: e.CheckpointChanged) -> None:
    """Enter a checkpoint that is new or has changed."""
    checkpoint, previous = news.save, facts.checkpoints.get(news.save.number)
    facts.checkpoints[checkpoint.number] = checkpoint
    _forget_oldest(facts)
    attempt = facts.attempt
    if attempt is None or checkpoint.attempt != attempt.number:
        return
    _distrust_unsound(facts, attempt)
    _note_progress(facts, attempt)
    is_new = checkpoint.state is CheckpointState.WHOLE and (
        previous is None or previous.state is not CheckpointState.WHOLE
    )
    if is_new and checkpoint.stated is not None and checkpoint.steps:
        _compare_steps(attempt, checkpoint)


def fold_resumed_elsewhere(facts: Facts, news: e.ResumedElsewhere) -> None:
    """Note where the script of the current attempt truly began."""
    attempt = facts.attempt
    if attempt is not None and attempt.number == news.attempt and attempt.actual_resume is None:
        attempt.actual_resume = ActualResume(news.step, news.main, news.steps)
        attempt.began_from_checkpoint = False
        _note_progress(facts, attempt)


def fold_checkpoint_read(facts: Facts, news: e.CheckpointRead) -> None:
    """Note from which checkpoint the ranks of the current attempt resumed, by what they had read."""
    attempt = facts.attempt
    if attempt is None or attempt.number != news.attempt:
        return
    given, checkpoint = attempt.resume.save if attempt.resume is not None else 0, facts.checkpoints.get(news.save)
    if news.save == given:
        attempt.began_from_checkpoint = given > 0
    else:
        step = checkpoint.step if checkpoint is not None else None
        attempt.actual_resume = ActualResume(
            step or 0, checkpoint.main if checkpoint is not None else "", checkpoint_read=news.save
        )
        attempt.began_from_checkpoint = False
    _note_progress(facts, attempt)


def set_state(facts: Facts, number: int, state: CheckpointState, why: str) -> None:
    """Set the state of a checkpoint, if it is known."""
    if number in facts.checkpoints:
        facts.checkpoints[number] = dataclasses.replace(facts.checkpoints[number], state=state, why=why)
        if facts.attempt is not None:
            _note_progress(facts, facts.attempt)


def fold_judged(facts: Facts, attempt: AttemptFacts) -> None:
    """Distrust what was saved after ranks began to run different collectives, or after the loss was last finite."""
    _distrust_unsound(facts, attempt)
    _note_progress(facts, attempt)


def restore_trust(facts: Facts) -> None:
    """Trust distrusted checkpoints again: the job has ended, and no attempt made progress without them."""
    for number in facts.distrusted_checkpoints:
        if number in facts.checkpoints and facts.checkpoints[number].state is CheckpointState.DISTRUSTED:
            set_state(facts, number, CheckpointState.WHOLE, "")
    facts.distrusted_checkpoints = ()


def find_unloadable(facts: Facts, attempt: AttemptFacts, verdict: d.Verdict | None) -> UnloadableCheckpoint | None:
    """Return the checkpoint that the attempt could not resume from, if there is another one to go back to."""
    checkpoint = facts.checkpoints.get(attempt.resume.save) if attempt.resume else None
    kinds = (d.VerdictKind.CRASH, d.VerdictKind.OOM, d.VerdictKind.LAUNCH)
    is_own_failure = verdict is not None and verdict.kind in kinds and verdict.retry
    if checkpoint is None or verdict is None or not is_own_failure or facts.steps_made:
        return None
    if checkpoint.state is not CheckpointState.WHOLE or not _has_another(facts, checkpoint):
        return None
    for node in facts.nodes.values():
        if node.setup_failure is not None and node.setup_failure.save == checkpoint.number:
            why = f"it was incomplete on {node.name} in attempt {attempt.number}"
            return UnloadableCheckpoint(checkpoint, why, is_certain=True)
    for number in verdict.ranks:
        failure = facts.ranks[number].failure if number in facts.ranks else None
        is_bad = verdict.kind is d.VerdictKind.CRASH  # a lack of memory is not the fault of the checkpoint
        if failure is not None and failure.loading and is_bad and _is_file_of(checkpoint, failure.loading):
            why = f"rank {number} could not load it in attempt {attempt.number}: {failure.type}"
            return UnloadableCheckpoint(checkpoint, why, is_certain=True)
    last = (
        facts.past_attempts[-1]
        if facts.past_attempts and facts.past_attempts[-1].number > facts.resumed_after
        else None
    )
    if (
        verdict.kind is d.VerdictKind.LAUNCH
        or last is None
        or last.verdict is None
        or last.verdict.signature != verdict.signature
    ):
        return None
    is_same = last.attempt.resume is not None and last.attempt.resume.save == checkpoint.number
    if not is_same or last.attempt.own_steps_at_failure:
        return None
    why = f"attempts {last.number} and {attempt.number} failed in the same way before their first step from it"
    return UnloadableCheckpoint(checkpoint, why, is_certain=False)


def needs_deep_compare(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether all bytes of a checkpoint are to be compared before the next attempt: a node was lost or reset with this one,
    or a person resumes the job."""
    verdict = attempt.verdict
    lost = any(node.agent_loss is not None for node in facts.every_node())
    is_lost = lost or (verdict is not None and verdict.kind is d.VerdictKind.NODE_LOST)
    return is_lost or attempt.number <= facts.resumed_after


def no_attempt_reason(facts: Facts) -> str:
    """Say why no attempt may follow: the newest checkpoint is for another number of ranks, or the one that a person has named
    cannot be used. Empty where one may."""
    choice = facts.checkpoint_choice
    if facts.resume_override is not None and choice.checkpoint is None and choice.world_size_mismatch is None:
        overriding = facts.checkpoints.get(facts.resume_override.save)
        what = (
            f"{overriding.main} ({overriding.why or overriding.state.value})"
            if overriding
            else f"checkpoint {facts.resume_override.save}"
        )
        fix = "resume from the newest with orch resume, or choose another with --from"
        return f"it was to resume from {what}, which is no longer complete: {fix}"
    checkpoint = choice.world_size_mismatch
    if checkpoint is None:
        return ""
    return (
        f"{checkpoint.main} has files of each of the {checkpoint.world_size} ranks that saved it, and there are {len(facts.ranks)}: "
        f"use {checkpoint.world_size} ranks, or resume from another checkpoint"
    )


def ignored_checkpoint_text(attempt: AttemptFacts) -> str:
    """Say in one line how it is known that the attempt's script began elsewhere; empty if it is not."""
    if attempt.actual_resume is None or attempt.resume is None:
        return ""
    actual = attempt.actual_resume
    if actual.checkpoint_read:
        return ""  # a script may choose its own checkpoint
    if actual.checkpoint_read == 0:
        return f"the script started from scratch: no rank had read {attempt.resume.path} before its first step ({IGNORED_CHECKPOINT_HINT})"
    observation = (
        f"{actual.main}, written after {actual.steps:,} steps of its own, shows that it began at step {actual.step:,}"
    )
    if actual.step:
        return f"the script did not resume from {attempt.resume.path} but from a checkpoint of its own choice: {observation}"
    return f"{IGNORED_CHECKPOINT} {attempt.resume.path}: {observation} ({IGNORED_CHECKPOINT_HINT})"


def _is_file_of(checkpoint: Checkpoint, path: str) -> bool:
    return f"{path.rstrip('/')}/".endswith(f"/{checkpoint.main}/") or f"/{checkpoint.main}/" in path


def _has_another(facts: Facts, checkpoint: Checkpoint) -> bool:
    others = [other for other in facts.checkpoints.values() if other.number != checkpoint.number]
    return choose_checkpoint(others, len(facts.ranks), facts.resume_override).checkpoint is not None


def _note_progress(facts: Facts, attempt: AttemptFacts) -> None:
    attempt.wrote_newer_checkpoint = any(
        checkpoint.attempt == attempt.number
        and checkpoint.state is CheckpointState.WHOLE
        and checkpoint.content is not Content.OTHER
        and (checkpoint.step or 0) > attempt.base_step
        for checkpoint in facts.checkpoints.values()
    )


def _compare_steps(attempt: AttemptFacts, checkpoint: Checkpoint) -> None:
    """Note that the step in a checkpoint proves that its attempt resumed, or how far it is from the counted step."""
    assert checkpoint.stated is not None
    counted = attempt.call_step + checkpoint.steps
    difference = abs(checkpoint.stated - counted)
    if difference <= NEAR_STEPS and attempt.base_step > 2 * NEAR_STEPS and attempt.actual_resume is None:
        attempt.began_from_checkpoint = True
    is_far = difference >= max(STEP_MISMATCH_MIN, STEP_MISMATCH_SHARE * max(checkpoint.stated, counted))
    if is_far and checkpoint.step_source is StepSource.STATED:
        attempt.step_mismatch = (
            f"{checkpoint.main} says step {checkpoint.stated:,}, orch counted {counted:,}: the checkpoint's step is used; "
            "orch counts steps of the optimizer"
        )


def _distrust_unsound(facts: Facts, attempt: AttemptFacts) -> None:
    verdict = attempt.verdict
    if attempt.sound_step is not None:
        sound, near = attempt.sound_step, 0
        why = f"the loss or a gradient was not finite in attempt {attempt.number}, at some step after {sound:,}"
    elif verdict is not None and verdict.kind is d.VerdictKind.DESYNC and attempt.own_steps_at_failure is not None:
        # Not the verdict's step: the base may be known better since.
        sound, near = attempt.base_step + attempt.own_steps_at_failure - 1, NEAR_STEPS
        why = f"ranks ran different collectives from step {sound + 1:,} on"
    else:
        return
    for checkpoint in list(facts.checkpoints.values()):
        is_suspect = checkpoint.attempt == attempt.number or attempt.sound_step is not None
        if not is_suspect or checkpoint.step is None or checkpoint.state is not CheckpointState.WHOLE:
            continue
        if checkpoint.step > sound - (0 if checkpoint.step_source is StepSource.STATED else near):
            facts.checkpoints[checkpoint.number] = dataclasses.replace(
                checkpoint, state=CheckpointState.DISTRUSTED, why=why
            )


def _forget_oldest(facts: Facts) -> None:
    if len(facts.checkpoints) <= CHECKPOINTS_MAX:
        return
    override = facts.resume_override.save if facts.resume_override is not None else 0
    in_order = sorted(
        facts.checkpoints.values(),
        key=lambda checkpoint: (
            checkpoint.number == override,
            checkpoint.state is CheckpointState.WHOLE,
            checkpoint.number,
        ),
    )
    for checkpoint in in_order[: len(facts.checkpoints) - CHECKPOINTS_MAX]:
        del facts.checkpoints[checkpoint.number]
