"""Which failures of hosts still count, and which hosts a new job is given last. Pure.

A failure is the verdict `node_lost` of a job, or a failed check of the host itself; nothing else, and nothing that a later
check has disproved or the user has forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

FAILURE_S_MAX = 24 * 3600.0
"""A failure that is older no longer counts."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a host, at a wall-clock time; `job` is empty for a check."""

    host: str
    at: float
    why: str
    job: str

    def words(self, wall_s: float) -> str:
        """Return when and where it failed, and why."""
        age_s = max(0.0, wall_s - self.at)
        ago = f"{age_s / 3600:.0f} h" if age_s >= 2 * 3600 else f"{age_s / 60:.0f} min"
        return f"{ago} ago, {f'in {self.job}' if self.job else 'in a check'}: {self.why}"


@dataclass(frozen=True, slots=True)
class Checked:
    """What is kept of a host's last check, and when the user has forgotten its failures; 0: never."""

    host: str
    at: float = 0.0
    # Why it failed; empty when it passed
    fault: str = ""
    forgotten_at: float = 0.0


def latest(lost: Iterable[Failure], checks: Mapping[str, Checked], wall_s: float) -> dict[str, Failure]:
    """Return the last failure of each host that still counts."""
    found: dict[str, Failure] = {}
    of_checks = [Failure(one.host, one.at, one.fault, "") for one in checks.values() if one.fault]
    for failure in sorted([*lost, *of_checks], key=lambda one: one.at):
        check = checks.get(failure.host, Checked(failure.host))
        passed_at = 0.0 if check.fault else check.at
        if failure.at > max(passed_at, check.forgotten_at) and wall_s - failure.at < FAILURE_S_MAX:
            found[failure.host] = failure
    return found


def in_order(hosts: Sequence[str], failed: Iterable[str], wanted: int) -> tuple[list[str], list[str]]:
    """Return the hosts in the order in which a job takes them, and those that are set aside: at its end, and only where
    there are enough others."""
    aside = [host for host in hosts if host in set(failed)]
    others = [host for host in hosts if host not in aside]
    return ([*others, *aside], aside) if len(others) >= wanted else (list(hosts), [])
