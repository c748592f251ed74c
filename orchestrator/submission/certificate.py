"""Certificate of one job, by which its processes know one another; made at submit."""

from __future__ import annotations

import datetime
import ipaddress

CERTIFICATE_YEARS = 20


def new() -> tuple[bytes, bytes]:
    """Return a new self-signed certificate and its key, PEM. It is valid long before now, since clocks differ."""
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
