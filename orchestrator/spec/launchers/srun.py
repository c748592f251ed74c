"""Options of srun and of `#SBATCH` lines (Slurm 22.05 to 25.11) as fields of a job file, and the size that they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.slurm.sbatch_options import gpus_of
from orchestrator.spec.launchers.launch_line import (
    ALL,
    CPUS_NODE,
    DEVICE,
    RANKS,
    RANKS_EACH,
    Dropped,
    Given,
    LaunchLine,
    Setting,
    as_job_name,
    count_later,
    counts,
    is_later,
    last,
    number,
    options,
    program,
    read,
    sorted_out,
)

_FIELDS = {
    "-A/--account=": "slurm.account",
    "-p/--partition=": "slurm.partition",
    "-q/--qos=": "slurm.qos",
    "-C/--constraint=": "slurm.constraint",
    "--reservation=": "slurm.reservation",
    "-w/--nodelist=": "slurm.nodelist",
    "-x/--exclude=": "slurm.exclude",
    "--mem=": "slurm.mem",
    "--comment=": "slurm.comment",
    "--mail-user=": "slurm.mail",
    "-J/--job-name=": "name",
    "-D/--chdir=": "workdir",
}
_OWN = (
    "-N/--nodes= -n/--ntasks= --ntasks-per-node= --ntasks-per-gpu= -c/--cpus-per-task= -t/--time= --gres= -G/--gpus= "
    "--gpus-per-node= --gpus-per-task= --exclusive=? --export=?"
)
_LOGS = "orch keeps the logs in the job's folder: orch logs"
_SCRIPT = "orch's own batch script has it"
_NOT_NEEDED = {
    _LOGS: "-o/--output= -e/--error= -i/--input= --open-mode= -l/--label -u/--unbuffered -v/--verbose -Q/--quiet "
    "-X/--disable-status --slurmd-debug= --quit-on-interrupt",
    "orch asks for a new turn in the queue itself: time_limit_action: requeue": "--requeue --no-requeue",
    "orch is warned before the time limit, and warns the ranks: checkpoint.on_preempt": "--signal=",
    "orch ends and restarts all ranks when one fails": "-K/--kill-on-bad-exit=? -k/--no-kill=? -W/--wait=",
    "Slurm tells of the end and of failures: slurm.mail": "--mail-type=",
    "orch starts one agent on each node, and the ranks from it": "--jobid= --het-group= --overlap -O/--overcommit --exact "
    "-m/--distribution= --cpu-bind= --mem-bind= --gpu-bind= --accel-bind= --mpi= --multi-prog --pty -r/--relative= "
    "--resv-ports=? --bcast=? --bcast-exclude= --send-libs=? --compress=? -T/--threads= --propagate=? -E/--preserve-env "
    "-I/--immediate=? --msg-timeout= --prolog= --epilog= --task-prolog= --task-epilog= -Z/--no-allocate "
    "--ntasks-per-core= --ntasks-per-socket= --x11=?",
    _SCRIPT: "--parsable --get-user-env=? --export-file= --ignore-pbs --wait-all-nodes=",
}
_EXTRA = (
    "--acctg-freq= --bb= --bbf= -b/--begin= --cluster-constraint= --container= --contiguous -S/--core-spec= "
    "--cores-per-socket= --cpu-freq= --cpus-per-gpu= --deadline= --delay-boot= -d/--dependency= -B/--extra-node-info= "
    "--gid= --gpu-freq= --gpus-per-socket= --gres-flags= --hint= -H/--hold --kill-on-invalid-dep= -L/--licenses= "
    "--mcs-label= --mem-per-cpu= --mem-per-gpu= --mincpus= --network= --nice=? --power= --prefer= --priority= --profile= "
    "--reboot -s/--oversubscribe --sockets-per-node= --spread-job --switches= --thread-spec= --threads-per-core= "
    "--time-min= --tmp= --uid= --use-min-nodes --wckey= --batch= --container-id= --container-image= --container-mounts= "
    "--container-workdir= --no-container-mount-home --container-mount-home --container-name= --container-writable"
)
"""Options that sbatch takes as they are, as `slurm.extra`; the last are those of pyxis."""

_REFUSED = {
    "a job is one job; submit it several times with --set": "-a/--array=",
    "orch asks the one cluster of this machine": "-M/--clusters=",
    "write slurm.nodelist": "-F/--nodefile=",
    "write its text as command": "--wrap=",
    "then nothing is started": "--test-only",
}
_TAKEN = {**_FIELDS, **dict.fromkeys(_EXTRA.split(), "slurm.extra")}
SRUN = options("srun", _TAKEN, _NOT_NEEDED, refused=_REFUSED, own=_OWN)
_WAITS = {"orch submit --follow waits": "-W/--wait"}
SBATCH = options("sbatch", _TAKEN, {**_NOT_NEEDED, **_WAITS}, refused=_REFUSED, own=_OWN)
_COUNTS = (RANKS, RANKS_EACH)
GPUS_EACH, GPUS_ALL = "gpus_of_a_node", "gpus"
"""Keys of settings with the GPUs of a node, and of all nodes together."""

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?)|(?P<clock>\d+(?::\d+){0,2})"
)


def srun(words: Sequence[str], start: int) -> LaunchLine:
    """Return the launch line whose options begin at `start`; its program may itself be a launch line."""
    given, at = read(words, start, SRUN)
    settings, dropped = from_options(given)
    settings.append(Setting("backend", "slurm", "srun", yields=True))
    return LaunchLine("srun", "command", program(words, at, "srun"), tuple(settings), tuple(dropped))


def from_options(given: Sequence[Given]) -> tuple[list[Setting], list[Dropped]]:
    """Return the settings that options of srun or sbatch stand for, and those not needed."""
    settings, dropped = sorted_out([option for option in given if option.option.key != "slurm.extra"])
    settings = [
        replace(setting, value=as_job_name(str(setting.value))) if setting.key == "name" else setting
        for setting in settings
    ]
    extra = [option for option in given if option.option.key == "slurm.extra"]
    if extra:
        settings.append(
            Setting(
                "slurm.extra",
                [_joined(option) for option in extra],
                " ".join(option.text for option in extra),
            )
        )
    settings += _size(given, dropped)
    if (time := last(given, "-t")) is not None:
        limit = duration(time)
        settings += [Setting("time_limit", limit, time.text)] if limit else []
        dropped += [] if limit else [Dropped(time.text, "to Slurm it is no limit")]
    if (alone := last(given, "--exclusive")) is not None:
        settings.append(Setting("slurm.exclusive", "true", alone.text))
    settings += _env(given, dropped)
    return settings, dropped


def _joined(option: Given) -> str:
    if len(option.words) == 1:
        return option.words[0]
    return (
        f"{option.words[0]}={option.value}"
        if option.words[0].startswith("--")
        else f"{option.words[0]}{option.value}"
    )


def _size(given: Sequence[Given], dropped: list[Dropped]) -> list[Setting]:
    keys = {"-N": "nodes", "-n": RANKS, "--ntasks-per-node": RANKS_EACH, "-c": "slurm.cpus_per_task"}
    found = counts(given, keys, dropped, between="-")
    for name in ("--gres", "--gpus-per-node", "--gpus-per-task", "-G", "--ntasks-per-gpu"):
        if (one := last(given, name)) is not None:
            found += _gpus(one, dropped)
    return found


def _gpus(option: Given, dropped: list[Dropped]) -> list[Setting]:
    """Return what an option says of GPUs. A kind of GPU needs `slurm.gres`, which names it."""
    if is_later(option.value):
        count_later(option, dropped)
        return []
    if option.name in ("--gpus-per-task", "--ntasks-per-gpu"):
        if option.value.rpartition(":")[2] != "1":
            raise ValueError(f"{option.text}: orch starts one rank for each GPU")
        dropped.append(Dropped(option.text, "orch starts one rank for each GPU"))
        return [Setting(DEVICE, "gpu", option.text)]
    if option.name == "--gres":
        count = gpus_of(option.value)
        if not count:
            return [Setting("slurm.gres", option.value, option.text)]
        is_plain = option.value in ("gpu", f"gpu:{count}")
        return [
            Setting(GPUS_EACH, str(count), option.text),
            *([] if is_plain else [Setting("slurm.gres", option.value, option.text)]),
        ]
    kind, _, count_text = option.value.rpartition(":")
    count = number(replace(option, value=count_text))
    gres = [Setting("slurm.gres", f"gpu:{kind}:{count}", option.text)] if kind and option.name != "-G" else []
    return [Setting(GPUS_ALL if option.name == "-G" else GPUS_EACH, str(count), option.text), *gres]


def duration(option: Given) -> str:
    """Return a time limit as a job file has it: `2-12` is `60h`; empty for 0, which is none. Raises ValueError for another
    text."""
    match = _TIME.fullmatch(option.value)
    if match is None:
        raise ValueError(f"{option.text}: write a time such as 12:00:00 or 2-00:00:00")
    parts = [int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds")]
    if match["clock"]:
        clock = [int(part) for part in match["clock"].split(":")]
        parts = {1: [0, 0, *clock, 0], 2: [0, 0, *clock], 3: [0, *clock]}[len(clock)]
    seconds = sum(count * unit for count, unit in zip(parts, (86_400, 3600, 60, 1), strict=True))
    text = ""
    for letter, unit in (("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, unit)
        text += f"{count}{letter}" if count else ""
    return text


def _env(given: Sequence[Given], dropped: list[Dropped]) -> list[Setting]:
    """Return the variables that `--export=ALL,NAME=value` sets."""
    one = last(given, "--export")
    if one is None:
        return []
    pairs = [word for word in one.value.split(",") if "=" in word]
    if not pairs:
        dropped.append(
            Dropped(one.text, "ranks get the environment of the submit, and env and secrets of the job file")
        )
    return [
        Setting(f"env.{name}", value, one.text) for name, _, value in (pair.partition("=") for pair in pairs)
    ]


# The size of a job: Slurm's tasks are the ranks, unless srun starts another launcher on each node


def of_tasks(line: LaunchLine, inner: LaunchLine | None = None) -> LaunchLine:
    """Return a line of srun whose tasks are the ranks; `inner` is what the tasks run, when it is Python."""
    settings, gpus = _without_gpus(line.settings)
    settings = [*_with_device(settings, gpus), *([gpus] if gpus is not None else [])]
    if not any(setting.key in _COUNTS for setting in settings):
        settings.append(Setting(RANKS_EACH, "1", "one process", yields=True))
    if inner is None:
        return replace(line, settings=tuple(settings))
    return replace(inner, settings=(*settings, *inner.settings), dropped=(*line.dropped, *inner.dropped))


def nested(line: LaunchLine, inner: LaunchLine) -> LaunchLine:
    """Return a line of srun that starts another launcher, one for each node: that one counts the ranks."""
    settings, gpus = _without_gpus(line.settings)
    why = f"{inner.launcher} starts the ranks, and says how many"
    dropped = [Dropped(setting.option, why) for setting in settings if setting.key in _COUNTS]
    keys = {"slurm.cpus_per_task": CPUS_NODE}
    outer = [
        replace(setting, key=keys.get(setting.key, setting.key))
        for setting in settings
        if setting.key not in _COUNTS
    ]
    counts = [setting for setting in inner.settings if setting.key in _COUNTS]
    own = list(inner.settings)
    if gpus is not None and all(count.yields and count.value == ALL for count in counts):
        own = [setting for setting in own if setting not in counts] + [gpus]
    elif gpus is not None:
        own.append(replace(gpus, yields=True))
    return replace(
        inner,
        settings=(*_with_device(outer, gpus), *own),
        dropped=(*line.dropped, *dropped, *inner.dropped),
    )


def _without_gpus(settings: Sequence[Setting]) -> tuple[list[Setting], Setting | None]:
    """Return the settings without those of GPUs, and the GPUs as ranks: of a node, or of all."""
    keys = {GPUS_EACH: RANKS_EACH, GPUS_ALL: RANKS}
    gpus = [replace(setting, key=keys[setting.key]) for setting in settings if setting.key in keys]
    return [setting for setting in settings if setting.key not in keys], gpus[-1] if gpus else None


def _with_device(settings: Sequence[Setting], gpus: Setting | None) -> list[Setting]:
    """Return the settings, and the device of ranks: Slurm gives no GPUs that are not asked for. Without any option srun
    uses the nodes that an sbatch script asked for."""
    has_own = any(setting.key != "backend" for setting in settings) or gpus is not None
    if not has_own or any(setting.key == DEVICE for setting in settings):
        return list(settings)
    option, device = (gpus.option, "gpu") if gpus is not None else ("srun without GPUs", "cpu")
    return [*settings, Setting(DEVICE, device, option, yields=gpus is None)]
