"""Checkpoints of a job: the list, the one that a resume starts from, and their part of a post-mortem.

The ledger records each checkpoint. Here its files are compared with the record, so that no missing one is offered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.client import adoption
from orchestrator.client.adoption import LIST_HINT, unusable_error
from orchestrator.core.checkpoints import disk, ledger, memory, tree
from orchestrator.core.checkpoints.checkpoint import START_PREFIX, Checkpoint, CheckpointState, FileLocation
from orchestrator.core.checkpoints.ledger import ENDED_STATES
from orchestrator.core.checkpoints.resume_choice import (
    OVERRIDE_STATES,
    ResumeChoice,
    ResumeOverride,
    choose_checkpoint,
    fits_world_size,
)
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.layout import CODE_PREFIX, JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.text import format_count

if TYPE_CHECKING:
    from orchestrator.brain.model.events import CheckpointRead
    from orchestrator.journal.job_record import Record

MEMORY_BYTES_PER_S = 1e9
"""How fast a checkpoint is written to memory, at least: pickling and copying take longer than the memory itself."""

CHECKPOINTS_NAMED_MAX = 5
"""The number of checkpoints that an error names."""


def load_checkpoints(job: JobDir) -> dict[int, Checkpoint]:
    """Return the checkpoints of a job by number. Raises ClusterError when the ledger cannot be read."""
    return _read_ledger(job)[0]


def ledger_damage(job: JobDir) -> list[str]:
    """Return a text for each line of the ledger that cannot be read. Raises ClusterError."""
    return _read_ledger(job)[1]


def _read_ledger(job: JobDir) -> tuple[dict[int, Checkpoint], list[str]]:
    try:
        return ledger.read(job.root, job.ledger)
    except OSError as err:
        raise ClusterError(f"cannot be read: {err.strerror}", str(job.ledger), "make it readable") from err


# A resume


class ResumeSource:
    """Checkpoint that a resume starts from: the newest, or the one that the user names. `number`: of the named one, else 0."""

    def __init__(self, job: JobDir, plan: Plan, reference: str) -> None:
        """Raises UserError, ClusterError."""
        self._job, self._plan = job, plan
        self._saves = load_checkpoints(job)
        self.number = 0
        if reference:
            checkpoint = find_checkpoint(job, plan, self._saves, reference)
            self._saves[checkpoint.number] = checkpoint  # it may have been adopted
            self.number = checkpoint.number
        else:
            _require_ledger(job, self._saves)
        self.choice = ResumeChoice()

    def choose_for(self, world_size: int) -> None:
        """Choose for this number of ranks. Raises UserError if the checkpoint is for another number."""
        latest = max((checkpoint.attempt for checkpoint in self._saves.values()), default=0)
        override = ResumeOverride(self.number, latest) if self.number else _load_override(self._job)
        self.choice = _choose_current(self._job, self._plan, self._saves, world_size, override)
        checkpoint = self.choice.world_size_mismatch
        if (
            override is not None
            and override.save in self._saves
            and self.choice.checkpoint is None
            and checkpoint is None
        ):
            named = self._saves[override.save]
            raise unusable_error(named.main, named.why or named.state.value)
        if checkpoint is not None:
            complete = [one for one in self._saves.values() if one.state is CheckpointState.WHOLE]
            others = _list_names([checkpoint for checkpoint in complete if fits_world_size(checkpoint, world_size)])
            fix = f"resume with {checkpoint.world_size} ranks"
            fix += f"; for {world_size} ranks use --from with one of: {others}" if others else ""
            raise UserError(describe_size_mismatch(checkpoint, world_size), checkpoint.main, fix)


def _require_ledger(job: JobDir, checkpoints: Mapping[int, Checkpoint]) -> None:
    """Raise ClusterError if the ledger lacks complete checkpoints that the journal has: the job would resume before them and
    overwrite them. Also if it is a link, because a supervisor does not write through one."""
    from orchestrator.journal import facts_file
    from orchestrator.journal.journal_integrity import JournalError

    if job.ledger.is_symlink():
        raise ClusterError("is a link", str(job.ledger), "replace it by the file itself")
    with contextlib.suppress(JournalError):
        journaled = [
            one for one in facts_file.read(job).facts.checkpoints.values() if one.state is CheckpointState.WHOLE
        ]
        lost = [checkpoint for checkpoint in journaled if checkpoint.number not in checkpoints]
        if lost:
            what = f"lacks {format_count(len(lost), 'checkpoint')} that the job wrote: {', '.join(checkpoint.main for checkpoint in lost[-CHECKPOINTS_NAMED_MAX:])}"
            fix = "resume from a file with --from PATH, or start a new job with orch submit"
            raise ClusterError(what, str(job.ledger), fix)


def describe_size_mismatch(checkpoint: Checkpoint, world_size: int) -> str:
    """Return the text for a checkpoint that this number of ranks cannot load."""
    return f"has files of each of the {checkpoint.world_size} ranks that saved it, and there would be {world_size}"


def find_checkpoint(job: JobDir, plan: Plan, checkpoints: Mapping[int, Checkpoint], reference: str) -> Checkpoint:
    """Return the complete checkpoint that the user named: by its number, its name or a path; one that is not in the ledger is
    adopted. Raises UserError, ClusterError."""
    paths = _candidate_paths(job, plan, reference)
    existing = {path for path in paths if os.path.lexists(path)}
    reals = {os.path.realpath(path) for path in existing}
    numbered = next((checkpoint for checkpoint in checkpoints.values() if reference == str(checkpoint.number)), None)
    if existing and numbered is not None and not _is_at(numbered, paths | reals):
        raise _ambiguous_error(reference, {numbered.path, *existing})
    reason = ""
    for checkpoint in sorted(checkpoints.values(), key=lambda checkpoint: -checkpoint.number):
        is_number = reference == str(checkpoint.number)
        if not is_number and not _is_at(checkpoint, paths | reals):
            continue
        current, _ = _check_files(job, plan, checkpoint, deep=False)
        if current.state in OVERRIDE_STATES:
            return current
        reason = reason or (
            current.why
            if current.state is CheckpointState.GONE
            else f"{current.state.value}: {current.why}".strip(": ")
        )
        if is_number:
            raise unusable_error(current.main, reason)
    if len(reals) > 1:
        raise _ambiguous_error(reference, existing)
    if existing:
        return adoption.adopt(job, plan, Path(min(existing)))
    if reason:
        raise unusable_error(reference, reason)
    checked = (_check_files(job, plan, checkpoint, deep=False)[0] for checkpoint in checkpoints.values())
    others = _list_names([checkpoint for checkpoint in checked if checkpoint.state is CheckpointState.WHOLE])
    raise UserError("there is no such checkpoint", reference, f"choose one of: {others}" if others else LIST_HINT)


def _ambiguous_error(wanted: str, paths: Set[str]) -> UserError:
    return UserError("matches several checkpoints", wanted, f"name the path of one: {', '.join(sorted(paths))}")


def _candidate_paths(job: JobDir, plan: Plan, wanted: str) -> set[str]:
    """Return the paths that the user may mean: relative to the current folder, the checkpoints, the job folder, and the ranks' working directory."""
    place, _ = tree.split_glob(*plan.checkpoint_location(job))
    return {os.path.abspath(root / wanted) for root in (Path(), place, job.root, job.code)}  # noqa: PTH100 -- links stay as they are


