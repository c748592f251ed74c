"""YAML of a job file as data with the line of each key, and the faults found in it.

Rules: every scalar stays the text that was written, since its field decides what it means: that avoids YAML 1.1's traps
(`off`, `1:30`, `010`, dates); only an unquoted empty value, `~` or `null` is None. Nothing here knows a field.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import yaml

from orchestrator.core.errors import Fault, UserError

SPEC_BYTES_MAX = 1 << 18
VALUES_MAX = 10_000
DEPTH_MAX = 16
TEXT_CHARS_MAX = 130_000  # Linux takes no argument or variable above 128 KiB
FAULTS_MAX = 50
LINE_CHARS_MAX = 1_000
ECHO_CHARS_MAX = 60
FOLDER_NAMES_MAX = 5_000

Value: TypeAlias = "str | list[Value] | dict[str, Value] | None"

_NULLS = ("", "~", "null", "Null", "NULL")
_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
_UNFIT = re.compile("[\0\ud800-\udfff]")
_PLAIN = re.compile(r"[\w.+:/@-]+")
_NO_YAML = re.compile(r"[*&!%@`#]|\{\w+\}|\{[^}]*\}\S|\[[^\]]*\]\S")
"""Beginnings of a value of the command line that no YAML for a field has: a glob such as `*` or `[0-9]*.pt`, which YAML
takes for an alias or a broken list, a tag, a comment, and a placeholder such as `{job_dir}`."""

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", re.ASCII)


class WrongValue(ValueError):
    """A value that cannot be. The text says what it must be; the reader adds what was written."""


class SpecError(UserError):
    """All faults of a job file, those of the file by line, then those of the command line; `what`, `where` and `fix` are the
    first one's."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: fault.line or SPEC_BYTES_MAX))
        assert self.faults, "an error has a fault"
        lines = [str(fault) for fault in self.faults[:FAULTS_MAX]]
        more = len(self.faults) - len(lines)
        first = self.faults[0]
        super().__init__(first.what, first.where, first.fix or "docs/reference.md and orch schema have every field")
        self._text = "\n".join([*lines, f"and {more} more faults"] if more else lines)

    def __str__(self) -> str:
        return self._text


class SourceLocation(NamedTuple):
    """Place of a key: `job.yaml:14`, or without a line `--set nodes=17`."""

    text: str
    line: int = 0
    has_key: bool = False


@dataclass(slots=True)
class Document:
    """A job file as data, the place of each dotted key in it, and the faults that did not stop the reading."""

    origin: str = "job.yaml"
    data: dict[str, Value] = field(default_factory=dict)
    locations: dict[str, SourceLocation] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def where(self, key: str) -> str:
        """Return `job.yaml:14: nodes`: the line of the key or its nearest parent, or the argument that set it."""
        return self.fault(key, "").where

    def fault(self, key: str, what: str) -> Fault:
        """Return a fault of `key` at its place."""
        holder = next((with_parent for with_parent in _key_and_parents(key) if with_parent in self.locations), "")
        text, line, has_key = self.locations.get(holder, SourceLocation(self.origin))
        return Fault(text if has_key and holder == key else f"{text}: {escape(key)}", what, line=line)

    def override(self, argument: str) -> None:
        """Apply one `key.path=value` of the command line, its value read as YAML, or taken as the text that it can only
        be."""
        key, equals, text = argument.partition("=")
        key = key.strip()
        public = argument if key != "notify.url" else f"{key}=…"  # it may hold a token
        origin = f"--set {escape(public, ECHO_CHARS_MAX)}"
        if not equals or not _KEY.fullmatch(key):
            what = "must be key.path=value, such as nodes=4 or monitor.hang_timeout=5m"
            self.faults.append(Fault(origin, what))
            return
        if _NO_YAML.match(text):
            text = yaml.dump(text, default_style='"', width=math.inf)
        try:
            reader = _Reader(text, origin, key)
        except SpecError as err:
            self.faults += err.faults
            return
        self.faults += reader.faults
        self.put(key, reader.data, origin)
        self.locations |= reader.locations

    def put(self, key: str, value: Value, origin: str) -> None:
        """Put a value at a dotted key; `origin` is the place that faults of it name."""
        *above, last = key.split(".")
        section, path = self.data, ""
        for name in above:
            path = f"{path}.{name}".removeprefix(".")
            self.locations.setdefault(path, SourceLocation(origin))
            inner = section[name] = section.get(name) or {}
            if not isinstance(inner, dict):
                self.faults.append(Fault(origin, f"{path} is not a section of keys"))
                return
            section = inner
        section[last] = value
        gone = (f"{key}.", f"{key}[")
        self.locations = {held: place for held, place in self.locations.items() if not held.startswith(gone)}
        self.locations[key] = SourceLocation(origin, has_key=True)


