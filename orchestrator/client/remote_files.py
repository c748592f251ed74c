"""What of an ended job is still on its hosts? It is brought home, and swept when everything is.

Rules: nothing at home is ever overwritten: logs only grow by what is missing at their end, and of checkpoints only
files come that are not here. A host is swept only when all that it had is at home; which hosts are clean is kept in the
job's folder, so that nobody asks twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import fanout
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.client.job import Job
from orchestrator.core import codec
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import home, ownership, shipped_files
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.observations import Retryable
from orchestrator.core.wire.tokens import is_token
from orchestrator.supervisor.journal import journal_file, lost_journal

if TYPE_CHECKING:
    import paramiko

    from orchestrator.backends.ssh.connect.connection import Connection

FILES_MAX = 100_000
DEPTH_MAX = 8
READ_BYTES = 1 << 20
BEFORE_FOLDER = frozenset(("config", "connect", "host key", "auth", "forward", "shell", "python"))
"""The stages of a launch that leave nothing on a host."""

ALL_S_MAX = 24 * 3600.0
"""How long everything may take; a host that gives nothing is given up much sooner, by its connection."""


@dataclass(slots=True)
class Fetched:
    """What came home from a host, and what could not: a text each."""

    files: int = 0
    size_bytes: int = 0
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Account:
    """How it went, host by host: what came home, and why nothing could be done at others."""

    brought: dict[str, Fetched]
    failed: dict[str, LaunchError]

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing was left behind."""
        return not self.failed and not any(one.missing for one in self.brought.values())

    @property
    def clean(self) -> tuple[str, ...]:
        """Return the hosts at which nothing was left behind."""
        return tuple(host for host, one in self.brought.items() if not one.missing)

    def lines(self) -> list[str]:
        """Return what is to be told of each host at which something is left; what is to be done stands on a line below."""
        told = [f"{host}: {text}" for host, one in self.brought.items() for text in one.missing]
        return [
            *told,
            *(
                f"{host}: {err}" + (f"\n  fix: {err.fix}" if err.fix else "")
                for host, err in self.failed.items()
            ),
        ]


def collect(job: Job) -> Account:
    """Bring home what an ended job's hosts still have. Raises ClusterError when the job's folder is damaged."""
    return _visit_all(job, lambda _there, _host: None)


def clean_hosts(job: Job) -> Account:
    """Bring everything home, then end what an ended job left running on its hosts and remove its folders there.

    Raises ClusterError when the job's folder is damaged.
    """
    from orchestrator.backends.ssh import launch

    plan, bundle = job.plan(), job.folder.bundle.read_bytes()

    def clean(there: Connection, host: str) -> None:
        kit = launch.Launcher(_script(job.folder, host), bundle)
        swept = launch.clean_up(there, kit, remote_root(plan), job.id)
        if swept.kept and "submitted from" not in swept.kept:
            raise LaunchError("sweep", f"its folder was kept: {swept.kept}", "orch clean again later")
        _note_swept(job.folder, host)

    return _visit_all(job, clean)


def remote_root(plan: Plan) -> str:
    """Return where a job's folder is on its hosts, as the user wrote it."""
    assert plan.ssh is not None
    return f"{plan.ssh.remote_dir.rstrip('/')}/jobs/{plan.id}"


def hosts_used(job: Job) -> tuple[str, ...]:
    """Return the hosts on which a job may have left something: those that were not swept, and where a launch may have
    come as far as its folder."""
    plan = job.plan()
    if plan.ssh is None:
        return ()
    swept = _swept(job.folder)
    if lost_journal.lost(job.folder, plan):
        return tuple(node.name for node in plan.nodes if node.name not in swept)
    came: dict[str, int] = {}
    for one in journal_file.read_only(job.folder.journal, d.Launch, e.LaunchFailed):
        if isinstance(one, d.Launch):
            came[one.node] = came.get(one.node, 0) + 1
        elif isinstance(one, e.LaunchFailed) and one.stage in BEFORE_FOLDER:
            came[one.node] = came.get(one.node, 0) - 1
    return tuple(host for host, count in came.items() if count > 0 and host not in swept)


