"""A script that continues after its training is no hang: the status says that the ranks have ended."""

from __future__ import annotations

import time

import pytest

from tests.support.local import Desk

pytestmark = pytest.mark.slow

STATUS_S_MAX = 30.0


def test_script_running_after_its_ranks_is_no_suspicion(desk: Desk) -> None:
    """A script that continues after its ranks is reported without a suspicion."""
    job = desk.submit(
        {"words.py": "print('done')\n"}, entrypoint=None, nodes=1, procs_per_node=2,
        launch="sleep 12 &\ntorchrun --nproc_per_node 2 words.py\nwait",
    )  # fmt: skip
    told, until_s = set[tuple[str, str | None]](), time.monotonic() + STATUS_S_MAX
    while (status := job.job.status())["state"] not in ("SUCCEEDED", "FAILED") and time.monotonic() < until_s:
        told.add((status["reason"], status["suspicion"]))
        time.sleep(0.2)
    assert status["state"] == "SUCCEEDED"
    assert ("all ranks have ended with code 0; the script continues on node-0", None) in told
    assert {suspicion for _, suspicion in told} == {None}
