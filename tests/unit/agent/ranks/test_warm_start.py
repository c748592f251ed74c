"""Which processes can be forked as if they were new, and what is said of those that cannot."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.agent.host import hook_files
from orchestrator.agent.ranks import imports_ahead, spawn, warm_start
from orchestrator.agent.ranks.first_imports import Import
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.settings.rank_env import NodePlan, rank_env
from orchestrator.core.slurm import step_env
from tests.support import jobs

MODULES = {
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "asks": "import os\nos.environ.get('LOCAL_RANK')\n",
    "sockets": "import socket\nkept = socket.socket()\n",
    "starts": "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n",
    "handles": "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n",
    "well": "VALUE = 7\n",
    "breaks": "raise ImportError('not here')\n",
    "lazy": "def __getattr__(name):\n    import nested\n    return nested\n",
    "nested": "import os\nos.environ.get('LOCAL_RANK')\n",
    "wants": "import os\nVALUE = os.environ.get('MODE')\n",
    "temporary": "import tempfile\nFOLDER = tempfile.TemporaryDirectory()\n",
    "moves": "import os\nos.chdir('/')\n",
}
REASONS = {
    "thread": "started a thread",
    "asks": "reads LOCAL_RANK",
    "sockets": "opened a socket",
    "starts": "started a process",
    "handles": "changed a signal handler",
    "breaks": "raises ImportError: not here",
    "temporary": "made a temporary file",
    "moves": "changed the working folder",
}


@pytest.fixture(autouse=True)
def adopts() -> None:
    """Have this process adopt its grandchildren, as an agent does."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a node's folder with the hook, and installed modules next to it."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code/own.py").touch()
    for name, source in MODULES.items():
        (tmp_path / "site-packages" / f"{name}.py").write_text(source)
    hook_files.install_hook(tmp_path)
    return tmp_path


@pytest.fixture
def imported(folder: Path, request: pytest.FixtureRequest) -> Iterator[warm_start.Template]:
    """Return a template of the modules and of the program's first imports, once it has said what it is."""
    one = _begun(folder, *request.param)
    yield one
    one.end()


def _begun(folder: Path, modules: tuple[str, ...], imports: tuple[Import, ...]) -> warm_start.Template:
    """Return a template that has said what it is."""
    env = {**os.environ, "PYTHONPATH": str(folder / "site-packages")}
    one = warm_start.Template(folder, (sys.executable, "train.py"), env, folder / "code", modules, imports)
    one.begin()
    while one.is_importing:
        time.sleep(0.01)
        one.poll()
    return one


def _reason(argv: tuple[str, ...], code: Path, *, has_stepped: bool) -> str:
    try:
        warm_start.read_source(argv, code, has_stepped=has_stepped)
    except ValueError as err:
        return str(err)
    return ""


def _imports(*names: str) -> tuple[Import, ...]:
    return tuple(Import(name) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", REASONS)
def test_unforkable_package_is_named_rest_is_unforked(folder: Path, name: str) -> None:
    """A package that keeps a process from being forked is named; what follows it is left to ranks."""
    one = _begun(folder, ("well",), _imports("wants", name, "lazy"))
    assert one.is_ready and one.imported.ready == ("well", "wants")
    assert one.left_out == f"{name}, which {REASONS[name]}"
    assert (procfs.stat(one.pid) or pytest.fail()).ppid == os.getpid()
    one.end()


@pytest.mark.slow
@pytest.mark.parametrize("imported", [(("well",), (Import("lazy", ("Name",)),))], indirect=True)
def test_lazily_imported_name_is_requested(imported: warm_start.Template) -> None:
    """A name that is imported only on access is accessed."""
    assert imported.left_out == "lazy, which reads LOCAL_RANK"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imported", [(("well", "breaks"), _imports("os", "sys", "json", "missing", "lazy"))], indirect=True
)
def test_builtin_and_missing_modules_end_nothing(imported: warm_start.Template) -> None:
    """Python's own modules and missing ones do not end the imports."""
    assert (imported.imported.ready, imported.left_out) == (("well", "lazy"), "")


