"""States of a rank that prove that it cannot go on, signs of life, and states that are neither. Real processes, as an
agent starts and inspects them; the cases of a table run side by side, since each has to stand for a while."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from orchestrator.core.observations import Activity
from tests.support.watch import SAY_READY, stood, watching

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="this kernel does not tell calls"),
]

LOADER = """import multiprocessing, os, sys, time, signal
torch = os.path.abspath('site-packages/torch/utils/data')
os.makedirs(f'{torch}/_utils', exist_ok=True)
open(f'{torch}/dataloader.py', 'w').write('def _try_get_data(queue):\\n    return queue.get(timeout=999)')
open(f'{torch}/_utils/worker.py', 'w').write('def _worker_loop(fetch):\\n    fetch()')
sys.path[:0] = [torch, f'{torch}/_utils']
import dataloader, worker
fork = multiprocessing.get_context('fork')
"""
"""The same files and functions as torch's, without torch."""

STILL_S_MAX = 30.0
"""How long what moves may look still: a look meets it where the one before did, now and then."""

ORPHAN = """import os, time
def orphan(act):
    if not os.fork():
        if not os.fork():
            os.setsid(); act()
        os._exit(0)
    os.wait()
"""
"""Gives a case `orphan`: runs a function in a process that is not below the rank, as if it were another program."""

DEADLOCK = """import threading
a, b, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
def take(first_lock, second_lock):
    with first_lock:
        both.wait()
        with second_lock: pass
threading.Thread(target=take, args=(b, a), daemon=True).start()
"""

SERVES = """import os, socket, threading, time
server = socket.create_server(('127.0.0.1', 0))
mine = socket.create_connection(server.getsockname())
other, _ = server.accept()
"""

PROOFS = {
    "asleep for an hour": ("import time\ntime.sleep(3600)", r"in sleep\(\), 3,\d+ s to go"),
    "a lock that it holds itself": (
        "import threading\nlock = threading.Lock()\nwith lock:\n    with lock: pass",
        "on a lock",
    ),
    "two threads that hold each other's lock": (
        f"{DEADLOCK}take(a, b)",
        r"on a lock; the other thread is at case_\d+.py:6 take, and does not go on either",
    ),
    "a thread that waits for its lock is joined": (
        (
            "import threading\nlock = threading.Lock()\nlock.acquire()\n"
            "def take():\n    with lock: pass\nthread = threading.Thread(target=take, daemon=True)\nthread.start()\nthread.join()"
        ),
        "in join.. of another thread, .*does not go on either",
    ),
    "an import that waits for itself": (
        (
            "import os, sys, threading\nsys.path.insert(0, os.getcwd())\n"
            "open('tables.py', 'w').write('import threading\\ndef fill():\\n    import tables\\n    tables.ROWS.append(1)\\n"
            "filler = threading.Thread(target=fill, daemon=True)\\nfiller.start()\\nfiller.join()\\nROWS = []')\nimport tables"
        ),
        "in join.. of another thread",
    ),
    "a child that is stopped": (
        (
            "import os, signal, subprocess\nchild = subprocess.Popen(['sleep', '300'])\n"
            "os.kill(child.pid, signal.SIGSTOP)\nchild.wait()"
        ),
        r"waits for its child sleep \(\d+\), which is stopped \(state T\)",
    ),
    "a shell whose program is stopped": (
        (
            "import subprocess, sys\nsubprocess.run(['sh', '-c', "
            "f'{sys.executable} -c \"import os; os.kill(os.getpid(), 19)\"; exit 3'])"
        ),
        r"waits for its child python\S* \(\d+\), which is stopped",
    ),
    "a loader whose worker is stopped": (
        (
            f"{LOADER}def fetch(): open('/proc/self/comm', 'w').write('pt_data_worker'); os.kill(os.getpid(), signal.SIGSTOP)\n"
            "fork.Process(target=worker._worker_loop, args=(fetch,)).start()\ndataloader._try_get_data(fork.Queue())"
        ),
        "waits for its DataLoader's worker .* which is stopped",
    ),
    "input() at a terminal": (
        "import os, pty\nmaster, slave = pty.openpty()\nos.dup2(slave, 0)\ninput('well? ')",
        r"at a prompt of input\(\), where no other process can type",
    ),
    "input() at a pipe of its own": (
        "import os, sys\nread_end, write_end = os.pipe()\nos.dup2(read_end, 0)\nsys.stdin = open(0)\ninput('well? ')",
        r"at a prompt of input\(\)",
    ),
    "pdb": (
        "import os, pty\nmaster, slave = pty.openpty()\nos.dup2(slave, 0)\nimport pdb; pdb.set_trace()\nprint()",
        "at a prompt of pdb",
    ),
}

