"""Launchers that a node's script runs in Python and not through a shim, and gangs that orch has not started.

1. Where PATH does not lead to a shim, as in `python -m torch.distributed.run` or `/opt/env/bin/torchrun`, a Python of a
   node's script is the launcher: it becomes the shim before it has imported anything.
2. Where such a Python calls torch's launcher or Accelerate's in its own process, as `tune run` does, a shim runs in place of
   that call.
3. Where it trains, or enters a process group of several, it is noted for the agent. So are torch's launcher below a rank, and
   each process of a rank that trains in a group: see `agent/launch/gangs.py`.
"""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH118, PTH120, PTH123

import os
import sys

TYPE_CHECKING = False  # typing's own costs 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FOLDER_ENV = "ORCH_LAUNCH_DIR"
"""The variable with the folder of the shims; set for what a node's script starts, and not for ranks."""

REAL_ENV = "ORCH_LAUNCH_REAL"
"""Set for a real launcher that a shim has passed a call on to."""

PYTHON_ENV = "ORCH_LAUNCH_PYTHON"
"""The Python that would have run the launcher, for the shim that takes its place."""

NAMES = (
    "torchrun",
    "accelerate",
    "accelerate-launch",
    "deepspeed",
    "fabric",
    "lightning",
    "srun",
    "mpirun",
    "mpiexec",
)
"""The programs that have a shim."""

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "lightning.fabric.cli": "lightning.fabric.cli",
    "lightning_fabric.cli": "lightning.fabric.cli",
}
"""The same as modules behind `python -m`, each with the name of its shim."""

_FLAGS = "bBdEhiIOPqRsStuvVx?"
"""Python's options without a value, which may be combined in one word: -um MODULE."""


def find_launcher(argv: "list[str]") -> "tuple[str, list[str]]":
    """Return the shim for a Python process with this command line, and the words for it; "" for no launcher."""
    at = 1
    while at < len(argv) and argv[at].startswith("-"):
        option, at = argv[at][1:].lstrip(_FLAGS), at + 1
        if option.startswith("m"):
            words = [option[1:], *argv[at:]] if option[1:] else argv[at:]
            return MODULES.get("".join(words[:1]), ""), words[1:]
        if option.startswith("c") or argv[at - 1] in ("-", "--"):
            return "", []
        at += option in ("W", "X", "-check-hash-based-pycs")
    name = argv[at].rpartition("/")[2] if at < len(argv) else ""
    return (name if name in NAMES else ""), argv[at + 1 :]


def hand_over(argv: "list[str]") -> None:
    """Become the shim if this process is a launcher that a node's script has started."""
    folder = os.environ.get(FOLDER_ENV, "")
    name, words = find_launcher(argv)
    if not folder or not name or REAL_ENV in os.environ:
        return
    program = folder + "/" + name
    # The polyglot of a shim that Python itself runs has the same name, and starts no launcher.
    if os.path.exists(program) and not any(word.startswith(folder + "/") for word in argv[:3]):  # noqa: PTH110
        os.environ[PYTHON_ENV] = sys.executable
        os.execv(program, [program, *words])


GANGS_FILE = "gangs.jsonl"
"""Notes for the agent: in the folder of the shims, or in that of the attempt, beside the folders of its ranks. A line has
`rank`, the name of a rank's folder (empty: of the script), `what`, and the `words` of its program."""

LAUNCHES, TRAINS, IN_GROUP = "torch.distributed.run", "trains", "rank {} of {}"
"""What is noted: a launcher, steps, a group of several."""

STEPS_MIN = 5
"""A program that makes fewer steps may only try out what is installed."""


def note(what: str) -> None:
    """Note something about this process for the agent. Raises nothing: what cannot be noted is not known."""
    import json

    rank, main = os.environ.get("ORCH_RANK_DIR", ""), getattr(sys.modules.get("__main__"), "__spec__", None)
    try:
        words = ["-m", main.name, *sys.argv[1:]] if main is not None else sys.argv
        line = json.dumps({"rank": os.path.basename(rank), "what": what, "words": words}) + "\n"  # noqa: PTH119
        with open(os.path.join(os.path.dirname(rank) or os.environ[FOLDER_ENV], GANGS_FILE), "a") as file:
            file.write(line)
    except Exception:
        pass


def note_launcher(argv: "list[str]") -> None:
    """Note that a process of a rank is torch's launcher."""
    name, words = find_launcher(argv)
    if name.startswith("torch") and words[-1:] not in (["--help"], ["-h"], ["--version"]):
        note(LAUNCHES)


