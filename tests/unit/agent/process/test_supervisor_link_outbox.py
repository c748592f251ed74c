"""The outbox: unacknowledged reports stay, in order and within a limit."""

from __future__ import annotations

from orchestrator.agent.process import supervisor_link
from orchestrator.agent.process.supervisor_link import Outbox
from orchestrator.core.wire.reports import Stopped


def test_reports_stay_in_order_until_they_are_acknowledged() -> None:
    one = Outbox()
    reports = [Stopped(attempt, "asked") for attempt in range(1, 5)]
    assert [one.add(report) for report in reports] == [1, 2, 3, 4]
    one.acknowledge(2)
    assert one.pending() == ((3, reports[2]), (4, reports[3]))
    one.acknowledge(1)
    assert len(one.pending()) == 2
    one.acknowledge(9)
    assert one.pending() == ()
    assert one.add(reports[0]) == 5


def test_oldest_reports_are_dropped_past_limit() -> None:
    one = Outbox()
    for attempt in range(supervisor_link.REPORTS_MAX + 3):
        one.add(Stopped(attempt, "asked"))
    pending = one.pending()
    assert len(pending) == supervisor_link.REPORTS_MAX
    assert pending[0][0] == 4
