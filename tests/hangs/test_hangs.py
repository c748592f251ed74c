"""Is every hang of the gallery found in time, with the right culprit, at the right line, and is the job well again?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.wire.reports import Exited, Inspected
from tests.support.local import Sight, desk_at

from .conftest import as_params, selected
from .gallery import CASES, START_S_MAX, Case
from .runs import Entry, Runs, is_restarted, side_by_side
from .script import training

SIDE_BY_SIDE = side_by_side(3)

END_S_MAX = 120.0
"""What a job may take besides being found to hang, on a machine that is busy with other things."""

LOADED_S = 15.0
"""What a busy machine may add to the time in which a hang is found; `bench/hang_gallery.py` tells the figures of a quiet one."""


def is_of_collectives(entry: Entry) -> bool:
    """Tell whether a case itself calls torch.distributed, beside the training around it."""
    return entry.script.count("dist.") > training("").count("dist.")


@pytest.fixture(scope="module")
def gallery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Give the jobs of all cases that are to be tested."""
    with desk_at(tmp_path_factory.mktemp("hangs")) as desk:
        yield Runs(desk, selected(request, CASES), SIDE_BY_SIDE, lambda case: case.found_s_max + END_S_MAX)


@pytest.mark.parametrize("entry", as_params(CASES, lambda entry: 3 if is_of_collectives(entry) else 12))
def test_hang_is_found_in_time_and_culprit_named(gallery: Runs, entry: Case) -> None:
    job = gallery.result(entry.name)
    _assert_judged(job, entry)
    ends = ("SUCCEEDED", [entry.kind, None]) if is_restarted(entry) else ("FAILED", [entry.kind])
    assert (job.seen()["state"], job.kinds()) == ends


def _assert_judged(job: Sight, case: Case) -> None:
    """The first attempt's verdict is as the case says."""
    judged = job.news(d.Judge)
    assert judged, f"{case.name}: no verdict; {job.seen()}"
    verdict: d.Verdict = judged[0].verdict
    print(f"{case.name}: found after {judged[0].at - verdict.since_s:.1f} s\n{_told(verdict)}")
    assert verdict.kind.value == case.kind, _told(verdict)
    if case.ranks is not None:
        assert verdict.ranks == case.ranks, _told(verdict)
    words = f"{verdict.summary}\n{verdict.culprit}"
    if case.kind == "crash":
        words += "\n".join(verdict.evidence)
    assert not [text for text in case.says if text not in words], _told(verdict)
    assert not case.lines or any(line in words for line in case.lines), _told(verdict)
    assert not [text for text in case.waits if text not in verdict.waiting], _told(verdict)
    if case.kind == "hang":
        _assert_seen_before_it_was_killed(job)
        _assert_named_at_once(job, case, verdict)
    assert judged[0].at - verdict.since_s < case.found_s_max + LOADED_S, _told(verdict)


def _assert_named_at_once(job: Sight, case: Case, verdict: d.Verdict) -> None:
    """Long before what only patience sees is judged, the rank is named with its line."""
    named = job.notices(d.NoticeTopic.SUSPECT)
    assert named or not verdict.stall_timeout_s, _told(verdict)
    for one in named[:1]:
        print(f"{case.name}: named after {one.at - verdict.since_s:.1f} s: {one.why}")
        assert one.at - verdict.since_s < min(case.found_s_max, START_S_MAX) + LOADED_S, one
        assert not case.lines or any(line in one.why for line in case.lines), one


def _assert_seen_before_it_was_killed(job: Sight) -> None:
    """Looks at every rank came before the verdict, and their pages are there."""
    news = job.news(e.FromNode, d.Judge)
    before = news[: next(at for at, one in enumerate(news) if isinstance(one, d.Judge))]
    inspected = [one for one in before if isinstance(one.report, Inspected)]
    assert {one.node for one in inspected} == {"node-0", "node-1"}
    gone = {one.report.rank for one in before if isinstance(one.report, Exited)}  # perhaps in the moment of the look
    looks = [look for one in inspected for look in one.report.ranks]
    looked = {f"rank-{look.rank:05d}" for look in looks if look.rank not in gone}
    pages = {path.name[:10] for path in job.job.folder.evidence(1).glob("rank-*")}
    assert looked and pages >= looked, (looked, pages)  # one that has ended leaves none


def _told(verdict: d.Verdict) -> str:
    lines = [verdict.kind.value, verdict.summary, f"culprit {verdict.culprit}", f"waiting {verdict.waiting}"]
    return "\n  ".join([*lines, *verdict.evidence])
