"""Private files of a job: secrets, environment, token, certificate and key, the webhook's address. Made at submit."""

from __future__ import annotations

import datetime
import ipaddress
import json
import secrets as random_secrets
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core.jobdir.durable import replace_bytes, sync_folder
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.settings import rank_env
from orchestrator.core.wire.tokens import TOKEN_BYTES

PRIVATE_MODE = 0o600


def write_credentials(folder: Path, plan: Plan, environ: Mapping[str, str], webhook: str | None) -> None:
    """Make the folder of a job's private files: private from their first byte, and on disk at the end. `webhook`: its URL."""
    folder.mkdir(mode=0o700)
    kept = {name: environ[name] for name in plan.secrets}
    public, key = new_certificate()
    files = {
        "secrets.json": json.dumps(kept).encode(),
        "environment.json": json.dumps(rank_env.submitter_env(environ, plan.secrets)).encode(
            "utf-8", "surrogateescape"
        ),
        "token": random_secrets.token_hex(TOKEN_BYTES).encode(),
        "certificate.pem": public,
        "key.pem": key,
        **({"webhook": webhook.encode()} if webhook else {}),
    }
    for name, data in files.items():
        replace_bytes(folder / name, data, mode=PRIVATE_MODE)
    write_peer_credentials(folder, plan)
    sync_folder(folder.parent)


def write_peer_credentials(folder: Path, plan: Plan) -> None:
    """Write the certificate and key of a job's agents among themselves, if it needs them and has none."""
    names = ("peer_certificate.pem", "peer_key.pem")
    if plan.memory_bytes and not all((folder / name).exists() for name in names):
        for name, data in zip(names, new_certificate(), strict=True):
            replace_bytes(folder / name, data, mode=PRIVATE_MODE)


CERTIFICATE_YEARS = 20


def new_certificate() -> tuple[bytes, bytes]:
    """Return a new self-signed certificate and its key, as PEM. Its validity begins in the past, since clocks differ."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "orch")])
    now = datetime.datetime.now(datetime.timezone.utc)
    span = datetime.timedelta(days=365 * CERTIFICATE_YEARS)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - span)
        .not_valid_after(now + span)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("orch"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            False,
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
