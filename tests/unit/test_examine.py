"""Is it seen what a rank does? Real processes, started and looked at as an agent does it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from orchestrator.node.frames import Frame, is_in_users_code
from orchestrator.wire.messages import Doing
from tests.support.watch import SAY_READY, watching

GO = SAY_READY.replace("\n", "; ").removesuffix("; ") + "\n"
"""The same on one line, so that line numbers below can be counted."""

DEPTH = 12
"""Imports within one another; CPython has five frames of its own for each, and a dump ends after a hundred."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="this kernel does not tell calls"),
]


def test_a_first_look_says_where_a_rank_is_and_judges_nothing(tmp_path: Path) -> None:
    script = f"import time\n{GO}def rest():\n    time.sleep(3600)\nrest()\n"
    with watching(tmp_path, script) as watch:
        found = watch.look()[0]
        assert (found.doing, found.still_s, found.certain) == (Doing.UNSEEN, 0.0, False)
        assert (found.where, found.state) == ("train.py:4 rest", "S")
        assert found.stack == ("train.py:4 rest", "train.py:5 <module>")


def test_a_rank_deep_in_imports_shows_the_users_line_and_no_import_machinery(tmp_path: Path) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    for number in range(DEPTH):
        (library / f"deep{number}.py").write_text(f"import deep{number + 1}\n")
    (library / f"deep{DEPTH}.py").write_text(f"import time\n{GO}time.sleep(3600)\n")
    with watching(tmp_path, "x = 1\nimport deep0\n", PYTHONPATH=str(library)) as watch:
        found = watch.look()[0]
        assert (found.where, found.phase) == ("train.py:2 <module>", "import")
        assert found.stack[-1] == found.where
        assert len(found.stack) == DEPTH + 2, found.stack


def test_a_long_sleep_is_proof_and_a_short_one_says_when_it_ends(tmp_path: Path) -> None:
    script = f"import os, time\n{GO}time.sleep(float(os.environ['SLEEP']))\n"
    with watching(tmp_path / "long", script, SLEEP="3600") as watch:
        found = watch.until_doing(Doing.SLEEPS, certain=True)
        assert found.ends_s is not None
        assert 3500 < found.ends_s <= 3600
        assert "in sleep(), 3,5" in found.why or "in sleep(), 3,600" in found.why
    with watching(tmp_path / "short", script, SLEEP="40") as watch:
        found = watch.until_doing(Doing.SLEEPS)
        assert not found.certain
        assert found.ends_s is not None
        assert 0 < found.ends_s <= 40


def test_time_that_stands_still_is_summed_over_looks_and_a_moving_stack_ends_it(tmp_path: Path) -> None:
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
        first = watch.until_doing(Doing.SLEEPS)
        second = watch.until(lambda one: one.still_s > first.still_s + 0.5)
        assert not second.certain
        go.touch()
        moved = watch.until_doing(Doing.WORKS)
        assert (moved.still_s, moved.why) == (0.0, "its stack moves")
        assert watch.until_doing(Doing.SLEEPS).still_s < second.still_s + 30


def test_work_in_changing_functions_is_work(tmp_path: Path) -> None:
    script = f"""import time
def a(until):
    while time.monotonic() < until: pass
def b(until):
    while time.monotonic() < until: pass
{GO}number = 0
while True:
    number += 1
    (a if number % 3 else b)(time.monotonic() + 0.013)
"""
    with watching(tmp_path, script) as watch:
        assert watch.until_doing(Doing.WORKS).still_s == 0.0


def test_reading_much_is_work_though_the_stack_stands_still(tmp_path: Path) -> None:
    script = f"""import os, time
file = os.open('/dev/zero', os.O_RDONLY)
{GO}while True:
    os.read(file, 1 << 20); time.sleep(0.02)
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.WORKS)
        assert "it reads and writes" in found.why
        time.sleep(0.3)
        assert watch.look()[0].doing is Doing.WORKS


def test_a_child_that_computes_is_work(tmp_path: Path) -> None:
    script = f"""import subprocess, sys
