"""How is Slurm asked and told something from its own nodes? By scontrol, within a limit, and in a thread."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.slurm.hostlist import HostlistError, expand

COMMAND_S_MAX = 10.0
"""How long a command may take: with its controller down, one gives up by itself after MessageTimeout, 10 s mostly."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What scontrol says: `refusal` in one line, empty when it has done what it was asked to."""

    text: str
    refusal: str


def ask(*words: str) -> Answer:
    """Run scontrol. Whether it was refused is told by its words too: an agent reaps its children before we could."""
    try:
        done = subprocess.run(
            ("scontrol", *words), capture_output=True, stdin=subprocess.DEVNULL, timeout=COMMAND_S_MAX, check=False,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        return Answer("", "there is no scontrol on this node")
    except subprocess.TimeoutExpired:
        return Answer("", f"scontrol timed out after {COMMAND_S_MAX:g} s")
    except OSError as err:
        return Answer("", f"scontrol cannot be run: {err.strerror}")
    refusal = " ".join(done.stderr.split())
    if done.returncode and not refusal:
        refusal = " ".join(done.stdout.split()) or f"scontrol ended with code {done.returncode}"
    return Answer(done.stdout, refusal)


def show_job(job_id: str) -> dict[str, str]:
    """Return the fields of a job; none when nothing is said of it."""
    return fields(ask("--oneliner", "show", "job", job_id).text)


def fields(text: str) -> dict[str, str]:
    """Read a line of `NAME=value`, the first of each name. Values may hold blanks, and texts of the job itself may
    look like fields: those come later than what they could be taken for."""
    found: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals:
            found.setdefault(name, value)
    return found


def is_orphaned(job: Mapping[str, str], restarts: str) -> bool:
    """Tell from a job's fields whether this very stay runs on without its batch script."""
    if job.get("JobState") != "RUNNING" or job.get("Restarts") != restarts:
        return False
    listed, host = job.get("NodeList", "(null)"), job.get("BatchHost", "")
    try:
        nodes = () if listed == "(null)" else expand(listed)
    except HostlistError:
        return False
    return bool(host and nodes) and host not in nodes
