"""Secrets of a job, loaded from its folder as the `Mask` that hides them (`core.mask`)."""

from __future__ import annotations

from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.secret_mask import Mask, make_mask


def load_mask(job: JobDir) -> Mask:
    """Return the mask of a job's secrets; an empty one for another user's job, whose secrets cannot be read.

    Raises ValueError when they are damaged, or missing though the job has some.
    """
    try:
        secrets = codec.loads_plain(ownership.read_regular(job.secrets / "secrets.json"))
        webhook = ownership.read_regular(job.webhook).decode() if job.webhook.exists() else ""
    except PermissionError:
        return Mask(())
    except FileNotFoundError as err:
        if job.plan.exists() and _has_secrets(job):
            raise ValueError(f"they cannot be read: {err.strerror}") from err
        return Mask(())
    except OSError as err:
        raise ValueError(f"they cannot be read: {err.strerror}") from err
    return make_mask(map(str, secrets.values()), webhook)


def _has_secrets(job: JobDir) -> bool:
    """Return whether a job names secrets; False for a damaged plan."""
    try:
        return bool(codec.loads_plain(ownership.read_regular(job.plan)).get("secrets"))
    except (OSError, codec.CodecError):
        return False
