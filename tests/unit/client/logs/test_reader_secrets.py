"""Is a secret shown in halves where a log is cut: a line that is too long, one that is being written, one written over?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from orchestrator.client.logs.reader import FLUSH_S, LINE_BYTES_MAX, Follower, LogLine, LogQuery, lines, read
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from orchestrator.core.secret_mask import Mask

S = 1_000_000_000
NOW_NS = 1_000_000 * S
SECRET = "qZ7-Wv9_Kx2+Jm4"
MASK = Mask([SECRET])


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    place = JobDir(tmp_path / "job")
    place.attempt_logs(1).mkdir(parents=True)
    return place


def write(job: JobDir, text: str, at_ns: int = NOW_NS) -> None:
    with job.rank_log(1, 0).open("ab") as file:
        file.write(text.encode())
        index = LogIndex(job.rank_index(1, 0))
        index.record(at_ns, file.tell())
        index.close()


def parts_shown(found: Iterable[LogLine]) -> list[str]:
    """Return the parts of the secret that the lines show once they are masked."""
    parts = [SECRET[at : at + 4] for at in range(len(SECRET) - 3)]
    texts = [MASK.apply(line.text) for line in found]
    return [part for part in parts for text in texts if part in text]


@pytest.mark.parametrize("begin", [-len(SECRET) - 1, -len(SECRET) + 1, -8, -1, 0])
@pytest.mark.parametrize("cut_bytes", [LINE_BYTES_MAX, 2 * LINE_BYTES_MAX])
@pytest.mark.parametrize("query", [LogQuery(), LogQuery(tail=9), LogQuery(since_s=60.0)], ids=["all", "tail", "since"])
def test_secret_across_long_line_cut_stays_whole(job: JobDir, begin: int, cut_bytes: int, query: LogQuery) -> None:
    head = "." * (cut_bytes + begin)
    text = f"{head}{SECRET}{'.' * (3 * LINE_BYTES_MAX - len(head) - len(SECRET))}"
    for at in range(0, len(text), 50_000):
        write(job, text[at : at + 50_000], NOW_NS - (70 - at // 5_000) * S)
    found = list(read(job, query, NOW_NS, MASK))
    assert found and parts_shown(found) == []
    follower = Follower(job, query, MASK, clock_ns=lambda: NOW_NS)
    assert parts_shown([*lines(follower.poll()), *lines(follower.drain())]) == []


@pytest.mark.parametrize("query", [LogQuery(), LogQuery(tail=9)], ids=["all", "tail"])
def test_repeated_first_character_is_no_start_of_secret(job: JobDir, query: LogQuery) -> None:
    """A run of the character that another secret begins with is not its beginning."""
    write(job, "." * (LINE_BYTES_MAX - 8) + SECRET + "." * (LINE_BYTES_MAX - 7))
    assert parts_shown(read(job, query, NOW_NS, Mask([SECRET, ".another one"]))) == []


def test_partly_written_secret_is_not_shown(job: JobDir) -> None:
    """Nothing is shown of a secret that is being written."""
    write(job, f"key {SECRET[:9]}")
    assert parts_shown(read(job, LogQuery(), NOW_NS, MASK)) == []
    times = iter(range(NOW_NS, NOW_NS + 100 * S, int(2 * FLUSH_S * S)))
    follower = Follower(job, LogQuery(), MASK, clock_ns=lambda: next(times))
    shown = [line for _ in range(4) for line in lines(follower.poll())]
    assert "".join(line.text for line in shown) == "key "
    write(job, f"{SECRET[9:]} is it\n")
    shown += [*lines(follower.poll()), *lines(follower.drain())]
    assert "".join(MASK.apply(line.text) for line in shown) == "key *** is it"


def test_secret_partly_overwritten_by_bar_is_not_shown(job: JobDir) -> None:
    write(job, f"{SECRET}\rhi\n")
    assert parts_shown(read(job, LogQuery(), NOW_NS, MASK)) == []


def test_long_line_of_only_secrets_is_read(job: JobDir) -> None:
    """A long line that consists of secrets is still read."""
    write(job, "a" * 3 * LINE_BYTES_MAX)
    assert len(list(read(job, LogQuery(), NOW_NS, Mask(["aaaa"])))) > 1
