"""How does the cost of a supervisor grow with its job? `python -m bench.scale [NODES …] [brain]` (10, 100, 300, 1000, brain).

The real supervisor, with nodes of 8 ranks that stand-ins play on this machine (`bench.stand_ins`): one heartbeat a second
of each, a step a second. What the stand-ins cost does not count. Shares of a core are of the processor time of the
supervisor's process; the aims are for 1,000 nodes. Nothing is asserted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.stand_ins import PER_NODE
from orchestrator.__main__ import GC_THRESHOLD
from orchestrator.brain.brain import Brain
from orchestrator.brain.model import events as e
from orchestrator.core import codec
from orchestrator.core import observations as seen
from orchestrator.core.jobdir import home, requests, status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import PlannedNode, PlannedPool
from orchestrator.core.wire import orders, reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.journal import facts_file
from orchestrator.submission import credentials
from orchestrator.supervisor import main_loop
from orchestrator.supervisor import status as status_object
from tests.support import jobs
from tests.support.fake_backend import Backend

SIZES = (10, 100, 300, 1000)
BRAIN_SIZES = (100, 1000, 10_000)
STEADY_S = 12.0
SETTLE_S = 8.0
WAIT_S_MAX = 240.0
RUNS = 5
TICKS = os.sysconf("SC_CLK_TCK")


# The job


def plan_of(nodes: int, job_id: str) -> Plan:
    """Return the plan of a job whose hosts are chosen and fenced, as over SSH and on Slurm."""
    plan = jobs.plan(name="scale", nodes=1, procs_per_node=PER_NODE, restart={"backoff": 0})
    hosts = tuple(PlannedNode(f"node-{index}", f"host-{index}", "", (), ()) for index in range(nodes))
    limits = dataclasses.replace(plan.limits, fence_s=0.6 * plan.limits.node_timeout_s)
    pool = PlannedPool(nodes, PER_NODE, 0, 0)
    return dataclasses.replace(plan, id=job_id, nodes=hosts, limits=limits, pool=pool, heartbeat_s=1.0)


def make(place: Path, nodes: int) -> JobDir:
    """Make the folder of a job that was just submitted."""
    job = JobDir(place / "jobs" / home.new_id("scale", time.time()))
    for folder in (job.root, job.requests, job.logs):
        folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of(nodes, job.id)
    job.plan.write_text(codec.dumps(plan))
    credentials.write_credentials(job.secrets, plan, {"PATH": os.environ["PATH"]}, None)
    return job


def supervise(job: JobDir) -> subprocess.Popen[bytes]:
    """Start the supervisor."""
    with job.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.scale", "supervise", str(job.root)], stdout=log, stderr=log
        )


def stand_ins(job: JobDir, nodes: int) -> subprocess.Popen[bytes]:
    """Start the nodes."""
    with (job.root / "stand-ins.log").open("ab") as log:
        words = [sys.executable, "-m", "bench.stand_ins", str(job.root), "0", str(nodes)]
        return subprocess.Popen(words, stdout=log, stderr=log)


# What is seen


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int, name: str) -> float:
    """Return a line of a process's status, in MB."""
    found = re.search(rf"{name}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def await_(what: str, is_done: Callable[[], Any]) -> float:
    """Wait; return the time at which it was done."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not is_done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.02)
    return time.time()


def state(job: JobDir) -> dict[str, Any]:
    """Return the job's status file."""
    try:
        status: dict[str, Any] = json.loads(job.state.read_text())
    except (OSError, ValueError):
        return {"state": "", "attempt": 0, "step": None, "nodes": []}
    return status


def lines(job: JobDir, name: str) -> list[dict[str, Any]]:
    path = job.root / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def arrived(job: JobDir, order: str, attempt: int) -> list[float]:
    """Return when an order of an attempt has arrived at each node."""
    return [one["at"] for one in lines(job, "arrivals.jsonl") if (one["order"], one["attempt"]) == (order, attempt)]


def all_arrived(job: JobDir, order: str, attempt: int, nodes: int) -> float:
    """Wait until every node has an order, and return when the last got it."""
    await_(f"{order} at all nodes", lambda: len(arrived(job, order, attempt)) >= nodes)
    return max(arrived(job, order, attempt))


def steps_within(job: JobDir, attempt: int) -> None:
    """Wait until the status shows a step of an attempt."""
    await_(f"steps of attempt {attempt}", lambda: (now := state(job))["attempt"] == attempt and now["step"])


def shown(job: JobDir, span_s: float) -> Iterator[tuple[int, float]]:
    """Yield each step with the time at which the status file first had it."""
    last, until_s = None, time.monotonic() + span_s
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), job.state.open("rb") as file:
            written_s = os.fstat(file.fileno()).st_mtime_ns / 1e9
            found = re.search(rb'"step": (\d+)', file.read(4096))
            if found and int(found[1]) != last:
                if last is not None:
                    yield int(found[1]), written_s
                last = int(found[1])
        time.sleep(0.01)


