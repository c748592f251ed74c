"""What does a checkpoint cost ranks, and a lost host the job? `python -m bench.checkpoints [stall] [host]` (both by default).

- stall: a rank with 2 GB of state on this machine, by torch.save and by torch.distributed.checkpoint, to disk, to memory
  (`checkpoint.memory`) and in the background (`checkpoint.async`, where this version has it), in turns. Stalls are seen by the script.
- host: on a cluster in a box whose hosts send 1 Gbit/s: until a checkpoint outlives its host, and what the host's loss costs.

Nothing is asserted; the aims stand beside. Medians of `BENCH_RUNS` (3).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

import orchestrator
from bench.ssh import table
from orchestrator.core.checkpoints import ledger, memory
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.layout import JobDir
from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, TOGETHER, Desk, Job

RUNS = int(os.environ.get("BENCH_RUNS", "3"))
STATE_BYTES = int(float(os.environ.get("BENCH_GB", "2")) * 1e9)
RUN_S_MAX = 300.0
POLL_S = 0.05
SAVES = 2
PAUSE_S = 12.0
"""Between two saves: time to copy one, and to train undisturbed afterwards."""

MEMORY = {"memory": f"{6 * STATE_BYTES // 10**6}M"}
WAYS: dict[str, dict[str, str]] = {"disk": {}, "memory": MEMORY, "async": {"async": "dcp"}}
FORMATS = {"torch.save": ("disk", "memory"), "dcp": ("disk", "memory", "async")}

TRAIN = """
import os, sys, time, torch
import torch.distributed.checkpoint as dcp

