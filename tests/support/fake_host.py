"""A host at hand: its shell is a process of this machine, so that the real script and the real landing run, without ssh."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import queue
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.launch import AgentLaunch, CodeArchive, Launcher, launch_agent
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan, PlannedSsh
from orchestrator.core.plan_types import PlannedPool
from orchestrator.core.wire.agent_config import AgentConfig, LeaseNeeds
from orchestrator.core.wire.orders import PrepareNode
from orchestrator.submission import bundle
from orchestrator.submission.credentials import new_certificate
from orchestrator.submission.render import render
from tests.support import jobs

GONE_S_MAX = 20.0
POLL_S = 0.02
BUNDLE = bundle.build()
FILES = {"train.py": b"print(1)\n", "pkg/deep/mod.py": b"x" * 50_000}
CERTIFICATE = new_certificate()[0].decode()


class Process:
    """What `Connection.run` returns, over the pipes of a process of this machine."""

    def __init__(self, argv: list[str], env: Mapping[str, str], host: FakeHost) -> None:
        self._host = host
        self._words = 0
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=host.home,
            start_new_session=True, bufsize=0, user=host.user,
        )  # fmt: skip
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._errors = b""
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in io.BufferedReader(self._process.stdout):  # type: ignore[type-var]
                self._lines.put(line.rstrip(b"\n"))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):
            while data := os.read(self._process.stderr.fileno(), 65536):
                self._errors += data

    @property
    def errors(self) -> str:
        return self._errors.decode(errors="replace")

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._host.before_send(data)
        self._host.sent.append(data)
        damages = self._host.damages
        if damages is not None and data.startswith(damages):
            data = data[:-1] + bytes([data[-1] ^ 1])
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def line(self, wait_s: float) -> bytes | None:
        if self._words == self._host.breaks_after:
            raise EOFError
        try:
            line = self._lines.get(timeout=wait_s)
        except queue.Empty as err:
            raise TimeoutError from err
        self._words += bool(line)
        return line

    def exit_code(self, wait_s: float) -> int | None:
        try:
            code = self._process.wait(wait_s)
        except subprocess.TimeoutExpired as err:
            raise TimeoutError from err
        self._threads[1].join(wait_s)
        return code if code >= 0 else None

    def close(self) -> None:
        """Hang up, as sshd does: the pipes end; the command is not killed."""
        assert self._process.stdin and self._process.stdout and self._process.stderr
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, wait_s: float) -> int:
        return self._process.wait(wait_s)


@dataclass
class FakeHost:
    """A home folder with a login shell. `env` is what the shell has; `rc` runs before each command, as .bashrc does.

    `sent`: what was sent there; `damages`: of a piece that begins so, the last byte changes on the way; `breaks_after`:
    so many words, then the line breaks.
    """

    home: Path
    env: dict[str, str] = field(default_factory=dict)
    rc: str = ""
    shell: tuple[str, ...] = ("/bin/sh",)
    processes: list[Process] = field(default_factory=list)
    user: str | None = None
    sent: list[bytes] = field(default_factory=list)
    damages: bytes | None = None
    before_send: Callable[[bytes], object] = len
    breaks_after: int | None = None

    def run(self, command: str) -> Process:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {"HOME": str(self.home), "PATH": path, "SSH_CLIENT": "10.0.0.1 1 22", **self.env}
        text = f"{self.rc}\n{command}" if self.rc else command
        self.processes.append(Process([*self.shell, "-c", text], env, self))
        return self.processes[-1]

    @property
    def jobs(self) -> Path:
        return self.home / ".orch" / "jobs"

    @property
    def job(self) -> JobDir:
        return JobDir(self.jobs / jobs.ID)


def plan(**fields: object) -> Plan:
    """Return a plan over ssh, made by hand."""
    pool = PlannedPool(nodes=2, ranks_each=2, gpus_each=0, spares=0)
    ssh = PlannedSsh(None, None, "strict", "~/.orch", (), None)
    return replace(jobs.plan(), backend="ssh", pool=pool, ssh=ssh, **fields)  # type: ignore[arg-type]


def launcher(python: str = "/no/such/python") -> Launcher:
    """Return what runs on a host: the real script and the real bundle."""
    return Launcher(render(plan(), JobDir.at(jobs.ROOT), python)[0].text, BUNDLE)


def archive(path: Path, files: Mapping[str, bytes]) -> CodeArchive:
    """Make a code archive at `path`, its files compressed as little as can be."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(gzip.compress(out.getvalue(), compresslevel=0, mtime=0))
    return CodeArchive.read(path)


