"""Host key check: a host's key is compared with known_hosts, as OpenSSH does it.

A key that is known under the host's name is good. A key that contradicts a known key is refused under both policies. An
unknown key is refused (`strict`), or added (`accept-new`). A host that is known by keys of other types only counts as
contradicting: its known types were requested first, so it no longer has any of them. Host certificates are not read,
since paramiko verifies none: a `@cert-authority` line makes no key known.

This module reads the files itself, since paramiko's `HostKeys` skips `@revoked` and patterns, and has no line numbers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.ssh_config import DEFAULT_PORT, Target, fits, home
from orchestrator.core.observations import Retryable

Policy = Literal["strict", "accept-new"]

SALT_BYTES = 20
FILE_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class HostKey:
    """A host's public key in the wire format, whose first field is its type."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """The fingerprint that people compare: `SHA256:…`, as ssh-keygen prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")

    @property
    def name(self) -> str:
        """The type in OpenSSH's short form: `ED25519`, `RSA`, `ECDSA`."""
        return self.kind.removeprefix("sk-").removeprefix("ssh-").partition("-")[0].partition("@")[0].upper()

    def __str__(self) -> str:
        return f"{self.name} key {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Known:
    """One line of a known_hosts file."""

    file: Path
    line: int
    marker: str
    key: HostKey

    @property
    def where(self) -> str:
        """File and line."""
        return f"{_short(self.file)}:{self.line}"


def known_kinds(target: Target) -> tuple[str, ...]:
    """Return the types of the host's known keys, to be requested first."""
    lines = _plain(_find(target, target.key_name)) or _plain(_find(target, *_portless(target)))
    return tuple(dict.fromkeys(known.key.kind for known in lines))


def check(target: Target, key: HostKey, policy: Policy) -> None:
    """Raise LaunchError("host key") unless the host's key is known, or new and accepted."""
    if _is_known(target, key):
        return
    if policy == "accept-new":
        with _append_lock:  # another thread may have added a key of the same name
            if not _is_known(target, key):
                _append(target, key)
        return
    covered = any(known.marker == "@cert-authority" for known in _find(target, target.key_name))
    note = " (there is a @cert-authority line for it, but host certificates are not read)" if covered else ""
    raise LaunchError(
        "host key",
        f"its {key} is not in known_hosts{note}",
        f"compare the fingerprint with the host's own, then: {_add_command(target, key)}",
        Retryable.PERMANENT,
    )


_append_lock = threading.Lock()


def _is_known(target: Target, key: HostKey) -> bool:
    """Tell whether a key is known. Raises LaunchError when it is revoked, or differs from the known one."""
    exact, loose = _find(target, target.key_name), _find(target, *_portless(target))
    for known in (*exact, *loose):
        if known.marker == "@revoked" and known.key == key:
            raise LaunchError(
                "host key",
                f"its {key} is revoked by {known.where}",
                "do not trust this host before its administrator has said why",
                Retryable.PERMANENT,
            )
    plain = _plain(exact)
    if plain and all(known.key != key for known in plain):
        _refuse_changed(target, key, plain)
    return any(known.key == key for known in (*plain, *_plain(loose)))


def _plain(lines: list[Known]) -> list[Known]:
    return [known for known in lines if not known.marker]


def _refuse_changed(target: Target, key: HostKey, plain: list[Known]) -> NoReturn:
    same = [known for known in plain if known.key.kind == key.kind]
    old = (same or plain)[0]
    what = "is not" if same else "is of another type than"
    removals = " && ".join(
        f"ssh-keygen -f {_quoted(file)} -R {shlex.quote(target.key_name)}"
        for file in dict.fromkeys(known.file for known in plain)
    )
    raise LaunchError(
        "host key",
        f"its {key} {what} the one in {old.where}, {old.key}: "
        "the host was reinstalled, or something stands between it and you",
        f"only if it was reinstalled: {removals} && {_add_command(target, key)}",
        Retryable.PERMANENT,
    )


