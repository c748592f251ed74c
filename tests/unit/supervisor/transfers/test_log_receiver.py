"""The log receiver: what nodes send is written once, only where they may write, and only behind what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports
from orchestrator.supervisor.transfers import log_receiver as intake_module
from orchestrator.supervisor.transfers.log_receiver import LogReceiveError, LogReceiver
from tests.support.fake_disk import FakeDisk

LOG = "logs/attempt-001/rank-00002.log"


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return JobDir(tmp_path)


def _text(job: JobDir, path: str) -> bytes:
    return (job.root / path).read_bytes()


def test_chunks_are_joined_and_acknowledged(job: JobDir) -> None:
    intake = LogReceiver(job)
    assert intake.resume_offsets("n0") == orders.ResumeOffsets({})
    intake.receive("n0", reports.Chunk(LOG, 0), b"one ")
    intake.receive("n0", reports.Chunk(LOG, 4), b"two")
    assert _text(job, LOG) == b"one two"
    assert intake.take_due_acks() == [("n0", orders.ChunkAck(7))]
    assert intake.take_due_acks() == []


def test_existing_bytes_are_never_rewritten(job: JobDir) -> None:
    """Existing bytes are never written again."""
    intake = LogReceiver(job)
    intake.receive("n0", reports.Chunk(LOG, 0), b"0123456789")
    intake.receive("n0", reports.Chunk(LOG, 2), b"XX")
    intake.receive("n1", reports.Chunk(LOG, 8), b"XXab")
    assert _text(job, LOG) == b"0123456789ab"
    assert intake.take_due_acks() == [("n0", orders.ChunkAck(12)), ("n1", orders.ChunkAck(4))]


def test_new_job_folder_knows_node_of_each_file(job: JobDir) -> None:
    first = LogReceiver(job)
    pages = "evidence/attempt-001"
    for path in (
        LOG,
        "logs/attempt-001/rank-00002.idx",
        f"{pages}/rank-00002-stacks.txt",
        f"{pages}/rank-00002-flight.jsonl",
        f"{pages}/node-n0-gpus.txt",
    ):
        first.receive("n0", reports.Chunk(path, 0), b"12345678")
    first.receive("n0", reports.Chunk("logs/attempt-001/node-n0.log", 0), b"note")
    first.receive("n0", reports.Chunk("nodes/n0/agent.log", 0), b"word")
    first.receive("n1", reports.Chunk("logs/attempt-001/rank-00003.log", 0), b"1")
    first.close()
    second = LogReceiver(job)
    assert second.resume_offsets("n0") == orders.ResumeOffsets(
        {
            LOG: 8,
            "logs/attempt-001/rank-00002.idx": 8,
            f"{pages}/rank-00002-stacks.txt": 8,
            f"{pages}/rank-00002-flight.jsonl": 8,
            f"{pages}/node-n0-gpus.txt": 8,
            "logs/attempt-001/node-n0.log": 4,
            "nodes/n0/agent.log": 4,
        }
    )
    assert second.resume_offsets("n1") == orders.ResumeOffsets({"logs/attempt-001/rank-00003.log": 1})
    assert second.resume_offsets("n") == orders.ResumeOffsets({})


def test_a_new_connection_counts_from_zero(job: JobDir) -> None:
    intake = LogReceiver(job)
    intake.receive("n0", reports.Chunk(LOG, 0), b"1234")
    assert intake.resume_offsets("n0") == orders.ResumeOffsets({LOG: 4})
    intake.receive("n0", reports.Chunk(LOG, 4), b"5")
    assert intake.take_due_acks() == [("n0", orders.ChunkAck(1))]


@pytest.mark.parametrize(
    "path",
    [
        "job.yaml",
        "journal.jsonl",
        "../other/logs/attempt-001/rank-00002.log",
        "logs/attempt-001/../../secrets/token",
        "/etc/passwd",
        "logs/attempt-001/rank-00002.log\n",
        "logs/attempt-001/rank-00002.txt",
        "logs/attempt-1/rank-00002.log",
        "logs/attempt-001/node-n1.log",
        "evidence/attempt-001/node-n1-gpus.txt",
        "evidence/attempt-001/rank-00002-flight.json",
        "logs//attempt-001/rank-00002.log",
        "./logs/attempt-001/rank-00002.log",
        "logs/attempt-٠٠١/rank-00002.log",
        "nodes/n1/agent.log",
        "nodes/n0/agent.json",
        "checkpoints/last.pt",
        "",
    ],
)
def test_file_of_other_node_is_refused(job: JobDir, capsys: pytest.CaptureFixture[str], path: str) -> None:
    """A file that is not the node's is refused, and this is reported once."""
    intake = LogReceiver(job)
    for _ in range(3):
        intake.receive("n0", reports.Chunk(path, 0), b"evil")
    assert list(job.root.iterdir()) == []
    assert capsys.readouterr().out.count("refused") == 1
    assert intake.take_due_acks() == [("n0", orders.ChunkAck(12))]


