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
from orchestrator.spec.foreign.launchers import LaunchCount, ProgramKind
from orchestrator.spec.foreign.sbatch_header import Header
from orchestrator.spec.launch_lines import Conversion
from orchestrator.spec.yaml_document import (
    Document,
    SourceLocation,
    SpecError,
    Value,
    escape,
    read_text,
    resolve_path,
)

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
_REMOTE = re.compile(r"^([^#\n]*([;&|]|\b(do|then|nohup|timeout[ \t]+\S+)))?[ \t]*(ssh|pdsh|clush)[ \t]", re.MULTILINE)
_OTHER_HOSTS = (
    "starts commands on other hosts, which orch does itself: give the command that each of them runs, "
    "and write backend: ssh and ssh.hosts into the job file"
)


@dataclass(frozen=True, slots=True)
class ConvertedFile:
    """Text of a job file, with the conversions of the options."""

    text: str
    conversions: tuple[Conversion, ...]
    # Notes for the user
    notes: tuple[str, ...]


def convert_command(command: str, folder: Path, target: Path) -> ConvertedFile:
    """Return the job file of a launch line, of `sbatch run.sh`, or of a script's path, to be run in `folder`; `target` is the
    folder of the job file. Raises UserError or SpecError."""
    document = Document("--from-command")
    try:
        header = _fill_document(document, command.strip(), folder)
    except ValueError as err:
        fix = "change the line, or write the job file by hand: orch init"
        raise UserError(str(err), "--from-command", fix) from err
    conversions = [Conversion(one.option, one.field, one.text) for one in header.settings]
    conversions += launch_lines.parse_launch_line(document, folder)
    if document.faults:
        raise SpecError(document.faults)
    data = document.data
    if isinstance(data.get("entrypoint"), list):
        data["entrypoint"] = run_line.document_value(
            job_writer.entrypoint_value([str(word) for word in data["entrypoint"] or []])
        )
    code = resolve_path(Path(), str(data.get("workdir", ".")))
    if target.resolve() != folder.resolve() and not code.is_absolute():
        data["workdir"] = os.path.relpath(folder / code, target)
    ordered = {name: data[name] for name in dict.fromkeys([*_ORDER, *data]) if name in data}
    text = job_writer.job_file_text(ordered, [f"Made from: {_shorten(command)}"])
    return ConvertedFile(text, tuple(conversions), (*header.notes, *_advice(ordered)))


def _fill_document(document: Document, command: str, folder: Path) -> Header:
    """Fill an empty document from a command. Raises ValueError for one that cannot be converted."""
    argv = shlex.split(command.replace("\\\n", " "))
    start, header = launchers.find_start(argv), Header()
    at, given = _find_script(argv, folder)
    key = "launch"
    if at < len(argv):
        script = resolve_path(folder, argv[at])
        name = script.stem
        text = read_text(script)
        header, launch = _convert_script(text, given, argv, at, folder, is_sbatch=start.starter is ProgramKind.SBATCH)
        header.notes.extend(_launcher_notes(text))
    elif start.starter is ProgramKind.SBATCH:
        raise ValueError("names no script after sbatch's options")
    elif start.starter is ProgramKind.REMOTE or launchers.find_hosts(argv):
        raise ValueError(_OTHER_HOSTS)
    elif start.starter in (ProgramKind.LAUNCHER, ProgramKind.SHELL) or launchers.is_launch(command):
        name, launch = run_line.derive_job_name(argv), command
    elif start.starter in (ProgramKind.PYTHON, ProgramKind.RUNNER) or "".join(argv[:1]).endswith(".py"):
        name, launch, key = run_line.derive_job_name(argv), command, "entrypoint"
    else:
        raise ValueError(
            "starts neither a launcher nor a shell script nor Python, and is not an sbatch script: give what each node runs, without a "
            "scheduler or a container around it; a program that itself starts a launcher is launch: in a job file"
        )
    document.put("name", launchers.as_job_name(name), "--from-command")
    document.locations[key] = SourceLocation("--from-command", has_key=True)
    for setting in header.settings:
        if setting.field:
            document.put(setting.field, run_line.document_value(setting.value), "--from-command")
            document.locations[setting.field] = SourceLocation("--from-command")
    document.data[key] = launch
    return header


def _launcher_notes(text: str) -> list[str]:
    """Return a note for a script that runs Python and, as far as can be seen, no launcher."""
    starts = [(launchers.find_start(words), words) for words in launchers.split_commands(text)]
    programs = [
        line
        for start, words in starts
        if start.starter is ProgramKind.PYTHON and (line := launchers.join_command(words[start.behind :]))
    ]
    if not programs or any(
        start.starter in (ProgramKind.LAUNCHER, ProgramKind.SHELL, ProgramKind.REMOTE) for start, _ in starts
    ):
        return []
    line = f"if {programs[-1]} trains by itself, write entrypoint: {programs[-1]} in place of launch"
    return [f"no line starts a launcher that orch knows: {line}"]


