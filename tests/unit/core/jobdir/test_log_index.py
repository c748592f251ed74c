"""The time index beside a log: what it promises after growth, truncation, crashes and a clock that is set back."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.jobdir.log_index import IndexCursor, LogIndex, offset_at

RECORD_BYTES = 16


def write(path: Path, *notes: tuple[int, int]) -> Path:
    index = LogIndex(path)
    for time_ns, size_bytes in notes:
        index.record(time_ns, size_bytes)
    index.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.idx"


def test_byte_has_time_of_first_later_record(path: Path) -> None:
    cursor = IndexCursor(write(path, (100, 10), (200, 30), (300, 31)))
    assert [cursor.span(offset) for offset in (0, 9, 10, 29, 30)] == [
        (100, 10),
        (100, 10),
        (200, 30),
        (200, 30),
        (300, 31),
    ]
    assert cursor.span(31) is None
    assert cursor.time_ns == 300


def test_later_lines_start_at_last_record_before_time(path: Path) -> None:
    write(path, (100, 10), (200, 30), (300, 31))
    assert [offset_at(path, at_ns) for at_ns in (0, 99, 100, 199, 200, 300, 10**18)] == [
        0,
        0,
        10,
        10,
        30,
        31,
        31,
    ]


def test_missing_or_empty_index_reports_unknown(path: Path) -> None:
    """A missing or empty index knows nothing and says so."""
    assert offset_at(path, 5) == 0
    assert IndexCursor(path).span(0) is None
    assert IndexCursor(None).span(0) is None
    write(path)
    assert offset_at(path, 5) == 0
    assert IndexCursor(path).span(0) is None


def test_unchanged_log_costs_no_record(path: Path) -> None:
    write(path, (100, 10), (200, 10), (300, 10))
    assert path.stat().st_size == RECORD_BYTES
    write(path, (400, 0), (500, 0))
    assert path.stat().st_size == 0


def test_torn_record_is_ignored_and_fixed_by_writer(path: Path) -> None:
    """A torn record is ignored by readers and fixed by the next writer."""
    write(path, (100, 10), (200, 20))
    with path.open("ab") as file:
        file.write(b"\x07" * 9)
    assert offset_at(path, 1000) == 20
    cursor = IndexCursor(path)
    assert cursor.span(15) == (200, 20)
    assert cursor.span(20) is None

    write(path, (300, 30))
    assert path.stat().st_size == 3 * RECORD_BYTES
    assert offset_at(path, 1000) == 30


def test_reopened_index_continues_after_crash(path: Path) -> None:
    write(path, (100, 10))
    write(path, (200, 10), (300, 25))
    assert path.stat().st_size == 2 * RECORD_BYTES
    assert IndexCursor(path).span(10) == (300, 25)


def test_truncated_log_truncates_its_records(path: Path) -> None:
    write(path, (100, 10), (200, 20), (300, 30), (400, 15), (500, 40))
    assert path.stat().st_size == 3 * RECORD_BYTES
    assert [offset_at(path, at_ns) for at_ns in (100, 399, 400, 500)] == [10, 10, 15, 40]


def test_log_truncated_to_nothing_restarts_index(path: Path) -> None:
    """A log truncated to nothing starts again."""
    write(path, (300, 30), (400, 0), (410, 5))
    assert path.stat().st_size == RECORD_BYTES
    assert IndexCursor(path).span(0) == (410, 5)


def test_clock_set_back_pauses_index_until_caught_up(path: Path) -> None:
    write(path, (1000, 10), (400, 20))
    write(path, (500, 30), (1100, 40))
    assert [offset_at(path, at_ns) for at_ns in (450, 999, 1000, 1100)] == [0, 0, 30, 40]
    cursor = IndexCursor(path)
    assert [cursor.span(offset) for offset in (5, 15, 25, 35)] == [
        (1000, 10),
        (1000, 20),
        (1000, 30),
        (1100, 40),
    ]


def test_cursor_sees_new_records_only_after_refresh(path: Path) -> None:
    cursor = IndexCursor(write(path, (100, 10)))
    assert cursor.span(10) is None
    write(path, (200, 20))
    assert cursor.span(10) is None
    cursor.refresh()
    assert cursor.span(10) == (200, 20)


@pytest.mark.parametrize("start", [0, 1, 5_000, 99_990])
def test_cursor_started_anywhere_agrees_with_walking_one(path: Path, start: int) -> None:
    write(path, *((1_000 + number, 10 * number) for number in range(1, 10_001)))
    cursor = IndexCursor(path)
    for offset in range(start, 100_000, 7):
        assert cursor.span(offset) == (1_001 + offset // 10, 10 * (offset // 10 + 1))
    assert cursor.span(100_000) is None


def test_full_disk_costs_only_time_stamps() -> None:
    """A full disk costs time stamps and nothing else."""
    index = LogIndex(Path("/dev/full"))
    index.record(100, 10)
    index.record(200, 20)
    index.close()
