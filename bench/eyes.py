"""What do the eyes cost those who are looked at? `python -m bench.eyes`: the hook in a rank, a beat of the agent.

In processor time, which a busy machine falsifies least. The aims stand beside.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from orchestrator.agent.host import hook_files
from orchestrator.agent.ranks import step_counter
from orchestrator.agent.ranks.hook import layout
from orchestrator.agent.ranks.processes import NodeRanks, RankProcess
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.log_index import LogIndex
from tests.support.watch import SAY_READY, watching

ROUNDS = 7
STEPS = 20_000
BEATS = 200
RANKS = 8
RUNS = 5
RUN_S_MAX = 120.0
LOOKS = 7
LOOK_PAUSE_S = 2.0

STEP = f"""
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(int(sys.argv[1]) - 1)]
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], lr=0.1)
optimizer.step()  # the step file is claimed, the groups have their columns
(after_step,) = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.values()
best_ns = float("inf")
for _ in range({ROUNDS}):
    began_ns = time.thread_time_ns()
    for _ in range({STEPS}):
        after_step(optimizer, (), dict())
    best_ns = min(best_ns, time.thread_time_ns() - began_ns)
print(best_ns / {STEPS})
"""
IMPORT = "import torch\nprint(0)\n"


def rank(root: Path) -> dict[str, str]:
    """Lay out a rank's folder and return its environment."""
    folder = Path(tempfile.mkdtemp(dir=root))
    hook_files.install_hook(folder)
    step_counter.create_step_file(folder / layout.STEP_FILE)
    own = {
        layout.RANK_DIR_ENV: str(folder),
        layout.STACK_SIGNAL_ENV: "50",
        "RANK": "0",
        "PYTHONPATH": str(folder / "hook"),
    }
    env = {**os.environ, **own, layout.SOCKET_ENV: "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # a node's first rank compiles the hook for the others
    return env


def said(text: str, env: dict[str, str], *args: str) -> float:
    """Run a script and return the number that it prints."""
    argv = [sys.executable, "-c", text, *args]
    return float(subprocess.run(argv, env=env, check=True, capture_output=True, timeout=RUN_S_MAX).stdout)


def step(root: Path) -> None:
    """One optimizer step's share of the hook, by the number of process groups."""
    for count in (1, 4, 8):
        print(f"hook, a step with {count} groups: {said(STEP, rank(root), str(count)):.0f} ns (aim: below 5,000)")


def start(root: Path) -> None:
    """What the hook adds to the start of Python, and to `import torch`, where it starts the worker server."""
    bare = dict(os.environ)
    for what, text, aim in (("python -c pass", "print(0)", 5), ("import torch", IMPORT, 10)):
        pairs = []
        hooked = rank(root)
        said(text, hooked)
        for _ in range(RUNS):
            took = []
            for env in (hooked, bare):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                said(text, env)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            pairs.append(took[0] - took[1])
        print(f"hook, added to {what}: {statistics.median(pairs) * 1e3:.1f} ms of CPU (aim: below {aim}; {RUNS} pairs)")


def beat(root: Path) -> None:
    """One beat of an agent with 8 ranks that have 1,000 steps and 8 groups each."""
    job = JobDir(root / "job")
    job.attempt_logs(1).mkdir(parents=True)
    processes, sleepers = [], []
    for number in range(RANKS):
        env = rank(root)
        said(STEP, env, "8")
        sleeper = subprocess.Popen(["sleep", "600"])
        sleepers.append(sleeper)
        folder = Path(env[layout.RANK_DIR_ENV])
        index = LogIndex(job.rank_index(1, number))
        reader = step_counter.StepCounter(folder / layout.STEP_FILE)
        processes.append(RankProcess(number, sleeper.pid, folder, job.rank_log(1, number), index, reader))
    ranks = NodeRanks(1, job, "node", processes)
    took_s = []
    try:
        for _ in range(BEATS):
            for process in processes:
                process.optimizer_steps = process.steps - 100
            began_s = time.perf_counter()
            ranks.heartbeats()
            took_s.append(time.perf_counter() - began_s)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
        ranks.close()
    print(f"agent, a beat of {RANKS} ranks: {statistics.median(took_s) * 1e3:.2f} ms (aim: below 1)")


def look(root: Path) -> None:
    """Looks at 8 ranks that have torch, with their pages on the disk."""
    script = f"import time, torch.distributed\n{SAY_READY}time.sleep(600)\n"
    with watching(root / "looked", script, ranks=RANKS, **{layout.SOCKET_ENV: "1"}) as watch:
        took_s = []
        for _ in range(LOOKS):
            began_s = time.perf_counter()
            watch.look()
            took_s.append(time.perf_counter() - began_s)
            time.sleep(LOOK_PAUSE_S)
    worst_s = max(took_s)
    print(f"agent, a look at {RANKS} ranks: {statistics.median(took_s):.2f} s, worst {worst_s:.2f} s (aim: below 2)")


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="orch-bench-eyes-"))
    try:
        for bench in (step, start, beat, look):
            bench(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
