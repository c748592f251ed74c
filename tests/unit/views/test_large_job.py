"""Is the status of a large job short, and is nothing that differs hidden in it?"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.views import cells
from orchestrator.views import status as status_view
from tests.support import golden, jobs


def test_large_job_counts_ranks_and_nodes_by_state() -> None:
    """Ranks and nodes of a large job are counted by their state unless all are requested."""
    one = jobs.status([*jobs.submitted(), *jobs.running(1, 1.0, 20)])
    ranks = [replace(one.ranks[0], rank=rank, step=20 + rank % 2) for rank in range(1000)]
    ranks[7] = replace(ranks[7], state="exited", exit=-9, steps_per_s=None, beat_s=None)
    nodes = [replace(one.nodes[0], name=f"n{node}", ranks=[node], seen_s=1.0 + node / 100) for node in range(100)]
    nodes[5] = replace(nodes[5], state="silent")
    many = replace(one, nodes=tuple(nodes), ranks=tuple(ranks))
    golden.check("status-large.txt", cells.plain_text(status_view.job(many)))
    every = cells.plain_text(status_view.job(many, every_rank=True))
    assert len(every.splitlines()) > 1100 and "--ranks" not in every
