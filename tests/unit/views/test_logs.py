"""How log lines look: folding, prefixes, harmless text, and secrets that stay hidden."""

from __future__ import annotations

import base64
import json
import random
import re
from urllib.parse import quote

import pytest

from orchestrator.client.logs.reader import LogBlock, LogLine, LogQuery, lines
from orchestrator.core.invisible_characters import escape_harmful
from orchestrator.core.secret_mask import Mask
from orchestrator.views.logs import (
    FOLD_LINES_MAX,
    Deduplicator,
    LogStyle,
    LogView,
    ShownLine,
    choose_style,
    strip_escapes,
)

MS = 1_000_000
PLAIN = LogStyle(colour=False, prefix=True)
COLOUR = LogStyle(colour=True, prefix=True)
TERMINAL = LogStyle(colour=True, prefix=True, terminal=True)
DULL = LogStyle(colour=False, prefix=True, terminal=True)
BARE = LogStyle(colour=False, prefix=False)


def line(rank: int | None, text: str, *, at_ms: int = 0, attempt: int = 1, node: str | None = None) -> LogLine:
    return LogLine(time_ns=at_ms * MS, attempt=attempt, rank=rank, text=text, node=node)


def folded(lines: list[LogLine]) -> list[ShownLine]:
    folding = Deduplicator()
    return [*(item for one in lines for item in folding.add(one)), *folding.flush()]


def brief(items: list[ShownLine]) -> list[tuple[str, tuple[int, ...]]]:
    return [(item.line.text, item.ranks) for item in items]


def shown(style: LogStyle, *items: ShownLine, secrets: tuple[str, ...] = ()) -> list[str]:
    view = LogView(style, Mask(secrets))
    return [text for item in items for text in view.lines(item)]


def test_identical_lines_of_several_ranks_are_folded() -> None:
    lines = [line(rank, text) for rank in (2, 0, 1) for text in ("A", "B", "A")]
    assert brief(folded(lines)) == [("A", (0, 1, 2)), ("B", (0, 1, 2)), ("A", (0, 1, 2))]


def test_repetition_of_one_rank_is_never_folded() -> None:
    assert brief(folded([line(0, "A"), line(0, "A"), line(1, "A")])) == [
        ("A", (0, 1)),
        ("A", (0,)),
    ]


def test_line_is_not_folded_across_earlier_output() -> None:
    """A line is not folded across what its rank printed before."""
    lines = [line(0, "X"), line(0, "Y"), line(1, "Y"), line(1, "X")]
    assert brief(folded(lines)) == [("X", (0,)), ("Y", (0, 1)), ("X", (1,))]


def test_lines_further_apart_than_window_stay_separate() -> None:
    assert brief(folded([line(0, "A"), line(1, "A", at_ms=499)])) == [("A", (0, 1))]
    assert brief(folded([line(0, "A"), line(1, "A", at_ms=500)])) == [("A", (0,)), ("A", (1,))]


def test_attempts_and_node_logs_are_not_folded() -> None:
    lines = [line(0, "A"), line(None, "A", node="n1"), line(None, "A", node="n2"), line(1, "A", attempt=2)]
    assert brief(folded(lines)) == [("A", (0,)), ("A", ()), ("A", ()), ("A", (1,))]


def test_followed_line_is_released_after_its_window() -> None:
    folding = Deduplicator(window_ns=500 * MS)
    assert list(folding.add(line(0, "A", at_ms=1000))) == []
    assert list(folding.ready(1499 * MS)) == []
    assert list(folding.add(line(1, "A", at_ms=1400))) == []
    assert brief(list(folding.ready(1500 * MS))) == [("A", (0, 1))]
    assert list(folding.flush()) == []


