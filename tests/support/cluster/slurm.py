"""How does a real Slurm come up on the cluster in a box, and what can go wrong with it?

A `SlurmBox` is a box whose hosts share /home: munged on all of them, slurmctld on login, slurmd on each node, and as an
option slurmdbd over MariaDB on login. Partitions: `main`, which is the default; `high`, whose jobs take nodes from those
of the others, which are then requeued; `low`, from which `main` takes them, with a grace; and `small`, which gives a
job one node, for ten minutes at most.

Rules: as for every box, nothing is left at its end. All of Slurm's logs lie in the box's folder `slurm`. What `clear`
has to mend after a test is not a fault of the box: a node that was given up, a job that was left.
"""

from __future__ import annotations

import pwd
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.core.host.procfs import Proc, is_alive

from .box import Box
from .host import TRAINER, USERS, Host, Running, running, wait_for
from .network import address
from .slurmconf import ACCOUNT, PASSWORD, Cluster, cgroup_conf, gres_conf, slurm_conf, slurmdbd_conf
from .slurmqueue import ASK_S, Queue

INIT = Path(__file__).with_name("slurminit.sh")
ETC = "common/etc"
KEY_BYTES = 128
ASKED_S_MAX = 20.0
DAEMON_S_MAX = 60.0
"""How long a daemon may take to start or to end."""

READY_S_MAX = 90.0
CLEAR_S_MAX = 90.0
"""How long jobs may take to leave the queue, and nodes to come back: more than SlurmdTimeout."""

SOCKET = "/run/mysqld/mysqld.sock"
DATABASE = f"""
create database if not exists slurm_acct_db;
create user if not exists slurm@localhost identified by '{PASSWORD}';
grant all on slurm_acct_db.* to slurm@localhost
"""
TMP_BYTES = 1 << 30
USABLE = ("idle",)
MENDED_BY_RESUME = ("down", "drain", "fail", "inval")


