"""What does Slurm's queue say of jobs? One squeue for all of them, and seldom.

Rules: however many jobs are asked for, a look is one squeue (and once in a process one scontrol), and at most one sacct
for those that squeue does not know; looks come 2 s apart, and up to 30 s apart while nothing changes. A Slurm that does
not answer changes nothing: what it said last stands, with its age and why there is no news. A job is forgotten only when
Slurm has said so twice, some time apart. A look runs beside: who knows something already waits a second at most, and
the next caller finds what it brought.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from orchestrator.node import scontrol
from orchestrator.node.orphan import is_orphaned
from orchestrator.slurm import environment, words
from orchestrator.slurm.words import Cluster, QueueJob, Stage

SOON_S = 2.0
SELDOM_S = 30.0
"""How far looks are apart: right after a change, and when nothing has changed for long."""

ASK_S_MAX = 6.0
"""How long Slurm may take to answer a question; with slurmctld down its commands give up after 9 to 12 s."""

DEED_S_MAX = 20.0
"""How long it may take to do something."""

FIRST_S_MAX = 10.0
"""How long a caller waits for a look when nothing is known yet."""

AGAIN_S_MAX = 1.0
"""How long a caller waits for a look when the last one's answer is there."""

CONFIRM_S = 2.0
"""How long after the first time Slurm is asked again for a job that it does not know."""

WANTED_S = 120.0
"""How long a job is looked for after somebody has last asked for it."""

CANCEL_APART_S = 5.0
OUTPUT_CHARS_MAX = 300

IS_PENDING = "Job is pending execution"
"""What Slurm says to a requeue of a job that waits in the queue."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a command said; `silent`: why it has not said anything."""

    out: str
    err: str
    code: int
    silent: str = ""


