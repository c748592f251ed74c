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
from orchestrator.client.adoption import LIST, Offer, unfit
from orchestrator.core.checkpoints import disk, ledger, names, tree
from orchestrator.core.checkpoints.choice import NAMED, Choice, Pin, choose, fits
from orchestrator.core.checkpoints.ledger import ENDED
from orchestrator.core.checkpoints.save import START, Place, Save, SaveState, StepSource
from orchestrator.core.codec import Json
from orchestrator.core.errors import ClusterError, OrchError, UserError
from orchestrator.core.jobdir import start_folder, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.text import counted

if TYPE_CHECKING:
    from orchestrator.brain.model.events import CheckpointRead
    from orchestrator.journal.job_record import Record

NAMED_MAX = 5
"""The number of checkpoints that an error names."""


def known(job: JobDir) -> dict[int, Save]:
    """Return the checkpoints of a job by number. Raises ClusterError when the ledger cannot be read."""
    return _read(job)[0]


def damage(job: JobDir) -> list[str]:
    """Return a text for each line of the ledger that cannot be read. Raises ClusterError."""
    return _read(job)[1]


def _read(job: JobDir) -> tuple[dict[int, Save], list[str]]:
    try:
        return ledger.read(job.root, job.ledger)
    except OSError as err:
        raise ClusterError(f"cannot be read: {err.strerror}", str(job.ledger), "make it readable") from err


# A resume


class Start:
    """Checkpoint that a resume starts from: the newest, or the one that the user names. `number`: of the named one, else 0."""

    def __init__(self, job: JobDir, plan: Plan, wanted: str) -> None:
        """Raises UserError, ClusterError."""
        self._job, self._plan = job, plan
        self._saves = known(job)
        self.number = 0
        if wanted:
            save = find(job, plan, self._saves, wanted)
            self._saves[save.number] = save  # it may have been adopted
            self.number = save.number
        else:
            _require_ledger(job, self._saves)
        self.choice = Choice()

    def fit(self, world_size: int) -> None:
        """Choose for this number of ranks. Raises UserError if the checkpoint is for another number."""
        latest = max((save.attempt for save in self._saves.values()), default=0)
        pin = Pin(self.number, latest) if self.number else _pin(self._job)
        self.choice = _choice_now(self._job, self._plan, self._saves, world_size, pin)
        save = self.choice.misfit
        if pin is not None and pin.save in self._saves and self.choice.save is None and save is None:
            named = self._saves[pin.save]
            raise unfit(named.main, named.why or named.state.value)
        if save is not None:
            own = [one for one in self._saves.values() if one.state is SaveState.WHOLE]
            others = _named([setting for setting in own if fits(setting, world_size)])
            fix = f"resume with {save.world_size} ranks"
            fix += f"; for {world_size} ranks use --from with one of: {others}" if others else ""
            raise UserError(misfit(save, world_size), save.main, fix)


def _require_ledger(job: JobDir, saves: Mapping[int, Save]) -> None:
    """Raise ClusterError if the ledger lacks complete checkpoints that the journal has: the job would resume before them and
    overwrite them. Also if it is a link, because a supervisor does not write through one."""
    from orchestrator.journal import facts_file
    from orchestrator.journal.lost_journal import JournalError

    if job.ledger.is_symlink():
        raise ClusterError("is a link", str(job.ledger), "replace it by the file itself")
    with contextlib.suppress(JournalError):
        written = [one for one in facts_file.read(job).facts.saves.values() if one.state is SaveState.WHOLE]
        lost = [save for save in written if save.number not in saves]
        if lost:
            what = f"lacks {counted(len(lost), 'checkpoint')} that the job wrote: {', '.join(save.main for save in lost[-NAMED_MAX:])}"
            fix = "resume from a file with --from PATH, or start a new job with orch submit"
            raise ClusterError(what, str(job.ledger), fix)


def misfit(save: Save, world_size: int) -> str:
    """Return the text for a checkpoint that this number of ranks cannot load."""
    return f"has files of each of the {save.world_size} ranks that saved it, and there would be {world_size}"


