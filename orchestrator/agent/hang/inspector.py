"""Inspector of a node's ranks: samples all ranks at once and classifies each rank in a thread of its own.

The agent's loop calls `begin`, then `gather` until that returns an answer. If a thread hangs (a file system that does
not answer), its rank misses this inspection and the next ones; no other rank is affected. Evidence files are written
before the answer, so that the evidence is on the disk before anything is killed. The files only grow, so
that they can be shipped from hosts that do not see the job folder (`core/wire/shipped_files`):
`rank-00002-stacks.txt`; `rank-00002-flight.jsonl`, one line per inspection with torch's own trace;
`node-NODE-gpus.txt`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from orchestrator.agent.hang import classify, python_stacks, sample, stack_frames
from orchestrator.agent.hang.classify import PreviousSample, SampleContext
from orchestrator.agent.numbers import gpu_use
from orchestrator.agent.ranks import failure, flight_recorder, stack_dump
from orchestrator.agent.ranks.hook.layout import RING_STEPS
from orchestrator.agent.ranks.processes import NodeRanks, RankProcess
from orchestrator.agent.ranks.rank_start import STACK_SIGNAL
from orchestrator.core import observations
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import make_subfolders
from orchestrator.core.jobdir.layout import rank_name
from orchestrator.core.status_types import Frame
from orchestrator.core.wire import reports

T = TypeVar("T")

STACKS_S_MAX = 2.0
"""How long the ranks of a node may take to answer; a rank that has not by then is described from /proc."""

INSPECTION_S_MAX = 4.0
"""How long an inspection may take in all: the stacks, then torch's answers and the holder of the GIL."""

EVIDENCE_BYTES_MAX = 16 << 20
"""An evidence file of one attempt that is larger takes no later inspections."""

POLL_S = 0.01
_TIMED_OUT = f"the inspection took longer than {INSPECTION_S_MAX:g} s: a file system that does not answer?"


@dataclass(slots=True)
class _WatchedRank:
    """One rank, from inspection to inspection."""

    process: RankProcess
    client: flight_recorder.WorkerServerClient
    previous: PreviousSample | None = None
    # The thread that inspects it.
    thread: threading.Thread | None = None
    # The digest of the last trace in its evidence file.
    trace_digest: bytes = b""

    @property
    def is_busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


@dataclass(slots=True)
class _RankJob:
    """One rank in one inspection: the requests sent to it, then its stacks, then the result of its thread."""

    rank: _WatchedRank
    before: sample.ResourceUse
    pending_stacks: python_stacks.PendingStacks
    flight_query: futures.Future[flight_recorder.FlightRecord]
    stacks: list[python_stacks.RankStack] | None = None
    result: observations.RankInspection | None = None