INNOCENTS = {
    "asleep beside a thread": "import threading, time\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\ntime.sleep(3600)",
    "asleep with a handler that may raise": "import signal, time\nsignal.signal(signal.SIGUSR1, print)\ntime.sleep(3600)",
    "asleep with an alarm": "import signal, sys, time\nsignal.signal(signal.SIGALRM, lambda *_: sys.exit())\nsignal.alarm(60)\ntime.sleep(3600)",
    "asleep until a child's end raises": (
        "import signal, subprocess, time\ndef ended(*_): raise TimeoutError\nsignal.signal(signal.SIGCHLD, ended)\n"
        "subprocess.Popen(['sleep', '60'])\ntime.sleep(3600)"
    ),
    "asleep in C code": "import ctypes\nctypes.PyDLL(None).sleep(3600)",
    "paused": "import signal\nsignal.pause()",
    "paused in C code": "import ctypes\nctypes.CDLL(None).pause()",
    "a lock that a thread releases": (
        "import threading, time\nlock = threading.Lock()\nlock.acquire()\ndef later():\n    time.sleep(60)\n    lock.release()\n"
        "threading.Thread(target=later, daemon=True).start()\nlock.acquire()"
    ),
    "a lock that a handler releases": (
        "import signal, threading\nlock = threading.Lock()\nlock.acquire()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: lock.release())\nlock.acquire()"
    ),
    "a lock that another process releases": (
        f"{ORPHAN}import multiprocessing\nlock = multiprocessing.get_context('fork').Lock()\nlock.acquire()\n"
        "orphan(lambda: (time.sleep(60), lock.release()))\nlock.acquire()"
    ),
    "an event that native code may set": "import threading\nthreading.Event().wait()",
    "a queue that native code may fill": "import queue\nqueue.SimpleQueue().get()",
    "a thread that sleeps is joined": "import threading, time\nthread = threading.Thread(target=time.sleep, args=(3600,))\nthread.start()\nthread.join()",
    "a script is over and its thread sleeps": "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()",
    "a FIFO that is opened later": "import os\nos.mkfifo('later')\nopen('later').read()",
    "a pipe that another process writes": f"{ORPHAN}ours, theirs = os.pipe()\norphan(lambda: (time.sleep(60), os.write(theirs, b'x')))\nos.close(theirs)\nos.read(ours, 1)",
    "input() that another process types": (
        f"{ORPHAN}import sys\nours, theirs = os.pipe()\norphan(lambda: (time.sleep(60), os.write(theirs, b'y\\n')))\n"
        "os.dup2(ours, 0)\nsys.stdin = open(0)\ninput('well? ')"
    ),
    "input() that a thread types": (
        "import os, sys, threading, time\nours, theirs = os.pipe()\nos.dup2(ours, 0)\nsys.stdin = open(0)\n"
        "threading.Timer(60, os.write, (theirs, b'y')).start()\ninput('well? ')"
    ),
    "input() at a FIFO": (
        f"{ORPHAN}import sys\nos.mkfifo('typed')\norphan(lambda: (f := os.open('typed', os.O_WRONLY), time.sleep(60), os.write(f, b'y\\n')))\n"
        "os.dup2(os.open('typed', os.O_RDONLY), 0)\nsys.stdin = open(0)\ninput('well? ')"
    ),
    "input() at a socket": (
        f"{ORPHAN}import socket, sys\na, b = socket.socketpair()\norphan(lambda: (time.sleep(60), b.send(b'y\\n')))\nb.close()\n"
        "os.dup2(a.fileno(), 0)\nsys.stdin = open(0)\ninput('well? ')"
    ),
    "input() at a terminal of another process": (
        f"{ORPHAN}import pty, sys\na, b = pty.openpty()\norphan(lambda: (time.sleep(60), os.write(a, b'y\\n')))\nos.close(a)\n"
        "os.dup2(b, 0)\nsys.stdin = open(0)\ninput('well? ')"
    ),
    "a thread that waits for another process's lock is joined": (
        f"{ORPHAN}import multiprocessing, threading\nlock = multiprocessing.get_context('fork').Lock()\nlock.acquire()\n"
        "orphan(lambda: (time.sleep(60), lock.release()))\nthread = threading.Thread(target=lambda: lock.acquire())\n"
        "thread.start()\nthread.join()"
    ),
    "what is not called a lock, and may be C code's": "import threading\ncamera = threading.Lock()\nwith camera:\n    with camera: pass",
    "a lock that a callback of C code may release": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "a subinterpreter has ended": (
        "import subprocess\ntry: import _interpreters as inner\nexcept ImportError: import _xxsubinterpreters as inner\n"
        "inner.destroy(inner.create())\nsubprocess.run(['sleep', '60'])"
    ),
    "asleep with a handler of a real-time signal": "import signal, time\nsignal.signal(signal.SIGRTMIN + 9, print)\ntime.sleep(3600)",
    "a child that is held back now and then, as by cpulimit": (
        f"{ORPHAN}import signal, subprocess\nchild = subprocess.Popen(['sleep', '60'])\ndef limit():\n    while True:\n"
        "        os.kill(child.pid, signal.SIGSTOP)\n        time.sleep(0.3)\n        os.kill(child.pid, signal.SIGCONT)\n"
        "        time.sleep(0.02)\norphan(limit)\nchild.wait()"
    ),
    "work under a debugger": (
        "import os, sys\nfor place in ('debugpy', 'mine'): os.makedirs(f'site-packages/{place}')\n"
        "open('site-packages/debugpy/server.py', 'w').write('def run(act): act()')\n"
        "open('site-packages/mine/train.py', 'w').write('import socket\\npair = socket.socketpair()\\ndef go(): pair[0].recv(1)')\n"
        "sys.path[:0] = [os.path.abspath(f'site-packages/{place}') for place in ('debugpy', 'mine')]\n"
        "import server, train\nserver.run(train.go)"
    ),
    "a child that sleeps for long": "import subprocess\nsubprocess.run(['sleep', '3600'])",
    "one of two children is stopped": (
        "import os, signal, subprocess\nos.kill(subprocess.Popen(['sleep', '300']).pid, signal.SIGSTOP)\n"
        "subprocess.Popen(['sleep', '60'])\nos.wait()"
    ),
    "the child beside the stopped one is waited for": (
        "import os, signal, subprocess\nos.kill(subprocess.Popen(['sleep', '300']).pid, signal.SIGSTOP)\n"
        "subprocess.run(['sleep', '60'])"
    ),
    "a stopped child is waited for with a limit": (
        "import os, signal, subprocess\nchild = subprocess.Popen(['sleep', '300'])\nos.kill(child.pid, signal.SIGSTOP)\n"
        "signal.signal(signal.SIGALRM, lambda *_: child.kill())\nsignal.alarm(60)\nchild.wait()"
    ),
    "one of two workers of a loader is stopped": (
        f"{LOADER}def fetch(): open('/proc/self/comm', 'w').write('pt_data_worker'); os.kill(os.getpid(), signal.SIGSTOP)\nfor act in (fetch, lambda: time.sleep(60)):\n"
        "    fork.Process(target=worker._worker_loop, args=(act,)).start()\ndataloader._try_get_data(fork.Queue())"
    ),
    "a lock on a file": (
        f"{ORPHAN}import fcntl\nfile = open('cache.lock', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "orphan(lambda: time.sleep(60))\nfile.close()\nfcntl.flock(open('cache.lock', 'w'), fcntl.LOCK_EX)"
    ),
    "a loop until an alarm": "import signal, sys\nsignal.signal(signal.SIGALRM, lambda *_: sys.exit())\nsignal.alarm(60)\nwhile True:\n    pass",
    "a loop that an error ends": "import contextlib\nwith contextlib.suppress(IndexError):\n    while True:\n        pass",
    "a loop that sleeps": "import time\nwhile True:\n    time.sleep(0.1)",
    "one call of C code": "import itertools\nsum(itertools.repeat(1, 10**12))",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
}
"""Each stands for a while, and nothing in its state says that it never goes on."""

