"""Is whatever only looks like a hang left alone?"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.core.host.procfs import Proc
from orchestrator.core.wire import orders
from tests.support.local import Sight, desk_at, kill

from .conftest import as_params, selected
from .innocents import INNOCENTS, Deed, Innocent
from .innocents_busy import BUSY
from .innocents_waits import WAITS
from .runs import Runs, side_by_side
from .unlike import UNLIKE

ALL = (*INNOCENTS, *BUSY, *UNLIKE, *WAITS)
SIDE_BY_SIDE = side_by_side(4)

END_S_MAX = 180.0
"""What a job may take more than on a quiet machine."""

STOPPED_S = 15.0
CC_S_MAX = 60.0


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


BACK = "CLOCK_BACK"
"""Names the file that sets the clock back; see `clock.c`."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock that `back`, once it is there, sets back by an hour for all processes that `python` begins."""

    python: Path
    back: Path

    def set_back(self, job: Sight) -> None:
        """Do so once the ranks are warm."""
        if not self.back.exists() and (job.seen()["step"] or 0) > 100:
            see = [BACK.encode() in Path(f"/proc/{proc.pid}/environ").read_bytes() for proc in job.processes()]
            assert len(see) >= 7 and all(see), "supervisor, two agents and four ranks, none with the true clock"
            self.back.touch()


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    """Give a clock that can be set back."""
    if shutil.which("cc") is None:
        pytest.skip("a clock that can be set back needs cc: apt install gcc libc6-dev")
    folder = tmp_path_factory.mktemp("clock")
    library, python, back = folder / "clock.so", folder / "python", folder / "back"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=CC_S_MAX)
    python.write_text(f'#!/bin/sh\nexport LD_PRELOAD="{library}" {BACK}="{back}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return Clock(python, back)


@pytest.fixture(scope="module")
def gallery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[Runs]:
    """Give the jobs of all innocents that are to be tested."""
    deeds = {Deed.STOP_SUPERVISOR: stop_its_supervisor(), Deed.SET_CLOCK_BACK: clock.set_back}
    tend = {one.name: deeds[one.deed] for one in ALL if one.deed in deeds}
    pythons = {one.name: clock.python for one in ALL if one.deed is Deed.SET_CLOCK_BACK}
    with desk_at(tmp_path_factory.mktemp("innocents")) as desk:
        entries = selected(request, ALL)
        yield Runs(desk, entries, SIDE_BY_SIDE, lambda one: one.lasts_s + END_S_MAX, tend, pythons)


@pytest.mark.parametrize("entry", as_params(ALL, lambda one: 4 if one in UNLIKE else 15))
def test_innocent_job_is_never_killed(gallery: Runs, entry: Innocent) -> None:
    """A slow but healthy job is never killed."""
    job = gallery.result(entry.name)
    said = [one.verdict for one in job.news(d.Judge, d.Notice) if one.verdict is not None]
    looks = len(job.news(orders.Inspect))
    print(f"{entry.name}: {looks} looks")
    assert not said, said
    assert (job.seen()["state"], job.kinds()) == ("SUCCEEDED", [None])
