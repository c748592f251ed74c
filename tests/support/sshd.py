"""What do the tests over SSH share? A home of their own, keys, and real sshd servers on loopback ports.

Rules: HOME is a folder of the test, here and on the servers, so nobody's ~/.ssh is read or written and nobody's .bashrc
runs; all that sshd needs lies there too; a server and everything it started is gone at the test's end.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.connection import Connection, JumpHosts
from orchestrator.backends.ssh.connect.ssh_config import Target, resolve

WAIT_S = 20.0
START_S_MAX = 30.0
END_S_MAX = 20.0
SERVER = "/usr/sbin/sshd"
PRIVILEGE_FOLDER = Path("/run/sshd")
LOOPBACK = "127.0.0.1"

needs_sshd = pytest.mark.skipif(
    not (Path(SERVER).exists() and shutil.which("ssh-keygen")),
    reason="needs sshd and ssh-keygen: apt install openssh-server openssh-client",
)


@dataclass(slots=True)
class Sshd:
    """A running sshd; `log` is what it said, and `folder / "home"` is home for who logs in."""

    process: subprocess.Popen[str]
    port: int
    folder: Path
    host_keys: list[Path]
    user: str
    log: list[str] = field(default_factory=list)

    @property
    def known_hosts(self) -> str:
        """The lines that make its keys known."""
        return "".join(f"[{LOOPBACK}]:{self.port} {public(key)}\n" for key in self.host_keys)

    def family(self) -> list[int]:
        """The pids of the server and of all that it started."""
        return _family(self.process.pid)

    def sessions(self) -> list[int]:
        """The pids of what serves its connections; a keeper that has just landed may still be beneath them."""
        return [pid for pid in self.family()[1:] if _name(pid).startswith("sshd")]

    def cut_off(self) -> None:
        """Kill all that it started; one of those may go with another."""
        for pid in self.family()[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it and what serves its connections."""
        for pid in [self.process.pid, *self.sessions()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(END_S_MAX)


@dataclass(slots=True)
class Desk:
    """Where a test logs in from: its home, and a key that its servers know."""

    home: Path
    key: Path
    start: Callable[..., Sshd]

    def know(self, *servers: Sshd) -> None:
        """Write the servers' keys to known_hosts."""
        with (self.home / ".ssh" / "known_hosts").open("a") as stream:
            stream.writelines(server.known_hosts for server in servers)

    def configure(self, text: str) -> None:
        """Write ~/.ssh/config."""
        (self.home / ".ssh" / "config").write_text(text)


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "", bits: int | None = None) -> Path:
    """Make a key pair with ssh-keygen."""
    size = ["-b", str(bits)] if bits else []
    argv = ["ssh-keygen", "-q", "-t", kind, *size, "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run(argv, check=True, timeout=START_S_MAX)
    return path


def public(key: Path) -> str:
    """The type and the text of a public key."""
    return " ".join(key.with_name(key.name + ".pub").read_text().split()[:2])


def fingerprint(key: Path) -> str:
    """What ssh-keygen prints."""
    done = subprocess.run(["ssh-keygen", "-lf", f"{key}.pub"], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.split()[1]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as line:
        line.bind((LOOPBACK, 0))
        port: int = line.getsockname()[1]
        return port


def target_of(port: int) -> Target:
    """How a server on this port is reached."""
    return resolve(LOOPBACK, port=port)


def enter(server: Sshd, jumps: JumpHosts) -> Connection:
    """Connect to a server that is known."""
    return Connection.open(target_of(server.port), host_keys="strict", jumps=jumps)


def is_over(connection: Connection) -> bool:
    """Wait until a connection is gone; tell whether that came in time."""
    deadline_s = time.monotonic() + WAIT_S
    while connection.is_open and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not connection.is_open


def refused(target: Target, jumps: JumpHosts, stage: str) -> LaunchError:
    """Return why there is no way in, which must be known at this stage."""
    with pytest.raises(LaunchError) as caught:
        Connection.open(target, host_keys="strict", jumps=jumps)
    assert caught.value.stage == stage, str(caught.value)
    return caught.value


def start_sshd(folder: Path, host_keys: list[Path], authorized: str, settings: str = "") -> Sshd:
    """Start a server that lets this user in by the keys of `authorized`; `settings` go before all others."""
    (folder / "home").mkdir(parents=True)
    (folder / "authorized_keys").write_text(authorized)
    port = free_port()
    config = [settings, f"ListenAddress {LOOPBACK}:{port}", f"PidFile {folder}/pid", "StrictModes no"]
    config += [f"HostKey {key}" for key in host_keys]
    config += [
        f"AuthorizedKeysFile {folder}/authorized_keys",
        "PasswordAuthentication no",
        "UsePAM no",
        f"SetEnv HOME={folder}/home",
    ]
    config += ["PermitRootLogin yes", "MaxStartups 500", "Subsystem sftp /usr/lib/openssh/sftp-server"]
    (folder / "sshd_config").write_text("\n".join(config) + "\n")
    if os.geteuid() == 0:
        PRIVILEGE_FOLDER.mkdir(mode=0o755, exist_ok=True)  # made at boot, as a rule, and only where sshd is a service
    argv = [SERVER, "-D", "-e", "-f", str(folder / "sshd_config")]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    server = Sshd(process, port, folder, host_keys, getpass.getuser())
    assert process.stderr is not None
    up = threading.Event()
    threading.Thread(target=_listen, args=(server, up), daemon=True).start()
    if not up.wait(START_S_MAX) or process.poll() is not None:
        server.stop()
        raise AssertionError(f"sshd did not start: {''.join(server.log)}")
    return server


def _listen(server: Sshd, up: threading.Event) -> None:
    """Keep what the server says, and tell when it listens or has ended."""
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.log.append(line)
        if "Server listening" in line:
            up.set()
    up.set()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in _family(int(child)))]
