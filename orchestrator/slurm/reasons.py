"""Why does a job wait in Slurm's queue, and what can be done about it? Slurm's reasons in plain words. Pure.

Rules: the first word of a reason counts, whatever stands behind it. With EnforcePartLimits=NO, Slurm's default, a job
that no nodes will ever fit is queued like any other: so reasons that time does not mend are told as such. None of them
is taken for an end, since an administrator may change the limits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job waits: `why` follows on "waits in the queue"; `fix` is how to mend that, empty when it mends itself, with
    `{job}` for the job's name."""

    why: str
    fix: str = ""


_ANEW = "orch cancel {job}, then orch resume {job} --set"
_LESS = f"{_ANEW} KEY=VALUE for what must change"
_WAITS = {
    "resources": Wait("until enough nodes are free"),
    "priority": Wait("behind jobs of higher priority"),
    "begintime": Wait("until the time at which Slurm may start it"),
    "dependency": Wait("for another job that it depends on"),
    "licenses": Wait("for licenses"),
    "reservation": Wait("for its reservation"),
    "nodedown": Wait("for a node that is down"),
    "reqnodenotavail": Wait("for nodes that are down, drained or reserved now", "sinfo -R says why they are"),
    "partitiondown": Wait(
        "since its partition is down", f"wait until it is up, or {_ANEW} slurm.partition=…"
    ),
    "partitioninactive": Wait(
        "since its partition takes no jobs now", f"wait until it does, or {_ANEW} slurm.partition=…"
    ),
    "qosusagethreshold": Wait("since its QOS asks for a larger share than is left"),
}
"""By the first word of the reason, for those that are seen most; all others are told in Slurm's words alone."""

_NEVER = (
    (
        "partitionnodelimit",
        Wait(
            "it asks for more nodes than its partition has up or lets a job have",
            f"{_ANEW} nodes=… (or slurm.partition=…); scontrol show partition shows its limits",
        ),
    ),
    (
        "partitiontimelimit",
        Wait(
            "it asks for more time than its partition lets a job have",
            f"{_ANEW} time_limit=… (or slurm.partition=…); scontrol show partition shows its limits",
        ),
    ),
    (
        "partitionconfig",
        Wait(
            "it asks for more nodes, cores, GPUs, memory or time than its partition lets a job have",
            f"{_LESS}; scontrol show partition and sinfo -o '%P %D %c %m %G' show that",
        ),
    ),
    (
        "badconstraints",
        Wait(
            "no nodes have all that it asks for",
            f"{_LESS}; sinfo -o '%20N %c %m %G %f' shows that",
        ),
    ),
    (
        "dependencyneversatisfied",
        Wait("the job that it depends on has not ended as it should", f"{_ANEW} slurm.extra=[]"),
    ),
    (
        "reservationdeleted",
        Wait("its reservation is no more", f"{_ANEW} slurm.reservation=…; scontrol show reservation"),
    ),
    (
        "(invalid)?account(notallowed)?",
        Wait(
            "its account may not be used there",
            f"{_ANEW} slurm.account=…; sacctmgr show assoc user=$USER shows yours",
        ),
    ),
    (
        "(invalid)?qos(notallowed)?",
        Wait("its QOS may not be used there", f"{_ANEW} slurm.qos=…; sacctmgr show qos shows them"),
    ),
    (
        "(assoc|qos)(max.*(perjob|pernode|wall)|min).*|maxmemperlimit",
        Wait(
            "it asks for more, or less, than its account, QOS or partition lets a job have",
            f"{_LESS}; sacctmgr show qos and sacctmgr show assoc user=$USER show that",
        ),
    ),
)
"""Reasons that time does not mend, as patterns of their first word. The `why` stands alone."""

_LIMITED = (
    (
        "(assoc|qos)grp.*(minutes|runmins?).*|assoc.*timelimit",
        "since the budget of its account or QOS is used up",
    ),
    ("assoc.*|qos.*", "until other jobs of the same user, account or QOS have ended"),
)
"""The limits on what many jobs have together."""


def of(reason: str) -> tuple[Wait, bool]:
    """Return what a reason of squeue means, and whether the job can never start as it is."""
    first = re.split(r"[,\s(]", reason, maxsplit=1)[0].lower()
    for pattern, wait in _NEVER:
        if re.fullmatch(pattern, first):
            return wait, True
    if first in _WAITS:
        return _WAITS[first], False
    return next((Wait(why) for pattern, why in _LIMITED if re.fullmatch(pattern, first)), Wait("")), False
