"""Writer of a job file: settings in, YAML out that `load` reads as the same settings. Pure.

Rules: only given settings are written, in their order. A text is quoted if another reader of YAML would take it for
something else (`off`, `1:30`); a list is written in one line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import yaml

SettingValue: TypeAlias = "str | int | float | bool | Sequence[SettingValue] | Mapping[str, SettingValue] | None"

LINE_CHARS_MAX = 130_000
"""The length at which YAML breaks a line: never, since a text of a job file is at most this long."""

_SAME_TO_ALL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?|true|false")
"""Numbers and truth values that are the same in YAML 1.1, YAML 1.2 and JSON."""


_SCRIPT = re.compile(r"[\t\n\x20-\x7e\xa1-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd]*")
"""Text that a reader of YAML takes unchanged."""


def job_file_text(settings: Mapping[str, SettingValue], notes: Sequence[str] = ()) -> str:
    """Return a job file with `settings`, and with `notes` as lines of comment at its top."""
    comment = "".join(f"# {line}".rstrip() + "\n" for note in notes for line in note.splitlines() or [""])
    return comment + "".join(_line(name, value) for name, value in settings.items())


def _line(name: str, value: SettingValue) -> str:
    """Return one setting; a text of several lines, such as a script, is written unchanged, indented."""
    if isinstance(value, str) and "\n" in value.strip("\n") and _SCRIPT.fullmatch(value):
        lines = "".join(f"  {line}\n" if line else "\n" for line in value.strip("\n").split("\n"))
        return f"{name}: |{'2' if value[:1].isspace() else ''}\n{lines}"
    return str(yaml.dump({name: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LINE_CHARS_MAX))


def entrypoint_value(argv: Sequence[str]) -> str | list[str]:
    """Return a command as the value of `entrypoint`: as one text if it splits into the same words, else as a list."""
    return " ".join(argv) if all(word == shlex.quote(word) for word in argv) else list(argv)


class _Dumper(yaml.SafeDumper):
    """Writer of plain YAML, without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    """Represent a text. One that every reader takes for the same number or truth value stays plain: orch reads it as text."""
    tag = "tag:yaml.org,2002:str"
    if _SAME_TO_ALL.fullmatch(value):
        kind = "bool" if value.isalpha() else "float" if "." in value else "int"
        tag = f"tag:yaml.org,2002:{kind}"
    return dumper.represent_scalar(tag, value)


def _list(dumper: yaml.SafeDumper, value: Sequence[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)
_Dumper.add_representer(tuple, _list)
