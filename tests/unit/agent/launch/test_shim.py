"""Ways to start a training from a node's script: each leads to one gang, or to the end of the attempt with the line to write."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.local import FAKE_TORCH
from tests.unit.agent.launch.test_script import play

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
TORCH = {
    **FAKE_TORCH,
    "torch/distributed/__init__.py": "from torch.distributed.distributed_c10d import *\n",
    "torch/distributed/distributed_c10d.py": """
def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1):
    pass
""",
    "torch/distributed/launcher/__init__.py": "from torch.distributed.launcher.api import *\n",
    "torch/distributed/launcher/api.py": """
def launch_agent(config, entrypoint, args):
    print("no process is started here")


class elastic_launch:
    def __init__(self, config, entrypoint):
        self._config, self._entrypoint = config, entrypoint

    def __call__(self, *args):
        return launch_agent(self._config, self._entrypoint, list(args))
""",
    "torch/distributed/run.py": """
import sys
from types import SimpleNamespace
from torch.distributed.launcher.api import elastic_launch


def main(args=None):
    words = sys.argv[1:] if args is None else args
    config = SimpleNamespace(max_nodes=1, nproc_per_node=int(words[0].partition("=")[2]))
    elastic_launch(config, sys.executable)("-u", *words[1:])


if __name__ == "__main__":
    main()
""",
    "accelerate/__init__.py": "",
    "accelerate/commands/__init__.py": "",
    "accelerate/commands/launch.py": """
import argparse, subprocess, sys


