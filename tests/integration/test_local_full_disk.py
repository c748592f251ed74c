"""What if the disk of the job home is full? That costs nothing but time: nobody dies, and the job goes on by itself."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc
from orchestrator.core.jobdir.full_disk import RETRY_S
from orchestrator.core.wire import reports
from orchestrator.journal import journal_file
from tests.support.local import FAKE_TORCH, STEPPER, Desk, Sight, wait_until

DISK_BYTES = 24 << 20
PAGE_BYTES = 4096
SUPERVISORS_MAX = 20
"""More of them than lines fit into the last page of a journal, which is there although the disk is full."""

FULL_S = 12.0
"""Longer than a sleep that counts, see `SLEEP_S_MIN`."""

SILENT = (
    STEPPER.replace("os.write(1,", "(lambda *_: None)(1,")
    + """
gate = Path(os.environ["GATE"])


def wait_at_the_gate(step):
    while step == 50 and not gate.exists():
        optimizer.step()
        time.sleep(0.02)


run(60, at_step=wait_at_the_gate)
"""
)
"""Makes steps, and prints nothing; the gate is on another disk."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a folder on a small disk of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, timeout=10).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


@pytest.fixture
def small_desk(small_disk: Path, tmp_path: Path) -> Iterator[Desk]:
    """Give a desk whose job home is on the small disk."""
    one = Desk(tmp_path, {**os.environ, "ORCH_HOME": str(small_disk / "home"), "GATE": str(tmp_path / "gate")})
    yield one
    (small_disk / "fill").unlink(missing_ok=True)
    left = one.clear_up()
    assert not left, "processes of ended jobs were left:\n" + "\n".join(left)


def _fill(disk: Path, job: Sight) -> None:
    """Leave no room on the disk, nor in the last page of a log."""
    with (disk / "fill").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(PAGE_BYTES)):
            pass
    for log in [
        *job.root.glob("*.log"),
        *job.root.glob("nodes/*/*.log"),
        *job.root.glob("logs/*/node-*.log"),
    ]:
        with log.open("ab", buffering=0) as file:
            file.write(b"\n" * (-file.tell() % PAGE_BYTES))
    with pytest.raises(OSError, match="No space") as caught:
        (disk / "more").write_bytes(b"x")
    assert caught.value.errno == errno.ENOSPC


def _size_bytes(job: Sight) -> int:
    return job.job.folder.journal.stat().st_size


def _is_gone(proc: Proc) -> bool:
    return not procfs.is_alive(proc)


def _fill_journal(job: Sight) -> None:
    """Let supervisors come and go until no line of them fits."""
    for _ in range(SUPERVISORS_MAX):
        before_bytes, supervisor = _size_bytes(job), job.supervisor()
        job.kill_supervisor()
        job.job.status()
        assert job.supervisor() != supervisor
        time.sleep(RETRY_S)
        if _size_bytes(job) == before_bytes:
            return
    pytest.fail("the journal never ran out of room")


def test_a_full_disk_costs_nothing_but_time(small_desk: Desk, small_disk: Path, tmp_path: Path) -> None:
    job = small_desk.submit({**FAKE_TORCH, "train.py": SILENT}, nodes=2, entrypoint="train.py")
    job.wait_for_step(50)
    ranks = job.rank_procs()
    shepherds = [job.keeper(node) for node in ("node-0", "node-1")] + [
        job.agent("node-0"),
        job.agent("node-1"),
    ]
    _fill(small_disk, job)
    _fill_journal(job)
    supervisor = job.supervisor()
    time.sleep(FULL_S)
    assert all(procfs.is_alive(one) for one in (*ranks.values(), *shepherds, supervisor))
    assert job.job.status()["full_disk"] == job.job.why()["full_disk"] == str(job.root)
    (tmp_path / "gate").touch()  # the ranks end while nothing of it can be written down
    wait_until(lambda: not any(procfs.is_alive(one) for one in ranks.values()), "the end of the ranks")
    time.sleep(3 * RETRY_S)
    assert all(procfs.is_alive(one) for one in (*shepherds, supervisor))
    assert not job.news(d.EndJob)
    (small_disk / "fill").unlink()
    status = job.wait()
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 1, 0)
    entries = list(journal_file.read(job.job.folder.journal))
    assert [entry.n for entry in entries] == list(range(1, len(entries) + 1))
    assert sorted(one.rank for one in job.news(reports.Exited)) == [0, 1, 2, 3]
    said = (job.root / "supervisor.log").read_text()
    assert said.count("the disk is full") >= 1
    assert "the disk has free space again" in said
