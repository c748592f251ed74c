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


def test_a_byte_has_the_time_of_the_first_note_beyond_it(path: Path) -> None:
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


def test_later_lines_begin_where_the_last_note_up_to_the_time_ended(path: Path) -> None:
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


def test_a_missing_or_empty_index_knows_nothing_and_says_so(path: Path) -> None:
    assert offset_at(path, 5) == 0
    assert IndexCursor(path).span(0) is None
    assert IndexCursor(None).span(0) is None
    write(path)
    assert offset_at(path, 5) == 0
    assert IndexCursor(path).span(0) is None


def test_a_log_that_has_not_grown_costs_no_record(path: Path) -> None:
    write(path, (100, 10), (200, 10), (300, 10))
    assert path.stat().st_size == RECORD_BYTES
    write(path, (400, 0), (500, 0))
    assert path.stat().st_size == 0


def test_a_torn_record_is_ignored_by_readers_and_mended_by_the_next_writer(path: Path) -> None:
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


def test_a_reopened_index_goes_on_where_the_crash_left_it(path: Path) -> None:
    write(path, (100, 10))
    write(path, (200, 10), (300, 25))
    assert path.stat().st_size == 2 * RECORD_BYTES
    assert IndexCursor(path).span(10) == (300, 25)


def test_a_truncated_log_takes_its_records_with_it(path: Path) -> None:
    write(path, (100, 10), (200, 20), (300, 30), (400, 15), (500, 40))
    assert path.stat().st_size == 3 * RECORD_BYTES
    assert [offset_at(path, at_ns) for at_ns in (100, 399, 400, 500)] == [10, 10, 15, 40]


def test_a_log_truncated_to_nothing_starts_anew(path: Path) -> None:
    write(path, (300, 30), (400, 0), (410, 5))
    assert path.stat().st_size == RECORD_BYTES
    assert IndexCursor(path).span(0) == (410, 5)


def test_a_clock_set_back_waits_until_it_has_caught_up(path: Path) -> None:
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


def test_a_cursor_sees_new_records_only_after_refresh(path: Path) -> None:
    cursor = IndexCursor(write(path, (100, 10)))
    assert cursor.span(10) is None
    write(path, (200, 20))
    assert cursor.span(10) is None
    cursor.refresh()
    assert cursor.span(10) == (200, 20)


@pytest.mark.parametrize("start", [0, 1, 5_000, 99_990])
def test_a_cursor_that_starts_anywhere_agrees_with_one_that_walks(path: Path, start: int) -> None:
    write(path, *((1_000 + number, 10 * number) for number in range(1, 10_001)))
    cursor = IndexCursor(path)
    for offset in range(start, 100_000, 7):
        assert cursor.span(offset) == (1_001 + offset // 10, 10 * (offset // 10 + 1))
    assert cursor.span(100_000) is None


def test_a_full_disk_costs_time_stamps_and_nothing_else() -> None:
    index = LogIndex(Path("/dev/full"))
    index.record(100, 10)
    index.record(200, 20)
    index.close()
