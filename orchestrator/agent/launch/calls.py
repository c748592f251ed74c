"""Launcher call as a shim reports it: the ranks that it asks for, and their environment. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.launch import options, shim_files
from orchestrator.agent.ranks.hook.launch import FOLDER_ENV
from orchestrator.agent.ranks.rank_start import CountOption, LauncherCall
from orchestrator.core.errors import UserError
from orchestrator.core.settings.rank_env import NodePlan

_SHELL_VARIABLES = ("_", "SHLVL", "OLDPWD")
_ACCELERATE = ("accelerate", "accelerate-launch")
ACCELERATE_USAGE = "accelerate launch [options] script [arguments]"


@dataclass(frozen=True, slots=True)
class ShimRequest:
    """What a shim reports: the launcher's name and arguments, the folder, the environment, the next real program of that name
    in PATH (empty: none), and the Python that would have run it."""

    name: str
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    real: str
    python: str

    @classmethod
    def from_data(cls, data: Any) -> ShimRequest:
        """Return a request of plain data. Raises ValueError."""
        try:
            texts = [str(data[name]) for name in ("name", "cwd", "real", "python")]
            env = {str(name): str(value) for name, value in data["env"].items()}
            args = tuple(str(word) for word in data["words"])
        except (KeyError, TypeError, AttributeError) as err:
            raise ValueError(f"not a call of a launcher: {err}") from err
        if texts[0] not in shim_files.SHIMS:
            raise ValueError(f"no launcher shim: {texts[0]}")
        return cls(texts[0], args, texts[1], env, texts[2], texts[3])

    @property
    def accelerate_args(self) -> tuple[str, ...] | None:
        """The words behind `accelerate launch`; None where it is no such call."""
        if self.name not in _ACCELERATE or (self.name == "accelerate" and self.args[:1] != ("launch",)):
            return None
        args = self.args[self.name == "accelerate" :]
        return None if args[:1] in (("-h",), ("--help",)) else args


def read_call(request: ShimRequest, at: NodePlan) -> LauncherCall | options.RunOnce | options.PassThrough:
    """Return what a call other than Accelerate's asks for, compared with the job. Raises UserError."""
    if request.name in _ACCELERATE:
        return options.PassThrough()
    parsed = options.parse_line(request.name, request.args, len(at.ranks), at.plan.world_size)
    return _check_counts(parsed, at) if isinstance(parsed, LauncherCall) else parsed


def _check_counts(call: LauncherCall, at: NodePlan) -> LauncherCall:
    options.check_counts(call, len(at.nodes), len(at.ranks), at.plan.world_size)
    return call


def accelerate_settings(args: tuple[str, ...], at: NodePlan) -> str:
    """Return the word for `accelerate_env` that has it read a line of `accelerate launch`."""
    return json.dumps(
        {
            "line": args,
            "processes": at.plan.world_size,
            "nodes": len(at.nodes),
            "keep": sorted({*at.plan.env, *at.plan.secrets}),
        }
    )


def parse_accelerate_reply(reply: Any, at: NodePlan) -> LauncherCall:
    """Return the call that Accelerate's own code has read. Raises UserError with Accelerate's words."""
    try:
        parsed = json.loads(reply["out"])
        words, kind, env = tuple(parsed["words"]), str(parsed["kind"]), dict(parsed["env"])
        counts_asked = {name: parsed[name] for name in ("num_machines", "num_processes")}
    except (ValueError, KeyError, TypeError):
        lines = str(reply.get("err", "") if isinstance(reply, dict) else "").strip().splitlines()
        text = lines[-1].removeprefix("orch: ") if lines else "Accelerate has not answered"
        raise UserError(text, fix=ACCELERATE_USAGE) from None
    counts = {
        name: CountOption(int(number), f"--{name} {number}") if number is not None else None
        for name, number in counts_asked.items()
    }
    nodes = counts["num_machines"]
    call = LauncherCall(
        "accelerate launch", ("-m", *words) if kind == "module" else words, kind != "command", has_macros=True,
        nodes=None if nodes is None else (nodes, nodes), ranks=counts["num_processes"], env=env,
    )  # fmt: skip
    return _check_counts(call, at)


def rank_env(
    request: ShimRequest, call: LauncherCall, script_variables: Mapping[str, str], hook: str
) -> dict[str, str]:
    """Return the environment of the ranks: that of the script where it called, without what was the script's `script_variables`."""
    folder = request.env.get(FOLDER_ENV, "")
    env = {
        name: value
        for name, value in request.env.items()
        if name not in _SHELL_VARIABLES and script_variables.get(name) != value
    }
    for name, ours in (("PATH", folder), ("PYTHONPATH", hook)):
        parts = [part for part in env.get(name, "").split(os.pathsep) if part != ours]
        env[name] = os.pathsep.join(parts)
        if not env[name]:
            del env[name]
    env.pop(FOLDER_ENV, None)
    bash_env = env.pop(shim_files.USERS_BASH_ENV, "")
    if env.get("BASH_ENV", "").startswith(f"{folder}/"):
        del env["BASH_ENV"]
        if bash_env:
            env["BASH_ENV"] = bash_env
    return {**env, **call.env}


def script_env(
    script_variables: Mapping[str, str], given: Mapping[str, str], folder: Path, hook: str
) -> dict[str, str]:
    """Return the environment of a node's script: that which ranks would have, its `script_variables` variables, and the three nets."""
    env = {**given, **script_variables, FOLDER_ENV: str(folder)}
    if users := env.get("BASH_ENV", ""):
        env[shim_files.USERS_BASH_ENV] = users
    env["BASH_ENV"] = str(folder / shim_files.BASH_FILE)
    shims = f"{folder}{os.pathsep}{folder / shim_files.SLURM_FOLDER}"
    for name, ours in (("PATH", shims), ("PYTHONPATH", hook)):
        env[name] = os.pathsep.join(part for part in (ours, env.get(name, "")) if part)
    return env
