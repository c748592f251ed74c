"""The table of saves, what is offered below it, and what a resume says that it begins from."""

from __future__ import annotations

from typing import Any

from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointState,
    CompletionReason,
    FileLocation,
    StepSource,
)
from orchestrator.core.checkpoints.resume_choice import ResumeChoice, SkippedCheckpoint
from orchestrator.core.codec import Json
from orchestrator.views import cells, checkpoint_table
from tests.support import golden, jobs, saved_files

COLUMNS = 80


def _save(number: int, **fields: Any) -> Json:
    """Return a save as `orch checkpoints --json` has it; `fields` are those that differ."""
    main = fields.get("main", f"step-{number}0.pt")
    whole: Json = {
        "save": number, "path": f"{jobs.ROOT}/checkpoints/{main}", "main": main, "step": 10 * number, "content": "state",
        "state": "whole", "why": "", "compared": "", "files": 1, "bytes": 3_400_000, "exists": True, "whole": None,
        "written_at": f"2026-11-20T22:4{number % 10}:05.123Z", "resume": False, "places": [{"host": "", "path": "/"}],
    }  # fmt: skip
    return {**whole, **fields}


def _offer(main: str, **fields: Any) -> Json:
    base = {"save": None, "format": "torch.save", "checkpoint_path": "", "state": "offered"}
    return {**_save(5, main=main, step=50), **base, **fields}


def _text(*listed: Json) -> str:
    return cells.plain_text(checkpoint_table.table(listed, jobs.ID, jobs.ROOT))


OVER = {"state": "gone", "why": "was overwritten by checkpoint 6", "main": "last.pt"}
DELETED = {"state": "gone", "exists": False}
TABLES: dict[str, list[Json]] = {
    "whole ones": [_save(1), _save(2, resume=True, step=1200, bytes=2_100_000_000)],
    "a night": [
        _save(1, **DELETED, why="step-10.pt is gone"),
        _save(2, state="pruned", why="checkpoint.keep", exists=False),
        _save(3, content="weights alone", step=None),
        _save(4, resume=True, files=12, main="step-40", why="step-40/a.pt is empty, but orch kept a copy in .kept/4"),
        _save(5, **DELETED, why="step-50.pt is gone"),
        _save(6, state="gone", why="step-60.pt differs from what was saved (sha256)"),
        _save(7, state="torn", why="is cut off: its zip has no end; moved step-70.pt to .step-70.pt.torn-attempt-1"),
        _save(8, state="distrusted", why="rank 0 could not load it in attempt 2: RuntimeError"),
        _save(9, state="open", why="not every rank has made a step since"),
    ],
    "one name, again and again": [_save(4, **OVER), _save(5, **OVER), _save(6, main="last.pt", resume=True)],
    "nothing whole": [_save(1, **DELETED, why="step-10.pt is gone"), _save(2, state="torn", why="step-20.pt is empty")],
    "on a host": [_save(1, resume=True), _save(2, state="torn", why="step-20.pt is empty", places=[{"host": "gpu3", "path": "/"}])],
    "compared": [
        _save(1, whole=True, compared="sha256"),
        _save(2, whole=False, state="gone", why="step-20.pt differs from what was saved (sha256)"),
        _save(3, whole=True, compared="sha256", resume=True),
        _save(4, whole=True, compared="size and time, its format has no check sum", main="a.pkl"),
    ],
    "of no rank": [
        _save(1, resume=True),
        _offer("my model.pt"),
        _offer("torn.pt", format="unknown", step=None, why="torn.pt is cut off: its zip has no end"),
    ],
    "many of no rank": [_offer(f"old/{number}.pt") for number in range(7)],
    "where ranks start, and elsewhere": [
        _save(1, main="out/ckpt_10.pt", path=f"{jobs.ROOT}/code/out/ckpt_10.pt", places=[{"host": "", "path": f"{jobs.ROOT}/code"}]),
        _save(2, main="run/step-20.pt", path="/scratch/run/step-20.pt", places=[{"host": "", "path": "/scratch"}], resume=True),
    ],
    "in memory": [
        _save(1, bytes=8_400_000_000, safe_bytes=8_400_000_000, complete=True, safe=True, places=[
            *({"host": f"node{number}", "path": "/dev/shm/orch-x", "memory": True} for number in range(1, 9)),
            {"host": "node1", "path": "/home/me/.orch/jobs/x/checkpoints", "memory": False}, {"host": "", "path": "/", "memory": False},
        ]),
        _save(2, bytes=8_400_000_000, safe_bytes=2_100_000_000, complete=True, safe=False, resume=True, places=[
            {"host": "node1", "path": "/dev/shm/orch-x/checkpoints", "memory": True},
            {"host": "node2", "path": "/dev/shm/orch-y/checkpoints", "memory": True},
            {"host": "node2", "path": "/dev/shm/orch-y/neighbours/2", "memory": True},
        ]),
        _save(3, state="open", why="not every rank has made a step since", complete=False, safe=False, safe_bytes=0, places=[
            {"host": "node1", "path": "/dev/shm/orch-x/checkpoints", "memory": True},
        ]),
    ],
    "nothing yet": [],
}  # fmt: skip


