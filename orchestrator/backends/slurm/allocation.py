"""Allocation: the nodes that Slurm has allocated to this job, and a thread that checks, on hints, whether Slurm takes
them away.

Hints are signals to this process (USR1: the time limit is near; TERM: the end) and an agent's report that its node's
processes were signalled to end: where a grace period begins, Slurm signals the steps and not the batch script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.api import AllocationEnd
from orchestrator.backends.slurm import control, end_causes
from orchestrator.core import codec
from orchestrator.core.errors import OwnershipLostError
from orchestrator.core.host import interfaces
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.slurm.hostlist import expand
from orchestrator.core.slurm.job_states import Stage

RECORD_S_MAX = 60.0
"""How long after its start an allocation may be missing in the job folder: its id is written after sbatch returns."""

RECORD_POLL_S = 0.1

EXPLAIN_S_MAX = 3.0
"""How long Slurm may take to explain a TERM."""

CHECK_PAUSE_S = 0.2
OUTPUT_BYTES_MAX = 1 << 20

# Hints, the strongest last; a byte each, since a signal handler may do little more than write one.
_CHECK, _LIMIT, _END, _CLOSE = b"0", b"1", b"2", b"9"


@dataclass(frozen=True, slots=True)
class Grant:
    """An allocation as Slurm describes it to the processes in it."""

    job_id: str
    restarts: int
    nodes: tuple[str, ...]

    @property
    def id(self) -> str:
        """The name of this allocation, unique among all of the Slurm job."""
        return f"{self.job_id}.{self.restarts}"


def find_grant(job: JobDir, environ: Mapping[str, str]) -> Grant | None:
    """Return the allocation that this process is in; None when it is in none. Raises NotOursError."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    deadline_s = time.monotonic() + RECORD_S_MAX
    while job_id not in (ids := _ids(job)):
        if time.monotonic() > deadline_s:
            raise OwnershipLostError(f"Slurm job {job_id} is not listed in {job.slurm}")
        time.sleep(RECORD_POLL_S)
    if ids[-1] != job_id:
        raise OwnershipLostError(f"this is Slurm job {job_id}, and the job now runs in Slurm job {ids[-1]}")
    try:
        nodes = expand(environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError as err:
        raise OwnershipLostError(f"SLURM_JOB_NODELIST cannot be read: {err}") from err
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return Grant(job_id, int(restarts) if restarts.isdigit() else 0, nodes)


def _ids(job: JobDir) -> list[str]:
    """Return the ids of the job's Slurm jobs, the present one last; none while they cannot be read."""
    try:
        return list(codec.loads(tuple[str, ...], job.slurm.read_bytes()))
    except (OSError, codec.CodecError):
        return []


class SlurmAllocation:
    """The allocation that this process runs in; see `backends.api.Allocation`."""

    def __init__(self, job: JobDir, grant: Grant, notice_s: float, wake: Callable[[], None]) -> None:
        """`notice_s`: how long before the time limit, at the earliest, Slurm sends USR1; `wake` is called, from any
        thread, when `endings` has something to return."""
        self._grant = grant
        self._notice_s = notice_s
        self._output = job.batch_log  # there Slurm prints why it ends a job
        self._output_begin_bytes = _read_output_begin(job.steps / f"{grant.id}.begun", self._output)
        self._wake = wake
        self._lock = threading.Lock()
        self._endings: list[AllocationEnd] = []
        self._reported: AllocationEnd | None = None
        self._kill_s = control.KILL_WAIT_S
        self._hints_fd, self._hint_fd = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="slurm", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """See `Grant.id`."""
        return self._grant.id

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes, as Slurm calls them."""
        return self._grant.nodes

    def addresses(self) -> list[str]:
        """Return where the other nodes may reach this one, best first."""
        return [address.ip for address in interfaces.list_addresses()] or [socket.gethostname()]

    def watch_signals(self, earlier_signals: str) -> None:
        """Take Slurm's signals for hints, and check at once; `earlier_signals` names those that the batch script received
        before this process began."""
        signal.signal(signal.SIGUSR1, lambda signum, frame: self._hint(_LIMIT))
        signal.signal(signal.SIGTERM, lambda signum, frame: self._hint(_END))
        self._hint(_END if "TERM" in earlier_signals else _LIMIT if "USR1" in earlier_signals else _CHECK)

    def check(self) -> None:
        """Ask Slurm in the background whether the nodes will be taken away."""
        self._hint(_CHECK)

    def endings(self) -> list[AllocationEnd]:
        """Return what was learned of the end since the last call."""
        with self._lock:
            endings, self._endings = self._endings, []
        return endings

    def requeue(self, avoid: Mapping[str, str]) -> str:
        """Give the nodes back and wait for others; return why that failed, empty when it did not. This blocks."""
        return control.requeue(self._grant.job_id, avoid)

    def close(self) -> None:
        """End the thread."""
        self._hint(_CLOSE)

    def _hint(self, hint: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._hint_fd, hint)

    def _serve(self) -> None:
        """Follow up hints, the strongest first, until one of them proves right."""
        self._kill_s = control.kill_wait_s()
        while True:
            hints = sorted(set(os.read(self._hints_fd, 4096)), reverse=True)
            if ord(_CLOSE) in hints:
                return
            endings = (self._find_end(bytes([hint])) for hint in hints)
            ending = next((ending for ending in endings if ending is not None), None)
            if ending is None or (self._reported is not None and self._reported.cause is ending.cause):
                continue
            self._reported = ending
            with self._lock:
                self._endings.append(ending)
            self._wake()

    def _find_end(self, hint: bytes) -> AllocationEnd | None:
        """Return the ending from the daemons' output or scontrol; for a TERM, ask again until it is explained."""
        job_id, deadline_s = self._grant.job_id, time.monotonic() + EXPLAIN_S_MAX
        while True:
            ending = end_causes.find_printed_end(job_id, self._read_output(), self._kill_s)
            if ending is not None:
                return ending
            job = control.show_job(job_id)
            ending = end_causes.find_job_end(job, self._grant.restarts, self._kill_s) if job else None
            if ending is not None:
                return ending
            if hint == _LIMIT:
                return self._find_limit_end(job)
            if hint == _CHECK and (job is None or job.is_running or job.stage is Stage.UNKNOWN):
                return None
            if time.monotonic() > deadline_s:
                return end_causes.explain_term(job, self._kill_s)
            time.sleep(CHECK_PAUSE_S)

    def _find_limit_end(self, job: end_causes.SlurmJobInfo | None) -> AllocationEnd | None:
        ending = end_causes.find_limit_end(job, self._notice_s)
        if ending is None:
            print("a USR1 came long before the time limit: Slurm has not sent it, and it is ignored", flush=True)
        return ending

    def _read_output(self) -> list[str]:
        """Return what was printed since this allocation began: the file holds the output of earlier ones, too."""
        try:
            with self._output.open("rb") as file:
                file.seek(max(self._output_begin_bytes, self._output.stat().st_size - OUTPUT_BYTES_MAX))
                return file.read(OUTPUT_BYTES_MAX).decode(errors="replace").splitlines()
        except OSError:
            return []


def _read_output_begin(mark: Path, output: Path) -> int:
    """Return how long the output was when the first supervisor of this allocation began."""
    try:
        return int(mark.read_text())
    except (OSError, ValueError):
        size_bytes = output.stat().st_size if output.exists() else 0
    with contextlib.suppress(OSError):
        mark.parent.mkdir(exist_ok=True)
        replace_text(mark, str(size_bytes), durable=False)
    return size_bytes
