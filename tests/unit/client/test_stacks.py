"""Does `orch stacks` ask once, wait for those that were asked and no longer, and show who stands where? The supervisor
is a thread that writes the journal."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.brain.diagnosis import hang_report
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.client import stacks
from orchestrator.client.job import Job
from orchestrator.core import observations
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import Status
from orchestrator.core.wire import orders, reports
from orchestrator.journal.journal_file import Journal, read, read_tail
from orchestrator.supervisor.request_inbox import RequestInbox
from orchestrator.views import cells
from orchestrator.views import stacks as stack_view
from tests.support import folders, golden, jobs
from tests.support.frames import frame

RUNNING = [*jobs.submitted(), *jobs.running(1, 1.0, 7)]
WAIT_S_MAX = 20.0
GROUP = observations.Collective("default_pg", "default group", (0, 1, 2, 3), 9655, "all_reduce", "float32[1000]", 9.0)
WAITS = ("c10d_logger.py:81 wrapper", "train.py:97 train_step", "train.py:120 main")
READS = ("dataset.py:31 read", "train.py:88 load_batch", "train.py:120 main")

Answer = Callable[[int, int], list[News]]


def _look(
    rank: int, activity: observations.Activity, where: str = "train.py:97 train_step", **more: Any
) -> observations.RankInspection:
    plain: dict[str, Any] = {
        "rank": rank, "pid": 5000 + rank, "state": "S", "activity": activity, "still_s": 3.04, "where": frame(where), "inside": 1,
        "why": "in all_reduce #9,655 (default group)", "phase": "train", "stack": WAITS,
        "collectives": (GROUP,), "groups": (), "collective_counts": (), "unavailable": ("py-spy is not installed: no native frames",),
    }  # fmt: skip
    return observations.RankInspection(**{**plain, **more})


READER = _look(
    2, observations.Activity.BLOCKED, where="train.py:88 load_batch", why="in read() of data/shard-17.bin, a FIFO that nobody writes",
    stack=READS, collectives=(), line="return shard.read(BLOCK)",
)  # fmt: skip


def _looked(
    look: int, *nodes: int, activity: observations.Activity = observations.Activity.WAITING_FOR_RANKS
) -> list[News]:
    """Both nodes were asked for a look, and these have answered."""
    told: list[News] = [d.To(20.0, "somebody asked", f"node-{n}", orders.Inspect(1, look)) for n in (0, 1)]
    ranks = {0: (_look(0, activity), _look(1, activity)), 1: (READER, _look(3, activity))}
    return [*told, *(e.FromNode(20.5, f"node-{n}", reports.Inspected(1, look, ranks[n])) for n in nodes)]


@contextmanager
def _supervised(job: JobDir, answer: Answer) -> Iterator[list[int]]:
    """Answer requests as a supervisor does; yield the numbers of those that came."""
    asked: list[int] = []
    stop = threading.Event()

    def work() -> None:
        entries = list(read(job.journal))
        journal = Journal(job.journal, "boot", entries[-1].n)
        folder = RequestInbox(job.requests)
        while not stop.is_set():
            for one in folder.read_after(asked[-1] if asked else 0, 20.0):
                asked.append(one.request)
                for news in answer(one.request, len(asked)):
                    journal.write(news)
            time.sleep(0.01)
        journal.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield asked
    finally:
        stop.set()
        thread.join(WAIT_S_MAX)


def _status(job: JobDir) -> Status:
    return Job(job).source.status()


def test_answers_of_nodes_are_one_object(tmp_path: Path) -> None:
    """The answers of all nodes are one object with the ranks in order."""
    job = folders.make(tmp_path, RUNNING)
    with _supervised(job, lambda number, n: [e.InspectRequested(20.0, number), *_looked(n, 1, 0)]) as asked:
        taken = stacks.inspect_stacks(job, _status(job))
    assert asked == [1], "one look tells, where it tells what ranks do"
    assert [rank["rank"] for rank in taken["ranks"]] == [0, 1, 2, 3]
    assert (taken["attempt"], taken["looks"], taken["unanswered"]) == (1, 1, [])
    assert taken["pages"] == str(job.evidence(1))
    assert taken["ranks"][2]["where"] == "train.py:88 load_batch"
    assert taken["ranks"][0]["collectives"][0]["number"] == 9655


def test_second_inspection_shows_what_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first inspection is followed by a second one that shows what moves."""
    monkeypatch.setattr(stacks, "APART_S", 0.05)
    job = folders.make(tmp_path, RUNNING)

    def answer(number: int, n: int) -> list[News]:
        seen = observations.Activity.UNKNOWN if n == 1 else observations.Activity.WAITING_FOR_RANKS
        return [e.InspectRequested(20.0, number), *_looked(n, 0, 1, activity=seen)]

    with _supervised(job, answer) as asked:
        taken = stacks.inspect_stacks(job, _status(job))
    assert asked == [1, 2]
    assert (taken["looks"], taken["ranks"][0]["activity"]) == (2, "waiting_for_ranks")
    assert taken["apart_s"] >= stacks.APART_S