def command(argv: list[str], environ: Mapping[str, str], limit_s: float = ASK_S_MAX) -> Said:
    """Run one of Slurm's commands, within a limit. The user's formats (SQUEUE_FORMAT, SLURM_TIME_FORMAT) are kept from
    it, as is what another job of Slurm has left in the environment."""
    env = {**environment(environ), "TZ": "UTC", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", env=env, timeout=limit_s,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return Said("", "", 127, f"there is no {argv[0]} on this machine")
    except subprocess.TimeoutExpired:
        return Said("", "", 124, f"{argv[0]} gave no answer within {limit_s:g} s")
    except OSError as err:
        return Said("", "", 126, f"{argv[0]} cannot be run: {err.strerror}")
    return Said(done.stdout, done.stderr, done.returncode)


class Queue:
    """Slurm's queue, as this process sees it."""

    def __init__(
        self,
        environ: Callable[[], Mapping[str, str]] = lambda: os.environ,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._environ = environ
        self._clock_s = clock_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._known: dict[str, QueueJob] = {}
        self._heard_at: dict[str, float] = {}
        self._wanted_at: dict[str, float] = {}
        self._cancelled_at: dict[str, float] = {}
        self._silent = ""
        self._looked_at = float("-inf")
        self._apart_s = SOON_S
        self._cluster: Cluster | None = None
        self._cluster_lock = threading.Lock()

    def look(self, ids: Iterable[str], age_s_max: float = SELDOM_S) -> dict[str, QueueJob]:
        """Return each of these jobs as Slurm last told of it; asks Slurm when it is time to, or when nothing is known
        of one of them, or what is known is older than `age_s_max` (and `SOON_S`)."""
        wanted = list(dict.fromkeys(ids))
        with self._lock:
            now_s = self._clock_s()
            self._wanted_at.update(dict.fromkeys(wanted, now_s))
            is_first = any(job_id not in self._known for job_id in wanted)
            is_new = any(job_id not in self._heard_at for job_id in wanted) and not self._silent
            apart_s = min(self._apart_s, max(SOON_S, age_s_max))
            if self._worker is None and wanted and (is_new or now_s - self._looked_at >= apart_s):
                asked = [job_id for job_id, at in self._wanted_at.items() if now_s - at <= WANTED_S]
                self._worker = threading.Thread(target=self._look, args=(asked,), daemon=True)
                self._worker.start()
            worker = self._worker
        if worker is not None:
            worker.join(FIRST_S_MAX if is_first else AGAIN_S_MAX)
        with self._lock:
            return {job_id: self._told(job_id) for job_id in wanted}

    def detail(self, job: QueueJob) -> QueueJob:
        """Return a job that is over with who ended it and how, where Slurm or its accounts tell; as it is now, if it is
        over no more."""
        shown = command(["scontrol", "show", "job", "-o", job.id], self._environ())
        found = words.scontrol_job(shown.out) or job
        if not is_over(found):
            return found  # somebody has put it back into the queue since
        kept = self._accounts([job.id]).get(job.id)
        more = replace(job, exit=found.exit or job.exit, restarts=found.restarts)
        if kept is None or kept.state != job.state:
            return more
        return replace(more, by=kept.by, exit=kept.exit)

    def cancel(self, job_id: str, *, again: bool = False) -> str:
        """Take a job out of the queue or off its nodes; return Slurm's words when it refuses, else nothing.

        `again`: somebody may have done so just now, and nothing is done twice within `CANCEL_APART_S`.
        """
        with self._lock:
            now_s = self._clock_s()
            if again and now_s - self._cancelled_at.get(job_id, float("-inf")) < CANCEL_APART_S:
                return ""
            self._cancelled_at[job_id] = now_s
        said = command(["scancel", job_id], self._environ(), DEED_S_MAX)
        self.expect_news()
        return "" if not said.code else said.silent or _last_line(said.err)

    def bring_back(self, job_id: str) -> str:
        """Put a job that runs on without its batch script back into the queue; return what is lost and Slurm's words when
        it refuses, nothing when that is done, or nothing is lost, or Slurm does not say."""
        shown = command(["scontrol", "show", "job", "-o", job_id], self._environ())
        job = scontrol.fields(shown.out) if shown.code == 0 else {}
        if not is_orphaned(job, job.get("Restarts", "")):
            return ""
        said = command(["scontrol", "requeue", job_id], self._environ(), DEED_S_MAX)
        self.expect_news()
        if not said.code or IS_PENDING in said.err:  # somebody else was faster
            return ""
        refusal = said.silent or _last_line(said.err) or f"scontrol ended with {said.code}"
        lost = (
            f"{job['BatchHost']} is lost, and the supervisor with it: Slurm job {job_id} runs on for nothing"
        )
        return f"{lost}, and cannot be requeued: {refusal}"

    def expect_news(self) -> None:
        """Look again at the next opportunity: something was done that the queue will tell of."""
        with self._lock:
            self._looked_at, self._apart_s = float("-inf"), SOON_S

    @property
    def cluster_name(self) -> str:
        """Return the cluster's name as a look has found it; empty before the first that got an answer."""
        return self._cluster.name if self._cluster is not None else ""

    def cluster(self) -> Cluster | None:
        """Return what Slurm is set up like, asked once; None while it does not answer."""
        with self._cluster_lock:
            if self._cluster is None:
                said = command(["scontrol", "show", "config"], self._environ())
                if said.code == 0:
                    self._cluster = words.scontrol_config(said.out)
            return self._cluster

    def ask_ahead(self) -> None:
        """Begin to ask what Slurm is set up like, for a `cluster` that comes later."""
        threading.Thread(target=self.cluster, daemon=True).start()

    def _told(self, job_id: str) -> QueueJob:
        known = self._known.get(job_id)
        if known is None:
            return QueueJob(job_id, "UNKNOWN", silent=self._silent or "there is no answer yet")
        heard_s = max(0.0, self._clock_s() - self._heard_at[job_id])
        return replace(known, silent=self._silent, heard_s=round(heard_s, 1))

    def _look(self, ids: list[str]) -> None:
        """Ask Slurm for jobs, and keep what it says."""
        try:
            found, silent = self._ask(ids)
        except Exception as err:  # a thread's last word: nobody waits for what it does not say
            found, silent = {}, f"asking it went wrong: {err}"
        with self._lock:
            now_s = self._clock_s()
            before = {job_id: _news(self._known[job_id]) for job_id in ids if job_id in self._known}
            self._known.update(found)
            self._heard_at.update(dict.fromkeys(found, now_s))
            after = {job_id: _news(self._known[job_id]) for job_id in ids if job_id in self._known}
            changed = before != after or bool(self._silent) != bool(silent)
            self._apart_s = SOON_S if changed else min(SELDOM_S, 2 * self._apart_s)
            self._silent, self._looked_at, self._worker = silent, now_s, None

    def _ask(self, ids: list[str]) -> tuple[dict[str, QueueJob], str]:
        """Return the jobs as Slurm tells of them now, and why it tells nothing, if so."""
        found, silent = self._squeue(ids)
        if not silent:
            self.cluster()
        missing = [job_id for job_id in ids if job_id not in found]
        if silent or not missing:
            return found, silent
        found |= self._accounts(missing)
        left = [job_id for job_id in missing if job_id not in found]
        if not left:
            return found, ""
        with self._lock:
            confirmed = [one for one in left if one in self._known and self._known[one].state == "FORGOTTEN"]
        if len(confirmed) < len(left):
            self._sleep(CONFIRM_S)
            again, silent = self._squeue(left)
            if silent:
                return found, silent
            found |= again
        return {**{job_id: QueueJob(job_id, "FORGOTTEN") for job_id in left}, **found}, ""

    def _squeue(self, ids: list[str]) -> tuple[dict[str, QueueJob], str]:
        argv = ["squeue", "-h", "--states=all", "-o", words.SQUEUE_FORMAT, "-j", ",".join(ids)]
        said = command(argv, self._environ())
        if (
            said.code == 0 or words.UNKNOWN_ID in said.err
        ):  # of a single id; of several it lists those that it knows
            wanted = frozenset(ids)
            return {one.id: one for one in words.squeue(said.out).values() if one.id in wanted}, ""
        return {}, said.silent or _last_line(said.err) or f"squeue ended with {said.code}"

    def _accounts(self, ids: list[str]) -> dict[str, QueueJob]:
        """Return what accounting tells of jobs that are over; nothing where there is none."""
        cluster = self.cluster()
        if cluster is None or not cluster.has_accounts:
            return {}
        argv = [
            "sacct",
            "-n",
            "-X",
            "-P",
            "--duplicates",
            f"--format={words.SACCT_FORMAT}",
            "-j",
            ",".join(ids),
        ]
        return words.sacct(command(argv, self._environ()).out, _user_name)


def _news(job: QueueJob) -> tuple[str, str, str]:
    """Return what makes a job's state another: an expected start is estimated anew all the time."""
    return job.state, job.reason, job.nodes


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:OUTPUT_CHARS_MAX] if lines else ""


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"user {uid}"


def is_over(job: QueueJob) -> bool:
    """Tell whether a job will never run again, as far as Slurm says."""
    return job.stage in (Stage.OVER, Stage.FORGOTTEN)
