"""Do programs that do something unusual with their process print the same as forks and as new interpreters?"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.local import Desk, Sight
from tests.support.packages import need

need("torch")
pytestmark = pytest.mark.soak

PROBES = {
    "numpy": """
a = numpy.arange(40000.0).reshape(200, 200) % 7
print((a @ a @ a).sum(), len(os.listdir("/proc/self/task")) > 0)
""",
    "loaders": """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, row): return row, os.getppid() == parent, torch.initial_seed() != 0
for context in ("fork", "spawn", "forkserver"):
    parent = os.getpid()
    rows = torch.utils.data.DataLoader(range(8), num_workers=2, batch_size=2, multiprocessing_context=context)
    print(context, [row.tolist() for row in rows])
""",
    "spawns": """
torch.multiprocessing.spawn(child, args=("spawned",), nprocs=2)
print("joined")
""",
    "compiles": """
@torch.compile
def f(x): return torch.sin(x) ** 2 + torch.cos(x) ** 2
print(f(torch.ones(3)).tolist())
""",
    "processes": """
print(subprocess.run(["sh", "-c", "echo from a shell; exit 3"], capture_output=True, text=True))
print(subprocess.run([sys.executable, "-c", "import sys; print(len(sys.path) > 0)"], capture_output=True, text=True).stdout)
with concurrent.futures.ProcessPoolExecutor(2) as pool:
    print(list(pool.map(abs, [-1, -2])))
print(os.system("exit 4"))
""",
    "stdin": """
try:
    print(input("a question: "))
except EOFError as err:
    print("end", err)
""",
    "forks": """
os.register_at_fork(before=lambda: print("before"), after_in_child=lambda: os._exit(7), after_in_parent=lambda: print("parent"))
print(os.waitpid(os.fork(), 0)[1])
""",
    "exits": """
import atexit, threading, weakref
class Thing: pass
thing = Thing()
weakref.finalize(thing, print, "finalized")
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
sys.exit()
""",
    "faults": """
import faulthandler
print(faulthandler.is_enabled())
faulthandler.enable()
print(sys.getrecursionlimit(), end=" ")
sys.setrecursionlimit(5000)
def deep(n): return n and deep(n - 1)
print(deep(4000))
""",
    "raises": """
def outer():
    raise ValueError("wrong")
if os.environ["RANK"] == "1":
    time.sleep(60)  # until the end of rank 0 ends the gang
outer()
""",
    "execs": """
print("first", flush=True)
os.execv(sys.executable, [sys.executable, "-c", "import os; print('second', os.environ['RANK'], len(os.listdir('/proc/self/fd')))"])
""",
    "daemon": """
if os.fork():
    os.wait()
    print("left")
else:
    os.setsid()
    if os.fork():
        os._exit(0)
    print("daemon", os.getsid(0) != os.getpid(), flush=True)
    os._exit(0)
""",
    "signals": """
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("caught"))
os.kill(os.getpid(), signal.SIGUSR1)
signal.alarm(1)
signal.pause()
""",
    "files": """
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3], [os.get_inheritable(fd) for fd in (0, 1, 2)])
with tempfile.NamedTemporaryFile() as file:
    print(os.path.dirname(file.name))
print(sys.stdin.closed, sys.dont_write_bytecode, sys.flags.dev_mode, sys.getswitchinterval(), site.getsitepackages()[0][-13:])
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
logging.info("logged by %s", __name__)
print(user_hook() if "user_hook" in globals() else getattr(__import__("builtins"), "user_hook", None))
""",
    "development": """
import faulthandler, warnings
print(sys.flags.dev_mode, sys.flags.utf8_mode, faulthandler.is_enabled(), os.environ["PYTHONDEVMODE"])
open(os.devnull)
""",
    "lightning": """
from lightning.fabric.utilities.rank_zero import rank_zero_only as one
from torchmetrics.utilities.prints import rank_zero_only as two
print(one.rank, two.rank)
print({name: value for name, value in os.environ.items() if name.startswith("PYTORCH")})  # one is set by the import
""",
    "modules": """
import pickle
print(__name__, pickle.loads(pickle.dumps(Picked(3))).value, __file__[-10:], sys.modules["__main__"].Picked is Picked)
print(torch.distributed.is_initialized(), torch.is_grad_enabled(), torch.get_num_threads() > 0)
""",
}

SETTINGS = {"files": {"PYTHONPATH": "site"}, "development": {"PYTHONDEVMODE": "1"}}

HEAD = """
import concurrent.futures, os, site, subprocess, sys, tempfile, time
import numpy
import torch
import torch.multiprocessing
import torch.utils.data
{more}

class Picked:
    def __init__(self, value): self.value = value

def child(index, word):
    os.write(1, b"spawned\\n")

if __name__ == "__main__":
{body}
"""


def _run(desk: Desk, name: str, start: str, **spec: Any) -> Sight:
    body = "\n".join("    " + line for line in PROBES[name].strip().splitlines())
    more = "import lightning" if name == "lightning" else ""
    files = {
        "train.py": HEAD.format(body=body, more=more),
        "site/sitecustomize.py": "import builtins\nbuiltins.user_hook = 'mine'\n",
    }
    job = desk.submit(
        files, entrypoint="train.py", name=name, start=start, restart={"max": 0}, procs_per_node=2, **spec
    )
    job.wait()
    assert ("forks" if start == "auto" else "new") in job.attempts()[0]["starts"][0]
    return job


@pytest.mark.parametrize("name", PROBES)
def test_forked_program_prints_like_new_interpreter(desk: Desk, name: str) -> None:
    if name == "lightning":
        need("lightning")
    spec: dict[str, Any] = {"env": SETTINGS[name]} if name in SETTINGS else {}
    forked, new = (_run(desk, name, start, **spec) for start in ("auto", "fresh"))
    for rank in (0, 1):
        assert forked.log(rank) == new.log(rank).replace(str(new.root), str(forked.root))
    assert [rank["exit"] for rank in forked.seen()["ranks"]] == [rank["exit"] for rank in new.seen()["ranks"]]
    assert forked.log(0)
