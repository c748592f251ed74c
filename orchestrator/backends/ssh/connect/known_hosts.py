"""Host key check: a host's key is compared with known_hosts, as OpenSSH does it.

- A key that is known under the host's name is good.
- A key that contradicts a known one is refused under both policies. So is one whose type is not that of any known key:
  the known types were requested first, so the host has none of them any more. Types that cannot be requested prove nothing.
- An unknown key is refused (`strict`), or added (`accept-new`).
- A revoked key is refused. A `@cert-authority` line makes no key known: paramiko verifies no host certificates.

paramiko's `HostKeys` is not used: it passes over patterns and `@revoked`, so a changed key could pass for a new one.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paramiko

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.ssh_config import DEFAULT_PORT, Target, home
from orchestrator.core.observations import Retryable

Policy = Literal["strict", "accept-new"]

FILE_BYTES_MAX = 64 << 20
KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
"""The types of host keys that can be requested: those of paramiko."""


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One line of a known_hosts file; `key` is in base64."""

    file: Path
    line: int
    marker: str
    kind: str
    key: str

    @property
    def where(self) -> str:
        """File and line."""
        return f"{_short_path(self.file)}:{self.line}"


def find_known_types(target: Target) -> tuple[str, ...]:
    """Return the types of the host's known keys, to be requested first."""
    lines = _drop_marked(_find_lines(target, target.key_name)) or _drop_marked(
        _find_lines(target, *_portless_names(target))
    )
    return tuple(dict.fromkeys(known.kind for known in lines))


def check(target: Target, key: paramiko.PKey, policy: Policy) -> None:
    """Raise LaunchError("host key") unless the host's key is known, or new and accepted."""
    with _append_lock:  # another thread may be adding a key of the same name
        if _is_known(target, key):
            return
        if policy == "accept-new":
            _append(target, key)
            return
    covered = any(known.marker == "@cert-authority" for known in _find_lines(target, target.key_name))
    note = " (there is a @cert-authority line for it, but host certificates are not read)" if covered else ""
    fix = f"compare the fingerprint with the host's own, then: {_add_command(target, key)}"
    raise _refusal(key, f"is not in known_hosts{note}", fix)


_append_lock = threading.Lock()


def _is_known(target: Target, key: paramiko.PKey) -> bool:
    """Return whether a key is known. Raises LaunchError when it is revoked, or differs from the known one."""
    exact, loose, key_text = (
        _find_lines(target, target.key_name),
        _find_lines(target, *_portless_names(target)),
        key.get_base64(),
    )
    for known in (*exact, *loose):
        if known.marker == "@revoked" and known.key == key_text:
            fix = "do not trust this host until its administrator explains why"
            raise _refusal(key, f"is revoked by {known.where}", fix)
    unmarked = _drop_marked(exact)
    if unmarked and all(known.kind not in KEY_TYPES for known in unmarked):
        what = f"is not in known_hosts; the one in {unmarked[0].where} is of the type {unmarked[0].kind}, which orch cannot read"
        fix = f"compare the fingerprint with the host's own, then: {_add_command(target, key)}"
        raise _refusal(key, what, fix)
    if unmarked and all(known.key != key_text for known in unmarked):
        same_type = [known for known in unmarked if known.kind == key.get_name()]
        what = "is not" if same_type else "is of another type than"
        removals = [
            f"ssh-keygen -f {_quote_path(file)} -R {shlex.quote(target.key_name)}"
            for file in dict.fromkeys(known.file for known in unmarked)
        ]
        raise _refusal(
            key,
            f"{what} the one in {(same_type or unmarked)[0].where}: "
            "the host was reinstalled, or another machine answers in its place",
            f"only if it was reinstalled: {' && '.join((*removals, _add_command(target, key)))}",
        )
    return any(known.key == key_text for known in (*unmarked, *_drop_marked(loose)))


def _drop_marked(lines: list[KnownKey]) -> list[KnownKey]:
    return [known for known in lines if not known.marker]


