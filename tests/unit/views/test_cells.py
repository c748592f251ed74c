"""Do lines fit a terminal, and are times said as people say them?"""

from __future__ import annotations

import pytest

from orchestrator.views import cells


def test_long_line_breaks_between_words_but_command_never() -> None:
    row = cells.line(
        "RUNNING  attempt 1  step 100,000/1,000,000  12.50 steps/s  31s so far  ",
        cells.Cell("1 restart", "yellow"),
    )
    fix = cells.line(
        "suspicion   ",
        cells.Cell("rank 1 on node-0 is blocked in a place of many words, train.py:88 load_batch", "yellow"),
    )
    command = cells.line("  look    ", cells.Cell(f"orch logs {'x' * 80}", "cyan"))
    path = cells.line(f"checkpoint  {'/long' * 30} and more of it")
    lines = cells.wrap([row, fix, command, path], 78)
    shown = cells.plain_text(lines).splitlines()
    assert shown[:2] == [
        "RUNNING  attempt 1  step 100,000/1,000,000  12.50 steps/s  31s so far",
        "         1 restart",
    ]
    assert shown[2:4] == [
        "suspicion   rank 1 on node-0 is blocked in a place of many words, train.py:88",
        "            load_batch",
    ]
    assert lines[1][-1] == cells.Cell("1 restart", "yellow") and lines[4] == command
    assert shown[5:] == [f"checkpoint  {'/long' * 30}", "            and more of it"]
    assert cells.wrap([row], None) == [row]
    lone = cells.line(f"checkpoint  {'/long' * 30}")
    assert cells.wrap([lone], 78) == [lone]


def test_line_beyond_terminal_edge_is_shown_from_middle() -> None:
    far = cells.line(f"{' ' * 100}candidate: forward(Tensor self)")
    assert cells.plain_text(cells.wrap([far], 40)).splitlines() == [
        f"{' ' * 20}candidate:", f"{' ' * 20}forward(Tensor self)",
    ]  # fmt: skip


def test_times_in_sentence_are_short() -> None:
    assert [cells.span(s) for s in (0.04, 3.1, 9.0, 9.96, 42.4, 61.0)] == [
        "0 s", "3.1 s", "9 s", "10 s", "42 s", "1m01s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (0, "0.0s"), (9.94, "9.9s"), (59.4, "59s"), (59.9, "1m00s"), (3599.6, "1h00m"), (200, "3m20s"),
     (7500, "2h05m"), (86_400 * 3 + 4 * 3600, "3d04h")],
)  # fmt: skip
def test_durations_are_human_readable(seconds: float | None, said: str) -> None:
    """Durations are written as people say them."""
    assert cells.duration(seconds) == said


def test_name_with_line_break_starts_no_new_line() -> None:
    """A name with a line break begins no line of its own."""
    assert cells.plain_text([cells.line("  ", cells.Cell("step\n# HELP evil.pt"))]) == "  step\\n# HELP evil.pt\n"
