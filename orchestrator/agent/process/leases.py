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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.core import codec
from orchestrator.core.errors import HostError
from orchestrator.core.host import procfs
from orchestrator.core.host.gpus import Gpu
from orchestrator.core.jobdir import full_disk
from orchestrator.core.text import counted
from orchestrator.core.wire.agent_config import Needs
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
class Holder:
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
class Stock:
    """What this host can lease."""

    gpus: Callable[[], Sequence[Gpu]]
    cores: int
    prefix: str = PREFIX


class Leases:
    """Leases of one agent, held while these sockets are open in any process."""

    def __init__(self, me: Holder, gpus: tuple[str, ...], sockets: Sequence[socket.socket]) -> None:
        self.gpus = gpus
        self._answer = codec.dumps(me).encode()
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


def me(job: str, node: str) -> Holder:
    """Return this process as a holder."""
    return Holder(job, node, _user(os.geteuid()), os.getpid())


def acquire(needs: Needs, who: Holder, stock: Stock) -> Leases:
    """Lease what is needed, all or nothing. Raises RequestFailed, which names the holders of what is missing."""
    if not needs.gpus and not needs.slots:
        return Leases(who, (), ())
    return _take_gpus(needs.gpus, who, stock) if needs.gpus else _take_slots(needs, who, stock)


def held(stock: Stock, text: str) -> tuple[HeldLeases, ...]:
    """Return the leases that jobs hold on this host now. `text`: of /proc/net/unix, which lists the names without binding any."""
    marked = [line.rpartition(f"@{stock.prefix}/") for line in text.splitlines()]
    names = list(dict.fromkeys(name for _, mark, name in marked if mark and name != "turn"))
    gpus: Sequence[Gpu] = ()
    if any(name.startswith("gpu-") for name in names):
        with contextlib.suppress(HostError):
            gpus = stock.gpus()
    ids = {f"gpu-{gpu.uuid}": f"GPU {gpu.id}" for gpu in gpus}
    things = [ids.get(name, name.replace("-", " ", 1)) for name in sorted(names, key=_in_order)]
    holders = _holders(sorted(names, key=_in_order), stock.prefix)
    by_holder = _by_holder(dict(zip(things, holders, strict=True)))
    return tuple(
        HeldLeases(len(own), _grouped(own), str(holder), holder.for_s) for holder, own in by_holder.items()
    )


def _in_order(name: str) -> tuple[str, int, str]:
    kind, _, number = name.partition("-")
    return kind, int(number) if number.isdigit() else 0, number


def _take_gpus(count: int, who: Holder, stock: Stock) -> Leases:
    try:
        gpus = stock.gpus()
    except HostError as err:
        reason = f"{counted(count, 'GPU')} wanted, none available: {err}"
        fix = "install the NVIDIA driver there, or take the host off the list"
        raise RequestFailed("lease", reason, fix) from err
    if len(gpus) < count:
        reason = f"{counted(count, 'GPU')} wanted, the host has {len(gpus)}"
        raise RequestFailed("lease", reason, "lower gpus_per_node, or take the host off the list")
    names = {f"gpu-{gpu.uuid}": gpu for gpu in gpus}
    with _choosing_alone(stock.prefix):
        bound, taken = _bind(list(names), count, stock.prefix)
        free = len(bound)
        if free < count:
            _close(bound.values())
    if free < count:
        things = [f"GPU {names[name].id}" for name in taken]
        holders = dict(zip(things, _holders(taken, stock.prefix), strict=True))
        raise _busy(f"{counted(count, 'GPU')} wanted, {free} of {len(gpus)} free", holders, who)
    return Leases(who, tuple(names[name].id for name in bound), tuple(bound.values()))


