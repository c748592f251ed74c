"""Do agents and whoever started a supervisor find it, also when it came up on a full disk?"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from orchestrator import orders
from orchestrator.backends.local import LocalBackend
from orchestrator.deeds import Deeds
from orchestrator.ferry import Ferry
from orchestrator.links import Links
from orchestrator.wire.paths import JobDir
from tests.support import jobs

OLD, NEW = "127.0.0.1:4000", "127.0.0.1:4001"


def _deeds(job: JobDir) -> Deeds:
    plan, backend = jobs.plan(), LocalBackend(job)
    links, ferry = Links(plan.id, "token", ()), Ferry(job, plan, None, lambda: "")
    return Deeds(job, plan, orders.Private("token", "", {}, {}), backend, links, ferry)


def _refuse(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_an_old_word_that_still_holds_is_renewed_and_another_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = JobDir(tmp_path)
    job.endpoint.write_text(OLD)
    os.utime(job.endpoint, (1.0, 1.0))
    deeds = _deeds(job)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _refuse)
        deeds.endpoint = OLD
        deeds.say_where()
        assert job.endpoint.stat().st_mtime > 1.0 and job.endpoint.read_text() == OLD
        deeds.endpoint = NEW
        deeds.say_where()
        deeds.go_on(tuple, 1.0)
        assert job.endpoint.read_text() == OLD
    deeds.go_on(tuple, 2.0)
    assert job.endpoint.read_text() == NEW
    deeds.close()