def note_gang() -> None:
    """Note this process's place in a process group of several."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if getattr(c10d, "is_initialized", bool)() and c10d.get_world_size() > 1:
        note(IN_GROUP.format(c10d.get_rank(), c10d.get_world_size()))


class ScriptImports:
    """A finder on `sys.meta_path` in a Python of a node's script, which is no rank. It finds nothing of its own: it replaces a
    function of a library as soon as that is imported, before a program has taken it from its module."""

    def __init__(self) -> None:
        self._awaited = {
            "torch.distributed.launcher.api": ("launch_agent", wrap_launch_agent),
            "accelerate.commands.launch": ("launch_command", wrap_launch_command),
            "torch.distributed.distributed_c10d": ("init_process_group", wrap_init_process_group),
            "torch.optim.optimizer": ("register_optimizer_step_post_hook", watch_steps),
        }
        sys.meta_path.insert(0, self)

    def find_spec(self, module: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return the spec of a module of these; None for another."""
        if module not in self._awaited:
            return None
        from importlib.util import find_spec

        name, replaced = self._awaited.pop(module)
        spec: Any = find_spec(module)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(made: "Any") -> None:
            execute(made)
            if hasattr(made, name):  # an older torch may have no such function
                setattr(made, name, replaced(getattr(made, name)))

        spec.loader.exec_module = execute_and_replace
        return spec


def wrap_launch_agent(launch: "Callable[..., Any]") -> "Callable[..., Any]":
    """Return a replacement of torch's launcher that runs a shim."""

    def launch_agent(config: "Any", entrypoint: "Any", args: "Any", *more: "Any", **options: "Any") -> "Any":
        if callable(entrypoint):  # no other process can run it: its processes are noted as a gang
            return launch(config, entrypoint, args, *more, **options)
        is_python = entrypoint == sys.executable
        words = args[args[:1] == ["-u"] :] if is_python else ["--no-python", entrypoint, *args]
        # torchrun's own numbers where none are given are 1, and mean those of the job
        asked = {"--nnodes": config.max_nodes, "--nproc-per-node": config.nproc_per_node}
        counts = [f"{name}={number}" for name, number in asked.items() if number > 1]
        run_shim("torchrun", [*counts, *map(str, words)])
        return {}

    return launch_agent


def wrap_launch_command(launch: "Callable[..., Any]") -> "Callable[..., Any]":
    """Return a replacement of Accelerate's launcher that runs a shim with the options that are not at their defaults."""

    def launch_command(args: "Any") -> None:
        import itertools

        actions: Any = launch.__globals__["launch_command_parser"]()._actions
        given = [one for one in actions if one.option_strings and getattr(args, one.dest, one.default) != one.default]
        words = [(one.option_strings[0], str(getattr(args, one.dest)))[: 2 - (one.nargs == 0)] for one in given]
        run_shim("accelerate-launch", [*itertools.chain(*words), args.training_script, *args.training_script_args])

    return launch_command


def run_shim(name: str, words: "list[str]") -> None:
    """Run the shim for a launcher to its end."""
    import subprocess

    program = os.environ[FOLDER_ENV] + "/" + name
    subprocess.run([program, *words], env={**os.environ, PYTHON_ENV: sys.executable}, check=True)


def wrap_init_process_group(form: "Callable[..., Any]") -> "Callable[..., Any]":
    """Return a wrapper of torch's function that forms the process group: it notes the call first, since that may never return."""
    import functools

    @functools.wraps(form)
    def init_process_group(*args: "Any", **options: "Any") -> "Any":
        asked = {**os.environ, **dict(zip(("", "", "", "WORLD_SIZE", "RANK"), args))}  # noqa: B905 -- Python 3.8
        rank, size = (options.get(name, asked.get(name.upper(), -1)) for name in ("rank", "world_size"))
        if str(size).isdigit() and int(size) > 1:
            note(IN_GROUP.format(rank, size))
        return form(*args, **options)

    return init_process_group


def watch_steps(register: "Callable[..., Any]") -> "Callable[..., Any]":
    """Note the steps of optimizers, and return torch's function unchanged."""
    import itertools

    made = itertools.count(1).__next__

    def after_step(*_: object) -> None:
        if made() == STEPS_MIN:
            note(TRAINS)

    after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    register(after_step)
    return register
