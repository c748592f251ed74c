"""Sections of a job file: rendezvous, monitor, restart, checkpoint, hosts, Slurm and the others, each with its fields.

Rules: as in `model`, which has the fields outside sections and the rules between sections.
"""

from __future__ import annotations

from typing import get_args

import pydantic
from pydantic import ValidationInfo

from orchestrator.core.checkpoints.memory import DEFAULT_DIR
from orchestrator.core.jobdir.layout import CODE_PREFIX
from orchestrator.core.slurm import sbatch_options
from orchestrator.spec import value_types as rules
from orchestrator.spec.value_types import Line, Section, described, duration_text, whole_number
from orchestrator.spec.yaml_document import WrongValue, quote_value

PORT_MAX = 65_535
BEATS_PER_NODE_TIMEOUT = 5
MEMORY_BYTES_MIN = 64 * 10**6
"""Least `checkpoint.memory`: less holds no checkpoint worth it."""

DEFAULT_OCCASIONS = ("hang", "notice", "withdrawn", "failed")


def _at_least(value: float, least_s: float, least_of: str) -> float:
    if value < least_s:
        raise WrongValue(f"must be at least {least_of}, {duration_text(least_s)}")
    return value


class Rendezvous(Section):
    """Port and network interface of the ranks."""

    port: int | None = whole_number(
        None, "Port of rank 0's store. Default: a free one for each attempt.", high=PORT_MAX
    )
    interface: str | None = described(None, "Network interface of the ranks' traffic.", pattern=rules.INTERFACE)


class Monitor(Section):
    """Timeouts, and what follows them."""

    heartbeat_s: rules.Heartbeat = described("1s", "Interval between heartbeats of a node, 100ms to 1m.")
    queue_timeout: rules.SecondsOrOff = described(
        "off",
        "Backend ssh: longest wait for hosts that other jobs use. Slurm keeps its own queue.",
    )
    start_timeout: rules.Seconds = described(
        "10m", "Longest time from the start of an attempt until all its ranks run (not the first step)."
    )
    rendezvous_timeout: rules.SecondsOrOff = described(
        "30m", "Longest time that ranks may wait for each other before their first step."
    )
    first_step_timeout: rules.SecondsOrOff = described(
        "off", "Longest time from the start of all ranks to the first step."
    )
    hang_timeout: rules.SilenceOrOff = described(
        "auto",
        "How long no rank may step or move before the attempt is ended, where no state proves a hang. auto: as long as the "
        "process group lets ranks wait, or 30m where none waits. off: ranks are not even inspected.",
    )
    node_timeout: rules.NodeSilence = described(
        "auto",
        "Longest silence of a node before it counts as lost: a time of at least 5 heartbeats and 5s, or auto, which is 20s "
        "where other nodes are heard whose ranks make no step either, else 1m.",
    )
    on_hang: rules.Hang = described("restart", "What follows a hang: a restart, only a notification, or failure.")
    on_desync: rules.Desync = described(
        "fail", "What follows when ranks silently run different collectives: failure, or only a notification."
    )
    on_nan: rules.NotFinite = described(
        "notify",
        "What follows when the loss that ranks print or report, or the norm by which they clip gradients, stays nan or infinite: a "
        "notification, a restart from the last checkpoint before it, or failure.",
    )
    compare_replicas: int | None = whole_number(
        None,
        "After how many steps the parameters of ranks that hold the same are compared; a notice names a rank that has drifted. "
        "Default: never.",
    )
    stop_grace: rules.Pause = described("15s", "Time from TERM to KILL when you or the time limit stop the job.")

    @pydantic.field_validator("node_timeout")
    @classmethod
    def _spans_heartbeats(cls, value: float | str, info: ValidationInfo) -> float | str:
        least_s = BEATS_PER_NODE_TIMEOUT * info.data.get("heartbeat_s", 0.0)
        return value if isinstance(value, str) else _at_least(value, least_s, f"{BEATS_PER_NODE_TIMEOUT} heartbeats")


