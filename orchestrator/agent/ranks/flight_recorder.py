"""Flight recorder of a rank, from torch's worker server: the collectives entered, and whether Python code still runs.

The hook starts the worker server on a unix socket in the rank's folder, and torch answers there from its flight
recorder even while Python code is blocked. Queries go one at a time, each with a limit, and never in the agent's loop:
`WorkerServerClient.start_query` begins one.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import json
import math
import os
import select
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.ranks import failure
from orchestrator.agent.ranks.hook.layout import PENDING_HANDLER, SOCKET_FILE
from orchestrator.agent.ranks.step_counter import ProcessGroup, StepCounter, StepEnd
from orchestrator.core import observations
from orchestrator.core.host import procfs

CALL_S_MAX = 1.0
ANSWER_BYTES_MAX = 4 << 20  # 2,000 entries, which is what torch keeps, have 1 MB
PROCESSES_MAX = 8  # processes of one rank that have torch

EARLIER_MAX = 3
"""How many collectives of a group are reported before its last one."""

COMPUTE_STEPS_MAX = 64
COMPUTE_STEPS_MIN = 5
QUERY_S = 10.0
QUERY_S_MAX = 300.0
SETTLED_STEPS = 3
"""For how many steps a count must be ahead of the trace."""

QUERY_COST_FACTOR = 500
"""The pause after a query for a rank's own work, as a multiple of the time that the query took (some 10 ms)."""

_TRACE, _PYTHON = "fr_trace_json", "dump_traceback"
_TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16",
    "Char": "int8", "Byte": "uint8",
}  # fmt: skip
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One collective that the rank has entered."""

    group: str
    label: str
    number: int
    what: str
    shape: str
    # Wall clock of the rank's host.
    created_ns: int
    # It has completed.
    done: bool
    is_p2p: bool
    # Its backend lists point-to-point operations, too.
    lists_p2p: bool
    # The time limit of the collective; None where torch does not report it.
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """torch's answer about one rank."""

    pid: int = 0
    entries: tuple[FlightEntry, ...] = ()
    # No Python code can run in the process: native code has held the GIL for `CALL_S_MAX`. None: not asked, not known.
    gil_held: bool | None = None
    # The stacks of all Python threads as `faulthandler` writes them under the GIL; the thread of torch's that answers
    # is among them as the `Current thread`.
    threads: str = ""
    # The exception that its main thread is handling, without a traceback.
    exception: observations.Failure | None = None
    # The process of `threads`, `gil_held` and `raised`.
    threads_pid: int = 0
    # The trace as torch has sent it.
    trace: bytes = b""
    # Why the answer is not complete; the rest is then empty.
    unavailable: str = ""
    took_s: float = 0.0

    def collectives(
        self, groups: Sequence[ProcessGroup], world_size: int, now_ns: int
    ) -> tuple[observations.Collective, ...]:
        """Return the last collective entered in each group, the latest first.

        A group's ranks are known after the first step; before, only those of the default group.
        """
        members = {group.name: group.ranks for group in groups}
        entries_by_group: dict[str, list[FlightEntry]] = {}
        for entry in self.entries:
            if not entry.is_p2p:
                entries_by_group.setdefault(entry.group, []).append(entry)
        collectives = []
        for *before, last in sorted(
            entries_by_group.values(), key=lambda entries: entries[-1].created_ns, reverse=True
        ):
            all_ranks = tuple(range(world_size)) if last.label == "default group" else ()
            ranks = members.get(last.group, all_ranks)
            ago_s = max(0.0, (now_ns - last.created_ns) / 1e9)
            earlier = tuple(
                observations.EnteredCollective(entry.number, entry.what, entry.shape) for entry in before[-EARLIER_MAX:]
            )
            collective = observations.Collective(
                last.group, last.label, ranks, last.number, last.what, last.shape, ago_s, last.done, earlier, last.limit_s
            )  # fmt: skip
            collectives.append(collective)
        return tuple(collectives)


