"""Figures of backend ssh, on a cluster in a box: `python -m bench.ssh [launch] [supervisor] [logs]` (all by default).

All hosts share this machine's processors with login, so figures are ratios against other tools in the same run, taken
in turns. Everything of ours is seen from outside: the times in a job's journal, the sizes of its logs, /proc. Nothing
is asserted; what the project aims at is printed beside what was found.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core.host import procfs
from orchestrator.journal import journal_file
from tests.support.cluster import needs
from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk, Job
from tests.support.cluster.host import Host

RUNS = int(os.environ.get("BENCH_RUNS", "5"))
FANOUT = 32
SIZES = (16, 64, 128)
MAIN_SIZE = 64
LAUNCH_S_MAX = 180.0
SPAN_S = 20.0
LOG_MIB = 128
LOG_HOSTS = 8
SHIP_S_MAX = 300.0

IDLE = {"entrypoint": {"command": "sleep 600"}, "procs_per_node": 1, "checkpoint": {"path": "*"}}
STEADY = {"heartbeat_s": 1, "stop_grace": 1, "node_timeout": 60, "start_timeout": 300}
TALK = """
import os, time
block = (b"x" * 98 + b"\\n") * 10240
left = {bytes}
while left > 0:
    left -= os.write(1, block[:left])
time.sleep(600)
"""


def run(desk: Desk, count: int, **spec: Any) -> Job:
    """Submit an idle job on so many hosts."""
    fields: dict[str, Any] = {**IDLE, "nodes": count, "ssh": {"hosts": f"node[1-{count}]"}, **spec}
    return desk.submit({"README": "nothing to run\n"}, monitor=STEADY, **fields)


def end(desk: Desk, job: Job) -> None:
    """Cancel a job, and take away all that it has left."""
    desk.orch("cancel", job.id)
    job.wait(LAUNCH_S_MAX)
    desk.clear_up()


def agents_up_s(desk: Desk, count: int, **spec: Any) -> float:
    """Return the time from the first order to launch an agent until all agents are there."""
    job = run(desk, count, **spec)

    def times() -> list[list[float]] | None:
        found: list[list[float]] = [[], []]
        for entry in journal_file.read(job.folder.journal):
            if isinstance(entry.news, (d.Launch, e.AgentUp)):
                found[isinstance(entry.news, e.AgentUp)].append(entry.wall_s)
        return found if len(found[1]) >= count else None

    launched, up = job.wait_until(times, f"{count} agents", LAUNCH_S_MAX)
    end(desk, job)
    return float(max(up) - min(launched))


def tool_s(box: Box, argv: Sequence[str]) -> float:
    """Return the time that a tool takes to run `true` on hosts."""
    start_s = time.perf_counter()
    box.login.run(argv, user="trainer", env={"PDSH_SSH_ARGS_APPEND": "-o BatchMode=yes -q"}, limit_s=LAUNCH_S_MAX)
    return time.perf_counter() - start_s


def pdsh(count: int) -> list[str]:
    return ["pdsh", "-R", "ssh", "-f", str(FANOUT), "-w", f"node[1-{count}]", "true"]


def clush(count: int) -> list[str]:
    return ["clush", "-q", "-S", "-f", str(FANOUT), "-w", f"node[1-{count}]", "true"]


def in_turns(ways: dict[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """Measure each way so many times, in turns, after one run that does not count."""
    for way in ways.values():
        way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            found[name].append(way())
    return found


def table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a title, columns aligned; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(title)
    for row in rows:
        print("   " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def launch() -> None:
    """Agents on 16, 64 and 128 hosts against `true` by pdsh and clush with the same fan-out."""
    head = "hosts, orch, pdsh, clush, agents alone, orch / (pdsh + agents), orch / (clush + agents)"
    rows = [tuple(head.split(", "))]
    with Box(max(SIZES)) as box:
        desk = Desk(box)
        for count in SIZES:
            ways: dict[str, Callable[[], float]] = {
                "orch": partial(agents_up_s, desk, count),
                "pdsh": partial(tool_s, box, pdsh(count)),
                "clush": partial(tool_s, box, clush(count)),
                "alone": partial(agents_up_s, desk, count, backend="local"),
            }
            found = in_turns(ways, RUNS if count == MAIN_SIZE else min(RUNS, 3))
            middle = {name: statistics.median(values) for name, values in found.items()}
            ratios = [
                statistics.median(
                    ours / (theirs + alone)
                    for ours, theirs, alone in zip(found["orch"], found[tool], found["alone"], strict=True)
                )
                for tool in ("pdsh", "clush")
            ]
            seconds = [f"{middle[name]:.2f} s" for name in ways]
            rows.append((str(count), *seconds, *(f"{ratio:.2f}" for ratio in ratios)))
    table(f"agents up over SSH, fan-out {FANOUT} (aim on {MAIN_SIZE} hosts: at most 1.0)", rows)
    print("   agents alone: as many agents started by backend local, without SSH; medians, in turns")


def supervisor() -> None:
    """Processor and memory of the supervisor with 16 and 128 connected agents."""
    rows: list[tuple[str, ...]] = [("agents", "CPU of a core", "resident", "for each more agent")]
    first: tuple[int, int] | None = None
    with Box(max(SIZES)) as box:
        desk = Desk(box)
        for count in (min(SIZES), max(SIZES)):
            job = run(desk, count)
            job.until(lambda seen: seen["state"] == "RUNNING", "all ranks", LAUNCH_S_MAX)
            time.sleep(5.0)  # what follows a start: listings, first checkpoints' scan
            pid = job.supervisor().pid
            before, start_s = look(pid), time.monotonic()
            time.sleep(SPAN_S)
            after = look(pid)
            share = (after.cpu_s - before.cpu_s) / (time.monotonic() - start_s)
            each = (after.rss_bytes - first[1]) / (count - first[0]) / 1024 if first else None
            first = first or (count, after.rss_bytes)
            rows.append(
                (
                    str(count),
                    f"{100 * share:.1f} %",
                    f"{after.rss_bytes / 1e6:.0f} MB",
                    f"{each:.0f} KiB" if each is not None else "",
                )
            )
            end(desk, job)
    table(f"supervisor, a heartbeat a second from each agent (aim with {max(SIZES)}: under 10 %)", rows)


def look(pid: int) -> procfs.ProcStat:
    stat = procfs.stat(pid)
    assert stat is not None, f"process {pid} is gone"
    return stat


def cpu_s(host: Host) -> float:
    """Return the processor time of a host's processes, its part of SSH among them."""
    stats = [procfs.stat(one.proc.pid) for one in host.processes()]
    return sum(stat.cpu_s for stat in stats if stat)


