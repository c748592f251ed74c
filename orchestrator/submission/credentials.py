"""Private files of a job: secrets, environment, token, certificate and key, the webhook's address; made at submit."""

from __future__ import annotations

import json
import secrets as random_secrets
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core.jobdir import rank_env
from orchestrator.core.jobdir.durable import replace_bytes, sync_folder
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.wire.tokens import TOKEN_BYTES
from orchestrator.submission import certificate

PRIVATE = 0o600


def fill(folder: Path, made: Plan, environ: Mapping[str, str], webhook: str | None) -> None:
    """Make the folder of a job's private files, all of them private from their first byte, and on disk at the end.
    `webhook`: its address."""
    folder.mkdir(mode=0o700)
    kept = {name: environ[name] for name in made.secrets}
    public, key = certificate.new()
    files = {
        "secrets.json": json.dumps(kept).encode(),
        "environment.json": json.dumps(rank_env.outer_env(environ, made.secrets)).encode(
            "utf-8", "surrogateescape"
        ),
        "token": random_secrets.token_hex(TOKEN_BYTES).encode(),
        "certificate.pem": public,
        "key.pem": key,
        **({"webhook": webhook.encode()} if webhook else {}),
    }
    for name, data in files.items():
        replace_bytes(folder / name, data, mode=PRIVATE)
    sync_folder(folder.parent)
