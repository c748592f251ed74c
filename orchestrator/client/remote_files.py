"""Files of an ended job on its SSH hosts: fetched into the job folder, after which a host can be cleaned up.

Rules: nothing in the job folder is ever overwritten: logs only grow by what is missing at their end, and where a file
of a checkpoint comes is decided by `collect.FetchTargets`. A host is cleaned up only when all its files were fetched; the job folder keeps
which hosts are clean, so that no host is contacted twice.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from orchestrator.backends.api import Copy, Direction, LaunchError
from orchestrator.backends.ssh import fanout
from orchestrator.backends.ssh.copy.copy_task import ConnectionBroken, CopyTask, RateLimit
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.client import host_listing, job_checkpoints
from orchestrator.client.collect import (
    OTHERS_BYTES_MAX,
    FetchTargets,
    describe_left_out,
    is_rank_file,
)
from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.checkpoints.checkpoint import CheckpointFile
from orchestrator.core.errors import ClusterError, HostError
from orchestrator.core.jobdir import home, locks, ownership, requests
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.text import format_count, shorten_list
from orchestrator.core.wire import shipped_files
from orchestrator.core.wire.tokens import is_token
from orchestrator.journal import journal_file, journal_integrity
from orchestrator.supervisor.transfers.checkpoint_disk import LocalCheckpointFolders

if TYPE_CHECKING:
    import paramiko

    from orchestrator.backends.ssh.connect.connection import Connection
    from orchestrator.backends.ssh.copy.sftp import SftpCopy

CONFLICTS_SHOWN = 5
"""How many files of a host are named that conflict with local ones, or are not regular files."""

READ_BYTES = 1 << 20
STAGES_BEFORE_FOLDER = frozenset(("config", "connect", "host key", "auth", "forward", "shell", "python"))
"""The stages in which a failed launch left nothing on a host."""

ALL_S_MAX = 24 * 3600.0
"""Limit on the whole; the connection to a host that does not answer times out much sooner."""


@dataclass(slots=True)
class Fetched:
    """Files fetched from a host; `missing`: a text for each that could not be; `conflicts`: for each that conflicts with
    another one of the same name, or is not a regular file."""

    files: int = 0
    size_bytes: int = 0
    missing: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FetchReport:
    """Outcome of a fetch from all hosts: what was fetched from each, and why a host failed."""

    fetched: dict[str, Fetched]
    failed: dict[str, LaunchError]

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left on any host."""
        return not self.failed and not any(fetched.missing for fetched in self.fetched.values())

    @property
    def clean_hosts(self) -> tuple[str, ...]:
        """The hosts on which nothing was left."""
        return tuple(host for host, fetched in self.fetched.items() if not fetched.missing)

    def lines(self) -> list[str]:
        """Return a text for each file that was left on a host, with its fix on a line below, or that conflicts with another."""
        missing = [
            f"{host}: {text}"
            for host, fetched in self.fetched.items()
            for text in (*fetched.missing, *shorten_list(fetched.conflicts, CONFLICTS_SHOWN, "like these"))
        ]
        fixes = {host: f"\n  fix: {err.fix}" if err.fix else "" for host, err in self.failed.items()}
        return [*missing, *(f"{host}: {err}{fixes[host]}" for host, err in self.failed.items())]


def collect(job: Job, *, everything: bool = False) -> FetchReport:
    """Fetch what an ended job's hosts still have; `everything`: without a limit on its size. Raises ClusterError when the job's folder is
    damaged."""
    return _run_on_hosts(job, lambda _connection, _host: None, everything=everything)


def clean_hosts(job: Job, *, discard: bool = False) -> FetchReport:
    """Fetch everything, then end what an ended job left running on its hosts and remove its folders there. A host with files that
    could not be fetched keeps them, unless they are to be `discard`ed.

    Raises ClusterError when the job's folder is damaged.
    """
    from orchestrator.backends.ssh import launch

    plan, bundle = job.plan(), job.folder.bundle.read_bytes()

    def clean(connection: Connection, host: str) -> None:
        launcher = launch.Launcher(_launch_script(job.folder, host), bundle)
        cleanup = launch.clean_up(connection, launcher, remote_root(plan), job.id)
        if cleanup.kept_reason:
            raise LaunchError("cleanup", f"its folder was kept: {cleanup.kept_reason}", "run orch clean again later")
        _record_clean(job.folder, host)

    return _run_on_hosts(job, clean, discard=discard)


