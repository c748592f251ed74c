"""The checkpoint to resume from, the step that each checkpoint holds, and the proof that a script ignores its checkpoint.

The newest checkpoint is the one of the most steps, not the last one reported; one that is overwritten with fewer steps,
or invalidated, gives way to the previous one. What a checkpoint states of its step (`agent.outputs.checkpoint_step`)
counts before what was counted, unless such numbers go back while steps are made, as the step of an epoch does. Any
other number in a name counts as a step only where counting comes to about the same, since it may as well be an epoch or
a micro-batch.

A script that ignores its checkpoint makes the same steps once more, and each of its attempts looks like progress from the
checkpoint on. The proof is a path that an earlier attempt wrote and that this one writes again after as many steps of its
own. Names that are overwritten anyway (`last.pt`) prove nothing.
"""

from __future__ import annotations

import re

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import AttemptFacts, Facts, IgnoredCheckpoint, SavedOutside, StatedStep

OLDER_MAX = 100
"""How many earlier checkpoints are remembered to fall back on."""

OUTSIDE_MAX = 16
"""How many files that were saved outside of `checkpoint.path` are remembered."""

NEAR_STEPS = 2
"""How far off a count may be that was taken from file times: their clocks tick every 4 to 10 ms, a step may take 1."""

APART_STEPS = 3 * NEAR_STEPS
"""How far off a sum of three such counts may be."""

SUSPICION = "the script seems to begin anew instead of from its checkpoint"
DIFFERS_SHARE = 0.2
DIFFERS_MIN = 10
"""By which share of the larger, and by how many steps at least, a stated step and a counted one differ when that is
said: a save in the background ends some steps later."""

QUESTION = "does it read ORCH_RESUME_FROM, or checkpoint.resume_args?"

_NUMBER = re.compile(r"[0-9]+")


def adopt(facts: Facts, attempt: AttemptFacts, news: e.CheckpointFound) -> None:
    """Enter a complete checkpoint of the current attempt, and start from it next if it is the newest."""
    ignored = _ignored_checkpoint(facts, attempt, news)
    if ignored is not None:
        _rebase(facts, attempt, ignored)
    about = attempt.base_step + news.steps
    named = _named(news.path, about)
    step = about if named is None else named
    if news.stated is not None and _is_step(attempt, news.stated, news.steps):
        step = news.stated
        _compare(facts, attempt, news, about)
    # Close to 0 the count alone is near the sum as well, so that a fitting name proves nothing.
    if named is not None and attempt.ignored is None and attempt.base_step > 2 * NEAR_STEPS:
        attempt.resumes = True
    _enter(facts, attempt, news.path, step)
    is_known = step > 0 or facts.made > 0
    _offer(facts, attempt, d.Checkpoint(news.path, step if is_known else None), news.steps)


def _is_step(attempt: AttemptFacts, stated: int, count: int) -> bool:
    """Tell whether what checkpoints state is the job's step: it must have grown beyond what came before."""
    before, attempt.stated = attempt.stated, StatedStep(stated, count)
    if stated <= attempt.base_step and attempt.base_step:
        return False
    if before is not None and stated < before.step and count >= before.count:
        attempt.misstated, attempt.differing = True, ""
    return not attempt.misstated


def _compare(facts: Facts, attempt: AttemptFacts, news: e.CheckpointFound, about: int) -> None:
    """Note a stated step that differs from what was counted, where steps were counted at all."""
    assert news.stated is not None
    apart = abs(news.stated - about)
    if news.steps and apart >= max(DIFFERS_MIN, DIFFERS_SHARE * max(news.stated, about)):
        name = news.path.rstrip("/").rpartition("/")[2]
        attempt.differing = (
            f"{name} says step {news.stated:,}, the counter {about:,}: what the checkpoint says is taken, "
            "and the counter counts steps of the optimizer"
        )


def invalidate(facts: Facts, news: e.CheckpointInvalidated) -> None:
    """Fold an invalid checkpoint: fall back on the newest one before it. News of an old attempt counts here too, since it
    can only make the choice safer."""
    _forget(facts, news.path)
    attempt = facts.attempt
    if attempt is not None and attempt.checkpointed:
        newest = facts.checkpoint
        attempt.checkpointed = newest is not None and (newest.step or 0) > attempt.base_step


def note_outside(facts: Facts, news: e.SavedOutside) -> None:
    """Remember the last file of each series outside of `checkpoint.path`; one on a host's own disk is another than that on
    another host. Its step is known only where the attempt could not go on from such a file by itself."""
    others = [
        saved
        for saved in facts.saved_outside
        if saved.file.pattern != news.file.pattern or (news.on_own_disk and saved.node != news.node)
    ]
    attempt, step = facts.attempt, None
    if news.steps and attempt is not None and attempt.number == news.attempt:
        is_known = news.attempt == 1 or attempt.resume is not None
        step = attempt.base_step + news.steps if is_known else None
    saved = SavedOutside(news.file, news.node, news.attempt, step, news.at - news.age_s)
    facts.saved_outside = sorted([*others, saved], key=lambda saved: saved.at)[-OUTSIDE_MAX:]


def distrust(facts: Facts, attempt: AttemptFacts) -> None:
    """Fall back behind the step at which the attempt's ranks began to run different collectives."""
    adopted = [*facts.older, *([facts.checkpoint] if facts.checkpoint else [])]
    for checkpoint in adopted:
        if _is_out_of_step(facts, attempt, checkpoint):
            _forget(facts, checkpoint.path)
    newest = facts.checkpoint
    attempt.checkpointed = newest is not None and (newest.step or 0) > attempt.base_step


