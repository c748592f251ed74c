"""A launch line as a value: which words are the program, what the launcher's options say of the job, and what is not needed.

Rules: every option that a launcher knows is in its table: it becomes a setting of the job file, or has a reason why it is
not needed. An option that is not in the table is a mistake of the user. A ValueError is the rest of a sentence that
begins with the field which holds the line.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Value: TypeAlias = "str | list[str]"
Kind: TypeAlias = Literal["script", "module", "command"]

RANKS_EACH = "ranks_per_node"
"""Key of a setting with the ranks of a node: the job file has two fields for them, one for GPUs and one for CPU ranks."""

RANKS = "ranks"
"""Key of a setting with the ranks of all nodes together."""

DEVICE = "device"
"""Key of a setting with the device of the ranks, `cpu` or `gpu`."""

CPUS_NODE = "cpus_per_node"
"""Key of a setting with the CPU cores of a node, which its ranks share."""

ALL = "auto"
"""The number of ranks on a node that has as many as it has GPUs."""

OF_NODE, OF_JOB = "{ranks_per_node}", "{nodes}"
"""Values of variables that the job's size gives."""

RENDEZVOUS = "orch makes the rendezvous, with a free port for each attempt"
NUMBERED = "orch numbers the nodes"
LOGS = "orch keeps a log of each rank: orch logs --rank 2"
ROLES = "all ranks have the role default"
STARTS = "orch starts and watches the ranks its own way"
REACHES = "orch reaches the hosts itself"
UNBOUND = "orch binds no rank to cores; a command can: numactl --cpunodebind=0 python3 train.py"
"""Why options that several launchers have are not needed."""

