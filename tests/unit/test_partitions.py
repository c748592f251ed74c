"""Is it seen before a submit that a job would never start in its partition? Lines as Slurm 22.05 prints them."""

from __future__ import annotations

import pytest

from orchestrator.slurm import partitions
from orchestrator.slurm.partitions import Asked, Partition

SHOWN = (
    "PartitionName=main AllowGroups=ALL Default=YES QoS=N/A DefaultTime=00:30:00 Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime=2-00:30:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=node[1-4] State=UP TotalCPUs=32 TotalNodes=4\n"
    "PartitionName=small Default=NO MaxNodes=1 MaxTime=10:00 MinNodes=1 Nodes=node[1-4] State=UP TotalNodes=4\n"
    "PartitionName=big Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=3 State=UP TotalNodes=4\n"
    "PartitionName=down Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=1 State=DOWN TotalNodes=4\n"
)
MAIN, SMALL, BIG, DOWN = partitions.read(SHOWN)


def test_partitions_are_read_with_their_limits() -> None:
    assert Partition("main", True, "UP", 4, 0, None, 2 * 86400 + 1800.0) == MAIN
    assert Partition("small", False, "UP", 4, 1, 1, 600.0) == SMALL
    assert (BIG.limit_s_max, BIG.nodes_min, DOWN.state) == (None, 3, "DOWN")
    assert SMALL.size == "small: 4 nodes, 1 of them for a job, at most 10m"
    assert BIG.size == "big: 4 nodes, no time limit"


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_partitions error\n", "PartitionName", "State=UP"])
def test_what_is_no_partition_is_none(text: str) -> None:
    assert partitions.read(text) == ()


def test_an_odd_line_limits_nothing() -> None:
    (odd,) = partitions.read("PartitionName=x MaxTime=soon MaxNodes=few TotalNodes=9")
    assert partitions.fault(Asked(("x",), 5, 9e9, False), odd) == ("", "")


@pytest.mark.parametrize(
    ("nodes", "limit_s", "one", "what", "field"),
    [
        (5, None, MAIN, "5 nodes asked, and a job in partition main gets 4 at most", "nodes"),
        (2, None, SMALL, "2 nodes asked, and a job in partition small gets 1 at most", "nodes"),
        (2, None, BIG, "2 nodes asked, and a job in big needs 3 at least", "nodes"),
        (1, 660.0, SMALL, "11m asked, and partition small allows 10m at most", "time_limit"),
        (4, 3 * 86400.0, MAIN, "3d asked, and partition main allows 2d30m at most", "time_limit"),
        (4, None, DOWN, "partition down is DOWN", "slurm.partition"),
        (4, 2 * 86400.0, MAIN, "", ""),
        (1, 600.0, SMALL, "", ""),
    ],
)
def test_what_a_partition_never_gives_is_said_with_the_field(
    nodes: int, limit_s: float | None, one: Partition, what: str, field: str
) -> None:
    assert partitions.fault(Asked((), nodes, limit_s, False), one) == (what, field)


def test_sizes_that_a_qos_may_allow_are_not_judged() -> None:
    assert partitions.fault(Asked((), 9, 9e9, True), SMALL) == ("", "")
    assert partitions.fault(Asked((), 1, None, True), DOWN)[0]


def test_the_partitions_of_a_job_are_those_it_names_or_the_default_one() -> None:
    there = (MAIN, SMALL, BIG, DOWN)
    assert partitions.wanted(Asked((), 1, None, False), there) == (MAIN,)
    assert partitions.wanted(Asked(("small", "big"), 1, None, False), there) == (SMALL, BIG)
