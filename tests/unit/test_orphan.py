"""Does a job whose batch script is lost with its node go back into the queue, and no other?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.node.orphan import AGAIN_S, ALONE_S, TURN_S, Orphan, is_orphaned
from tests.unit import hosts

SHOWN = {"JobState": "RUNNING", "Restarts": "1", "BatchHost": "node1", "NodeList": "node[2-3]"}
ENVIRON = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1", "SLURM_NODEID": "1"}


def test_only_a_stay_without_its_batch_host_is_orphaned() -> None:
    assert is_orphaned(SHOWN, "1")
    assert not is_orphaned({**SHOWN, "NodeList": "node[1-3]"}, "1")
    assert not is_orphaned(SHOWN, "0"), "another stay: this one is over already"
    assert not is_orphaned({**SHOWN, "JobState": "COMPLETING"}, "1")
    assert not is_orphaned({**SHOWN, "NodeList": "(null)"}, "1") and not is_orphaned({}, "1")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an scontrol first in PATH that writes down what it is asked."""
    shown = " ".join(f"{name}={value}" for name, value in SHOWN.items())
    hosts.program(
        tmp_path / "bin", "scontrol", f"#!/bin/sh\necho \"$@\" >>{tmp_path}/asked\necho '{shown}'\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "asked"


def test_an_agent_without_contact_asks_in_its_turn_and_requeues_once(asked: Path) -> None:
    notes: list[str] = []
    orphan = Orphan(ENVIRON, notes.append)
    orphan.look(ALONE_S + TURN_S - 0.1)
    orphan.look(0.0)
    orphan.look(ALONE_S + TURN_S)
    hosts.wait_for(lambda: notes, "the note")
    orphan.look(ALONE_S + TURN_S + AGAIN_S - 0.1)
    assert asked.read_text().splitlines() == ["--oneliner show job 8", "requeue 8"]
    assert notes == ["node1 is lost, and the supervisor with it: Slurm job 8 is requeued"]
