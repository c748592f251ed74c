"""Which collectives has a rank entered, and does Python still run in it? Asked of torch's own window in the rank.

The hook opens the window (torch's worker server on a unix socket in the rank's folder), and torch answers there from its
flight recorder even while Python stands still. One request at a time, each with its limit, and never in the agent's loop:
`Window.ask` begins, `Asked.answer` is called until it is there.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.rank.hook import SOCKET_FILE
from orchestrator.agent.rank.step_counter import Group, StepCounter, StepEnd
from orchestrator.core import observations
from orchestrator.core.host import procfs

CALL_S_MAX = 1.0
ANSWER_BYTES_MAX = 4 << 20  # 2,000 entries, which is what torch keeps, have 1 MB
WINDOWS_MAX = 8  # processes of one rank that have torch
WAITS_MAX = 16

EARLIER_MAX = 3
"""So many collectives of a group are told of before its last one."""

OWN_STEPS_MAX = 64
OWN_STEPS_MIN = 5
OWN_EVERY_S = 10.0
OWN_EVERY_S_MAX = 300.0
SETTLED_STEPS = 3
"""For so many steps a count must be ahead of the trace."""

OWN_COST = 500
"""Asking for a rank's trace and reading it takes some 10 ms; it may take no more than this part of the time."""

_TRACE, _COUNTERS, _PYTHON = "fr_trace_json", "wait_counter_values", "dump_traceback"
_COUNTER_PREFIX = "pytorch.wait_counter."
_TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16",
    "Char": "int8", "Byte": "uint8",
}  # fmt: skip
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective, as the rank has entered it; `created_ns` is its host's wall clock.

    `done`: it was carried out. `lists_p2p`: its backend notes what goes from one rank to one other, too.
    """

    group: str
    label: str
    number: int
    what: str
    shape: str
    created_ns: int
    done: bool
    is_p2p: bool
    lists_p2p: bool


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """What torch has told of one rank. `lack`: why it has not told all; the rest is then empty.

    `waits`: what it waits for by its own counters, such as `TCPStore wait`. `gil_held`: no Python code can run in it,
    since native code has held the lock for `CALL_S_MAX`; None: not asked, or not known. `threads`: the stacks of all its
    Python threads, as `faulthandler` writes them under the GIL, that of torch's own that answers among them as the
    `Current thread`; both are of the process `threads_of`. `trace`: torch's own words.
    """

    pid: int = 0
    entries: tuple[Entry, ...] = ()
    waits: tuple[str, ...] = ()
    gil_held: bool | None = None
    threads: str = ""
    threads_of: int = 0
    trace: bytes = b""
    lack: str = ""
    took_s: float = 0.0

    def collectives(
        self, groups: Sequence[Group], world_size: int, now_ns: int
    ) -> tuple[observations.Collective, ...]:
        """Return the last collective entered in each group, the latest first.

        A group's ranks are known once a step was made; before, only those of the default group.
        """
        members = {group.name: group.ranks for group in groups}
        own: dict[str, list[Entry]] = {}
        for entry in self.entries:
            if not entry.is_p2p:
                own.setdefault(entry.group, []).append(entry)
        found = []
        for *before, last in sorted(own.values(), key=lambda one: one[-1].created_ns, reverse=True):
            everybody = tuple(range(world_size)) if last.label == "default group" else ()
            ranks = members.get(last.group, everybody)
            ago_s = max(0.0, (now_ns - last.created_ns) / 1e9)
            earlier = tuple(
                observations.EnteredCollective(one.number, one.what, one.shape)
                for one in before[-EARLIER_MAX:]
            )
            one = observations.Collective(
                last.group, last.label, ranks, last.number, last.what, last.shape, ago_s, last.done, earlier
            )
            found.append(one)
        return tuple(found)


class PendingQuery:
    """A question on its way, in a thread of its own that ends by itself."""

    def __init__(self, window: WorkerServerClient, python_of: int | None) -> None:
        self._found: FlightRecord | None = None
        self._thread = threading.Thread(target=self._ask, args=(window, python_of), daemon=True)
        self._thread.start()

    def answer(self) -> FlightRecord | None:
        """Return what torch has told, None while it has not."""
        return self._found

    def _ask(self, window: WorkerServerClient, python_of: int | None) -> None:
        try:
            self._found = window.look(python_of)
        except Exception as err:  # of a thread that nobody waits for
            self._found = FlightRecord(lack=f"torch's flight recorder: {type(err).__name__}: {err}"[:300])


class WorkerServerClient:
    """One rank's window: what can be asked of the processes in it that have torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[
            int, socket.socket
        ] = {}  # who was asked for its Python threads, and has not told of them yet
        self._lock = threading.Lock()  # two looks must not ask at once: torch has two threads to answer

    def ask(self, python_of: int | None = None) -> PendingQuery:
        """Ask, and return at once. `python_of`: of this process also for the stacks of all Python threads, and so whether
        Python code runs; 0 for the one with the longest trace."""
        return PendingQuery(self, python_of)

    def look(self, python_of: int | None = None) -> FlightRecord:
        """Ask and wait for the answer, some `CALL_S_MAX` at most: of the process with the longest trace."""
        with self._lock:
            pids = self._pids()
            if not pids:
                return FlightRecord(
                    lack="torch's flight recorder: no process of the rank has torch.distributed (yet)"
                )
            flights = [self._look(pid) for pid in pids]
            best = max(flights, key=lambda flight: len(flight.entries))
            if python_of is None:
                return best
            held, threads = self._python(python_of or best.pid)
            return dataclasses.replace(best, gil_held=held, threads=threads, threads_of=python_of or best.pid)

    def close(self) -> None:
        """Give back the connections. Without the lock: the agent's loop does not wait for a look that is under way."""
        for pid in list(self._held):
            asked = self._held.pop(pid, None)
            if asked is not None:
                asked.close()

    def _pids(self) -> list[int]:
        head, _, tail = SOCKET_FILE.partition("{}")
        names = (path.name[len(head) : -len(tail)] for path in self._folder.glob(SOCKET_FILE.format("*")))
        pids = sorted(int(name) for name in names if name.isdigit())
        return [pid for pid in pids if procfs.stat(pid) is not None][:WINDOWS_MAX]

    def _look(self, pid: int) -> FlightRecord:
        began_s = time.monotonic()
        until_s = began_s + CALL_S_MAX
        try:
            trace = self._call(pid, _TRACE, until_s)
            waits = _waits(self._call(pid, _COUNTERS, until_s))
            entries = _entries(trace)
            return FlightRecord(pid, entries, waits, trace=trace, took_s=time.monotonic() - began_s)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as err:
            words = str(err) or type(err).__name__
            return FlightRecord(
                pid, lack=f"torch's flight recorder of pid {pid}: {words}"[:300], took_s=CALL_S_MAX
            )

    def _python(self, pid: int) -> tuple[bool | None, str]:
        """Ask for the stacks of all Python threads; return also whether native code keeps Python from running, None when
        torch does not answer at all. A question that was not answered stays open and is not asked again meanwhile."""
        asked = self._held.pop(pid, None)
        if asked is not None and select.select([asked], [], [], 0)[0]:
            asked.close()  # it tells of a time long past
            asked = None
        try:
            asked = asked or _sent(self._folder, pid, _PYTHON)
        except OSError:
            return None, ""
        if select.select([asked], [], [], CALL_S_MAX)[0]:
            try:
                with asked:
                    body = _answer(asked, _PYTHON, time.monotonic() + CALL_S_MAX)
            except (OSError, ValueError):
                return False, ""
            return False, body.decode(errors="replace")
        self._held[pid] = asked
        with contextlib.suppress(OSError, ValueError):
            self._call(pid, "ping", time.monotonic() + CALL_S_MAX)
            return True, ""
        return None, ""

    def _call(self, pid: int, handler: str, until_s: float) -> bytes:
        """Return the body of an answer. Raises OSError or ValueError, in words that say what is wrong."""
        with _sent(self._folder, pid, handler) as client:
            return _answer(client, handler, until_s)


