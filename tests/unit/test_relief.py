"""Is a rank that waits for its children, or at a pipe, proved to hang only where nobody is left who could let it go on?

Real processes, as in `test_examine`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.node.frames import Frame, awaits_task, is_worker_of_loader, serves
from orchestrator.wire.messages import Doing, RankLook
from tests.support.watch import SAY_READY, watching

GO = SAY_READY.replace("\n", "; ").removesuffix("; ") + "\n"
STILL_S = 3.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="this kernel does not tell calls"),
]

MONITOR = """import multiprocessing, os, signal, subprocess, sys, threading, time
fork = multiprocessing.get_context('fork')
def monitor():
    time.sleep(300)
watcher = fork.Process(target=monitor, daemon=True)
watcher.start()
"""
"""A child that no rank ever waits for."""


def stands(one: RankLook) -> bool:
    return one.doing is Doing.BLOCKED and one.still_s > STILL_S


@pytest.mark.parametrize(
    "waits",
    [
        "fork.Pool(2).map(slow, range(4))",
        "fork.Pool(2).map(time.sleep, [40, 40])",
        "subprocess.Popen(['sleep', '40']).wait()",
        "subprocess.Popen(['sleep', '40']); os.wait()",
        "ours, theirs = fork.Pipe(); fork.Process(target=answer, args=(theirs,)).start(); ours.recv()",
        "queue = fork.Queue(); fork.Process(target=fill, args=(queue,)).start(); queue.get()",
        "os.kill(watcher.pid, signal.SIGSTOP); subprocess.run(['sleep', '40'])",
        "threading.Timer(40, watcher.kill).start(); watcher.join()",
        "signal.signal(signal.SIGALRM, lambda *_: watcher.kill()); signal.alarm(40); watcher.join()",
    ],
)
def test_a_child_beside_the_one_that_is_waited_for_is_no_proof(tmp_path: Path, waits: str) -> None:
    script = f"""{MONITOR}def slow(number):
    time.sleep(40 if number == 3 else 0)
def answer(connection):
    time.sleep(40); connection.send(1)
def fill(queue):
    time.sleep(40); queue.put(1)
{GO}{waits}
"""
    with watching(tmp_path, script) as watch:
        found = watch.until(stands)
        assert not found.certain, found.why


@pytest.mark.parametrize(
    ("waits", "why"),
    [
        ("watcher.join()", "train.py:4 monitor"),
        ("os.kill(watcher.pid, signal.SIGSTOP); watcher.join()", "which is stopped (state T)"),
        ("fork.Pool(2).map(slow, range(4))", "train.py:8 slow"),
        (
            "os.waitpid(subprocess.Popen(['sh', '-c', f'{sys.executable} deep.py; exit 3']).pid, 0)",
            "deep.py:1 <module>",
        ),
        ("subprocess.Popen([sys.executable, 'deep.py'], stdout=-1).stdout.read()", "deep.py:1 <module>"),
        ("subprocess.run(['sleep', '600'])", "which is in sleep(), "),
        ("os.system('sleep 600; true')", "which is in sleep(), "),
        ("subprocess.Popen(['sleep', '600'], stdout=-1).stdout.read()", "which is in sleep(), "),
    ],
)
def test_a_rank_that_none_of_its_children_can_let_go_on_is_proved(
    tmp_path: Path, waits: str, why: str
) -> None:
    script = f"""{MONITOR}def slow(number):
    time.sleep(7200 if number == 3 else 0)
open('deep.py', 'w').write('import time; time.sleep(3600)')
{GO}{waits}
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED, certain=True)
        assert found.why.startswith("waits for its child ")
        assert why in found.why


@pytest.mark.parametrize(
    ("before", "certain"),
    [
        ("", True),
        ("watcher = fork.Process(target=monitor, daemon=True); watcher.start()", True),
        ("subprocess.Popen(['sleep', '40'])", False),
        ("threading.Timer(40, print).start()", False),
        ("signal.signal(signal.SIGALRM, print); signal.alarm(40)", False),
    ],
)
@pytest.mark.parametrize(
    "waits", ["open('data.fifo')", "select.select([os.pipe()[0]], [], [])", "own.read(1)"]
)
def test_a_pipe_that_only_the_reader_could_write_is_proof_where_nothing_can_rouse_it(
    tmp_path: Path, before: str, certain: bool, waits: str
) -> None:
    script = f"""import select
{MONITOR.partition("watcher")[0]}os.mkfifo('data.fifo')
own = os.fdopen(os.open('data.fifo', os.O_RDWR), 'rb', 0) if 'own' in {waits!r} else None
{before}
{GO}{waits}
"""
    with watching(tmp_path, script) as watch:
        found = watch.until(stands)
        assert found.certain == certain, found.why