@pytest.mark.slow
@pytest.mark.parametrize("imported", [(("well",), _imports("own", "lazy"))], indirect=True)
def test_imports_after_program_module_are_left_to_ranks(imported: warm_start.Template) -> None:
    assert (imported.imported.ready, imported.left_out) == (("well",), "")


@pytest.mark.slow
@pytest.mark.parametrize("imported", [(("thread", "well"), ())], indirect=True)
def test_template_is_missing_without_first_module(imported: warm_start.Template) -> None:
    assert not imported.is_ready
    assert imported.why_fresh == "import thread started a thread"
    assert imported.fork(spawn.Program((sys.executable, "train.py"), {}, Path(), Path())) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "imports", "why_fresh", "left_out"),
    [
        (("nested",), (), "import nested reads LOCAL_RANK", ""),
        (("well",), (), "import well imports what well.py of the code takes the place of", ""),
        (("wants",), _imports("well"), "", ""),
    ],
)
def test_program_module_shadowing_import_is_named(
    folder: Path, modules: tuple[str, ...], imports: tuple[Import, ...], why_fresh: str, left_out: str
) -> None:
    """A module of the code that takes the place of an imported one is named."""
    (folder / "code" / "well.py").touch()
    one = _begun(folder, modules, imports)
    assert (one.why_fresh, one.left_out) == (why_fresh, left_out)
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
def test_template_replaces_python_running_torch_script(tmp_path: Path, argv: tuple[str, ...], reason: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "train.py").write_text("import os, numpy as np, torch.nn as nn\n")
    (tmp_path / "pack/train.py").write_text("import os\nfrom torch import nn\n")
    (tmp_path / "plain.py").write_text("# import torch\n")
    (tmp_path / "wrapped").write_text("#!/bin/sh\n")
    real = tuple(sys.executable if word == "PYTHON" else word for word in argv)
    assert _reason(real, tmp_path, has_stepped=False) == reason


def test_torchless_script_with_steps_has_template(tmp_path: Path) -> None:
    """A script without torch whose ranks made steps has a template."""
    (tmp_path / "plain.py").write_text("import helper\n")
    assert _reason((sys.executable, "plain.py"), tmp_path, has_stepped=True) == ""


def test_program_setting_torch_load_variables_starts_ranks_fresh(tmp_path: Path) -> None:
    """A program that sets what torch reads when it is loaded has its ranks started fresh."""
    (tmp_path / "train.py").write_text('import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\n')
    reason = "train.py sets OMP_NUM_THREADS, which torch may read when it is imported"
    assert _reason((sys.executable, "train.py"), tmp_path, has_stepped=True) == reason


def test_variables_given_at_start_are_forbidden_to_imports() -> None:
    """Each variable that a rank gets when it starts is one that imports may not read."""
    at = NodePlan(jobs.plan(), JobDir(Path("/job")), "node-0", 1, ("node-0", "node-1"))
    own = rank_env(at, 0, ("127.0.0.1", 29500))
    of_slurm = step_env.rank_step_env(0, 0, [("node-0", (0,))])
    assert set(imports_ahead.RANK_VARIABLES) == own.keys() | of_slurm.keys()


def test_late_fork_is_distinguished_from_missing_one(tmp_path: Path) -> None:
    """A late fork is distinguished from one that will never come."""
    (tmp_path / warm_start.TICKET).touch()
    assert warm_start._cancel_fork(tmp_path / warm_start.TICKET) == 0
    assert not (tmp_path / warm_start.TICKET).exists(), "a fork that comes now ends"
    (tmp_path / f"{warm_start.TICKET}.4711").touch()
    assert warm_start._cancel_fork(tmp_path / warm_start.TICKET) == 4711
    (tmp_path / "folder" / warm_start.TICKET).mkdir(parents=True)
    with pytest.raises(OSError):
        warm_start._cancel_fork(tmp_path / "folder" / warm_start.TICKET)
