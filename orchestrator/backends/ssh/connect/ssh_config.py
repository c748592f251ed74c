"""OpenSSH's configuration of a host: user, port, keys, bastions, known_hosts; `ssh -G` reads it.

Only ssh itself knows `Include`, `Match` and later additions. It fills in defaults, but leaves `~` and `%h` to the reader.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import socket
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.backends.api import LaunchError
from orchestrator.core.observations import Retryable

SSH_G_S_MAX = 10.0
CONNECT_S_MAX = 10.0
"""Limit of a TCP connection, without `ConnectTimeout`."""

JUMPS_MAX = 8
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
DEFAULT_PORT = 22

_JUMP = re.compile(r"^(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^]]+\]|[^:@]+)(?::(?P<port>\d+))?/?$")

Options = dict[str, list[str]]
"""The values, by keyword in lower case, in the order of the configuration."""


@dataclass(frozen=True, slots=True)
class Target:
    """A host and how to reach it."""

    host: str  # as the user wrote it
    hostname: str  # what is dialled
    user: str
    port: int
    key_alias: str
    identity_files: tuple[Path, ...]
    certificate_files: tuple[Path, ...]
    identities_only: bool
    agent_socket: str
    user_known_hosts: tuple[Path, ...]
    global_known_hosts: tuple[Path, ...]
    hash_known_hosts: bool
    connect_s_max: float
    proxy_command: str
    jump: Target | None

    @property
    def key_name(self) -> str:
        """The host's name in known_hosts."""
        if self.key_alias:
            return self.key_alias
        return self.hostname if self.port == DEFAULT_PORT else f"[{self.hostname}]:{self.port}"

    @property
    def port_option(self) -> str:
        """The port option of a command for people, followed by a space; empty for the default port."""
        return "" if self.port == DEFAULT_PORT else f"-p {self.port} "


def resolve(host: str, user: str | None = None, port: int | None = None) -> Target:
    """Return how to reach `host`; `user` and `port` override the configuration. Raises LaunchError("config")."""
    return _resolve(host, user, port, None, 0)


def home() -> Path:
    """Return the user's home folder."""
    return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)


def overrides_home() -> bool:
    """Return whether HOME differs from the home folder of the user database, which OpenSSH uses."""
    return home() != Path(pwd.getpwuid(os.getuid()).pw_dir)


def _resolve(host: str, user: str | None, port: int | None, via: Target | None, depth: int) -> Target:
    if depth > JUMPS_MAX:
        raise _config_error(f"ProxyJump leads through more than {JUMPS_MAX} hosts, perhaps in a loop", host)
    if not host or host.startswith("-") or any(char.isspace() for char in host):
        raise _config_error(f"{host!r} is not a host name", host)
    options = _read_options(host, user, port)
    target = _target(host, options)
    jumps = options.get("proxyjump", ["none"])[-1]
    if via is not None:
        return replace(target, jump=via, proxy_command="")
    if jumps.lower() == "none":
        return target
    return replace(target, jump=_resolve_jumps(jumps, host, depth), proxy_command="")


def _resolve_jumps(jumps: str, host: str, depth: int) -> Target:
    """Return the last bastion of `user@first:port,second,…`; each is reached through the previous one."""
    last: Target | None = None
    for jump in jumps.split(","):
        match = _JUMP.match(jump.strip())
        if match is None:
            raise _config_error(f"ProxyJump {jump!r} is not [user@]host[:port]", host)
        port = int(match["port"]) if match["port"] else None
        last = _resolve(match["host"].strip("[]"), match["user"], port, last, depth + 1)
    assert last is not None
    return last


def _target(host: str, options: Options) -> Target:
    def last(keyword: str) -> str:
        value = options.get(keyword, [""])[-1].strip()
        return "" if value.lower() == "none" else value

    def paths(values: list[str]) -> tuple[Path, ...]:
        return tuple(Path(_expand(value.strip('"'), tokens)) for value in values if value.lower() not in ("", "none"))

    hostname, port = last("hostname").lower(), int(last("port"))
    tokens = {"h": hostname, "n": host, "p": str(port), "r": last("user"), "k": hostname}
    agent = last("identityagent") if "identityagent" in options else "SSH_AUTH_SOCK"
    return Target(
        host=host,
        hostname=hostname,
        user=last("user"),
        port=port,
        key_alias=last("hostkeyalias").lower(),
        identity_files=paths(options.get("identityfile", [])),
        certificate_files=paths(options.get("certificatefile", [])),
        identities_only=last("identitiesonly") == "yes",
        agent_socket=os.environ.get(agent, "") if agent == "SSH_AUTH_SOCK" else _expand(agent, tokens),
        user_known_hosts=paths(last("userknownhostsfile").split()),
        global_known_hosts=paths(last("globalknownhostsfile").split()),
        hash_known_hosts=last("hashknownhosts") == "yes",
        connect_s_max=float(last("connecttimeout") or CONNECT_S_MAX),
        proxy_command=_fill_in(last("proxycommand"), tokens),
        jump=None,
    )


def _read_options(host: str, user: str | None, port: int | None) -> Options:
    """Return what `ssh -G` prints. ssh finds the home folder in the user database, so another HOME is spelled out."""
    argv = ["ssh", "-T", "-G"]
    config = ""
    if overrides_home():
        argv += ["-F", "/dev/stdin"]
        config = f'Include "{home() / ".ssh" / "config"}"\nMatch all\nInclude {SYSTEM_CONFIG}\n'
    argv += ["-l", user] if user else []
    argv += ["-p", str(port)] if port else []
    try:
        done = subprocess.run([*argv, "--", host], input=config.encode(), capture_output=True, timeout=SSH_G_S_MAX)
    except FileNotFoundError as err:
        what = "there is no ssh client on this machine, which reads ~/.ssh/config"
        raise LaunchError("config", what, "install openssh-client", Retryable.PERMANENT) from err
    except subprocess.TimeoutExpired as err:
        raise _config_error(f"`ssh -G {host}` took longer than {SSH_G_S_MAX:.0f} s", host) from err
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _config_error(lines[0] if lines else f"`ssh -G {host}` ended with code {done.returncode}", host)
    options: Options = {}
    ssh_folder = str(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh") + "/"
    for line in done.stdout.decode(errors="replace").splitlines():
        keyword, _, value = line.partition(" ")
        if overrides_home():
            value = value.replace(ssh_folder, f"{home() / '.ssh'}/")
        options.setdefault(keyword.lower(), []).append(value)
    return options


def _expand(value: str, tokens: dict[str, str]) -> str:
    """Fill in `~`, `%h` and its like, and `$NAME` or `${NAME}`."""
    text = _fill_in(value, tokens)
    path = str(home()) + text[1:] if text == "~" or text.startswith("~/") else os.path.expanduser(text)  # noqa: PTH111
    return os.path.expandvars(path)


def _fill_in(value: str, tokens: dict[str, str]) -> str:
    hostname = socket.gethostname()
    values = {**tokens, "%": "%", "d": str(home()), "u": getpass.getuser(), "i": str(os.getuid())}
    values |= {"l": hostname, "L": hostname.partition(".")[0]}
    return re.sub(r"%(.)", lambda match: values.get(match[1], match[0]), value)


def _config_error(what: str, host: str) -> LaunchError:
    return LaunchError("config", what, f"fix ~/.ssh/config; `ssh -G {host}` checks it", Retryable.PERMANENT)
