"""I/O counter: every byte that a rank's processes read and write counts once."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from orchestrator.agent.ranks.io_counter import RESCAN_S, IoCounter

RUN_S_MAX = 30.0
WRITER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {!r}], stdin=0)
print("ready", flush=True)
sys.stdin.readline()
open("/dev/null", "wb").write(bytes(1 << 20))
child.wait()
print("written", flush=True)
sys.stdin.readline()
"""
CHILD = 'import sys; open("/dev/null", "wb").write(bytes(2 << 20))'


@pytest.mark.slow
def test_bytes_of_process_tree_accumulate_and_never_shrink() -> None:
    """The bytes of a process and its children are summed and never shrink."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER.format(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        counter, now_s = IoCounter(process.pid), 1000.0
        counter.total_bytes(now_s)
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"written\n"
        grown = counter.total_bytes(now_s + 1)
        assert grown >= 1 << 20
        process.stdin.close()
        process.wait(RUN_S_MAX)
        assert counter.total_bytes(now_s + 1 + RESCAN_S) >= grown
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_missing_process_has_no_traffic() -> None:
    """A process that does not exist has no traffic."""
    assert IoCounter(999_999_999).total_bytes(time.monotonic()) == 0