class Notify(Section):
    """Notifications about the job."""

    command: rules.Command | None = described(
        None,
        "Command to run. It gets JSON on standard input, and ORCH_NOTIFY_EVENT and more in its environment.",
    )
    url: str | None = described(None, "Webhook to call. It gets the same JSON by POST.", pattern=rules.URL)
    on: rules.Occasions = described(DEFAULT_OCCASIONS, f"Events: {', '.join(get_args(rules.Occasion))}.")

    @pydantic.field_validator("url")
    @classmethod
    def _can_be_reached(cls, value: str | None) -> str | None:
        return None if value is None else rules.check_webhook_url(value)


class Restart(Section):
    """How often and how soon a failed attempt is restarted."""

    max: int = whole_number(
        3,
        "Most restarts after attempts without progress. A restart after an attempt that got further than all before it "
        "is free. 0: never restart.",
        low=0,
    )
    backoff: rules.Pause = described(
        "1s",
        "Wait before a restart, from the second failure in a row without progress on. Doubles each time.",
    )
    backoff_max: rules.Pause = described("1m", "Longest wait before a restart.")
    never_on_exit_codes: rules.ExitCodes = described((), "Exit codes of a rank after which the job fails at once.")

    @pydantic.field_validator("backoff_max")
    @classmethod
    def _is_longest(cls, value: float, info: ValidationInfo) -> float:
        return _at_least(value, info.data.get("backoff", 0.0), "restart.backoff")


class OnPreempt(Section):
    """How ranks are warned that Slurm is about to take their nodes."""

    signal: rules.Signal = described("TERM", "Signal that tells ranks to save a checkpoint.")
    grace: rules.Grace = described("1m", "Time to save, at most 12h; then ranks are killed. Slurm may give less.")


class CheckpointSection(Section):
    """Where checkpoints are, how many are kept, and how the script gets one."""

    path: rules.Glob = described(
        "*",
        f"Glob of the checkpoints, relative to ORCH_CHECKPOINT_DIR or absolute. `{CODE_PREFIX}…`: where ranks start.",
    )
    keep: int | None = whole_number(None, "How many of the newest checkpoints to keep. Default: all.")
    keep_every: int | None = whole_number(None, "With keep: checkpoints whose step is a multiple of this stay, too.")
    resume_args: rules.ResumeArgs | None = described(
        None,
        "Arguments appended when a complete checkpoint exists, such as --auto-resume. `{path}` is its path.",
    )
    memory: rules.Size | None = described(
        None,
        "How much memory of each node the checkpoints may take: ranks write to memory, and orch copies the files to the memory of "
        "another node and to disk. Default: ranks write to disk.",
    )
    memory_dir: Line = described(DEFAULT_DIR, "With memory: the folder in memory (tmpfs) on each node.")
    async_: rules.AsyncSaves = described(
        "off",
        "dcp: `torch.distributed.checkpoint.save` copies the state and returns; a thread of each rank writes it while the training "
        "continues. For scripts that neither rename nor publish a folder right after they have saved it.",
        alias="async",
    )
    on_preempt: OnPreempt = described({}, "Backend slurm: how ranks are warned of preemption and of the time limit.")

    @pydantic.field_validator("keep")
    @classmethod
    def _is_of_the_jobs_own(cls, value: int | None, info: ValidationInfo) -> int | None:
        path = info.data.get("path", "")
        if value is not None and path.startswith(("/", CODE_PREFIX)):
            raise ValueError(
                f"has no effect with checkpoint.path {quote_value(path)}: orch deletes only in ORCH_CHECKPOINT_DIR; "
                "remove keep, or write a path relative to that"
            )
        return value

    @pydantic.field_validator("memory")
    @classmethod
    def _has_room(cls, value: int | None, info: ValidationInfo) -> int | None:
        path = info.data.get("path", "")
        if value is not None and value < MEMORY_BYTES_MIN:
            raise WrongValue(f"must be at least {MEMORY_BYTES_MIN // 10**6}M")
        if value is not None and path.startswith(("/", CODE_PREFIX)):
            raise ValueError(
                f"has no effect with checkpoint.path {quote_value(path)}: only ORCH_CHECKPOINT_DIR can be in memory; "
                "remove memory, or write a path relative to that"
            )
        if value is not None and info.data.get("keep", 0) is None:
            raise ValueError("needs checkpoint.keep, or old checkpoints would fill the memory; write keep: 3")
        return value

    @pydantic.field_validator("memory_dir")
    @classmethod
    def _is_for_memory(cls, value: str, info: ValidationInfo) -> str:
        if not value.startswith("/"):
            raise WrongValue("must be an absolute path")
        if value != cls.model_fields["memory_dir"].default and info.data.get("memory", 0) is None:
            raise ValueError("has no effect without checkpoint.memory; remove it, or write memory: 64G")
        return value


