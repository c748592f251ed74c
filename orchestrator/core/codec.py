"""Codec between dataclasses and JSON, for wire and disk: by the types of the fields, both ways and strictly.

Rules: only dataclasses of plain fields (numbers, text, booleans, None, enums, paths, tuples, lists, sets of text,
dicts with keys of text or whole numbers, dataclasses); an unknown or missing field is an error, since both ends run
the same bundle; but `FORMER` of a class has names that earlier versions wrote, each with its present name or empty; a
field that does not count when two values are compared is left out; a value of a union of dataclasses carries its class
name under `kind`. The input may come from a stranger: numbers are finite and of 64 bits (subclasses of `float`: also
`nan` and `inf`, as texts), nothing is nested deeper than `DEPTH_MAX`; else CodecError.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args, get_origin

T = TypeVar("T")
Reader = Callable[[Any], Any]

Json: TypeAlias = dict[str, Any]
"""A JSON object, at the border to a wire, a file or a user's screen; further in, values have types."""

DEPTH_MAX = 32
"""How deep objects and lists may be nested; those of a job are nested less than 10 deep."""

INT_BITS_MAX = 64

SERIES_MIN, SERIES_MAX = 64, 1 << 20
"""How many whole numbers at equal distances are written as a series."""

SERIES_KEPT, NUMBER_MAX = 64, 10**9 - 1
_SERIES = re.compile(r"[0-9]{1,9}:[0-9]{1,9}:[1-9][0-9]{0,8}")

_PLAIN = frozenset({str, int, float, bool, type(None)})
_UNIONS = (typing.Union, types.UnionType)
_once: Callable[[Callable[[type], T]], Callable[[type], T]] = functools.cache
_INT_MAX = 1 << INT_BITS_MAX - 1
KEYS_SHOWN = 4


class CodecError(ValueError):
    """The text is not JSON, or not of the expected type."""


class KeysError(CodecError):
    """An object lacks keys of its type, or has others: most likely another version of orch has written it."""


