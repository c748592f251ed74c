"""By what do a job's processes know one another? A certificate of its own, made at submit.

What makes one takes longer to load than to use, 0.1 s in all. `ahead` has a second process do that while the first one
still reads the job file.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import select
import signal
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NoReturn

CERTIFICATE_YEARS = 20

AHEAD_S_MAX = 5.0
"""How long the certificate of the other process is waited for; then one is made here."""

_BETWEEN = b"\0"
_ahead: ContextVar[int | None] = ContextVar("ahead", default=None)


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Let another process make what the first `new` within returns. Not for processes with threads: it forks."""
    try:
        ours, theirs = os.pipe()
    except OSError:
        yield  # no room for a pipe: `new` makes it, or says why not
        return
    try:
        pid = os.fork()
    except OSError:
        pid = None
    if pid == 0:
        _tell(theirs)
    os.close(theirs)
    mark = _ahead.set(ours if pid else None)
    try:
        yield
    finally:
        _ahead.reset(mark)
        os.close(ours)
        if pid:
            # It is ours until waited for; but where SIGCHLD is ignored, as some shells do, nobody can wait for it.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _tell(out: int) -> NoReturn:
    """Be the other process: write a certificate and its key, and end, without a word whatever happens."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(out, _BETWEEN.join((*_made(), b"")))
    finally:
        os._exit(0)


def new() -> tuple[bytes, bytes]:
    """Return a new self-signed certificate and its key, PEM. It is valid long before now, since clocks differ."""
    ours = _ahead.get()
    _ahead.set(None)
    told = b"" if ours is None else _heard(ours)
    match told.split(_BETWEEN):
        case [public, key, b""]:
            return public, key
        case _:
            return _made()


def _heard(ours: int) -> bytes:
    """Return all that the other process writes until it ends, or `AHEAD_S_MAX` has passed."""
    told, until_s = b"", time.monotonic() + AHEAD_S_MAX
    while (left_s := until_s - time.monotonic()) > 0 and select.select([ours], [], [], left_s)[0]:
        part = os.read(ours, 1 << 16)
        if not part:
            break
        told += part
    return told


def _made() -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "orch")])
    now = datetime.datetime.now(datetime.timezone.utc)
    span = datetime.timedelta(days=365 * CERTIFICATE_YEARS)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - span)
        .not_valid_after(now + span)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName("orch"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            ),
            False,
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), private
