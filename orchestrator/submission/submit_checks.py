"""Checks of a submit or a resume before anything is created: refusals for what this machine lacks and for overrides without
effect, and warnings about what is allowed but probably a mistake."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.agent.host import resources, setup_script
from orchestrator.core import codec, host_facts
from orchestrator.core.checkpoints import tree
from orchestrator.core.errors import Fault, HostError, UserError
from orchestrator.core.jobdir import home, start_folder
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.text import format_count
from orchestrator.spec.load import SpecFile
from orchestrator.spec.yaml_document import ECHO_CHARS_MAX, escape

SUBMIT_ONLY_FIELDS = ("workdir", "snapshot", "ssh.sync")
"""The fields that choose what is copied at submit."""


_KEEPS_BEST = (
    (
        re.compile(r"load[-_]best[-_]model[-_]at[-_]end(?![ =]+(?:false|no|0)\b)", re.IGNORECASE),
        "load_best_model_at_end",
        "save_total_limit",
    ),
    (re.compile(r"save[-_]top[-_]k[ =:]+[1-9]", re.IGNORECASE), "save_top_k", "save_top_k"),
)
"""Words of a command by which a script keeps its best checkpoints; the name of the option, and of the one that limits them."""


def submit_warnings(plan: Plan) -> tuple[Fault, ...]:
    """Return warnings of a job that can be submitted, each with its fix."""
    words = " ".join(plan.argv)
    found = [(name, limit) for pattern, name, limit in _KEEPS_BEST if pattern.search(words)]
    if plan.checkpoint_keep is None or not found:
        return ()
    name, limit = found[0]
    what = f"checkpoint.keep deletes checkpoints by their age, and the script keeps the best ones ({name})"
    return (Fault("", what, f"leave checkpoint.keep out, and limit them in the script by {limit}"),)


def uncopied_imports_warning(job: JobDir, plan: Plan, environ: Mapping[str, str]) -> tuple[Fault, ...]:
    """Return the warning that ranks may import files that are not in the snapshot and may still be edited, as far as it is quickly
    seen: compiled modules that git ignores, entries of PYTHONPATH and lines of `.pth` files. Never raises."""
    uncopied: list[str] = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        others = (codec.loads_plain(job.provenance.read_bytes())["submitted_from"], Path(__file__).parents[2])
        uncopied += (to for name, to in start_folder.find_links(job).items() if name.endswith(".so"))
        places = plan.env.get("PYTHONPATH", environ.get("PYTHONPATH", "")).split(os.pathsep)
        python = Path((plan.pythons or (plan.program,))[0])
        for file in python.parents[1].glob("lib/python3*/site-packages/*.pth"):
            places += file.read_text(errors="replace").splitlines()
        uncopied += (place for place in places if _is_editable_folder(Path(place), others))
    if plan.ssh is not None or not uncopied:
        return ()
    what = f"ranks import files that are not copied: {', '.join(sorted(set(uncopied)))}"
    return (Fault("", what, "do not change it until the job has ended: the next attempt would run the changes"),)


def _is_editable_folder(place: Path, others: tuple[str | Path, ...]) -> bool:
    """Return whether a folder is the submitter's, and not below these others: the workdir and orch itself."""
    return (
        place.is_absolute()
        and place.is_dir()
        and place.stat().st_uid == os.getuid()
        and "-packages" not in str(place)
        and not any(map(place.is_relative_to, others))
    )


RANKS_PER_CORE_MAX = 8
"""CPU ranks of backend local for each core of this machine: with more, ranks and agents leave no time to the shell that
would stop them."""


def refuse_too_many_ranks(file: SpecFile, plan: Plan) -> None:
    """Raise UserError for more CPU ranks of backend local than this machine can start and still answer its user."""
    ranks = plan.world_size if plan.backend == "local" and not any(node.gpus for node in plan.nodes) else 0
    cores = len(os.sched_getaffinity(0))
    if ranks <= cores * RANKS_PER_CORE_MAX:
        return
    what = f"{ranks} ranks in {format_count(len(plan.nodes), 'agent')} on the {format_count(cores, 'core')} of this machine: more than {RANKS_PER_CORE_MAX} per core"
    fix = "lower nodes or procs_per_node, or choose backend ssh or slurm; orch submit --oversubscribe accepts it"
    raise UserError(what, file.where("nodes" if len(plan.nodes) > 1 else "procs_per_node"), fix)


