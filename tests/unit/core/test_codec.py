"""Does every value come back as it went, and is everything else refused?"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import codec
from orchestrator.core.codec import CodecError
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire import orders, reports


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    text: str = "default"


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    pair: tuple[int, float]
    colour: Colour
    path: Path
    maybe: int | None
    table: dict[str, bool]
    names: set[str] = field(default_factory=set)
    counts: dict[int, list[Inner]] = field(default_factory=dict)
    passing: object = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Other:
    number: int


WHOLE = Outer(
    Inner(1), (Inner(2, "ä\n\udc80"), Inner(3)), (4, 0.5), Colour.RED, Path("/a b"), None, {"yes": True, "no": False},
    {"b", "a"}, {3: [Inner(4)], -1: []}, object(),
)  # fmt: skip
KINDS: Mapping[str, type[Any]] = codec.classes_by_kind(Inner | Other)


class Loss(float):
    """A number that need not be finite."""


@dataclass(frozen=True, slots=True)
class Lost:
    loss: Loss | None


@pytest.mark.parametrize("text", ["1.5", "nan", "inf", "-inf"])
def test_only_float_subclass_round_trips_non_finite(text: str) -> None:
    packed = codec.dumps(Lost(Loss(text)))
    assert packed == ('{"loss":1.5}' if text == "1.5" else f'{{"loss":"{text}"}}')
    assert codec.dumps(codec.loads(Lost, packed)) == packed
    with pytest.raises(CodecError):
        codec.loads(Lost, '{"loss":"1.5"}')
    with pytest.raises(CodecError):
        codec.unpack(tuple[float, ...], [text if text != "1.5" else "x"])


def test_value_round_trips() -> None:
    """A value is read as it was written."""
    text = codec.dumps(WHOLE)
    assert "\n" not in text
    assert codec.loads(Outer, text) == WHOLE


def test_union_value_names_its_class() -> None:
    assert codec.loads_kind(KINDS, codec.dumps_kind(Other(7))) == Other(7)
    assert codec.loads_kind(KINDS, codec.dumps_kind(Inner(7))) == Inner(7)
    with pytest.raises(CodecError, match="unknown kind"):
        codec.loads_kind(KINDS, '{"kind":"Outer"}')
    with pytest.raises(CodecError, match="unknown kind"):
        codec.loads_kind(KINDS, "[]")


def test_only_defaults_may_be_left_out() -> None:
    """A default may be left out, and nothing else."""
    assert codec.loads(Inner, '{"number":1}') == Inner(1)
    with pytest.raises(CodecError, match="missing or unknown number"):
        codec.loads(Inner, '{"text":"x"}')
    with pytest.raises(CodecError, match="missing or unknown more"):
        codec.loads(Inner, '{"number":1,"more":2}')


@pytest.mark.parametrize("data", ['{"number":"1"}', '{"number":true}', '{"number":1.5}', '{"number":null}', "[]", "1"])
def test_value_of_other_type_is_refused(data: str) -> None:
    with pytest.raises(CodecError):
        codec.loads(Inner, data)


def test_integer_is_a_float_but_bool_is_not() -> None:
    value = codec.pack(WHOLE)
    assert codec.unpack(Outer, {**value, "pair": [4, 1]}).pair == (4, 1.0)
    for pair in ([4, True], [4], [4, 1, 2], "4"):
        with pytest.raises(CodecError):
            codec.unpack(Outer, {**value, "pair": pair})
    with pytest.raises(CodecError, match="enum"):
        codec.unpack(Outer, {**value, "colour": "blue"})


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", "{} {}"])
def test_invalid_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(CodecError, match="no JSON"):
        codec.loads(Inner, text)


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[Infinity]",
        "[-Infinity]",
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 900 + "]" * 900,
        "[" * (codec.DEPTH_MAX + 1) + "]" * (codec.DEPTH_MAX + 1),
        '{"a":"\xff"}'.encode("latin-1"),
        "{}".encode("utf-16"),
    ],
    ids=["nan", "inf", "-inf", "lists", "objects", "whole", "just", "bytes", "utf-16"],
)
def test_python_only_json_extensions_are_refused(text: str | bytes) -> None:
    with pytest.raises(CodecError, match="no JSON"):
        codec.loads(Inner, text)
    codec.loads_plain('{"a":' * codec.DEPTH_MAX + "1" + "}" * codec.DEPTH_MAX)


@pytest.mark.parametrize("number", ["1" * 30, "-" + "1" * 30, "1" * 400, "1e999", "-1e999"])
def test_infinite_number_is_refused(number: str) -> None:
    """A number without bounds is refused."""
    for pair in (f"[{number},1]", f"[1,{number}]"):
        with pytest.raises(CodecError):
            codec.loads(Outer, codec.dumps(WHOLE).replace("[4,0.5]", pair))
    assert codec.loads(Inner, '{"number":18446744073709551615}').number == (1 << 64) - 1


@pytest.mark.parametrize("data", ['{"kind":[]}', '{"kind":{}}', '{"kind":null}', "1", '{"\\ud800\\n\\u001b[2J":1}'])
def test_unknown_kind_is_reported_printably(data: str) -> None:
    for read in (lambda: codec.loads_kind(KINDS, data), lambda: codec.loads(Inner, data)):
        with pytest.raises(CodecError) as caught:
            read()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = (
    codec.classes_by_kind(reports.Report)
    | codec.classes_by_kind(orders.Order)
    | codec.classes_by_kind(w.HostRequest)
    | codec.classes_by_kind(w.Reply)
)


@pytest.mark.slow
@given(st.sampled_from(sorted(MESSAGES)), st.data())
@settings(max_examples=60, deadline=None)
def test_message_with_any_field_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    """One field of a good message is anything at all."""
    fields = codec.pack(data.draw(st.from_type(MESSAGES[kind])))
    fields[data.draw(st.sampled_from(sorted(fields) or ["x"]))] = data.draw(ANYTHING)
    text = json.dumps({"kind": kind, **fields})
    try:
        value = codec.loads_kind(MESSAGES, text)
    except CodecError as err:
        assert str(err).isprintable()
    else:
        assert codec.loads_kind(MESSAGES, codec.dumps_kind(value)) == value


@given(st.binary() | st.text())
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read_or_refused(text: str | bytes) -> None:
    with contextlib.suppress(CodecError):
        codec.loads_plain(text)


def test_plain_data_is_an_object() -> None:
    assert codec.loads_plain(codec.dumps_plain({"a": [1]})) == {"a": [1]}
    with pytest.raises(CodecError, match="dict wanted"):
        codec.loads_plain("[1]")


@dataclass(frozen=True, slots=True)
class Group:
    ranks: tuple[int, ...]
    name: str = "world"
    parts: tuple[Inner, ...] = ()


@pytest.mark.parametrize("ranks", [range(8000), range(3, 8000, 8), range(100, 164)])
def test_equally_spaced_numbers_are_one_series(ranks: range) -> None:
    """Many numbers at equal distances are written as a series and read as one object."""
    text = codec.dumps(Group(tuple(ranks)))
    assert len(text) < 80
    codec._series_kept.clear()  # as in another process
    codec._series_texts.clear()
    assert codec.loads(Group, text) == Group(tuple(ranks))
    assert codec.loads(Group, text).ranks is codec.loads(Group, text).ranks


@pytest.mark.parametrize(
    "ranks",
    [
        range(8),
        [*range(100), 7],
        [*range(50), *range(60, 200)],
        [5] * 100,
        range(-99, 99),
        range(10**9, 10**9 + 99),
    ],
)
def test_other_numbers_are_written_individually(ranks: Any) -> None:
    text = codec.dumps(Group(tuple(ranks)))
    assert json.loads(text)["ranks"] == list(ranks)
    assert codec.loads(Group, text) == Group(tuple(ranks))


@pytest.mark.parametrize(
    "series",
    [
        "0:9999999:1",
        "0:5:1",
        "9:0:1",
        "0:100:0",
        "0:100",
        "a:b:c",
        "-9:100:1",
        "0:999999999999:1",
        "",
        "0:100:1\n",
    ],
)
def test_invalid_series_is_refused(series: str) -> None:
    with pytest.raises(CodecError):
        codec.loads(Group, json.dumps({"ranks": series}))


def test_brief_message_omits_defaults_and_reads_the_same() -> None:
    value = Group((1, 2), parts=(Inner(1), Inner(2, "other")))
    brief = codec.pack_without_defaults(value)
    assert brief == {
        "kind": "Group",
        "ranks": [1, 2],
        "parts": [{"number": 1}, {"number": 2, "text": "other"}],
    }
    assert codec.unpack_kind({"Group": Group}, brief) == value


@dataclass(frozen=True, slots=True)
class Shorter:
    FORMER: ClassVar[dict[str, str]] = {"old": "", "titles": "names"}

    number: int
    names: tuple[str, ...] = field(default_factory=tuple)


def test_only_fields_of_earlier_versions_are_ignored_or_renamed() -> None:
    assert codec.unpack(Shorter, {"number": 1, "old": 7.5}) == Shorter(1)
    assert codec.unpack(Shorter, {"number": 1, "titles": ["a"]}) == Shorter(1, ("a",))
    assert codec.pack(Shorter(1)) == {"number": 1, "names": []}
    with pytest.raises(codec.KeysError, match="unknown older"):
        codec.unpack(Shorter, {"number": 1, "older": 2})
