"""Launchers by name: what a line starts, and the counts that a plain line gives. Pure.

Rules:
1. A launch line is run by a shell on each node, and not parsed: only the words that start it are inspected here.
2. Counts are literal numbers between a launcher and its script, in one plain line. Anything else is not a count.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
INTERPRETER = re.compile(r"python[0-9.]*")
SHELL = re.compile(r"(ba|z|da|k)?sh|.+\.(sh|bash)")
CUDA = "CUDA_VISIBLE_DEVICES"

OWNED_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Variables that orch must set itself, or ranks would not find each other (the torchrun contract)."""


_LAUNCHERS = (
    ("torchrun",), ("accelerate", "launch"), ("accelerate-launch",), ("deepspeed",), ("fabric", "run"),
    ("lightning", "run"), ("srun",), ("mpirun",), ("mpiexec",),
)  # fmt: skip
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
}
_RUNNERS = {
    **dict.fromkeys(("uv", "poetry", "pipenv", "pdm", "hatch", "pixi", "conda", "mamba", "micromamba"), ("run",)),
    **dict.fromkeys(("singularity", "apptainer"), ("exec", "run")),
    **dict.fromkeys(("numactl", "nice", "time", "nohup", "exec", "stdbuf", "xargs", "timeout"), ()),
    "nsys": ("profile",),
}  # fmt: skip
"""Programs that start the program behind their options, each with its verbs that do so."""

_NAMING = (
    "-n",
    "--name",
    "-p",
    "--prefix",
    "--env",
    "-e",
    "--with",
    "--group",
    "--extra",
    "--only-group",
    "--python",
)
"""Options of these that a name follows, which may be a launcher's."""

_BRACES = ("awk", "gawk", "mawk", "jq")
"""Programs in whose own language `{attempt}` means something."""

_RESERVED = ("if", "then", "else", "elif", "while", "until", "do", "!", "{")
_QUOTED_OR_COMMENT = re.compile(r"('[^']*'|\"(?:\\.|[^\"\\])*\")|(?:^|(?<=[\s;&|(]))#[^\n]*", re.DOTALL)
_OPERATOR = re.compile(r"\|\|?|&&?|;|<|(?:\d|&)?>>?(?:&\d|\S*)")
_SEPARATOR = re.compile(r"[;&|()<>\n]+")

_NODES = ("nnodes", "num-nodes", "num-machines")
_EACH = ("nproc-per-node", "num-gpus", "devices")
_ALL = ("num-processes", "np")


class Starter(enum.Enum):
    """Kind of program that a command starts."""

    LAUNCHER = "a launcher"
    SHELL = "a shell script, or a shell"
    PYTHON = "a Python program"
    RUNNER = "a Python program, by the runner of an environment"
    SBATCH = "a Slurm submission"
    REMOTE = "a command on other hosts"
    OTHER = "another program"


