"""Could this job run? Every condition that can be looked at before it starts, each fault with its fix. Starts no job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator import home, snapshot, submission
from orchestrator.errors import OrchError
from orchestrator.node import setup
from orchestrator.plan import Plan
from orchestrator.spec import SpecFile, load

Json: TypeAlias = dict[str, Any]

IMPORT_S_MAX = 120.0
WORDS_CHARS_MAX = 300
FREE_BYTES_MIN = 1 << 30
_LOOK = """
import json, sys
script, counts_gpus = sys.argv[1:]
said = {"python": ".".join(map(str, sys.version_info[:3]))}
try:
    if script:
        with open(script, "rb") as file:
            compile(file.read(), script, "exec", dont_inherit=True)
except (SyntaxError, ValueError) as err:
    said["script"] = f"{script}:{getattr(err, 'lineno', 0) or 1}: {type(err).__name__}: {getattr(err, 'msg', err)}"
except OSError as err:
    said["script"] = f"{script}: {err.strerror}"
try:
    import torch
    said["torch"] = torch.__version__
    said["gpus"] = torch.cuda.device_count() if counts_gpus else 0
except BaseException as err:
    said["no_torch"] = f"{type(err).__name__}: {err}"
print()
print(json.dumps(said))
"""
"""What the ranks' own interpreter is asked: the script is compiled and not run; the last line is the answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: `ok`, what was found, and how to mend it when it is not ok."""

    what: str
    ok: bool
    found: str
    fix: str = ""
    exit_code: int = 0

    def as_json(self) -> Json:
        return {"what": self.what, "ok": self.ok, "found": self.found, "fix": self.fix}


def check(
    spec: Path, backend: str | None, overrides: Sequence[str], environ: Mapping[str, str]
) -> list[Finding]:
    """Return what was found, in the order a job would meet it; a job that cannot be planned is looked at no further.

    Raises SpecError when the spec cannot be read.
    """
    file = load(spec, overrides=overrides, backend=backend)
    return list(_findings(file, environ))


def _findings(file: SpecFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("spec", True, f"{file.path} can be read")
    try:
        plan = submission.make_plan(file, environ, home.new_id(file.spec.name, time.time()), time.time())
    except OrchError as err:
        yield _fault("plan", err)
        return
    yield Finding("plan", True, plan.size)
    yield _try("code", lambda: _code(file, environ))
    yield _try("space", lambda: _space(home.home(environ)))
    yield from _python(file, plan, environ)
    yield _loopback()


def _fault(what: str, err: OrchError) -> Finding:
    return Finding(what, False, f"{err.where}: {err.what}" if err.where else err.what, err.fix, err.exit_code)


def _try(what: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except OrchError as err:
        return _fault(what, err)


def _code(file: SpecFile, environ: Mapping[str, str]) -> Finding:
    survey = snapshot.survey(file.workdir, file.spec.snapshot.limit_mb, home.home(environ))
    size = f"{len(survey.copies)} files, {survey.size_bytes / 1e6:.1f} MB to copy"
    return Finding("code", True, f"{size}, {len(survey.links)} ignored entries to link")


def _space(folder: Path) -> Finding:
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free at {place}"
    if not os.access(place, os.W_OK):
        return Finding("space", False, f"{place} cannot be written to", "set ORCH_HOME to another place", 3)
    if free < FREE_BYTES_MIN:
        return Finding("space", False, found, "free some space, or set ORCH_HOME to another place", 3)
    return Finding("space", True, found)


def _python(file: SpecFile, plan: Plan, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Import torch and compile the script as a rank would; a job need not use torch, so its lack is no fault."""
    if plan.shell or "python" not in Path(plan.program).name:
        yield Finding("python", True, f"{plan.program} (not looked into)")
        return
    entry = file.spec.entry
    script = str(file.workdir / entry.target) if entry.kind == "script" else ""
    gpus = max(len(node.gpus) for node in plan.nodes)
    try:
        python = setup.find_program(plan.program, {**environ, **plan.env}, file.workdir)
        said = _ask(python, script, "gpus" if gpus else "", {**environ, **plan.env})
    except (setup.SetupError, OSError, subprocess.TimeoutExpired, ValueError) as err:
        fix = "try it by hand, or name another interpreter in python:"
        yield Finding("python", False, f"{plan.program} cannot be used: {err}", fix, 3)
        return
    torch = f"torch {said['torch']}" if "torch" in said else f"no torch ({said.get('no_torch')})"
    yield Finding("python", True, f"{python} {said['python']}, {torch}")
    if gpus and "torch" in said and said["gpus"] < gpus:
        found = f"torch {said['torch']} sees {said['gpus']} of {gpus} GPUs"
        yield Finding("gpus", False, found, "install a torch that is built for this driver's CUDA", 3)
    if "script" in said:
        yield Finding("script", False, said["script"], "mend the script", 2)
    elif script:
        yield Finding("script", True, f"{entry.target} can be compiled")


def _ask(python: str, script: str, counts_gpus: str, env: Mapping[str, str]) -> Json:
    """Return what an interpreter says of itself. Raises ValueError with its last words when that is nothing."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, "-c", _LOOK, script, counts_gpus], cwd=folder, capture_output=True, text=True,
            timeout=IMPORT_S_MAX, env=env, errors="replace", check=False,
        )  # fmt: skip
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(said, dict)
    except (IndexError, ValueError, AssertionError):
        words = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        raise ValueError(words[0][:WORDS_CHARS_MAX]) from None
    return said


def _loopback() -> Finding:
    try:
        port = setup.free_port(f"{os.getpid()} {time.monotonic_ns()}")
    except setup.SetupError as err:
        return Finding("network", False, err.reason, "see what listens: ss -ltn", 3)
    return Finding("network", True, f"127.0.0.1 has free ports, {port} among them")