@dataclass(slots=True)
class Inspector:
    """Inspects the ranks of one attempt on this node; `env`: the environment of one of them."""

    ranks: NodeRanks
    env: Mapping[str, str]
    _watched: dict[int, _WatchedRank] = field(default_factory=dict)
    _waiting: list[_WatchedRank] = field(default_factory=list)
    _jobs: list[_RankJob] = field(default_factory=list)
    # nvidia-smi's output in one inspection
    _gpus: futures.Future[gpu_use.GpuUse] = field(default_factory=futures.Future)
    _number: int | None = None
    _began_s: float = 0.0

    def begin(self, number: int) -> None:
        """Request the stacks of all living ranks; an inspection in progress is abandoned."""
        self._number, self._began_s = number, time.monotonic()
        alive = self.ranks.alive
        for process in alive:
            if process.rank not in self._watched:
                client = flight_recorder.WorkerServerClient(process.folder)
                self._watched[process.rank] = _WatchedRank(process, client)
        self._waiting = [self._watched[process.rank] for process in alive]
        self._jobs = []
        self._begin_ranks()
        self._gpus = futures.Future()
        with contextlib.suppress(RuntimeError):  # the limit of processes is reached
            threading.Thread(target=self._record_gpus, args=(self._gpus,), daemon=True).start()

    @property
    def is_inspecting(self) -> bool:
        """Whether `gather` has something to wait for."""
        return self._number is not None

    def gather(self) -> reports.Inspected | None:
        """Return the results, once the evidence files are written; None while a rank's result is missing."""
        number = self._number
        if number is None:
            return None
        past_s = time.monotonic() - self._began_s
        self._begin_ranks()
        for job in self._jobs:
            if job.stacks is None:
                self._start_thread(job, past_s > STACKS_S_MAX)
        missing = self._waiting or any(job.result is None for job in self._jobs)
        if missing and past_s <= INSPECTION_S_MAX:
            return None
        self._number = None
        results = [job.result or _describe_by_stacks(job) for job in self._jobs]
        results += [_describe_busy(rank.process) for rank in self._waiting]
        return reports.Inspected(self.ranks.attempt, number, tuple(sorted(results, key=lambda result: result.rank)))

    def close(self) -> None:
        """Close the connections."""
        self._number, self._waiting, self._jobs = None, [], []
        for rank in self._watched.values():
            rank.client.close()

    @property
    def folder(self) -> Path:
        """The folder of the evidence files."""
        return self.ranks.job.evidence(self.ranks.attempt)

    @property
    def world_size(self) -> int:
        """The number of ranks of the attempt on all nodes; 0 where the environment does not say it."""
        text = self.env.get("WORLD_SIZE", "")
        return int(text) if text.isdigit() else 0

    def _begin_rank(self, rank: _WatchedRank, tree: Mapping[int, list[int]]) -> _RankJob:
        pids = python_stacks.rank_pids(rank.process.pid, tree)
        previous = rank.previous
        main_pid, tid = (previous.sample.pid, previous.sample.tid) if previous is not None else (pids[0], 0)
        # Measured before any request: what the answers cost is not the rank's own doing.
        before = sample.measure(tuple(dict.fromkeys((main_pid, *pids))), tid)
        last = rank.process.counter.read()
        stacks = python_stacks.request_stacks(pids, rank.process.folder, int(STACK_SIGNAL), (last.pid, last.tid))
        query = rank.client.start_query(last.pid or (previous.sample.pid if previous is not None else 0))
        return _RankJob(rank, before, stacks, query)

    def _begin_ranks(self) -> None:
        """Begin all ranks that are free: one that the previous inspection is still busy with has to wait."""
        free = [rank for rank in self._waiting if not rank.is_busy]
        self._waiting = [rank for rank in self._waiting if rank not in free]
        if free:
            tree = procfs.children()
            self._jobs += [self._begin_rank(rank, tree) for rank in free]

    def _start_thread(self, job: _RankJob, is_due: bool) -> None:
        """Start a rank's thread as soon as its stacks have arrived."""
        stacks = python_stacks.poll_stacks(job.pending_stacks)
        if stacks is None and is_due:
            stacks = python_stacks.collect_stacks(job.pending_stacks)
        if stacks is None:
            return
        until_s = self._began_s + INSPECTION_S_MAX - 2 * POLL_S
        thread = threading.Thread(target=self._inspect, args=(job, stacks, until_s), daemon=True)
        with contextlib.suppress(RuntimeError):  # the limit of processes is reached: it is tried again
            thread.start()
            job.stacks, job.rank.thread = stacks, thread

    def _inspect(self, job: _RankJob, stacks: list[python_stacks.RankStack], until_s: float) -> None:
        """Inspect one rank, in a thread of its own."""
        rank = job.rank
        if not stacks:
            job.result = _gone_inspection(rank.process.rank)
            return
        last = rank.process.counter.read()
        port = self.env.get("MASTER_PORT", "")
        now = sample.sample_rank(rank.process.rank, stacks, job.before, (last.pid, last.tid), port)
        record = _await_result(job.flight_query, until_s)
        threads = record.threads if record is not None and record.threads_pid == now.pid else ""
        now = sample.add_threads(now, threads)
        context = self._build_context(job, now, record)
        if now.uses_gpu:
            context = self._add_gpu_use(context, now.pid, until_s)
        result, rank.previous = classify.classify(now, context, rank.previous)
        with contextlib.suppress(OSError):  # a full disk costs the evidence files, not their summary
            text = _evidence_text(result, stacks, threads)
            self._append(f"{rank_name(result.rank)}-stacks.txt", text.encode(errors="replace"))
        job.result = result

    def _build_context(
        self, job: _RankJob, now: sample.HangSample, record: flight_recorder.FlightRecord | None
    ) -> SampleContext:
        counter = job.rank.process.counter
        groups = counter.groups()
        raised = failure.read_raised(job.rank.process.folder, now.pid)
        is_exiting = counter.exiting_pid() in (now.pid, job.rank.process.pid)
        keys, counts = tuple(group.key for group in groups), counter.history()
        if record is None:
            reason = f"torch's flight recorder took longer than {INSPECTION_S_MAX:g} s"
            return SampleContext(
                is_exiting, groups=keys, collective_counts=counts, unavailable=(reason,), exception=raised
            )
        with contextlib.suppress(OSError):
            if record.trace:
                self._append_trace(job.rank, record.trace)
        last = {entry.group: entry for entry in record.entries if not entry.is_p2p}
        return SampleContext(
            is_exiting=is_exiting,
            gil_held=record.gil_held if record.threads_pid == now.pid else None,
            exception=raised or (record.exception if record.threads_pid == now.pid else None),
            collectives=record.collectives(groups, self.world_size, time.time_ns()),
            has_pending_collectives=any(not entry.done for entry in last.values()),
            groups=keys,
            collective_counts=counts,
            groups_with_p2p=flight_recorder.find_groups_with_p2p(counter.step_ends(RING_STEPS), groups, record.entries),
            unavailable=(record.unavailable,) if record.unavailable else (),
        )

    def _add_gpu_use(self, context: SampleContext, pid: int, until_s: float) -> SampleContext:
        use = _await_result(self._gpus, until_s)
        share, reason = use.process_share(pid) if use else (None, f"nvidia-smi took longer than {INSPECTION_S_MAX:g} s")
        unavailable = (*context.unavailable, reason) if reason else context.unavailable
        return dataclasses.replace(context, gpu_use=share, unavailable=unavailable)

    def _append(self, name: str, content: bytes) -> None:
        """Add to an evidence file, while it has room. Raises OSError."""
        make_subfolders(self.folder.parents[1], self.folder)
        with ownership.open_for_append(self.folder / name) as file:
            if file.tell() < EVIDENCE_BYTES_MAX:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    def _append_trace(self, rank: _WatchedRank, trace: bytes) -> None:
        """Add torch's trace to the rank's evidence file of traces, or that it is unchanged."""
        digest = hashlib.sha256(trace).digest()
        is_same, rank.trace_digest = digest == rank.trace_digest, digest
        content = b'"unchanged": true' if is_same else b'"trace": ' + trace.replace(b"\n", b" ")
        looked_at = time.strftime("%Y-%m-%dT%H:%M:%S%z").encode()
        name = f"{rank_name(rank.process.rank)}-flight.jsonl"
        self._append(name, b'{"looked_at": "%b", %b}\n' % (looked_at, content))

    def _record_gpus(self, query: futures.Future[gpu_use.GpuUse]) -> None:
        use = gpu_use.read_gpu_use()
        query.set_result(use)
        if use.text:
            text = f"{time.strftime('%H:%M:%S')}\n{use.text}\n"
            with contextlib.suppress(OSError):
                self._append(f"node-{self.ranks.node}-gpus.txt", text.encode(errors="replace"))


