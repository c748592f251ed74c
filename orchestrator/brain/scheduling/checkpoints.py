"""Checkpoints in the brain: the progress of an attempt by its checkpoints, the notice that steps differ, and checkpoints
that are distrusted. `core.checkpoints.choice` chooses the newest one.

A checkpoint is distrusted when attempts cannot resume from it: a rank raised while loading it, or two attempts from it
failed in the same way before their first step. The next older one is used. If the job ends before an attempt makes
progress from that one, the checkpoints may not have been the cause (a library, the code), and are trusted again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import AttemptFacts, Facts, OtherBeginning
from orchestrator.core.checkpoints.choice import choose
from orchestrator.core.checkpoints.save import Content, Save, SaveState, StepSource
from orchestrator.core.checkpoints.steps import NEAR_STEPS

SAVES_MAX = 300
"""How many checkpoints are remembered here; the ledger has all."""

SUSPICION = "the script seems to start from scratch instead of resuming from its checkpoint"
QUESTION = "does it read ORCH_RESUME_FROM, or checkpoint.resume_args?"

DIFFERS_SHARE = 0.2
DIFFERS_MIN = 10
"""By which share of the larger, and by how many steps at least, a stated step and a counted one differ when that is
said: a checkpoint in the background ends some steps later."""


@dataclass(frozen=True, slots=True)
class Unloadable:
    """A checkpoint that the attempt could not resume from, and how that is known."""

    save: Save
    why: str
    is_certain: bool


def learn(facts: Facts, news: e.SaveChanged) -> None:
    """Enter a checkpoint that is new or has changed."""
    save, before = news.save, facts.saves.get(news.save.number)
    facts.saves[save.number] = save
    _forget_oldest(facts)
    attempt = facts.attempt
    if attempt is None or save.attempt != attempt.number:
        return
    _distrust_unsound(facts, attempt)
    _note_progress(facts, attempt)
    is_new = save.state is SaveState.WHOLE and (before is None or before.state is not SaveState.WHOLE)
    if is_new and save.stated is not None and save.steps:
        _compare_steps(attempt, save)


def began_elsewhere(facts: Facts, news: e.BeganElsewhere) -> None:
    """Note where the script of the current attempt truly began."""
    attempt = facts.attempt
    if attempt is not None and attempt.number == news.attempt and attempt.began is None:
        attempt.began = OtherBeginning(news.step, news.main, news.steps)
        attempt.resumes = False
        _note_progress(facts, attempt)


def read(facts: Facts, news: e.CheckpointRead) -> None:
    """Note from which checkpoint the ranks of the current attempt resumed, by what they had read."""
    attempt = facts.attempt
    if attempt is None or attempt.number != news.attempt:
        return
    given, save = attempt.resume.save if attempt.resume is not None else 0, facts.saves.get(news.save)
    if news.save == given:
        attempt.resumes = given > 0
    else:
        step = save.step if save is not None else None
        attempt.began = OtherBeginning(step or 0, save.main if save is not None else "", read=news.save)
        attempt.resumes = False
    _note_progress(facts, attempt)


def set_state(facts: Facts, number: int, state: SaveState, why: str) -> None:
    """Set the state of a checkpoint, if it is known."""
    if number in facts.saves:
        facts.saves[number] = dataclasses.replace(facts.saves[number], state=state, why=why)
        if facts.attempt is not None:
            _note_progress(facts, facts.attempt)


def judged(facts: Facts, attempt: AttemptFacts) -> None:
    """Distrust what was saved after ranks began to run different collectives, or after the loss was last finite."""
    _distrust_unsound(facts, attempt)
    _note_progress(facts, attempt)


def trust_again(facts: Facts) -> None:
    """Trust distrusted checkpoints again: the job has ended, and no attempt made progress without them."""
    for number in facts.doubted:
        if number in facts.saves and facts.saves[number].state is SaveState.DISTRUSTED:
            set_state(facts, number, SaveState.WHOLE, "")
    facts.doubted = ()


def unloadable(facts: Facts, attempt: AttemptFacts, verdict: d.Verdict | None) -> Unloadable | None:
    """Return the checkpoint that the attempt could not resume from, if there is another one to go back to."""
    save = facts.saves.get(attempt.resume.save) if attempt.resume else None
    kinds = (d.Kind.CRASH, d.Kind.OOM, d.Kind.LAUNCH)
    is_own = verdict is not None and verdict.kind in kinds and verdict.retry
    if save is None or verdict is None or not is_own or facts.made:
        return None
    if save.state is not SaveState.WHOLE or not _has_another(facts, save):
        return None
    for node in facts.nodes.values():
        if node.setup_failure is not None and node.setup_failure.save == save.number:
            why = f"it was incomplete on {node.name} in attempt {attempt.number}"
            return Unloadable(save, why, is_certain=True)
    for number in verdict.ranks:
        failure = facts.ranks[number].failure if number in facts.ranks else None
        is_bad = verdict.kind is d.Kind.CRASH  # a lack of memory is not the fault of the checkpoint
        if failure is not None and failure.loading and is_bad and _is_of(save, failure.loading):
            why = f"rank {number} could not load it in attempt {attempt.number}: {failure.type}"
            return Unloadable(save, why, is_certain=True)
    last = facts.past[-1] if facts.past and facts.past[-1].number > facts.resumed_after else None
    if (
        verdict.kind is d.Kind.LAUNCH
        or last is None
        or last.verdict is None
        or last.verdict.signature != verdict.signature
    ):
        return None
    is_same = last.attempt.resume is not None and last.attempt.resume.save == save.number
    if not is_same or last.attempt.failed_count:
        return None
    why = (
        f"attempts {last.number} and {attempt.number} failed in the same way before their first step from it"
    )
    return Unloadable(save, why, is_certain=False)


def ended_badly(facts: Facts, attempt: AttemptFacts) -> bool:
    """Return whether all bytes of a checkpoint are to be compared before the next attempt: a node was lost or reset with this one,
    or a person resumes the job."""
    verdict = attempt.verdict
    lost = any(node.lost is not None for node in facts.every_node())
    is_lost = lost or (verdict is not None and verdict.kind is d.Kind.NODE_LOST)
    return is_lost or attempt.number <= facts.resumed_after


def why_none(facts: Facts) -> str:
    """Say why no attempt may follow: the newest checkpoint is for another number of ranks, or the one that a person has named
    cannot be used. Empty where one may."""
    choice = facts.choice
    if facts.pin is not None and choice.save is None and choice.misfit is None:
        named = facts.saves.get(facts.pin.save)
        what = f"{named.main} ({named.why or named.state.value})" if named else f"checkpoint {facts.pin.save}"
        fix = "resume from the newest with orch resume, or choose another with --from"
        return f"it was to resume from {what}, which is no longer complete: {fix}"
    save = choice.misfit
    if save is None:
        return ""
    return (
        f"{save.main} has files of each of the {save.world_size} ranks that saved it, and there are {len(facts.ranks)}: "
        f"use {save.world_size} ranks, or resume from another checkpoint"
    )


def ignores_checkpoint(attempt: AttemptFacts) -> str:
    """Say in one line how it is known that the attempt's script began elsewhere; empty if it is not."""
    if attempt.began is None or attempt.resume is None:
        return ""
    began = attempt.began
    if began.read:
        return ""  # a script may choose its own checkpoint
    if began.read == 0:
        return f"the script started from scratch: no rank had read {attempt.resume.path} before its first step ({QUESTION})"
    seen = f"{began.main}, written after {began.steps:,} steps of its own, shows that it began at step {began.step:,}"
    if began.step:
        return f"the script did not resume from {attempt.resume.path} but from a checkpoint of its own choice: {seen}"
    return f"{SUSPICION} {attempt.resume.path}: {seen} ({QUESTION})"


