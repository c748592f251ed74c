"""What may a value of the job file be? The kinds of values are named at the end; what reads them stands before.

Rules: a value comes as the text that was written or, from Python, as what it is; a `Rule` returns it in its final
type or raises ValueError with a whole sentence. Nothing here reads the disk or knows another field.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from orchestrator.specfile import did_you_mean, shown

DURATION_S_MIN = 0.001
DURATION_S_MAX = 366 * 86_400.0
WHOLE_MAX = 10**15
NAME_CHARS_MAX = 63
TEXT_CHARS_MAX = 130_000  # Linux takes no argument or variable above 128 KiB

Schema: TypeAlias = dict[str, Any]
EntryKind: TypeAlias = Literal["script", "module", "command"]

# What orch must set itself, or ranks would not find each other (the torchrun contract).
OWNED_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_UNITS_S = (("d", 86_400.0), ("h", 3_600.0), ("m", 60.0), ("s", 1.0), ("ms", 0.001))
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_DURATION = re.compile("".join(f"(?:({_NUMBER}){unit})?" for unit, _ in _UNITS_S))
_SECONDS = re.compile(r"[0-9]{1,15}(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_HOST = r"(?!-)(?:[A-Za-z0-9_.:%-]|\[[0-9,-]+\])+"


class Unfit(ValueError):
    """The value is not of the rule's kind; the text, if any, is a hint that ends the sentence."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a field reads a value. `says` completes "must be …"; `show` writes a default for the docs."""

    says: str
    read: Callable[[object], Any]
    schema: Schema
    show: Callable[[Any], str] = shown

    def or_none(self) -> Rule:
        """Return the rule that also takes None, for a field that may be left empty."""
        schema = {"anyOf": [self.schema, {"type": "null"}]}
        return replace(self, read=lambda value: None if value is None else self.read(value), schema=schema)

    def checked(self, value: object) -> Any:
        """Return the value in its final type. Raises ValueError with a whole sentence."""
        try:
            return self.read(value)
        except Unfit as err:
            hint = f" ({err})" if str(err) else ""
            raise ValueError(f"must be {self.says}, not {shown(value)}{hint}") from err

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.checked)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return dict(self.schema)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a rank runs: a script or module with `args`; or a command, as shell text in `target` or words in `args`."""

    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()


def whole(low: int, high: int | None = None) -> Rule:
    """Return the rule of a whole number from `low` to `high`."""

    def read(value: object) -> int:
        number = _whole(value)
        if not low <= number <= (WHOLE_MAX if high is None else high):
            raise Unfit
        return number

    says = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    top = {} if high is None else {"maximum": high}
    return Rule(says, read, {"type": "integer", "minimum": low, **top})


def duration(low_s: float = DURATION_S_MIN, high_s: float = DURATION_S_MAX) -> Rule:
    """Return the rule of a duration in seconds, with the least and the longest it may be."""

    def read(value: object) -> float:
        seconds = _seconds(value)
        if not low_s <= seconds <= high_s:
            raise Unfit("" if seconds < low_s or high_s < DURATION_S_MAX else "a year at most")
        return seconds

    low = f" of at least {duration_text(low_s)}" if low_s > DURATION_S_MIN else "" if low_s else ", or 0"
    high = f" and at most {duration_text(high_s)}" if high_s < DURATION_S_MAX else ""
    text = {"type": "string", "pattern": f"^({_NUMBER}|{_DURATION.pattern})$"}
    number = {"type": "number", "minimum": low_s, "maximum": high_s}
    return Rule(
        f"a duration such as 90s, 10m or 1h30m{low}{high}", read, {"anyOf": [number, text]}, duration_text
    )


def choice(*words: str) -> Rule:
    """Return the rule of one of a few words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise Unfit(did_you_mean(str(value), words).removeprefix("; "))
        return value

    return Rule(f"{', '.join(words[:-1])} or {words[-1]}", read, {"enum": list(words)})