def _refusal(key: paramiko.PKey, what: str, fix: str) -> LaunchError:
    reason = f"its {key.algorithm_name} key {key.fingerprint} {what}"
    return LaunchError("host key", reason, fix, Retryable.PERMANENT)


def _add_command(target: Target, key: paramiko.PKey) -> str:
    """Return how the key is added: ssh-keyscan, or ssh itself where ssh-keyscan cannot reach the host; and what gives it a
    place first where the user's ssh_config leaves it none."""
    file = next(iter(target.user_known_hosts), home() / ".ssh" / "known_hosts")
    if file == Path(os.devnull):
        return (
            f"name a file: `UserKnownHostsFile ~/.ssh/known_hosts` for {target.host} in ~/.ssh/config, and connect once"
        )
    if target.jump is not None or target.proxy_command or target.key_alias:
        return f"ssh -o StrictHostKeyChecking=ask {target.port_option}-l {shlex.quote(target.user)} {target.host} true"
    hashed = "-H " if target.hash_known_hosts else ""
    kind = key.algorithm_name.lower()
    return f"ssh-keyscan {hashed}{target.port_option}-t {kind} {target.hostname} >> {_quote_path(file)}"


def _append(target: Target, key: paramiko.PKey) -> None:
    file = next(iter(target.user_known_hosts), Path(os.devnull))
    if file == Path(os.devnull):
        what = "is new, and with this UserKnownHostsFile there is no file to store it in"
        raise _refusal(key, what, _add_command(target, key))
    name = paramiko.HostKeys.hash_host(target.key_name) if target.hash_known_hosts else target.key_name
    line = f"{name} {key.get_name()} {key.get_base64()}\n".encode()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b", 0) as out:
            size_bytes = os.fstat(out.fileno()).st_size
            torn = size_bytes and os.pread(out.fileno(), 1, size_bytes - 1) != b"\n"
            out.write(b"\n" * bool(torn) + line)  # in one call: others append too
    except OSError as err:
        what = f"is new and cannot be stored: {err.strerror}: {file}"
        raise _refusal(key, what, f"make {_short_path(file)} writable") from err


def _find_lines(target: Target, *names: str) -> list[KnownKey]:
    files = (*target.user_known_hosts, *target.global_known_hosts)
    return [known for file in files for known in _read_lines(file, names)]


def _portless_names(target: Target) -> tuple[str, ...]:
    """Return the bare name, under which a known key is good on any port, as for OpenSSH; a different key there is not an
    error."""
    return () if target.key_alias or target.port == DEFAULT_PORT else (target.hostname,)


def _read_lines(path: Path, names: tuple[str, ...]) -> Iterator[KnownKey]:
    """Yield the lines of a file about one of `names`."""
    try:
        with path.open("rb") as stream:
            text = stream.read(FILE_BYTES_MAX).decode(errors="replace")
    except OSError:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3 and any(_names_host(words[0], name) for name in names):
            yield KnownKey(path, number, marker, words[1], words[2])


def _names_host(patterns: str, name: str) -> bool:
    """Return whether the first field of a line names a host: in clear, by patterns, or hashed."""
    if patterns.startswith("|1|"):
        try:
            return paramiko.HostKeys.hash_host(name, patterns) == patterns
        except (ValueError, AssertionError, IndexError):
            return False  # a torn line
    hits = [pattern for pattern in patterns.lower().split(",") if _matches(pattern.removeprefix("!"), name)]
    return bool(hits) and not any(pattern.startswith("!") for pattern in hits)


def _matches(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern of OpenSSH's, in which only `*` and `?` are special."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _short_path(path: Path) -> str:
    text, own = str(path), f"{home()}/"
    return "~/" + text[len(own) :] if text.startswith(own) else text


def _quote_path(path: Path) -> str:
    short = _short_path(path)
    return short if short.startswith("~/") and short[2:] == shlex.quote(short[2:]) else shlex.quote(str(path))
