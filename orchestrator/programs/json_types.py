"""Types of the JSON outputs that are not dataclasses; `orch schema NAME` prints their JSON Schema. Keys are only added, never removed."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict  # pydantic wants them before Python 3.12

from orchestrator.core.jobdir.status_file import QueueStatus
from orchestrator.core.status_types import Suspicion

State = Literal["QUEUED", "STARTING", "RUNNING", "RESTARTING", "STOPPING", "SUCCEEDED", "FAILED", "CANCELLED"]


class Submitted(TypedDict):
    """A job that was submitted; `new`: by this command, not with the same key before."""

    id: str
    name: str
    dir: str
    state: State
    new: bool


class Start(TypedDict):
    """Checkpoint that a restart starts from."""

    path: str
    step: int | None


class Frame(TypedDict):
    """A source line; `within`: its process or thread, if it is not the main one."""

    file: str
    line: int
    function: str
    within: str


class Evidence(TypedDict):
    """A part of the evidence of a verdict."""

    kind: str
    text: str
    node: str
    fix: str


class Verdict(TypedDict):
    """Why an attempt failed."""

    kind: str
    ranks: list[int]
    node: str
    step: int | None
    summary: str
    culprit: str
    waiting: str
    evidence: list[str]
    head: str
    proof: list[Evidence]
    signature: list[str]
    frame: Frame | None
    detected_s: float


class Told(TypedDict):
    """A notice in an attempt, or its withdrawal."""

    what: Literal["noticed", "withdrawn"]
    kind: str
    text: str
    fix: str
    at: str


class Passed(TypedDict):
    """A newer checkpoint that was skipped."""

    save: int
    path: str
    step: int | None
    why: str


class Attempt(TypedDict):
    """An attempt of a post-mortem."""

    attempt: int
    why: str
    started_at: str
    ended_at: str | None
    first_step: int | None
    last_step: int | None
    resumed_from: str | None
    resumed_step: int | None
    began_from: dict[str, Any] | None
    resumed_save: NotRequired[dict[str, Any] | None]
    passed: list[Passed]
    verdict: Verdict | None
    restart_s: float | None
    restart_parts: dict[str, float] | None
    queued_s: float | None
    repeated_steps: int | None
    checkpoint_stalls_s: list[float]
    losses: NotRequired[list[str] | None]
    notices: list[str]
    told: list[Told]
    remarks: list[str]
    starts: list[str]
    fresh_starts: list[str]
    job_end: State | None
    ended_why: str | None
    ending: Literal["done", "cancelled", "restart"] | None


class TimeUse(TypedDict):
    """Time of the ranks: seconds of each kind, and the productive share."""

    ratio: float | None
    rank_seconds: dict[str, float]


class Loss(TypedDict):
    """Cost of a failure."""

    attempt: int
    cause: str
    node: str
    rank_seconds: float


class CheckpointAdvice(TypedDict):
    """What a job's checkpoints cost, and the interval that would cost least. Of three values the middle one is the most likely, and
    the others are the limits at 95 %; null where no limit is known."""

    checkpoints: int
    stall_s: float
    interval_steps: int
    failures: int
    rank_hours: float
    ranks: int
    between_failures_s: list[float | None]
    best_steps: list[int | None]
    checkpoint_share: float | None
    failure_share: float | None
    best_share: float | None
    memory_share: float


class JobTimeUse(TimeUse):
    """Time of the ranks of one job, with its failures."""

    id: str
    losses: list[Loss]
    advice: NotRequired[CheckpointAdvice | None]


class Goodput(TimeUse):
    """Output of `orch goodput`: all jobs together, and each."""

    jobs: list[JobTimeUse]


class Why(TypedDict):
    """A post-mortem."""

    id: str
    name: str
    state: State
    reason: str
    dir: str
    checkpoint: Start | None
    attempts: list[Attempt]
    suspicion: str | None
    suspected: NotRequired[Suspicion | None]
    written_at: NotRequired[str]
    queue: NotRequired[QueueStatus | None]
    full_disk: NotRequired[str]
    goodput: TimeUse
    passed: NotRequired[list[Passed]]
    misfit: NotRequired[dict[str, str] | None]
    offered: NotRequired[list[str]]


class Need(TypedDict):
    """What a person is needed for."""

    kind: Literal["hang", "queue", "disk", "supervisor"]
    what: str
    fix: str


class Culprit(TypedDict):
    """A rank at fault, and the source line where it failed or is stuck, if known."""

    rank: int
    node: str
    host: str
    file: str | None
    line: int | None
    function: str | None


class Command(TypedDict):
    """A command that can be run next."""

    label: str
    command: str


class Outcome(TypedDict):
    """The outcome of a wait."""

    id: str
    name: str
    dir: str
    state: State
    reason: str
    ended: bool
    needs: Need | None
    attempt: int
    restarts: int
    step: int | None
    verdict: dict[str, Any] | None
    culprits: list[Culprit]
    notices: list[str]
    checkpoint: Start | None
    next: list[Command]


class Logs(TypedDict):
    """The last lines of the logs; `cut`: earlier lines were left out, to limit the size."""

    id: str
    text: str
    lines: int
    cut: bool


class Collective(TypedDict):
    """The last collective that a rank has entered in a group."""

    group: str
    label: str
    ranks: list[int]
    number: int
    what: str
    shape: str
    entered_s: float


class InspectedRank(TypedDict):
    """Inspection of a rank."""

    rank: int
    node: str
    pid: int | None
    state: str
    activity: str
    still_s: float
    where: str
    line: str
    why: str
    phase: str
    stack: list[str]
    inside: int
    collectives: list[Collective]
    gpu_use: float | None
    unavailable: list[str]


class Stacks(TypedDict):
    """Inspection of all ranks."""

    id: str
    name: str
    state: State
    attempt: int
    step: int | None
    dir: str
    looks: int
    apart_s: float | None
    ranks: list[InspectedRank]
    unanswered: list[str]
    pages: str


class Save(TypedDict):
    """A checkpoint of the ledger, or files that can be adopted."""

    save: int | None
    path: str
    main: str
    attempt: int | None
    world_size: int | None
    step: int | None
    step_source: Literal["stated", "counted", "unknown"]
    format: str
    content: str
    state: str
    why: str
    closed_by: str
    compared: str
    files: int
    bytes: int
    written_at: str
    stall_s: float | None
    places: list[dict[str, str | bool]]
    exists: bool
    complete: bool
    safe: bool
    safe_bytes: int
    whole: bool | None
    resume: bool
    checkpoint_path: str


class Folders(TypedDict):
    """Where a job's files are."""

    id: str
    dir: str
    start: str
    written: int
    links: list[dict[str, str]]
    checkpoints: list[dict[str, Any]]
    logs: str
    checkpoint_path: str | None


class Finding(TypedDict):
    """A finding of a check."""

    what: str
    ok: bool
    found: str
    fix: str
    severity: Literal["ok", "note", "warning", "error"]
    nodes: list[str]
    figures: NotRequired[dict[str, float]]


class Held(TypedDict):
    """GPUs or slots of a host that a job holds; `since` is null if the process is not visible."""

    count: int
    things: str
    holder: str
    since: str | None


class Stock(TypedDict):
    """Free capacity of a host, or why it is unknown."""

    gpus: int
    slots: int
    held: list[Held]
    fault: str


class Host(TypedDict):
    """A host that jobs or checks have used."""

    host: str
    state: str
    seen_at: str
    job: str | None
    failed_at: str | None
    failed_job: str | None
    why: str | None
    free: NotRequired[Stock | None]
