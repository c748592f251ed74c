"""How does a cluster come up on one machine, and go without a trace?

A `Box` is a login host and hosts node1 … nodeN: each with network, host name, IPC, mounts and pids of its own, its own
/etc, /tmp, /run, /dev, /root and (unless shared) /home, and a real sshd. Users `root` and `trainer` have keys to all.
The machine's Python and this repository are visible on all of them, at their own paths.

Rules: nothing on the machine changes but one folder below /var/tmp (not /tmp, which each host has its own of); killing
a host's first process ends all that runs on it, and its mounts and network with it; a box whose owner died is swept
away by the next one.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc

from .faults import Faults
from .host import GONE_S_MAX, ROOT, TRAINER, USERS, Host, User, namespace, wait_for
from .keys import new_key
from .needs import SBIN
from .network import Network, address
from .verbs import REPOSITORY, Verbs

PLACE = Path("/var/tmp")
PREFIX = "orch-box-"
INIT = Path(__file__).with_name("hostinit.sh")
OWN_OF_A_HOST = ("/root", "/home", "/tmp", "/run")

UP_S_MAX = 120.0
"""How long all hosts together may take to come up."""

HOSTS_MAX = 1000
READY_BYTES = 1 << 16

SSHD_CONFIG = """\
# of a cluster in a box
ListenAddress 0.0.0.0
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
UsePAM no
UseDNS no
PrintMotd no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AuthorizedKeysFile /etc/ssh/authorized_keys/%u
MaxStartups 200:30:400
Subsystem sftp /usr/lib/openssh/sftp-server
Include /etc/ssh/box.d/*.conf
"""


class Box(Faults):
    """A cluster in a box, up from `with Box() as box:` to its end."""

    def __init__(self, hosts: int = 8, *, shared_home: bool = False) -> None:
        """`shared_home`: /home is one file system for all hosts, as with NFS."""
        assert 1 <= hosts <= HOSTS_MAX
        super().__init__()
        self.shared_home = shared_home
        self.count = hosts
        self.state = Path()
        self.hosts: dict[str, Host] = {}
        self.verbs: Verbs | None = None

    @property
    def login(self) -> Host:
        """The host from which jobs are submitted."""
        return self.hosts["login"]

    @property
    def nodes(self) -> list[Host]:
        """All hosts but login, in order."""
        return [host for host in self.hosts.values() if host is not self.login]

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        return self.hosts[name]

    def __enter__(self) -> Box:
        sweep()
        self.state = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
        self.state.chmod(0o755)
        me = procfs.stat(os.getpid())
        assert me is not None
        (self.state / "owner").write_text(f"{os.getpid()} {me.start_ticks}\n")
        try:
            self._lay_out()
            self.start(list(self.hosts.values()))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every host and remove the box's folder."""
        if self.verbs is not None:
            self.verbs.close()
        for host in self.hosts.values():
            if host.first is not None:
                _kill(host.first)
        for host in self.hosts.values():
            self.reap(host)
        self.hosts.clear()
        shutil.rmtree(self.state)

    # --- hosts come and go

    def start(self, hosts: list[Host]) -> None:
        """Switch hosts on, login among them or already there; they are up and wired at the return."""
        ready, said = os.pipe()
        try:
            for host in hosts:
                host.shell = self._begin(host, said)
            os.close(said)
            said = -1
            _wait_ready(ready, hosts)
        finally:
            os.close(ready)
            if said >= 0:
                os.close(said)
        if self.login in hosts:
            self.network = Network(self.login)
            self.network.start()
        self.network.plug([host for host in hosts if host is not self.login])

    def reap(self, host: Host) -> None:
        """Wait until nothing of a killed host is left: its first process ends as the last of its namespace."""
        first = host.first
        if host.shell is not None:
            host.shell.wait(GONE_S_MAX)
        if first is not None:
            wait_for(lambda: not procfs.is_alive(first), f"the end of {host.name}")
        host.first, host.shell, host.namespaces = None, None, {}

    def _begin(self, host: Host, ready: int) -> subprocess.Popen[bytes]:
        environ = {
            "PATH": f"/usr/local/bin:/usr/bin:/bin:{SBIN}",
            "HOST": host.name,
            "STATE": str(host.state),
            "COMMON": str(self.state / "common"),
            "HOMES": str(host.homes),
            "VISIBLE": "\n".join(_hidden_by_a_host()),
            "READY": str(ready),
        }
        # The first process dies with `unshare`, and `unshare` with this process: a killed test leaves no hosts.
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--ipc", "--mount", "--pid"]
        with (host.state / "init.log").open("wb") as log:
            return subprocess.Popen(
                [*argv, "--fork", "--kill-child", str(INIT)],
                env=environ,
                pass_fds=[ready],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    # --- what hosts find when they come up

    def _lay_out(self) -> None:
        for number in range(self.count + 1):
            name = f"node{number}" if number else "login"
            state = self.state / name
            homes = self.state / "home" if self.shared_home else state / "home"
            self.hosts[name] = Host(name, number, address(number), state, homes)
        self.verbs = Verbs(self.login)
        host_keys = {host.name: new_key() for host in self.hosts.values()}
        user_keys = {user.name: new_key() for user in USERS.values()}
        known = "".join(f"{host.name},{host.address} {host_keys[host.name][1]}\n" for host in self.hosts.values())
        self._lay_out_common({name: public for name, (_, public) in user_keys.items()})
        for host in self.hosts.values():
            own = host.state / "etc"
            _write(own / "hostname", f"{host.name}\n")
            _write(own / "ssh/ssh_host_ed25519_key", host_keys[host.name][0], mode=0o600)
            for user in USERS.values():
                self._lay_out_home(host, user, user_keys[user.name][0], known)
            (host.state / "root").chmod(0o711)  # a Python below it must be everybody's

    def _lay_out_common(self, user_keys: dict[str, str]) -> None:
        etc = self.state / "common/etc"
        lines = [f"{host.address} {host.name}" for host in self.hosts.values()]
        _write(etc / "hosts", "\n".join(["127.0.0.1 localhost", *lines, ""]))
        _write(etc / "resolv.conf", "# no DNS here\n")
        _write(etc / "nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        uid, home = TRAINER.uid, TRAINER.home
        _append(etc / "passwd", f"trainer:x:{uid}:{uid}::{home}:/bin/bash\n")
        _append(etc / "group", f"trainer:x:{uid}:\n")
        _append(etc / "shadow", "trainer:*:19000:0:99999:7:::\n", mode=0o600)
        _write(etc / "ssh/sshd_config", SSHD_CONFIG)
        _write(etc / "ssh/box.d/00-none.conf", "# faults are put beside this file\n")
        for name, public in user_keys.items():
            _write(etc / f"ssh/authorized_keys/{name}", f"{public} {name}@box\n")

    def _lay_out_home(self, host: Host, user: User, key: str, known: str) -> None:
        home = host.state / "root" if user is ROOT else host.homes / user.name
        _write(home / ".ssh/id_ed25519", key, mode=0o600)
        _write(home / ".ssh/known_hosts", known, mode=0o600)
        for path in (home, home / ".ssh", home / ".ssh/id_ed25519", home / ".ssh/known_hosts"):
            os.chown(path, user.uid, user.uid)
        (home / ".ssh").chmod(0o700)


def sweep() -> None:
    """Remove boxes whose owner is no more; their hosts died with it, unless somebody else killed only the owner's box."""
    for state in sorted(PLACE.glob(f"{PREFIX}*")):
        try:
            owner = Proc(*map(int, (state / "owner").read_text().split()))
        except (OSError, ValueError, TypeError):
            continue  # just being made, or not ours
        if procfs.is_alive(owner):
            continue
        for file in sorted(state.glob("*/first")):
            _kill(Proc(*map(int, file.read_text().split())))
        shutil.rmtree(state, ignore_errors=True)


