"""Does a written job file say exactly what was given, and read well?"""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.spec import job_writer, yaml_document

TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff\ufffe\uffff"),
    max_size=20,
)
SETTINGS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.one_of(TEXTS, st.lists(TEXTS, max_size=3), st.dictionaries(st.just("A"), TEXTS, max_size=1)),
    min_size=1,
    max_size=4,
)


def test_job_file_is_written_like_by_hand() -> None:
    """A job file is written as a person would write it."""
    settings: dict[str, job_writer.SettingValue] = {
        "name": "train",
        "nodes": 2,
        "entrypoint": job_writer.entrypoint_value(["train.py", "--lr", "0.1"]),
        "env": {"A": "1", "B": "off", "C": "two words", "D": "0.5", "E": "010"},
        "secrets": ["HF_TOKEN"],
        "logs": {"unbuffered": False},
    }
    assert job_writer.job_file_text(settings, ["written by `orch run`", ""]) == (
        "# written by `orch run`\n"
        "#\n"
        "name: train\n"
        "nodes: 2\n"
        "entrypoint: train.py --lr 0.1\n"
        "env:\n"
        "  A: 1\n"
        "  B: 'off'\n"
        "  C: two words\n"
        "  D: 0.5\n"
        "  E: '010'\n"
        "secrets: [HF_TOKEN]\n"
        "logs:\n"
        "  unbuffered: false\n"
    )


@pytest.mark.slow
@given(SETTINGS)
def test_written_file_round_trips(settings: dict[str, job_writer.SettingValue]) -> None:
    """A written job file is the same when read again."""
    document = yaml_document.parse(job_writer.job_file_text(settings), "job.yaml")
    assert document.data == settings
    assert document.faults == []


@given(st.lists(TEXTS.filter(bool), min_size=1, max_size=4))
def test_entry_arguments_are_preserved(words: list[str]) -> None:
    """The arguments of an entry stay the same."""
    written = job_writer.entrypoint_value(words)
    assert (shlex.split(written) if isinstance(written, str) else written) == words


@pytest.mark.parametrize("word", ["two words", "$HOME", "{path}", "", "a'b", "*"])
def test_shell_sensitive_arguments_become_a_list(word: str) -> None:
    """Arguments that a shell would read otherwise are written as a list."""
    assert job_writer.entrypoint_value(["train.py", word]) == ["train.py", word]


def test_long_text_stays_on_one_line() -> None:
    text = " ".join(["word"] * 1000)
    assert job_writer.job_file_text({"entrypoint": text}) == f"entrypoint: {text}\n"
