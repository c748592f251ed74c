"""Kills at random moments of saving: an attempt never begins from a save whose files are of two steps or cut off, and always
from the newest that was whole.

The writers are slow, so that most kills hit one. Each file bears its step; a script that is given files of two steps says
MIXED.
"""

from __future__ import annotations

import os
import random
import re
import time

import pytest

from orchestrator.core.host.procfs import Proc
from tests.support.local import FAKE_TORCH, STEPPER, Desk, Sight, kill, wait_until

STEPS = 100_000

WRITER = (
    STEPPER
    + """
import json, struct, zipfile

folder, resume = Path(os.environ["ORCH_CHECKPOINT_DIR"]), os.environ["ORCH_RESUME_FROM"]
kind = sys.argv[1]


def slowly(path, data):
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        for at in range(0, len(data), 1 + len(data) // 8):
            file.write(data[at : at + 1 + len(data) // 8])
            time.sleep(0.02)


def zipped(step):
    import io

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("step", str(step) * 2000)
    return out.getvalue()


def tensors(step):
    data = struct.pack("<Q", step) * 1000
    head = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(head)) + head + data


def files(step):
    "Return the files of a save, in the order in which the ranks write them: rank, name, bytes."
    match kind:
        case "numbered":
            return [(0, f"step-{step}.pt", zipped(step))]
        case "in-place":
            return [(0, "ckpt.pt", zipped(step))]
        case "of-ranks":
            return [(own, f"step_{step}_rank_{own}.pt", zipped(step)) for own in (0, 1)]
        case "pair":
            return [(0, f"step_{step}_model.pt", zipped(step)), (0, f"step_{step}_optim.pt", zipped(step))]
        case "folder-in-place":
            names = ["model.safetensors", "optimizer.pt", *(f"rng_state_{own}.pth" for own in (0, 1))]
            made = [(0, f"latest/{names[0]}", tensors(step)), (0, f"latest/{names[1]}", zipped(step))]
            made += [(own, f"latest/{name}", zipped(step)) for own, name in enumerate(names[2:])]
            state = json.dumps({"global_step": step, "max_steps": 10**6}).encode()
            return [*made, (0, "latest/trainer_state.json", state)]


def step_of(path):
    if path.suffix == ".json":
        return json.loads(path.read_text())["global_step"]
    if path.suffix == ".safetensors":
        return struct.unpack("<Q", path.read_bytes()[-8:])[0]
    with zipfile.ZipFile(path) as archive:
        text = archive.read("step").decode()
    return int(text[: len(text) // 2000])


def wait(name):  # the other rank has come as far
    (folder.parent / "meet").mkdir(exist_ok=True)
    (folder.parent / "meet" / f"{attempt}-{name}-{rank}").touch()
    while not all((folder.parent / "meet" / f"{attempt}-{name}-{own}").exists() for own in (0, 1)):
        time.sleep(0.005)


first = 0
if resume:
    found = Path(resume)
    if found.is_dir():
        own = [path for path in found.iterdir()]
    elif kind in ("of-ranks", "pair"):
        number = int("".join(c for c in found.name.split("_")[1]))
        own = list(found.parent.glob(f"step_{number}_*"))
    else:
        own = [found]
    try:
        steps = {step_of(path) for path in own}
        lacks = {"of-ranks": 2, "pair": 2, "folder-in-place": 5}.get(kind, 1) - len(own)
        first = steps.pop()
        print(f"begins at {first}" if not steps and not lacks else f"MIXED {steps} {lacks}", flush=True)
    except Exception as err:
        print(f"BROKEN {err!r}", flush=True)
else:
    print("begins at 0", flush=True)
for number in range(first + 1, 100_000):
    optimizer.step()
    time.sleep(0.3 if kind.endswith("in-place") else 0.02)  # what is written over must be seen before
    if number % 10 == 0:
        wait(number)
        for own, name, data in files(number):
            if own == rank:
                slowly(folder / name, data)
        wait(f"{number}-saved")
        os.write(1, f"saved {number}\\n".encode())
"""
)

KINDS = ("numbered", "in-place", "of-ranks", "pair", "folder-in-place")


def _procs(job: Sight, who: str) -> list[Proc]:
    ranks = job.rank_procs()
    if who == "rank":
        return [ranks[random.randrange(len(ranks))]]
    if who == "ranks":
        return list(ranks.values())
    return [job.keeper(), job.agent(), *ranks.values()]


def _play(desk: Desk, kind: str, kills: int, seed: int) -> None:
    random.seed(seed)
    job = desk.submit(
        {**FAKE_TORCH, "train.py": WRITER},
        entrypoint=f"train.py {kind}",
        restart={"max": 10_000},
        total_steps=STEPS,
    )
    killed = []
    for attempt in range(1, kills + 1):
        job.wait_for_line("begins at", attempt=attempt)
        wait_until(lambda attempt=attempt: "saved" in job.log(0, attempt), "a save")  # type: ignore[misc]
        wait_until(lambda attempt=attempt: job.seen()["attempt"] == attempt, "its pids")  # type: ignore[misc]
        time.sleep(random.uniform(0.5, 5.0 if kind.endswith("in-place") else 3.0))
        who = random.choice(("rank", "ranks", "agent"))
        for proc in _procs(job, who):
            kill(proc)
        killed.append(who)
    job.wait_for_line("begins at", attempt=kills + 1)
    logs = [job.log(0, attempt) for attempt in range(1, kills + 2)]
    job.job.cancel()
    job.wait()
    begun = [int(re.findall(r"begins at (\d+)", log)[0]) for log in logs]
    saved = [max([0, *map(int, re.findall(r"saved (\d+)", log))]) for log in logs]
    said = job.job.folder.supervisor_log.read_text()
    assert not re.search("MIXED|BROKEN", "".join(logs)), f"seed {seed}: {said}"
    for number in range(1, kills + 1):
        # What both ranks had written is used, or one that was being written and is whole all the same; what was saved
        # since the last look of an agent that was killed with its ranks is in no ledger, and not begun from.
        newest = max(begun[number - 1], saved[number - 1])
        known = begun[number - 1] if killed[number - 1] == "agent" else newest
        assert known <= begun[number] <= newest + 10, f"seed {seed}, attempt {number + 1}: {begun} {saved}\n{said}"


@pytest.mark.parametrize("kind", KINDS)
def test_random_kills_never_yield_mixed_or_older_checkpoint(desk: Desk, kind: str) -> None:
    """Kills at random moments of saving never lead to a mixed or older checkpoint."""
    _play(desk, kind, 4, int(os.environ.get("ORCH_SEED", "0")))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_hundred_random_kills_while_saving(desk: Desk, kind: str) -> None:
    _play(desk, kind, 100, int(os.environ.get("ORCH_SEED", "1")))
