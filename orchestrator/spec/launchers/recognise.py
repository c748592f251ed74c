"""Recognition of launch lines: a line's words, or shell text that holds such a line, as what the job file says without the
launcher."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from orchestrator.spec.launchers import shell_text
from orchestrator.spec.launchers.accelerate import accelerate
from orchestrator.spec.launchers.deepspeed import deepspeed
from orchestrator.spec.launchers.environment import ASSIGNMENT, is_orchs, of_variables
from orchestrator.spec.launchers.fabric import fabric
from orchestrator.spec.launchers.launch_line import INTERPRETER, Dropped, LaunchLine, Setting, program, starts
from orchestrator.spec.launchers.srun import nested, of_tasks, srun
from orchestrator.spec.launchers.torchrun import distributed_launch, torchrun

PYTHON = "python3"
"""The interpreter in shell text: the job's own comes first in PATH."""

_READERS: dict[tuple[str, ...], Callable[[Sequence[str], int], LaunchLine]] = {
    ("torchrun",): torchrun,
    ("accelerate", "launch"): accelerate,
    ("accelerate-launch",): accelerate,
    ("deepspeed",): deepspeed,
    ("fabric", "run", "model"): fabric,
    ("fabric", "run"): fabric,
    ("lightning", "run", "model"): fabric,
    ("srun",): srun,
}
_MODULES: dict[tuple[str, ...], Callable[[Sequence[str], int], LaunchLine]] = {
    ("torch.distributed.run",): torchrun,
    ("torch.distributed.launch",): distributed_launch,
    ("accelerate.commands.launch",): accelerate,
    ("accelerate.commands.accelerate_cli", "launch"): accelerate,
    ("deepspeed.launcher.runner",): deepspeed,
    ("deepspeed",): deepspeed,
}
_QUESTIONS = ("-h", "--help", "-V", "--version", "--usage")
"""Options with which a launcher says something about itself, and launches nothing."""

_SHELLS = ("bash", "sh", "zsh", "dash")
_NAMED = re.compile(
    r"(?:^|[\s;&|(/'\"`])(torchrun|accelerate[ -]launch|deepspeed|fabric\s+run|lightning\s+run|srun"
    r"|torch\.distributed\.(?:run|launch))\s"
)
_BEGINS_WITH_PYTHON = re.compile(r"(?:env\s+)?(?:[A-Za-z_]\w*=\S*\s+)*(?:\S*/)?python[0-9.]*\s")
_BEHIND = re.compile(r"(?:\s*(?:\d*(?:>>|>&|>|<)|&>>?)\s*[^\s|&;]+)*\s*(\|\||&&|\||&(?!>))")
"""Redirections, and the operator behind a command."""

_SILENT = {"-u": "lines are never buffered: logs.unbuffered"}
_AS_VARIABLE = {
    "-O": "PYTHONOPTIMIZE=1",
    "-OO": "PYTHONOPTIMIZE=2",
    "-B": "PYTHONDONTWRITEBYTECODE=1",
    "-s": "PYTHONNOUSERSITE=1",
}