def remote_root(plan: Plan) -> str:
    """Return where a job's folder is on its hosts, as the user wrote it."""
    assert plan.ssh is not None
    return f"{plan.ssh.remote_dir.rstrip('/')}/jobs/{plan.id}"


def hosts_used(job: Job) -> tuple[str, ...]:
    """Return the hosts on which a job may have left files.

    These are the hosts that were not cleaned up and on which a launch may have created the job's folder.
    """
    plan = job.plan()
    if plan.ssh is None:
        return ()
    clean = _load_clean_hosts(job.folder)
    if journal_integrity.find_loss(job.folder):
        return tuple(node.name for node in plan.nodes if node.name not in clean)
    launches: dict[str, int] = {}
    for news in journal_file.read_kinds(job.folder.journal, d.Launch, e.LaunchFailed):
        if isinstance(news, d.Launch):
            launches[news.node] = launches.get(news.node, 0) + 1
        elif isinstance(news, e.LaunchFailed) and news.stage in STAGES_BEFORE_FOLDER:
            launches[news.node] = launches.get(news.node, 0) - 1
    return tuple(host for host, count in launches.items() if count > 0 and host not in clean)


@ownership.restricted_umask()
def _run_on_hosts(
    job: Job, action: Callable[[Connection, str], None], *, everything: bool = False, discard: bool = False
) -> FetchReport:
    """Fetch the files of each host, and run `action` there when nothing is missing, or what is may be discarded.

    No host is contacted while another command works on the job, or after it was resumed. Raises UserError for a job that is not this
    user's alone: its folder names the hosts and the scripts that run there.
    """
    home.require_own_job(job.folder)
    plan, hosts = job.plan(), hosts_used(job)
    if plan.ssh is None or not hosts:
        return FetchReport({}, {})
    others_bytes_max = float("inf") if everything else OTHERS_BYTES_MAX
    fetcher = _Fetcher(job.folder, plan, RateLimit(plan.ssh.copy_mb_s), others_bytes_max)

    def visit(connection: Connection, host: str) -> Fetched:
        fetched = fetcher.fetch(connection, host)
        if discard:
            fetched.missing.clear()
        if not fetched.missing:
            action(connection, host)
        return fetched

    try:
        with locks.hold_ended_job(job.folder):
            results = fanout.run_on_each(hosts, plan.ssh, visit, limit_s=ALL_S_MAX)
    except (ClusterError, OSError) as err:  # local files can be collected anyway
        fault = requests.make_write_error(err, job.folder.root) if isinstance(err, OSError) else err
        return FetchReport({}, {"its hosts": LaunchError("folder", fault.what, fault.fix)})
    return FetchReport(
        {host: result for host, result in results.items() if isinstance(result, Fetched)},
        {host: result for host, result in results.items() if isinstance(result, LaunchError)},
    )


_record_lock = threading.Lock()


def _record_clean(job: JobDir, host: str) -> None:
    with _record_lock:
        replace_text(job.cleaned_hosts, json.dumps(sorted({*_load_clean_hosts(job), host})))


def _load_clean_hosts(job: JobDir) -> frozenset[str]:
    try:
        return frozenset(codec.loads(tuple[str, ...], ownership.read_regular(job.cleaned_hosts)))
    except (OSError, codec.CodecError):
        return frozenset()


def _launch_script(job: JobDir, host: str) -> str:
    """Return the launch script of a host. A resume may have dropped it: then another one, since they differ only in comments."""
    for path in (job.scripts / f"{host}.sh", *sorted(job.scripts.glob("*.sh"))):
        with contextlib.suppress(OSError):
            return path.read_text()
    raise ClusterError("the job's launch scripts are missing", str(job.scripts), f"remove jobs/{job.id} there by hand")


