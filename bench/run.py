"""Figures, each against something else in the same run: `python bench/run.py [NAME …]` (all when none is named).

Machines differ and are shared, so every figure is a ratio of medians of runs taken in turns (A B A B …). Nothing here
is asserted; what the project aims at is printed beside what was found.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orchestrator
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.log_index import LogIndex

RUNS = int(os.environ.get("BENCH_RUNS", "5"))
RUN_S_MAX = 180.0
JOBS = 1000
LOG_S = 6000
"""Length of the logs of all ranks together, about 600 MB."""

TINY = textwrap.dedent('''
    """A tiny DDP training that stamps the time of its steps: the least a launcher can be measured by."""
    import os, sys, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    steps, out, width = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, width)
    with open(os.path.join(out, os.environ["RANK"] + "." + os.environ.get("ORCH_ATTEMPT", "1")), "w") as file:
        for step in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 0 or step == steps - 1 or step % 100 == 0:
                file.write(f"{step} {time.time()}\\n")
                file.flush()
    time.sleep(0.1)
    dist.destroy_process_group()
''')


def spec(folder: Path, command: str, *, nodes: int, procs: int) -> Path:
    """Write a job and return its file."""
    (folder / "train.py").write_text(TINY)
    file = folder / "job.yaml"
    file.write_text(f"name: bench\nnodes: {nodes}\nprocs_per_node: {procs}\nentrypoint: {command!r}\n")
    return file


def stamps(out: Path, ranks: int, step: int, attempt: int = 1) -> list[float]:
    """Wait for all ranks' time of a step, and return them."""
    deadline_s = time.monotonic() + RUN_S_MAX
    while time.monotonic() < deadline_s:
        found = []
        for rank in range(ranks):
            path = out / f"{rank}.{attempt}"
            lines = path.read_text().splitlines() if path.exists() else []
            found += [
                float(line.split()[1]) for line in lines if line.split()[0] == str(step) and len(line.split()) > 1
            ]
        if len(found) == ranks:
            return found
        time.sleep(0.01)
    raise TimeoutError(f"not all of {ranks} ranks made step {step} within {RUN_S_MAX:g} s")


def in_turns(*ways: Callable[[], float]) -> list[list[float]]:
    """Measure each way `RUNS` times, in turns, after one run that does not count."""
    for way in ways:
        way()
    return [list(column) for column in zip(*[[way() for way in ways] for _ in range(RUNS)], strict=True)]