@dataclass(frozen=True, slots=True)
class Taken:
    """What the job file says in place of a launch line. `words` are those of `entrypoint`, None where it takes a shell."""

    launcher: str
    words: tuple[str, ...] | None
    shell: str
    settings: tuple[Setting, ...] = ()
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A launch line among words: the variables before it, the position behind them, that of the launcher, and the line."""

    variables: tuple[tuple[str, str], ...]
    begin: int
    launcher: int
    line: LaunchLine


def in_words(words: Sequence[str], *, as_program: bool) -> Taken | None:
    """Return what a list of words becomes, None where it is no launch line. `as_program`: a bare `python train.py` is one too."""
    if _is_shell_call(words):
        return in_text(words[2], as_program=False)
    if words and _base(words[0]) == "xargs":
        _refuse_quoted(words)
    found = _line(words, as_program=as_program)
    if found is None:
        _refuse_quoted(words)
        return Taken("python", None, shlex.join(words)) if as_program and runs_python(words) else None
    line = _with_variables(found.line, found.variables)
    if line.launcher == "srun" and _is_shell_call(line.program(words)):
        return _in_shell_of_srun(line, line.program(words)[2])
    if not line.local_rank and line.kind != "command" and found.begin == found.launcher:
        return Taken(line.launcher, tuple(line.program(words)), "", line.settings, line.dropped)
    text = shlex.join(words)
    inner = _replaced(text, shell_text.parsed(text).commands[0], found, keeps_variables=False)
    return Taken(line.launcher, None, inner, line.settings, line.dropped)


def _needs_no_shell(command: shell_text.Command, words: Sequence[str]) -> bool:
    """Tell whether a shell would change only words that the launcher's place takes away, or words for another shell."""
    found = _line(words)
    if _is_shell_call(words[-3:]) or found is None:
        return _is_shell_call(words[-3:])
    return all(command.words[at].is_plain for at in (*range(found.launcher), *found.line.kept))


def _in_shell_of_srun(line: LaunchLine, text: str) -> Taken:
    taken = in_text(text, as_program=True)
    if taken is None:
        line = of_tasks(line)
        return Taken("srun", None, text, line.settings, line.dropped)
    inner = LaunchLine(taken.launcher, "script", (0,), taken.settings, taken.dropped)
    whole = of_tasks(line, inner) if taken.launcher == "python" else nested(line, inner)
    return Taken("srun", taken.words, taken.shell, whole.settings, whole.dropped)


def in_text(text: str, *, as_program: bool) -> Taken | None:
    """Return what shell text becomes, None where no launch line is in it. Raises ValueError for one that cannot be seen
    through."""
    if not _NAMED.search(f"{text} ") and not (as_program and _starts_python(text)):
        return None
    shell = shell_text.parsed(text)
    commands = [one for one in shell.commands if one.words]
    for inner in shell.inner:
        if _holds_line(inner):
            raise ValueError(
                "starts a launcher within $( ), where orch cannot take its place; write it as a line of its own"
            )
    words = [word.text for word in commands[0].words] if len(commands) == 1 else []
    if shell.is_plain or (words and not shell.has_operators and _needs_no_shell(commands[0], words)):
        return in_words(words, as_program=as_program)
    lines = [(one, found) for one in commands if (found := _line([word.text for word in one.words]))]
    _refuse_hidden(commands, lines)
    if not lines:
        if not as_program or not _starts_python(text):
            return None
        fails = _fails(text, commands[0]) if commands else ""
        return Taken("python", None, f"{fails}{text}")
    command, found = lines[0]
    line = _with_variables(found.line, [pair for pair in found.variables if is_orchs(pair[0])])
    return Taken(line.launcher, None, _replaced(text, command, found), line.settings, line.dropped)


def shell_of(words: Sequence[str]) -> str:
    """Return the words of `entrypoint` as a shell runs them."""
    return shlex.join([PYTHON, *words])


def names_launcher(text: str) -> bool:
    """Tell whether a command of a script's text starts a launcher."""
    return bool(_NAMED.search(f"{text} ")) and any(
        is_line([word.text for word in command.words]) for command in shell_text.parsed(text).commands
    )


def runs_python(words: Sequence[str]) -> bool:
    """Tell whether words run a script or module, also behind variables or a program such as `uv run`."""
    at = 1 if words[:1] == ["env"] else 0
    while at < len(words) and ASSIGNMENT.fullmatch(words[at]):
        at += 1
    return any(
        INTERPRETER.fullmatch(_base(words[start])) or (start > at and words[start].endswith(".py"))
        for start in starts(words, at)
    )


def _starts_python(text: str) -> bool:
    """Tell whether the first command of shell text runs a script or module."""
    if _BEGINS_WITH_PYTHON.match(text):
        return True
    try:
        commands = shell_text.parsed(text).commands
    except ValueError:
        return False
    return bool(commands) and not commands[0].depth and runs_python([word.text for word in commands[0].words])


