"""Control groups around this process (cgroups(7), both versions)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.core.host.procfs import text


def folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of this process's cgroup and those above it, each with whether it is of version 2.

    Version 2 has one line `0::PATH` in /proc/self/cgroup, version 1 a line for each hierarchy with its controllers; there
    only that of `controller` counts. `root` has /proc and /sys.
    """
    for line in text(root / "proc/self/cgroup").splitlines():
        words = line.split(":", 2)
        if len(words) < 3:
            continue
        controllers, path = words[1:]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = Path(path.lstrip("/"))
        yield from ((base / folder, not controllers) for folder in (inner, *inner.parents))
