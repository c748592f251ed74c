"""The log shipper: every byte of a node's files arrives once, in bounded chunks, and none before the sizes are known."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.agent.outputs import log_shipper as shipper_module
from orchestrator.agent.outputs.log_shipper import SHIP_WINDOW_BYTES, WINDOW_BYTES_MIN, LogShipper
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.connection import RAW_BYTES_MAX
from orchestrator.supervisor.transfers.log_receiver import LogReceiver

NODE = "n0"

ROUNDS_MAX = 1000


@dataclass(slots=True)
class Ship:
    """A shipper on a host, with what it has sent."""

    job: JobDir
    sent: list[tuple[reports.Chunk, bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_connected: bool = True
    now_s: float = 1000.0

    def send(self, chunk: reports.Chunk, raw: bytes) -> bool:
        if self.is_connected:
            self.sent.append((chunk, raw))
        return self.is_connected

    @property
    def sent_bytes(self) -> int:
        return sum(len(raw) for _, raw in self.sent)

    def write(self, name: str, data: bytes, attempt: int = 1) -> None:
        """Append to a rank's log (`00002.log`), or to another file given by its path."""
        path = self.job.root / name
        if "/" not in name:
            rank = int(name.partition(".")[0])
            self.job.rank_run(NODE, attempt, rank).mkdir(parents=True, exist_ok=True)
            path = self.job.attempt_logs(attempt) / f"rank-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ship:
    ship = Ship(JobDir(tmp_path / "host"))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return ship.now_s

    monkeypatch.setattr(shipper_module, "time", Clock)
    return ship


def _shipper(ship: Ship) -> LogShipper:
    return LogShipper(ship.job, NODE, ship.send, ship.notes.append)


def test_shipper_waits_until_received_logs_are_known(ship: Ship) -> None:
    """No log is sent before it is known what the job folder already has."""
    ship.write("00000.log", b"line\n")
    shipper = _shipper(ship)
    shipper.poll((1,))
    shipper.send_last((1,))
    assert not ship.sent
    assert not shipper.has_arrived((1,))
    shipper.begin(orders.ResumeOffsets({"logs/attempt-001/rank-00000.log": 2}))
    assert ship.sent == [(reports.Chunk("logs/attempt-001/rank-00000.log", 2), b"ne\n")]
    shipper.pause()  # there is a new line
    ship.write("00000.log", b"more\n")
    ship.now_s += 10.0
    shipper.poll((1,))
    assert len(ship.sent) == 1


def test_shipper_sends_own_files_of_all_attempts(ship: Ship) -> None:
    """Only files of this node are sent, and all attempts are found again."""
    ship.write("00003.log", b"a", 1)
    ship.write("00003.idx", b"i" * 40, 1)
    ship.write("00001.log", b"b", 2)
    ship.write("evidence/attempt-001/rank-00003-stacks.txt", b"s")
    ship.write("evidence/attempt-001/rank-00003-flight.jsonl", b"f")
    ship.write("evidence/attempt-001/rank-00003-nccl.log", b"n")
    ship.write("evidence/attempt-001/node-n0-gpus.txt", b"u")
    ship.write("logs/attempt-002/node-n0.log", b"n")
    ship.write("nodes/n0/agent.log", b"g")
    for name in (
        "logs/attempt-001/rank-00009.log",
        "evidence/attempt-001/rank-00009-stacks.txt",
        "evidence/attempt-001/rank-00009-flight.jsonl",
        "evidence/attempt-001/node-n1-gpus.txt",
        "logs/attempt-001/node-n1.log",
        "nodes/n1/agent.log",
        "nodes/n1/attempt-001/rank-00009/beat",
        "nodes/n0/agent.json",
        "secrets/token",
    ):
        ship.write(name, b"of others")
    _shipper(ship).begin(orders.ResumeOffsets({}))
    assert {chunk.path: raw for chunk, raw in ship.sent} == {
        "logs/attempt-001/rank-00003.log": b"a",
        "logs/attempt-001/rank-00003.idx": b"i" * 32,  # whole records
        "evidence/attempt-001/rank-00003-stacks.txt": b"s",
        "evidence/attempt-001/rank-00003-flight.jsonl": b"f",
        "evidence/attempt-001/rank-00003-nccl.log": b"n",
        "evidence/attempt-001/node-n0-gpus.txt": b"u",
        "logs/attempt-002/rank-00001.log": b"b",
        "logs/attempt-002/node-n0.log": b"n",
        "nodes/n0/agent.log": b"g",
    }


