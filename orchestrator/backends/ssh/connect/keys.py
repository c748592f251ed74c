"""Keys that may be offered to a host: those that ssh-agent holds, and identity files.

In OpenSSH's order: certificates, then the agent's keys that identity files name, the agent's others (unless
`IdentitiesOnly`), and files that the agent does not have. A supervisor has no terminal and never asks for a passphrase:
an encrypted file can be used only through the agent.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.pkey import PublicBlob, UnknownKeyType

from orchestrator.backends.ssh.connect.ssh_config import Target

AGENT_S_MAX = 20.0
"""How long an agent may take to answer: a hardware key may wait for a touch."""

AGENT_BYTES_MAX = 256 << 10
AGENT_KEYS_MAX = 256

# Requests, answers and flags of RSA signatures in the agent's protocol (draft-ietf-sshm-ssh-agent).
_LIST, _KEYS = b"\x0b", b"\x0c"
_SIGN, _SIGNED = b"\x0d", b"\x0e"
_RSA_FLAGS = {"rsa-sha2-256": 2, "rsa-sha2-512": 4}
_CERTIFICATE = "-cert-v01@openssh.com"


class AgentKey(paramiko.PKey):
    """A key that an ssh-agent holds.

    Replaces paramiko's `Agent`, which ignores `IdentityAgent` and waits without a limit for an agent that hangs.
    """

    def __init__(self, agent: str, blob: bytes, comment: str) -> None:
        """`agent` is the path of its socket."""
        super().__init__()
        self.public_blob = None
        self.comment = comment or "a key of ssh-agent"
        self.refusal = ""  # why the agent did not sign
        self._agent = agent
        self._blob = blob
        self._kind = paramiko.Message(blob).get_text()

    def get_name(self) -> str:
        """Return the key's type."""
        return self._kind

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


@dataclass(frozen=True, slots=True)
class Identity:
    """A key to offer, with its name for people."""

    name: str
    key: paramiko.PKey


@dataclass(frozen=True, slots=True)
class OfferedKeys:
    """The keys for a host."""

    offers: list[Identity]  # in order
    locked: list[Path]  # encrypted files that ssh-agent does not have
    notes: list[str]  # what may explain why the host accepts no key


def find(target: Target) -> OfferedKeys:
    """Return the keys for a host."""
    held, notes = _agent_keys(target.agent_socket)
    named: list[Identity] = []
    files: list[Identity] = []
    locked: list[Path] = []
    for path in target.identity_files:
        blob = _public_blob(path)
        try:
            key = held.get(blob) or _load(path)
        except (TypeError, paramiko.PasswordRequiredException):  # cryptography raises TypeError
            locked.append(path)
            if not blob:
                notes.append(f"without {path}.pub it is not known whether ssh-agent has {path}")
            continue
        except (ValueError, OSError, UnsupportedAlgorithm, paramiko.SSHException, UnknownKeyType):
            notes.append(f"{path} cannot be read here, perhaps by ssh-agent: ssh-add {path}")
            continue
        if key is not None:
            in_agent = held.get(key.asbytes())
            (named if in_agent else files).append(Identity(str(path), in_agent or key))
    taken = {identity.key.asbytes() for identity in named}
    others = [Identity(key.comment, key) for blob, key in held.items() if blob not in taken]
    plain = [*named, *([] if target.identities_only else others), *files]
    return OfferedKeys([*_certified(target, plain), *plain], locked, notes)


def ssh_add(target: Target, path: Path) -> str:
    """Return the command that gives a key to ssh-agent, or to a new one where there is none."""
    return f"ssh-add {path}" if target.agent_socket else f'eval "$(ssh-agent)" && ssh-add {path}'


_loading = threading.Lock()


def _load(path: Path) -> paramiko.PKey | None:
    """Read a private key file; None where there is none. Raises what paramiko raises."""
    if not path.is_file() or path.suffix == ".pub":
        return None
    with _loading:  # a large RSA key takes half a second, and many hosts need it at once
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


def _certified(target: Target, plain: list[Identity]) -> list[Identity]:
    """Return the certificates that belong to one of the keys, each signing with that key."""
    paths = [path.with_name(path.name + "-cert.pub") for path in target.identity_files]
    identities = []
    for path in dict.fromkeys((*target.certificate_files, *paths)):
        bare = _certified_key(path)
        identity = next((candidate for candidate in plain if candidate.key.asbytes() == bare), None)
        if identity is not None:
            key = copy.copy(identity.key)
            key.load_certificate(str(path))
            identities.append(Identity(str(path), key))
    return identities


def _certified_key(path: Path) -> bytes:
    """Return the public key that a certificate certifies; nothing where none can be read."""
    try:
        blob = PublicBlob.from_file(str(path))
    except (OSError, ValueError):
        return b""
    for kind in (paramiko.Ed25519Key, paramiko.RSAKey, paramiko.ECDSAKey):
        with contextlib.suppress(paramiko.SSHException, ValueError):
            return kind(data=blob.key_blob).asbytes()
    return b""


def _agent_keys(path: str) -> tuple[dict[bytes, AgentKey], list[str]]:
    """Return the keys that an agent holds, by their public halves, and notes on failures."""
    if not path:
        return {}, []
    try:
        answer = _ask_agent(path, _LIST)
        count = answer.get_int() if answer.get_byte() == _KEYS else 0
        pairs = [(answer.get_binary(), answer.get_text()) for _ in range(min(count, AGENT_KEYS_MAX))]
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
