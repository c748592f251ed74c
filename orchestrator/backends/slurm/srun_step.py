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

ERRORS_MAX = 20
"""How many of srun's own complaints are kept."""

LINE_CHARS_MAX = 300
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


class TaskState(enum.Enum):
    """Fate of a node's agent in this step."""

    COMING = "coming"
    UP = "up"
    ENDED = "ended"  # certainly
    FAILED = "failed"  # never came up; the word says why
    LOST = "lost"  # Slurm has given the node up: the agent may live or not


@dataclass(slots=True)
class AgentTask:
    """One node's fate, and the latest message about it."""

    state: TaskState = TaskState.COMING
    message: str = ""


@dataclass(slots=True)
class SrunStep:
    """One srun and the fates of its agents."""

    name: str
    nodes: tuple[str, ...]  # in the order of its tasks
    log: Path
    begun_s: float
    # None while the process lives, negative for a signal. An srun of an earlier supervisor has no exit code to read,
    # and counts as ended by a signal.
    exit_code: Callable[[], int | None]
    send_signal: Callable[[int], None]
    tasks: dict[str, AgentTask] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    is_over: bool = False
    _is_aborted: bool = False
    _read_bytes: int = 0

    def __post_init__(self) -> None:
        self.tasks = {node: AgentTask() for node in self.nodes}

    def poll(self) -> None:
        """Read what srun printed since the last poll, and whether it has ended."""
        if self.is_over:
            return
        code = self.exit_code()  # before its log is read: nothing comes after
        for line in self._new_lines(is_last=code is not None):
            self._read_line(line)
        if code is not None:
            self.is_over = True
            self._settle(code)

    def give_up(self) -> None:
        """End an srun that brings no agent up."""
        self.send_signal(signal.SIGTERM)

    def nodes_in(self, state: TaskState) -> list[str]:
        """Return the nodes with a fate."""
        return [node for node, seen in self.tasks.items() if seen.state is state]

    def reason(self, node: str) -> str:
        """Return in one line what is known of a node that is not up."""
        return self.tasks[node].message or (self.errors[-1] if self.errors else "")

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
        return [line.decode(errors="replace").rstrip()[:LINE_CHARS_MAX] for line in lines if line.strip()]

    def _read_line(self, line: str) -> None:
        if labelled := _LABELLED.match(line):
            self._read_task(int(labelled[1]), labelled[2])
        elif tasks := _TASKS.match(line):
            self._note_message(tasks[1], TaskState.ENDED, tasks[2])
        elif launch := _LAUNCH.match(line):
            self._note_message(launch[1], TaskState.FAILED, launch[2])
        elif lost := _LOST.match(line):
            self._note_message(lost[1], TaskState.LOST, "Slurm reports a node failure")
        elif line.startswith(_ABORTED):
            self._is_aborted = True
        elif (error := _ERROR.match(line)) and not any(noise in line for noise in _NOISE):
            self.errors = [*self.errors, error[1]][-ERRORS_MAX:]

    def _read_task(self, task: int, text: str) -> None:
        """Read a task's line: its monitor reports that it is up, or the launch script reports why there is none."""
        if task >= len(self.nodes):
            return
        words = text.split()
        if words[: len(UP)] == list(UP) and words[-1] in self.tasks:
            self._note_message(words[-1], TaskState.UP, "")
        elif "***" not in text and self.tasks[self.nodes[task]].state is TaskState.COMING:
            self.tasks[self.nodes[task]].message = text

    def _note_message(self, nodes: str, state: TaskState, message: str) -> None:
        """Note srun's message about nodes. Before a monitor is up, the end of its task is a failed launch; a message of the
        node itself explains it better."""
        try:
            names = expand(nodes)
        except ValueError:
            return
        for seen in [self.tasks[name] for name in names if name in self.tasks]:
            if seen.state in (TaskState.ENDED, TaskState.FAILED):
                continue
            is_never_up = state is TaskState.ENDED and seen.state is TaskState.COMING
            seen.state = TaskState.FAILED if is_never_up else state
            if not is_never_up:
                seen.message = message
            elif not self._is_aborted:
                seen.message = f"{seen.message} ({message})" if seen.message else _explain_exit(message)

    def _settle(self, code: int) -> None:
        """Settle all fates: srun has ended. An srun that ends by itself ends after all of its tasks; a killed one
        leaves their fates open."""
        last = self.errors[-1] if self.errors else f"srun ended with code {code}"
        for seen in self.tasks.values():
            if seen.state is TaskState.COMING:
                seen.state = TaskState.FAILED
            elif seen.state is TaskState.UP:
                seen.state, seen.message = (TaskState.ENDED if code >= 0 else TaskState.LOST), last

    @property
    def faulty_nodes(self) -> list[str]:
        """The nodes that failed for a reason of their own; the other nodes of such a step are innocent."""
        return [node for node in self.nodes_in(TaskState.FAILED) if self.tasks[node].message or len(self.nodes) == 1]


def _explain_exit(message: str) -> str:
    code = _EXIT.fullmatch(message)
    why = command_output.start_failure_text(code[1]) if code is not None else ""
    return f"no program could be started there: {why}; its {message[0].lower()}{message[1:]}" if why else message