def is_line(words: Sequence[str]) -> bool:
    """Tell whether words are a launch line, right or wrong."""
    return _line(words, checks=False) is not None


def script_run_by(value: object) -> str:
    """Return the shell script that a command runs, as text or list of words; empty for none that can be seen."""
    commands = [[str(word) for word in value]] if isinstance(value, list) else []
    if isinstance(value, str):
        try:
            commands = [
                [word.text for word in command.words] for command in shell_text.parsed(value).commands
            ]
        except ValueError:
            return ""
    for words in commands:
        is_shell = _base(words[0]) in (*_SHELLS, "source", ".", "exec") if words else False
        first = next((word for word in words[is_shell:] if not word.startswith("-")), "")
        if first.endswith((".sh", ".bash")):
            return first
    return ""


def _line(words: Sequence[str], *, as_program: bool = False, checks: bool = True) -> Found | None:
    """Return the launch line in these words, None for other words."""
    before: list[tuple[str, str]] = []
    at = 1 if len(words) > 1 and words[0] == "env" and ASSIGNMENT.fullmatch(words[1]) else 0
    while at < len(words) and (match := ASSIGNMENT.fullmatch(words[at])):
        before.append((match[1], match[2]))
        at += 1
    for start in starts(words, at):
        if (reader := _reader(words, start)) is not None:
            read, options_at = reader
            if words[options_at : options_at + 1] and words[options_at] in _QUESTIONS:
                return None
            line = _through(words, read(words, options_at)) if checks else LaunchLine("", "script", (start,))
            return Found(tuple(before), at, start, line)
    if as_program and at < len(words) and INTERPRETER.fullmatch(_base(words[at])):
        return Found(tuple(before), at, at, _python(words, at))
    return None


def _reader(words: Sequence[str], at: int) -> tuple[Callable[[Sequence[str], int], LaunchLine], int] | None:
    """Return the reader of the launcher at a position, and where its options begin."""
    named = [_base(words[at]), *words[at + 1 : at + 3]]
    for name, read in _READERS.items():
        if tuple(named[: len(name)]) == name:
            return read, at + len(name)
    if not INTERPRETER.fullmatch(named[0]):
        return None
    module = _behind_options(words, at + 1)
    if tuple(words[module : module + 1]) != ("-m",):
        return None
    rest = tuple(words[module + 1 : module + 3])
    for name, read in _MODULES.items():
        if rest[: len(name)] == name:
            return read, module + 1 + len(name)
    return None


def _behind_options(words: Sequence[str], at: int) -> int:
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 2 if words[at] in ("-W", "-X") else 1
    return at


def _through(words: Sequence[str], line: LaunchLine) -> LaunchLine:
    if line.launcher != "srun":
        return line
    offset = line.kept[0]
    if _is_shell_call(words[offset:]):
        return line
    found = _line(list(words[offset:]), as_program=True)
    if found is None:
        return of_tasks(line)
    inner = replace(found.line, kept=tuple(at + offset for at in found.line.kept))
    if inner.launcher == "python":
        inner = replace(of_tasks(line, inner), launcher="srun")
    else:
        inner = nested(line, inner)
    return _with_variables(inner, found.variables)


def _with_variables(line: LaunchLine, variables: Sequence[tuple[str, str]]) -> LaunchLine:
    settings, dropped = of_variables(variables)
    return replace(line, settings=(*line.settings, *settings), dropped=(*line.dropped, *dropped))


def _python(words: Sequence[str], at: int) -> LaunchLine:
    """Return the line of an interpreter, whose ranks the job file counts."""
    settings, dropped, end = [], [], _behind_options(words, at + 1)
    if words[at] not in ("python", "python3"):
        settings.append(Setting("python", words[at], words[at]))
    for option in words[at + 1 : end]:
        if option in _AS_VARIABLE:
            name, _, value = _AS_VARIABLE[option].partition("=")
            settings.append(Setting(f"env.{name}", value, option))
        elif option in _SILENT:
            dropped.append(Dropped(option, _SILENT[option]))
        else:
            raise ValueError(f"python {option} cannot be taken over; write the line as command")
    if tuple(words[end : end + 1]) in (("-c",), ("-",)):
        raise ValueError(f"python {words[end]} is not a script; write the line as command")
    is_module = end < len(words) and words[end] == "-m"
    kept = program(words, end + is_module, "python")
    return LaunchLine("python", "module" if is_module else "script", kept, tuple(settings), tuple(dropped))