def test_checkpoint_tables_match_golden_files() -> None:
    """The tables are those that were reviewed."""
    golden.check("checkpoints.txt", "".join(f"# {name}\n{_text(*rows)}\n" for name, rows in TABLES.items()))


def test_table_fits_narrow_terminal_except_commands_and_reasons() -> None:
    rows = [row for table in TABLES.values() for row in _text(*table).splitlines()]
    wide = [row for row in rows if len(row) > COLUMNS]
    assert all(row.startswith("      ") or "checkpoint.path" in row for row in wide), wide


def test_overwritten_checkpoint_is_shown_if_nothing_else() -> None:
    text = _text(_save(1, **{**OVER, "why": "last.pt is gone"}))
    assert "last.pt\n      it is gone" in text and "a restart starts from the beginning" in text


def _whole(number: int, **fields: Any) -> Checkpoint:
    place = FileLocation("", f"{jobs.ROOT}/checkpoints")
    known = {"main": f"step-{number}0.pt", "step_source": StepSource.STATED, "locations": (place,)}
    return saved_files.saved(number, **{**known, **fields})


def test_resume_text_matches_golden_file() -> None:
    """The text of a resume about its start is as reviewed."""
    torn = SkippedCheckpoint(7, "step-70.pt", 70, "torn: the attempt ended while it was written")
    gone = SkippedCheckpoint(6, "step-60", None, "gone: step-60/model.pt is gone")
    kept = "last.pt is empty, but orch kept a copy in .kept/5"
    choices = {
        "the newest": ResumeChoice(_whole(5)),
        "one before others": ResumeChoice(_whole(5, step_source=StepSource.COUNTED), skipped=(torn, gone)),
        "as it was kept": ResumeChoice(_whole(5, main="last.pt", why=kept, step=None)),
        "one that was given up": ResumeChoice(
            _whole(5, state=CheckpointState.DISTRUSTED, why="rank 0 could not load it in attempt 2: RuntimeError")
        ),
        "adopted from elsewhere": ResumeChoice(
            _whole(5, locations=(FileLocation("", "/data"),), closed_by=CompletionReason.ADOPTED)
        ),
        "many passed": ResumeChoice(_whole(1), skipped=(torn, gone) * 4),
        "the beginning": ResumeChoice(skipped=(torn,)),
    }
    text = "".join(
        f"# {name}\n{cells.plain_text(checkpoint_table.resume_lines(one, jobs.ROOT))}\n"
        for name, one in choices.items()
    )
    golden.check("resume.txt", text)


WHERE: Json = {
    "id": jobs.ID, "dir": jobs.ROOT, "start": f"{jobs.ROOT}/code", "written": 3, "links": [{"name": "runs", "to": "/home/me/runs"}],
    "checkpoints": [{"dir": f"{jobs.ROOT}/code/out", "whole": 2}, {"dir": "/scratch/run", "whole": 1}], "logs": f"{jobs.ROOT}/logs",
    "checkpoint_path": "{job_dir}/code/out/net_*.pth",
}  # fmt: skip


def test_checkpoint_folders_are_listed_by_line_and_inline() -> None:
    assert cells.plain_text(checkpoint_table.folder_lines(WHERE)).splitlines() == [
        f"  folder       {jobs.ROOT}",
        f"  code         {jobs.ROOT}/code  3 files written by ranks",
        "               runs -> /home/me/runs, which jobs of this workdir share",
        f"  checkpoints  {jobs.ROOT}/code/out  2 complete checkpoints",
        "  checkpoints  /scratch/run  1 complete checkpoint",
        f"  logs         {jobs.ROOT}/logs",
    ]
    assert cells.plain_text(checkpoint_table.end_lines(WHERE)).splitlines() == [
        f"folder      {jobs.ROOT}: 2 checkpoints in code/out, 1 checkpoint in /scratch/run, 3 files written in code",
        'job file    checkpoint: {path: "{job_dir}/code/out/net_*.pth"} names them, if your script gets its checkpoint by resume_args',
    ]
    empty = {**WHERE, "written": 0, "links": [], "checkpoints": [], "checkpoint_path": None}
    assert cells.plain_text(checkpoint_table.end_lines(empty)) == f"folder      {jobs.ROOT}\n"