def line(says: str, pattern: str = r".+") -> Rule:
    """Return the rule of a text in one line that fits `pattern` as a whole; blanks at its ends fall off."""
    fits = re.compile(pattern)

    def read(value: object) -> str:
        text = plain_text(value).strip()
        if not text.isprintable() or not fits.fullmatch(text):
            raise Unfit
        return text

    return Rule(says, read, {"type": "string", "pattern": f"^(?:{pattern})$"})


def duration_text(seconds: float | str | None) -> str:
    """Return `1h30m` for 5400 seconds, `off` for None, and a word as it is."""
    if seconds is None or isinstance(seconds, str):
        return seconds or "off"
    left_ms = round(seconds * 1000)
    parts = []
    for unit, unit_s in _UNITS_S:
        count, left_ms = divmod(left_ms, round(unit_s * 1000))
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


def plain_text(value: object) -> str:
    """Return a scalar as text that a process can be given: no NUL, no lone surrogate. Raises Unfit."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise Unfit('write "" for an empty text' if value is None else "")
    text = str(value)
    if len(text) > TEXT_CHARS_MAX:
        raise Unfit(f"it has more than {TEXT_CHARS_MAX} characters")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise Unfit("it holds a character that no process can be given")
    return text


def _whole(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or not _WHOLE.fullmatch(value):
        raise Unfit
    digits = value.lstrip("+-")
    if len(digits) > 1 and digits.startswith("0"):
        # YAML 1.1 reads 010 as 8, YAML 1.2 as 10: the user must say which.
        raise Unfit("a leading zero may mean octal; leave it out")
    return int(value)


def _gpus(value: object) -> int | str:
    return "auto" if value == "auto" else int(_COUNT.read(value))


def _switch(value: object) -> bool:
    found = value if isinstance(value, bool) else _SWITCH.get(str(value).lower())
    if found is None:
        raise Unfit
    return found


def _seconds(value: object) -> float:
    """Read a duration to seconds. Raises Unfit for what is none, negative or not finite."""
    if isinstance(value, str):
        return _seconds_of(value.strip())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unfit
    # A whole number of Python's may be too large for a float.
    seconds = float(value) if abs(value) <= WHOLE_MAX else math.inf
    if not 0 <= seconds < math.inf:
        raise Unfit
    return seconds


def _seconds_of(text: str) -> float:
    if re.fullmatch(r"[0-9]+(:[0-9]+)+", text):
        # YAML 1.1 reads 1:30 as the number 90, people as minutes or hours.
        raise Unfit("write 1h30m or 1m30s, so that nobody has to guess")
    if _SECONDS.fullmatch(text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if not text or not found:
        raise Unfit
    pairs = zip(found.groups(), _UNITS_S, strict=True)
    return math.fsum(float(count) * unit_s for count, (_, unit_s) in pairs if count)


def _seconds_or_off(value: object) -> float | None:
    if value is False or (isinstance(value, str) and value.lower() == "off"):
        return None
    return float(_SECONDS_RULE.read(value))


def _silence(value: object) -> float | str | None:
    return "auto" if value == "auto" else _seconds_or_off(value)


def _name(value: object) -> str:
    text = plain_text(value)
    if not _NAME.fullmatch(text):
        mended = re.sub(r"[^A-Za-z0-9._-]+", "-", text[:NAME_CHARS_MAX]).strip("-._")
        raise Unfit(f"{mended} would do" if mended else "")
    return text


def _env_name(value: object) -> str:
    text = plain_text(value)
    if not _ENV_NAME.fullmatch(text):
        raise Unfit
    if text in OWNED_NAMES:
        fix = "; set rendezvous.port" if text == "MASTER_PORT" else ""
        raise ValueError(f"cannot be set: orch gives {text} its value on every rank{fix}")
    if text.startswith("ORCH_"):
        raise ValueError("cannot be set: names that start with ORCH_ are orch's own")
    return text


def _nccl_name(value: object) -> str:
    bare = plain_text(value).lower().removeprefix("nccl_")
    if not _ENV_NAME.fullmatch(bare):
        raise Unfit
    return bare


def _nccl_text(value: object) -> str:
    """Read a setting's value; NCCL reads switches as numbers, so true becomes 1."""
    text = plain_text(value)
    return str(int(_SWITCH[text.lower()])) if text.lower() in _SWITCH else text


