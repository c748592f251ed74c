"""What may a job file say? The table of its fields: kind, default, description, and the rules between them.

Rules: every field has its description here, which is the help, the JSON Schema and the reference in one; a rule
between two fields is a validator of the later one, so that a fault elsewhere does not hide it. Durations are seconds,
as floats. What a value may be stands in `spec_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

import pydantic
from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo

from orchestrator import sbatch
from orchestrator import spec_rules as rules
from orchestrator.spec_rules import Entry, duration_text
from orchestrator.specfile import shown

MACHINES_MAX = 4096
BEATS_PER_NODE_TIMEOUT = 5
HOSTS_CHARS_MAX = 65_536
DEFAULT_OCCASIONS = ("hang", "notice", "withdrawn", "failed")
GRACE_S_MAX = 12 * 3600.0  # sbatch takes a --signal at most 65535 s before the limit


def _listed(value: object) -> object:
    """Take nothing as an empty list and one scalar as a list of one."""
    return () if value is None else (value,) if isinstance(value, (str, int, float)) else value


def _host_list(value: object) -> object:
    """Split `a,b gpu[1,3-5]` at commas and blanks outside of brackets."""
    if not isinstance(value, str):
        return _listed(value)
    if len(value) > HOSTS_CHARS_MAX:
        raise ValueError(f"must be at most {HOSTS_CHARS_MAX} characters; write ranges such as gpu[01-08]")
    return re.findall(r"(?:\[[^\]\s]*\]?|[^,\s\[])+", value)


def _mapped(value: object) -> object:
    return {} if value is None else value


def _settings(value: object) -> object:
    bare = [str(key).lower().removeprefix("nccl_") for key in value] if isinstance(value, Mapping) else []
    if len(set(bare)) < len(bare):
        raise ValueError("names one setting twice, in two spellings")
    return _mapped(value)


def _bare_signal(value: object) -> object:
    return value.removeprefix("SIG") if isinstance(value, str) else value


Backend: TypeAlias = Literal["local", "ssh", "slurm"]
Hang: TypeAlias = Literal["restart", "notify", "fail"]
Desync: TypeAlias = Literal["fail", "notify"]
HostKeys: TypeAlias = Literal["strict", "accept-new"]
LimitAction: TypeAlias = Literal["fail", "requeue"]
Occasion: TypeAlias = Literal[
    "hang", "notice", "withdrawn", "verdict", "restart", "failed", "succeeded", "cancelled"
]
Signal: TypeAlias = Literal["TERM", "INT", "USR1", "USR2", "HUP"]
BackendWord: TypeAlias = Annotated[Backend, rules.choice(*get_args(Backend))]
HangWord: TypeAlias = Annotated[Hang, rules.choice(*get_args(Hang))]
DesyncWord: TypeAlias = Annotated[Desync, rules.choice(*get_args(Desync))]
HostKeysWord: TypeAlias = Annotated[HostKeys, rules.choice(*get_args(HostKeys))]
OccasionWord: TypeAlias = Annotated[Occasion, rules.choice(*get_args(Occasion))]
Occasions: TypeAlias = Annotated[tuple[OccasionWord, ...], BeforeValidator(_listed)]
LimitActionWord: TypeAlias = Annotated[LimitAction, rules.choice(*get_args(LimitAction))]
SignalWord: TypeAlias = Annotated[Signal, rules.choice(*get_args(Signal)), BeforeValidator(_bare_signal)]
Grace: TypeAlias = Annotated[float, rules.duration(0.0, GRACE_S_MAX)]
Machines: TypeAlias = Annotated[int, rules.whole(1, MACHINES_MAX)]
Spares: TypeAlias = Annotated[int, rules.whole(0, MACHINES_MAX)]
Restarts: TypeAlias = Annotated[int, rules.whole(0)]
Megabytes: TypeAlias = Annotated[int, rules.whole(1, 1_000_000)]
Heartbeat: TypeAlias = Annotated[float, rules.duration(0.1, 60)]
NodeSilence: TypeAlias = Annotated[float, rules.duration(5)]
Lines: TypeAlias = Annotated[tuple[rules.Line, ...], BeforeValidator(_listed)]
Options: TypeAlias = Annotated[tuple[rules.Option, ...], BeforeValidator(_listed)]
Hosts: TypeAlias = Annotated[tuple[rules.Host, ...], BeforeValidator(_host_list)]
Secrets: TypeAlias = Annotated[tuple[rules.EnvName, ...], BeforeValidator(_listed)]
ExitCodes: TypeAlias = Annotated[tuple[Annotated[int, rules.whole(1, 255)], ...], BeforeValidator(_listed)]
Env: TypeAlias = Annotated[dict[rules.EnvName, rules.EnvText], BeforeValidator(_mapped)]
Nccl: TypeAlias = Annotated[dict[rules.NcclName, rules.NcclText], BeforeValidator(_settings)]


def about(default: object, text: str) -> Any:
    """Return a field's default and description; the default is checked like a written value."""
    return Field(default=default, description=text, validate_default=True)


