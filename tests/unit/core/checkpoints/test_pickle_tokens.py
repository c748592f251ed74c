"""Texts and numbers of pickles that are read and never executed."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.checkpoints.pickle_tokens import Token, read_tokens
from tests.support.saved_files import Model, adam, metadata

QUICK = settings(max_examples=300, database=None)


def read(data: bytes) -> list[Token]:
    """Return all tokens, as far as the bytes are a pickle."""
    found: list[Token] = []
    try:
        for token in read_tokens(data):
            found.append(token)
    except ValueError:
        pass
    return found


def values(data: Any) -> list[str | int]:
    """Return the texts and whole numbers in plain data, in order."""
    if isinstance(data, dict):
        return [value for pair in data.items() for item in pair for value in values(item)]
    if isinstance(data, (list, tuple)):
        return [value for item in data for value in values(item)]
    return [data] if type(data) in (str, int) else []


PLAIN = st.recursive(
    st.integers(0, 2**40) | st.integers(-(2**31), 0) | st.text(max_size=300) | st.none() | st.booleans()
    | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["abc", "step"]), inner)
    | st.tuples(inner, inner),
    max_leaves=20,
)  # fmt: skip


@pytest.mark.slow
@given(PLAIN, st.integers(2, pickle.HIGHEST_PROTOCOL))
@QUICK
def test_texts_and_numbers_come_in_file_order(data: object, protocol: int) -> None:
    assert [value for _, value in read_tokens(pickle.dumps(data, protocol))] == values(data)


def test_value_comes_with_its_nesting_depth() -> None:
    """A value is reported with the number of containers around it."""
    state = {"a": 1, "step": 5, "inner": {"b": 2, "step": 6, "more": [{"c": 3, "step": 7}, 8]}}
    found = read(pickle.dumps(state, 2))
    steps = [(depth, value) for (_, before), (depth, value) in pairwise(found) if before == "step"]
    assert steps == [(1, 5), (2, 6), (4, 7)]


def test_repeated_text_is_reported_again() -> None:
    path = "relative_" + "path"
    found = [value for _, value in read_tokens(pickle.dumps([{path: "a"}, {path: "b"}], 4))]
    assert found == ["relative_path", "a", "relative_path", "b"]


def test_nothing_is_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read(pickle.dumps({"step": 5, "evil": Evil()}, protocol))
    read(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert list(tmp_path.iterdir()) == []


SAMPLES = (
    pickle.dumps({"step": 5, "model": OrderedDict(a="b" * 300), "big": 2**70, "bytes": b"x" * 300}, 2),
    pickle.dumps({"step": 5, "set": frozenset({1}), "bytes": bytearray(300)}, 5),
    pickle.dumps({"step": 5, "many": list(range(1000)), "long": "x" * 70_000}, 0),
    pickle.dumps(adam(7), 4), pickle.dumps(Model(), 3), metadata({"__0_0.distcp": [400], "__1_0.distcp": [300, 100]}),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("data", SAMPLES, ids=range(len(SAMPLES)))
def test_truncated_pickle_is_an_error(data: bytes) -> None:
    """A pickle that is cut off anywhere is an error."""
    assert list(read_tokens(data)) == list(read_tokens(data + b"what follows"))
    for length in range(0, len(data), max(1, len(data) // 200)):
        with pytest.raises(ValueError):
            list(read_tokens(data[:length]))


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda data: b"\x80\x04\x95" + data))
@QUICK
def test_any_bytes_are_read_or_raise_pickle_error(data: bytes) -> None:
    read(data)


@pytest.mark.slow
@given(st.sampled_from(SAMPLES), st.data())
@QUICK
def test_pickle_with_changed_bytes_raises_pickle_error(sample: bytes, data: st.DataObject) -> None:
    raw = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for _, value in read(bytes(raw)):
        assert isinstance(value, str) or value.bit_length() <= 64


@pytest.mark.parametrize(
    "data",
    [
        b"\x8d" + (1 << 62).to_bytes(8, "little") + b"x", b"X\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8, b"T\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f", b"\x8a\xff" + b"x" * 255, b"(" * 100_000, b"e" * 1000, b"h\x05j\x00\x00\x00\x7f.", b"S'a", b"\xff",
    ],
)  # fmt: skip
def test_huge_lengths_and_deep_nesting_cost_nothing(data: bytes) -> None:
    """Huge lengths, deep nesting and unknown entries cost nothing."""
    assert read(data) == []
