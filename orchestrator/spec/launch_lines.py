"""Launch lines in a job file: they become `launch`, and their literal counts fill fields that are not set.

Rules:
1. A line in `entrypoint` that starts a launcher or a shell script, or one in `command` that starts a launcher, becomes
   `launch`, unchanged.
2. `python train.py` becomes the script, with that Python; a line for an environment runner becomes a command.
3. If a field and a line give different counts, the fault is that of the field, and names the line.
4. A count that only a shell knows must be given in a field.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestrator.core.errors import Fault, HostError
from orchestrator.core.host import gpus
from orchestrator.core.slurm.sbatch_options import SRUN
from orchestrator.spec.foreign import launchers, sbatch_header
from orchestrator.spec.foreign.launchers import (
    ASSIGNMENT,
    CUDA,
    OWNED_NAMES,
    LaunchCount,
    LaunchCounts,
    ProgramKind,
)
from orchestrator.spec.yaml_document import Document, SourceLocation, Value, quote_value, resolve_path

CONFIG_BYTES_MAX = 1 << 18
_EXPANDED = re.compile(r"[$`*?\[~]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
"""Quoted text in which a shell changes nothing."""

_CONFIG_FILE = re.compile(r"--config[-_]file[= ]\s*(\S+)")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of a part of a launch line or script: a field with its value, or no field with the reason."""

    option: str
    field: str
    text: str


def parse_launch_line(document: Document, folder: Path) -> list[Conversion]:
    """Move a launch line of a job file into its field, and its counts into theirs. Faults are added to the document. Return the
    conversion of each count, for the user."""
    for key in ("entrypoint", "command"):
        if document.data.get(key):
            try:
                _move_to_field(document, key)
            except ValueError as err:
                document.faults.append(document.fault(key, str(err)))
                document.data[key] = {"command": "true"} if key == "entrypoint" else "true"  # no second fault
    _refuse_accelerate(document)
    launch = document.data.get("launch")
    if isinstance(launch, list):
        launch = "\n".join(str(line) for line in launch)
    if isinstance(launch, str):
        words = launchers.find_launch_command(launch)
        try:
            conversions = _apply_srun(document, words)
        except ValueError as err:
            document.faults.append(document.fault("launch", str(err)))
            return []
        return conversions + _CountFiller(document, "launch", _add_config_counts(words, document, folder)).fill()
    return []


def _refuse_accelerate(document: Document) -> None:
    """Add the fault of a section that was removed, with the line that replaces it."""
    if "accelerate" not in document.data:
        return
    place = document.fault("accelerate", "")
    given = document.data.pop("accelerate")
    given = given if isinstance(given, dict) else {}
    args, named = given.get("args") or "", given.get("config_file")
    words = ["accelerate launch", f"--config_file {named}" if named else ""]
    words += [args if isinstance(args, str) else launchers.join_command([str(word) for word in args])]
    script = document.data.get("entrypoint") or "train.py"
    line = " ".join(filter(None, (*words, str(script))))
    fix = f"write launch: {line} (in place of entrypoint, too)"
    document.faults.append(Fault(place.where, "this section was removed", fix, place.line))


# The line's place


def _move_to_field(document: Document, key: str) -> None:
    """Move what a rank or a node runs into its field. Raises ValueError for a line that has none."""
    value = document.data[key]
    is_inner = isinstance(value, dict) and list(value) == ["command"]
    is_command = key == "command" or is_inner
    value = value["command"] if isinstance(value, dict) and is_inner else value
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        words = [str(word) for word in value]
        commands, text = [words, *launchers.shell_commands(words)], launchers.join_command(words)
    elif isinstance(value, str):
        commands, text = launchers.split_commands(value), value.strip()
    else:
        return
    if not is_command and commands[:1] and commands[0][:1] == ["-m"]:  # what Python itself is given
        commands[0].insert(0, "python")
        text = f"python {text}"
    starts = [launchers.find_start(words).starter for words in commands]
    if ProgramKind.LAUNCHER in starts or (ProgramKind.SHELL in starts[:1] and not is_command):
        _put_launch(document, key, launchers.make_runnable(text))
    elif is_command:
        return  # each rank runs it
    elif starts[:1] in ([ProgramKind.SBATCH], [ProgramKind.REMOTE]):
        line = shlex.quote(text) if "\n" not in text else "FILE"
        raise ValueError(
            f"is {starts[0].value}, which orch does itself; convert the line: orch init --from-command {line}"
        )
    elif starts[:1] in ([ProgramKind.PYTHON], [ProgramKind.RUNNER]):
        _put_python(document, key, commands[0], text, is_shell=isinstance(value, str) and _needs_shell(text))


def _put_launch(document: Document, key: str, text: str) -> None:
    """Move a line to `launch`; its faults keep the place where it was written."""
    place = document.locations.get(key, SourceLocation(document.origin))
    where = place.text if place.has_key else f"{place.text}: {key}"
    document.locations["launch"] = SourceLocation(where, place.line, has_key=True)
    del document.data[key]
    if document.data.get("launch") is not None:
        document.faults.append(document.fault("launch", "excludes launch; keep one of the two"))
    document.data["launch"] = text


