"""Mask of a job's secrets, read from its folder."""

from __future__ import annotations

from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.mask import Mask, of_secrets


def of_job(job: JobDir) -> Mask:
    """Return the mask of a job's secrets; of another user's job, which cannot be read, an empty one. Raises ValueError
    when they are damaged."""
    try:
        kept = codec.loads_plain(ownership.read_regular(job.secrets / "secrets.json"))
        webhook = ownership.read_regular(job.webhook).decode() if job.webhook.exists() else ""
    except (FileNotFoundError, PermissionError):
        return Mask(())
    except OSError as err:
        raise ValueError(f"they cannot be read: {err.strerror}") from err
    return of_secrets(map(str, kept.values()), webhook)
