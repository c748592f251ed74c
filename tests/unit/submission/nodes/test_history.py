"""Is a host's last check kept, replaced and forgotten, and does damage keep nothing from working?"""

from __future__ import annotations

from pathlib import Path

from orchestrator.submission.nodes import history

NOW = 1e9


def test_checks_are_kept_by_host_and_ended_by_a_passed_one(tmp_path: Path) -> None:
    history.record_checks(tmp_path, {"n1": "", "user@n2": "connect: refused"}, NOW)
    assert {host: one.why for host, one in history.failures(tmp_path, NOW + 1).items()} == {
        "user@n2": "connect: refused"
    }
    listed = [history.as_json(one) for one in history.hosts(tmp_path, NOW + 1)]
    assert [(one["host"], one["state"], one["why"]) for one in listed] == [
        ("n1", "passed its check", None),
        ("user@n2", "failed its check", "connect: refused"),
    ]
    history.record_checks(tmp_path, {"user@n2": ""}, NOW + 2)
    assert history.failures(tmp_path, NOW + 3) == {}


def test_a_forgotten_failure_does_not_count(tmp_path: Path) -> None:
    history.record_checks(tmp_path, {"n2": "connect: refused"}, NOW)
    history.forget(tmp_path, "n2", NOW + 1)
    assert history.failures(tmp_path, NOW + 2) == {}
    assert [one.name for one in history.hosts(tmp_path, NOW + 2)] == ["n2"]


def test_damage_is_passed_over(tmp_path: Path) -> None:
    history.record_checks(tmp_path, {"n2": "connect: refused"}, NOW)
    (tmp_path / "nodes" / "n1.json").write_text("{")
    (tmp_path / "jobs" / "gpt-20260101-000000000-ab").mkdir(parents=True)
    (tmp_path / "jobs" / "gpt-20260101-000000000-ab" / "journal.jsonl").write_text('"node_lost"')
    assert list(history.failures(tmp_path, NOW + 1)) == ["n2"]
    assert history.hosts(tmp_path / "none", NOW) == [] and history.failures(tmp_path / "none", NOW) == {}
