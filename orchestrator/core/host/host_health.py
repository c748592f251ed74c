"""Health of hosts in the job home, `nodes/HOST.json`: the result of a host's last check, or the job that has lost it since.

Rules: the file is replaced as a whole, by `orch check` and by the supervisor that judges a host lost; the last one counts.
A file that cannot be read is skipped: it must not keep a job from starting.
"""

from __future__ import annotations

import contextlib
import urllib.parse
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import replace_text

FAILURE_S_MAX = 24 * 3600.0
"""A failure that is older no longer counts."""


@dataclass(frozen=True, slots=True)
class HostHealth:
    """Health of a host at a wall-clock time. `fault`: empty for a passed check; `job`: the job that has lost it, empty for a
    check; `gpus`: how many the check has found."""

    host: str
    at: float
    fault: str
    job: str = ""
    gpus: int | None = None
    # The last burn-in: when, what it has proved wrong, its devices, and the speed of the slowest by part
    burned_at: float | None = None
    burn_fault: str = ""
    devices: tuple[str, ...] = ()
    speeds: dict[str, float] = field(default_factory=dict)

    def describe_failure(self, wall_s: float) -> str:
        """Return when and where it failed, and why."""
        age_s = max(0.0, wall_s - self.at)
        ago = f"{age_s / 3600:.0f} h" if age_s >= 2 * 3600 else f"{age_s / 60:.0f} min"
        return f"{ago} ago, {f'in {self.job}' if self.job else 'in a check'}: {self.fault}"


def write(home: Path, note: HostHealth) -> None:
    """Replace the health of a host. Its last burn-in stays known, and a passed check without one does not clear its fault.
    Raises OSError."""
    path = home / "nodes" / f"{urllib.parse.quote(note.host, safe='')}.json"
    known = _read(path)
    if known is not None and note.burned_at is None:
        note = replace(
            note, burned_at=known.burned_at, burn_fault=known.burn_fault, devices=known.devices, speeds=known.speeds
        )
    if note.burn_fault and note.burned_at and not note.fault:
        note = replace(note, at=note.burned_at, fault=note.burn_fault)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, codec.dumps(note) + "\n")


def read_all(home: Path) -> dict[str, HostHealth]:
    """Return the health of each known host."""
    notes = map(_read, sorted((home / "nodes").glob("*.json")))
    return {note.host: note for note in notes if note is not None}


def _read(path: Path) -> HostHealth | None:
    with contextlib.suppress(OSError, codec.CodecError):
        return codec.loads(HostHealth, ownership.read_regular(path))
    return None


def recent_failures(home: Path, wall_s: float) -> dict[str, HostHealth]:
    """Return the failures that still count, by host."""
    return {host: note for host, note in read_all(home).items() if note.fault and wall_s - note.at < FAILURE_S_MAX}