def read_text(path: Path) -> str:
    """Return the text of a job file or script. Raises SpecError when it is missing, not a regular file, too large or not UTF-8."""
    name = escape(str(path))
    missing = find_file_fault(path)
    if missing:
        raise SpecError([Fault(name, missing)])
    try:
        with path.open("rb") as file:
            raw = file.read(SPEC_BYTES_MAX + 1)
    except OSError as err:
        raise SpecError([Fault(name, f"cannot be read: {err.strerror}")]) from err
    if len(raw) > SPEC_BYTES_MAX:
        raise SpecError([Fault(name, f"is larger than {SPEC_BYTES_MAX >> 10} KiB, the most that is read")])
    try:
        return raw.decode()
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        what = f"is not UTF-8 text (byte 0x{raw[err.start]:02x}); save it as UTF-8"
        raise SpecError([Fault(f"{name}:{line}", what, line=line)]) from err


def parse(text: str, origin: str) -> Document:
    """Turn a file's text into data. Raises SpecError for a text that is not YAML, over a limit, or not a map of keys."""
    reader = _Reader(text, origin)
    if not isinstance(reader.data, dict):
        what = f"must be a map of keys such as `name: my-job`, not {quote_value(reader.data)}; `orch init` writes a starter"
        raise SpecError([Fault(f"{origin}:1", what, line=1)])
    return Document(origin, reader.data, reader.locations, reader.faults)


