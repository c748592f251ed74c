"""Figures of one machine, each beside something else in the same run: printed, and not asserted beyond sanity."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.run import orch, read, stamps
from bench.starts import torchrun
from orchestrator.core.host import procfs
from tests.gpu.machine import BEGIN, DEVICE, ON_GPU, ONE_RANK, TWO_RANKS
from tests.support.local import Desk

pytestmark = pytest.mark.gpu

RUN_S_MAX = 120.0
END_S_MAX = 20.0

STAMPED = f"""{BEGIN}
steps, out, wide = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.Linear(wide, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(16, wide, device=device)
name = f"{{rank}}." + os.environ.get("ORCH_ATTEMPT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "1"))
with open(os.path.join(out, name), "w") as file:
    for step in range(steps):
        model(batch).square().mean().backward()
        dist.all_reduce(torch.ones(4))
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step == 0 or step == steps - 1 or step % 100 == 0:
            file.write(f"{{step}} {{time.time()}}\\n")
            file.flush()
dist.destroy_process_group()
"""
USUAL = {"heartbeat_s": 1, "stop_grace": 1}
"""As users have it; other tests look more often."""
RUNS = 3
FIRST, LAST = 1000, 4000
"""Steps of a run for the step time: between these two."""


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """At the end of the block the process is gone, with all that it has started."""
    try:
        yield process
    finally:
        below = procfs.descendants(process.pid)
        process.terminate()
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S_MAX)
        for pid in below:
            if b"elastic.py" in read(pid, "cmdline"):
                os.kill(pid, signal.SIGKILL)


def test_restart_after_a_kill_beside_torchrun(desk: Desk, tmp_path: Path, say: Callable[[str], None]) -> None:
    """From the kill of one of two ranks to the next attempt's first step on both."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    job = desk.submit({"train.py": STAMPED}, entrypoint=f"train.py 100000 {ours} 64", monitor=USUAL, **TWO_RANKS)
    stamps(ours, 2, 100)
    began_s = time.time()
    os.kill(job.rank_procs()[1].pid, signal.SIGKILL)
    our_s = max(stamps(ours, 2, 0, attempt=2)) - began_s
    job.job.cancel()
    job.wait()
    script = tmp_path / "elastic.py"
    script.write_text(STAMPED)
    words = [*torchrun(2), "--max-restarts=1", str(script), "100000", str(theirs), "64"]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with ended(subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL, start_new_session=True)) as process:
        stamps(theirs, 2, 100, attempt=0)
        began_s = time.time()
        os.kill(max(procfs.descendants(process.pid)), signal.SIGKILL)
        their_s = max(stamps(theirs, 2, 0, attempt=1)) - began_s
    say(f"restart after kill -9, to the first step: {our_s:.2f} s, torchrun {their_s:.2f} s, {our_s / their_s:.2f} ×")
    assert 0 < our_s < RUN_S_MAX and 0 < their_s < RUN_S_MAX


def test_step_time_beside_plain_python(desk: Desk, tmp_path: Path, say: Callable[[str], None]) -> None:
    """One rank, a few runs each in turns: under orch, and by hand."""
    script = tmp_path / "alone.py"
    script.write_text(STAMPED)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    found: dict[str, list[float]] = {"orch": [], "python": []}
    for number in range(RUNS):
        for how, each_s in found.items():
            out = tmp_path / f"{how}-{number}"
            out.mkdir()
            words = [str(LAST + 1), str(out), "512"]
            if how == "orch":
                job = desk.submit(
                    {"train.py": STAMPED},
                    entrypoint=f"train.py {' '.join(words)}",
                    monitor=USUAL,
                    env={"OMP_NUM_THREADS": "1"},
                    **ONE_RANK,
                )
                assert job.wait()["state"] == "SUCCEEDED"
            else:
                env = {**os.environ, **alone}
                subprocess.run([sys.executable, str(script), *words], env=env, check=True, timeout=RUN_S_MAX)
            (first_s,), (last_s,) = stamps(out, 1, FIRST), stamps(out, 1, LAST)
            each_s.append((last_s - first_s) / (LAST - FIRST))
    ours_s, theirs_s = (min(each_s) for each_s in found.values())
    say(f"step time: {ours_s * 1e3:.3f} ms, plain python {theirs_s * 1e3:.3f} ms, {ours_s / theirs_s:.3f} ×")
    assert 0 < ours_s < 10 * theirs_s, found


WIDE, LAYERS = 3536, 12
"""150 million parameters."""
EVERY, ROUNDS = 4, {"cpu": 10, "cuda": 40}[DEVICE]
USUAL_EVERY = 500
COST_MAX = 0.005

SUMMED = f"""{BEGIN}
import statistics
model = torch.nn.Sequential(*(torch.nn.Linear({WIDE}, {WIDE}, bias=False) for _ in range({LAYERS}))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
batch = torch.randn({"64" if DEVICE == "cuda" else "4"}, {WIDE}, device=device)
took_s = []
for step in range(1, {EVERY * ROUNDS} + 1):
    began_s = time.perf_counter()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took_s.append(time.perf_counter() - began_s)
rounds = [took_s[at : at + {EVERY}] for at in range({EVERY}, len(took_s), {EVERY})]
plain = [statistics.median(one[1:-1]) for one in rounds]  # the sum is made in the last, and read in the next
more = [one[-1] - usual for one, usual in zip(rounds, plain)]
print("FIGURES", sum(one.numel() for one in model.parameters()), statistics.median(plain), statistics.median(more), flush=True)
"""


def test_cost_of_comparing_replicas(desk: Desk, say: Callable[[str], None]) -> None:
    """What the sum of 150 million parameters adds to its step, as a share of the 500 steps that it is made after."""
    job = desk.submit({"train.py": SUMMED}, entrypoint="train.py", monitor={"compare_replicas": EVERY}, **ONE_RANK)
    assert job.wait(RUN_S_MAX)["state"] == "SUCCEEDED", job.job.why()
    count, usual_s, more_s = map(float, job.log().partition("FIGURES")[2].split()[:3])
    share = max(more_s, 0.0) / (usual_s * USUAL_EVERY)
    say(
        f"compare_replicas: {count / 1e6:.0f} M parameters: a sum adds {more_s * 1e3:.2f} ms to a step of {usual_s * 1e3:.1f} ms: "
        f"{share:.3%} of {USUAL_EVERY} steps"
    )
    assert count > 149e6 and share < COST_MAX


SPREAD_MAX = 0.03
BURN_S = 20
SHARED = "disk"
"""What others use as well."""


def burn_in(folder: Path, environ: dict[str, str]) -> dict[str, float]:
    """Return the figures of one burn-in, by what they measure."""
    done = subprocess.run(
        orch("check", "job.yaml", "--burn-in", f"{BURN_S}s", "--json"), cwd=folder, env=environ, capture_output=True,
        text=True, check=False, timeout=RUN_S_MAX,
    )  # fmt: skip
    found = [one for one in json.loads(done.stdout) if one["what"] == "burn-in"]
    measured: dict[str, float] = next((one["figures"] for one in found if one.get("figures")), {})
    return measured


@ON_GPU
def test_burn_in_says_the_same_twice(desk: Desk, tmp_path: Path, say: Callable[[str], None]) -> None:
    helped = subprocess.run(orch("check", "--help"), capture_output=True, text=True, check=True, timeout=RUN_S_MAX)
    if "--burn-in" not in helped.stdout:
        pytest.skip("orch check has no --burn-in")
    (tmp_path / "train.py").write_text("print('well')\n")
    (tmp_path / "job.yaml").write_text("name: burn\ngpus_per_node: 1\nentrypoint: train.py\n")
    first, second = burn_in(tmp_path, desk.environ), burn_in(tmp_path, desk.environ)
    spreads = {what: abs(one - second[what]) / max(one, second[what]) for what, one in first.items() if what in second}
    for what, spread in spreads.items():
        say(f"burn-in: {what}: {first[what]:g} and {second[what]:g}, spread {spread:.1%}")
    computed = {what: spread for what, spread in spreads.items() if what != SHARED}
    assert computed and max(computed.values()) < SPREAD_MAX


SAVING = f"""{BEGIN}
form, size, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if form == "dcp":
    import torch.distributed.checkpoint as dcp
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {{str(number): torch.full((size // 32,), float(number), device=device) for number in range(8)}}
folder = os.environ["ORCH_CHECKPOINT_DIR"]
for step in range(1, 41):
    model(torch.randn(16, 64, device=device)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
    if step == 20:
        began_s = time.time()
        if form == "dcp":
            dcp.save(state, checkpoint_id=f"{{folder}}/step-{{step}}")
        else:
            torch.save(state, f"{{folder}}/step-{{step}}.pt")
        with open(out, "w") as file:
            file.write(str(time.time() - began_s))
dist.destroy_process_group()
"""
STATE_BYTES = 10 * 10**9 if DEVICE == "cuda" else 10**8
WAYS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("torch.save", "disk", {}),
    ("torch.save", "memory", {"memory": f"{3 * STATE_BYTES // 10**6}M"}),
    ("dcp", "disk", {}),
    ("dcp", "memory", {"memory": f"{3 * STATE_BYTES // 10**6}M"}),
    ("dcp", "in the background", {"async": "dcp"}),
)


def test_checkpoint_to_disk_to_memory_and_in_the_background(
    desk: Desk, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """For how long one rank stands still for a checkpoint of its state, by where it goes."""
    for form, where, fields in WAYS:
        out = tmp_path / f"{form} {where}".replace(" ", "-")
        job = desk.submit(
            {"train.py": SAVING}, entrypoint=f"train.py {form} {STATE_BYTES} {out}", monitor=USUAL,
            checkpoint={"keep": 1, **fields}, **ONE_RANK,
        )  # fmt: skip
        assert job.wait()["state"] == "SUCCEEDED"
        say(f"a checkpoint of {STATE_BYTES / 1e9:g} GB by {form}, {where}: {float(out.read_text()):.2f} s")
