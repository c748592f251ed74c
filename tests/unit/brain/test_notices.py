"""Is it said that ranks train alone, and that a checkpoint states another step than was counted; once, and never wrongly?"""

from __future__ import annotations

import math

import pytest

from orchestrator.brain import notices
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.decisions import NoticeTopic
from orchestrator.core.checkpoints.checkpoint import CheckpointState, StepSource
from orchestrator.core.observations import Failure, Framework
from orchestrator.core.status_types import ReportedNumber, Training
from orchestrator.core.wire import reports
from orchestrator.core.wire.reports import RankHeartbeat
from tests.support.brain_story import Story, only, save
from tests.support.frames import frame

TORCH = Framework.TORCH


def running(nodes: int = 2) -> Story:
    story = Story(nodes, fence_s=None)
    story.run()
    return story


def beats(story: Story, *ranks: tuple[int, Framework | None]) -> list[d.Notice]:
    """Let every rank tell its steps and what it is alone with; return the notices."""
    story.now_s += 1.0
    said = []
    for rank, (steps, alone) in enumerate(ranks):
        beat = RankHeartbeat(rank, steps, "S", 0, 0.0, optimizer_steps=steps, alone=alone)
        said += story.hear(e.FromNode(0.0, f"n{rank}", reports.Heartbeat(1, (beat,))))
    return [one for one in said if isinstance(one, d.Notice)]


def test_ranks_training_alone_are_named_once_with_fix() -> None:
    story = running()
    assert not beats(story, (29, TORCH), (40, TORCH))
    (notice,) = beats(story, (30, TORCH), (41, TORCH))
    assert notice.topic is NoticeTopic.ALONE
    assert notice.why == "2 ranks train alone: none has formed a process group after 30 steps"
    together = "torch.distributed.init_process_group() and DistributedDataParallel(model)"
    assert notice.fix == f"if they are to train together, {together}"
    assert not beats(story, (60, TORCH), (61, TORCH))


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        (Framework.LIGHTNING, "Trainer(strategy='ddp', devices=1, num_nodes=2)"),
        (Framework.ACCELERATE, "env: {ACCELERATE_USE_CPU: 'true'}"),
    ],
)
def test_fix_line_is_that_of_framework(framework: Framework, words: str) -> None:
    (notice,) = beats(running(), (30, framework), (30, framework))
    assert words in notice.fix


@pytest.mark.parametrize(
    "ranks",
    [
        ((90, TORCH), (90, None)),
        ((90, TORCH), (0, None)),
        ((90, None), (90, None)),
        ((0, None), (0, None)),
    ],
    ids=["one in a group", "one without a step", "a gang", "no steps at all"],
)
def test_no_notice_unless_every_rank_is_alone(
    ranks: tuple[tuple[int, Framework | None], ...],
) -> None:
    assert not beats(running(), *ranks)


def test_world_size_of_one_is_not_alone() -> None:
    assert not beats(running(1), (90, TORCH))


def test_notice_is_withdrawn_if_group_forms_late() -> None:
    story = running()
    assert beats(story, (30, TORCH), (30, TORCH))
    (notice,) = beats(story, (50, None), (50, TORCH))
    assert (notice.withdrawn, notice.why) == (True, notices.RANKS_CONNECTED)
    assert not beats(story, (51, None), (51, None))


def test_ranks_alone_that_end_early_are_named() -> None:
    story = running()
    ended = [
        e.FromNode(0.0, f"n{rank}", reports.Exited(1, rank, 0, None, 5, None, False, False, TORCH)) for rank in (0, 1)
    ]
    decided = story.hear(*ended)
    assert [type(one) for one in decided[:2]] == [d.Notice, d.Finish]
    assert "after 5 steps" in decided[0].why


# The loss.


