"""Options of launchers, as far as a shim needs them: which arguments are a rank's program, how many ranks are asked
for, which arguments the launcher adds to the program's, and which options orch replaces.

Rules: an option that is in no table is a mistake, as it is for the launcher. Accelerate's options are read by Accelerate itself, see
`accelerate_env`. Those of srun are in `sbatch_options`. Tables are of torch 2.13, DeepSpeed 0.19, Lightning 2.6, Slurm 22.05 to 25.11 and Open MPI 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.agent.ranks.hook.launch import MODULES, NAMES, find_launcher
from orchestrator.agent.ranks.rank_start import CountOption, LauncherCall
from orchestrator.core.errors import UserError
from orchestrator.core.option_table import Option, OptionTable, list_names
from orchestrator.core.slurm import sbatch_options


@dataclass(frozen=True)
class RunOnce:
    """A command that the launcher would run once on this node: `mpirun -np 1 hostname`, or another launcher behind srun."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class PassThrough:
    """The real launcher is to be run: it starts no ranks. Where there is none, `argv` do as well; none: they do not."""

    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Launcher:
    """A launcher's options, and the names of `rank_options` ones, which concern the ranks; the others do not."""

    usage: str
    rank_options: str
    options: OptionTable


_HELP = "--help/-h --version/-V --usage"
_INFO_OPTIONS = list_names(_HELP)
"""Options with which a launcher starts nothing."""

_TORCHRUN = _Launcher(
    "torchrun [options] [-m | --no-python] script [arguments]",
    "nnodes nproc-per-node module no-python use-env",
    OptionTable(
        "torchrun",
        "--nnodes= --nproc-per-node= --module/-m --no-python --use-env --rdzv-backend= --rdzv-endpoint= --rdzv-id= --rdzv-conf= "
        "--standalone --master-addr= --master-port= --local-addr= --node-rank= --max-restarts= --monitor-interval= --start-method= "
        "--role= --log-dir= --redirects/-r= --tee/-t= --local-ranks-filter= --duplicate-stdout-filters= "
        "--duplicate-stderr-filters= --logs-specs= --event-log-handler= --numa-binding= --signals-to-handle= --shutdown-timeout= "
        "--virtual-local-rank --run-path " + _HELP,
    ),
)
_DEEPSPEED = _Launcher(
    "deepspeed [options] script [arguments]",
    "num-nodes num-gpus include module no-python no-local-rank",
    OptionTable(
        "deepspeed",
        "--num-nodes= --num-gpus/--num-accelerators= --include/-i= --module --no-python --no-local-rank --hostfile/-H= "
        "--master-port= --master-addr= --node-rank= --launcher= --launcher-args= --ssh-port= --no-ssh --no-ssh-check --force-multi "
        "--venv-script= --enable-each-rank-log= --log-level= --quiet/-q --save-pid --bind-cores-to-rank --bind-core-list= "
        "--exclude/-e= " + _HELP,
    ),
)
_FABRIC = _Launcher(
    "fabric run [options] script [arguments]",
    "accelerator strategy devices num-nodes precision",
    OptionTable(
        "fabric run",
        "--accelerator= --strategy= --devices= --num-nodes= --precision= --node-rank= --main-address= --main-port= "
        + _HELP,
        abbreviates=False,
    ),
)
_SRUN = _Launcher(
    "srun [options] program [arguments]", "nodes ntasks ntasks-per-node export chdir", sbatch_options.SRUN
)
_MPIRUN = _Launcher(
    "mpirun [options] program [arguments]",
    "n npernode x genv wdir mca",
    OptionTable(
        "mpirun",
        "-n/-np/--np/-c/--n= --npernode/-npernode/-N/-ppn/-perhost= -x= -genv== --wdir/-wdir/--wd/-wd= --mca/-mca/--pmca== "
        "-H/--host/-host/-hosts= --hostfile/-hostfile/-machinefile/--machinefile/-f= --map-by/-map-by= --rank-by= --bind-to/-bind-to= "
        "--report-bindings/-report-bindings --allow-run-as-root --oversubscribe/-oversubscribe --tag-output/-tag-output "
        "--timestamp-output/-timestamp-output --output-filename= --display-map --use-hwthread-cpus --verbose/-v --quiet/-q -genvall "
        "--noversion -launcher= --prefix= " + _HELP,
        abbreviates=False,
    ),
)

