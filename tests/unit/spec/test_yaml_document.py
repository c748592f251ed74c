"""The file as text: what is read, on which line, what is refused before it is built, and what any text comes to."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.spec import yaml_document
from orchestrator.spec.load import JobSpec, json_schema, load
from orchestrator.spec.yaml_document import Document, SpecError, parse, read_text
from tests.unit.spec.test_load import GOOD, HEAD

BOMB_S_MAX = 5.0
EXAMPLES_MAX = 150


def fault_of(text: str) -> str:
    """Return the words of the fault that stops the reading of `text`."""
    with pytest.raises(SpecError) as caught:
        parse(text, "job.yaml")
    return str(caught.value)


def test_every_scalar_stays_as_written() -> None:
    assert parse("a: [off, 1:30, 010, 2024-01-01, 1e3, 0x10, yes, 'null', 1_000]\n", "job.yaml").data == {
        "a": ["off", "1:30", "010", "2024-01-01", "1e3", "0x10", "yes", "null", "1_000"]
    }


@pytest.mark.parametrize("nothing", ["", "~", "null", "NULL"])
def test_unquoted_null_is_none(nothing: str) -> None:
    assert parse(f"a: {nothing}\n", "job.yaml").data == {"a": None}


def test_keys_and_list_items_have_line_numbers() -> None:
    document = parse("a: 1\n\nb:\n  c:\n    - x\n    - y\n", "dir/job.yaml")
    assert document.where("a") == "dir/job.yaml:1: a"
    assert document.where("b.c") == "dir/job.yaml:4: b.c"
    assert document.where("b.c[1]") == "dir/job.yaml:6: b.c[1]"


def test_absent_key_has_nearest_parents_line_or_none() -> None:
    document = parse("a:\n  b: 1\n", "job.yaml")
    assert document.where("a.c.d") == "job.yaml:1: a.c.d"
    assert document.where("z") == "job.yaml: z"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_bom_and_windows_line_ends_are_accepted(ending: str) -> None:
    document = parse(f"\ufeffa: 1{ending}b: 2{ending}", "job.yaml")
    assert document.data == {"a": "1", "b": "2"}
    assert document.where("b") == "job.yaml:2: b"


def test_aliases_are_read() -> None:
    assert parse("a: &x {b: 1}\nc: *x\n", "job.yaml").data == {"a": {"b": "1"}, "c": {"b": "1"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "job.yaml:1: must be a map of keys such as `name: my-job`, not empty; `orch init` writes a starter"),
        ("# only a comment\n", "not empty"),
        ("---\n", "not empty"),
        ("- a\n- b\n", "job.yaml:1: must be a map of keys such as `name: my-job`, not a list"),
        ("just words\n", 'job.yaml:1: must be a map of keys such as `name: my-job`, not "just words"'),
        ("a: 1\n---\nb: 2\n", "job.yaml:2: is not YAML: expected a single document"),
        ("a: *b\n", "job.yaml:1: is not YAML: found undefined alias 'b'"),
        ("a: &a [*a]\n", f"job.yaml:1: contains more than 10000 values, or is nested deeper than {yaml_document.DEPTH_MAX}"),
        ("a: 1\nb: \x07\n", "job.yaml:2: contains the unprintable character '\\x07'"),
        ("a:\n\tb: 1\n", "job.yaml:2: is not YAML: while scanning for the next token, found character '\\t'"),
        ("a: b: c\n", "job.yaml:1: is not YAML: mapping values are not allowed here (line 1); check quotes, colons"),
        ("a: 1\nb: 'x\n\nc: 1\n", "while scanning a quoted scalar (line 2), found unexpected end of stream (line 5)"),
        ("a: [1, 2\n\nb: 3\n", "job.yaml:3: is not YAML: while parsing a flow sequence (line 1), expected"),
        ("a: @x\n", "job.yaml:1: is not YAML: while scanning for the next token, found character '@'"),
        ("a: {b: 1\n", "is not YAML"),
        ("a: 1\nb: '\n\n\t\x85", "is not YAML"),
        ('a: 1\nb: "\\UFFFFFFFF"\n', "job.yaml:2: contains an escape or a nesting beyond what can be read"),
        (f"%YAML {'9' * 5000}.1\n---\na: 1\n", "job.yaml:1: contains an escape"),
        ("a: !%ff b\n", "job.yaml:1: is not YAML"),
    ],
)  # fmt: skip
def test_invalid_job_file_gets_one_line(text: str, said: str) -> None:
    fault = fault_of(text)
    assert said in fault
    assert fault.isprintable()


def test_recoverable_faults_are_collected() -> None:
    """Faults that leave the rest readable are collected."""
    text = (
        'a: 1\na: 2\nb: !!python/object:os.system x\nc: &y {d: 1}\ne:\n  <<: *y\n? [a]\n: b\nf: "\\0"\n"\\ud800": 1\n'
    )
    document = parse(text, "job.yaml")
    assert [str(fault) for fault in document.faults] == [
        "job.yaml:2: a: is written twice, first at job.yaml:1",
        'job.yaml:3: b: the tag "tag:yaml.org,2002:python/object:os.system" is not read; write the value plainly',
        "job.yaml:6: e: a key must be a plain word; merge keys (<<) are not read, write them out",
        "job.yaml:7: a key must be a plain word; merge keys (<<) are not read, write them out",
        "job.yaml:9: f: has more than 130000 characters, or one that cannot be passed to a process",
        "job.yaml:10: a key must be a plain word; merge keys (<<) are not read, write them out",
    ]
    assert document.data["a"] == "1"


def laughs(levels: int) -> str:
    """Return the billion laughs: each level ten times the one before."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        laughs(9),
        "a: " + "[" * 100_000,
        "a: " + "{a: " * 50_000,
        "- " * 100_000,
        "a: " + "[" * 20 + "]" * 20,
        "a: [" + "1, " * 20_000 + "]",
    ],
    ids=["laughs", "lists", "maps", "dashes", "levels", "items"],
)
def test_yaml_bomb_meets_a_limit_first(text: str) -> None:
    started_s = time.process_time()
    assert re.match("job.yaml:1: contains (more than 10000 values|an escape or a nesting)", fault_of(text))
    assert time.process_time() - started_s < BOMB_S_MAX


