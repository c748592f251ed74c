"""Which keys may be offered to a host, and who signs with them? ssh-agent, identity files, certificates.

In OpenSSH's order: certificates, then the agent's keys that identity files name, the agent's others (unless
`IdentitiesOnly`), and files that the agent does not have. An encrypted file is opened by the agent, or by a passphrase
that `ask` gives, once for all hosts; its public half is known without, so that nobody is asked for a key in vain.
"""

from __future__ import annotations

import base64
import binascii
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, utils

from orchestrator.backends.ssh.config import Target

Ask = Callable[[str], str | None]
"""Asks a person for a secret; None when nobody can say it."""

AGENT_S_MAX = 20.0  # a key may want to be touched
AGENT_BYTES_MAX = 256 << 10
KEY_BYTES_MAX = 1 << 20
ASKS_MAX = 3
CERTIFICATE = "-cert-v01@openssh.com"

_SHA2_512, _SHA2_256 = 4, 2
_AGENT_FLAGS = {"rsa-sha2-512": _SHA2_512, "rsa-sha2-256": _SHA2_256}
_CERTIFICATE_FIELDS = {
    "ssh-rsa": 2,
    "ssh-ed25519": 1,
}  # how many fields make the public key; of all others: 2

PrivateKey = rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey


class KeyUnusable(Exception):
    """A key that was accepted cannot sign: it is locked, or its agent is gone."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Identity:
    """A key to offer. `sign` takes the data and the algorithm; it is `ready` when that needs neither agent nor person."""

    name: str
    kind: str
    blob: bytes
    ready: bool
    sign: Callable[[bytes, str], bytes]


class Keyring:
    """The keys of this process, for all hosts: files are read and passphrases asked for once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._files: dict[tuple[Path, int, int], _KeyFile | None] = {}
        self._opened: dict[Path, PrivateKey | None] = {}

    def identities(self, target: Target, ask: Ask | None) -> tuple[list[Identity], list[str]]:
        """Return the keys to offer, in order, and what is to be said if none is taken."""
        agent_keys, notes = _agent_keys(target.agent_socket)
        files = [file for path in target.identity_files if (file := self._read(path)) is not None]
        names = {file.blob: str(file.path) for file in files if file.blob}
        plain: list[Identity] = []
        for file in files:
            held = next((key for key in agent_keys if key.blob == file.blob), None)
            if held is not None:
                plain.append(_agent_identity(target.agent_socket, held, names[held.blob]))
        if not target.identities_only:
            plain += [
                _agent_identity(target.agent_socket, key, key.comment or "a key of ssh-agent")
                for key in agent_keys
                if key.blob not in names
            ]
        held_blobs = {key.blob for key in agent_keys}
        plain += [
            self._file_identity(file, ask, has_agent=bool(target.agent_socket))
            for file in files
            if file.blob and file.blob not in held_blobs
        ]
        notes += [f"{file.path} is encrypted and has no .pub file" for file in files if not file.blob]
        return [*_certified(target, plain), *plain], notes

    def was_opened(self, name: str) -> bool:
        """Say whether a passphrase was given for this key: no other program can use it then."""
        return self._opened.get(Path(name)) is not None

    def _read(self, path: Path) -> _KeyFile | None:
        try:
            stat = path.stat()
        except OSError:
            return _public_only(path)
        key = (path, stat.st_mtime_ns, stat.st_size)
        with self._lock:
            if key not in self._files:
                self._files[key] = _read_key(path)
            return self._files[key]

    def _file_identity(self, file: _KeyFile, ask: Ask | None, has_agent: bool) -> Identity:
        def sign(data: bytes, algorithm: str) -> bytes:
            key = file.private or self._open(file, ask)
            if key is None:
                start = "" if has_agent else 'eval "$(ssh-agent)" && '
                why = f"the key {file.path} is encrypted and not in ssh-agent"
                if not file.encrypted:
                    why = f"of the key {file.path} only the public half can be read"
                raise KeyUnusable(why, f"{start}ssh-add {file.path}")
            return signature(key, data, algorithm)

        return Identity(str(file.path), kind_of(file.blob), file.blob, file.private is not None, sign)

    def _open(self, file: _KeyFile, ask: Ask | None) -> PrivateKey | None:
        if ask is None or not file.encrypted:
            return self._opened.get(file.path)
        with self._asking:
            for _ in range(ASKS_MAX):
                if file.path in self._opened:
                    break
                passphrase = ask(f"Passphrase for {file.path}: ")
                if not passphrase:
                    self._opened[file.path] = None  # not to be asked again for the next host
                    break
                key = _load(file.data, passphrase.encode())
                if key is not None:
                    self._opened[file.path] = key
            return self._opened.get(file.path)