def test_bytes_in_flight_stay_within_window(ship: Ship) -> None:
    ship.write("00000.log", os.urandom(3 << 20))
    shipper = _shipper(ship)
    shipper.begin(orders.ResumeOffsets({}))
    assert ship.sent_bytes == SHIP_WINDOW_BYTES
    assert all(len(raw) <= RAW_BYTES_MAX for _, raw in ship.sent)
    shipper.poll((1,))
    assert ship.sent_bytes == SHIP_WINDOW_BYTES
    shipper.acknowledge(orders.ChunkAck(100_000))
    assert ship.sent_bytes == SHIP_WINDOW_BYTES + 100_000
    while ship.sent_bytes < 3 << 20:
        shipper.acknowledge(orders.ChunkAck(ship.sent_bytes))
    assert not shipper.has_arrived((1,))
    shipper.acknowledge(orders.ChunkAck(ship.sent_bytes))
    assert shipper.has_arrived((1,))
    assert b"".join(raw for _, raw in ship.sent) == (ship.job.rank_log(1, 0)).read_bytes()


def test_flooding_rank_does_not_delay_other_logs(ship: Ship) -> None:
    ship.write("00000.log", bytes(20 << 20))
    ship.write("00007.log", b"last words\n")
    shipper = _shipper(ship)
    shipper.begin(orders.ResumeOffsets({}))
    assert b"last words\n" in [raw for _, raw in ship.sent]
    ship.write("00007.log", b"more\n")
    ship.now_s += 1.0
    shipper.poll((1,))
    shipper.acknowledge(orders.ChunkAck(ship.sent_bytes))
    assert b"more\n" in [raw for _, raw in ship.sent]


def test_slow_log_is_sent_once_per_second(ship: Ship) -> None:
    """A slow log is sent once a second, and its first line at once."""
    shipper = _shipper(ship)
    shipper.begin(orders.ResumeOffsets({}))
    for _ in range(11):
        ship.write("00000.log", b"x\n")
        shipper.poll((1,))
        ship.now_s += 0.2
    assert [len(raw) for _, raw in ship.sent] == [2, 10, 10]


def test_last_lines_are_sent_at_once(ship: Ship) -> None:
    """The last lines are sent at once, up to a few windows of them."""
    shipper = _shipper(ship)
    shipper.begin(orders.ResumeOffsets({}))
    ship.write("00000.log", b"x\n")
    shipper.poll((1,))
    ship.write("00000.log", b"y\n")
    shipper.poll((1,))
    assert ship.sent_bytes == 2
    shipper.send_last((1,))
    assert ship.sent_bytes == 4
    ship.write("00000.log", bytes(9 << 20))
    shipper.send_last((1,))
    assert ship.sent_bytes == 4 + 4 * SHIP_WINDOW_BYTES


def test_slow_connection_gets_less_so_heartbeats_pass(ship: Ship) -> None:
    """A slow connection is given less, so that heartbeats get through."""
    ship.write("00000.log", bytes(50 << 20))
    shipper = _shipper(ship)
    shipper.begin(orders.ResumeOffsets({}))
    on_way = []
    for _ in range(8):
        ship.now_s += 2.0
        got = ship.sent_bytes
        shipper.acknowledge(orders.ChunkAck(got))
        on_way.append(ship.sent_bytes - got)
    assert on_way[0] == SHIP_WINDOW_BYTES // 2
    assert on_way[-1] == WINDOW_BYTES_MIN
    for _ in range(8):
        ship.now_s += 0.01
        got = ship.sent_bytes
        shipper.acknowledge(orders.ChunkAck(got))
    assert ship.sent_bytes - got == SHIP_WINDOW_BYTES


