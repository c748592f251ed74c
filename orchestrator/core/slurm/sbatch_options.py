"""Options of sbatch and srun: all of them, what a job file may name, what orch sets itself, and how one is written into a batch
script. Pure.

One Slurm task on each node runs the node's agent, which starts all of its ranks: so a task is given what all ranks of
the node need together. The later of two equal options counts, and `slurm.extra` comes last. The tables are of Slurm 22.05 to 25.11.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from orchestrator.core.option_table import OptionTable, list_names

SIGNAL_MARGIN_S = 30
"""Time between the end of the ranks' grace and the time limit: the supervisor stops the ranks and asks for a requeue."""

OPTION_CHARS_MAX = 4000
"""sbatch holds an option of a script in a buffer of 8192 bytes."""

MINUTE_S = 60

_RESERVED = {
    "orch sets it to `name`": "--job-name/-J=",
    "write `nodes` and `spares`": "--nodes/-N=",
    "write `time_limit`": "--time/-t=",
    "write `gpus_per_node`": "--gpus-per-node= --gpus/-G= --gpus-per-task=",
    "write `procs_per_node`": "--ntasks/-n= --ntasks-per-node/--tasks-per-node= --ntasks-per-gpu=",
    "write `env` and `secrets`": "--export= --export-file= --get-user-env",
    "write `slurm.partition`": "--partition/-p=",
    "write `slurm.account`": "--account/-A=",
    "write `slurm.qos`": "--qos/-q=",
    "write `slurm.constraint`": "--constraint/-C=",
    "write `slurm.exclude`": "--exclude/-x=",
    "write `slurm.cpus_per_task`": "--cpus-per-task/-c=",
    "write `slurm.mem`": "--mem=",
    "write `slurm.exclusive`": "--exclusive",
    "write its nodes as --nodelist": "--nodefile/-F=",
    "write its text as `launch`, which each node runs": "--wrap=",
    "write `orch submit --follow`": "--wait/-W",
    "logs are orch's own: orch logs": "--output/-o= --error/-e= --input/-i= --open-mode=",
    "orch's own batch script sets it": "--chdir/--workdir/-D= --requeue --signal=",
    "orch's own batch script may be requeued when nodes are lost": "--no-requeue",
    "orch's own batch script keeps running, and restarts all ranks, when a node fails": "--no-kill/-k",
    "job arrays are not supported; submit the job several times": "--array/-a=",
    "orch asks the one cluster of this machine": "--clusters/-M=",
    "orch prints the job's id itself": "--parsable",
    "no job would be queued": "--test-only --help/-h --usage --version/-V",
}
"""Options that are not allowed in `slurm.extra`, by the reason."""

_STEP = {
    "orch shows what each rank prints: orch logs": "--label/-l --unbuffered/-u --verbose/-v --quiet/-Q --disable-status/-X "
    "--quit-on-interrupt --slurmd-debug=",
    "orch ends and restarts all ranks when one fails": "--kill-on-bad-exit/-K",
    "orch starts one agent on each node, and the ranks from it": "--jobid= --het-group= --overlap --overcommit/-O --exact "
    "--distribution/-m= --cpu-bind= --mem-bind= --gpu-bind= --accel-bind= --mpi= --multi-prog --pty --relative/-r= --resv-ports "
    "--bcast --bcast-exclude= --send-libs --compress --threads/-T= --propagate --preserve-env/-E --immediate/-I --msg-timeout= "
    "--prolog= --epilog= --task-prolog= --task-epilog= --no-allocate/-Z --ntasks-per-core= --ntasks-per-socket= --x11 "
    "--ignore-pbs --wait-all-nodes=",
}
"""Options of srun for the tasks of a step, by the reason why a job file needs none; sbatch takes some of them."""

_OTHERS = (
    "--reservation= --nodelist/-w= --gres= --comment= --mail-user= --mail-type= --acctg-freq= --bb= --bbf= --begin/-b= "
    "--cluster-constraint= --container= --contiguous --core-spec/-S= --cores-per-socket= --cpu-freq= --cpus-per-gpu= --deadline= "
    "--delay-boot= --dependency/-d= --extra-node-info/-B= --gid= --gpu-freq= --gpus-per-socket= --gres-flags= --hint= --hold/-H "
    "--kill-on-invalid-dep= --licenses/-L= --mcs-label= --mem-per-cpu= --mem-per-gpu= --mincpus= --network= --nice --power= "
    "--prefer= --priority= --profile= --reboot --oversubscribe/-s --sockets-per-node= --spread-job --switches= --thread-spec= "
    "--threads-per-core= --time-min= --tmp= --uid= --use-min-nodes --wckey= --batch= --container-id= --container-image= "
    "--container-mounts= --container-workdir= --no-container-mount-home --container-mount-home --container-name= "
    "--container-writable"
)
"""Options that sbatch takes as they are, as `slurm.extra`; the last are those of pyxis."""