_Reader: TypeAlias = "Callable[[Sequence[str], int], tuple[list[Option], int]]"
_CONDA_ENV = ("-n", "--name")
"""Options of `conda run` before the name of an environment, which may be `deepspeed`."""

_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")


def parse_line(
    launcher: str, words: Sequence[str], ranks_here: int, ranks: int
) -> LauncherCall | RunOnce | PassThrough:
    """Return what a launcher's words ask for; `launcher` is one of `NAMES` or a module. `ranks_here` are the
    job's ranks on this node, `ranks` all of them. Raises UserError."""
    if launcher in ("torchrun", "torch.distributed.launch"):
        return _torchrun(launcher, words)
    if launcher == "deepspeed":
        return _deepspeed(words)
    if launcher == "lightning.fabric.cli":
        return _fabric("fabric", ("run", *words), ranks_here, ranks)
    if launcher in ("fabric", "lightning"):
        return _fabric(launcher, words, ranks_here, ranks)
    if launcher == "srun":
        return _srun(words, ranks_here, ranks)
    if launcher in ("mpirun", "mpiexec"):
        return _mpirun(words, ranks)
    raise AssertionError(launcher)


def check_counts(call: LauncherCall, nodes: int, ranks_here: int, ranks: int) -> None:
    """Compare what a call asks for with the job. Raises UserError."""
    if call.nodes is not None and not call.nodes[0].number <= nodes <= call.nodes[1].number:
        asked = call.nodes[1]
        raise UserError(_mismatch_text(asked, "node", nodes, f"nodes: {asked.number}", f"--nnodes={nodes}"))
    if call.ranks_per_node is not None and call.ranks_per_node.number != ranks_here:
        asked = call.ranks_per_node
        field_name = f"gpus_per_node: {asked.number} (procs_per_node: {asked.number} for CPU ranks)"
        raise UserError(_mismatch_text(asked, "rank on each node", ranks_here, field_name, str(ranks_here)))
    if call.ranks is not None and call.ranks.number != ranks:
        asked = call.ranks
        each = asked.number // nodes if asked.number % nodes == 0 else 0
        fix = (
            f"gpus_per_node: {each} (procs_per_node: {each} for CPU ranks)"
            if each
            else "fitting nodes and gpus_per_node"
        )
        raise UserError(_mismatch_text(asked, "rank", ranks, fix, str(ranks)))


def _mismatch_text(asked: CountOption, what: str, in_job: int, fields: str, number: str) -> str:
    return (
        f"{asked.option} asks for {_count_text(asked.number, what)}, but the job has {in_job}; either set {fields} in the job file "
        f"(or the flag of orch run for it), or write {number.rpartition('=')[2]} in the line"
    )


def _count_text(number: int, what: str) -> str:
    first, _, rest = what.partition(" ")
    return f"{number} {first}{'' if number == 1 else 's'}{' ' + rest if rest else ''}"


class _ParsedOptions:
    """The options of a line by their names, the last of each, and the words behind them. Raises UserError."""

    def __init__(self, launcher: _Launcher, words: Sequence[str], at: int = 0) -> None:
        self._launcher = launcher
        self.values: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.all: list[Option] = []
        self.program_words = tuple(words[self.add(launcher.options.read, words, at) :])
        self.starts_ranks = self.values.keys().isdisjoint(_INFO_OPTIONS)
        if self.starts_ranks and not self.program_words:
            name = launcher.usage.partition(" [")[0]
            raise UserError(f"{name} names no program after its options", fix=launcher.usage)

    def add(self, read: _Reader, words: Sequence[str], at: int) -> int:
        """Add the options at a position, and return the position behind them. Raises UserError."""
        try:
            found, at = read(words, at)
        except ValueError as err:
            raise UserError(str(err), fix=self._launcher.usage) from err
        self.all += found
        self.values |= {one.name: one.value for one in found}
        self.texts |= {one.name: one.text for one in found}
        return at

    @property
    def unused(self) -> list[str]:
        """The options that do not concern the ranks, as they were written."""
        return [one.text for one in self.all if one.name not in self._launcher.rank_options.split()]

    def number(self, name: str) -> CountOption | None:
        """Return the number of an option, None where it is not given. Raises UserError."""
        if name not in self.values:
            return None
        text = self.values[name]
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise UserError(f"{self.texts[name]}: must be a whole number of at least 1", fix=self._launcher.usage)
        return CountOption(int(text), self.texts[name])

    def number_range(self, name: str, between: str) -> tuple[CountOption, CountOption] | None:
        """Return the least and the most of a range, such as `--nnodes 1:4`. Raises UserError."""
        if name not in self.values:
            return None
        low, _, high = self.values[name].partition(between)
        counts = []
        for text in (low, high or low):
            if not (text.isascii() and text.isdecimal()):
                raise UserError(f"{self.texts[name]}: must be a whole number", fix=self._launcher.usage)
            counts.append(CountOption(int(text), self.texts[name]))
        return counts[0], counts[1]