def told(
    story: Story, step: int, training: Training | None, count: int = 0, *norms: tuple[int, ReportedNumber]
) -> list[d.Notice]:
    """Let rank 0 tell its step, its training and its norms; return the notices."""
    story.now_s += 1.0
    beat = RankHeartbeat(
        0, step, "S", 0, 0.0, optimizer_steps=step, training=training, nonfinite_losses=count, gradient_norms=norms
    )
    return [
        one for one in story.hear(e.FromNode(0.0, "n0", reports.Heartbeat(1, (beat,)))) if isinstance(one, d.Notice)
    ]


def test_non_finite_loss_is_noticed_once_and_withdrawn() -> None:
    story = running()
    assert not told(story, 50, Training(ReportedNumber(0.3)))
    (notice,) = told(story, 60, Training(ReportedNumber(math.nan)))
    assert (notice.topic, notice.why) == (NoticeTopic.LOSS, "loss is nan, seen from step 60 on")
    assert not told(story, 80, Training(ReportedNumber(math.nan)))
    (notice,) = told(story, 90, Training(ReportedNumber(0.25)))
    assert (notice.withdrawn, notice.why) == (True, "loss is 0.25 again")


@pytest.mark.parametrize(
    ("training", "again"),
    [(None, "gradient norm is finite again"), (Training(ReportedNumber(0.25)), "loss is 0.25 again")],
)
def test_non_finite_norm_is_noticed_as_loss_is(training: Training | None, again: str) -> None:
    story = running()
    odd, finite = (812, ReportedNumber(math.inf)), (811, ReportedNumber(1.3))
    assert not told(story, 812, training, 1, odd, finite)
    (notice,) = told(story, 813, training, 2, odd, finite)
    assert notice.topic is NoticeTopic.LOSS
    assert notice.why == "gradient norm is inf at step 812 (last finite 1.3 at step 811)"
    assert not told(story, 814, training, 3, odd, finite)
    (notice,) = told(story, 815, training)
    assert (notice.withdrawn, notice.why) == (True, again)


# The end.

CAUGHT = Failure("ValueError", "no data", "Traceback ...", frame("train.py:8"))


def ended(story: Story, *failures: Failure | None, steps: int = 0) -> list[str]:
    """Let each rank exit with code 0; return what is said of that."""
    exits = [
        e.FromNode(0.0, f"n{n}", reports.Exited(1, n, 0, None, steps, why, False, False))
        for n, why in enumerate(failures)
    ]
    said = [one.why for one in story.hear(*exits) if isinstance(one, d.Notice)]
    assert story.brain.facts.attempt is not None and story.brain.facts.attempt.verdict is None
    return said


def test_success_after_traceback_is_noticed() -> None:
    """An end with code 0 after a traceback is reported."""
    said = "every rank exited with code 0, and the log of {} ends with ValueError: no data at train.py:8"
    assert ended(running(), None, CAUGHT, steps=39) == [said.format("rank 1")]
    assert ended(running(), CAUGHT, CAUGHT) == [said.format("ranks 0-1")]


@pytest.mark.parametrize(("total", "is_said"), [(400, True), (65, False), (60, False), (55, False)])
def test_fewer_steps_than_printed_total_are_noticed(total: int, is_said: bool) -> None:
    story = running()
    told(story, 60, Training(percent=100 * 60 / total, total_steps=total))
    said = [f"every rank exited with code 0, and it made 60 of the {total} steps that it printed"]
    assert ended(story, None, None, steps=60) == (said if is_said else [])


def test_bar_of_other_things_gives_no_end_notice() -> None:
    """A progress bar of other things than steps says nothing of the end."""
    story = running()
    told(story, 60, Training(percent=100 * 2 / 400, total_steps=400))
    assert not ended(story, None, None, steps=60)


