"""How does the submit side deal with Slurm? By Slurm's own commands, a bounded time each, in a scrubbed environment."""

from __future__ import annotations

from collections.abc import Mapping

ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR"),
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SSL_CERT_FILE"),
)
"""What sbatch, and by it the batch script, get of the environment. No other SLURM_*: within a job those describe that
job, and sbatch and srun take them for wishes. What of SBATCH_* is heeded stands in `sbatch.defaults`."""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what sbatch is given of an environment."""
    return {name: environ[name] for name in ENVIRONMENT if name in environ}
