"""Where is what in a job's folder? The layout of the contract, in one place; nothing here touches the disk.

One writer per file: the submit side writes `job.yaml plan.json scripts code orch.pyz secrets requests`, the
supervisor `journal.jsonl facts.jsonl state.json supervisor.* steps allocation`, an agent its `nodes/NAME/`, its logs and its evidence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_RANK_LOG = re.compile(r"rank-(\d{5,})\.log$")
_ATTEMPT_DIR = re.compile(r"attempt-(\d{3,})$")


def attempt_name(attempt: int) -> str:
    """Return the folder name of an attempt, `attempt-001` for the first."""
    return f"attempt-{attempt:03d}"


def rank_name(rank: int) -> str:
    """Return the file stem of a rank, `rank-00002` for rank 2."""
    return f"rank-{rank:05d}"


def rank_of(path: Path) -> int | None:
    """Return the rank whose log `path` is, or None when it is no rank's log."""
    found = _RANK_LOG.search(path.name)
    return int(found.group(1)) if found else None


def attempt_of(path: Path) -> int | None:
    """Return the attempt whose folder `path` is, or None when it is none."""
    found = _ATTEMPT_DIR.search(path.name)
    return int(found.group(1)) if found else None


@dataclass(frozen=True, slots=True)
class JobDir:
    """One job's folder."""

    root: Path

    @classmethod
    def at(cls, root: str) -> JobDir:
        """Return the job folder at `root`."""
        return cls(Path(root))

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def spec(self) -> Path:
        return self.root / "job.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def overrides(self) -> Path:
        """What `--set` and `--backend` changed of the spec, a JSON list of `key=value`."""
        return self.root / "overrides.json"

    @property
    def provenance(self) -> Path:
        """Git commit, versions of Python, torch and packages at submit."""
        return self.root / "provenance.json"

    @property
    def dirty_diff(self) -> Path:
        """What the working tree had over its commit at submit."""
        return self.root / "code.diff"

    @property
    def scripts(self) -> Path:
        return self.root / "scripts"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def archive(self) -> Path:
        """The code for hosts that do not see this folder: the snapshot's copies, and what `ssh.sync` names."""
        return self.root / "code.tar.gz"

    @property
    def hosts_file(self) -> Path:
        """The user's `ssh.hosts_file` as it was at submit."""
        return self.root / "hosts.txt"

    @property
    def bundle(self) -> Path:
        return self.root / "orch.pyz"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def facts(self) -> Path:
        """What the journal came to at one of its places, so that only what follows need be read."""
        return self.root / "facts.jsonl"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def lock(self) -> Path:
        """Held (flock) by the one supervisor that may act."""
        return self.root / "supervisor.lock"

    @property
    def resume_lock(self) -> Path:
        """Held (flock) by the one command that resumes the job."""
        return self.root / "resume.lock"

    @property
    def supervisor_log(self) -> Path:
        return self.root / "supervisor.log"

    @property
    def endpoint(self) -> Path:
        """Where agents dial, one `host:port` a line; rewritten when a supervisor comes back on another port."""
        return self.root / "endpoint"

    @property
    def requests(self) -> Path:
        """What people asked for after submit (cancel, resume), one numbered file each."""
        return self.root / "requests"

    @property
    def ended(self) -> Path:
        """Exists when the job is over, so that a thousand old jobs cost one stat each."""
        return self.root / "ended"

    @property
    def slurm(self) -> Path:
        """Slurm's ids of the job, a JSON list, the present one last; written by the submit side."""
        return self.root / "slurm.json"

    @property
    def queue_said(self) -> Path:
        """What Slurm said of the job when a command last asked, a JSON object; the latest command's word stands."""
        return self.root / "queue-said.json"

    @property
    def queue(self) -> Path:
        """Which cluster's queue a job of Slurm is in, a JSON object; written by the submit side."""
        return self.root / "queue.json"

    @property
    def allocation(self) -> Path:
        """Which allocation of Slurm the job is in now, `12.0`; written by its supervisor before anything is ordered."""
        return self.root / "allocation"

    @property
    def steps(self) -> Path:
        """What each srun is that brought agents up, and what it said, see `backends/slurm`."""
        return self.root / "steps"

    @property
    def swept(self) -> Path:
        """The hosts on which nothing of the ended job is left, a JSON list."""
        return self.root / "swept.json"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def webhook(self) -> Path:
        """The address of the webhook that is told, where there is one."""
        return self.secrets / "webhook"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / attempt_name(attempt)

    @property
    def batch_log(self) -> Path:
        """What the batch script of a job of Slurm printed, and Slurm of it."""
        return self.logs / "slurm.log"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt_logs(attempt) / f"{rank_name(rank)}.log"

    def rank_index(self, attempt: int, rank: int) -> Path:
        """The sparse time index beside a rank's log, see `wire/logindex.py`."""
        return self.attempt_logs(attempt) / f"{rank_name(rank)}.idx"

    def node_log(self, attempt: int, node: str) -> Path:
        return self.attempt_logs(attempt) / f"node-{node}.log"

    def evidence(self, attempt: int) -> Path:
        return self.root / "evidence" / attempt_name(attempt)

    def node(self, node: str) -> Path:
        """What an agent keeps for itself: its pid, its hook, each rank's beat and error files."""
        return self.root / "nodes" / node

    def rank_run(self, node: str, attempt: int, rank: int) -> Path:
        return self.node(node) / attempt_name(attempt) / rank_name(rank)
