"""Settings of NCCL, gloo and torch for the ranks of a node, each with its reason. Pure.

Rules: what the user, the submitter's shell, the host or the setup lines have set is kept. Equal nodes get equal settings
in every attempt, so that numbers can be reproduced. What NCCL itself chooses well is not set.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.host_facts import HardwareFacts
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import Limits
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.text import format_count

RECORDER_ENTRIES = "2000"
"""How many collectives torch's flight recorder keeps; torch's own default, but older releases come with it switched off."""

WATCHDOG_S = 1800
"""The least time before torch's watchdog aborts a rank whose watchdog thread is stuck; torch's own is 480 s."""

RANK_MARK = "{rank}"
"""Stands in a value for the number of the rank, which the agent puts there."""

_OTHER_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Variables that torch has renamed, each with its earlier name: the node's torch is not known before the start."""

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "KMP_", "MKL_", "GOMP_", "FI_", "UCX_")
_WATCHED = frozenset(
    (
        "PYTHONUNBUFFERED",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_ORDER",
        "CUBLAS_WORKSPACE_CONFIG",
        "WANDB_RUN_ID",
        "WANDB_RESUME",
        "MLFLOW_RUN_NAME",
    )
)


def is_watched(name: str) -> bool:
    """Return whether a variable affects NCCL, gloo or torch, or the run in which an experiment tracker continues."""
    return name.startswith(_PREFIXES) or name in _WATCHED


class SetBy(enum.Enum):
    """Origin of a setting."""

    ORCH = "orch"
    # In the job file or on the command line
    YOU = "you"
    # The environment that the job was submitted with
    SHELL = "your shell"
    HOST = "the host"
    SETUP = "setup lines"
    # orch, but when the attempt starts
    LATER = "orch, at the start"


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable of the ranks' environment; `value` is None where it is not set, or not known yet."""

    name: str
    value: str | None
    set_by: SetBy
    reason: str

    @property
    def text(self) -> str:
        """The setting in one line."""
        shown = f"{self.name}={self.value}" if self.value is not None else self.name
        return " ".join(f"{shown} ({self.set_by.value}: {self.reason})".split())  # a value may have lines


_TEXT = re.compile(rf"([A-Za-z_]\w*)(?:=(.*?))? \(({'|'.join(re.escape(by.value) for by in SetBy)}): (.*)\)")


def parse_setting(text: str) -> Setting | None:
    """Return the setting of a line that `Setting.text` has made, to be shown; None for another line."""
    found = _TEXT.fullmatch(text)
    return Setting(found[1], found[2], SetBy(found[3]), found[4]) if found else None


@dataclass(frozen=True, slots=True)
class EnvLayers:
    """Layers of the environment that the ranks of a node share: the host's environment, what the job adds, and all that
    is given in the end. `agent.ranks.rank_start.NodeEnvironment.build_env` adds orch's settings, which yield to it, and
    a rank's own variables."""

    host: Mapping[str, str]
    job: Mapping[str, str]
    given: Mapping[str, str]

    @classmethod
    def before_setup(cls, host: Mapping[str, str], job: Mapping[str, str], node: Mapping[str, str]) -> EnvLayers:
        """Return the layers before setup lines; `node`: what the node itself sets."""
        return cls(host, job, {**host, **job, **node})

    def origin(self, name: str, chosen: Mapping[str, str]) -> tuple[SetBy, str]:
        """Return who has set a variable that is given, and where."""
        value = self.given[name]
        if self.job.get(name) == value:
            return (
                (SetBy.YOU, chosen[name])
                if name in chosen
                else (SetBy.SHELL, "set in the shell that submitted the job")
            )
        if self.host.get(name) == value:
            return SetBy.HOST, "it is set in the host's environment"
        return SetBy.SETUP, "the setup lines of the job file set it"


