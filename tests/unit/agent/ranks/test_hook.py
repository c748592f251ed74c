"""The hook in real, short Python processes with a stand-in for torch, and the step file from both of its sides."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.agent.ranks import failure
from orchestrator.agent.ranks.hook import errors, layout, worker_server
from orchestrator.agent.ranks.step_counter import NO_STEP, StepCounter
from tests.support.hooked import (
    STEPS,
    Rank,
    lay_out_with_stand_in,
    run,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return lay_out_with_stand_in(tmp_path)


# Who counts steps.


def test_steps_are_counted_with_their_times(rank: Rank) -> None:
    done = rank.run([sys.executable, rank.script(STEPS), "5"])
    assert (done.returncode, done.stdout) == (0, b"")
    reader = StepCounter(rank.dir / layout.STEP_FILE)
    last = reader.read()
    assert last.step == 5
    assert last.time_ns > 0
    assert reader.rate_per_s() is not None
    assert rank.files() == ["files.txt", "steps", "steps-claim-0"]


def test_grandchild_of_rank_shell_counts(rank: Rank) -> None:
    script = rank.script(STEPS)
    assert rank.run(["bash", "-c", f"{sys.executable} {script} 3; true"]).returncode == 0
    assert rank.last_step().step == 3


def test_first_living_process_counts_and_claim_passes_on(rank: Rank) -> None:
    rank.script(STEPS, "child.py")
    script = rank.script(
        f"{STEPS}\nimport subprocess\nsubprocess.run([sys.executable, {str(rank.code / 'child.py')!r}, '7'])\n"
    )
    rank.run([sys.executable, script, "2"])
    assert rank.last_step().step == 2
    rank.run([sys.executable, script, "4"])
    assert rank.last_step().step == 4
    assert rank.files() == ["files.txt", "steps", "steps-claim-0", "steps-claim-1"]


def test_program_restarting_by_exec_keeps_counting(rank: Rank) -> None:
    again = "import os\nif sys.argv[1] == '2':\n    os.execv(sys.executable, [sys.executable, sys.argv[0], '4'])\n"
    rank.run([sys.executable, rank.script(f"{STEPS}\n{again}"), "2"])
    assert rank.last_step().step == 4


def test_forked_child_reports_nothing(rank: Rank) -> None:
    fork = "\nimport os\nif os.fork() == 0:\n    step()\n    os._exit(0)\nos.wait()\n"
    rank.run([sys.executable, rank.script(STEPS + fork), "3"])
    assert rank.last_step().step == 3


def children(rank: Rank, method: str, work: str) -> None:
    """Run a script whose only steps are those of two children, one after the other."""
    script = rank.script(
        "import multiprocessing, torch.optim.optimizer, colorsys\n"
        f"def work(steps):\n    {work}\n"
        "if __name__ == '__main__':\n"
        "    for steps in (3, 5):\n"
        f"        child = multiprocessing.get_context({method!r}).Process(target=work, args=(steps,))\n"
        "        child.start(); child.join()\n        print(child.exitcode)\n"
    )
    assert rank.run([sys.executable, script]).stdout == b"0\n0\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_count_if_parent_makes_no_steps(rank: Rank, method: str) -> None:
    children(rank, method, "for _ in range(steps): torch.optim.optimizer.step()")
    assert rank.last_step().step == 5
    assert rank.files() == ["files.txt", "steps", "steps-claim-0", "steps-claim-1"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_data_worker_makes_no_steps(rank: Rank, method: str) -> None:
    rank.script("def get_worker_info():\n    return 'worker 0'\n", "torch/utils/data/__init__.py")
    children(rank, method, "import torch.utils.data; torch.optim.optimizer.step()")
    assert rank.last_step() == NO_STEP
    assert rank.files() == ["files.txt", "steps"]


def test_hook_without_rank_does_nothing(rank: Rank) -> None:
    env = {name: value for name, value in rank.env.items() if name != "RANK"}
    done = run([sys.executable, "-c", "import sys; print(sys.excepthook is sys.__excepthook__)"], env)
    assert done.stdout == b"True\n"
    assert rank.files() == ["steps"]


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_isolated_python_is_unharmed(rank: Rank, flag: str) -> None:
    done = rank.run([sys.executable, flag, "-c", "print('ran')"])
    assert (done.returncode, done.stdout) == (0, b"ran\n")


# What of the script stays as it was.


def test_user_sitecustomize_runs_and_keeps_name(rank: Rank) -> None:
    rank.script("import builtins\nbuiltins.mine = 'ran'\n", "sitecustomize.py")
    show = "import sys, sitecustomize; print(mine, sitecustomize.__file__, sys.path[1:])"
    assert rank.run([sys.executable, "-c", show]).stdout == rank.run_bare([sys.executable, "-c", show]).stdout


def test_failing_sitecustomize_fails_with_same_message(rank: Rank) -> None:
    rank.script("raise RuntimeError('mine')", "sitecustomize.py")
    with_hook = rank.run([sys.executable, "-c", "pass"])
    assert b"mine" in with_hook.stdout
    assert with_hook.stdout == rank.run_bare([sys.executable, "-c", "pass"]).stdout


def test_no_sitecustomize_appears_without_a_user_one(rank: Rank) -> None:
    """Where there is no other sitecustomize there is none."""
    show = "import sys; print('sitecustomize' in sys.modules, sys.path[1:]); import sitecustomize"
    assert rank.run([sys.executable, "-c", show]).stdout == rank.run_bare([sys.executable, "-c", show]).stdout


def test_two_hooks_on_path_count_once(rank: Rank) -> None:
    shutil.copytree(rank.root / "hook", rank.root / "hook2")
    path = f"{rank.root / 'hook2'}:{rank.env['PYTHONPATH']}"
    rank.run([sys.executable, rank.script(STEPS), "3"], PYTHONPATH=path)
    assert rank.last_step().step == 3


def test_torch_spec_and_loader_are_unchanged(rank: Rank) -> None:
    rank.script("", "torch/cuda/__init__.py")
    rank.script("class CUDAGraph: capture_begin = capture_end = replay = print", "torch/cuda/graphs.py")
    rank.script("_make_grads = print", "torch/autograd.py")
    rank.script("is_compiling = bool", "torch/compiler.py")
    rank.script("", "torch/nn/__init__.py")
    rank.script("from . import clip_grad\nfrom .clip_grad import clip_grad_norm_", "torch/nn/utils/__init__.py")
    rank.script("clip_grad_norm_ = print", "torch/nn/utils/clip_grad.py")
    rank.script("", "torch/distributed/__init__.py")
    rank.script("_update_default_pg = print", "torch/distributed/distributed_c10d.py")
    show = (
        "import importlib.util, importlib, sys\nprint(importlib.util.find_spec('torch').loader.exec_module)\n"
        "import torch.optim.optimizer, torch.cuda.graphs, torch.autograd, torch.distributed.distributed_c10d, torch.nn.utils\n"
        "import torch.compiler\nimport colorsys, wave, csv, netrc, plistlib, pyclbr\nprint(type(torch.__spec__.loader), importlib.reload(torch))\n"
        "print([getattr(finder, '__name__', type(finder)) for finder in sys.meta_path])"
    )
    first, *rest = rank.run([sys.executable, rank.script(show)]).stdout.splitlines()
    bare_first, *bare_rest = rank.run_bare([sys.executable, rank.script(show)]).stdout.splitlines()
    assert rest == bare_rest
    assert first.startswith(bare_first[:60])


def test_import_that_first_sees_torch_finds_its_module(rank: Rank) -> None:
    """The hook's finder vanishes while the list of finders is walked, and the next in it must not be passed over."""
    text = (
        "import sys, torch.optim.optimizer\n"
        "first = next(one for one in sys.meta_path if 'BuiltinImporter' in str(one))\n"
        "sys.meta_path.remove(first)\nsys.meta_path.insert(2, first)\n"
        "name = next(one for one in sys.builtin_module_names if one not in sys.modules)\n"
        "__import__(name)\nprint(len(torch.optim.optimizer.HOOKS))\n"
    )
    done = rank.run([sys.executable, rank.script(text)])
    assert done.stdout == b"1\n"


