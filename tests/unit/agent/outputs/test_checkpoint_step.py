"""The step that a checkpoint states of itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.agent.outputs.checkpoint_step import stated_step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=1200.ckpt", 1200),
        ("epoch=3-step=1200-v1.ckpt", 1200),
        ("step-20.pt", 20),
        ("step_000500.pt", 500),
        ("global_step500", 500),
        ("model-iter-70.pth", 70),
        ("iter_0000100", 100),
        ("checkpoint-500", None),
        ("checkpoint-3.pt", None),
        ("epoch_7.pt", None),
        ("last.pt", None),
        ("timestep3.pt", None),
        ("steps.pt", None),
    ],
)
def test_only_a_word_for_steps_makes_a_number_the_step(tmp_path: Path, name: str, step: int | None) -> None:
    assert stated_step(tmp_path / name) == step


def test_the_state_of_transformers_trainer_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    state = {"epoch": 1.5, "global_step": 500, "log_history": [{"step": 10, "global_step": 3}] * 9}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True))
    assert stated_step(folder) == 500


def test_a_damaged_state_states_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "trainer_state.json").write_bytes(b"\xff\x00{")
    assert stated_step(folder) is None
    (folder / "trainer_state.json").unlink()
    os.mkfifo(folder / "trainer_state.json")
    assert stated_step(folder) is None
