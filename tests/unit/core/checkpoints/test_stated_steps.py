"""The step that a state names: at its top, or in a dict or an object of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.saved_files import Model, Tensor, adam, torch_save
from tests.unit.core.checkpoints.test_formats import put


@dataclass
class Run:
    """The state of a loop, as scripts keep it."""

    step: int
    epoch: int


LIGHTNING = {
    "epoch": 1,
    "global_step": 40,
    "pytorch-lightning_version": "2.6",
    "loops": {"current": {"step": 3}},
}


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({"iter_num": 4000, "model": Model(), "optimizer": adam(9)}, 4000),
        ({"optimizer": adam(9), "model": Model(), "iteration": 70}, 70),
        (LIGHTNING, 40),
        ({"step": 5, "global_step": 6}, 6),
        ({"step": 0}, 0),
        ({"step": 10**15}, None),
        ({"step": 2**80}, None),
        ({"step": -1}, None),
        ({"step": "5"}, None),
        ({"step": Tensor()}, None),
        ({"epoch": 7, "optimizer": adam(9)}, None),
        ({"cfg": {}, "optimizer_history": [{"name": "Adam", "num_updates": 9}]}, 9),
        ({"model": Model(), "trainer": OrderedDict(epoch_length=31, iteration=70, max_epochs=8)}, 70),
        ({"model": Model(), "state": {"epoch": 3, "step": 70}, "loader": {"step": 8, "epoch": 3}}, 70),
        ({"model": Model(), "run": Run(step=70, epoch=3)}, 70),
        ({"args": {"seed": 1, "step": 9}, "model": Model()}, None),
        (Model("step"), None),
    ],
)
def test_step_of_state_is_at_top_level(tmp_path: Path, state: dict[str, Any], step: int | None) -> None:
    assert put(tmp_path, "a.pt", torch_save(state)).step == step