# Script, then the type, line and function to be found.
FAILURES = {
    "plain": ("def f():\n    raise ValueError('no')\nf()", "ValueError", 2, "f"),
    "chained": (
        "try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise KeyError from e",
        "KeyError",
        4,
        "<module>",
    ),
    "in the library": ("import json\njson.loads('{')", "json.decoder.JSONDecodeError", 2, "<module>"),
    "syntax": ("x = 1\ndef (:\n", "SyntaxError", 2, "<module>"),
    "own type": ("class Bad(Exception): pass\nraise Bad", "Bad", 2, "<module>"),
    "missing module": ("\nimport nowhere", "ModuleNotFoundError", 2, "<module>"),
    "hook replaced": (
        "import sys\nsys.excepthook = lambda *a: print('mine')\n1 / 0",
        "ZeroDivisionError",
        3,
        "<module>",
    ),
    "rich": (
        "import rich.traceback\nrich.traceback.install(width=80)\n1 / 0",
        "ZeroDivisionError",
        3,
        "<module>",
    ),
    "str fails": ("class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd", "Odd", 3, "<module>"),
}
if sys.version_info < (3, 14):  # whose pdb asks whether to end the process, and does so without an exception
    FAILURES["no terminal"] = ("x = 1\nbreakpoint()", "bdb.BdbQuit", 2, "<module>")


