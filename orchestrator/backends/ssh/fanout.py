"""What do many hosts say at once? Work of the submit side over SSH, host by host, in parallel and bounded.

Rules: a host that does not answer is an answer, never an exception; one bad host holds no other up; nothing is left
behind on a host but what the work itself leaves.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from orchestrator.backends.api import LaunchError
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.jobdir.plan import PlannedSsh
from orchestrator.core.observations import Retryable

if TYPE_CHECKING:
    from orchestrator.backends.ssh.connect.connection import Connection

FANOUT = 32
"""How many hosts are worked on at once."""

WORK_S_MAX = 600.0
"""How long everything may take unless said otherwise; what a host does has its own limits within."""

ASK_S_MAX = 10.0
ASKED_MAX = 32
"""How many hosts are asked for their GPUs: the first ones tell what all are to have."""

KEYS_LOOKED_MAX = 8
"""For how many hosts the keys are looked at before a submit; most have the same."""

WORDS_CHARS_MAX = 300
SHOWN_MAX = 8

T = TypeVar("T")


class _Round(Generic[T]):
    """One piece of work on many hosts: what is left to do, and what came of it."""

    def __init__(self, hosts: Sequence[str], visit: Callable[[str], T]) -> None:
        self._left: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, T | BaseException]] = queue.SimpleQueue()
        self._hosts = tuple(dict.fromkeys(hosts))
        self._visit = visit
        for host in self._hosts:
            self._left.put(host)

    def go(self, limit_s: float) -> dict[str, T | LaunchError]:
        """Return what each host said, in the order of the hosts."""
        for _ in range(min(FANOUT, len(self._hosts))):
            threading.Thread(target=self._work, daemon=True).start()
        said: dict[str, T | LaunchError] = {}
        deadline_s = time.monotonic() + limit_s
        while len(said) < len(self._hosts):
            try:
                host, answer = self._done.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(answer, BaseException) and not isinstance(answer, LaunchError):
                raise answer
            said[host] = answer
        late = LaunchError("connect", f"no answer within {limit_s:g} s", "look at the host, or try again")
        return {host: said.get(host, late) for host in self._hosts}

    def _work(self) -> None:
        while True:
            try:
                host = self._left.get_nowait()
            except queue.Empty:
                return
            try:
                self._done.put((host, self._visit(host)))
            except BaseException as err:  # whatever it is, the caller must hear of it
                self._done.put((host, err))


def each(
    hosts: Sequence[str],
    ssh: PlannedSsh,
    work: Callable[[Connection, str], T],
    *,
    limit_s: float = WORK_S_MAX,
) -> dict[str, T | LaunchError]:
    """Connect to every host and return what `work` returned there, or why it could not, in the order of the hosts."""
    import paramiko

    from orchestrator.backends.ssh.connect import connection, known_hosts, ssh_config

    jumps = connection.Jumps()
    policy: known_hosts.Policy = "accept-new" if ssh.host_keys == "accept-new" else "strict"

    def visit(host: str) -> T | LaunchError:
        try:
            target = ssh_config.resolve(host, ssh.user, ssh.port)
            there = connection.Connection.open(target, host_keys=policy, jumps=jumps)
            try:
                return work(there, host)
            finally:
                there.close()
        except LaunchError as err:
            return err
        except (paramiko.SSHException, EOFError, OSError) as err:
            return LaunchError(
                "connect", f"the connection broke: {str(err) or type(err).__name__}", "try again"
            )

    try:
        return _Round(hosts, visit).go(limit_s)
    finally:
        jumps.close()


def gpus_each(hosts: Sequence[str], ssh: PlannedSsh, where: str) -> int:
    """Return how many GPUs each host has, by asking the first of them.

    Raises ClusterError when none can be reached, UserError when they have different numbers.
    """
    said = each(hosts[:ASKED_MAX], ssh, _gpus, limit_s=ASK_S_MAX)
    found = {host: answer for host, answer in said.items() if isinstance(answer, int)}
    if not found:
        what = "no host said how many GPUs it has\n" + told(said)
        raise ClusterError(what, where, "mend the hosts, or set gpus_per_node or procs_per_node")
    if len(set(found.values())) > 1:
        named = ", ".join(f"{host} {count}" for host, count in list(found.items())[:SHOWN_MAX])
        fix = "set gpus_per_node, or gpus= for each host in ssh.hosts_file"
        raise UserError(f"the hosts have different numbers of GPUs: {named}", where, fix)
    return next(iter(found.values()))


_ASK_GPUS = (
    "/bin/sh -c 'command -v nvidia-smi >/dev/null 2>&1 || { echo orch-gpus none; exit 0; }; "
    "nvidia-smi -L 2>&1; echo orch-gpus $?'"
)


def _gpus(connection: Connection, host: str) -> int:
    """Return how many GPUs nvidia-smi lists; what a .bashrc prints is passed over."""
    remote = connection.run(_ASK_GPUS)
    try:
        remote.end_input()
        lines: list[str] = []
        while (raw := remote.line(ASK_S_MAX)) is not None and len(lines) < 10_000:
            lines.append(raw.decode(errors="replace").strip())
    except TimeoutError as err:
        raise LaunchError("shell", "nvidia-smi does not answer", "see why with nvidia-smi there") from err
    finally:
        remote.close()
    words = next((line.split()[1] for line in lines if re.fullmatch(r"orch-gpus \w+", line)), "")
    if words == "none" or any(line.startswith("No devices") for line in lines):
        return 0
    if words == "0":
        return sum(1 for line in lines if re.match(r"GPU [0-9]+:", line))
    last = " ".join(line for line in lines[-3:] if not line.startswith("orch-gpus"))[-WORDS_CHARS_MAX:]
    raise LaunchError(
        "shell", f"nvidia-smi fails: {last or 'no word why'}", "mend the driver", Retryable.PERMANENT
    )


def refuse_locked_keys(hosts: Sequence[str], ssh: PlannedSsh) -> None:
    """Raise ClusterError when every key for one of the hosts is encrypted and no ssh-agent has any.

    A supervisor has no terminal, and a passphrase is never stored: such a job could only fail.
    """
    from orchestrator.backends.ssh.connect import keys, ssh_config

    for host in hosts[:KEYS_LOOKED_MAX]:
        try:
            target = ssh_config.resolve(host, ssh.user, ssh.port)
        except LaunchError as err:
            raise ClusterError(str(err), host, err.fix) from err
        found = keys.find(target)
        if found.locked and not found.offers:
            what = f"the key {found.locked[0]} is encrypted, and no ssh-agent has it"
            raise ClusterError(what, host, keys.ssh_add(target, found.locked[0]))


def told(said: Mapping[str, object]) -> str:
    """Return the hosts that failed, a line each with what is to be done."""
    failed = [(host, answer) for host, answer in said.items() if isinstance(answer, LaunchError)]
    lines = [
        f"  {host}: {err}" + (f"\n    fix: {err.fix}" if err.fix else "") for host, err in failed[:SHOWN_MAX]
    ]
    more = len(failed) - SHOWN_MAX
    return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])
