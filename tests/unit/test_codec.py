"""Does every value come back as it went, and is everything else refused?"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.wire import codec
from orchestrator.wire.codec import CodecError


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
KINDS: Mapping[str, type[Any]] = codec.by_kind(Inner | Other)


def test_a_value_comes_back_as_it_went() -> None:
    text = codec.dumps(WHOLE)
    assert "\n" not in text
    assert codec.loads(Outer, text) == WHOLE


def test_a_value_of_a_union_names_its_class() -> None:
    assert codec.loads_kind(KINDS, codec.dumps_kind(Other(7))) == Other(7)
    assert codec.loads_kind(KINDS, codec.dumps_kind(Inner(7))) == Inner(7)
    with pytest.raises(CodecError, match="unknown kind"):
        codec.loads_kind(KINDS, '{"kind":"Outer"}')
    with pytest.raises(CodecError, match="unknown kind"):
        codec.loads_kind(KINDS, "[]")


def test_a_default_may_be_left_out_and_nothing_else() -> None:
    assert codec.loads(Inner, '{"number":1}') == Inner(1)
    with pytest.raises(CodecError, match="missing or unknown number"):
        codec.loads(Inner, '{"text":"x"}')
    with pytest.raises(CodecError, match="missing or unknown more"):
        codec.loads(Inner, '{"number":1,"more":2}')


@pytest.mark.parametrize(
    "data", ['{"number":"1"}', '{"number":true}', '{"number":1.5}', '{"number":null}', "[]", "1"]
)
def test_a_value_of_another_type_is_refused(data: str) -> None:
    with pytest.raises(CodecError):
        codec.loads(Inner, data)


def test_a_whole_number_is_a_float_and_a_switch_is_none() -> None:
    value = codec.pack(WHOLE)
    assert codec.unpack(Outer, {**value, "pair": [4, 1]}).pair == (4, 1.0)
    for pair in ([4, True], [4], [4, 1, 2], "4"):
        with pytest.raises(CodecError):
            codec.unpack(Outer, {**value, "pair": pair})
    with pytest.raises(CodecError, match="enum"):
        codec.unpack(Outer, {**value, "colour": "blue"})


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", "{} {}"])
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(CodecError, match="no JSON"):
        codec.loads(Inner, text)


def test_plain_data_is_an_object() -> None:
    assert codec.loads_plain(codec.dumps_plain({"a": [1]})) == {"a": [1]}
    with pytest.raises(CodecError, match="an object wanted"):
        codec.loads_plain("[1]")