child = subprocess.Popen([sys.executable, '-S', '-E', '-c', 'while True: pass'])
{GO}child.wait()
"""
    with watching(tmp_path, script) as watch:
        assert watch.until(lambda one: one.why.startswith("its child ")).doing is Doing.WORKS


def test_a_lock_that_no_thread_can_release_is_proof(tmp_path: Path) -> None:
    script = f"""import threading
a, b, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
def one():
    with a:
        both.wait()
        with b: pass
def two():
    with b:
        both.wait()
        with a: pass
other = threading.Thread(target=one); other.start()
{GO}two()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED, certain=True)
        assert (found.where, found.why) == (
            "train.py:10 two",
            "on a lock; the other thread is at train.py:6 one, and does not go on either",
        )


def test_a_lock_that_another_thread_may_release_is_no_proof(tmp_path: Path) -> None:
    script = f"""import threading, time
lock = threading.Lock()
def rest():
    while True: time.sleep(1), threading.main_thread()
threading.Thread(target=rest, daemon=True).start()
lock.acquire()
{GO}lock.acquire()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until(lambda one: one.doing is Doing.BLOCKED and one.still_s > 2)
        assert found.why == "on a lock; the other thread is at train.py:4 rest"
        assert (found.certain, found.ends_s) == (False, None)


def test_a_wait_with_a_limit_says_when_it_ends(tmp_path: Path) -> None:
    script = f"import threading\n{GO}threading.Event().wait(50)\n"
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED)
        assert found.ends_s is not None
        assert 0 < found.ends_s <= 50
        assert not found.certain
        assert found.why.startswith("on a lock, for 4")


@pytest.mark.parametrize("how", ["open(fifo)", "os.read(os.open(fifo, os.O_RDWR), 1)"])
def test_a_fifo_that_nobody_writes_is_proof_and_is_named(tmp_path: Path, how: str) -> None:
    script = f"""import os
fifo = os.environ['FIFO']
os.mkfifo(fifo)
def load_batch():
    return {how}
{GO}load_batch()
"""
    with watching(tmp_path, script, FIFO=str(tmp_path / "job" / "code" / "shard.bin")) as watch:
        found = watch.until_doing(Doing.BLOCKED, certain=True)
        call = how.partition("(")[0].removeprefix("os.")
        assert found.why == f"in {call}() of shard.bin, and nobody has its other end open"
        assert found.where == "train.py:5 load_batch"


def test_a_pipe_that_a_living_child_may_write_is_no_proof(tmp_path: Path) -> None:
    script = f"""import os, subprocess
child = subprocess.Popen(['sleep', '55'], stdout=subprocess.PIPE)
{GO}os.read(child.stdout.fileno(), 1)
"""
    with watching(tmp_path, script) as watch:
        found = watch.until(lambda one: one.doing is Doing.BLOCKED and one.still_s > 1)
        assert not found.certain
        assert found.why.startswith("in read() of a pipe")


@pytest.mark.parametrize("asker", ["input", "pdb"])
def test_a_prompt_without_a_person_is_proof(tmp_path: Path, asker: str) -> None:
    ask = "input('well? ')" if asker == "input" else "import pdb; pdb.set_trace(); pass"
    script = f"""import os, pty, sys, threading
master, slave = pty.openpty()
os.dup2(slave, 0)
threading.Thread(target=lambda: [os.read(master, 99) for _ in range(9)], daemon=True).start()
{GO}def think():
    {ask}
think()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED, certain=True)
        name = "input()" if asker == "input" else "pdb"
        assert found.why == f"at a prompt of {name}, where nobody can type"
        assert found.where == "train.py:7 think"


