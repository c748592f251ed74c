"""The series of a job: what is written comes back, damage and full disks do no harm, and it stays small."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from orchestrator.core.jobdir import series
from orchestrator.core.jobdir.series import Measurement, RankMeasurement, SeriesWriter
from orchestrator.core.status_types import Usage

FULL = RankMeasurement(3, 120_000, 2.5, 0.4, 1.25, 5e-5, Usage(1.5, 64 << 30, 0.97, 70 << 30))
BARE = RankMeasurement(4)


def _sample(wall_s: float, *ranks: RankMeasurement) -> Measurement:
    return Measurement(wall_s, 2, ranks)


def test_series_round_trips(tmp_path: Path) -> None:
    """A series is the same after it was written and read."""
    writer = SeriesWriter(tmp_path / "series.jsonl")
    written = [_sample(1e9, FULL, BARE), _sample(1e9 + 10)]
    for sample in written:
        writer.add(sample)
    assert list(series.read(tmp_path / "series.jsonl")) == written
    assert list(series.read(tmp_path / "none")) == []


def test_line_has_time_attempt_and_compact_rank_rows(
    tmp_path: Path,
) -> None:
    """A line is time, attempt and a row per rank without its last unknown numbers."""
    path = tmp_path / "series.jsonl"
    SeriesWriter(path).add(_sample(1e9, FULL, BARE, RankMeasurement(5, 7, usage=Usage(1.0))))
    rows = "[[3,120000,2.5,0.4,1.25,5e-05,1.5,68719476736,0.97,75161927680],[4],[5,7,null,null,null,null,1.0]]"
    assert path.read_text() == f"[1000000000.0,2,{rows}]\n"


def test_reader_may_thin_out_close_samples(tmp_path: Path) -> None:
    """A reader may leave out samples that are close together."""
    writer = SeriesWriter(tmp_path / "series.jsonl")
    for wall_s in (1000.0, 1010.0, 1020.0, 1030.0, 900.0):  # the clock was set back
        writer.add(_sample(wall_s, BARE))
    assert [sample.wall_s for sample in series.read(tmp_path / "series.jsonl", 15.0)] == [
        1000.0,
        1020.0,
        900.0,
    ]


def test_non_finite_loss_round_trips(tmp_path: Path) -> None:
    """A loss that is not a number is read as such."""
    SeriesWriter(tmp_path / "series.jsonl").add(_sample(1e9, RankMeasurement(0, loss=math.nan, learning_rate=math.inf)))
    (rank,) = next(series.read(tmp_path / "series.jsonl")).ranks
    assert rank.loss is not None
    assert (math.isnan(rank.loss), rank.learning_rate) == (True, math.inf)


def test_damaged_line_is_skipped_and_next_is_whole(tmp_path: Path) -> None:
    """A reader skips what is damaged, and the next line is whole."""
    path = tmp_path / "series.jsonl"
    SeriesWriter(path).add(_sample(1e9, FULL))
    with path.open("ab") as file:
        file.write(
            b'\xff\x00\n[]\n[1,2]\n[1,2,[[]]]\n[1,2,[["x"]]]\n[1,2,[[1,true]]]\n{}\n' + b"[" * 9000 + b"\n[1,2,[[1"
        )
    SeriesWriter(path).add(_sample(1e9 + 10, BARE))
    assert [sample.wall_s for sample in series.read(path)] == [1e9, 1e9 + 10]


def test_unwritable_disk_is_no_error(tmp_path: Path) -> None:
    """A disk that accepts nothing is not an error."""
    writer = SeriesWriter(tmp_path / "gone" / "series.jsonl")
    writer.add(_sample(1e9, FULL))
    assert not writer.is_due(1e9 + 9)
    assert writer.is_due(1e9 + 10)
    if Path("/dev/full").exists():
        SeriesWriter(Path("/dev/full")).add(_sample(1e9, FULL))


def test_clock_set_back_does_not_end_series(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "series.jsonl")
    assert writer.is_due(1e9)
    writer.add(_sample(2e9, FULL))
    assert writer.is_due(1e9)


@pytest.mark.parametrize("ranks", [1, 64, 1024])
def test_three_days_stay_below_25_mb(ranks: int) -> None:
    """Three days stay below 25 MB, and a month below 80 MB."""
    line_bytes, age_s, size_bytes, sizes_bytes, samples = 95 * ranks, 0.0, 0, {}, 0
    while age_s < 30 * 86_400:
        size_bytes += line_bytes
        age_s += series.pause_s(line_bytes, age_s)
        samples += 1
        sizes_bytes[int(age_s // 86_400)] = size_bytes
    assert sizes_bytes[2] < 25e6
    assert size_bytes < 80e6
    assert samples > 300


def test_sample_of_64_ranks_is_small(tmp_path: Path) -> None:
    """A sample of 64 ranks takes 6 kB at most."""
    path = tmp_path / "series.jsonl"
    wide = RankMeasurement(
        63, 12_345_678, 2.51234, 0.398765,
        2.345678, 4.98765e-5, Usage(13.57, 64_123_456_789, 0.97, 79_123_456_789),
    )  # fmt: skip
    SeriesWriter(path).add(_sample(1e9, *[wide] * 64))
    assert os.path.getsize(path) < 6100  # noqa: PTH202
