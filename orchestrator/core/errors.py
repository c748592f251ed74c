"""Errors that a person can fix: the user's mistake, and a cluster that cannot do what was asked.

Every other exception that reaches the command line is a bug. The last three are for callers that know what they
mean for the job.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault with its place (`job.yaml:7: nodes`, a path) and its fix; `line`: of a file, to sort by."""

    where: str
    what: str
    fix: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


EXIT_INTERRUPTED = 130
"""The exit code of a command that its user has interrupted."""


class OrchError(Exception):
    """Failure with its place and its fix; `exit_code` is that of the command line (1 means a failed job)."""

    exit_code = 3

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    @classmethod
    def from_fault(cls, fault: Fault) -> OrchError:
        """Return the error of a fault."""
        return cls(fault.what, fault.where, fault.fix)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  fix: {self.fix}" if self.fix else head

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of a traceback, which does not help to fix the error."""
        return str(self).splitlines()


class UserError(OrchError):
    """The spec, the arguments or the files of the user are at fault."""

    exit_code = 2


class ClusterError(OrchError):
    """A machine, a queue or a network refused or did not answer."""

    exit_code = 3


class HostError(Exception):
    """Failure on a host: to run a program, hold a port, list GPUs, copy a file; `tail`: the end of the output."""

    def __init__(self, reason: str, tail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.tail = tail


class Cancelled(Exception):
    """The work was cancelled."""


class OwnershipLostError(Exception):
    """The job does not belong to this process (any more): it is in another allocation, or another process has signed its lock."""
