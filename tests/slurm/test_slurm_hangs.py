"""Is a hang on a real Slurm found, explained and told of as elsewhere? The supervisor lives inside the allocation."""

from __future__ import annotations

import json

from tests.support.cluster import hanging
from tests.support.cluster.desk import Desk
from tests.support.cluster.host import TRAINER
from tests.support.cluster.slurm_jobs import allocations


def test_hang_is_explained_and_restarted_in_the_allocation(desk: Desk) -> None:
    """A hang is explained, notified from the allocation and answered in it."""
    told = f"{TRAINER.home}/desk/told.jsonl"  # on all hosts
    command = f"(hostname; cat; echo) >> {told}"
    job = hanging.reading_a_fifo(desk, notify={"command": command, "on": ["hang", "restart"]})
    hanging.assert_stacks_tell_and_change_nothing(job)
    hanging.assert_judged_and_mended(job)
    assert len(allocations(job)) == 1
    lines = desk.box.login.path(told).read_text().splitlines()
    assert lines[::2] == ["node1", "node1"], "the supervisor is on the first node"
    notes = [json.loads(line) for line in lines[1::2]]
    assert [(note["event"], note["attempt"]) for note in notes] == [("hang", 1), ("restart", 2)]
    assert notes[0]["verdict"]["ranks"] == [1] and hanging.LINE in notes[0]["text"], notes