form, size, saves, pause_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(1)
folder = os.environ["ORCH_CHECKPOINT_DIR"]
layer = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
x = torch.randn(256, 512)
state = {f"part{number}": torch.full((size // 32,), float(number)) for number in range(8)}


def save(step):
    if form == "dcp":
        dcp.save(state, checkpoint_id=f"{folder}/step-{step}", no_dist=False)
    else:
        torch.save(state, f"{folder}/step-{step}.pt")


step, end_s = 0, time.time() + 5
for number in range(saves + 1):
    while time.time() < end_s or step < 100:
        begin_s, cpu_s = time.time(), time.process_time()
        optimizer.zero_grad()
        for _ in range(4):
            layer(x).square().mean().backward()
        optimizer.step()
        step += 1
        print("step", step, begin_s, time.time(), time.process_time() - cpu_s, flush=True)
    if number < saves:
        begin_s = time.time()
        save(step)
        print("save", step, begin_s, time.time(), 0, flush=True)
    end_s = time.time() + pause_s
"""

SAVER = (
    TOGETHER
    + """
block = os.urandom(1 << 20)
folder, every_s, next_s = Path(os.environ["ORCH_CHECKPOINT_DIR"]), float(os.environ["EVERY_S"]), 0.0


def at_step(step):
    global next_s
    together(True)
    if rank == 0 or time.monotonic() < next_s or step < 20:
        return
    with open(folder / f"step-{step - 1}.bin", "wb") as file:
        for _ in range(int(os.environ["BYTES"]) >> 20):
            file.write(block)
    next_s = time.monotonic() + every_s


meet()
resume_from = os.environ["ORCH_RESUME_FROM"]
run(1000000, 0.05, at_step, int(Path(resume_from).stem.rpartition("-")[2]) if resume_from else 0)
"""
)
"""Two ranks that make 20 steps a second together; the second saves at step 20, and then every so many seconds."""

WIRE_MBIT = 1000
SHM = "/mnt/memory"
MOUNT = (
    f"umount -l {SHM} 2>/dev/null; mkdir -p {SHM} && mount -t tmpfs -o size={12 * STATE_BYTES},mode=1777 memory {SHM}"
)
"""A host's own /dev/shm is small."""
EVERY_S = 10.0
LOST_BYTES = STATE_BYTES // 4
"""State of the rank whose host is lost: as much as such a wire carries to two places within the time between two checkpoints."""
CUT_S = (5.0, 7.0, 9.0)
"""How long after a checkpoint was written its host loses its power, by run."""


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def aimed(value: float, unit: str = " s") -> str:
    return "-" if value != value else f"{value:.2f}{unit}"


def is_home(one: Checkpoint) -> bool:
    return not memory.find_missing(one, [place for place in one.locations if not place.host])


def watch(job: JobDir, is_over: Callable[[Mapping[int, dict[str, float]]], bool]) -> dict[int, dict[str, float]]:
    """Watch a job's ledger; return when each checkpoint was written, safe and at home, by number."""
    found: dict[int, dict[str, float]] = {}
    end_s = time.monotonic() + RUN_S_MAX
    while not is_over(found):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{job.root}: not within {RUN_S_MAX:g} s: {found}")
        for number, one in ledger.read(job.root, job.ledger)[0].items():
            if not one.written_ns:
                continue
            times = found.setdefault(number, {"written": one.written_ns / 1e9})
            if one.state is CheckpointState.WHOLE:
                holds = {"safe": memory.is_safe(one), "home": is_home(one)}
                times |= {name: time.time() for name, so in holds.items() if so and name not in times}
        time.sleep(POLL_S)
    return found


# Stalls


def train(folder: Path, form: str, way: str) -> dict[str, float]:
    """Run the training once; return its figures: all times in seconds. None of them if this version does not know the way."""
    (folder / "train.py").write_text(TRAIN)
    spec = {
        "name": "bench", "procs_per_node": 1, "checkpoint": {"keep": 3, **WAYS[way]},
        "entrypoint": f"train.py {form} {STATE_BYTES} {SAVES} {PAUSE_S}",
    }  # fmt: skip
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    try:
        job = orchestrator.submit(folder / "job.yaml", environ={**os.environ, "ORCH_HOME": str(folder / "home")})
    except UserError as err:
        if way != "async":
            raise
        print(f"   {way} is left out: {err}")
        return {}
    try:
        seen = watch(job.folder, lambda found: job.folder.ended.exists())
        lines = [line.split() for line in job.folder.rank_log(1, 0).read_text().splitlines()]
        lines = [words for words in lines if words[:1] in (["save"], ["step"])]
    finally:
        if not job.folder.ended.exists():
            job.cancel()
        job.wait(RUN_S_MAX)
        shutil.rmtree(folder / "home", ignore_errors=True)
    saved = [(float(begin), float(end)) for what, _, begin, end, _ in lines if what == "save"]
    steps = [(float(begin), float(end), float(cpu)) for what, _, begin, end, cpu in lines if what == "step"]
    safe = sorted(times["safe"] for times in seen.values() if "safe" in times)
    spans = [(end, at) for (_, end), at in zip(saved, safe, strict=False)]
    began_s = steps[0][0] + 2.0  # what a start costs is over
    busy, quiet = list[tuple[float, float]](), list[tuple[float, float]]()
    for begin, end, cpu in steps:
        if any(since <= begin and end <= until for since, until in spans):
            busy.append((end - begin, cpu))
        elif begin > began_s and not any(since <= end and begin < until + 1.0 for since, until in spans):
            quiet.append((end - begin, cpu))
    return {
        "stall": median([end - begin for begin, end in saved]),
        "safe": median([at - end for end, at in spans]),
        **{
            name: 100 * (median([one[at] for one in busy]) / median([one[at] for one in quiet]) - 1)
            for at, name in enumerate(("wall", "processor"))
        },
    }


def stall() -> None:
    """To disk, to memory and in the background, in turns."""
    rows: list[tuple[str, ...]] = [
        ("saved by", "to", "stall", "of that on disk", "until on disk", "steps meanwhile", "their processor time")
    ]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="orch-bench-checkpoints-", dir="/var/tmp") as place:
        for _ in range(RUNS):
            for form, ways in FORMATS.items():
                for way in ways:
                    found.setdefault((form, way), []).append(train(Path(place), form, way))
    for (form, way), runs in found.items():
        if all(runs):
            pairs = zip(runs, found[form, "disk"], strict=True)
            ratio = median([one["stall"] / other["stall"] for one, other in pairs])
            figures = {name: median([one[name] for one in runs]) for name in runs[0]}
            slower = [f"{figures[name]:+.1f} %" for name in ("wall", "processor")]
            rows.append((form, way, aimed(figures["stall"]), aimed(ratio, ""), aimed(figures["safe"]), *slower))
    load = os.getloadavg()[0]
    table(f"a rank with {STATE_BYTES / 1e9:g} GB of state (aims: memory at most 0.4 of disk, steps 1 % slower)", rows)
    print(
        f"   steps meanwhile: from the save to the disk against those without a copy, medians; load {load:.1f} at the end"
    )


# Hosts


def submit(desk: Desk, way: str, size_bytes: int, every_s: float) -> Job:
    """Submit a rank on node1 and one on node2, with a spare; what ends a job undoes what is done to hosts."""
    for node in desk.box.nodes:
        desk.box.slow_wire(node.name, WIRE_MBIT)
        node.run(["sh", "-c", MOUNT])
    return desk.submit(
        {**FAKE_TORCH, "train.py": SAVER}, nodes=2, spares=1, procs_per_node=1, ssh={"hosts": "node[1-3]"},
        checkpoint={"keep": 3, **WAYS[way], **({"memory_dir": SHM} if way == "memory" else {})}, env={"BYTES": str(size_bytes), "EVERY_S": str(every_s)},
    )  # fmt: skip


def travel(desk: Desk, way: str) -> dict[str, float]:
    """Return how long after it was written one checkpoint was safe, and at home."""
    job = submit(desk, way, STATE_BYTES, 10 * RUN_S_MAX)
    times = watch(job.folder, lambda found: "home" in found.get(1, {}))[1]
    desk.clear_up()
    return {name: times[name] - times["written"] for name in ("safe", "home")}


def lose(desk: Desk, way: str, cut_s: float) -> dict[str, float]:
    """Switch the host off so long after a checkpoint was written; return how many steps that costs, and how long it takes."""
    job = submit(desk, way, LOST_BYTES, EVERY_S)
    written_s = watch(job.folder, lambda found: 4 in found)[4]["written"]
    time.sleep(max(0.0, written_s + cut_s - time.time()))
    desk.box.power_off("node2")
    job.until(lambda seen: seen["attempt"] == 2 and (seen["step"] or 0) > 0, "a step of the next attempt", RUN_S_MAX)
    first = job.why()[0]
    begun = json.loads(desk.orch("why", job.id, "--json").stdout)["attempts"][1]["resumed_from"] or "step-0.bin"
    desk.clear_up()
    return {"steps": first["last_step"] - int(Path(begun).stem.rpartition("-")[2])}


def host() -> None:
    """Both ways, in turns, each with the wire of the other."""
    ways: dict[str, list[dict[str, float]]] = {"disk": [], "memory": []}
    with Box(3) as box:
        desk = Desk(box)
        for turn in range(RUNS):
            for way, runs in ways.items():
                runs.append({**travel(desk, way), **lose(desk, way, CUT_S[turn % len(CUT_S)])})
                print("  ", way, runs[-1], flush=True)
    rows: list[tuple[str, ...]] = [("to", "until safe", "until home", "steps that a lost host costs", "which are")]
    for way, runs in ways.items():
        figures = {name: median([one[name] for one in runs]) for name in runs[0]}
        steps = "/".join(f"{one['steps']:.0f}" for one in runs)
        rows.append((way, aimed(figures["safe"]), aimed(figures["home"]), steps, aimed(figures["steps"] * 0.05)))
    table(f"a checkpoint of {STATE_BYTES / 1e9:g} GB on a host that sends {WIRE_MBIT / 1000:g} Gbit/s", rows)
    cuts = "/".join(f"{cut:g}" for cut in CUT_S[:RUNS])
    print(f"   lost: {LOST_BYTES / 1e9:g} GB every {EVERY_S:g} s at 20 steps/s, {cuts} s after the fourth was written")


def main(names: list[str]) -> None:
    parts = {"stall": stall, "host": host}
    for name in names or parts:
        parts[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
