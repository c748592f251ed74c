"""Call of a launcher by the script of a node, for which the agent starts the ranks: their words, folder and environment. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from orchestrator.core.slurm import step_env
from orchestrator.core.wire import messages as m


@dataclass(frozen=True)
class Count:
    """A number that a line names, with the option as it stands there."""

    number: int
    option: str


@dataclass
class Call:
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
    nodes: tuple[Count, Count] | None = None
    ranks_each: Count | None = None
    ranks: Count | None = None
    # Options that orch does not need
    unused: list[str] = field(default_factory=list)
    # Variables that the launcher sets
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call that the agent starts ranks for. `number`: which call of the attempt it is, from 1."""

    number: int
    script: m.Script
    call: Call
    # The program first, found on this node
    argv: tuple[str, ...]
    cwd: Path
    env: dict[str, str] = field(repr=False)

    def argv_of(self, local_rank: int, more: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words of a rank, with `more` behind them."""
        call, words = self.call, list(self.argv)
        if call.local_rank:
            at = call.local_rank_at + call.is_python
            words[at:at] = [f"{call.local_rank}={local_rank}"]
        if call.has_macros:
            words = [Template(word).safe_substitute(local_rank=local_rank) for word in words]
        return (*words, *more)

    def env_of(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return the variables by which srun and mpirun number a rank, for programs that read those."""
        gang = self.script.gang
        if self.call.launcher == "mpirun":
            counts = {name: len(ranks) for name, ranks in gang}
            here = next(len(ranks) for _, ranks in gang if rank in ranks)
            values = {
                "RANK": rank,
                "SIZE": sum(counts.values()),
                "LOCAL_RANK": local_rank,
                "LOCAL_SIZE": here,
            }
            return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
        if self.call.launcher == "srun" and self.script.stands_in_slurm:
            return step_env.of_a_rank(rank, local_rank, gang)
        return {}