def _program_words(given: _ParsedOptions) -> tuple[tuple[str, ...], bool]:
    is_module, is_command = "module" in given.values, "no-python" in given.values
    if is_module and is_command:
        raise UserError("--module and --no-python cannot be used together")
    return (("-m", *given.program_words) if is_module else given.program_words), not is_command


def _torchrun(launcher: str, words: Sequence[str]) -> LauncherCall | PassThrough:
    given = _ParsedOptions(_TORCHRUN, words)
    if not given.starts_ranks:
        return PassThrough()
    rest = given.program_words[:1] + (
        given.program_words[2:] if given.program_words[1:2] == ("--",) else given.program_words[1:]
    )
    given.program_words = rest  # torchrun takes that `--` away, too
    program, is_python = _program_words(given)
    is_given_rank = launcher != "torchrun" and "use-env" not in given.values
    each = given.values.get("nproc-per-node", "auto")
    return LauncherCall(
        launcher, program, is_python,
        local_rank="--local-rank" if is_given_rank else "", local_rank_at=1 + ("module" in given.values), has_macros=True,
        nodes=given.number_range("nnodes", ":"),
        ranks_per_node=None if each in ("auto", "gpu", "cpu", "xpu") else given.number("nproc-per-node"),
        unused=given.unused,
    )  # fmt: skip


def _deepspeed(words: Sequence[str]) -> LauncherCall | PassThrough:
    given = _ParsedOptions(_DEEPSPEED, words)
    if not given.starts_ranks:
        return PassThrough()
    program, is_python = _program_words(given)
    each, nodes = given.number("num-gpus"), given.number_range("num-nodes", ":")
    if (chosen := given.values.get("include")) is not None:
        hosts = [part.partition(":")[2] for part in chosen.split("@")]
        nodes = (CountOption(len(hosts), given.texts["include"]),) * 2
        each = CountOption(len(hosts[0].split(",")), given.texts["include"]) if hosts[0] else each
    return LauncherCall(
        "deepspeed", program, is_python, local_rank="" if "no-local-rank" in given.values else "--local_rank",
        local_rank_at=1 + ("module" in given.values), nodes=nodes, ranks_per_node=each, unused=given.unused,
    )  # fmt: skip


