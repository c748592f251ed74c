"""Journals that earlier versions wrote come to what they came to then. The files are nights of the simulation; the golden files
were written by the version that wrote the journals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.client import post_mortem
from orchestrator.core.jobdir import status_file
from orchestrator.core.wire import reports
from orchestrator.journal import journal_file, old_formats
from orchestrator.journal.journal_integrity import JournalError
from orchestrator.supervisor.status import status
from tests.support import golden, jobs

OLD = sorted(Path(__file__).parent.glob("format_*/*.jsonl.gz"))


def _unpacked(old: Path, folder: Path) -> Path:
    path = folder / "journal.jsonl"
    path.write_bytes(gzip.decompress(old.read_bytes()))
    return path


@pytest.mark.parametrize("old", OLD, ids=lambda path: f"{path.parent.name}-{path.name.partition('.')[0]}")
def test_old_journal_gives_the_same_facts(old: Path, tmp_path: Path) -> None:
    record = jobs.record(journal_file.read(_unpacked(old, tmp_path)))
    now = jobs.moment(record.facts.last_event_at)
    found = {
        "why": post_mortem.why(jobs.plan(), record),
        "status": status_file.to_json(status(jobs.plan(), record.facts, now, {})),
        "received": record.last_report,
    }
    name = f"journal-{old.parent.name.removeprefix('format_')}-{old.name.partition('.')[0]}.json"
    golden.check(name, json.dumps(found, indent=1) + "\n")


def test_the_old_journals_hold_every_kind_that_changed() -> None:
    texts = [gzip.decompress(old.read_bytes()).decode() for old in OLD]
    missing = {kind for kind in old_formats.CHANGED_3 if not any(f'"kind":"{kind}"' in text for text in texts)}
    assert not missing


def test_one_kind_of_old_journal_is_readable(tmp_path: Path) -> None:
    """One kind of event of an old journal can be read alone."""
    path = _unpacked(OLD[0], tmp_path)
    found = list(journal_file.read_kinds(path, d.Judge, reports.Exited))
    wanted = [entry.news for entry in journal_file.read(path)]
    assert found == [one for one in wanted if isinstance(journal_file.unwrap_message(one), (d.Judge, reports.Exited))]
    assert found


def test_journal_of_unreadable_age_is_refused(tmp_path: Path) -> None:
    """A journal that is older than every readable format is refused."""
    path = _unpacked(OLD[0], tmp_path)
    path.write_text(path.read_text().replace('"format":3', f'"format":{old_formats.OLDEST - 1}', 1))
    with pytest.raises(JournalError, match="another version of orch"):
        list(journal_file.read(path))
