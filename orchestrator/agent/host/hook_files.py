"""Files of the hook in a node's folder."""

from __future__ import annotations

import functools
import pkgutil
from pathlib import Path

from orchestrator.core.jobdir import full_disk, ownership
from orchestrator.core.jobdir.durable import replace_bytes

HOOK_FILES = (
    "sitecustomize.py",
    *(
        f"_orch_hook/{name}.py"
        for name in (
            "__init__",
            "arm",
            "errors",
            "files",
            "graphs",
            "groups",
            "launch",
            "layout",
            "own_code",
            "saves",
            "steps",
            "tensors",
            "worker_server",
        )
    ),
)
"""The hook as it lies in a node's folder; all but the first are a package, so that programs see one name of it."""


def install_hook(node_folder: Path) -> None:
    """Install the hook in the node's folder. An unchanged hook is not written again: the disk may be full by now."""
    for name in HOOK_FILES:
        source = pkgutil.get_data("orchestrator.agent.ranks.hook", Path(name).name)
        assert source is not None
        file = node_folder / "hook" / name
        file.parent.mkdir(exist_ok=True)
        if not file.exists() or ownership.read_regular(file) != source:
            full_disk.retry_while_full(functools.partial(replace_bytes, file, source, durable=False))
