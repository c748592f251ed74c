"""Copies of saves come home whole or not at all, and reach the hosts of the next attempt; with a copier that obeys the test."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.backends.api import Direction
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    Content,
    FileLocation,
    Format,
)
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import TransferStatus
from orchestrator.supervisor.transfers import checkpoint_copies
from orchestrator.supervisor.transfers.checkpoint_copies import INCOMING_MAX, CheckpointCopies
from tests.support.fake_copier import FakeCopier
from tests.support.saved_files import SAVED_NS, S, write

Files = dict[str, bytes]


@dataclass
class Quay:
    """The copies of a job, with a copier, hosts and a job folder."""

    folder: Path
    copier: FakeCopier
    copies: CheckpointCopies

    @property
    def job(self) -> JobDir:
        return JobDir(self.folder / "job")

    def place(self, host: str) -> Path:
        return self.folder / "far" / host / "checkpoints"

    def save(self, number: int, main: str, **files: Files) -> Checkpoint:
        """Let hosts write the files of a save; return it as the ledger has it."""
        pieces, places = [], []
        for host, own in files.items():
            for name, data in own.items():
                write(self.place(host) / name, data, SAVED_NS + number * S)
                pieces.append(CheckpointFile(name, len(data), SAVED_NS + number * S, "0" * 64))
            places.append(FileLocation(host, str(self.place(host)), tuple(own)))
        return Checkpoint(
            number, main, main, main, 1, 2, 10, Format.TORCH, Content.STATE, True, CheckpointState.OPEN,
            files=tuple(pieces), locations=tuple(places),
        )  # fmt: skip

    def bring(self, number: int, main: str, **files: Files) -> Checkpoint:
        """Let a save come home; return it as it is there."""
        save = self.save(number, main, **files)
        self.copies.fetch(save)
        self.copier.arrive_all()
        assert self.copies.take_fetched() == [(number, "")]
        return dataclasses.replace(save, locations=(FileLocation("", str(self.job.checkpoints)), *save.locations))

    def home(self) -> Files:
        """Return what is at home, also what has only gathered."""
        root = self.job.checkpoints
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture
def quay(tmp_path: Path) -> Quay:
    quay = Quay(tmp_path, FakeCopier(), None)  # type: ignore[arg-type]
    quay.job.checkpoints.mkdir(parents=True)
    return renewed(quay)


def renewed(quay: Quay) -> Quay:
    """Let another supervisor take over."""
    quay.copies = CheckpointCopies(quay.job, quay.copier, quay.job.checkpoints, "*")
    return quay


# Home


def test_checkpoint_is_staged_and_moved_in_place_complete(quay: Quay) -> None:
    """A checkpoint is collected apart and put into its place when all of it has arrived."""
    save = quay.save(1, "s", n0={"s/a.pt": b"a"}, n1={"s/d/b.pt": b"b"})
    quay.copies.fetch(save)
    quay.copies.fetch(save)
    assert sorted(quay.copier.begun) == ["fetch 1 n0", "fetch 1 n1"]
    copy = quay.copier.of("n1")
    assert (copy.direction, copy.names, copy.expected) == (Direction.FETCH, ("s/d/b.pt",), save.files[1:])
    quay.copier.arrive("n0")
    assert quay.copies.take_fetched() == [] and list(quay.home()) == [".coming/1/s/a.pt"]
    quay.copier.arrive("n1")
    assert quay.copies.take_fetched() == [(1, "")] and quay.copies.take_fetched() == []
    assert quay.home() == {"s/a.pt": b"a", "s/d/b.pt": b"b"}
    assert not list((quay.job.checkpoints / ".coming").iterdir())


def test_rewritten_file_cancels_fetch_of_checkpoint(quay: Quay) -> None:
    """One file that was rewritten meanwhile keeps all of the checkpoint from being fetched."""
    quay.copies.fetch(quay.save(1, "s", n0={"s/a.pt": b"a"}, n1={"s/b.pt": b"b"}))
    quay.copier.arrive("n0")
    write(quay.place("n1") / "s/b.pt", b"B", SAVED_NS + 9 * S)
    quay.copier.arrive("n1")
    assert quay.copies.take_fetched() == [(1, "s/b.pt was written again on n1 before it was copied")]
    assert quay.home() == {}


def test_failed_copy_ends_others_of_its_checkpoint(quay: Quay) -> None:
    quay.copies.fetch(quay.save(1, "s", n0={"s/a.pt": b"a"}, n1={"s/b.pt": b"b"}))
    quay.copier.arrive("n0", "no space is left for it")
    assert quay.copies.take_fetched() == [(1, "no space is left for it")]
    assert quay.copier.begun == {} and quay.copier.dropped == ["fetch 1 n1"]


def test_cancelled_fetch_is_not_reported(quay: Quay) -> None:
    """A checkpoint that is not wanted any more is not reported."""
    quay.copies.fetch(quay.save(1, "s", n0={"s/a.pt": b"a"}))
    quay.copies.cancel_fetch(1)
    quay.copies.cancel_fetch(2)
    assert quay.copier.begun == {} and quay.copies.take_fetched() == []


def test_folder_replaces_older_one_with_all_files(quay: Quay) -> None:
    """A folder takes the place of an older one with all its files."""
    quay.bring(1, "last", n0={"last/a.pt": b"1", "last/only-1.pt": b"1"})
    quay.bring(2, "last", n0={"last/a.pt": b"2"})
    assert quay.home() == {"last/a.pt": b"2"}


def test_loose_files_replace_older_ones_individually(quay: Quay) -> None:
    """Files of a checkpoint without a folder replace older ones one by one."""
    write(quay.job.checkpoints / "notes.txt", b"mine")
    for number in (1, 2):
        quay.bring(number, "model.pt", n0={"model.pt": b"%d" % number, "optim/a.pt": b"%d" % number})
    assert quay.home() == {"model.pt": b"2", "optim/a.pt": b"2", "notes.txt": b"mine"}


def test_checkpoint_root_as_checkpoint_is_fetched(quay: Quay) -> None:
    """A checkpoint that is the checkpoint folder itself is fetched."""
    write(quay.job.checkpoints / "ledger.jsonl", b"mine")
    for number in (1, 2):
        quay.bring(number, ".", n0={".metadata": b"%d" % number, "__0_0.distcp": b"%d" % number})
    assert quay.home() == {".metadata": b"2", "__0_0.distcp": b"2", "ledger.jsonl": b"mine"}


def test_part_already_local_stays(quay: Quay) -> None:
    """A part that the job folder already has stays there."""
    save = quay.save(1, "s", n1={"s/b.pt": b"b"})
    write(quay.job.checkpoints / "s/a.pt", b"a")
    here = FileLocation("", str(quay.job.checkpoints), ("s/a.pt",))
    save = dataclasses.replace(
        save, files=(CheckpointFile("s/a.pt", 1, SAVED_NS), *save.files), locations=(here, *save.locations)
    )
    quay.copies.fetch(save)
    quay.copier.arrive_all()
    assert quay.copies.take_fetched() == [(1, "")] and quay.home() == {"s/a.pt": b"a", "s/b.pt": b"b"}


def test_older_checkpoint_of_same_names_replaces_no_newer(quay: Quay) -> None:
    older = quay.save(1, "last.pt", n1={"last.pt": b"1"})
    quay.copies.fetch(older)
    quay.copies.fetch(quay.save(2, "last.pt", n0={"last.pt": b"2"}))
    quay.copies.fetch(quay.save(3, "other.pt", n1={"other.pt": b"3"}))
    quay.copier.arrive("fetch 2 n0")
    quay.copier.arrive("fetch 1 n1")
    assert quay.copies.take_fetched() == [(2, ""), (1, "checkpoint 2, which overwrote it, was fetched first")]
    assert quay.home() == {"last.pt": b"2"} and list(quay.copier.begun) == ["fetch 3 n1"]


def test_local_disk_error_gives_up_checkpoint_with_reason(quay: Quay) -> None:
    write(quay.job.checkpoints / "s", b"a file where a folder is to be")
    quay.copies.fetch(quay.save(1, "s/d/a.pt", n0={"s/d/a.pt": b"a"}))
    quay.copier.arrive_all()
    ((number, why),) = quay.copies.take_fetched()
    assert number == 1 and why.endswith("on this machine") and list(quay.home()) == ["s"]


def test_oldest_transfer_is_given_up_beyond_limit(quay: Quay) -> None:
    for number in range(1, INCOMING_MAX + 2):
        quay.copies.fetch(quay.save(number, f"{number}.pt", n0={f"{number}.pt": b"x"}))
    assert quay.copies.take_fetched() == [(1, f"more than {INCOMING_MAX} are being fetched at once")]
    assert len(quay.copier.begun) == INCOMING_MAX


# A supervisor that is revived


def test_staged_files_are_forgotten_by_new_supervisor(quay: Quay) -> None:
    quay.copies.fetch(quay.save(1, "s", n0={"s/a.pt": b"a"}, n1={"s/b.pt": b"b"}))
    quay.copier.arrive("n0")
    quay.copies.take_fetched()
    assert renewed(quay).home() == {}


def test_interrupted_folder_exchange_is_undone(quay: Quay) -> None:
    quay.bring(1, "d/last", n0={"d/last/a.pt": b"1", "d/last/deep/b.pt": b"1"})
    before, stage = quay.home(), quay.job.checkpoints / ".coming/2"
    write(stage / "d/last/a.pt", b"2")
    (stage / ".old/d").mkdir(parents=True)
    (quay.job.checkpoints / "d/last").rename(stage / ".old/d/last")
    assert renewed(quay).home() == before


def test_interrupted_file_exchange_is_undone(quay: Quay) -> None:
    quay.bring(1, "a.pt", n0={"a.pt": b"1", "b.pt": b"1"})
    before, stage = quay.home(), quay.job.checkpoints / ".coming/2"
    write(stage / "b.pt", b"2")
    (stage / ".old").mkdir(parents=True)
    (quay.job.checkpoints / "a.pt").rename(stage / ".old/a.pt")
    write(quay.job.checkpoints / "a.pt", b"2")
    assert renewed(quay).home() == before


def test_finished_exchange_stays(quay: Quay) -> None:
    quay.bring(1, "last", n0={"last/a.pt": b"1"})
    stage = quay.job.checkpoints / ".coming/2"
    (stage / ".old").mkdir(parents=True)
    (quay.job.checkpoints / "last").rename(stage / ".old/last")
    write(quay.job.checkpoints / "last/a.pt", b"2")
    assert renewed(quay).home() == {"last/a.pt": b"2"}


# To hosts


def test_checkpoint_is_sent_with_all_files(quay: Quay) -> None:
    save = quay.bring(1, "s", n0={"s/a.pt": b"a"}, n1={"s/b.pt": b"b"})
    assert quay.copies.send(save, "n1", "/far/n1")
    copy = quay.copier.of("n1")
    assert (copy.direction, copy.remote_dir) == (Direction.SEND, "/far/n1/checkpoints")
    assert (copy.local_dir, copy.names, copy.written_by_host) == (
        quay.job.checkpoints,
        ("s/a.pt", "s/b.pt"),
        ("s/b.pt",),
    )
    there = quay.copies.locate_on_host(save, "n1", "/far/n1")
    assert there.path == "/far/n1/checkpoints/s"
    assert there.locations == (FileLocation("n1", "/far/n1/checkpoints", ("s/a.pt", "s/b.pt")),)


def test_checkpoint_is_sent_once_until_another_is_sent(
    quay: Quay,
) -> None:
    """A checkpoint is sent once, however often its host is prepared, until another one is."""
    old, new = (quay.bring(number, f"{number}.pt", n0={f"{number}.pt": b"x"}) for number in (1, 2))
    for _ in range(2):
        assert quay.copies.send(old, "n1", "/far/n1")
    (first,) = quay.copier.begun
    quay.copies.send(new, "n1", "/far/n1")
    assert quay.copier.dropped == [first] and len(quay.copier.begun) == 1
    quay.copier.arrive("n1", "no space is left for it on n1")
    assert quay.copies.take_fetched() == []
    assert quay.copies.finished_sends == [("n1", "no space is left for it on n1")]


def test_send_result_expires_when_ranks_start(quay: Quay) -> None:
    """The result of sending does not count any more once the host's ranks start."""
    save = quay.bring(1, "a.pt", n0={"a.pt": b"a"})
    quay.copies.send(save, "n1", str(quay.place("n1").parent))
    quay.copier.arrive("n1")
    quay.copies.take_fetched()
    assert quay.copies.finished_sends == [("n1", "")]
    quay.copies.end_sends("n1")
    assert quay.copies.finished_sends == []