def ship(desk: Desk, count: int) -> tuple[float, float, float]:
    """Return MB/s of logs from so many hosts, and the processor seconds per GB at home and on the hosts."""
    files = {"train.py": TALK.format(bytes=LOG_MIB << 20)}
    job = desk.submit(files, nodes=count, procs_per_node=1, monitor=STEADY, ssh={"hosts": f"node[1-{count}]"})
    logs = [job.folder.rank_log(1, rank) for rank in range(count)]
    hosts = desk.box.nodes[:count]
    job.wait_until(lambda: sum(log.exists() and log.stat().st_size > 0 for log in logs), "a first byte", LAUNCH_S_MAX)
    start_s, home_s, there_s = time.monotonic(), look(job.supervisor().pid).cpu_s, sum(map(cpu_s, hosts))
    begun = sum(log.stat().st_size for log in logs if log.exists())
    whole = count * (LOG_MIB << 20)
    job.wait_until(lambda: sum(log.stat().st_size for log in logs if log.exists()) >= whole, "all", SHIP_S_MAX)
    took_s, moved = time.monotonic() - start_s, whole - begun
    home_s = look(job.supervisor().pid).cpu_s - home_s
    there_s = sum(map(cpu_s, hosts)) - there_s
    end(desk, job)
    return moved / took_s / 1e6, home_s / moved * 1e9, there_s / moved * 1e9


def plain_ssh_mb_s(box: Box) -> float:
    """Return MB/s of bytes from one host through OpenSSH, for comparison."""
    words = ["sh", "-c", f"ssh -o BatchMode=yes node1 head -c {LOG_MIB << 20} /dev/zero | cat >/dev/null"]
    start_s = time.perf_counter()
    box.login.run(words, user="trainer", limit_s=SHIP_S_MAX)
    return (LOG_MIB << 20) / (time.perf_counter() - start_s) / 1e6


def logs() -> None:
    """Logs on their way home, from one host and from eight at once."""
    rows: list[tuple[str, ...]] = [("hosts", "in all", "each host", "supervisor", "on the hosts (ranks, agent, sshd)")]
    with Box(LOG_HOSTS) as box:
        desk = Desk(box)
        for count in (1, LOG_HOSTS):
            rate, home, there = map(
                statistics.median, zip(*[ship(desk, count) for _ in range(min(RUNS, 3))], strict=True)
            )
            rows.append(
                (
                    str(count),
                    f"{rate:.0f} MB/s",
                    f"{rate / count:.1f} MB/s",
                    f"{home:.1f} CPU s/GB",
                    f"{there:.1f} CPU s/GB",
                )
            )
        plain = statistics.median(plain_ssh_mb_s(box) for _ in range(min(RUNS, 3)))
    table(f"logs shipped home, {LOG_MIB} MiB from each host (ssh head | cat: {plain:.0f} MB/s)", rows)


BENCHES = {"launch": launch, "supervisor": supervisor, "logs": logs}


def main(names: list[str]) -> int:
    """Run the named benches, or all."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    missing = needs.missing()
    if missing:
        print(f"no figures of backend ssh: {missing}", file=sys.stderr)
        return 0
    for name in names or BENCHES:
        BENCHES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
