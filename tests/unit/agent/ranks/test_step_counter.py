"""The step file as its reader sees it: steps, speed, collectives, counts at steps in common."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.agent.ranks import step_counter
from orchestrator.agent.ranks.hook import layout
from orchestrator.agent.ranks.step_counter import NO_STEP, LastStep, StepCounter


def written(path: Path, times_ns: Sequence[int], first_step: int = 1, pid: int = 7) -> StepCounter:
    """A step file as the hook would leave it after steps at these times."""
    step_counter.create_step_file(path)
    words = [0] * (layout.STEP_FILE_BYTES // 8)
    words[layout.MAGIC_WORD] = layout.STEP_FILE_MAGIC | layout.STEP_FILE_VERSION << 32
    words[layout.PID_WORD] = pid
    for step, time_ns in enumerate(times_ns, first_step):
        words[layout.RING_WORD + step % layout.RING_STEPS] = time_ns
        words[layout.TIME_WORD] = time_ns
        words[layout.STEP_WORD] = step
    path.write_bytes(struct.pack(f"<{len(words)}Q", *words))
    return StepCounter(path)


def seconds(*times_s: float) -> list[int]:
    return [int(time_s * 1e9) for time_s in times_s]


def test_nothing_is_known_before_first_step(tmp_path: Path) -> None:
    step_counter.create_step_file(tmp_path / "steps")
    reader = StepCounter(tmp_path / "steps")
    assert reader.read() == NO_STEP
    assert reader.rate_per_s() is None


def test_overwritten_ring_keeps_last_step(tmp_path: Path) -> None:
    reader = written(tmp_path / "steps", seconds(*range(1, 2001)))
    assert reader.read() == LastStep(step=2000, time_ns=2000 * 10**9, pid=7, rows=2000)


def test_late_counter_knows_only_its_own_steps(tmp_path: Path) -> None:
    """A counter that took over late knows only its own steps."""
    reader = written(tmp_path / "steps", seconds(100, 101), first_step=500)
    assert reader.rate_per_s() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("times_s", "rate_per_s"),
    [
        ([100], None),
        ([100, 100.5], 2.0),
        ([0.5 * n for n in range(1, 101)], 2.0),
        ([1, 60, 61, 62], 1.0),  # the pause lies outside the window
        ([100, 160], 1 / 60),  # slower than the window: the last two steps
        ([100, 50], None),  # the clock was set back
    ],
)
def test_rate_is_that_of_last_steps(tmp_path: Path, times_s: list[float], rate_per_s: float | None) -> None:
    rate = written(tmp_path / "steps", seconds(*times_s)).rate_per_s()
    assert rate == (None if rate_per_s is None else pytest.approx(rate_per_s))


def every(step_s: float, count: int) -> list[float]:
    return [100 + step_s * number for number in range(count)]


@pytest.mark.parametrize(
    ("times_s", "median_step_s"),
    [
        (every(0.5, 3), None),  # two steps between three moments
        (every(0.5, 4), 0.5),
        ([*every(0.5, 100), *(200 + at_s for at_s in every(2, 200))], 2.0),  # only the last 128 count
        ([*every(0.5, 50), *(190 + at_s for at_s in every(0.5, 50))], 0.5),  # one pause is not usual
        (
            [100 + turn + part * 0.01 for turn in range(50) for part in range(3)],
            0.98,
        ),  # three optimizers in turn
        ([*every(0.5, 20), 50, 50.5, 51], 0.5),  # the clock was set back
    ],
)
def test_median_step_time_is_between_iterations(
    tmp_path: Path, times_s: list[float], median_step_s: float | None
) -> None:
    usual = written(tmp_path / "steps", seconds(*times_s)).median_step_s()
    assert usual == (None if median_step_s is None else pytest.approx(median_step_s))


def counted(path: Path, counts: Sequence[int], first_step: int = 1) -> StepCounter:
    """A step file with one group that had entered so many collectives at these steps."""
    written(path, seconds(*range(1, len(counts) + 1)), first_step)
    words = list(struct.unpack(f"<{layout.STEP_FILE_BYTES // 8}Q", path.read_bytes()))
    words[layout.GROUPS_WORD] = 2
    for step, count in enumerate(counts, first_step):
        row = layout.COUNTS_WORD + step % layout.RING_STEPS * layout.ROW_WORDS
        words[row], words[row + layout.GROUPS_MAX] = count + 1, step * layout.OPTIMIZERS_MAX
    path.write_bytes(struct.pack(f"<{len(words)}Q", *words))
    group = {"column": 0, "name": "0", "label": "default_pg", "ranks": [0, 1]}
    path.with_name(layout.GROUPS_FILE).write_text(json.dumps({"generation": 2, "groups": [group]}))
    return StepCounter(path)


def test_ranks_steps_apart_count_at_common_steps(tmp_path: Path) -> None:
    """Ranks some steps apart are compared at steps that they have in common."""
    reader = counted(tmp_path / "steps", list(range(3000)))
    for since, last in [(0, 100), (500, 700), (2000, 2999), (2990, 3000), (2998, 2999)]:
        one = {mark.step for mark in reader.collective_counts(since, last)}
        other = {mark.step for mark in reader.collective_counts(max(0, since - 3), last - 1)}
        assert 1 <= len(one) <= step_counter.COUNTS_MAX
        assert one & other or last - since < 3


def test_restarted_trainer_has_its_own_counts(tmp_path: Path) -> None:
    reader = counted(tmp_path / "steps", [4, 8, 12])
    assert [mark.counts for mark in reader.collective_counts(500, 3)] == [(4,), (8,), (12,)]


def test_history_shows_where_count_grew_differently(tmp_path: Path) -> None:
    """Step 1,504 entered one collective less than the others, and 1,600 one more."""
    counts = [2 * step - (step >= 1504) + (step >= 1600) for step in range(1, 2001)]
    steps = [mark.step for mark in counted(tmp_path / "steps", counts).history()]
    assert steps == [2000 - layout.RING_STEPS + 2, 1504, 1505, 1600, 1601, 2000]


def test_file_of_other_layout_has_no_steps(tmp_path: Path) -> None:
    written(tmp_path / "steps", seconds(1, 2))
    data = bytearray((tmp_path / "steps").read_bytes())
    data[4] += 1  # the version
    (tmp_path / "steps").write_bytes(data)
    assert StepCounter(tmp_path / "steps").read() == NO_STEP


def test_stall_is_longer_interval_less_usual_one(tmp_path: Path) -> None:
    """Intervals of 0.1 s, and 1.6 s after steps 20 and 40, at which files were written."""
    times_s = [100.0]
    for step in range(1, 50):
        times_s.append(times_s[-1] + (1.6 if step in (20, 40) else 0.1))
    reader = written(tmp_path / "steps", seconds(*times_s))
    assert reader.stall_s(20, {20, 40}) == pytest.approx(1.5)
    assert reader.stall_s(30, {20, 30, 40}) == pytest.approx(0.0, abs=1e-6)
    assert reader.stall_s(50, {20, 40, 50}) is None  # no step has followed
    assert reader.stall_s(-1, {20, 40}) is None  # no hook has seen the write
    assert reader.stall_s(20, set(range(1, 47))) is None  # few intervals hold no checkpoint


def test_stall_of_overwritten_step_is_unknown(tmp_path: Path) -> None:
    reader = written(tmp_path / "steps", seconds(*range(1, 2001)))
    assert reader.stall_s(500, {500}) is None
    assert reader.stall_s(1999, {1999}) == 0.0
