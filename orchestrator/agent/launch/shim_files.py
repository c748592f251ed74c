"""Files of the shims in a node's folder: a program for each launcher, Slurm's programs where there is no Slurm, and
functions of the same names for bash, which `conda activate` and `module load` cannot put behind another folder in PATH.
Functions for Python keep the hook on its path, also after `export PYTHONPATH=.`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from orchestrator.agent.launch.shim import ADDRESS_FILE
from orchestrator.agent.ranks.hook.launch import MODULES, NAMES
from orchestrator.core.jobdir.durable import replace_text

BASH_FILE = "functions.sh"
USERS_BASH_ENV = "ORCH_BASH_ENV"
"""The variable with the user's own BASH_ENV, which the functions' file reads."""

PYTHONS = ("python", "python3")

SLURM_FOLDER = "slurm"
"""The folder of Slurm's programs within that of the shims: the ranks keep it in PATH, too."""

SHIMS = tuple(dict.fromkeys((*NAMES, *MODULES.values())))

_SHIM_PROGRAM = """\
#!/bin/sh
''':'
exec {python} -I -S "$0" "$@"
'''
import os, sys
if sys.executable != {executable!r}:  # a Python of the script's runs this file
    os.environ["ORCH_LAUNCH_PYTHON"] = sys.executable
    os.execv({executable!r}, [{executable!r}, "-I", "-S", os.path.abspath(__file__)] + sys.argv[1:])
sys.path.insert(0, {bundle!r})
from orchestrator.agent.launch.shim import main
sys.exit(main(os.path.abspath(__file__), sys.argv[1:]))
"""

_SCONTROL = """\
#!/bin/sh
if [ "$1 $2" = "show hostnames" ] || [ "$1 $2" = "show hostname" ]; then
    printf '%s\\n' "${3:-$SLURM_JOB_NODELIST}" | tr , '\\n'
    exit 0
fi
echo "orch: there is no Slurm here: scontrol $*: the nodes are in SLURM_JOB_NODELIST, separated by commas" >&2
exit 1
"""
_COMMAND_FUNCTION = """\
command() {{ case "${{1-}} ${{2-}}" in {names}) builtin type -P "$2" ;; *) builtin command "$@" ;; esac; }}
"""
"""Scripts ask `command -v python` for a path; of a function bash would print the name alone."""

_SQUEUE = """\
#!/bin/sh
echo "orch: there is no Slurm here: squeue $*: use orch status" >&2
exit 1
"""


def write_shims(folder: Path, address: str, hook: str, bundle: Path, *, has_slurm_shims: bool) -> None:
    """Write all files into the folder and its `SLURM_FOLDER`; `hook`: the folder of the hook; `bundle`: orch, as it is on this node.
    Raises OSError."""
    slurm = folder / SLURM_FOLDER
    text = _SHIM_PROGRAM.format(python=shlex.quote(sys.executable), executable=sys.executable, bundle=str(bundle))
    programs = dict.fromkeys((folder / name for name in SHIMS), text)
    if has_slurm_shims:
        programs |= {slurm / "scontrol": _SCONTROL, slurm / "squeue": _SQUEUE}
    for file, program in programs.items():
        _replace(file, program, 0o700)
    functions = [f'{name}() {{ {shlex.quote(str(folder / name))} "$@"; }}\n' for name in NAMES]
    path = f"PYTHONPATH={shlex.quote(hook)}${{PYTHONPATH:+:$PYTHONPATH}}"
    functions += [f'{name}() {{ {path} builtin command {name} "$@"; }}\n' for name in PYTHONS]
    functions.append(_COMMAND_FUNCTION.format(names=" | ".join(f'"-v {name}"' for name in (*NAMES, *PYTHONS))))
    users = f'[ -z "${{{USERS_BASH_ENV}-}}" ] || . "${USERS_BASH_ENV}"\n'
    _replace(folder / BASH_FILE, users + "".join(functions))
    _replace(folder / ADDRESS_FILE, address)


def _replace(file: Path, text: str, mode: int = 0o600) -> None:
    if not file.exists() or file.read_text() != text:
        replace_text(file, text, mode=mode, durable=False)
