"""An sbatch script as a job: `#SBATCH` lines, what prepares each node, variables, and the one line that starts the training."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.spec.launchers import recognise, shell_text
from orchestrator.spec.launchers.environment import of_variables
from orchestrator.spec.launchers.launch_line import (
    DEVICE,
    RANKS,
    RANKS_EACH,
    Dropped,
    Given,
    LaunchLine,
    Setting,
    is_later,
    read,
)
from orchestrator.spec.launchers.recognise import Taken
from orchestrator.spec.launchers.script_variables import ASSIGNED, SETTERS, Variables
from orchestrator.spec.launchers.srun import GPUS_EACH, SBATCH, from_options, nested, of_tasks

_PREPARES = {"module", "ml", "conda", "mamba", "micromamba", "source", ".", "eval", "ulimit", "unset", "spack", "pyenv",
             "umask", "alias", "shopt"}  # fmt: skip
_IDLE = {
    "it prints only": "echo printf date hostname nvidia-smi pwd which env printenv lscpu cat ls",
    "orch asks Slurm itself": "scontrol squeue sinfo sacct scancel",
    "it is for the batch script, which is orch's own": "set wait exit sleep trap true :",
}
_WHY_IDLE = {name: why for why, names in _IDLE.items() for name in names.split()}
_FILTERS = ["head", "tail", "grep", "egrep", "tee", "awk", "sed", "sort", "tr", "cut", "wc", "xargs", "uniq"]
_LIST = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=\((?P<words>.*)\)\s*", re.DOTALL)
# A line after which PATH may find another Python: that of the script's ranks
_CHOOSES_PYTHON = re.compile(r"\bactivate\b|\bPATH=|python|conda|mamba|pyenv|torch", re.IGNORECASE)
# A variable before the program, in shell text whose launcher is gone
_HOLDS_OPTIONS = re.compile(r"\bpython3 (\$(?:\w+|\{\w+\})) (?=-m |\S+\.py\b)")
_OF_RANKS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "NODE_RANK", "LOCAL_RANK")


@dataclass(slots=True)
class _Script:
    """What was read of a script so far."""

    settings: list[Setting] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    variables: Variables = field(default_factory=Variables)
    env: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    # Lines that start ranks, and those that start Python alone, each with its number
    launches: list[tuple[int, str]] = field(default_factory=list)
    programs: list[tuple[int, str]] = field(default_factory=list)


def taken(text: str, arguments: Sequence[str], *, on_slurm: bool) -> Taken:
    """Return what the job file says in place of a script with these arguments. `on_slurm`: it is one for sbatch.

    Raises ValueError for a script that is not one training.
    """
    script, given = _Script(variables=Variables(list(arguments))), []
    for number, line in _directives(text):
        words = shlex.split(line, comments=True)
        options, end = read(words, 0, SBATCH)
        if end < len(words):
            raise ValueError(f"line {number}: {words[end]} is no option of sbatch")
        given += options
    settings, script.dropped = from_options(given)
    script.variables.values |= _known_of_slurm(settings, given)
    for number, item in items(text):
        _take(number, item, script)
    number, line = _launch(script)
    try:
        ranks = recognise.in_text(line, as_program=True) or Taken("python", None, line)
        kept = [*(ranks.words or ()), ranks.shell, *(str(setting.value) for setting in ranks.settings)]
        script.variables.require_clear(" ".join(kept))
        if held := _HOLDS_OPTIONS.search(ranks.shell):
            raise ValueError(
                f"{held[1]} stands where options of {ranks.launcher} may stand; write out what it holds"
            )
    except ValueError as err:
        raise ValueError(f"line {number}: {err}") from err
    whole = _with_directives(settings, script.dropped, ranks)
    env = [pair for pair in script.env.items() if not recognise.names_launcher(pair[1])]
    variables, not_needed = of_variables(env)
    more = [
        *script.settings,
        *(variable for variable in variables if variable.key not in (RANKS_EACH, DEVICE)),
    ]
    if script.setup:
        more.append(Setting("setup", script.setup, "lines that prepare a node"))
    chosen = [line for line in script.setup if _CHOOSES_PYTHON.search(line)]
    if chosen and ranks.words is not None and all(setting.key != "python" for setting in ranks.settings):
        more.append(Setting("python", "python3", chosen[-1]))
    return Taken(
        ranks.launcher,
        ranks.words,
        ranks.shell,
        (*([Setting("backend", "slurm", "sbatch", yields=True)] if on_slurm else []), *whole.settings, *more),
        (*whole.dropped, *not_needed),
    )


def _directives(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            yield number, line.removeprefix("#SBATCH").strip()


def items(text: str) -> Iterator[tuple[int, str]]:
    """Yield the commands of a script, each with the number of its first line; a loop or condition is one."""
    start, held = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not held and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start if held else number
        held = f"{held}{line}\n"
        if line.endswith("\\"):
            continue
        try:
            is_open = shell_text.parsed(held).open_depth > 0
        except ValueError:
            is_open = True
        if not is_open:
            yield start, held.replace("\\\n", " ").strip()
            held = ""
    if held:
        raise ValueError(f"line {start}: a quote, loop or condition is not closed")


def _take(number: int, item: str, script: _Script) -> None:
    """Sort one command of the script."""
    commands, variables = shell_text.parsed(item).commands, script.variables
    if not commands:
        return
    words, filled = [word.text for word in commands[0].words], variables.filled(item)
    names = [command.words[0].text.rpartition("/")[2] for command in commands]
    is_one = len(commands) == 1
    if (listed := _LIST.fullmatch(item)) is not None:
        variables.note_list(listed["name"], listed["words"], is_more=bool(listed["more"]))
        script.dropped.append(Dropped(_short(item), "its words stand where the launch line names it"))
    elif is_one and _assigns(words):
        _assign(words[words[0] in SETTERS :], item, script, is_export=words[0] == "export")
    elif words == ["shift"]:
        del variables.arguments[:1]
    elif recognise.names_launcher(filled):
        script.launches.append((number, filled))
    elif any(recognise.runs_python(_words(command, variables)) and not command.depth for command in commands):
        script.programs.append((number, filled))
    elif is_one and names[0] == "cd" and len(words) == 2:
        _folder(words[1], item, script)
    elif names[0] in _WHY_IDLE and all(name in _WHY_IDLE or name in _FILTERS for name in names):
        script.dropped.append(Dropped(_short(item), _WHY_IDLE[names[0]]))
    elif (script.launches or script.programs) and names[0] not in _PREPARES:
        script.dropped.append(
            Dropped(_short(item), "it stands behind the training; run it when the job has ended")
        )
    else:
        script.setup.append(filled)
        variables.note_unclear(number, item)


def _words(command: shell_text.Command, variables: Variables) -> list[str]:
    """Return the words of a command; the first, which names a program, with its variables filled in."""
    words = [word.text for word in command.words]
    return [*variables.filled(words[0]).split(), *words[1:]]


def _assigns(words: Sequence[str]) -> bool:
    rest = words[1:] if words[0] in SETTERS else words
    is_element = any("[" in word.partition("=")[0] for word in rest)  # of a list
    return (
        bool(rest)
        and not is_element
        and all(ASSIGNED.fullmatch(word) or words[0] == "export" for word in rest)
    )


def _assign(words: Sequence[str], item: str, script: _Script, *, is_export: bool) -> None:
    """Note variables: those that are known go into `env` where they are exported, others are made on each node."""
    variables = script.variables
    for word in words:
        match = ASSIGNED.fullmatch(word)
        if match is None:
            if word in variables.values:
                script.env[word] = variables.values[word]
            continue
        name = match["name"]
        value = variables.filled(f"${{{name}}}{match['value']}" if match["more"] else match["value"])
        if not is_later(value):
            variables.note(name, value)
            if is_export or name in script.env:
                script.env[name] = value
        elif name in _OF_RANKS:
            script.dropped.append(Dropped(_short(item), f"orch gives {name} its value on every rank"))
        elif "scontrol" in value or "hostname" in value:
            script.dropped.append(Dropped(_short(item), "orch knows the nodes, and makes the rendezvous"))
        elif "$(" in value or "`" in value:
            variables.forget(name)
            script.setup.append(f"export {name}={_quoted(value)}")
        else:
            variables.note(name, value)
            is_more = name not in variables.values  # it adds to the one that the node has
            if (is_export or is_more) and not recognise.names_launcher(value):
                script.setup.append(f"export {name}={_quoted(value)}")


def _quoted(value: str) -> str:
    return '"' + value.replace('"', '\\"') + '"'


def _folder(path: str, item: str, script: _Script) -> None:
    if "SLURM_SUBMIT_DIR" in path or path in (".", "$PWD"):
        script.dropped.append(Dropped(item, "ranks start in the job's copy of workdir"))
    elif is_later(path):
        raise ValueError(f"{item}: write the folder of the code as workdir")
    else:
        script.settings.append(Setting("workdir", path, item))


def _known_of_slurm(settings: Sequence[Setting], given: Sequence[Given]) -> dict[str, str]:
    values = {setting.key: str(setting.value) for setting in settings}
    known = {"SLURM_NNODES": values.get("nodes", "1"), "SLURM_JOB_NUM_NODES": values.get("nodes", "1")}
    pairs = ((GPUS_EACH, "SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE"), (RANKS, "SLURM_NTASKS SLURM_NPROCS"),
             (RANKS_EACH, "SLURM_NTASKS_PER_NODE"), ("slurm.cpus_per_task", "SLURM_CPUS_PER_TASK"))  # fmt: skip
    for key, names in pairs:
        if key in values:
            known |= dict.fromkeys(names.split(), values[key])
    return known


def _launch(script: _Script) -> tuple[int, str]:
    """Return the line that starts the training. Raises ValueError where there is none, or more than one."""
    found = [
        launch
        for launch in script.launches
        if "python" in launch[1] or not launch[1].lstrip().startswith("srun")
    ]
    found = found or script.launches[:]
    programs = script.programs
    if not found:
        found, programs = programs, []
    script.setup += [line for number, line in programs if found and number < found[0][0]]
    if not found:
        raise ValueError(
            "no line of the script starts a training; name the line: orch init --from-command 'torchrun …'"
        )
    if len(found) > 1:
        numbers = " and ".join(str(number) for number, _ in found[:5])
        raise ValueError(
            f"lines {numbers} each start a training, and a job runs one; give orch init one of these lines"
        )
    return found[0]


def _with_directives(settings: list[Setting], dropped: list[Dropped], ranks: Taken) -> LaunchLine:
    outer = LaunchLine("sbatch", "script", (0,), tuple(settings), tuple(dropped))
    own = [setting for setting in ranks.settings if not (setting.key == DEVICE and setting.yields)]
    inner = LaunchLine(ranks.launcher, "script", (0,), tuple(own), ranks.dropped)
    if ranks.launcher not in ("srun", "python"):
        return nested(outer, inner)
    firm = {setting.key for setting in own if not setting.yields}
    sizes = {RANKS, RANKS_EACH} if firm & {RANKS, RANKS_EACH} else set()
    left = [setting for setting in settings if setting.key not in firm | sizes]
    whole = of_tasks(replace(outer, settings=tuple(left)), inner)
    kept = [setting for setting in whole.settings if setting in own or setting.key not in sizes]
    return replace(whole, settings=tuple(kept))


def _short(text: str) -> str:
    first, _, more = text.partition("\n")
    return f"{first} …" if more else first
