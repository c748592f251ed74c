"""Job file equivalent to a call of `orch run` or `orchestrator.run`.

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
from orchestrator.spec.foreign.launchers import INTERPRETER, ProgramKind, as_job_name
from orchestrator.spec.load import SpecFile, validate
from orchestrator.spec.value_types import host_texts
from orchestrator.spec.yaml_document import ECHO_CHARS_MAX, Document, SourceLocation, Value, escape

Spell: TypeAlias = Callable[[str, str], str]
"""How a setting was written, from its name and value: `--nodes 2` on the command line, `nodes=2` in Python."""

SHEBANG_BYTES = 1_000


@dataclass(frozen=True, slots=True)
class RunLine:
    """Command of a job and its settings; None or empty: not given."""

    argv: tuple[str, ...]
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


def make_job_file(line: RunLine, path: Path, notes: Sequence[str], spell: Spell) -> SpecFile:
    """Return the job file of a line, as if it were read from `path`. Raises SpecError with all faults at once."""
    document = Document(escape(str(path)))
    named = _hosts(line.hosts)
    nodes = line.nodes if line.nodes is not None or not named else len(named)
    backend = line.backend or (None if line.hosts is None else "ssh")
    name = line.name if line.name is not None else derive_job_name(line.argv)
    for key, option, value in (
        ("name", "name", name), ("backend", "backend", backend), ("nodes", "nodes", nodes),
        ("gpus_per_node", "gpus", line.gpus), ("procs_per_node", "procs", line.procs),
    ):  # fmt: skip
        _put(document, key, value, spell(option, str(value)))
    starter = launchers.find_start(line.argv).starter
    is_program = starter is ProgramKind.OTHER and bool(line.argv) and _is_python_program(line.argv[0])
    if is_program and line.procs in (None, 1) and line.gpus in (None, 0, 1, "0", "1"):
        document.put("command", launchers.join_command(line.argv), "SCRIPT")
    elif is_program or starter in (ProgramKind.LAUNCHER, ProgramKind.SHELL):
        document.put("launch", launchers.make_runnable(launchers.join_command(line.argv)), "SCRIPT")
    else:
        document.put("entrypoint", document_value(job_writer.entrypoint_value(line.argv)), "SCRIPT")
    _put(document, "python", line.python, spell("python", str(line.python)))
    _put(document, "env", line.env or None, spell("env", "…"))
    document.locations |= {f"env.{name}": SourceLocation(spell("env", name)) for name in line.env}
    _put(document, "ssh.hosts", line.hosts, spell("hosts", str(line.hosts)))
    for key, setting in line.settings.items():
        document.put(key, document_value(setting), spell("set", key))
    for override in line.overrides:
        document.override(override)
    return validate(path, job_writer.job_file_text(document.data, notes), document)


def _is_python_program(word: str) -> bool:
    """Return whether a word is an installed Python program, such as `tune` or `litgpt`: it starts its training itself, so it runs
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


def derive_job_name(argv: Sequence[str]) -> str:
    """Return the name of a job with this command: that of its script or module."""
    argv = [part for word in argv for part in word.split()]  # one may be a whole line, as behind `bash -c`
    scripts = [word for word in argv if word.endswith((".py", ".sh"))]
    modules = [after.rpartition(".")[2] for word, after in itertools.pairwise(argv) if word == "-m"]
    first = scripts[0] if scripts else modules[-1] if modules else next(iter(argv), "")
    stem = first.rstrip("/").rpartition("/")[2].removesuffix(".py").removesuffix(".sh")
    return as_job_name(stem)


def split_python(argv: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split a command into its interpreter and the rest; no interpreter for a command that begins otherwise, or whose module is
    a launcher, which the job file itself reads."""
    rest = list(argv[1:])
    if not argv or not INTERPRETER.fullmatch(argv[0].rpartition("/")[2]):
        return "", tuple(argv)
    while rest[:1] == ["-u"]:  # lines are not buffered anyway
        rest = rest[1:]
    if (
        not rest
        or launchers.find_start(argv).starter is ProgramKind.LAUNCHER
        or (rest[0].startswith("-") and rest[0] != "-m")
    ):
        return "", tuple(argv)
    return argv[0], tuple(rest)


def _hosts(given: str | Sequence[str] | None) -> list[str]:
    """Return the named hosts; none if one of them cannot be read, which the job file's reader reports."""
    texts = host_texts(given) if isinstance(given, str) else given or ()
    try:
        return list(dict.fromkeys(name for text in texts for name in hosts.expand_range(text)))
    except ValueError:
        return []


def _put(document: Document, key: str, value: object, origin: str) -> None:
    if value is not None:
        document.put(key, document_value(value), escape(origin, ECHO_CHARS_MAX))


def document_value(value: object) -> Value:
    """Return a value as a job file would hold it: each scalar as the text that one would write."""
    if isinstance(value, Mapping):
        return {str(name): document_value(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [document_value(inner) for inner in value]
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)