def _is_out_of_step(facts: Facts, attempt: AttemptFacts, checkpoint: d.Checkpoint) -> bool:
    """Tell whether the attempt wrote the checkpoint after its ranks began to run different collectives, or may have."""
    verdict = attempt.verdict
    if verdict is None or verdict.kind is not d.Kind.DESYNC or attempt.failed_count is None:
        return False
    if facts.writers.get(checkpoint.path) != attempt.number or checkpoint.step is None:
        return False
    exact = checkpoint.step in _numbers(checkpoint.path)
    began = attempt.base_step + attempt.failed_count  # not the verdict's: the base may be known better since
    return checkpoint.step >= began - (0 if exact else NEAR_STEPS)


def ignores_checkpoint(attempt: AttemptFacts) -> str:
    """Say in one line how it is known that the attempt's script ignores its checkpoint; empty if it is not."""
    if attempt.ignored is None or attempt.resume is None:
        return ""
    seen = f"it wrote {attempt.ignored.path} again after {attempt.ignored.steps} steps of its own"
    return f"{SUSPICION} {attempt.resume.path}: {seen} ({QUESTION})"


def _numbers(path: str) -> list[int]:
    """Return the numbers in the last part of a path."""
    return [int(digits) for digits in _NUMBER.findall(path.rstrip("/").rpartition("/")[2])]


def _named(path: str, about: int) -> int | None:
    """Return the step in the name of a checkpoint, None if no number in it is near `about`."""
    near = [number for number in _numbers(path) if abs(number - about) <= NEAR_STEPS]
    return near[-1] if near else None


def _ignored_checkpoint(
    facts: Facts, attempt: AttemptFacts, news: e.CheckpointFound
) -> IgnoredCheckpoint | None:
    """Return where the script truly began, if this checkpoint proves that it ignored the one that it was given."""
    known = facts.known_steps.get(news.path)
    if known is None or attempt.resume is None or facts.writers.get(news.path) == attempt.number:
        return None
    if attempt.ignored is not None or attempt.resumes or attempt.base_step <= NEAR_STEPS:
        return None
    base = known - news.steps
    numbered = known in _numbers(news.path)
    overwritten = news.path == attempt.resume.path or news.path in facts.rewritten
    if abs(base) <= NEAR_STEPS and (numbered or not overwritten):
        return IgnoredCheckpoint(0, news.path, news.steps)
    # A script may choose an older checkpoint by itself; only a name that bears its step is proof enough of that.
    if numbered and NEAR_STEPS < base < attempt.base_step - APART_STEPS:
        return IgnoredCheckpoint(base, news.path, news.steps)
    return None


def _rebase(facts: Facts, attempt: AttemptFacts, ignored: IgnoredCheckpoint) -> None:
    """Count the attempt from where it truly began, with what it has written so far."""
    too_far = attempt.base_step - ignored.base
    attempt.ignored = ignored
    own_paths = [path for path, number in facts.writers.items() if number == attempt.number]
    for path in own_paths:
        about = facts.known_steps[path] - too_far
        named = _named(path, about)
        facts.known_steps[path] = about if named is None else named
    adopted = [*facts.older, *([facts.checkpoint] if facts.checkpoint else [])]
    for path in own_paths:
        _forget(facts, path)
    for checkpoint in adopted:
        if checkpoint.path in own_paths:
            _offer(facts, attempt, d.Checkpoint(checkpoint.path, facts.known_steps[checkpoint.path]))


def _enter(facts: Facts, attempt: AttemptFacts, path: str, step: int) -> None:
    """Note who wrote a path at which step; what it held before is gone."""
    before = facts.known_steps.get(path, step)
    if facts.writers.get(path) == attempt.number and abs(step - before) > NEAR_STEPS:
        facts.rewritten.add(path)
    if step < before:
        _forget(facts, path)
    facts.known_steps[path] = step
    facts.writers[path] = attempt.number


def _offer(facts: Facts, attempt: AttemptFacts, checkpoint: d.Checkpoint, count: int | None = None) -> None:
    """Adopt a checkpoint unless there is one of more steps. `count`: the attempt's own steps when it was written; where
    some of its checkpoints state other steps than were counted, only these can be compared."""
    step = checkpoint.step or 0
    if _is_out_of_step(facts, attempt, checkpoint):
        return
    if facts.checkpoint is not None and step < (facts.checkpoint.step or 0):
        is_own = facts.writers.get(facts.checkpoint.path) == attempt.number
        if not is_own or attempt.stated is None or count is None or count < attempt.adopted_count:
            return
    attempt.adopted_count = max(attempt.adopted_count, count or 0)
    attempt.checkpointed = attempt.checkpointed or step > attempt.base_step
    if facts.checkpoint is not None:
        facts.older.append(facts.checkpoint)
    facts.older = [older for older in facts.older if older.path != checkpoint.path][-OLDER_MAX:]
    facts.checkpoint = checkpoint


def _forget(facts: Facts, path: str) -> None:
    facts.older = [older for older in facts.older if older.path != path]
    if facts.checkpoint is not None and facts.checkpoint.path == path:
        facts.checkpoint = facts.older.pop() if facts.older else None
