"""Ranks to be started: the program of each, with its environment, from the order, the plan and what the node was prepared with."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.agent.ranks import spawn
from orchestrator.agent.ranks.hook.layout import RANK_DIR_ENV, SOCKET_ENV, STACK_SIGNAL_ENV
from orchestrator.core.host import process_tags
from orchestrator.core.settings import rank_env
from orchestrator.core.settings.rank_env import NodeAttempt
from orchestrator.core.settings.rank_settings import Layers, Setting, to_set
from orchestrator.core.slurm import step_env

STACK_SIGNAL = signal.SIGRTMIN + 6
"""Requests a process's stack from `faulthandler`, the next signal from Python (see `hook.Stacks`). USR1 and USR2 belong to
NCCL, Lightning and submitit, so they are real-time signals."""


class RankCall(Protocol):
    """A launcher call by the script of the node; `agent.launch` makes it."""

    @property
    def number(self) -> int:
        """Which call of the attempt it is, from 1."""

    @property
    def cwd(self) -> Path:
        """Where the ranks start."""

    @property
    def env(self) -> dict[str, str]:
        """What the ranks are given, before their own variables."""

    def argv_of(self, local_rank: int, more: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words of a rank, with `more` behind them."""

    def env_of(self, rank: int, at: NodeAttempt) -> dict[str, str]:
        """Return the variables by which the launcher numbers a rank."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """A rank to be started."""

    rank: int
    local_rank: int
    program: spawn.Program


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What the environments of a node's ranks are made of, and which program they run."""

    at: NodeAttempt
    layers: Layers
    settings: tuple[Setting, ...]
    # As this node has it
    program: str
    # By which the job's processes are known on the node
    tag: str

    def of_a_rank(self, own: Mapping[str, str], rank: int = 0) -> dict[str, str]:
        """Return the environment of a rank: of two layers that set a variable the later one wins. Without variables of its
        `own` it is that of the template that ranks are forked from.

        | layer | whose it is |
        |---|---|
        | `settings` | orch decides them, where nothing else sets them |
        | `layers.given` | the host, the job, the node, the setup lines |
        | share | of the cores that Slurm has given the node |
        | `own` | torchrun's contract, and orch's variables |
        | hook | orch: in front of PYTHONPATH |
        """
        env = {
            SOCKET_ENV: "1",
            **to_set(self.settings, rank),
            **self.layers.given,
            **step_env.share(self.layers.given, own),
            **own,
            STACK_SIGNAL_ENV: str(int(STACK_SIGNAL)),
        }
        path = (str(self.at.job.node(self.at.node) / "hook"), env.get("PYTHONPATH", ""))
        return {**env, "PYTHONPATH": os.pathsep.join(part for part in path if part)}

    def starts(self, meet: tuple[str, int], call: RankCall | None) -> tuple[RankStart, ...]:
        """Return the ranks of the node. They meet at an address and port; those of a launcher `call` run its words."""
        return tuple(self._start(local_rank, meet, call) for local_rank in range(len(self.at.ranks)))

    def _start(self, local_rank: int, meet: tuple[str, int], call: RankCall | None) -> RankStart:
        at, rank, words = self.at, self.at.ranks[local_rank], rank_env.arguments(self.at)
        argv, cwd, numbers = (self.program, *words[1:]), at.job.code, dict[str, str]()
        if call is not None:
            argv, cwd = call.argv_of(local_rank, words if call.number == 1 else ()), call.cwd
            numbers = call.env_of(rank, at)
        own = {
            **numbers,
            **rank_env.rank_env(at, rank, meet),
            RANK_DIR_ENV: str(at.job.rank_run(at.node, at.attempt, rank)),
            process_tags.NAME: self.tag,
        }
        log = at.job.rank_log(at.attempt, rank)
        return RankStart(rank, local_rank, spawn.Program(argv, self.of_a_rank(own, rank), cwd, log))