class WorkerServerClient:
    """Client of the worker servers in one rank: one server in each of its processes that has torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Connections of processes that have not yet answered the request for their Python threads.
        self._unanswered: dict[int, socket.socket] = {}
        self._lock = threading.Lock()  # one query at a time: torch has two threads to answer

    def start_query(self, threads_pid: int | None = None) -> Future[FlightRecord]:
        """Start a query in a thread of its own that ends by itself. `threads_pid`: the process to ask also for the stacks of all
        Python threads, and so whether Python code runs; 0 for the process with the longest trace."""
        answer: Future[FlightRecord] = Future()

        def run() -> None:
            try:
                answer.set_result(self.query(threads_pid))
            except Exception as err:  # no other code sees an error of this thread
                reason = f"torch's flight recorder: {type(err).__name__}: {err}"
                answer.set_result(FlightRecord(unavailable=reason[:300]))

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError as err:  # the limit of processes is reached, by the ranks' own workers perhaps
            answer.set_result(FlightRecord(unavailable=f"torch's flight recorder: {err}"))
        return answer

    def query(self, threads_pid: int | None = None) -> FlightRecord:
        """Query and wait for the answer, a few `CALL_S_MAX` at most: that of the process with the longest trace."""
        with self._lock:
            pids = self._pids()
            if not pids:
                reason = "torch's flight recorder: no process of the rank has torch.distributed (yet)"
                return FlightRecord(unavailable=reason)
            records = [self._query_process(pid) for pid in pids]
            best = max(records, key=lambda record: len(record.entries))
            if threads_pid is None:
                return best
            held, threads = self._query_threads(threads_pid or best.pid)
            raised = self._query_exception(threads_pid or best.pid) if held is False else None
            return dataclasses.replace(
                best, gil_held=held, threads=threads, exception=raised, threads_pid=threads_pid or best.pid
            )

    def close(self) -> None:
        """Close the connections. Without the lock: the agent's loop does not wait for a query that is under way."""
        for pid in list(self._unanswered):
            connection = self._unanswered.pop(pid, None)
            if connection is not None:
                connection.close()

    def _pids(self) -> list[int]:
        head, _, tail = SOCKET_FILE.partition("{}")
        names = (path.name[len(head) : -len(tail)] for path in self._folder.glob(SOCKET_FILE.format("*")))
        pids = sorted(int(name) for name in names if name.isdigit())
        return [pid for pid in pids if procfs.stat(pid) is not None][:PROCESSES_MAX]

    def _query_process(self, pid: int) -> FlightRecord:
        began_s = time.monotonic()
        until_s = began_s + CALL_S_MAX
        try:
            trace = self._call(pid, _TRACE, until_s)
            entries = _entries(trace)
            return FlightRecord(pid, entries, trace=trace, took_s=time.monotonic() - began_s)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as err:
            reason = f"torch's flight recorder of pid {pid}: {str(err) or type(err).__name__}"
            return FlightRecord(pid, unavailable=reason[:300], took_s=CALL_S_MAX)

    def _query_threads(self, pid: int) -> tuple[bool | None, str]:
        """Request the stacks of all Python threads; return first whether native code keeps Python from running, None
        when torch does not answer at all. A request without an answer stays open and is not repeated in the
        meantime."""
        connection = self._unanswered.pop(pid, None)
        if connection is not None and select.select([connection], [], [], 0)[0]:
            connection.close()  # its answer is of an earlier query
            connection = None
        try:
            connection = connection or _send_request(self._folder, pid, _PYTHON)
        except OSError:
            return None, ""
        if select.select([connection], [], [], CALL_S_MAX)[0]:
            try:
                with connection:
                    body = _read_answer(connection, _PYTHON, time.monotonic() + CALL_S_MAX)
            except (OSError, ValueError):
                return False, ""
            return False, body.decode(errors="replace")
        self._unanswered[pid] = connection
        with contextlib.suppress(OSError, ValueError):
            self._call(pid, "ping", time.monotonic() + CALL_S_MAX)
            return True, ""
        return None, ""

    def _query_exception(self, pid: int) -> observations.Failure | None:
        """Return the exception that the main thread of a process is handling; None as well where torch has no handlers in
        Python."""
        try:
            exception = failure.parse_error(self._call(pid, PENDING_HANDLER, time.monotonic() + CALL_S_MAX))
        except (OSError, ValueError):
            return None
        return failure.summarize(exception) if exception is not None else None

    def _call(self, pid: int, handler: str, until_s: float) -> bytes:
        """Return the body of an answer. Raises OSError or ValueError, whose text says what is wrong."""
        with _send_request(self._folder, pid, handler) as client:
            return _read_answer(client, handler, until_s)


class LocalComputeTime:
    """Local compute time of a rank in a step, read from its trace periodically.

    From the end of a step until the rank enters the next collective, no rank waits for another: this covers loading
    the batch, the forward pass, and the backward pass up to the first bucket under DDP; under FSDP, which gathers
    before it computes, only loading the batch. What comes after depends on other ranks, too. So a rank that waits
    never looks slow, and a slow one looks slow in that part. Point-to-point operations (pipelines) are waits
    that no trace shows: a step with such operations does not count.
    """

    def __init__(self, client: WorkerServerClient) -> None:
        self._client = client
        self._pending: Future[FlightRecord] | None = None
        self._due_s = 0.0
        self._compute_s: float | None = None

    def poll(self, counter: StepCounter, now_s: float) -> float | None:
        """Return the latest result; start the next query when it is due."""
        if self._pending is None and now_s >= self._due_s:
            self._pending = self._client.start_query()
        if self._pending is not None and self._pending.done():
            record, self._pending = self._pending.result(), None
            self._due_s = now_s + min(max(QUERY_S, QUERY_COST_FACTOR * record.took_s), QUERY_S_MAX)
            if not record.unavailable:
                self._compute_s = local_compute_s(counter.step_ends(COMPUTE_STEPS_MAX + 1), record.entries)
        return self._compute_s