LIFE = {
    "it reads much": (
        "import os\nfile = os.open('/dev/zero', os.O_RDONLY)\nwhile True:\n    os.read(file, 1 << 20)",
        "reads and writes",
    ),
    "its stack moves": (
        (
            "import time\ndef a(until):\n    while time.monotonic() < until: pass\ndef b(until):\n    while time.monotonic() < until: pass\n"
            "number = 0\nwhile True:\n    number += 1\n    (a if number % 2 else b)(time.monotonic() + 0.31)"
        ),
        "its stack moves",
    ),
    "its child computes": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-E', '-c', 'while True: pass'])",
        "its child .* computes",
    ),
    "it sends": (
        (
            f"{SERVES}def drain():\n    while True:\n        other.recv(1 << 16)\n        time.sleep(0.02)\n"
            "if not os.fork():\n    drain()\nmine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)\nmine.sendall(bytes(1 << 30))"
        ),
        r"moves data little by little, in send\(\) of the connection",
    ),
    "it receives": (
        (
            f"{SERVES}if not os.fork():\n    while True:\n        other.send(b'x')\n        time.sleep(0.2)\n"
            "while True: mine.recv(16)"
        ),
        r"moves data little by little, in recv\(\) of the connection",
    ),
    "it receives with a time limit": (
        (
            f"{SERVES}mine.settimeout(30)\nif not os.fork():\n    while True:\n        other.send(b'x')\n        time.sleep(0.1)\n"
            "while True: mine.recv(16)"
        ),
        r"moves data little by little, in poll\(\)",
    ),
    "a thread of it receives": (
        (
            f"{SERVES}if not os.fork():\n    while True:\n        other.send(b'x')\n        time.sleep(0.2)\n"
            "def load():\n    while True: mine.recv(16)\nthreading.Thread(target=load).start()\ntime.sleep(3600)"
        ),
        "another thread of it moves data",
    ),
    "a thread of it moves": (
        (
            "import threading, time\ndef one():\n    time.sleep(0.23)\ndef two():\n    time.sleep(0.31)\ndef work():\n"
            "    while True:\n        one()\n        two()\nthreading.Thread(target=work).start()\ntime.sleep(3600)"
        ),
        "another thread of it moves",
    ),
    "a child of it sends": (
        (
            f"{SERVES}if not os.fork():\n    while True:\n        other.recv(1 << 16)\n        time.sleep(0.02)\n"
            "mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)\n"
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import socket, sys; "
            "socket.socket(fileno=int(sys.argv[1])).sendall(bytes(1 << 30))', str(mine.fileno())], pass_fds=[mine.fileno()])"
        ),
        "moves data little by little, in send",
    ),
}


