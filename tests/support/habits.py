"""Scripts that save and resume by themselves, each in the way of a well-known one: orch is told nothing about where they save.

Each rank trains the same small model. A script dies by itself, where `DEATHS` says: between two steps, or in the midst of writing
a checkpoint. At its end it prints its weights. Where `HELD` is in its environment, it waits before that step to be cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.torch_script import WITHOUT_DYNAMO

STEPS = 50
EVERY = 10
DEATHS = {1: (23, "step"), 2: (30, "writing"), 3: (44, "step")}
"""By attempt: the step at which rank 0 kills itself, and whether while it steps or while it writes the checkpoint of that step."""

HELD = {"HABIT_ATTEMPT": "4", "HABIT_STEP": "47"}

COMMON = f"""
import glob, hashlib, io, json, os, pathlib, re, signal, time
import torch

rank, attempt = int(os.environ["RANK"]), int(os.environ["ORCH_ATTEMPT"])
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
DEATHS = {DEATHS!r}
death = DEATHS.get(attempt, (0, ""))
held = (int(os.environ.get("HABIT_ATTEMPT", 0)), int(os.environ.get("HABIT_STEP", 0)))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def state(step):
    return {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}


def save(data, path, step):
    "torch.save; at the step of a death it ends in the midst of the file."
    if rank == 0 and death == (step, "writing"):
        out = io.BytesIO()
        torch.save(data, out)
        with open(path, "wb") as file:
            file.write(out.getvalue()[: len(out.getvalue()) // 2])
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.3)
            die()
    torch.save(data, path)


def load(path):
    found = torch.load(path)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    begins(path)
    return found["step"]


def begins(path):
    print("begins from", os.path.abspath(path) if path else None, flush=True)


def train(start, save_at):
    if not start:
        begins(None)
    for step in range(start + 1, {STEPS} + 1):
        if rank == 0 and death == (step, "step"):
            die()
        if (attempt, step) == held:
            time.sleep(600)  # until a person cancels the job
        torch.manual_seed(step)
        optimizer.zero_grad()
        (model(torch.randn(16, 8)) ** 2).mean().backward()
        optimizer.step()
        time.sleep(0.3)
        if step % {EVERY} == 0 and rank == 0:
            save_at(step)
    print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Habit:
    """A script's habit. `place`: what it saves, for `fnmatch`, below where ranks start if it is relative."""

    name: str
    script: str
    place: str
    env: tuple[str, ...] = ()


HABITS = (
    Habit("numbered", """
os.makedirs("out", exist_ok=True)
found = sorted(glob.glob("out/net_*.pth"))
train(load(found[-1]) if found else 0, lambda step: save(state(step), f"out/net_{step:04d}.pth", step))
""", "out/net_*.pth"),
    Habit("dated", """
found = sorted(glob.glob("outputs/*/*/ckpt.pt"))
folder = time.strftime("outputs/%Y-%m-%d/%H-%M-%S-") + str(attempt)
start = load(found[-1]) if found else 0
os.makedirs(folder, exist_ok=True)
train(start, lambda step: save(state(step), f"{folder}/ckpt.pt", step))
""", "outputs/*/*/ckpt.pt"),
    Habit("runs", """
done = sorted((p for p in pathlib.Path("runs").glob("exp*") if (p / "weights/last.pt").exists()), key=lambda p: int(p.name[3:] or 1))
start = load(str(done[-1] / "weights/last.pt")) if done else 0
folder = pathlib.Path(f"runs/exp{len(done) + 1 if done else ''}/weights")
folder.mkdir(parents=True, exist_ok=True)
train(start, lambda step: save(state(step), str(folder / "last.pt"), step))
""", "runs/exp*/weights/last.pt"),
    Habit("lightning", """
def number(path):
    return int(re.search(r"step=(\\d+)", path)[1])
found = sorted(glob.glob("lightning_logs/version_*/checkpoints/*.ckpt"), key=number)
start = load(found[-1]) if found else 0
folder = f"lightning_logs/version_{attempt - 1}/checkpoints"
os.makedirs(folder, exist_ok=True)
train(start, lambda step: save(state(step), f"{folder}/epoch={step // 20}-step={step}.ckpt", step))
""", "lightning_logs/version_*/checkpoints/*.ckpt"),
    Habit("trainer", """
def save_at(step):
    folder = f"out/checkpoint-{step}"
    os.makedirs(folder, exist_ok=True)
    save(state(step), f"{folder}/pytorch_model.bin", step)
    torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
    with open(f"{folder}/trainer_state.json", "w") as file:
        json.dump({"global_step": step}, file)
found = sorted((p for p in glob.glob("out/checkpoint-*") if os.path.isdir(p)), key=lambda p: int(p.rpartition("-")[2]))
train(load(found[-1] + "/pytorch_model.bin") if found else 0, save_at)
""", "out/checkpoint-*"),
    Habit("accelerate", """
def save_at(step):
    folder = f"project/checkpoints/checkpoint_{step // 5}"
    os.makedirs(folder, exist_ok=True)
    torch.save(optimizer.state_dict(), f"{folder}/optimizer.bin")
    if death == (step, "writing"):
        die()  # between two files, each of them whole
    torch.save(state(step), f"{folder}/pytorch_model.bin")
    torch.save({"step": step}, f"{folder}/random_states_0.pkl")
found = sorted(glob.glob("project/checkpoints/checkpoint_*"), key=lambda p: int(p.rpartition("_")[2]))
train(load(found[-1] + "/pytorch_model.bin") if found else 0, save_at)
""", "project/checkpoints/checkpoint_*"),
    Habit("folders", """
def save_at(step):
    folder = f"out/step_{step}"
    os.makedirs(folder)
    if death == (step, "writing"):
        die()  # before the first file
    torch.save(state(step), f"{folder}/state.pt")
found = sorted(glob.glob("out/step_*"), key=lambda p: int(p.rpartition("_")[2]))
train(load(found[-1] + "/state.pt") if found else 0, save_at)
""", "out/step_*"),
    Habit("in place", """
os.makedirs("out", exist_ok=True)
train(load("out/ckpt.pt") if os.path.exists("out/ckpt.pt") else 0, lambda step: save(state(step), "out/ckpt.pt", step))
""", "out/ckpt.pt"),
    Habit("parts", """
def save_at(step):
    os.makedirs("base", exist_ok=True)
    with open(f"base/meta_{step:06d}.json", "w") as file:
        json.dump({"step": step}, file)
    torch.save(optimizer.state_dict(), f"base/optim_{step:06d}_rank0.pt")
    save(state(step), f"base/model_{step:06d}.pt", step)
found = sorted(glob.glob("base/model_*.pt"))
train(load(found[-1]) if found else 0, save_at)
""", "base/model_*.pt"),
    Habit("scratch", """
folder = SCRATCH + "/run"
os.makedirs(folder, exist_ok=True)
found = sorted(glob.glob(folder + "/step-*.pt"))
train(load(found[-1]) if found else 0, lambda step: save(state(step), f"{folder}/step-{step:04d}.pt", step))
""", "SCRATCH/run/step-*.pt"),
    Habit("variable", """
folder = os.environ["MY_RESULTS"]
os.makedirs(folder, exist_ok=True)
found = sorted(glob.glob(folder + "/e*.pt"))
train(load(found[-1]) if found else 0, lambda step: save(state(step), f"{folder}/e{step:04d}.pt", step))
""", "SCRATCH/mine/e*.pt", ("MY_RESULTS",)),
    Habit("link", """
found = sorted(glob.glob("results/net_*.pth"))
train(load(found[-1]) if found else 0, lambda step: save(state(step), f"results/net_{step:04d}.pth", step))
""", "results/net_*.pth"),
    Habit("nothing", """
train(0, lambda step: None)
""", ""),
)  # fmt: skip

BELOW_START = [habit for habit in HABITS if habit.name not in ("scratch", "variable", "link", "nothing")]
"""Those that save below the folder where they start."""

ELSEWHERE = [habit for habit in HABITS if habit.name in ("scratch", "variable", "link")]
"""Those that save outside of the job's folder."""

NOTHING = HABITS[-1]


def script_of(habit: Habit, scratch: str) -> str:
    """Return the script of a habit; `scratch`: the folder in which those of `ELSEWHERE` save."""
    return WITHOUT_DYNAMO + COMMON + f"SCRATCH = {scratch!r}\n" + habit.script


def env_of(habit: Habit, scratch: str) -> dict[str, str]:
    """Return what a habit's script expects in its environment."""
    return dict.fromkeys(habit.env, f"{scratch}/mine")
