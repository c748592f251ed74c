"""Login to a host by public keys, offered one by one as OpenSSH does, until the host accepts one.

- Keys only: a supervisor has no terminal to ask for a password, a passphrase or a second factor. An encrypted file can be
  used only through ssh-agent.
- The order is OpenSSH's: the agent's keys that identity files name, the agent's others (unless `IdentitiesOnly`), and files
  that the agent does not have; before them their certificates.

`paramiko.SSHClient` is not used: it offers all keys of the agent whatever `IdentitiesOnly` says, and a host hangs up after
the first few.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shlex
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.pkey import PublicBlob, UnknownKeyType

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.ssh_config import Target
from orchestrator.core.observations import Retryable

AUTH_S_MAX = 30.0
"""How long one answer of the host may take."""

AGENT_S_MAX = 20.0
"""How long an agent may take to answer: a hardware key may wait for a touch."""

AGENT_BYTES_MAX = 256 << 10
OFFERS_MAX = 64

# Requests, answers and flags of RSA signatures in the agent's protocol (draft-ietf-sshm-ssh-agent).
_LIST, _KEYS = b"\x0b", b"\x0c"
_SIGN, _SIGNED = b"\x0d", b"\x0e"
_RSA_FLAGS = {"rsa-sha2-256": 2, "rsa-sha2-512": 4}
_CERTIFICATE = "-cert-v01@openssh.com"


@dataclass(frozen=True, slots=True)
class Identity:
    """A key to offer, with its name for people."""

    name: str
    key: paramiko.PKey


@dataclass(frozen=True, slots=True)
class OfferedKeys:
    """The keys for a host."""

    offers: list[Identity]  # in order
    encrypted_files: list[Path]  # encrypted files that ssh-agent does not have
    notes: list[str]  # what may explain why the host accepts no key


def authenticate(transport: paramiko.Transport, target: Target) -> None:
    """Log in. Raises LaunchError("auth")."""
    keys = _find_keys(target)
    transport.auth_timeout = AUTH_S_MAX
    tried: list[str] = []
    # The answer to "none" names the methods that the host allows.
    methods = _offer(transport, target, None, tried)
    for identity in keys.offers[:OFFERS_MAX]:
        if transport.is_authenticated() or "publickey" not in methods:
            break
        tried.append(identity.name)
        methods = _offer(transport, target, identity.key, tried) or methods
    if not transport.is_authenticated():
        raise _refusal(target, tried, methods, keys)


def _find_keys(target: Target) -> OfferedKeys:
    agent_keys, notes = _agent_keys(target.agent_socket)
    named: list[Identity] = []
    files: list[Identity] = []
    locked: list[Path] = []
    for path in target.identity_files:
        try:
            key = agent_keys.get(_public_blob(path)) or _load(path)
        except (TypeError, paramiko.PasswordRequiredException):  # cryptography raises TypeError
            locked.append(path)
        except (ValueError, OSError, UnsupportedAlgorithm, paramiko.SSHException, UnknownKeyType):
            notes.append(f"{path} cannot be read here, perhaps by ssh-agent: ssh-add {path}")
        else:
            if key is not None:
                in_agent = agent_keys.get(key.asbytes())
                (named if in_agent else files).append(Identity(str(path), in_agent or key))
    named_blobs = {identity.key.asbytes() for identity in named}
    others = [Identity(key.comment, key) for blob, key in agent_keys.items() if blob not in named_blobs]
    plain = [*named, *([] if target.identities_only else others), *files]
    return OfferedKeys([*_find_certificates(target, plain), *plain], locked, notes)


class AgentKey(paramiko.PKey):
    """A key that an ssh-agent holds. paramiko's own ignores `IdentityAgent`, and waits without a limit for an agent that
    hangs."""

    def __init__(self, agent: str, blob: bytes, comment: str) -> None:
        """`agent` is the path of its socket."""
        super().__init__()
        self.public_blob = None
        self.comment = comment or "a key of ssh-agent"
        self.refusal = ""  # why the agent did not sign
        self._agent = agent
        self._blob = blob

    def get_name(self) -> str:
        """Return the key's type."""
        return paramiko.Message(self._blob).get_text()

    def asbytes(self) -> bytes:
        """Return the public key."""
        return self._blob

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> paramiko.Message:
        """Let the agent sign. If it does not, return an empty signature: the host refuses it, and the next key follows."""
        request = paramiko.Message()
        request.add_byte(_SIGN)
        request.add_string(self._blob)
        request.add_string(data)
        request.add_int(_RSA_FLAGS.get((algorithm or "").removesuffix(_CERTIFICATE), 0))
        try:
            answer = _ask_agent(self._agent, request.asbytes())
            if answer.get_byte() == _SIGNED:
                return paramiko.Message(answer.get_binary())
            self.refusal = f"ssh-agent refused to sign with {self.comment}"
        except OSError as err:
            self.refusal = f"ssh-agent at {self._agent} does not answer ({err})"
        return paramiko.Message()


def _agent_keys(path: str) -> tuple[dict[bytes, AgentKey], list[str]]:
    if not path:
        return {}, []
    try:
        answer = _ask_agent(path, _LIST)
        count = answer.get_int() if answer.get_byte() == _KEYS else 0
        pairs = [(answer.get_binary(), answer.get_text()) for _ in range(min(count, OFFERS_MAX))]
        return {blob: AgentKey(path, blob, comment) for blob, comment in pairs}, []
    except (OSError, ValueError) as err:
        return {}, [f"ssh-agent at {path} does not answer ({err})"]