@dataclass(frozen=True, slots=True)
class Start:
    """Program that a command starts: its kind, its position, the position after its name, and a launcher's name."""

    starter: Starter
    at: int
    behind: int
    launcher: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """A count as an option gives it: `value` is a number, `auto`, or text that only a shell knows."""

    value: str
    option: str

    @property
    def is_literal(self) -> bool:
        """Whether the value is known before a shell runs the line."""
        return self.value == "auto" or self.value.isdecimal()


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a line: nodes, ranks of each or of all, and whether the ranks are CPU ranks. `default` ranks of each hold where
    neither the line nor the job file says more."""

    nodes: Count | None = None
    each: Count | None = None
    every: Count | None = None
    is_cpu: bool = False
    default: Count | None = None


def start_of(words: Sequence[str]) -> Start:
    """Return the program that a command starts, after the variables set for it."""
    at = 1 if len(words) > 1 and words[0] == "env" else 0
    while at < len(words) and ASSIGNMENT.fullmatch(words[at]):
        at += 1
    return _start(words, at)


def _start(words: Sequence[str], at: int) -> Start:
    if at >= len(words):
        return Start(Starter.OTHER, at, at)
    base = _base(words[at])
    for name in _LAUNCHERS:
        if (base, *words[at + 1 : at + len(name)]) == name:
            return Start(Starter.LAUNCHER, at, at + len(name), base)
    if INTERPRETER.fullmatch(base):
        return _python(words, at)
    if SHELL.fullmatch(base):
        return Start(Starter.SHELL, at, at + 1)
    if base in ("sbatch", "salloc") or base.endswith((".sbatch", ".slurm")):
        return Start(Starter.SBATCH, at, at + 1)
    if base in ("ssh", "pdsh", "clush", "parallel-ssh", "pssh"):
        return Start(Starter.REMOTE, at, at + 1)
    if base in _RUNNERS:
        return _run(words, at, _RUNNERS[base])
    return Start(Starter.OTHER, at, at + 1)


def _python(words: Sequence[str], at: int) -> Start:
    module = at + 1
    while module < len(words) and re.match(r"-[^mc-]", words[module]):
        module += 2 if words[module] in ("-W", "-X") else 1
    named = words[module + 1] if module + 1 < len(words) and words[module] == "-m" else ""
    if named in _MODULES:
        return Start(Starter.LAUNCHER, at, module + 2, _MODULES[named])
    return Start(Starter.PYTHON, at, module)


def _run(words: Sequence[str], at: int, verbs: Sequence[str]) -> Start:
    """Return the first program that a runner starts."""
    has_verb = not verbs
    for here in range(at + 1, len(words)):
        has_verb |= words[here] in verbs
        if not has_verb or words[here].startswith("-") or words[here - 1] in _NAMING:
            continue
        found, after = _start(words, here), _start(words, here + 1)
        if found.starter is Starter.PYTHON and after.starter in (Starter.LAUNCHER, Starter.SHELL):
            return after  # the interpreter is the value of an option: Python runs neither
        if found.starter is Starter.PYTHON or words[here].endswith(".py"):
            return Start(Starter.RUNNER, at, here)
        if found.starter is not Starter.OTHER:
            return found
    return Start(Starter.OTHER, at, at + 1)


def is_launch(text: str) -> bool:
    """Tell whether a command of shell text starts a launcher."""
    return any(start_of(words).starter is Starter.LAUNCHER for words in commands_of(text))


def commands_of(text: str) -> list[list[str]]:
    """Return the words of the commands in shell text, as far as they can be parsed without a shell; none for other text, and
    none after a here-document. The commands in the text of `bash -c` follow the command itself."""
    head = _QUOTED_OR_COMMENT.sub(lambda match: match[1] or "", text.replace("\\\n", " ").partition("<<")[0])
    lexer = shlex.shlex(head, posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    is_target = False  # of a redirection
    try:
        for word in lexer:
            if _SEPARATOR.fullmatch(word):
                is_target = bool(re.search("[<>]", word))
                commands += [] if is_target else [[]]
            elif is_target:
                is_target = False
            elif commands[-1] or word not in _RESERVED:
                commands[-1].append(word)
    except ValueError:
        return []
    return [inner for words in commands if words for inner in (words, *given_to_shell(words))]


def given_to_shell(words: Sequence[str]) -> list[list[str]]:
    """Return the commands in the text that a command passes to a shell."""
    start = start_of(words)
    texts = words[start.at + 1 : start.at + 3] if start.starter is Starter.SHELL else []
    return commands_of(texts[1]) if len(texts) == 2 and re.fullmatch("-[a-z]*c", texts[0]) else []


def first_operator(text: str) -> str:
    """Return the first word of a text that is a shell operator or a redirection; empty without one."""
    try:
        words = shlex.split(text.replace("\\\n", " "), posix=False)
    except ValueError:
        return ""
    return next((word for word in words[1:] if _OPERATOR.fullmatch(word)), "")


def words_with_placeholders(text: str) -> list[str]:
    """Return the words of shell text in which a placeholder or a variable of orch's may be meant: none that names a variable
    that the text itself sets, and none of a text that cannot be split."""
    words = [word for one in commands_of(text) if one[0] not in _BRACES for word in one]
    own = [word.partition("=")[0] for word in words if word.startswith("ORCH_") and "=" in word]
    return [word for word in words if not any(name in word for name in own)]


def joined(words: Sequence[str]) -> str:
    """Return words quoted for a shell; of variables before the command only the values are quoted."""
    variables = []
    for word in words:
        if (match := ASSIGNMENT.fullmatch(word)) is None:
            break
        variables.append(f"{match[1]}={shlex.quote(match[2])}")
    return " ".join([*variables, *map(shlex.quote, words[len(variables) :])])


def runnable(text: str) -> str:
    """Return a line that a shell can run: a script without a folder in its name is started by bash, not searched in PATH."""
    return f"bash {text}" if re.match(r"[\w.-]+\.(sh|bash)(\s|$)", text) else text


def launched_by(text: str) -> list[str]:
    """Return the launcher's command in one plain line; none for a text of several lines or launchers."""
    lines = [words for words in commands_of(text) if start_of(words).starter is Starter.LAUNCHER]
    return lines[0] if len(lines) == 1 and "\n" not in text.replace("\\\n", " ").strip() else []