def decide_settings(
    facts: HardwareFacts | None, at: NodePlan, layers: EnvLayers, interface: str | None, evidence: Path
) -> tuple[Setting, ...]:
    """Return the settings of a node's ranks: those that orch decides, then others that are set.

    `facts` are None for a node that is not known yet. `interface` leads to the first node: empty where it is not known, None
    where it is found when the attempt starts. `evidence`: the attempt's folder for it, as the node sees it.
    """
    plan = at.plan
    decided = [
        _threads(facts, at), *_interfaces(interface), *_flight_recorder(evidence), _watchdog(plan.limits),
        Setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", SetBy.ORCH, "a failed collective ends its rank, as under torchrun"),
        *_nccl_log(evidence, layers.given), *_trackers(plan.id, layers.given), *_unbuffered(plan),
    ]  # fmt: skip
    here = [_yield_to_given(setting, plan, layers) for setting in decided]
    names = {setting.name for setting in here}
    others = sorted(name for name in layers.given if is_watched(name) and name not in names)
    return (*here, *(_given_setting(name, plan, layers) for name in others))


def added_variables(decided: tuple[Setting, ...], rank: int) -> dict[str, str]:
    """Return the variables that orch adds to the environment of one rank."""
    return {
        one.name: one.value.replace(RANK_MARK, f"{rank:05d}")
        for one in decided
        if one.set_by is SetBy.ORCH and one.value is not None
    }


def _yield_to_given(setting: Setting, plan: Plan, layers: EnvLayers) -> Setting:
    """Return the given setting if something else has set it, by this name or torch's other one; else orch's."""
    if setting.name in layers.given:
        return _given_setting(setting.name, plan, layers)
    pairs = {**_OTHER_NAMES, **{old: new for new, old in _OTHER_NAMES.items()}}
    twin = pairs.get(setting.name, "")
    if twin in layers.given and setting.set_by is SetBy.ORCH:
        return Setting(setting.name, layers.given[twin], SetBy.ORCH, f"as {twin}: torch has both names for it")
    return setting


def _given_setting(name: str, plan: Plan, layers: EnvLayers) -> Setting:
    set_by, where = layers.origin(name, plan.origins)
    value = layers.given[name] if name not in plan.secrets else "(secret)"
    return Setting(name, value, set_by, where)


# What orch decides