def _ask_agent(path: str, request: bytes) -> paramiko.Message:
    """Return an agent's answer, over a connection of its own, so that threads need no lock. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(AGENT_S_MAX)
        line.connect(path)
        line.sendall(len(request).to_bytes(4, "big") + request)
        with line.makefile("rb") as stream:
            size_bytes = int.from_bytes(stream.read(4), "big")
            if not 0 < size_bytes <= AGENT_BYTES_MAX:
                raise ConnectionError(f"an answer of {size_bytes} bytes")
            return paramiko.Message(stream.read(size_bytes))


_load_lock = threading.Lock()


def _load(path: Path) -> paramiko.PKey | None:
    """Read a private key file; None where there is none. Raises what paramiko raises."""
    if not path.is_file() or path.suffix == ".pub":
        return None
    with _load_lock:  # a large RSA key takes half a second, and many hosts need it at once
        return _load_once(path, path.stat().st_mtime_ns)


@functools.lru_cache
def _load_once(path: Path, _mtime_ns: int) -> paramiko.PKey:
    key = paramiko.PKey.from_path(path)
    key.public_blob = None  # a certificate next to it is offered by itself
    return key


def _public_blob(path: Path) -> bytes:
    """Return the public half of an identity file where it can be read without the private one: from the `.pub` file, or
    from itself where it is public; else nothing."""
    for file in (path.with_name(path.name + ".pub"), path):
        with contextlib.suppress(OSError, ValueError):
            return PublicBlob.from_file(str(file)).key_blob
    return b""


def _find_certificates(target: Target, identities: list[Identity]) -> Iterator[Identity]:
    """Yield the certificates next to identity files and of `CertificateFile`, each with the key that it is for."""
    beside = [path.with_name(path.name + "-cert.pub") for path in target.identity_files]
    for path in dict.fromkeys((*target.certificate_files, *beside)):
        with contextlib.suppress(OSError, ValueError):
            blob = PublicBlob.from_file(str(path)).key_blob
            # A certificate holds the fields of its key: all but the type, which comes first with its length.
            fields = ((one, one.key.asbytes()[4 + len(one.key.get_name()) :]) for one in identities)
            identity = next((field for field, of_key in fields if of_key in blob), None)
            if identity is not None:
                key = copy.copy(identity.key)
                key.load_certificate(str(path))
                yield Identity(str(path), key)


def _offer(transport: paramiko.Transport, target: Target, key: paramiko.PKey | None, tried: list[str]) -> list[str]:
    """Offer a key, or none; return the methods that may follow, as far as the host names them. Raises LaunchError when
    the login has ended."""
    who = f"{target.user}@{target.hostname}"
    ssh_command = f"ssh -v {target.port_option}-l {shlex.quote(target.user)} {target.host} true"
    try:
        if key is None:
            return transport.auth_none(target.user)
        further = transport.auth_publickey(target.user, key)
        if not further:
            return []
    except paramiko.BadAuthenticationType as err:
        return err.allowed_types
    except (paramiko.SSHException, EOFError, OSError) as err:
        if "timeout" in str(err):  # the only sign that paramiko gives
            why = f"{who} did not answer within {AUTH_S_MAX:.0f} s of logging in"
            fix = f"see where it hangs (PAM, LDAP, a lost home folder): {ssh_command}"
            raise LaunchError("auth", why, fix) from err
        if transport.is_active():
            return []
        if len(tried) < 2:
            raise LaunchError("auth", f"{who} hung up while logging in: {err}", f"try {ssh_command}") from err
        why = f"{who} got too many keys and hung up after {len(tried)} ({', '.join(tried)})"
        fix = f"name the right one: `IdentityFile …` and `IdentitiesOnly yes` for {target.host} in ~/.ssh/config"
        raise LaunchError("auth", why, fix, Retryable.PERMANENT) from err
    why = f"{who} accepts the key {tried[-1]}, but requires {', '.join(further)} as well"
    raise LaunchError("auth", why, "allow this key alone for this user there", Retryable.PERMANENT)


def _refusal(target: Target, tried: list[str], methods: list[str], keys: OfferedKeys) -> LaunchError:
    who, offers = f"{target.user}@{target.hostname}", ", ".join(methods) or "nothing"
    copy_command = f"ssh-copy-id {target.port_option}{shlex.quote(target.user)}@{target.host}"
    refusals = [offer.key.refusal for offer in keys.offers if isinstance(offer.key, AgentKey) and offer.key.refusal]
    details = "".join(f"; {note}" for note in (*keys.notes, *refusals))
    if keys.encrypted_files:
        details = f"; the key {keys.encrypted_files[0]} is encrypted and not in ssh-agent{details}"
    if "publickey" not in methods:
        why, fix = (
            f"{who} accepts no keys, only {offers}",
            "set `PubkeyAuthentication yes` in its sshd_config",
        )
    elif tried:
        why = f"{who} accepts none of the keys {', '.join(tried)}; its login methods are {offers}"
        fix = f"put a key there: {copy_command}; or name the right one or the right user in ~/.ssh/config"
        if refusals:
            fix = "ssh-agent must sign here: ssh-add the key again, without -h and -c; or name a key in a file (IdentityFile)"
    else:
        files = ", ".join(str(path) for path in target.identity_files)
        why = f"there is no key for {who}: nothing in ssh-agent, nor {files}"
        fix = f"ssh-keygen -t ed25519 && {copy_command}"
    if keys.encrypted_files:
        fix = ("" if target.agent_socket else 'eval "$(ssh-agent)" && ') + f"ssh-add {keys.encrypted_files[0]}"
    return LaunchError("auth", why + details, fix, Retryable.PERMANENT)
