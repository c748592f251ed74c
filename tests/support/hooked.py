"""Processes that run under orch's hook as ranks do, with torch or a stand-in for it, alone or as a gang."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.hang import python_stacks
from orchestrator.agent.hang.python_stacks import RankStack
from orchestrator.agent.host import hook_files
from orchestrator.agent.ranks import failure, step_counter, warm_start
from orchestrator.agent.ranks.hook import layout
from orchestrator.agent.ranks.step_counter import LastStep, StepCounter
from orchestrator.core.observations import Failure

STACK_SIGNAL = 50
STACKS_S_MAX = 2.0  # a busy machine; the agent waits less
RUN_S_MAX = 180  # a busy machine imports torch three times
# As much of torch as the hook looks at: a module with this name and this function.
STAND_IN = """
HOOKS = []
def register_optimizer_step_post_hook(hook):
    HOOKS.append(hook)
class Optimizer:
    def __init__(self, parameters=1):
        self.param_groups = [{"params": [0] * parameters}]
    def step(self):
        for hook in HOOKS:
            hook(self, (), {})
step = Optimizer().step
"""
STEPS = """
import sys
from torch.optim.optimizer import step
import colorsys  # any later import: then the hook sees torch
for _ in range(int(sys.argv[1])):
    step()
"""
WORLD_SIZE = 2


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's folder, the hook's folder and the user's code, as an agent would lay them out."""

    root: Path

    @property
    def dir(self) -> Path:
        return self.root / "rank"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def env(self) -> dict[str, str]:
        return {
            **bare_env(),
            "ORCH_RANK_DIR": str(self.dir),
            "ORCH_STACK_SIGNAL": str(STACK_SIGNAL),
            "RANK": "0",
            "PYTHONPATH": f"{self.root / 'hook'}:{self.code}",
        }

    def script(self, text: str, name: str = "train.py") -> Path:
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, argv: Sequence[str | Path], **env: str) -> subprocess.CompletedProcess[bytes]:
        return run(argv, {**self.env, **env})

    def run_bare(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[bytes]:
        return run(argv, {**bare_env(), "PYTHONPATH": str(self.code)})

    def last_step(self) -> LastStep:
        return self.reader().read()

    def reader(self) -> StepCounter:
        return StepCounter(self.dir / layout.STEP_FILE)

    def errors(self) -> list[Failure]:
        paths = self.dir.glob(layout.ERROR_FILE.format("*"))
        found = [failure.find_error(self.dir, int(path.stem.partition("-")[2])) for path in paths]
        return [error for error in found if error is not None]

    def error(self) -> Failure:
        (error,) = self.errors()
        return error

    def files(self) -> list[str]:
        """Return the files of its folder; that it was forked leaves one, too."""
        return sorted(path.name for path in self.dir.iterdir() if path.stem != warm_start.TICKET)


def ask_for_stacks(pid: int, rank: Rank) -> python_stacks.PendingStacks:
    """Look at a rank's processes, as an inspection does."""
    return python_stacks.request_stacks(python_stacks.rank_pids(pid), rank.dir, STACK_SIGNAL)


def take_stacks(pid: int, rank: Rank) -> list[RankStack]:
    """Return the stacks of a rank's processes."""
    pending = ask_for_stacks(pid, rank)
    deadline = time.monotonic() + STACKS_S_MAX
    while (stacks := python_stacks.poll_stacks(pending)) is None and time.monotonic() < deadline:
        time.sleep(python_stacks.POLL_S)
    return stacks if stacks is not None else python_stacks.collect_stacks(pending)


def bare_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}


def run(argv: Sequence[str | Path], env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_S_MAX, check=False
    )


def outputs(running: Sequence[subprocess.Popen[bytes]]) -> list[bytes]:
    """Return what processes have printed by their end; none of them outlives this."""
    try:
        return [process.communicate(timeout=RUN_S_MAX)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def lay_out(root: Path) -> Rank:
    """Make a rank's folders as an agent does before the start."""
    rank = Rank(root)
    for folder in (rank.dir, rank.code):
        folder.mkdir()
    hook_files.install_hook(root)
    step_counter.create_step_file(rank.dir / layout.STEP_FILE)
    return rank


def lay_out_with_stand_in(root: Path) -> Rank:
    """The same, with as much of torch in the user's code as the hook looks at."""
    rank = lay_out(root)
    rank.script("import torch.utils.data.dataloader", "torch/__init__.py")
    rank.script("", "torch/utils/__init__.py")
    rank.script("", "torch/utils/data/__init__.py")
    rank.script("class _BaseDataLoaderIter: pass", "torch/utils/data/dataloader.py")
    rank.script("", "torch/optim/__init__.py")
    rank.script(STAND_IN, "torch/optim/optimizer.py")
    return rank


def gang(root: Path, count: int = WORLD_SIZE) -> list[Rank]:
    ranks = []
    for number in range(count):
        (root / f"rank{number}").mkdir()
        ranks.append(lay_out(root / f"rank{number}"))
    return ranks


def torchrun_env(rank: int, world_size: int = WORLD_SIZE) -> dict[str, str]:
    ids = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    ones = {"GROUP_RANK": "0", "NODE_RANK": "0", "GROUP_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return {**dict.fromkeys(ids, str(rank)), **dict.fromkeys(sizes, str(world_size)), **ones}


def gang_envs(count: int = WORLD_SIZE) -> list[dict[str, str]]:
    """Return what the ranks of a gang on this machine have in their environments, to meet and to be asked."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "test"}
    return [{**torchrun_env(rank, count), **meeting, layout.SOCKET_ENV: "1"} for rank in range(count)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