def test_first_faults_are_shown_and_rest_counted() -> None:
    text = "a: 1\n" + "a: 2\n" * 70
    with pytest.raises(SpecError) as caught:
        raise SpecError(parse(text, "job.yaml").faults)
    lines = str(caught.value).splitlines()
    assert len(lines) == yaml_document.FAULTS_MAX + 1
    assert lines[-1] == "and 20 more faults"


def test_unreadable_file_gives_reason(tmp_path: Path) -> None:
    """A file that cannot be read is reported with the reason."""
    (tmp_path / "job.yaml").write_text("name: a\n")
    (tmp_path / "wide.yaml").write_bytes("name: a\n".encode("utf-16"))
    (tmp_path / "latin.yaml").write_bytes(b"# ok\nname: caf\xe9\n")
    (tmp_path / "big.yaml").write_bytes(b"#" * (yaml_document.SPEC_BYTES_MAX + 1))
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("jop.yaml", "; did you mean job.yaml?"),
        ("none/at.all", "no file at.all in"),
        (".", "is a folder"),
        ("job.yaml/x", "no file x in"),
        ("x" * 300, "no file xxx"),
        ("a\0b", "no file a\\x00b in"),
        ("pipe", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        ("wide.yaml", "wide.yaml:1: is not UTF-8 text (byte 0xff); save it as UTF-8"),
        ("latin.yaml", "latin.yaml:2: is not UTF-8 text (byte 0xe9); save it as UTF-8"),
        ("big.yaml", "big.yaml: is larger than 256 KiB"),
    ):
        with pytest.raises(SpecError) as caught:
            read_text(tmp_path / name)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def overridden(argument: str) -> Document:
    """Return a small document with an override put in."""
    document = parse("a: &x {b: 1, c: 2}\nd: *x\ne: 3\n", "job.yaml")
    document.override(argument)
    return document


def test_override_is_inserted_and_known_by_argument() -> None:
    document = overridden("a.b=[1, 2]")
    assert document.data["a"] == {"b": ["1", "2"], "c": "2"}
    assert document.where("a.b") == "--set a.b=[1, 2]"
    assert document.where("a.b[0]") == "--set a.b=[1, 2]: a.b[0]"
    assert document.where("a.c") == "job.yaml:1: a.c"