def _find_script(argv: Sequence[str], folder: Path) -> tuple[int, list[Option]]:
    """Return the position of the script that words name for sbatch, for a shell, or as the first of them, behind the last for
    none; and sbatch's options before it."""
    if argv[:1] == ["sbatch"]:
        given, at = SBATCH.read(argv, 1)
        return at, given
    at = 1 if argv[:1] in (["bash"], ["sh"]) else 0
    path = resolve_path(folder, argv[at]) if at < len(argv) else folder
    kinds = (
        ProgramKind.SHELL,
        ProgramKind.SBATCH,
        ProgramKind.OTHER,
    )  # not a program by its path, such as .venv/bin/torchrun
    is_script = path.is_file() and path.suffix != ".py" and launchers.find_start(argv[at:]).starter in kinds
    return at if is_script else len(argv), []


def _convert_script(
    text: str,
    given: Sequence[Option],
    argv: Sequence[str],
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
    options, body = sbatch_header.split_script(text)
    if not options and not is_sbatch:
        line = launchers.make_runnable(launchers.join_command(argv))
        if _REMOTE.search(text):
            raise ValueError(_OTHER_HOSTS)
        return Header(), line
    header = sbatch_header.parse_header([*options, *given], _count_ranks(body, folder))
    header.settings.insert(0, sbatch_header.FieldSetting("backend", "slurm", "sbatch"))
    fields = {setting.field for setting in header.settings}
    if "time_limit_action" not in fields and re.search(r"\bscontrol\s+requeue\b", body):
        header.settings.append(sbatch_header.FieldSetting("time_limit_action", "requeue", "scontrol requeue"))
    if fields.isdisjoint(("gpus_per_node", "procs_per_node")):
        header.settings.append(sbatch_header.FieldSetting("procs_per_node", "1", "no GPUs and no tasks in the header"))
    if re.search(r"\s(-\w*l|--login)\b", shell):
        body = f"{_LOGIN}\n{body}"
        header.notes.append(f"{shell} is a login shell, so the lines begin with what it reads, /etc/profile")
    if argv[at + 1 :]:
        body = f"set -- {shlex.join(argv[at + 1 :])}\n{body}"
    header.notes += _body_notes(body, any(one.field == "time_limit_action" for one in header.settings))
    return header, body.strip("\n") + "\n"


def _count_ranks(body: str, folder: Path) -> LaunchCount | None:
    """Return the ranks of a node as the launchers of a body, and of the scripts that it names, count them literally, and all the
    same; else None."""
    lines = launchers.split_commands(body)
    scripts = [resolve_path(folder, word) for words in lines for word in words if word.endswith((".sh", ".bash"))]
    lines += [words for path in scripts if path.is_file() for words in launchers.split_commands(read_text(path))]
    starts = [words for words in lines if launchers.find_start(words).starter is ProgramKind.LAUNCHER]
    each = [count for words in starts if (count := launchers.read_counts(words).per_node) is not None]
    is_one = len({count.value for count in each}) == 1 and each[0].value.isdecimal()
    return each[0] if is_one else None


def _body_notes(body: str, requeues: bool) -> list[str]:
    """Return notes on a body that ran once until now, and now runs on each node."""
    lines = [line.strip() for line in body.splitlines()]
    once = [line for line in lines if _ONCE.match(line)]
    notes = [
        "each node runs the lines of launch, once; srun, torchrun and other launchers in them start that node's ranks"
    ]
    if once:
        more = f" and {len(once) - _LINES_SHOWN_MAX} more" if len(once) > _LINES_SHOWN_MAX else ""
        shown = "; ".join(escape(line, 60) for line in once[:_LINES_SHOWN_MAX])
        notes.append(
            f'these may need to run only once: {shown}{more}. Write `[ "$GROUP_RANK" = 0 ] && ` before such a line'
        )
    again = ", and requeues the job (time_limit_action: requeue)" if requeues else ""
    if any(line.startswith("trap ") for line in lines):
        notes.append(f"no signal reaches the script's trap: orch warns the ranks itself{again}; remove the trap")
    if any(re.match(r"cd\s+\"?\$\{?SLURM_SUBMIT_DIR", line) for line in lines):
        notes.append("cd to SLURM_SUBMIT_DIR leaves the job's copy of the code, in which the lines start; remove it")
    return notes


def _shorten(command: str) -> str:
    line = " ".join(command.replace("\\\n", " ").split())
    return escape(line, 200)


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