def _add_command(target: Target, key: HostKey) -> str:
    """Return how the key is added: ssh-keyscan, or ssh itself where ssh-keyscan cannot reach the host; and what gives it a
    place first where the user's ssh_config leaves it none."""
    if target.user_known_hosts[:1] == (Path(os.devnull),):
        return f"name a file: `UserKnownHostsFile ~/.ssh/known_hosts` for {target.host} in ~/.ssh/config, and connect once"
    if target.jump is not None or target.proxy_command or target.key_alias:
        return f"ssh -o StrictHostKeyChecking=ask {target.port_option}-l {shlex.quote(target.user)} {target.host} true"
    file = _first_file(target) or home() / ".ssh" / "known_hosts"
    hashed = "-H " if target.hash_known_hosts else ""
    return (
        f"ssh-keyscan {hashed}{target.port_option}-t {key.name.lower()} {target.hostname} >> {_quoted(file)}"
    )


def _first_file(target: Target) -> Path | None:
    """Return the file for new keys; None where it is missing or /dev/null."""
    for file in target.user_known_hosts[:1]:
        if file != Path(os.devnull):
            return file
    return None


def _append(target: Target, key: HostKey) -> None:
    file = _first_file(target)
    if file is None:
        raise LaunchError(
            "host key",
            f"its {key} is new, and with this UserKnownHostsFile there is no place to keep it",
            f"name a file: `UserKnownHostsFile ~/.ssh/known_hosts` for {target.host} in ~/.ssh/config",
            Retryable.PERMANENT,
        )
    name = _hashed(target.key_name) if target.hash_known_hosts else target.key_name
    line = f"{name} {key.kind} {base64.b64encode(key.blob).decode()}\n".encode()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes and os.pread(fd, 1, size_bytes - 1) != b"\n":
                line = b"\n" + line
            os.write(fd, line)  # in one call: others append too
        finally:
            os.close(fd)
    except OSError as err:
        reason = f"its {key} is new and cannot be kept: {err.strerror}: {file}"
        raise LaunchError("host key", reason, f"make {_short(file)} writable", Retryable.PERMANENT) from err


def _hashed(name: str) -> str:
    salt = os.urandom(SALT_BYTES)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _find(target: Target, *names: str) -> list[Known]:
    """Return the lines about a host, file by file."""
    files = (*target.user_known_hosts, *target.global_known_hosts)
    return [known for file in files for known in _read(file, names)]


def _portless(target: Target) -> tuple[str, ...]:
    """Return the bare name, under which a known key is good on any port, as for OpenSSH; a different key there is not an
    error."""
    return () if target.key_alias or target.port == DEFAULT_PORT else (target.hostname,)


def _read(path: Path, names: tuple[str, ...]) -> Iterator[Known]:
    """Yield the lines of a file about one of `names`; skips lines that cannot be read, as OpenSSH does."""
    try:
        with path.open("rb") as stream:
            text = stream.read(FILE_BYTES_MAX).decode(errors="replace")
    except OSError:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#"):
            continue
        try:
            if any(_is_about(words[0], name) for name in names):
                key = HostKey(words[1], base64.b64decode(words[2], validate=True))
                yield Known(path, number, marker, key)
        except ValueError:
            continue


def _is_about(patterns: str, name: str) -> bool:
    """Tell whether the first field of a line names a host: in clear, by patterns, or hashed."""
    if patterns.startswith("|1|"):
        salt, _, digest = patterns[3:].partition("|")
        return hmac.digest(base64.b64decode(salt), name.encode(), "sha1") == base64.b64decode(digest)
    hits = [pattern for pattern in patterns.lower().split(",") if fits(pattern.removeprefix("!"), name)]
    return bool(hits) and not any(pattern.startswith("!") for pattern in hits)


def _short(path: Path) -> str:
    text = str(path)
    own = str(home())
    return "~" + text[len(own) :] if text.startswith(own + "/") else text


def _quoted(path: Path) -> str:
    short = _short(path)
    return short if short.startswith("~/") and short[2:] == shlex.quote(short[2:]) else shlex.quote(str(path))