def _is_shell_call(words: Sequence[str]) -> bool:
    return len(words) == 3 and _base(words[0]) in _SHELLS and words[1] in ("-c", "-lc")


def _holds_line(text: str) -> bool:
    try:
        return names_launcher(text)
    except ValueError:
        return True


def _refuse_hidden(
    commands: Sequence[shell_text.Command], lines: Sequence[tuple[shell_text.Command, Found]]
) -> None:
    """Raise ValueError for a launch line that shell text holds where orch cannot take the launcher's place."""
    for command in commands:
        _refuse_quoted([word.text for word in command.words])
    if len(lines) > 1:
        raise ValueError("starts launchers more than once, and a job runs one program; make a job of each")
    if lines and lines[0][0].depth:
        raise ValueError(
            "starts a launcher in a loop, condition, function or subshell, where orch cannot take its place; "
            "write its line alone as entrypoint"
        )


def _refuse_quoted(words: Sequence[str]) -> None:
    """Raise ValueError for a command that gives a launch line as text to a shell."""
    name = _base(words[0]) if words else ""
    texts = words[1:] if name in ("eval", "parallel") else []
    if name in _SHELLS:
        texts = [after for word, after in pairwise(words) if re.fullmatch("-[a-z]*c", word)]
    is_fed = name == "xargs" and _line(words, checks=False) is not None
    if is_fed or any(_holds_line(word) for word in texts):
        raise ValueError(
            f"starts a launcher through {name}; write its line without {name} and quotes around it"
        )
    if any(_is_shell_call(words[at : at + 3]) and _holds_line(words[at + 2]) for at in range(1, len(words))):
        raise ValueError(
            "starts a launcher within quotes; write its line without a shell and quotes around it"
        )


def _replaced(text: str, command: shell_text.Command, found: Found, *, keeps_variables: bool = True) -> str:
    """Return shell text with the launcher's words replaced by the interpreter. Variables before it that are orch's go, or all
    of them."""
    words, line = command.words, found.line
    names = [word.text.partition("=")[0] for word in words[: found.begin]]
    gone = {at for at, name in enumerate(names) if not keeps_variables or is_orchs(name)}
    gone |= set(range(found.launcher, len(words))) - set(line.kept)
    python = "" if line.kind == "command" else f"{PYTHON} -m " if line.kind == "module" else f"{PYTHON} "
    pieces, done = [text[: words[0].start]], words[0].start
    for at, word in enumerate(words):
        between = text[done : word.start]
        pieces.append(between if between.strip(" \t\\\n") else between if at - 1 not in gone else "")
        raw = text[word.start : word.end]
        if at == line.kept[0]:
            raw = f'{python}{raw} {line.local_rank}="$LOCAL_RANK"' if line.local_rank else f"{python}{raw}"
        pieces.append("" if at in gone else raw)
        done = word.end
    inner = "".join(pieces)
    return f"{_fails(text, command)}{inner}{text[words[-1].end :]}".strip()


def _fails(text: str, command: shell_text.Command) -> str:
    """Return what stands before shell text so that a rank that fails is seen, whatever its output is piped through. Raises
    ValueError for a program in the background."""
    rest = text[command.words[-1].end :]
    behind = _BEHIND.match(rest)
    if behind is not None and behind[1] == "&" and "wait" not in rest.split():
        raise ValueError("starts its program in the background, and would end at once; leave the & out")
    return "set -o pipefail; " if behind is not None and behind[1] == "|" else ""


def _base(word: str) -> str:
    return word.rpartition("/")[2]