def find(job: JobDir, plan: Plan, saves: Mapping[int, Save], wanted: str) -> Save:
    """Return the complete checkpoint that the user named: by its number, its name or a path; one that is not in the ledger is
    adopted. Raises UserError, ClusterError."""
    paths = _paths(job, plan, wanted)
    there = {path for path in paths if os.path.lexists(path)}
    reals = {os.path.realpath(path) for path in there}
    numbered = next((save for save in saves.values() if wanted == str(save.number)), None)
    if there and numbered is not None and not _is_at(numbered, paths | reals):
        raise _ambiguous(wanted, {numbered.path, *there})
    why = ""
    for save in sorted(saves.values(), key=lambda save: -save.number):
        is_number = wanted == str(save.number)
        if not is_number and not _is_at(save, paths | reals):
            continue
        now, _ = _now(job, plan, save, deep=False)
        if now.state in NAMED:
            return now
        why = why or (now.why if now.state is SaveState.GONE else f"{now.state.value}: {now.why}".strip(": "))
        if is_number:
            raise unfit(now.main, why)
    if len(reals) > 1:
        raise _ambiguous(wanted, there)
    if there:
        return adoption.adopt(job, plan, Path(min(there)))
    if why:
        raise unfit(wanted, why)
    seen = (_now(job, plan, save, deep=False)[0] for save in saves.values())
    others = _named([save for save in seen if save.state is SaveState.WHOLE])
    raise UserError("there is no such checkpoint", wanted, f"choose one of: {others}" if others else LIST)


def _ambiguous(wanted: str, paths: Set[str]) -> UserError:
    return UserError(
        "matches several checkpoints", wanted, f"name the path of one: {', '.join(sorted(paths))}"
    )


def _paths(job: JobDir, plan: Plan, wanted: str) -> set[str]:
    """Return the paths that the user may mean: relative to the current folder, the checkpoints, the job folder, and the ranks' working directory."""
    place, _ = tree.place_of(*plan.checkpoint_place(job))
    return {os.path.abspath(root / wanted) for root in (Path(), place, job.root, job.code)}  # noqa: PTH100 -- links stay as they are


def _is_at(save: Save, paths: set[str]) -> bool:
    files = (save.main, *(piece.name for piece in save.pieces))
    return any(os.path.normpath(f"{place.root}/{name}") in paths for place in save.places for name in files)


def _named(saves: list[Save]) -> str:
    """Return the latest checkpoints as `--from` takes them, with name and step."""
    steps = {save.number: "" if save.step is None else f", step {save.step:,}" for save in saves}
    return ", ".join(f"{save.number} ({save.main}{steps[save.number]})" for save in saves[-NAMED_MAX:])


def _choice_now(job: JobDir, plan: Plan, saves: dict[int, Save], world_size: int, pin: Pin | None) -> Choice:
    """Return the choice for this number of ranks from the files as they are now; in `saves` those without their files become GONE."""
    while True:
        choice = choose(saves.values(), world_size, pin)
        save = choice.save or choice.misfit
        if save is None:
            return choice
        now, _ = _now(job, plan, save, deep=False)
        saves[save.number] = now
        if now.state in NAMED:
            return dataclasses.replace(choice, save=now) if choice.save is not None else choice


def _now(job: JobDir, plan: Plan, save: Save, *, deep: bool) -> tuple[Save, str]:
    """Return a checkpoint with the state of its files now, and how they were compared, empty if not at all. If they have
    changed, an attempt resumes from the kept copy."""
    if save.state not in NAMED or not save.places or _is_unseen(plan, save):
        return save, ""
    found = disk.compare(save, deep=deep)
    if not found.fault:
        return save, found.by
    kept = job.checkpoints / disk.KEPT / str(save.number)
    if kept.is_dir():
        own = disk.compare(dataclasses.replace(save, places=(Place("", str(kept)),)), deep=deep)
        if not own.fault:
            why = f"{found.fault}, but orch kept a copy in {disk.KEPT}/{save.number}"
            return dataclasses.replace(save, why=why), own.by
    return dataclasses.replace(save, state=SaveState.GONE, why=found.fault), ""