def test_node_name_like_pattern_means_only_itself(job: JobDir) -> None:
    intake = LogReceiver(job)
    intake.receive("n.0", reports.Chunk("nodes/nx0/agent.log", 0), b"evil")
    assert not (job.root / "nodes").exists()
    intake.receive("n.0", reports.Chunk("nodes/n.0/agent.log", 0), b"good")
    assert _text(job, "nodes/n.0/agent.log") == b"good"


def test_gap_requests_restart_of_transfer(job: JobDir) -> None:
    """A gap requests a new beginning of the transfer."""
    intake = LogReceiver(job)
    intake.receive("n0", reports.Chunk(LOG, 0), b"1234")
    with pytest.raises(LogReceiveError, match="has 4 bytes here, but the node sent bytes from 6 on"):
        intake.receive("n0", reports.Chunk(LOG, 6), b"78")
    os.truncate(job.root / LOG, 2)
    with pytest.raises(LogReceiveError, match="has 2 bytes here"):
        intake.receive("n0", reports.Chunk(LOG, 4), b"56")
    assert intake.resume_offsets("n0") == orders.ResumeOffsets({LOG: 2})


def test_locally_deleted_log_is_sent_from_start(job: JobDir) -> None:
    """A log that was deleted here is sent again from its start."""
    intake = LogReceiver(job)
    intake.receive("n0", reports.Chunk(LOG, 0), b"1234")
    (job.root / LOG).unlink()
    with pytest.raises(LogReceiveError, match="was deleted here"):
        intake.receive("n0", reports.Chunk(LOG, 4), b"56")
    assert intake.resume_offsets("n0") == orders.ResumeOffsets({})
    intake.receive("n0", reports.Chunk(LOG, 0), b"123456")
    assert _text(job, LOG) == b"123456"


def test_link_in_place_of_log_is_not_followed(job: JobDir, tmp_path_factory: pytest.TempPathFactory) -> None:
    victim = tmp_path_factory.mktemp("elsewhere") / "victim"
    victim.write_bytes(b"")
    (job.root / LOG).parent.mkdir(parents=True)
    (job.root / LOG).symlink_to(victim)
    intake = LogReceiver(job)
    intake.receive("n0", reports.Chunk(LOG, 0), b"evil")
    assert victim.read_bytes() == b""


def test_few_files_are_open_for_many_logs(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files are open, however many are written."""
    monkeypatch.setattr(intake_module, "FILES_OPEN_MAX", 4)
    intake = LogReceiver(job)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for turn in range(3):
        for rank in range(20):
            intake.receive("n0", reports.Chunk(f"logs/attempt-001/rank-{rank:05d}.log", turn), b"x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 4
    intake.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert all(len(_text(job, f"logs/attempt-001/rank-{rank:05d}.log")) == 3 for rank in range(20))


def test_full_disk_costs_only_time(job: JobDir, disk: FakeDisk) -> None:
    """A full disk costs time and nothing else."""
    disk.room_bytes = 6
    seen: list[bytes] = []
    disk.at_wait = lambda: seen.append(_text(job, LOG))
    intake = LogReceiver(job)
    for offset in range(0, 20, 4):
        intake.receive("n0", reports.Chunk(LOG, offset), b"0123")
    assert seen == [b"012301"] * 2
    assert intake.take_due_acks() == [("n0", orders.ChunkAck(20))]
    assert _text(job, LOG) == b"0123" * 5
