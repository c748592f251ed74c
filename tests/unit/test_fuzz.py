"""Does every verb end with a sentence, whatever its arguments are and whatever a job file says?

`ORCH_FUZZ` multiplies how much is tried.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pydantic
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orchestrator.cli import group
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.checkpoints.ledger import Ledger
from orchestrator.spec.model import JobSpec
from tests.support import folders, jobs, verbs
from tests.support.saved_files import saved

WORDS_MAX = FILES_MAX = verbs.examples(300)
QUIET = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))

TEXTS = (
    "", " ", "-", "--", "-1", "0", "1", "9" * 20, "1e400", "nan", "0x10", "x" * 5000, "\u202egpj.exe", "\x1b[2J", "\udcff", "é", "💥",
    ".", "..", "/", "~", "~nosuch", "/dev/null", "/dev/zero", "/proc/self/mem", "pipe", "circle", "(", "[", "{", "*", "a=b", "=", "a.b=c",
    "nodes=0", "workdir=.", "restart.max=1", "10m", "-5s", "9" * 9 + "d", "node-0", "broken", "done", "step-9", "step-9.pt", "a\nb", "%s{0}$HOME",
)  # fmt: skip
"""What somebody may type, or a script with a mistake in it."""

ODD: tuple[Any, ...] = (
    *TEXTS,
    None,
    True,
    -1,
    0.5,
    10**30,
    float("inf"),
    [],
    [[]],
    {},
    {"": None},
    {"a": {"b": []}},
    ["a", 1],
)
"""What a field of a job file may hold."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a home of two ended jobs, and files that are none."""
    place = tmp_path_factory.mktemp("fuzz")
    folders.failed(place / "home", "broken", jobs.BEGAN_S)
    done = folders.succeeded(place / "home", "done", jobs.BEGAN_S + 60)
    book = Ledger(done.root, done.ledger)
    book.put(saved(1, main="step-9", state=CheckpointState.TORN, why="step-9/a.pt is cut off"))
    book.flush()
    (done.checkpoints / "step-9.pt").write_bytes(b"PK\x03\x04")
    (place / "train.py").write_text("")
    (place / "job.yaml").write_text("name: gpt\nentrypoint: train.py\n")
    (place / "circle").symlink_to("circle")
    os.mkfifo(place / "pipe")
    return place


@pytest.fixture(autouse=True)
def _place(template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(template)
    yield


def _words(name: str, command: click.Command) -> st.SearchStrategy[list[str]]:
    """Return command lines of a verb: some of its options, each with something, and some arguments."""
    text = st.sampled_from(TEXTS) | st.text(st.characters(exclude_characters="\0"), max_size=20)  # no shell gives a NUL
    options = [one for one in command.params if isinstance(one, click.Option) and one.name not in ENDLESS]
    used = st.sampled_from(options).flatmap(lambda one: _option(one, text)) if options else st.just([])
    parts = st.lists(used | text.map(lambda one: [one]), max_size=4)
    return parts.map(lambda lists: [name, *(word for words in lists for word in words)])


def _option(option: click.Option, text: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    flags = st.sampled_from([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return flags.map(lambda flag: [flag])
    return st.tuples(flags, text).map(list)


VERBS = tuple(sorted(set(group.cli.commands) - {"mcp"}))  # which speaks with a program over real pipes

ENDLESS = ("serve", "listen", "burn_s")
"""Options with which a verb works until Ctrl-C, or for as long as they say."""


@pytest.mark.slow
def test_any_arguments_end_every_verb_with_sentence(template: Path) -> None:
    @given(st.sampled_from(VERBS).flatmap(lambda name: _words(name, group.cli.commands[name])))
    @settings(QUIET, max_examples=WORDS_MAX)
    @example(["report", "-o", ""])
    def tried(words: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            shutil.copytree(template / "home", f"{folder}/home")
            patch.setenv("ORCH_HOME", f"{folder}/home")
            before = sorted(Path().iterdir())
            code, _ = verbs.checked(words)
            made = sorted(set(Path().iterdir()) - set(before))
            assert code == 0 or not made, (words, made)
            for path in made:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    tried()


def _fields(model: type[pydantic.BaseModel], above: str = "") -> Iterator[str]:
    """Give the path of each field that a job file may have."""
    for name, field in model.model_fields.items():
        yield f"{above}{name}"
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                yield from _fields(kind, f"{above}{name}.")


FIELDS = tuple(dict.fromkeys(_fields(JobSpec)))

VALUES = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def _spoilt(changes: dict[str, Any]) -> dict[str, Any]:
    """Return a job file with these fields set to something."""
    spec: dict[str, Any] = {"name": "gpt", "entrypoint": "train.py"}
    for path, value in changes.items():
        *above, last = path.split(".")
        inside = spec
        for name in above:
            if not isinstance(inside.get(name), dict):
                inside[name] = {}
            inside = inside[name]
        inside[last] = value
    return spec


@pytest.mark.slow
def test_any_job_file_is_planned_or_refused(template: Path) -> None:
    texts = st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3).map(
        lambda changes: json.dumps(_spoilt(changes)).encode()
    )

    @given(texts | st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")))
    @settings(QUIET, max_examples=FILES_MAX)
    def tried(text: bytes) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ORCH_HOME", str(template / "none"))
            Path("fuzz.yaml").write_bytes(text)
            code, _ = verbs.checked(["render", "fuzz.yaml"])
            assert code in (0, 2, 3) and not Path("none").exists()

    tried()
