"""What does every rank of this node do? All are asked for their stacks at once, and looked at each in its own thread.

The agent's loop calls `begin`, then `gather` until that has an answer. A thread that hangs (a file system that does not
answer) costs its rank this look and the next ones, and nobody else anything. Pages are written before the answer: what
is read there is on the disk before anything is killed. They only grow, so that they can travel from hosts that do not
see the job folder (`wire/travel`): `rank-00002-stacks.txt`; `rank-00002-flight.jsonl`, a line for each look with torch's
own words; `node-NODE-gpus.txt`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agent.evidence import classify, sample
from orchestrator.agent.evidence.classify import PreviousSample, SampleContext
from orchestrator.agent.probes import gpu_use, python_stacks, stack_frames
from orchestrator.agent.rank import flight_recorder
from orchestrator.agent.rank.hook import RING_STEPS
from orchestrator.agent.rank.processes import STACK_SIGNAL, NodeRanks, RankProcess
from orchestrator.core import observations
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.layout import rank_name
from orchestrator.core.wire import messages as m

STACKS_S_MAX = 2.0
"""How long the ranks of a node may take to answer; whoever has not by then is described from /proc."""

LOOK_S_MAX = 4.0
"""How long a look may take in all: the stacks, then what torch says and who holds Python's lock."""

PAGE_BYTES_MAX = 16 << 20
"""How much is written to one page in one attempt; later looks are not written down."""

TRACE_SHARE = 4
"""A trace may use this part of the room that is left on its page: so there is always some for the last look."""

POLL_S = 0.01
_TOO_LONG = f"looking at it took longer than {LOOK_S_MAX:g} s: a file system that does not answer?"


@dataclass(slots=True)
class _Watched:
    """One rank, from look to look. `busy`: the thread that looks at it; `traced`: the digest of the last trace on its
    page."""

    process: RankProcess
    window: flight_recorder.WorkerServerClient
    earlier: PreviousSample | None = None
    busy: threading.Thread | None = None
    traced: bytes = b""

    @property
    def is_busy(self) -> bool:
        return self.busy is not None and self.busy.is_alive()


@dataclass(slots=True)
class _Inspection:
    """One rank in one look: what was asked of it, and once its stacks are there, the thread that looks."""

    watched: _Watched
    before: sample.ResourceUse
    asked: python_stacks.PendingStacks
    flight: flight_recorder.PendingQuery
    found: list[python_stacks.RankStack] | None = None
    look: observations.RankInspection | None = None


@dataclass(slots=True)
class _GpusAsked:
    """What nvidia-smi says in one look, once it has."""

    use: gpu_use.GpuUse | None = None