_TEXT = " ".join([*_RESERVED.values(), *_STEP.values(), _OTHERS])
SBATCH = OptionTable("sbatch", _TEXT)
SRUN = OptionTable("srun", f"{_TEXT} --wait/-W=")
"""All that a step takes, and those of the job, which it takes as well."""

RESERVED_OPTIONS = {name: why for why, text in _RESERVED.items() for name in list_names(text)}
"""The reasons why options are not allowed in `slurm.extra`, by the options' names without dashes."""

STEP_OPTIONS = {name: why for why, text in _STEP.items() for name in list_names(text)}

EXPEDITED = "--requeue=expedite"
"""orch's own --requeue with a value (Slurm 25.11): a requeued job starts again at once. Older ones refuse it."""

_FLAGS = "HIOQsv"
"""Short options without a value: another may follow in the same word."""

_DEFAULTS = ("account", "partition", "qos", "reservation", "constraint", "wckey")
"""Options that a user may set for all jobs, as SBATCH_ACCOUNT and so on."""

_PLAIN = re.compile(r"-[A-Za-z0-9_@%+=:,./\[\]-]*")
_HETEROGENEOUS = re.compile("(het|pack)(job)", re.IGNORECASE)
_BROKEN = r"\1\\\2"
_GPUS = re.compile(r"(?:gres[:/])?gpu(?::[A-Za-z][^:,]*)?(?::([0-9]+))?(?:\([^)]*\))?")


def find_option_fault(option: str) -> str:
    """Return the fault of an item of `slurm.extra`, empty without one."""
    name = re.split("[=\\s]", option.lstrip("-"), maxsplit=1)[0]
    if not name:
        return "names no option; write it as sbatch takes it, such as --licenses=foo"
    is_two = re.match(r"--?[^\s=]+\s", option) or re.search(r"\s--?[a-z]", option)
    if is_two and not option.startswith("--comment="):
        return "must be one option, its value after `=`, such as --licenses=foo; write others as further items"
    if option == EXPEDITED:
        return ""
    if option.startswith("--"):
        owned = [one for one in RESERVED_OPTIONS if len(one) > 1 and one.startswith(name)]  # sbatch takes beginnings
        return f"is not allowed here: {RESERVED_OPTIONS[owned[0]]}" if owned else ""
    letters = re.match(f"[{_FLAGS}]*[A-Za-z]?", name)
    owned = [letter for letter in (letters.group() if letters else "") if letter in RESERVED_OPTIONS]
    return f"-{owned[0]} is not allowed here: {RESERVED_OPTIONS[owned[0]]}" if owned else ""


def find_gres(extra: Sequence[str]) -> str:
    """Return the generic resources that `slurm.extra` asks for, empty for none."""
    return next((option[7:] for option in reversed(extra) if option.startswith("--gres=")), "")


def count_gpus(gres: str) -> int:
    """Return how many GPUs of a node are among generic resources."""
    matches = [_GPUS.fullmatch(item.strip()) for item in gres.split(",")]
    return sum(int(match.group(1) or 1) for match in matches if match)


def signal_lead_s(grace_s: float) -> int:
    """Return how long before the time limit Slurm signals the batch script."""
    return math.ceil(grace_s) + SIGNAL_MARGIN_S


def whole_minutes_s(time_limit_s: float) -> int:
    """Return the time limit as Slurm takes it, in whole minutes."""
    return math.ceil(time_limit_s / MINUTE_S) * MINUTE_S


def submitter_defaults(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the options that the submitter's environment chooses. The rest of SBATCH_* would break what the batch script
    relies on, and does not count."""
    chosen = ((name, environ.get(f"SBATCH_{name.upper()}", "")) for name in _DEFAULTS)
    return tuple((name, text) for name, text in chosen if text and text.isprintable())


def directive(option: str) -> str:
    """Return an option as a line of a batch script. Its text must be printable.

    sbatch parses such a line itself: it splits at blanks, removes quotes and the backslashes in them, and ends at a
    bare `#`. The words hetjob and packjob anywhere in the line would begin another component of the job.
    """
    assert option.isprintable(), "a line break would end the line"
    if _PLAIN.fullmatch(option) and not _HETEROGENEOUS.search(option):
        return f"#SBATCH {option}"
    name, equals, value = option.partition("=")
    if not equals or not _PLAIN.fullmatch(name) or _HETEROGENEOUS.search(name):
        return f"#SBATCH {_quoted(option)}"
    return f"#SBATCH {name}={_quoted(value)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_HETEROGENEOUS.sub(_BROKEN, escaped)}"'
