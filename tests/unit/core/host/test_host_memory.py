"""Which failures of hosts count, for how long, and what ends them."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.host import host_health
from orchestrator.core.host.host_health import FAILURE_S_MAX, HostHealth

NOW = 1e9
LOST = HostHealth("user@n3", NOW - 7200, "node_lost: no word for 8 s", "gpt-1")


def test_a_lost_node_counts_for_a_day(tmp_path: Path) -> None:
    host_health.write(tmp_path, LOST)
    assert host_health.recent_failures(tmp_path, NOW) == {"user@n3": LOST}
    assert host_health.recent_failures(tmp_path, LOST.at + FAILURE_S_MAX) == {}


def test_the_last_failure_is_the_one_that_is_told(tmp_path: Path) -> None:
    newer = HostHealth(LOST.host, NOW - 60, "network: cut")
    host_health.write(tmp_path, LOST)
    host_health.write(tmp_path, newer)
    assert host_health.recent_failures(tmp_path, NOW) == {LOST.host: newer}


def test_a_passed_check_ends_it_and_a_later_failure_counts_again(tmp_path: Path) -> None:
    host_health.write(tmp_path, LOST)
    host_health.write(tmp_path, HostHealth(LOST.host, NOW - 60, ""))
    assert host_health.recent_failures(tmp_path, NOW) == {}
    host_health.write(tmp_path, LOST)
    assert list(host_health.recent_failures(tmp_path, NOW)) == [LOST.host]


def test_damage_is_passed_over(tmp_path: Path) -> None:
    host_health.write(tmp_path, LOST)
    (tmp_path / "nodes" / "n1.json").write_text("{")
    assert list(host_health.recent_failures(tmp_path, NOW)) == [LOST.host]
    assert host_health.recent_failures(tmp_path / "none", NOW) == {}


def test_a_failure_says_when_and_where() -> None:
    assert LOST.describe_failure(NOW) == "2 h ago, in gpt-1: node_lost: no word for 8 s"
    assert HostHealth("n", NOW - 300, "cut").describe_failure(NOW) == "5 min ago, in a check: cut"
