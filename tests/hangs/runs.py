"""How does a gallery run in minutes? Several jobs side by side, begun in order, each watched until it has ended.

Rules: at most `side_by_side` jobs run at once; whoever asks for one result drives all; a job that does not end within
its limit is left to the desk, which kills it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from orchestrator.supervisor import status
from tests.support.local import Desk, Sight

from .gallery import Case
from .innocents import Innocent

Entry: TypeAlias = Case | Innocent

POLL_S = 0.25
"""Between two looks at the jobs; more often, and the looks would slow what they look at."""

SPEC: dict[str, Any] = {"nodes": 2, "procs_per_node": 2, "monitor": {"heartbeat_s": 1.0}}
"""As a user has it, but with an end that waits less for ranks that do not listen (see `Desk.submit`)."""

RESTARTED = frozenset({
    "stopped", "endless_loop", "deadlock_on_a_lock", "skips_an_all_reduce", "fifo_nobody_writes", "never_exits",
})  # fmt: skip
"""The hangs after which the job is seen to restart and end well; after all others it fails, which costs half."""


def side_by_side(usual: int) -> int:
    """Return how many jobs shall run at once; `make soak` asks for more, to see the galleries under load."""
    return int(os.environ.get("ORCH_JOBS_AT_ONCE", usual))


def is_restarted(case: Case) -> bool:
    """Tell whether the job goes on after what befalls it."""
    return case.ends == "SUCCEEDED" and (case.kind != "hang" or case.name in RESTARTED)


@dataclass(slots=True)
class Run:
    """A job of a gallery; `tend` is called while it runs."""

    sight: Sight
    began_s: float
    limit_s: float
    tend: Callable[[Sight], None]

    @property
    def is_over(self) -> bool:
        return self.sight.seen()["state"] in status.ENDED or time.monotonic() > self.began_s + self.limit_s


@dataclass(slots=True)
class Runs:
    """All jobs of a gallery, by name."""

    desk: Desk
    entries: Sequence[Entry]
    side_by_side: int
    limit_s: Callable[[Any], float]
    tend: Mapping[str, Callable[[Sight], None]] = field(default_factory=dict)
    pythons: Mapping[str, Path] = field(default_factory=dict)  # which Python runs a job, its supervisor and agents
    begun: dict[str, Run] = field(default_factory=dict)

    def result(self, name: str) -> Sight:
        """Return a job that has ended or has used up its time, after running whatever comes before it."""
        while name not in self.begun or not self.begun[name].is_over:
            self._drive()
            time.sleep(POLL_S)
        return self.begun[name].sight

    def _drive(self) -> None:
        running = [run for run in self.begun.values() if not run.is_over]
        for run in running:
            run.tend(run.sight)
        ahead = [entry for entry in self.entries if entry.name not in self.begun]
        if ahead and len(running) < self.side_by_side:
            self._begin(ahead[0])

    def _begin(self, entry: Entry) -> None:
        files = {"train.py": entry.script, **(entry.files if isinstance(entry, Case) else {})}
        spec = {**SPEC, **entry.spec, "monitor": {**SPEC["monitor"], **entry.spec.get("monitor", {})}}
        if isinstance(entry, Case) and not is_restarted(entry):
            spec["monitor"]["on_hang"] = "fail"
        with mock.patch.object(sys, "executable", str(self.pythons.get(entry.name, sys.executable))):
            sight = self.desk.submit(files, entrypoint="train.py", **spec)
        tend = self.tend.get(entry.name, lambda _: None)
        self.begun[entry.name] = Run(sight, time.monotonic(), self.limit_s(entry), tend)
