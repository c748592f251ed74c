"""The layout of a job's folder: each path of the contract, in one place. Nothing here touches the disk.

One writer per file: the submit side writes `job.yaml plan.json scripts code orch.pyz secrets requests`, the supervisor
`journal.jsonl facts.jsonl series.jsonl state.json supervisor.* steps allocation`, an agent its `nodes/NAME/`, logs and evidence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TORCHELASTIC_ERROR_FILE = "torchelastic-error.json"
"""The name in a rank's folder of the file that torch's `record` writes the error of a rank to."""

_RANK_LOG = re.compile(r"rank-(\d{5,})\.log$")
_ATTEMPT_DIR = re.compile(r"attempt-(\d{3,})$")


def attempt_name(attempt: int) -> str:
    """Return the folder name of an attempt, `attempt-001` for the first."""
    return f"attempt-{attempt:03d}"


def rank_name(rank: int) -> str:
    """Return the file stem of a rank, `rank-00002` for rank 2."""
    return f"rank-{rank:05d}"


def rank_of(path: Path) -> int | None:
    """Return the rank whose log `path` is, or None for another file."""
    match = _RANK_LOG.search(path.name)
    return int(match.group(1)) if match else None


def attempt_of(path: Path) -> int | None:
    """Return the attempt whose folder `path` is, or None for another folder."""
    match = _ATTEMPT_DIR.search(path.name)
    return int(match.group(1)) if match else None


IN_CODE = "{job_dir}/code/"
"""The beginning of a `checkpoint.path` in the working folder of the ranks."""


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
        """The job's id, which is the name of its folder."""
        return self.root.name

    @property
    def origin(self) -> Path:
        """Where this folder lay when the job was submitted or last started: elsewhere it has moved, or is a copy."""
        return self.root / "origin"

    @property
    def spec(self) -> Path:
        """The job file as it was submitted."""
        return self.root / "job.yaml"

    @property
    def plan(self) -> Path:
        """The plan that the supervisor works from (`plan.Plan`); a job is deleted when it is gone."""
        return self.root / "plan.json"

    @property
    def overrides(self) -> Path:
        """The changes of `--set` and `--backend` to the job file, a JSON list of `key=value`."""
        return self.root / "overrides.json"

    @property
    def provenance(self) -> Path:
        """Git commit, versions of Python, torch and packages at submit."""
        return self.root / "provenance.json"

    @property
    def dirty_diff(self) -> Path:
        """The changes in the working tree that its commit lacked at submit."""
        return self.root / "code.diff"

    @property
    def scripts(self) -> Path:
        """The scripts that start the job, as `orch render` shows them: of the agent, and of sbatch."""
        return self.root / "scripts"

    @property
    def code(self) -> Path:
        """The snapshot of the user's code, in which the ranks run."""
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
        """The program of supervisor and agents, a zip application."""
        return self.root / "orch.pyz"

    @property
    def journal(self) -> Path:
        """The append-only journal: each event and decision, one JSON object a line."""
        return self.root / "journal.jsonl"

    @property
    def facts(self) -> Path:
        """The facts that the journal adds up to at one of its lines, so that only the lines after it need be read."""
        return self.root / "facts.jsonl"

    @property
    def state(self) -> Path:
        """The status as the supervisor last wrote it (`status_file`)."""
        return self.root / "state.json"

    @property
    def series(self) -> Path:
        """What ranks measured over time (`series`)."""
        return self.root / "series.jsonl"

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
        """The log of the supervisor process: its notes, and what it printed when it could not go on."""
        return self.root / "supervisor.log"

    @property
    def given_up(self) -> Path:
        """Exists while the supervisor's guard has given it up (`supervisor/guard.py`), and says why; written by the guard."""
        return self.root / "given-up"

    @property
    def endpoint(self) -> Path:
        """The addresses that agents dial, one `host:port` a line; rewritten when a supervisor comes back on another port."""
        return self.root / "endpoint"

    @property
    def requests(self) -> Path:
        """The requests to the job after its submit, one numbered file each (`requests`)."""
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
    def queue(self) -> Path:
        """The cluster in whose queue a Slurm job is, a JSON object; written by the submit side."""
        return self.root / "queue.json"

    @property
    def allocation(self) -> Path:
        """The Slurm allocation that the job is in now, `12.0`; written by its supervisor before its first order."""
        return self.root / "allocation"

    @property
    def steps(self) -> Path:
        """The srun steps that started agents, and their output, see `backends/slurm`."""
        return self.root / "steps"

    @property
    def cleaned_hosts(self) -> Path:
        """The hosts that are cleaned of the ended job, a JSON list."""
        return self.root / "swept.json"

    @property
    def secrets(self) -> Path:
        """The folder of what only the user may read: environment, secrets, keys, certificate."""
        return self.root / "secrets"

    @property
    def webhook(self) -> Path:
        """The URL of the webhook that is notified, where the job has one."""
        return self.secrets / "webhook"

    @property
    def checkpoints(self) -> Path:
        """The folder for checkpoints, as the ranks get it in ORCH_CHECKPOINT_DIR."""
        return self.root / "checkpoints"

    @property
    def ledger(self) -> Path:
        """The ledger of saves (`core/checkpoints/ledger.py`); written by the supervisor."""
        return self.checkpoints / "ledger.jsonl"

    def checkpoint_place(self, glob: str) -> tuple[Path, str]:
        """Return the folder of a `checkpoint.path` on a rank's host, and the glob in it; an absolute glob stays."""
        if glob.startswith(IN_CODE):
            return self.code, glob.removeprefix(IN_CODE)
        return self.checkpoints, glob

    @property
    def logs(self) -> Path:
        """The logs of all attempts."""
        return self.root / "logs"

    def attempt_logs(self, attempt: int) -> Path:
        """The logs of one attempt."""
        return self.logs / attempt_name(attempt)

    @property
    def batch_log(self) -> Path:
        """The output of a Slurm job's batch script, and Slurm's own words in it."""
        return self.logs / "slurm.log"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """The output of a rank in one attempt."""
        return self.attempt_logs(attempt) / f"{rank_name(rank)}.log"

    def rank_index(self, attempt: int, rank: int) -> Path:
        """The sparse time index of a rank's log (`log_index`)."""
        return self.attempt_logs(attempt) / f"{rank_name(rank)}.idx"

    def node_log(self, attempt: int, node: str) -> Path:
        """The notes of a node's agent in one attempt."""
        return self.attempt_logs(attempt) / f"node-{node}.log"

    @property
    def from_hosts(self) -> Path:
        """Files of checkpoints that a host had in a newer version than the job folder, after the end; by host."""
        return self.root / "from-hosts"

    def evidence(self, attempt: int) -> Path:
        """The evidence files of one attempt: stacks, kernel waits, open files, GPU use."""
        return self.root / "evidence" / attempt_name(attempt)

    def node(self, node: str) -> Path:
        """The agent's own files: its pid, its hook, and a folder for each rank that it ran."""
        return self.root / "nodes" / node

    def rank_run(self, node: str, attempt: int, rank: int) -> Path:
        """A rank's own files in one attempt: step file and error files."""
        return self.node(node) / attempt_name(attempt) / rank_name(rank)
