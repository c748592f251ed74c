"""State of the agents that one srun has started, read from srun's output in a file, so that srun can outlive the supervisor.

srun puts the number of the task before each line of a task's output. Its own messages name the node that they are about,
or say that the whole step has ended. The first line of a monitor proves that it is up, see `core/slurm/step_env.py`.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.hostlist import expand
from orchestrator.core.slurm.step_env import UP

WORDS_MAX = 20
"""How many of srun's own complaints are kept."""

WORD_CHARS_MAX = 300
LOG_BYTES_MAX = 1 << 20
"""How much of an srun's output one poll reads."""

_LABELLED = re.compile(r"\s*(\d+): (.*)")
_TASKS = re.compile(r"srun: error: (\S+): tasks? [\d,\-\[\]]+: (.+)")
_LAUNCH = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+?): (.+)")
_LOST = re.compile(r"srun: error: Node failure on (\S+)")
_ERROR = re.compile(r"(?:srun|slurmstepd-?\S*): (?:error|fatal): (.+)")
_NOISE = ("*** STEP", "Application launch failed", "Timed out waiting for job step")
_ABORTED = "srun: Job step aborted"
"""From here on srun kills all tasks: their end is not the nodes' fault."""

_EXIT = re.compile(r"Exited with exit code (\d+)")


class Fate(enum.Enum):
    """Fate of a node's agent in this step."""

    COMING = "coming"
    UP = "up"
    ENDED = "ended"  # certainly
    FAILED = "failed"  # never came up; the word says why
    LOST = "lost"  # Slurm has given the node up: the agent may live or not


@dataclass(slots=True)
class AgentTask:
    """One node's fate, and the latest message about it."""

    fate: Fate = Fate.COMING
    word: str = ""


@dataclass(slots=True)
class Step:
    """One srun and the fates of its agents."""

    name: str
    nodes: tuple[str, ...]  # in the order of its tasks
    log: Path
    begun_s: float
    # None while the process lives, negative for a signal. An srun of an earlier supervisor has no exit code to read,
    # and counts as ended by a signal.
    exit_code: Callable[[], int | None]
    signalled: Callable[[int], None]
    seen: dict[str, AgentTask] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    is_over: bool = False
    _is_aborted: bool = False
    _read_bytes: int = 0

    def __post_init__(self) -> None:
        self.seen = {node: AgentTask() for node in self.nodes}

    def poll(self) -> None:
        """Read what srun printed since the last poll, and whether it has ended."""
        if self.is_over:
            return
        code = self.exit_code()  # before its log is read: nothing comes after
        for line in self._new_lines(is_last=code is not None):
            self._read(line)
        if code is not None:
            self.is_over = True
            self._settle(code)

    def give_up(self) -> None:
        """End an srun that brings no agent up."""
        self.signalled(signal.SIGTERM)

    def of(self, fate: Fate) -> list[str]:
        """Return the nodes with a fate."""
        return [node for node, seen in self.seen.items() if seen.fate is fate]

    def reason(self, node: str) -> str:
        """Return in one line what is known of a node that is not up."""
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

    def _read(self, line: str) -> None:
        if labelled := _LABELLED.match(line):
            self._read_task(int(labelled[1]), labelled[2])
        elif tasks := _TASKS.match(line):
            self._note(tasks[1], Fate.ENDED, tasks[2])
        elif launch := _LAUNCH.match(line):
            self._note(launch[1], Fate.FAILED, launch[2])
        elif lost := _LOST.match(line):
            self._note(lost[1], Fate.LOST, "Slurm reports a node failure")
        elif line.startswith(_ABORTED):
            self._is_aborted = True
        elif (error := _ERROR.match(line)) and not any(noise in line for noise in _NOISE):
            self.complaints = [*self.complaints, error[1]][-WORDS_MAX:]

    def _read_task(self, task: int, text: str) -> None:
        """Read a task's line: its monitor reports that it is up, or the launch script reports why there is none."""
        if task >= len(self.nodes):
            return
        words = text.split()
        if words[: len(UP)] == list(UP) and words[-1] in self.seen:
            self._note(words[-1], Fate.UP, "")
        elif "***" not in text and self.seen[self.nodes[task]].fate is Fate.COMING:
            self.seen[self.nodes[task]].word = text

    def _note(self, nodes: str, fate: Fate, word: str) -> None:
        """Note srun's message about nodes. Before a monitor is up, the end of its task is a failed launch; a message of the
        node itself explains it better."""
        try:
            names = expand(nodes)
        except ValueError:
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
        """Settle all fates: srun has ended. An srun that ends by itself ends after all of its tasks; a killed one
        leaves their fates open."""
        last = self.complaints[-1] if self.complaints else f"srun ended with code {code}"
        for seen in self.seen.values():
            if seen.fate is Fate.COMING:
                seen.fate = Fate.FAILED
            elif seen.fate is Fate.UP:
                seen.fate, seen.word = (Fate.ENDED if code >= 0 else Fate.LOST), last

    @property
    def accused(self) -> list[str]:
        """The nodes that failed for a reason of their own; the other nodes of such a step are innocent."""
        return [node for node in self.of(Fate.FAILED) if self.seen[node].word or len(self.nodes) == 1]


def _explained(word: str) -> str:
    code = _EXIT.fullmatch(word)
    why = command_output.unstarted(code[1]) if code is not None else ""
    return f"no program could be started there: {why}; its {word[0].lower()}{word[1:]}" if why else word