def test_a_stopped_rank_is_stopped_and_goes_on_to_work(tmp_path: Path) -> None:
    script = f"import time\n{GO}while True:\n    time.sleep(0.01)\n"
    with watching(tmp_path, script) as watch:
        pid = watch.ranks.processes[0].pid
        os.kill(pid, signal.SIGSTOP)
        found = watch.until(lambda one: one.doing is Doing.STOPPED and one.still_s > 0.5)
        assert (found.why, found.state) == ("stopped (state T)", "T")
        os.kill(pid, signal.SIGCONT)
        assert watch.until(lambda one: one.doing is not Doing.STOPPED).still_s == 0.0


def test_a_stopped_child_that_is_waited_for_is_proof(tmp_path: Path) -> None:
    script = f"""import os, signal, subprocess
child = subprocess.Popen(['sleep', '300'])
os.kill(child.pid, signal.SIGSTOP)
{GO}child.wait()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED, certain=True)
        assert found.why.startswith("waits for its child ")
        assert found.why.endswith("which is stopped (state T)")


def test_threads_that_outlive_the_script_are_named(tmp_path: Path) -> None:
    script = f"""import threading, time
def rest(): time.sleep(3600)
threading.Thread(target=rest).start()
{GO}"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED, certain=True)
        words = (
            "waits for its other threads to end, one of them at train.py:2 rest, and does not go on either"
        )
        assert (found.why, found.phase) == (words, "exit")


def test_the_rank_behind_a_launcher_is_the_one_that_is_looked_at(tmp_path: Path) -> None:
    script = f"""import os, subprocess, sys, time
if 'INNER' in os.environ:
    {GO}    time.sleep(3600)
subprocess.run([sys.executable, __file__], env=dict(os.environ, INNER='1'))
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.SLEEPS, certain=True)
        assert found.pid != watch.ranks.processes[0].pid
        assert found.where == "train.py:4 <module>"


def test_a_rank_that_still_imports_is_in_the_phase_of_importing(tmp_path: Path) -> None:
    script = f"import sys\nsys.path.insert(0, '.')\nopen('slow.py', 'w').write('import time; time.sleep(40)')\n{GO}import slow\n"
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.SLEEPS)
        assert found.phase == "import"
        assert found.where == "slow.py:1 <module>"


def test_a_program_without_a_python_stack_is_told_by_its_system_call(tmp_path: Path) -> None:
    script = f"import os\n{GO}os.execvp('sleep', ['sleep', '3600'])\n"
    with watching(tmp_path, script) as watch:
        watch.await_name("sleep")
        found = watch.until_doing(Doing.SLEEPS)
        assert found.why.startswith("in sleep(), ")
        assert not found.certain  # a relative sleep: nobody but the kernel knows how much of it is left
        assert found.stack == ()


def test_a_page_grows_by_each_look_with_all_stacks(tmp_path: Path) -> None:
    script = f"import time\n{GO}time.sleep(3600)\n"
    with watching(tmp_path, script) as watch:
        watch.look()
        before = watch.page()
        watch.until_doing(Doing.SLEEPS)
        assert watch.page().startswith(before)
        assert watch.page().count('train.py", line 3 in <module>') == watch.count
        assert "unseen, still for 0 s: in sleep()" in before.splitlines()[0]


def test_eight_ranks_are_looked_at_together(tmp_path: Path) -> None:
    script = f"import time\n{GO}time.sleep(3600)\n"
    with watching(tmp_path, script, ranks=8) as watch:
        assert sorted(watch.look()) == list(range(8))
        assert all(one.stack == ("train.py:3 <module>",) for one in watch.look().values())


def test_a_dataloader_of_processes_is_waited_for_and_its_stuck_worker_is_named(tmp_path: Path) -> None:
    """The same frames as torch's, without torch: a queue that a child should fill, and the child in a FIFO."""
    script = f"""import multiprocessing, os
def work(queue):
    os.mkfifo('shard.bin')
    open('shard.bin').read()
queue = multiprocessing.get_context('fork').Queue()
multiprocessing.get_context('fork').Process(target=work, args=(queue,), daemon=True).start()
{GO}queue.get()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED, certain=True)
        assert found.why.startswith("waits for its child ")
        assert "in open() of shard.bin, train.py:4 work: nobody has its other end open" in found.why
        assert found.where == "train.py:8 <module>"


def test_what_comes_little_by_little_is_work(tmp_path: Path) -> None:
    script = f"""import socket, threading, time
