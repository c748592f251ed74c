"""Options of sbatch: what a job file may name, what orch sets itself, and how one is written into a batch script. Pure.

One Slurm task on each node runs the node's agent, which starts all of its ranks: so a task is given what all ranks of
the node need together. The later of two equal options counts, and `slurm.extra` comes last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

SIGNAL_MARGIN_S = 30
"""How long before the time limit the ranks must have saved: the supervisor still stops them and asks for a requeue."""

OPTION_CHARS_MAX = 4000
"""sbatch holds an option of a script in a buffer of 8192 bytes."""

MINUTE_S = 60

_SCRIPT = "orch's own batch script needs it as it is"
_OWNED = {
    **dict.fromkeys(("job-name", "J"), "orch sets it to `name`"),
    **dict.fromkeys(("nodes", "N"), "write `nodes` and `spares`"),
    **dict.fromkeys(("time", "t"), "write `time_limit`"),
    **dict.fromkeys(("gpus-per-node", "gpus", "G", "gpus-per-task"), "write `gpus_per_node`"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node", "ntasks-per-gpu"), "write `procs_per_node`"),
    **dict.fromkeys(("export", "export-file", "get-user-env"), "write `env` and `secrets`"),
    **dict.fromkeys(("partition", "p"), "write `slurm.partition`"),
    **dict.fromkeys(("account", "A"), "write `slurm.account`"),
    **dict.fromkeys(("qos", "q"), "write `slurm.qos`"),
    **dict.fromkeys(("constraint", "C"), "write `slurm.constraint`"),
    **dict.fromkeys(("nodefile", "F"), "write its nodes as --nodelist"),
    **dict.fromkeys(("exclude", "x"), "write `slurm.exclude`"),
    **dict.fromkeys(("cpus-per-task", "c"), "write `slurm.cpus_per_task`"),
    **{name: f"write `slurm.{name}`" for name in ("mem", "exclusive")},
    **dict.fromkeys(("output", "o", "error", "e", "input", "i", "open-mode"), "logs are orch's own"),
    **dict.fromkeys(("chdir", "D", "wrap", "requeue", "no-requeue", "signal", "no-kill", "k"), _SCRIPT),
    **dict.fromkeys(("array", "a"), "a job is one job; submit it several times"),
    **dict.fromkeys(("wait", "W"), "write `orch submit --follow`"),
    **dict.fromkeys(("clusters", "M"), "orch asks the one cluster of this machine"),
    **dict.fromkeys(("test-only", "parsable", "help", "usage", "version", "h", "V"), "then no job is queued"),
}
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


def fault_of(option: str) -> str:
    """Return the fault of an item of `slurm.extra`, empty without one."""
    name = re.split("[=\\s]", option.lstrip("-"), maxsplit=1)[0]
    if not name:
        return "names no option; write it as sbatch takes it, such as --licenses=foo"
    is_two = re.match(r"--?[^\s=]+\s", option) or re.search(r"\s--?[a-z]", option)
    if is_two and not option.startswith("--comment="):
        return (
            "must be one option, its value after `=`, such as --licenses=foo; write others as further items"
        )
    if option == EXPEDITED:
        return ""
    if option.startswith("--"):
        owned = [one for one in _OWNED if len(one) > 1 and one.startswith(name)]  # sbatch takes beginnings
        return f"cannot stand here: {_OWNED[owned[0]]}" if owned else ""
    letters = re.match(f"[{_FLAGS}]*[A-Za-z]?", name)
    owned = [letter for letter in (letters.group() if letters else "") if letter in _OWNED]
    return f"-{owned[0]} cannot stand here: {_OWNED[owned[0]]}" if owned else ""


def gres_of(extra: Sequence[str]) -> str:
    """Return the generic resources that `slurm.extra` asks for, empty for none."""
    return next((option[7:] for option in reversed(extra) if option.startswith("--gres=")), "")


def gpus_of(gres: str) -> int:
    """Return how many GPUs of a node are among generic resources."""
    matches = [_GPUS.fullmatch(item.strip()) for item in gres.split(",")]
    return sum(int(match.group(1) or 1) for match in matches if match)


def signal_s(grace_s: float) -> int:
    """Return how long before the time limit Slurm signals the batch script."""
    return math.ceil(grace_s) + SIGNAL_MARGIN_S


def limit_s(time_limit_s: float) -> int:
    """Return the time limit as Slurm takes it, in whole minutes."""
    return math.ceil(time_limit_s / MINUTE_S) * MINUTE_S


def defaults(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the options that the submitter's environment chooses. The rest of SBATCH_* would break what the batch script
    relies on, and does not count."""
    chosen = ((name, environ.get(f"SBATCH_{name.upper()}", "")) for name in _DEFAULTS)
    return tuple((name, text) for name, text in chosen if text and text.isprintable())


def directive(option: str) -> str:
    """Return an option as a line of a batch script. Its text must be printable.

    sbatch reads such a line itself: it splits at blanks, takes quotes and the backslashes within them away, and ends
    at a bare `#`. The words hetjob and packjob anywhere in the line would begin another component of the job.
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
