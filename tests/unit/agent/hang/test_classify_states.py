"""States in which a rank stands still, by their names, and signs of life. Real processes, as an agent starts and inspects
them; the cases of a table run side by side, since each has to stand for a while."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from orchestrator.agent.hang import classify, kernel_wait, sample
from orchestrator.agent.ranks.stack_dump import ThreadStack
from orchestrator.core.observations import Activity
from orchestrator.core.status_types import Frame
from tests.support.local import wait_until
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

FORK = """import multiprocessing, time
fork = multiprocessing.get_context('fork')
def work(_):
    time.sleep(999)
"""

STANDS = {
    "asleep for an hour": ("import time\ntime.sleep(3600)", r"in sleep\(\)$"),
    "an exception behind a finally": (
        "import time\ntry:\n    raise ValueError('no data')\nfinally:\n    time.sleep(3600)",
        r"raised ValueError: no data at case_\d+.py:3 <module>, then in sleep\(\)$",
    ),
    "an exception behind an exit": (
        "import atexit, time\natexit.register(time.sleep, 3600)\n1 / 0",
        r"raised ZeroDivisionError: division by zero at case_\d+.py:3 <module>, then in sleep\(\)$",
    ),
    "a lock that it holds itself": (
        "import threading\nlock = threading.Lock()\nwith lock:\n    with lock: pass",
        "on a lock",
    ),
    "two threads that hold each other's lock": (
        f"{DEADLOCK}take(a, b)",
        r"on a lock; the other thread is at case_\d+.py:6 take",
    ),
    "a thread that waits for its lock is joined": (
        (
            "import threading\nlock = threading.Lock()\nlock.acquire()\n"
            "def take():\n    with lock: pass\nthread = threading.Thread(target=take, daemon=True)\nthread.start()\nthread.join()"
        ),
        "in join.. of another thread",
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
        r"waits for a child to end: it is sleep \(\d+\), which is in state T",
    ),
    "a shell whose program is stopped": (
        (
            "import subprocess, sys\nsubprocess.run(['sh', '-c', "
            "f'{sys.executable} -c \"import os; os.kill(os.getpid(), 19)\"; exit 3'])"
        ),
        r"waits for a child to end: it is \S+ \(\d+\)",
    ),
    "a shell whose program waits": (
        "import subprocess\nsubprocess.run(['sh', '-c', 'sleep 999; true'])",
        r"waits for a child to end: it is sh \(\d+\), which waits for sleep \(\d+\), which is in sleep\(\)$",
    ),
    "a child that does not answer": (
        f"{FORK}ours, theirs = fork.Pipe()\nfork.Process(target=work, args=(0,)).start()\nours.recv()",
        r"in read\(\) of .*, and a child does not answer: it is \S+ \(\d+\), which is in sleep\(\), case_\d+.py:4 work",
    ),
    "a pool whose task does not end": (
        f"{FORK}fork.Pool(2).map(work, [1])",
        r"on a lock, and a child does not answer: one of 2 is \S+ \(\d+\), which is in sleep\(\), case_\d+.py:4 work",
    ),
    "a loader whose worker is stopped": (
        (
            f"{LOADER}def fetch(): open('/proc/self/comm', 'w').write('pt_data_worker'); os.kill(os.getpid(), signal.SIGSTOP)\n"
            "fork.Process(target=worker._worker_loop, args=(fetch,)).start()\ndataloader._try_get_data(fork.Queue())"
        ),
        r"waits for its DataLoader's workers: it is pt_data_worker \(\d+\), which is in state T",
    ),
    "input() at a terminal": (
        "import os, pty\nmaster, slave = pty.openpty()\nos.dup2(slave, 0)\ninput('well? ')",
        r"at a prompt of input\(\)$",
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


def test_blocked_rank_is_named_with_its_wait(tmp_path: Path) -> None:
    for name, found in stood(tmp_path, {name: code for name, (code, _) in STANDS.items()}).items():
        assert found.activity in (Activity.BLOCKED, Activity.SLEEPING), (name, found)
        assert re.match(STANDS[name][1], found.why), (name, found.why)


def test_any_movement_of_rank_is_progress(tmp_path: Path) -> None:
    cases = {name: code for name, (code, _) in LIFE.items()}
    for name, found in stood(tmp_path, cases, still_s=STILL_S_MAX).items():
        assert found.activity is Activity.PROGRESSING and re.search(LIFE[name][1], found.why), (name, found)


WORDS = {
    "a wait with a limit": ("import threading\nthreading.Event().wait(50)", r"on a lock, with a time limit"),
    "a child": ("import subprocess\nsubprocess.run(['sleep', '55'])", r"waits for a child to end: it is sleep \(\d+\)"),
    "asyncio": ("import asyncio\nasync def main():\n    await asyncio.Event().wait()\nasyncio.run(main())", "waits in asyncio's loop"),
    "threads that outlive the script": (
        "import threading, time\ndef rest(): time.sleep(3600)\nthreading.Thread(target=rest).start()",
        r"waits for its other threads to end, one of them at case_\d+.py:2 rest",
    ),
    "a poll with a limit": (f"{SERVES}import select\nwhile True: select.select([mine], [], [], 0.5)", r"in select\(\), with a time limit, in a loop"),
    "a C call that keeps the GIL": ("import itertools\nsum(itertools.repeat(1, 10**12))", "computes at one place|in C code"),
}  # fmt: skip


def test_wait_of_rank_is_described(tmp_path: Path) -> None:
    for name, found in stood(tmp_path, {name: code for name, (code, _) in WORDS.items()}).items():
        assert re.match(WORDS[name][1], found.why), (name, found)


def test_training_thread_is_judged_instead_of_main_thread(tmp_path: Path) -> None:
    """The thread that makes the steps is judged, whatever the main thread does."""
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
    assert found["child"].why.startswith("waits for a child to end")
    assert str(found["child"].where).endswith(":5 train")
    assert str(found["steps"].where).endswith((":5 train", ":5 <listcomp>"))


def test_store_wait_is_recognised_by_its_address(tmp_path: Path) -> None:
    """A wait for the store is recognised by its address, whatever it is called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"import socket\nkv = socket.create_connection(('127.0.0.1', {port}))\n{SAY_READY}kv.recv(1)\n"
        with watching(tmp_path / "store", script, MASTER_PORT=str(port)) as watch:
            assert watch.until_activity(Activity.WAITING_FOR_RANKS).why == "in the store"
        with watching(tmp_path / "other", script, MASTER_PORT="1") as watch:
            assert watch.until_activity(Activity.BLOCKED).why.startswith("in recv() of the connection")


