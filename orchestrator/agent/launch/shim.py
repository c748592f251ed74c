"""Shim for a launcher: reports the script's call to the node's agent, and does what the agent answers.

It runs in the script's own environment, under the agent's Python, as one process between the script and the agent. It does
not interpret the command line: the agent does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.agent.ranks.hook.launch import PYTHON_ENV, REAL_ENV

ADDRESS_FILE = "address"
"""Holds the name of the agent's socket, in the folder of the shims."""

ANSWER_S_MAX = 60.0
"""How long the agent may take to answer a call; the end of the ranks is waited for without limit, as a launcher would."""

RUN_S_MAX = 300.0
"""How long Accelerate's own code may take."""

MESSAGE_BYTES_MAX = 8 << 20
SCRIPT_LINE_BYTES_MAX = 500


def main(program: str, args: list[str]) -> int:
    """Run in place of a launcher; `program` is the shim's own file. Return the exit code."""
    file = Path(program)
    env = dict(os.environ)
    python, is_real = env.pop(PYTHON_ENV, ""), REAL_ENV in env
    real = _find_real(file)
    if is_real:
        _exec([real or file.name, *args], env)
    request = {
        "name": file.name, "words": args, "cwd": _cwd(), "env": env, "real": real,
        "python": python or _read_shebang_python(real) or shutil.which("python") or shutil.which("python3") or "",
    }  # fmt: skip
    try:
        line = _connect((file.parent / ADDRESS_FILE).read_text())
        with line, line.makefile("rwb") as stream:
            return _serve(line, stream, request, env)
    except (OSError, ValueError) as err:
        print(f"orch: {file.name}: the agent of this node does not answer: {err}", file=sys.stderr)
        return 1


def _serve(line: socket.socket, stream: Any, request: dict[str, Any], env: dict[str, str]) -> int:
    """Send the call and do what is answered, until the end; return the exit code."""
    _send(stream, request)
    while True:
        text = stream.readline(MESSAGE_BYTES_MAX)
        if not text.endswith(b"\n"):
            print("orch: the agent of this node has ended", file=sys.stderr)
            return 1
        answer = json.loads(text)
        line.settimeout(None)  # it has answered: what follows is the end of the ranks
        if answer.get("say"):
            print(answer["say"], file=sys.stderr, flush=True)
        if "exit" in answer:
            return int(answer["exit"])
        if "exec" in answer:
            _exec(answer["exec"], {**env, REAL_ENV: "1"} if answer["is_real"] else env)
        if "run" in answer:
            _send(stream, _run(answer["run"], env))


def _run(argv: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Run a program of Python's that the agent names, with orch on its path; return its code and output."""
    source = str(Path(__file__).parents[3])
    path = os.pathsep.join(part for part in (source, env.get("PYTHONPATH", "")) if part)
    try:
        done = subprocess.run(
            argv, env={**env, "PYTHONPATH": path, REAL_ENV: "1"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=RUN_S_MAX, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        return {"code": 1, "out": "", "err": str(err)}
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def _connect(name: str) -> socket.socket:
    """Connect to the agent. Raises OSError where its user is another."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(ANSWER_S_MAX)
    line.connect("\0" + name)
    _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise OSError("its socket belongs to another user")
    return line


def _send(stream: Any, data: dict[str, Any]) -> None:
    stream.write(json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n")
    stream.flush()


def _exec(argv: list[str], env: dict[str, str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as err:
        print(f"orch: {argv[0]}: {err.strerror}", file=sys.stderr)
        os._exit(127)


def _find_real(file: Path) -> str:
    """Return the next program of this name in PATH; empty for none."""
    folders = [part for part in os.environ.get("PATH", "").split(os.pathsep) if Path(part) != file.parent]
    return shutil.which(file.name, path=os.pathsep.join(folders)) or ""


def _read_shebang_python(real: str) -> str:
    """Return the Python in the first line of a launcher that pip has installed; empty where there is none."""
    if not real:
        return ""
    with contextlib.suppress(OSError), Path(real).open("rb") as file:
        first = file.readline(SCRIPT_LINE_BYTES_MAX).decode(errors="replace").strip()
        words = first.removeprefix("#!").split()
        if first.startswith("#!/") and len(words) == 1 and "python" in Path(words[0]).name:
            return words[0]
    return ""


def _cwd() -> str:
    """Return the working folder as the shell names it; one that is gone as the kernel does."""
    named = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if named and Path(named).samefile("."):
            return named
    return str(Path("/proc/self/cwd").readlink())