def test_file_being_sent_is_not_replaced_meanwhile(quay: Quay) -> None:
    """Nothing replaces what is being sent until that is over."""
    save = quay.bring(1, "last.pt", n0={"last.pt": b"1"})
    quay.copies.send(save, "n1", str(quay.place("n1").parent))
    quay.copies.fetch(quay.save(2, "last.pt", n0={"last.pt": b"2"}))
    quay.copier.arrive("n0")
    assert quay.copies.take_fetched() == [] and quay.home()["last.pt"] == b"1"
    quay.copier.arrive("n1")
    assert quay.copies.take_fetched() == [(2, "")] and quay.home() == {"last.pt": b"2"}


def test_abandoned_send_blocks_nothing(quay: Quay) -> None:
    save = quay.bring(1, "last.pt", n0={"last.pt": b"1"})
    quay.copies.send(save, "n1", str(quay.place("n1").parent))
    quay.copies.fetch(quay.save(2, "last.pt", n0={"last.pt": b"2"}))
    quay.copier.arrive("n0")
    assert quay.copies.take_fetched() == []
    quay.copies.end_sends("n1")
    assert quay.copies.take_fetched() == [(2, "")] and quay.home() == {"last.pt": b"2"}


@pytest.mark.parametrize("folder", ["job/from-hosts/n0/checkpoints", "job/checkpoints/.kept/1"])
def test_external_checkpoint_is_shared_not_sent(quay: Quay, folder: str) -> None:
    """A checkpoint elsewhere in the job folder is sent; one outside is seen by all hosts."""
    save = dataclasses.replace(
        quay.save(1, "a.pt", n0={"a.pt": b"a"}), locations=(FileLocation("", str(quay.folder / folder)),)
    )
    assert quay.copies.send(save, "n1", "/far/n1")
    assert quay.copier.of("n1").local_dir == quay.folder / folder
    assert quay.copies.locate_on_host(save, "n1", "/far/n1").path == "/far/n1/checkpoints/a.pt"
    shared = dataclasses.replace(save, locations=(FileLocation("", "/shared"),))
    assert not quay.copies.send(shared, "n1", "/far/n1")
    assert quay.copies.locate_on_host(shared, "n1", "/far/n1").path == "/shared/a.pt"


# What people see, and what hosts delete


def test_transfer_is_reported_with_progress(quay: Quay) -> None:
    save = quay.bring(1, "a.pt", n0={"a.pt": b"five!"})
    quay.copies.send(save, "n1", "/far/n1")
    quay.copies.fetch(quay.save(2, "s", n0={"s/a.pt": b"123"}, n1={"s/b.pt": b"1"}))
    assert quay.copies.list_transfers() == [
        TransferStatus("s", "n0", "fetch", bytes=3, done_bytes=1),
        TransferStatus("s", "n1", "fetch", bytes=1, done_bytes=1),
        TransferStatus("a.pt", "n1", "send", bytes=5, done_bytes=1),
    ]


def test_hosts_delete_own_files_of_pruned_checkpoint(quay: Quay) -> None:
    save = quay.bring(1, "s", n0={"s/a.pt": b"a"}, n1={"s/b.pt": b"b"})
    quay.copies.discard(save)
    assert [(node, own.locations[0].host, [p.name for p in own.files]) for node, own in quay.copies.discards] == [
        ("n0", "n0", ["s/a.pt"]), ("n1", "n1", ["s/b.pt"]),
    ]  # fmt: skip
    assert checkpoint_copies.restrict_to_host(save, "n2") is None