def test_inspection_does_not_interrupt_sleep_in_c(tmp_path: Path) -> None:
    """An inspection does not wake what sleeps in C code."""
    calls = ("ctypes.PyDLL(None).sleep(3600)", "ctypes.CDLL(None).pause()", "signal.pause()")
    beside = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    cases = {
        f"{call} {other}": f"import ctypes, signal\n{other}{call}\nraise SystemExit('woken')"
        for call in calls
        for other in ("", beside)
    }
    for name, found in stood(tmp_path, cases).items():
        assert found.why == ("in sleep()" if "sleep" in name else "in pause()"), (name, found)
        assert bool(found.stack) is ("PyDLL" not in name), "torch's worker server shows it where the GIL is free"


def test_inspection_does_not_interrupt_signal_sensitive_wait(tmp_path: Path) -> None:
    """An inspection does not end what any signal would end."""
    blocks = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
    calls = {
        "signal.sigwait(signal.valid_signals())": r"in rt_sigtimedwait\(\)",
        f"{blocks}signal.sigwait(signal.valid_signals())": r"in rt_sigtimedwait\(\)",
        f"{blocks}os.read(libc.signalfd(-1, (ctypes.c_ulong * 16)(2**64 - 1), 0), 128)": r"in read\(\) of .*signalfd",
        "libc.poll(None, 0, 60_000)": r"in poll\(\), with a time limit",
        "libc.msgrcv(libc.msgget(0, 0o1600), bytes(64), 8, 0, 0)": r"in msgrcv\(\)",
    }
    begin = "import ctypes, os, signal\nlibc = ctypes.CDLL(None)\n"
    cases = {call: f"{begin}{call}\nraise SystemExit('woken')" for call in calls}
    for name, found in stood(tmp_path, cases).items():
        assert re.match(calls[name], found.why) and found.stack, (name, found)


def test_inspection_writes_into_no_reused_descriptor(
    tmp_path: Path,
) -> None:
    """An inspection writes into no file of a script that has closed its descriptors."""
    script = (
        f"import os, time\n{SAY_READY}os.closerange(3, 100)\n"
        "files = [open(f'part-{n}', 'w') for n in range(30)]\nopen('all', 'w').close()\ntime.sleep(60)"
    )
    with watching(tmp_path, script) as watch:
        wait_until((watch.job.code / "all").exists, "the files of the script")
        watch.until_activity(Activity.SLEEPING)
        assert [path for path in watch.job.code.glob("part-*") if path.stat().st_size] == []


def test_threads_created_by_inspection_are_no_progress() -> None:
    """While C code keeps Python's lock, each request to torch's worker server leaves a thread that waits for it."""
    frames = (Frame("/home/ada/train.py", 6, "<module>"),)
    use = sample.ResourceUse(1.0, 0.0, 0.0, {}, 0, {})
    main, wait = ThreadStack(1, "", False, frames), kernel_wait.NO_WAIT

    def look(*others: ThreadStack) -> sample.HangSample:
        sides = tuple(sample.SideThread(0, thread, wait, "") for thread in others)
        return sample.HangSample(0, 9, 9, "R", main, sides, True, "", "", "", wait, (), False, False, use, use, ())

    first, asking, beside = (
        look(),
        look(ThreadStack(2, "", False, ())),
        look(ThreadStack(3, "", False, frames)),
    )
    previous = classify.classify(first, classify.SampleContext(), None)[1]
    for now, activity in ((asking, Activity.BLOCKED), (beside, Activity.PROGRESSING)):
        assert classify.classify(now, classify.SampleContext(), previous)[0].activity is activity
