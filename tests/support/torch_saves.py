"""A training of one rank or several that saves by torch.save, with real torch and with a stand-in that writes such files."""

from __future__ import annotations

from tests.support.local import FAKE_TORCH
from tests.support.torch_script import WITHOUT_DYNAMO

_BEGINS = """
import array, os, sys, time, hashlib, pathlib

rank, attempt = int(os.environ["RANK"]), int(os.environ["ORCH_ATTEMPT"])
folder, resume = pathlib.Path(os.environ["ORCH_CHECKPOINT_DIR"]), os.environ["ORCH_RESUME_FROM"]
first = 0
print("from", resume or "nothing", flush=True)
"""
_TORCH = (
    WITHOUT_DYNAMO
    + """
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if resume:
    found = torch.load(resume)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    first = found["step"]


def step(number):
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(4, 64)).pow(2).mean().backward()
    optimizer.step()


def state(number):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}


def step_alone():  # changes nothing
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kept = {one: {key: value.clone() for key, value in own.items()} for one, own in optimizer.state.items()}
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    model.load_state_dict(before)
    for one, own in kept.items():
        optimizer.state[one].update(own)


def digest():
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()

"""
)
_STAND_IN = """
import torch
from torch.optim.optimizer import Optimizer
import colorsys  # any import after torch lets the hook see that it is there

optimizer = Optimizer()
weights = array.array("d", range(4096))
if resume:
    found = torch.load(resume)
    weights, first = found["model"]["weight"], found["step"]


def step(number):
    weights[:] = array.array("d", [0.9 * one + number for one in weights])
    optimizer.step()


def state(number):
    groups = [{"lr": 0.01, "params": [0]}]
    return {"model": {"weight": weights}, "optimizer": {"state": {0: {"exp_avg": 0.0}}, "param_groups": groups}, "step": number}


def step_alone():
    optimizer.step()


def digest():
    return hashlib.sha256(weights).hexdigest()

"""
_LOOP = """
def known(name):
    path = folder / "ledger.jsonl"
    return path.exists() and f'"main": "{name}"' in path.read_text()


def settle(name):  # until the ledger has it as whole
    while not known(name) or not list(folder.glob(f".kept/*[0-9]/{name}")):
        step_alone()
        time.sleep(0.02)


for number in range(first + 1, 41):
    step(number)
    time.sleep(0.02)
    if number % 10 == 0:
        torch.save(state(number), folder / f"step-{number}.pt")
        settle(f"step-{number}.pt")
    exec(os.environ.get("THEN", ""))
print("ends with", digest(), flush=True)
"""
REAL = _BEGINS + _TORCH + _LOOP
PLAIN = _BEGINS + _STAND_IN + _LOOP
"""Each rank saves each ten steps, with real torch, and with a stand-in for it. THEN is run after each step."""

STAND_IN = {
    **FAKE_TORCH,
    "torch/__init__.py": """
import io, pickle, zipfile
from array import array


class Pickler(pickle.Pickler):
    def persistent_id(self, value):  # the bytes of a tensor lie beside the pickle
        return ("storage", "FloatStorage", "0", "cpu", len(value)) if isinstance(value, array) else None


class Unpickler(pickle.Unpickler):
    def persistent_load(self, name):
        return array("d", self.data)


def save(state, path):
    pickled = io.BytesIO()
    Pickler(pickled, 2).dump(state)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/data/0", state["model"]["weight"].tobytes())
        archive.writestr("archive/version", b"3\\n")


def load(path):
    with zipfile.ZipFile(path) as archive, archive.open("archive/data.pkl") as file:
        reader = Unpickler(file)
        reader.data = archive.read("archive/data/0")
        return reader.load()
""",
}
"""What `PLAIN` needs of torch: files as `torch.save` writes them, at a tenth of the time that the real one takes to import."""
