"""Header of an sbatch script, and options of srun, converted into fields of a job file. Pure.

Rules, those of sbatch (Slurm 22.05 to 25.11):
1. A line that begins with `#SBATCH` has options, quoted almost as in a shell. The first line that is neither empty nor a
   comment ends the header.
2. A long name may be abbreviated while it is unique. The last of two equal options counts.
3. Options of the command line come after those of the script.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core.option_table import Option
from orchestrator.core.slurm.sbatch_options import (
    EXPEDITED,
    RESERVED_OPTIONS,
    SBATCH,
    STEP_OPTIONS,
    count_gpus,
)
from orchestrator.spec.foreign.launchers import LaunchCount, as_job_name

_FIELDS = {
    "account": "slurm.account", "partition": "slurm.partition", "qos": "slurm.qos", "constraint": "slurm.constraint",
    "exclude": "slurm.exclude", "mem": "slurm.mem", "job-name": "name", "chdir": "workdir",
}  # fmt: skip
_SIZES = (
    "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "gres", "gpus", "gpus-per-node", "gpus-per-task",
)  # fmt: skip
_READ = (*_FIELDS, *_SIZES, "time", "signal", "export", "exclusive", "array", "requeue")
"""Options that become fields."""

_REFUSED = ("clusters", "nodefile", "wrap", "test-only", "help", "usage", "version")
_WHY = RESERVED_OPTIONS | STEP_OPTIONS
_SIGNALS = ("TERM", "INT", "USR1", "USR2", "HUP")
SIGNAL_S = 60
"""How long before the time limit Slurm sends a signal whose time is not given."""

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?)|(?P<clock>\d+(?::\d+){0,2})"
)


@dataclass(frozen=True, slots=True)
class FieldSetting:
    """Value that an option gives to a field of the job file, or with an empty field why the option is dropped."""

    field: str
    value: str | list[str]
    option: str

    @property
    def text(self) -> str:
        """The value in one line."""
        return self.value if isinstance(self.value, str) else " ".join(self.value)


@dataclass(slots=True)
class Header:
    """Result of reading options: settings of fields, and notes for the user."""

    settings: list[FieldSetting] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def split_script(text: str) -> tuple[list[Option], str]:
    """Return the options of a script's header, and its body. Raises ValueError for an option that sbatch does not have."""
    given: list[Option] = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.startswith("#SBATCH"):
            try:
                words = _split_words(line.removeprefix("#SBATCH"))
                options, end = SBATCH.read(words, 0)
                if end < len(words):
                    raise ValueError(f"{words[end]} is not an option of sbatch")
            except ValueError as err:
                raise ValueError(f"line {number + 1}: {err}") from err
            given += options
        elif line.strip() and not line.lstrip().startswith("#"):
            return given, "".join(lines[number:])
    return given, ""


def _split_words(line: str) -> list[str]:
    """Return the words of a line. Quotes of both kinds hold blanks, a backslash alone does not, and `#` ends the line."""
    words: list[str] = []
    word, quote, is_escaped = "", "", False
    is_word = False
    for char in f"{line} ":
        if not quote and (char.isspace() or (char == "#" and not is_escaped)):
            words += [word] if is_word else []
            word, is_word, is_escaped = "", False, False
            if char == "#":
                return words
            continue
        is_word = True
        if is_escaped or (char not in ("\\", quote) and (quote or char not in "'\"")):
            word, is_escaped = word + char, False
        elif char == "\\":
            is_escaped = True
        else:
            quote = "" if quote else char
    if quote:
        raise ValueError(f"a {quote} is not closed")
    return words


