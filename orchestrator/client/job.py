"""Job handle `Job`, for notebooks and scripts; the command line's verbs are thin over it.

>>> import orchestrator
>>> job = orchestrator.submit("job.yaml")
>>> job.wait()["state"]
'SUCCEEDED'
"""

from __future__ import annotations

import dataclasses
import html
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core import codec
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import full_disk, home, locks, ownership, requests, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.status_file import Status
from orchestrator.submission import supervisor_process

if TYPE_CHECKING:
    from orchestrator.client.logs.reader import LogLine, LogQuery
    from orchestrator.core.checkpoints.choice import Choice
    from orchestrator.core.jobdir.plan import Plan
    from orchestrator.core.mask import Mask
    from orchestrator.spec.load import SpecFile
    from orchestrator.supervisor.journal.lost_journal import Traces

POLL_S = 0.1
STATE_POLL_S = 0.02
STATE_S_MAX = 10.0
"""How long a new supervisor may take to write its first status."""

RESUME_S_MAX = 30.0
"""How long it may take until a resumed job has begun its next attempt."""

CLOSE_S_MAX = 120.0
"""How long it may take to end a job whose machine is gone."""

QUIET_S = 15.0
"""A living supervisor writes its status every half second; an older one names the supervisor that is late."""


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

    def status(self) -> Status:
        """Return one object of `orch status --json`.

        A supervisor that died is started again, and a job that Slurm has ended is closed. Raises ClusterError when
        that is not possible, or when the job's folder is damaged.
        """
        self.look_after()
        return self.last_status()

    def look_after(self) -> None:
        """Start the job's supervisor if it died; settle a job of Slurm by its state in the queue. Raises ClusterError."""
        if self.is_slurm:
            from orchestrator.client import slurm_status

            slurm_status.settle(self.folder)
        else:
            supervisor_process.revive(self.folder)

    @property
    def is_slurm(self) -> bool:
        """Whether the job's nodes come from Slurm."""
        return home.is_slurm(self.folder)

    @property
    def slurm_id(self) -> str | None:
        """Slurm's id of the job, the latest; None for a job that Slurm was never given. Raises ClusterError."""
        from orchestrator.client import slurm_status

        return slurm_status.present(self.folder) if self.is_slurm else None

    def node_names(self) -> list[str]:
        """Return the names of the job's nodes; of a job of Slurm those that have had any part in it yet.

        Raises ClusterError when the plan is missing or damaged.
        """
        from orchestrator.client.logs import reader as log_reader

        return log_reader.nodes(self.folder) if self.is_slurm else [node.name for node in self.plan().nodes]

    def last_status(self) -> Status:
        """Return the last status, joined with Slurm's state of a job in its queue; start nothing. Raises ClusterError."""
        if not self.folder.ended.exists() and self.is_slurm:
            from orchestrator.client import slurm_status

            try:
                written = self._written_status()
            except FileNotFoundError:
                written = None
            return {**slurm_status.join(self.folder, written, self.plan), "dir": str(self.folder.root)}
        deadline_s = time.monotonic() + STATE_S_MAX
        while True:
            try:
                return {**self._written_status(), "dir": str(self.folder.root)}
            except FileNotFoundError:
                if not _is_beginning(self.folder) or time.monotonic() > deadline_s:
                    raise _no_status(self.folder) from None
                time.sleep(STATE_POLL_S)

    def _written_status(self) -> Status:
        """Return the supervisor's status, with the supervisor's process if it is old. Raises FileNotFoundError."""
        status = status_file.read(self.folder, time.time())
        if status.get("written_s", 0.0) > QUIET_S:
            status["supervisor"] = locks.holder(self.folder.lock)
            if full_disk.is_used_up(self.folder.root):
                status["full_disk"] = str(self.folder.root)
        return status

    def __repr__(self) -> str:
        """Return the job's id and last known state."""
        try:
            state = f" {self._written_status()['state']}"
        except (OrchError, OSError):
            state = ""
        return f"<Job {self.id}{state}>"

    def _repr_html_(self) -> str:
        """Return the job as a notebook shows it: its id, state and step, and its folder."""
        try:
            status = self.last_status()
            words = [status["state"], f"attempt {status['attempt']}"]
            words += [f"step {status['step']:,}"] if status["step"] is not None else []
        except OrchError as err:
            words = [err.what]
        shown = " · ".join(html.escape(word) for word in words)
        return f"<b>{html.escape(self.id)}</b> {shown}<br><code>{html.escape(str(self.folder.root))}</code>"

    def wait(self, timeout_s: float | None = None) -> Status:
        """Wait until the job has ended and return its status. Raises TimeoutError after `timeout_s`."""
        deadline_s = time.monotonic() + (timeout_s if timeout_s is not None else float("inf"))
        while True:
            status = self.status()
            if status["state"] in status_file.ENDED:
                return status
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.id} is still {status['state']} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def logs(self, query: LogQuery | None = None) -> Iterator[LogLine]:
        """Yield the ranks' log lines, merged by time and without secrets; `query` narrows them down."""
        from orchestrator.client.logs import reader as log_reader

        mask = self.mask()
        for line in log_reader.read(self.folder, query or log_reader.LogQuery(), time.time_ns(), mask):
            yield dataclasses.replace(line, text=mask.apply(line.text))

    def cancel(self, gone: str = "") -> None:
        """Request the job's end, for which `wait` waits. `gone`: as for `resume`.

        Raises UserError when it has ended already, and ClusterError when Slurm refuses to cancel it.
        """
        was_lost = self._may_end_without_journal()
        state = "" if was_lost else self.status()["state"]
        if state in status_file.ENDED:
            raise UserError(f"the job has ended already ({state}): there is nothing to stop", self.id)
        if self.is_slurm:
            from orchestrator.client import slurm_status

            slurm_status.cancel(self.folder)
        else:
            is_left = not was_lost and self._is_left_behind_by(gone)
            requests.ask(self.folder.requests, "cancel")
            if was_lost:
                self.look_after()
            elif is_left:
                supervisor_process.start_supervisor(self.folder)

    def _is_left_behind_by(self, gone: str) -> bool:
        """Tell whether an unended local job has lost this machine, see `supervisor_process.left_behind_by`."""
        if not gone:
            return False
        try:
            silent_s = self._written_status().get("written_s", 0.0)
        except FileNotFoundError:
            return False
        return supervisor_process.left_behind_by(self.folder, silent_s) == gone

    def _may_end_without_journal(self) -> bool:
        """Prepare a job whose journal is lost for a supervisor that stops what still runs of it.

        Return whether the job is such a one, and has no supervisor.
        """
        if self.folder.ended.exists() or not home.is_ours(self.folder):
            return False
        from orchestrator.supervisor.journal import lost_journal

        plan = self.plan()
        if not lost_journal.lost_or_damaged(self.folder, plan):
            return False
        home.require_ours(self.folder)
        with locks.locked(self.folder) as is_mine:  # a living supervisor needs no journal to stop the job
            traces = lost_journal.lost_or_damaged(self.folder, plan) if is_mine else None
            if traces is None or self.folder.ended.exists():
                return False
            lost_journal.rewrite(self.folder, plan, traces, is_over=False)
        return True

    def restart(self) -> Status:
        """Request that the present attempt ends and the next begins from the newest checkpoint; return the status before.

        Raises UserError when no attempt is there to end.
        """
        before = self.status()
        if before["state"] in status_file.ENDED:
            raise UserError(f"the job has ended: {before['state']}", self.id, "orch resume lets it go on")
        if before["state"] not in ("STARTING", "RUNNING"):
            fix = "wait until orch status says that it runs"
            raise UserError(f"there is no attempt to end: the job is {before['state']}", self.id, fix)
        requests.ask(self.folder.requests, "restart")
        return before

    def resume(
        self,
        checkpoint: str = "",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        *,
        gone: str = "",
    ) -> Choice:
        """Let an ended job go on from its newest checkpoint, or from `checkpoint`; return what it begins from. `gone` names another machine on which a
        job of backend local was running and which will not come back; without it such a job is never taken over.

        Of several commands at once, one resumes it. Raises UserError if the job runs, and if it has succeeded and
        neither `checkpoint` nor `overrides` give it anything new to do.
        """
        home.require_ours(self.folder)
        try:
            with locks.resuming(self.folder) as is_mine:
                if not is_mine:
                    what = f"another command is resuming the job{locks.by_whom(self.folder.resume_lock)}"
                    fix = "see with orch status what comes of that, then try again"
                    raise ClusterError(what, self.id, fix)
                return self._resume(
                    checkpoint, tuple(overrides), os.environ if environ is None else environ, gone
                )
        except OSError as err:
            raise requests.refused(err, self.folder.root) from err

    def _resume(
        self, checkpoint: str, overrides: tuple[str, ...], environ: Mapping[str, str], gone: str
    ) -> Choice:
        """Let the job go on, with its resume lock held."""
        from orchestrator.client import saves
        from orchestrator.submission import resume
        from orchestrator.supervisor.journal import lost_journal

        if traces := lost_journal.lost_or_damaged(self.folder, self.plan()):
            return self._resume_without_journal(traces, checkpoint, overrides, environ)
        if self._is_left_behind_by(gone):
            self.cancel(gone)  # by a supervisor of this machine, which finds nothing of it alive
            self.wait(CLOSE_S_MAX)
        before = self.status()
        state = before["state"]
        if state not in status_file.ENDED:
            raise self._goes_on(before)
        if state == "SUCCEEDED" and not overrides and not checkpoint:
            fix = "train on with --set entrypoint='train.py --steps 2000', repeat a part with --from CHECKPOINT, "
            fix += "or start over with orch submit"
            raise UserError("the job has succeeded: nothing is left to do", self.id, fix)
        start = saves.Start(self.folder, self.plan(), checkpoint)
        resume.resume(self.folder, self.plan(), start.number, overrides, environ, start.fit)
        if self.is_slurm:
            self._queue_again(before)
        else:
            self._await_resume(before)
        return start.choice

    def _goes_on(self, status: Status) -> UserError:
        """Return the refusal of a resume while the job goes on, or might do so on another machine."""
        what, fix = f"the job is {status['state']}", "orch cancel it first, or wait for its end"
        who, silent_s = locks.holder(self.folder.lock), status.get("written_s", 0.0)
        if who is not None and who["host"] != os.uname().nodename and status["backend"] == "local":
            what = f"{what} on {who['host']}, heard of {silent_s:.0f} s ago"
            fix = "orch cancel it there, or wait for its end"
            if silent_s < supervisor_process.LEFT_S_MIN:
                fix += f"; if that machine is gone, try again once that is {supervisor_process.LEFT_S_MIN:g} s ago"
            else:
                fix += f"; if that machine is gone for good: orch resume {self.id} --gone {who['host']}"
        return UserError(what, self.id, fix)

    def _resume_without_journal(
        self, traces: Traces, checkpoint: str, overrides: tuple[str, ...], environ: Mapping[str, str]
    ) -> Choice:
        """Resume a job whose journal is lost as a new attempt, from the checkpoint that the user names."""
        from orchestrator.client import saves, slurm_status
        from orchestrator.submission import resume
        from orchestrator.supervisor.journal import lost_journal

        plan = self.plan()
        if self.is_slurm:
            slurm_status.require_over(self.folder)
        with locks.locked(self.folder) as is_mine:
            if not is_mine:
                fix = "orch cancel it, and try again once its supervisor has left"
                raise UserError(f"{traces.how}, and its supervisor is at work", self.id, fix)
            if not checkpoint:
                raise lost_journal.refusal(self.folder, traces)
        start = saves.Start(self.folder, plan, checkpoint)
        with locks.locked(self.folder) as is_mine:
            if not is_mine:
                raise UserError("its supervisor is at work", self.id, "try again once it has left")
            lost_journal.rewrite(self.folder, plan, traces, is_over=True)
        resume.resume(self.folder, plan, start.number, overrides, environ, start.fit)
        if self.is_slurm:
            self._queue_again(status_file.unknown(plan, "FAILED", "", time.time()))
        return start.choice

    def _queue_again(self, before: Status) -> None:
        from orchestrator.client import slurm_status

        plan = self.plan()  # the new one, where there were overrides
        sized = status_file.sized(before, plan)
        slurm_status.requeue_status(self.folder, sized)

    def _await_resume(self, before: Status) -> None:
        """Wait until the status shows the resume: before that a wait for the job's end would see the old end."""
        deadline_s = time.monotonic() + RESUME_S_MAX
        while _is_same_end(before, self.last_status()):
            if time.monotonic() > deadline_s:
                what = f"no new attempt was begun within {RESUME_S_MAX:g} s"
                raise ClusterError(what, self.id, f"see {self.folder.supervisor_log}")
            time.sleep(STATE_POLL_S)

    def why(self) -> Json:
        """Return the post-mortem as `orch why --json` prints it. Raises OrchError when plan or journal are damaged."""
        from orchestrator.client import post_mortem
        from orchestrator.client.logs import losses
        from orchestrator.supervisor.journal import facts_file, journal_file, lost_journal

        plan = self.plan()
        lost_journal.require_journal(self.folder, plan)
        record = facts_file.read(self.folder)
        with journal_file.replayed(self.folder.journal):
            why = post_mortem.why(plan, record)
        for attempt in why["attempts"][-losses.ATTEMPTS_MAX :] if len(why["attempts"]) > 1 else ():
            attempt["losses"] = losses.of_log(self.folder.rank_log(attempt["attempt"], 0))
        goes_on = record.facts.end is None
        why |= {"suspicion": self._suspicion() if goes_on else None, "dir": str(self.folder.root)}
        return {**why, **self._in_queue()} if goes_on and self.is_slurm else why

    def _in_queue(self) -> Json:
        """Return what only Slurm's queue knows while there is no supervisor."""
        try:
            status: Json = {**self.last_status()}
        except OrchError:
            return {}
        return {key: status[key] for key in ("state", "reason", "queue") if key in status}

    def _suspicion(self) -> str | None:
        """Return the suspicion of a hang that a living supervisor has."""
        try:
            status = self._written_status()
        except (FileNotFoundError, OrchError):
            return None
        return None if "supervisor" in status else status["suspicion"]

    def stacks(self) -> Json:
        """Inspect what every rank does right now and return what `orch stacks --json` prints; change nothing.

        Raises UserError when no rank of the job runs, and ClusterError when its supervisor or its nodes do not answer.
        """
        from orchestrator.client import stacks as live_stacks

        return live_stacks.stacks(self.folder, self.status())

    def plan(self) -> Plan:
        """Return the plan made at submit. Raises ClusterError when the plan is missing or damaged."""
        from orchestrator.core.jobdir.plan import Plan

        fix = "the folder is not a whole job any more; submit the job again"
        try:
            return codec.loads(Plan, ownership.read_regular(self.folder.plan))
        except OSError as err:
            what = f"the job's plan cannot be read: {err.strerror}"
            raise ClusterError(what, str(self.folder.plan), fix) from err
        except codec.CodecError as err:
            raise ClusterError(f"the job's plan is damaged: {err}", str(self.folder.plan), fix) from err

    def ranks_of(self, attempt: int | None = None) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each node, in `attempt` or the latest that was placed; a pool's differ by attempt.

        Raises ClusterError when plan or journal are damaged.
        """
        plan = self.plan()
        ranks = {node.name: node.ranks for node in plan.nodes}
        if plan.pool is None:
            return ranks
        from orchestrator.brain.model import decisions as d
        from orchestrator.supervisor.journal import journal_file

        places = journal_file.read_only(self.folder.journal, d.Place)
        chosen = [
            place for place in places if isinstance(place, d.Place) and attempt in (None, place.attempt)
        ]
        return {**ranks, **({node.name: node.ranks for node in chosen[-1].nodes} if chosen else {})}

    def mask(self) -> Mask:
        """Return the mask that hides the job's secrets in all output. Raises ClusterError when they are damaged."""
        from orchestrator.client import secret_mask

        try:
            return secret_mask.of_job(self.folder)
        except ValueError as err:
            what = f"the job's secrets are not known, so nothing could be masked: {err}"
            raise ClusterError(what, str(self.folder.secrets), "read the log files themselves") from err