def local_compute_s(ends: Sequence[StepEnd], entries: Sequence[FlightEntry]) -> float | None:
    """Return the median time from a step's end to the next collective, over the last 64 steps; None below 5 of them."""
    begun = sorted(entries, key=lambda entry: entry.created_ns)
    times_ns = [entry.created_ns for entry in begun]
    durations_s = []
    for before, end in itertools.pairwise(ends):
        first = bisect.bisect_left(times_ns, before.time_ns)
        inside = begun[first : bisect.bisect_right(times_ns, end.time_ns)]
        # A trace that begins in the middle of a step does not show which collective was the step's first.
        if inside and first > 0 and not _has_p2p(before, end, inside):
            durations_s.append((inside[0].created_ns - before.time_ns) / 1e9)
    return statistics.median(durations_s) if len(durations_s) >= COMPUTE_STEPS_MIN else None


def _has_p2p(before: StepEnd, end: StepEnd, inside: Sequence[FlightEntry]) -> bool:
    if any(entry.is_p2p for entry in inside):
        return True
    if all(entry.lists_p2p for entry in inside):
        return False
    # gloo counts point-to-point operations and does not list them.
    return before.total is None or end.total is None or end.total - before.total > len(inside)


def find_groups_with_p2p(
    ends: Sequence[StepEnd], groups: Sequence[ProcessGroup], entries: Sequence[FlightEntry]
) -> tuple[str, ...]:
    """Return the keys of the groups with point-to-point operations since the trace began: gloo counts these and does
    not list them, so that the rank's count runs ahead of the trace's numbers."""
    keys = []
    for index, group in enumerate(groups):
        entry_numbers = sorted(
            (entry.created_ns, entry.number)
            for entry in entries
            if entry.group == group.name and not (entry.is_p2p or entry.lists_p2p)
        )
        ahead = [
            end.counts[index] - entry_numbers[at - 1][1]
            for end in ends  # the trace does not cover ends after its last entry
            if end.counts is not None
            and 0 < (at := bisect.bisect_right(entry_numbers, (end.time_ns, math.inf))) < len(entry_numbers)
        ]
        # A collective that another thread has just begun is counted, and listed a moment later.
        if ahead and min(ahead[-SETTLED_STEPS:]) > min(ahead):
            keys.append(group.key)
    return tuple(keys)


def _send_request(folder: Path, pid: int, handler: str) -> socket.socket:
    """Send a request and return the connection that the answer will come on. Raises OSError.

    A socket's path may have 107 bytes at most and the folder lies deep, so the path names the folder by its descriptor.
    """
    client = socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(CALL_S_MAX)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            client.connect(f"/proc/self/fd/{fd}/{SOCKET_FILE.format(pid)}")
        finally:
            os.close(fd)
        head = f"POST /handler/{handler} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        client.sendall(head.encode())
        return client
    except OSError:
        client.close()
        raise


def _read_answer(client: socket.socket, handler: str, until_s: float) -> bytes:
    """Return the body of an answer. Raises OSError or ValueError."""
    head, _, body = b"".join(_read_blocks(client, until_s)).partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise ValueError(f"torch does not offer {handler} here")
    return body


def _read_blocks(client: socket.socket, until_s: float) -> Iterator[bytes]:
    """Yield an answer until its end. Raises OSError when it does not come in time, ValueError when it is too long."""
    size_bytes = 0
    while block := _read_block(client, until_s - time.monotonic()):
        size_bytes += len(block)
        if size_bytes > ANSWER_BYTES_MAX:
            raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX >> 20} MiB")
        yield block


def _read_block(client: socket.socket, limit_s: float) -> bytes:
    if limit_s <= 0:
        raise TimeoutError(f"no answer within {CALL_S_MAX:g} s")
    client.settimeout(limit_s)
    try:
        return client.recv(_BLOCK_BYTES)
    except TimeoutError as err:
        raise TimeoutError(f"no answer within {CALL_S_MAX:g} s") from err


def _entries(trace: bytes) -> tuple[FlightEntry, ...]:
    """Return the entries of a trace, oldest first. Raises ValueError, KeyError, TypeError or IndexError."""
    return tuple(_entry(entry) for entry in json.loads(trace).get("entries", ()))


def _entry(entry: Mapping[str, Any]) -> FlightEntry:
    backend, _, what = str(entry["profiling_name"]).rpartition(":")
    name, purpose = map(str, entry["process_group"])
    sizes, types = entry["input_sizes"], entry["input_dtypes"]
    limit_ms = entry.get("timeout_ms")
    label = {"default_pg": "default group", "undefined": "", "": ""}.get(purpose, purpose) or f"group {name}"
    return FlightEntry(
        group=name, label=label, number=int(entry["collective_seq_id"]), what=what, shape=_shape(sizes, types),
        created_ns=int(entry["time_created_ns"]), done=entry.get("retired") is True or entry.get("state") == "completed",
        is_p2p=entry.get("is_p2p") is True, lists_p2p=backend != "gloo",
        limit_s=int(limit_ms) / 1000 if limit_ms else None,
    )  # fmt: skip


def _shape(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> str:
    """Return tensors as `float32[4,1]`: the first, and how many more there are."""
    if not sizes or not types:
        return ""
    first = f"{_TYPES.get(types[0], types[0].lower())}[{','.join(map(str, sizes[0]))}]"
    return first if len(sizes) == 1 else f"{first} and {len(sizes) - 1} more"