def parse_header(given: Sequence[Option], ranks: LaunchCount | None = None) -> Header:
    """Return the settings that options give to a job, whose lines count the `ranks` of a node. Raises ValueError for what a job
    cannot have."""
    result, last = Header(), {option.name: option for option in given}
    for name, option in last.items():
        if name in _REFUSED:
            raise ValueError(f"{option.text}: {_WHY[name]}")
        if name in _FIELDS:
            value = as_job_name(option.value) if name == "job-name" else option.value
            result.settings.append(FieldSetting(_FIELDS[name], value, option.text))
        elif name in _WHY and name not in _READ:
            result.settings.append(FieldSetting("", _WHY[name], option.text))
    if (array := last.get("array")) is not None:
        raise ValueError(_array_advice(array))
    if (limit := last.get("time")) is not None:
        text = duration(limit)
        result.settings.append(
            FieldSetting("time_limit", text, limit.text)
            if text
            else FieldSetting("", "Slurm takes it for no limit", limit.text)
        )
    if (alone := last.get("exclusive")) is not None:
        result.settings.append(FieldSetting("slurm.exclusive", "true", alone.text))
    if (again := last.get("requeue")) is not None:
        result.settings.append(FieldSetting("time_limit_action", "requeue", again.text))
    _add_signal(last, result)
    _add_export(last, result)
    gres = _add_size(last, result, ranks)
    passed = [one for one in given if one.name not in (*_WHY, *_SIZES) or one.text == EXPEDITED]
    if extra := [*gres, *passed]:
        values = [f"--{one.name}={one.value}" if one.value else f"--{one.name}" for one in extra]
        result.settings.append(FieldSetting("slurm.extra", values, " ".join(one.text for one in extra)))
    return result


def _array_advice(option: Option) -> str:
    """Return the advice for a job array."""
    numbers = []
    for part in option.value.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", part)
        numbers.append(f"$(seq {match[1]} {match[3] + ' ' if match[3] else ''}{match[2]})" if match else part)
    return (
        f"{option.text}: job arrays are not supported. Remove the line; this submits one job for each number, and the script "
        f"finds its number as before: for i in {' '.join(numbers)}; do orch submit job.yaml --set name=job-$i "
        "--set env.SLURM_ARRAY_TASK_ID=$i; done"
    )


def _add_signal(last: Mapping[str, Option], made: Header) -> None:
    """Add the warning before the time limit, which orch sends to the ranks themselves."""
    option = last.get("signal")
    if option is None:
        return
    match = re.fullmatch(r"(?:[RB]{1,2}:)?(?:SIG)?(\w+)(?:@(\d+))?", option.value, re.IGNORECASE)
    name = match[1].upper() if match else ""
    if name.isdecimal() and int(name) in set(signal.Signals):
        name = signal.Signals(int(name)).name.removeprefix("SIG")
    if match is None or name not in _SIGNALS:
        names = ", ".join(_SIGNALS)
        made.settings.append(
            FieldSetting("", f"orch warns ranks by TERM, or by one of {names} in checkpoint.on_preempt", option.text)
        )
        return
    made.settings.append(FieldSetting("checkpoint.on_preempt.signal", name, option.text))
    made.settings.append(FieldSetting("checkpoint.on_preempt.grace", f"{int(match[2] or SIGNAL_S)}s", option.text))


def _add_export(last: Mapping[str, Option], made: Header) -> None:
    option = last.get("export")
    if option is None:
        return
    pairs = [word.partition("=") for word in option.value.split(",") if "=" in word]
    made.settings += [FieldSetting(f"env.{name}", value, option.text) for name, _, value in pairs]
    if not pairs:
        why = "ranks get the environment of the submit, and env and secrets of the job file"
        made.settings.append(FieldSetting("", why, option.text))


