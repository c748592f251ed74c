"""Environment that `accelerate launch` would give the ranks of this node, by the code of the installed Accelerate.

The shim for `accelerate launch` runs this file on each node, by the Python of the call. Accelerate reads its options and its
configuration and prepares a launch as it always does; in place of the launch, the variables that it would have set are
printed. Those that orch sets itself, and those of the job file's `env`, are left out.

Only the standard library, as far back as Python 3.8: the job's Python need not be the one that runs the agent.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

SCRIPT = "orch-starts-the-ranks"
"""Stands for the training script, which Accelerate's parser asks for."""

OWNED_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_", "PET_", "ORCH_")
OWNED_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PWD", "OLDPWD", "SHLVL", "_"),
)
"""Variables that are orch's: places of ranks, rendezvous, GPUs."""


class _CapturedLaunch(BaseException):
    """The moment at which Accelerate would start processes, with the environment that they would get."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__()
        self.env = dict(env)


def main(words: Sequence[str]) -> None:
    """Print, as JSON, `env` and what a line starts. Raises SystemExit, which says why: Accelerate cannot prepare the launch, or
    would start something that orch cannot replace.

    The word is a JSON object: `line`, the words behind `accelerate launch`, `processes` and `nodes` of the job, and `keep`, the names
    that are not to be changed.
    """
    settings = json.loads(words[0])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print at import is not for the reader
    changed = launch_variables(settings)
    with lines:
        json.dump({**settings["found"], "env": changed}, lines)


def launch_variables(settings: dict[str, Any]) -> dict[str, str]:
    """Return what the launch would change of this process's environment. Raises SystemExit."""
    before = dict(os.environ)
    env = _environment(_launch_module(), settings)
    kept = {*settings["keep"], *OWNED_NAMES}
    return {
        name: value
        for name, value in env.items()
        if before.get(name) != value and name not in kept and not name.startswith(OWNED_PREFIXES)
    }


def _launch_module() -> Any:
    try:
        return importlib.import_module("accelerate.commands.launch")
    except ImportError as err:
        fix = "install accelerate in the Python of the launch line"
        raise SystemExit(f"orch: {sys.executable} cannot import accelerate ({err}); {fix}") from err


def _environment(launch: Any, settings: dict[str, Any]) -> dict[str, str]:
    """Return the environment in which Accelerate would start the ranks. Raises SystemExit."""
    args = _read_line(launch, settings)
    which = f"accelerate {_version()}"
    _capture_launch(launch)
    try:
        launch.launch_command(args)
    except _CapturedLaunch as moment:
        return moment.env
    except (Exception, SystemExit) as err:
        why = " ".join(str(err).split()) or type(err).__name__
        raise SystemExit(f"orch: {which} cannot launch: {why}") from err
    raise SystemExit(f"orch: {which} starts no local processes; orch cannot replace such a launch")


def _read_line(launch: Any, settings: dict[str, Any]) -> Any:
    """Return the options of a whole line as Accelerate's own parser reads them, with orch's place of the ranks in them; note
    under `found` what the line starts, and how many."""
    parser = launch.launch_command_parser()

    def refuse(message: str) -> NoReturn:
        raise SystemExit(f"orch: accelerate launch {_version()}: {message}")

    parser.error = refuse
    args = parser.parse_args(settings["line"])
    settings["found"] = {
        "words": [args.training_script, *args.training_script_args],
        "kind": "module" if args.module else "command" if args.no_python else "script",
        "num_processes": args.num_processes,
        "num_machines": args.num_machines,
    }
    args.training_script, args.training_script_args = SCRIPT, []
    args.num_processes, args.num_machines, args.machine_rank = settings["processes"], settings["nodes"], 0
    args.main_process_ip, args.main_process_port = "127.0.0.1", 0
    if settings["nodes"] > 1:
        args.deepspeed_multinode_launcher = "standard"
    others = (args.multi_gpu, args.use_fsdp, args.use_deepspeed, args.use_megatron_lm, args.config_file)
    if not any(others) and not importlib.import_module("torch").cuda.is_available():
        args.cpu = True  # else each of several CPU ranks would be alone
    return args


def _capture_launch(launch: Any) -> None:
    """Replace the calls by which Accelerate starts processes: torchrun's `run`, and a process of its own."""
    run = importlib.import_module("torch.distributed.run")

    def stop(*_: object, env: Mapping[str, str] | None = None, **__: object) -> NoReturn:
        raise _CapturedLaunch(os.environ if env is None else env)

    run.run = stop  # type: ignore[attr-defined]
    launch.subprocess = types.SimpleNamespace(Popen=stop, run=stop, CalledProcessError=OSError)


def _version() -> str:
    return str(getattr(importlib.import_module("accelerate"), "__version__", "of an unknown version"))


if __name__ == "__main__":
    main(sys.argv[1:])