def _shell_lines(value: object) -> tuple[str, ...]:
    texts = (
        _scalars(value) if isinstance(value, (list, tuple)) else [] if value is None else [plain_text(value)]
    )
    lines = [row for text in texts for row in text.strip("\n").split("\n")]
    return tuple(lines) if any(row.strip() for row in lines) else ()


def _glob(value: object) -> str:
    text = str(_LINE.read(value))
    if ".." in text.split("/"):
        raise ValueError('must not hold ".."; name a place below ORCH_CHECKPOINT_DIR or an absolute path')
    return text


def _resume_args(value: object) -> str:
    text = plain_text(value)
    if "{path}" not in text:
        raise Unfit("{path} stands for the checkpoint")
    _split(text)
    return text


def entry_of(value: object) -> Entry:
    """Read an `entrypoint`. Raises ValueError."""
    if isinstance(value, Entry):
        return value
    if not isinstance(value, Mapping):
        return _script_or_module(_words(value))
    if list(value) != ["command"]:
        raise Unfit("its only key may be `command`")
    return _command(value["command"])


def _command(value: object) -> Entry:
    if isinstance(value, Entry):
        return value
    if isinstance(value, (list, tuple)):
        return Entry("command", "", tuple(_words(value)))
    text = plain_text(value).strip()
    if not text:
        raise Unfit
    return Entry("command", text)


def _words(value: object) -> list[str]:
    """Split a text as a shell would, or take a list's items as they are. Raises Unfit, ValueError."""
    words = _scalars(value) if isinstance(value, (list, tuple)) else _split(plain_text(value))
    if not words or not words[0].strip():
        raise Unfit
    return words


def _scalars(items: Sequence[object]) -> list[str]:
    for number, item in enumerate(items, 1):
        if not isinstance(item, (str, int, float)):
            raise ValueError(f"item {number} must be text, not {shown(item)}")
    return [plain_text(item) for item in items]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as err:
        raise ValueError("has a quote or backslash that is not closed") from err


def _script_or_module(words: list[str]) -> Entry:
    first, rest = words[0], tuple(words[1:])
    program = first.rsplit("/", 1)[-1]
    if first == "-m":
        if not rest or not _MODULE.fullmatch(rest[0]):
            raise ValueError("-m must be followed by a module's dotted name, such as -m pkg.train")
        return Entry("module", rest[0], rest[1:])
    if first.startswith("-"):
        raise ValueError(f"must start with a script or -m, not with the option {shown(first)}")
    if re.fullmatch(r"python[0-9.]*", program):
        raise ValueError("must start with the script: leave python out, or choose one with `python:`")
    if program in _LAUNCHERS:
        raise ValueError(f"must start with the script: orch takes the place of {program}")
    if program in _SHELLS or program.endswith(".sh"):
        raise ValueError("must start with a Python script: for a shell script write `command: bash run.sh`")
    return Entry("script", first, rest)


_STRING: Schema = {"type": "string"}
_WORD: Schema = {"type": "string", "pattern": f"^{_ENV_NAME.pattern}$"}
_SCALAR: Schema = {"type": ["string", "number", "boolean"]}
_SCALARS: Schema = {"type": "array", "items": _SCALAR, "minItems": 1}
_COMMAND_MAP: Schema = {"type": "object", "properties": {"command": {"anyOf": [_STRING, _SCALARS]}}}
_COUNT = whole(1)
_SECONDS_RULE = duration()
_LINE = line("one line of text")
_OFF: Schema = {"anyOf": [_SECONDS_RULE.schema, {"const": "off"}, {"const": False}]}
_SILENCE: Schema = {"anyOf": [{"const": "auto"}, *_OFF["anyOf"]]}
_VARIABLE = "a variable name of letters, digits and underscores, no digit first"
_NAME_SAYS = f"1 to {NAME_CHARS_MAX} letters, digits, dots, dashes or underscores, a letter or digit first"
_SETTING = "the name of an NCCL setting, such as debug"
_ENTRY_SAYS = 'a script with arguments ("train.py --lr 0.1"), "-m module …", a list of words, or {command: …}'

