"""Options of launchers, as far as a stand-in needs them: which words are a rank's program, how many ranks are asked for, what
the launcher adds to the program's own words, and which options are orch's own business.

Rules: an option that is in no table is a mistake, as it is for the launcher. Names with `_` and `-` are the same. Accelerate's
options are read by Accelerate itself, see `accelerate_env`. Tables are of torch 2.13, DeepSpeed 0.19, Lightning 2.6, Slurm 22.05 to 25.11 and Open MPI 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.agent.ranks.hook.launch import MODULES, NAMES, launcher_of
from orchestrator.agent.ranks.rank_start import Call, Count
from orchestrator.core.errors import UserError


@dataclass(frozen=True)
class Once:
    """A command that the launcher would run once on this node: `mpirun -np 1 hostname`, or another launcher behind srun."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class ToReal:
    """The real launcher is to be run: it starts no ranks. Where there is none, `words` do as well; none: they do not."""

    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Table:
    """A launcher's options: `own` bear on the ranks, the others do not. Each is written `-t/--tee=`, with `=` where a value
    follows."""

    usage: str
    own: str
    unused: str
    abbreviates: bool = True

    def known(self) -> dict[str, tuple[str, bool, bool]]:
        """Return by each name with its dashes the first name, whether a value follows, and whether it is used."""
        found = {}
        for texts, is_used in ((self.own, True), (self.unused, False)):
            for text in texts.split():
                names = text.rstrip("=").split("/")
                found.update({name: (names[0], text.endswith("="), is_used) for name in names})
        return found


_TORCHRUN = _Table(
    "torchrun [options] [-m | --no-python] script [arguments]",
    "--nnodes= --nproc-per-node= -m/--module --no-python --use-env",
    "--rdzv-backend= --rdzv-endpoint= --rdzv-id= --rdzv-conf= --standalone --master-addr= --master-port= --local-addr= "
    "--node-rank= --max-restarts= --monitor-interval= --start-method= --role= --log-dir= -r/--redirects= -t/--tee= "
    "--local-ranks-filter= --duplicate-stdout-filters= --duplicate-stderr-filters= --logs-specs= --event-log-handler= "
    "--numa-binding= --signals-to-handle= --shutdown-timeout= --virtual-local-rank --run-path",
)
_DEEPSPEED = _Table(
    "deepspeed [options] script [arguments]",
    "--num-nodes= --num-gpus/--num-accelerators= -i/--include= --module --no-python --no-local-rank",
    "-H/--hostfile= --master-port= --master-addr= --node-rank= --launcher= --launcher-args= --ssh-port= --no-ssh --no-ssh-check "
    "--force-multi --venv-script= --enable-each-rank-log= --log-level= -q/--quiet --save-pid --bind-cores-to-rank "
    "--bind-core-list= -e/--exclude=",
)
_FABRIC = _Table(
    "fabric run [options] script [arguments]",
    "--accelerator= --strategy= --devices= --num-nodes= --precision=",
    "--node-rank= --main-address= --main-port=",
    abbreviates=False,
)
_SRUN = _Table(
    "srun [options] program [arguments]",
    "-N/--nodes= -n/--ntasks= --ntasks-per-node= --export= -D/--chdir=",
    "-A/--account= -p/--partition= -q/--qos= -C/--constraint= --reservation= -w/--nodelist= -x/--exclude= --mem= --comment= "
    "--mail-user= --mail-type= -J/--job-name= --ntasks-per-gpu= -c/--cpus-per-task= -t/--time= --gres= -G/--gpus= "
    "--gpus-per-node= --gpus-per-task= --exclusive -o/--output= -e/--error= -i/--input= --open-mode= -l/--label "
    "-u/--unbuffered -v/--verbose -Q/--quiet -X/--disable-status --quit-on-interrupt --signal= -K/--kill-on-bad-exit "
    "-k/--no-kill -W/--wait= --jobid= --het-group= --overlap -O/--overcommit --exact -m/--distribution= --cpu-bind= "
    "--mem-bind= --gpu-bind= --accel-bind= --mpi= --pty -r/--relative= --resv-ports -T/--threads= --propagate "
    "-E/--preserve-env -I/--immediate= --msg-timeout= --prolog= --epilog= --task-prolog= --task-epilog= --ntasks-per-core= "
    "--ntasks-per-socket= -d/--dependency= --cpus-per-gpu= --mem-per-cpu= --mem-per-gpu= --hint= --gres-flags= "
    "-s/--oversubscribe --threads-per-core= --sockets-per-node= --cores-per-socket= --network= --cpu-freq= --acctg-freq= "
    "-L/--licenses= -B/--extra-node-info= --bcast -b/--begin= --deadline= --nice --profile= --container-image= "
    "--container-mounts= --container-workdir= --container-name= --container-writable --no-container-mount-home",
)
_MPIRUN = _Table(
    "mpirun [options] program [arguments]",
    "-n/-np/--np/-c/--n= --npernode/-npernode/-N/-ppn/-perhost= -x/-genv= --wdir/-wdir/--wd/-wd=",
    "-H/--host/-host/-hosts= --hostfile/-hostfile/-machinefile/--machinefile/-f= --map-by/-map-by= --rank-by= --bind-to/-bind-to= "
    "--report-bindings/-report-bindings --allow-run-as-root --oversubscribe/-oversubscribe --tag-output/-tag-output --timestamp-output/-timestamp-output "
    "--output-filename= --display-map --use-hwthread-cpus --verbose/-v --quiet/-q -genvall --noversion -launcher= --prefix=",
    abbreviates=False,
)
_WITH_TWO = ("--mca", "-mca", "--pmca", "-genv")
"""Options of mpirun with two values."""

