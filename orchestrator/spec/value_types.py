"""Types of values in a job file: pydantic's own, and parsers for types that pydantic lacks.

Rules: a value comes as the text that was written. A ValueError is the rest of a sentence that begins with the field.
Nothing here reads the disk or knows another field.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, WithJsonSchema

from orchestrator.core import placeholders
from orchestrator.core.jobdir.layout import CODE_PREFIX
from orchestrator.spec.foreign import launchers
from orchestrator.spec.foreign.launchers import OWNED_NAMES
from orchestrator.spec.yaml_document import WrongValue, quote_value

DURATION_S_MIN = 0.001
DURATION_S_MAX = 366 * 86_400.0
WHOLE_MAX = 10**15
GPUS_PER_NODE_MAX = 1024
"""Most GPUs of a node."""
GRACE_S_MAX = 12 * 3600.0  # sbatch takes a --signal at most 65535 s before the limit

_NO_SCRIPTS = {
    r"-.*": "options must follow the script, only -m may come first",
    r"horovodrun": "orch takes the place of {}; write what it starts, and nodes and gpus_per_node",
    r"accelerate|fabric|lightning": "only what starts a script is read, such as accelerate launch train.py",
}
_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
DURATION = f"^(?:{_NUMBER}|{''.join(f'(?:{_NUMBER}{unit})?' for unit in _UNITS_S)})$"
LINE = r"^\S(?:[^\x00-\x1f\x7f]*\S)?$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
HOST = r"^(?:[A-Za-z0-9_.:%]|\[[0-9,-]+\])(?:[A-Za-z0-9_.:%-]|\[[0-9,-]+\])*$"
USER = r"^[^\s:@/-][^\s:@/]*$"
INTERFACE = r"^[^\s/]+$"
URL = r"^https?://[^\s/@]\S*$"
SIZE = r"^([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([MGT])(i?)B?$"
OPTION = r"^-[^\x00-\x1f\x7f]*\S$"

PATTERNS = {
    DURATION: "a duration such as 90s, 10m or 1h30m",
    LINE: "one line of text",
    NAME: "1 to 63 letters, digits, dots, dashes or underscores, a letter or digit first",
    VARIABLE: "a name of letters, digits and underscores, no digit first",
    HOST: "a host such as gpu[01-08].lab, without a user",
    USER: "a user name",
    INTERFACE: "an interface such as eth0",
    URL: "a URL such as https://…",
    SIZE: "a size such as 64G, 512MB or 64GiB",
    OPTION: "an sbatch option such as --licenses=foo",
}
"""Descriptions of the patterns, in faults and in the reference."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Program of a rank: a script or module with `args`; or a command, as shell text in `target` or words in `args`. Or the
    shell text that each node runs once."""

    kind: Literal["script", "module", "command", "launch"]
    target: str
    args: tuple[str, ...] = ()

    @property
    def is_python(self) -> bool:
        """Return whether it is a Python program that orch knows, and no shell text or other command."""
        return self.kind in ("script", "module")


# Sections and fields


class Section(BaseModel):
    """A section of the spec."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _empty_is_unwritten(cls, data: object) -> object:
        """Treat an empty section, list or map as not written; for a number that would be a guess."""
        if not isinstance(data, Mapping):
            return data
        empty = [name for name, info in cls.model_fields.items() if info.default in (None, (), {})]
        return {name: value for name, value in data.items() if value is not None or name not in empty}

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _is_decimal(cls, value: object, info: ValidationInfo) -> object:
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, str) and re.match(r"[+-]?0[0-9]", value) and int in (kind, *get_args(kind)):
            # YAML 1.1 reads 010 as 8, YAML 1.2 as 10: the user must say which.
            raise WrongValue("must be a whole number without a leading zero, which may mean octal")
        return value


def described(default: object, text: str, **limits: Any) -> Any:
    """Return a field's default, description and limits; the default is read like a written value."""
    return Field(default=default, description=text, **limits)


def whole_number(default: int | None, text: str, low: int = 1, high: int = WHOLE_MAX) -> Any:
    """Return the same as `described` for a whole number with its limits."""
    return described(default, text, ge=low, le=high)