def test_earlier_inspections_are_no_answer(tmp_path: Path) -> None:
    """Inspections that existed before are no answer."""
    job = folders.make(tmp_path, [*RUNNING, *_looked(1, 0, 1)])
    late = [e.FromNode(20.5, "node-0", reports.Inspected(1, 1, ()))]
    with (
        _supervised(job, lambda number, n: [*late, e.InspectRequested(20.0, number), *late]),
        pytest.raises(ClusterError, match="no rank was left to inspect"),
    ):
        stacks.inspect_stacks(job, _status(job), 0.1)


def test_silent_node_is_named_beside_other_answers(tmp_path: Path) -> None:
    job = folders.make(tmp_path, RUNNING)
    with _supervised(job, lambda number, n: [e.InspectRequested(20.0, number), *_looked(n, 0)]):
        taken = stacks.inspect_stacks(job, _status(job), 0.1)
    assert (taken["unanswered"], [rank["rank"] for rank in taken["ranks"]]) == (["node-1"], [0, 1])
    assert "no answer from node-1" in cells.plain_text(stack_view.stacks(taken))


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ([], "its supervisor did not read the request within 0.1 s"),
        (_looked(1), "node-0, node-1 did not answer within 0.1 s"),
    ],
)
def test_silent_rank_is_named(tmp_path: Path, said: list[News], what: str) -> None:
    """A rank that does not answer is named."""
    job = folders.make(tmp_path, RUNNING)

    def answer(number: int, n: int) -> list[News]:
        return [e.InspectRequested(20.0, number), *said] if said else []

    with _supervised(job, answer), pytest.raises(ClusterError, match=what) as told:
        stacks.inspect_stacks(job, _status(job), 0.1)
    assert told.value.exit_code == 3
    assert told.value.fix


def test_ended_or_unstarted_job_has_no_stacks(tmp_path: Path) -> None:
    ended = folders.failed(tmp_path)
    with pytest.raises(UserError, match="the job has ended: FAILED") as told:
        Job(ended).stacks()
    assert told.value.fix.startswith("orch why ")
    begun = folders.make(tmp_path, jobs.submitted())
    with pytest.raises(UserError, match="no rank is running: the job is STARTING"):
        stacks.inspect_stacks(begun, _status(begun))
    assert not list(begun.requests.iterdir())


def test_journal_line_being_written_is_read_later(tmp_path: Path) -> None:
    job = folders.make(tmp_path, RUNNING)
    whole = job.journal.read_bytes()
    first = whole.index(b"\n") + 1
    job.journal.write_bytes(whole[: first + 20])
    entries, offset = read_tail(job.journal, 0)
    assert ([entry.n for entry in entries], offset) == ([1], first)
    job.journal.write_bytes(whole)
    entries, offset = read_tail(job.journal, offset)
    assert entries[0].n == 2
    assert offset == len(whole)


# How they look


