"""Refusals of a submit or a resume before anything is made: for what this machine lacks, for a path without a checkpoint, and
for an override without effect.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from orchestrator.agent import setup_script
from orchestrator.agent.outputs.checkpoint_formats import Wholeness, inspect_shape, wholeness
from orchestrator.agent.outputs.checkpoint_series import is_plausible
from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.spec.load import SpecFile
from orchestrator.spec.yaml_document import ECHO_CHARS_MAX, escaped, missing_file, path_in
from orchestrator.submission.planner import accelerate_file
from orchestrator.submission.snapshot import Snapshot

_LIST = "orch checkpoints lists what there is"

VAIN = ("workdir", "snapshot", "ssh.sync")
"""The fields that choose what is copied at submit."""


def refuse_missing(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise UserError for what the job's ranks need and this machine lacks, where they run here and no setup line may
    install it."""
    _refuse_accelerate(file, plan)
    if file.spec.backend != "local" or file.spec.setup:
        return
    if fault := missing_interface(
        file.spec.rendezvous.interface, [name for _, name in socket.if_nameindex()]
    ):
        raise UserError(fault, file.where("rendezvous.interface"), "name one of these, or leave it out")
    if plan.program == sys.executable:
        return  # it runs orch
    try:
        setup_script.find_program(plan.program, {**environ, **plan.env}, file.workdir)
    except setup_script.SetupError as err:
        field = "python" if file.spec.python else "entrypoint" if file.spec.entrypoint else "command"
        raise UserError(err.reason, file.where(field), "install it, or name another") from err


def _refuse_accelerate(file: SpecFile, plan: Plan) -> None:
    """Raise UserError for a configuration of Accelerate that ranks could not read, or that names another number of ranks."""
    accelerate = file.spec.accelerate
    if accelerate is None or accelerate.config_file is None:
        return
    where, named = file.where("accelerate.config_file"), accelerate.config_file
    path = path_in(file.workdir, named)
    if missing := missing_file(path):
        raise UserError(
            missing, where, "it is looked for in workdir; accelerate config --config_file writes one"
        )
    if file.spec.backend == "ssh" and not path.resolve().is_relative_to(file.workdir):
        raise UserError(f"{named} lies outside workdir, and only workdir is copied", where, "copy it there")
    try:
        why = "" if isinstance(yaml.safe_load(path.read_text()), dict) else "it holds no keys"
    except (OSError, ValueError, yaml.YAMLError) as err:
        why = str(err)
    if why:
        raise UserError(f"{named} is not a configuration of Accelerate: {why}", where, "write it again")


def refuse_uncopied(file: SpecFile, code: Snapshot) -> None:
    """Raise UserError for a configuration of Accelerate that the hosts would not get: git ignores it."""
    accelerate = file.spec.accelerate
    if accelerate is None or accelerate.config_file is None:
        return
    named = accelerate_file(file, accelerate.config_file)
    if Path(named) not in (*code.copies, *code.synced):
        fix = f"take it out of .gitignore, or write ssh.sync: [{named}]"
        where = file.where("accelerate.config_file")
        raise UserError(f"git ignores {named}, so it is not copied to the hosts", where, fix)


def missing_interface(named: str | None, names: Sequence[str]) -> str:
    """Return the message that a host has no interface of this name; empty where it has one. NCCL takes the beginning of
    a name, several with commas, `=` for a whole name, and `^` for all but these."""
    words = [word.removeprefix("=") for word in (named or "").split(",") if word]
    if not words or words[0].startswith("^") or any(name.startswith(tuple(words)) for name in names):
        return ""
    return f"there is no interface {named}; there are {', '.join(names)}"


def existing(job: JobDir, checkpoint: str, plan: Plan) -> Path:
    """Return the checkpoint that a user named: a path, or a name in the job's checkpoint folder. Raises UserError for
    anything else."""
    folder, _ = plan.checkpoint_place(job)
    for path in (folder / checkpoint, Path(checkpoint).absolute()):
        if os.path.exists(path):  # noqa: PTH110 -- never raises
            if fault := _unfit(job, path, plan):
                raise UserError(f"is not a checkpoint to begin from: {fault}", str(path), _LIST)
            return path
    own = folder == job.checkpoints and folder.is_dir()
    names = os.listdir(folder) if own else []  # noqa: PTH208
    latest = sorted(names)[-5:]
    raise UserError(
        "there is no such checkpoint", checkpoint, f"there are: {', '.join(latest)}" if latest else _LIST
    )


def _unfit(job: JobDir, path: Path, plan: Plan) -> str:
    """Return why an attempt cannot begin from a path; empty where it can. A path that the job's own glob finds may have any
    format, another one must look like a checkpoint."""
    folder, glob = plan.checkpoint_place(job)
    if any(own.resolve().is_relative_to(path.resolve()) for own in (job.checkpoints, folder)):
        return "the job's checkpoints are in it"
    shape = inspect_shape(path)
    if not shape.size_bytes:
        return "it holds nothing"
    is_named = glob != "*" and path in CheckpointWatch(folder, glob).listed()
    if not is_named and not is_plausible(path, shape):
        return "no file of it has an ending of checkpoints, such as .pt or .safetensors"
    state = wholeness(path, shape)
    return "it was cut off while it was written" if state in (Wholeness.TORN, Wholeness.UNFINISHED) else ""


def refuse_vain(overrides: Sequence[str]) -> None:
    """Raise UserError for an override that has no effect on a resume."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in VAIN or key.startswith(tuple(f"{name}." for name in VAIN)):
            what = "has no effect on a resume: the job goes on with the code that its submit has copied"
            raise UserError(
                what, f"--set {escaped(override, ECHO_CHARS_MAX)}", "leave it out, or submit a new job"
            )