def test_broken_connections_neither_repeat_nor_omit_bytes(ship: Ship, tmp_path: Path) -> None:
    """Nothing is sent twice or left out over broken connections."""
    home = JobDir(tmp_path / "home")
    home.root.mkdir()
    intake, shipper = LogReceiver(home), _shipper(ship)
    for round_ in range(6):
        shipper.pause()
        ship.is_connected = True
        shipper.begin(intake.resume_offsets(NODE))
        for turn in range(5):
            ship.write("00000.log", os.urandom(90_000 * turn))
            ship.write("00001.log", b"line\n")
            ship.now_s += 0.3
            ship.is_connected = turn < 4
            shipper.poll((1,))
            arrived, ship.sent = ship.sent, []
            for chunk, raw in arrived[: len(arrived) - round_ % 3]:  # what was on its way is lost with the line
                intake.receive(NODE, chunk, raw)
            if len(arrived) - round_ % 3 < len(arrived):
                break
            for _, got in intake.take_due_acks():
                shipper.acknowledge(got)
    shipper.begin(intake.resume_offsets(NODE))
    for _ in range(ROUNDS_MAX):
        if shipper.has_arrived((1,)):
            break
        arrived, ship.sent = ship.sent, []
        for chunk, raw in arrived:
            intake.receive(NODE, chunk, raw)
        for _, got in intake.take_due_acks():
            shipper.acknowledge(got)
    assert shipper.has_arrived((1,))
    for rank in (0, 1):
        assert home.rank_log(1, rank).read_bytes() == ship.job.rank_log(1, rank).read_bytes()


def test_truncated_log_continues_and_vanished_one_is_dropped(ship: Ship, tmp_path: Path) -> None:
    """A truncated log continues in the job folder, and one that vanished is dropped."""
    for name in ("00000.log", "00001.log", "00000.idx"):
        ship.write(name, b"0123456789abcde\n")
    home = JobDir(tmp_path / "home")
    home.root.mkdir()
    intake, shipper = LogReceiver(home), _shipper(ship)

    def poll() -> None:
        ship.now_s += 5
        shipper.poll((1,))
        for chunk, raw in ship.sent:
            intake.receive(NODE, chunk, raw)
        ship.sent.clear()

    shipper.begin(intake.resume_offsets(NODE))
    poll()
    log = ship.job.rank_log(1, 0)
    log.rename(tmp_path / "aside")
    log.symlink_to(log)  # cannot be looked at for a while
    poll()
    (tmp_path / "aside").replace(log)
    os.truncate(log, 3)
    os.truncate(log.with_suffix(".idx"), 0)
    ship.job.rank_log(1, 1).unlink()
    poll()
    ship.write("00000.log", b" more\n")
    ship.write("00000.idx", bytes(64))
    shipper.poll((1,))
    ship.sent.clear()  # lost with the line
    shipper.begin(intake.resume_offsets(NODE))
    poll()
    assert home.rank_log(1, 0).read_bytes() == b"0123456789abcde\n012 more\n"
    assert home.rank_index(1, 0).read_bytes() == b"0123456789abcde\n"
    os.truncate(log, 0)
    ship.write("00000.log", b"new\n")
    poll()
    ship.sent.clear()
    assert home.rank_log(1, 0).read_bytes().endswith(b"012 more\nnew\n")
    assert [note.removeprefix("logs/attempt-001/") for note in ship.notes] == [
        "rank-00000.log has 3 bytes, but 16 were sent: it was truncated, and shipping continues from its new beginning",
        "rank-00000.idx has 0 bytes, but 16 were sent: shipping it stops",
        "rank-00001.log is gone: shipping it stops",
        "rank-00000.log has 4 bytes, but 9 were sent: it was truncated, and shipping continues from its new beginning",
    ]
    os.truncate(log, 1)
    later = _shipper(ship)
    later.begin(intake.resume_offsets(NODE))
    assert not ship.sent, "another agent does not know which bytes of it were sent"


def test_fully_sent_attempts_are_not_scanned_again(ship: Ship) -> None:
    """Older attempts are not scanned again once they have been sent."""
    for attempt in range(1, 6):
        ship.write("00000.log", b"x\n", attempt)
    shipper = _shipper(ship)
    shipper.begin(orders.ResumeOffsets({}))
    assert ship.sent_bytes == 10
    shipper.poll((5,))
    ship.job.rank_log(1, 0).unlink()
    shipper.poll((5,))
    assert ship.notes == []  # whoever looks, sees that it is gone
    # An order may name an older attempt's files again: they go on where they were.
    ship.write("00000.log", b"y\n", 4)
    ship.now_s += 5
    shipper.poll((4, 5))
    assert ship.sent[-1] == (reports.Chunk("logs/attempt-004/rank-00000.log", 2), b"y\n")