@pytest.mark.parametrize("name", FAILURES)
def test_uncaught_exception_is_noted_and_log_is_unchanged(rank: Rank, name: str) -> None:
    text, kind, line, function = FAILURES[name]
    script = rank.script(text)
    done, bare = rank.run([sys.executable, script]), rank.run_bare([sys.executable, script])
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout)
    error = rank.error()
    assert (error.type, str(error.where)) == (kind, f"{script}:{line} {function}")
    assert kind.rpartition(".")[2] in error.traceback


def test_refused_gpu_is_named_with_those_that_the_rank_sees(rank: Rank) -> None:
    (rank.code / "torch" / "cuda.py").write_text(
        "def device_count(): return 2\n"
        "def refuse(): raise RuntimeError('CUDA error: invalid device ordinal\\nCUDA kernel errors might be late')\n"
        "def set_device(device):\n    device = int(device)\n    refuse()\n"
    )
    seen = "this rank sees 2 GPUs, CUDA_VISIBLE_DEVICES=4,5, LOCAL_RANK=1"
    script = rank.script("import torch.cuda\ntorch.cuda.set_device('3')")
    rank.run([sys.executable, script], CUDA_VISIBLE_DEVICES="4,5", LOCAL_RANK="1")
    assert rank.error().message.splitlines()[0] == f"CUDA error: invalid device ordinal (GPU 3 was asked for, {seen})"


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit('bye')",
        "import sys; sys.exit(3)",
        "import os; os._exit(4)",
        "raise KeyboardInterrupt",
    ],
)
def test_exit_and_interrupt_are_no_errors(rank: Rank, text: str) -> None:
    """An exit and an interrupt are no errors and end in the same way."""
    done, bare = rank.run([sys.executable, "-c", text]), rank.run_bare([sys.executable, "-c", text])
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout)
    assert rank.errors() == []


@pytest.mark.parametrize("env", [{}, {"PYTHONFAULTHANDLER": "1"}])
@pytest.mark.parametrize("shell", [False, True])
def test_fatal_signal_records_all_stacks_and_location(rank: Rank, env: dict[str, str], shell: bool) -> None:
    """A fatal signal leaves the stacks of all threads and the location."""
    script = rank.script(
        "import ctypes, json, threading, time\n"
        "def wait(): time.sleep(60)\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "time.sleep(0.1)\n"
        "class Loader:\n    def __init__(self, **_): ctypes.string_at(0)\n"
        "json.loads('1', cls=Loader)\n"
    )
    line = f"{sys.executable} {script}; exit $?"
    argv = ["bash", "-c", line] if shell else [sys.executable, str(script)]
    done, log = rank.run(argv, **env), rank.root / "rank.log"
    log.write_bytes(done.stdout)
    assert done.returncode == (139 if shell else -11)
    assert (b"Fatal Python error" in done.stdout) == bool(env)
    found = failure.diagnose_exit(rank.dir, log, 0, done.returncode)
    assert found is not None and (found.type, str(found.where)) == ("", f"{script}:6 __init__")
    assert "json.loads('1', cls=Loader)" in found.traceback
    assert found.traceback.index(" in wait") < found.traceback.index(" in __init__")


def test_interrupt_has_its_location(rank: Rank) -> None:
    script, log = rank.script("def f():\n    raise KeyboardInterrupt\nf()"), rank.root / "rank.log"
    done = rank.run([sys.executable, script])
    log.write_bytes(done.stdout)
    found = failure.diagnose_exit(rank.dir, log, 0, done.returncode)
    assert found is not None and str(found.where) == f"{script}:2 f"


def test_long_messages_and_tracebacks_are_truncated(rank: Rank) -> None:
    rank.run([sys.executable, "-c", "raise ValueError('head' + 'm' * 100000 + 'tail')"])
    error = rank.error()
    assert len(error.message) == errors.MESSAGE_CHARS_MAX
    assert len(error.traceback) <= errors.TRACEBACK_CHARS_MAX
    assert error.traceback.startswith("Traceback") and error.traceback.endswith("tail\n")


