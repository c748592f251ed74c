"""Facts of a job: all that the brain knows of it, its attempts and checkpoints; `node_facts` and `rank_facts` have the rest.

What was ordered and what was observed are always two fields.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.collective_counts import CountKey, Tally
from orchestrator.brain.model.node_facts import NodeFacts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.core.checkpoints import resume_choice
from orchestrator.core.checkpoints.checkpoint import Checkpoint
from orchestrator.core.checkpoints.resume_choice import ResumeOverride, ResumePoint, SkippedCheckpoint
from orchestrator.core.plan_types import Limits, PlannedPool, QueueTerms
from orchestrator.core.status_types import AllocationEndCause, Frame

News: TypeAlias = "e.Event | d.Decision"


class Phase(enum.Enum):
    """How far an attempt is."""

    PREPARE = "prepare"  # agents come up, set up their nodes, and find a port
    RUN = "run"  # ranks were ordered to start
    STOP = "stop"  # a verdict was made, all ranks ended, or the user cancelled: what is left is being stopped


class JobGoal(enum.Enum):
    """What the user wants of the job."""

    RUN = "run"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class ActualResume:
    """A script did not resume from the checkpoint that it was given, but began at step `step`: it had read checkpoint `checkpoint_read`
    (0: none), or checkpoint `main` shows that, which it wrote after `steps` steps of its own."""

    step: int
    main: str = ""
    steps: int = 0
    checkpoint_read: int | None = None


@dataclass(frozen=True, slots=True)
class AllocationLoss:
    """How an allocation was lost to an attempt; `node`: the node with which it was lost, if it was one."""

    at: float
    allocation: str
    cause: AllocationEndCause
    why: str
    node: str


@dataclass(slots=True)
class AttemptFacts:
    """The current attempt."""

    number: int
    began_at: float
    # Since when one supervisor has watched it: a silence before that counts for nothing.
    watched_at: float
    resume: ResumePoint | None
    phase: Phase = Phase.PREPARE

    # Since when its ranks have nodes, when it last had to wait for other jobs, and since when all its ranks run.
    placed_at: float | None = None
    queued_at: float = 0.0
    running_at: float | None = None
    # The launcher call whose ranks run, since when, and the steps that ranks of the calls before it made.
    call: int = 1
    call_at: float = 0.0
    earlier_steps: int = 0

    # The last inspection that was ordered, when, and which one it was in its silence.
    inspection: int = 0
    inspected_at: float | None = None
    inspections_in_silence: int = 0
    # Newer checkpoints than `resume`, with why; by node why checkpoints are not in memory as wanted; the last notice of each topic and key.
    passed_over: tuple[SkippedCheckpoint, ...] = ()
    memory_faults: dict[str, str] = field(default_factory=dict)
    notices: list[d.Notice] = field(default_factory=list)

    # How it ended: the verdict, whether the next one avoids its node (see `host_faults`), its own steps, and since when it stops.
    verdict: d.Verdict | None = None
    leaves_host: bool = False
    judged_at: float = 0.0
    own_steps_at_failure: int | None = None
    # Of one that diverged: the job's last step whose weights are known to give a finite loss.
    sound_step: int | None = None
    stop_at: float | None = None
    restart_requested: bool = False
    # How its nodes were taken away before it was judged, and since when another allocation has replaced its own.
    allocation_loss: AllocationLoss | None = None
    allocation_lost_at: float | None = None

    # Whether it wrote a newer checkpoint, and began from the one it was given, by what it read or its checkpoints state; or where else.
    wrote_newer_checkpoint: bool = False
    began_from_checkpoint: bool = False
    actual_resume: ActualResume | None = None
    # How the step in a checkpoint and the counted step differ, as a sentence.
    step_mismatch: str = ""
    # After its end: when a comparison was ordered, of which checkpoint, and the last one that was compared.
    compare_ordered_at: float | None = None
    checkpoint_to_compare: int = 0
    compared_checkpoint: int | None = None

    @property
    def is_preempted(self) -> bool:
        """Whether it ended because its nodes are taken away."""
        return self.verdict is not None and self.verdict.kind in (d.VerdictKind.PREEMPTED, d.VerdictKind.TIME_LIMIT)

    @property
    def costs_no_restart(self) -> bool:
        """Whether it costs no restart budget: its nodes were taken away or a host was at fault, or the user wanted the restart."""
        return self.is_preempted or self.leaves_host or (self.verdict is None and self.restart_requested)

    @property
    def base_step(self) -> int:
        """The job's step that the attempt started from."""
        if self.actual_resume is not None:
            return self.actual_resume.step
        return (self.resume.step or 0) if self.resume else 0

    @property
    def call_step(self) -> int:
        """The job's step that the ranks of the present call started from."""
        return self.base_step + self.earlier_steps

    def last_notice(self, topic: d.NoticeTopic, key: str = "") -> d.Notice | None:
        """Return the last notice on a topic, also if it was withdrawn."""
        return next((notice for notice in self.notices if (notice.topic, notice.key) == (topic, key)), None)

    def active_notice(self, topic: d.NoticeTopic) -> d.Notice | None:
        """Return the notice on a topic that holds."""
        last = self.last_notice(topic)
        return None if last is None or last.withdrawn else last

    def own_steps(self, verdict: d.Verdict) -> int | None:
        """Return how many steps the attempt had made by itself when it failed, None if no step is known."""
        return None if verdict.step is None else verdict.step - self.base_step