class OwnWork:
    """How long a rank works by itself in a step, looked up now and then in its trace.

    From the end of a step until the rank enters the first collective after it, nobody waits for anybody: loading the
    batch, the forward pass, and the backward pass up to the first bucket under DDP; under FSDP, which gathers before
    it computes, loading the batch only. What comes after is other ranks' time as well. So a rank that waits never
    looks slow, and a slow one does as far as that part goes. What one rank sends to one other (pipelines) is waiting
    that no trace shows: a step with such traffic says nothing.
    """

    def __init__(self, window: WorkerServerClient) -> None:
        self._window = window
        self._asked: PendingQuery | None = None
        self._due_s = 0.0
        self._own_s: float | None = None

    def poll(self, beats: StepCounter, now_s: float) -> float | None:
        """Return what was found last; begin to look anew when that is due."""
        if self._asked is None and now_s >= self._due_s:
            self._asked = self._window.ask()
        flight = self._asked.answer() if self._asked is not None else None
        if flight is not None:
            self._asked = None
            self._due_s = now_s + min(max(OWN_EVERY_S, OWN_COST * flight.took_s), OWN_EVERY_S_MAX)
            if not flight.lack:
                self._own_s = own_s(beats.step_ends(OWN_STEPS_MAX + 1), flight.entries)
        return self._own_s