class Batch(Section):
    """Samples of one optimizer step, as the script has them: shown, and compared when a job is resumed."""

    per_device: int | None = whole_number(None, "Samples that each rank takes at a time.")
    accumulation: int = whole_number(1, "Micro-batches of each rank per optimizer step.")

    @pydantic.field_validator("accumulation")
    @classmethod
    def _adds_up_something(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("per_device", 0) is None:
            raise ValueError("needs batch.per_device, without which there is no batch size to show")
        return value


class Logs(Section):
    """How ranks write their logs."""

    unbuffered: bool = described(True, "Set PYTHONUNBUFFERED=1, so that lines appear when they are printed.")


class Snapshot(Section):
    """The code snapshot, which is taken at submit."""

    limit_mb: int = whole_number(500, "Largest code snapshot, in MB.", high=1_000_000)


class Ssh(Section):
    """The hosts of backend ssh."""

    hosts: rules.Hosts = described((), "Hosts: gpu[01-08].lab, or a list of such.")
    hosts_file: Line | None = described(
        None,
        "File with one host per line, relative to the job file: `gpu1 gpus=8 slots=16 address=10.0.0.1 "
        "labels=a100,ib`. With ssh.hosts it only describes those hosts.",
    )
    user: str | None = described(None, "User on the hosts. Default: from the SSH configuration.", pattern=rules.USER)
    port: int | None = whole_number(None, "Port of sshd. Default: from the SSH configuration.", high=PORT_MAX)
    host_keys: rules.HostKeys = described(
        "strict", "strict: a host's key must be known. accept-new: an unknown key is learnt at first contact."
    )
    remote_dir: Line = described("~/.orch", "Folder for jobs on the hosts.")
    labels: rules.Lines = described((), "Labels of hosts_file. Only hosts that have all of them are used.")
    sync: rules.Lines = described((), "Git-ignored paths in workdir to copy to the hosts, such as data/.")
    copy_limit_mb: int | None = whole_number(
        None, "Limit in MB per second for copies of checkpoints. Default: no limit."
    )


class Slurm(Section):
    """Options for Slurm besides nodes, GPUs and time."""

    partition: Line | None = described(None, "Partition. Default: the cluster's.")
    account: Line | None = described(None, "Account to charge.")
    qos: Line | None = described(None, "Quality of service.")
    constraint: Line | None = described(None, "Features a node must have.")
    exclude: Line | None = described(None, "Nodes to avoid.")
    cpus_per_task: int | None = whole_number(None, "CPU cores per rank. Default: 1.")
    mem: Line | None = described(None, "Memory per node, such as 64G.")
    exclusive: bool = described(False, "Ask for whole nodes.")
    extra: rules.Options = described(
        (),
        "More options for sbatch, such as --licenses=foo, --reservation=lab, --nodelist=n[1-4], --mail-type=END or "
        "--comment=text. --gres=gpu:a100:8 asks for the GPUs instead of gpus_per_node, and must name the same number.",
    )

    @pydantic.field_validator("*")
    @classmethod
    def _fits_a_script(cls, value: object) -> object:
        for text in value if isinstance(value, tuple) else (str(value),):
            if len(text) > sbatch_options.OPTION_CHARS_MAX or not text.isprintable():
                raise WrongValue(f"must be printable, and at most {sbatch_options.OPTION_CHARS_MAX} characters")
        return value

    @pydantic.field_validator("extra")
    @classmethod
    def _is_not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if fault := sbatch_options.find_option_fault(option):
                raise ValueError(f"{quote_value(option)} {fault}")
        return value