def _is_same_end(before: Status, now: Status) -> bool:
    """Tell whether an ended job's status is still that of the same end; times jitter, so they are not compared."""
    begun = before["started_at"] is None and now["started_at"] is not None
    return now["state"] in status_file.ENDED and now["attempt"] == before["attempt"] and not begun


def submit(
    spec: str | Path,
    *,
    backend: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Job:
    """Submit a job file and return the job. `overrides`: `key.path=value`. Raises OrchError, leaving nothing behind."""
    from orchestrator.spec.load import load

    file = load(Path(spec), overrides=overrides, backend=backend)
    kept = [*overrides, *([f"backend={backend}"] if backend else [])]
    return submit_file(file, kept, environ)


def submit_file(
    file: SpecFile, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Job:
    """Submit a job file that was read with `overrides` and return the job. Raises OrchError, leaving nothing behind."""
    from orchestrator.submission import submit as submission

    job = Job(submission.submit(file, os.environ if environ is None else environ, overrides))
    if file.spec.backend == "slurm":
        from orchestrator.client import slurm_status

        slurm_status.note_cluster(job.folder)
    return job


def find(wanted: str | None = None, environ: Mapping[str, str] | None = None) -> Job:
    """Return a job by id or name, or the latest. Raises UserError when there is none."""
    return Job(home.find(home.home(os.environ if environ is None else environ), wanted))


def _is_beginning(job: JobDir) -> bool:
    """Tell whether a first status may still come: a whole job folder, of a job that is not over."""
    return job.plan.exists() and not job.ended.exists()


def _no_status(job: JobDir) -> ClusterError:
    if not job.plan.exists():
        return ClusterError("this is not a whole job folder: it has no plan.json", str(job.root), "delete it")
    if job.ended.exists():
        return ClusterError("the status file is missing", str(job.state), "`orch why` reads the journal")
    what = f"no status was written within {STATE_S_MAX:g} s"
    return ClusterError(what, str(job.root), f"see {job.supervisor_log}")
