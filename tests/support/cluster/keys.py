"""How does one get an SSH key at once? Made in this process, since a hundred runs of ssh-keygen take seconds."""

from __future__ import annotations

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def new_key(passphrase: str = "") -> tuple[str, str]:
    """Return a new ed25519 key, private and public, each as OpenSSH writes it into a file."""
    key = Ed25519PrivateKey.generate()
    guard: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        guard = serialization.BestAvailableEncryption(passphrase.encode())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, guard)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private.decode(), public.decode()
