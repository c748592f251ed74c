"""Variables that stand before a launch line (`CUDA_VISIBLE_DEVICES=0,1 torchrun …`), or are exported in a script before it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from orchestrator.spec.launchers.launch_line import DEVICE, RANKS_EACH, Dropped, Setting

OWNED_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Variables that orch must set itself, or ranks would not find each other (the torchrun contract)."""

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_GPUS = "CUDA_VISIBLE_DEVICES"


def is_orchs(name: str) -> bool:
    """Tell whether a variable has no place in a job's environment, since orch gives ranks their own or chooses the GPUs."""
    return name in OWNED_NAMES or name == _GPUS or name.startswith(("ORCH_", "PET_", "TORCHELASTIC_"))


def of_variables(variables: Iterable[tuple[str, str]]) -> tuple[list[Setting], list[Dropped]]:
    """Return the settings of variables and those not needed."""
    settings, dropped = [], []
    for name, value in variables:
        text = f"{name}={value}"
        if name == _GPUS:
            settings += _gpus(value, text)
            dropped.append(
                Dropped(text, f"orch takes free GPUs; to choose them, set {_GPUS} where you call orch")
            )
        elif is_orchs(name):
            dropped.append(Dropped(text, f"orch gives {name} its value on every rank"))
        else:
            settings.append(Setting(f"env.{name}", value, text))
    return settings, dropped


def _gpus(value: str, text: str) -> list[Setting]:
    """Return how many GPUs a choice of GPUs is; an empty one, or -1, means CPU ranks."""
    words = [word for word in value.split(",") if word.strip()]
    if not words or words[0] == "-1":
        return [Setting(DEVICE, "cpu", text)]
    return [Setting(RANKS_EACH, str(len(words)), text, yields=True), Setting(DEVICE, "gpu", text)]