def _is_of(save: Save, path: str) -> bool:
    return f"{path.rstrip('/')}/".endswith(f"/{save.main}/") or f"/{save.main}/" in path


def _has_another(facts: Facts, save: Save) -> bool:
    others = [other for other in facts.saves.values() if other.number != save.number]
    return choose(others, len(facts.ranks), facts.pin).save is not None


def _note_progress(facts: Facts, attempt: AttemptFacts) -> None:
    attempt.checkpointed = any(
        save.attempt == attempt.number
        and save.state is SaveState.WHOLE
        and save.content is not Content.OTHER
        and (save.step or 0) > attempt.base_step
        for save in facts.saves.values()
    )


def _compare_steps(attempt: AttemptFacts, save: Save) -> None:
    """Note that the step in a checkpoint proves that its attempt resumed, or how far it is from the counted step."""
    assert save.stated is not None
    counted = attempt.call_step + save.steps
    apart = abs(save.stated - counted)
    if apart <= NEAR_STEPS and attempt.base_step > 2 * NEAR_STEPS and attempt.began is None:
        attempt.resumes = True
    is_far = apart >= max(DIFFERS_MIN, DIFFERS_SHARE * max(save.stated, counted))
    if is_far and save.step_source is StepSource.STATED:
        attempt.differing = (
            f"{save.main} says step {save.stated:,}, orch counted {counted:,}: the checkpoint's step is used; "
            "orch counts steps of the optimizer"
        )


def _distrust_unsound(facts: Facts, attempt: AttemptFacts) -> None:
    verdict = attempt.verdict
    if attempt.sound_step is not None:
        sound, near = attempt.sound_step, 0
        why = f"the loss was not finite in attempt {attempt.number}, at some step after {sound:,}"
    elif verdict is not None and verdict.kind is d.Kind.DESYNC and attempt.failed_count is not None:
        # Not the verdict's step: the base may be known better since.
        sound, near = attempt.base_step + attempt.failed_count - 1, NEAR_STEPS
        why = f"ranks ran different collectives from step {sound + 1:,} on"
    else:
        return
    for save in list(facts.saves.values()):
        is_suspect = save.attempt == attempt.number or attempt.sound_step is not None
        if not is_suspect or save.step is None or save.state is not SaveState.WHOLE:
            continue
        if save.step > sound - (0 if save.step_source is StepSource.STATED else near):
            facts.saves[save.number] = dataclasses.replace(save, state=SaveState.DISTRUSTED, why=why)


def _forget_oldest(facts: Facts) -> None:
    if len(facts.saves) <= SAVES_MAX:
        return
    named = facts.pin.save if facts.pin is not None else 0
    in_order = sorted(
        facts.saves.values(),
        key=lambda save: (save.number == named, save.state is SaveState.WHOLE, save.number),
    )
    for save in in_order[: len(facts.saves) - SAVES_MAX]:
        del facts.saves[save.number]