def test_a_state_that_cannot_mend_itself_is_certain_and_named(tmp_path: Path) -> None:
    for name, found in stood(tmp_path, {name: code for name, (code, _) in PROOFS.items()}).items():
        assert found.proven and found.activity in (Activity.BLOCKED, Activity.SLEEPING), (name, found)
        assert re.match(PROOFS[name][1], found.why), (name, found.why)


def test_what_may_end_by_itself_is_never_certain(tmp_path: Path) -> None:
    for name, found in stood(tmp_path, INNOCENTS).items():
        assert not found.proven and found.activity not in (Activity.PROGRESSING, Activity.EXITING), (
            name,
            found,
        )


def test_whatever_moves_of_a_rank_is_work(tmp_path: Path) -> None:
    cases = {name: code for name, (code, _) in LIFE.items()}
    for name, found in stood(tmp_path, cases, still_s=STILL_S_MAX).items():
        assert found.activity is Activity.PROGRESSING and re.search(LIFE[name][1], found.why), (name, found)


WORDS = {
    "a wait with a limit": ("import threading\nthreading.Event().wait(50)", r"on a lock, for 4\d s more"),
    "a child": ("import subprocess\nsubprocess.run(['sleep', '55'])", r"waits for a child to end: it is sleep \(\d+\)"),
    "asyncio": ("import asyncio\nasync def main():\n    await asyncio.Event().wait()\nasyncio.run(main())", "waits in asyncio's loop"),
    "threads that outlive the script": (
        "import threading, time\ndef rest(): time.sleep(3600)\nthreading.Thread(target=rest).start()",
        r"waits for its other threads to end, one of them at case_\d+.py:2 rest",
    ),
    "a poll with a limit": (f"{SERVES}import select\nwhile True: select.select([mine], [], [], 0.5)", r"in select\(\) of the connection"),
    "a C call that keeps the GIL": ("import itertools\nsum(itertools.repeat(1, 10**12))", "computes at one place|in C code"),
}  # fmt: skip


