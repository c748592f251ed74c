"""What was every rank of this node doing? Stacks asked of all of them at once, then written to the evidence folder."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.node import stacks
from orchestrator.node.ranks import STACK_SIGNAL, NodeRanks
from orchestrator.wire.durable import replace_text
from orchestrator.wire.paths import rank_name

STACKS_S_MAX = 2.0
"""How long the ranks of a node may take to answer; whoever has not by then is described from /proc."""

_FRAME = re.compile(r'File "(.+?)", line (\d+) in (.+)')


@dataclass(slots=True)
class Asking:
    """Stacks that were asked for, and until when they are waited for (monotonic seconds)."""

    attempt: int
    asked: dict[int, stacks.Asked]
    due_s: float


def begin(ranks: NodeRanks) -> Asking:
    """Ask all living ranks for their stacks."""
    asked = {p.rank: stacks.ask(p.pid, p.folder, int(STACK_SIGNAL)) for p in ranks.alive}
    return Asking(ranks.attempt, asked, time.monotonic() + STACKS_S_MAX)


def gather(asking: Asking, folder: Path) -> tuple[str, ...] | None:
    """Write the answers into `folder` and return a line for each rank; None while some are still to come."""
    answers: dict[int, list[stacks.RankStack]] = {}
    for rank, asked in asking.asked.items():
        found = stacks.answer(asked)
        if found is None:
            if time.monotonic() < asking.due_s:
                return None
            found = stacks.last_answer(asked)
        answers[rank] = found
    with contextlib.suppress(OSError):  # a full disk costs the pages, not their summary
        folder.mkdir(parents=True, exist_ok=True)
        for rank, found in answers.items():
            replace_text(folder / f"{rank_name(rank)}-stacks.txt", _page(found))
    return tuple(_line(rank, found) for rank, found in answers.items())


def _page(found: list[stacks.RankStack]) -> str:
    heads = (
        f"pid {one.pid}  state {one.state}  sleeps in {one.wchan or 'nothing'}\n{one.text}" for one in found
    )
    return "\n\n".join(heads) + "\n"


def _line(rank: int, found: list[stacks.RankStack]) -> str:
    """Say in one line where a rank's first process is: the innermost frame of its main thread, and its caller."""
    if not found:
        return f"rank {rank}: gone"
    first = found[0]
    main = first.text.rpartition("Current thread")[2] if "Current thread" in first.text else first.text
    frames = _FRAME.findall(main)
    if not frames:
        return (
            f"rank {rank} (pid {first.pid}, state {first.state}): {first.text.strip().splitlines()[0][:200]}"
        )
    shown = " < ".join(f"{name} {Path(file).name}:{row}" for file, row, name in frames[:3])
    return f"rank {rank} (pid {first.pid}, state {first.state}): {shown}"