def test_lines_waiting_to_fold_are_bounded() -> None:
    folding = Deduplicator()
    released = [item for number in range(3 * FOLD_LINES_MAX) for item in folding.add(line(0, f"{number}"))]
    assert len(released) == 2 * FOLD_LINES_MAX
    released += [item for number in range(300) for item in folding.add(line(0, "x" * 100_000 + f"{number}"))]
    assert len(released) > 3 * FOLD_LINES_MAX
    released += folding.flush()
    assert len(released) == 3 * FOLD_LINES_MAX + 300


@pytest.mark.parametrize("seed", range(30))
def test_folding_loses_nothing_and_keeps_rank_order(seed: int) -> None:
    dice = random.Random(seed)
    lines, at_ms = [], 0
    for _ in range(500):
        at_ms += dice.choice((0, 0, 0, 10, 200))
        rank = dice.choice((0, 1, 2, 3, None))
        node = "n1" if rank is None else None
        lines.append(line(rank, dice.choice("ABC"), at_ms=at_ms, node=node, attempt=1 + at_ms // 8_000))
    shown = folded(lines)
    for rank in range(4):
        said = [(item.attempt, item.text) for item in lines if item.rank == rank]
        assert [(item.line.attempt, item.line.text) for item in shown if rank in item.ranks] == said
    assert len(shown) < len(lines)


def test_every_line_is_under_its_rank_name() -> None:
    items = (
        ShownLine(line(2, "hello"), (2,)),
        ShownLine(line(0, "same"), (0, 1, 2, 3)),
        ShownLine(line(None, "setup", node="node-1"), ()),
        ShownLine(line(0, "back", attempt=2), (0,)),
    )
    assert shown(PLAIN, *items) == [
        "[rank 2] hello",
        "[ranks 0-3 ×4] same",
        "[node-1] setup",
        "── attempt 2 ──",
        "[rank 0] back",
    ]
    assert shown(BARE, items[0], items[3]) == ["hello", "back"]


def test_divider_describes_restart_without_secrets_or_escapes() -> None:
    """A divider shows what is known of the restart, without secrets or escapes."""
    view = LogView(PLAIN, Mask(("hunter2!",)), lambda attempt: f"from step-{attempt}.pt; hunter2!\x1b[2J")
    view.lines(ShownLine(line(0, "x"), (0,)))
    divider = view.lines(ShownLine(line(0, "x", attempt=2), (0,)))[0]
    assert divider.startswith("── attempt 2 ── from step-2.pt; ")
    assert "hunter2" not in divider and "\x1b" not in divider


def test_many_scattered_ranks_do_not_fill_line() -> None:
    ranks = tuple(range(0, 1_000, 2))
    assert shown(PLAIN, ShownLine(line(0, "same"), ranks)) == ["[ranks 0,2,4,6,… ×500] same"]


def test_rank_keeps_its_colour() -> None:
    view = LogView(COLOUR, Mask(()))
    prefixes = [view.lines(ShownLine(line(rank, "x"), (rank,)))[0] for rank in (0, 1, 0)]
    assert prefixes[0] == prefixes[2] != prefixes[1]
    assert prefixes[0].startswith("\x1b[36m[rank 0]\x1b[0m")


@pytest.mark.parametrize(
    ("query", "terminal", "environ", "style"),
    [
        (LogQuery(), True, {"TERM": "xterm"}, TERMINAL),
        (LogQuery(), True, {"TERM": "xterm", "NO_COLOR": ""}, TERMINAL),
        (LogQuery(), True, {"TERM": "xterm", "NO_COLOR": "1"}, DULL),
        (LogQuery(), True, {"TERM": "dumb"}, DULL),
        (LogQuery(), False, {"TERM": "xterm"}, PLAIN),
        (LogQuery(ranks=(2,)), True, {"TERM": "xterm"}, TERMINAL),
        (LogQuery(ranks=(2,)), False, {}, BARE),
        (LogQuery(ranks=(2, 3)), False, {}, PLAIN),
        (LogQuery(ranks=(2,), nodes=("n1",)), False, {}, PLAIN),
    ],
)
def test_style_fits_the_output(query: LogQuery, terminal: bool, environ: dict[str, str], style: LogStyle) -> None:
    assert choose_style(query, terminal=terminal, environ=environ) == style


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("plain\ttext é", "plain\ttext é"),
        ("\x1b[2J\x1b[1;1Hgone?", "gone?"),
        ("\x1b]0;a title\x07rest", "rest"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$qm\x1b\\rest", "rest"),
        ("\x1b]0;never closed", "0;never closed"),
        ("\x9b31mred\x9d0;title\x9c", "red"),
        ("bell\x07 back\x08 nul\x00 del\x7f", "bell back nul del"),
        ("\x1b\x1b[0K[31m", "[31m"),
        ("end\x1b", "end"),
        ("\x1b(Bset\x1bc", "set"),
    ],
)
def test_escape_sequences_of_log_are_not_obeyed(text: str, plain: str) -> None:
    assert strip_escapes(text, colour=False) == plain
    assert strip_escapes(text, colour=True) == plain


def test_log_colours_are_kept_and_end() -> None:
    """Colours of a log are kept where colours are shown, and do not run on."""
    text = "\x1b[1;31mred\x1b[K\x1b[?25l and on"
    assert strip_escapes(text, colour=True) == "\x1b[1;31mred and on\x1b[0m"
    assert strip_escapes(text, colour=False) == "red and on"


def test_invisible_text_is_shown_except_in_files() -> None:
    """Invisible text is shown to people and left as it is in files."""
    text = "loss 3 \u202e5.0\u2066 na\u200bn \u05d0\u05d1 1\u00a0000 \U0001f468\u200d\U0001f469"
    (seen,), (kept,) = (
        shown(TERMINAL, ShownLine(line(1, text), (1,))),
        shown(BARE, ShownLine(line(1, text), (1,))),
    )
    assert kept == text
    assert seen.endswith("loss 3 \\u202e5.0\\u2066 na\\u200bn \u05d0\u05d1 1\u00a0000 \U0001f468\u200d\U0001f469")


@pytest.mark.parametrize("code", [0x34F, 0x17B4, 0x200B, 0x2062, 0xFFF0, 0x1BCA0, 0x1D173, 0xE0041])
def test_invisible_characters_of_any_kind_are_shown(code: int) -> None:
    """Characters that show nothing are shown, whatever their kind."""
    escape = ascii(chr(code))[1:-1]
    (seen,) = shown(TERMINAL, ShownLine(line(1, f"a{chr(code)}b"), (1,)))
    assert seen.endswith(f"a{escape}b") and escape_harmful(f"a{chr(code)}b") == f"a{escape}b"


@pytest.mark.parametrize("seed", range(20))
def test_no_noise_passes_an_escape(seed: int) -> None:
    """No noise gets an escape through."""
    dice = random.Random(seed)
    noise = "".join(dice.choice("\x1b\x1b\x9b\x9d\x07[]?;0138mHKP\\ a\n\r") for _ in range(500))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", strip_escapes(noise, colour=False))
    assert not re.search(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[0-9;:]*m", "", strip_escapes(noise, colour=True))
    )


SECRET = 'hunter2/"tö+ken"?'


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        repr(SECRET)[1:-1],
        json.dumps(SECRET)[1:-1],
        base64.b64encode(SECRET.encode()).decode(),
        base64.urlsafe_b64encode(SECRET.encode()).decode(),
        quote(SECRET),
        quote(SECRET, safe=""),
    ],
)
def test_secret_is_hidden_in_every_encoding(form: str) -> None:
    """A secret is hidden in every form in which it may appear."""
    assert Mask([SECRET]).apply(f"key={form}, ok") == "key=***, ok"


