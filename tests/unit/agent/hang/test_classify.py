"""The activity of real processes, started and inspected as an agent does it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestrator.agent.hang.stack_frames import runs_users_code
from orchestrator.core.observations import Activity
from orchestrator.core.status_types import Frame
from tests.support.watch import SAY_READY, watching

GO = SAY_READY.replace("\n", "; ").removesuffix("; ") + "\n"
"""The same on one line, so that line numbers below can be counted."""

DEPTH = 10
"""Imports within one another; CPython has five frames of its own for each, from 3.14 on two more that it does not write,
and a dump ends after a hundred."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="this kernel does not tell calls"),
]


def test_first_inspection_locates_rank_without_verdict(tmp_path: Path) -> None:
    """A first inspection reports where a rank is and judges nothing."""
    script = f"import time\n{GO}def rest():\n    time.sleep(3600)\nrest()\n"
    with watching(tmp_path, script) as watch:
        found = watch.look()[0]
        assert (found.activity, found.still_s) == (Activity.UNKNOWN, 0.0)
        assert (str(found.where), found.state) == ("train.py:4 rest", "S")
        assert found.stack == ("train.py:4 rest", "train.py:5 <module>")


def test_rank_in_imports_shows_user_line_only(tmp_path: Path) -> None:
    """A rank deep in imports shows the user's line and no import machinery."""
    library = tmp_path / "site-packages"
    library.mkdir()
    for number in range(DEPTH):
        (library / f"deep{number}.py").write_text(f"import deep{number + 1}\n")
    (library / f"deep{DEPTH}.py").write_text(f"import time\n{GO}time.sleep(3600)\n")
    with watching(tmp_path, "x = 1\nimport deep0\n", PYTHONPATH=str(library)) as watch:
        found = watch.look()[0]
        assert (str(found.where), found.phase) == ("train.py:2 <module>", "import")
        assert found.stack[-1] == str(found.where)
        assert len(found.stack) == DEPTH + 2, found.stack


def test_stuck_time_accumulates_until_stack_moves(tmp_path: Path) -> None:
    """The time without movement is summed over inspections, and a moving stack ends it."""
    script = f"""import os, time
{GO}def one():
    while not os.path.exists(os.environ['GO']):
        time.sleep(0.2)
def two():
    time.sleep(30)
one()
two()
"""
    go = tmp_path / "go"
    with watching(tmp_path, script, GO=str(go)) as watch:
        first = watch.until_activity(Activity.SLEEPING)
        second = watch.until(lambda one: one.still_s > first.still_s + 0.5)
        go.touch()
        moved = watch.until_activity(Activity.PROGRESSING)
        assert (moved.still_s, moved.why) == (0.0, "its stack moves")
        assert watch.until_activity(Activity.SLEEPING).still_s < second.still_s + 30


def test_stopped_rank_is_stopped_then_progressing(tmp_path: Path) -> None:
    """A stopped rank is reported as stopped, and once it continues, as working."""
    script = f"import time\n{GO}while True:\n    time.sleep(0.01)\n"
    with watching(tmp_path, script) as watch:
        pid = watch.ranks.processes[0].pid
        os.kill(pid, signal.SIGSTOP)
        found = watch.until(lambda one: one.activity is Activity.STOPPED and one.still_s > 0.5)
        assert (found.why, found.state) == ("stopped (state T)", "T")
        os.kill(pid, signal.SIGCONT)
        assert watch.until(lambda one: one.activity is not Activity.STOPPED).still_s == 0.0


def test_rank_behind_launcher_is_inspected(tmp_path: Path) -> None:
    script = f"""import os, subprocess, sys, time
if 'INNER' in os.environ:
    {GO}    time.sleep(3600)
subprocess.run([sys.executable, __file__], env=dict(os.environ, INNER='1'))
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_activity(Activity.SLEEPING)
        assert found.pid != watch.ranks.processes[0].pid
        assert str(found.where) == "train.py:4 <module>"


def test_importing_rank_is_in_import_phase(tmp_path: Path) -> None:
    script = f"import sys\nsys.path.insert(0, '.')\nopen('slow.py', 'w').write('import time; time.sleep(40)')\n{GO}import slow\n"
    with watching(tmp_path, script) as watch:
        found = watch.until_activity(Activity.SLEEPING)
        assert found.phase == "import"
        assert str(found.where) == "slow.py:1 <module>"


def test_program_without_python_is_described_by_system_call(tmp_path: Path) -> None:
    script = f"import os\n{GO}os.execvp('sleep', ['sleep', '3600'])\n"
    with watching(tmp_path, script) as watch:
        watch.await_name("sleep")
        found = watch.until_activity(Activity.SLEEPING)
        assert found.why == "in sleep()"
        assert found.stack == ()


def test_evidence_grows_by_every_inspection(tmp_path: Path) -> None:
    script = f"import time\n{GO}time.sleep(3600)\n"
    with watching(tmp_path, script) as watch:
        watch.look()
        before = watch.page()
        watch.until_activity(Activity.SLEEPING)
        assert watch.page().startswith(before)
        assert watch.page().count("Stack (most recent call last)") == watch.count
        assert 'train.py", line 3, in <module>\n    time.sleep(3600)\n' in before
        assert watch.page().count("all Python threads") == watch.count
        assert "unknown, still for 0 s: in sleep()" in before.splitlines()[0]


def test_eight_ranks_are_inspected_concurrently(tmp_path: Path) -> None:
    script = f"import time\n{GO}time.sleep(3600)\n"
    with watching(tmp_path, script, ranks=8) as watch:
        assert sorted(watch.look()) == list(range(8))
        assert all(one.stack == ("train.py:3 <module>",) for one in watch.look().values())


def test_loader_worker_in_user_code_is_named() -> None:
    loop = Frame("/site-packages/torch/utils/data/_utils/worker.py", 9, "_worker_loop")
    main, item = Frame("/home/ada/train.py", 5, "main"), Frame("/home/ada/data.py", 7, "__getitem__")
    assert not runs_users_code((Frame("/usr/lib/python3.11/queue.py", 3, "get"), loop, main))
    assert runs_users_code((Frame("/usr/lib/python3.11/socket.py", 3, "recv"), item, loop, main))
