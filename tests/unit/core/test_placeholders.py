"""Is exactly what orch knows filled in, and is what nearly is that told?"""

from __future__ import annotations

import pytest

from orchestrator.core import placeholders

VALUES = {"checkpoint_dir": "/c", "attempt": "2", "ORCH_ATTEMPT": "2", "ORCH_CHECKPOINT_DIR": "/c"}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{checkpoint_dir}/a{attempt}", "/c/a2"),
        ("$ORCH_CHECKPOINT_DIR/a${ORCH_ATTEMPT}", "/c/a2"),
        ("run={out:{checkpoint_dir}}", "run={out:/c}"),
        *[(other, other) for other in ("${checkpoint_dir}", "{{checkpoint_dir}}", "{epoch}", "a={b:1,c:2}", "^x{2,3}$")],
        *[(other, other) for other in ("$ORCH_ATTEMPTS", "${ORCH_ATTEMPT:-1}", "${oc.env:ORCH_ATTEMPT}", "$HOME", "{}", "$")],
    ],
)  # fmt: skip
def test_only_names_of_orch_are_expanded(text: str, filled: str) -> None:
    assert placeholders.fill(text, VALUES) == filled


def test_placeholder_is_shown_in_braces_without_quotes() -> None:
    words = ("train.py", "--out", "$ORCH_CHECKPOINT_DIR/x", "${ORCH_ATTEMPT}", "a b{resume_from}", "$HOME")
    assert placeholders.quote_command(words) == "train.py --out {checkpoint_dir}/x {attempt} 'a b{resume_from}' '$HOME'"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("--o={checkpoint_dirs}", "{checkpoint_dir}"),
        ("{resume_form}", "{resume_from}"),
        ("$ORCH_CHECKPOINT/x", "$ORCH_CHECKPOINT_DIR"),
        ("${ORCH_RESUME_FORM}", "${ORCH_RESUME_FROM}"),
    ],
)
def test_similar_name_is_questioned(text: str, meant: str) -> None:
    """A similar name is asked about."""
    assert placeholders.find_misspelled(text).endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    "text",
    [
        "{checkpoint}",
        "{epoch}-{step}",
        "$ORCH_MINE",
        "{job_dir}",
        "${checkpoint_dirs}",
        "{attempts}",
        "{attempted}",
    ],
)
def test_unlike_name_is_left_alone(text: str) -> None:
    assert placeholders.find_misspelled(text) == ""


def test_braces_in_shell_text_are_refused_with_variable() -> None:
    assert placeholders.find_misplaced("--o={checkpoint_dir}").endswith('write "${ORCH_CHECKPOINT_DIR}"')
    assert placeholders.find_misplaced("${attempt}{a,b}$ORCH_ATTEMPT") == ""
    assert placeholders.find_misplaced("$ORCH_CHECKPOINT").endswith("did you mean $ORCH_CHECKPOINT_DIR?")


@pytest.mark.parametrize("word", ["print(f'{attempt}')", "{print $1} {attempt}", "x={};{job_dir}"])
def test_braces_of_program_inside_shell_text_are_kept(word: str) -> None:
    assert placeholders.find_misplaced(word) == ""


def test_environment_has_values_of_attempt() -> None:
    env = {"ORCH_CHECKPOINT_DIR": "/j/checkpoints", "ORCH_RESUME_FROM": "", "ORCH_ATTEMPT": "2", "A": "b"}
    values = placeholders.values_from_environment(env, "/j")
    text = "{checkpoint_dir} {job_dir}/x {attempt} {resume_from}$ORCH_ATTEMPT $A ${checkpoint_dir} {path}"
    assert placeholders.fill(text, values) == "/j/checkpoints /j/x 2 2 $A ${checkpoint_dir} {path}"
    assert placeholders.values_from_environment({}, "/j") == {}
