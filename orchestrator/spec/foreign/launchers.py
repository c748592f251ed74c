"""Launchers such as torchrun, by name: which one a line starts, and its numbers of nodes and ranks. Pure.

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


class ProgramKind(enum.Enum):
    """Kind of program that a command starts."""

    LAUNCHER = "a launcher"
    SHELL = "a shell script, or a shell"
    PYTHON = "a Python program"
    RUNNER = "a Python program, by the runner of an environment"
    SBATCH = "a Slurm submission"
    REMOTE = "a command on other hosts"
    OTHER = "another program"


@dataclass(frozen=True, slots=True)
class CommandStart:
    """Program that a command starts: its kind, its position, the position after its name, and a launcher's name."""

    starter: ProgramKind
    at: int
    behind: int
    launcher: str = ""


@dataclass(frozen=True, slots=True)
class LaunchCount:
    """A count as an option gives it: `value` is a number, `auto`, or text that only a shell knows."""

    value: str
    option: str

    @property
    def is_literal(self) -> bool:
        """Whether the value is known before a shell runs the line."""
        return self.value == "auto" or self.value.isdecimal()


@dataclass(frozen=True, slots=True)
class LaunchCounts:
    """Counts of a line: nodes, ranks of each or of all, and whether the ranks are CPU ranks. `default` ranks of each hold where
    neither the line nor the job file says more."""

    nodes: LaunchCount | None = None
    per_node: LaunchCount | None = None
    total: LaunchCount | None = None
    is_cpu: bool = False
    default: LaunchCount | None = None


def find_start(argv: Sequence[str]) -> CommandStart:
    """Return the program that a command starts, after the variables set for it."""
    at = 1 if len(argv) > 1 and argv[0] == "env" else 0
    while at < len(argv) and ASSIGNMENT.fullmatch(argv[at]):
        at += 1
    return _find_start_at(argv, at)


def _find_start_at(argv: Sequence[str], at: int) -> CommandStart:
    if at >= len(argv):
        return CommandStart(ProgramKind.OTHER, at, at)
    base = _program_name(argv[at])
    for name in _LAUNCHERS:
        if (base, *argv[at + 1 : at + len(name)]) == name:
            return CommandStart(ProgramKind.LAUNCHER, at, at + len(name), base)
    if INTERPRETER.fullmatch(base):
        return _find_python_start(argv, at)
    if SHELL.fullmatch(base):
        return CommandStart(ProgramKind.SHELL, at, at + 1)
    if base in ("sbatch", "salloc") or base.endswith((".sbatch", ".slurm")):
        return CommandStart(ProgramKind.SBATCH, at, at + 1)
    if base in ("ssh", "pdsh", "clush", "parallel-ssh", "pssh"):
        return CommandStart(ProgramKind.REMOTE, at, at + 1)
    if base in _RUNNERS:
        return _find_behind_runner(argv, at, _RUNNERS[base])
    return CommandStart(ProgramKind.OTHER, at, at + 1)


def _find_python_start(argv: Sequence[str], at: int) -> CommandStart:
    module = at + 1
    while module < len(argv) and re.match(r"-[^mc-]", argv[module]):
        module += 2 if argv[module] in ("-W", "-X") else 1
    named = argv[module + 1] if module + 1 < len(argv) and argv[module] == "-m" else ""
    if named in _MODULES:
        return CommandStart(ProgramKind.LAUNCHER, at, module + 2, _MODULES[named])
    return CommandStart(ProgramKind.PYTHON, at, module)


def _find_behind_runner(argv: Sequence[str], at: int, verbs: Sequence[str]) -> CommandStart:
    """Return the first program that a runner starts."""
    has_verb = not verbs
    for here in range(at + 1, len(argv)):
        has_verb |= argv[here] in verbs
        if not has_verb or argv[here].startswith("-") or argv[here - 1] in _NAMING:
            continue
        found, after = _find_start_at(argv, here), _find_start_at(argv, here + 1)
        if found.starter is ProgramKind.PYTHON and after.starter in (ProgramKind.LAUNCHER, ProgramKind.SHELL):
            return after  # the interpreter is the value of an option: Python runs neither
        if found.starter is ProgramKind.PYTHON or argv[here].endswith(".py"):
            return CommandStart(ProgramKind.RUNNER, at, here)
        if found.starter is not ProgramKind.OTHER:
            return found
    return CommandStart(ProgramKind.OTHER, at, at + 1)


def is_launch(text: str) -> bool:
    """Return whether a command of shell text starts a launcher."""
    return any(find_start(words).starter is ProgramKind.LAUNCHER for words in split_commands(text))


def split_commands(text: str) -> list[list[str]]:
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
    return [inner for words in commands if words for inner in (words, *shell_commands(words))]


def shell_commands(argv: Sequence[str]) -> list[list[str]]:
    """Return the commands in the text that a command passes to a shell."""
    start = find_start(argv)
    texts = argv[start.at + 1 : start.at + 3] if start.starter is ProgramKind.SHELL else []
    return split_commands(texts[1]) if len(texts) == 2 and re.fullmatch("-[a-z]*c", texts[0]) else []


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
    words = [word for one in split_commands(text) if one[0] not in _BRACES for word in one]
    own = [word.partition("=")[0] for word in words if word.startswith("ORCH_") and "=" in word]
    return [word for word in words if not any(name in word for name in own)]


