"""Gangs that orch has not started: what the hook records of them, and when they end the attempt.

1. Below the ranks of a node: each of its several ranks calls a launcher, or two processes with the same numbers train below all
   of them. So they are copies that never meet. One rank a node may start processes as it likes.
2. In the script of a node, before its first launcher call: a process is one of a group of several, or trains. It is no rank,
   so it is not watched, and other nodes train copies.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from orchestrator.agent.ranks.hook.launch import GANGS_FILE, LAUNCHES, TRAINS
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import ownership
from orchestrator.core.observations import LINE_CHARS_MAX

GangNote = tuple[str, str, str]
"""Folder of a rank (empty: of the script), what is noted, and the line of the program."""


def read_notes(folder: Path) -> list[GangNote]:
    """Return what the hook has noted in a folder; nothing while a line is incomplete."""
    try:
        lines = map(json.loads, ownership.read_regular(folder / GANGS_FILE).splitlines())
        return [(str(one["rank"]), str(one["what"]), _command_line(one["words"])) for one in lines]
    except (OSError, ValueError, TypeError, LookupError):
        return []


def _command_line(words: Sequence[str]) -> str:
    return shlex.join(words)[:LINE_CHARS_MAX] if words[0] not in ("", "-", "-c") else "FILE.py"


def diagnose_ranks(folder: Path, ranks: int, first_pid: int) -> tuple[str, str] | None:
    """Return why the ranks of a node are copies of one training, and the fix; None where they are not.

    `folder` is that of their attempt, and `first_pid` one of them.
    """
    notes = read_notes(folder)
    notes_by_rank = {rank: {what for of, what, _ in notes if of == rank} for rank, _, _ in notes}
    shared = set.intersection(*notes_by_rank.values()) if len(notes_by_rank) == ranks > 1 else set()
    if LAUNCHES in shared:
        argv = procfs.read_text(Path(f"/proc/{first_pid}/cmdline")).split("\0")[:-1]
        line = argv[-1] if argv[1:2] == ["-c"] else shlex.join(("python", *argv[1:]))
        return (
            f"each rank starts {LAUNCHES}: write launch: {line}",
            "each node then runs the line once, and orch starts the ranks where it calls the launcher",
        )
    if len(shared) < 2:
        return None
    return (
        f"each rank has started a gang of its own, {' and '.join(sorted(shared)[:2])}: write procs_per_node: 1",
        "the script starts its processes itself, so one rank on each node is enough (without gpus_per_node, all GPUs are seen)",
    )


def diagnose_script(folder: Path) -> tuple[str, str] | None:
    """Return why the script of a node, which has called no launcher, trains without orch, and the fix; None where it does not."""
    for _, what, program in read_notes(folder)[:1]:
        how = "trains without a launcher" if what == TRAINS else f"is {what} in a gang that orch has not started"
        field = "entrypoint" if ".py" in program or program.startswith("-m ") else "command"
        return f"{program} {how}: write {field}: {program}", (
            "orch then starts each rank; for a program that starts its processes itself (torch.multiprocessing.spawn) write "
            "procs_per_node: 1, too; what has to train before a launcher is called belongs in setup:"
        )
    return None
