"""How goodput is shown: by kind, and what failures cost by cause and host."""

from __future__ import annotations

import pytest

from orchestrator.client import post_mortem
from orchestrator.journal import goodput
from orchestrator.journal.goodput import Goodput, Loss, Span, TimeKind
from orchestrator.views import cells
from orchestrator.views import goodput as view
from tests.support import golden, jobs

HOUR_S = 3600.0
ENDED = [*jobs.crashed_once(), *jobs.crash(2, 12.0, 5, 25)]
FOUND = {
    "gpt": goodput.from_record(jobs.record(jobs.entries(ENDED))),
    "small": goodput.from_record(jobs.record(jobs.entries(jobs.submitted()))),
}


@pytest.mark.parametrize("by", [None, "cause", "host"])
def test_goodput_table_matches_golden_file(by: str | None) -> None:
    """The table is the one that was reviewed."""
    shown = view.table(post_mortem.time_uses(FOUND), by)
    golden.check(f"goodput-{by or 'kind'}.txt", cells.plain_text(shown))


def test_unit_follows_total_time_in_every_row() -> None:
    days = Span(0, 1, TimeKind.PRODUCTIVE, 0.0, 72 * HOUR_S, 64)
    blink = Span(0, 1, TimeKind.WASTED, 72 * HOUR_S, 73 * HOUR_S, 64)
    text = cells.plain_text(view.summary(post_mortem.time_use(Goodput((days, blink)))))
    assert text == "\ngoodput     98.6%: 4,608.0 of 4,672.0 rank-hours were useful training\n  the rest  wasted 64.0\n"


def test_job_without_steps_reports_no_goodput() -> None:
    spans = (Span(0, 1, TimeKind.STARTUP, 0.0, 72.0, 2),)
    text = cells.plain_text(view.table(post_mortem.time_uses({"gpt": Goodput(spans)}), None))
    assert text.splitlines()[0] == "gpt  no goodput: no step was made in 144.0 rank-seconds"
    assert view.summary(post_mortem.time_use(Goodput(spans))) == []
    assert cells.plain_text(view.table(post_mortem.time_uses({}), None)) == "no rank has run yet\n"


@pytest.mark.parametrize(
    ("interval_steps", "failures", "said"),
    [
        (20, 3, "checkpoints cost 7.0 %, failures 0.0 %: every 540 steps instead of 20 would cost least, 0.6 % in all"),
        (300, 3, "every 300 steps is near the best interval"),
        (20, 0, "how often to save is not known: no failure in 320.0 rank-hours, so at most one in 21h41m (95 %)"),
    ],
)
def test_goodput_says_how_often_to_save(interval_steps: int, failures: int, said: str) -> None:
    worked = Span(0, 1, TimeKind.PRODUCTIVE, 0.0, 40 * HOUR_S, 4), Span(0, 2, TimeKind.PRODUCTIVE, 0.0, 40 * HOUR_S, 4)
    lost = [
        Span(0, 1, TimeKind.WASTED, 80 * HOUR_S, 80 * HOUR_S + 1, 4, Loss(1, "crash", f"node-{number}"))
        for number in range(failures)
    ]
    shown = view.table(post_mortem.time_uses({"gpt": Goodput((*worked, *lost), (1.5,) * 3, interval_steps, 1.0)}), None)
    assert said in cells.plain_text(shown)


@pytest.mark.parametrize(("in_memory_s", "said"), [(0.5, True), (1.45, False), (None, False)])
def test_goodput_says_what_memory_would_save(in_memory_s: float | None, said: bool) -> None:
    worked = Span(0, 1, TimeKind.PRODUCTIVE, 0.0, 40 * HOUR_S, 4)
    shown = post_mortem.time_uses({"gpt": Goodput((worked,), (1.5,) * 3, 20, 1.0)}, (), in_memory_s)
    assert ("checkpoint.memory would save about 4.7 %" in cells.plain_text(view.table(shown, None))) == said
    assert ("checkpoint.memory" in cells.plain_text(view.table(shown, None))) == said