def _needs_shell(text: str) -> bool:
    return bool(
        _EXPANDED.search(_QUOTED.sub("", text)) or launchers.first_operator(text) or "\n" in text.replace("\\\n", " ")
    )


def _put_python(document: Document, key: str, argv: Sequence[str], text: str, *, is_shell: bool) -> None:
    """Move the script of an interpreter into `entrypoint`, or into a command if a shell or another program must start it."""
    start = launchers.find_start(argv)
    if start.starter is ProgramKind.PYTHON and tuple(argv[start.behind : start.behind + 1]) in ((), ("-",)):
        raise ValueError(f"{' '.join(argv)} names no script")
    is_plain = set(argv[start.at + 1 : start.behind]) <= {"-u"} and argv[start.behind] != "-c"
    if is_shell or start.starter is ProgramKind.RUNNER or not is_plain:
        fails = "set -o pipefail; " if "|" in text.replace("||", "") and is_shell else ""
        document.data[key] = {"command": fails + text}
        return
    document.data[key] = list(argv[start.behind :])
    if argv[start.at] not in ("python", "python3"):
        _set_or_compare(document, key, "python", argv[start.at], argv[start.at])
    for name, value in (match.groups() for word in argv[: start.at] if (match := ASSIGNMENT.fullmatch(word))):
        if name == CUDA:
            _CountFiller(document, key, launchers.read_counts(argv[: start.at])).fill()
        elif name not in OWNED_NAMES:
            _set_or_compare(document, key, f"env.{name}", value, f"{name}={value}")


def _apply_srun(document: Document, argv: Sequence[str]) -> list[Conversion]:
    """Move options of srun into fields; only the size if the job does not run on Slurm. Raises ValueError for an option that
    srun does not have, and for hosts of an mpirun line that the job file does not have."""
    start = launchers.find_start(argv)
    if (hosts := launchers.find_hosts(argv)) and not document.data.get("backend"):
        fix = "write backend: ssh, and them as ssh.hosts (orch run: --hosts)"
        raise ValueError(f"names the hosts {hosts}, to which orch itself connects: {fix}")
    if start.launcher != "srun":
        return []
    options, at = SRUN.read(argv, start.behind)
    inner, given = launchers.find_start(argv[at:]).starter, ("gpus_per_node", "procs_per_node")
    has_ranks = any(_value(document, field) is not None for field in given)
    has_ranks |= any(option.name.startswith("gpus") for option in options)
    if inner is ProgramKind.LAUNCHER or (inner is ProgramKind.SHELL and has_ranks):  # that one counts the ranks
        options = [option for option in options if not option.name.startswith("ntasks")]
    elsewhere = document.data.get("backend") not in (None, "slurm")
    conversions = []
    for one in [
        sbatch_header.FieldSetting("backend", "slurm", "srun"),
        *sbatch_header.parse_header(options).settings,
    ]:
        current = None if elsewhere else _value(document, one.field)
        if one.field == "slurm.extra" and isinstance(current, list):  # of two equal options the later counts
            current[:0] = [option for option in one.value if option not in current]
            conversions.append(Conversion(one.option, one.field, one.text))
            continue
        is_size = one.field in ("nodes", "procs_per_node", "gpus_per_node")
        if one.field and not is_size and (elsewhere or _value(document, one.field) is not None):
            continue
        value: Value = one.value if isinstance(one.value, str) else list(one.value)
        if not one.field or _set_or_compare(document, "launch", one.field, value, one.option):
            conversions.append(Conversion(one.option, one.field, one.text))
    return conversions


def _set_or_compare(document: Document, key: str, field: str, value: Value, option: str) -> bool:
    """Set a field to the value in a line, unless it is set: then both must be equal. Return whether it was set here."""
    current = _value(document, field)
    place = document.locations.get(key) or document.locations.get("entrypoint") or SourceLocation(key)
    if current is None:
        document.put(field, value, place.text)
        document.locations[field] = SourceLocation(place.text, place.line)
        return True
    if (current.strip() if isinstance(current, str) else current) != value:
        text = place.text if place.has_key else f"{place.text}: {key}"
        what = f"is {quote_value(current)}, and {text} says {option}; keep one"
        document.faults.append(document.fault(field, what))
    return False


def _value(document: Document, field: str) -> Value:
    """Return the value at a dotted key, None for nothing."""
    found: Value = document.data
    for part in field.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


# The size