def own_s(ends: Sequence[StepEnd], entries: Sequence[Entry]) -> float | None:
    """Return the median time from a step's end to the next collective, of the last 64 steps; None below 5 of them."""
    begun = sorted(entries, key=lambda entry: entry.created_ns)
    times_ns = [entry.created_ns for entry in begun]
    found = []
    for before, end in itertools.pairwise(ends):
        first = bisect.bisect_left(times_ns, before.time_ns)
        inside = begun[first : bisect.bisect_right(times_ns, end.time_ns)]
        # A trace that begins in the middle of a step does not tell which of its collectives was the first.
        if inside and first > 0 and not _is_mixed(before, end, inside):
            found.append((inside[0].created_ns - before.time_ns) / 1e9)
    return statistics.median(found) if len(found) >= OWN_STEPS_MIN else None


def _is_mixed(before: StepEnd, end: StepEnd, inside: Sequence[Entry]) -> bool:
    """Tell whether in this step something may have gone from one rank to one other."""
    if any(entry.is_p2p for entry in inside):
        return True
    if all(entry.lists_p2p for entry in inside):
        return False
    # Such traffic counts with gloo, though it is not in the trace.
    return before.count is None or end.count is None or end.count - before.count > len(inside)


def mixed(ends: Sequence[StepEnd], groups: Sequence[Group], entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the keys of the groups in which something went from one rank to one other since the trace began: gloo counts
    it and does not list it, so that the rank's count runs ahead of the trace's numbers."""
    found = []
    for index, group in enumerate(groups):
        own = sorted(
            (entry.created_ns, entry.number)
            for entry in entries
            if entry.group == group.name and not (entry.is_p2p or entry.lists_p2p)
        )
        ahead = [
            end.counts[index] - own[at - 1][1]
            for end in ends  # later ones than the trace's last entry are not covered by it
            if end.counts is not None
            and 0 < (at := bisect.bisect_right(own, (end.time_ns, math.inf))) < len(own)
        ]
        # What another thread has just begun is counted, and listed a moment later.
        if ahead and min(ahead[-SETTLED_STEPS:]) > min(ahead):
            found.append(group.key)
    return tuple(found)


def _sent(folder: Path, pid: int, handler: str) -> socket.socket:
    """Send a question and return the connection that the answer will come on. Raises OSError.

    A socket's path may have 107 bytes at most and the folder lies deep, so it is called by its descriptor.
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


def _answer(client: socket.socket, handler: str, until_s: float) -> bytes:
    """Return the body of an answer. Raises OSError or ValueError."""
    head, _, body = b"".join(_blocks(client, until_s)).partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise ValueError(f"torch does not offer {handler} here")
    return body


def _blocks(client: socket.socket, until_s: float) -> Iterator[bytes]:
    """Yield an answer until its end. Raises OSError when it does not come in time, ValueError when it is too long."""
    size_bytes = 0
    while block := _block(client, until_s - time.monotonic()):
        size_bytes += len(block)
        if size_bytes > ANSWER_BYTES_MAX:
            raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX >> 20} MiB")
        yield block


def _block(client: socket.socket, limit_s: float) -> bytes:
    if limit_s <= 0:
        raise TimeoutError(f"no answer within {CALL_S_MAX:g} s")
    client.settimeout(limit_s)
    try:
        return client.recv(_BLOCK_BYTES)
    except TimeoutError as err:
        raise TimeoutError(f"no answer within {CALL_S_MAX:g} s") from err


def _entries(trace: bytes) -> tuple[Entry, ...]:
    """Return the entries of a trace, oldest first. Raises ValueError, KeyError, TypeError or IndexError."""
    return tuple(_entry(one) for one in json.loads(trace).get("entries", ()))


def _entry(one: Mapping[str, Any]) -> Entry:
    backend, _, what = str(one["profiling_name"]).rpartition(":")
    name, purpose = map(str, one["process_group"])
    sizes, types = one["input_sizes"], one["input_dtypes"]
    label = {"default_pg": "default group", "undefined": "", "": ""}.get(purpose, purpose) or f"group {name}"
    return Entry(
        group=name, label=label, number=int(one["collective_seq_id"]), what=what, shape=_shape(sizes, types),
        created_ns=int(one["time_created_ns"]), done=one.get("retired") is True or one.get("state") == "completed",
        is_p2p=one.get("is_p2p") is True, lists_p2p=backend != "gloo",
    )  # fmt: skip


def _shape(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> str:
    """Write tensors as `float32[4,1]`: the first, and how many more there are."""
    if not sizes or not types:
        return ""
    first = f"{_TYPES.get(types[0], types[0].lower())}[{','.join(map(str, sizes[0]))}]"
    return first if len(sizes) == 1 else f"{first} and {len(sizes) - 1} more"


def _waits(counters: bytes) -> tuple[str, ...]:
    """Return the names of the wait counters that are active."""
    found = json.loads(counters)
    active = sorted(name for name, one in found.items() if one.get("active_count", 0) > 0)
    return tuple(name.removeprefix(_COUNTER_PREFIX).replace("__", " ") for name in active[:WAITS_MAX])