def config(node: str = "node-0", needs: LeaseNeeds = LeaseNeeds(0, 0, 0), **fields: object) -> AgentConfig:  # noqa: B008
    """Return what an agent is told that dials a port where nobody listens."""
    base = AgentConfig(
        job=jobs.ID, node=node, root=f"~/.orch/jobs/{jobs.ID}", token="c" * 64, certificate=CERTIFICATE,
        address="127.0.0.1:9", heartbeat_s=1.0, node_timeout_s=60.0, fence_s=30.0, checkpoint_glob="*",
        finds_checkpoints=False, ships=True, needs=needs,
    )  # fmt: skip
    return replace(base, **fields)  # type: ignore[arg-type]


def prepare(attempt: int, **fields: object) -> PrepareNode:
    """Return the order to make node-0 ready, which is not the first, for new interpreters, by a plan with these fields."""
    nodes = tuple(reversed(jobs.plan().nodes))
    usual = {"nodes": nodes, "argv": (sys.executable, "train.py"), "pythons": (), "starts_fresh": True}
    made = replace(jobs.plan(), **{**usual, **fields})  # type: ignore[arg-type]
    return PrepareNode(attempt, None, made, tuple(node.name for node in nodes))


def launch(code: CodeArchive, told: AgentConfig | None = None, of: Launcher | None = None) -> AgentLaunch:
    """Return a launch with the real script."""
    return AgentLaunch(of or launcher(), code, told or config())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_gone(pids: list[int]) -> None:
    """Wait until none of these runs any more; fail when one stays."""
    deadline_s = time.monotonic() + GONE_S_MAX
    while left := [pid for pid in pids if (stat := procfs.stat(pid)) and stat.state not in "ZX"]:
        assert time.monotonic() < deadline_s, f"still running: {left}"
        time.sleep(POLL_S)


def keepers(root: Path) -> list[int]:
    """Return the processes that were started from the bundle of the job folder `root`, or of one below `root`."""
    found = []
    for pid in procfs.pids():
        words = _argv(pid)
        if "agent" in words and any(Path(word).is_relative_to(root) for word in words if word.endswith("orch.pyz")):
            found.append(pid)
    return found


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def end_all(root: Path) -> None:
    """End every agent below `root`."""
    pids = keepers(root)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    wait_gone(pids)


@contextlib.contextmanager
def host(folder: Path) -> Iterator[FakeHost]:
    """Have a host for a while; nothing that was started on it stays."""
    home = folder / "home"
    home.mkdir(parents=True)
    here = FakeHost(home)
    try:
        yield here
    finally:
        end_all(folder)
        for process in here.processes:
            process.close()
            process.wait(GONE_S_MAX)


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds; fail, naming `what`, when it does not come to that."""
    deadline_s = time.monotonic() + GONE_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, f"waited for {what}"
        time.sleep(POLL_S)


def failure(
    host: FakeHost, code: CodeArchive, told: AgentConfig | None = None, of: Launcher | None = None
) -> LaunchError:
    """Launch an agent, which is to fail; return how."""
    with pytest.raises(LaunchError) as found:
        launch_agent(host, launch(code, told, of))
    return found.value


def program(folder: Path, name: str, text: str) -> Path:
    """Make a program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


@contextlib.contextmanager
def disk(folder: Path, options: str) -> Iterator[Path]:
    """Have a small disk of one's own for a while."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "orch-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("root may not mount a tmpfs here")
    try:
        yield folder
    finally:
        end_all(folder)
        subprocess.run(["umount", "-l", folder], check=True)
