"""A training of one rank or several with a stand-in for torch that writes files as torch.save does."""

from __future__ import annotations

import hashlib
from array import array

from tests.support.local import FAKE_TORCH

_BEGINS = """
import array, os, sys, time, hashlib, pathlib

rank, attempt = int(os.environ["RANK"]), int(os.environ["ORCH_ATTEMPT"])
folder, resume = pathlib.Path(os.environ["ORCH_CHECKPOINT_DIR"]), os.environ["ORCH_RESUME_FROM"]
first = 0
print("from", resume or "nothing", flush=True)
"""
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
PLAIN = _BEGINS + _STAND_IN + _LOOP
"""Each rank saves each ten steps. THEN is run after each step."""


def end_of_plain() -> str:
    """Return the digest with which `PLAIN` ends where nothing disturbs it."""
    weights = array("d", range(4096))
    for number in range(1, 41):
        weights = array("d", [0.9 * one + number for one in weights])
    return hashlib.sha256(weights).hexdigest()


STAND_IN = {
    **FAKE_TORCH,
    "torch/__init__.py": """
import io, pickle, zipfile
from array import array


class Pickler(pickle.Pickler):
    def persistent_id(self, value):  # the bytes of a tensor lie beside the pickle
        if isinstance(value, array):
            self.data = value.tobytes()
            return ("storage", "FloatStorage", "0", "cpu", len(value))


class Unpickler(pickle.Unpickler):
    def persistent_load(self, name):
        return array("d", self.data)


def save(state, path):
    pickled = io.BytesIO()
    writer = Pickler(pickled, 2)
    writer.dump(state)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/data/0", writer.data)
        archive.writestr("archive/version", b"3\\n")


def load(path):
    with zipfile.ZipFile(path) as archive, archive.open("archive/data.pkl") as file:
        reader = Unpickler(file)
        reader.data = archive.read("archive/data/0")
        return reader.load()
""",
}
"""What `PLAIN` needs of torch: files of one tensor as `torch.save` writes them, at a tenth of the time that the real one takes to import."""
