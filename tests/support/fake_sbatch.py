"""Slurm's commands, as a folder of small scripts that comes first in PATH: what sbatch was given, and what it answers."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

SBATCH = """#!/bin/sh
n=$(cat "{folder}/calls" 2>/dev/null || echo 0); n=$((n + 1)); echo $n >"{folder}/calls"
printf '%s\\n' "$@" >"{folder}/argv"; env >"{folder}/env"; cat >"{folder}/stdin"
test -e "{folder}/say.$n" && . "{folder}/say.$n"
. "{folder}/say"
"""


@dataclass(frozen=True, slots=True)
class FakeSbatch:
    """A folder with sbatch, scancel, squeue, srun and salloc; sbatch answers, and of the others it is known what they were told."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """An environment in which these are Slurm's commands."""
        return {"PATH": f"{self.folder}:/usr/bin:/bin", "HOME": str(self.folder)}

    @property
    def calls(self) -> int:
        """How often sbatch was run."""
        return int((self.folder / "calls").read_text()) if (self.folder / "calls").exists() else 0

    def answer(self, out: str = "Submitted batch job 7", err: str = "", code: int = 0, call: int = 0) -> None:
        """Let sbatch answer this, always or at its `call`-th call."""
        name = f"say.{call}" if call else "say"
        text = f"printf '%s\\n' {shlex.quote(out)}; printf '%s\\n' {shlex.quote(err)} >&2; exit {code}\n"
        (self.folder / name).write_text(text)

    def seen(self, what: str) -> list[str]:
        """Return the lines of the last call's `argv`, `env` or `stdin`; `scancel.told` has one for each call of it."""
        return (self.folder / what).read_text().splitlines()


def make(folder: Path) -> FakeSbatch:
    """Put the commands into a new folder; sbatch takes every job, as number 7."""
    folder.mkdir()
    for name in ("sbatch", "scancel", "squeue", "srun", "salloc"):
        text = SBATCH.format(folder=folder) if name == "sbatch" else f'#!/bin/sh\necho "$@" >>{folder}/{name}.told\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    commands = FakeSbatch(folder)
    commands.answer()
    return commands
