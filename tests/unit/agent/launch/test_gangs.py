"""Ranks that are copies of one training, and those that are not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.agent.launch import gangs
from orchestrator.agent.ranks.hook.launch import GANGS_FILE, LAUNCHES


def _below(folder: Path, *of_ranks: list[str]) -> tuple[str, str] | None:
    notes = [
        {"rank": f"rank-{rank:05}", "what": what, "words": ["t.py"]} for rank, of in enumerate(of_ranks) for what in of
    ]
    (folder / GANGS_FILE).write_text("".join(f"{json.dumps(note)}\n" for note in notes))
    return gangs.diagnose_ranks(folder, len(of_ranks), os.getpid())


def test_launchers_started_by_several_ranks_are_copies(tmp_path: Path) -> None:
    launched = _below(tmp_path, [LAUNCHES], [LAUNCHES, "rank 0 of 2"])
    assert launched is not None and "write launch: python " in launched[0] and "pytest" in launched[0]
    spawned = _below(tmp_path, ["rank 0 of 2", "rank 1 of 2"], ["rank 1 of 2", "rank 0 of 2"])
    assert spawned is not None and "write procs_per_node: 1" in spawned[0]


@pytest.mark.parametrize(
    "of_ranks",
    [
        [[LAUNCHES, "rank 0 of 2", "rank 1 of 2"]],  # the only rank of its node
        [["rank 0 of 2"], ["rank 1 of 2"]],
        [[LAUNCHES], []],  # the first rank alone, as for an evaluation
        [["rank 0 of 1"], ["rank 0 of 1"]],  # not noted by the hook, either
        [
            ["rank 0 of 4", "rank 1 of 4"],
            ["rank 2 of 4", "rank 3 of 4"],
        ],  # each has two processes of one gang
    ],
)
def test_other_ranks_continue_training(of_ranks: list[list[str]], tmp_path: Path) -> None:
    assert _below(tmp_path, *of_ranks) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', '{"rank": "", "what": "x", "words": []}\n{"ra', "\xff"])
def test_unreadable_notes_are_ignored(text: str, tmp_path: Path) -> None:
    """Notes that cannot be read are ignored."""
    (tmp_path / GANGS_FILE).write_text(text, encoding="latin-1")
    assert gangs.read_notes(tmp_path) == []