def check_webhook_url(url: str) -> str:
    """Return a webhook's address. Raises ValueError, without the address in it, for one that cannot be reached."""
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ValueError("has no host, or a port that is not a number")
    if "@" in parts.netloc:
        raise ValueError(
            "contains a user or password, which orch does not send; use a command: "
            'notify.command: curl -u "$HOOK" -d @- URL, with HOOK in secrets'
        )
    return url


# Durations


def duration(low_s: float = DURATION_S_MIN, high_s: float = DURATION_S_MAX, choices: Any = None) -> BeforeValidator:
    """Return the reader of a duration to seconds; a Literal of words is accepted too, and `off` becomes None."""
    number, text = Annotated[float, Field(ge=low_s, le=high_s)], Annotated[str, Field(pattern=DURATION)]
    instead = [word for word in get_args(choices) if isinstance(word, str)]
    span = f" from {duration_text(low_s)} to {duration_text(high_s)}"
    is_bounded = (low_s, high_s) != (DURATION_S_MIN, DURATION_S_MAX)
    says = ", or ".join([PATTERNS[DURATION] + span * is_bounded, *instead])

    def read(value: object) -> float | str | None:
        if isinstance(value, str) and value.lower() in instead:
            return None if value.lower() == "off" else value.lower()
        seconds = parse_seconds(str(value))
        if not low_s <= seconds <= high_s:
            raise WrongValue(f"must be {says}")
        return seconds

    schema: Any = number | text if choices is None else number | text | choices
    return BeforeValidator(read, json_schema_input_type=schema)


def parse_seconds(text: str) -> float:
    """Return a duration's seconds, -1 for another text."""
    try:
        return float(text)
    except ValueError:
        pairs = re.findall(rf"({_NUMBER})(ms|[dhms])", text) if re.match(DURATION, text) else []
        return sum(float(number) * _UNITS_S[unit] for number, unit in pairs) if pairs else -1.0


def duration_text(seconds: float) -> str:
    """Return `1h30m` for 5400 seconds."""
    left_ms = round(seconds * 1000)
    parts = []
    for unit, unit_s in _UNITS_S.items():
        count, left_ms = divmod(left_ms, round(unit_s * 1000))
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


# Numbers, names and texts


def _read_size(value: object) -> int:
    match = re.match(SIZE, str(value))
    if match is None:
        raise WrongValue(f"must be {PATTERNS[SIZE]}")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** (2 + "MGT".index(match[2])))


def _count_or_auto(value: object) -> object:
    # Pydantic would find one fault for each branch of the union.
    if value == "auto" or (re.fullmatch(r"[1-9][0-9]{0,8}", str(value)) and int(str(value)) <= GPUS_PER_NODE_MAX):
        return value
    raise WrongValue(f"must be a whole number from 1 to {GPUS_PER_NODE_MAX}, or auto")


def _check_env_name(name: str) -> str:
    if name in OWNED_NAMES:
        fix = "; set rendezvous.port" if name == "MASTER_PORT" else ""
        raise ValueError(f"cannot be set: orch gives {name} its value on every rank{fix}")
    if name.startswith("ORCH_"):
        raise ValueError("cannot be set: names that start with ORCH_ are orch's own")
    return name


def _nccl_settings(value: object) -> object:
    """Remove the prefix of NCCL's names. NCCL reads switches as numbers, so true becomes 1."""
    if not isinstance(value, Mapping):
        return value
    switches = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}
    bare = {
        str(name).lower().removeprefix("nccl_"): switches.get(str(text).lower(), text) for name, text in value.items()
    }
    if len(bare) < len(value):
        raise ValueError("names one setting twice, in two spellings")
    return bare


_CHECKPOINT_DIR = re.compile(r"^(\{checkpoint_dir\}|\$ORCH_CHECKPOINT_DIR|\$\{ORCH_CHECKPOINT_DIR\})/+(?=.)")


def _checkpoint_glob(written: str) -> str:
    glob = _CHECKPOINT_DIR.sub("", _check_placeholders(written))
    known = placeholders.find_names(glob.removeprefix(CODE_PREFIX)) & {
        *placeholders.NAMES,
        *placeholders.VARIABLES,
    }
    if known or glob == CODE_PREFIX:
        raise WrongValue(
            f"must begin with {CODE_PREFIX} for files where the ranks start, or be relative to ORCH_CHECKPOINT_DIR, "
            "or absolute"
        )
    if ".." in glob.split("/"):
        raise ValueError('must not contain ".."; name a place below ORCH_CHECKPOINT_DIR or an absolute path')
    return glob


