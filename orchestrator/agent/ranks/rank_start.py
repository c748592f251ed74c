"""Ranks to be started: program and environment of each, by the plan or by a launcher that the script of the node has called. Pure."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from orchestrator.agent.ranks import spawn
from orchestrator.agent.ranks.hook.layout import (
    ASYNC_ENV,
    COMPARE_ENV,
    GIVEN_ENV,
    RANK_DIR_ENV,
    SOCKET_ENV,
    STACK_SIGNAL_ENV,
    SUBMITTED_FROM_ENV,
)
from orchestrator.core.host import process_tags
from orchestrator.core.settings import rank_env
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import EnvLayers, Setting, added_variables
from orchestrator.core.slurm import step_env

STACK_SIGNAL = signal.SIGRTMIN + 6
"""Requests a process's stack from `faulthandler`, the next signal from Python (see `hook.errors`). USR1 and USR2 belong to
NCCL, Lightning and submitit, so they are real-time signals."""


@dataclass(frozen=True)
class CountOption:
    """A number in a command line, with its option as written."""

    number: int
    option: str


@dataclass
class LauncherCall:
    """A call of a launcher: the words of a rank's program, and what the launcher adds to them."""

    launcher: str
    words: tuple[str, ...]
    # Python runs the words, which begin with a script or with `-m`
    is_python: bool = True
    # The option by which the program is given its local rank, behind the first `local_rank_at` words
    local_rank: str = ""
    local_rank_at: int = 0
    # `${local_rank}` in a word is the local rank
    has_macros: bool = False
    # What is asked for: nodes (at least and at most), ranks of a node, ranks of all nodes
    nodes: tuple[CountOption, CountOption] | None = None
    ranks_per_node: CountOption | None = None
    ranks: CountOption | None = None
    # Options that orch does not need
    unused: list[str] = field(default_factory=list)
    # Variables that the launcher sets
    env: dict[str, str] = field(default_factory=dict)
    # The folder that it runs the program in, from where it is called
    cwd: str = ""


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call that the agent starts ranks for. `number`: which call of the attempt it is, from 1."""

    number: int
    call: LauncherCall
    # The program first, found on this node
    argv: tuple[str, ...]
    cwd: Path
    env: dict[str, str] = field(repr=False)
    # Those of the process that has called, see `spawn.read_limits`
    limits: tuple[tuple[Any, ...], ...] = ()

    def rank_argv(self, local_rank: int, more: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words of a rank, with `more` behind them."""
        call, argv = self.call, list(self.argv)
        if call.local_rank:
            at = call.local_rank_at + call.is_python
            argv[at:at] = [f"{call.local_rank}={local_rank}"]
        if call.has_macros:
            argv = [Template(word).safe_substitute(local_rank=local_rank) for word in argv]
        return (*argv, *more)

    def rank_variables(self, rank: int, at: NodePlan) -> dict[str, str]:
        """Return the variables by which srun and mpirun number a rank, for programs that read those."""
        if self.call.launcher == "mpirun":
            values = {
                "RANK": rank,
                "SIZE": at.plan.world_size,
                "LOCAL_RANK": at.ranks.index(rank),
                "LOCAL_SIZE": len(at.ranks),
            }
            return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
        if self.call.launcher == "srun" and at.plan.slurm is None:
            return step_env.rank_step_env(rank, at.ranks.index(rank), at.gang)
        return {}


@dataclass(frozen=True, slots=True)
class RankStart:
    """A rank to be started."""

    rank: int
    local_rank: int
    program: spawn.Program


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What the environments of a node's ranks are made of, and which program they run."""

    at: NodePlan
    layers: EnvLayers
    settings: tuple[Setting, ...]
    # As this node has it
    program: str
    # By which the job's processes are known on the node
    tag: str
    # The folder whose copy ranks run, where this node has it
    submitted_from: str = ""

    def build_env(self, rank_variables: Mapping[str, str], rank: int = 0) -> dict[str, str]:
        """Return the environment of a rank: of two layers that set a variable the later one wins. Without variables of its
        `rank_variables` it is that of the template that ranks are forked from.

        | layer | whose it is |
        |---|---|
        | `settings` | orch decides them, where nothing else sets them |
        | `layers.given` | the host, the job, the node, the setup lines |
        | share | of the cores that Slurm has given the node |
        | `rank_variables` | torchrun's contract, and orch's variables |
        | hook | orch: in front of PYTHONPATH |
        """
        env = {
            SOCKET_ENV: "1",
            **added_variables(self.settings, rank),
            **self.layers.given,
            **step_env.cpu_share_env(self.layers.given, rank_variables),
            **rank_variables,
            STACK_SIGNAL_ENV: str(int(STACK_SIGNAL)),
            **({COMPARE_ENV: str(self.at.plan.limits.compare_steps)} if self.at.plan.limits.compare_steps else {}),
            **({ASYNC_ENV: "1"} if self.at.plan.limits.saves_async else {}),
            **({SUBMITTED_FROM_ENV: self.submitted_from} if self.submitted_from else {}),
        }
        path = (str(self.at.job.node(self.at.node) / "hook"), env.get("PYTHONPATH", ""))
        return {**env, "PYTHONPATH": os.pathsep.join(part for part in path if part)}

    def rank_starts(self, rendezvous: tuple[str, int], call: RankCall | None) -> tuple[RankStart, ...]:
        """Return the ranks of the node. They meet at an address and port; those of a launcher `call` run its words."""
        return tuple(self._start(local_rank, rendezvous, call) for local_rank in range(len(self.at.ranks)))

    def _start(self, local_rank: int, rendezvous: tuple[str, int], call: RankCall | None) -> RankStart:
        at, rank, words = self.at, self.at.ranks[local_rank], rank_env.rank_arguments(self.at)
        argv, cwd, numbers = (self.program, *words[1:]), at.job.code, dict[str, str]()
        if call is not None:
            argv, cwd = call.rank_argv(local_rank, words if call.number == 1 else ()), call.cwd
            numbers = call.rank_variables(rank, at)
        rank_variables = {
            **numbers,
            **rank_env.rank_env(at, rank, rendezvous),
            GIVEN_ENV: f"{rendezvous[0]} {rendezvous[1]} {rank} {at.plan.world_size}",
            RANK_DIR_ENV: str(at.job.rank_run(at.node, at.attempt, rank)),
            process_tags.NAME: self.tag,
        }
        log = at.job.rank_log(at.attempt, rank)
        limits = call.limits if call is not None else ()
        return RankStart(rank, local_rank, spawn.Program(argv, self.build_env(rank_variables, rank), cwd, log, limits))