_NO_RUN = ("-h", "--help", "--version", "-V", "--usage")
_CONDA_ENV = ("-n", "--name")
"""Options of `conda run` before the name of an environment, which may be `deepspeed`."""

_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")


def read(launcher: str, words: Sequence[str], ranks_here: int, ranks: int) -> Call | Once | ToReal:
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


def agree(call: Call, nodes: int, ranks_here: int, ranks: int) -> None:
    """Compare what a call asks for with the job. Raises UserError."""
    if call.nodes is not None and not call.nodes[0].number <= nodes <= call.nodes[1].number:
        asked = call.nodes[1]
        raise UserError(_differs(asked, "node", nodes, f"nodes: {asked.number}", f"--nnodes={nodes}"))
    if call.ranks_each is not None and call.ranks_each.number != ranks_here:
        asked = call.ranks_each
        field_name = f"gpus_per_node: {asked.number} (procs_per_node: {asked.number} for CPU ranks)"
        raise UserError(_differs(asked, "rank on each node", ranks_here, field_name, str(ranks_here)))
    if call.ranks is not None and call.ranks.number != ranks:
        asked = call.ranks
        each = asked.number // nodes if asked.number % nodes == 0 else 0
        fix = (
            f"gpus_per_node: {each} (procs_per_node: {each} for CPU ranks)"
            if each
            else "fitting nodes and gpus_per_node"
        )
        raise UserError(_differs(asked, "rank", ranks, fix, str(ranks)))


def _differs(asked: Count, what: str, there: int, fields: str, number: str) -> str:
    return (
        f"{asked.option} asks for {_counted(asked.number, what)}, and the job has {there}; write {fields} in the job file, "
        f"or the flag of orch run for it, or {number.rpartition('=')[2]} in the line"
    )


def _counted(number: int, what: str) -> str:
    first, _, rest = what.partition(" ")
    return f"{number} {first}{'' if number == 1 else 's'}{' ' + rest if rest else ''}"


