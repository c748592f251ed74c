"""Does the stand-in for a launch take what Accelerate would set, and leave what is orch's? With an Accelerate of our own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.submission import bundle

pytestmark = pytest.mark.slow  # each test starts an interpreter

FAKE = {
    "accelerate/__init__.py": "__version__ = '9.9'\nprint('a banner on standard output')\n",
    "accelerate/commands/__init__.py": "",
    "accelerate/commands/launch.py": """
import argparse, os, subprocess, sys

def launch_command_parser():
    parser = argparse.ArgumentParser("accelerate")
    for name in ("config_file", "num_processes", "num_machines", "machine_rank", "main_process_ip",
                 "main_process_port", "mixed_precision", "deepspeed_multinode_launcher"):
        parser.add_argument("--" + name)
    for name in ("module", "no_python", "multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "cpu"):
        parser.add_argument("--" + name, action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser

def launch_command(args):
    if args.mixed_precision == "fp4":
        raise ValueError("no such\\nprecision")
    if args.mixed_precision == "cloud":
        return
    news = {"ACCELERATE_SIZE": str(args.num_processes), "ACCELERATE_NOTE": "it's one", "MASTER_PORT": "1",
            "WORLD_SIZE": "7", "OMP_NUM_THREADS": "8", "KEPT": "theirs", "CUDA_VISIBLE_DEVICES": "3"}
    if args.mixed_precision == "one":
        subprocess.Popen([sys.executable], env={**os.environ, **news})
    else:
        import torch.distributed.run
        os.environ.update(news)
        torch.distributed.run.run(args)
""",
    "torch/__init__.py": "import types\ncuda = types.SimpleNamespace(is_available=lambda: False)\n",
    "torch/distributed/__init__.py": "",
    "torch/distributed/run.py": "def run(args):\n    raise AssertionError('a launch')\n",
}


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _run(folder: Path, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    settings = {"line": [*args, "t.py"], "processes": 4, "nodes": 2, "keep": ["KEPT"], **more}
    return subprocess.run(
        [sys.executable, "-S", "-m", "orchestrator.agent.ranks.accelerate_env", json.dumps(settings)],
        env={"PYTHONPATH": f"{folder}:{bundle.PACKAGE.parent}", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("how", [(), ("--mixed_precision", "one")])
def test_launch_variables_exclude_orch_and_user_ones(fake: Path, how: tuple[str, ...]) -> None:
    done = _run(fake, *how)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["env"] == {"ACCELERATE_NOTE": "it's one", "ACCELERATE_SIZE": "4", "OMP_NUM_THREADS": "8"}
    assert (told["kind"], told["words"]) == ("script", ["t.py"])
    assert "a banner" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--mixed_precision", "fp4"), "orch: accelerate 9.9 cannot launch: no such precision"),
        (("--mixed_precision", "cloud"), "orch: accelerate 9.9 starts no local processes"),
        (("--fruit",), "orch: accelerate launch 9.9: unrecognized arguments: --fruit"),
    ],
)  # fmt: skip
def test_impossible_launch_is_refused_in_one_line(fake: Path, args: tuple[str, ...], words: str) -> None:
    done = _run(fake, *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_python_without_accelerate_is_named(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 1
    assert f"orch: {sys.executable} cannot import accelerate (No module named 'accelerate')" in done.stderr