def verb(job: JobDir, *words: str) -> tuple[float, float, int]:
    """Run a verb; return its median time, the processor time, and the size of its output."""
    taken = []
    for _ in range(RUNS if words[0] != "stacks" else 2):
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        env = {**os.environ, "ORCH_HOME": str(job.root.parents[1])}
        done = subprocess.run([sys.executable, "-m", "orchestrator.cli", *words, job.id], env=env, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode:
            print(f"  {words}: {done.stderr.decode()[-500:]}", flush=True)
        taken.append((time.perf_counter() - began_s, spent_s, len(done.stdout)))
    walls, cpus, sizes = zip(*taken, strict=True)
    return statistics.median(walls), statistics.median(cpus), max(sizes)


# The measurements


def measure(place: Path, nodes: int) -> None:
    """Take one job of so many nodes from its start to its end, and print what that costs."""
    job = make(place, nodes)
    began_s = time.time()
    processes = [supervise(job), stand_ins(job, nodes)]
    try:
        print(f"{nodes} nodes, {nodes * PER_NODE} ranks", flush=True)
        all_arrived(job, "Start", 1, nodes)
        steps_within(job, 1)
        say(
            "start: until all nodes have the order to start",
            f"{max(arrived(job, 'Start', 1)) - began_s:.1f} s",
        )
        say("  processor time of that", f"{cpu_s(processes[0].pid):.1f} s")
        time.sleep(SETTLE_S)
        steady(job, processes[0].pid)
        for words in (("status",), ("status", "--json"), ("why",), ("stacks",)):
            wall_s, spent_s, size = verb(job, *words)
            say(
                f"orch {' '.join(words)}",
                f"{wall_s:.2f} s, of it {spent_s:.2f} s processor, {size / 1e3:.0f} kB",
            )
        next_attempt(job, processes[0].pid, nodes)
        time.sleep(SETTLE_S)
        processes[0] = revive(job, processes[0], nodes)
        cancel(job, nodes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def say(what: str, text: str) -> None:
    print(f"  {what}: {text}", flush=True)


def steady(job: JobDir, pid: int) -> None:
    """Measure while all trains: share of a core, memory, the age of what the status file shows, and its own cost."""
    before_s, journal_before, began_s = cpu_s(pid), job.journal.stat().st_size, time.monotonic()
    ages = []
    for step, written_s in shown(job, STEADY_S):
        told = [one["at"] for one in lines(job, "steps.jsonl") if one["step"] == step]
        ages += [written_s - told[-1]] if told else []
    span_s = time.monotonic() - began_s
    say("a core's share in steady state (aim: 35 %)", f"{100 * (cpu_s(pid) - before_s) / span_s:.1f} %")
    say("memory", f"{memory_mb(pid, 'VmRSS'):.0f} MB, at most {memory_mb(pid, 'VmHWM'):.0f} MB")
    if ages:
        say(
            "from a beat to state.json",
            f"{statistics.median(ages):.2f} s, at most {max(ages):.2f} s ({len(ages)} steps)",
        )
    say("journal", f"{(job.journal.stat().st_size - journal_before) / span_s / 1e3:.1f} kB/s")
    facts, plan = facts_file.read(job).facts, codec.loads(Plan, job.plan.read_bytes())
    spent_s = cost(
        lambda: codec.dumps_plain(
            status_file.to_json(status_object.status(plan, facts, status_object.Now(facts.last_event_at, time.time())))
        )
    )
    say("state.json", f"{job.state.stat().st_size / 1e6:.2f} MB, {1000 * spent_s:.1f} ms of processor to make")


def cost(act: Callable[[], object]) -> float:
    """Return the least processor time of a call."""
    taken = []
    for _ in range(3):
        began_s = time.process_time()
        act()
        taken.append(time.process_time() - began_s)
    return min(taken)


def next_attempt(job: JobDir, pid: int, nodes: int) -> None:
    """Ask for another attempt: measure its stop and its start."""
    before_s = cpu_s(pid)
    asked_s = time.time()
    requests.send(job.requests, "restart")
    stop_s = all_arrived(job, "Stop", 1, nodes)
    start_s = all_arrived(job, "Start", 2, nodes)
    first = [min(arrived(job, "Stop", 1)), min(arrived(job, "Start", 2))]
    steps_within(job, 2)
    say("orch restart: until all nodes have the order to stop (aim: 2 s)", f"{stop_s - asked_s:.2f} s")
    say(
        "  from the first node that has it to the last: stop, start",
        f"{stop_s - first[0]:.2f} s, {start_s - first[1]:.2f} s",
    )
    say("  until all have that to start again", f"{start_s - asked_s:.2f} s")
    say("  processor time until the first step", f"{cpu_s(pid) - before_s:.1f} s")


def revive(job: JobDir, old: subprocess.Popen[bytes], nodes: int) -> subprocess.Popen[bytes]:
    """Kill the supervisor and start it again: measure until it has all its nodes."""
    old.kill()
    old.wait()
    killed_s = time.time()
    job.state.unlink()
    new = supervise(job)
    are_back = await_("all nodes again", lambda: _up(job) == nodes)
    say(
        "revival after kill -9: until all nodes are back",
        f"{are_back - killed_s:.1f} s, {cpu_s(new.pid):.1f} s processor",
    )
    return new


def _up(job: JobDir) -> int:
    return sum(node["state"] == "up" for node in state(job)["nodes"])


def cancel(job: JobDir, nodes: int) -> None:
    """Cancel the job: measure until all nodes are told, and until it has ended."""
    asked_s = time.time()
    requests.send(job.requests, "cancel")
    stop_s = all_arrived(job, "Stop", 2, nodes)
    over_s = await_("the end", lambda: state(job)["state"] == "CANCELLED")
    say("orch cancel: until all nodes have the order to stop (aim: 2 s)", f"{stop_s - asked_s:.2f} s")
    say("  until the job has ended", f"{over_s - asked_s:.2f} s")


# The brain alone


def brain(nodes: int) -> None:
    """Measure what a running job's heartbeats and a decision cost, without processes and connections."""
    plan = plan_of(nodes, "scale")
    alone = Brain()
    alone.learn(jobs.planned(plan))
    alone.learn(e.SupervisorStarted(0.0, 1))
    now_s = play(alone, nodes)
    beats, learned, decided = RUNS, 0.0, []
    for count in range(1, beats + 1):
        now_s += 1.0
        ranks = {index: tuple(_beat(rank, count) for rank in _ranks(index)) for index in range(nodes)}
        began_s = time.process_time()
        for index in range(nodes):
            alone.learn(e.FromNode(now_s, f"node-{index}", reports.Heartbeat(1, ranks[index])))
        learned += time.process_time() - began_s
        began_s = time.process_time()
        decisions, _ = alone.decide(now_s)
        decided.append(time.process_time() - began_s)
        for decision in decisions:
            alone.learn(decision)
    say(
        f"the brain alone with {nodes} nodes",
        f"{1e6 * learned / beats / nodes:.0f} µs to learn a beat, {1000 * min(decided):.1f} ms to decide, "
        f"{1000 * cost(lambda: alone.take_heartbeats()):.1f} ms to coalesce all beats",
    )


def _ranks(index: int) -> range:
    return range(index * PER_NODE, (index + 1) * PER_NODE)


def _beat(rank: int, steps: int) -> RankHeartbeat:
    return RankHeartbeat(
        rank, steps, "R", 120 * steps, 11.7 * steps, 93_571 * steps, 1.0, 0.61 if steps < 5 else 0.62, groups=("0123456789abcdef",),
        collective_counts=(seen.CollectiveCounts(steps, 0, steps, (12 * steps,)),), optimizer_steps=steps,
    )  # fmt: skip


def play(alone: Brain, nodes: int) -> float:
    """Bring a job up: answer all orders at once; return the time by the job's clock."""
    from orchestrator.brain.model import decisions as d

    now_s, began_s, rounds = 0.0, time.process_time(), 0
    while alone.facts.attempt is None or alone.facts.attempt.running_at is None:
        now_s, rounds = now_s + 0.1, rounds + 1
        assert rounds < 100, "the job does not start"
        decisions, _ = alone.decide(now_s)
        for decision in decisions:
            alone.learn(decision)
        for decision in decisions:
            match decision:
                case d.Launch(node=node):
                    alone.learn(e.AgentUp(now_s, node, f"boot-{node}", 0, 0, "10.0.0.1", 0, ()))
                case d.To(node=node, order=orders.Prepare()):
                    first = (seen.Address("10.0.0.1", "eth0"),) if node == "node-0" else ()
                    alone.learn(e.FromNode(now_s, node, reports.Prepared(1, "10.0.0.1", 29500, first)))
                case d.To(node=node, order=orders.Probe()):
                    alone.learn(
                        e.FromNode(now_s, node, reports.Probed(1, (seen.ReachableAddress("10.0.0.1", "eth0"),), ()))
                    )
                case d.To(node=node, order=orders.Start()):
                    pids = tuple(range(PER_NODE))
                    alone.learn(e.FromNode(now_s, node, reports.Started(1, pids)))
                case _:
                    pass
    say(f"the brain alone starts {nodes} nodes in", f"{time.process_time() - began_s:.2f} s of processor")
    return now_s


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["supervise"]:
        gc.set_threshold(*GC_THRESHOLD)  # as `orch.pyz supervise` does
        os._exit(main_loop.supervise(Path(words[1]), lambda job, plan: Backend()))
    place = Path(tempfile.mkdtemp(prefix="orch-bench-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for nodes in [int(word) for word in words if word.isdigit()] or ([] if words else SIZES):
            measure(place / str(nodes), nodes)
        for nodes in BRAIN_SIZES if not words or "brain" in words else ():
            brain(nodes)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
