"""Reading logs: order, tails, spans of time, attempts, and following them without losing or doubling a line."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from orchestrator.client.logs.reader import (
    BAR_S,
    CUT_MARK,
    LINE_BYTES_MAX,
    Follower,
    LogLine,
    LogQuery,
    attempts,
    lines,
    read,
)
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex

S = 1_000_000_000
NOW_NS = 1_000_000 * S
SPARSE_BYTES = 2 << 30


class Job:
    """A job folder whose logs grow as the test says, with a clock of its own."""

    def __init__(self, root: Path) -> None:
        self.dir = JobDir(root / "job")
        self.now_ns = NOW_NS

    def write(self, rank: int, text: str | bytes, *, attempt: int = 1, at_ns: int | None = None) -> None:
        """Append to a rank's log and note the time, as the agent does."""
        path = self.dir.rank_log(attempt, rank)
        append(path, text)
        index = LogIndex(self.dir.rank_index(attempt, rank))
        index.record(self.now_ns if at_ns is None else at_ns, path.stat().st_size)
        index.close()

    def write_node(self, node: str, text: str, *, at_ns: int, attempt: int = 1) -> None:
        path = self.dir.node_log(attempt, node)
        append(path, text)
        os.utime(path, ns=(at_ns, at_ns))

    def lines(self, query: LogQuery | None = None) -> list[LogLine]:
        return list(read(self.dir, query or LogQuery(), self.now_ns))

    def texts(self, query: LogQuery | None = None) -> list[str]:
        return [line.text for line in self.lines(query)]

    def follow(self, query: LogQuery | None = None) -> Follower:
        return Follower(self.dir, query or LogQuery(), clock_ns=lambda: self.now_ns)


