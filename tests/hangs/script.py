"""What do the ranks of the galleries run? A small training over gloo that a case interrupts at one of four places.

A case defines what it needs of `arrive` (before the process group), `misbehave` (after the warm-up), `between` (after
each step) and `leave` (after the process group), in attempt 1 only; attempt 2 makes a few steps and ends. The line at
fault bears the mark `# here`.
"""

from __future__ import annotations

import textwrap

from tests.support.torch_script import WITHOUT_DYNAMO

WARM_STEPS = 60
"""Quick steps of about 40 ms before a case happens: enough for the usual step time to be known to the supervisor."""

LAST_STEPS = 20
MARK = "# here"

_HEAD = """
import os, signal, subprocess, sys, threading, time

rank, attempt = int(os.environ["RANK"]), int(os.environ["ORCH_ATTEMPT"])


def arrive(): pass
def misbehave(): pass
def between(step): pass
def leave(): pass

"""

_TORCH = f"""{WITHOUT_DYNAMO}import torch.distributed as dist

"""

_OWN = "torch.nn.Linear(64, 64)"
_DDP = f"torch.nn.parallel.DistributedDataParallel({_OWN})"
_AVERAGE = "        average(model)\n"

_TRAIN = f"""

def average(module):
    flat = torch.cat([one.grad.flatten() for one in module.parameters()])
    dist.all_reduce(flat)


def train(steps):
    for step in range(steps):
        model(torch.ones(4, 64)).sum().backward()
{_AVERAGE}\
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        if attempt == 1:
            between(step)


if attempt == 1:
    arrive()
dist.init_process_group("gloo")
model = {_OWN}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if attempt == 1:
    train({WARM_STEPS})
    print("warm", flush=True)
    misbehave()
    train({LAST_STEPS})
else:
    train(3)
dist.destroy_process_group()
if attempt == 1:
    leave()
print("done", flush=True)
"""


_FIRST_ATTEMPT = f"""    train({WARM_STEPS})
    print("warm", flush=True)
    misbehave()
    train({LAST_STEPS})
"""
_IN_A_THREAD = f"""\
    def first():
{textwrap.indent(_FIRST_ATTEMPT, "    ")}\
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=first).start()
    try:
        time.sleep(3600)
    except KeyboardInterrupt:
        pass
"""
assert _FIRST_ATTEMPT in _TRAIN


def training(case: str, *, ddp: bool = False, threaded: bool = False) -> str:
    """Return the training that `case` interrupts; with torch's DDP instead of an all_reduce in the script; `threaded`: in a
    thread, while the main thread sleeps."""
    end = _TRAIN.replace(_AVERAGE, "").replace(_OWN, _DDP) if ddp else _TRAIN
    end = end.replace(_FIRST_ATTEMPT, _IN_A_THREAD) if threaded else end
    return f"{_HEAD}{_TORCH}{case.strip()}\n{end}"


def plain(case: str) -> str:
    """Return a script without torch: `case` is all it does."""
    return f"{_HEAD}{case.strip()}\n"


def lines_at_fault(script: str) -> tuple[str, ...]:
    """Return `train.py:LINE` of each marked line."""
    lines = [number for number, line in enumerate(script.splitlines(), start=1) if line.endswith(MARK)]
    return tuple(f"train.py:{line}" for line in lines)