def join_command(argv: Sequence[str]) -> str:
    """Return words quoted for a shell; of variables before the command only the values are quoted."""
    variables = []
    for word in argv:
        if (match := ASSIGNMENT.fullmatch(word)) is None:
            break
        variables.append(f"{match[1]}={shlex.quote(match[2])}")
    return " ".join([*variables, *map(shlex.quote, argv[len(variables) :])])


def make_runnable(text: str) -> str:
    """Return a line that a shell can run: a script without a folder in its name is started by bash, not searched in PATH."""
    return f"bash {text}" if re.match(r"[\w.-]+\.(sh|bash)(\s|$)", text) else text


def find_launch_command(text: str) -> list[str]:
    """Return the launcher's command in one plain line; none for a text of several lines or launchers."""
    lines = [words for words in split_commands(text) if find_start(words).starter is ProgramKind.LAUNCHER]
    return lines[0] if len(lines) == 1 and "\n" not in text.replace("\\\n", " ").strip() else []


def read_counts(argv: Sequence[str]) -> LaunchCounts:
    """Return the counts between a launcher and its script. Of a launcher that starts another one, as srun does, only the nodes
    count: the other one starts the ranks."""
    start, result = find_start(argv), LaunchCounts()
    for word in argv[: start.at]:
        if word.startswith(f"{CUDA}=") and (gpus := [one for one in word.partition("=")[2].split(",") if one]):
            is_cpu = gpus[0] == "-1"
            result = replace(result, is_cpu=is_cpu, default=None if is_cpu else LaunchCount(str(len(gpus)), word))
    launcher, at = start.launcher, start.behind
    while at < len(argv) and not _is_program(argv[at]):
        inner = _find_start_at(argv, at)
        if inner.starter is ProgramKind.LAUNCHER:
            result = replace(result, per_node=None, total=None)
            launcher, at = inner.launcher, inner.behind
            continue
        name, equals, value = argv[at].partition("=")
        option = argv[at]
        if name.startswith("-") and not equals and at + 1 < len(argv):
            value, option = argv[at + 1], f"{name} {argv[at + 1]}"
        result = _add_count(result, _option_name(name, launcher), LaunchCount(_number(value), option), value)
        at += 1
    if launcher == "srun" and result.default is None:
        result = replace(result, is_cpu=True, default=LaunchCount("1", "srun without --ntasks"))
    if launcher == "torchrun" and result.per_node is None and result.default is None:
        result = replace(result, default=LaunchCount("1", "torchrun without --nproc-per-node"))
    return result


def find_hosts(argv: Sequence[str]) -> str:
    """Return the list of hosts that a line of mpirun names before its program; empty for none."""
    start = find_start(argv)
    at = start.behind if start.launcher in ("mpirun", "mpiexec") else len(argv)
    while at + 1 < len(argv) and not INTERPRETER.fullmatch(_program_name(argv[at])) and not _is_program(argv[at]):
        if argv[at] in ("-H", "-host", "--host"):
            return argv[at + 1]
        at += 1
    return ""


def _add_count(result: LaunchCounts, name: str, count: LaunchCount, value: str) -> LaunchCounts:
    if name in _NODES:
        return replace(result, nodes=replace(count, value=_number(value.rpartition(":")[2])))
    if name in _EACH:
        return replace(result, per_node=count)
    if name in _ALL:
        return replace(result, total=count)
    if name == "gpu-ids" and value != "all":
        return replace(result, per_node=replace(count, value=_number(f"[{value}]")))
    return replace(result, is_cpu=True) if name == "cpu" or (name, value) == ("accelerator", "cpu") else result


def _option_name(name: str, launcher: str) -> str:
    """Return an option's name without dashes before it and with dashes in it; the ranks that mpirun counts as `np`."""
    if launcher in ("mpirun", "mpiexec") and name in ("-n", "-np", "--n", "--np"):
        return "np"
    return name[2:].replace("_", "-") if name.startswith("--") else ""


def _number(value: str) -> str:
    """Return a number, or the length of a list of devices; `auto` for as many as there are GPUs."""
    if value in ("gpu", "auto", "-1"):
        return "auto"
    is_list = re.fullmatch(r"\[?[0-9]+(,[0-9]+)+\]?|\[[0-9]+\]", value)
    return str(value.count(",") + 1) if is_list else value


def _is_program(word: str) -> bool:
    """Return whether a word is a script, or an option before one."""
    return word.endswith(".py") or word in ("-m", "--module", "-c", "--", "--no-python", "--no_python")


def _program_name(word: str) -> str:
    return word.rpartition("/")[2]


FALLBACK_NAME = "job"
NAME_CHARS_MAX = 63


def as_job_name(text: str) -> str:
    """Return a text as the name of a job, which has letters, digits, dots, dashes and underscores only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:NAME_CHARS_MAX] or FALLBACK_NAME
