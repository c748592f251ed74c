"""Job handle `Job`, for notebooks and scripts; the command line's verbs are thin over it.

>>> import orchestrator
>>> job = orchestrator.submit("job.yaml")
>>> job.wait()["state"]
'SUCCEEDED'
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.client.job_source import JobSource
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import home, locks, requests, status_file
from orchestrator.core.jobdir.layout import JobDir, rank_name
from orchestrator.core.jobdir.status_file import Status

if TYPE_CHECKING:
    from orchestrator.client.logs.reader import LogLine, LogQuery
    from orchestrator.core.checkpoints.resume_choice import ResumeChoice
    from orchestrator.core.jobdir.plan import Plan
    from orchestrator.core.secret_mask import Mask
    from orchestrator.journal.goodput import Goodput
    from orchestrator.journal.job_record import Record
    from orchestrator.spec.load import SpecFile
    from orchestrator.submission.submit import SubmitKey

POLL_S = 0.1


@dataclass(frozen=True, slots=True, repr=False)
class Job:
    """One job, by its folder."""

    folder: JobDir

    @property
    def id(self) -> str:
        """The job's id, which is its folder's name."""
        return self.folder.id

    @property
    def name(self) -> str:
        """The name that the spec gives it."""
        return home.name_of(self.folder.id)

    @property
    def reference(self) -> str:
        """The job's reference in commands: its name if that is unique, else its id."""
        return home.reference(self.folder)

    def status(self) -> Json:
        """Return one object of `orch status --json`.

        A dead supervisor is restarted, and a job that Slurm has ended is closed. Raises ClusterError when
        that is not possible, or when the job's folder is damaged.
        """
        from orchestrator.client.logs import trackers

        return status_file.to_json(trackers.add_runs(self.folder, self.source.settled_status()))

    @property
    def source(self) -> JobSource:
        """The job's source of state, by its backend."""
        if not home.is_slurm(self.folder):
            return JobSource(self.folder)
        from orchestrator.client.slurm_status import SlurmSource

        return SlurmSource(self.folder)

    def __repr__(self) -> str:
        """Return the job's id and last known state."""
        try:
            state = f" {self.source.written_status().state}"
        except (OrchError, OSError):
            state = ""
        return f"<Job {self.id}{state}>"

    def wait(self, timeout_s: float | None = None) -> Json:
        """Wait until the job has ended and return its status. Raises TimeoutError after `timeout_s`."""
        deadline_s = time.monotonic() + (timeout_s if timeout_s is not None else float("inf"))
        while True:
            status = self.source.settled_status()
            if status.state in status_file.ENDED:
                return status_file.to_json(status)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.id} is still {status.state} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def logs(self, query: LogQuery | None = None) -> Iterator[LogLine]:
        """Yield the ranks' log lines, merged by time and without secrets; `query` narrows them down."""
        from orchestrator.client.logs import reader as log_reader

        mask = self.mask()
        for line in log_reader.read(self.folder, query or log_reader.LogQuery(), time.time_ns(), mask):
            yield dataclasses.replace(line, text=mask.apply(line.text))

    def cancel(self) -> None:
        """Request the job's end, for which `wait` waits.

        Raises UserError when it has ended already, and ClusterError when Slurm refuses to cancel it.
        """
        state = self.source.settled_status().state
        if state in status_file.ENDED:
            fix = f"{'' if state == 'SUCCEEDED' else 'orch resume continues it, '}orch clean removes its leftovers"
            raise UserError(f"the job has ended already ({state}): there is nothing to cancel", self.id, fix)
        self.source.cancel()

    def restart(self) -> Json:
        """Request that the current attempt is stopped and the next starts from the newest checkpoint; return the status before.

        Raises UserError when there is no attempt to stop.
        """
        status = self.source.settled_status()
        if status.state in status_file.ENDED:
            raise UserError(f"the job has ended: {status.state}", self.id, "orch resume continues it")
        if status.state not in ("STARTING", "RUNNING"):
            fix = "wait until orch status shows RUNNING"
            raise UserError(f"there is no attempt to stop: the job is {status.state}", self.id, fix)
        requests.send(self.folder.requests, "restart")
        return status_file.to_json(status)

    def resume(
        self,
        checkpoint: str = "",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> ResumeChoice:
        """Resume an ended job from its newest checkpoint, or from `checkpoint`; return what it starts from.

        Of several commands at once, one resumes it. Raises UserError if the job runs, and if it has succeeded and
        neither `checkpoint` nor `overrides` give it anything new to do.
        """
        home.require_own_job(self.folder)
        try:
            with locks.hold_command_lock(self.folder):
                return self._resume(checkpoint, tuple(overrides), os.environ if environ is None else environ)
        except OSError as err:
            raise requests.make_write_error(err, self.folder.root) from err

    def _resume(self, checkpoint: str, overrides: tuple[str, ...], environ: Mapping[str, str]) -> ResumeChoice:
        """Resume the job while its resume lock is held."""
        from orchestrator.client import job_checkpoints
        from orchestrator.journal import journal_integrity
        from orchestrator.submission import resume

        journal_integrity.require_journal(self.folder)
        ended_status = self.source.settled_status()
        state = ended_status.state
        if state not in status_file.ENDED:
            raise self._still_running_error(ended_status)
        if state == "SUCCEEDED" and not overrides and not checkpoint:
            fix = "continue with more steps by --set entrypoint='train.py --steps 2000', repeat a part by --from CHECKPOINT, "
            fix += "or start again with orch submit"
            raise UserError("the job has succeeded: nothing is left to do", self.id, fix)
        start = job_checkpoints.ResumeSource(self.folder, self.plan(), checkpoint)
        resume.resume(self.folder, self.plan(), start.number, overrides, environ, start.choose_for)
        self.source.await_resume(ended_status)
        return start.choice

    def _still_running_error(self, status: Status) -> UserError:
        what, fix = f"the job is {status.state}", "orch cancel it first, or wait for its end"
        holder, silent_s = locks.read_holder(self.folder.lock), status.written_s or 0.0
        if holder is not None and holder.host != os.uname().nodename and status.backend == "local":
            what = f"{what} on {holder.host}, last update {silent_s:.0f} s ago"
            fix = f"orch cancel it there, or wait for its end; if that machine is gone for good: {home.resubmit_hint(self.folder.root)}"
        return UserError(what, self.id, fix)

    def why(self, record: Record | None = None) -> Json:
        """Return the post-mortem, of a record that was read before or now. Raises OrchError when plan or journal are damaged."""
        from orchestrator.client import job_checkpoints, post_mortem
        from orchestrator.client.logs import losses
        from orchestrator.journal import facts_file, journal_file

        plan, record = self.plan(), record or facts_file.load_record(self.folder)
        with journal_file.checked_replay(self.folder.journal):
            why = post_mortem.why(plan, record)
        for attempt in why["attempts"][-losses.ATTEMPTS_MAX :] if len(why["attempts"]) > 1 else ():
            attempt["losses"] = losses.read_losses(self.folder.rank_log(attempt["attempt"], 0))
        changed = self.source.changed_imports()
        for attempt in why["attempts"]:
            attempt["remarks"] += [
                f"imported {path}, which is not in the job's copy of the code and has changed since its first import"
                for path in changed.get(attempt["attempt"], ())
            ]
        why |= {"suspicion": None, "dir": str(self.folder.root)}
        job_checkpoints.add_checkpoints(self.folder, plan, why, record)
        if record.facts.end is not None:
            return why
        with contextlib.suppress(FileNotFoundError, OrchError):
            post_mortem.add_live_status(why, self.source.written_status())
        return {**why, **self.source.queue_fields()}

    def goodput(self) -> Goodput:
        """Return how the ranks' time was spent. Raises OrchError when plan or journal are damaged."""
        from orchestrator.journal import goodput, journal_integrity

        journal_integrity.require_journal(self.folder)
        return goodput.read(self.folder, self.plan().created_at)

    def stacks(self) -> Json:
        """Inspect what every rank is doing now, without changing it, and return what `orch stacks --json` prints.

        Raises UserError when no rank of the job runs, and ClusterError when its supervisor or its nodes do not answer.
        """
        from orchestrator.client import stacks as live_stacks

        return live_stacks.inspect_stacks(self.folder, self.source.settled_status())

    def plan(self) -> Plan:
        """Return the plan made at submit. Raises ClusterError when the plan is missing or damaged."""
        return self.source.plan()

    def ranks_by_node(self, attempt: int | None = None) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each node, in `attempt` or the latest that was placed; a pool's differ by attempt.

        Raises ClusterError when plan or journal are damaged.
        """
        plan = self.plan()
        ranks = {node.name: node.ranks for node in plan.nodes}
        if plan.pool is None:
            return ranks
        from orchestrator.brain.model import decisions as d
        from orchestrator.journal import journal_file

        placements = journal_file.read_kinds(self.folder.journal, d.Place)
        chosen = [place for place in placements if isinstance(place, d.Place) and attempt in (None, place.attempt)]
        return {**ranks, **dict(chosen[-1].nodes if chosen else ())}

    def select_ranks(self, ranks: Sequence[int], nodes: Sequence[str], attempt: int | None) -> tuple[int, ...]:
        """Return the ranks that `--rank` and `--node` mean; none for all. Raises UserError for one that is not the job's."""
        if not ranks and not nodes:
            return ()
        from orchestrator.client.logs import reader

        plan, names = self.plan(), self.source.nodes()
        for name in nodes:
            if name not in names and name not in reader.nodes(self.folder):
                raise UserError(f"{self.id} has no node {name!r}", "--node", f"it has: {', '.join(names[:20])}")
        for rank in ranks:  # an earlier attempt may have had more of them
            if rank >= plan.world_size and not any(self.folder.logs.glob(f"*/{rank_name(rank)}.log")):
                fix = f"its ranks are 0 to {plan.world_size - 1}"
                raise UserError(f"{self.id} has no rank {rank}", "--rank", fix)
        placed = self.ranks_by_node(attempt).items() if not ranks else ()
        return tuple(ranks) or tuple(rank for name, node_ranks in placed if name in nodes for rank in node_ranks)

    def mask(self) -> Mask:
        """Return the mask that hides the job's secrets in all output. Raises ClusterError when they are damaged."""
        from orchestrator.client.logs import job_mask

        try:
            return job_mask.load_mask(self.folder)
        except ValueError as err:
            what = f"the job's secrets cannot be read, so output cannot be masked: {err}"
            raise ClusterError(what, str(self.folder.secrets), "read the log files themselves") from err


def submit(
    spec: str | Path,
    *,
    backend: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    oversubscribe: bool = False,
    key: str | None = None,
) -> Job:
    """Submit a job file and return the job. `overrides`: `key.path=value`; `oversubscribe`: with any number of ranks a core;
    `key`: the same again returns the job that was submitted with it first.

    Raises OrchError, leaving nothing behind.
    """
    return submit_file(spec, backend, overrides, environ, oversubscribe=oversubscribe, key=key)[0]


def submit_file(
    spec: str | Path,
    backend: str | None,
    overrides: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    oversubscribe: bool = False,
    key: str | None = None,
) -> tuple[Job, bool]:
    """Submit a job file as `submit` does; return the job, and whether it is new. Raises OrchError, leaving nothing behind."""
    from orchestrator.spec.load import load

    file = load(Path(spec), overrides=overrides, backend=backend)
    all_overrides = [*overrides, *([f"backend={backend}"] if backend else [])]
    return submit_once(file, all_overrides, environ, oversubscribe=oversubscribe, key=key)


def submit_once(
    file: SpecFile,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    oversubscribe: bool = False,
    key: str | None = None,
) -> tuple[Job, bool]:
    """Submit a job file that was read with `overrides`, unless a job was submitted with `key` before; return the job, and
    whether it is new. Raises OrchError, leaving nothing behind."""
    from orchestrator.submission.submit import hold_key

    environ = os.environ if environ is None else environ
    if key is None:
        return _submit(file, overrides, environ, oversubscribe, None), True
    with hold_key(home.job_home(environ), key) as claim:
        existing = claim.job()
        if existing is not None:
            return Job(existing), False
        return _submit(file, overrides, environ, oversubscribe, claim), True


def _submit(
    file: SpecFile,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    oversubscribe: bool,
    key: SubmitKey | None,
) -> Job:
    from orchestrator.client.checks import sources
    from orchestrator.submission import submit as submission

    sources.refuse_uncompiled(file, environ)
    job = Job(submission.submit(file, environ, overrides, oversubscribe=oversubscribe, key=key))
    if file.spec.backend == "slurm":
        from orchestrator.client import slurm_status

        slurm_status.record_cluster(job.folder)
    return job


def find(wanted: str | None = None, environ: Mapping[str, str] | None = None, *, running: bool = False) -> Job:
    """Return a job by id or name, or the latest. Raises UserError when there is none. `running`: to act on a running job."""
    return Job(home.find_job(home.job_home(os.environ if environ is None else environ), wanted, running=running))