def test_training_without_steps_is_noticed_with_last_line() -> None:
    """A training that made no step is reported with its last line."""
    last = Failure("", "Unable to locate sufficient 2 gpus", "", None)
    said = "every rank exited with code 0, and no step was made"
    words = f"{said}: the log of rank 0 ends with: Unable to locate sufficient 2 gpus"
    assert ended(running(), last, last) == [words]
    assert ended(running(), Failure("", "", "", None), None) == [said]
    assert not ended(running(), None, None)
    story = running()
    told(story, 0, Training(ReportedNumber(0.1)))  # it trains without an optimizer of torch
    assert not ended(story, last, last)


# Stated steps.


def stated(count: int, step: int, source: StepSource = StepSource.STATED) -> e.CheckpointChanged:
    """Return a save after so many steps that states this one."""
    held = step if source is StepSource.STATED else count
    return e.CheckpointChanged(0.0, save(held, main=f"checkpoint-{step}", steps=count, stated=step, step_source=source))


def test_stated_step_unlike_counted_one_is_noticed_once() -> None:
    """A stated step that differs from the counted one is reported once."""
    story = running(1)
    notice = only(story.hear(stated(1000, 500)), d.Notice)
    assert notice.topic is NoticeTopic.STEPS
    assert notice.why.startswith("checkpoint-500 says step 500, orch counted 1,000:")
    assert not story.hear(stated(2000, 1000))


@pytest.mark.parametrize(("count", "step"), [(108, 100), (20, 20), (3, 9), (0, 500)])
def test_late_checkpoint_and_uncounted_steps_are_no_difference(count: int, step: int) -> None:
    """A checkpoint that ends late and steps that were not counted are no difference."""
    assert not running(1).hear(stated(count, step))


def test_numbers_other_than_job_step_are_no_difference() -> None:
    """`epoch0-step100.pt`, then `epoch1-step50.pt`: the step is that of the epoch."""
    assert not running(1).hear(stated(150, 50, StepSource.COUNTED))


@pytest.mark.parametrize("state", [CheckpointState.OPEN, CheckpointState.TORN])
def test_incomplete_checkpoint_says_nothing_of_steps(state: CheckpointState) -> None:
    unfinished = save(500, state=state, steps=1000, stated=500, step_source=StepSource.STATED)
    assert not running(1).hear(e.CheckpointChanged(0.0, unfinished))


def _begin(story: Story, attempt: int, *faults: str) -> list[d.Notice]:
    """Make the nodes ready, each with its fault, and start the ranks; return the notices on memory."""
    ready = [
        e.FromNode(0.0, f"n{node}", reports.Prepared(attempt, "10.0.0.1", 5000, (), memory_fault=fault))
        for node, fault in enumerate(faults)
    ]
    if attempt == 1:
        story.hear(*(story.up(node) for node in range(len(faults))))
    said = story.hear(*ready)
    said += story.hear(*(e.FromNode(0.0, f"n{node}", reports.Started(attempt, (9,))) for node in range(len(faults))))
    return [one for one in said if isinstance(one, d.Notice) and one.topic is NoticeTopic.MEMORY]


def test_nodes_without_room_in_memory_are_named_once_in_each_attempt() -> None:
    story, fault = Story(3, fence_s=None), "/dev/shm has 0.06 GB, checkpoint.memory is 64.0 GB"
    (notice,) = _begin(story, 1, fault, "", fault)
    assert notice.why == f"n0 and n2: checkpoints are written to disk: {fault}"
    assert not story.hear(e.FromNode(0.0, "n0", reports.Heartbeat(1, ())))
    story.hear(story.exited(0), *(story.stopped(node) for node in range(3)))
    story.wait(30.0)
    (again,) = _begin(story, 2, "", fault, "")
    assert again.why == f"n1: checkpoints are written to disk: {fault}"


def test_many_reasons_are_counted() -> None:
    story = Story(6, fence_s=None)
    (notice,) = _begin(story, 1, *(f"/dev/shm has 0.0{number} GB" for number in range(6)))
    assert notice.why.endswith("/dev/shm has 0.02 GB; 3 more reasons")
