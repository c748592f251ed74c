"""Are the hosts of checks and jobs listed, each as it was last seen?"""

from __future__ import annotations

from pathlib import Path

from orchestrator.client.checks import seen_hosts
from orchestrator.core.host import host_health
from orchestrator.core.host.host_health import HostHealth

NOW = 1e9


def test_hosts_are_listed_with_counting_failures(tmp_path: Path) -> None:
    for note in (
        HostHealth("n1", NOW, ""),
        HostHealth("user@n2", NOW, "connect: refused"),
        HostHealth("n3", NOW, "gone", "gpt-1"),
    ):
        host_health.write(tmp_path, note)
    listed = [one.as_json() for one in seen_hosts.list_hosts(tmp_path, NOW + 1)]
    assert [(one["host"], one["state"], one["job"], one["failed_job"], one["why"]) for one in listed] == [
        ("n1", "passed its check", None, None, None),
        ("n3", "was lost", "gpt-1", "gpt-1", "gone"),
        ("user@n2", "failed its check", None, None, "connect: refused"),
    ]


def test_damaged_host_file_is_skipped(tmp_path: Path) -> None:
    """Damage is skipped."""
    (tmp_path / "jobs" / "gpt-20260101-000000000-ab").mkdir(parents=True)
    assert seen_hosts.list_hosts(tmp_path, NOW) == [] and seen_hosts.list_hosts(tmp_path / "none", NOW) == []
