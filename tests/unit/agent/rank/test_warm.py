"""Which processes can be forked as if they were new, and what is said of those that cannot."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.agent.rank import processes, spawn, template, warm
from orchestrator.core.jobdir import rank_env
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.slurm import step_env
from tests.support import jobs

MODULES = {
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "asks": "import os\nos.environ.get('LOCAL_RANK')\n",
    "sockets": "import socket\nkept = socket.socket()\n",
    "starts": "import subprocess\nkept = subprocess.Popen(['sleep', '60'])\n",
    "handles": "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n",
    "well": "VALUE = 7\n",
    "breaks": "raise ImportError('not here')\n",
}
REASONS = {
    "thread": "started a thread",
    "asks": "reads LOCAL_RANK",
    "sockets": "opened a socket",
    "starts": "started a process",
    "handles": "changed a signal handler",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a node's folder with the hook, and installed modules in `lib` beside it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "code").mkdir()
    for name, source in MODULES.items():
        (tmp_path / "lib" / f"{name}.py").write_text(source)
    processes.install_hook(tmp_path)
    return tmp_path


@pytest.fixture
def imported(folder: Path, request: pytest.FixtureRequest) -> Iterator[warm.Template]:
    """Return a template of the modules that the test names, once it has said what it is."""
    env = {**os.environ, "PYTHONPATH": str(folder / "lib")}
    one = warm.Template(folder, (sys.executable, "train.py"), env, folder / "code", request.param)
    one.begin()
    while one.is_importing:
        time.sleep(0.01)
        one.poll()
    yield one
    one.end()


@pytest.mark.slow
@pytest.mark.parametrize("imported", [("well", *REASONS, "breaks")], indirect=True)
def test_modules_that_keep_a_process_from_being_forked_are_named_and_left_out(
    imported: warm.Template,
) -> None:
    assert imported.unfit == REASONS
    assert imported.is_ready


@pytest.mark.slow
@pytest.mark.parametrize("imported", [("thread", "well")], indirect=True)
def test_without_the_first_module_there_is_no_template(imported: warm.Template) -> None:
    assert not imported.is_ready
    assert imported.why_fresh == "import thread started a thread"
    assert imported.fork(spawn.Program((sys.executable, "train.py"), {}, Path(), Path())) == 0


@pytest.mark.slow
def test_a_module_of_the_code_that_takes_the_place_of_an_imported_one_is_named(folder: Path) -> None:
    (folder / "code" / "well.py").touch()
    one = warm.Template(folder, (sys.executable, "train.py"), {**os.environ, "PYTHONPATH": str(folder / "lib")},
                        folder / "code", ("well",))  # fmt: skip
    one.begin()
    while one.is_importing:
        time.sleep(0.01)
        one.poll()
    assert one.why_fresh == "well.py of the code takes the place of an installed module"
    one.end()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("PYTHON", "train.py"), ""),
        (("PYTHON", "-m", "pack.train"), ""),
        (("PYTHON", "plain.py"), "plain.py does not import torch"),
        (("./wrapped", "train.py"), "./wrapped is a script"),
        (
            ("bash", "-c", "python train.py"),
            "its command is not a Python with a script or module of the code",
        ),
        (("PYTHON", "-c", "import torch"), "-c is no Python file"),
        (
            ("PYTHON", "-m", "torch.utils.collect_env"),
            "its command is not a Python with a script or module of the code",
        ),
    ],
)
def test_a_template_takes_the_place_of_a_python_that_runs_a_script_with_torch(
    tmp_path: Path, argv: tuple[str, ...], reason: str
) -> None:
    (tmp_path / "pack").mkdir()
    for name in ("train.py", "pack/train.py"):
        (tmp_path / name).write_text("import os\nfrom torch import nn\n")
    (tmp_path / "plain.py").write_text("# import torch\n")
    (tmp_path / "wrapped").write_text("#!/bin/sh\n")
    real = tuple(sys.executable if word == "PYTHON" else word for word in argv)
    assert warm.reason_against(real, tmp_path, has_stepped=False) == reason


def test_a_script_without_torch_whose_ranks_made_steps_has_a_template(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import helper\n")
    assert warm.reason_against((sys.executable, "plain.py"), tmp_path, has_stepped=True) == ""


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "1"', "OMP_NUM_THREADS"),
        ("os.environ.setdefault('TORCH_LOGS', 'dynamo')", "TORCH_LOGS"),
        ('if os.environ["TORCH_HOME"] == "":', ""),
        ('home = os.environ["TORCH_HOME"]', ""),
        ('os.environ["TOKENIZERS_PARALLELISM"] = "false"', ""),
    ],
)
def test_a_script_that_sets_what_torch_reads_when_it_is_loaded_has_ranks_of_its_own(
    tmp_path: Path, line: str, sets: str
) -> None:
    (tmp_path / "train.py").write_text(f"import os\n{line}\nimport torch\n")
    reason = warm.reason_against((sys.executable, "train.py"), tmp_path, has_stepped=True)
    assert reason == (f"train.py sets {sets}, which torch may read when it is imported" if sets else "")


def test_every_variable_that_a_rank_gets_when_it_starts_is_one_that_imports_may_not_read() -> None:
    slot = rank_env.RankSlot(0, "node-0", 0, 1, 0, 1)
    own = rank_env.rank_env(jobs.plan(), JobDir(Path("/job")), slot, 1, ("127.0.0.1", 29500), "")
    of_slurm = step_env.of_a_rank(0, 0, [("node-0", (0,))])
    assert set(template.ALONE) == (own.keys() | of_slurm.keys()) - {"ORCH_TAG"}


def test_a_late_fork_is_told_from_one_that_will_never_be(tmp_path: Path) -> None:
    (tmp_path / warm.TICKET).touch()
    assert warm._late_fork(tmp_path / warm.TICKET) == 0
    assert not (tmp_path / warm.TICKET).exists(), "a fork that comes now ends"
    (tmp_path / f"{warm.TICKET}.4711").touch()
    assert warm._late_fork(tmp_path / warm.TICKET) == 4711
    (tmp_path / "folder" / warm.TICKET).mkdir(parents=True)
    with pytest.raises(OSError):
        warm._late_fork(tmp_path / "folder" / warm.TICKET)