def signature(key: PrivateKey, data: bytes, algorithm: str) -> bytes:
    """Return the signature in the wire format: the algorithm's name and the signature proper."""
    match key:
        case ed25519.Ed25519PrivateKey():
            raw = key.sign(data)
        case rsa.RSAPrivateKey():
            digest = hashes.SHA512() if algorithm == "rsa-sha2-512" else hashes.SHA256()
            raw = key.sign(data, padding.PKCS1v15(), digest)
        case _:
            curve_bits = key.curve.key_size
            hash_ = (
                hashes.SHA256()
                if curve_bits <= 256
                else hashes.SHA384()
                if curve_bits <= 384
                else hashes.SHA512()
            )
            raw = b"".join(
                _mpint(part) for part in utils.decode_dss_signature(key.sign(data, ec.ECDSA(hash_)))
            )
    return string(algorithm.encode()) + string(raw)


def string(data: bytes) -> bytes:
    """Return `data` as SSH's wire format has it: its length, then itself."""
    return struct.pack(">I", len(data)) + data


def kind_of(blob: bytes) -> str:
    """Return the type that a public key names in its first field."""
    return next(_fields(blob), b"").decode(errors="replace")


def _fields(blob: bytes) -> Iterator[bytes]:
    while len(blob) >= 4:
        (size_bytes,) = struct.unpack_from(">I", blob)
        if len(blob) < 4 + size_bytes:
            return
        yield blob[4 : 4 + size_bytes]
        blob = blob[4 + size_bytes :]