def _is_unseen(plan: Plan, save: Save) -> bool:
    """Tell whether a checkpoint is on a host, or may be on a disk that only hosts or nodes of Slurm have: then the other
    files of its folder are not here either."""
    is_theirs = Path(plan.checkpoint_glob).is_absolute() if save.is_named else save.area != START
    return bool(save.places[0].host) or (
        is_theirs
        and plan.backend != "local"
        and not os.path.lexists(save.path if plan.ssh is not None else Path(save.path).parent)
    )


# The list


def offers(job: JobDir, plan: Plan) -> list[Offer]:
    """Return the files that look like checkpoints and are not in the ledger, see `adoption`. Raises ClusterError."""
    return adoption.offers(job, plan, known(job))


def listed(job: JobDir, plan: Plan, *, verify: bool) -> list[Json]:
    """Return the checkpoints, oldest first, as `orch checkpoints --json` prints them, also adoptable ones. Raises
    ClusterError."""
    saves = known(job)
    seen = {number: _now(job, plan, save, deep=verify) for number, save in saves.items()}
    choice = choose((save for save, _ in seen.values()), plan.world_size, _pin(job))
    start = choice.save.number if choice.save is not None else 0
    root, _ = tree.place_of(*plan.checkpoint_place(job))
    notes = {passed.save: passed.why for passed in choice.passed}
    if choice.misfit is not None:
        notes[choice.misfit.number] = misfit(choice.misfit, plan.world_size)
    rows = [
        _row(
            save,
            by if verify else "",
            notes.get(save.number, ""),
            root if save.is_named else job.code if save.area == START else Path(save.area),
            is_start=save.number == start,
        )
        for save, by in seen.values()
    ]
    return [*rows, *map(_offer_row, adoption.offers(job, plan, saves))]


def _pin(job: JobDir) -> Pin | None:
    """Return the checkpoint that the user named for the next attempt, if it is still in effect."""
    from orchestrator.journal import facts_file
    from orchestrator.journal.lost_journal import JournalError

    try:
        return facts_file.read(job).facts.pin
    except JournalError:
        return None


def _row(save: Save, verified_by: str, note: str, root: Path, *, is_start: bool) -> Json:
    """Return a checkpoint for JSON; `note`: why the next attempt skips it. `complete`: it is complete in the ledger and its files exist. `whole`: the result of a comparison of all
    bytes has found, None without one. `resume`: the next attempt resumes from it. `why`: the note on it. `root`: where
    it was, if what is left of it was moved."""
    return {
        "save": save.number,
        "path": save.path if save.places else str(root / save.main),
        "main": save.main,
        "attempt": save.attempt,
        "world_size": save.world_size,
        "step": save.step,
        "step_source": save.step_source.value,
        "format": save.format.value,
        "content": save.content.value,
        "state": save.state.value,
        "why": save.why
        or _waits_for(save)
        or (note if note not in (save.content.value, save.state.value) else ""),
        "closed_by": save.closed_by.value,
        "compared": verified_by or save.compared,
        "files": len(save.pieces),
        "bytes": save.size_bytes,
        "written_at": status_file.iso(save.written_ns / 1e9),
        "places": [{"host": place.host, "path": place.root} for place in save.places],
        "exists": bool(save.places) and not save.places[0].host and os.path.lexists(save.path),
        "complete": save.state is SaveState.WHOLE,
        "whole": True if verified_by else False if save.state in ENDED else None,
        "resume": is_start,
        "checkpoint_path": "",
    }


def _waits_for(save: Save) -> str:
    if save.state is not SaveState.OPEN:
        return ""
    return "is being copied from its hosts" if save.is_coming else "not every rank has made a step since"


def _offer_row(offer: Offer) -> Json:
    return {
        "save": None,
        "path": str(offer.path),
        "main": offer.group.main,
        "attempt": None,
        "world_size": None,
        "step": offer.reading.step,
        "step_source": (StepSource.UNKNOWN if offer.reading.step is None else StepSource.STATED).value,
        "format": offer.reading.format.value,
        "content": offer.reading.content.value,
        "state": "offered",
        "why": offer.fault,
        "closed_by": "",
        "compared": "",
        "files": len(offer.pieces),
        "bytes": sum(piece.size_bytes for piece in offer.pieces),
        "written_at": status_file.iso(offer.written_ns / 1e9),
        "places": [],
        "exists": True,
        "complete": False,
        "whole": None,
        "resume": False,
        "checkpoint_path": "",
    }