@dataclass(slots=True)
class Inspector:
    """What looks at the ranks of one attempt on this node; `env`: what one of them is told."""

    ranks: NodeRanks
    env: Mapping[str, str]
    _watched: dict[int, _Watched] = field(default_factory=dict)
    _unasked: list[_Watched] = field(default_factory=list)
    _asking: list[_Inspection] = field(default_factory=list)
    _gpus: _GpusAsked = field(default_factory=_GpusAsked)
    _look_number: int | None = None
    _began_s: float = 0.0

    def begin(self, look: int) -> None:
        """Ask all living ranks for their stacks; a look that is not yet through is given up."""
        self._look_number, self._began_s = look, time.monotonic()
        alive = self.ranks.alive
        for process in alive:
            if process.rank not in self._watched:
                self._watched[process.rank] = _Watched(
                    process, flight_recorder.WorkerServerClient(process.folder)
                )
        self._unasked = [self._watched[process.rank] for process in alive]
        self._asking = []
        self._ask_all()
        self._gpus = _GpusAsked()
        threading.Thread(target=self._note_gpus, args=(self._gpus,), daemon=True).start()

    @property
    def is_looking(self) -> bool:
        """Tell whether `gather` has something to wait for."""
        return self._look_number is not None

    def gather(self) -> m.Inspected | None:
        """Return what was found, once the pages are written; None while some of it is still to come, or unasked."""
        look = self._look_number
        if look is None:
            return None
        past_s = time.monotonic() - self._began_s
        self._ask_all()
        for asking in self._asking:
            if asking.found is None:
                self._take_stacks(asking, past_s > STACKS_S_MAX)
        missing = self._unasked or any(asking.look is None for asking in self._asking)
        if missing and past_s <= LOOK_S_MAX:
            return None
        self._look_number = None
        asked = tuple(asking.look or _plain(asking) for asking in self._asking)
        unasked = tuple(_unanswered(watched.process) for watched in self._unasked)
        looks = sorted(asked + unasked, key=lambda one: one.rank)
        return m.Inspected(self.ranks.attempt, look, tuple(looks))

    def close(self) -> None:
        """Give back the connections."""
        self._look_number, self._unasked, self._asking = None, [], []
        for watched in self._watched.values():
            watched.window.close()

    @property
    def folder(self) -> Path:
        """Where the pages are."""
        return self.ranks.job.evidence(self.ranks.attempt)

    @property
    def world_size(self) -> int:
        """How many ranks the attempt has on all nodes; 0 where its ranks are not told."""
        words = self.env.get("WORLD_SIZE", "")
        return int(words) if words.isdigit() else 0

    def _ask(self, watched: _Watched, tree: Mapping[int, list[int]]) -> _Inspection:
        pids = python_stacks.processes(watched.process.pid, tree)
        earlier = watched.earlier
        own, tid = (earlier.sight.pid, earlier.sight.tid) if earlier is not None else (pids[0], 0)
        # Measured before anything is asked: what the answers cost is not the rank's own doing.
        before = sample.measure(tuple(dict.fromkeys((own, *pids))), tid)
        beat = watched.process.beats.read()
        asked = python_stacks.ask_these(pids, watched.process.folder, int(STACK_SIGNAL), (beat.pid, beat.tid))
        return _Inspection(
            watched,
            before,
            asked,
            watched.window.ask(beat.pid or (earlier.sight.pid if earlier is not None else 0)),
        )

    def _ask_all(self) -> None:
        """Ask all that can be asked: one that the look before is still busy with has to wait."""
        free = [watched for watched in self._unasked if not watched.is_busy]
        self._unasked = [watched for watched in self._unasked if watched not in free]
        if free:
            tree = procfs.children()
            self._asking += [self._ask(watched, tree) for watched in free]

    def _take_stacks(self, asking: _Inspection, is_due: bool) -> None:
        """Begin to look at a rank as soon as its stacks are there."""
        found = python_stacks.answer(asking.asked)
        if found is None and is_due:
            found = python_stacks.last_answer(asking.asked)
        if found is None:
            return
        asking.found = found
        until_s = self._began_s + LOOK_S_MAX - 2 * POLL_S
        thread = threading.Thread(target=self._look, args=(asking, found, until_s), daemon=True)
        asking.watched.busy = thread
        thread.start()

    def _look(self, asking: _Inspection, found: list[python_stacks.RankStack], until_s: float) -> None:
        """Look at one rank, in a thread of its own."""
        watched = asking.watched
        if not found:
            asking.look = _gone(watched.process.rank)
            return
        beat = watched.process.beats.read()
        seen = sample.take(watched.process.rank, found, asking.before, (beat.pid, beat.tid))
        while (told := asking.flight.answer()) is None and time.monotonic() < until_s:
            time.sleep(POLL_S)
        threads = told.threads if told is not None and told.threads_of == seen.pid else ""
        seen = sample.with_threads(seen, threads)
        word = self._word(asking, seen, told)
        if seen.gpu:
            word = self._with_gpu(word, seen.pid, until_s)
        look, watched.earlier = classify.classify(seen, word, watched.earlier)
        with contextlib.suppress(OSError):  # a full disk costs the pages, not their summary
            self._append(asking, _page_of(look, found, threads))
        asking.look = look

    def _word(
        self, asking: _Inspection, seen: sample.RankSample, told: flight_recorder.FlightRecord | None
    ) -> SampleContext:
        """Return what the rank's beat file and torch say of it."""
        beats = asking.watched.process.beats
        groups = beats.groups()
        left = beats.left_pid() in (seen.pid, asking.watched.process.pid)
        keys, marks = tuple(group.key for group in groups), beats.history()
        if told is None:
            lack = f"torch's flight recorder took longer than {LOOK_S_MAX:g} s"
            return SampleContext(left=left, groups=keys, marks=marks, lacks=(lack,))
        with contextlib.suppress(OSError):
            if told.trace:
                self._append_trace(asking, told.trace)
        last = {entry.group: entry for entry in told.entries if not entry.is_p2p}
        return SampleContext(
            left=left,
            gil_held=told.gil_held if told.threads_of == seen.pid else None,
            collectives=told.collectives(groups, self.world_size, time.time_ns()),
            on_device=any(not entry.done for entry in last.values()),
            groups=keys,
            marks=marks,
            mixed=flight_recorder.mixed(beats.step_ends(RING_STEPS), groups, told.entries),
            lacks=(told.lack,) if told.lack else (),
        )

    def _with_gpu(self, word: SampleContext, pid: int, until_s: float) -> SampleContext:
        """Return the word of a rank that uses a GPU with how busy that is."""
        gpus = self._gpus
        while gpus.use is None and time.monotonic() < until_s:
            time.sleep(POLL_S)
        late = None, f"nvidia-smi took longer than {LOOK_S_MAX:g} s"
        share, lack = gpus.use.share(pid) if gpus.use is not None else late
        return dataclasses.replace(word, gpu_use=share, lacks=(*word.lacks, lack) if lack else word.lacks)

    def _page(self, asking: _Inspection, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{rank_name(asking.watched.process.rank)}-{name}"

    def _append(self, asking: _Inspection, text: str) -> None:
        """Add to the rank's page of stacks."""
        with self._page(asking, "stacks.txt").open("ab") as file:
            if file.tell() < PAGE_BYTES_MAX:
                file.write(text.encode(errors="replace"))
                file.flush()
                os.fsync(file.fileno())

    def _append_trace(self, asking: _Inspection, trace: bytes) -> None:
        """Add torch's own words to the rank's page of them, or that they are what they were."""
        digest = hashlib.sha256(trace).digest()
        with self._page(asking, "flight.jsonl").open("ab") as file:
            left_bytes = PAGE_BYTES_MAX - file.tell()
            if left_bytes <= 0:
                return
            if digest == asking.watched.traced:
                words = b'"unchanged": true'
            else:
                words = b'"trace": ' + _shortened(trace, left_bytes // TRACE_SHARE).replace(b"\n", b" ")
            looked_at = time.strftime("%Y-%m-%dT%H:%M:%S%z").encode()
            file.write(b'{"looked_at": "%b", %b}\n' % (looked_at, words))
        asking.watched.traced = digest

    def _note_gpus(self, asked: _GpusAsked) -> None:
        asked.use = gpu_use.gpu_use()
        with contextlib.suppress(OSError):
            if asked.use.page:
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / f"node-{self.ranks.node}-gpus.txt").open("ab") as file:
                    if file.tell() < PAGE_BYTES_MAX:
                        file.write(
                            f"{time.strftime('%H:%M:%S')}\n{asked.use.page}\n".encode(errors="replace")
                        )


def _shortened(trace: bytes, bytes_max: int) -> bytes:
    """Return a trace with only its newest entries, where it would use much more than `bytes_max`."""
    if len(trace) <= bytes_max:
        return trace
    known = json.loads(trace)
    entries = known.get("entries", [])
    left_out = len(entries) - len(entries) * bytes_max // len(trace)
    return json.dumps({**known, "entries": entries[left_out:], "entries_left_out": left_out}).encode()


def _page_of(look: observations.RankInspection, found: list[python_stacks.RankStack], threads: str) -> str:
    place = f", {look.where}" if look.where else ""
    head = (
        f"{time.strftime('%H:%M:%S')} {look.activity.text}, still for {look.still_s:g} s: {look.why}{place}\n"
    )
    lacks = "".join(f"lacking: {lack}\n" for lack in look.unavailable)
    bodies = (
        f"pid {one.pid}  state {one.state}  sleeps in {one.wchan or 'nothing'}\n{one.text}" for one in found
    )
    beside = f"\nall Python threads of pid {look.pid}, by torch\n{threads}" if threads else ""
    return head + lacks + "\n" + "\n".join(bodies) + beside + "\n"


def _gone(rank: int) -> observations.RankInspection:
    return observations.RankInspection(
        rank, 0, "X", observations.Activity.UNKNOWN, 0.0, "", "gone", False, None, "", (), (), (), (), ()
    )


def _plain(asking: _Inspection) -> observations.RankInspection:
    """Describe a rank that could not be looked at in time by its stacks alone."""
    process = asking.watched.process
    found = asking.found or python_stacks.last_answer(asking.asked)
    if not found:
        return _gone(process.rank)
    first = found[0]
    main = stack_frames.own_stack(first.text)
    stack = main.frames if main is not None else ()
    return observations.RankInspection(
        process.rank, first.pid, first.state, observations.Activity.UNKNOWN, 0.0, stack_frames.place(stack), _TOO_LONG, False, None,
        stack_frames.phase(stack), classify.texts(stack), (), (), (), (_TOO_LONG,),
    )  # fmt: skip


def _unanswered(process: RankProcess) -> observations.RankInspection:
    """Describe a rank with which the look before is not yet through."""
    stat = procfs.stat(process.pid)
    if stat is None:
        return _gone(process.rank)
    return observations.RankInspection(
        process.rank, process.pid, stat.state, observations.Activity.UNKNOWN, 0.0, "", _TOO_LONG, False, None, "", (), (), (), (),
        (_TOO_LONG,),
    )  # fmt: skip
