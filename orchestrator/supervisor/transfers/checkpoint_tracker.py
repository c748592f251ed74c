"""Checkpoint tracker, the only writer of the ledger: enters what agents report, completes, verifies, keeps and prunes checkpoints.

Rules
- Changes are written to the ledger first; events and acknowledgements follow. On a full disk `take_events` waits, as the journal does.
- Where hosts do not see this disk, a checkpoint counts once it is complete in the job folder (`checkpoint_copies`).
- Nothing else waits: files are read, linked, moved and deleted in a thread.
- Files that a script overwrites or deletes before its next checkpoint is complete stay in `.kept/NUMBER` until then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from orchestrator.backends.api import BulkCopier, Wake
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.rank_facts import RankState
from orchestrator.core.checkpoints import disk
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState, CompletionReason, FileLocation
from orchestrator.core.checkpoints.ledger import Ledger
from orchestrator.core.checkpoints.resume_choice import ResumeOverride, choose_checkpoint
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire import reports
from orchestrator.supervisor.transfers import checkpoint_copies, checkpoint_disk, completion, memory_copies
from orchestrator.supervisor.transfers.checkpoint_pruning import CheckpointPruner
from orchestrator.supervisor.transfers.completion import Assessment, CheckpointGang
from orchestrator.supervisor.transfers.observed_resume import ResumeSourceTracker
from orchestrator.supervisor.transfers.resume_comparison import ResumeComparison

DECIDED_STATES = {CheckpointState.WHOLE, CheckpointState.DISTRUSTED}
"""The brain changes a checkpoint from one to the other."""

REPORTED_MAX = 300
"""How many of the latest checkpoints a new supervisor reports to the brain."""


class CheckpointTracker:
    """All checkpoints of one job."""

    def __init__(self, job: JobDir, plan: Plan, copier: BulkCopier | None, wake: Wake) -> None:
        """`wake` is called, from any thread, when `take_events` has something. Raises OSError."""
        self._job = job
        self._ledger = Ledger(job.root, job.ledger)
        self._continuations: dict[int, completion.ContinuationTracker] = {}
        self.notes: list[str] = [*self._ledger.faults]
        self._thread = checkpoint_disk.DiskThread(wake)
        self._folders = checkpoint_disk.LocalCheckpointFolders(job, plan)
        kept = job.checkpoints / disk.KEPT_FOLDER
        self._retention = checkpoint_disk.RetentionPolicy(self._folders, kept, self._thread, self.notes)
        self._pruner = CheckpointPruner(plan, self._folders, self._thread, self.notes, self._enter_pruned)
        self._copied_stamps = frozenset[tuple[str, int, int]]()  # the files of the last copied open checkpoint
        self._stopped_nodes: set[tuple[int, str]] = set()  # nodes with a rank that will not continue, by attempt
        self._heartbeats: dict[str, completion.HeartbeatHistory] = {}
        self._gang = CheckpointGang(0, 0, 0, ())
        self._resume_override: ResumeOverride | None = None
        self._is_ended = False
        self._events: list[e.Event] = []
        self.is_remote: Callable[[str], bool] = lambda node: True  # whether a node does not see this disk
        far, folder = copier if plan.ssh is not None else None, self._folders.checkpoint_folder
        self.copies = checkpoint_copies.CheckpointCopies(job, far, folder, plan.checkpoint_glob)
        self._resume_sources = ResumeSourceTracker()
        self.memory = memory_copies.MemoryCopies(
            plan, self._folders, self.checkpoints, self._enter_relocated, self.copies.discard, self.notes
        )
        self._comparison = ResumeComparison(
            self._ledger, self._folders, self._retention, self.memory, self._thread, self.notes, self._note_compared
        )

    @property
    def deep(self) -> bool:
        """Whether all bytes of the checkpoint to resume from are to be compared."""
        return self._comparison.deep

    @property
    def checkpoints(self) -> dict[int, Checkpoint]:
        return self._ledger.checkpoints

    def begin(self, facts: Facts, at: float) -> None:
        """Continue from an earlier supervisor: report to the brain what the ledger has and the brain does not know."""
        if facts.attempt is not None:
            ended = [rank for rank in facts.ranks.values() if rank.rank_state is RankState.EXITED]
            self._stopped_nodes = {(facts.attempt.number, rank.node) for rank in ended if not rank.ended_well}
        for number, known in facts.checkpoints.items():
            if number not in self.checkpoints:
                why = "it is no longer in the ledger"
                gone = dataclasses.replace(known, state=CheckpointState.GONE, why=why)
                self._events.append(e.CheckpointChanged(at, gone))
        self.apply_decisions(facts)
        for checkpoint in sorted(self.checkpoints.values(), key=lambda checkpoint: checkpoint.number)[-REPORTED_MAX:]:
            if facts.checkpoints.get(checkpoint.number) != completion.summarize(checkpoint):
                self._events.append(e.CheckpointChanged(at, completion.summarize(checkpoint)))
            if checkpoint.state is CheckpointState.OPEN:
                watch = self._continuations[checkpoint.number] = completion.ContinuationTracker()
                if checkpoint.parts:
                    watch.note_change(checkpoint, {})
            if checkpoint.is_in_transit and self._folders.is_copied(checkpoint):
                self.copies.fetch(checkpoint)

    def enter_report(self, at: float, node: str, report: reports.CheckpointSeen, gang: CheckpointGang) -> None:
        """Enter what an agent reports of a checkpoint of the current attempt."""
        self._gang = gang
        unfit = checkpoint_copies.find_invalid_names(report)
        if report.attempt != gang.attempt or unfit:
            self.notes += [f"{node} reports a checkpoint that is refused: {unfit}"] if unfit else []
            return
        part = dataclasses.replace(report.part, host=node)
        self._give_up_rewritten(at, report)
        checkpoint = previous = self._find_or_open(report, gang)
        # Where nodes share this disk, an agent reports the files of all
        others = completion.rebuild_parts(checkpoint) if self._is_fetched(checkpoint, node) else ()
        parts = (*(old for old in others if old.host != node), part)
        pieces = {name: piece for name, (_, piece) in completion.collect_files(parts).items()}
        checkpoint = dataclasses.replace(
            checkpoint, state=CheckpointState.OPEN, closed_by=CompletionReason.NONE, parts=parts, main=min(checkpoint.main, report.main),
            files=tuple(pieces.values()), steps=min(part.steps for part in parts), is_in_transit=False,
            is_new=all(part.is_new for part in parts),
        )  # fmt: skip
        was_open = previous.state is CheckpointState.OPEN and not previous.is_in_transit
        is_known = checkpoint.number in self.checkpoints and was_open
        if previous.is_in_transit:
            self.copies.cancel_fetch(checkpoint.number)
        self._ledger.put(checkpoint)
        self.memory.displace(at, checkpoint, node, part.root)
        beats = {node: own for node, own in self._heartbeats.items() if own.latest.attempt == gang.attempt}
        tracker = self._continuations.setdefault(checkpoint.number, completion.ContinuationTracker())
        tracker.note_change(checkpoint, beats)
        if not is_known:
            self._emit_change(at, checkpoint)
        for number in list(self._continuations):  # also those that this one follows
            self._assess(at, number, gang)

    def enter_reads(self, at: float, node: str, report: reports.CheckpointsRead, gang: CheckpointGang) -> None:
        """Enter what the ranks of a node had read before their first steps, which may show the checkpoint they resumed from."""
        began = self._resume_sources.add_report(node, report, gang, self.checkpoints.values(), self._newest())
        if began is not None and report.attempt == gang.attempt:
            number, other = began
            self._events.append(e.CheckpointRead(at, gang.attempt, number, other))
            note = functools.partial(self._resume_sources.stated_steps.__setitem__, gang.attempt)
            self._thread.submit(lambda: self._folders.stated_step(other), lambda _, step: note(step))

    def enter_hashes(self, at: float, node: str, report: reports.CheckpointHashed) -> None:
        """Enter the sha256 of a checkpoint's files, where they are still those."""
        digests = {piece.stamp: piece.sha256 for piece in report.files}
        for checkpoint in self._find_by_key(report.key, report.attempt):
            if (known := completion.set_digests(checkpoint, digests)) != checkpoint:
                self._ledger.put(known)
                if known.is_in_transit and known.is_hashed:
                    self.copies.fetch(known)

    def enter_heartbeat(self, at: float, node: str, heartbeat: reports.Heartbeat, gang: CheckpointGang) -> None:
        """Enter a heartbeat, which may show that its node has continued."""
        if heartbeat.attempt != gang.attempt:
            return
        self._gang = gang
        if (gang.attempt, node) in self._stopped_nodes:
            return
        self._heartbeats.setdefault(node, completion.HeartbeatHistory(heartbeat)).add(heartbeat)
        for number, watch in list(self._continuations.items()):
            if watch.add_heartbeat(node, heartbeat):
                self._assess(at, number, gang)

    def enter_event(self, event: e.FromNode) -> None:
        """Note a rank that will not continue; one that ended by itself with code 0 counts as continued. Distrust checkpoints on a
        disk that this machine does not see, where another host that is to resume from one lacks it: they share no disk."""
        match event.report:
            case reports.Exited() as exited if exited.code != 0 or exited.ordered:
                self._stopped_nodes.add((exited.attempt, event.node))
                self._heartbeats.pop(event.node, None)
            case reports.PrepareFailed() as failed if (lost := self.find_on_host_disk(failed.save)) is not None:
                for checkpoint in checkpoint_disk.distrust_invisible(self.checkpoints.values(), lost, event.node):
                    self._enter(event.at, checkpoint)

    def close_stopped(self, at: float, gang: CheckpointGang) -> None:
        """Assess open checkpoints after a node has stopped the attempt, or was lost with it."""
        self._gang = gang
        for number in list(self._continuations):
            self._assess(at, number, gang)
        self.memory.attempt_over = gang.attempt - (not gang.is_over)
        if gang.is_over:
            self.copies.fetch_unhashed(self.checkpoints.values(), gang.attempt)

    def apply_decisions(self, facts: Facts) -> None:
        """Enter the brain's decisions about checkpoints."""
        self._resume_override = facts.resume_override
        for number, known in facts.checkpoints.items():
            checkpoint = self.checkpoints.get(number)
            if checkpoint is not None and {checkpoint.state, known.state} == DECIDED_STATES:
                self._ledger.put(dataclasses.replace(checkpoint, state=known.state, why=known.why))

    def compare(self, at: float, order: d.CompareCheckpoint) -> None:
        """Close all checkpoints of an attempt, and compare the one that the next attempt is to resume from; `CheckpointCompared` follows."""
        gang = dataclasses.replace(self._gang, lost=frozenset(self._gang.nodes))
        for number in list(self._continuations):
            self._assess(at, number, gang)
        self.copies.fetch_unhashed(self.checkpoints.values(), gang.attempt)
        self._comparison.begin(at, order)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint in memory is not on a disk yet, or is being fetched."""
        return self.memory.is_used and (self.memory.is_unsaved or self.copies.is_fetching)

    def end_job(self, at: float) -> None:
        """Delete kept copies at the end of the job, if the newest checkpoint is in its place; one in memory will be."""
        self._is_ended = self.memory.is_used
        if (checkpoint := self._newest()) is not None:
            self._retention.delete_kept(checkpoint)

    def take_events(self, at: float) -> list[e.Event]:
        """Return the events since the last call, for the brain."""
        self._comparison.poll(at)
        self._thread.run_callbacks(at)
        for number, fault in self.copies.take_fetched():
            self._finish_fetch(at, number, fault)
        self.notes += full_disk.retry_while_full(self._ledger.try_flush)
        events, self._events = self._events, []
        return events

    def find_on_host_disk(self, number: int) -> Checkpoint | None:
        """Return a checkpoint if it is on a disk that hosts see and this machine does not: a host has to compare it."""
        checkpoint = self.checkpoints.get(number)
        return checkpoint if checkpoint is not None and self._comparison.is_for_host(checkpoint) else None

    def find_torn_on_host(self, node: str, attempt: int) -> tuple[Checkpoint, ...]:
        """Return the torn checkpoints of the attempt before this one, as they are on a host."""
        checkpoints, node_count = self.checkpoints.values(), len(self._gang.nodes)
        return checkpoint_disk.find_torn_on_host(checkpoints, node, attempt - 1, self._folders, node_count)

    def close(self) -> None:
        """End the thread, once what it has begun is done."""
        self._thread.close()

    def _find_or_open(self, report: reports.CheckpointSeen, gang: CheckpointGang) -> Checkpoint:
        """Return the checkpoint that a report is about: one that is open, or a new one."""
        known = self._find_by_key(report.key, report.attempt)
        last = known[-1] if known else None
        is_open = last is not None and last.state is CheckpointState.OPEN and not last.is_in_transit
        if last is not None and (is_open or report.key != report.series):
            return last
        return completion.new_checkpoint(self._ledger.next_number, report, gang.world_size)

    def _give_up_rewritten(self, at: float, report: reports.CheckpointSeen) -> None:
        """Give up checkpoints that a host has overwritten before they were hashed: they cannot be fetched any more."""
        for checkpoint in self._find_by_key(report.key, report.attempt) if report.key == report.series else ():
            if self.copies.is_overwritten(checkpoint, report.part):
                self._finish_fetch(at, checkpoint.number, f"{checkpoint.main} was overwritten before it was hashed")

    def _is_fetched(self, checkpoint: Checkpoint, node: str) -> bool:
        return self.memory.holds(checkpoint) or (self._folders.is_copied(checkpoint) and self.is_remote(node))

    def _find_by_key(self, key: str, attempt: int) -> list[Checkpoint]:
        return [one for one in self.checkpoints.values() if (one.key, one.attempt) == (key, attempt)]

    def _assess(self, at: float, number: int, gang: CheckpointGang) -> None:
        checkpoint = self.checkpoints[number]
        if checkpoint.state is not CheckpointState.OPEN or checkpoint.is_in_transit or not checkpoint.parts:
            self._continuations.pop(number, None)
            return
        if checkpoint.attempt != gang.attempt:  # nothing more will be reported of it
            gang = CheckpointGang(checkpoint.attempt, 0, checkpoint.world_size, ())
        assessment = completion.assess(checkpoint, self._continuations[number], gang, self.checkpoints.values())
        if assessment.state is CheckpointState.OPEN:
            self._ledger.put(dataclasses.replace(checkpoint, why=assessment.why))
            self._copy_proved(checkpoint, assessment, gang)
        else:
            self._close(at, checkpoint, assessment, gang)

    def _copy_proved(self, checkpoint: Checkpoint, assessment: Assessment, gang: CheckpointGang) -> None:
        """Copy a checkpoint whose format alone shows that it is complete, since its ranks may overwrite it; the copy counts."""
        (part, *others), place = checkpoint.parts, FileLocation("", str(self._folders.folder(checkpoint)))
        is_shown = part.closed_by is CompletionReason.FINAL_FILE and not assessment.why and not others
        if not is_shown or self._copied_stamps == checkpoint.stamps or self._is_fetched(checkpoint, part.host):
            return

        def close_kept(at: float, is_kept: bool) -> None:
            now = self.checkpoints[checkpoint.number]
            if is_kept and now.state is CheckpointState.OPEN and now.stamps == checkpoint.stamps:
                self._close(at, now, Assessment(CheckpointState.WHOLE, part.closed_by, ""), gang)

        self._copied_stamps = checkpoint.stamps
        self._retention.copy(dataclasses.replace(checkpoint, locations=(place,)), close_kept)

    def _close(self, at: float, checkpoint: Checkpoint, assessment: Assessment, gang: CheckpointGang) -> None:
        host, is_fetched = checkpoint.parts[0].host, functools.partial(self._is_fetched, checkpoint)
        locations = completion.locate_files(checkpoint.parts, self._folders.folder(checkpoint), is_fetched)
        checkpoint = completion.close(checkpoint, assessment, locations)
        checkpoint = self._with_step(at, checkpoint, gang)
        is_far = any(place.host for place in checkpoint.locations)
        if self.memory.holds(checkpoint):
            checkpoint = memory_copies.mark_memory(checkpoint)
        elif assessment.state is CheckpointState.WHOLE and is_far:
            checkpoint = dataclasses.replace(checkpoint, state=CheckpointState.OPEN, is_in_transit=True)
            if checkpoint.is_hashed:
                self.copies.fetch(checkpoint)
        elif assessment.state is CheckpointState.WHOLE and self._folders.is_on_host_disk(checkpoint):
            shared = FileLocation(host, checkpoint.locations[0].root)
            checkpoint = dataclasses.replace(checkpoint, locations=(*checkpoint.locations, shared))
        self._enter(at, checkpoint)
        self._continuations.pop(checkpoint.number, None)

    def _with_step(self, at: float, checkpoint: Checkpoint, gang: CheckpointGang) -> Checkpoint:
        """Return a checkpoint with the job's step, and note where its attempt truly began if it shows that."""
        others = [other for other in self.checkpoints.values() if other.number != checkpoint.number]
        checkpoint, began = self._resume_sources.assign_step(checkpoint, others, gang.base_step)
        if began is not None:
            self._events.append(e.ResumedElsewhere(at, checkpoint.attempt, began, checkpoint.main, checkpoint.steps))
            for other in others:
                if other.attempt == checkpoint.attempt and other.step is not None and other.stated is None:
                    self._enter(at, dataclasses.replace(other, step=other.step - gang.base_step + began))
            self._gang = dataclasses.replace(self._gang, base_step=began)
        return checkpoint

    def _enter(self, at: float, checkpoint: Checkpoint) -> None:
        """Enter a checkpoint whose state has changed; a complete one may replace, keep and prune others."""
        previous = self.checkpoints[checkpoint.number]
        is_new = checkpoint.state is CheckpointState.WHOLE and previous.state is not CheckpointState.WHOLE
        if self.memory.holds(checkpoint):  # until it is here, it takes the place of no other one
            is_new = checkpoint.state is CheckpointState.WHOLE and _is_here(checkpoint) and not _is_here(previous)
        self._ledger.put(checkpoint)
        self._emit_change(at, checkpoint)
        if not is_new:
            return
        for other in list(self.checkpoints.values()):
            if other.number == checkpoint.number or not checkpoint_copies.shares_files(checkpoint, other):
                continue
            if other.state is CheckpointState.WHOLE and self._folders.is_in_place(other):
                why = f"was overwritten by checkpoint {checkpoint.number}"
            elif other.is_in_transit and other.number < checkpoint.number:
                self.copies.cancel_fetch(other.number)
                why = checkpoint_copies.superseded_reason(checkpoint.number)
            else:
                continue
            gone = dataclasses.replace(other, state=CheckpointState.GONE, why=why, is_in_transit=False)
            self._ledger.put(gone)
            self._emit_change(at, gone)
        newest = self._newest()
        is_far = any(place.host and not place.is_memory for place in checkpoint.locations)
        if newest is not None and newest.number == checkpoint.number and not is_far:
            self._retention.delete_kept(checkpoint) if self._is_ended else self._retention.keep(checkpoint)
        self._pruner.prune(self.checkpoints.values(), self._newest())

    def _enter_relocated(self, at: float, checkpoint: Checkpoint) -> None:
        """Enter a checkpoint that was copied from memory; over SSH it is fetched once it is on the disks of hosts."""
        if self.memory.may_fetch(at, checkpoint):
            checkpoint = dataclasses.replace(checkpoint, is_in_transit=True)
            self.copies.fetch(checkpoint)
        self._enter(at, checkpoint)

    def _note_compared(self, at: float, checkpoint: Checkpoint | None, event: e.CheckpointCompared) -> None:
        """Note that a checkpoint was compared; one that has changed comes with it."""
        if checkpoint is not None:
            self._emit_change(at, checkpoint)
        self._events.append(event)

    def _emit_change(self, at: float, checkpoint: Checkpoint) -> None:
        self._events.append(e.CheckpointChanged(at, completion.summarize(checkpoint)))

    def _newest(self) -> Checkpoint | None:
        return choose_checkpoint(self.checkpoints.values(), self._gang.world_size, self._resume_override).checkpoint

    def _enter_pruned(self, at: float, pruned: Checkpoint) -> None:
        known = self.checkpoints[pruned.number]
        self._enter(at, dataclasses.replace(known, state=pruned.state, why=pruned.why))
        self.copies.discard(known)

    def _finish_fetch(self, at: float, number: int, fault: str) -> None:
        """Enter that a checkpoint was fetched, or could not be."""
        checkpoint = self.checkpoints[number]
        if not checkpoint.is_in_transit:
            return
        if fault:
            self.notes.append(f"checkpoint {checkpoint.main} of attempt {checkpoint.attempt} was not copied: {fault}")
            self.memory.note_failed_fetch(at, number)
            is_elsewhere = checkpoint.state is CheckpointState.WHOLE  # in memory, or on the disks of hosts
            arrived = (
                checkpoint if is_elsewhere else dataclasses.replace(checkpoint, state=CheckpointState.GONE, why=fault)
            )
        else:
            here = FileLocation("", str(self._folders.folder(checkpoint)))
            locations = (here, *(place for place in checkpoint.locations if place.host))
            arrived = dataclasses.replace(checkpoint, state=CheckpointState.WHOLE, locations=locations)
        self._enter(at, dataclasses.replace(arrived, is_in_transit=False))


def _is_here(checkpoint: Checkpoint) -> bool:
    """Return whether all of a checkpoint is on a disk that the supervisor sees."""
    return any(not place.host and not place.names for place in checkpoint.locations)
