"""Steps of saves: what is stated, what is counted, and where an attempt truly began."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.checkpoints.checkpoint import Checkpoint, StepSource
from orchestrator.core.checkpoints.steps import (
    FAR_STEPS,
    NEAR_STEPS,
    are_steps_misstated,
    find_true_start,
    job_step,
)
from tests.support.saved_files import saved


def of(attempt: int, steps: int, stated: int | None = None, main: str = "last.pt", number: int = 1) -> Checkpoint:
    return saved(
        number,
        key=main,
        series="last.pt",
        main=main,
        attempt=attempt,
        steps=steps,
        stated=stated,
        step=stated,
    )


@pytest.mark.parametrize(
    ("main", "base", "steps", "stated", "step", "source"),
    [
        ("last.pt", 100, 20, 120, 120, StepSource.STATED),
        ("last.pt", 100, 20, 7, 7, StepSource.STATED),
        ("last.pt", 100, 20, None, 120, StepSource.COUNTED),
        ("ckpt_120.pt", 100, 21, None, 120, StepSource.COUNTED),
        ("ckpt_120.pt", 100, 24, None, 124, StepSource.COUNTED),
        ("epoch-3-000119.pt", 100, 20, None, 119, StepSource.COUNTED),
        ("020000", 0, 20_001, None, 20_000, StepSource.COUNTED),
        ("checkpoint-8", 0, 500, None, 500, StepSource.COUNTED),
        ("last-v1.ckpt", 0, 2, None, 2, StepSource.COUNTED),
        ("ckpt_rank0.pt", 0, 2, None, 2, StepSource.COUNTED),
        ("run_120/last.pt", 100, 21, None, 121, StepSource.COUNTED),
        ("020000", 0, 0, None, None, StepSource.UNKNOWN),
        ("last.pt", 0, 0, 50, 50, StepSource.STATED),
        ("last.pt", 0, 0, 0, 0, StepSource.STATED),
    ],
)
def test_stated_step_precedes_name_and_count(
    main: str, base: int, steps: int, stated: int | None, step: int | None, source: StepSource
) -> None:
    """A stated step counts, then a number of the name near the count, then the count."""
    assert job_step(of(1, steps, stated, main), base, misstated=False) == (step, source)


def test_stated_steps_going_back_do_not_count() -> None:
    """Statements that go back while steps are made do not count."""
    of_epochs = [of(1, 90, 90, number=1), of(1, 110, 10, number=2)]
    assert are_steps_misstated(of_epochs)
    assert job_step(of_epochs[1], 0, misstated=True) == (110, StepSource.COUNTED)


def test_constant_number_in_all_checkpoints_is_a_setting() -> None:
    """A number that is the same in all checkpoints of an attempt is a setting."""
    saves = [of(1, 20 * number, 1000, number=number) for number in (1, 2, 3)]
    assert are_steps_misstated(saves) and not are_steps_misstated(saves[:2])


@pytest.mark.parametrize(
    "saves",
    [
        [of(1, 90, 90, number=1), of(1, 110, 110, number=2)],
        [of(1, 90, 90, number=1), of(1, 90, 90, number=2), of(1, 91, 90, number=3)],
        [of(1, 90, 90, number=1), of(2, 10, 10, number=2)],
        [of(1, 90, 90, number=1), of(1, 20, 20, number=2)],
        [of(1, 90, 90, number=1), of(1, 110, None, number=2)],
        [of(1, 0, 90, number=1), of(1, 0, 10, number=2)],
        [],
    ],
)
def test_other_statements_count(saves: list[Checkpoint]) -> None:
    assert not are_steps_misstated(saves)
    assert not are_steps_misstated(saves[::-1])


@pytest.mark.parametrize(
    ("save", "begun"),
    [
        (of(2, 20, 520), None),
        (of(2, 20, 518), None),
        (of(2, 20, 20), 0),
        (of(2, 20, 22), 0),
        (of(2, 20, 420), 400),
        (of(2, 20, 423), 400),
        (of(2, 20, 300), None),
        (of(2, 20, None), None),
        (of(2, 0, 20), None),
        (of(2, 20, None, "ckpt_420.pt"), 400),
        (of(2, 400, None, "ckpt_400.pt"), 0),
    ],
)
def test_start_before_known_checkpoint_is_inferred(save: Checkpoint, begun: int | None) -> None:
    """The attempt was given step 500; attempt 1 had saved steps 400, 420 and 500."""
    others = [
        saved(
            number,
            key=f"ckpt_{step}.pt",
            attempt=1,
            steps=step,
            stated=step,
            step=step,
            main=f"ckpt_{step}.pt",
        )
        for number, step in enumerate((400, 420, 500), 5)
    ]
    assert find_true_start(save, 500, others, misstated=False) == begun
    if save.stated is not None:
        assert find_true_start(save, 500, others, misstated=True) is None


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("began", [0, 300, 500])
def test_script_with_several_optimizer_steps_is_not_accused(each: int, began: int) -> None:
    """Attempt 1 has saved each 50 of its steps up to 500; attempt 2 was given 500, and saves after 50 of its steps."""
    others = [of(1, each * step, step, f"model_{step}.pt", step) for step in range(50, 501, 50)]
    save = of(2, each * 50, began + 50, f"model_{began + 50}.pt", 600)
    assert find_true_start(save, 500, others, misstated=False) == (began if each == 1 and began < 500 else None)


def test_unclear_stated_step_leads_to_no_conclusion() -> None:
    """Where nothing shows what a stated step is, nothing is concluded."""
    assert find_true_start(of(2, 20, 20), 500, [of(0, 0, 500)], misstated=False) is None


STEPS = st.integers(0, 3000)
SAVES = st.lists(
    st.builds(
        lambda attempt, steps, stated, step: saved(1, attempt=attempt, steps=steps, stated=stated, step=step),
        st.integers(1, 3), STEPS, STEPS | st.none(), STEPS | st.none(),
    ),
    max_size=6,
)  # fmt: skip


@given(
    SAVES,
    st.integers(1, 4),
    STEPS,
    STEPS | st.none(),
    STEPS,
    st.sampled_from(["last.pt", "ckpt_20.pt", "2000"]),
)
@settings(database=None)
def test_step_is_near_statement_or_count(
    others: list[Checkpoint], attempt: int, steps: int, stated: int | None, base: int, main: str
) -> None:
    """A step is near what was stated or counted, and a start is an earlier checkpoint."""
    save = of(attempt, steps, stated, main)
    step, source = job_step(save, base, misstated=are_steps_misstated([*others, save]))
    assert (step is None) == (source is StepSource.UNKNOWN)
    assert step is None or step == stated or abs(step - base - steps) <= NEAR_STEPS
    begun = find_true_start(save, base, others, misstated=False)
    if begun is not None:
        assert begun < base and begun in {0, *(other.step for other in others if other.attempt < attempt)}
        assert stated is None or abs(stated - steps - begun) <= FAR_STEPS


@pytest.mark.parametrize(("stated", "began"), [(80, 60), (78, 60), (20, None), (None, None), (200, None)])
def test_first_attempt_from_other_jobs_file_is_recognised(stated: int | None, began: int | None) -> None:
    """The file that the ranks had read states 60; the save was made after 20 steps."""
    assert find_true_start(of(1, 20, stated), 0, [], misstated=False, read=60) == began
    assert find_true_start(of(1, 20, stated), 0, [], misstated=True, read=60) is None
