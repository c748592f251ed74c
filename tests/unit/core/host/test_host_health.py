"""Which failures of hosts count, for how long, and what ends them."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.host import host_health
from orchestrator.core.host.host_health import FAILURE_S_MAX, HostHealth

NOW = 1e9
LOST = HostHealth("user@n3", NOW - 7200, "node_lost: no word for 8 s", "gpt-1")


def test_lost_node_counts_for_a_day(tmp_path: Path) -> None:
    host_health.write(tmp_path, LOST)
    assert host_health.recent_failures(tmp_path, NOW) == {"user@n3": LOST}
    assert host_health.recent_failures(tmp_path, LOST.at + FAILURE_S_MAX) == {}


def test_last_failure_is_reported(tmp_path: Path) -> None:
    newer = HostHealth(LOST.host, NOW - 60, "network: cut")
    host_health.write(tmp_path, LOST)
    host_health.write(tmp_path, newer)
    assert host_health.recent_failures(tmp_path, NOW) == {LOST.host: newer}


def test_passed_check_clears_failures_until_the_next(tmp_path: Path) -> None:
    """A passed check ends it, and a later failure counts again."""
    host_health.write(tmp_path, LOST)
    host_health.write(tmp_path, HostHealth(LOST.host, NOW - 60, ""))
    assert host_health.recent_failures(tmp_path, NOW) == {}
    host_health.write(tmp_path, LOST)
    assert list(host_health.recent_failures(tmp_path, NOW)) == [LOST.host]


def test_failed_burn_in_is_cleared_by_a_passed_burn_in_only(tmp_path: Path) -> None:
    burned = HostHealth("n", NOW - 600, "", burned_at=NOW - 600, burn_fault="burn-in: wrong", speeds={"disk": 1.0})
    host_health.write(tmp_path, burned)
    host_health.write(tmp_path, HostHealth("n", NOW, "", gpus=8))
    (kept,) = host_health.recent_failures(tmp_path, NOW).values()
    assert kept.describe_failure(NOW) == "10 min ago, in a check: burn-in: wrong"
    assert (kept.gpus, kept.speeds) == (8, {"disk": 1.0})
    host_health.write(tmp_path, HostHealth("n", NOW, "network: cut"))
    assert host_health.recent_failures(tmp_path, NOW)["n"].fault == "network: cut"
    host_health.write(tmp_path, HostHealth("n", NOW, "", burned_at=NOW))
    assert host_health.recent_failures(tmp_path, NOW) == {}


def test_damaged_memory_file_is_skipped(tmp_path: Path) -> None:
    """Damage is skipped."""
    host_health.write(tmp_path, LOST)
    (tmp_path / "nodes" / "n1.json").write_text("{")
    assert list(host_health.recent_failures(tmp_path, NOW)) == [LOST.host]
    assert host_health.recent_failures(tmp_path / "none", NOW) == {}


def test_failure_has_time_and_place() -> None:
    """A failure says when and where it happened."""
    assert LOST.describe_failure(NOW) == "2 h ago, in gpt-1: node_lost: no word for 8 s"
    assert HostHealth("n", NOW - 300, "cut").describe_failure(NOW) == "5 min ago, in a check: cut"
