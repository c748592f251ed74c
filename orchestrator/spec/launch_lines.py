"""Launch lines in a job file: orch takes the launcher's place, and what the line says holds where no field says it.

Rules: a field and a line that say different things are a fault of the field, which names the line. What the command line
sets (`--set`, `--backend`) is meant for this job and wins over a line in the file.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestrator.core.host import gpus
from orchestrator.spec.launchers import accelerate, recognise, shell_text
from orchestrator.spec.launchers.launch_line import (
    ALL,
    CPUS_NODE,
    DEVICE,
    OF_JOB,
    OF_NODE,
    RANKS,
    RANKS_EACH,
    Setting,
)
from orchestrator.spec.launchers.recognise import Taken
from orchestrator.spec.value_types import seconds_of
from orchestrator.spec.yaml_document import Document, Place, Value, path_in, shown

CONFIG_BYTES_MAX = 1 << 18
SCRIPT_BYTES_MAX = 1 << 18
_PSEUDO = (RANKS, RANKS_EACH, DEVICE, CPUS_NODE)


@dataclass(frozen=True, slots=True)
class Became:
    """What became of a part of a launch line: a field with its value, or none with the reason."""

    option: str
    field: str
    text: str


def take_over(document: Document, folder: Path) -> list[Became]:
    """Put what a launch line says into a job file's fields, and its program in the line's place. Faults go into the document.

    Return what became of each option, for a reader.
    """
    for field in ("entrypoint", "command"):
        value = document.data.get(field)
        key = field
        if field == "entrypoint" and isinstance(value, dict) and list(value) == ["command"]:
            key, value = "entrypoint.command", value["command"]
        if not value:
            continue
        try:
            taken = _taken(value, as_program=key == "entrypoint")
            if taken is None:
                _refuse_script_that_launches(value, document, folder)
                continue
        except ValueError as err:
            _fail(document, key, field, str(err))
            continue
        return _Takeover(document, key, folder, taken).run()
    if isinstance(document.data.get("accelerate"), dict):
        return _Takeover(document, "accelerate", folder, Taken("accelerate", None, "")).run()
    return []


def apply(document: Document, key: str, folder: Path, taken: Taken) -> list[Became]:
    """Put a launch line that was read elsewhere into a document; `key` is the field that its program gets."""
    return _Takeover(document, key, folder, taken).run()


def _taken(value: Value, *, as_program: bool) -> Taken | None:
    if isinstance(value, str):
        return recognise.in_text(value.strip(), as_program=as_program)
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return recognise.in_words([str(word) for word in value], as_program=as_program)
    return None


def _fail(document: Document, key: str, field: str, what: str) -> None:
    document.faults.append(document.fault(key, what))
    document.data[field] = (
        {"command": "true"} if field == "entrypoint" else "true"
    )  # no second fault of the same


class _Takeover:
    """One launch line, and the document that it stands in."""

    def __init__(self, document: Document, key: str, folder: Path, taken: Taken) -> None:
        self._document, self._key, self._taken = document, key, taken
        self._folder = folder
        self._became: list[Became] = []
        self._place = document.places.get(key) or document.places.get(key.partition(".")[0]) or Place(key)

    def run(self) -> list[Became]:
        if self._taken.words is not None or self._taken.shell:
            self._put_program()
        settings = [*self._taken.settings]
        for setting in settings:
            if setting.key not in _PSEUDO and setting.value not in (OF_NODE, OF_JOB, []):
                self._set(setting)
        if any(setting.key == "accelerate.args" for setting in settings) and not self._document.data.get(
            "accelerate"
        ):
            self._put("accelerate", {})
        settings += self._of_config()
        self._set_size(settings)
        if any(setting.key == "accelerate.args" for setting in settings):
            self._tell_accelerate_of_cpus()
        for setting in settings:
            if setting.value in (OF_NODE, OF_JOB):
                text = str(self._value("nodes") or 1) if setting.value == OF_JOB else self._ranks()
                self._set(Setting(setting.key, text, setting.option))
        self._became += [Became(drop.option, "", drop.why) for drop in self._taken.dropped]
        return self._became

    def _put_program(self) -> None:
        """Put the program in the line's place. Its faults are found later, at the same place."""
        taken, field = self._taken, self._key.partition(".")[0]
        entry: Value = taken.shell
        if taken.words is not None:
            entry = list(taken.words) if self._key == "entrypoint" else recognise.shell_of(taken.words)
        if field == "entrypoint" and not isinstance(entry, list):
            entry = {"command": entry}
        self._document.data[field] = entry

    def _set(self, setting: Setting) -> None:
        """Set a field, unless the job file sets it: then both must agree."""
        key = setting.key
        there = self._value(key)
        value: Value = list(setting.value) if isinstance(setting.value, list) else setting.value
        if there is None:
            self._put(key, value)
            texts = value if key == "setup" and isinstance(value, list) else []
            self._became += [Became(str(text), key, "runs once on each node") for text in texts]
            self._became += [] if texts else [Became(setting.option, key, _shown(value))]
        elif not setting.yields and not _is_same(there, value) and not self._is_overridden(key):
            self._contradict(key, there, setting)
        else:
            self._became.append(Became(setting.option, key, _shown(there)))

    def _put(self, key: str, value: Value) -> None:
        self._document.put(key, value, self._place.text)
        self._document.places[key] = Place(self._place.text, self._place.line)

    def _value(self, key: str) -> Value:
        """Return what stands at a dotted key, None for nothing."""
        section: Value = self._document.data
        for part in key.split("."):
            section = section.get(part) if isinstance(section, dict) else None
        return section

    def _is_overridden(self, key: str) -> bool:
        place = self._document.places.get(key)
        return place is not None and not place.line and bool(self._place.line)

    def _contradict(self, key: str, there: Value, setting: Setting) -> None:
        text = self._place.text if self._place.has_key else f"{self._place.text}: {self._key}"
        what = f"is {shown(there)}, and {text} says {setting.option}; keep one"
        self._document.faults.append(self._document.fault(key, what))

    def _ranks(self) -> str:
        gpus_each, procs = self._value("gpus_per_node"), self._value("procs_per_node")
        return str(gpus_each if gpus_each is not None else procs if procs is not None else 1)

    # The size

    def _set_size(self, settings: Sequence[Setting]) -> None:
        """Set nodes before, then ranks: on GPUs where nodes have them."""
        for setting in settings:
            if setting.key == "nodes" and self._value("nodes") is None:
                self._set(setting)
        count = self._ranks_each(settings)
        if count is None:
            return
        there = {key: self._value(key) for key in ("gpus_per_node", "procs_per_node")}
        if there["gpus_per_node"] == ALL and count.yields:
            return
        said = next((key for key, value in there.items() if value not in (None, ALL)), "")
        if said:
            self._set(Setting(said, count.value, count.option, count.yields))
        else:
            self._choose_device(count, settings)
        self._set_cpus(settings)
        self._report_counts(count, settings)

    def _report_counts(self, count: Setting, settings: Sequence[Setting]) -> None:
        """Note what became of the other options that count ranks."""
        ranks, known = self._ranks(), {change.option for change in self._became}
        known |= {drop.option for drop in self._taken.dropped}
        field = "gpus_per_node" if self._value("gpus_per_node") is not None else "procs_per_node"
        for setting in settings:
            if (
                setting.key in (RANKS, RANKS_EACH)
                and setting.option not in known
                and " without " not in setting.option
            ):
                is_same = setting.key == RANKS or setting.value == ranks
                text = ranks if is_same else f"{count.option} says how many ranks a node has"
                self._became.append(Became(setting.option, field if is_same else "", text))

    def _ranks_each(self, settings: Sequence[Setting]) -> Setting | None:
        """Return the ranks of a node: what is said firmly, else the first count that gives way to the job file's."""
        nodes = str(self._value("nodes") or 1)
        each = [setting for setting in settings if setting.key == RANKS_EACH]
        for setting in settings:
            if setting.key == RANKS and nodes.isascii() and nodes.isdecimal() and int(nodes):
                count, rest = divmod(int(str(setting.value)), int(nodes))
                if rest or not count:
                    what = f"is {nodes}, and {setting.option} counts the ranks of all nodes: they cannot be divided equally"
                    key = "nodes" if self._value("nodes") is not None else self._key
                    self._document.faults.append(self._document.fault(key, what))
                    return None
                each.append(Setting(RANKS_EACH, str(count), setting.option, setting.yields))
        each.sort(key=lambda one: (one.yields, one.value == ALL))
        firm = [one for one in each if not one.yields]
        if len({one.value for one in firm}) > 1:
            what = f"says {firm[0].option} and {firm[1].option}, which are different numbers of ranks on a node; keep one"
            self._document.faults.append(self._document.fault(self._key, what))
            return None
        return each[0] if each else None

    def _choose_device(self, count: Setting, settings: Sequence[Setting]) -> None:
        device = next((setting.value for setting in settings if setting.key == DEVICE), None)
        backend = self._value("backend") or "local"
        if count.value == ALL and device != "cpu":
            self._replace("gpus_per_node", count, ALL)
        elif device == "cpu" or (backend == "local" and device is None and not _has_gpus()):
            number = "1" if count.value == ALL else str(count.value)
            self._replace("procs_per_node", count, number)
            why = "since this machine has no GPU" if device is None else ""
            why = next((f"by {setting.option}" for setting in settings if setting.key == DEVICE), why)
            what = f"{number} (CPU ranks, {why}; with GPUs: gpus_per_node: {count.value})"
            self._became[-1] = Became(count.option, "procs_per_node", what)
            if self._value("gpus_per_node") == ALL:
                self._document.data.pop("gpus_per_node")
        else:
            self._replace("gpus_per_node", count, str(count.value))

    def _replace(self, key: str, setting: Setting, value: str) -> None:
        self._put(key, value)
        self._became.append(Became(setting.option, key, value))

    def _set_cpus(self, settings: Sequence[Setting]) -> None:
        """Set the cores of a rank where a line counts those of a node."""
        for setting in settings:
            ranks = self._ranks()
            if setting.key == CPUS_NODE and ranks.isdecimal() and str(setting.value).isdecimal():
                each = max(1, int(str(setting.value)) // max(1, int(ranks)))
                self._set(Setting("slurm.cpus_per_task", str(each), setting.option))

    # Accelerate's configuration

    def _of_config(self) -> list[Setting]:
        """Return the size that Accelerate's configuration asks for, where it can be read here."""
        if not isinstance(self._value("accelerate"), dict):
            return []
        named = self._value("accelerate.config_file")
        path = (
            path_in(path_in(self._folder, str(self._value("workdir") or ".")), str(named))
            if named
            else _default_config()
        )
        written = self._value("accelerate.args") or []
        args = written.split() if isinstance(written, str) else [str(word) for word in written]
        of_args = accelerate.size_of(args)
        if path is None or (not named and "--cpu" in args):
            return of_args
        config = _read_config(path)
        chosen = {one.key for one in (*self._taken.settings, *of_args) if not one.yields}
        is_counted = not chosen.isdisjoint((RANKS, RANKS_EACH))
        in_file = accelerate.of_config(config or {}, path.name, yields=not named)
        return of_args + [
            setting
            for setting in in_file
            if setting.key not in chosen and not (is_counted and setting.key == RANKS)
        ]

    def _tell_accelerate_of_cpus(self) -> None:
        """Add the option for CPU ranks to a line of accelerate launch: without it each rank would be alone."""
        args = self._value("accelerate.args")
        others = ("--cpu", "--multi_gpu", "--use_fsdp", "--use_deepspeed", "--use_megatron_lm")
        is_free = args is None or (isinstance(args, list) and not any(str(word) in others for word in args))
        if is_free and self._value("gpus_per_node") is None and self._value("accelerate.config_file") is None:
            self._put("accelerate.args", [*(args if isinstance(args, list) else []), "--cpu"])
            self._became.append(
                Became("accelerate launch", "accelerate.args", "--cpu, since the ranks are CPU ranks")
            )


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


def _has_gpus() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return False
    with contextlib.suppress(gpus.GpuError):
        return gpus.program() is not None and bool(gpus.here())
    return False


def _is_same(there: Value, value: Value) -> bool:
    if isinstance(there, list) or isinstance(value, list):
        return there == value
    return str(there).strip() == str(value) or seconds_of(str(there)) == seconds_of(str(value)) != -1.0


def _shown(value: Value) -> str:
    return " ".join(str(word) for word in value) if isinstance(value, list) else str(value)


# Scripts that launch


def _refuse_script_that_launches(value: Value, document: Document, folder: Path) -> None:
    """Raise ValueError for a command that runs a shell script of the workdir which starts a launcher itself, whatever holds
    in its ranks: one behind a condition may be for other places than orch."""
    script = recognise.script_run_by(value)
    if not script:
        return
    path = path_in(path_in(folder, str(document.data.get("workdir") or ".")), script)
    try:
        text = path.read_text(errors="replace")[:SCRIPT_BYTES_MAX]
        commands = shell_text.parsed(text).commands
    except (OSError, ValueError):
        return
    for command in commands:
        words = [word.text for word in command.words]
        if not command.depth and recognise.is_line(words):
            number = text.count("\n", 0, command.words[0].start) + 1
            raise ValueError(
                f"runs {script}, whose line {number} would start a launcher in every rank, each with ranks of its own; give "
                f"that line as `entrypoint: {shlex.join(words)}`, or: orch init --from-command {script}"
            )
