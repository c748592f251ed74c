"""How are the hosts wired? A bridge for each network, in login's namespace, and what is not let through.

The machine's own network is not touched: bridges, ports and rules live in login's network namespace and die with it.
Addresses are 10.77.x.y on the first network and 10.78.x.y on the second, so several boxes may use them at once.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field

from .host import Host

IP_S_MAX = 60.0
PER_BLOCK = 250
NETS = {"br0": ("n", "10.77"), "br1": ("m", "10.78")}
"""Of each bridge: the first letter of its ports, and the net of its addresses."""


def address(number: int, net: str = "10.77") -> str:
    """Return the address of a host by its number; login is number 0."""
    if number == 0:
        return f"{net}.255.254"
    return f"{net}.{number // PER_BLOCK}.{number % PER_BLOCK}"


@dataclass(slots=True)
class Network:
    """The wires of one box."""

    login: Host
    bridges: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Make the first bridge; login is on it."""
        self._bridge("br0", address(0))

    def plug(self, hosts: list[Host]) -> None:
        """Give hosts that have just come up their interfaces."""
        for bridge in self.bridges:
            self._wire(hosts, bridge)

    def second(self, hosts: list[Host]) -> None:
        """Give hosts another network, which login is not on."""
        self._bridge("br1", "")
        self._wire(hosts, "br1")

    def end_second(self, hosts: list[Host]) -> None:
        """Take the second network away."""
        for host in hosts:
            self._ip(self.login, f"link del m{host.number}", check=False)  # gone with a host that was off
        self._ip(self.login, "link del br1")
        self.bridges.remove("br1")

    def addresses(self, host: Host) -> list[str]:
        """Return a host's addresses on all networks."""
        return [address(host.number, NETS[bridge][1]) for bridge in self.bridges]

    def unplug(self, host: Host) -> None:
        """Take the host's interfaces away for good; the host itself sees nothing but silence before."""
        for port in self._ports(host):
            self._ip(self.login, f"link set {port} down", check=False)

    def forget(self, host: Host) -> None:
        """Remove what is left of the wires of a host that is off: the kernel does it too, but in its own time."""
        for port in self._ports(host):
            self._ip(self.login, f"link del {port}", check=False)

    def down(self, host: Host) -> None:
        """Cut the host's wires: silence, on both sides."""
        self._ip(self.login, *(f"link set {port} down" for port in self._ports(host)))

    def up(self, host: Host) -> None:
        """Mend the host's wires."""
        for port in self._ports(host):
            self._ip(self.login, f"link set {port} up", check=False)  # gone with a host that is off

    def in_host(self, host: Host, *lines: str) -> None:
        """Run lines of `ip -batch` on a host."""
        self._ip(host, *lines)

    def lose(self, hosts: list[Host], interface: str) -> None:
        """Remove an interface of hosts that may still have it."""
        for host in hosts:
            if host.is_up:
                self._ip(host, f"link del {interface}", check=False)

    def _ports(self, host: Host) -> list[str]:
        return [f"{NETS[bridge][0]}{host.number}" for bridge in self.bridges]

    def forbid(self, *rules: str) -> None:
        """Let no packet through that one of the nft rules matches."""
        self.rules.extend(rules)
        self._filter()

    def allow(self, *rules: str) -> None:
        """Take rules back."""
        for rule in rules:
            self.rules.remove(rule)
        self._filter()

    def _filter(self) -> None:
        chains = "\n".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; jump cuts; }}"
            for hook in ("input", "forward", "output")
        )
        cuts = "\n".join(f"{rule} drop" for rule in self.rules)
        text = (
            f"table bridge box\ndelete table bridge box\ntable bridge box {{\nchain cuts {{\n{cuts}\n}}\n{chains}\n}}\n"
        )
        self._into(self.login, ["nft", "-f", "-"], text)

    def _bridge(self, name: str, own: str) -> None:
        lines = [f"link add {name} type bridge", f"link set {name} up"]
        self._ip(self.login, *lines, *([f"addr add {own}/16 dev {name}"] if own else []))
        self.bridges.append(name)

    def _wire(self, hosts: list[Host], bridge: str) -> None:
        (prefix, net), interface = NETS[bridge], f"eth{bridge[-1]}"
        lines = []
        for host in hosts:
            port = f"{prefix}{host.number}"
            mac = f"02:00:00:{bridge[-1]:0>2}:{host.number >> 8:02x}:{host.number & 255:02x}"  # one for life
            lines.append(f"link add {port} type veth peer name {interface} address {mac} netns {host.pid}")
            lines.append(f"link set {port} master {bridge} up")
        self._ip(self.login, *lines)
        for host in hosts:
            own = address(host.number, net)
            self._ip(host, f"addr add {own}/16 dev {interface}", f"link set {interface} up")
        # Whoever asked in vain for a host that was off would be told "no route" for seconds more.
        self._ip(self.login, f"neigh flush dev {bridge}", check=False)

    def _ip(self, host: Host, *lines: str, check: bool = True) -> None:
        self._into(host, ["ip", "-batch", "-"], "\n".join([*lines, ""]), check=check)

    def _into(self, host: Host, argv: list[str], text: str, *, check: bool = True) -> None:
        # Only the network namespace: `netns PID` must name a process as the machine counts.
        entered = ["nsenter", "-t", str(host.pid), "-n", "--", *argv]
        done = subprocess.run(entered, input=text, capture_output=True, text=True, timeout=IP_S_MAX, check=False)
        assert not check or done.returncode == 0, f"{argv} for {host.name}: {done.stderr}\n{text}"
