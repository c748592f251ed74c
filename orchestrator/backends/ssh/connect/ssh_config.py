"""OpenSSH's configuration of a host: user, port, keys, bastions, known_hosts.

`ssh -G` answers where ssh is installed: only ssh itself knows `Include`, `Match` and later additions. It costs some
milliseconds, so hosts that the same `Host` lines match share one answer. Without ssh, paramiko's reader is used.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shutil
import socket
import subprocess
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import paramiko

from orchestrator.backends.api import LaunchError
from orchestrator.core.observations import Retryable

ASK_S_MAX = 10.0
JUMPS_MAX = 8
INCLUDES_MAX = 256
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
DEFAULT_PORT = 22

_DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
_LINE = re.compile(r"^\s*(\w+)(?:\s*=\s*|\s+)(.*?)\s*$")
_JUMP = re.compile(r"^(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^]]+\]|[^:@]+)(?::(?P<port>\d+))?/?$")

Options = dict[str, list[str]]
"""The values set, by keyword in lower case, in the order of the configuration."""


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
    connect_s_max: float | None
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


def has_own_home() -> bool:
    """Tell whether HOME differs from the home folder of the user database, which OpenSSH uses."""
    return home() != Path(pwd.getpwuid(os.getuid()).pw_dir)


def _resolve(host: str, user: str | None, port: int | None, through: Target | None, depth: int) -> Target:
    if depth > JUMPS_MAX:
        raise _bad(f"ProxyJump leads through more than {JUMPS_MAX} hosts, perhaps in a circle", host)
    if not host or host.startswith("-") or any(char.isspace() for char in host):
        raise _bad(f"{host!r} is not a host name", host)
    options = _options(host, user, port)
    target = _target(host, options, user, port)
    jumps = _last(options, "proxyjump")
    if through is not None:
        return replace(target, jump=through, proxy_command="")
    if not jumps or jumps.lower() == "none":
        return target
    return replace(target, jump=_chain(jumps, host, depth), proxy_command="")


def _chain(jumps: str, host: str, depth: int) -> Target:
    """Return the last bastion of `user@first:port,second,…`; each is reached through the previous one."""
    last: Target | None = None
    for jump in jumps.split(","):
        match = _JUMP.match(jump.strip())
        if match is None:
            raise _bad(f"ProxyJump {jump!r} is not [user@]host[:port]", host)
        port = int(match["port"]) if match["port"] else None
        last = _resolve(match["host"].strip("[]"), match["user"], port, last, depth + 1)
    assert last is not None
    return last


def _target(host: str, options: Options, user: str | None, port: int | None) -> Target:
    hostname = (_last(options, "hostname") or host).lower()
    whose = user or _last(options, "user") or getpass.getuser()
    where = port or _number(options, "port", host) or DEFAULT_PORT
    proxy = _last(options, "proxycommand")
    tokens = {"h": hostname, "n": host, "p": str(where), "r": whose}
    return Target(
        host=host,
        hostname=hostname,
        user=whose,
        port=where,
        key_alias=_last(options, "hostkeyalias").lower(),
        identity_files=_paths(options, "identityfile", tokens, _defaults(_DEFAULT_KEYS)),
        certificate_files=_paths(options, "certificatefile", tokens, []),
        identities_only=_last(options, "identitiesonly").lower() in ("yes", "true"),
        agent_socket=_agent_socket(_last(options, "identityagent"), tokens),
        user_known_hosts=_files(options, "userknownhostsfile", tokens, _defaults(("known_hosts",))),
        global_known_hosts=_files(options, "globalknownhostsfile", tokens, ["/etc/ssh/ssh_known_hosts"]),
        hash_known_hosts=_last(options, "hashknownhosts").lower() in ("yes", "true"),
        connect_s_max=_number(options, "connecttimeout", host),
        proxy_command="" if proxy.lower() == "none" else _expand(proxy, tokens, tilde=False),
        jump=None,
    )


def _options(host: str, user: str | None, port: int | None) -> Options:
    texts = _texts()
    if shutil.which("ssh") is None:
        return _read_without_ssh(host)
    shared = _Shape.of(texts, host)
    if shared is None:
        return _ask_ssh(host, user, port)
    key = (str(home()), *texts, str(shared.matches), str(user), str(port))
    with _answers_lock:  # the first of many threads asks, the others wait for its answer
        if key not in _answers:
            if len(_answers) > _ANSWERS_MAX:
                _answers.clear()
            _answers[key] = (host, _ask_ssh(host, user, port))
        first, options = _answers[key]
    if _last(options, "hostname") != first.lower():
        return options
    return {**options, "hostname": [host.lower()]}


_ANSWERS_MAX = 1024
_answers: dict[tuple[str, ...], tuple[str, Options]] = {}
_answers_lock = threading.Lock()


def _ask_ssh(host: str, user: str | None, port: int | None) -> Options:
    """Return what `ssh -G` prints. ssh finds the home folder in the user database, so another HOME is spelled out."""
    argv = ["ssh", "-T", "-G"]
    config = ""
    if has_own_home():
        argv += ["-F", "/dev/stdin"]
        config = f'Include "{home() / ".ssh" / "config"}"\nMatch all\nInclude {SYSTEM_CONFIG}\n'
    argv += ["-l", user] if user else []
    argv += ["-p", str(port)] if port else []
    try:
        done = subprocess.run(
            [*argv, "--", host], input=config.encode(), capture_output=True, timeout=ASK_S_MAX
        )
    except subprocess.TimeoutExpired as err:
        raise _bad(f"`ssh -G {host}` took longer than {ASK_S_MAX:.0f} s", host) from err
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _bad(lines[0] if lines else f"`ssh -G {host}` ended with code {done.returncode}", host)
    options: Options = {}
    own = str(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh") + "/"
    for line in done.stdout.decode(errors="replace").splitlines():
        keyword, _, value = line.partition(" ")
        if has_own_home():
            value = value.replace(own, f"{home() / '.ssh'}/")
        options.setdefault(keyword.lower(), []).append(value)
    return options


def _read_without_ssh(host: str) -> Options:
    own = _roots()[0]
    if own.is_file() and re.search(r"(?im)^\s*include\b", own.read_text(errors="replace")):
        raise _bad("without an ssh client, `Include` cannot be followed: install openssh-client", host)
    text = "\nHost *\n".join(path.read_text(errors="replace") for path in _roots() if path.is_file())
    try:
        options = paramiko.SSHConfig.from_text(text).lookup(host)
    except (paramiko.SSHException, ImportError, ValueError) as err:
        raise _bad(str(err) or type(err).__name__, host) from err
    return {key: list(value) if isinstance(value, list) else [value] for key, value in options.items()}


@dataclass(frozen=True, slots=True)
class _Shape:
    """Which of all `Host` lines match a host: hosts of the same shape share all options but their names."""

    matches: tuple[bool, ...]

    @classmethod
    def of(cls, texts: tuple[str, ...], host: str) -> _Shape | None:
        """Return the host's shape, or None where the configuration tells hosts apart by more than their names."""
        matches: list[bool] = []
        for line in (line for text in texts for line in text.splitlines()):
            match = _LINE.match(line)
            if match is None:
                continue
            keyword, value = match[1].lower(), match[2]
            if keyword == "host":
                matches.append(_matches(value, host))
            elif _tells_apart(keyword, value, host):
                return None
        return cls(tuple(matches))


