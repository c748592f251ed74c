"""Trainings that save as some programs do, are killed once, and tell from where they went on: what is the truth of a save?

The one weight is a number that depends on every step, so that a training that goes on from another state, or makes a step
twice, ends with another one. Files are zips, as those of `torch.save`. `KIND` is the first word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from .desk import FAKE_TORCH, TOGETHER, Desk, Job

STEPS = 60

SCRIPT = (
    TOGETHER
    + """
import io, threading, zipfile

kind, folder, given = sys.argv[1], Path(os.environ["ORCH_CHECKPOINT_DIR"]), os.environ["ORCH_RESUME_FROM"]
is_first, clock_s = attempt == 1, {"behind": -3600, "ahead": 3600}.get(kind, 0)


def put(name, pause_s=0.0):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data", f"{step} {weight} " * 5000)
    data, path = out.getvalue(), folder / name
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        file.write(data[:5000])
        time.sleep(pause_s)
        if is_first and kind == "rewritten" and step == 25:
            os.kill(os.getpid(), 9)
        file.write(data[5000:])
    if clock_s:  # the file server's
        now_s = time.time() + clock_s
        os.utime(path, (now_s, now_s))


def later(name, after_s):
    data = (step, weight)

    def write():
        time.sleep(after_s)
        (folder / name).write_text(f"{data}")

    threading.Thread(target=write, daemon=True).start()


def save():
    global clock_s
    name = f"{step:06d}"
    if kind == "now-and-then":
        put(f"model_{name}.pt")
        if step % 20 == 0:
            put(f"ema_{name}.pt")
        elif is_first and step == 50:
            time.sleep(3)
            os.kill(os.getpid(), 9)
    elif kind == "background":
        put(f"model_{name}.pt")
        later(f"optim_{name}.bin", 600 if is_first and step == 50 else 0.3)
    elif kind == "unusual":
        is_full = is_first and step == 50
        (folder / f"{name}.state").write_text("" if is_full else f"{step} {weight} " * 50)
    elif kind == "anew":
        put(f"run-{attempt}/step_{step}.pt")
    else:
        clock_s = -3600 if kind == "jumps" and step >= 30 else clock_s
        put(f"model_{name}.pt")
        if is_first and step == 50:
            time.sleep(3)
            os.kill(os.getpid(), 9)
        put(f"optim_{name}.pt")


def read(path):
    if path.endswith(".state"):
        return Path(path).read_text()
    with zipfile.ZipFile(path) as archive:
        return archive.read("archive/data").decode()


begun, weight = map(int, read(given).split()[:2]) if given and kind != "anew" else (0, 1)
print(f"begins at {begun}, given {os.path.basename(given)}", flush=True)
meet()
for step in range(begun + 1, STEPS + 1):
    weight = (weight * 31 + step) % 2**61
    together(True)
    optimizer.step()
    time.sleep(0.3 if kind == "rewritten" or (kind == "anew" and not is_first) else 0.1)
    if rank == 0 and kind == "rewritten" and is_first:
        put("last.pt", 0.4)
    elif rank == 0 and step % 10 == 0:
        save()
    if rank == 1 and step == {"background": {1: 57}, "unusual": {1: 57}, "anew": {1: 47, 2: 37, 3: 37}}.get(kind, {}).get(attempt):
        os.kill(os.getpid(), 9)
print(f"ends with {weight}", flush=True)
""".replace("STEPS", str(STEPS))
)

CLOCKS = ("right", "behind", "ahead", "jumps")
"""Clocks of a file server. One of the two files of step 50 is written when its rank is killed."""


def play(desk: Desk, kinds: Sequence[str], **spec: Any) -> dict[str, Job]:
    """Submit a training of two ranks for each kind, each on a node of its own, and wait until all are over."""
    jobs = {}
    for number, kind in enumerate(kinds, 1):
        own: dict[str, Any] = {"ssh": {"hosts": f"node{number}"}} if desk.backend == "ssh" else {}
        files = {**FAKE_TORCH, "train.py": SCRIPT}
        jobs[kind] = desk.submit(files, entrypoint=f"train.py {kind}", nodes=1, name=kind, **own, **spec)
    for job in jobs.values():
        job.wait()
    return jobs


def begun_at(job: Job, attempt: int = 2) -> int:
    """Return the step from which an attempt went on."""
    found = re.search(r"begins at (\d+)", job.log(0, attempt))
    assert found, job.story()
    return int(found[1])


def assert_undisturbed(job: Job, steps: range) -> None:
    """The job has succeeded after one restart from one of these steps, with the weight of a training that nothing disturbed."""
    status, weight = job.status(), 1
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1), job.story()
    for step in range(1, STEPS + 1):
        weight = (weight * 31 + step) % 2**61
    assert begun_at(job) in steps and f"ends with {weight}" in job.log(0, 2), job.story()


def saves(job: Job) -> dict[str, Any]:
    """Return what `orch checkpoints` says of each save, by its path."""
    told = json.loads(job.desk.orch("checkpoints", job.id, "--json").stdout)
    return {one["path"].rpartition("/checkpoints/")[2]: one for one in told}


def assert_true(desk: Desk) -> None:
    """What is gone on from is what was saved, whatever the file server's clock, names and habits."""
    for kind, job in play(desk, CLOCKS).items():
        assert_undisturbed(job, range(40, 41))
        assert saves(job)["model_000050.pt"]["attempt"] == 2, f"{kind}: half a save counts"

    jobs = play(desk, ("now-and-then", "background"))
    assert_undisturbed(jobs["now-and-then"], range(50, 51))
    names = [path.name for path in jobs["now-and-then"].folder.checkpoints.rglob("*")]
    assert not [name for name in names if "torn" in name]
    assert_undisturbed(jobs["background"], range(40, 41))

    (job,) = play(desk, ("unusual",), checkpoint={"path": "*.state"}).values()
    assert_undisturbed(job, range(40, 41))
    assert job.why()[1]["passed"][0]["why"] == "torn: 000050.state is empty"


def assert_begun_anew(desk: Desk) -> None:
    """A script that begins anew in another folder is told; its restart is counted, and a resume begins from the most steps."""
    (job,) = play(desk, ("anew",), restart={"max": 1}).values()
    assert job.status()["state"] == "FAILED", job.story()
    assert [one["attempt"] for one in job.why()] == [1, 2, 3], "the second restart is one too many"
    assert [text for text in job.seen()["notices"] if "from scratch" in text and "run-3/step_10.pt" in text]
    assert "run-1/step_40.pt" in desk.orch("resume", job.id).stdout
    job.until(lambda seen: seen["attempt"] == 4, "attempt 4")
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert "given step_40.pt" in job.log(0, 4)
