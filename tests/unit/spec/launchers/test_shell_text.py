"""Shell text taken apart: commands, words, depth, and what a shell would change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.spec.launchers import shell_text


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("a b", [(0, ["a", "b"])]),
        ("a 'b c' \"d e\" f\\ g", [(0, ["a", "b c", "d e", "f g"])]),
        ("a \\\n  b", [(0, ["a", "b"])]),
        ("a && b | c; d & e\nf", [(0, [name]) for name in "abcdef"]),
        ("a > x 2>&1 b &> y", [(0, ["a", "b"])]),
        ("a # b\nc#d", [(0, ["a"]), (0, ["c#d"])]),
        ("for x in 1 2; do a; done; b", [(1, ["x", "in", "1", "2"]), (1, ["a"]), (0, ["b"])]),
        ("if a; then b; fi", [(1, ["a"]), (1, ["b"])]),
        ("(a; b)", [(1, ["a"]), (1, ["b"])]),
        ("a $(b c) `d` ${e f}", [(0, ["a", "$(b c)", "`d`", "${e f}"])]),
        ("a <<EOF\nb 'c\nEOF\nd", [(0, ["a"]), (0, ["d"])]),
        ("", []),
    ],
)
def test_commands_and_their_words(text: str, commands: list[tuple[int, list[str]]]) -> None:
    found = [(one.depth, [word.text for word in one.words]) for one in shell_text.parsed(text).commands]
    assert found == commands


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("a 'b*' \"c\"", True),
        ("a *", False),
        ("a $B", False),
        ("a ~/b", False),
        ("a; b", False),
        ("a > b", False),
        ("'~'", True),
    ],
)
def test_a_plain_text_is_one_command_that_a_shell_would_not_change(text: str, is_plain: bool) -> None:
    assert shell_text.parsed(text).is_plain == is_plain


def test_texts_of_substitutions_are_kept() -> None:
    assert shell_text.parsed('a "$(b "c")" `d`').inner == ('b "c"', "d")


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "a $(b", "a `b", "a ${b"])
def test_what_is_not_closed_is_a_mistake(text: str) -> None:
    with pytest.raises(ValueError, match="not closed"):
        shell_text.parsed(text)


@given(st.text("ab '\"\\$(){}`;&|<>#\n=*~", max_size=40))
def test_any_text_is_taken_apart_or_refused(text: str) -> None:
    try:
        commands = shell_text.parsed(text).commands
    except ValueError:
        return
    ends = [place for one in commands for word in one.words for place in (word.start, word.end)]
    assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("t.py '|' | tee", "|"), ("t.py >log 2>&1", ">log"), ("t.py 2>&1", "2>&1"), ("t.py &", "&"), ("t.py && x", "&&"),
        ("t.py --mask <mask> (1,2) a>b 'a | b' \"x; y\" |x", ""), ("t.py 'a", ""),
    ],
)  # fmt: skip
def test_an_operator_among_words_is_one_that_stands_alone(text: str, operator: str) -> None:
    assert shell_text.first_operator(text) == operator