class _Given:
    """The options of a line by their first names, the last of each, and the words behind them."""

    def __init__(self, launcher: str, words: Sequence[str], table: _Table, starts: int = 0) -> None:
        self._launcher, self._table, self._known = launcher, table, table.known()
        self._flags = [name for name, (_, takes, _) in self._known.items() if not takes]
        self.values: dict[str, str] = {}
        self.text: dict[str, str] = {}
        self.unused: list[str] = []
        self.all: list[tuple[str, str]] = []
        self.runs = True
        at = starts
        while at < len(words) and words[at].startswith("-") and words[at] != "-":
            if words[at] == "--":
                at += 1
                break
            if words[at] in _NO_RUN:
                self.runs = False
                return
            at = self.take(words, at)
        self.rest = tuple(words[at:])
        if not self.rest:
            raise UserError(f"{launcher} names no program behind its options", fix=table.usage)

    def find(self, name: str) -> str:
        """Return an option's name as the table has it; empty for another word."""
        plain = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
        if plain in self._known or not (self._table.abbreviates and plain.startswith("--")):
            return plain if plain in self._known else ""
        meant = [full for full in self._known if full.startswith(plain)]
        return meant[0] if len({self._known[full][0] for full in meant}) == 1 else ""

    def take(self, words: Sequence[str], at: int) -> int:
        """Take the option at a position, and return the position behind it. Raises UserError."""
        word = words[at]
        name, equals, value = word.partition("=")
        full = self.find(name)
        if not full and not word.startswith("--") and word[:2] in self._known:
            if self._known[word[:2]][1]:
                full, equals, value = word[:2], "=", word[2:]
            elif all(letter.isdigit() or f"-{letter}" in self._flags for letter in word[2:]):
                full = word[:2]  # flags in one word, or a number behind one: -lu, -K1
        if word in _WITH_TWO and len(words) > at + 2:
            self.all.append((word, f"{words[at + 1]}={words[at + 2]}"))
            return at + 3
        if not full:
            raise UserError(
                f"{self._launcher} has no option {name}, or orch does not know it", fix=self._table.usage
            )
        first, takes, is_used = self._known[full]
        text, at = word, at + 1
        if takes and not equals:
            if at >= len(words):
                raise UserError(f"{self._launcher} {word} needs a value behind it", fix=self._table.usage)
            value, text, at = words[at], f"{word} {words[at]}", at + 1
        self.values[first], self.text[first] = value, text
        self.all.append((first, value))
        if not is_used:
            self.unused.append(text)
        return at

    def number(self, name: str) -> Count | None:
        """Return the number of an option, None where it is not given. Raises UserError."""
        if name not in self.values:
            return None
        text = self.values[name]
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise UserError(f"{self.text[name]}: must be a whole number of at least 1", fix=self._table.usage)
        return Count(int(text), self.text[name])

    def span(self, name: str, between: str) -> tuple[Count, Count] | None:
        """Return the least and the most of a range, such as `--nnodes 1:4`. Raises UserError."""
        if name not in self.values:
            return None
        low, _, high = self.values[name].partition(between)
        counts = []
        for text in (low, high or low):
            if not (text.isascii() and text.isdecimal()):
                raise UserError(f"{self.text[name]}: must be a whole number", fix=self._table.usage)
            counts.append(Count(int(text), self.text[name]))
        return counts[0], counts[1]


def _program(given: _Given, module: str) -> tuple[tuple[str, ...], bool]:
    is_module, is_command = module in given.values, "--no-python" in given.values
    if is_module and is_command:
        raise UserError("--module and --no-python cannot stand together")
    return (("-m", *given.rest) if is_module else given.rest), not is_command


def _torchrun(launcher: str, words: Sequence[str]) -> Call | ToReal:
    given = _Given(launcher, words, _TORCHRUN)
    if not given.runs:
        return ToReal()
    rest = given.rest[:1] + (given.rest[2:] if given.rest[1:2] == ("--",) else given.rest[1:])
    given.rest = rest  # torchrun takes that `--` away, too
    program, is_python = _program(given, "-m")
    is_given_rank = launcher != "torchrun" and "--use-env" not in given.values
    each = given.values.get("--nproc-per-node", "auto")
    return Call(
        launcher, program, is_python,
        local_rank="--local-rank" if is_given_rank else "", local_rank_at=1 + ("-m" in given.values), has_macros=True,
        nodes=given.span("--nnodes", ":"),
        ranks_each=None if each in ("auto", "gpu", "cpu", "xpu") else given.number("--nproc-per-node"),
        unused=given.unused,
    )  # fmt: skip


def _deepspeed(words: Sequence[str]) -> Call | ToReal:
    given = _Given("deepspeed", words, _DEEPSPEED)
    if not given.runs:
        return ToReal()
    program, is_python = _program(given, "--module")
    each, nodes = given.number("--num-gpus"), given.span("--num-nodes", ":")
    if (chosen := given.values.get("-i")) is not None:
        hosts = [part.partition(":")[2] for part in chosen.split("@")]
        nodes = (Count(len(hosts), given.text["-i"]),) * 2
        each = Count(len(hosts[0].split(",")), given.text["-i"]) if hosts[0] else each
    return Call(
        "deepspeed", program, is_python, local_rank="" if "--no-local-rank" in given.values else "--local_rank",
        local_rank_at=1 + ("--module" in given.values), nodes=nodes, ranks_each=each, unused=given.unused,
    )  # fmt: skip


