"""Step that a checkpoint states of itself: in the state file of transformers' Trainer, else in its name.

A number in a name is taken for the step only after a word that says so, as in Lightning's `epoch=3-step=1200.ckpt`,
`step-20.pt` or DeepSpeed's `global_step500`; that of `checkpoint-3` may be an epoch, or the number of the save. No
checkpoint is unpickled.
"""

from __future__ import annotations

import re
from pathlib import Path

TRAINER_STATE = "trainer_state.json"
HEAD_BYTES = 16_384
"""The keys of the state file are in alphabetical order, and its long part is the log history."""

_GLOBAL_STEP = re.compile(rb'"global_step"\s*:\s*(\d{1,15})\b')
_NAMED = re.compile(
    r"(?:(?<![a-z])|global[-_]?)(?:step|iter|iteration)s?[-_=]?(\d{1,15})(?![\d.]*[a-z])", re.IGNORECASE
)


def stated_step(path: Path) -> int | None:
    """Return the step that the checkpoint at `path` states, None where it states none."""
    try:
        state = path / TRAINER_STATE
        if state.is_file():  # the open of a pipe would wait for its writer
            with state.open("rb") as file:
                match = _GLOBAL_STEP.search(file.read(HEAD_BYTES))
            if match is not None:
                return int(match[1])
    except OSError:
        pass  # another kind of checkpoint
    name = path.name if path.is_dir() else path.stem
    numbers = _NAMED.findall(name)
    return int(numbers[-1]) if numbers else None
