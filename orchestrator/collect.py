"""What came of a job? Its checkpoints, logs and evidence: listed, brought together, and cleared away."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator import home, leftovers, statefile
from orchestrator.backends import LaunchError
from orchestrator.errors import ClusterError, OrchError, UserError, counted
from orchestrator.job import POLL_S, Job
from orchestrator.node import keeper
from orchestrator.node.checkpoints import CheckpointWatch
from orchestrator.node.formats import Wholeness, look, wholeness

Json: TypeAlias = dict[str, Any]


def checkpoints(job: Job, *, verify: bool) -> list[Json]:
    """Return what matches the job's glob, oldest first: path, step (None: not known), bytes, written_at, complete.

    `complete`: the supervisor knows that it is. `whole`: what the files' formats tell, None when they tell nothing or
    `verify` did not ask for it. `resume`: the next attempt starts from it. Raises ClusterError for a damaged job.
    """
    from orchestrator import factsfile

    facts = factsfile.read(job.folder).facts
    chosen = facts.checkpoint.path if facts.checkpoint else None
    watch = CheckpointWatch(job.folder.checkpoints, job.plan().checkpoint_glob)
    listed = []
    for path, shape in sorted(watch.listed().items(), key=lambda item: item[1].mtime_ns):
        listed.append(
            {
                "path": str(path),
                "step": facts.known_steps.get(str(path)),
                "bytes": shape.size_bytes,
                "written_at": statefile.iso(shape.mtime_ns / 1e9),
                "complete": str(path) in facts.known_steps,
                "whole": _whole(path) if verify else None,
                "resume": str(path) == chosen,
            }
        )
    return listed


def _whole(path: Path) -> bool | None:
    known = wholeness(path, look(path))
    return None if known is Wholeness.UNKNOWN else known is Wholeness.WHOLE


def collect(job: Job, to: Path | None) -> Path:
    """Bring a job's results together and return where they are. Raises OrchError, UserError for an unfit `to`.

    Everything is in the job folder: from the start, or since it came from the hosts (`leftovers`). `to` gets a copy of
    logs, checkpoints, evidence and the post-mortem (`why.json`).
    """
    if to is None:
        return job.folder.root
    if to.resolve().is_relative_to(job.folder.root.resolve()):
        raise UserError("a copy of the job inside its own folder", str(to), "name a folder elsewhere")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError("is no empty folder", str(to), "name a new one")
    why = json.dumps(job.why(), indent=2)
    try:
        to.mkdir(parents=True, exist_ok=True)
        (to / "why.json").write_text(why)
        for part in (job.folder.logs, job.folder.checkpoints, job.folder.root / "evidence"):
            if part.exists() and (not part.is_symlink() or home.is_ours(job.folder)):
                shutil.copytree(part, to / part.name, symlinks=True)
        for file in (job.folder.spec, job.folder.provenance, job.folder.journal):
            if file.exists():
                shutil.copy2(file, to, follow_symlinks=False)
    except (OSError, shutil.Error) as err:
        raise ClusterError(
            f"cannot be copied: {err}", str(to), "free some space there, and name a new folder"
        ) from err
    return to


LAST_S_MAX = 360.0
"""How long to wait for what an ended job's supervisor still brings home."""


def await_last(job: Job) -> None:
    """Wait until an ended job's supervisor has brought home what it can; revive it if it died over that."""
    deadline_s = time.monotonic() + LAST_S_MAX
    while not job.folder.ended.exists() and time.monotonic() < deadline_s:
        job.look_after()
        time.sleep(POLL_S)


def tidy(jobs: Sequence[Job]) -> str:
    """Kill what ended jobs left running and remove their run files and the drafts of cut off submits.

    Says what, and what could not be done; nothing when there was nothing to do.
    """
    tidied, left = 0, []
    for job in jobs:
        run = job.folder.root / "nodes"
        if not job.folder.ended.exists() or not run.exists() or job.folder.archive.exists():
            continue  # over SSH it holds what agents said, and nothing of it runs here
        for node in sorted(run.iterdir()):
            keeper.sweep(job.id, node.name)
        if _is_deleted(run):
            tidied += 1
        else:
            left.append(run)
    drafts = [
        path for folder in {job.folder.root.parent for job in jobs} for path in sorted(folder.glob(".*"))
    ]
    old = [path for path in drafts if time.time() - path.lstat().st_mtime > DRAFT_S_MAX]
    removed = sum(_is_deleted(path) for path in old)
    parts = [f"tidied {counted(tidied, 'ended job')}"] if tidied else []
    parts += [f"removed {counted(removed, 'cut off submit')}"] if removed else []
    parts += [f"{counted(len(left), 'ended job')} could not be tidied, such as {left[0]}"] if left else []
    return ", ".join(parts)


def _is_deleted(folder: Path) -> bool:
    """Delete a folder, and tell whether it is gone: it may be another user's."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def swept(accounts: Sequence[leftovers.Account]) -> str:
    """Say how many hosts were cleaned, of how many jobs, and what came home before; nothing when there were none."""
    cleaned = [account for account in accounts if account.clean]
    if not cleaned:
        return ""
    hosts = sum(len(account.clean) for account in cleaned)
    text = f"cleaned {counted(hosts, 'host')} of {counted(len(cleaned), 'job')}"
    brought = leftovers.summary(cleaned)
    return f"{text}; {brought}" if brought else text


def sweep_hosts(jobs: Sequence[Job]) -> dict[str, leftovers.Account]:
    """Clean the hosts of ended jobs; return how it went for each job that had anything there."""
    accounts: dict[str, leftovers.Account] = {}
    for job in jobs:
        if not job.folder.ended.exists() or not job.folder.archive.exists():
            continue
        try:
            account = leftovers.sweep(job)
        except OrchError as err:  # one damaged folder must not keep the others' hosts dirty
            account = leftovers.Account({}, {"its hosts": LaunchError("folder", err.what, err.fix)})
        if account.brought or account.failed:
            accounts[job.id] = account
    return accounts


DRAFT_S_MAX = 3600.0
"""A submit takes seconds; a draft older than that belongs to one that was cut off."""


def older_than(jobs: Sequence[Job], age_s: float) -> list[Job]:
    """Return the ended jobs that ended longer ago than that."""
    limit_s = time.time() - age_s
    return [job for job in jobs if job.folder.ended.exists() and job.folder.ended.stat().st_mtime < limit_s]


def delete(jobs: Sequence[Job]) -> str:
    """Delete ended jobs' folders; say what."""
    for job in jobs:
        assert job.folder.ended.exists(), "only ended jobs are deleted"
        shutil.rmtree(job.folder.root, ignore_errors=True)
    left = [job.id for job in jobs if job.folder.root.exists()]
    if left:
        return f"deleted {counted(len(jobs) - len(left), 'job')}; these could not be: {', '.join(left)}"
    names = sorted({home.name_of(job.id) for job in jobs})
    return f"deleted {counted(len(jobs), 'job')} ({', '.join(names)})"