def inside(spaces: set[int]) -> list[Proc]:
    """Return the processes that are in one of these namespaces (inodes of net, mnt or pid namespaces).

    Only while the namespaces are there: Linux gives the inode of one that is gone to the next.
    """
    pids = [pid for pid in procfs.pids() if any(namespace(pid, kind) in spaces for kind in ("pid", "mnt", "net"))]
    return [Proc(pid, stat.start_ticks) for pid in pids if (stat := procfs.stat(pid)) is not None]


def _wait_ready(ready: int, hosts: list[Host]) -> None:
    waiting = {host.name: host for host in hosts}
    deadline_s = time.monotonic() + UP_S_MAX
    text = b""
    while waiting:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([ready], [], [], left_s)[0]:
            break
        block = os.read(ready, READY_BYTES)
        if not block:
            break  # all hosts that were waited for have died
        *lines, text = (text + block).split(b"\n")
        for line in lines:
            name, pid = line.decode().split()
            _is_up(waiting.pop(name), int(pid))
    words = [f"{host.name}: {(host.state / 'init.log').read_text().strip()}" for host in waiting.values()]
    assert not waiting, "hosts did not come up:\n" + "\n".join(words[:4])


def _is_up(host: Host, pid: int) -> None:
    stat = procfs.stat(pid)
    assert stat is not None, f"{host.name} died at once"
    host.first = Proc(pid, stat.start_ticks)
    host.namespaces = {kind: namespace(pid, kind) for kind in ("net", "mnt", "pid")}
    (host.state / "first").write_text(f"{pid} {stat.start_ticks}\n")


def _kill(proc: Proc) -> None:
    if procfs.is_alive(proc):
        try:
            os.kill(proc.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _hidden_by_a_host() -> list[str]:
    """Return what of this Python and this repository lies where a host has something of its own."""
    wanted = {str(REPOSITORY), sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}
    found = sorted(path for path in wanted if path.startswith(tuple(f"{own}/" for own in OWN_OF_A_HOST)))
    return [path for path in found if not any(path.startswith(f"{other}/") for other in found)]


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _append(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write what the machine's file of that name in /etc says, and `text` after it."""
    _write(path, (Path("/etc") / path.name).read_text() + text, mode=mode)
