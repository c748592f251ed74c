"""Leases of a host's GPUs and slots: sockets that one process holds, and the kernel frees when it ends.

Each GPU and each slot is a unix socket in the abstract namespace. Only one process of any user can bind its name, no
file stays behind, and no daemon is needed. A process that finds a name in use connects to it and reads its holder. The
names belong to a network namespace: jobs in containers with networks of their own do not see each other's leases.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.core import codec
from orchestrator.core.errors import HostError
from orchestrator.core.host import procfs
from orchestrator.core.host.gpus import Gpu
from orchestrator.core.jobdir import full_disk
from orchestrator.core.text import format_count
from orchestrator.core.wire.agent_config import LeaseNeeds
from orchestrator.core.wire.bootstrap import HeldLeases, RequestFailed

PREFIX = "orch-lease"

ASK_S_MAX = 1.0
"""How long a holder may take to answer; its process may be stopped."""

CHOOSE_S_MAX = 5.0
"""How long another process may take to choose: two that chose at once could each get half, and neither enough."""

CHOOSE_POLL_S = 0.02
ANSWER_BYTES_MAX = 4096
ASKERS_MAX = 128
EXHAUSTED_S = 0.1
"""How long a holder pauses when it cannot accept an asker now, since the asker wakes it again at once."""

_NAME_BYTES_MAX = 107  # sun_path, less the leading NUL


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Holder of a lease; the fields of a process that does not answer are empty or 0. `for_s`: how long its process has lived,
    as the asker finds."""

    job: str
    node: str
    user: str
    pid: int
    for_s: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        job = f"job {self.job}" if self.job else "a process that does not answer"
        return f"{job} of {self.user or 'an unknown user'}, pid {self.pid or 'unknown'}"


@dataclass(frozen=True, slots=True)
class LeaseCapacity:
    """What this host can lease."""

    gpus: Callable[[], Sequence[Gpu]]
    cores: int
    prefix: str = PREFIX


class Leases:
    """Leases of one agent, held while these sockets are open in any process."""

    def __init__(self, holder: LeaseHolder, gpus: tuple[str, ...], sockets: Sequence[socket.socket]) -> None:
        self.gpus = gpus
        self._answer = codec.dumps(holder).encode()
        self._listeners = {listener.fileno(): listener for listener in sockets}

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when another process asks."""
        return tuple(self._listeners)

    def answer(self, fd: int) -> None:
        """Answer a process that asks at `fd` who holds the lease."""
        try:
            asker, _ = self._listeners[fd].accept()
            with asker:
                asker.setblocking(False)
                asker.send(self._answer)
        except OSError as err:
            if full_disk.is_exhausted(err):
                time.sleep(EXHAUSTED_S)

    def close(self) -> None:
        """Free all leases, unless another process holds them too."""
        _close(self._listeners.values())


def this_holder(job: str, node: str) -> LeaseHolder:
    """Return this process as a holder."""
    return LeaseHolder(job, node, _user(os.geteuid()), os.getpid())


def acquire(needs: LeaseNeeds, requester: LeaseHolder, capacity: LeaseCapacity) -> Leases:
    """Lease what is needed, all or nothing. Raises RequestFailed, which names the holders of what is missing."""
    if not needs.gpus and not needs.slots:
        return Leases(requester, (), ())
    return _lease_gpus(needs.gpus, requester, capacity) if needs.gpus else _lease_slots(needs, requester, capacity)


def list_held(capacity: LeaseCapacity, text: str) -> tuple[HeldLeases, ...]:
    """Return the leases that jobs hold on this host now. `text`: of /proc/net/unix, which lists the names without binding any."""
    marked = [line.rpartition(f"@{capacity.prefix}/") for line in text.splitlines()]
    names = list(dict.fromkeys(name for _, mark, name in marked if mark and name != "turn"))
    gpus: Sequence[Gpu] = ()
    if any(name.startswith("gpu-") for name in names):
        with contextlib.suppress(HostError):
            gpus = capacity.gpus()
    ids = {f"gpu-{gpu.uuid}": f"GPU {gpu.id}" for gpu in gpus}
    things = {name: ids.get(name, name.replace("-", " ", 1)) for name in sorted(names, key=_sort_key)}
    by_holder = _group_by_holder(_holders(things, capacity.prefix))
    return tuple(
        HeldLeases(len(names_held), _format_names(names_held), str(holder), holder.for_s)
        for holder, names_held in by_holder.items()
    )


def _sort_key(name: str) -> tuple[str, int, str]:
    kind, _, number = name.partition("-")
    return kind, int(number) if number.isdigit() else 0, number


def _lease_gpus(count: int, requester: LeaseHolder, capacity: LeaseCapacity) -> Leases:
    try:
        gpus = capacity.gpus()
    except HostError as err:
        reason = f"{format_count(count, 'GPU')} wanted, none available: {err}"
        fix = "install the NVIDIA driver there, or take the host off the list"
        raise RequestFailed("lease", reason, fix) from err
    if len(gpus) < count:
        reason = f"{format_count(count, 'GPU')} wanted, the host has {len(gpus)}"
        raise RequestFailed("lease", reason, "lower gpus_per_node, or take the host off the list")
    names = {f"gpu-{gpu.uuid}": gpu for gpu in gpus}
    with _hold_choice_lock(capacity.prefix):
        bound, taken = _bind(list(names), count, capacity.prefix)
        free = len(bound)
        if free < count:
            _close(bound.values())
    if free < count:
        holders = _holders({name: f"GPU {names[name].id}" for name in taken}, capacity.prefix)
        raise _busy_failure(f"{format_count(count, 'GPU')} wanted, {free} of {len(gpus)} free", holders, requester)
    return Leases(requester, tuple(names[name].id for name in bound), tuple(bound.values()))


def _lease_slots(needs: LeaseNeeds, requester: LeaseHolder, capacity: LeaseCapacity) -> Leases:
    """Lease slots.

    Slots that the same job holds, under another host name of this machine, do not count as missing. Without a number of
    slots in the list of hosts, a job that wants more than the machine's cores leases all of them.
    """
    total = needs.host_slots or capacity.cores
    count = needs.slots if needs.host_slots else min(needs.slots, total)
    if count > total:
        reason = f"{format_count(count, 'slot')} wanted, the host has {total}"
        raise RequestFailed("lease", reason, "lower procs_per_node, or raise the host's slots")
    with _hold_choice_lock(capacity.prefix):
        bound, taken = _bind([f"slot-{number}" for number in range(total)], count, capacity.prefix)
    if len(bound) < count:
        holders = _holders({name: name.replace("-", " ") for name in taken}, capacity.prefix)
        ours = sum(holder is not None and holder.job == requester.job for holder in holders.values())
        if len(bound) + ours < count:
            _close(bound.values())
            raise _busy_failure(
                f"{format_count(count, 'slot')} wanted, {len(bound)} of {total} free", holders, requester
            )
    return Leases(requester, (), tuple(bound.values()))


def _bind(names: Sequence[str], count: int, prefix: str) -> tuple[dict[str, socket.socket], list[str]]:
    """Bind up to `count` of `names` in order; return the bound and the taken ones."""
    bound: dict[str, socket.socket] = {}
    taken: list[str] = []
    for name in names:
        if len(bound) == count:
            break
        listener = _try_bind(name, prefix)
        if listener is None:
            taken.append(name)
        else:
            bound[name] = listener
    return bound, taken


def _try_bind(name: str, prefix: str) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name, prefix))
    except OSError as err:
        listener.close()
        if err.errno == errno.EADDRINUSE:
            return None
        raise
    listener.setblocking(False)
    listener.listen(ASKERS_MAX)
    return listener


def _address(name: str, prefix: str) -> bytes:
    return b"\0" + f"{prefix}/{name}".encode()[:_NAME_BYTES_MAX]


@contextlib.contextmanager
def _hold_choice_lock(prefix: str) -> Iterator[None]:
    """Hold this host's lock for choosing. Raises RequestFailed when another launch holds it for `CHOOSE_S_MAX`."""
    deadline_s = time.monotonic() + CHOOSE_S_MAX
    while (lock := _try_bind("turn", prefix)) is None:
        if time.monotonic() > deadline_s:
            holder = _ask_holder("turn", prefix, {})
            reason = f"another launch on this host has been leasing for {CHOOSE_S_MAX:.0f} s: {holder}"
            raise RequestFailed("lease", reason, "orch tries again", "busy")
        time.sleep(CHOOSE_POLL_S)
    with lock:
        yield


