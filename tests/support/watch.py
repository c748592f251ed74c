"""Real ranks in one place or another, as an agent starts and looks at them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from orchestrator.agent.hang.inspector import Inspector
from orchestrator.agent.host.hook_files import install_hook
from orchestrator.agent.ranks.hook.layout import RANK_DIR_ENV
from orchestrator.agent.ranks.processes import NodeRanks
from orchestrator.agent.ranks.rank_start import NodeEnvironment, RankStart
from orchestrator.agent.ranks.spawn import Program
from orchestrator.core import observations
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import EnvLayers
from tests.support import jobs, torch_window

READY_S_MAX = 60.0
LOOKS_S_MAX = 60.0
BETWEEN_S = 0.7

SAY_READY = "import os\nopen(os.environ['READY'], 'w').close()\n"
"""What a script runs once it has loaded all that it needs."""


class Watch:
    """Ranks of one script, all on this node, each with a stand-in for torch's window, and the eyes of its agent."""

    def __init__(
        self,
        folder: Path,
        script: str,
        ranks: int,
        env: dict[str, str],
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.job = JobDir.at(str(folder / "job"))
        self.job.code.mkdir(parents=True)
        for name, text in {"train.py": script, **(files or {})}.items():
            (self.job.code / name).write_text(text)
        self.job.node("node-0").mkdir(parents=True)
        install_hook(self.job.node("node-0"))
        path = os.pathsep.join(
            part for part in (torch_window.install(folder / "window"), env.get("PYTHONPATH", "")) if part
        )
        self.ready = [folder / f"ready-{rank}" for rank in range(ranks)]
        self.ranks = NodeRanks(1, self.job, "node-0")
        self.ranks.begin()
        at = NodePlan(jobs.plan(), self.job, "node-0", 1)
        made = NodeEnvironment(at, EnvLayers.before_setup(os.environ, {}, {}), (), sys.executable, "")
        starts = tuple(
            self._start(rank, made, {**env, "WORLD_SIZE": str(ranks), "PYTHONPATH": path}) for rank in range(ranks)
        )
        self.ranks.make_files(starts)
        self.ranks.start(starts)
        self.eyes = Inspector(self.ranks, starts[0].program.env)
        self.count = 0

    def _start(self, rank: int, made: NodeEnvironment, env: Mapping[str, str]) -> RankStart:
        folder = self.job.rank_run("node-0", 1, rank)
        own = {"RANK": str(rank), "READY": str(self.ready[rank]), **env, RANK_DIR_ENV: str(folder)}
        log = self.job.rank_log(1, rank)
        program = Program((sys.executable, "train.py"), made.build_env(own), self.job.code, log)
        return RankStart(rank, rank, program)

    def await_ready(self) -> None:
        """Wait until every rank has said that it is where it shall be looked at."""
        deadline_s = time.monotonic() + READY_S_MAX
        while not all(path.exists() for path in self.ready):
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.02)

    def await_name(self, name: str) -> None:
        """Wait until the only rank is the program of that name: a signal on the way there would end it."""
        comm = Path(f"/proc/{self.ranks.processes[0].pid}/comm")
        deadline_s = time.monotonic() + READY_S_MAX
        while comm.read_text() != f"{name}\n":
            assert time.monotonic() < deadline_s, f"it is {comm.read_text()!r} still"
            time.sleep(0.01)

    def look(self) -> dict[int, observations.RankInspection]:
        """Take one look at all ranks."""
        self.count += 1
        self.eyes.begin(self.count)
        deadline_s = time.monotonic() + LOOKS_S_MAX
        while (looked := self.eyes.gather()) is None:
            assert time.monotonic() < deadline_s, "the look has no end"
            time.sleep(0.01)
        assert (looked.attempt, looked.inspection) == (1, self.count)
        return {one.rank: one for one in looked.ranks}

    def until(self, seen: Callable[[observations.RankInspection], bool], rank: int = 0) -> observations.RankInspection:
        """Look again and again until one rank is seen so."""
        deadline_s = time.monotonic() + LOOKS_S_MAX
        while True:
            found = self.look()[rank]
            if seen(found):
                return found
            assert time.monotonic() < deadline_s, f"{found}\n{self.page(rank)}\n{self.logs()}"
            time.sleep(BETWEEN_S)

    def until_activity(self, activity: observations.Activity, rank: int = 0) -> observations.RankInspection:
        """Look until a rank does that."""
        return self.until(lambda one: one.activity is activity, rank)

    def page(self, rank: int = 0) -> str:
        """Return the page of the last look."""
        return (self.job.evidence(1) / f"rank-{rank:05d}-stacks.txt").read_text()

    def logs(self) -> str:
        """Return what the ranks have printed."""
        return "\n".join(process.log.read_text() for process in self.ranks.processes)

    def close(self) -> None:
        """End the ranks and all that they have started."""
        self.eyes.close()
        for process in self.ranks.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # each leads a group of its own
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0)
        self.ranks.close()


CASES = """import os
open(os.environ['READY'], 'w').close()
file = f"case_{os.environ['RANK']}.py"
exec(compile(open(file).read(), file, 'exec'))
"""
STILL_S = 2.5
"""Nothing has moved for so long in what `stood` returns: three looks or so."""


def stood(folder: Path, cases: Mapping[str, str], still_s: float = STILL_S) -> dict[str, observations.RankInspection]:
    """Run each case as a rank of one job, all side by side, and return by name what is found of it once it has stood, for
    `still_s`, or worked, for a while."""
    names = list(cases)
    watch = Watch(folder, CASES, len(cases), {}, {f"case_{n}.py": cases[name] for n, name in enumerate(names)})
    try:
        watch.await_ready()
        until_s = time.monotonic() + LOOKS_S_MAX
        seen: dict[int, observations.RankInspection] = {}
        worked: Counter[int] = Counter()
        while time.monotonic() < until_s:
            for rank, found in watch.look().items():
                worked[rank] += found.activity is observations.Activity.PROGRESSING
                if rank not in seen and (found.still_s > still_s or worked[rank] > 1):
                    seen[rank] = found  # and would take the processor from those that are not
                    os.killpg(watch.ranks.processes[rank].pid, signal.SIGKILL)
            if len(seen) == len(cases):
                break
            time.sleep(BETWEEN_S)
        missing = [names[rank] for rank in range(len(cases)) if rank not in seen]
        assert not missing, f"{missing}\n{watch.logs()}"
        return {names[rank]: found for rank, found in seen.items()}
    finally:
        watch.close()


@contextmanager
def watching(folder: Path, script: str, ranks: int = 1, **env: str) -> Iterator[Watch]:
    """Start a script as ranks, wait until it says that it is ready, and end it after the block."""
    watch = Watch(folder, script, ranks, env)
    try:
        watch.await_ready()
        yield watch
    finally:
        watch.close()
