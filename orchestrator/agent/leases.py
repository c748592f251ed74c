"""Who may use this host's GPUs and slots? Whoever holds their sockets; the kernel takes them back when he is gone.

Each GPU and each slot is a unix socket in the abstract namespace: only one process can bind its name, whoever its
user, no file is left behind, and no daemon is needed. Who finds a name taken connects to it and is told who has it.
The namespace is that of the network: jobs in containers with a network of their own do not see each other's leases.
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
from dataclasses import dataclass

from orchestrator.core import codec
from orchestrator.core.host.gpus import Gpu, GpuError
from orchestrator.core.jobdir import full_disk
from orchestrator.core.wire.messages import Needs

PREFIX = "orch-lease"

ASK_S_MAX = 1.0
"""How long a holder may take to say who it is; its process may be stopped."""

TURN_S_MAX = 5.0
"""How long another one may take to choose: two who chose at once could each get half, and neither enough."""

TURN_POLL_S = 0.02
ANSWER_BYTES_MAX = 4096
ASKERS_MAX = 128
EXHAUSTED_S = 0.1
"""How long a holder rests when no asker can be taken now, since it is waked for him again at once."""

_NAME_BYTES_MAX = 107  # sun_path, less the leading NUL


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lease; fields of somebody who does not answer are empty."""

    job: str
    node: str
    user: str
    pid: int

    def __str__(self) -> str:
        job = f"job {self.job}" if self.job else "somebody who does not answer"
        return f"{job} of {self.user or 'an unknown user'}, pid {self.pid or 'unknown'}"


