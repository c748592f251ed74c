"""What does the Slurm of a cluster in a box say of its jobs and nodes, and how is it asked for something? As plain data.

All is asked on login, as any user of the cluster could; what only an administrator may do is done as root.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .host import Host, wait_for

T = TypeVar("T")

QUEUE_S_MAX = 60.0
"""How long Slurm may take for what it does at once on a quiet machine."""

ASK_S = 0.1
"""How often Slurm is asked for what is waited for: its programs are not cheap."""

FORMAT = "%i|%u|%P|%T|%D|%N|%r"
FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z:/]*)=")


@dataclass(frozen=True, slots=True)
class Entry:
    """A job in the queue. `state` is Slurm's long word; `nodes` is empty while none is given."""

    id: str
    user: str
    partition: str
    state: str
    count: int
    nodes: str
    reason: str


@dataclass(frozen=True, slots=True)
class Queue:
    """Slurm, as seen from login."""

    login: Host

    def sbatch(
        self,
        script: str,
        *options: str,
        user: str = "trainer",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit the text of a script, and return the job's id."""
        argv = ["sbatch", "--parsable", *options]
        done = self.login.run(argv, user=user, cwd=cwd, env=env, input=f"#!/bin/bash\n{script}\n")
        return done.stdout.strip().partition(";")[0]

    # --- what is

    def entries(self) -> list[Entry]:
        """Return the jobs that are not over, as squeue lists them."""
        lines = self.login.run(["squeue", "-h", "-o", FORMAT]).stdout.splitlines()
        return [_entry(line) for line in lines]

    def state(self, id: str) -> str:
        """Return a job's state as long as Slurm knows the job, and an empty word after that."""
        return self.job(id).get("JobState", "")

    def job(self, id: str) -> dict[str, str]:
        """Return all that `scontrol show job` says; nothing of a job that it does not know."""
        done = self.login.run(["scontrol", "-o", "show", "job", id], check=False)
        return _fields(done.stdout) if done.returncode == 0 else {}

    def nodes(self) -> dict[str, str]:
        """Return the state of each node, under Slurm's name, as sinfo's long word: `idle`, `mixed`, `down*`."""
        lines = self.login.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N|%T"]).stdout.splitlines()
        return dict(line.split("|", 1) for line in lines)

    def wait_for_state(self, id: str, *states: str, limit_s: float = QUEUE_S_MAX) -> dict[str, str]:
        """Wait until a job is in one of the states, and return what `scontrol show job` then says."""

        def met() -> dict[str, str] | None:
            known = self.job(id)
            return known if known.get("JobState") in states else None

        found = self._wait(met, f"job {id} as {' or '.join(states)}", limit_s)
        assert found is not None
        return found

    def wait_for_node(self, node: str, *states: str, limit_s: float = QUEUE_S_MAX) -> None:
        """Wait until a node is in one of the states."""
        self._wait(lambda: self.nodes()[node] in states, f"{node} as {' or '.join(states)}", limit_s)

    # --- what a user asks for

    def scancel(self, *words: str, user: str = "trainer") -> None:
        """Cancel jobs, or signal them: ids and options of scancel."""
        self.login.run(["scancel", *words], user=user)

    def warn(self, id: str) -> None:
        """Send the batch shell what Slurm sends with `--signal=B:USR1@…`: a time limit is minutes away at least."""
        self.scancel("--batch", "--signal=USR1", id)

    def requeue(self, id: str) -> None:
        """Let a running job go back to the queue."""
        self._scontrol("requeue", id)

    def hold(self, id: str) -> None:
        """Let a pending job not start."""
        self._scontrol("hold", id)

    def release(self, id: str) -> None:
        """Let a job that is held start."""
        self._scontrol("release", id)

    def preempt(self, count: int, *, script: str = "sleep 600", options: Sequence[str] = ()) -> str:
        """Submit a job that takes so many whole nodes from those of the other partitions, and return its id."""
        size = [f"--nodes={count}", "--exclusive", "--partition=high", "--no-requeue"]
        return self.sbatch(script, *size, "--output=/dev/null", *options, user="root", cwd="/")

    # --- what an administrator does

    def drain(self, node: str, reason: str = "a test") -> None:
        """Let no job start on a node; those that run there go on."""
        self._scontrol("update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def down(self, node: str, reason: str = "a test") -> None:
        """Give a node up at once, with all jobs on it that cannot do without."""
        self._scontrol("update", f"NodeName={node}", "State=DOWN", f"Reason={reason}")

    def resume(self, node: str) -> None:
        """Give a node that is drained or down back to the jobs."""
        self._scontrol("update", f"NodeName={node}", "State=RESUME")

    def end_in(self, id: str, seconds: int) -> None:
        """Let a running job's time limit, which Slurm counts in minutes, come in so many seconds.

        slurmctld looks every 30 s: the end comes up to that much late, and the warning of `--signal` at once or early.
        """
        self._scontrol("update", f"JobId={id}", f"EndTime=now+{seconds}")

    def allow(self, id: str, *, minutes: int) -> None:
        """Give a job another time limit."""
        self._scontrol("update", f"JobId={id}", f"TimeLimit={minutes}")

    def comment(self, id: str, text: str) -> None:
        """Write a comment of a job; it is in slurmctld's saved state when everything before it is."""
        self._scontrol("update", f"JobId={id}", f"Comment={text}")

    def _scontrol(self, *words: str) -> None:
        self.login.run(["scontrol", *words])

    def _wait(self, condition: Callable[[], T], what: str, limit_s: float) -> T:
        try:
            return wait_for(condition, what, limit_s, ASK_S)
        except TimeoutError as err:
            raise AssertionError(f"{err}\n{self.story()}") from None

    def story(self) -> str:
        """Return what one wants to read when Slurm did not do as it should."""
        asked = (["squeue", "-l"], ["sinfo", "-N", "-l"])
        return "\n".join(self.login.run(argv, check=False).stdout for argv in asked)


def _entry(line: str) -> Entry:
    id, user, partition, state, count, nodes, reason = line.split("|", 6)
    return Entry(id, user, partition, state, int(count), nodes, reason)


def _fields(text: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol -o show`: values may have spaces in them."""
    parts = FIELD.split(text.strip())
    return {key: value.strip() for key, value in zip(parts[1::2], parts[2::2], strict=True)}