class SlurmBox(Box):
    """A cluster in a box with a Slurm over it, up from `with SlurmBox() as box:` to its end."""

    def __init__(
        self,
        nodes: int = 4,
        *,
        gpus: int = 2,
        accounting: bool = False,
        names: Mapping[str, str] | None = None,
        shared_home: bool = True,
    ) -> None:
        """`names`: what Slurm calls nodes, where that is not what the host is called."""
        super().__init__(nodes, shared_home=shared_home)
        self.cluster = Cluster(gpus=gpus, accounting=accounting, names=dict(names or {}))

    def __enter__(self) -> SlurmBox:
        super().__enter__()
        try:
            self.wait_idle(READY_S_MAX)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def queue(self) -> Queue:
        """What Slurm says, and what it is asked for."""
        return Queue(self.login)

    @property
    def logs(self) -> Path:
        """The folder with the logs of slurmctld, of each slurmd, and of slurmdbd."""
        return self.state / "slurm"

    def node(self, host: str) -> str:
        """Return what Slurm calls a host."""
        return self.cluster.node(host)

    def wait_idle(self, limit_s: float = CLEAR_S_MAX) -> None:
        """Wait until every node is free for jobs."""

        def all_idle() -> bool:
            return all(state in USABLE for state in self._states().values())

        try:
            wait_for(all_idle, "a cluster of idle nodes", limit_s, ASK_S)
        except TimeoutError as err:
            raise AssertionError(f"{err}\n{self.queue.story()}\n{self.log('slurmctld')}") from None

    def clear(self) -> None:
        """End every job, whoever's, and whatever ranks of it are left; mend the nodes."""
        self.heal()
        self._scancel_all()
        busy = {host.name for host, one in running(self.hosts.values()) if one.uid == TRAINER.uid}
        for name in sorted(busy):
            self.kill_all(name, TRAINER.name)
        wait_for(lambda: not self._scancel_all(), "an empty queue", CLEAR_S_MAX, ASK_S)
        for node, state in self._states().items():
            # One that has come back by itself meanwhile is not to be resumed: Slurm refuses, and `wait_idle` tells.
            if state.startswith(MENDED_BY_RESUME):
                self.login.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
        self.wait_idle()

    def log(self, daemon: str, lines: int = 20) -> str:
        """Return the last lines of a daemon's log: `slurmctld`, `slurmd-node1`, `slurmdbd`."""
        path = self.logs / f"{daemon}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    # --- daemons come and go

    def start(self, hosts: list[Host]) -> None:
        """Switch hosts on, and start on them what they are for."""
        super().start(hosts)
        if self.login in hosts:
            self._init([self.login], "")
            if self.cluster.accounting:
                self._start_accounting()
            self._init([self.login], "slurmctld")
        self._init([host for host in hosts if host is not self.login], "slurmd")

    def slurmd(self, name: str) -> Proc | None:
        """Return the slurmd of a host, if it runs."""
        return next(iter(self._daemons(name, "slurmd")), None)

    def kill_slurmd(self, name: str, *, jobs: bool = True) -> None:
        """Kill a host's slurmd; `jobs`: and all that runs there for jobs, as when a host is lost to Slurm alone."""
        host = self.hosts[name]
        host.kill(self._daemons(name, "slurmd"))
        if jobs:
            host.kill(self._daemons(name, "slurmstepd"))
            self.kill_all(name, "trainer")
        self._stands("slurmd", name, lambda: self.start_slurmd(name))

    def start_slurmd(self, name: str) -> None:
        """Start a host's slurmd if it does not run."""
        self._standing = [one for one in self._standing if (one.name, one.host) != ("slurmd", name)]
        if self.hosts[name].is_up and self.slurmd(name) is None:
            self._init([self.hosts[name]], "slurmd")

    def stop_slurmctld(self, *, kill: bool = False) -> None:
        """End slurmctld; `kill`: without any chance to save what it knows."""
        found = self._daemons("login", "slurmctld")
        self.login.signal(found, signal.SIGKILL if kill else signal.SIGTERM)
        wait_for(lambda: not any(map(is_alive, found)), "the end of slurmctld", DAEMON_S_MAX)
        self._stands("slurmctld", "login", self.start_slurmctld)

    def start_slurmctld(self) -> None:
        """Start slurmctld if it does not run, and wait until it answers."""
        self._standing = [one for one in self._standing if one.name != "slurmctld"]
        if not self._daemons("login", "slurmctld"):
            self._init([self.login], "slurmctld")
        wait_for(self._answers, "an answer of slurmctld", DAEMON_S_MAX, ASK_S)

    def restart_slurmctld(self, *, kill: bool = False) -> None:
        """End slurmctld and start it again."""
        self.stop_slurmctld(kill=kill)
        self.start_slurmctld()

    def configure(self, **settings: object) -> None:
        """Change settings of slurm.conf everywhere, for good, and restart slurmctld: `configure(MinJobAge=2)`."""
        conf = self.state / ETC / "slurm/slurm.conf"
        kept = [line for line in conf.read_text().splitlines() if line.partition("=")[0] not in settings]
        text = "\n".join([*(f"{key}={value}" for key, value in settings.items()), *kept, ""])
        conf.write_text(text)
        for host in self.hosts.values():
            if host.is_up:
                host.write("/etc/slurm/slurm.conf", text)
        self.restart_slurmctld()

    # --- what is wrong with a node

    def full_tmp(self, name: str, left_kib: int = 4) -> None:
        """Leave a host hardly any space below /tmp."""
        host = self.hosts[name]
        used = shutil.disk_usage(host.path("/tmp")).used
        self._resize_tmp(host, used + (left_kib << 10))
        self._stands("full tmp", name, lambda: self._resize_tmp(host, TMP_BYTES))

    def limit(self, name: str, resource: str, value: int) -> None:
        """Give all jobs that start on a host a limit, `man 1 prlimit`: `limit("node2", "nofile", 64)`."""
        slurmd = self.slurmd(name)
        assert slurmd is not None, f"no slurmd on {name}"
        subprocess.run(["prlimit", f"--pid={slurmd.pid}", f"--{resource}={value}:{value}"], check=True)

        def undo() -> None:  # a hard limit can be raised by nobody here, so a new slurmd it is
            self.hosts[name].kill(self._daemons(name, "slurmd"))
            self.start_slurmd(name)

        self._stands("limit", name, undo)

    # --- helpers

    def _init(self, hosts: Sequence[Host], daemon: str) -> None:
        """Run the script that starts what a host has, on all of them at once."""
        environ = {
            "DAEMON": daemon,
            "DATABASE": str(self.state / "mysql"),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        begun = []
        for host in hosts:
            gpus = 0 if host is self.login else self.cluster.gpus
            with (self.logs / f"init-{host.name}.log").open("ab") as log:
                process = host.popen(
                    ["timeout", f"{DAEMON_S_MAX:g}", str(INIT)],
                    env={**environ, "GPUS": str(gpus)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            begun.append((host, process))
        for host, process in begun:
            code = process.wait(DAEMON_S_MAX + 5)
            words = (self.logs / f"init-{host.name}.log").read_text()
            assert code == 0, f"{daemon or 'munged'} on {host.name} did not start:\n{words}\n{self.log(daemon)}"

    def _start_accounting(self) -> None:
        """Start the database and slurmdbd, and make the users known to it."""
        ask = ["mariadb", "--no-defaults", f"--socket={SOCKET}"]
        self._init([self.login], "mariadbd")
        self._until([*ask, "-e", "select 1"], "an answer of MariaDB")
        self.login.run([*ask, "-e", DATABASE])
        self._init([self.login], "slurmdbd")
        self._until(["sacctmgr", "-n", "show", "cluster"], "an answer of slurmdbd")
        for known in (
            ["cluster", "box"],
            ["account", ACCOUNT, "cluster=box"],
            ["user", ",".join(USERS), f"account={ACCOUNT}"],
        ):
            self.login.run(["sacctmgr", "-i", "-Q", "add", *known], check=False)  # not the first start: it is known

    def _lay_out(self) -> None:
        super()._lay_out()
        self.logs.mkdir(mode=0o755)
        _chown(self.logs, "slurm")
        slurm, key = self.state / ETC / "slurm", self.state / ETC / "munge/munge.key"
        slurm.mkdir()
        key.parent.mkdir(mode=0o700)
        key.write_bytes(secrets.token_bytes(KEY_BYTES))
        for path in (key.parent, key):
            _chown(path, "munge")
        key.chmod(0o400)
        nodes = [self.hosts[f"node{number}"] for number in range(1, self.count + 1)]
        assert all(host.address == address(host.number) for host in nodes)
        (slurm / "slurm.conf").write_text(slurm_conf(self.cluster, self.login, nodes, str(self.logs)))
        (slurm / "gres.conf").write_text(gres_conf(self.cluster, nodes))
        (slurm / "cgroup.conf").write_text(cgroup_conf(_version()))
        if self.cluster.accounting:
            (slurm / "slurmdbd.conf").write_text(slurmdbd_conf(self.login, str(self.logs)))
            _chown(slurm / "slurmdbd.conf", "slurm")
            (slurm / "slurmdbd.conf").chmod(0o600)

    def _daemons(self, name: str, program: str) -> list[Proc]:
        def runs(one: Running) -> bool:
            return Path(one.program).name in (program, f"{program}-wlm")  # as Debian calls them

        return [one.proc for one in self.hosts[name].processes() if runs(one)]

    def _until(self, argv: list[str], what: str) -> None:
        wait_for(lambda: self.login.run(argv, check=False).returncode == 0, what, DAEMON_S_MAX, ASK_S)

    def _answers(self) -> bool:
        return self.login.run(["scontrol", "ping"], check=False).returncode == 0

    def _states(self) -> dict[str, str]:
        """Return the nodes' states; nothing says more than that slurmctld has not answered."""
        try:
            return self.queue.nodes()
        except AssertionError:
            return {"slurmctld": "silent"}

    def _scancel_all(self) -> bool:
        """Cancel what is in the queue; returns whether anything was there."""
        ids = [one.id for one in self.queue.entries()]
        if ids:
            self.login.run(["scancel", *ids], check=False)
        return bool(ids)

    def _resize_tmp(self, host: Host, size_bytes: int) -> None:
        if host.is_up:
            host.run(["mount", "-o", f"remount,size={size_bytes}", "/tmp"])


def _chown(path: Path, user: str) -> None:
    shutil.chown(path, user, pwd.getpwnam(user).pw_gid)


def _version() -> tuple[int, ...]:
    """The version of this machine's Slurm, such as (22, 5, 8)."""
    told = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True, timeout=ASKED_S_MAX)
    return tuple(int(part) for part in re.findall(r"\d+", told.stdout)[:3])