def _threads(facts: HardwareFacts | None, at: NodePlan) -> Setting:
    """Return the number of threads: the rank's share of the host's cores, so that ranks never compete for them.

    torchrun gives every rank one thread. Where other jobs may come to the host, the share is counted by what a rank leases
    of it, a GPU or a slot; then it is the same whether they are there or not.
    """
    plan, slots = at.plan, at.planned_node.slots
    ranks = plan.world_size if plan.pool is None else len(at.ranks)  # of the job on this host
    if facts is None:
        reason = f"the cores of the node, shared by {format_count(ranks, 'rank')}"
        return Setting("OMP_NUM_THREADS", None, SetBy.LATER, reason)
    cores = facts.cores
    what = format_count(cores, "core")
    if facts.quota_cpus is not None and facts.quota_cpus < cores:
        cores, what = math.floor(facts.quota_cpus), f"a cgroup's limit of {facts.quota_cpus:g} CPUs"
    if plan.slurm is not None and facts.slurm_cpus is not None and facts.slurm_cpus <= cores:
        cores, what = facts.slurm_cpus, f"{format_count(facts.slurm_cpus, 'CPU')} from Slurm"
    if plan.ssh is not None and not at.gpus:
        sharers = slots or facts.cpus
        sharers_text = (
            f"{format_count(sharers, 'slot')} of the host, {'from hosts_file' if slots else 'one for each CPU'}"
        )
    elif plan.slurm is None and at.gpus and len(facts.gpus) >= ranks:
        sharers, sharers_text = len(facts.gpus), f"{format_count(len(facts.gpus), 'GPU')} of the host"
    else:
        sharers, sharers_text = ranks, f"{format_count(ranks, 'rank')} of the job here"
    threads = max(1, cores // max(1, sharers))
    return Setting("OMP_NUM_THREADS", str(threads), SetBy.ORCH, f"{what} shared by {sharers_text}")


def _interfaces(name: str | None) -> list[Setting]:
    """Return the settings that make gloo and NCCL use the interface over which nodes reach each other.

    NCCL takes a bare name for the beginning of a name, and `=` before it for the whole name.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    if name is None:
        reason = "the interface over which every node reaches the first one, probed before the ranks start"
        return [Setting(one, None, SetBy.LATER, reason) for one in names]
    if not name:
        return []
    is_loopback = name == "lo"
    reason = "all ranks are on this machine" if is_loopback else "this node reaches the other nodes over it"
    values = (name, name if is_loopback else f"={name}")
    return [Setting(one, value, SetBy.ORCH, reason) for one, value in zip(names, values, strict=True)]


def _flight_recorder(evidence: Path) -> list[Setting]:
    both = "; under its new name and its earlier one"
    on = f"torch records its last collectives, so that orch can name the rank that a hang waits for{both}"
    dump = f"the file of that record when torch itself gives up; torch appends the rank{both}"
    values = (RECORDER_ENTRIES, on), (f"{evidence}/torch-trace-of-rank-", dump)
    stacks = "recording a stack takes Python's lock, and a dump could wait for it forever"
    recorder = [
        Setting(name, value, SetBy.ORCH, reason)
        for names, (value, reason) in zip(_OTHER_NAMES.items(), values, strict=True)
        for name in names
    ]
    return [*recorder, Setting("TORCH_INCLUDE_STACK_TRACE", "0", SetBy.ORCH, stacks)]


def _watchdog(limits: Limits) -> Setting:
    """Return how long torch's own watchdog waits: longer than orch, so that a hang is judged before the rank is gone.

    The limits of collectives, 600 s or 1800 s, are arguments in the script: not ours to set.
    """
    wait_s = max(WATCHDOG_S, math.ceil(2 * (limits.hang_timeout_s or 0.0)))
    reason = "torch must not abort a rank before orch has judged a hang"
    return Setting("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(wait_s), SetBy.ORCH, reason)


def _nccl_log(evidence: Path, environ: Mapping[str, str]) -> list[Setting]:
    """Return the settings that keep NCCL's warnings in a file of each rank; none where the log is the user's business."""
    if "NCCL_DEBUG" in environ:
        return []
    file = f"{evidence}/rank-{RANK_MARK}-nccl.log"
    return [
        Setting("NCCL_DEBUG", "WARN", SetBy.ORCH, "NCCL logs why it fails, and nothing else"),
        Setting("NCCL_DEBUG_FILE", file, SetBy.ORCH, "kept out of your script's output"),
    ]


def _trackers(job: str, environ: Mapping[str, str]) -> list[Setting]:
    """Return the settings by which experiment trackers recognise a job after a restart.

    Each rank has a separate run in W&B: two processes in one run overwrite each other. Where the user has set
    either variable, neither is set.
    """
    named = Setting("MLFLOW_RUN_NAME", job, SetBy.ORCH, "MLflow's runs get the job's name")
    pair = {"WANDB_RUN_ID": f"{job}-{RANK_MARK}", "WANDB_RESUME": "allow"}
    if not pair.keys().isdisjoint(environ):
        return [named]
    reason = "W&B continues the same run after a restart; one run for each rank that calls it"
    return [*(Setting(name, value, SetBy.ORCH, reason) for name, value in pair.items()), named]


def _unbuffered(plan: Plan) -> list[Setting]:
    reason = "lines appear in the log when they are printed (logs.unbuffered)"
    return [Setting("PYTHONUNBUFFERED", "1", SetBy.ORCH, reason)] if plan.unbuffered else []