@ownership.closed_to_others()
def _visit_all(job: Job, then: Callable[[Connection, str], None]) -> Account:
    """Bring home what each host has, and do `then` there when nothing is missing. Raises UserError for
    a job that is not this user's alone: what its folder names would be done in his name."""
    home.require_ours(job.folder)
    plan, hosts = job.plan(), hosts_used(job)
    if plan.ssh is None or not hosts:
        return Account({}, {})
    fetcher = _Fetcher(job.folder, plan, _Pace(plan.ssh.copy_mb_s))

    def visit(there: Connection, host: str) -> Fetched:
        brought = fetcher.fetch(there, host)
        if not brought.missing:
            then(there, host)
        return brought

    said = fanout.each(hosts, plan.ssh, visit, limit_s=ALL_S_MAX)
    return Account(
        {host: one for host, one in said.items() if isinstance(one, Fetched)},
        {host: one for host, one in said.items() if isinstance(one, LaunchError)},
    )


_note_lock = threading.Lock()


def _note_swept(job: JobDir, host: str) -> None:
    with _note_lock:
        replace_text(job.cleaned_hosts, json.dumps(sorted({*_swept(job), host})))


def _swept(job: JobDir) -> frozenset[str]:
    try:
        return frozenset(codec.loads(tuple[str, ...], ownership.read_regular(job.cleaned_hosts)))
    except (OSError, codec.CodecError):
        return frozenset()


def _script(job: JobDir, host: str) -> str:
    """Return the launch script of a host; a resume may have left it out, and they differ in comments only."""
    for path in (job.scripts / f"{host}.sh", *sorted(job.scripts.glob("*.sh"))):
        with contextlib.suppress(OSError):
            return path.read_text()
    raise ClusterError(
        "the job's launch scripts are gone", str(job.scripts), f"remove jobs/{job.id} there by hand"
    )