def append(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def polled(follower: Follower) -> list[str]:
    return [line.text for line in lines(follower.poll())]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_without_logs_has_no_lines(job: Job) -> None:
    assert job.lines() == []
    assert job.lines(LogQuery(tail=5, attempt=3)) == []
    assert attempts(job.dir) == ()
    assert list(lines(job.follow().drain())) == []


def test_ranks_merge_by_time_then_rank_then_order(job: Job) -> None:
    job.write(1, "b1\nb2\n", at_ns=10 * S)
    job.write(0, "a1\n", at_ns=10 * S)
    job.write(0, "a2\n", at_ns=12 * S)
    job.write(1, "b3\n", at_ns=11 * S)
    assert job.texts() == ["a1", "b1", "b2", "b3", "a2"]
    first = job.lines()[1]
    assert (first.time_ns, first.attempt, first.rank, first.node) == (10 * S, 1, 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_line_time_is_first_index_record_after_it(job: Job, seed: int) -> None:
    dice = random.Random(seed)
    expected, written, at_ns = list[tuple[int, int, str]](), dict.fromkeys(range(3), ""), 0
    for _ in range(200):
        at_ns += dice.choice((0, 1, 7))
        rank = dice.randrange(3)
        text = "".join(dice.choice((f"{dice.random()}", "x" * dice.choice((10, 6_000)), "\n", "\n")) for _ in range(9))
        job.write(rank, text, at_ns=at_ns)
        *whole, written[rank] = (written[rank] + text).split("\n")
        expected += [(at_ns, rank, line) for line in whole]
    for rank in range(3):
        job.write(rank, "\n", at_ns=at_ns)
        expected.append((at_ns, rank, written[rank]))
    expected.sort(key=lambda line: line[:2])
    assert [(line.time_ns, line.rank, line.text) for line in job.lines()] == expected


def test_unindexed_lines_have_file_mtime(job: Job) -> None:
    """Lines that the index does not cover were written by the file's mtime."""
    job.write(0, "noted\n", at_ns=10 * S)
    append(job.dir.rank_log(1, 0), "not noted\n")
    os.utime(job.dir.rank_log(1, 0), ns=(20 * S, 20 * S))
    job.write(1, "between\n", at_ns=15 * S)
    assert [(line.text, line.time_ns // S) for line in job.lines()] == [
        ("noted", 10),
        ("between", 15),
        ("not noted", 20),
    ]


def test_no_line_is_later_than_readers_clock(job: Job) -> None:
    job.write(0, "from a clock ahead\n", at_ns=NOW_NS + 99 * S)
    assert job.lines()[0].time_ns == NOW_NS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_tail_is_end_of_full_output(job: Job, seed: int) -> None:
    dice = random.Random(seed)
    for attempt in range(1, dice.randint(2, 4)):
        at_ns = attempt * 1_000 * S
        for _ in range(dice.randint(1, 200)):
            at_ns += dice.choice((0, 0, 1, 50)) * S
            text = "".join(f"{dice.random()}" * dice.randint(0, 40) + "\n" for _ in range(dice.randint(1, 4)))
            job.write(dice.randrange(4), text, attempt=attempt, at_ns=at_ns)
    everything = job.lines(LogQuery(grep=re.compile("")))
    for tail in (0, 1, 2, 7, 100, 500, 10_000):
        assert job.lines(LogQuery(tail=tail)) == everything[max(0, len(everything) - tail) :]


def test_unfinished_last_line_is_shown(job: Job) -> None:
    job.write(0, "whole\nhalf")
    assert job.texts() == ["whole", "half"]
    assert job.texts(LogQuery(tail=1)) == ["half"]


@pytest.mark.parametrize("text", ["\n", "a", "\n\n\n", "a\n\n", "\na", "é\n"])
def test_forward_and_backward_reading_yield_each_line_once(job: Job, text: str) -> None:
    job.write(0, text)
    expected = text.removesuffix("\n").split("\n")
    assert job.texts() == expected
    assert job.texts(LogQuery(tail=99)) == expected


def test_ranks_nodes_and_attempts_are_selectable(job: Job) -> None:
    for rank in range(4):
        job.write(rank, f"rank {rank}\n", at_ns=rank * S)
        job.write(rank, f"again {rank}\n", at_ns=rank * S, attempt=2)
    job.write_node("n1", "setup\nagent\n", at_ns=2 * S)
    assert job.texts(LogQuery(ranks=(2, 0, 2), attempt=1)) == ["rank 0", "rank 2"]
    assert job.texts(LogQuery(ranks=(2,), nodes=("n1",), attempt=1)) == ["setup", "agent", "rank 2"]
    only_node = job.lines(LogQuery(nodes=("n1",), attempt=1))
    assert [(line.text, line.rank, line.node) for line in only_node] == [
        ("setup", None, "n1"),
        ("agent", None, "n1"),
    ]
    assert job.texts(LogQuery(ranks=(9,))) == []
    assert attempts(job.dir) == (1, 2)


def test_newest_attempt_with_output_is_default(job: Job) -> None:
    job.write(0, "old\n", attempt=1)
    job.write(0, "new\n", attempt=2)
    job.write(0, "", attempt=3)
    assert job.texts() == ["new"]
    assert job.texts(LogQuery(attempt=1)) == ["old"]


def test_long_tail_continues_into_earlier_attempts(job: Job) -> None:
    """A tail that needs more lines continues into earlier attempts."""
    job.write(0, "1\n2\n", attempt=1, at_ns=100 * S)
    job.write(0, "3\n4\n", attempt=2, at_ns=50 * S)  # another node's clock: the attempt decides
    assert job.texts(LogQuery(tail=2)) == ["3", "4"]
    assert job.texts(LogQuery(tail=3)) == ["2", "3", "4"]
    assert job.texts(LogQuery(tail=3, attempt=2)) == ["3", "4"]


def test_grep_searches_every_attempt_and_tail_counts_matches(job: Job) -> None:
    job.write(0, "loss 1\nstep\nloss 2\nstep\n", attempt=1)
    job.write(0, "loss 3\nstep\nstep\n", attempt=2)
    assert job.texts(LogQuery(grep=re.compile("loss"))) == ["loss 1", "loss 2", "loss 3"]
    assert job.texts(LogQuery(grep=re.compile("loss"), tail=2)) == ["loss 2", "loss 3"]
    assert job.texts(LogQuery(grep=re.compile("loss"), attempt=1)) == ["loss 1", "loss 2"]


def test_since_selects_lines_in_every_attempt(job: Job) -> None:
    """since shows the lines that ended in that time, in every attempt."""
    job.write(0, "early\nearly, ", attempt=1, at_ns=NOW_NS - 100 * S)
    job.write(0, "but ended late\n", attempt=1, at_ns=NOW_NS - 50 * S)
    job.write(0, "late\n", attempt=2, at_ns=NOW_NS - 10 * S)
    assert job.texts(LogQuery(since_s=60)) == ["early, but ended late", "late"]
    assert job.texts(LogQuery(since_s=60, tail=5)) == ["early, but ended late", "late"]
    assert job.texts(LogQuery(since_s=20)) == ["late"]
    assert job.texts(LogQuery(since_s=5)) == []


def test_end_of_huge_log_needs_no_full_read(job: Job) -> None:
    for rank in range(64):
        job.write(rank, "first\n", at_ns=1 * S)
        os.truncate(job.dir.rank_log(1, rank), SPARSE_BYTES)
        job.write(rank, "\n", at_ns=2 * S)
        job.write(rank, "".join(f"line {number}\n" for number in range(100)), at_ns=3 * S)
    before_bytes = read_bytes()
    assert job.texts(LogQuery(tail=2)) == ["line 98", "line 99"]
    assert len(job.texts(LogQuery(tail=6400))) == 6400
    assert job.texts(LogQuery(since_s=(NOW_NS - 2 * S) / S)) == job.texts(LogQuery(tail=6400))
    assert read_bytes() - before_bytes < 128 << 20


def read_bytes() -> int:
    """Return how many bytes this process has read so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def test_overlong_line_is_split_and_marked_without_loss(job: Job) -> None:
    """A line that is too long is split and marked, and nothing of it is lost."""
    text = "é" * (2 * LINE_BYTES_MAX) + "end"
    job.write(0, f"before\n{text}\nafter\n")
    for query in (LogQuery(), LogQuery(tail=99)):
        before, *pieces, after = job.texts(query)
        assert (before, after) == ("before", "after")
        assert len(pieces) > 3
        assert all(piece.endswith(CUT_MARK) for piece in pieces[:-1])
        assert "".join(piece.removesuffix(CUT_MARK) for piece in pieces) == text


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("\r 1%\r 50%\r100%", "100%"),
        ("loading....\rdone", "doneing...."),
        ("text\r", "text"),
        ("\r 99% of it\r          \r", ""),
        ("\r\x1b[32m50%\x1b[0m\r\x1b[32m100%\x1b[0m\r\x1b[K", "\x1b[32m100%\x1b[0m"),
        ("█\r██", "██"),
    ],
)
def test_progress_bar_shows_final_state(job: Job, written: str, seen: str) -> None:
    job.write(0, written + "\n")
    assert job.texts() == [seen]


def test_text_after_unfinished_bar_is_own_line(job: Job) -> None:
    bar = "  5%|# | 1/20 [00:00<00:13, 75 rows/s]"
    job.write(0, f'\r{bar}{{"saved": [1]}}\n\r{bar} \n')
    assert job.texts() == [bar, '{"saved": [1]}', bar]


def test_progress_bar_of_any_length_is_one_line(job: Job) -> None:
    bar = "".join(f"\r{step:6d}/99999 |███   |" for step in range(20_000))
    job.write(0, f"before\n{bar}\nafter\n")
    for query in (LogQuery(), LogQuery(tail=99)):
        assert job.texts(query) == ["before", " 19999/99999 |███   |", "after"]


def test_undecodable_bytes_are_shown_escaped(job: Job) -> None:
    job.write(0, b"caf\xe9 \xff\n")
    assert job.texts() == ["caf� �"]


def test_follower_starts_with_tail_and_continues(job: Job) -> None:
    job.write(0, "1\n2\n3\n")
    follower = job.follow(LogQuery(tail=2))
    job.write(0, "4\n")
    assert polled(follower) == ["2", "3"]
    assert polled(follower) == ["4"]
    assert polled(follower) == []


def test_follower_finds_new_ranks_and_separates_attempts(job: Job) -> None:
    """A follower finds new ranks and attempts and keeps attempts apart."""
    follower = job.follow()
    assert polled(follower) == []
    job.write(1, "old\n", attempt=1)
    job.write(0, "new\n", attempt=2, at_ns=5)
    assert [(line.attempt, line.rank, line.text) for line in lines(follower.poll())] == [
        (1, 1, "old"),
        (2, 0, "new"),
    ]
    job.write(2, "late\n", attempt=2)
    assert polled(follower) == ["late"]


def test_unfinished_line_is_held_until_end_or_second(job: Job) -> None:
    """An unfinished line is held back until it ends or a second has passed."""
    follower = job.follow()
    job.write(0, "half")
    assert polled(follower) == []
    job.write(0, " a line\nnext")
    assert polled(follower) == ["half a line"]
    job.now_ns += S // 2
    assert polled(follower) == []
    job.now_ns += S // 2
    assert polled(follower) == ["next"]
    job.write(0, "\nfurther on\n")
    assert polled(follower) == ["further on"]


def test_rest_of_emitted_line_is_own_line(job: Job) -> None:
    follower = job.follow()
    job.write(0, b"loading \xe2\x96")
    polled(follower)
    job.now_ns += S
    assert polled(follower) == ["loading "]
    job.write(0, b"\x88 done\n")
    assert polled(follower) == ["█ done"]


def test_progress_bar_is_followed_at_slow_pace(job: Job) -> None:
    follower = job.follow()
    shown = []
    for step in range(100):
        job.write(0, f"\r{step}%")
        shown += polled(follower)
        job.now_ns += S // 10
    assert len(shown) == 10 // BAR_S - 1
    job.write(0, "\r100%\n")
    assert polled(follower) == ["100%"]


def test_truncated_log_restarts_without_losing_held_text(job: Job) -> None:
    """A truncated log starts again, and what was held back is not lost."""
    follower = job.follow()
    job.write(0, "one\nheld")
    assert polled(follower) == ["one"]
    os.truncate(job.dir.rank_log(1, 0), 0)
    job.write(0, "new\n")
    assert polled(follower) == ["held", "new"]


def test_drain_returns_rest_with_unfinished_lines(job: Job) -> None:
    job.write(0, "past\n")
    follower = job.follow()
    job.write(0, "whole\nhalf \xe9".encode("latin-1"))
    job.write(1, "other")
    assert [line.text for line in lines(follower.drain())] == ["past", "whole", "half �", "other"]
    assert list(lines(follower.drain())) == []


def test_follower_greps_old_and_new_lines(job: Job) -> None:
    job.write(0, "loss 1\nstep\n")
    follower = job.follow(LogQuery(grep=re.compile("loss")))
    job.write(0, "step\nloss 2\n")
    assert [line.text for line in lines(follower.drain())] == ["loss 1", "loss 2"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_follower_never_loses_doubles_or_reorders_lines(job: Job, seed: int) -> None:
    dice = random.Random(seed)
    written: dict[tuple[int, int], bytes] = {}
    follower, got = None, list[LogLine]()
    for _ in range(300):
        key = (dice.choice((1, 1, 2)), dice.randrange(3))
        text = "".join(dice.choice("ab\n\r€") for _ in range(dice.randrange(30))).encode()
        text = text[: dice.choice((None, None, -1))].replace(b"\r", b"") + b"x" * dice.choice((0, 0, 0, 200))
        job.write(key[1], text, attempt=key[0])
        written[key] = written.get(key, b"") + text
        job.now_ns += dice.randrange(S // 20)
        if follower is None and dice.random() < 0.05:
            follower = job.follow(LogQuery(grep=re.compile("")))
        if follower is not None and dice.random() < 0.5:
            got += lines(follower.poll())
    follower = follower or job.follow(LogQuery(grep=re.compile("")))
    got += lines(follower.drain())
    for (attempt, rank), raw in written.items():
        texts = [line.text for line in got if (line.attempt, line.rank) == (attempt, rank)]
        assert "".join(texts) == raw.decode("utf-8", "replace").replace("\n", "")


@pytest.mark.slow
def test_thousand_ranks_are_followed_with_few_open_files(job: Job) -> None:
    for rank in range(1_000):
        append(job.dir.rank_log(1, rank), f"hello from {rank}\n")
    before = len(list(Path("/proc/self/fd").iterdir()))
    follower = job.follow(LogQuery(tail=0))
    found = read(job.dir, LogQuery(), NOW_NS)
    next(found)
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 80
    assert len(list(found)) == 999
    for rank in range(1_000):
        append(job.dir.rank_log(1, rank), "more\n")
    assert len(list(lines(follower.poll()))) == 1_000
