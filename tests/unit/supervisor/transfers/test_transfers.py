"""Transfers: files arrive where they belong, and no copy is begun twice. With a carrier that only remembers."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.backends.api import Copied, Copy, Direction
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import codec
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m
from orchestrator.core.wire.messages import Envelope
from orchestrator.supervisor.transfers.transfers import Transfers
from tests.support import jobs

THREAD_S_MAX = 10.0
GANG = (("n0", (0,)), ("n1", (1,)))


@dataclass
class Carrier:
    """Remembers copies; the test ends them."""

    begun: list[Copy] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    done: list[Copied] = field(default_factory=list)

    def copy(self, copy: Copy) -> None:
        self.begun.append(copy)

    def drop(self, key: str) -> None:
        self.dropped.append(key)

    def copied(self) -> list[Copied]:
        done, self.done = self.done, []
        return done

    def progress(self) -> dict[str, int]:
        return {}


@dataclass
class Quay:
    """A transfers at home, with its carrier."""

    job: JobDir
    carrier: Carrier
    transfers: Transfers

    def say(self, node: str, message: object, boot: str = "a", seq: int = 1) -> Envelope:
        return Envelope(node, boot, seq, codec.pack_kind(message))

    def greet(
        self, node: str, boot: str = "a", started: int = 0, *, ships: bool = True, root: str = "/far"
    ) -> m.Hello:
        """Let an agent say who it is, which it does before all else."""
        hello = m.Hello(
            m.PROTOCOL, self.job.id, "", node, boot, node, 1, 0, 0, "", 0, (), 0, f"{root}/{node}", ships, ()
        )
        self.transfers.greeted(hello, started, 1.0)
        return hello

    def up(self, node: str, *, ships: bool = True, root: str = "/far") -> m.ResumeOffsets | None:
        return self.transfers.up(self.greet(node, ships=ships, root=root))

    def bring(self, name: str, data: bytes) -> list[e.Event]:
        """Let n0 report a checkpoint of one file, and its copy arrive."""
        piece = m.ManifestEntry(name, len(data), 1, hashlib.sha256(data).hexdigest())
        events = self.transfers.found(self.say("n0", m.ManifestReported(1, name, 10, (piece,))), 1, GANG, 1.0)
        copy = self.carrier.begun.pop()
        copy.local_dir.mkdir(parents=True, exist_ok=True)
        (copy.local_dir / name).write_bytes(data)
        self.carrier.done.append(Copied(copy, ""))
        return events + self.transfers.news(2.0)


@pytest.fixture
def quay(tmp_path: Path) -> Quay:
    job = JobDir(tmp_path / "job")
    for folder in (job.checkpoints, job.logs):
        folder.mkdir(parents=True)
    carrier = Carrier()
    plan = dataclasses.replace(jobs.plan(), id=job.id)
    return Quay(job, carrier, Transfers(job, plan, carrier, lambda: ""))


def _prepare(quay: Quay, node: str, path: str) -> d.Prepare:
    return d.Prepare(3.0, "why", 2, node, d.Checkpoint(path, 10))


def test_a_node_that_sees_the_job_folder_is_told_nothing_of_files(quay: Quay) -> None:
    assert quay.up("n0", ships=False) is None
    assert quay.up("n1") == m.ResumeOffsets({})


def test_a_checkpoint_is_known_when_it_is_at_home(quay: Quay) -> None:
    quay.up("n0")
    events = quay.bring("step-10.pt", b"ten")
    path = str(quay.job.checkpoints / "step-10.pt")
    assert [(type(one), getattr(one, "path", "")) for one in events] == [
        (e.CheckpointFetchStarted, path),
        (e.CheckpointFound, path),
    ]
    assert Path(path).read_bytes() == b"ten"


def test_what_an_agent_had_kept_is_fetched_from_its_own_folder_before_it_is_up(quay: Quay) -> None:
    quay.greet("n0")
    quay.bring("step-10.pt", b"ten")
    spoiled = e.CheckpointInvalidated(2.0, "n0", 1, "/far/n0/checkpoints/step-10.pt")
    assert quay.transfers.localized(spoiled) == dataclasses.replace(
        spoiled, path=str(quay.job.checkpoints / "step-10.pt")
    )


def test_an_agent_that_comes_after_another_does_not_speak_for_it(quay: Quay) -> None:
    quay.greet("n0")
    quay.greet("n1")
    piece = m.ManifestEntry("step-10/n0.pt", 3, 1, hashlib.sha256(b"ten").hexdigest())
    quay.transfers.found(quay.say("n0", m.ManifestReported(1, "step-10", 10, (piece,))), 1, GANG, 1.0)
    quay.greet("n1", boot="b", started=1)
    for node in ("n0", "n1"):
        quay.transfers.learned(e.Stopped(2.0, node, 1, "asked"))
    (spoiled,) = quay.transfers.news(2.0)
    assert isinstance(spoiled, e.CheckpointInvalidated)
    assert quay.carrier.begun == []


def test_what_a_stale_attempt_reports_is_not_fetched(quay: Quay) -> None:
    quay.up("n0")
    piece = m.ManifestEntry("a.pt", 1, 1, "0" * 64)
    assert (
        quay.transfers.found(quay.say("n0", m.ManifestReported(1, "a.pt", 10, (piece,))), 2, GANG, 1.0) == []
    )
    assert quay.carrier.begun == []


def test_before_a_node_is_prepared_its_checkpoint_is_there_and_its_files_are_named(quay: Quay) -> None:
    quay.up("n0")
    quay.up("n1")
    quay.bring("step-10.pt", b"ten")
    path = str(quay.job.checkpoints / "step-10.pt")
    decision = _prepare(quay, "n1", path)
    assert quay.transfers.send(decision, 3.0) is False
    (copy,) = quay.carrier.begun
    assert (copy.direction, copy.node, copy.remote_dir) == (Direction.SEND, "n1", "/far/n1/checkpoints")
    quay.carrier.done.append(Copied(copy, ""))
    assert quay.transfers.news(4.0) == []
    deadline_s = time.monotonic() + THREAD_S_MAX
    while not (ready := quay.transfers.arrived(4.0)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    ((arrived, pieces),) = ready
    assert arrived == decision
    assert [(one.name, one.size_bytes) for one in pieces] == [("step-10.pt", 3)]
    assert quay.transfers.path_there("n1", path) == "/far/n1/checkpoints/step-10.pt"


def test_a_checkpoint_that_cannot_be_brought_fails_the_preparation_with_the_reason(quay: Quay) -> None:
    quay.up("n0")
    quay.up("n1")
    quay.bring("step-10.pt", b"ten")
    path = str(quay.job.checkpoints / "step-10.pt")
    quay.transfers.send(_prepare(quay, "n1", path), 3.0)
    quay.carrier.done.append(Copied(quay.carrier.begun[0], "no space is left on n1"))
    (failed,) = quay.transfers.news(4.0)
    assert isinstance(failed, e.PrepareFailed)
    assert (failed.node, failed.attempt) == ("n1", 2)
    assert failed.reason == f"{path} could not be brought there: no space is left on n1"


def test_a_checkpoint_is_sent_once_however_often_its_node_is_to_be_prepared_and_no_more_once_ranks_start(
    quay: Quay,
) -> None:
    quay.up("n0")
    quay.up("n1")
    quay.bring("step-10.pt", b"ten")
    quay.bring("step-20.pt", b"twenty")
    old, new = (str(quay.job.checkpoints / name) for name in ("step-10.pt", "step-20.pt"))
    for _ in range(2):  # its connection broke in between
        assert quay.transfers.send(_prepare(quay, "n1", old), 3.0) is False
    assert len(quay.carrier.begun) == 1
    quay.transfers.send(_prepare(quay, "n1", new), 3.0)
    (first, second) = quay.carrier.begun
    assert quay.carrier.dropped == [first.key]
    quay.carrier.done.append(Copied(first, "given up"))
    assert quay.transfers.news(4.0) == []
    quay.transfers.let_go("n1", 5.0)
    assert quay.carrier.dropped == [first.key, second.key]
    quay.carrier.done.append(Copied(second, "no space is left on n1"))
    assert quay.transfers.news(6.0) == [] and quay.transfers.arrived(6.0) == []


def test_nothing_is_brought_to_a_node_that_sees_it_or_from_a_place_that_all_see(quay: Quay) -> None:
    quay.up("n0", ships=False, root="/nfs")
    quay.up("n1")
    path = str(quay.job.checkpoints / "step-10.pt")
    assert quay.transfers.send(_prepare(quay, "n0", path), 3.0)
    assert quay.transfers.path_there("n0", path) == "/nfs/n0/checkpoints/step-10.pt"
    assert quay.transfers.send(_prepare(quay, "n1", "/shared/step-10.pt"), 3.0)
    assert quay.transfers.path_there("n1", "/shared/step-10.pt") == "/shared/step-10.pt"


def test_a_path_that_a_host_names_is_told_as_it_is_called_here(quay: Quay) -> None:
    quay.up("n0", ships=False, root="/nfs")
    there = e.CheckpointFound(1.0, "n0", 1, "/nfs/n0/checkpoints/a.pt", 5)
    assert quay.transfers.localized(there) == dataclasses.replace(
        there, path=str(quay.job.checkpoints / "a.pt")
    )
    elsewhere = dataclasses.replace(there, path="/shared/a.pt")
    assert quay.transfers.localized(elsewhere) == elsewhere


def test_what_travels_is_told(quay: Quay) -> None:
    quay.up("n0")
    piece = m.ManifestEntry("a.pt", 5, 1, "0" * 64)
    quay.transfers.found(quay.say("n0", m.ManifestReported(1, "a.pt", 10, (piece,))), 1, GANG, 1.0)
    (one,) = quay.transfers.travels()
    assert (one["name"], one["node"], one["direction"], one["bytes"]) == ("a.pt", "n0", "fetch", 5)


def test_a_lost_node_is_sent_nothing_more(quay: Quay) -> None:
    quay.up("n0")
    quay.up("n1")
    quay.bring("step-10.pt", b"ten")
    quay.transfers.send(_prepare(quay, "n1", str(quay.job.checkpoints / "step-10.pt")), 3.0)
    quay.transfers.lost("n1", 2, 4.0)
    assert quay.carrier.dropped == [quay.carrier.begun[0].key]