def report(what: str, aim: str, ours: list[float], theirs: list[float], unit: str, against: str) -> None:
    """Print one comparison: medians, and the median of the pairwise ratios."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"{what}: {ratio:.3f} × {against} (aim: {aim})")
    print(f"    ours {statistics.median(ours):.4g} {unit} [{min(ours):.4g}-{max(ours):.4g}],", end=" ")
    print(f"{against} {statistics.median(theirs):.4g} {unit} [{min(theirs):.4g}-{max(theirs):.4g}], {len(ours)} pairs")
    sys.stdout.flush()


def orch(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("orch")), *words]


def wall_s(argv: list[str], env: dict[str, str]) -> float:
    """Run a command to its end and return its wall time in seconds."""
    start_s = time.perf_counter()
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, timeout=RUN_S_MAX)
    return time.perf_counter() - start_s


def status(folder: Path) -> None:
    """`orch status` with 1,000 finished jobs in the home against `python -c pass`."""
    home = folder / "home"
    env = {**os.environ, "ORCH_HOME": str(home)}
    (folder / "noop.py").write_text("pass\n")
    file = folder / "noop.yaml"
    file.write_text("name: noop\nprocs_per_node: 2\nentrypoint: noop.py\n")
    job = orchestrator.submit(file, environ=env)
    job.wait(RUN_S_MAX)
    time.sleep(1.0)  # the listing of packages is still written
    for number in range(JOBS - 1):
        copy = home / "jobs" / f"noop-20200101-000000{number:03d}-bb"
        copy.mkdir()
        for name in ("plan.json", "state.json", "ended", "journal.jsonl", "job.yaml"):
            shutil.copy2(job.folder.root / name, copy / name)
    bare = [sys.executable, "-c", "pass"]
    ours, theirs = in_turns(lambda: wall_s(orch("status"), env), lambda: wall_s(bare, env))
    report(f"orch status with {JOBS} finished jobs", "at most 8", ours, theirs, "s", "python -c pass")
    ours, theirs = in_turns(lambda: wall_s(orch("status", "--all"), env), lambda: wall_s(bare, env))
    report(f"orch status --all with {JOBS} finished jobs", "none", ours, theirs, "s", "python -c pass")


def pace(folder: Path) -> None:
    """Steps a second of 2 ranks with agent, hook and heartbeats, against the same script started by hand."""
    env = {**os.environ, "ORCH_HOME": str(folder / "home")}
    steps = 6001

    def speed(out: Path) -> float:
        first, last = max(stamps(out, 2, 1000)), max(stamps(out, 2, steps - 1))
        return (steps - 1001) / (last - first)

    def ours() -> float:
        out = Path(tempfile.mkdtemp(dir=folder))
        job = orchestrator.submit(spec(folder, f"train.py {steps} {out} 256", nodes=1, procs=2), environ=env)
        job.wait(RUN_S_MAX)
        return speed(out)

    def by_hand() -> float:
        out = Path(tempfile.mkdtemp(dir=folder))
        common = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, str(folder / "train.py"), str(steps), str(out), "256"],
                env={
                    **os.environ,
                    **common,
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                },
                start_new_session=True,
            )
            for rank in range(2)
        ]
        for process in processes:
            process.wait(RUN_S_MAX)
        return speed(out)

    spec(folder, "train.py", nodes=1, procs=2)
    a, b = in_turns(ours, by_hand)
    report("steps a second of 2 ranks", "at least 0.995", a, b, "steps/s", "by hand")


def _free_port() -> int:
    from orchestrator.agent.host.rendezvous import free_port

    return free_port(str(time.monotonic_ns()))


def cost(folder: Path) -> None:
    """Memory and processor time of the supervisor and of each agent while 2 × 2 ranks train."""
    env = {**os.environ, "ORCH_HOME": str(folder / "home")}
    out = Path(tempfile.mkdtemp(dir=folder))
    job = orchestrator.submit(spec(folder, f"train.py 100000 {out} 256", nodes=2, procs=2), environ=env)
    stamps(out, 4, 100)
    time.sleep(2.0)
    before = {pid: _look(pid) for pid in _ours(job)}
    span_s = 20.0
    time.sleep(span_s)
    for pid, (name, stat) in before.items():
        now = _look(pid)[1]
        share = 100 * (now.cpu_s - stat.cpu_s) / span_s
        print(f"{name} (pid {pid}): {now.rss_bytes / 1e6:.1f} MB resident, {share:.2f} % of a core (aim: 40 MB, 1 %)")
    job.cancel()
    job.wait(RUN_S_MAX)


def _ours(job: Any) -> list[int]:
    mark = str(job.folder.bundle).encode()
    return [pid for pid in procfs.pids() if mark in read(pid, "cmdline")]


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _look(pid: int) -> tuple[str, procfs.ProcStat]:
    stat = procfs.stat(pid)
    assert stat is not None
    return read(pid, "comm").decode().strip(), stat


def logs(folder: Path) -> None:
    """`orch logs` into a pipe, of one rank and of four, without and with secrets, against `cat` of the same files."""
    (folder / "noop.py").write_text("pass\n")
    tokens = {name: f"{name}-qZ7Wv9Kx2Jm4LoPq8RtY" for name in ("HF_TOKEN", "WANDB_API_KEY")}
    env = {**os.environ, **tokens, "ORCH_HOME": str(folder / "home")}
    for ranks, secrets, aim in ((1, [], 500), (1, [*tokens], 150), (4, [], 100), (4, [*tokens], 100)):
        file = folder / "noop.yaml"
        file.write_text(f"name: noop\nprocs_per_node: {ranks}\nentrypoint: noop.py\nsecrets: {secrets}\n")
        job = orchestrator.submit(file, environ=env)
        job.wait(RUN_S_MAX)
        paths = [job.folder.rank_log(1, rank) for rank in range(ranks)]
        for rank, path in enumerate(paths):
            _write_log(path, LogIndex(job.folder.rank_index(1, rank)), LOG_S // ranks)
        words = ["logs", job.id, *(["--rank", "0"] if ranks == 1 else [])]
        ours, theirs = in_turns(
            functools.partial(_piped, orch(*words), env),
            functools.partial(_piped, ["cat", *map(str, paths)], env),
        )
        what = f"orch logs, {ranks} rank{'s' * (ranks > 1)}, {len(secrets)} secrets"
        report(what, f"at least {aim} MB/s", ours, theirs, "MB/s", "cat")
        shutil.rmtree(job.folder.logs)


def _write_log(path: Path, index: LogIndex, span_s: int) -> None:
    """Write a log of a thousand lines a second, and its index with a record a second."""
    began_ns = time.time_ns() - 10**15
    with path.open("wb") as file:
        for second in range(span_s):
            lines = (
                f"2026-01-01 00:00:00 INFO step {second * 1000 + line:9d}  loss {1 / (line + 1):.6f}  lr 3.00e-04  12345 tokens/s\n"
                for line in range(1000)
            )
            file.write("".join(lines).encode())
            index.record(began_ns + second * 10**9, file.tell())
    index.close()


def _piped(argv: list[str], env: dict[str, str]) -> float:
    """Read a command's output to its end and return how many MB it has given a second, its start included."""
    start_s, size_bytes = time.perf_counter(), 0
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while block := os.read(process.stdout.fileno(), 1 << 20):
            size_bytes += len(block)
    return size_bytes / 1e6 / (time.perf_counter() - start_s)


BENCHES = {"status": status, "pace": pace, "cost": cost, "logs": logs}


def main(benches: Mapping[str, Callable[[Path], None]], names: list[str]) -> int:
    """Run the named benches, or all."""
    unknown = [name for name in names if name not in benches]
    if unknown:
        print(f"no bench {', '.join(unknown)}; there are {', '.join(benches)}", file=sys.stderr)
        return 2
    for name in names or benches:
        folder = Path(tempfile.mkdtemp(prefix=f"orch-bench-{name}-"))
        try:
            benches[name](folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(BENCHES, sys.argv[1:]))