# Where files are


def folders(job: JobDir) -> Json:
    """Return where a job's files are, as `orch folder --json` prints it. Raises ClusterError."""
    whole = [save for save in known(job).values() if save.state is SaveState.WHOLE and save.places]
    by_folder: dict[str, int] = {}
    for save in whole:
        host = f"{save.host}:" if save.host and not os.path.lexists(save.path) else ""
        folder = f"{host}{os.path.dirname(save.path)}"  # noqa: PTH120 -- a host's path, not one of this machine
        by_folder[folder] = by_folder.get(folder, 0) + 1
    try:
        written, links = start_folder.written(job), start_folder.links(job)
    except OSError as err:
        raise ClusterError(f"cannot be read: {err.strerror}", str(job.code), "make it readable") from err
    return {
        "id": job.id,
        "dir": str(job.root),
        "start": str(job.code),
        "written": len(written),
        "links": [{"name": name, "to": to} for name, to in links.items()],
        "checkpoints": [{"dir": folder, "whole": count} for folder, count in by_folder.items()],
        "logs": str(job.logs),
        "checkpoint_path": _path_of(whole[-1]) if whole else None,
    }


def _path_of(save: Save) -> str | None:
    """Return the `checkpoint.path` that matches a checkpoint and those like it; None if the job file already names it."""
    if save.is_named:
        return None
    glob = names.without_count(save.main).replace("#", "*")
    return f"{{job_dir}}/code/{glob}" if save.area == START else f"{save.area}/{glob}"


# A post-mortem


def explain(job: JobDir, plan: Plan, why: Json, record: Record) -> None:
    """Add to a post-mortem why the checkpoint of each attempt was complete; and, for a job that
    has ended, what a resume would start from with the files as they are now. Adds nothing if the ledger cannot be read."""
    try:
        saves = known(job)
    except OrchError:
        return
    for attempt, history in zip(why["attempts"], record.attempts, strict=False):
        resume = history.begun.resume
        given = saves.get(resume.save) if resume else None
        read = saves.get(history.read.save) if history.read is not None else None
        attempt["began_from"] = _beginning(history.read, read, given)
        proved = given if read is None else read
        is_anew = history.read is not None and not history.read.save
        attempt["resumed_save"] = _proof(proved) if proved is not None and not is_anew else None
    if record.facts.end is None:
        return
    choice = _choice_now(job, plan, saves, plan.world_size, record.facts.pin)
    save, other = choice.save, choice.misfit
    why["checkpoint"] = {"path": save.path, "step": save.step, **_proof(save)} if save is not None else None
    why["misfit"] = {"path": other.path, "why": misfit(other, plan.world_size)} if other is not None else None
    offered = [] if save is not None or other is not None else adoption.offers(job, plan, saves)
    why["offered"] = [str(offer.path) for offer in offered if not offer.fault]
    why["passed"] = [
        {"save": loser.save, "path": loser.main, "step": loser.step, "why": loser.why}
        for loser in choice.passed
    ]


def _beginning(event: CheckpointRead | None, read: Save | None, given: Save | None) -> Json | None:
    """Return the checkpoint that an attempt started from, as its ranks' reads show; None if unknown."""
    if event is None or (event.save and read is None):
        return None
    if read is None:
        path = event.other.removeprefix(START) or None
        return {"save": None, "path": path, "step": None, "chosen_by": "script"} if path or given else None
    is_own = not read.is_named or given is None or read.number != given.number
    chosen_by = "script" if is_own else "orch"
    return {"save": read.number, "path": read.path, "step": read.step, "chosen_by": chosen_by}


def _proof(save: Save) -> Json:
    return {
        "save": save.number,
        "step": save.step,
        "step_source": save.step_source.value,
        "closed_by": save.closed_by.value,
        "compared": save.compared,
    }
