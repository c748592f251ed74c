"""Is a hang seen over SSH, explained by pages that were written on other hosts, and is a host at fault left out?"""

from __future__ import annotations

from tests.hangs.script import training
from tests.support.cluster import hanging
from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk

LONG_TRAINING = hanging.ONCE + training("""
def misbehave():
    train(3000)
""")

FOUND_S_MAX = 37.0
"""A hang timeout of 12 s, and what a busy machine adds."""


def test_mutually_unreachable_hosts_are_a_network_hang(desk: Desk, box: Box) -> None:
    """Hosts that lose each other while the supervisor hears both are a network hang."""
    monitor = {"heartbeat_s": 1.0, "node_timeout": 60, "hang_timeout": "12s"}
    job = desk.submit({"train.py": LONG_TRAINING}, procs_per_node=1, start="fresh", monitor=monitor)
    job.wait_for_step(100)
    box.cut_between("node1", "node2")
    job.until(lambda seen: seen["attempt"] == 2 or seen["state"] == "RESTARTING", "the verdict")
    box.heal()
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert job.kinds() == ["hang", None]
    verdict = job.why()[0]["verdict"]
    assert "no rank is missing" in verdict["summary"], verdict
    assert verdict["detected_s"] < FOUND_S_MAX


def test_rank_reading_fifo_is_named_with_evidence(desk: Desk) -> None:
    """A rank that reads a FIFO is named with its line, and all stack dumps are fetched."""
    job = hanging.reading_a_fifo(desk)
    hanging.assert_stacks_tell_and_change_nothing(job)
    hanging.assert_judged_and_mended(job)