def refuse_missing(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise UserError for what the job's ranks need and this machine lacks, where they run here and no setup line may
    install it."""
    refuse_lack_of_memory(file, plan)
    if file.spec.backend != "local" or file.spec.setup:
        return
    if fault := missing_interface(file.spec.rendezvous.interface, [name for _, name in socket.if_nameindex()]):
        raise UserError(fault, file.where("rendezvous.interface"), "name one of these, or leave it out")
    if plan.program == sys.executable:
        return  # it runs orch
    try:
        setup_script.find_program(plan.program, {**environ, **plan.env}, file.workdir)
    except HostError as err:
        fields = ("python", "entrypoint", "command", "launch")
        field = next(name for name in fields if getattr(file.spec, name))
        raise UserError(err.reason, file.where(field), "install it, or name another") from err


def refuse_lack_of_memory(file: SpecFile, plan: Plan) -> None:
    """Raise UserError for checkpoints that are to be in this machine's memory and do not fit there."""
    if plan.backend != "local" or not plan.memory_bytes:
        return
    folder, host_bytes = resources.inspect_folder(plan.memory_dir), resources.available_bytes()
    fault = folder.fault if Path(plan.memory_dir).is_dir() else f"{plan.memory_dir} is not a folder"
    if fault := fault or host_facts.find_memory_shortage(
        plan.memory_bytes, len(plan.nodes), plan.memory_dir, folder.free_bytes, host_bytes
    ):
        fix = "lower checkpoint.memory, free some memory, or name another folder in checkpoint.memory_dir"
        raise UserError(fault, file.where("checkpoint.memory"), fix)


def refuse_foreign_syntax(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise UserError for an interface as only NCCL writes it where gloo would read it: `^` all but these, `=` a whole name.

    gloo takes whole names alone, and fails when the ranks meet.
    """
    name = "GLOO_SOCKET_IFNAME"
    value = plan.env.get(name, environ.get(name, "") if plan.ssh is None else "")
    if not value.startswith(("^", "=")):
        return
    where = plan.origins.get(name, name)
    fix = f"name the interface itself, such as eth0; NCCL's own setting is nccl: {{socket_ifname: {value!r}}}"
    raise UserError(f"gloo does not know {value!r}: it takes whole names, and {value[0]} is NCCL syntax", where, fix)


def missing_interface(interface: str | None, names: Sequence[str]) -> str:
    """Return the message that a host has no interface of this name; empty where it has one. NCCL takes the beginning of
    a name, several with commas, `=` for a whole name, and `^` for all but these."""
    words = [word.removeprefix("=") for word in (interface or "").split(",") if word]
    if not words or words[0].startswith("^") or any(name.startswith(tuple(words)) for name in names):
        return ""
    return f"there is no interface {interface}; available: {', '.join(names)}"


def refuse_shared_checkpoints(plan: Plan, environ: Mapping[str, str], where: str) -> None:
    """Raise UserError for a checkpoint folder outside the job's folder that another job, which has not ended, saves to: each
    would take the other's checkpoints for its own. Raises ClusterError when the home cannot be read."""
    if not Path(plan.checkpoint_glob).is_absolute():
        return
    own_location = _absolute_location(plan)
    for folder in home.unfinished_jobs(home.job_home(environ)):
        if folder.id == plan.id:
            continue
        try:
            other = codec.loads(Plan, folder.plan.read_bytes())
        except (OSError, codec.CodecError):
            continue  # damaged, which its own commands report
        if _absolute_location(other) == own_location and _machines(plan) & _machines(other):
            what = f"{folder.id} has not ended and saves its checkpoints to {plan.checkpoint_glob}, too"
            fix = f"give each job a folder of its own, or end that one: orch cancel {folder.id}"
            raise UserError(what, where, fix)


def _absolute_location(plan: Plan) -> tuple[str, str]:
    root, glob = tree.split_glob(Path("/"), plan.checkpoint_glob)
    return (os.path.realpath(root) if plan.ssh is None else os.path.normpath(root), glob)


def _machines(plan: Plan) -> set[str]:
    """Return the hosts of a job over SSH; one name for those that see this machine's disks."""
    return {node.host for node in plan.nodes} if plan.ssh is not None else {""}


def refuse_ineffective_overrides(overrides: Sequence[str]) -> None:
    """Raise UserError for an override that has no effect on a resume."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in SUBMIT_ONLY_FIELDS or key.startswith(tuple(f"{name}." for name in SUBMIT_ONLY_FIELDS)):
            what = "has no effect on a resume: the job keeps the code that was copied at submit"
            raise UserError(what, f"--set {escape(override, ECHO_CHARS_MAX)}", "leave it out, or submit a new job")