def test_what_a_rank_is_in_is_said_in_words_and_a_wait_with_a_limit_says_when_it_ends(tmp_path: Path) -> None:
    for name, found in stood(tmp_path, {name: code for name, (code, _) in WORDS.items()}).items():
        assert re.match(WORDS[name][1], found.why), (name, found)
        assert (found.ends_s is not None) is name.endswith("with a limit"), (name, found)


def test_the_thread_that_makes_the_steps_is_judged_whatever_the_main_thread_does(tmp_path: Path) -> None:
    trainer = """import subprocess, sys, threading, time
def train():
    steps = sys._orch_hook._steps
    steps.after_step(None, None, None)
    {does}
threading.Thread(target=train, daemon=True).start()
time.sleep(3600)
"""
    child = trainer.replace("{does}", "subprocess.run(['sleep', '60'])")
    steps = trainer.replace("{does}", "[time.sleep(n % 7 / 10) for n in range(999)]")
    found = stood(tmp_path, {"child": child, "steps": steps})
    assert found["child"].why.startswith("waits for a child to end") and not found["child"].proven
    assert found["child"].where.endswith(":5 train")
    assert found["steps"].where.endswith((":5 train", ":5 <listcomp>")) and not found["steps"].proven


def test_a_wait_for_the_store_is_known_by_its_address_whatever_it_is_called(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = (
            f"import socket\nkv = socket.create_connection(('127.0.0.1', {port}))\n{SAY_READY}kv.recv(1)\n"
        )
        with watching(tmp_path / "store", script, MASTER_PORT=str(port)) as watch:
            assert watch.until_activity(Activity.WAITING_FOR_RANKS).why == "in the store"
        with watching(tmp_path / "other", script, MASTER_PORT="1") as watch:
            assert not watch.until_activity(Activity.BLOCKED).proven


def test_an_inspection_does_not_wake_what_sleeps_in_c_code(tmp_path: Path) -> None:
    calls = ("ctypes.PyDLL(None).sleep(3600)", "ctypes.CDLL(None).pause()", "signal.pause()")
    beside = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    cases = {
        f"{call} {other}": f"import ctypes, signal\n{other}{call}\nraise SystemExit('woken')"
        for call in calls
        for other in ("", beside)
    }
    for name, found in stood(tmp_path, cases).items():
        assert found.why == ("in sleep()" if "sleep" in name else "in pause()"), (name, found)
        assert bool(found.stack) is ("PyDLL" not in name), (
            "torch's worker server shows it where the GIL is free"
        )


def test_an_inspection_does_not_end_what_any_signal_would_end(tmp_path: Path) -> None:
    blocks = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
    calls = {
        "signal.sigwait(signal.valid_signals())": r"in rt_sigtimedwait\(\)",
        f"{blocks}signal.sigwait(signal.valid_signals())": r"in rt_sigtimedwait\(\)",
        f"{blocks}os.read(libc.signalfd(-1, (ctypes.c_ulong * 16)(2**64 - 1), 0), 128)": r"in read\(\) of .*signalfd",
        "libc.poll(None, 0, 60_000)": r"in poll\(\), for \d+ s more",
        "libc.msgrcv(libc.msgget(0, 0o1600), bytes(64), 8, 0, 0)": r"in msgrcv\(\)",
    }
    begin = "import ctypes, os, signal\nlibc = ctypes.CDLL(None)\n"
    cases = {call: f"{begin}{call}\nraise SystemExit('woken')" for call in calls}
    for name, found in stood(tmp_path, cases).items():
        assert re.match(calls[name], found.why) and found.stack and not found.proven, (name, found)


def test_an_inspection_writes_into_no_file_of_a_script_that_has_closed_its_descriptors(
    tmp_path: Path,
) -> None:
    script = (
        f"import os, time\n{SAY_READY}os.closerange(3, 100)\n"
        "files = [open(f'part-{n}', 'w') for n in range(30)]\nopen('all', 'w').close()\ntime.sleep(60)"
    )
    with watching(tmp_path, script) as watch:
        while not (watch.job.code / "all").exists():
            pass
        watch.until_activity(Activity.SLEEPING)
        assert [path for path in watch.job.code.glob("part-*") if path.stat().st_size] == []


def test_time_without_a_processor_is_told(tmp_path: Path) -> None:
    one = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nnumber = 0\nwhile True: number += 1\n"
    for found in stood(tmp_path, {"first": one, "second": one}).values():  # two on one processor
        assert 0.5 < found.starved_s <= found.still_s + 0.1