def _await_result(answer: futures.Future[T], until_s: float) -> T | None:
    """Return an answer that comes in time."""
    with contextlib.suppress(futures.TimeoutError):
        return answer.result(max(0.0, until_s - time.monotonic()))
    return None


def _evidence_text(result: observations.RankInspection, stacks: list[python_stacks.RankStack], threads: str) -> str:
    place = f", {result.where}" if result.where else ""
    head = f"{time.strftime('%H:%M:%S')} {result.activity.text}, still for {result.still_s:g} s: {result.why}{place}\n"
    reasons = "".join(f"lacking: {reason}\n" for reason in result.unavailable)
    bodies = (
        f"pid {stack.pid}  state {stack.state}  sleeps in {stack.wchan or 'nothing'}\n{_format_dump(stack.pid, stack.text)}"
        for stack in stacks
    )
    others = (
        f"\nall Python threads of pid {result.pid}, by torch\n{_format_dump(result.pid, threads)}" if threads else ""
    )
    return head + reasons + "\n" + "\n".join(bodies) + others + "\n"


def _format_dump(pid: int, text: str) -> str:
    """Return a dump as a traceback; a text without a stack as it is."""
    threads, began_s = (
        [thread for thread in stack_dump.parse_dump(text) if thread.frames],
        sample.start_time_s(pid),
    )
    return stack_dump.format_traceback(threads, lambda frame: sample.read_line(pid, frame, began_s)) or text


def _gone_inspection(rank: int) -> observations.RankInspection:
    return _unknown_inspection(rank, 0, "X", "gone")


def _describe_by_stacks(job: _RankJob) -> observations.RankInspection:
    """Describe a rank that could not be inspected in time by its stacks alone."""
    process = job.rank.process
    stacks = job.stacks or python_stacks.collect_stacks(job.pending_stacks)
    if not stacks:
        return _gone_inspection(process.rank)
    first = stacks[0]
    main = stack_dump.dumped_stack(first.text)
    frames = main.frames if main is not None else ()
    return _unknown_inspection(process.rank, first.pid, first.state, _TIMED_OUT, frames, (_TIMED_OUT,))


def _describe_busy(process: RankProcess) -> observations.RankInspection:
    """Describe a rank that the previous inspection is still busy with."""
    stat = procfs.stat(process.pid)
    if stat is None:
        return _gone_inspection(process.rank)
    return _unknown_inspection(process.rank, process.pid, stat.state, _TIMED_OUT, (), (_TIMED_OUT,))


def _unknown_inspection(
    rank: int,
    pid: int,
    state: str,
    why: str,
    frames: tuple[Frame, ...] = (),
    unavailable: tuple[str, ...] = (),
) -> observations.RankInspection:
    """Return the inspection of a rank of which only its frames, if any, are known."""
    stack, inside = stack_frames.format_frames(frames)
    return observations.RankInspection(
        rank, pid, state, observations.Activity.UNKNOWN, 0.0, stack_frames.find_shown_frame(frames), why,
        stack_frames.find_phase(frames), stack, (), (), (), unavailable, inside=inside,
    )  # fmt: skip