class _CountFiller:
    """Filler of fields from the counts of one line; `key` is the field of the line."""

    def __init__(self, document: Document, key: str, counts: LaunchCounts) -> None:
        self._document, self._key, self._counts = document, key, counts
        self._conversions: list[Conversion] = []

    def fill(self) -> list[Conversion]:
        """Fill the fields. Return the conversion of each count."""
        counts = self._counts
        if counts.nodes is not None:
            self._fill("nodes", counts.nodes, "nodes: 2 (orch run: --nodes 2)")
        each = counts.per_node or self._ranks_per_node()
        if each is None:
            if counts.default is not None and not self._has_ranks():
                self._put_ranks(counts.default)
        elif self._value("gpus_per_node") not in (None, "auto"):
            self._fill("gpus_per_node", each)
        elif self._value("procs_per_node") is not None:
            self._fill("procs_per_node", each)
        elif each.is_literal:
            self._put_ranks(each)
        elif self._value("gpus_per_node") is None:
            self._ask(each, "gpus_per_node: 8, or procs_per_node: 8 for CPU ranks (orch run: --gpus 8 or --procs 8)")
        return self._conversions

    def _fill(self, field: str, count: LaunchCount, fix: str = "") -> None:
        if not count.is_literal:
            if self._value(field) is None:
                self._ask(count, fix)
        elif count.value != "auto" and _set_or_compare(self._document, self._key, field, count.value, count.option):
            self._conversions.append(Conversion(count.option, field, count.value))

    def _ask(self, count: LaunchCount, fix: str) -> None:
        what = f"{count.option}: this number is only known on the nodes; write {fix}"
        if count.value == "cpu":
            what = (
                f"{count.option}: the cores of the nodes are not known here; write procs_per_node: 8, and leave it out"
            )
        self._document.faults.append(self._document.fault(self._key, what))

    def _ranks_per_node(self) -> LaunchCount | None:
        """Return the ranks of a node where a line counts those of all nodes."""
        every, nodes = self._counts.total, str(self._value("nodes") or 1)
        if every is None or not every.value.isdecimal() or not (nodes.isdecimal() and int(nodes)):
            return every
        count, rest = divmod(int(every.value), int(nodes))
        if count and not rest:
            return LaunchCount(str(count), every.option)
        what = f"is {nodes}, and {every.option} counts the ranks of all nodes: they cannot be divided equally"
        key = "nodes" if self._value("nodes") is not None else self._key
        self._document.faults.append(self._document.fault(key, what))
        return None

    def _put_ranks(self, count: LaunchCount) -> None:
        """Set the ranks of a node: on GPUs, or on CPUs if the line says so or this machine, which runs them, has no GPU."""
        is_here = (self._value("backend") or "local") == "local"
        if count.value == "auto" and not self._counts.is_cpu:
            field, value = "gpus_per_node", "auto"
        elif self._counts.is_cpu or (is_here and not _has_gpus()):
            field, value = "procs_per_node", "1" if count.value == "auto" else count.value
            self._document.data.pop("gpus_per_node", None)
        else:
            field, value = "gpus_per_node", count.value
            self._document.data.pop("gpus_per_node", None)
        _set_or_compare(self._document, self._key, field, value, count.option)
        self._conversions.append(Conversion(count.option, field, value))

    def _has_ranks(self) -> bool:
        return any(self._value(field) is not None for field in ("gpus_per_node", "procs_per_node"))

    def _value(self, field: str) -> Value:
        return self._document.data.get(field)


def _has_gpus() -> bool:
    if os.environ.get(CUDA, "0").split(",")[0].strip() in ("", "-1"):
        return False
    with contextlib.suppress(HostError):
        return gpus.find_nvidia_smi() is not None and bool(gpus.list_gpus())
    return False


# Accelerate's configuration


def _add_config_counts(words: Sequence[str], document: Document, folder: Path) -> LaunchCounts:
    """Return the counts of a line, completed from Accelerate's configuration: the file that it names, or that of this machine
    if the job file gives no counts either."""
    counts = launchers.read_counts(words)
    if not any("accelerate" in word for word in words):
        return counts
    match = _CONFIG_FILE.search(" ".join(words))
    named = match[1] if match else ""
    workdir = resolve_path(folder, str(document.data.get("workdir") or "."))
    path = resolve_path(workdir, named) if named else _default_config()
    if path is None or (not named and counts.is_cpu):
        return counts
    config = _read_config(path) or {}
    data = document.data

    def count(word: str, *fields: str) -> LaunchCount | None:
        value = str(config.get(word, ""))
        is_free = named or all(data.get(field) is None for field in fields)
        is_number = value.isascii() and value.isdecimal() and int(value) > 0
        return LaunchCount(value, f"{word}: {value} in {path.name}") if is_free and is_number else None

    is_cpu = str(config.get("use_cpu", "")).lower() == "true" or config.get("distributed_type") == "MULTI_CPU"
    every = None if counts.per_node else counts.total or count("num_processes", "gpus_per_node", "procs_per_node")
    nodes = counts.nodes or count("num_machines", "nodes")
    return LaunchCounts(nodes, counts.per_node, every, counts.is_cpu or is_cpu, counts.default)


def _default_config() -> Path | None:
    """Return the configuration that `accelerate config` has written on this machine, None where there is none."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    paths = [home / "accelerate" / f"default_config.{ending}" for ending in ("json", "yaml")]
    return next((path for path in reversed(paths) if path.is_file()), None)


def _read_config(path: Path) -> Mapping[str, object] | None:
    """Return a configuration's keys, None where it cannot be read: Accelerate itself says why."""
    try:
        with path.open("rb") as file:
            data = yaml.load(file.read(CONFIG_BYTES_MAX), Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return data if isinstance(data, dict) else None