def _at_least(value: float, least_s: float, least_of: str) -> float:
    if value < least_s:
        least = f"{least_of}, {duration_text(least_s)}"
        raise ValueError(f"must be at least {least}, not {duration_text(value)}")
    return value


class Part(BaseModel):
    """A section of the spec; one left empty has its defaults."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, data: object) -> object:
        return {} if data is None else data


class Rendezvous(Part):
    """Where the ranks of an attempt meet."""

    port: rules.OptionalPort = about(None, "Port of rank 0's store; by default a free one for each attempt.")
    interface: rules.OptionalInterface = about(None, "Network interface of the ranks' traffic.")


class Monitor(Part):
    """When silence becomes a verdict, and what follows."""

    heartbeat_s: Heartbeat = about(1.0, "Time between two heartbeats of a node.")
    queue_timeout: rules.SecondsOrOff = about(
        "off",
        "Backend ssh: longest wait for hosts that others use; or off. Slurm keeps its own queue.",
    )
    start_timeout: rules.Seconds = about(
        600.0, "Longest time from an attempt's start until all its ranks run (not the first step)."
    )
    rendezvous_timeout: rules.SecondsOrOff = about(
        600.0, "Longest time that ranks may wait for one another before their first step; or off."
    )
    first_step_timeout: rules.SecondsOrOff = about(
        "off", "Longest time from the start of all ranks to the first step; or off."
    )
    hang_timeout: rules.SilenceOrOff = about(
        "auto",
        "Silence that makes a live job suspicious: `auto`, as its own step times tell; a time, after which unmoving "
        "ranks are a hang without further patience; or off.",
    )
    hang_floor: rules.Seconds = about(5.0, "Shortest silence that `hang_timeout: auto` finds suspicious.")
    hang_ceiling: rules.Seconds = about(600.0, "Longest silence that `hang_timeout: auto` finds innocent.")
    node_timeout: NodeSilence = about(
        60.0, "Longest silence of a node, at least 5 heartbeats; then it is lost."
    )
    on_hang: HangWord = about("restart", "What follows a hang: a restart, a word to the user, or failure.")
    on_desync: DesyncWord = about(
        "fail", "What follows when ranks silently run different collectives: failure, or a word to the user."
    )
    stop_grace: rules.Pause = about(15.0, "Time from TERM to KILL when user or time limit stop the job.")

    @pydantic.field_validator("node_timeout")
    @classmethod
    def _spans_heartbeats(cls, value: float, info: ValidationInfo) -> float:
        least_s = BEATS_PER_NODE_TIMEOUT * info.data.get("heartbeat_s", 0.0)
        return _at_least(value, least_s, f"{BEATS_PER_NODE_TIMEOUT} heartbeats")

    @pydantic.field_validator("hang_ceiling")
    @classmethod
    def _is_above_floor(cls, value: float, info: ValidationInfo) -> float:
        return _at_least(value, info.data.get("hang_floor", 0.0), "monitor.hang_floor")


class Notify(Part):
    """Whom to tell of what happens."""

    command: rules.OptionalCommand = about(
        None, "Command that is told: JSON on standard input, ORCH_NOTIFY_EVENT and more in its environment."
    )
    url: rules.OptionalUrl = about(None, "Webhook that is told: the same JSON, by POST.")
    on: Occasions = about(DEFAULT_OCCASIONS, f"Of what: {', '.join(get_args(Occasion))}.")


class Restart(Part):
    """How often and how fast a failed attempt is followed by another."""

    max: Restarts = about(
        3,
        "Restarts after attempts that made no progress; one that got further than all before it is free; "
        "0: never restart.",
    )
    backoff: rules.Pause = about(
        1.0, "Wait before a restart, from the second failure in a row without progress on; doubles each time."
    )
    backoff_max: rules.Pause = about(60.0, "Longest wait before a restart.")
    never_on_exit_codes: ExitCodes = about((), "Exit codes of a rank after which the job fails at once.")

    @pydantic.field_validator("backoff_max")
    @classmethod
    def _is_longest(cls, value: float, info: ValidationInfo) -> float:
        return _at_least(value, info.data.get("backoff", 0.0), "restart.backoff")


class OnPreempt(Part):
    """How ranks are told that Slurm is about to take their nodes."""

    signal: SignalWord = about("TERM", "Signal that tells ranks to save themselves.")
    grace: Grace = about(60.0, "Time they have for that; then they are killed. Slurm may give less.")


class Checkpoint(Part):
    """What a checkpoint is, and how a script is given one."""

    path: rules.Glob = about("*", "Glob of the checkpoints, relative to ORCH_CHECKPOINT_DIR or absolute.")
    keep: rules.OptionalCount = about(None, "How many of the newest checkpoints to keep; by default all.")
    resume_args: rules.OptionalResumeArgs = about(
        None, "Arguments appended when a good checkpoint exists; `{path}` stands for its path."
    )
    on_preempt: OnPreempt = about(
        OnPreempt(), "Backend slurm: how ranks are told of preemption, and of the time limit's end."
    )


class Logs(Part):
    """How ranks write their logs."""

    unbuffered: rules.Switch = about(True, "Set PYTHONUNBUFFERED=1: lines appear when they are printed.")


class Snapshot(Part):
    """What is copied at submit."""

    limit_mb: Megabytes = about(500, "Largest code snapshot, in MB.")


class Ssh(Part):
    """The hosts of backend ssh."""

    hosts: Hosts = about((), "Hosts: a text like gpu[01-08].lab, or a list of such.")
    hosts_file: rules.OptionalLine = about(
        None,
        "File with a host on each line, relative to the job file: `gpu1 gpus=8 slots=16 address=10.0.0.1 "
        "labels=a100,ib`; beside hosts it only describes them.",
    )
    user: rules.OptionalUser = about(None, "User on the hosts; by default what the SSH configuration says.")
    port: rules.OptionalPort = about(None, "Port of sshd; by default what the SSH configuration says.")
    host_keys: HostKeysWord = about("strict", "Host keys must be known, or are learnt at first contact.")
    remote_dir: rules.Line = about("~/.orch", "Folder for jobs on the hosts.")
    labels: Lines = about((), "Labels of hosts_file that a host must have, all of them, to be used.")
    sync: Lines = about((), "Paths in workdir that git ignores and the hosts need, such as data/.")
    copy_limit_mb: rules.OptionalCount = about(
        None, "Most MB per second for copies of checkpoints; by default no limit."
    )


class Slurm(Part):
    """What Slurm is asked for, beside nodes, GPUs and time."""

    partition: rules.OptionalLine = about(None, "Partition; by default the cluster's.")
    account: rules.OptionalLine = about(None, "Account that is charged.")
    qos: rules.OptionalLine = about(None, "Quality of service.")
    constraint: rules.OptionalLine = about(None, "Features a node must have.")
    reservation: rules.OptionalLine = about(None, "Reservation to run in.")
    nodelist: rules.OptionalLine = about(None, "Nodes to use.")
    exclude: rules.OptionalLine = about(None, "Nodes to avoid.")
    gres: rules.OptionalLine = about(None, "Generic resources, in place of those for gpus_per_node.")
    cpus_per_task: rules.OptionalCount = about(None, "CPU cores of each rank; by default 1.")
    mem: rules.OptionalLine = about(None, "Memory of a node, such as 64G.")
    exclusive: rules.Switch = about(False, "Ask for whole nodes.")
    mail: rules.OptionalLine = about(None, "Address Slurm writes to when the job ends or fails.")
    comment: rules.OptionalLine = about(None, "Comment in Slurm's accounting.")
    extra: Options = about((), "More options for sbatch, such as --licenses=foo.")

    @pydantic.field_validator("*")
    @classmethod
    def _fits_a_script(cls, value: object) -> object:
        longest = max(
            (len(text) for text in (value if isinstance(value, tuple) else (str(value),))), default=0
        )
        if longest > sbatch.OPTION_CHARS_MAX:
            raise ValueError(f"must be at most {sbatch.OPTION_CHARS_MAX} characters, not {longest}")
        return value

    @pydantic.field_validator("extra")
    @classmethod
    def _is_not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if fault := sbatch.fault_of(option):
                raise ValueError(f"{shown(option)} {fault}")
        return value


class JobSpec(Part):
    """One training job, as the job file says it."""

    name: rules.Name = Field(description="Name of the job.")
    backend: BackendWord = about("local", "Where it runs: this machine, hosts over SSH, or a Slurm cluster.")
    nodes: Machines = about(1, "Machines the job runs on.")
    spares: Spares = about(0, "More machines, kept ready to replace a lost one.")
    gpus_per_node: rules.OptionalGpus = about(
        None, "GPUs of a node, one rank each; `auto`: all there are, which is also meant when neither is set."
    )
    procs_per_node: rules.OptionalCount = about(
        None, "CPU ranks of a node; beside `gpus_per_node: auto`, those of a machine without GPUs (else 1)."
    )
    command: rules.OptionalCommand = about(None, "Shell command that a rank runs, in place of entrypoint.")
    entrypoint: rules.OptionalEntry = about(
        None, 'What a rank runs: "train.py --lr 0.1", "-m pkg.train --x", a list of words, or {command: …}.'
    )
    workdir: rules.Line = about(".", "Folder of the code, relative to the job file; ranks run in a snapshot.")
    python: rules.OptionalLine = about(None, "Python of the ranks; by default the one that runs orch.")
    setup: rules.ShellLines = about((), "Shell lines that run once on each node, before its ranks.")
    env: Env = about({}, "Environment of the ranks; wins over what orch would set.")
    secrets: Secrets = about((), "Variables taken from the submitter's environment and never shown.")
    time_limit: rules.OptionalSeconds = about(
        None, "Longest run of the job, restarts included; on Slurm of each stay on its nodes."
    )
    time_limit_action: LimitActionWord = about(
        "fail", "What follows the time limit: failure, or on Slurm another turn in the queue, and going on."
    )
    total_steps: rules.OptionalCount = about(None, "Optimizer steps of the training, to tell the time left.")
    rendezvous: Rendezvous = about(Rendezvous(), "Where the ranks of an attempt meet.")
    nccl: Nccl = about({}, "NCCL settings without their prefix: `debug: INFO` sets NCCL_DEBUG.")
    monitor: Monitor = about(Monitor(), "When silence becomes a verdict, and what follows.")
    notify: Notify = about(Notify(), "Whom to tell of what happens.")
    restart: Restart = about(Restart(), "How often and how fast a failed attempt is followed by another.")
    checkpoint: Checkpoint = about(Checkpoint(), "What a checkpoint is, and how a script is given one.")
    logs: Logs = about(Logs(), "How ranks write their logs.")
    snapshot: Snapshot = about(Snapshot(), "What is copied at submit.")
    ssh: Ssh = about(Ssh(), "The hosts of backend ssh.")
    slurm: Slurm = about(Slurm(), "What Slurm is asked for, beside nodes, GPUs and time.")

    @property
    def entry(self) -> Entry:
        """What a rank runs, whichever field says it."""
        entry = self.entrypoint or self.command
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
            raise ValueError(
                "Slurm must be asked for a number: write gpus_per_node: 8, or procs_per_node: 4 for CPU ranks"
            )
        return value

    @pydantic.field_validator("procs_per_node")
    @classmethod
    def _agrees_with_gpus(cls, value: int | None, info: ValidationInfo) -> int | None:
        gpus = info.data.get("gpus_per_node")
        if value is not None and isinstance(gpus, int) and gpus != value:
            raise ValueError(f"must equal gpus_per_node, {gpus}, not {value}: one rank drives one GPU")
        return value

    @pydantic.field_validator("entrypoint")
    @classmethod
    def _one_entry(cls, value: Entry | None, info: ValidationInfo) -> Entry | None:
        if "command" in info.data and value is None and info.data["command"] is None:
            raise ValueError("is missing; name the script, such as `entrypoint: train.py`")
        if value is not None and info.data.get("command") is not None:
            raise ValueError("stands beside command; keep one of the two")
        return value

    @pydantic.field_validator("secrets")
    @classmethod
    def _not_in_env(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        both = [name for name in value if name in info.data.get("env", {})]
        if both:
            raise ValueError(f"{both[0]} stands in env too, in plain text; remove it there or here")
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
    def _leaves_time_to_train(cls, value: Checkpoint, info: ValidationInfo) -> Checkpoint:
        limit_s, told_s = info.data.get("time_limit"), sbatch.signal_s(value.on_preempt.grace)
        if info.data.get("backend") == "slurm" and limit_s is not None and sbatch.limit_s(limit_s) <= told_s:
            raise ValueError(
                f"on_preempt.grace of {duration_text(value.on_preempt.grace)} and {sbatch.SIGNAL_MARGIN_S}s to end in "
                f"order fill the time_limit of {duration_text(limit_s)}; raise that, or lower the grace"
            )
        return value

    @pydantic.field_validator("slurm")
    @classmethod
    def _asks_for_gpus_once(cls, value: Slurm, info: ValidationInfo) -> Slurm:
        gpus = info.data.get("gpus_per_node")
        if info.data.get("backend") == "slurm" and value.gres and isinstance(gpus, int):
            named = sbatch.gpus_of(value.gres)
            if named != gpus:
                said = f"{named} GPUs" if named else "no GPUs"
                raise ValueError(
                    f"gres {shown(value.gres)} names {said} in place of gpus_per_node, {gpus}; write both alike, "
                    f"such as gpu:{gpus}"
                )
        return value

    @pydantic.field_validator("ssh")
    @classmethod
    def _has_hosts(cls, value: Ssh, info: ValidationInfo) -> Ssh:
        if info.data.get("backend") == "ssh" and not value.hosts and not value.hosts_file:
            raise ValueError("backend ssh needs ssh.hosts or ssh.hosts_file")
        if value.labels and not value.hosts_file:
            raise ValueError("labels stand in a file: ssh.labels needs ssh.hosts_file")
        return value