_LATER = re.compile(r"[$`]")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a launch line says of a field: its dotted key, or one of the keys above, the value, and the words that say so."""

    key: str
    value: Value
    option: str
    # Whether the job file may say otherwise
    yields: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """Words of a launch line that orch does not need, and why."""

    option: str
    why: str


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A launch line that was read. `kept` are the positions of the program's words in the line, its name first."""

    launcher: str
    kind: Kind
    kept: tuple[int, ...]
    settings: tuple[Setting, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    # The argument by which the launcher tells a script its local rank, such as --local_rank; empty for none
    local_rank: str = ""

    def program(self, words: Sequence[str]) -> list[str]:
        """Return the program as `entrypoint` holds it: `train.py --lr 0.1`, `-m pkg.train`, or a command's words."""
        return [*(["-m"] if self.kind == "module" else []), *(words[at] for at in self.kept)]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a launcher: its names, whether a value follows, and the field that it stands for, or why none does, or
    what to write in place of one that a job cannot have."""

    names: tuple[str, ...]
    takes: Literal["nothing", "value", "may"]
    key: str = ""
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """One option as it was written. `name` is the first of its names, `words` are those of the line."""

    name: str
    value: str
    option: Option
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The option as one would write it in a shell."""
        return (
            shlex.join(self.words)
            if not any(_LATER.search(word) for word in self.words)
            else " ".join(self.words)
        )


@dataclass(frozen=True, slots=True)
class Options:
    """All options of a launcher, by each of their names with dashes."""

    launcher: str
    known: Mapping[str, Option] = field(repr=False)
    # Whether a beginning of a name stands for it, as in argparse
    abbreviates: bool = True

    def find(self, name: str) -> Option | None:
        """Return the option of this name, None for another word."""
        plain = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
        if plain in self.known or not (self.abbreviates and plain.startswith("--")):
            return self.known.get(plain)
        meant = {host.names: host for full, host in self.known.items() if full.startswith(plain)}
        return next(iter(meant.values())) if len(meant) == 1 else None

    def unknown(self, word: str) -> ValueError:
        """Return the error of an option that the launcher does not have."""
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name.replace("_", "-"), self.known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        return ValueError(f"{self.launcher} has no option {name}{meant}")


def options(
    launcher: str,
    taken: Mapping[str, str],
    not_needed: Mapping[str, str],
    *,
    refused: Mapping[str, str] | None = None,
    own: str = "",
    abbreviates: bool = True,
) -> Options:
    """Return a launcher's options. Each is written `-t/--tee=`: its names, and `=` where a value follows, `=?` where one may.

    `taken` has the field for each, `not_needed` the options for each reason, `refused` those for each fix, `own` those that the
    launcher's reader knows.
    """
    known = {}
    rows = [(text, key, "", "") for text, key in taken.items()]
    rows += [(text, "", why, "") for why, texts in not_needed.items() for text in texts.split()]
    rows += [(text, "", "", fix) for fix, texts in (refused or {}).items() for text in texts.split()]
    rows += [(text, "", "", "") for text in own.split()]
    for text, key, why, fix in rows:
        names = tuple(text.rstrip("=?").split("/"))
        takes: Literal["nothing", "value", "may"] = (
            "may" if text.endswith("=?") else "value" if text.endswith("=") else "nothing"
        )
        known.update(dict.fromkeys(names, Option(names, takes, key, why, fix)))
    return Options(launcher, known, abbreviates)


def read(words: Sequence[str], start: int, table: Options) -> tuple[list[Given], int]:
    """Read options from position `start` on, up to the first word that is none. Return them and that word's position."""
    given: list[Given] = []
    at = start
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        if words[at] == "--":
            return given, at + 1
        one, at = read_one(words, at, table)
        given.append(one)
    return given, at


def read_one(words: Sequence[str], at: int, table: Options) -> tuple[Given, int]:
    """Read the option at a position. Return it and the position behind it. Raises ValueError for one that is not known."""
    word = words[at]
    name, equals, value = word.partition("=")
    option = table.find(name)
    if option is None and not word.startswith("--"):
        name, equals, value = word[:2], "=" if len(word) > 2 else "", word[2:].removeprefix("=")
        option = table.find(name)
        if option is not None and option.takes == "nothing" and equals:
            option = None
    if option is None:
        raise table.unknown(word)
    given, behind = Given(option.names[0], value, option, (word,)), at + 1
    if option.takes == "value" and not equals:
        if behind >= len(words):
            raise ValueError(f"{table.launcher} {word} needs a value behind it")
        given, behind = replace(given, value=words[behind], words=(word, words[behind])), behind + 1
    if option.fix:
        raise ValueError(f"{given.text}: {option.fix}")
    return given, behind


def sorted_out(given: Sequence[Given]) -> tuple[list[Setting], list[Dropped]]:
    """Return the settings that options stand for by their tables, and those not needed. The last of two equal ones counts."""
    settings = {
        option.option.key: Setting(option.option.key, option.value, option.text)
        for option in given
        if option.option.key
    }
    dropped = [Dropped(option.text, option.option.why) for option in given if option.option.why]
    return list(settings.values()), dropped


def last(given: Sequence[Given], name: str) -> Given | None:
    """Return the last of the options with this first name, None where it is not given."""
    return next((option for option in reversed(given) if option.name == name), None)


def number(option: Given, low: int = 1) -> int:
    """Return an option's whole number. Raises ValueError for another text."""
    if is_later(option.value):
        raise ValueError(f"{option.text} is not known before the job runs; write the number")
    if not re.fullmatch(r"[0-9]{1,9}", option.value) or int(option.value) < low:
        raise ValueError(f"{option.text}: must be a whole number of at least {low}")
    return int(option.value)


def counts(
    given: Sequence[Given], keys: Mapping[str, str], dropped: list[Dropped], *, between: str = ""
) -> list[Setting]:
    """Return the settings of options that count something, by the first name of each; the most of a range that `between`
    divides."""
    found = []
    for name, key in keys.items():
        one = last(given, name)
        if one is not None and is_later(one.value):
            count_later(one, dropped)
        elif one is not None:
            low, _, high = one.value.partition(between or " ")
            found.append(Setting(key, str(number(replace(one, value=high or low))), one.text))
    return found


def count_later(option: Given, dropped: list[Dropped]) -> None:
    """Note a count that Slurm's variables would give. Raises ValueError for other variables."""
    if "SLURM_" not in option.value:
        number(option)
    dropped.append(Dropped(option.text, "the job file says how many, and orch asks Slurm for them"))


def is_later(text: str) -> bool:
    """Tell whether a shell would put something else in place of a text, or of a part of it."""
    return bool(_LATER.search(text))


def kind_of(launcher: str, given: Sequence[Given], module: str) -> Kind:
    """Return what a program is, by the options `--no-python` and the one named `module`."""
    is_module, is_command = last(given, module) is not None, last(given, "--no-python") is not None
    if is_module and is_command:
        raise ValueError(f"{launcher} cannot have --module and --no-python together")
    return "module" if is_module else "command" if is_command else "script"


def program(words: Sequence[str], at: int, launcher: str) -> tuple[int, ...]:
    """Return the positions of the program's words from `at` on. Raises ValueError where there is none."""
    if at >= len(words):
        raise ValueError(f"{launcher} names no script behind its options")
    return tuple(range(at, len(words)))


FALLBACK_NAME = "job"
NAME_CHARS_MAX = 63


def as_job_name(text: str) -> str:
    """Return a text as the name of a job, which has letters, digits, dots, dashes and underscores only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:NAME_CHARS_MAX] or FALLBACK_NAME


INTERPRETER = re.compile(r"python[0-9.]*")

_RUN, _EXEC = (("run",), 0), (("exec", "run"), 1)
_WRAPPERS: dict[str, tuple[tuple[str, ...], int]] = {
    **dict.fromkeys(("uv", "poetry", "pipenv", "pdm", "hatch", "pixi", "conda", "mamba", "micromamba"), _RUN),
    **dict.fromkeys(("singularity", "apptainer"), _EXEC),
    **dict.fromkeys(("numactl", "nice", "time", "nohup", "exec", "stdbuf", "xargs"), ((), 0)),
    "nsys": (("profile",), 0),
}
"""Programs that start the program behind their options, in another environment or in another way: each with its verbs that
do so, and the number of words between such a verb and the program."""

_NAMING = ("-n", "--name", "-p", "--prefix", "-o", "--output", "--env", "-e", "--with", "--group", "--extra")
"""Options behind such a verb that a name follows."""


def starts(words: Sequence[str], at: int) -> list[int]:
    """Return the positions where a launcher may stand: at `at`, or behind a program there that starts another; none of the
    words behind the first that can only be a program."""
    wrapper = _WRAPPERS.get(words[at].rpartition("/")[2]) if at < len(words) else None
    if wrapper is None:
        return [at] if at < len(words) else []
    (verbs, between), name = wrapper, words[at].rpartition("/")[2]
    found, place, is_unclear = [at], at + 1, False
    while verbs and place < len(words) and words[place] not in verbs:
        if not words[place].startswith("-") and not words[place - 1].startswith("-"):
            return found  # such as `uv pip install`
        place += 1
    for here in range(place + bool(verbs), len(words)):
        word, before = words[here], words[here - 1]
        is_value = before.startswith("-") and "=" not in before
        if word.startswith("-") or (
            is_value and verbs and before in _NAMING and (name, before) != ("uv", "-n")
        ):
            continue
        if word.rpartition("/")[2] in _WRAPPERS:
            return found + starts(words, here)
        is_program = INTERPRETER.fullmatch(word.rpartition("/")[2]) or word.endswith(".py")
        if is_program or not (is_value or between):
            return [*found, here]
        if is_value or is_unclear:  # an option's value, or behind an option without one
            found.append(here)
        is_unclear |= is_value
        between -= not is_value
    return found
