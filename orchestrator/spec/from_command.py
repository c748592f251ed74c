"""A job file made of a launch line or an sbatch script, and what became of each option, for `orch init --from-command`."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import UserError
from orchestrator.spec import job_writer, launch_lines, run_line
from orchestrator.spec.launch_lines import Became
from orchestrator.spec.launchers import recognise, sbatch_script
from orchestrator.spec.launchers.launch_line import read
from orchestrator.spec.launchers.recognise import Taken
from orchestrator.spec.launchers.srun import SBATCH
from orchestrator.spec.yaml_document import Document, Place, SpecError, Value, escaped, missing_file, path_in
from orchestrator.spec.yaml_document import read as read_text

_ORDER = ("name", "backend", "nodes", "gpus_per_node", "procs_per_node", "workdir", "entrypoint", "command", "python")  # fmt: skip


@dataclass(frozen=True, slots=True)
class MadeFile:
    """A job file's text, and what became of the options."""

    text: str
    became: tuple[Became, ...]
    # What a reader should still know
    notes: tuple[str, ...]


def job_file(command: str, folder: Path, target: Path) -> MadeFile:
    """Return the job file of a launch line, of `sbatch run.sh`, or of a script's path, which is meant for `folder`; `target` is
    where the job file will lie. Raises UserError or SpecError."""
    try:
        taken = _taken(command.strip(), folder)
    except ValueError as err:
        fix = "change the line, or write the job file by hand: orch init"
        raise UserError(str(err), "--from-command", fix) from err
    document = Document("--from-command")
    key = "entrypoint" if taken.words is not None else "command"
    document.places[key] = Place("--from-command", has_key=True)
    became = launch_lines.apply(document, key, folder, taken)
    if document.faults:
        raise SpecError(document.faults)
    if taken.words is not None:
        document.data["entrypoint"] = _entry(taken.words)
    document.data.setdefault("name", run_line.name_of(taken.words or taken.shell.split()))
    data = document.data
    code = path_in(Path(), str(data.get("workdir", ".")))
    if target.resolve() != folder.resolve() and not code.is_absolute():
        data["workdir"] = os.path.relpath(folder / code, target)
    ordered = {name: data[name] for name in dict.fromkeys([*_ORDER, *data]) if name in data}
    return MadeFile(
        job_writer.job_file(ordered, [f"Made from: {_short(command)}"]),
        tuple(became),
        tuple(_advice(ordered)),
    )


def _taken(command: str, folder: Path) -> Taken:
    """Return what the command becomes. Raises ValueError for one that cannot be read."""
    words = shlex.split(command.replace("\\\n", " "), comments=False)
    script, directives, arguments = _script_of(words, folder)
    if script is not None:
        text = _inserted(read_text(script), directives)
        return sbatch_script.taken(text, arguments, on_slurm=words[0] == "sbatch" or "#SBATCH" in text)
    taken = recognise.in_text(command, as_program=True)
    if taken is None:
        if words and words[0].endswith(".py"):
            return Taken("python", tuple(words), "")
        raise ValueError(
            "starts none of torchrun, accelerate launch, deepspeed, fabric run, srun and python, and is no sbatch script"
        )
    return taken


def _script_of(words: list[str], folder: Path) -> tuple[Path | None, list[str], list[str]]:
    """Return the script that a command names, the options for sbatch before it, and its arguments; None for another command."""
    at, given = 0, []
    if words[:1] == ["sbatch"]:
        options, at = read(words, 1, SBATCH)
        if at >= len(words):
            raise ValueError("sbatch names no script behind its options")
        given = [option.text for option in options]
    elif words[:1] in (["bash"], ["sh"]) and len(words) > 1:
        at = 1
    path = path_in(folder, words[at]) if words else folder
    # Not a program by its path, such as .venv/bin/torchrun
    is_program = recognise.is_line(words) or recognise.runs_python(words)
    is_script = words[:1] == ["sbatch"] or not (missing_file(path) or path.suffix == ".py" or is_program)
    return (path, given, words[at + 1 :]) if is_script else (None, [], [])


def _inserted(text: str, options: list[str]) -> str:
    lines = text.splitlines(keepends=True)
    last = max((number for number, line in enumerate(lines, 1) if line.startswith("#SBATCH")), default=0)
    return "".join([*lines[:last], *(f"#SBATCH {option}\n" for option in options), *lines[last:]])


def _entry(words: tuple[str, ...]) -> Value:
    written = job_writer.entry(words)
    return written if isinstance(written, str) else list(written)


def _short(command: str) -> str:
    line = " ".join(command.replace("\\\n", " ").split())
    return escaped(line, 200)


def _advice(data: dict[str, Value]) -> list[str]:
    """Return what to add where the command leaves it open."""
    notes = []
    if str(data.get("nodes", "1")) != "1" and "backend" not in data:
        notes.append(
            "all nodes are this machine until the file says `backend: ssh` with ssh.hosts, or `backend: slurm`"
        )
    if data.get("backend") == "slurm":
        notes.append("the job is queued in Slurm; ORCH_HOME must be a folder that all nodes see")
    texts = [*(data.get("setup") or []), data.get("command") or ""]
    if any(re.search(r"\$[1-9@*]", str(text)) for text in texts):
        notes.append(
            "$1 is an argument of the script, which a job does not have: write its value in its place"
        )
    return notes