def _fabric(launcher: str, words: Sequence[str], ranks_here: int, ranks: int) -> LauncherCall | PassThrough:
    starts = 2 if tuple(words[:2]) == ("run", "model") else 1
    if tuple(words[:1]) != ("run",):
        return PassThrough()
    given = _ParsedOptions(_FABRIC, words, starts)
    if not given.starts_ranks:
        return PassThrough()
    kept, at = [given.program_words[0]], 1
    while at < len(given.program_words):  # its options may also follow the script
        word = given.program_words[at]
        name = _FABRIC.options.find(word.partition("=")[0])
        if name.startswith("--") and name[2:] not in _INFO_OPTIONS:
            at = given.add(_FABRIC.options.take_option, given.program_words, at)
        else:
            kept.append(word)
            at += 1
    devices = given.values.get("devices", "auto").strip("[] ")
    each = None
    if "," in devices:
        each = CountOption(len([word for word in devices.split(",") if word.strip()]), given.texts["devices"])
    elif devices not in ("-1", "auto"):
        each = given.number("devices")
    env = {"LT_CLI_USED": "1", "LT_NUM_NODES": str(ranks // ranks_here)}
    env["LT_DEVICES"] = devices if "," in devices else str(ranks_here)
    for name in ("accelerator", "strategy", "precision"):
        if name in given.values:
            env[f"LT_{name.upper()}"] = given.values[name]
    nodes = given.number_range("num-nodes", ":")
    return LauncherCall(f"{launcher} run", tuple(kept), nodes=nodes, ranks_per_node=each, unused=given.unused, env=env)


def _srun(words: Sequence[str], ranks_here: int, ranks: int) -> LauncherCall | RunOnce | PassThrough:
    given = _ParsedOptions(_SRUN, words)
    if not given.starts_ranks:
        return PassThrough()
    each, total = given.number("ntasks-per-node"), given.number("ntasks")
    pairs = [pair for pair in given.values.get("export", "").split(",") if "=" in pair]
    cwd = given.values.get("chdir", "")
    if _is_single_command(total, ranks, given.program_words):
        return PassThrough(_wrap_in_env(given.program_words, cwd, pairs))
    for text in given.unused:
        if text.startswith("--container"):
            raise UserError(f"srun {text}: for ranks in a container write the whole line as command:")
    nodes = given.number_range("nodes", "-")
    tasks_here = each.number if each else total.number * ranks_here // ranks if total else 0
    is_shell = given.program_words[0].rpartition("/")[2] in _SHELLS
    is_one = each is not None and tasks_here == 1 < ranks_here
    if _starts_launcher(given.program_words) or is_one or (is_shell and tasks_here <= 1):
        # A task of each node: as this script, which each node runs
        return RunOnce(_wrap_in_env(given.program_words, cwd, pairs))
    env = dict(pair.partition("=")[::2] for pair in pairs)
    return LauncherCall(
        "srun", given.program_words, False, nodes=nodes, ranks_per_node=each, ranks=total, unused=given.unused, env=env, cwd=cwd
    )  # fmt: skip


def _wrap_in_env(words: tuple[str, ...], cwd: str, pairs: Sequence[str]) -> tuple[str, ...]:
    """Return a command that runs in a folder, unless that is empty, and with more variables."""
    front = (*(("-C", cwd) if cwd else ()), *pairs)
    return ("env", *front, *words) if front else words


def _is_single_command(total: CountOption | None, ranks: int, words: Sequence[str]) -> bool:
    """Return whether a command that is asked for once is not a rank of the job: in a job of one rank `hostname` is not."""
    names = [word.rpartition("/")[2] for word in words]
    trains = any(name == "-m" or name.startswith("python") or name.endswith((".py", ".sh")) for name in names)
    return total is not None and total.number == 1 and (ranks > 1 or not trains)


def _starts_launcher(words: Sequence[str]) -> bool:
    """Return whether a command starts a launcher, perhaps behind `env`, `uv run`, `numactl` and the like: what follows a
    Python or a script is an argument of these, such as `--strategy deepspeed`."""
    for at, word in enumerate(words):
        name, previous = word.rpartition("/")[2], words[at - 1] if at else ""
        if name.startswith("python"):
            return bool(find_launcher(list(words[at:]))[0])
        if name.endswith((".py", ".sh")) or (previous == "-m" and not word[:1].isdigit()):  # numactl -m 0
            return word in MODULES
        if name in NAMES and previous not in _CONDA_ENV:
            return True
    return False


def _mpirun(words: Sequence[str], ranks: int) -> LauncherCall | RunOnce | PassThrough:
    given = _ParsedOptions(_MPIRUN, words)
    if not given.starts_ranks:
        return PassThrough()
    if ":" in given.program_words:
        raise UserError("mpirun … : … starts several programs, and all ranks of a job run the same one")
    total, each = given.number("n"), given.number("npernode")
    pairs = [one.value for one in given.all if one.name in ("x", "genv") and "=" in one.value]
    cwd = given.values.get("wdir", "")
    if _is_single_command(total, ranks, given.program_words) or _starts_launcher(given.program_words):
        return RunOnce(_wrap_in_env(given.program_words, cwd, pairs))
    env = dict(pair.partition("=")[::2] for pair in pairs)
    return LauncherCall("mpirun", given.program_words, False, ranks_per_node=each, ranks=total, unused=given.unused, env=env, cwd=cwd)  # fmt: skip
