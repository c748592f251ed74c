"""Check of the ranks' Python on this node (`program_probe`), its all-reduce with other nodes (`reduce_rank`), and its
burn-in (`burn_in`)."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.core.host_facts import UNKNOWN, AllReduced, MissingImport, ProgramFacts
from orchestrator.core.wire.bootstrap import GatherFacts

PROBE_S_MAX = 90.0
"""How long it may take; from a cold network disk `import torch` takes long."""

REDUCE_S_MAX = 75.0
"""How long one all-reduce may take, the import of torch included."""

REDUCE_GROUP_S_MAX = 15.0
"""How long its ranks wait for one another once each has torch."""

BURN_EXTRA_S_MAX = 150.0
"""How much longer than asked for a round of a burn-in may take: the import of torch, the matrices, a last repetition."""

ERROR_CHARS_MAX = 300
_FOLDER = Path("/")


def probe_program(step: GatherFacts, env: Mapping[str, str]) -> ProgramFacts:
    """Probe the ranks' Python; `env` is all of its environment."""
    request = {
        "sources": [{"path": source.path, "text": source.text} for source in step.sources],
        "own": list(step.own_modules), "counts_gpus": step.counts_gpus,
    }  # fmt: skip
    answer = _run_script(step.program, "program_probe", request, env, PROBE_S_MAX)
    if isinstance(answer, str):
        return ProgramFacts(fault=answer)
    missing = tuple(MissingImport(**one) for one in answer.get("missing", []))
    texts = {name: str(answer.get(name, "")) for name in _TEXT_FIELDS}
    return ProgramFacts(gpus=int(answer.get("gpus", UNKNOWN)), missing=missing, **texts)


_TEXT_FIELDS = ("python", "torch", "no_torch", "cuda", "nccl", "syntax", "changes_path")


def run_burn(program: str, script: str, request: dict[str, Any], env: Mapping[str, str], limit_s: float) -> AllReduced:
    """Take part in an all-reduce as one rank (`reduce_rank`), or run a round of a burn-in of this host (`burn_in`)."""
    answer = _run_script(program, script, request, env, limit_s)
    if isinstance(answer, str) or answer.get("fault"):
        return AllReduced((answer if isinstance(answer, str) else str(answer["fault"]))[:ERROR_CHARS_MAX])
    speeds, sums = ({part: tuple(row) for part, row in answer.get(name, {}).items()} for name in ("speeds", "sums"))
    devices, wrong, notes = (tuple(answer.get(name, ())) for name in ("devices", "wrong", "notes"))
    return AllReduced("", devices, speeds, sums, wrong, notes, float(answer.get("busy", 0.0)))


def _run_script(
    program: str, script: str, request: dict[str, Any], env: Mapping[str, str], limit_s: float
) -> dict[str, Any] | str:
    """Run a script of this package with a Python; return the object in its last line, or why there is none.

    It runs in a session of its own, so that all it starts ends with it.
    """
    executable = shutil.which(str(Path(program).expanduser()), path=env.get("PATH"))
    text = pkgutil.get_data(__package__ or "", f"{script}.py")
    assert text is not None
    if executable is None:
        return f"there is no {program}"
    try:
        child = subprocess.Popen(
            [executable, "-c", text.decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", cwd=_FOLDER, env=dict(env), start_new_session=True,
        )  # fmt: skip
    except OSError as err:
        return f"it cannot be run: {err.strerror}"
    try:
        output, errors = child.communicate(json.dumps(request), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s:g} s"
    finally:
        _end(child)
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except ValueError:
                break
    error_lines = errors.strip().splitlines()[-1:] or [f"it ended with code {child.returncode}"]
    return error_lines[0][:ERROR_CHARS_MAX]


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