def _resume_args(text: str) -> str:
    if not _split_words(text):
        raise WrongValue('must be arguments, such as "--resume {path}" or --auto-resume')
    return _check_placeholders(text, (placeholders.PATH,))


def _check_placeholders(text: str, extra_names: tuple[str, ...] = ()) -> str:
    if fault := placeholders.find_misspelled(text, extra_names):
        raise ValueError(fault)
    return text


def _shell_lines(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        return value
    lines = [line for text in texts for line in text.strip("\n").split("\n")]
    return lines if any(line.strip() for line in lines) else []


# Entries


def _read_entry(value: object) -> Entry:
    if isinstance(value, str) and (operator := launchers.first_operator(value)):
        raise ValueError(
            f"contains {operator}, which only a shell reads: write `command: python3 {value.strip()}`, or quote it"
        )
    if not isinstance(value, Mapping):
        return _program_entry(
            _read_words(value, 'a script with arguments ("train.py --lr 0.1"), "-m module …", or a list of words')
        )
    if list(value) != ["command"]:
        raise WrongValue("must be a text, a list of words, or a map whose only key is `command`")
    return _command_entry(value["command"])


def _rank_entry(entry: Entry) -> Entry:
    """Check the placeholders in what a rank runs. Raises ValueError."""
    if entry.kind == "command" and not entry.args:
        faults = map(placeholders.find_misplaced, launchers.words_with_placeholders(entry.target))
    else:
        faults = map(placeholders.find_misspelled, (entry.target, *entry.args))
    if fault := next(filter(None, faults), ""):
        raise ValueError(fault)
    return entry


def _command_entry(value: object) -> Entry:
    if isinstance(value, str) and value.strip():
        return Entry("command", value.strip())
    return Entry("command", "", tuple(_read_words(value, "a shell command, as a text or a list of words")))


def _launch_entry(value: object) -> Entry:
    lines = _shell_lines(value)
    if not isinstance(lines, list) or not lines or not all(isinstance(line, str) for line in lines):
        raise WrongValue("must be a shell line such as `bash train.sh`, or the lines of a script")
    return Entry("launch", "\n".join(lines))


def _read_words(value: object, says: str) -> list[str]:
    """Split a text as a shell would, or take a list's words as they are. Raises ValueError."""
    words = _split_words(value) if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise WrongValue(f"must be {says}")
    if not words or not words[0].strip():
        raise WrongValue(f"must be {says}")
    return list(words)


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as err:
        raise ValueError("has a quote or backslash that is not closed") from err


def _program_entry(words: list[str]) -> Entry:
    first, rest = words[0], tuple(words[1:])
    name = first.rsplit("/", 1)[-1]
    if first == "-m":
        if not rest or not all(part.isidentifier() for part in rest[0].split(".")):
            raise ValueError("-m must be followed by a module's dotted name, such as -m pkg.train")
        if rest[0].endswith(".py"):
            raise ValueError(f"-m takes a module's name: write -m {rest[0][:-3]}, or {rest[0]} without -m")
        return Entry("module", rest[0], rest[1:])
    if first.startswith("../"):
        raise ValueError("lies outside workdir, and only workdir is copied; set workdir to a folder above it")
    for pattern, hint in _NO_SCRIPTS.items():
        if re.fullmatch(pattern, name):
            raise ValueError(f"starts with {quote_value(first)}, not with a Python script: {hint.format(name)}")
    return Entry("script", first, rest)


def _as_list(value: object) -> object:
    """Take one text as a list of one."""
    return [value] if isinstance(value, str) else value


def _host_list(value: object) -> object:
    """Split `a,b gpu[1,3-5]` at commas and blanks outside of brackets."""
    return host_texts(value) if isinstance(value, str) else value


def host_texts(text: str) -> list[str]:
    """Return the texts of a list of hosts, cut at commas and blanks outside of brackets."""
    return re.findall(r"(?:\[[^\]\s]*\]?|[^,\s\[])+", text)


def _bare_signal(value: object) -> object:
    return value.removeprefix("SIG") if isinstance(value, str) else value


# The kinds

Backend: TypeAlias = Literal["local", "ssh", "slurm"]
Hang: TypeAlias = Literal["restart", "notify", "fail"]
Desync: TypeAlias = Literal["fail", "notify"]
NotFinite: TypeAlias = Literal["notify", "rollback", "fail"]
AsyncSaves: TypeAlias = Literal["off", "dcp"]
HostKeys: TypeAlias = Literal["strict", "accept-new"]
Start: TypeAlias = Literal["auto", "fresh"]
LimitAction: TypeAlias = Literal["fail", "requeue"]
Occasion: TypeAlias = Literal[
    "suspect", "hang", "notice", "withdrawn", "verdict", "restart", "failed", "succeeded", "cancelled"
]
Signal: TypeAlias = Annotated[Literal["TERM", "INT", "USR1", "USR2", "HUP"], BeforeValidator(_bare_signal)]
# YAML 1.1 reads `off` as false, and in `[train.py, --n, 3]` there is a number: the JSON Schema accepts what an editor sees.
Scalar: TypeAlias = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
EnvText: TypeAlias = Annotated[Scalar, AfterValidator(_check_placeholders)]
Gpus: TypeAlias = Annotated[
    Annotated[int, Field(ge=1, le=GPUS_PER_NODE_MAX)] | Literal["auto"], BeforeValidator(_count_or_auto)
]
Seconds: TypeAlias = Annotated[float, duration()]
Pause: TypeAlias = Annotated[float, duration(0.0)]
Heartbeat: TypeAlias = Annotated[float, duration(0.1, 60.0)]
NodeSilence: TypeAlias = Annotated[float | Literal["auto"], duration(5.0, choices=Literal["auto"])]
Size: TypeAlias = Annotated[
    int, BeforeValidator(_read_size, json_schema_input_type=Annotated[str, Field(pattern=SIZE)])
]
Grace: TypeAlias = Annotated[float, duration(0.0, GRACE_S_MAX)]
SecondsOrOff: TypeAlias = Annotated[float | None, duration(choices=Literal["off", False])]
SilenceOrOff: TypeAlias = Annotated[float | Literal["auto"] | None, duration(choices=Literal["auto", "off", False])]
Line: TypeAlias = Annotated[str, Field(pattern=LINE)]
Glob: TypeAlias = Annotated[Line, AfterValidator(_checkpoint_glob)]
ResumeArgs: TypeAlias = Annotated[str, AfterValidator(_resume_args)]
EnvName: TypeAlias = Annotated[str, Field(pattern=VARIABLE), AfterValidator(_check_env_name)]
Nccl: TypeAlias = Annotated[dict[Annotated[str, Field(pattern=VARIABLE)], Scalar], BeforeValidator(_nccl_settings)]
_TEXT_OR_LIST: Any = str | list[Scalar]
ShellLines: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_shell_lines, json_schema_input_type=_TEXT_OR_LIST)]
Command: TypeAlias = Annotated[Entry, BeforeValidator(_command_entry, json_schema_input_type=_TEXT_OR_LIST)]
RankCommand: TypeAlias = Annotated[Command, AfterValidator(_rank_entry)]
LaunchScript: TypeAlias = Annotated[Entry, BeforeValidator(_launch_entry, json_schema_input_type=_TEXT_OR_LIST)]
_ENTRY: Any = _TEXT_OR_LIST | dict[Literal["command"], _TEXT_OR_LIST]
EntryPoint: TypeAlias = Annotated[
    Entry, BeforeValidator(_read_entry, json_schema_input_type=_ENTRY), AfterValidator(_rank_entry)
]
_LISTED = BeforeValidator(_as_list)
Lines: TypeAlias = Annotated[tuple[Line, ...], _LISTED]
Hosts: TypeAlias = Annotated[tuple[Annotated[str, Field(pattern=HOST)], ...], BeforeValidator(_host_list)]
Options: TypeAlias = Annotated[tuple[Annotated[str, Field(pattern=OPTION)], ...], _LISTED]
Secrets: TypeAlias = Annotated[tuple[EnvName, ...], _LISTED]
Occasions: TypeAlias = Annotated[tuple[Occasion, ...], _LISTED]
ExitCodes: TypeAlias = Annotated[tuple[Annotated[int, Field(ge=1, le=255)], ...], _LISTED]
