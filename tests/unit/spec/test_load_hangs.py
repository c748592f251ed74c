"""What may a job file say of hangs, and of whom to tell?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.jobdir.plan import PlannedNotify
from tests.support import jobs
from tests.unit.spec.test_load import HEAD, fault, folder, loaded

__all__ = ["folder"]


def test_plan_knows_hang_timeout_auto_or_set(folder: Path) -> None:
    """hang_timeout is auto or the user's time, and the plan knows which."""
    assert jobs.plan().limits.hang_timeout_s == 0.0
    assert jobs.plan(monitor={"hang_timeout": "10m"}).limits.hang_timeout_s == 600.0
    assert jobs.plan(monitor={"hang_timeout": "off"}).limits.hang_timeout_s is None
    assert loaded(folder, f"{HEAD}monitor: {{hang_timeout: auto}}\n").spec.monitor.hang_timeout == "auto"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hang_patience: 60s", "hang_patience: was removed; write monitor.hang_timeout: 60s, or"),
        ("hang_ceiling: 20m", "hang_ceiling: was removed; write monitor.hang_timeout: 20m"),
        ("hang_floor: 10s", "hang_floor: was removed; remove it"),
    ],
)
def test_removed_field_names_its_replacement(folder: Path, text: str, said: str) -> None:
    """A field that was removed says what to write."""
    assert fault(folder, f"{HEAD}monitor: {{{text}}}\n").startswith(f"job.yaml:3: monitor.{said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{url: hooks.example.com}", "notify.url: must be a URL such as https://…, not hooks.example.com"),
        ("{url: 'https://me:hunter2@hooks.example.com/x'}", "notify.url: contains a user or password, which orch does not send; use a command: notify.command: curl -u \"$HOOK\" -d @- URL, with HOOK in secrets"),
        ("{url: 'https://hooks.example.com:port/x'}", "notify.url: has no host, or a port that is not a number"),
        ("{url: 'https://[::1/x'}", "notify.url: has no host, or a port that is not a number"),
        ("{on: [hangs]}", "notify.on[0]: must be suspect, hang, notice, withdrawn, verdict, restart, failed, succeeded or cancelled, not hangs; did you mean hang?"),
        ("{command: []}", "notify.command: must be a shell command, as a text or a list of words, not a list"),
    ],
)  # fmt: skip
def test_notification_target_is_checked(folder: Path, text: str, said: str) -> None:
    assert fault(folder, f"{HEAD}notify: {text}\n").endswith(said)


def test_command_and_webhook_select_their_events() -> None:
    """A command and a webhook can be notified of what the user chooses."""
    told = jobs.plan(notify={"command": "mail -s orch me", "on": "hang"}).notify
    assert told == PlannedNotify(("sh", "-c", "mail -s orch me"), None, ("hang",))
    both = jobs.plan(notify={"command": ["tell", "me"], "url": "https://hooks.example.com/x?y=1"}).notify
    assert both == PlannedNotify(
        ("tell", "me"), "https://hooks.example.com/***", ("hang", "notice", "withdrawn", "failed")
    )
    assert jobs.plan(notify={"on": ["hang"]}).notify is None
