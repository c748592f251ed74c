"""What does the job file say, value by value, and on which line?

Rules: every scalar stays the text that was written, since what it means is its field's affair: that keeps YAML 1.1's
traps out (`off`, `1:30`, `010`, dates), and only an unquoted nothing, `~` or `null` is None. Limits count while the
parser runs, before anything is built. Nothing here knows a field.
"""

from __future__ import annotations

import codecs
import difflib
import itertools
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from orchestrator.errors import UserError

SPEC_BYTES_MAX = 1 << 20
VALUES_MAX = 10_000
ALIASES_MAX = 100
DEPTH_MAX = 16
FAULTS_MAX = 50
KEY_CHARS_MAX = 200
ECHO_CHARS_MAX = 60
LINE_CHARS_MAX = 4_096
FOLDER_NAMES_MAX = 5_000

Value: TypeAlias = "str | list[Value] | dict[str, Value] | None"

# libyaml's parser is about ten times as fast, and not everywhere.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STR_TAG = "tag:yaml.org,2002:str"
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN = re.compile(r"[\w.+:/@-]+")
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", re.ASCII)
_HINTS = (
    (
        "mapping values are not allowed",
        "put quotes around a value that holds a colon, and check the indentation",
    ),
    ("could not find expected ':'", "a key lacks its colon, or a line of text lacks its indentation"),
    ("quoted scalar", "a quote is not closed"),
    ("cannot start any token", "put quotes around a value that starts with this character"),
    ("did not find expected", "check the indentation, quotes and brackets of this line and the one above"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake of the user: `where` is `job.yaml:7: nodes`, `what` a sentence with its remedy, in one line."""

    where: str
    what: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class SpecError(UserError):
    """All faults of a job file, those of the file by line, then those of the command line."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: fault.line or VALUES_MAX * SPEC_BYTES_MAX))
        assert self.faults, "an error has a fault"
        lines = [str(fault) for fault in self.faults[:FAULTS_MAX]]
        more = len(self.faults) - len(lines)
        super().__init__("\n".join([*lines, f"and {more} more faults"] if more else lines))


@dataclass(frozen=True, slots=True)
class Places:
    """Where each key was written: `lines` in the file, `origins` (`--set nodes=17`) on the command line."""

    shown: str = "job.yaml"
    lines: Mapping[str, int] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """Return `job.yaml:14: nodes`: the line of the key or its nearest parent, or the argument that set it."""
        name = escaped(key)
        for holder in _with_parents(key):
            if holder in self.origins:
                return self.origins[holder] if holder == key else f"{self.origins[holder]}: {name}"
            if holder in self.lines:
                return f"{self.shown}:{self.lines[holder]}: {name}"
        inside = [origin for held, origin in self.origins.items() if held.startswith(f"{key}.")]
        return f"{inside[0]}: {name}" if inside else f"{self.shown}: {name}"

    def fault(self, key: str, what: str) -> Fault:
        """Return a fault of `key` at its place."""
        holder = next(
            (held for held in _with_parents(key) if held in self.origins or held in self.lines), key
        )
        return Fault(self.where(key), what, 0 if holder in self.origins else self.lines.get(holder, 0))


@dataclass(frozen=True, slots=True)
class Document:
    """A spec as data, with the faults that did not stop the reading (keys written twice, tags)."""

    data: dict[str, Value]
    places: Places
    faults: tuple[Fault, ...] = ()


def read(path: Path) -> str:
    """Return the file's text as it stands. Raises SpecError when it is missing, no file, too large or not UTF-8."""
    shown_path = escaped(str(path), LINE_CHARS_MAX)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder; name the job file in it" if stat.S_ISDIR(mode) else "no regular file"
            raise SpecError([Fault(shown_path, f"is {kind}")])
        with path.open("rb") as file:
            raw = file.read(SPEC_BYTES_MAX + 1)
    except FileNotFoundError as err:
        fix = did_you_mean(path.name, names_in(path.parent)) or "; `orch init` writes a starter"
        raise SpecError([Fault(shown_path, f"no such file{fix}")]) from err
    except (OSError, ValueError) as err:
        reason = (getattr(err, "strerror", None) or str(err)).lower()
        raise SpecError([Fault(shown_path, f"cannot be read: {reason}")]) from err
    if len(raw) > SPEC_BYTES_MAX:
        raise SpecError(
            [Fault(shown_path, f"is larger than {SPEC_BYTES_MAX >> 20} MiB; a job file is a page of YAML")]
        )
    return _decoded(raw, shown_path)


def compose(text: str, shown_path: str) -> Document:
    """Turn a file's text into data. Raises SpecError for what is no YAML, over a limit, or no map of keys."""
    reader = _Reader(text, escaped(shown_path, LINE_CHARS_MAX), numbered=True)
    data = reader.document()
    if data is None:
        raise SpecError([Fault(reader.origin, "is empty; `orch init` writes a starter")])
    if not isinstance(data, dict):
        what = f"must be a map of keys such as `name: my-job`, not {shown(data)}"
        raise SpecError([Fault(f"{reader.origin}:1", what, 1)])
    return Document(data, Places(reader.origin, reader.lines), tuple(reader.faults))


def override(document: Document, argument: str) -> Document:
    """Return the document with one `key.path=value` put in, its value read as YAML. Raises SpecError."""
    origin = f"--set {escaped(argument)}"
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key) or key.count(".") >= DEPTH_MAX:
        raise SpecError([Fault(origin, "must be key.path=value, such as nodes=4 or monitor.hang_timeout=5m")])
    reader = _Reader(text, origin, numbered=False)
    value = reader.document()
    if reader.faults:
        raise SpecError(reader.faults)
    return put(document, key, value, origin)


def put(document: Document, key: str, value: Value, origin: str) -> Document:
    """Return the document with `value` at a dotted key, said to come from `origin`. Raises SpecError."""
    below = (f"{key}.", f"{key}[")
    lines = {
        held: line
        for held, line in document.places.lines.items()
        if held != key and not held.startswith(below)
    }
    origins = {held: arg for held, arg in document.places.origins.items() if not held.startswith(below)}
    try:
        data = _with(document.data, key.split("."), value)
    except LookupError as err:
        raise SpecError([Fault(origin, f"{escaped(str(err.args[0]))} is no section of keys")]) from err
    return Document(data, Places(document.places.shown, lines, {**origins, key: origin}), document.faults)


def dotted(path: Sequence[str | int]) -> str:
    """Return `ssh.hosts[0]` for a path of keys and list positions."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def escaped(text: str, chars_max: int = ECHO_CHARS_MAX) -> str:
    """Return `text` in one short line: unprintable characters as escapes, a long text cut."""
    cut = text if len(text) <= chars_max else f"{text[:chars_max]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def shown(value: object) -> str:
    """Return how a fault names a value: a plain word bare, other text in quotes, a container by its kind."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (Mapping, list, tuple)):
        return "a map" if isinstance(value, Mapping) else "a list"
    text = escaped(str(value))
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def did_you_mean(word: str, names: Iterable[str], section: str = "") -> str:
    """Return `; did you mean NAME?` for the nearest of `names`, or nothing when none is near; with a section the name
    is told with it, as `--set` takes it."""
    found = difflib.get_close_matches(word[: 2 * ECHO_CHARS_MAX], names, n=1)
    return f"; did you mean {f'{section}.' if section else ''}{escaped(found[0])}?" if found else ""


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, at most FOLDER_NAMES_MAX; none when it cannot be read."""
    try:
        return sorted(entry.name for entry in itertools.islice(folder.iterdir(), FOLDER_NAMES_MAX))
    except (OSError, ValueError):
        return []


def missing_file(path: Path) -> str | None:
    """Return why there is no file to read at `path`, with the nearest name there is; None when there is one."""
    try:
        if path.is_file():
            return None
        if path.is_dir():
            return f"{escaped(str(path), LINE_CHARS_MAX)} is a folder"
    except (OSError, ValueError):
        pass  # too long a name, or a folder that may not be entered: there is nothing to find
    near = did_you_mean(path.name, names_in(path.parent))
    return f"no file {escaped(path.name)} in {escaped(str(path.parent), LINE_CHARS_MAX)}{near}"


class _Reader:
    """Builds one value from the parser's events, and keeps lines and faults on the way."""

    def __init__(self, text: str, origin: str, *, numbered: bool) -> None:
        self.origin = origin
        self.lines: dict[str, int] = {}
        self.faults: list[Fault] = []
        self._text = text.removeprefix("\ufeff")
        self._numbered = numbered
        self._events: Iterator[yaml.Event] = iter(())
        self._anchors: dict[str, tuple[Value, int]] = {}
        self._values = 0
        self._aliases = 0

    def document(self) -> Value:
        """Return the value of the only document, None for an empty text. Raises SpecError."""
        found = _UNPRINTABLE.search(self._text)
        if found:
            line = self._text.count("\n", 0, found.start()) + 1
            raise self._stop(line, f"holds the unprintable character {ascii(found.group())[1:-1]}")
        self._events = yaml.parse(self._text, Loader=_LOADER)
        try:
            return self._only_document()
        except yaml.YAMLError as err:
            raise self._syntax(err) from err

    def _only_document(self) -> Value:
        root: Value = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._stop(_line(event), "starts a second document; one file holds one job")
            elif isinstance(event, yaml.NodeEvent):
                root = self._value(event, "", 1)
        return root

    def _value(self, event: yaml.Event, path: str, depth: int) -> Value:
        self._count(1, event)
        if depth > DEPTH_MAX:
            raise self._stop(_line(event), f"is nested deeper than {DEPTH_MAX} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if getattr(event, "tag", None) not in (None, _STR_TAG):
            self._fault(
                _line(event),
                path,
                f"the tag {shown(getattr(event, 'tag', ''))} is not read; write the value plainly",
            )
        before = self._values
        value: Value
        if isinstance(event, yaml.ScalarEvent):
            value = None if event.implicit[0] and event.value in _NULLS else event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._list(path, depth)
        else:
            value = self._map(path, depth)
        anchor = getattr(event, "anchor", None)
        if anchor:
            self._anchors[anchor] = (value, self._values - before + 1)
        return value

    def _list(self, path: str, depth: int) -> list[Value]:
        items: list[Value] = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            here = f"{path}[{len(items)}]"
            self.lines.setdefault(here, _line(event))
            items.append(self._value(event, here, depth + 1))
        return items

    def _map(self, path: str, depth: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                raise self._stop(_line(event), "a key must be a plain word")
            key, line = str(event.value), _line(event)
            if len(key) > KEY_CHARS_MAX:
                raise self._stop(line, f"a key is longer than {KEY_CHARS_MAX} characters")
            here = f"{path}.{key}" if path else key
            first_line = self.lines.setdefault(here, line)
            value = self._value(next(self._events), here, depth + 1)
            if key == "<<" and event.implicit[0]:
                self._fault(line, path, "merge keys (<<) are not read; write the keys out")
            elif key in values:
                self._fault(line, here, f"is written twice, first on line {first_line}")
            else:
                values[key] = value
        return values

    def _alias(self, event: yaml.AliasEvent) -> Value:
        """Return an anchor's value; it counts as if it were written out, so that a bomb meets the limit here."""
        self._aliases += 1
        if self._aliases > ALIASES_MAX:
            raise self._stop(_line(event), f"uses more than {ALIASES_MAX} aliases")
        if event.anchor not in self._anchors:
            raise self._stop(_line(event), f"the alias *{escaped(str(event.anchor))} names nothing above it")
        value, values = self._anchors[event.anchor]
        self._count(values, event)
        return value

    def _count(self, values: int, event: yaml.Event) -> None:
        self._values += values
        if self._values > VALUES_MAX:
            raise self._stop(_line(event), f"holds more than {VALUES_MAX} values")

    def _fault(self, line: int, key: str, what: str) -> None:
        head = f"{self.origin}:{line}" if self._numbered else self.origin
        self.faults.append(
            Fault(f"{head}: {escaped(key)}" if key else head, what, line if self._numbered else 0)
        )

    def _stop(self, line: int, what: str) -> SpecError:
        """Return the error of a fault after which nothing more can be read."""
        self._fault(line, "", what)
        return SpecError(self.faults)

    def _syntax(self, err: yaml.YAMLError) -> SpecError:
        told = " ".join(str(getattr(err, part, None) or "") for part in ("context", "problem")).strip()
        # What is left open is found at the file's end, and mended where it starts.
        first = "context_mark" if re.search("quoted|flow", told) else "problem_mark"
        mark = getattr(err, first, None) or getattr(err, "problem_mark", None)
        rows = self._text.splitlines() or [""]
        row = min(mark.line if mark else 0, len(rows) - 1)
        hint = next((hint for sign, hint in _HINTS if sign in told), "check this line and the one above")
        if re.match(r"\s*\t", rows[row]):
            hint = "a tab stands here; YAML indents with spaces"
        return self._stop(row + 1, f"is no YAML: {hint} ({escaped(told, LINE_CHARS_MAX)})")


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return mark.line + 1 if mark else 1


def _decoded(raw: bytes, shown_path: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        seen = "it looks like UTF-16" if wide else f"byte 0x{raw[err.start]:02x}"
        raise SpecError(
            [Fault(f"{shown_path}:{line}", f"is not UTF-8 text ({seen}); save it as UTF-8", line)]
        ) from err


def _with_parents(key: str) -> Iterator[str]:
    """Yield `ssh.hosts[0]`, `ssh.hosts`, `ssh`."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]


def _with(data: dict[str, Value], path: Sequence[str], value: Value) -> dict[str, Value]:
    """Return `data` with `value` at `path`; what an alias shares stays untouched. Raises LookupError(key)."""
    head, rest = path[0], path[1:]
    if not rest:
        return {**data, head: value}
    inner = data.get(head)
    if inner is not None and not isinstance(inner, dict):
        raise LookupError(head)
    return {**data, head: _with(inner or {}, rest, value)}
