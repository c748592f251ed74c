"""Conversion of a launch line or an sbatch script into a job file, for `orch init --from-command`.

Rules: a line stays as it is typed. The header of an sbatch script becomes fields, its body, unchanged, `launch`. In a
body, and in the shell scripts that it names, only commands that start launchers are read, with their counts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import UserError
from orchestrator.core.option_table import Option
from orchestrator.core.slurm.sbatch_options import SBATCH
from orchestrator.spec import job_writer, launch_lines, run_line
from orchestrator.spec.foreign import launchers, sbatch_header
from orchestrator.spec.foreign.launchers import Count, Starter
from orchestrator.spec.foreign.sbatch_header import Header
from orchestrator.spec.launch_lines import Became
from orchestrator.spec.yaml_document import Document, Place, SpecError, Value, escaped, path_in, read

_ORDER = (
    "name", "backend", "nodes", "gpus_per_node", "procs_per_node", "workdir", "launch", "entrypoint", "python",
)  # fmt: skip
_ONCE = re.compile(
    r"(mkdir|cp|mv|rm|rsync|scp|ln|tar|unzip|touch|git|pip|conda\s+install|wget|curl|aws|gsutil|rclone|wandb|huggingface-cli)\b"
)
"""Commands that usually run once for a job, and not on each of its nodes."""

_LOGIN = "_path=$PATH; . /etc/profile; PATH=$_path:$PATH"
"""What a login shell reads, such as the function `module`; many an /etc/profile forgets the PATH before it."""

_LINES_SHOWN_MAX = 8
_REMOTE = re.compile(
    r"^([^#\n]*([;&|]|\b(do|then|nohup|timeout[ \t]+\S+)))?[ \t]*(ssh|pdsh|clush)[ \t]", re.MULTILINE
)
_OTHER_HOSTS = (
    "starts commands on other hosts, which orch does itself: give the command that each of them runs, "
    "and write backend: ssh and ssh.hosts into the job file"
)


@dataclass(frozen=True, slots=True)
class MadeFile:
    """Text of a job file, with the conversions of the options."""

    text: str
    became: tuple[Became, ...]
    # Notes for the user
    notes: tuple[str, ...]


def job_file(command: str, folder: Path, target: Path) -> MadeFile:
    """Return the job file of a launch line, of `sbatch run.sh`, or of a script's path, to be run in `folder`; `target` is the
    folder of the job file. Raises UserError or SpecError."""
    document = Document("--from-command")
    try:
        header = _fill(document, command.strip(), folder)
    except ValueError as err:
        fix = "change the line, or write the job file by hand: orch init"
        raise UserError(str(err), "--from-command", fix) from err
    became = [Became(one.option, one.field, one.text) for one in header.settings]
    became += launch_lines.take_over(document, folder)
    if document.faults:
        raise SpecError(document.faults)
    data = document.data
    if isinstance(data.get("entrypoint"), list):
        data["entrypoint"] = _data(job_writer.entry([str(word) for word in data["entrypoint"] or []]))
    code = path_in(Path(), str(data.get("workdir", ".")))
    if target.resolve() != folder.resolve() and not code.is_absolute():
        data["workdir"] = os.path.relpath(folder / code, target)
    ordered = {name: data[name] for name in dict.fromkeys([*_ORDER, *data]) if name in data}
    text = job_writer.job_file(ordered, [f"Made from: {_short(command)}"])
    return MadeFile(text, tuple(became), (*header.notes, *_advice(ordered)))


def _fill(document: Document, command: str, folder: Path) -> Header:
    """Fill an empty document from a command. Raises ValueError for one that cannot be converted."""
    words = shlex.split(command.replace("\\\n", " "))
    start, header = launchers.start_of(words), Header()
    at, given = _script_of(words, folder)
    key = "launch"
    if at < len(words):
        script = path_in(folder, words[at])
        name = script.stem
        text = read(script)
        header, launch = _of_script(text, given, words, at, folder, is_sbatch=start.starter is Starter.SBATCH)
        header.notes.extend(_without_launcher(text))
    elif start.starter is Starter.SBATCH:
        raise ValueError("names no script after sbatch's options")
    elif start.starter is Starter.REMOTE or launchers.hosts_of(words):
        raise ValueError(_OTHER_HOSTS)
    elif start.starter in (Starter.LAUNCHER, Starter.SHELL) or launchers.is_launch(command):
        name, launch = run_line.name_of(words), command
    elif start.starter in (Starter.PYTHON, Starter.RUNNER) or "".join(words[:1]).endswith(".py"):
        name, launch, key = run_line.name_of(words), command, "entrypoint"
    else:
        raise ValueError(
            "starts neither a launcher nor a shell script nor Python, and is not an sbatch script: give what each node runs, without a "
            "scheduler or a container around it; a program that itself starts a launcher is launch: in a job file"
        )
    document.put("name", launchers.as_job_name(name), "--from-command")
    document.places[key] = Place("--from-command", has_key=True)
    for setting in header.settings:
        if setting.field:
            document.put(setting.field, _data(setting.value), "--from-command")
            document.places[setting.field] = Place("--from-command")
    document.data[key] = launch
    return header


def _without_launcher(text: str) -> list[str]:
    """Return a note for a script that runs Python and, as far as can be seen, no launcher."""
    starts = [(launchers.start_of(words), words) for words in launchers.commands_of(text)]
    programs = [
        line
        for start, words in starts
        if start.starter is Starter.PYTHON and (line := launchers.joined(words[start.behind :]))
    ]
    if not programs or any(
        start.starter in (Starter.LAUNCHER, Starter.SHELL, Starter.REMOTE) for start, _ in starts
    ):
        return []
    line = f"if {programs[-1]} trains by itself, write entrypoint: {programs[-1]} in place of launch"
    return [f"no line starts a launcher that orch knows: {line}"]


def _script_of(words: Sequence[str], folder: Path) -> tuple[int, list[Option]]:
    """Return the position of the script that words name for sbatch, for a shell, or as the first of them, behind the last for
    none; and sbatch's options before it."""
    if words[:1] == ["sbatch"]:
        given, at = SBATCH.read(words, 1)
        return at, given
    at = 1 if words[:1] in (["bash"], ["sh"]) else 0
    path = path_in(folder, words[at]) if at < len(words) else folder
    kinds = (
        Starter.SHELL,
        Starter.SBATCH,
        Starter.OTHER,
    )  # not a program by its path, such as .venv/bin/torchrun
    is_script = path.is_file() and path.suffix != ".py" and launchers.start_of(words[at:]).starter in kinds
    return at if is_script else len(words), []


