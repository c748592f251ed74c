"""Job without a file: the job file that a call of `orch run` or `orchestrator.run` is equal to.

Rules: a field that is not given is not written. A fault names the option or argument that set the field, not a line of a
file that the user never wrote.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from orchestrator.spec import hosts, job_writer
from orchestrator.spec.foreign import launchers
from orchestrator.spec.foreign.launchers import INTERPRETER, Starter, as_job_name
from orchestrator.spec.load import SpecFile, checked
from orchestrator.spec.value_types import host_texts
from orchestrator.spec.yaml_document import ECHO_CHARS_MAX, Document, Place, Value, escaped

Spell: TypeAlias = Callable[[str, str], str]
"""How a setting was written, from its name and value: `--nodes 2` on the command line, `nodes=2` in Python."""

SHEBANG_BYTES = 1_000


@dataclass(frozen=True, slots=True)
class RunLine:
    """Command of a job and its settings; None or empty: not given."""

    words: tuple[str, ...]
    nodes: int | None = None
    gpus: int | str | None = None
    procs: int | None = None
    backend: str | None = None
    hosts: str | Sequence[str] | None = None
    name: str | None = None
    env: Mapping[str, object] = field(default_factory=dict)
    python: str | None = None
    # Fields by their dotted keys, and `key.path=value` with the value in YAML
    settings: Mapping[str, object] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


def job_file(line: RunLine, path: Path, notes: Sequence[str], spell: Spell) -> SpecFile:
    """Return the job file of a line, as if it were read from `path`. Raises SpecError with all faults at once."""
    document = Document(escaped(str(path)))
    named = _hosts(line.hosts)
    nodes = line.nodes if line.nodes is not None or not named else len(named)
    backend = line.backend or (None if line.hosts is None else "ssh")
    name = line.name if line.name is not None else name_of(line.words)
    for key, option, value in (
        ("name", "name", name), ("backend", "backend", backend), ("nodes", "nodes", nodes),
        ("gpus_per_node", "gpus", line.gpus), ("procs_per_node", "procs", line.procs),
    ):  # fmt: skip
        _say(document, key, value, spell(option, str(value)))
    starter = launchers.start_of(line.words).starter
    is_program = starter is Starter.OTHER and bool(line.words) and _is_program(line.words[0])
    if is_program and line.procs in (None, 1) and line.gpus in (None, 0, 1, "0", "1"):
        document.put("command", launchers.joined(line.words), "SCRIPT")
    elif is_program or starter in (Starter.LAUNCHER, Starter.SHELL):
        document.put("launch", launchers.runnable(launchers.joined(line.words)), "SCRIPT")
    else:
        document.put("entrypoint", _data(job_writer.entry(line.words)), "SCRIPT")
    _say(document, "python", line.python, spell("python", str(line.python)))
    _say(document, "env", line.env or None, spell("env", "…"))
    document.places |= {f"env.{name}": Place(spell("env", name)) for name in line.env}
    _say(document, "ssh.hosts", line.hosts, spell("hosts", str(line.hosts)))
    for key, setting in line.settings.items():
        document.put(key, _data(setting), spell("set", key))
    for override in line.overrides:
        document.override(override)
    return checked(path, job_writer.job_file(document.data, notes), document)


def _is_program(word: str) -> bool:
    """Tell whether a word is an installed Python program, such as `tune` or `litgpt`: it starts its training itself, so it runs
    once on a node, as the only rank or as the launcher of the ranks."""
    place = shutil.which(word) if "/" not in word and not Path(word).exists() else None
    if place is None:
        return False
    try:
        with Path(place).open("rb") as file:
            head = file.readline(SHEBANG_BYTES)
    except OSError:
        return False
    return head.startswith(b"#!") and b"python" in head


def name_of(words: Sequence[str]) -> str:
    """Return the name of a job with this command: that of its script or module."""
    words = [part for word in words for part in word.split()]  # one may be a whole line, as behind `bash -c`
    scripts = [word for word in words if word.endswith((".py", ".sh"))]
    modules = [after.rpartition(".")[2] for word, after in itertools.pairwise(words) if word == "-m"]
    first = scripts[0] if scripts else modules[-1] if modules else next(iter(words), "")
    stem = first.rstrip("/").rpartition("/")[2].removesuffix(".py").removesuffix(".sh")
    return as_job_name(stem)


def without_python(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split a command into its interpreter and the rest; no interpreter for a command that begins otherwise, or whose module is
    a launcher, which the job file itself reads."""
    rest = list(words[1:])
    if not words or not INTERPRETER.fullmatch(words[0].rpartition("/")[2]):
        return "", tuple(words)
    while rest[:1] == ["-u"]:  # lines are not buffered anyway
        rest = rest[1:]
    if (
        not rest
        or launchers.start_of(words).starter is Starter.LAUNCHER
        or (rest[0].startswith("-") and rest[0] != "-m")
    ):
        return "", tuple(words)
    return words[0], tuple(rest)


def _hosts(said: str | Sequence[str] | None) -> list[str]:
    """Return the named hosts; none if one of them cannot be read, which the job file's reader reports."""
    texts = host_texts(said) if isinstance(said, str) else said or ()
    try:
        return list(dict.fromkeys(name for text in texts for name in hosts.expand(text)))
    except ValueError:
        return []


def _say(document: Document, key: str, value: object, origin: str) -> None:
    if value is not None:
        document.put(key, _data(value), escaped(origin, ECHO_CHARS_MAX))


def _data(value: object) -> Value:
    """Return a value as a job file would hold it: each scalar as the text that one would write."""
    if isinstance(value, Mapping):
        return {str(name): _data(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_data(inner) for inner in value]
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)