class _Pace:
    """Keeps all copies together below a limit of speed."""

    def __init__(self, mb_s: float | None) -> None:
        self._bytes_per_s = None if mb_s is None else mb_s * 1e6
        self._free_s = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, size_bytes: int) -> None:
        """Wait as long as so many bytes may take."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + size_bytes / self._bytes_per_s
            wait_s = self._free_s - time.monotonic()
        time.sleep(max(0.0, wait_s))


@dataclass(frozen=True, slots=True)
class _There:
    """A host that is visited."""

    connection: Connection
    sftp: paramiko.SFTPClient


class _Fetcher:
    """Brings one job's files home from any of its hosts; hosts may share a disk, so a file has one reader at a time."""

    def __init__(self, job: JobDir, plan: Plan, pace: _Pace) -> None:
        self._job = job
        self._root = _relative(remote_root(plan))
        self._pace = pace
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def fetch(self, there: Connection, host: str) -> Fetched:
        """Bring home what a host has and this folder lacks."""
        brought = Fetched()
        sftp = there.sftp()
        try:
            if self._is_own(sftp):
                return brought
            for name, size_bytes in _files(sftp, self._root):
                if shipped_files.may_send(host, name) or name.startswith("checkpoints/"):
                    with self._turn(name):
                        self._bring(_There(there, sftp), name, size_bytes, brought)
        finally:
            sftp.close()
        return brought

    def _is_own(self, sftp: paramiko.SFTPClient) -> bool:
        """Tell whether the host sees this very folder."""
        try:
            own = (self._job.secrets / "token").read_text(encoding="ascii", errors="replace")
            with sftp.open(f"{self._root}/secrets/token") as file:
                return is_token(own.strip()) and bool(file.read(READ_BYTES) == own.encode())
        except OSError:
            return False

    def _bring(self, there: _There, name: str, size_bytes: int, brought: Fetched) -> None:
        home = self._job.root / name
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            if name.startswith("checkpoints/"):
                came = self._whole(there, name, home) if not os.path.lexists(home) else 0
            else:
                came = self._tail(there, name, home, size_bytes)
        except OSError as err:
            brought.missing.append(f"{name} could not be brought home: {err.strerror or err}")
            return
        brought.files += came > 0
        brought.size_bytes += came

    def _tail(self, there: _There, name: str, home: Path, size_bytes: int) -> int:
        """Append what is missing at the end of a file that only grows."""
        with home.open("ab") as out:
            begin = out.tell()
            if size_bytes > begin:
                for piece in self._read(there, name, begin, size_bytes):
                    out.write(piece)
            return out.tell() - begin

    def _whole(self, there: _There, name: str, home: Path) -> int:
        """Bring a file under another name, and give it its own when it is whole."""
        about = there.sftp.stat(f"{self._root}/{name}")
        size_bytes, mtime_s = about.st_size or 0, about.st_mtime or 0
        part = home.with_name(f".{home.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as out:
                for piece in self._read(there, name, 0, size_bytes):
                    out.write(piece)
            os.utime(part, (mtime_s, mtime_s))
            part.replace(home)
        finally:
            part.unlink(missing_ok=True)
        return size_bytes

    def _read(self, there: _There, name: str, begin: int, end: int) -> Iterator[bytes]:
        from orchestrator.backends.ssh.copy import sftp as sftp_copy

        path = PurePosixPath(there.sftp.normalize("."), self._root, name)  # where SFTP begins
        with contextlib.closing(sftp_copy.tail(there.connection, str(path), begin)) as remote:
            for piece in sftp_copy.blocks(remote, end - begin):
                self._pace.advance(len(piece))
                yield piece

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            yield


def _relative(root: str) -> str:
    """Return a folder as SFTP finds it, which begins in the home folder and knows no `~`."""
    if root == "~" or root.startswith("~/"):
        return root[2:] or "."
    if root.startswith("~"):
        raise ClusterError(
            f"{root} cannot be found over SFTP",
            "ssh.remote_dir",
            "copy it home by hand: scp -r; then remove it there",
        )
    return root


def _files(sftp: paramiko.SFTPClient, root: str) -> Iterator[tuple[str, int]]:
    """Yield the files of a job on a host that may have to come home, each with its size."""
    count = 0
    todo = [("logs", 1), ("evidence", 1), ("nodes", 1), ("checkpoints", 1)]
    while todo:
        folder, depth = todo.pop()
        try:
            entries = sorted(sftp.listdir_attr(f"{root}/{folder}"), key=lambda entry: entry.filename)
        except FileNotFoundError:
            continue
        except OSError as err:
            reason = f"{folder} of the job cannot be listed: {err.strerror or err}"
            raise LaunchError("folder", reason, "make it readable there", Retryable.PERMANENT) from err
        for entry in entries:
            name, mode = f"{folder}/{entry.filename}", entry.st_mode or 0
            if "/" in entry.filename or entry.filename.startswith("."):
                continue  # a file on its way, or what no host has any business with
            count += 1
            if count > FILES_MAX:
                raise LaunchError(
                    "folder", f"more than {FILES_MAX} files of the job", "copy them by hand: scp -r"
                )
            if stat.S_ISDIR(mode) and depth < DEPTH_MAX:
                todo.append((name, depth + 1))
            elif stat.S_ISREG(mode):
                yield name, entry.st_size or 0


def summary(accounts: Iterable[Account]) -> str:
    """Return in one line what came home, of all jobs; empty when everything was home before."""
    all_brought = [one for account in accounts for one in account.brought.values()]
    files = sum(one.files for one in all_brought)
    size_mb = sum(one.size_bytes for one in all_brought) / 1e6
    hosts = len(all_brought)
    if not files:
        return ""
    return f"{files} file{'s' if files != 1 else ''} ({size_mb:.1f} MB) came from {hosts} host{'s' if hosts != 1 else ''}"