class _Fetcher:
    """Fetcher of a job's files from its hosts, which may share a disk: each file is fetched by one thread at a time."""

    def __init__(self, job: JobDir, plan: Plan, limit: RateLimit, others_bytes_max: float) -> None:
        """`others_bytes_max`: see `FetchTargets.too_large`."""
        self._job = job
        self._root = _sftp_path(remote_root(plan))
        self._brought = host_listing.sizes_in_archive(job)
        self._arrivals = FetchTargets(job, LocalCheckpointFolders(job, plan), job_checkpoints.load_checkpoints(job))
        self._limit, self._others_bytes_max = limit, others_bytes_max
        self._locks: dict[str, threading.Lock] = {}

    def fetch(self, connection: Connection, host: str) -> Fetched:
        """Fetch the files of a host that the job folder lacks."""
        from orchestrator.backends.ssh.copy.sftp import SftpCopy

        fetched = Fetched()
        with contextlib.closing(connection.sftp()) as client:
            if self._shares_job_folder(client):
                return fetched
            files = [*host_listing.list_files(client, self._root, self._brought, fetched.missing, fetched.conflicts)]
            left = self._arrivals.too_large(files, self._others_bytes_max)
            root = PurePosixPath(client.normalize("."), self._root)  # SFTP starts there, a shell may not
            copy = Copy("collect", host, Direction.FETCH, str(root), self._job.root, ())
            session = SftpCopy(CopyTask(copy, self._limit), connection, client)
            for file in files:
                if file.name not in left and (shipped_files.may_send(host, file.name) or is_rank_file(file.name)):
                    with self._locks.setdefault(file.name, threading.Lock()):
                        self._fetch_file(session, file, fetched)
            fetched.missing += describe_left_out(left)
        return fetched

    def _shares_job_folder(self, sftp: paramiko.SFTPClient) -> bool:
        """Return whether the host's folder is this one, on a shared disk."""
        try:
            token = (self._job.secrets / "token").read_text(encoding="ascii", errors="replace")
            with sftp.open(f"{self._root}/secrets/token") as file:
                return is_token(token.strip()) and bool(file.read(READ_BYTES) == token.encode())
        except OSError:
            return False

    def _fetch_file(self, session: SftpCopy, file: CheckpointFile, fetched: Fetched) -> None:
        task = session.task
        task.done_bytes = 0
        try:
            path = self._arrivals.target(task.copy.node, file)
            if path is None:
                return
            if is_rank_file(file.name):
                session.fetch(file.name, path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                session.append(file.name, path, file.size_bytes)
            is_extra_version = path.is_relative_to(self._job.from_hosts)
            if is_extra_version and self._arrivals.drop_duplicate(file, path):
                return
        except (OSError, HostError, ConnectionBroken) as err:
            why = (err.strerror if isinstance(err, OSError) else None) or err
            fetched.missing.append(f"{file.name} could not be fetched: {why}")
            return
        if is_extra_version:
            fetched.conflicts.append(f"{file.name} differs from the one in the job folder; it was saved as {path}")
        fetched.files += task.done_bytes > 0
        fetched.size_bytes += task.done_bytes


def _sftp_path(root: str) -> str:
    """Return a folder for SFTP: relative to the user's home folder, since SFTP does not know `~`."""
    if root == "~" or root.startswith("~/"):
        return root[2:] or "."
    if root.startswith("~"):
        raise ClusterError(
            f"{root} cannot be resolved over SFTP",
            "ssh.remote_dir",
            "copy it by hand (scp -r), then remove it there",
        )
    return root


def summarize(accounts: Iterable[FetchReport]) -> str:
    """Return in one line what was fetched for all jobs; empty for nothing."""
    nonempty = [one for account in accounts for one in account.fetched.values() if one.files]
    files = sum(fetched.files for fetched in nonempty)
    size_mb = sum(fetched.size_bytes for fetched in nonempty) / 1e6
    return (
        f"fetched {format_count(files, 'file')} ({size_mb:.1f} MB) from {format_count(len(nonempty), 'host')}"
        if files
        else ""
    )