def _fabric(launcher: str, words: Sequence[str], ranks_here: int, ranks: int) -> Call | ToReal:
    starts = 2 if tuple(words[:2]) == ("run", "model") else 1
    if tuple(words[:1]) != ("run",):
        return ToReal()
    given = _Given(f"{launcher} run", words, _FABRIC, starts)
    if not given.runs:
        return ToReal()
    kept, at = [given.rest[0]], 1
    while at < len(given.rest):  # its options may also stand behind the script
        word = given.rest[at]
        if word.startswith("--") and given.find(word.partition("=")[0]):
            at = given.take(given.rest, at)
        else:
            kept.append(word)
            at += 1
    devices = given.values.get("--devices", "auto").strip("[] ")
    each = None
    if "," in devices:
        each = Count(len([word for word in devices.split(",") if word.strip()]), given.text["--devices"])
    elif devices not in ("-1", "auto"):
        each = given.number("--devices")
    env = {"LT_CLI_USED": "1", "LT_NUM_NODES": str(ranks // ranks_here)}
    env["LT_DEVICES"] = devices if "," in devices else str(ranks_here)
    for name in ("--accelerator", "--strategy", "--precision"):
        if name in given.values:
            env[f"LT_{name[2:].upper()}"] = given.values[name]
    nodes = given.span("--num-nodes", ":")
    return Call(f"{launcher} run", tuple(kept), nodes=nodes, ranks_each=each, unused=given.unused, env=env)


def _srun(words: Sequence[str], ranks_here: int, ranks: int) -> Call | Once | ToReal:
    given = _Given("srun", words, _SRUN)
    if not given.runs:
        return ToReal()
    each, total = given.number("--ntasks-per-node"), given.number("-n")
    pairs = [pair for pair in given.values.get("--export", "").split(",") if "=" in pair]
    cwd = given.values.get("-D", "")
    if _is_no_rank(total, ranks, given.rest):
        return ToReal(_placed(given.rest, cwd, pairs))
    for text in given.unused:
        if text.startswith("--container"):
            raise UserError(f"srun {text}: for ranks in a container write the whole line as command:")
    nodes = given.span("-N", "-")
    tasks_here = each.number if each else total.number * ranks_here // ranks if total else 0
    is_shell = given.rest[0].rpartition("/")[2] in _SHELLS
    is_one = each is not None and tasks_here == 1 < ranks_here
    if _starts_launcher(given.rest) or is_one or (is_shell and tasks_here <= 1):
        # A task of each node: as this script, which each node runs
        return Once(_placed(given.rest, cwd, pairs))
    env = dict(pair.partition("=")[::2] for pair in pairs)
    return Call(
        "srun", given.rest, False, nodes=nodes, ranks_each=each, ranks=total, unused=given.unused, env=env, cwd=cwd
    )  # fmt: skip


def _placed(words: tuple[str, ...], cwd: str, pairs: Sequence[str]) -> tuple[str, ...]:
    """Return a command that runs in a folder, unless that is empty, and with more variables."""
    front = (*(("-C", cwd) if cwd else ()), *pairs)
    return ("env", *front, *words) if front else words


def _is_no_rank(total: Count | None, ranks: int, words: Sequence[str]) -> bool:
    """Tell whether a command that is asked for once is none of the job's ranks: in a job of one rank `hostname` is none."""
    names = [word.rpartition("/")[2] for word in words]
    trains = any(name == "-m" or name.startswith("python") or name.endswith((".py", ".sh")) for name in names)
    return total is not None and total.number == 1 and (ranks > 1 or not trains)


def _starts_launcher(words: Sequence[str]) -> bool:
    """Tell whether a command starts a launcher, perhaps behind `env`, `uv run`, `numactl` and the like: what stands behind a
    Python or a script is for these to read, such as `--strategy deepspeed`."""
    for at, word in enumerate(words):
        name, before = word.rpartition("/")[2], words[at - 1] if at else ""
        if name.startswith("python"):
            return bool(launcher_of(list(words[at:]))[0])
        if name.endswith((".py", ".sh")) or (before == "-m" and not word[:1].isdigit()):  # numactl -m 0
            return word in MODULES
        if name in NAMES and before not in _CONDA_ENV:
            return True
    return False


def _mpirun(words: Sequence[str], ranks: int) -> Call | Once | ToReal:
    given = _Given("mpirun", words, _MPIRUN)
    if not given.runs:
        return ToReal()
    if ":" in given.rest:
        raise UserError("mpirun … : … starts several programs, and all ranks of a job run the same one")
    total, each = given.number("-n"), given.number("--npernode")
    pairs = [value for name, value in given.all if name in ("-x", "-genv") and "=" in value]
    cwd = given.values.get("--wdir", "")
    if _is_no_rank(total, ranks, given.rest) or _starts_launcher(given.rest):
        return Once(_placed(given.rest, cwd, pairs))
    env = dict(pair.partition("=")[::2] for pair in pairs)
    return Call("mpirun", given.rest, False, ranks_each=each, ranks=total, unused=given.unused, env=env, cwd=cwd)  # fmt: skip