def _tells_apart(keyword: str, value: str, host: str) -> bool:
    if keyword == "hostname":
        return "%" in value or host.lower() == value.lower()
    return keyword in ("match", "canonicalizehostname") or (keyword == "include" and "$" in value)


def _matches(patterns: str, host: str) -> bool:
    hit = False
    for pattern in patterns.replace('"', " ").split():
        if fits(pattern.removeprefix("!"), host):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit


def fits(pattern: str, name: str) -> bool:
    """Tell whether a name matches a pattern of OpenSSH's, in which only `*` and `?` are special."""
    if "*" not in pattern and "?" not in pattern:
        return pattern == name
    text = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)
    return re.fullmatch(text, name) is not None


def _roots() -> tuple[Path, Path]:
    return home() / ".ssh" / "config", SYSTEM_CONFIG


def _texts() -> tuple[str, ...]:
    """Return the texts of all configuration files and of those that they include, in any order."""
    texts: list[str] = []
    waiting = [(path, path.parent) for path in _roots()]
    while waiting and len(texts) < INCLUDES_MAX:
        path, base = waiting.pop(0)
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        texts.append(text)
        for line in text.splitlines():
            match = _LINE.match(line)
            if match and match[1].lower() == "include":
                for name in match[2].replace('"', " ").split():
                    waiting += [(included, base) for included in _included(name, base)]
    return tuple(texts)


def _included(pattern: str, base: Path) -> list[Path]:
    full = Path(_tilde(pattern)) if pattern.startswith(("~", "/")) else base / pattern
    try:
        return sorted(Path("/").glob(str(full).lstrip("/")))
    except (ValueError, OSError):
        return []


def _last(options: Options, keyword: str) -> str:
    values = options.get(keyword, [])
    return values[-1].strip() if values else ""


def _number(options: Options, keyword: str, host: str) -> int | None:
    text = _last(options, keyword)
    if not text or text.lower() == "none":
        return None
    if not text.isdecimal():
        raise _bad(f"{keyword} {text!r} is not a number", host)
    return int(text)


def _defaults(names: tuple[str, ...]) -> list[str]:
    return [f"~/.ssh/{name}" for name in names]


def _paths(options: Options, keyword: str, tokens: dict[str, str], default: list[str]) -> tuple[Path, ...]:
    """Return the paths of a keyword that may stand on several lines, with one path each."""
    values = [value.strip().strip('"') for value in options.get(keyword, default)]
    return tuple(Path(_expand(value, tokens)) for value in values if value and value.lower() != "none")


def _files(options: Options, keyword: str, tokens: dict[str, str], default: list[str]) -> tuple[Path, ...]:
    """Return the paths of a keyword with several paths on one line."""
    words = [word for value in options.get(keyword, default) for word in value.replace('"', " ").split()]
    return tuple(Path(_expand(word, tokens)) for word in words if word.lower() != "none")


def _agent_socket(value: str, tokens: dict[str, str]) -> str:
    if value.lower() == "none":
        return ""
    if value in ("", "SSH_AUTH_SOCK"):
        return os.environ.get("SSH_AUTH_SOCK", "")
    return _expand(value, tokens)


def _expand(value: str, tokens: dict[str, str], tilde: bool = True) -> str:
    """Fill in `~`, `%h` and its like, and `$NAME` or `${NAME}`."""
    own = socket.gethostname()
    values = {**tokens, "%": "%", "d": str(home()), "u": getpass.getuser(), "i": str(os.getuid())}
    values |= {"l": own, "L": own.partition(".")[0]}
    values["k"] = values["h"]
    text = re.sub(r"%(.)", lambda match: values.get(match[1], match[0]), value)
    if not tilde:
        return text
    return os.path.expandvars(_tilde(text))


def _tilde(text: str) -> str:
    return str(home()) + text[1:] if text == "~" or text.startswith("~/") else os.path.expanduser(text)  # noqa: PTH111


def _bad(what: str, host: str) -> LaunchError:
    return LaunchError(
        "config", what, f"mend ~/.ssh/config; `ssh -G {host}` reads it again", Retryable.PERMANENT
    )
