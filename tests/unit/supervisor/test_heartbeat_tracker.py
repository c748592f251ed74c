"""Are decisions on heartbeats, and other work that comes again, put off in proportion to what they cost?"""

from __future__ import annotations

import time

from orchestrator.supervisor.heartbeat_tracker import WorkShare


def test_work_is_delayed_to_its_share() -> None:
    share = WorkShare(0.05, 0.5)
    assert share.pause_s == 0.0
    with share:
        pass
    assert share.pause_s < 0.1
    with share:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.01:
            pass
    assert 0.2 <= share.pause_s <= 0.5
    with share:
        while time.thread_time() - began_s < 0.06:
            pass
    assert share.pause_s == 0.5