Name: TypeAlias = Annotated[str, Rule(_NAME_SAYS, _name, {**_STRING, "pattern": f"^{_NAME.pattern}$"})]
EnvName: TypeAlias = Annotated[str, Rule(_VARIABLE, _env_name, _WORD)]
EnvText: TypeAlias = Annotated[str, Rule("text", plain_text, _SCALAR)]
NcclName: TypeAlias = Annotated[str, Rule(_SETTING, _nccl_name, _WORD)]
NcclText: TypeAlias = Annotated[str, Rule("text", _nccl_text, _SCALAR)]
Line: TypeAlias = Annotated[str, _LINE]
OptionalLine: TypeAlias = Annotated[str | None, _LINE.or_none()]
Host: TypeAlias = Annotated[str, line("a host such as gpu[01-08].lab, without a user", _HOST)]
Option: TypeAlias = Annotated[str, line("an sbatch option such as --licenses=foo", r"-.+")]
OptionalUser: TypeAlias = Annotated[str | None, line("a user name", r"[^\s:@/-][^\s:@/]*").or_none()]
OptionalInterface: TypeAlias = Annotated[str | None, line("an interface such as eth0", r"[^\s/]+").or_none()]
OptionalPort: TypeAlias = Annotated[int | None, whole(1, 65535).or_none()]
OptionalCount: TypeAlias = Annotated[int | None, _COUNT.or_none()]
OptionalGpus: TypeAlias = Annotated[
    int | Literal["auto"] | None,
    Rule(f"{_COUNT.says}, or auto", _gpus, {"anyOf": [_COUNT.schema, {"const": "auto"}]}).or_none(),
]
OptionalEntry: TypeAlias = Annotated[
    Entry | None, Rule(_ENTRY_SAYS, entry_of, {"anyOf": [_STRING, _SCALARS, _COMMAND_MAP]}).or_none()
]
OptionalCommand: TypeAlias = Annotated[
    Entry | None,
    Rule("a shell command, as a text or a list of words", _command, {"anyOf": [_STRING, _SCALARS]}).or_none(),
]
ShellLines: TypeAlias = Annotated[
    tuple[str, ...],
    Rule("shell lines, as a text or a list", _shell_lines, {"anyOf": [_STRING, {**_SCALARS, "minItems": 0}]}),
]
Glob: TypeAlias = Annotated[str, Rule("a glob pattern such as step-*.pt", _glob, _STRING)]
OptionalResumeArgs: TypeAlias = Annotated[
    str | None,
    Rule('arguments with {path} in them, such as "--resume {path}"', _resume_args, _STRING).or_none(),
]
Switch: TypeAlias = Annotated[bool, Rule("true or false", _switch, {"type": "boolean"})]
Seconds: TypeAlias = Annotated[float, _SECONDS_RULE]
Pause: TypeAlias = Annotated[float, duration(0.0)]
OptionalSeconds: TypeAlias = Annotated[float | None, _SECONDS_RULE.or_none()]
SecondsOrOff: TypeAlias = Annotated[
    float | None, Rule(f"{_SECONDS_RULE.says}, or the word off", _seconds_or_off, _OFF, duration_text)
]
_SILENCE_RULE = Rule(f"auto, {_SECONDS_RULE.says}, or the word off", _silence, _SILENCE, duration_text)
SilenceOrOff: TypeAlias = Annotated[float | Literal["auto"] | None, _SILENCE_RULE]
OptionalUrl: TypeAlias = Annotated[
    str | None, line("a URL such as https://…", r"https?://[^\s/@]\S*").or_none()
]