def _holders(things: Mapping[str, str], prefix: str) -> dict[str, LeaseHolder | None]:
    """Ask for the holder of each name, None for a name that has just become free; return them by what the names are for
    people. Each process is asked once."""
    by_pid: dict[int, LeaseHolder] = {}
    return {thing: _ask_holder(name, prefix, by_pid) for name, thing in things.items()}


def _ask_holder(name: str, prefix: str, by_pid: dict[int, LeaseHolder]) -> LeaseHolder | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(ASK_S_MAX)
        try:
            asker.connect(_address(name, prefix))
        except ConnectionRefusedError:
            return None
        except OSError:  # its queue is full of askers without an answer
            return LeaseHolder("", "", "", 0)
        credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if pid not in by_pid or not pid:  # pid 0 is in a container, and so may others be
            answered = LeaseHolder("", "", _user(uid), pid)
            with contextlib.suppress(OSError, codec.CodecError):
                answered = codec.loads(LeaseHolder, asker.recv(ANSWER_BYTES_MAX))
            by_pid[pid] = replace(answered, for_s=procfs.age_s(pid))
        return by_pid[pid]


def _busy_failure(what: str, holders: dict[str, LeaseHolder | None], requester: LeaseHolder) -> RequestFailed:
    things = _group_by_holder(holders)
    reasons = [f"{_format_names(names)} held by {holder}" for holder, names in things.items()]
    own_holder = next((holder for holder in things if holder.job == requester.job), None)
    if own_holder is not None:  # waiting does not help
        reasons.append(f"this job already holds them as {own_holder.node}: name each machine once in the list of hosts")
    return RequestFailed("lease", "; ".join([what, *reasons]), "orch tries again when they are free", "busy")


def _group_by_holder(holders: dict[str, LeaseHolder | None]) -> dict[LeaseHolder, list[str]]:
    things: dict[LeaseHolder, list[str]] = {}
    for thing, holder in holders.items():
        if holder is not None:
            things.setdefault(holder, []).append(thing)
    return things


def _format_names(names: Sequence[str]) -> str:
    """Return `slot 3` for one name, `slots 0-3` for three or more in a row, else a list."""
    kind, ids = names[0].partition(" ")[0], [name.partition(" ")[2] for name in names]
    in_row = len(ids) > 2 and all(number.isdigit() for number in ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1
    return f"{kind}{'s' if len(ids) > 1 else ''} {f'{ids[0]}-{ids[-1]}' if in_row else ', '.join(ids)}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _close(sockets: Iterable[socket.socket]) -> None:
    for listener in sockets:
        listener.close()