def _add_size(last: Mapping[str, Option], made: Header, ranks: LaunchCount | None) -> list[Option]:
    """Add nodes and the ranks of each: one for each GPU where GPUs are asked for, else one for each task; of a single task, as
    many as its lines count. Return `--gres` where a kind of GPU or other resources are asked for."""
    given = {name: last[name] for name in _SIZES if name in last}
    nodes = _read_number(given["nodes"], given["nodes"].value.rpartition("-")[2]) if "nodes" in given else 1
    if "nodes" not in given and {"ntasks", "ntasks-per-node"} <= given.keys():  # as Slurm spreads them
        nodes = math.ceil(_read_number(given["ntasks"]) / _read_number(given["ntasks-per-node"]))
    tasks = _tasks(given, nodes)
    gpus, gres = _gpus(given, nodes, tasks)
    if "nodes" in given or nodes > 1:
        made.settings.append(FieldSetting("nodes", str(nodes), given["nodes" if "nodes" in given else "ntasks"].text))
    elif "ntasks" in given and tasks > 1:
        made.notes.append(
            f"{given['ntasks'].text} without --nodes lets Slurm choose the number of nodes, which a job file must name: nodes: 1"
        )
    sizes = " ".join(given[name].text for name in _SIZES[1:] if name in given and name != "cpus-per-task")
    count, option = gpus or tasks, sizes
    if ranks is not None and tasks == 1 and not gpus:
        count, option = int(ranks.value), ranks.option
    if gpus or option != sizes or any(name in given for name in _SIZES[1:4]):
        made.settings.append(FieldSetting("gpus_per_node" if gpus else "procs_per_node", str(count), option))
    if gpus and ranks is not None and int(ranks.value) != gpus:
        made.notes.append(f"{ranks.option} and {sizes}: orch starts one rank for each GPU; make the two equal")
    if gpus and tasks not in (1, gpus):
        made.notes.append(f"{sizes}: {tasks} tasks and {gpus} GPUs on a node; orch starts one rank for each GPU")
    if (cores := given.get("cpus-per-task")) is not None:
        each = max(1, _read_number(cores) * tasks // count)
        made.settings.append(FieldSetting("slurm.cpus_per_task", str(each), cores.text))
    return [Option("gres", gres, sizes)] if gres else []


def _tasks(given: Mapping[str, Option], nodes: int) -> int:
    """Return the tasks of a node, as far as options count them."""
    if (each := given.get("ntasks-per-node")) is not None:
        return _read_number(each)
    if (every := given.get("ntasks")) is not None:
        count, rest = divmod(_read_number(every), nodes)
        if rest or not count:
            raise ValueError(f"{every.text} cannot be divided by the {nodes} nodes")
        return count
    if (each := given.get("ntasks-per-gpu")) is not None:
        return _read_number(each) * max(1, _gpus(given, nodes, 1)[0])
    return 1


def _gpus(given: Mapping[str, Option], nodes: int, tasks: int) -> tuple[int, str]:
    """Return the GPUs of a node, and the value of `--gres` where their kind or other resources are asked for."""
    gres = given["gres"].value if "gres" in given else ""
    count, times, parts, kind = count_gpus(gres), 1, 1, ""
    for name, many, of in (("gpus", 1, nodes), ("gpus-per-task", tasks, 1), ("gpus-per-node", 1, 1)):
        if name in given:
            kind, _, number = given[name].value.rpartition(":")
            if not number.isdecimal():  # a kind alone means one
                kind, number = number, "1"
            count, times, parts = _read_number(given[name], number), many, of
    each, rest = divmod(count * times, parts)
    if rest or (count and not each):
        raise ValueError(f"{given['gpus'].text} cannot be divided by the {nodes} nodes")
    if kind:
        return each, ",".join([f"gpu:{kind}:{each}", *([gres] if gres and not count_gpus(gres) else [])])
    is_plain = gres in ("", "gpu", f"gpu:{each}")
    return each, "" if is_plain else gres if count_gpus(gres) or not each else f"gpu:{each},{gres}"


def _read_number(option: Option, value: str = "") -> int:
    text = value or option.value
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise ValueError(f"{option.text}: must be a whole number of at least 1")
    return int(text)


def duration(option: Option) -> str:
    """Return a time limit as a job file has it: `2-12` is `60h`; empty for none. Raises ValueError for another text."""
    if option.value.upper() in ("INFINITE", "UNLIMITED", "-1"):
        return ""
    match = _TIME.fullmatch(option.value)
    if match is None:
        raise ValueError(f"{option.text}: write a time such as 12:00:00 or 2-00:00:00")
    parts = [int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds")]
    if match["clock"]:
        clock = [int(part) for part in match["clock"].split(":")]
        parts = {1: [0, 0, *clock, 0], 2: [0, 0, *clock], 3: [0, *clock]}[len(clock)]
    seconds = sum(count * unit for count, unit in zip(parts, (86_400, 3600, 60, 1), strict=True))
    text = ""
    for letter, unit in (("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, unit)
        text += f"{count}{letter}" if count else ""
    return text