class _Reader:
    """Reads a YAML text, a file's or the value that the command line gives to `key`; raises SpecError if it cannot."""

    def __init__(self, text: str, origin: str, key: str = "") -> None:
        self.locations: dict[str, SourceLocation] = {}
        self.faults: list[Fault] = []
        self._origin = origin
        self._is_file = not key
        self._values = 0
        node = self._node(text)
        self.data: Value = None if node is None else self._value(node, key, 1)

    def _node(self, text: str) -> yaml.Node | None:
        """Return the tree of the text's only document; the base loader leaves every scalar a text."""
        try:
            loader = yaml.BaseLoader(text)
        except yaml.reader.ReaderError as err:
            line = text.count("\n", 0, err.position)
            raise self._make_error(line, f"contains the unprintable character {chr(err.character)!a}") from err
        try:
            return loader.get_single_node()
        except yaml.MarkedYAMLError as err:
            parts = [(err.context, err.context_mark), (err.problem, err.problem_mark)]
            words = [f"{text} (line {mark.line + 1})" if mark else text for text, mark in parts if text]
            mark = err.problem_mark or err.context_mark
            what = (
                f"is not YAML: {escape(', '.join(words))}; check quotes, colons and brackets, and that no tab indents"
            )
            raise self._make_error(mark.line if mark else 0, what) from err
        except (ValueError, OverflowError, RecursionError) as err:  # \U99999999, or thousands of brackets
            raise self._make_error(loader.line, "contains an escape or a nesting beyond what can be read") from err

    def _value(self, node: yaml.Node, path: str, depth: int) -> Value:
        """Return a node as data. The values of an alias count each time, so that a bomb meets the limit here."""
        self._values += 1
        if self._values > VALUES_MAX or depth > DEPTH_MAX:
            what = f"contains more than {VALUES_MAX} values, or is nested deeper than {DEPTH_MAX} levels"
            raise self._make_error(node.start_mark.line, what)
        if node.tag not in _TAGS:
            self._add_fault(node, path, f"the tag {quote_value(node.tag)} is not read; write the value plainly")
        if isinstance(node, yaml.MappingNode):
            return self._map(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            items: list[Value] = []
            for number, item in enumerate(node.value):
                self.locations[f"{path}[{number}]"] = self._place(item.start_mark.line)
                items.append(self._value(item, f"{path}[{number}]", depth + 1))
            return items
        assert isinstance(node, yaml.ScalarNode)
        if len(node.value) > TEXT_CHARS_MAX or _UNFIT.search(node.value):
            what = f"has more than {TEXT_CHARS_MAX} characters, or one that cannot be passed to a process"
            self._add_fault(node, path, what)
        return None if node.style is None and node.value in _NULLS else str(node.value)

    def _map(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = f"{path}.{key}" if path else key
            if not isinstance(key_node, yaml.ScalarNode) or key == "<<" or _UNFIT.search(key):
                what = "a key must be a plain word; merge keys (<<) are not read, write them out"
                self._add_fault(key_node, path, what)
            elif key in values:
                self._add_fault(key_node, here, f"is written twice, first at {self.locations[here].text}")
            else:
                self.locations[here] = self._place(key_node.start_mark.line)
                values[key] = self._value(value_node, here, depth + 1)
        return values

    def _add_fault(self, node: yaml.Node, key: str, what: str) -> None:
        text, line, _ = self._place(node.start_mark.line)
        self.faults.append(Fault(f"{text}: {escape(key)}" if key else text, what, line=line))

    def _make_error(self, row: int, what: str) -> SpecError:
        text, line, _ = self._place(row)
        return SpecError([*self.faults, Fault(text, what, line=line)])

    def _place(self, row: int) -> SourceLocation:
        """Return a place by its row, counted from 0."""
        return SourceLocation(f"{self._origin}:{row + 1}", row + 1) if self._is_file else SourceLocation(self._origin)


def _key_and_parents(key: str) -> Iterator[str]:
    """Yield `ssh.hosts[0]`, `ssh.hosts`, `ssh`."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]


# Words of faults


def escape(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    """Return `text` in one line: unprintable characters as escapes, a long text cut."""
    cut = text if len(text) <= chars_max else f"{text[:chars_max]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def quote_value(value: object) -> str:
    """Return a value for a fault: a plain word bare, other text in quotes, a container by its kind."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (Mapping, list, tuple)):
        return "a map" if isinstance(value, Mapping) else "a list"
    text = escape(str(value), ECHO_CHARS_MAX)
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def did_you_mean(word: str, names: Iterable[str], section: str = "") -> str:
    """Return `; did you mean NAME?` for the nearest of `names`, with its section; empty when none is near."""
    nearest = difflib.get_close_matches(word[:ECHO_CHARS_MAX], names, n=1)
    return f"; did you mean {section}{escape(nearest[0])}?" if nearest else ""


def resolve_path(folder: Path, written: str) -> Path:
    """Return the path of a file or folder that a job file in `folder` names."""
    try:
        return folder / Path(written.strip()).expanduser()
    except RuntimeError:  # `~` has no meaning here
        return folder / written.strip()


def find_file_fault(path: Path) -> str:
    """Return why `path` cannot be read as a file, with the nearest name in its folder; empty when it can."""
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # too long a name, or a folder that may not be entered
        if path.is_file():
            return ""
        if path.exists():
            return f"{escape(str(path))} is {'a folder' if path.is_dir() else 'not a regular file'}"
        if path.is_symlink():
            return f"{escape(str(path))} is a broken link"
        names = sorted(entry.name for entry in itertools.islice(path.parent.iterdir(), FOLDER_NAMES_MAX))
    return f"no file {escape(path.name)} in {escape(str(path.parent.absolute()))}{did_you_mean(path.name, names)}"
