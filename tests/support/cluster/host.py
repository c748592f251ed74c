"""What is one host of the box, and what can be done on it? Its processes, its files, its commands.

A host is a first process in namespaces of its own; all is reached through that process (`man 1 nsenter`). Commands on
it get an environment made from nothing, as a login there would give: nothing of the machine's own leaks in.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc

T = TypeVar("T")

RUN_S_MAX = 120.0
"""How long a command on a host may take unless told otherwise."""

GONE_S_MAX = 30.0
POLL_S = 0.05

SSHD_PID = "/run/sshd.pid"
IDLE = "sleep 86400"
"""What the first process waits for, see hostinit.sh."""

SERVANT = "tests.support.cluster.verbs"
"""The program that runs verbs for tests."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody with an account on every host."""

    name: str
    uid: int
    home: str


ROOT = User("root", 0, "/root")
TRAINER = User("trainer", 2000, "/home/trainer")
USERS = {user.name: user for user in (ROOT, TRAINER)}


@dataclass(frozen=True, slots=True)
class Running:
    """A process on a host, as the machine sees it."""

    proc: Proc
    uid: int
    command: str
    program: str

    @property
    def is_sshd(self) -> bool:
        return Path(self.program).name.startswith("sshd")


def wait_for(condition: Callable[[], T], what: str, limit_s: float = GONE_S_MAX, poll_s: float = POLL_S) -> T:
    """Return the first true value of `condition`; raises TimeoutError, naming `what`, when none comes in time."""
    deadline_s = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"within {limit_s:g} s it never came: {what}")
        time.sleep(poll_s)
    return value


@dataclass(slots=True)
class Host:
    """One host: its name, its addresses, its folder on the machine, and its first process while it is up."""

    name: str
    number: int
    address: str
    state: Path
    homes: Path
    first: Proc | None = None
    shell: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    namespaces: dict[str, int] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """The machine's number of the first process."""
        assert self.first is not None, f"{self.name} is off"
        return self.first.pid

    @property
    def is_up(self) -> bool:
        return self.first is not None and procfs.is_alive(self.first)

    # --- commands

    def argv(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "", env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command that runs `argv` on this host as `user`."""
        who, environ = USERS[user], self.environ(user, env or {})
        return [
            *("nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-p", "-m", "--"),
            *("setpriv", f"--reuid={who.uid}", f"--regid={who.uid}", "--clear-groups", "--"),
            *("env", "-i", "-C", cwd or who.home, *(f"{name}={value}" for name, value in environ.items())),
            *argv,
        ]

    def environ(self, user: str, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a login of `user`, and these variables."""
        who = USERS[user]
        return {
            "HOME": who.home,
            "USER": who.name,
            "LOGNAME": who.name,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **env,
        }

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        check: bool = True,
        limit_s: float = RUN_S_MAX,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end; its failure shows what it printed."""
        process = subprocess.Popen(
            self.argv(argv, user=user, cwd=cwd, env=env),
            stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(input, timeout=limit_s)
        except BaseException:
            end(process)  # nsenter passes no signal on, so the whole session goes
            raise
        if check and process.returncode != 0:
            raise AssertionError(f"on {self.name}, {argv} ended with {process.returncode}:\n{out}{err}")
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host; `end` ends it."""
        return subprocess.Popen(self.argv(argv, user=user, cwd=cwd, env=env), start_new_session=True, **more)

    # --- files

    def path(self, inside: str) -> Path:
        """Return where a path of this host is for the machine; homes are there even when the host is off."""
        assert inside.startswith("/"), "paths on hosts are absolute"
        for mount, behind in (("/root", self.state / "root"), ("/home", self.homes)):
            if inside == mount or inside.startswith(f"{mount}/"):
                return behind / inside[len(mount) + 1 :]
        return Path(f"/proc/{self.pid}/root{inside}")

    def write(self, inside: str, text: str, *, user: str = "root", mode: int = 0o644) -> Path:
        """Write a file of this host, and its folders where they are missing, as `user`'s."""
        path, uid = self.path(inside), USERS[user].uid
        missing = [folder for folder in path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o755)
            os.chown(folder, uid, uid)
        path.write_text(text)
        path.chmod(mode)
        os.chown(path, uid, uid)
        return path

    # --- processes

    def processes(self) -> list[Running]:
        """Return what runs on this host but what serves it or tests."""
        return [one for _, one in running([self])]

    def sshd(self) -> Proc | None:
        """Return the process that listens for SSH, if it does."""
        try:
            inner = int(self.path(SSHD_PID).read_text())
        except (FileNotFoundError, ValueError):
            return None
        for one in self.processes():
            if one.is_sshd and inner_pid(one.proc.pid) == inner:
                return one.proc
        return None

    def sessions(self) -> list[Proc]:
        """Return the processes of sshd that serve connections."""
        listener = self.sshd()
        return [one.proc for one in self.processes() if one.is_sshd and one.proc != listener]

    def signal(self, procs: Sequence[Proc], signum: int) -> None:
        """Send a signal to those of the processes that still are."""
        for proc in procs:
            if procfs.is_alive(proc):
                try:
                    os.kill(proc.pid, signum)
                except ProcessLookupError:
                    continue

    def kill(self, procs: Sequence[Proc]) -> None:
        """Kill the processes, and wait until they are gone."""
        self.signal(procs, signal.SIGKILL)
        wait_for(lambda: all(map(_is_gone, procs)), f"the end of processes on {self.name}")


def running(hosts: Iterable[Host]) -> list[tuple[Host, Running]]:
    """Return what runs on hosts but what serves these or tests; all hosts cost one scan of /proc."""
    spaces = {host.namespaces["pid"]: host for host in hosts if host.is_up}
    found = []
    for pid in procfs.pids():
        host = spaces.get(namespace(pid, "pid"))
        if host is None or pid == host.pid:
            continue
        stat = procfs.stat(pid)
        if stat is None or stat.state in "ZX" or _serves(pid, stat.ppid, host):
            continue
        try:
            uid, program = Path(f"/proc/{pid}").stat().st_uid, str(Path(f"/proc/{pid}/exe").readlink())
        except OSError:
            continue
        found.append((host, Running(Proc(pid, stat.start_ticks), uid, _command(pid), program)))
    return found


def _is_gone(proc: Proc) -> bool:
    """Tell whether a process is dead with all its threads: the last of them lets its locks go."""
    try:
        return not procfs.is_alive(proc) and len([*Path(f"/proc/{proc.pid}/task").iterdir()]) <= 1
    except FileNotFoundError:
        return True


def _serves(pid: int, parent: int, host: Host) -> bool:
    command = _command(pid)
    return (parent == host.pid and command == IDLE) or f" -m {SERVANT} " in command


def end(process: subprocess.Popen[Any]) -> None:
    """Kill what `Host.popen` started, with all of its session, and reap it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(GONE_S_MAX)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def namespace(pid: int, kind: str) -> int:
    """Return the inode of a process's namespace; 0 when the process is gone."""
    try:
        return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def inner_pid(pid: int) -> int:
    """Return the pid by which a process is known on its host."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), 0)