@pytest.mark.parametrize("folder", ["/proc/self", "/nonexistent", "/dev/null"])
def test_unwritable_folder_is_harmless(rank: Rank, folder: str) -> None:
    """A folder that cannot be written is harmless."""
    script = rank.script(f"{STEPS}\nraise ValueError('no')")
    done, bare = (
        rank.run([sys.executable, script, "3"], ORCH_RANK_DIR=folder),
        rank.run_bare([sys.executable, script, "3"]),
    )
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout)


@pytest.mark.parametrize("damage", ["missing", "short", "a folder"])
def test_damaged_step_file_is_harmless_and_noted_once(rank: Rank, damage: str) -> None:
    file = rank.dir / layout.STEP_FILE
    file.unlink()
    if damage == "short":
        file.write_bytes(b"0" * 10)
    elif damage == "a folder":
        file.mkdir()
    done = rank.run([sys.executable, rank.script(STEPS), "3"])
    assert (done.returncode, done.stdout) == (0, b"")
    assert len((rank.dir / layout.NOTES_FILE).read_text().splitlines()) == 1


def test_hook_folder_deleted_midway_is_harmless(rank: Rank) -> None:
    text = f"import shutil\nshutil.rmtree({str(rank.root / 'hook')!r})\n{STEPS}\nraise ValueError('no')"
    done = rank.run([sys.executable, rank.script(text), "3"])
    assert done.returncode == 1
    assert rank.last_step().step == 3
    assert rank.error().type == "ValueError"


def test_short_runs_end_alike_with_and_without_hook(rank: Rank) -> None:
    for number in range(10):
        script = rank.script(f"print({number})\nimport json\nraise SystemExit({number} % 3)")
        done, bare = rank.run([sys.executable, script]), rank.run_bare([sys.executable, script])
        assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout)
    assert rank.files() == ["files.txt", "steps"]


@pytest.mark.parametrize(
    ("version", "mine", "is_kept"),
    [
        ("2.13.0+cpu", "2000", False),
        ("2.9.1", "2000", False),
        ("2.8.0", "2000", True),
        ("2.13.0", "500", True),
    ],
)
def test_torch_with_new_setting_gets_no_old(
    version: str, mine: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that knows the new name of a setting is not given the old one."""
    monkeypatch.setitem(sys.modules, "torch.version", SimpleNamespace(__version__=version))
    environ = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": mine}
    worker_server.drop_old_name(environ)
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in environ) is is_kept


# Where a rank meets the others.

MEETS = """
import os, subprocess, sys
from types import SimpleNamespace
import torch.distributed.rendezvous
from torch.distributed import distributed_c10d as c10d
os.environ.update(eval(sys.argv[1]))
c10d._world = SimpleNamespace(pg_map=eval(sys.argv[2]))
from _orch_hook import errors
print(errors.rendezvous_record())
torch.distributed.rendezvous.meet()
"""


@pytest.mark.parametrize(
    ("sets", "groups", "said"),
    [
        ({"MASTER_PORT": "12355"}, {}, "MASTER_PORT is 12355 by the script, orch gave 29500"),
        ({"RANK": "0"}, {}, "MASTER_PORT is 1 by the script, orch gave 29500"),
        ({"MASTER_PORT": "29500", "OTHER": "1"}, {}, ""),
        ({"MASTER_PORT": "12355"}, {"a group": 1}, ""),
    ],
    ids=["another port", "a port of the shell", "the same", "it has met them"],
)
def test_rank_meeting_others_elsewhere_reports_it(
    rank: Rank, sets: dict[str, str], groups: dict[str, int], said: str
) -> None:
    """A rank that meets the others at another address than it was given reports it."""
    rank.script("", "torch/distributed/__init__.py")
    rank.script("", "torch/distributed/distributed_c10d.py")
    rank.script("def meet(): raise RuntimeError('EADDRINUSE')", "torch/distributed/rendezvous.py")
    argv = [sys.executable, str(rank.script(MEETS)), repr(sets), repr(groups)]
    # A shell between the agent and Python has set the port.
    given = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "2"}
    env = {**rank.env, **given, "MASTER_PORT": "1", "ORCH_GIVEN": "127.0.0.1 29500 0 2"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    found = failure.parse_error(done.stdout.encode())
    assert (found.message if found else "") == said
    assert found is None or found.describe_with("in a wait") == f"{said}: in a wait"
    assert rank.error().message == (f"{said}: EADDRINUSE" if said else "EADDRINUSE")