def launch_command_parser():
    parser = argparse.ArgumentParser()
    for name in ("config_file", "num_processes", "num_machines"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    for name in ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "cpu", "no_python"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def launch_command(args):
    subprocess.Popen([sys.executable, args.training_script, *args.training_script_args]).wait()


def main():
    launch_command(launch_command_parser().parse_args())
""",
}
"""As much of torch's and Accelerate's launchers as there is to take over; the real one takes seconds to import, see `tests/integration`."""

GANG = """
import sys
from multiprocessing import get_context
from torch import distributed


def train(rank, size):
    distributed.init_process_group("gloo", world_size=size, rank=rank)


if __name__ == "__main__":
    for rank in range(2):
        get_context("spawn").Process(target=train, args=(rank, 2)).start()
    import time
    time.sleep(60)
"""
FILES = {
    **TORCH,
    "train.py": "import os, time\nfrom torch import distributed\ndistributed.init_process_group()\ntime.sleep(60)\n",
    "alone.py": """
import time
from torch.optim.optimizer import Optimizer
optimizer = Optimizer()
for _ in range(100):
    optimizer.step()
    time.sleep(0.1)
""",
    "pkg/__init__.py": "",
    "pkg/cli.py": "import alone\n",
    "prepare.py": """
from torch import distributed
from torch.optim.optimizer import Optimizer
distributed.init_process_group(world_size=1, rank=0)
Optimizer().step()
""",
    "own.py": "import sys\nfrom torch.distributed import run\nrun.main(sys.argv[1:])\n",
    "elastic.py": """
from types import SimpleNamespace
from torch.distributed.launcher.api import elastic_launch
elastic_launch(SimpleNamespace(max_nodes=1, nproc_per_node=2), "python")("train.py")
""",
    "runs.py": """
import runpy, sys
sys.argv[1:] = ["--nproc-per-node=2", "train.py"]
runpy.run_module("torch.distributed.run", run_name="__main__")
""",
    "spawned.py": """
from multiprocessing import get_context
from torch.distributed import run
if __name__ == "__main__":
    child = get_context("spawn").Process(target=run.main, args=(["--nproc-per-node=2", "train.py"],))
    child.start()
    child.join()
""",
    "accelerated.py": """
from accelerate.commands.launch import launch_command, launch_command_parser
launch_command(launch_command_parser().parse_args(["--multi_gpu", "--num-processes", "2", "train.py", "--x"]))
""",
    "child.py": "import subprocess\nsubprocess.run('torchrun --nproc-per-node 2 train.py'.split(), check=True)\n",
    "becomes.py": "import os\nos.execvp('torchrun', ['torchrun', '--nproc-per-node=2', 'train.py'])\n",
    "maestro.py": """
import os, subprocess, sys
def start(rank):
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    return subprocess.Popen([sys.executable, *sys.argv[1:]], env=env)
for child in [start(rank) for rank in range(2)]:
    child.wait()
""",
    "gang.py": GANG,
    "Makefile": "train:\n\ttorchrun --nproc-per-node 2 train.py\n",
    "tune": f"#!{sys.executable}\n"
    "import sys\nsys.path.insert(0, '.')\nfrom torch.distributed import run\nrun.main(sys.argv[2:])\n",
}

ONE_GANG = {
    "by name": "torchrun train.py",
    "by module": "python -u -m torch.distributed.run --nproc_per_node=2 train.py",
    "by full path": f"{BIN}/torchrun train.py",
    "behind prepared steps": "python prepare.py; torchrun train.py",
    "behind env, timeout, nice": "env A=1 timeout 60 nice torchrun train.py",
    "another shell": "sh -c 'exec torchrun train.py'",
    "xargs": "echo train.py | xargs torchrun --nproc-per-node 2",
    "find": "find . -name train.py -exec torchrun {} \\;",
    "make": "make train",
    "exec": "exec torchrun train.py",
    "a child of Python": "python child.py",
    "a Python that becomes it": "python becomes.py",
    "torchrun's main": "python own.py --nproc-per-node=2 train.py",
    "torchrun's main, with a module": "python own.py --nproc-per-node=2 -m pkg.cli",
    "a console script": "chmod +x tune; ./tune run --nproc-per-node=2 train.py",
    "runpy": "python runs.py",
    "elastic_launch": "python elastic.py",
    "accelerate's launch_command": "python accelerated.py",
    "accelerate's main": "python -c 'from accelerate.commands.launch import main; main()' --multi_gpu --num_processes 2 -m pkg.cli",
    "in a spawned process": "python spawned.py",
}

ENDS = {
    "a launcher of its own kind": ("python maestro.py train.py --x", ["train.py --x is rank ", "of 2 in a gang", "write entrypoint: train.py --x"]),
    "spawned processes": ("python gang.py", ["gang.py is rank", "write entrypoint: gang.py"]),
    "no launcher": ("python alone.py --lr 'a b'", ["alone.py --lr 'a b' trains without a launcher: write entrypoint: alone.py --lr 'a b'"]),
    "no launcher, a module": ("python -m pkg.cli x", ["write entrypoint: -m pkg.cli x"]),
    "no launcher, a text": ("python - < alone.py", ["write entrypoint: FILE.py"]),
    "not one gang": ("python own.py --nproc-per-node=8 train.py", ["asks for 8 ranks", "the job has 2"]),
    "past all nets": ("unset PYTHONPATH; exec -a torchrun bash -c 'sleep 60; :'", ["runs without orch"]),
    "past all nets, no name": ("TORCHELASTIC_RUN_ID=1 bash -c 'sleep 60; :'", ["runs without orch"]),
    "nohup": ("nohup torchrun train.py > log 2>&1 &", ["left in the background: "]),
    "setsid": ("setsid nohup sleep 60 < /dev/null &> log & disown; sleep 0.3", ["left in the background: sleep 60"]),
}  # fmt: skip


def _laid_out(folder: Path) -> Path:
    for name, text in FILES.items():
        file = folder / "code" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize("way", ONE_GANG)
def test_any_launcher_call_starts_one_gang(way: str, tmp_path: Path) -> None:
    seen = asyncio.run(play(_laid_out(tmp_path), ONE_GANG[way], until_call=True))
    assert seen.is_called and not any(report.is_final for report in seen.refused), seen


@pytest.mark.parametrize("way", ENDS)
def test_training_outside_of_orch_ends_with_suggested_line(way: str, tmp_path: Path) -> None:
    """A line that would train without orch ends at once with the line to write."""
    line, words = ENDS[way]
    (report,) = asyncio.run(play(_laid_out(tmp_path), line)).refused
    assert report.is_final and all(word in report.reason for word in words), report