class LeaseError(Exception):
    """The host cannot give what is needed: for good, or, when it is busy, now."""

    def __init__(self, reason: str, fix: str, *, is_busy: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix
        self.is_busy = is_busy


@dataclass(frozen=True, slots=True)
class Stock:
    """What this host has to give."""

    gpus: Callable[[], Sequence[Gpu]]
    cores: int
    prefix: str = PREFIX


class Leases:
    """What one agent has leased, for as long as these sockets are open in any process."""

    def __init__(self, me: Holder, gpus: tuple[str, ...], sockets: Sequence[socket.socket]) -> None:
        self.gpus = gpus
        self._answer = codec.dumps(me).encode()
        self._listeners = {one.fileno(): one for one in sockets}

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when somebody asks."""
        return tuple(self._listeners)

    def answer(self, fd: int) -> None:
        """Tell one who asks at `fd` who has it."""
        try:
            asker, _ = self._listeners[fd].accept()
            with asker:
                asker.setblocking(False)
                asker.send(self._answer)
        except OSError as err:
            if full_disk.is_exhausted(err):
                time.sleep(EXHAUSTED_S)

    def close(self) -> None:
        """Give all leases back, unless another process has them too."""
        _close(self._listeners.values())


def me(job: str, node: str) -> Holder:
    """Return this process as a holder."""
    return Holder(job, node, _user(os.geteuid()), os.getpid())


def take(needs: Needs, who: Holder, stock: Stock) -> Leases:
    """Lease what is needed, all or nothing. Raises LeaseError, which says who has what is missing."""
    if not needs.gpus and not needs.slots:
        return Leases(who, (), ())
    return _take_gpus(needs.gpus, who, stock) if needs.gpus else _take_slots(needs, who, stock)


def _take_gpus(count: int, who: Holder, stock: Stock) -> Leases:
    try:
        there = stock.gpus()
    except GpuError as err:
        reason = f"{_many(count, 'GPU')} wanted, none can be had: {err}"
        raise LeaseError(
            reason, "install the NVIDIA driver there, or take the host off the list", is_busy=False
        ) from err
    if len(there) < count:
        reason = f"{_many(count, 'GPU')} wanted, the host has {len(there)}"
        raise LeaseError(reason, "lower gpus_per_node, or take the host off the list", is_busy=False)
    names = {f"gpu-{gpu.uuid}": gpu for gpu in there}
    with _turn(stock.prefix):
        bound, taken = _bind(list(names), count, stock.prefix)
        free = len(bound)
        if free < count:
            _close(bound.values())
    if free < count:
        things = [f"GPU {names[name].id}" for name in taken]
        holders = dict(zip(things, _holders(taken, stock.prefix), strict=True))
        raise _busy(f"{_many(count, 'GPU')} wanted, {free} of {len(there)} free", holders, who)
    return Leases(who, tuple(names[name].id for name in bound), tuple(bound.values()))


def _take_slots(needs: Needs, who: Holder, stock: Stock) -> Leases:
    """Lease slots; those that this very job has already taken, as another of its hosts on this machine, do not count
    against it. More than the machine's cores are as many as it has: then the job has it to itself."""
    there = needs.slots_there or stock.cores
    count = needs.slots if needs.slots_there else min(needs.slots, there)
    if count > there:
        reason = f"{_many(count, 'slot')} wanted, the host has {there}"
        raise LeaseError(reason, "lower procs_per_node, or raise the host's slots", is_busy=False)
    with _turn(stock.prefix):
        bound, taken = _bind([f"slot-{number}" for number in range(there)], count, stock.prefix)
    if len(bound) < count:
        things = [name.replace("-", " ") for name in taken]
        holders = dict(zip(things, _holders(taken, stock.prefix), strict=True))
        ours = sum(holder is not None and holder.job == who.job for holder in holders.values())
        if len(bound) + ours < count:
            _close(bound.values())
            raise _busy(f"{_many(count, 'slot')} wanted, {len(bound)} of {there} free", holders, who)
    return Leases(who, (), tuple(bound.values()))


def _bind(names: Sequence[str], count: int, prefix: str) -> tuple[dict[str, socket.socket], list[str]]:
    """Bind up to `count` of `names` in order; return those, and the ones that were found taken."""
    bound: dict[str, socket.socket] = {}
    taken: list[str] = []
    for name in names:
        if len(bound) == count:
            break
        one = _try_bind(name, prefix)
        if one is None:
            taken.append(name)
        else:
            bound[name] = one
    return bound, taken


def _try_bind(name: str, prefix: str) -> socket.socket | None:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.bind(_address(name, prefix))
    except OSError as err:
        one.close()
        if err.errno == errno.EADDRINUSE:
            return None
        raise
    one.setblocking(False)
    one.listen(ASKERS_MAX)
    return one


def _address(name: str, prefix: str) -> bytes:
    return b"\0" + f"{prefix}/{name}".encode()[:_NAME_BYTES_MAX]


@contextlib.contextmanager
def _turn(prefix: str) -> Iterator[None]:
    """Be the only one on this host who chooses. Raises LeaseError when another one does not get done."""
    deadline_s = time.monotonic() + TURN_S_MAX
    while (turn := _try_bind("turn", prefix)) is None:
        if time.monotonic() > deadline_s:
            [holder] = _holders(["turn"], prefix)
            reason = f"another launch on this host has been choosing for {TURN_S_MAX:.0f} s: {holder}"
            raise LeaseError(reason, "it is tried again", is_busy=True)
        time.sleep(TURN_POLL_S)
    with turn:
        yield


def _holders(names: Iterable[str], prefix: str) -> list[Holder | None]:
    """Ask who has each of these names; None for one that has just become free. Each process is asked once."""
    known: dict[int, Holder] = {}
    return [_ask(name, prefix, known) for name in names]


def _ask(name: str, prefix: str, known: dict[int, Holder]) -> Holder | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.settimeout(ASK_S_MAX)
        try:
            one.connect(_address(name, prefix))
        except ConnectionRefusedError:
            return None
        except OSError:  # too many have asked before, and were not answered
            return Holder("", "", "", 0)
        credentials = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if pid not in known or not pid:  # no pid: it is in a container, as others may be
            known[pid] = Holder("", "", _user(uid), pid)
            with contextlib.suppress(OSError, codec.CodecError):
                known[pid] = codec.loads(Holder, one.recv(ANSWER_BYTES_MAX))
        return known[pid]


def _busy(what: str, holders: dict[str, Holder | None], who: Holder) -> LeaseError:
    """Say who has what, one after the other, each holder once."""
    things: dict[Holder, list[str]] = {}
    for thing, holder in holders.items():
        if holder is not None:
            things.setdefault(holder, []).append(thing)
    words = [f"{_folded(names)} held by {holder}" for holder, names in things.items()]
    own = next((holder for holder in things if holder.job == who.job), None)
    if own is not None:  # waiting is no remedy
        words.append(f"this very job has them as {own.node}: name each machine once in the list of hosts")
    return LeaseError("; ".join([what, *words]), "it is tried again when they are free", is_busy=True)


def _folded(names: Sequence[str]) -> str:
    """Return `slot 3` of one name, `slots 0-3` of several in a row, and a list of what is not in a row."""
    kind, ids = names[0].partition(" ")[0], [name.partition(" ")[2] for name in names]
    in_row = len(ids) > 2 and all(one.isdigit() for one in ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1
    return f"{kind}{'s' if len(ids) > 1 else ''} {f'{ids[0]}-{ids[-1]}' if in_row else ', '.join(ids)}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _close(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
