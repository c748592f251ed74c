"""What can go wrong with a host, and how is it mended? Each fault is a method; `heal` undoes what stands.

A fault is real: a wire that is down, a process that is killed or stopped, a file of the host's own that says something
else. Undoing tolerates what the host lost meanwhile, since a host that was switched off comes back as it once was.
"""

from __future__ import annotations

import abc
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core.host import procfs

from .host import SSHD_PID, USERS, Host, wait_for
from .keys import new_key
from .network import Network

SSHD_CONFIG_DIR = "/etc/ssh/box.d"
FREEZE_ROUNDS_MAX = 10
KILL_ROUNDS_MAX = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that stands. `host` is empty when it is not one host's."""

    name: str
    host: str
    undo: Callable[[], None] = field(compare=False)


class Faults(abc.ABC):
    """The faults of a box."""

    network: Network
    hosts: dict[str, Host]

    def __init__(self) -> None:
        self._standing: list[Fault] = []

    @abc.abstractmethod
    def start(self, hosts: list[Host]) -> None:
        """Switch hosts on."""

    @abc.abstractmethod
    def reap(self, host: Host) -> None:
        """Wait until nothing of a killed host is left."""

    def heal(self, name: str = "") -> None:
        """Undo what stands, the last first: of one host, or all."""
        for fault in reversed([one for one in self._standing if not name or one.host == name]):
            self._standing.remove(fault)
            fault.undo()

    # --- wires

    def cut(self, name: str) -> None:
        """Take a host's wires away: nothing is refused, nothing answers."""
        host = self.hosts[name]
        self.network.down(host)
        self._stands("cut", name, lambda: self.network.up(host))

    def cut_between(self, one: str, other: str) -> None:
        """Let two hosts not reach each other, on any network, while both reach all others."""
        rules = []
        for here, there in ((one, other), (other, one)):
            for net in self.network.addresses(self.hosts[here]):
                to = ", ".join(self.network.addresses(self.hosts[there]))
                rules.append(f"ip saddr {net} ip daddr {{ {to} }}")
        self._forbid("cut between", f"{one} {other}", rules)

    def bastion(self, name: str) -> None:
        """Let login reach only one host, and that one all others."""
        behind = [host for host in self.hosts.values() if host.name not in ("login", name)]
        them, login = ", ".join(host.address for host in behind), self.hosts["login"].address
        self._forbid(
            "bastion",
            "",
            [f"ip saddr {login} ip daddr {{ {them} }}", f"ip saddr {{ {them} }} ip daddr {login}"],
        )

    def second_network(self, *, only: bool = False) -> None:
        """Give the nodes another network. `only`: on the first they reach login, but not one another."""
        nodes = [host for host in self.hosts.values() if host.name != "login"]
        self.network.second(nodes)
        self._stands("second network", "", lambda: self.network.end_second(nodes))
        if only:
            them = ", ".join(host.address for host in nodes)
            self._forbid("first network", "", [f"ip saddr {{ {them} }} ip daddr {{ {them} }}"])

    def docker_bridges(self) -> None:
        """Give every node a bridge with the very same address, as Docker does."""
        nodes = [host for host in self.hosts.values() if host.name != "login" and host.is_up]
        for host in nodes:
            self.network.in_host(
                host,
                "link add docker0 type bridge",
                "addr add 172.17.0.1/16 dev docker0",
                "link set docker0 up",
            )
        self._stands("docker bridges", "", lambda: self.network.lose(nodes, "docker0"))

    def name_is_loopback(self, name: str) -> None:
        """Let a host find 127.0.1.1 when it looks up its own name, as Debian sets it up."""
        hosts = self.hosts[name].path("/etc/hosts").read_text()
        kept = [line for line in hosts.splitlines() if name not in line.split()[1:]]
        self._edit("loopback name", name, "/etc/hosts", "\n".join([f"127.0.1.1 {name}", *kept, ""]))

    def block_ports(self, low: int, high: int) -> None:
        """Let no packet to one of these TCP ports through between any hosts, as a firewall that drops them."""
        self._forbid("block ports", "", [f"tcp dport {low}-{high} ip saddr != 10.77.255.254"])

    def slow_wire(self, name: str, mbit_per_s: int) -> None:
        """Let a host send no faster than this."""
        host = self.hosts[name]
        host.run(
            [
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                f"{mbit_per_s}mbit",
                "burst",
                "64kb",
                "latency",
                "200ms",
            ]
        )
        self._stands("slow wire", name, lambda: _fast(host))

    def mount_small(self, name: str, inside: str, size: str, options: str = "rw") -> None:
        """Mount a disk of this size on a folder of a host, which is made where it does not exist."""
        host = self.hosts[name]
        host.run(["mkdir", "-p", inside])
        host.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777,{options}", "small", inside])
        self._stands("mount", name, lambda: _unmount(host, inside))

    # --- power and processes

    def power_off(self, name: str) -> None:
        """Switch a host off: silence first, then nothing of it is left but its disk."""
        host = self.hosts[name]
        self.network.unplug(host)
        assert host.first is not None
        host.signal([host.first], signal.SIGKILL)
        self.reap(host)
        self.network.forget(host)
        self._stands("power off", name, lambda: self.power_on(name))

    def power_on(self, name: str) -> None:
        """Switch a host on again; homes are as they were, all else is new."""
        self._standing = [one for one in self._standing if (one.name, one.host) != ("power off", name)]
        if not self.hosts[name].is_up:
            self.start([self.hosts[name]])

    def kill_all(self, name: str, user: str) -> None:
        """Kill every process of a user on a host, but the sshd that listens."""
        host = self.hosts[name]
        for _ in range(KILL_ROUNDS_MAX):  # what is being started meanwhile is found in the next round
            listener = host.sshd() if user == "root" else None
            found = [one.proc for one in host.processes() if one.uid == USERS[user].uid and one.proc != listener]
            if not found:
                return
            host.kill(found)
        raise AssertionError(f"processes of {user} on {name} come again and again")

    def freeze(self, name: str) -> None:
        """Stop all that runs on a host, at once."""
        host = self.hosts[name]
        for _ in range(FREEZE_ROUNDS_MAX):
            going = [one.proc for one in host.processes() if _state(one.proc.pid) != "T"]
            if not going:
                break
            host.signal(going, signal.SIGSTOP)
        self._stands("freeze", name, lambda: self._go_on(host))

    def thaw(self, name: str) -> None:
        """Let a frozen host go on."""
        self._undo("freeze", name)

    # --- sshd

    def stop_sshd(self, name: str) -> None:
        """End the process that listens; sessions go on, as with `systemctl stop ssh`."""
        host, listener = self.hosts[name], self.hosts[name].sshd()
        if listener is not None:
            host.signal([listener], signal.SIGTERM)
            wait_for(lambda: not procfs.is_alive(listener), f"the end of sshd on {name}")
        self._stands("stop sshd", name, lambda: self.start_sshd(name))

    def start_sshd(self, name: str) -> None:
        """Listen again."""
        self._standing = [one for one in self._standing if (one.name, one.host) != ("stop sshd", name)]
        host = self.hosts[name]
        if host.is_up and host.sshd() is None:
            host.path(SSHD_PID).unlink(missing_ok=True)
            host.run(["/usr/sbin/sshd", "-E", str(host.state / "sshd.log")])
            wait_for(host.sshd, f"sshd on {name}")

    def restart_sshd(self, name: str, *, sessions: bool = False) -> None:
        """Let sshd read its configuration again; `sessions`: those that are open end too."""
        self.stop_sshd(name)
        if sessions:
            self.break_ssh(name)
        self.start_sshd(name)

    def break_ssh(self, name: str) -> None:
        """Kill the sshd processes of the open sessions; what runs in them goes on."""
        host = self.hosts[name]
        host.kill(host.sessions())

    def stall_ssh(self, name: str) -> None:
        """Stop the open sessions: their connections stay, and nothing comes over them."""
        self._stop("stall ssh", name, self.hosts[name].sessions())

    def hang_sshd(self, name: str) -> None:
        """Stop the process that listens: the host answers, and never says who it is."""
        listener = self.hosts[name].sshd()
        self._stop("hang sshd", name, [listener] if listener else [])

    def no_forwarding(self, name: str) -> None:
        """Let sshd refuse port forwards."""
        self._configure_sshd("no forwarding", name, "AllowTcpForwarding no\n")

    def change_host_key(self, name: str) -> None:
        """Give a host another key than the one that is known."""
        private, _ = new_key()
        self._edit("host key", name, "/etc/ssh/ssh_host_ed25519_key", private, mode=0o600, sshd=True)

    def forget_host_key(self, name: str, user: str = "trainer") -> None:
        """Take a host's key out of what a user knows on login."""
        known = f"{USERS[user].home}/.ssh/known_hosts"
        lines = self.hosts["login"].path(known).read_text().splitlines()
        kept = [line for line in lines if name not in line.split()[0].split(",")]
        self._edit("forget host key", "login", known, "\n".join([*kept, ""]), user=user, mode=0o600)

    # --- standing and undoing

    def _stands(self, name: str, host: str, undo: Callable[[], None]) -> None:
        self._standing.append(Fault(name, host, undo))

    def _undo(self, name: str, host: str) -> None:
        for fault in [one for one in self._standing if (one.name, one.host) == (name, host)]:
            self._standing.remove(fault)
            fault.undo()

    def _forbid(self, name: str, host: str, rules: list[str]) -> None:
        self.network.forbid(*rules)
        self._stands(name, host, lambda: self.network.allow(*rules))

    def _stop(self, name: str, host: str, procs: list[procfs.Proc]) -> None:
        self.hosts[host].signal(procs, signal.SIGSTOP)
        self._stands(name, host, lambda: self.hosts[host].signal(procs, signal.SIGCONT))

    def _go_on(self, host: Host) -> None:
        host.signal([one.proc for one in host.processes()], signal.SIGCONT)

    def _configure_sshd(self, name: str, host: str, text: str) -> None:
        self._edit(name, host, f"{SSHD_CONFIG_DIR}/{name.replace(' ', '-')}.conf", text, sshd=True)

    def _edit(
        self,
        name: str,
        host: str,
        inside: str,
        text: str,
        *,
        user: str = "root",
        mode: int = 0o644,
        sshd: bool = False,
    ) -> None:
        """Let a file of a host say something else. `sshd`: it must hear of it."""
        one, uid = self.hosts[host], user
        path = one.path(inside)
        before = path.read_text() if path.exists() else None

        def put(content: str | None) -> None:
            if not one.is_up:
                return
            if content is None:
                one.path(inside).unlink(missing_ok=True)
            else:
                one.write(inside, content, user=uid, mode=mode)
            if sshd:
                self.restart_sshd(host)

        put(text)
        self._stands(name, host, lambda: put(before))


def _fast(host: Host) -> None:
    host.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=False)  # power on has given it another wire


def _unmount(host: Host, inside: str) -> None:
    host.run(["umount", "--lazy", inside])


def _state(pid: int) -> str:
    stat = procfs.stat(pid)
    return stat.state if stat else "T"
