"""Setup script of a node: runs the user's setup lines once, and keeps their environment for the ranks.

The lines run as one bash script that stops at the first failing line. At its exit the environment is read back, so that
ranks see what it exported, loaded or activated (variables, modules, conda). The module also finds programs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from orchestrator.agent.ranks import spawn
from orchestrator.core.errors import HostError

TAIL_BYTES = 4_000
OWN_PREFIX = "orch: "


class SetupRun:
    """One run of the setup lines; it ends when the agent reaps its process."""

    def __init__(self, lines: tuple[str, ...], env: Mapping[str, str], cwd: Path, folder: Path, log: Path) -> None:
        """Start the lines. Raises HostError when there is no bash."""
        self._env_fd = spawn.open_memory_file("setup-env")  # in memory, since secrets are in it
        env_file = f"/proc/{os.getpid()}/fd/{self._env_fd}"
        self._log = log
        script = folder / "setup.sh"
        program = spawn.Program(("bash", str(script)), {**env, "ORCH_SETUP_ENV": env_file}, cwd, log)
        try:
            self._log_start = log.stat().st_size if log.exists() else 0
            script.write_text("\n".join(("trap 'env -0 >\"$ORCH_SETUP_ENV\"' EXIT", "set -e", *lines, "")))
            self.pid = spawn.start(program)
        except OSError as err:
            os.close(self._env_fd)
            raise HostError(f"the setup lines cannot run: {err.strerror}: {err.filename}") from err

    def result(self, status: int) -> dict[str, str]:
        """Return the environment at the end of the lines. Raises HostError when they failed."""
        with os.fdopen(self._env_fd, "rb") as file:
            file.seek(0)
            raw = file.read()
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            how = f"code {code}" if code > 0 else f"signal {-code}"
            tail = self._tail()
            last = tail.rstrip().rpartition("\n")[2]
            if last.startswith(OWN_PREFIX):  # a line that orch added: it says how to fix it
                raise HostError(last.removeprefix(OWN_PREFIX))
            raise HostError(f"the setup lines ended with {how}", tail)
        if not raw:
            reason = "the setup lines' environment was not written: do they set a trap on EXIT, or exec?"
            raise HostError(reason, self._tail())
        pairs = (entry.decode("utf-8", "surrogateescape").partition("=") for entry in raw.split(b"\0") if entry)
        return {name: value for name, _, value in pairs if name not in ("ORCH_SETUP_ENV", "_", "SHLVL")}

    def _tail(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, self._log.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")


def find_program(program: str, env: Mapping[str, str], cwd: Path) -> str:
    """Return the path of `program` on this node, relative to `cwd`. Raises HostError when it does not exist."""
    path = env.get("PATH", os.defpath)
    file = shutil.which(_full_path(program, cwd), path=path)
    if file is None:
        raise HostError(f"there is no {program} on this node (PATH is {path})")
    return file


def find_first_program(programs: tuple[str, ...], env: Mapping[str, str], cwd: Path) -> str:
    """Return the first of the programs that this node has. Raises HostError when it has none of them."""
    for program in programs:
        with contextlib.suppress(HostError):
            find_program(program, env, cwd)
            return program
    path = env.get("PATH", os.defpath)
    raise HostError(f"there is no {' and no '.join(programs)} on this node (PATH is {path})")


def extended_path(pythons: tuple[str, ...], env: Mapping[str, str], cwd: Path) -> str:
    """Return PATH with the folder of the first of these interpreters in front that the node has, or that setup lines may
    make; empty where PATH gives that one already, since the folder may hold much else."""
    path = env.get("PATH", os.defpath)
    existing = [program for program in pythons if shutil.which(_full_path(program, cwd), path=path)] or pythons[:1]
    if not existing or os.sep not in existing[0]:
        return ""
    file = Path(_full_path(existing[0], cwd))
    if shutil.which(file.name, path=path) == str(file):
        return ""
    return os.pathsep.join(part for part in (str(file.parent), path) if part)


def _full_path(program: str, cwd: Path) -> str:
    return str(cwd / program) if os.sep in program else program
