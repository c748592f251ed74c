"""Layout of a job's folder: each path of the contract, in one place. Nothing here touches the disk.

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


CODE_PREFIX = "{job_dir}/code/"
"""The beginning of a `checkpoint.path` in the working folder of the ranks."""


class _PathInJob:
    """A path inside a job's folder that is always the same."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, job: JobDir, owner: object) -> Path:
        return job.root / self._name


@dataclass(frozen=True, slots=True)
class JobDir:
    """One job's folder."""

    root: Path

    origin = _PathInJob("origin")
    """Path of this folder when the job was submitted or last started; if it differs, the folder was moved or copied."""

    spec = _PathInJob("job.yaml")
    """The job file as it was submitted."""

    plan = _PathInJob("plan.json")
    """The plan that the supervisor works from (`plan.Plan`); a job is deleted when it is gone."""

    overrides = _PathInJob("overrides.json")
    """The changes of `--set` and `--backend` to the job file, a JSON list of `key=value`."""

    provenance = _PathInJob("provenance.json")
    """Git commit, versions of Python, torch and packages at submit."""

    dirty_diff = _PathInJob("code.diff")
    """The changes in the working tree that its commit lacked at submit."""

    scripts = _PathInJob("scripts")
    """The scripts that start the job, as `orch render` shows them: of the agent, and of sbatch."""

    code = _PathInJob("code")
    """The snapshot of the user's code, in which the ranks run."""

    snapshot_files = _PathInJob("snapshot.json")
    """The files of the snapshot, each with its size and time (`start_folder`)."""

    archive = _PathInJob("code.tar.gz")
    """The code for hosts that do not see this folder: the snapshot's copies, and what `ssh.sync` names."""

    hosts_file = _PathInJob("hosts.txt")
    """The user's `ssh.hosts_file` as it was at submit."""

    bundle = _PathInJob("orch.pyz")
    """The program of supervisor and agents, a zip application."""

    journal = _PathInJob("journal.jsonl")
    """The append-only journal: each event and decision, one JSON object a line."""

    facts = _PathInJob("facts.jsonl")
    """The facts at one line of the journal, so that only the lines after it need to be read."""

    state = _PathInJob("state.json")
    """The status as the supervisor last wrote it (`status_file`)."""

    series = _PathInJob("series.jsonl")
    """Measurements of the ranks over time (`series`)."""

    lock = _PathInJob("supervisor.lock")
    """Held (flock) by the one supervisor that may act."""

    resume_lock = _PathInJob("resume.lock")
    """Held (flock) by the one command that resumes the job."""

    supervisor_log = _PathInJob("supervisor.log")
    """The log of the supervisor process: its notes, and its last output when it failed."""

    given_up = _PathInJob("given-up")
    """Exists after the supervisor's watchdog has given up restarting it (`supervisor/supervisor_watchdog.py`), with the reason."""

    endpoint = _PathInJob("endpoint")
    """The addresses that agents dial, one `host:port` a line; rewritten when a supervisor comes back on another port."""

    requests = _PathInJob("requests")
    """The requests to the job after its submit, one numbered file each (`requests`)."""

    ended = _PathInJob("ended")
    """Exists when the job is over, so that a thousand old jobs cost one stat each."""

    slurm = _PathInJob("slurm.json")
    """Slurm's ids of the job, a JSON list, the present one last; written by the submit side."""

    queue = _PathInJob("queue.json")
    """The cluster in whose queue a Slurm job is, a JSON object; written by the submit side."""

    allocation = _PathInJob("allocation")
    """The Slurm allocation that the job is in now, `12.0`; written by its supervisor before its first order."""

    steps = _PathInJob("steps")
    """The srun steps that started agents, and their output, see `backends/slurm`."""

    cleaned_hosts = _PathInJob("swept.json")
    """The hosts from which the ended job was cleaned up, a JSON list."""

    secrets = _PathInJob("secrets")
    """The folder of private files: environment, secrets, keys, certificate."""

    webhook = _PathInJob("secrets/webhook")
    """The URL of the webhook that is notified, where the job has one."""

    checkpoints = _PathInJob("checkpoints")
    """The folder for checkpoints, as the ranks get it in ORCH_CHECKPOINT_DIR."""

    ledger = _PathInJob("checkpoints/ledger.jsonl")
    """The ledger of checkpoints (`core/checkpoints/ledger.py`); written by the supervisor."""

    logs = _PathInJob("logs")
    """The logs of all attempts."""

    batch_log = _PathInJob("logs/slurm.log")
    """The output of a Slurm job's batch script, with Slurm's own messages."""

    from_hosts = _PathInJob("from-hosts")
    """Files of checkpoints that a host had in a newer version than the job folder, after the end; by host."""

    @classmethod
    def at(cls, root: str) -> JobDir:
        """Return the job folder at `root`."""
        return cls(Path(root))

    @property
    def id(self) -> str:
        """The job's id, which is the name of its folder."""
        return self.root.name

    def checkpoint_location(self, glob: str) -> tuple[Path, str]:
        """Return the folder of a `checkpoint.path` on a rank's host, and the glob in it; an absolute glob stays."""
        if glob.startswith(CODE_PREFIX):
            return self.code, glob.removeprefix(CODE_PREFIX)
        return self.checkpoints, glob

    def attempt_logs(self, attempt: int) -> Path:
        """The logs of one attempt."""
        return self.logs / attempt_name(attempt)

    def rank_log(self, attempt: int, rank: int) -> Path:
        """The output of a rank in one attempt."""
        return self.attempt_logs(attempt) / f"{rank_name(rank)}.log"

    def rank_index(self, attempt: int, rank: int) -> Path:
        """The sparse time index of a rank's log (`log_index`)."""
        return self.attempt_logs(attempt) / f"{rank_name(rank)}.idx"

    def node_log(self, attempt: int, node: str) -> Path:
        """The notes of a node's agent in one attempt."""
        return self.attempt_logs(attempt) / f"node-{node}.log"

    def evidence(self, attempt: int) -> Path:
        """The evidence files of one attempt: stacks, kernel waits, open files, GPU use."""
        return self.root / "evidence" / attempt_name(attempt)

    def node(self, node: str) -> Path:
        """The agent's own files: its pid, its hook, and a folder for each rank that it ran."""
        return self.root / "nodes" / node

    def rank_run(self, node: str, attempt: int, rank: int) -> Path:
        """A rank's own files in one attempt: step file and error files."""
        return self.node(node) / attempt_name(attempt) / rank_name(rank)
