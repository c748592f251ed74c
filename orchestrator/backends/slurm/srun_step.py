"""What became of the agents that one srun has started? Its words are read from a file, so that it outlives us.

srun puts the number of the task before each line of a task's output; its own words say which node they are about, or
that the whole step is no more. What a keeper prints first proves that it is up, see `node/stepenv.py`.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.slurm import exec_codes
from orchestrator.core.slurm.hostlist import HostlistError, expand
from orchestrator.core.slurm.step_env import UP

WORDS_MAX = 20
"""So many of srun's own complaints are kept."""

WORD_CHARS_MAX = 300
LOG_BYTES_MAX = 1 << 20
"""So much of an srun's output is read at one look."""

_LABELLED = re.compile(r"\s*(\d+): (.*)")
_TASKS = re.compile(r"srun: error: (\S+): tasks? [\d,\-\[\]]+: (.+)")
_LAUNCH = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+?): (.+)")
_LOST = re.compile(r"srun: error: Node failure on (\S+)")
_ERROR = re.compile(r"(?:srun|slurmstepd-?\S*): (?:error|fatal): (.+)")
_NOISE = ("*** STEP", "Application launch failed", "Timed out waiting for job step")
_ABORTED = "srun: Job step aborted"
"""From here on srun kills all tasks: that they end is nobody's fault."""


_EXIT = re.compile(r"Exited with exit code (\d+)")


class Fate(enum.Enum):
    """What is seen of a node's agent in this step."""

    COMING = "coming"
    UP = "up"
    ENDED = "ended"  # certainly no more
    FAILED = "failed"  # never came up, and that is why
    LOST = "lost"  # Slurm has given the node up: whether the agent lives, nobody knows


@dataclass(slots=True)
class AgentTask:
    """What is seen of one node: its fate, and the latest word about it."""

    fate: Fate = Fate.COMING
    word: str = ""


@dataclass(slots=True)
class Step:
    """One srun. `nodes` in the order of its tasks; `exit_code` of the process: None while it lives, negative for a
    signal; one that an earlier supervisor has started tells none, which counts as one that a signal ended."""

    name: str
    nodes: tuple[str, ...]
    log: Path
    begun_s: float
    exit_code: Callable[[], int | None]
    signalled: Callable[[int], None]
    seen: dict[str, AgentTask] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    is_over: bool = False
    _is_aborted: bool = False
    _read_bytes: int = 0

    def __post_init__(self) -> None:
        self.seen = {node: AgentTask() for node in self.nodes}

    def look(self) -> None:
        """Take in what has been said since the last look, and whether srun has ended."""
        if self.is_over:
            return
        code = self.exit_code()  # before its log is read: nothing comes after
        for line in self._new_lines(is_last=code is not None):
            self._hear(line)
        if code is not None:
            self.is_over = True
            self._settle(code)

    def give_up(self) -> None:
        """End an srun from which nothing comes."""
        self.signalled(signal.SIGTERM)

    def of(self, fate: Fate) -> list[str]:
        """Return the nodes of that fate."""
        return [node for node, seen in self.seen.items() if seen.fate is fate]

    def reason(self, node: str) -> str:
        """Say in one line what is known of a node that is not up."""
        return self.seen[node].word or (self.complaints[-1] if self.complaints else "")

    def _new_lines(self, *, is_last: bool) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(self._read_bytes)
                raw = file.read(LOG_BYTES_MAX)
        except OSError:
            return []
        whole, newline, rest = raw.rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline) if not is_last else len(raw)
        lines = whole.split(b"\n") + ([rest] if is_last and rest else [])
        return [line.decode(errors="replace").rstrip()[:WORD_CHARS_MAX] for line in lines if line.strip()]

    def _hear(self, line: str) -> None:
        if labelled := _LABELLED.match(line):
            self._hear_task(int(labelled[1]), labelled[2])
        elif tasks := _TASKS.match(line):
            self._note(tasks[1], Fate.ENDED, tasks[2])
        elif launch := _LAUNCH.match(line):
            self._note(launch[1], Fate.FAILED, launch[2])
        elif lost := _LOST.match(line):
            self._note(lost[1], Fate.LOST, "Slurm has given it up: node failure")
        elif line.startswith(_ABORTED):
            self._is_aborted = True
        elif (error := _ERROR.match(line)) and not any(noise in line for noise in _NOISE):
            self.complaints = [*self.complaints, error[1]][-WORDS_MAX:]

    def _hear_task(self, task: int, text: str) -> None:
        """A task of the step speaks: the keeper says that it is up, or the script before it why that cannot be."""
        if task >= len(self.nodes):
            return
        words = text.split()
        if words[: len(UP)] == list(UP) and words[-1] in self.seen:
            self._note(words[-1], Fate.UP, "")
        elif "***" not in text and self.seen[self.nodes[task]].fate is Fate.COMING:
            self.seen[self.nodes[task]].word = text

    def _note(self, nodes: str, fate: Fate, word: str) -> None:
        """Note what srun says of nodes. Before a keeper is up, the end of its task is a launch that failed; what a node
        itself has said before is the better word."""
        try:
            names = expand(nodes)
        except HostlistError:
            return
        for seen in [self.seen[name] for name in names if name in self.seen]:
            if seen.fate in (Fate.ENDED, Fate.FAILED):
                continue
            is_never_up = fate is Fate.ENDED and seen.fate is Fate.COMING
            seen.fate = Fate.FAILED if is_never_up else fate
            if not is_never_up:
                seen.word = word
            elif not self._is_aborted:
                seen.word = f"{seen.word} ({word})" if seen.word else _explained(word)

    def _settle(self, code: int) -> None:
        """srun is no more. By itself it ends when all of its tasks have; one that was killed leaves that open."""
        last = self.complaints[-1] if self.complaints else f"srun ended with code {code}"
        for seen in self.seen.values():
            if seen.fate is Fate.COMING:
                seen.fate = Fate.FAILED
            elif seen.fate is Fate.UP:
                seen.fate, seen.word = (Fate.ENDED if code >= 0 else Fate.LOST), last

    @property
    def accused(self) -> list[str]:
        """The nodes that failed for a reason of their own; the others of such a step are innocent."""
        return [node for node in self.of(Fate.FAILED) if self.seen[node].word or len(self.nodes) == 1]


def _explained(word: str) -> str:
    """Return srun's word on a task that has said nothing, with what it means."""
    code = _EXIT.fullmatch(word)
    why = exec_codes.explained(code[1]) if code is not None else ""
    return f"no program could be started there: {why}; its {word[0].lower()}{word[1:]}" if why else word
