"""What a status tells of what ranks use, and of what their scripts tell of the training; and the sample of it for the series."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from orchestrator.brain.fold_events import fold
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, News
from orchestrator.core.checkpoints.checkpoint import CheckpointFile, FileLocation
from orchestrator.core.codec import Json
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.series import RankMeasurement
from orchestrator.core.status_types import ReportedNumber, Training, Usage
from orchestrator.core.wire import reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.supervisor import status as status_object
from orchestrator.views import cells, post_mortem
from tests.support import jobs

USAGE = Usage(1.5, 4 << 30, 0.97, 60 << 30)
TRAINING = Training(ReportedNumber(1.25), ReportedNumber(5e-5), 7.0, 600.0, 1000)


@pytest.mark.parametrize("value", [USAGE, TRAINING])
def test_every_number_is_shown(value: Usage | Training) -> None:
    def shown(one: Usage | Training) -> object:
        usage, training = (one, None) if isinstance(one, Usage) else (None, one)
        beat = RankHeartbeat(0, 0, "S", 100, 1.0, usage=usage, training=training)
        return _status([e.FromNode(4.5, "node-0", reports.Heartbeat(1, (beat,)))])["ranks"][0]

    for field in dataclasses.fields(value):
        one = dataclasses.replace(type(value)(), **{field.name: getattr(value, field.name)})
        assert shown(one) != shown(type(value)()), f"{field.name}: give it a value in {type(value).__name__.upper()}"


def _status(beats: list[News], at: float = 6.5) -> Json:
    """Return the status of a job whose file does not tell the total of its steps."""
    facts = Facts()
    for one in [*jobs.submitted(), *jobs.running(1, 1.0, 0), *beats]:
        fold(facts, one)
    return status_file.to_json(status_object.status(jobs.plan(), facts, jobs.moment(at)))


def test_rank_numbers_stay_until_updated_or_attempt_ends() -> None:
    """The numbers of ranks stay until they report more and end with the attempt."""
    beat = RankHeartbeat(1, 70, "S", 100, 1.0, optimizer_steps=70, usage=USAGE, training=TRAINING)
    later = RankHeartbeat(1, 71, "S", 100, 1.0, optimizer_steps=71)
    status = _status(
        [
            e.FromNode(4.5, "node-0", reports.Heartbeat(1, (beat,))),
            e.FromNode(5.5, "node-0", reports.Heartbeat(1, (later,))),
        ]
    )
    rank = status["ranks"][1]
    assert (rank["loss"], rank["learning_rate"], rank["percent"], rank["total_steps"]) == (
        1.25,
        5e-5,
        7.1,
        1000,
    )
    assert (rank["cpu_share"], rank["memory_bytes"]) == (1.5, 4 << 30)
    assert (rank["gpu_share"], rank["gpu_memory_bytes"]) == (0.97, 60 << 30)
    assert (status["loss"], status["learning_rate"]) == (1.25, 5e-5)
    over = [*jobs.crash(1, 5.0, 71, 71), jobs.again(2, 9.0, None)]
    again = _status([e.FromNode(4.5, "node-0", reports.Heartbeat(1, (beat,))), *over], at=10.0)
    assert (again["loss"], again["ranks"][1]["loss"], again["ranks"][1]["memory_bytes"]) == (None, None, None)


@pytest.mark.parametrize(
    ("steps", "told", "rate_per_s", "shown"),
    [
        (
            70,
            Training(percent=34.0, eta_s=60.0, total_steps=200),
            10.0,
            (35.0, 13.0, 200),
        ),  # the bar is late
        (70, Training(percent=34.0, eta_s=60.0, total_steps=200), None, (35.0, 60.0, 200)),
        (
            7,
            Training(percent=50.0, eta_s=60.0, total_steps=1000),
            10.0,
            (50.0, 60.0, None),
        ),  # it counts batches
        (7, Training(percent=50.0), None, (50.0, None, None)),
    ],
)
def test_bar_total_counts_only_for_steps(
    steps: int, told: Training, rate_per_s: float | None, shown: tuple[float, float | None, int | None]
) -> None:
    beat = RankHeartbeat(0, steps, "S", 1, 1.0, optimizer_steps=steps, training=told, rate_per_s=rate_per_s)
    rank = _status([e.FromNode(4.5, "node-0", reports.Heartbeat(1, (beat,)))])["ranks"][0]
    assert (rank["percent"], rank["eta_s"], rank["total_steps"]) == shown


def test_non_finite_loss_is_text_in_json() -> None:
    """A loss that is not a number is a text in JSON and is read again as such."""
    training = Training(ReportedNumber("nan"), ReportedNumber("inf"))
    beat = RankHeartbeat(0, 7, "S", 100, 1.0, training=training)
    status = _status([e.FromNode(4.5, "node-0", reports.Heartbeat(1, (beat,)))])
    assert (status["loss"], status["ranks"][0]["learning_rate"]) == ("nan", "inf")
    back = status_file.loads(json.dumps(status))
    assert back.training.loss is not None
    assert math.isnan(back.training.loss)


def test_sample_has_measurements_of_living_ranks() -> None:
    beat = RankHeartbeat(0, 7, "S", 100, 1.0, median_step_s=0.4, rate_per_s=2.5, usage=USAGE, training=TRAINING)
    facts = Facts()
    exited = e.FromNode(4.6, "node-0", reports.Exited(1, 1, 0, None, 7, None, False, False))
    for one in [
        *jobs.submitted(),
        *jobs.running(1, 1.0, 7),
        e.FromNode(4.5, "node-0", reports.Heartbeat(1, (beat,))),
        exited,
    ]:
        fold(facts, one)
    status = status_object.status(jobs.plan(), facts, jobs.moment(5.0))
    sample = status_object.sample(status, facts, 1e9)
    assert [rank.rank for rank in sample.ranks] == [0, 2, 3]
    assert sample.ranks[0] == RankMeasurement(0, 7, 2.5, 0.4, 1.25, 5e-5, USAGE)


def test_post_mortem_shows_when_process_group_was_formed() -> None:
    formed = [RankHeartbeat(rank, 0, "S", 0, 0.0, has_group=True) for rank in (0, 1)]
    *before, stepping, last = jobs.crashed_once()
    beat = e.FromNode(last.at - 0.4, "node-0", reports.Heartbeat(2, tuple(formed)))
    told = jobs.told([*before, beat, stepping, last])
    first, _ = told["attempts"]
    parts = first["restart_parts"]
    shown = cells.plain_text(post_mortem.post_mortem(told))
    assert ", process group after 2.1s, first step after 0.4s" in shown
    assert list(parts) == ["end_s", "start_s", "group_s", "first_step_s"] and parts["first_step_s"] == pytest.approx(
        0.4
    )
    assert sum(parts.values()) == pytest.approx(first["restart_s"])


@pytest.mark.parametrize(
    ("home", "safe", "safe_bytes"), [((), False, 0), (("a",), False, 3), (("a", "b"), True, 10), (None, True, 10)]
)
def test_safe_part_of_checkpoint_in_memory(home: tuple[str, ...] | None, safe: bool, safe_bytes: int) -> None:
    """What is on a disk or on two hosts is safe; in the memory of one host it is not."""
    facts = Facts()
    for one in jobs.crashed_once():
        fold(facts, one)
    assert facts.checkpoint is not None
    number = facts.checkpoint.save
    files = (CheckpointFile("a", 3, 1), CheckpointFile("b", 7, 1))
    in_memory = FileLocation("node-0", "/dev/shm/orch-x/checkpoints", is_memory=True)
    copy = FileLocation("node-1", "/dev/shm/orch-x/neighbours/2", is_memory=True)
    disk = FileLocation("", "/home/me", home or ())
    places = (in_memory, copy) if home is None else (in_memory, disk) if home else (in_memory,)
    ledger = {number: dataclasses.replace(facts.checkpoints[number], files=files, locations=places)}
    shown = status_object.status(jobs.plan(), facts, jobs.moment(12.0), ledger=ledger).checkpoint
    assert shown is not None
    assert (shown.safe, shown.bytes, shown.safe_bytes) == (safe, 10, safe_bytes)


def test_notice_of_memory_is_of_its_attempt_alone() -> None:
    """That a node has no room for checkpoints in memory is shown in the attempt that met it."""
    crashed = jobs.crashed_once()
    begun = next(index for index, one in enumerate(crashed) if isinstance(one, d.Judge))
    notice = d.Notice(3.0, "node-0: checkpoints are written to disk", 1, d.NoticeTopic.MEMORY)
    assert _notices([*crashed[:begun], notice]) == (notice.why,)
    assert _notices([*crashed[:begun], notice, *crashed[begun:]]) == ()


def _notices(news: list[News]) -> tuple[str, ...]:
    facts = Facts()
    for one in news:
        fold(facts, one)
    return status_object.status(jobs.plan(), facts, jobs.moment(12.0)).notices