def _take_slots(needs: Needs, who: Holder, stock: Stock) -> Leases:
    """Lease slots.

    Slots that the same job holds, under another host name of this machine, do not count as missing. Without a number of
    slots in the list of hosts, a job that wants more than the machine's cores leases all of them.
    """
    total = needs.slots_there or stock.cores
    count = needs.slots if needs.slots_there else min(needs.slots, total)
    if count > total:
        reason = f"{counted(count, 'slot')} wanted, the host has {total}"
        raise RequestFailed("lease", reason, "lower procs_per_node, or raise the host's slots")
    with _choosing_alone(stock.prefix):
        bound, taken = _bind([f"slot-{number}" for number in range(total)], count, stock.prefix)
    if len(bound) < count:
        things = [name.replace("-", " ") for name in taken]
        holders = dict(zip(things, _holders(taken, stock.prefix), strict=True))
        ours = sum(holder is not None and holder.job == who.job for holder in holders.values())
        if len(bound) + ours < count:
            _close(bound.values())
            raise _busy(f"{counted(count, 'slot')} wanted, {len(bound)} of {total} free", holders, who)
    return Leases(who, (), tuple(bound.values()))


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
def _choosing_alone(prefix: str) -> Iterator[None]:
    """Hold this host's lock for choosing. Raises RequestFailed when another launch holds it for `CHOOSE_S_MAX`."""
    deadline_s = time.monotonic() + CHOOSE_S_MAX
    while (lock := _try_bind("turn", prefix)) is None:
        if time.monotonic() > deadline_s:
            [holder] = _holders(["turn"], prefix)
            reason = f"another launch on this host has been leasing for {CHOOSE_S_MAX:.0f} s: {holder}"
            raise RequestFailed("lease", reason, "orch tries again", "busy")
        time.sleep(CHOOSE_POLL_S)
    with lock:
        yield


def _holders(names: Iterable[str], prefix: str) -> list[Holder | None]:
    """Ask for the holder of each name, None for a name that has just become free. Each process is asked once."""
    by_pid: dict[int, Holder] = {}
    return [_ask(name, prefix, by_pid) for name in names]


def _ask(name: str, prefix: str, by_pid: dict[int, Holder]) -> Holder | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(ASK_S_MAX)
        try:
            asker.connect(_address(name, prefix))
        except ConnectionRefusedError:
            return None
        except OSError:  # its queue is full of askers without an answer
            return Holder("", "", "", 0)
        credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if pid not in by_pid or not pid:  # pid 0 is in a container, and so may others be
            answered = Holder("", "", _user(uid), pid)
            with contextlib.suppress(OSError, codec.CodecError):
                answered = codec.loads(Holder, asker.recv(ANSWER_BYTES_MAX))
            by_pid[pid] = replace(answered, for_s=procfs.age_s(pid))
        return by_pid[pid]


def _busy(what: str, holders: dict[str, Holder | None], who: Holder) -> RequestFailed:
    things = _by_holder(holders)
    reasons = [f"{_grouped(names)} held by {holder}" for holder, names in things.items()]
    own = next((holder for holder in things if holder.job == who.job), None)
    if own is not None:  # waiting does not help
        reasons.append(
            f"this job already holds them as {own.node}: name each machine once in the list of hosts"
        )
    return RequestFailed("lease", "; ".join([what, *reasons]), "orch tries again when they are free", "busy")


def _by_holder(holders: dict[str, Holder | None]) -> dict[Holder, list[str]]:
    things: dict[Holder, list[str]] = {}
    for thing, holder in holders.items():
        if holder is not None:
            things.setdefault(holder, []).append(thing)
    return things


def _grouped(names: Sequence[str]) -> str:
    """Return `slot 3` for one name, `slots 0-3` for three or more in a row, else a list."""
    kind, ids = names[0].partition(" ")[0], [name.partition(" ")[2] for name in names]
    in_row = (
        len(ids) > 2
        and all(number.isdigit() for number in ids)
        and int(ids[-1]) - int(ids[0]) == len(ids) - 1
    )
    return f"{kind}{'s' if len(ids) > 1 else ''} {f'{ids[0]}-{ids[-1]}' if in_row else ', '.join(ids)}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _close(sockets: Iterable[socket.socket]) -> None:
    for listener in sockets:
        listener.close()