def _of_script(
    text: str,
    given: Sequence[Option],
    words: Sequence[str],
    at: int,
    folder: Path,
    *,
    is_sbatch: bool,
) -> tuple[Header, str]:
    """Return what a script's header says, and its body, which is given the arguments behind `at`; one that is not meant for
    Slurm is run as it is. Raises ValueError for one that starts commands on other hosts."""
    shell = text.partition("\n")[0] if text.startswith("#!") else ""
    if shell and not re.search(r"\b(ba|da|z|k)?sh\b", shell):
        raise ValueError(f"the script begins with {shell}, but a launch line must be for bash")
    options, body = sbatch_header.split(text)
    if not options and not is_sbatch:
        line = launchers.runnable(launchers.joined(words))
        if _REMOTE.search(text):
            raise ValueError(_OTHER_HOSTS)
        return Header(), line
    header = sbatch_header.header([*options, *given], _ranks_of(body, folder))
    header.settings.insert(0, sbatch_header.Setting("backend", "slurm", "sbatch"))
    fields = {setting.field for setting in header.settings}
    if "time_limit_action" not in fields and re.search(r"\bscontrol\s+requeue\b", body):
        header.settings.append(sbatch_header.Setting("time_limit_action", "requeue", "scontrol requeue"))
    if fields.isdisjoint(("gpus_per_node", "procs_per_node")):
        header.settings.append(
            sbatch_header.Setting("procs_per_node", "1", "no GPUs and no tasks in the header")
        )
    if re.search(r"\s(-\w*l|--login)\b", shell):
        body = f"{_LOGIN}\n{body}"
        header.notes.append(f"{shell} is a login shell, so the lines begin with what it reads, /etc/profile")
    if words[at + 1 :]:
        body = f"set -- {shlex.join(words[at + 1 :])}\n{body}"
    header.notes += _notes_of(body, any(one.field == "time_limit_action" for one in header.settings))
    return header, body.strip("\n") + "\n"


def _ranks_of(body: str, folder: Path) -> Count | None:
    """Return the ranks of a node as the launchers of a body, and of the scripts that it names, count them literally, and all the
    same; else None."""
    lines = launchers.commands_of(body)
    scripts = [path_in(folder, word) for words in lines for word in words if word.endswith((".sh", ".bash"))]
    lines += [words for path in scripts if path.is_file() for words in launchers.commands_of(read(path))]
    starts = [words for words in lines if launchers.start_of(words).starter is Starter.LAUNCHER]
    each = [count for words in starts if (count := launchers.counts(words).each) is not None]
    is_one = len({count.value for count in each}) == 1 and each[0].value.isdecimal()
    return each[0] if is_one else None


def _notes_of(body: str, requeues: bool) -> list[str]:
    """Return notes on a body that ran once until now, and now runs on each node."""
    lines = [line.strip() for line in body.splitlines()]
    once = [line for line in lines if _ONCE.match(line)]
    notes = [
        "each node runs the lines of launch, once; srun, torchrun and other launchers in them start that node's ranks"
    ]
    if once:
        more = f" and {len(once) - _LINES_SHOWN_MAX} more" if len(once) > _LINES_SHOWN_MAX else ""
        shown = "; ".join(escaped(line, 60) for line in once[:_LINES_SHOWN_MAX])
        notes.append(
            f'these may need to run only once: {shown}{more}. Write `[ "$GROUP_RANK" = 0 ] && ` before such a line'
        )
    again = ", and requeues the job (time_limit_action: requeue)" if requeues else ""
    if any(line.startswith("trap ") for line in lines):
        notes.append(
            f"no signal reaches the script's trap: orch warns the ranks itself{again}; remove the trap"
        )
    if any(re.match(r"cd\s+\"?\$\{?SLURM_SUBMIT_DIR", line) for line in lines):
        notes.append(
            "cd to SLURM_SUBMIT_DIR leaves the job's copy of the code, in which the lines start; remove it"
        )
    return notes


def _data(value: str | Sequence[str]) -> Value:
    return value if isinstance(value, str) else list(value)


def _short(command: str) -> str:
    line = " ".join(command.replace("\\\n", " ").split())
    return escaped(line, 200)


def _advice(data: dict[str, Value]) -> list[str]:
    """Return notes on what the command leaves open."""
    notes = []
    if str(data.get("nodes", "1")) != "1" and "backend" not in data:
        notes.append(
            "all nodes are this machine until the file says `backend: ssh` with ssh.hosts, or `backend: slurm`"
        )
    if data.get("backend") == "slurm":
        notes.append("the job is queued in Slurm; ORCH_HOME must be a folder that all nodes see")
    return notes