mine, other = socket.socketpair()
def feed():
    while True:
        other.send(b'x'); time.sleep(0.02)
threading.Thread(target=feed, daemon=True).start()
def load():
    while True: mine.recv(16)
{GO}load()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.WORKS)
        assert found.why.startswith("it reads little by little, in recv() of ")


SERVES = """import socket, threading, time
server = socket.create_server(('127.0.0.1', 0))
mine = socket.create_connection(server.getsockname())
other, _ = server.accept()
"""


@pytest.mark.parametrize("limit_s", ["30", "None"])
def test_what_comes_little_by_little_through_a_socket_with_a_time_limit_is_work(
    tmp_path: Path, limit_s: str
) -> None:
    script = f"""{SERVES}mine.settimeout({limit_s})
child = os.fork() if (os := __import__('os')) else 0
while not child:
    other.send(b'x'); time.sleep(0.02)
def load():
    while True: mine.recv(16)
{GO}load()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.WORKS)
        call = "recv" if limit_s == "None" else "poll"
        assert found.why.startswith(f"it reads little by little, in {call}() of the connection to 127.0.0.1:")


@pytest.mark.parametrize("limit_s", ["0.02", "0.5"])
def test_time_limits_that_pass_again_and_again_are_no_work(tmp_path: Path, limit_s: str) -> None:
    script = f"""{SERVES}import select
{GO}while True: select.select([mine], [], [], {limit_s})
"""
    with watching(tmp_path, script) as watch:
        found = watch.until(lambda one: one.still_s > 4)
        assert found.doing in (Doing.BLOCKED, Doing.SPINS)


def test_a_child_that_is_waited_for_is_named(tmp_path: Path) -> None:
    script = f"import subprocess\nchild = subprocess.Popen(['sleep', '55'])\n{GO}child.wait()\n"
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED)
        assert found.why.startswith("waits for a child to end: it is sleep (")
        assert not found.certain, "it ends within a minute"


def test_an_import_that_waits_for_itself_is_proof(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text(
        "import threading\ndef fill():\n    import tables\n    tables.ROWS.append(1)\n"
        "filler = threading.Thread(target=fill, daemon=True)\nfiller.start()\n"
        f"{GO.strip()}; filler.join()\nROWS = []\n"
    )
    with watching(tmp_path, f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport tables\n") as watch:
        found = watch.until_doing(Doing.BLOCKED, certain=True)
        assert found.why.startswith(
            "in join() of another thread, which does not end; the other thread is at tables"
        )


def test_of_a_loaders_workers_the_one_in_the_users_code_is_named() -> None:
    loop = Frame("/site-packages/torch/utils/data/_utils/worker.py", 9, "_worker_loop")
    main, item = Frame("/home/ada/train.py", 5, "main"), Frame("/home/ada/data.py", 7, "__getitem__")
    assert not is_in_users_code((Frame("/usr/lib/python3.11/queue.py", 3, "get"), loop, main))
    assert is_in_users_code((Frame("/usr/lib/python3.11/socket.py", 3, "recv"), item, loop, main))


def test_a_loop_of_asyncio_is_called_by_its_name(tmp_path: Path) -> None:
    script = f"import asyncio\nasync def main():\n    {GO.strip()}\n    await asyncio.Event().wait()\nasyncio.run(main())\n"
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED)
        assert (found.why, found.where) == ("waits in asyncio's loop", "train.py:5 <module>")
