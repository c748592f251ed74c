"""Fields of a job file: kind, default and description of each, and the rules between them.

Rules: the description here is the help, the JSON Schema and the reference in one; a default is written as a user would
write it. A rule between two fields is a validator of the later one, so that a fault of another field does not hide it; so
is a rule about the disk, where the context is the job file's folder. Durations are read to seconds, as floats.
`sections` has the sections, `value_types` the kinds of values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pydantic
from pydantic import Field, ValidationInfo

from orchestrator.core.slurm import sbatch_options
from orchestrator.spec import value_types as rules
from orchestrator.spec.foreign import launchers
from orchestrator.spec.sections import (
    Batch,
    CheckpointSection,
    Logs,
    Monitor,
    Notify,
    Rendezvous,
    Restart,
    Slurm,
    Snapshot,
    Ssh,
)
from orchestrator.spec.value_types import Entry, Line, Section, described, duration_text, whole_number
from orchestrator.spec.yaml_document import WrongValue, find_file_fault, quote_value, resolve_path

MACHINES_MAX = 4096
RANKS_PER_NODE_MAX = 4096
"""Most CPU ranks of a node."""

_NOT_RESUMED = ("tee", "cat", "grep", "sed", "awk", "ts", "head", "tail", "echo", "wait", "true", "exit")
"""Commands that may follow a training command, and never are one."""


class JobSpec(Section):
    """Training job as its job file describes it."""

    name: str = Field(description="Name of the job.", pattern=rules.NAME)
    backend: rules.Backend = described("local", "Where the job runs: this machine, hosts over SSH, or a Slurm cluster.")
    nodes: int = whole_number(1, "Machines the job runs on.", high=MACHINES_MAX)
    spares: int = whole_number(
        0,
        "Additional machines, kept ready to replace a lost one. No effect on backend local.",
        0,
        MACHINES_MAX,
    )
    gpus_per_node: rules.Gpus | None = described(
        None, "GPUs per node, one rank each. `auto`: all there are, the default without procs_per_node."
    )
    procs_per_node: int | None = whole_number(
        None,
        "CPU ranks per node. With `gpus_per_node: auto`: those of a machine without GPUs (else 1).",
        high=RANKS_PER_NODE_MAX,
    )
    workdir: Line = described(".", "Folder of the code, relative to the job file. Ranks run in a copy of it.")
    command: rules.RankCommand | None = described(None, "Shell command that each rank runs, instead of entrypoint.")
    launch: rules.LaunchScript | None = described(
        None,
        "Shell line or script that each node runs once, instead of entrypoint. Where it calls torchrun, accelerate, "
        "deepspeed, fabric, lightning, srun or mpirun, the ranks start.",
    )
    entrypoint: rules.EntryPoint | None = described(
        None,
        'What each rank runs: "train.py --lr 0.1", "-m pkg.train --x", a list of words, or {command: …}. Placeholders '
        "such as `{checkpoint_dir}` are filled in. A launch line, such as `torchrun --nproc-per-node 8 train.py`, means launch.",
    )
    start: rules.Start = described(
        "auto",
        "How a rank starts. auto: as a fork of a process of its node that has imported torch, where that is safe. "
        "fresh: as a new interpreter.",
    )
    python: Line | None = described(None, "Python of the ranks. Default: the one that runs orch.")
    setup: rules.ShellLines = described((), "Shell lines that run once on each node, before its ranks.")
    env: dict[rules.EnvName, rules.EnvText] = described(
        {}, "Environment variables of the ranks. They win over what orch would set."
    )
    secrets: rules.Secrets = described((), "Names of variables taken from your environment at submit, and never shown.")
    time_limit: rules.Seconds | None = described(
        None, "Longest run of the job, restarts included. On Slurm: of each allocation."
    )
    time_limit_action: rules.LimitAction = described(
        "fail",
        "What follows the time limit: the job fails, or (Slurm only) returns to the queue and continues.",
    )
    total_steps: int | None = whole_number(None, "Optimizer steps of the whole training, to show the time left.")
    batch: Batch = described(
        {}, "Batch size of the script. orch shows the effective batch size, and warns when it changes."
    )
    rendezvous: Rendezvous = described({}, "Where the ranks of an attempt meet.")
    nccl: rules.Nccl = described({}, "NCCL settings without their prefix: `debug: INFO` sets NCCL_DEBUG.")
    monitor: Monitor = described({}, "Timeouts, and what follows them.")
    notify: Notify = described({}, "Notifications about the job.")
    restart: Restart = described({}, "How often and how soon a failed attempt is restarted.")
    checkpoint: CheckpointSection = described(
        {}, "Where checkpoints are, how many are kept, and how the script gets one."
    )
    logs: Logs = described({}, "How ranks write their logs.")
    snapshot: Snapshot = described({}, "The code snapshot, which is taken at submit.")
    ssh: Ssh = described({}, "The hosts of backend ssh.")
    slurm: Slurm = described({}, "Options for Slurm besides nodes, GPUs and time.")

    @property
    def entry(self) -> Entry:
        """What starts a rank, from `entrypoint`, `command` or `launch`."""
        entry = self.entrypoint or self.command or self.launch
        assert entry is not None, "a spec without an entry is refused"
        return entry

    @pydantic.model_validator(mode="before")
    @classmethod
    def _gpus_by_default(cls, data: object) -> object:
        counts = ("gpus_per_node", "procs_per_node")
        if isinstance(data, Mapping) and all(data.get(count) is None for count in counts):
            return {**data, "gpus_per_node": "auto"}
        return data

    @pydantic.field_validator("gpus_per_node")
    @classmethod
    def _are_counted_for_slurm(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        if value == "auto" and info.data.get("backend") == "slurm":
            raise ValueError("Slurm needs a number: write gpus_per_node: 8, or procs_per_node: 4 for CPU ranks")
        return value

    @pydantic.field_validator("procs_per_node")
    @classmethod
    def _agrees_with_gpus(cls, value: int | None, info: ValidationInfo) -> int | None:
        gpus = info.data.get("gpus_per_node")
        if value is not None and isinstance(gpus, int) and gpus != value:
            raise WrongValue(f"must be equal to gpus_per_node, {gpus}, since one rank drives one GPU")
        return value

    @pydantic.field_validator("workdir")
    @classmethod
    def _is_a_folder(cls, value: str, info: ValidationInfo) -> str:
        if info.context is not None and not os.path.isdir(resolve_path(info.context, value)):  # noqa: PTH112 -- never raises
            raise WrongValue("must be an existing folder")
        return value

    @pydantic.field_validator("launch", "entrypoint")
    @classmethod
    def _one_entry(cls, value: Entry | None, info: ValidationInfo) -> Entry | None:
        others = [name for name in ("command", "launch") if info.data.get(name) is not None]
        if value is not None and others:
            raise ValueError(f"excludes {others[0]}; keep one of the two")
        return value

    @pydantic.field_validator("entrypoint")
    @classmethod
    def _is_there(cls, value: Entry | None, info: ValidationInfo) -> Entry | None:
        others = [info.data.get(name, "at fault") for name in ("command", "launch")]
        if value is None and others == [None, None]:
            raise ValueError("is missing; name the script, such as `entrypoint: train.py`")
        folder, workdir = info.context, info.data.get("workdir")
        if value is not None and value.kind == "script" and folder is not None and workdir is not None:
            missing = find_file_fault(resolve_path(folder, workdir) / value.target)
            if missing:
                raise ValueError(missing)
        return value

    @pydantic.field_validator("secrets")
    @classmethod
    def _not_in_env(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        both = [name for name in value if name in info.data.get("env", {})]
        if both:
            raise ValueError(f"{both[0]} is also in env, in plain text; remove it there or here")
        return tuple(dict.fromkeys(value))

    @pydantic.field_validator("time_limit_action")
    @classmethod
    def _has_a_queue(cls, value: str, info: ValidationInfo) -> str:
        backend = info.data.get("backend", "slurm")
        if value == "requeue" and backend != "slurm":
            raise ValueError(f"requeue needs a queue, and backend {backend} has none; write fail")
        return value

    @pydantic.field_validator("checkpoint")
    @classmethod
    def _leaves_time_to_train(cls, value: CheckpointSection, info: ValidationInfo) -> CheckpointSection:
        limit_s, notice_s = info.data.get("time_limit"), sbatch_options.signal_lead_s(value.on_preempt.grace)
        if (
            info.data.get("backend") == "slurm"
            and limit_s is not None
            and sbatch_options.whole_minutes_s(limit_s) <= notice_s
        ):
            raise ValueError(
                f"on_preempt.grace of {duration_text(value.on_preempt.grace)} and {sbatch_options.SIGNAL_MARGIN_S}s for a "
                f"clean stop use up the time_limit of {duration_text(limit_s)}; raise that, or lower the grace"
            )
        return value

    @pydantic.field_validator("checkpoint")
    @classmethod
    def _resumes_the_program(cls, value: CheckpointSection, info: ValidationInfo) -> CheckpointSection:
        entry = info.data.get("entrypoint") or info.data.get("command")
        if value.resume_args and isinstance(entry, Entry) and entry.kind == "command":
            last = next((words[0] for words in launchers.split_commands(entry.target)[::-1]), "").rpartition("/")[2]
            if last in _NOT_RESUMED:
                args = value.resume_args.replace("{path}", "$ORCH_RESUME_FROM")
                raise ValueError(
                    f"resume_args would go to {last}, the last program of the command; instead, write "
                    f"${{ORCH_RESUME_FROM:+{args}}} after the script's own arguments"
                )
        return value

    @pydantic.field_validator("slurm")
    @classmethod
    def _asks_for_gpus_once(cls, value: Slurm, info: ValidationInfo) -> Slurm:
        gpus = info.data.get("gpus_per_node")
        gres = sbatch_options.find_gres(value.extra)
        if info.data.get("backend") == "slurm" and gres and isinstance(gpus, int):
            named = sbatch_options.count_gpus(gres)
            if named != gpus:
                count = f"{named} GPUs" if named else "no GPUs"
                raise ValueError(
                    f"--gres={quote_value(gres)} names {count} in place of gpus_per_node, {gpus}; write both alike, "
                    f"such as --gres=gpu:{gpus}"
                )
        return value

    @pydantic.field_validator("ssh")
    @classmethod
    def _has_hosts(cls, value: Ssh, info: ValidationInfo) -> Ssh:
        if info.data.get("backend") == "ssh" and not value.hosts and not value.hosts_file:
            raise ValueError("backend ssh needs ssh.hosts or ssh.hosts_file")
        if value.labels and not value.hosts_file:
            raise ValueError("ssh.labels needs ssh.hosts_file, which has the labels")
        return value