@pytest.mark.parametrize("user", ["u", "me", "bob", "user"])
def test_secret_in_basic_credentials_is_hidden(user: str) -> None:
    token = base64.b64encode(f"{user}:{'s3cret-token'}:".encode()).decode()
    hidden = Mask(["s3cret-token"]).apply(token)
    assert "***" in hidden
    assert len(hidden.replace("***", "")) <= len(token) - 15  # of 12 bytes' 16 characters, up to two belong to others
    assert len(hidden.replace("***", "")) >= len(token) - 16


def test_longest_secret_is_hidden_first() -> None:
    assert Mask(["pass", "password1"]).apply("password1 pass") == "*** ***"


def test_every_line_of_secret_is_hidden() -> None:
    key = "-----BEGIN KEY-----\nMIIB\n\n  abc\n    deadbeef\n"
    assert Mask([key]).apply("MIIB, deadbeef; abc    -----BEGIN KEY-----") == "***, ***; abc    ***"


@pytest.mark.parametrize("values", [[], ["", "abc", "    "]])
def test_value_too_short_to_hide_is_unchanged(values: list[str]) -> None:
    """A value that is too short to hide is left alone."""
    assert Mask(values).apply("abc     abc") == "abc     abc"


def test_secret_split_by_escapes_stays_hidden() -> None:
    text, secrets = "key sec\x1b[0mret1 and s\x07cret22", ("secret1", "s\x07cret22")
    assert shown(BARE, ShownLine(line(0, text), (0,)), secrets=secrets) == ["key *** and ***"]
    for part in ("key sec\x1b[0mret1", "and s\x07cret22"):
        block = LogBlock(0, 1, 0, None, f"{part}\n".encode())
        assert "***" in "".join(LogView(BARE, Mask(secrets)).add([block]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_lines_in_blocks_render_like_single_lines(seed: int) -> None:
    """Lines in blocks look as they do one by one."""
    dice = random.Random(seed)
    secrets = ["hunter2/t\u00f6ken?", "s\x07cret22", "two\nlines-of-it", "0123456789abcdef"]
    parts = [b"x" * 190, b"step 12 loss 0.5", b" ", b"", "\u00e9\u2588\u202e".encode()]
    if dice.random() < 0.7:  # a batch without these is looked at as a whole
        parts += [b"\x1b[0m", b"\x1b]0;t", b"\x07", "\x9b3".encode(), b"\xff", b"\x9b", b"\xc2", b"\t"]
    if dice.random() < 0.7:
        parts += [secret.encode().replace(b"\n", b" ") for secret in secrets]
        parts += [secret.encode()[dice.randrange(9) : dice.randrange(4, 17)].replace(b"\n", b"") for secret in secrets]
        parts += [base64.b64encode(b"me:hunter2/t\xc3\xb6ken?")]
    blocks, attempt = [], 1
    for _ in range(dice.choice((1, 20, 90))):
        rank = dice.choice((0, 0, 1, None))
        attempt += dice.random() < 0.05
        data = b"".join(
            b"".join(dice.choice(parts) for _ in range(dice.randrange(6))) + b"\n"
            for _ in range(dice.choice((1, 2, 90)))
        )
        blocks.append(LogBlock(0, attempt, rank, "n1" if rank is None else None, data))
    for style in (PLAIN, BARE):
        one_by_one = [ShownLine(line, ()) for line in lines(blocks)]
        expected = "".join(f"{text}\n" for text in shown(style, *one_by_one, secrets=tuple(secrets)))
        view = LogView(style, Mask(secrets))
        assert "".join(view.add(blocks)) == expected
        assert view.flush() == ""


def test_identical_lines_are_folded_only_on_terminal() -> None:
    blocks = [LogBlock(0, 1, rank, None, b"same\nsame\n") for rank in (0, 1)]
    piped, seen = LogView(PLAIN, Mask(())), LogView(DULL, Mask(()))
    assert "".join(piped.add(blocks)) == "[rank 0] same\n" * 2 + "[rank 1] same\n" * 2
    assert "".join(seen.add(blocks)) + seen.flush() == "[ranks 0-1 \u00d72] same\n" * 2