def pack(value: object) -> Any:
    """Turn `value` into what `json.dumps` takes. Dataclasses become objects without a `kind`."""
    if type(value) in _PLAIN:
        return value
    if names := _field_names(type(value)):
        packed = {name: one if type(one := getattr(value, name)) in _PLAIN else pack(one) for name in names}
        for name in _union_names(type(value)):
            packed[name] = {"kind": type(getattr(value, name)).__name__, **packed[name]}
        return packed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): pack(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return (type(value) is tuple and _pack_series(value)) or [
            item if type(item) in _PLAIN else pack(item) for item in value
        ]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    assert isinstance(value, (str, int, float)), f"cannot pack {type(value)}"
    is_text = isinstance(value, float) and not math.isfinite(value)
    return str(float(value)) if is_text else value


def _pack_series(values: tuple[object, ...]) -> str:
    """Return many whole numbers at equal distances, such as the ranks of a large group, as `first:end:distance`; empty
    for anything else."""
    if len(values) < SERIES_MIN:
        return ""
    if known := _series_texts.get(id(values)):
        return known
    first, second, last = values[0], values[1], values[-1]
    if not type(first) is type(second) is type(last) is int or not 0 <= first < second < last < NUMBER_MAX:
        return ""
    series = range(first, last + 1, second - first)
    if list(series) != list(values):
        return ""
    text = f"{first}:{last + 1}:{second - first}"
    _cache_series(text, typing.cast(tuple[int, ...], values))
    return text


def _unpack_series(text: str) -> tuple[int, ...]:
    """Return the numbers of a series; the same object for the same text, since each rank of a group reports the ranks."""
    if text in _series_kept:
        return _series_kept[text]
    if not _SERIES.fullmatch(text):
        raise CodecError(f"no series of numbers: {_excerpt(text)}")
    series = range(*map(int, text.split(":")))
    if not SERIES_MIN <= len(series) <= SERIES_MAX:
        raise CodecError(f"a series of {SERIES_MIN} to {SERIES_MAX} numbers wanted: {_excerpt(text)}")
    return _cache_series(text, tuple(series))


_series_kept: dict[str, tuple[int, ...]] = {}
_series_texts: dict[int, str] = {}  # by the `id` of what is kept


def _cache_series(text: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(_series_texts) >= SERIES_KEPT:
        _series_kept.clear()
        _series_texts.clear()
    if text not in _series_kept:
        _series_kept[text], _series_texts[id(numbers)] = numbers, text
    return numbers


def pack_kind(value: object) -> dict[str, Any]:
    """Like `pack`, with the class name under `kind`, so that `unpack_kind` knows the class."""
    return {"kind": type(value).__name__, **pack(value)}


def pack_without_defaults(value: object) -> dict[str, Any]:
    """Like `pack_kind`, but without plain fields that have their default, also in tuples: heartbeats are short."""
    return {"kind": type(value).__name__, **_pack_without_defaults(value)}


def _pack_without_defaults(value: object) -> Any:
    if isinstance(value, tuple) and value and _field_names(type(value[0])):
        return [_pack_without_defaults(item) for item in value]
    if not (names := _field_names(type(value))):
        return pack(value)
    defaults, packed = _plain_defaults(type(value)), {}
    for name in names:
        item = getattr(value, name)
        if type(item) not in _PLAIN:
            packed[name] = _pack_without_defaults(item)
        elif name not in defaults or item != defaults[name]:
            packed[name] = item
    for name in _union_names(type(value)):
        packed[name] = {"kind": type(getattr(value, name)).__name__, **packed[name]}
    return packed


def dumps(value: object) -> str:
    """Return one line of JSON for a dataclass."""
    return json.dumps(pack(value), separators=(",", ":"))


def dumps_kind(value: object) -> str:
    """Return one line of JSON for a dataclass of a union."""
    return json.dumps(pack_kind(value), separators=(",", ":"))


def dumps_plain(data: Any) -> str:
    """Return one line of JSON for plain data."""
    return _ENCODER.encode(data)


def loads_plain(text: str | bytes) -> dict[str, Any]:
    """Read a JSON object. Raises CodecError."""
    return _expect(_json(text), dict)


def loads(cls: type[T], text: str | bytes) -> T:
    """Read one `cls` from JSON text. Raises CodecError."""
    return unpack(cls, _json(text))


def loads_kind(classes: Mapping[str, type[T]], text: str | bytes) -> T:
    """Read one of `classes` from JSON text by its `kind`. Raises CodecError."""
    return unpack_kind(classes, _json(text))


def unpack(cls: type[T], data: Any) -> T:
    """Read one `cls` from plain JSON data. Raises CodecError."""
    value: T = _reader(typing.cast(typing.Hashable, cls))(data)
    return value


def unpack_kind(classes: Mapping[str, type[T]], data: Any) -> T:
    """Read one of `classes` from plain JSON data by its `kind`. Raises CodecError."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in classes:
        raise CodecError(f"unknown kind: {_excerpt(data)}")
    return unpack(classes[kind], {key: item for key, item in data.items() if key != "kind"})


def classes_by_kind(union: object) -> dict[str, type[Any]]:
    """Return the classes of a union type by their names, for `unpack_kind`."""
    return {cls.__name__: cls for cls in get_args(union)}


def _json(text: str | bytes) -> Any:
    try:
        text = text.decode() if isinstance(text, bytes) else text
        data = _DECODER.decode(text)
    except ValueError as err:
        raise CodecError(f"no JSON: {err}") from err
    except RecursionError as err:
        raise CodecError(f"no JSON: nested more than {DEPTH_MAX} deep") from err
    # Few brackets cannot be nested deep, so most texts need no walk.
    if text.count("[") + text.count("{") > DEPTH_MAX and _is_deep(data):
        raise CodecError(f"no JSON: nested more than {DEPTH_MAX} deep")
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _is_deep(data: Any) -> bool:
    level = [data]
    for _ in range(DEPTH_MAX):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return False
    return True


def _excerpt(data: Any) -> str:
    """Return data for an error: its beginning, in printable characters alone."""
    return reprlib.repr(data)


@_once
def _field_names(cls: type) -> tuple[str, ...]:
    """Return the fields of a dataclass that are packed; none for any other class."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return tuple(field.name for field in fields if field.compare)


@_once
def _union_names(cls: type) -> tuple[str, ...]:
    """Return those of them whose type is a union of dataclasses."""
    hints = typing.get_type_hints(cls)
    return tuple(name for name in _field_names(cls) if _is_union(hints[name]))


def _is_union(tp: Any) -> bool:
    return get_origin(tp) in _UNIONS and all(map(dataclasses.is_dataclass, get_args(tp)))


@_once
def _plain_defaults(cls: type) -> Json:
    """Return the defaults of a dataclass that are numbers, texts, booleans or None, by field."""
    return {one.name: one.default for one in dataclasses.fields(cls) if type(one.default) in _PLAIN}


@functools.cache
def _reader(tp: Any) -> Reader:
    """Build the function that reads a value of type `tp`; once per type, so that decoding a heartbeat costs microseconds."""
    origin = get_origin(tp)
    if _is_union(tp):
        return functools.partial(unpack_kind, classes_by_kind(tp))
    if origin in _UNIONS:
        return _union_reader(get_args(tp))
    if origin is tuple:
        return _tuple_reader(get_args(tp))
    if origin is dict or origin is Mapping:
        return _dict_reader(*get_args(tp))
    if origin in (list, set):
        each = _reader(get_args(tp)[0])
        return lambda data: origin(each(value) for value in _expect(data, list))
    if dataclasses.is_dataclass(tp):
        return _dataclass_reader(typing.cast(type, tp))
    if isinstance(tp, type) and issubclass(tp, enum.Enum):
        return _enum_reader(tp)
    if tp is Path:
        return lambda data: Path(_expect(data, str))
    if tp in (int, float):
        return _read_int if tp is int else _read_float
    if isinstance(tp, type) and issubclass(tp, float):
        return lambda data: tp(data if data in ("nan", "inf", "-inf") else _read_float(data))
    if tp in (str, bool):
        return lambda data: data if type(data) is tp else _expect(data, tp)
    raise AssertionError(f"the codec does not know {tp}")


def _union_reader(members: tuple[Any, ...]) -> Reader:
    """Read `X | None`."""
    rest = [member for member in members if member is not type(None)]
    assert len(rest) == 1 and len(members) == 2, f"only X | None, not {members}"
    inner = _reader(rest[0])
    return lambda data: None if data is None else inner(data)


def _tuple_reader(members: tuple[Any, ...]) -> Reader:
    if len(members) == 2 and members[1] is Ellipsis:
        item = _reader(members[0])
        if members[0] is int:
            return lambda data: (
                _unpack_series(data) if type(data) is str else tuple([item(value) for value in _expect(data, list)])
            )
        return lambda data: tuple([item(value) for value in _expect(data, list)])
    readers = [_reader(member) for member in members]

    def read(data: Any) -> tuple[Any, ...]:
        values = _expect(data, list)
        if len(values) != len(readers):
            raise CodecError(f"{len(readers)} items wanted: {_excerpt(data)}")
        return tuple(one(value) for one, value in zip(readers, values, strict=True))

    return read


def _dict_reader(key_type: type, item_type: Any) -> Reader:
    item = _reader(item_type)

    def read(data: Any) -> dict[Any, Any]:
        values = _expect(data, dict)
        try:
            keys = [key_type(key) for key in values]
        except ValueError as err:
            raise CodecError(f"{key_type.__name__} wanted as key: {str(err)[:200]}") from err
        return dict(zip(keys, map(item, values.values()), strict=True))

    return read


def _dataclass_reader(cls: type) -> Reader:
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.compare]
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    is_plain = len(fields) == len(dataclasses.fields(cls)) and all(
        field.default_factory is dataclasses.MISSING for field in fields
    )
    in_order = [(field.name, readers[field.name], field.default) for field in fields]
    former: Mapping[str, str] = getattr(cls, "FORMER", {})
    needed = {one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING}

    def read(data: Any) -> Any:
        values = _expect(data, dict)
        if former and not values.keys() <= readers.keys():
            values = {former.get(key, key): value for key, value in values.items() if former.get(key) != ""}
        if not needed <= values.keys() or not values.keys() <= readers.keys():
            keys = sorted((needed - values.keys()) | (values.keys() - readers.keys()))
            off = ", ".join(keys[:KEYS_SHOWN]) + ", …" * (len(keys) > KEYS_SHOWN)
            raise KeysError(f"{cls.__name__}: missing or unknown {off if off.isprintable() else _excerpt(off)}")
        if not is_plain:
            return cls(**{name: readers[name](value) for name, value in values.items() if name in readers})
        return cls(  # by place, which is quicker
            *[read_one(values[name]) if name in values else default for name, read_one, default in in_order]
        )

    return read


def _enum_reader(tp: type[enum.Enum]) -> Reader:
    def read(data: Any) -> enum.Enum:
        try:
            return tp(data)
        except ValueError as err:
            raise CodecError(f"enum: {str(err)[:200]}") from err

    return read


def _expect(data: Any, tp: type[T]) -> T:
    if not isinstance(data, tp) or (tp is int and isinstance(data, bool)):
        raise CodecError(f"{tp.__name__} wanted: {_excerpt(data)}")
    return data


def _read_int(data: Any) -> int:
    if type(data) is int and -_INT_MAX < data < _INT_MAX:
        return data
    number = _expect(data, int)
    if number.bit_length() > INT_BITS_MAX:
        raise CodecError(f"a number of more than {INT_BITS_MAX} bits")
    return number


def _read_float(data: Any) -> float:
    if type(data) is float and -math.inf < data < math.inf:
        return data
    number = _read_int(data) if isinstance(data, int) else _expect(data, float)
    if not math.isfinite(number):  # 1e999 is read as infinite
        raise CodecError("a finite number wanted")
    return float(number)