def _is_at(checkpoint: Checkpoint, paths: set[str]) -> bool:
    files = (checkpoint.main, *(piece.name for piece in checkpoint.files))
    return any(os.path.normpath(f"{place.root}/{name}") in paths for place in checkpoint.locations for name in files)


def _list_names(checkpoints: list[Checkpoint]) -> str:
    """Return the latest checkpoints as `--from` takes them, with name and step."""
    steps = {
        checkpoint.number: "" if checkpoint.step is None else f", step {checkpoint.step:,}"
        for checkpoint in checkpoints
    }
    return ", ".join(
        f"{checkpoint.number} ({checkpoint.main}{steps[checkpoint.number]})"
        for checkpoint in checkpoints[-CHECKPOINTS_NAMED_MAX:]
    )


def _choose_current(
    job: JobDir, plan: Plan, checkpoints: dict[int, Checkpoint], world_size: int, override: ResumeOverride | None
) -> ResumeChoice:
    """Return the choice for this number of ranks from the files as they are now; in `checkpoints` those without their files become GONE."""
    while True:
        choice = choose_checkpoint(checkpoints.values(), world_size, override)
        checkpoint = choice.checkpoint or choice.world_size_mismatch
        if checkpoint is None:
            return choice
        current, _ = _check_files(job, plan, checkpoint, deep=False)
        checkpoints[checkpoint.number] = current
        if current.state in OVERRIDE_STATES:
            return dataclasses.replace(choice, checkpoint=current) if choice.checkpoint is not None else choice