@dataclass(slots=True)
class PastAttempt:
    """What is kept of an attempt that is over."""

    attempt: AttemptFacts
    step: int | None
    has_progressed: bool

    @property
    def number(self) -> int:
        return self.attempt.number

    @property
    def verdict(self) -> d.Verdict | None:
        return self.attempt.verdict

    @property
    def failed_step(self) -> int | None:
        """The job's step at which it failed; not its verdict's step if it was found later to have ignored its checkpoint."""
        count = self.attempt.own_steps_at_failure
        return None if count is None else self.attempt.base_step + count


@dataclass(slots=True)
class Facts:
    """Everything the brain knows of a job."""

    # The plan. `leaving`: nodes of earlier plans that may still run something.
    limits: Limits | None = None
    pool: PlannedPool | None = None
    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    leaving: dict[str, NodeFacts] = field(default_factory=dict)
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    # Of the ranks of the current attempt: the most steps that one has made, when (job clock) one was last seen to make a
    # step, a backward pass without steps, and to give a sign of progress, how many have exited, and when one last ended well.
    steps_made: int = 0
    stepped_at: float = 0.0
    passed_at: float = 0.0
    progress_at: float = 0.0
    exited_count: int = 0
    ended_well_at: float | None = None

    # What the user wants, and who cancelled the job. Numbers of requests: the last one, the last for an inspection, the last whose
    # inspections were ordered. `resumed_after`: the last attempt before the latest resume; failures up to it are forgiven.
    goal: JobGoal = JobGoal.RUN
    cancel_reason: str = ""
    last_request: int = 0
    inspect_requested: int = 0
    inspect_answered: int = 0
    resumed_after: int = 0
    resume_count: int = 0

    # Attempts. `spent`: restarts without progress; `pause_s`: the longest time between two steps in all attempts.
    attempt: AttemptFacts | None = None
    past_attempts: list[PastAttempt] = field(default_factory=list)
    best_step: int = 0
    restarts_spent: int = 0
    longest_pause_s: float = 0.0
    run_began_at: float | None = None
    end: d.JobEnd | None = None
    end_why: str = ""
    ended_at: float | None = None

    # Hosts of a pool: nodes of the attempt placed last, by rank; earlier jobs that wait for them; since when busy ones are tried again.
    last_hosts: tuple[str, ...] = ()
    jobs_ahead: tuple[str, ...] = ()
    busy_round_at: float = 0.0

    # Allocations of a queue system: the current one, all of them in order, the announced end of the current one, since when
    # the job waits for another one and why, and the end after which no other one follows.
    allocation: str = ""
    allocations: tuple[str, ...] = ()
    allocation_ending: e.AllocationEnding | None = None
    requeued_at: float | None = None
    requeue_reason: str = ""
    allocation_end: e.AllocationEnded | None = None

    # Checkpoints by number, without their files; persons' choices, while each holds; those given up since an attempt got further.
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    resume_overrides: tuple[ResumeOverride, ...] = ()
    distrusted_checkpoints: tuple[int, ...] = ()

    # Not journaled, see `desync`: by optimizer step and rank what was run, since when counts differ, uncountable groups.
    counts_at_steps: dict[CountKey, dict[int, Tally]] = field(default_factory=dict, compare=False)
    counts_differ_since: dict[CountKey, float] = field(default_factory=dict, compare=False)
    uncountable_groups: set[str] = field(default_factory=set, compare=False)
    # Not journaled, see `replicas`: by optimizer and its step the sum of each rank; what all have reported since the last look.
    sums_at_steps: dict[int, dict[int, Tally]] = field(default_factory=dict, compare=False)
    complete_sums: list[tuple[int, int]] = field(default_factory=list, compare=False)

    # Derived, see `ranks_on` and `living`: the ranks by node, those that live, and the dictionary from which they were taken.
    ranks_by_node: dict[str, list[RankFacts]] = field(default_factory=dict, compare=False, repr=False)
    living_ranks: list[RankFacts] | None = field(default=None, compare=False, repr=False)
    indexed_ranks: dict[int, RankFacts] | None = field(default=None, compare=False, repr=False)
    # Derived, see `suspicion.usual_step_s`: the greatest median of step times, if it is known to be that.
    usual_step_s: float | None = field(default=None, compare=False, repr=False)
    is_usual_known: bool = field(default=False, compare=False, repr=False)
    # Derived, see `desync`: the ranks of each group of processes.
    group_members: dict[str, set[int]] = field(default_factory=dict, compare=False, repr=False)

    # The job clock at the last event or decision.
    last_event_at: float = 0.0

    def verdict_on(
        self, kind: d.VerdictKind, head: str, cause: d.FailureCause = d.FailureCause.OTHER, place: tuple[str, ...] = (),
        frames: tuple[Frame, ...] = (), **more: object,
    ) -> d.Verdict:  # fmt: skip
        """Build a verdict; `more` are fields of it."""
        signature = d.FailureSignature(kind, cause, place, frames)
        blank = d.Verdict(kind, (), "", head, (), signature, self.step, self.progress_at, True)
        return dataclasses.replace(blank, **more)  # type: ignore[arg-type]

    @property
    def step(self) -> int | None:
        """The job's optimizer step: the furthest rank's, None while no rank has made one and none was resumed."""
        if self.attempt is None:
            return None
        if self.steps_made == 0 and self.attempt.base_step == 0:
            return None
        return self.attempt.base_step + self.steps_made

    @property
    def resume_override(self) -> ResumeOverride | None:
        """The checkpoint that the user chose with `--from`, and since which attempt."""
        return self.resume_overrides[-1] if self.resume_overrides else None

    @property
    def checkpoint_choice(self) -> resume_choice.ResumeChoice:
        """The checkpoint that the next attempt resumes from, and the newer ones that were passed over."""
        return resume_choice.choose_checkpoint(self.checkpoints.values(), len(self.ranks), self.resume_override)

    @property
    def checkpoint(self) -> ResumePoint | None:
        """The checkpoint of `checkpoint_choice`, as an attempt gets it."""
        checkpoint = self.checkpoint_choice.checkpoint
        return None if checkpoint is None else ResumePoint(checkpoint.path, checkpoint.step, checkpoint.number)

    @property
    def queue(self) -> QueueTerms | None:
        """What a job may do whose nodes come from a queue system; None for any other job."""
        return self.pool.queue if self.pool is not None else None

    @property
    def is_done(self) -> bool:
        """Whether every rank ended by itself and with code 0, and the script of every node, if there is one."""
        return self.are_ranks_done and not any(map(self.runs_script, self.gang))

    @property
    def runs_launch_script(self) -> bool:
        """Whether each node runs a script whose launcher calls start the ranks."""
        return self.limits is not None and self.limits.launches

    def runs_script(self, node: NodeFacts) -> bool:
        """Return whether the node has a script to run that has not been seen to end well."""
        return self.runs_launch_script and not node.script_ended_well

    @property
    def are_ranks_done(self) -> bool:
        """Whether every rank ended by itself and with code 0."""
        return self.exited_count == len(self.ranks) and all(rank.ended_well for rank in self.ranks.values())

    @property
    def gang(self) -> list[NodeFacts]:
        """The nodes that have ranks in the current attempt, in the order of the ranks; none before it is placed."""
        return sorted((node for node in self.nodes.values() if node.ranks), key=lambda node: node.ranks[0])

    @property
    def spares(self) -> list[NodeFacts]:
        """The nodes without ranks that the current attempt keeps in reserve; none before it is placed."""
        is_placed = self.attempt is not None and self.attempt.placed_at is not None
        idle = [node for node in self.nodes.values() if not (node.ranks or node.excluded or node.ordered.leave)]
        return idle if self.pool is not None and is_placed else []

    def every_node(self) -> list[NodeFacts]:
        """Return the nodes of the plan, then those of earlier plans."""
        return [*self.nodes.values(), *self.leaving.values()]

    def node(self, name: str) -> NodeFacts | None:
        """Return the node of that name, of this plan or an earlier one."""
        return self.nodes.get(name) or self.leaving.get(name)

    def is_unfinished(self, node: NodeFacts) -> bool:
        """Return whether a rank of the node, or its script, has not been seen to end."""
        ranks = self.ranks_on(node.name)
        return self.runs_script(node) or any(rank.rank_state is not RankState.EXITED for rank in ranks)

    def ranks_on(self, node: str) -> list[RankFacts]:
        """Return the ranks on a node, in order. Each change of a rank's node comes with another dictionary `ranks`."""
        self._index()
        return self.ranks_by_node.get(node, [])

    def living(self) -> list[RankFacts]:
        """Return the ranks whose processes are alive, in order. Each change of a rank's state sets `alive` to None."""
        self._index()
        if self.living_ranks is None:
            self.living_ranks = [rank for rank in self.ranks.values() if rank.rank_state is RankState.ALIVE]
        return self.living_ranks

    def _index(self) -> None:
        if self.indexed_ranks is self.ranks:
            return
        self.ranks_by_node, self.living_ranks, self.indexed_ranks = {}, None, self.ranks
        for rank in self.ranks.values():
            self.ranks_by_node.setdefault(rank.node, []).append(rank)

    def forget_signs(self) -> None:
        """Reset the signs of life and progress: new ranks start."""
        self.steps_made, self.exited_count = ((self.attempt.earlier_steps if self.attempt is not None else 0), 0)
        self.stepped_at, self.passed_at, self.progress_at, self.ended_well_at = 0.0, 0.0, 0.0, None
        self.group_members.clear()
        self.is_usual_known = False

    def note_signs(self, rank: RankFacts) -> None:
        """Note a rank's steps and its signs of progress."""
        earlier = self.attempt.earlier_steps if self.attempt is not None else 0
        self.steps_made = max(self.steps_made, earlier + rank.steps)
        self.stepped_at = max(self.stepped_at, rank.step_at)
        self.passed_at = max(self.passed_at, rank.pass_at)
        self.progress_at = max(self.progress_at, rank.sign_at)

    def note_median(self, previous_s: float | None, median_s: float | None) -> None:
        """Note that the median of a rank's step times has changed."""
        if median_s is not None and (self.usual_step_s is None or median_s >= self.usual_step_s):
            self.usual_step_s = median_s
        elif previous_s == self.usual_step_s:
            self.is_usual_known = False

    def broken_at(self) -> float | None:
        """Return when (job clock) the current attempt's gang was at the latest seen to be broken, None if never. A gang
        that misses one rank makes no step, so its other ranks fence themselves when they are cut off. One that is not
        known to be broken may train on behind a broken connection without end."""
        attempt = self.attempt
        assert attempt is not None
        started_nodes = [node for node in self.every_node() if node.may_run_attempt == attempt.number]
        ends_at = [rank.died_at for rank in self.ranks.values() if rank.rank_state is RankState.EXITED]
        ends_at += [node.cleared_at for node in started_nodes if node.is_clear(attempt.number)]
        ends_at += [node.agent_loss.at for node in started_nodes if node.agent_loss is not None]
        ends_at += [attempt.allocation_lost_at] if attempt.allocation_lost_at is not None else []
        return max(ends_at, default=None)

    def has_progressed(self) -> bool:
        """Return whether the current attempt got further than all before it: a new step or a newer checkpoint. Of one that
        ignored its checkpoint only a new step counts: its checkpoints may be newer than where it began, and yet old."""
        attempt = self.attempt
        if attempt is None:
            return False
        has_newer_checkpoint = attempt.wrote_newer_checkpoint and attempt.actual_resume is None
        return has_newer_checkpoint or (self.steps_made > 0 and (self.step or 0) > self.best_step)
