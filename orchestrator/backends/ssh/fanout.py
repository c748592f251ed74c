"""Fan-out: one task of the submit side on many hosts over SSH, in parallel and bounded.

Rules: a host that does not answer is a result, never an exception; one bad host delays no other; a host keeps only the files
that the task itself leaves there.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from orchestrator.backends.api import LaunchError
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.core.host import gpus
from orchestrator.core.jobdir.plan import PlannedSsh
from orchestrator.core.observations import Retryable

if TYPE_CHECKING:
    from orchestrator.backends.ssh.connect.connection import Connection

FANOUT = 32
"""How many hosts run the task at once."""

WORK_S_MAX = 600.0
"""Default limit for all hosts together; the task on a host has its own limits within."""

ASK_S_MAX = 10.0
ALL_ASKED_S_MAX = 30.0
"""How long all hosts together may take to be asked for their GPUs: one that refuses for now is tried again."""

GPU_HOSTS_MAX = 32
"""How many hosts are asked for their GPUs: the others must have as many as the first ones."""

OUTPUT_CHARS_MAX = 300
SHOWN_MAX = 8

T = TypeVar("T")


def fan_out(hosts: Sequence[str], task: Callable[[str], T], limit_s: float, at_once: int) -> dict[str, T | LaunchError]:
    """Return each host's result, in the order of the hosts. What the task raises for a host is raised here."""
    results: dict[str, T | LaunchError] = {}
    done: queue.SimpleQueue[tuple[str, T | BaseException]] = queue.SimpleQueue()
    slots, deadline_s = threading.BoundedSemaphore(at_once), time.monotonic() + limit_s

    def work(host: str) -> None:
        with slots:
            try:
                done.put((host, task(host)))
            except BaseException as err:  # the caller must learn of it
                done.put((host, err))

    for host in dict.fromkeys(hosts):
        threading.Thread(target=work, args=(host,), daemon=True).start()
        results[host] = LaunchError("connect", f"no answer within {limit_s:g} s", "check the host, or try again")
    for _ in range(len(results)):
        try:
            host, result = done.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(result, BaseException) and not isinstance(result, LaunchError):
            raise result
        results[host] = result
    return results


def run_on_each(
    hosts: Sequence[str],
    ssh: PlannedSsh,
    work: Callable[[Connection, str], T],
    *,
    limit_s: float = WORK_S_MAX,
    at_once: int = FANOUT,
    on_failure: Callable[[str, LaunchError], None] = lambda host, error: None,
) -> dict[str, T | LaunchError]:
    """Run `work` on each host over a connection of its own; return its results, or why it failed, in the hosts' order.

    `at_once`: the number of concurrent hosts; `on_failure` is called on a failure at once, in the host's own thread.
    """
    import paramiko

    from orchestrator.backends.ssh.connect import connection, known_hosts, ssh_config

    jumps = connection.JumpHosts()
    policy: known_hosts.Policy = "accept-new" if ssh.host_keys == "accept-new" else "strict"

    def run_task(host: str) -> T | LaunchError:
        result = connect_and_run(host)
        if isinstance(result, LaunchError):
            on_failure(host, result)
        return result

    def connect_and_run(host: str) -> T | LaunchError:
        try:
            target = ssh_config.resolve(host, ssh.user, ssh.port)
            line = connection.Connection.open(target, host_keys=policy, jumps=jumps)
            try:
                return work(line, host)
            finally:
                line.close()
        except LaunchError as err:
            return err
        except (paramiko.SSHException, EOFError, OSError) as err:
            reason = f"the connection broke: {str(err) or type(err).__name__}"
            return LaunchError("connect", reason, "try again")

    try:
        return fan_out(hosts, run_task, limit_s, at_once)
    finally:
        jumps.close()


def count_gpus(hosts: Sequence[str], ssh: PlannedSsh, where: str) -> int:
    """Return how many GPUs each host has, by asking the first of them.

    Raises ClusterError when none can be reached, UserError when they have different numbers.
    """
    results = run_on_each(hosts[:GPU_HOSTS_MAX], ssh, _count_host_gpus, limit_s=ALL_ASKED_S_MAX)
    counts = {host: result for host, result in results.items() if isinstance(result, int)}
    if not counts:
        what = "no host reported how many GPUs it has\n" + format_failures(results)
        raise ClusterError(what, where, "fix the hosts, or set gpus_per_node or procs_per_node")
    if len(set(counts.values())) > 1:
        named = ", ".join(f"{host} {count}" for host, count in list(counts.items())[:SHOWN_MAX])
        fix = "set gpus_per_node, or gpus= for each host in ssh.hosts_file"
        raise UserError(f"the hosts have different numbers of GPUs: {named}", where, fix)
    return next(iter(counts.values()))


_ASK_GPUS = (
    "/bin/sh -c 'command -v nvidia-smi >/dev/null 2>&1 || { echo orch-gpus none; exit 0; }; "
    "nvidia-smi -L 2>&1; echo orch-gpus $?'"
)


def _count_host_gpus(connection: Connection, host: str) -> int:
    """Return how many GPUs nvidia-smi lists; skips what a .bashrc prints."""
    remote = connection.run(_ASK_GPUS)
    try:
        remote.end_input()
        lines: list[str] = []
        while (raw := remote.line(ASK_S_MAX)) is not None and len(lines) < 10_000:
            lines.append(raw.decode(errors="replace").rstrip())
    except TimeoutError as err:
        raise LaunchError("shell", "nvidia-smi does not answer", "see why with nvidia-smi there") from err
    finally:
        remote.close()
    status = next((line.split()[1] for line in lines if re.fullmatch(r"orch-gpus \w+", line)), "")
    if status == "none" or any(line.startswith("No devices") for line in lines):
        return 0
    if status in map(str, gpus.GOOD_CODES):
        return len(gpus.parse_gpu_list("\n".join(lines)))
    last = " ".join(line for line in lines[-3:] if not line.startswith("orch-gpus"))[-OUTPUT_CHARS_MAX:]
    raise LaunchError("shell", f"nvidia-smi fails: {last or 'no reason given'}", "fix the driver", Retryable.PERMANENT)


def format_failures(results: Mapping[str, object]) -> str:
    """Return the hosts that failed, a line each with its fix."""
    failed = [(host, result) for host, result in results.items() if isinstance(result, LaunchError)]
    lines = [f"  {host}: {err}" + (f"\n    fix: {err.fix}" if err.fix else "") for host, err in failed[:SHOWN_MAX]]
    more = len(failed) - SHOWN_MAX
    return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])
