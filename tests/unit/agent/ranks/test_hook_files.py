"""Which files the hook takes for ones of a checkpoint, by their names."""

from __future__ import annotations

import pytest

from orchestrator.agent.ranks.hook.files import ENDINGS, may_be_checkpoint
from orchestrator.core.checkpoints import file_groups


def test_hook_knows_every_checkpoint_suffix() -> None:
    assert {suffix.removeprefix(".") for suffix in file_groups.SUFFIXES} <= ENDINGS


@pytest.mark.parametrize(
    ("name", "may_be"),
    [
        ("a.pt", True), ("/x/A.PT", True), ("out/ckpt_0.50", True), ("checkpoint-500", True), ("snapshot", True), (".metadata", True),
        ("train.py", False), ("epoch.json", False), ("loss.csv", False), ("README", False), ("step_5/log.txt", False),
    ],
)  # fmt: skip
def test_file_is_noted_by_suffix_or_name(name: str, may_be: bool) -> None:
    assert may_be_checkpoint(name) == may_be