def _mpint(number: int) -> bytes:
    return string(number.to_bytes(number.bit_length() // 8 + 1, "big"))


@dataclass(frozen=True, slots=True)
class _AgentKey:
    blob: bytes
    comment: str


def _agent_keys(path: str) -> tuple[list[_AgentKey], list[str]]:
    if not path:
        return [], []
    try:
        kind, body = _ask_agent(path, b"\x0b")
    except (OSError, EOFError) as err:
        return [], [f"ssh-agent at {path} does not answer ({err})"]
    parts = list(_fields(body[4:])) if kind == 12 else []
    keys = [
        _AgentKey(blob, name.decode(errors="replace"))
        for blob, name in zip(parts[::2], parts[1::2], strict=False)
    ]
    return keys, []


def _agent_identity(path: str, key: _AgentKey, name: str) -> Identity:
    def sign(data: bytes, algorithm: str) -> bytes:
        flags = _AGENT_FLAGS.get(algorithm.removesuffix(CERTIFICATE), 0)
        try:
            kind, body = _ask_agent(
                path, b"\x0d" + string(key.blob) + string(data) + struct.pack(">I", flags)
            )
        except (OSError, EOFError) as err:
            raise KeyUnusable(f"ssh-agent at {path} does not answer ({err})", "ssh-add -l") from err
        made = next(_fields(body), b"") if kind == 14 else b""
        if not made:
            raise KeyUnusable(f"ssh-agent refused to sign with {name}", "ssh-add -l")
        return made

    return Identity(name, kind_of(key.blob), key.blob, False, sign)


def _ask_agent(path: str, request: bytes) -> tuple[int, bytes]:
    """Ask over a connection of its own: threads need no turns then, and a restarted agent is no matter."""
    with socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(AGENT_S_MAX)
        agent.connect(path)
        agent.sendall(string(request))
        (size_bytes,) = struct.unpack(">I", _exactly(agent, 4))
        if not 0 < size_bytes <= AGENT_BYTES_MAX:
            raise EOFError(f"an answer of {size_bytes} bytes")
        answer = _exactly(agent, size_bytes)
        return answer[0], answer[1:]


def _exactly(agent: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        more = agent.recv(size_bytes - len(data))
        if not more:
            raise EOFError("it closed the connection")
        data += more
    return data


@dataclass(frozen=True, slots=True)
class _KeyFile:
    """An identity file: `private` when nothing more is needed to use it, `blob` empty when even that is hidden."""

    path: Path
    data: bytes
    blob: bytes
    encrypted: bool
    private: PrivateKey | None


def _read_key(path: Path) -> _KeyFile | None:
    try:
        with path.open("rb") as stream:
            data = stream.read(KEY_BYTES_MAX)
    except OSError:
        return _public_only(path)
    if b"PRIVATE KEY-----" not in data:
        return _KeyFile(path, b"", blob, False, None) if (blob := _public_blob(data)) else None
    blob, encrypted = _open_half(data)
    if encrypted:
        return _KeyFile(path, data, blob or _public_blob_of(path), True, None)
    private = _load(data, None)
    if private is None:
        return None
    line = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return _KeyFile(path, data, _public_blob(line), False, private)


def _public_only(path: Path) -> _KeyFile | None:
    """A file that is not here, or cannot be read, may still name a key of the agent."""
    blob = _public_blob_of(path)
    return _KeyFile(path, b"", blob, False, None) if blob else None


def _open_half(data: bytes) -> tuple[bytes, bool]:
    """Return the public key that OpenSSH's format shows in clear, and whether the private one is encrypted."""
    if b"BEGIN OPENSSH PRIVATE KEY" not in data:
        return b"", b"ENCRYPTED" in data
    body = b"".join(line for line in data.splitlines() if not line.startswith(b"-----"))
    try:
        raw = base64.b64decode(body)
    except binascii.Error:
        return b"", False
    magic = b"openssh-key-v1\0"
    if not raw.startswith(magic):
        return b"", False
    rest = raw[len(magic) :]
    names = []
    for name in _fields(rest):
        names.append(name)
        if len(names) == 3:
            break
    if len(names) < 3:
        return b"", False
    after = rest[sum(4 + len(name) for name in names) + 4 :]  # and over the number of keys, always 1
    return next(_fields(after), b""), names[0] != b"none"


def _load(data: bytes, passphrase: bytes | None) -> PrivateKey | None:
    for load in (serialization.load_ssh_private_key, serialization.load_pem_private_key):
        try:
            key = load(data, passphrase)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
        if isinstance(key, rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
            return key
    return None


def _public_blob_of(path: Path) -> bytes:
    try:
        with path.with_name(path.name + ".pub").open("rb") as stream:
            return _public_blob(stream.read(KEY_BYTES_MAX))
    except OSError:
        return b""


def _public_blob(line: bytes) -> bytes:
    words = line.split()
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (IndexError, binascii.Error):
        return b""
    return blob if kind_of(blob).encode() == words[0] else b""


def _certified(target: Target, plain: list[Identity]) -> list[Identity]:
    """Return the certificates that belong to one of the keys, each signing with that key."""
    paths = [path.with_name(path.name + "-cert.pub") for path in target.identity_files]
    made = []
    for path in dict.fromkeys((*target.certificate_files, *paths)):
        try:
            with path.open("rb") as stream:
                blob = _public_blob(stream.read(KEY_BYTES_MAX))
        except OSError:
            continue
        bare = _bare(blob)
        key = next((identity for identity in plain if identity.blob == bare), None)
        if key is not None:
            made.append(Identity(str(path), kind_of(blob), blob, key.ready, key.sign))
    return made


def _bare(certificate: bytes) -> bytes:
    """Return the public key that a certificate is about."""
    kind, *rest = _fields(certificate)
    if not kind.endswith(CERTIFICATE.encode()):
        return b""
    base = kind.removesuffix(CERTIFICATE.encode()).decode()
    count = _CERTIFICATE_FIELDS.get(base, 2)
    return b"".join(map(string, (base.encode(), *rest[1 : 1 + count])))  # rest[0] is a random number
