"""Ranks of real torch under orch's hook, forked from a node's template as an agent forks them: one import serves many tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.host import hook_files
from orchestrator.agent.ranks import spawn, warm_start
from tests.support.hooked import RUN_S_MAX, Rank, bare_env, gang_envs

POLL_S = 0.01
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LIBC = ctypes.CDLL(None)


@dataclass(slots=True)
class Forked:
    """A rank that was forked, for a `with` at whose end it is gone with all that it has started."""

    pid: int
    output: Path
    returncode: int | None = None

    def wait(self, limit_s: float = RUN_S_MAX) -> int:
        """Return the exit code. Raises TimeoutError."""
        deadline_s = time.monotonic() + limit_s
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline_s:
                raise TimeoutError(f"rank {self.pid} has not ended within {limit_s:g} s: {self.output.read_text()}")
            else:
                time.sleep(POLL_S)
        return self.returncode

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # the group that it leads
        self.wait()


@dataclass(frozen=True, slots=True)
class Forge:
    """Forks ranks of a template."""

    template: warm_start.Template

    def start(self, rank: Rank, text: str, *words: str, **env: str) -> Forked:
        """Start a rank with this text as its script."""
        argv, output = (sys.executable, str(rank.script(text)), *words), rank.root / "log"
        program = spawn.Program(argv, {**rank.env, **env}, rank.code, output)
        _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)  # the rank becomes a child of this process; no other orphan shall
        try:
            pid = self.template.fork(program)
        finally:
            _LIBC.prctl(_SUBREAPER, 0, 0, 0, 0)
        assert pid, self.template.why_fresh
        return Forked(pid, output)

    def start_gang(self, ranks: Sequence[Rank], text: str, *words: str, **env: str) -> list[Forked]:
        """Start all ranks of a gang with this text as their script."""
        envs = gang_envs(len(ranks))
        return [self.start(rank, text, *words, **{**own, **env}) for rank, own in zip(ranks, envs, strict=True)]

    def run(self, ranks: Sequence[Rank], text: str, *words: str, **env: str) -> list[tuple[int, bytes]]:
        """Run all ranks of a gang to their end; return their exit codes and what they have printed."""
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(one) for one in self.start_gang(ranks, text, *words, **env)]
            return [(one.wait(), one.output.read_bytes()) for one in running]


@contextmanager
def forge(folder: Path, *more: str) -> Iterator[Forge]:
    """Give a forge whose template has imported what each has, and more modules."""
    hook_files.install_hook(folder)
    (folder / "code").mkdir()
    env = {**bare_env(), "PYTHONPATH": str(folder / "hook"), "OMP_NUM_THREADS": "1"}
    template = warm_start.Template(
        folder, (sys.executable, "train.py"), env, folder / "code", (*warm_start.MODULES, *more)
    )
    template.begin()
    try:
        deadline_s = time.monotonic() + RUN_S_MAX
        while not template.is_ready:
            assert template.pid and time.monotonic() < deadline_s, template.why_fresh or "it still imports"
            time.sleep(POLL_S)
            template.poll()
        yield Forge(template)
    finally:
        pid = template.pid
        template.end()
        if pid:
            os.waitpid(pid, 0)