def _taken() -> dict[str, Any]:
    ranks: list[observations.RankInspection] = [
        *(_look(rank, observations.Activity.WAITING_FOR_RANKS) for rank in (0, 1, 3, 4, 5, 6, 7)),
        READER,
    ]
    nodes = {rank: f"gpu{rank // 4:02d}" for rank in range(8)}
    return {
        "id": jobs.ID, "name": "gpt", "state": "RUNNING", "attempt": 1, "step": 1204, "dir": jobs.ROOT, "looks": 2,
        "apart_s": 1.1, "ranks": [stacks.rank_json(one, nodes[one.rank]) for one in sorted(ranks, key=lambda r: r.rank)],
        "unanswered": [], "pages": f"{jobs.ROOT}/evidence/attempt-001",
    }  # fmt: skip


def test_stacks_of_many_ranks_are_grouped() -> None:
    golden.check("stacks.txt", cells.plain_text(stack_view.stacks(_taken())))


def test_user_frame_comes_first_despite_truncated_stack() -> None:
    """The user's frame comes first even where the stack was cut off before it."""
    deep = tuple(f"lazy.py:{number} load" for number in range(40))
    look = _look(0, observations.Activity.PROGRESSING, where="train.py:3 <module>", stack=deep, inside=40)
    assert hang_report.traceback_frames(look) == ("train.py:3 <module>", "…", deep[1], deep[0])
    text = cells.plain_text(stack_view.stacks({**_taken(), "ranks": [stacks.rank_json(look, "gpu00")]}))
    assert "\n  train.py:3 <module>\n  inside: … > lazy.py:11 load > lazy.py:10 load" in text


def test_remark_on_user_frame_does_not_repeat_it() -> None:
    """A remark on the user's frame does not show it twice."""
    inspection = _look(0, observations.Activity.PROGRESSING, READS[1], stack=READS)
    assert inspection.where is not None
    where = dataclasses.replace(inspection.where, within="DataLoader of the main thread")
    assert hang_report.traceback_frames(dataclasses.replace(inspection, where=where)) == (
        READS[2],
        f"{READS[1]} (DataLoader of the main thread)",
        READS[0],
    )


def test_only_requested_ranks_are_shown() -> None:
    text = cells.plain_text(stack_view.stacks(_taken(), (2,)))
    assert "1 rank inspected" in text and "load_batch" in text and "train_step" not in text


def test_running_ranks_are_shown_without_reason() -> None:
    """Ranks that run by themselves are shown without a reason."""
    works = _look(
        0,
        observations.Activity.PROGRESSING,
        why="",
        where="",
        stack=(),
        collectives=(),
        unavailable=(),
        still_s=0.0,
    )
    taken = {**_taken(), "ranks": [stacks.rank_json(works, "gpu00")]}
    assert "rank 0 on gpu00: working\n" in cells.plain_text(stack_view.stacks(taken))


def test_gpu_ranks_are_shown_with_gpu_use() -> None:
    one, other = (
        _look(rank, observations.Activity.WAITING_FOR_RANKS, gpu_use=share) for rank, share in ((0, 1.0), (1, 0.05))
    )
    alike = {**_taken(), "ranks": [stacks.rank_json(one, "gpu00"), stacks.rank_json(one, "gpu00")]}
    assert ", GPU 100% busy\n" in cells.plain_text(stack_view.stacks(alike))
    both = {**_taken(), "ranks": [stacks.rank_json(one, "gpu00"), stacks.rank_json(other, "gpu00")]}
    assert ", GPUs 5% to 100% busy\n" in cells.plain_text(stack_view.stacks(both))


def test_activity_of_exiting_rank_is_shown_once() -> None:
    words = "has finished its script and has not exited (state S)"
    leaves = _look(0, observations.Activity.EXITING, why=words, where="", stack=(), still_s=0.0)
    text = cells.plain_text(stack_view.stacks({**_taken(), "ranks": [stacks.rank_json(leaves, "gpu00")]}))
    assert f"rank 0 on gpu00: exiting: {words}\n" in text
