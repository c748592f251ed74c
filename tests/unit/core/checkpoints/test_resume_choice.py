"""The save that an attempt begins from, and the saves that need not be kept."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.checkpoints.checkpoint import (
    START_PREFIX,
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    Content,
    Format,
)
from orchestrator.core.checkpoints.resume_choice import (
    OVERRIDE_STATES,
    SKIPPED_MAX,
    ResumeChoice,
    ResumeOverride,
    choose_checkpoint,
    find_expendable,
    fits_world_size,
)
from tests.support.saved_files import saved

QUICK = settings(database=None, max_examples=100)


def chosen(saves: list[Checkpoint], pin: ResumeOverride | None = None, world_size: int = 2) -> int:
    """Return the number of the save that is chosen, 0 for the beginning."""
    save = choose_checkpoint(saves, world_size, pin).checkpoint
    return save.number if save is not None else 0


def reasons(choice: ResumeChoice) -> list[tuple[int, str]]:
    return [(one.save, one.why) for one in choice.skipped]


def test_newest_complete_wins_and_newer_ones_have_reasons() -> None:
    """The newest complete checkpoint counts, and each newer one has its reason."""
    saves = [
        saved(1), saved(2), saved(3, state=CheckpointState.TORN, why="ckpt_30.pt is cut off"), saved(4, state=CheckpointState.OPEN),
        saved(5, state=CheckpointState.GONE, why="it was deleted"), saved(6, state=CheckpointState.DISTRUSTED, why="a rank raised"),
    ]  # fmt: skip
    choice = choose_checkpoint(saves, 2)
    assert choice.checkpoint == saves[1]
    assert reasons(choice) == [
        (6, "distrusted: a rank raised"), (5, "gone: it was deleted"), (4, "open"), (3, "torn: ckpt_30.pt is cut off"),
    ]  # fmt: skip
    assert choose_checkpoint([], 2) == ResumeChoice()
    assert (
        len(choose_checkpoint([saved(number, state=CheckpointState.TORN) for number in range(1, 99)], 2).skipped)
        == SKIPPED_MAX
    )


def test_best_content_ever_written_wins() -> None:
    """The best content that the job has ever written counts."""
    weights, best, part = (
        saved(3, content=Content.WEIGHTS),
        saved(4, content=Content.BEST),
        saved(5, content=Content.PART),
    )
    assert chosen([saved(1), weights, best, part]) == 1
    assert chosen([saved(1, state=CheckpointState.GONE), weights, best, part]) == 0
    assert chosen([weights, best, part]) == 3
    assert chosen([best, part]) == 4
    assert chosen([part, saved(6, content=Content.OTHER)]) == 0
    assert reasons(choose_checkpoint([saved(1), weights], 2)) == [(3, "weights alone")]


def test_much_smaller_unproven_checkpoint_comes_last() -> None:
    """One far smaller than all before it comes last where no format proves it complete."""

    def of(number: int, size_bytes: int, **fields: Any) -> Checkpoint:
        pieces = (CheckpointFile("x.dat", size_bytes, 1),)
        return saved(number, series="x", files=pieces, **{"format": Format.UNKNOWN, **fields})

    sizes = [of(1, 700_000), of(2, 690_000), of(3, 507_904)]
    assert chosen(sizes) == 2
    assert reasons(choose_checkpoint(sizes, 2)) == [(3, "has 507,904 bytes, earlier ones at least 690,000")]
    assert chosen([*sizes[:2], of(3, 10), of(4, 10)]) == 2
    assert chosen([*sizes[:2], of(3, 520_000)]) == 3, "an epoch with a smaller buffer"
    assert chosen([*sizes[:2], of(3, 507_904, format=Format.TORCH)]) == 3
    assert chosen([*sizes[:1], of(3, 507_904)]) == 3, "one before it is no custom"
    assert chosen([replace(sizes[0], state=CheckpointState.GONE), *sizes[1:]]) == 3
    assert chosen(sizes, ResumeOverride(3, 1)) == 3
    gone = [replace(save, state=CheckpointState.PRUNED) for save in sizes[:2]]
    assert chosen([*gone, sizes[2]]) == 3


def test_last_checkpoint_of_attempt_wins_over_stated_steps() -> None:
    """The last checkpoint of each attempt counts, whatever steps the script states."""
    saves = [saved(1, attempt=1, step=7), saved(2, attempt=2, step=10), saved(3, attempt=2, step=3)]
    assert chosen(saves) == 1
    assert chosen([*saves, saved(4, attempt=3, step=5)]) == 1
    assert chosen([*saves[1:], saved(4, attempt=3, step=5)]) == 4


def test_earlier_attempt_that_got_further_wins() -> None:
    saves = [saved(1, attempt=1, step=500), saved(2, attempt=2, step=40), saved(3, attempt=2, step=60)]
    choice = choose_checkpoint(saves, 2)
    assert choice.checkpoint == saves[0]
    assert reasons(choice) == [(3, "an earlier attempt saved step 500")]
    assert chosen([*saves, saved(4, attempt=3, step=510)]) == 4
    assert chosen([saved(1, step=500), saved(2, step=40)]) == 2, "of one attempt the newest"
    assert chosen([saved(1, step=500), saved(2, attempt=2, step=None)]) == 2


def test_named_checkpoint_counts_until_later_attempt_writes() -> None:
    """A checkpoint that the user has named counts until a later attempt has written another."""
    saves = [saved(1), saved(2, state=CheckpointState.DISTRUSTED), saved(3, attempt=2)]
    assert chosen(saves, ResumeOverride(1, 2)) == 1
    assert chosen(saves, ResumeOverride(2, 2)) == 2, "even one that could not be loaded"
    assert chosen([*saves, saved(4, attempt=3)], ResumeOverride(1, 2)) == 4
    assert chosen([*saves, saved(4, attempt=3, state=CheckpointState.TORN)], ResumeOverride(1, 2)) == 1
    assert chosen([saved(1, state=CheckpointState.GONE), saved(2)], ResumeOverride(1, 2)) == 0
    further, adopted = saved(1, step=900), saved(5, attempt=0, step=900)
    assert chosen([further, saved(4, attempt=3, step=20)], ResumeOverride(1, 2)) == 4, (
        "it was begun from, and was not gone on with"
    )
    assert chosen([adopted, saved(4, attempt=3, step=20)]) == 4
    assert chosen([adopted, saved(4, attempt=3, step=20)], ResumeOverride(5, 3)) == 5


def elsewhere(number: int, **fields: Any) -> Checkpoint:
    """Return a save that a script has written where it starts."""
    return saved(number, **{"key": f"{START_PREFIX}#{number}", **fields})


def test_checkpoint_path_wins_over_newer_elsewhere() -> None:
    """A checkpoint at checkpoint.path counts before newer ones elsewhere."""
    assert chosen([saved(1), elsewhere(2), elsewhere(3, key="/scratch/#3")]) == 1
    assert chosen([saved(1, state=CheckpointState.DISTRUSTED), elsewhere(2)]) == 0, "it is given up for no other place"


def test_others_count_if_checkpoint_path_has_none() -> None:
    for fields in (
        {"state": CheckpointState.TORN},
        {"state": CheckpointState.GONE},
        {"content": Content.PART},
    ):
        assert chosen([elsewhere(1), saved(2, **fields)]) == 1
    assert chosen([elsewhere(1), elsewhere(2, key="/scratch/#2")]) == 2


def test_named_checkpoint_counts_anywhere_until_next_write() -> None:
    """A named checkpoint counts wherever it is until a later attempt has written."""
    saves = [saved(1), elsewhere(2)]
    assert chosen(saves, ResumeOverride(2, 1)) == 2
    assert chosen([*saves, elsewhere(3, attempt=2)], ResumeOverride(2, 1)) == 3
    assert chosen([*saves, elsewhere(3, attempt=2)], ResumeOverride(1, 1)) == 3
    assert chosen([*saves, elsewhere(3, attempt=2), saved(4, attempt=2)], ResumeOverride(2, 1)) == 4


def test_checkpoint_not_fitting_world_size_is_not_replaced() -> None:
    """One that does not fit the number of ranks is named, and nothing replaces it."""
    saves = [saved(1), saved(2, fits_any_size=False)]
    assert choose_checkpoint(saves, 4) == ResumeChoice(world_size_mismatch=saves[1])
    assert chosen(saves, world_size=2) == 2
    assert chosen(saves, ResumeOverride(1, 1), world_size=4) == 1
    assert fits_world_size(saved(1, fits_any_size=False, world_size=0), 4), (
        "of an adopted one the number may not be known"
    )


SAVES = st.lists(
    st.builds(
        dict[str, Any], state=st.sampled_from(CheckpointState), content=st.sampled_from(Content), attempt=st.integers(1, 3),
        step=st.integers(0, 50) | st.none(), fits_any_size=st.booleans(), world_size=st.sampled_from([2, 4]),
        steps=st.integers(0, 3), series=st.sampled_from("ab"), is_slot=st.booleans(), cites=st.lists(st.integers(1, 8)),
    ),
    max_size=8,
).map(lambda all_fields: [_made(number, dict(fields)) for number, fields in enumerate(all_fields, 1)])  # fmt: skip


def _made(number: int, fields: dict[str, Any]) -> Checkpoint:
    cites = tuple(f"ckpt_{cited}.pt" for cited in fields.pop("cites"))
    key = fields["series"] if fields.pop("is_slot") else f"{fields['series']}{number}"
    return saved(number, key=key, cites=cites, main=f"run/ckpt_{number}.pt", **fields)


def is_fit(save: Checkpoint, saves: list[Checkpoint]) -> bool:
    """Tell whether a save may be begun from when nobody has named one."""
    order = list(Content)
    usual = min((order.index(one.content) for one in saves if one.is_candidate), default=0)
    return save.state is CheckpointState.WHOLE and save.is_candidate and order.index(save.content) == usual


@pytest.mark.slow
@given(SAVES)
@QUICK
def test_newest_complete_checkpoint_is_chosen(saves: list[Checkpoint]) -> None:
    """Only what is complete is resumed from, and of that the newest."""
    choice = choose_checkpoint(saves, 2)
    found, fit = (
        choice.checkpoint or choice.world_size_mismatch,
        [save for save in saves if is_fit(save, saves)],
    )
    assert (found is None) == (not fit)
    if found is None:
        return
    assert found in fit and fits_world_size(found, 2) == (choice.world_size_mismatch is None)
    assert all(save.number <= found.number for save in fit if save.attempt == found.attempt)
    lasts = {save.attempt: save for save in fit if save.attempt > found.attempt}  # of each the newest
    if lasts:
        assert found.step is not None and lasts[max(lasts)].step is not None
        assert all(save.step < found.step for save in lasts.values() if save.step is not None)
    assert found.number not in [one.save for one in choice.skipped]


@pytest.mark.slow
@given(SAVES)
@QUICK
def test_newer_further_checkpoint_wins_and_lost_never_returns(
    saves: list[Checkpoint],
) -> None:
    """A newer one that is further is always chosen, and a lost one never again."""
    newer = saved(99, attempt=9, step=100)
    assert choose_checkpoint([*saves, newer], 2).checkpoint == newer
    found = choose_checkpoint(saves, 2).checkpoint
    if found is not None:
        for state in set(CheckpointState) - {CheckpointState.WHOLE}:
            lost = [dataclasses.replace(save, state=state) if save == found else save for save in saves]
            other = choose_checkpoint(lost, 2).checkpoint
            assert other is None or other.number != found.number


@pytest.mark.slow
@given(SAVES, st.randoms())
@QUICK
def test_order_of_arrival_does_not_matter(saves: list[Checkpoint], random: object) -> None:
    """The order in which checkpoints arrive does not matter."""
    shuffled = list(saves)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_checkpoint(shuffled, 2) == choose_checkpoint(saves, 2)
    assert find_expendable(shuffled, 1, None, choose_checkpoint(saves, 2).checkpoint) == find_expendable(
        saves, 1, None, choose_checkpoint(saves, 2).checkpoint
    )


@pytest.mark.slow
@given(SAVES, st.integers(1, 8), st.integers(0, 4))
@QUICK
def test_nothing_older_replaces_a_named_checkpoint(saves: list[Checkpoint], number: int, attempt: int) -> None:
    choice = choose_checkpoint(saves, 2, ResumeOverride(number, attempt))
    found = choice.checkpoint or choice.world_size_mismatch
    if found is not None and found.number != number:
        assert found.attempt > attempt and is_fit(found, saves)
    elif found is not None:
        assert found.state in OVERRIDE_STATES
    else:
        assert all(save.number != number or save.state not in OVERRIDE_STATES for save in saves)


# What is not kept


def test_retention_keeps_newest_referenced_best_and_round_steps() -> None:
    """The newest of each series stay, and what is referenced, best or a round step."""
    saves = [saved(number) for number in range(1, 8)]
    assert [save.number for save in find_expendable(saves, 3, None, saves[-1])] == [4, 3, 2, 1]
    assert [save.number for save in find_expendable(saves, 3, 20, saves[-1])] == [3, 1]
    cited = dataclasses.replace(saves[-1], cites=("ckpt_30.pt", "ckpt_20.pt"))
    assert [save.number for save in find_expendable([*saves[:-1], cited], 3, None, cited)] == [4, 1]
    torn = dataclasses.replace(saves[1], state=CheckpointState.TORN)
    assert [save.number for save in find_expendable([saves[0], torn, *saves[2:]], 3, None, saves[-1])] == [
        4,
        3,
        1,
    ]
    other = [saved(number, series="best@#") for number in (8, 9)]
    assert [save.number for save in find_expendable([*saves, *other], 3, None, other[-1])] == [4, 3, 2, 1]
    assert find_expendable(saves, 3, None, None) == [], "without one to begin from everything stays"


def test_files_of_one_checkpoint_stay_together() -> None:
    """Files that one checkpoint wrote under several names stay together."""
    saves = [saved(1), saved(2, steps=30), saved(3, steps=30), saved(4, steps=30)]
    assert [save.number for save in find_expendable(saves, 1, None, saves[-1])] == [1]


@pytest.mark.slow
@given(SAVES, st.integers(1, 3), st.integers(1, 20) | st.none())
@QUICK
def test_resume_source_and_best_are_never_expendable(saves: list[Checkpoint], keep: int, every: int | None) -> None:
    """The resume source, slots, best ones and the newest of a series are never expendable."""
    newest = choose_checkpoint(saves, 2).checkpoint
    found = find_expendable(saves, keep, every, newest)
    for save in found:
        assert (
            save.state is CheckpointState.WHOLE
            and not save.is_overwritten
            and save.content is not Content.BEST
            and save != newest
        )
        newer = [one for one in saves if one.series == save.series and one.number > save.number]
        assert len([one for one in newer if one.state is CheckpointState.WHOLE and not one.is_overwritten]) >= keep
        assert newest is not None and f"ckpt_{save.number}.pt" not in newest.cites
        assert not every or save.step is None or save.step % every
    left = [save for save in saves if save not in found]
    assert choose_checkpoint(left, 2).checkpoint == newest