def counts(words: Sequence[str]) -> Counts:
    """Return the counts between a launcher and its script. Of a launcher that starts another one, as srun does, only the nodes
    count: the other one starts the ranks."""
    start, found = start_of(words), Counts()
    for word in words[: start.at]:
        if word.startswith(f"{CUDA}=") and (
            gpus := [one for one in word.partition("=")[2].split(",") if one]
        ):
            is_cpu = gpus[0] == "-1"
            found = replace(found, is_cpu=is_cpu, default=None if is_cpu else Count(str(len(gpus)), word))
    launcher, at = start.launcher, start.behind
    while at < len(words) and not _is_program(words[at]):
        inner = _start(words, at)
        if inner.starter is Starter.LAUNCHER:
            found = replace(found, each=None, every=None)
            launcher, at = inner.launcher, inner.behind
            continue
        name, equals, value = words[at].partition("=")
        option = words[at]
        if name.startswith("-") and not equals and at + 1 < len(words):
            value, option = words[at + 1], f"{name} {words[at + 1]}"
        found = _with(found, _plain(name, launcher), Count(_number(value), option), value)
        at += 1
    if launcher == "srun" and found.default is None:
        found = replace(found, is_cpu=True, default=Count("1", "srun without --ntasks"))
    if launcher == "torchrun" and found.each is None and found.default is None:
        found = replace(found, default=Count("1", "torchrun without --nproc-per-node"))
    return found


def hosts_of(words: Sequence[str]) -> str:
    """Return the list of hosts that a line of mpirun names before its program; empty for none."""
    start = start_of(words)
    at = start.behind if start.launcher in ("mpirun", "mpiexec") else len(words)
    while at + 1 < len(words) and not INTERPRETER.fullmatch(_base(words[at])) and not _is_program(words[at]):
        if words[at] in ("-H", "-host", "--host"):
            return words[at + 1]
        at += 1
    return ""


def _with(found: Counts, name: str, count: Count, value: str) -> Counts:
    if name in _NODES:
        return replace(found, nodes=replace(count, value=_number(value.rpartition(":")[2])))
    if name in _EACH:
        return replace(found, each=count)
    if name in _ALL:
        return replace(found, every=count)
    if name == "gpu-ids" and value != "all":
        return replace(found, each=replace(count, value=_number(f"[{value}]")))
    return replace(found, is_cpu=True) if name == "cpu" or (name, value) == ("accelerator", "cpu") else found


def _plain(name: str, launcher: str) -> str:
    """Return an option's name without dashes before it and with dashes in it; the ranks that mpirun counts as `np`."""
    if launcher in ("mpirun", "mpiexec") and name in ("-n", "-np", "--n", "--np"):
        return "np"
    return name[2:].replace("_", "-") if name.startswith("--") else ""


def _number(value: str) -> str:
    """Return a number, or the length of a list of devices; `auto` for as many as there are GPUs."""
    if value in ("gpu", "auto", "-1"):
        return "auto"
    if re.fullmatch(r"\[?[0-9]+(,[0-9]+)+\]?|\[[0-9]+\]", value):
        return str(value.count(",") + 1)
    return value


def _is_program(word: str) -> bool:
    """Tell whether a word is a script, or an option before one."""
    return word.endswith(".py") or word in ("-m", "--module", "-c", "--", "--no-python", "--no_python")


def _base(word: str) -> str:
    return word.rpartition("/")[2]


FALLBACK_NAME = "job"
NAME_CHARS_MAX = 63


def as_job_name(text: str) -> str:
    """Return a text as the name of a job, which has letters, digits, dots, dashes and underscores only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:NAME_CHARS_MAX] or FALLBACK_NAME