def test_a_pipe_that_a_signals_handler_may_write_is_no_proof(tmp_path: Path) -> None:
    script = f"""import select, signal, os
read_end, write_end = os.pipe()
os.set_blocking(write_end, False)
signal.signal(signal.SIGUSR1, print); signal.set_wakeup_fd(write_end)
{GO}select.select([read_end], [], [])
"""
    with watching(tmp_path, script) as watch:
        assert not watch.until(stands).certain


def test_a_rank_that_waits_for_a_program_before_its_first_step_is_not_taken_for_another_child(
    tmp_path: Path,
) -> None:
    script = f"{MONITOR}{GO}subprocess.run(['sleep', '40'])\n"
    with watching(tmp_path, script) as watch:
        found = watch.until(lambda one: one.still_s > STILL_S)
        assert (found.pid, found.doing) == (watch.ranks.processes[0].pid, Doing.BLOCKED)
        assert found.why.startswith("waits for a child to end: it is sleep (")


LOADER = """torch = os.path.abspath('site-packages/torch/utils/data')
os.makedirs(f'{torch}/_utils')
open(f'{torch}/dataloader.py', 'w').write('def _try_get_data(queue):\\n    return queue.get(timeout=999)')
open(f'{torch}/_utils/worker.py', 'w').write('def _worker_loop(fetch):\\n    fetch()')
sys.path[:0] = [torch, f'{torch}/_utils']
import dataloader, worker
"""
"""The same files and functions as torch's, without torch."""


@pytest.mark.parametrize(("rest_s", "certain"), [(40, False), (3600, True)])
def test_a_loader_waits_for_its_workers_alone(tmp_path: Path, rest_s: int, certain: bool) -> None:
    script = f"""{MONITOR}{LOADER}def fetch():
    time.sleep({rest_s})
fork.Process(target=worker._worker_loop, args=(fetch,)).start()
{GO}dataloader._try_get_data(fork.Queue())
"""
    with watching(tmp_path, script) as watch:
        found = watch.until(stands)
        assert found.certain == certain
        assert "waits for its DataLoader's worker" in found.why
        assert "fetch" in found.why, "and not the monitor, which is no worker"


def in_library(*inside: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(f"/usr/lib/python3.11/{file}", 1, function) for file, function in inside)


def test_a_process_that_has_nothing_to_do_is_told_from_one_that_has() -> None:
    main = Frame("/home/ada/train.py", 5, "main")
    get, worker = ("multiprocessing/queues.py", "get"), ("multiprocessing/pool.py", "worker")
    assert awaits_task((*in_library(get, worker), main))
    assert not awaits_task((*in_library(("socket.py", "recv"), worker), main))
    assert not awaits_task((*in_library(get), main, *in_library(worker)))
    loop = Frame("/site-packages/torch/utils/data/_utils/worker.py", 9, "_worker_loop")
    assert awaits_task((*in_library(get), loop, main)) and is_worker_of_loader((main, loop))


def test_a_thread_that_only_carries_is_told_from_one_that_does_something() -> None:
    pool, start = "multiprocessing/pool.py", ("threading.py", "_bootstrap")
    feeds = ("threading.py", "wait"), ("multiprocessing/queues.py", "_feed"), start
    assert serves(in_library(*feeds))
    assert serves(in_library(("multiprocessing/connection.py", "recv"), (pool, "_handle_results"), start))
    assert serves(in_library(("concurrent/futures/thread.py", "_worker"), start))
    shares = ("socket.py", "accept"), ("multiprocessing/resource_sharer.py", "_serve"), start
    assert serves(in_library(*shares))  # of every worker that has sent a tensor
    # What the user has given: an iterable, a callback, a function of the library.
    assert not serves(in_library((pool, "_guarded_task_generation"), (pool, "_handle_tasks"), start))
    assert not serves(in_library(("json/decoder.py", "decode"), (pool, "_set"), (pool, "_handle_results")))
    assert not serves(in_library(("socket.py", "readinto"), (pool, "worker"), start))
    assert not serves(in_library(("threading.py", "wait"), ("threading.py", "run"), start))  # a Timer
    assert not serves((Frame("/home/ada/train.py", 5, "rows"), *in_library((pool, "_handle_results"))))