def _check_files(job: JobDir, plan: Plan, checkpoint: Checkpoint, *, deep: bool) -> tuple[Checkpoint, str]:
    """Return a checkpoint with the state of its files now, and how they were compared, empty if not at all. If they have
    changed, an attempt resumes from the kept copy."""
    if checkpoint.state not in OVERRIDE_STATES or not checkpoint.locations or _is_unreachable(plan, checkpoint):
        return checkpoint, ""
    comparison = disk.compare(checkpoint, deep=deep)
    if not comparison.fault:
        return checkpoint, comparison.compared
    kept = job.checkpoints / disk.KEPT_FOLDER / str(checkpoint.number)
    if kept.is_dir():
        kept_comparison = disk.compare(
            dataclasses.replace(checkpoint, locations=(FileLocation("", str(kept)),)), deep=deep
        )
        if not kept_comparison.fault:
            why = f"{comparison.fault}, but orch kept a copy in {disk.KEPT_FOLDER}/{checkpoint.number}"
            return dataclasses.replace(checkpoint, why=why), kept_comparison.compared
    return dataclasses.replace(checkpoint, state=CheckpointState.GONE, why=comparison.fault), ""


def _is_unreachable(plan: Plan, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is on a host, or may be on a disk that only hosts or nodes of Slurm have: then the other
    files of its folder are not here either."""
    is_theirs = (
        Path(plan.checkpoint_glob).is_absolute() if checkpoint.is_named else checkpoint.base_folder != START_PREFIX
    )
    return bool(checkpoint.locations[0].host) or (
        is_theirs
        and plan.backend != "local"
        and not os.path.lexists(checkpoint.path if plan.ssh is not None else Path(checkpoint.path).parent)
    )


def memory_stall_s(job: JobDir, plan: Plan) -> float | None:
    """Return for about how long a checkpoint in memory would stop the ranks; None if checkpoints are there already, or cannot be."""
    timed = [one for one in load_checkpoints(job).values() if one.stall_s is not None and one.size_bytes]
    is_elsewhere = plan.checkpoint_glob.startswith(("/", CODE_PREFIX)) or not all(one.is_named for one in timed)
    if plan.memory_bytes or is_elsewhere or not timed:
        return None
    return sum(one.size_bytes for one in timed) / len(timed) / MEMORY_BYTES_PER_S


# The list


def list_checkpoints(job: JobDir, plan: Plan, *, verify: bool) -> list[Json]:
    """Return the checkpoints, oldest first, as `orch checkpoints --json` prints them, also adoptable ones. Raises
    ClusterError."""
    checkpoints = load_checkpoints(job)
    checked = {number: _check_files(job, plan, checkpoint, deep=verify) for number, checkpoint in checkpoints.items()}
    choice = choose_checkpoint((checkpoint for checkpoint, _ in checked.values()), plan.world_size, _load_override(job))
    start_number = choice.checkpoint.number if choice.checkpoint is not None else 0
    root, _ = tree.split_glob(*plan.checkpoint_location(job))
    notes = {passed.save: passed.why for passed in choice.skipped}
    if choice.world_size_mismatch is not None:
        notes[choice.world_size_mismatch.number] = describe_size_mismatch(choice.world_size_mismatch, plan.world_size)
    rows = [
        _checkpoint_row(
            checkpoint,
            by if verify else "",
            notes.get(checkpoint.number, ""),
            root
            if checkpoint.is_named
            else job.code
            if checkpoint.base_folder == START_PREFIX
            else Path(checkpoint.base_folder),
            is_start=checkpoint.number == start_number,
        )
        for checkpoint, by in checked.values()
    ]
    return [*rows, *map(adoption.row, adoption.find_adoptable(job, plan, checkpoints))]


def _load_override(job: JobDir) -> ResumeOverride | None:
    """Return the checkpoint that the user named for the next attempt, if it is still in effect."""
    from orchestrator.journal import facts_file
    from orchestrator.journal.journal_integrity import JournalError

    try:
        return facts_file.read(job).facts.resume_override
    except JournalError:
        return None


def _checkpoint_row(checkpoint: Checkpoint, verified_by: str, note: str, root: Path, *, is_start: bool) -> Json:
    """Return a checkpoint for JSON; `note`: why the next attempt skips it. `complete`: it is complete in the ledger and its files exist. `whole`: the result of a comparison of all
    bytes has found, None without one. `safe`: it outlives the loss of any one host. `resume`: the next attempt resumes from it. `why`: the note on it. `root`: where
    it was, if what is left of it was moved."""
    return {
        "save": checkpoint.number,
        "path": checkpoint.path if checkpoint.locations else str(root / checkpoint.main),
        "main": checkpoint.main,
        "attempt": checkpoint.attempt,
        "world_size": checkpoint.world_size,
        "step": checkpoint.step,
        "step_source": checkpoint.step_source.value,
        "format": checkpoint.format.value,
        "content": checkpoint.content.value,
        "state": checkpoint.state.value,
        "why": checkpoint.why
        or _pending_reason(checkpoint)
        or (note if note not in (checkpoint.content.value, checkpoint.state.value) else ""),
        "closed_by": checkpoint.closed_by.value,
        "compared": verified_by or checkpoint.compared,
        "files": len(checkpoint.files),
        "bytes": checkpoint.size_bytes,
        "written_at": status_file.iso(checkpoint.written_ns / 1e9),
        "stall_s": None if checkpoint.stall_s is None else round(checkpoint.stall_s, 3),
        "places": [
            {"host": place.host, "path": place.root, "memory": place.is_memory} for place in checkpoint.locations
        ],
        "exists": bool(checkpoint.locations) and not checkpoint.locations[0].host and os.path.lexists(checkpoint.path),
        "complete": checkpoint.state is CheckpointState.WHOLE,
        "safe": checkpoint.state is CheckpointState.WHOLE and memory.is_safe(checkpoint),
        "safe_bytes": sum(piece.size_bytes for piece in memory.safe_files(checkpoint)),
        "whole": True if verified_by else False if checkpoint.state in ENDED_STATES else None,
        "resume": is_start,
        "checkpoint_path": "",
    }


def _pending_reason(checkpoint: Checkpoint) -> str:
    if checkpoint.state is not CheckpointState.OPEN:
        return ""
    return "is being copied from its hosts" if checkpoint.is_in_transit else "not every rank has made a step since"


# A post-mortem


def add_checkpoints(job: JobDir, plan: Plan, why: Json, record: Record) -> None:
    """Add to a post-mortem why the checkpoint of each attempt was complete; and, for a job that
    has ended, what a resume would start from with the files as they are now. Adds nothing if the ledger cannot be read."""
    try:
        checkpoints = load_checkpoints(job)
    except OrchError:
        return
    for attempt, history in zip(why["attempts"], record.attempts, strict=False):
        resume = history.begun.resume
        given_checkpoint = checkpoints.get(resume.save) if resume else None
        read_checkpoint = checkpoints.get(history.read.save) if history.read is not None else None
        attempt["began_from"] = _start_json(history.read, read_checkpoint, given_checkpoint)
        proved = given_checkpoint if read_checkpoint is None else read_checkpoint
        began_fresh = history.read is not None and not history.read.save
        attempt["resumed_save"] = _proof_json(proved) if proved is not None and not began_fresh else None
    if record.facts.end is None:
        return
    choice = _choose_current(job, plan, checkpoints, plan.world_size, record.facts.resume_override)
    checkpoint, other = choice.checkpoint, choice.world_size_mismatch
    why["checkpoint"] = (
        {"path": checkpoint.path, "step": checkpoint.step, **_proof_json(checkpoint)}
        if checkpoint is not None
        else None
    )
    why["misfit"] = (
        {"path": other.path, "why": describe_size_mismatch(other, plan.world_size)} if other is not None else None
    )
    offered = [] if checkpoint is not None or other is not None else adoption.find_adoptable(job, plan, checkpoints)
    why["offered"] = [str(offer.path) for offer in offered if not offer.fault]
    why["passed"] = [
        {"save": loser.save, "path": loser.main, "step": loser.step, "why": loser.why} for loser in choice.skipped
    ]


def _start_json(event: CheckpointRead | None, read: Checkpoint | None, given: Checkpoint | None) -> Json | None:
    """Return the checkpoint that an attempt started from, as its ranks' reads show; None if unknown."""
    if event is None or (event.save and read is None):
        return None
    if read is None:
        path = event.other.removeprefix(START_PREFIX) or None
        return {"save": None, "path": path, "step": None, "chosen_by": "script"} if path or given else None
    chosen_by = "script" if not read.is_named or given is None or read.number != given.number else "orch"
    return {
        "save": read.number,
        "path": read.path if read.locations else read.main,
        "step": read.step,
        "chosen_by": chosen_by,
    }


def _proof_json(checkpoint: Checkpoint) -> Json:
    return {
        "save": checkpoint.number,
        "step": checkpoint.step,
        "step_source": checkpoint.step_source.value,
        "closed_by": checkpoint.closed_by.value,
        "compared": checkpoint.compared,
    }
