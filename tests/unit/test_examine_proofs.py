"""Is a loop without a way out seen, and who holds a lock on a file? Real processes, as in `test_examine`."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from orchestrator.wire.messages import Doing
from tests.support.watch import BETWEEN_S, SAY_READY, watching

GO = SAY_READY.replace("\n", "; ").removesuffix("; ") + "\n"
"""The same on one line, so that line numbers below can be counted."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="this kernel does not tell calls"),
]


def test_a_loop_without_a_way_out_is_proof(tmp_path: Path) -> None:
    script = f"{GO}def count():\n    number = 0\n    while True:\n        number += 1\ncount()\n"
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.SPINS, certain=True)
        assert found.where in ("train.py:4 count", "train.py:5 count", "train.py:3 count")
        assert found.why == "in a loop that nothing in it can leave"


def test_what_an_endless_loop_calls_does_not_hide_it(tmp_path: Path) -> None:
    script = f"""{GO}def turn(number):
    for _ in range(1000):
        number = number * 31 % 1000003
    return number
def spin():
    number = 1
    while True:
        number = turn(number)
spin()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.SPINS, certain=True)
        assert found.where in ("train.py:8 spin", "train.py:9 spin"), "the loop, and not what it calls"
        assert found.why == "in a loop that nothing in it can leave"
        assert watch.until(lambda one: one.still_s > found.still_s + 1).certain


def test_a_loop_that_sleeps_and_cannot_be_left_is_proof_unless_another_thread_lives(tmp_path: Path) -> None:
    script = f"{GO}import time\ndef park():\n    while True:\n        time.sleep(20)\npark()\n"
    with watching(tmp_path / "alone", script) as watch:
        found = watch.until_doing(Doing.SLEEPS, certain=True)
        assert (found.why, found.ends_s) == ("in a loop that nothing in it can leave", None)
    serves = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    with watching(tmp_path / "serves", serves + script) as watch:
        found = watch.until_doing(Doing.SLEEPS)
        assert not found.certain
        assert watch.until(lambda one: one.still_s > found.still_s + 1).certain is False


@pytest.mark.parametrize(
    ("loop", "doing", "lasts_s"),
    [
        ("until = time.time() + 900\nwhile time.time() < until:\n    x = 1\n", Doing.SPINS, 900),
        ("for _ in range(200):\n    time.sleep(0.5)\n", Doing.SLEEPS, 100),
    ],
)
def test_a_loop_that_takes_longer_than_a_minute_is_proof_like_a_sleep(
    loop: str, doing: Doing, lasts_s: float, tmp_path: Path
) -> None:
    with watching(tmp_path, f"import time\n{GO}{loop}") as watch:
        found = watch.until_doing(doing, certain=True)
        assert (found.why, found.ends_s) == (f"in a loop that takes {lasts_s} s or more", lasts_s)
        assert found.phase != "retry"


def test_a_loop_on_a_variable_that_nobody_else_can_change_is_proof(tmp_path: Path) -> None:
    script = f"{GO}def wait():\n    done = False\n    while not done:\n        pass\nwait()\n"
    with watching(tmp_path, script) as watch:
        assert watch.until_doing(Doing.SPINS, certain=True).why == "in a loop that nothing in it can leave"


def test_c_code_that_takes_what_never_ends_is_proof_though_it_keeps_the_gil(tmp_path: Path) -> None:
    script = f"import itertools\n{GO}def count():\n    return sum(itertools.repeat(1))\ncount()\n"
    with watching(tmp_path, script) as watch:
        assert watch.until_doing(Doing.SPINS, certain=True).where == "train.py:4 count"


@pytest.mark.parametrize(("calls", "proved"), [("spin()", True), ("timeit.timeit(spin, number=1)", False)])
def test_a_loop_that_only_an_error_can_leave_is_proof_unless_a_library_may_catch_it(
    tmp_path: Path, calls: str, proved: bool
) -> None:
    script = f"""import hashlib, timeit
{GO}def spin():
    digest = b""
    while True:
        digest = hashlib.sha256(digest * 1000).digest()
        print(digest[0] // 2)
{calls}
"""
    with watching(tmp_path, script) as watch:
        if proved:
            assert watch.until_doing(Doing.SPINS, certain=True).where.endswith("spin")
            return
        for _ in range(4):
            found = watch.look()[0]
            assert not found.certain and found.doing in (Doing.UNSEEN, Doing.WORKS, Doing.SPINS)
            time.sleep(BETWEEN_S)


@pytest.mark.parametrize(
    ("does", "proved"),
    [
        ("time.sleep(3600)", True),
        ("threading.Event().wait()", True),
        ("rest()", True),
        ("time.sleep(50)", False),
        ("threading.Event().wait(3600)", False),
    ],
)
@pytest.mark.parametrize("waits", ["", "queue.SimpleQueue().get()\n"])
def test_a_wait_for_threads_of_which_none_goes_on_is_proof(
    tmp_path: Path, does: str, waits: str, proved: bool
) -> None:
    script = f"""import queue, threading, time
def rest():
    while True:
        time.sleep(1)
def does():
    {does}
threading.Thread(target=does).start()
{GO}{waits}"""
    with watching(tmp_path, script) as watch:
        if proved:
            found = watch.until_doing(Doing.BLOCKED, certain=True)
            assert found.why.endswith(", and does not go on either")
        else:
            assert not watch.until(lambda one: one.still_s > 2).certain


def test_an_endless_loop_whose_exception_is_caught_outside_is_no_proof(tmp_path: Path) -> None:
    script = f"""{GO}import time
def spin():
    while True:
        time.sleep(0.1)
def main():
    try:
        spin()
    except TimeoutError:
        pass
main()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until(lambda one: one.doing is Doing.SLEEPS and one.still_s > 2)
        assert not found.certain


@pytest.mark.parametrize(
    "waits",
    [
        "import subprocess; subprocess.Popen(['sleep', '60']); os.wait()",
        "import queue, threading; store = queue.SimpleQueue(); threading.Timer(60, print).start(); store.get()",
        "import signal, threading; signal.signal(signal.SIGALRM, print); threading.Event().wait()",
    ],
)
def test_what_only_looks_like_a_wait_for_ranks_or_for_ever_is_no_proof(tmp_path: Path, waits: str) -> None:
    with watching(tmp_path, f"{GO}{waits}\n") as watch:
        found = watch.until(lambda one: one.still_s > 2)
        assert (found.doing, found.certain) == (Doing.BLOCKED, False)


def test_a_wait_for_the_store_is_known_by_its_address_whatever_it_is_called(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"import socket\nkv = socket.create_connection(('127.0.0.1', {port}))\n{GO}kv.recv(1)\n"
        with watching(tmp_path / "store", script, MASTER_PORT=str(port)) as watch:
            assert watch.until_doing(Doing.WAITS).why == "in the store"
        with watching(tmp_path / "other", script, MASTER_PORT="1") as watch:
            assert not watch.until_doing(Doing.BLOCKED).certain


def test_a_handler_that_interrupts_an_endless_loop_is_not_that_loop(tmp_path: Path) -> None:
    script = f"""{GO}import signal, time
def handler(signum, frame):
    time.sleep(5)
    os._exit(0)
signal.signal(signal.SIGALRM, handler)
signal.alarm(4)
while True:
    time.sleep(0.1)
"""
    with watching(tmp_path, script) as watch:
        assert watch.until_doing(Doing.SLEEPS, certain=True).where in (
            "train.py:8 <module>",
            "train.py:9 <module>",
        )
        assert not watch.until(lambda one: one.where == "train.py:4 handler").certain


@pytest.mark.parametrize(
    "call", ["ctypes.PyDLL(None).sleep(3600)", "ctypes.CDLL(None).pause()", "signal.pause()"]
)
def test_a_look_does_not_wake_what_sleeps_in_c_code(tmp_path: Path, call: str) -> None:
    script = f"import ctypes, signal, threading\n{GO}{call}\nopen('woken', 'w')\n"
    other = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    with watching(tmp_path / "alone", script) as watch:
        found = watch.until(lambda one: one.still_s > 2)
        assert (found.where, found.stack, found.certain) == ("", (), False)
        assert found.why == ("in pause()" if "pause" in call else "in sleep(), 3,600 s to go")
        assert not (watch.job.code / "woken").exists()
    with watching(tmp_path / "beside", other + script) as watch:
        found = watch.until(lambda one: one.still_s > 2)
        assert (found.where, found.certain) == ("train.py:4 <module>", "sleep" in call)
        assert not (watch.job.code / "woken").exists()


def test_one_that_sleeps_in_a_loop_with_an_end_tries_again(tmp_path: Path) -> None:
    script = f"{GO}import time\nfor number in range(8):\n    time.sleep(0.7)\ntime.sleep(600)\n"
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.SLEEPS)
        assert (found.phase, found.certain) == ("retry", False)
        watch.until(lambda one: (one.doing, one.certain, one.phase) == (Doing.SLEEPS, True, "train"))


def test_time_without_a_processor_is_told(tmp_path: Path) -> None:
    script = f"import os\nos.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n{GO}while not os.environ.get('NO'): pass\n"
    with watching(tmp_path, script, ranks=2) as watch:  # two on one processor
        found = watch.until(lambda one: one.starved_s > 0.5)
        assert found.starved_s <= found.still_s + 0.1, "not more than the time that it stood"


def test_a_loop_that_may_end_is_no_proof(tmp_path: Path) -> None:
    script = f"{GO}def count():\n    number = 0\n    while number < 1 << 60:\n        number += 1\ncount()\n"
    with watching(tmp_path, script) as watch:
        found = watch.until(lambda one: one.doing is Doing.SPINS and one.still_s > 2)
        assert not found.certain
        assert found.why == "computes at one place"


def test_who_holds_the_lock_on_a_file_is_named(tmp_path: Path) -> None:
    script = f"""import fcntl, time
file = open('cache.lock', 'w')
{GO}if int(__import__('os').environ['RANK']) == 0:
    fcntl.flock(file, fcntl.LOCK_EX)
    time.sleep(600)
time.sleep(0.5)
fcntl.flock(file, fcntl.LOCK_EX)
"""
    with watching(tmp_path, script, ranks=2) as watch:
        deadline_s = time.monotonic() + 30
        while (found := watch.look()[1]).doing is not Doing.BLOCKED and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert (found.holder, found.certain) == (0, False)
        assert found.why == "in flock() of cache.lock, which rank 0 holds"
    with (tmp_path / "mine.lock").open("w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        script = f"import fcntl\n{GO}fcntl.flock(open({mine.name!r}), fcntl.LOCK_EX)\n"
        with watching(tmp_path / "other", script) as watch:
            found = watch.until_doing(Doing.BLOCKED)
            assert found.holder is None
            assert found.why == f"in flock() of {mine.name}, which process {os.getpid()} holds"


@pytest.mark.parametrize(
    ("holds", "holder", "words"),
    [
        ("take()", 0, "it holds itself"),
        ("threading.Thread(target=take_for_a_while, daemon=True).start()", None, "it holds itself"),
        ("child = os.fork()\nif not child: take_for_a_while()", None, "its child "),
        ("take(); child = os.fork()\nif not child: time.sleep(600)\nfiles.pop().close()", None, ""),
    ],
)
def test_a_lock_is_held_for_ever_only_by_the_thread_that_waits(
    tmp_path: Path, holds: str, holder: int | None, words: str
) -> None:
    script = f"""import fcntl, threading, time
files = []
def take():
    files.append(open('cache.lock', 'w'))
    fcntl.flock(files[-1], fcntl.LOCK_EX)
def take_for_a_while():
    take()
    time.sleep(600)
{GO}{holds}
time.sleep(1)
take()
"""
    with watching(tmp_path, script) as watch:
        found = watch.until_doing(Doing.BLOCKED)
        assert (found.holder, found.certain) == (holder, False)
        assert found.why.startswith(f"in flock() of cache.lock{words and ', which '}{words}")
        assert words or found.why == "in flock() of cache.lock", "it has handed the lock on"
