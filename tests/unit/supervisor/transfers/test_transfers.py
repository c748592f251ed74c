"""Nodes are known by how their agents greeted: whether they see this disk, and where the job's folder is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core import codec
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import messages as m
from orchestrator.core.wire.messages import Envelope
from orchestrator.supervisor.transfers.transfers import Transfers

LOG = "logs/attempt-001/rank-00000.log"


@pytest.fixture
def transfers(tmp_path: Path) -> Transfers:
    (tmp_path / "logs").mkdir()
    return Transfers(JobDir(tmp_path))


def greet(transfers: Transfers, node: str, *, ships: bool, root: str = "/far") -> m.ResumeOffsets | None:
    """Let an agent say who it is, and be connected; return where its files go on."""
    hello = m.Hello(
        m.PROTOCOL, "job", "", node, "a", node, 1, 0, 0, "", 0, (), 0, f"{root}/{node}", ships, ()
    )
    transfers.greeted(hello)
    return transfers.up(hello)


def chunk(node: str, begin: int, data: bytes) -> Envelope:
    return Envelope(node, "a", 0, codec.pack_kind(m.Chunk(LOG, begin)), raw=data)


def test_a_node_that_sees_the_job_folder_is_told_nothing_of_files(transfers: Transfers) -> None:
    assert greet(transfers, "n0", ships=False) is None
    assert greet(transfers, "n1", ships=True) == m.ResumeOffsets({})


def test_a_node_sees_this_disk_only_if_its_agent_has_said_so(transfers: Transfers, tmp_path: Path) -> None:
    greet(transfers, "n0", ships=False, root="/nfs")
    greet(transfers, "n1", ships=True)
    assert [transfers.ships(node) for node in ("n0", "n1", "unknown")] == [False, True, False]
    assert [transfers.may_ship(node) for node in ("n0", "n1", "unknown")] == [False, True, True]
    assert transfers.root("n0").root == Path("/nfs/n0") and transfers.root("unknown").root == tmp_path


def test_a_piece_of_a_log_lands_under_its_name_and_one_that_leaves_a_gap_is_to_be_sent_again(
    transfers: Transfers, tmp_path: Path
) -> None:
    greet(transfers, "n0", ships=True)
    assert transfers.receive(chunk("n0", 0, b"one\n"), 3.0)
    assert (tmp_path / LOG).read_bytes() == b"one\n" and transfers.moved_at == 3.0
    assert [node for node, _ in transfers.logs.owed()] == ["n0"]
    assert not transfers.receive(chunk("n0", 9, b"three\n"), 4.0)
    assert transfers.moved_at == 3.0
    transfers.logs.close()
