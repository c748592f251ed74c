"""Is every request heard once, and none overlooked?"""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.brain.model.events import AllocationEnded, CancelRequested, ResumeRequested
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir import requests
from orchestrator.core.jobdir.requests import make_write_error, send
from orchestrator.core.status_types import AllocationEndCause
from orchestrator.supervisor.request_inbox import RequestInbox, is_resumed
from tests.support.descriptors import few_descriptors, use_up


def test_requests_are_numbered_and_read_in_order(tmp_path: Path) -> None:
    assert send(tmp_path, "cancel") == 1
    assert send(tmp_path, "resume", save="17") == 2
    assert RequestInbox(tmp_path).read_after(0, 5.0) == [CancelRequested(5.0, 1), ResumeRequested(5.0, 2, 17)]
    assert RequestInbox(tmp_path).read_after(1, 6.0) == [ResumeRequested(6.0, 2, 17)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001.json", "000002.json"]


def test_resume_is_recognised_by_its_other_fields(tmp_path: Path) -> None:
    """A resume is recognised by what else is requested."""
    send(tmp_path, "cancel")
    send(tmp_path, "look")
    assert not is_resumed(tmp_path, 0)
    send(tmp_path, "resume")
    assert is_resumed(tmp_path, 2)
    assert not is_resumed(tmp_path, 3)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "/a b", "\u0661", "\u00b2", "9" * 5000])
def test_resume_without_checkpoint_number_uses_newest(tmp_path: Path, text: str) -> None:
    """A resume that names no number of a checkpoint starts from the newest."""
    send(tmp_path, "resume", save=text)
    assert RequestInbox(tmp_path).read_after(0, 5.0) == [ResumeRequested(5.0, 1, 0)]


def test_request_unreadable_without_descriptor_is_read_later(tmp_path: Path) -> None:
    """A request that cannot be read for want of a descriptor is read later."""
    send(tmp_path, "cancel")
    reader = RequestInbox(tmp_path)
    with few_descriptors(1) as used:
        use_up(used)
        for _ in range(6):
            assert reader.read_after(0, 1.0) == []
        os.close(used.pop())  # now the folder can be listed, and nothing in it be read while it is open
    assert reader.read_after(0, 2.0) == [CancelRequested(2.0, 1)]


def test_deleted_job_ends_but_unseen_does_not(tmp_path: Path) -> None:
    """A deleted job is to end, and one that is out of sight for a moment is not."""
    plan, away = tmp_path / "plan.json", tmp_path / "away"
    plan.touch()
    reader = RequestInbox(tmp_path / "requests", plan)
    for at, there in ((1.0, True), (2.0, False), (4.9, False), (5.0, True), (6.0, False), (8.9, False)):
        plan.rename(away) if plan.exists() and not there else None
        away.rename(plan) if away.exists() and there else None
        assert reader.read_after(6, at) == []
    assert reader.read_after(6, 9.0) == [CancelRequested(9.0, 7)]
    assert reader.read_after(7, 20.0) == []


def test_invalid_request_is_skipped(tmp_path: Path) -> None:
    """A file that is not a request is skipped."""
    for number, text in enumerate(("", "[]", '{"ask":"dance"}', '{"ask":"cancel"}'), start=1):
        (tmp_path / f"{number:06d}.json").write_text(text)
    (tmp_path / "notes.json").write_text('{"ask":"cancel"}')
    assert RequestInbox(tmp_path).read_after(0, 1.0) == [CancelRequested(1.0, 4)]
    assert RequestInbox(tmp_path / "missing").read_after(0, 1.0) == []


def test_pipe_among_requests_does_not_block_supervisor(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "000001.json")
    assert send(tmp_path, "cancel") == 2
    watch = threading.Thread(target=lambda: heard.extend(RequestInbox(tmp_path).read_after(0, 1.0)), daemon=True)
    heard: list[object] = []
    watch.start()
    watch.join(5.0)
    assert heard == [CancelRequested(1.0, 2)]


@pytest.mark.parametrize("name", ["9" * 20, "9" * 5000, "\u00b2", "\u0661"])
def test_file_without_request_number_is_none(tmp_path: Path, name: str) -> None:
    assert requests.number_of(tmp_path / f"{name}.json") == 0


def test_exhausted_numbers_are_reported_with_fix(tmp_path: Path) -> None:
    (tmp_path / f"{requests.NUMBER_MAX - 1}.json").write_text("{}")
    with pytest.raises(ClusterError, match="no number is left"):
        send(tmp_path, "cancel")


@pytest.mark.slow
def test_concurrent_requests_get_their_own_numbers(tmp_path: Path) -> None:
    """Many concurrent requests get numbers of their own, and each is stored."""
    pid = os.fork()
    if pid == 0:
        for _ in range(20):
            send(tmp_path, "cancel")
        os._exit(0)
    asked = ["restart", "look"] * 10
    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(lambda what: requests.send(tmp_path, what), asked))
    assert os.waitpid(pid, 0)[1] == 0
    assert len(set(numbers)) == 20
    assert len(list(tmp_path.glob("*.json"))) == 40
    written = {request.number: request.action for request in requests.read_after(tmp_path, 0)}
    assert [written[number] for number in numbers] == asked


def test_unknown_queue_cause_is_a_failure(tmp_path: Path) -> None:
    """The queue's state is a request, and an unknown cause is a failure."""
    send(tmp_path, "allocation_ended", allocation="7.0", cause="time_limit", why="TIMEOUT")
    send(tmp_path, "allocation_ended", allocation="7.0", cause="dance", why="?")
    assert RequestInbox(tmp_path).read_after(0, 1.0) == [
        AllocationEnded(1.0, 1, "7.0", AllocationEndCause.TIME_LIMIT, "TIMEOUT"),
        AllocationEnded(1.0, 2, "7.0", AllocationEndCause.FAILED, "?"),
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_forbidden_request_names_job_owner(tmp_path: Path) -> None:
    """A user who may not write a request is shown the owner of the job."""
    err = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "requests"))
    assert isinstance(make_write_error(err, tmp_path), ClusterError), "our own"
    os.chown(tmp_path, 12345, 12345)
    told = make_write_error(err, tmp_path)
    assert isinstance(told, UserError) and told.what == "this job belongs to user 12345"


def test_disk_refusing_request_is_named_with_fix(tmp_path: Path) -> None:
    told = make_write_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert str(told) == (
        f"{tmp_path}: cannot be written: No space left on device\n  fix: make room in {tmp_path}, then try again"
    )
    (tmp_path / "requests").touch()
    with pytest.raises(ClusterError, match="cannot be written: File exists"):
        send(tmp_path / "requests", "cancel")
