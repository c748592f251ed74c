"""Is whatever only looks like a hang left alone?"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from orchestrator.brain import decisions as d
from orchestrator.node.procfs import Proc
from tests.integration.conftest import Sight, kill

from .conftest import as_params, desk_at, selected
from .innocents import INNOCENTS, Deed, Innocent
from .runs import Runs

pytestmark = pytest.mark.integration

SIDE_BY_SIDE = 4

END_S_MAX = 180.0
"""What a job may take more than on a quiet machine."""

STOPPED_S = 15.0


def stop_its_supervisor() -> Callable[[Sight], None]:
    """Return what stops a job's supervisor for a while once the ranks are warm."""
    stopped: list[tuple[Proc, float]] = []

    def tend(job: Sight) -> None:
        if not stopped and (job.seen()["step"] or 0) > 100:
            stopped.append((job.supervisor(), time.monotonic() + STOPPED_S))
            kill(stopped[0][0], signal.SIGSTOP)
        if stopped and time.monotonic() > stopped[0][1]:
            kill(stopped[0][0], signal.SIGCONT)

    return tend


DEEDS = {Deed.STOP_SUPERVISOR: stop_its_supervisor}


@pytest.fixture(scope="module")
def gallery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Give the jobs of all innocents that are to be tested."""
    tend = {one.name: DEEDS[one.deed]() for one in INNOCENTS if one.deed in DEEDS}
    with desk_at(tmp_path_factory.mktemp("innocents")) as desk:
        entries = selected(request, INNOCENTS)
        yield Runs(desk, entries, SIDE_BY_SIDE, lambda one: one.lasts_s + END_S_MAX, tend)


@pytest.mark.parametrize("entry", as_params(INNOCENTS))
def test_an_innocent_is_never_killed(gallery: Runs, entry: Innocent) -> None:
    job = gallery.result(entry.name)
    said = [one.verdict for one in job.news(d.Judge, d.Notice)]
    looks = len(job.news(d.Look))
    print(f"{entry.name}: {looks} looks")
    assert not said, said
    assert (job.seen()["state"], job.kinds()) == ("SUCCEEDED", [None])
