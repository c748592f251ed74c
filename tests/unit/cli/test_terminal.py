"""Are there colours on a terminal, and nowhere else?"""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator

import pytest

from orchestrator.cli import terminal
from orchestrator.views import cells, post_mortem
from orchestrator.views.cells import Cell, line
from tests.support import jobs

LINES = [line(Cell("FAILED", "bold red"), "  attempt 2"), line("plain"), ()]


@pytest.fixture
def tty() -> Iterator[io.TextIOWrapper]:
    """Return the program's side of a terminal."""
    outer, inner = pty.openpty()
    with os.fdopen(inner, "w") as stream:
        yield stream
    os.close(outer)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(LINES)
    assert capsys.readouterr().out == "FAILED  attempt 2\nplain\n\n"


def test_terminal_gets_colours_and_same_text(tty: io.TextIOWrapper) -> None:
    assert terminal.has_colour(tty)
    assert terminal.paint(LINES) == "\x1b[1;31mFAILED\x1b[0m  attempt 2\nplain\n\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_disables_colours(
    tty: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert not terminal.has_colour(tty)


def test_empty_no_color_keeps_colours(tty: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    assert terminal.has_colour(tty)


def test_every_used_style_is_defined() -> None:
    told = jobs.told([*jobs.crashed_once(), *jobs.crash(2, 12.0, 3, 23)])
    styles = [Cell("x", style) for style in cells.STYLES.values()]
    assert terminal.paint([tuple(styles), *post_mortem.post_mortem(told)]).count("\x1b[0m") > len(styles)


def test_error_is_red_on_terminal_only_and_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """An error message is red on a terminal only, and harmless."""
    terminal.print_error("job.yaml:7: nodes\x1b[2J\n  fix: less")
    assert capsys.readouterr().err == "job.yaml:7: nodes\\x1b[2J\n  fix: less\n"


def test_a_pipe_has_no_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.width() is None
