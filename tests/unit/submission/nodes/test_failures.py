"""Which failures count, for how long, and what ends them; and is a host set aside only where there are enough others?"""

from __future__ import annotations

from orchestrator.submission.nodes.failures import FAILURE_S_MAX, Checked, Failure, in_order, latest

NOW = 1e9
LOST = Failure("n3", NOW - 7200, "node_lost: no word for 8 s", "gpt-1")


def test_a_lost_node_counts_for_a_day() -> None:
    assert latest([LOST], {}, NOW) == {"n3": LOST}
    assert latest([LOST], {}, LOST.at + FAILURE_S_MAX) == {}


def test_the_last_failure_is_the_one_that_is_told() -> None:
    newer = Failure("n3", NOW - 60, "network: cut", "")
    assert latest([LOST], {"n3": Checked("n3", NOW - 60, "network: cut")}, NOW) == {"n3": newer}


def test_a_passed_check_and_the_user_end_it_and_a_later_failure_counts_again() -> None:
    assert latest([LOST], {"n3": Checked("n3", NOW - 60)}, NOW) == {}
    assert latest([LOST], {"n3": Checked("n3", forgotten_at=NOW - 60)}, NOW) == {}
    assert latest([LOST], {"n3": Checked("n3", NOW - 9000)}, NOW) == {"n3": LOST}
    forgotten = Checked("n3", NOW - 60, "cut", forgotten_at=NOW - 30)
    assert latest([LOST], {"n3": forgotten}, NOW) == {}


def test_failed_hosts_come_last_where_there_are_others() -> None:
    assert in_order(["n1", "n2", "n3"], ["n1"], 2) == (["n2", "n3", "n1"], ["n1"])
    assert in_order(["n1", "n2", "n3"], ["n1"], 3) == (["n1", "n2", "n3"], [])
    assert in_order(["n1", "n2"], ["n7"], 2) == (["n1", "n2"], [])


def test_a_failure_says_when_and_where() -> None:
    assert LOST.words(NOW) == "2 h ago, in gpt-1: node_lost: no word for 8 s"
    assert Failure("n", NOW - 300, "cut", "").words(NOW) == "5 min ago, in a check: cut"
