"""Verbs of `orch` on a host: a process of trainer that has loaded them all, and forks for each that is asked for.

What a submit needs takes a second of processor time to load, and tests with a hundred submits spend it on nothing. A fork
has what `python -m orchestrator.cli` would have: its words, environment and folder, and files for what it prints.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orchestrator.cli

from .host import RUN_S_MAX, SERVANT, TRAINER, Host, end

REPOSITORY = Path(__file__).resolve().parents[3]
REQUEST_BYTES_MAX = 1 << 16
LOADED = ("cli", "client", "submission", "views")


@dataclass(slots=True)
class Verbs:
    """The asking end. The process begins with the first verb, and goes with its host."""

    host: Host
    process: subprocess.Popen[bytes] | None = None
    line: socket.socket | None = None

    def run(
        self, words: Sequence[str], cwd: str, env: Mapping[str, str], *, check: bool
    ) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end; its failure shows what it printed."""
        where = {"cwd": cwd or TRAINER.home, "env": self.host.environ(TRAINER.name, env)}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            line = self._line()
            request = json.dumps({"words": words, **where}).encode()
            try:
                socket.send_fds(line, [request], [out.fileno(), err.fileno()])
                code = int(line.recv(REQUEST_BYTES_MAX))
            except BaseException:
                self.close()
                raise
            for file in (out, err):
                file.seek(0)
            done = subprocess.CompletedProcess(["orch", *words], code, out.read(), err.read())
        told = f"{done.stdout}{done.stderr}"
        assert not (check and code), f"on {self.host.name}, {done.args} ended with {code}:\n{told}"
        return done

    def _line(self) -> socket.socket:
        if self.process is not None and self.process.poll() is not None:
            self.close()
        if self.line is None:
            self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.line.settimeout(RUN_S_MAX)
            argv = [sys.executable, "-m", SERVANT, str(theirs.fileno())]
            with theirs:
                self.process = self.host.popen(
                    argv,
                    user=TRAINER.name,
                    cwd=str(REPOSITORY),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        return self.line

    def close(self) -> None:
        """End the process with what it runs."""
        if self.line is not None and self.process is not None:
            self.line.close()
            end(self.process)
        self.line = self.process = None


def main() -> None:
    """Serve on the socket that is named, and become each verb in a fork."""
    line = socket.socket(fileno=int(sys.argv[1]))
    for room in LOADED:
        package = importlib.import_module(f"orchestrator.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)
    while True:
        asked, files, *_ = socket.recv_fds(line, REQUEST_BYTES_MAX, 2)
        if not asked:
            return
        pid = os.fork()
        if pid == 0:
            line.close()
            _become(json.loads(asked), files)
            orchestrator.cli.main()
        for file in files:
            os.close(file)
        line.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(verb: dict[str, Any], files: Sequence[int]) -> None:
    os.chdir(verb["cwd"])
    os.environ.clear()
    os.environ.update(verb["env"])
    sys.argv[1:], sys.path[0] = verb["words"], verb["cwd"]
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    main()
