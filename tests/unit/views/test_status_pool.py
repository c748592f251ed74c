"""Does the status of a job over SSH say which hosts it uses, and why it does not use the others?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.status_file import NodeStatus, RankStatus, Status, TrackerRun, TransferStatus
from orchestrator.core.text import ranks_text
from orchestrator.views import cells, status, tables
from tests.support import golden, jobs


def _host(name: str, state: str, role: str, ranks: tuple[int, ...] = (), note: str = "", fix: str = "") -> NodeStatus:
    seen_s = 0.8 if state in ("up", "silent") else None
    return NodeStatus(name, name, state, seen_s, role, list(ranks), note, fix)


def _rank(rank: int, node: str) -> RankStatus:
    return RankStatus(rank, rank % 2, node, 5000 + rank, "running", 20, 2.5, 0.8, None, None)


def _status(nodes: Sequence[NodeStatus], **fields: Any) -> Status:
    known = status_file.status_from_plan(jobs.plan(), "RUNNING", "", jobs.BEGAN_S)
    of_pool = replace(
        known,
        backend="ssh",
        attempt=2,
        restarts=1,
        step=20,
        steps_per_s=2.5,
        nodes=tuple(nodes),
        dir=jobs.ROOT,
    )
    return replace(of_pool, **fields)


KEY = "host key: its ED25519 key SHA256:abc is not in known_hosts"
HOSTS = [
    _host("gpu01.lab", "up", "placed", (0, 1)),
    _host("gpu02.lab", "excluded", "idle", note=KEY),
    _host("gpu03.lab", "silent", "placed", (2, 3)),
    _host("gpu04.lab", "up", "spare"),
    _host("gpu05.lab", "busy", "idle", note="8 GPUs of job llama-20261120-224605123-k3 (ada)"),
    _host("gpu06.lab", "launching", "spare"),
    *(_host(f"gpu{number:02d}.lab", "absent", "idle") for number in range(7, 13)),
]
QUEUED = [
    _host("gpu01.lab", "busy", "idle", note="8 GPUs of job llama (ada)"),
    _host("gpu02.lab", "absent", "idle"),
]
POOLS = {
    "running": _status(HOSTS, ranks=(_rank(0, "gpu01.lab"), _rank(2, "gpu03.lab"))),
    "queued": _status(QUEUED, state="QUEUED", step=None, steps_per_s=None, reason="waiting for gpu01.lab (busy)"),
    "succeeded": _status(HOSTS[:1], state="SUCCEEDED", reason="every rank exited with code 0"),
}


@pytest.mark.parametrize("name", POOLS)
def test_pool_status_matches_golden_file(name: str) -> None:
    """The status of a pool is the one that was reviewed."""
    golden.check(f"pool-{name}.txt", cells.plain_text(status.job(POOLS[name])))


def test_notable_host_is_never_hidden() -> None:
    """A host of which there is something to say is never hidden."""
    text = cells.plain_text(status.job(POOLS["running"]))
    assert all(host.name in text for host in HOSTS[:6]) and KEY in text
    assert "gpu12.lab" not in text and "6 hosts on standby: gpu07.lab" in text


def test_very_many_hosts_are_counted_unless_requested() -> None:
    many = [_host(f"h{number}", "up", "placed", (number,)) for number in range(100)]
    text = cells.plain_text(status.job(_status(many)))
    assert "100    running  0-99" in text and "h64" not in text
    assert "h64" in cells.plain_text(status.job(_status(many), every_rank=True))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [((), ""), ((7,), "7"), (range(4), "0-3"), ((0, 1, 4, 6, 7, 8), "0-1,4,6-8"), ((5, 3, 3, 1), "1,3,5")],
)
def test_consecutive_ranks_are_shown_as_range(numbers: tuple[int, ...], said: str) -> None:
    assert ranks_text(numbers) == said


SHORT, MEND = "lease: 2 GPUs wanted, the host has 1", "lower gpus_per_node"


def test_equal_host_problems_are_shown_once_in_full() -> None:
    """The same problem of several hosts is shown once and in full."""
    hosts = [_host(f"n{number}", "excluded", "idle", note=SHORT, fix=MEND) for number in range(6)]
    why = f"launch: 2 hosts are needed, and 0 of 6 can be used; n0: {SHORT}; fix: {MEND}"
    lines = cells.plain_text(status.job(_status(hosts, state="FAILED", reason=why))).splitlines()
    assert "launch: 2 hosts are needed, and 0 of 6 can be used" in lines
    assert lines[-2:] == [
        "n0, n1, n2, n3 and 2 more: lease: 2 GPUs wanted, the host has 1",
        "  fix: lower gpus_per_node",
    ]


def test_queued_job_names_awaited_job_once() -> None:
    nodes = [_host("n0", "busy", "idle", note="busy: 2 slots wanted; slots 0-1 held by job a of ada, pid 7")]
    why = "waiting for n0 (2 slots wanted; slots 0-1 held by job a of ada, pid 7)"
    text = cells.plain_text(status.job(_status(nodes, state="QUEUED", reason=why)))
    assert "\nwaiting for n0\n" in text and text.count("held by job a of ada, pid 7") == 1


@pytest.mark.parametrize(
    ("state", "note", "seen_s", "said"),
    [
        ("absent", "connect: refused", None, "failed"),
        ("absent", "no word for 11 s", 30.0, "lost"),
        ("busy", "busy: 2 slots wanted", None, "busy"),
        ("up", "", 0.4, "ready"),
    ],
)
def test_host_has_its_own_name_before_choice(state: str, note: str, seen_s: float | None, said: str) -> None:
    """A host is called by its own name before any is chosen."""
    node = replace(_host("n0", state, "spare" if state == "up" else "idle", note=note), seen_s=seen_s)
    text = cells.plain_text(status.job(_status([node, _host("n1", "launching", "idle")], state="STARTING")))
    assert f"\nn0    {said} " in text


def test_ranks_without_host_are_not_listed() -> None:
    ranks = (replace(_rank(0, ""), pid=None),)
    text = cells.plain_text(status.job(_status(HOSTS[6:], state="STARTING", ranks=ranks)))
    assert "RANK" not in text and "on none of 6 hosts" in text and "6 hosts on standby: gpu07.lab" in text


def test_copy_is_shown_with_progress() -> None:
    one = TransferStatus("step-20.pt", "gpu01.lab", "fetch", 40_000_000, 8_000_000)
    other = replace(one, direction="send", node="gpu03.lab", done_bytes=None)
    text = cells.plain_text(status.job(_status(HOSTS, travels=(one, other))))
    assert "copying     step-20.pt from gpu01.lab, 8.0 MB of 40.0 MB\n" in text
    assert "copying     step-20.pt to gpu03.lab, 40.0 MB\n" in text
    assert "copying" not in cells.plain_text(status.job(_status(HOSTS, state="FAILED", travels=(one,))))


@pytest.mark.parametrize(("reason", "shown"), [("", "waiting  a\n"), ("busy: b", "waiting  a: busy: b\n")])
def test_waiting_job_is_listed_with_reason_if_any(reason: str, shown: str) -> None:
    assert cells.plain_text(tables.waiting_lines([_status((), id="a", state="QUEUED", reason=reason)])) == shown


def test_tracker_runs_are_counted_and_last_is_named() -> None:
    runs = tuple(TrackerRun("wandb", f"/job/code/wandb/offline-run-{number}") for number in (1, 2, 3))
    text = cells.plain_text(status.job(_status(HOSTS, dir="/job", trackers=runs)))
    assert "wandb       3 runs, the last wandb/offline-run-3\n" in text
    text = cells.plain_text(status.job(_status(HOSTS, dir="/job", trackers=runs[:1])))
    assert "wandb       wandb/offline-run-1\n" in text