@pytest.mark.parametrize(
    "text",
    [
        "*",
        "*.pt",
        "&x",
        "!x",
        "%x",
        "@x",
        "`x`",
        "#x",
        "[0-9]*.pt",
        "{job_dir}/code/x.pt",
        "{attempt}",
        "*'\"\\ x: y",
    ],
)
def test_override_that_can_only_be_text_is_text(text: str) -> None:
    document = overridden(f"c.path={text}")
    assert (document.data["c"], document.faults) == ({"path": text}, [])


def test_override_does_not_change_aliased_values() -> None:
    """An override does not change what an alias shares."""
    assert overridden("a.b=9").data["d"] == {"b": "1", "c": "2"}


def test_override_creates_missing_sections() -> None:
    assert overridden("new.deep=x").data["new"] == {"deep": "x"}


def test_replaced_section_forgets_file_lines() -> None:
    assert overridden("a={b: 1}").where("a.b") == "--set a={b: 1}: a.b"
    assert overridden("a={z: 1}").where("a.b") == "--set a={z: 1}: a.b"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("nodes", "--set nodes: must be key.path=value"),
        ("=3", "--set =3: must be key.path=value"),
        ("a..b=3", "must be key.path=value"),
        ("e.f=3", "--set e.f=3: e is not a section of keys"),
        ("a=[1", "is not YAML"),
        ("a={b: 1, b: 2}", "--set a={b: 1, b: 2}: a.b: is written twice"),
        ("a=x\x1b[31m", "\\x1b[31m"),
        ("a=\udcff", "unprintable character"),
    ],
)
def test_bad_override_is_named(argument: str, said: str) -> None:
    (fault,) = overridden(argument).faults
    assert said in str(fault)
    assert "\x1b" not in str(fault)


def answer(folder: Path, raw: bytes, *overrides: str) -> None:
    """Load bytes; only a spec or a SpecError in printable lines may come of it."""
    path = folder / "fuzz.yaml"
    path.write_bytes(raw)
    try:
        load(path, overrides=overrides)
    except SpecError as err:
        assert all(line.isprintable() for line in str(err).splitlines())
        assert len(str(err).splitlines()) <= yaml_document.FAULTS_MAX + 1


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Path]:
    """Return a folder for all examples of a fuzz test."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "train.py").touch()
        yield Path(name)


fuzz = settings(max_examples=EXAMPLES_MAX, deadline=None, database=None, suppress_health_check=list(HealthCheck))
scalar = st.one_of(
    *[st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)],
    st.sampled_from(["off", "1:30", "010", "auto", "-m", "{path}", "~", "10m", "'", "\0", "\ud800", "~x"]),
)
PARTS = [json_schema(), *json_schema()["$defs"].values()]
key = st.sampled_from([*[name for part in PARTS for name in part["properties"]], "x", "", "<<"])
tree = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(key | st.text(max_size=5), inner, max_size=6),
    max_leaves=20,
)


@given(raw=st.binary(max_size=300))
@fuzz
def test_random_bytes_are_handled(fuzzed: Path, raw: bytes) -> None:
    answer(fuzzed, raw)


@given(text=st.text(alphabet="abn:-&*!|>'\"{}[],#?%@`~ \t\r\n1.\ufeff\x85", max_size=120))
@fuzz
def test_random_yaml_is_handled(fuzzed: Path, text: str) -> None:
    answer(fuzzed, text.encode())


@pytest.mark.slow
@given(data=st.dictionaries(key, tree, max_size=8))
@fuzz
def test_random_data_is_handled(fuzzed: Path, data: dict[str, object]) -> None:
    answer(fuzzed, yaml.safe_dump(data).encode("utf-8", "replace"))
    try:
        JobSpec.model_validate(data)
    except pydantic.ValidationError:
        pass


@pytest.mark.slow
@given(data=st.data())
@fuzz
def test_mutated_good_file_is_handled(fuzzed: Path, data: st.DataObject) -> None:
    raw = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        end = data.draw(st.integers(start, min(len(raw), start + 12)))
        raw[start:end] = data.draw(st.binary(max_size=6) | st.sampled_from([b"\n", b": ", b"- ", b"  ", b"*a", b"{"]))
    answer(fuzzed, bytes(raw))


@pytest.mark.slow
@given(argument=st.text(max_size=30) | st.builds(lambda name, text: f"{name}={text}", key, st.text(max_size=20)))
@fuzz
def test_random_overrides_are_handled(fuzzed: Path, argument: str) -> None:
    answer(fuzzed, HEAD.encode(), argument)
