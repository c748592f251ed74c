"""Which waits look as if they could never end, and do? Data only, as in `innocents.py`.

Each time there is something beside what is waited for that stands still for long, or what lets the rank go on cannot be
seen yet.
"""

from __future__ import annotations

from .innocents import Innocent
from .script import training

WAITS = (
    Innocent(
        "a_loader_that_is_slow_beside_a_monitor",
        training("""
import multiprocessing


def monitor():
    while True:
        time.sleep(300)


class Shards(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 7:
            time.sleep(15)
        return torch.ones(4, 64)


def misbehave():
    if rank == 1:
        multiprocessing.get_context("fork").Process(target=monitor, daemon=True).start()
        for batch in torch.utils.data.DataLoader(Shards(), num_workers=1):
            model(batch[0])
    dist.barrier()
"""),
        24,
    ),
    Innocent(
        "a_pool_that_is_slow_beside_a_monitor",
        training("""
import multiprocessing


def monitor():
    while True:
        time.sleep(300)


def tokenize(index):
    if index == 3:
        time.sleep(15)
    return index


def misbehave():
    if rank == 1:
        multiprocessing.get_context("fork").Process(target=monitor, daemon=True).start()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(tokenize, range(8))
    dist.barrier()
"""),
        24,
    ),
    Innocent(
        "one_of_two_helpers_answers_and_the_other_rests",
        training("""
import multiprocessing


def refresh(connection):
    connection.recv()
    time.sleep(100)
    connection.send("token")


def work(connection):
    time.sleep(connection.recv())
    connection.send("done")


def misbehave():
    if rank == 1:
        (one, its), (other, others) = multiprocessing.Pipe(), multiprocessing.Pipe()
        for function, end in ((refresh, its), (work, others)):
            multiprocessing.get_context("fork").Process(target=function, args=(end,), daemon=True).start()
        one.send(1)
        other.send(15)
        other.recv()
    dist.barrier()
"""),
        24,
    ),
    Innocent(
        "a_helper_unpacks_under_a_file_lock",
        training("""
import fcntl


def misbehave():
    if rank == 2:
        held = open("cache.lock", "w")
        fcntl.flock(held, fcntl.LOCK_EX)
        helper = subprocess.Popen(["sleep", "15"], pass_fds=[held.fileno()])
        held.close()
        with open("cache.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        helper.wait()
    dist.barrier()
"""),
        24,
    ),
    Innocent(
        "a_download_with_a_time_limit_for_75_s",
        training("""
import socket


def serve(connection):
    for _ in range(750):
        connection.sendall(b"x" * 20_000)
        time.sleep(0.1)
    connection.close()


def misbehave():
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            mine = socket.create_connection(server.getsockname(), timeout=30)
            theirs, _ = server.accept()
        child = os.fork()
        if not child:
            if not os.fork():  # not below the rank: as if it were on another host
                os.setsid()
                mine.close()
                serve(theirs)
            os._exit(0)
        theirs.close()
        os.waitpid(child, 0)
        with mine.makefile("rb") as file:
            assert len(file.read()) == 15_000_000
    dist.barrier()
"""),
        83,
    ),
    Innocent(
        "a_fifo_that_a_child_opens_later",
        training("""
def misbehave():
    if rank == 2:
        os.mkfifo("data.fifo")
        child = subprocess.Popen(["sh", "-c", "sleep 15; echo shard > data.fifo"])
        with open("data.fifo") as file:
            assert file.read()
        child.wait()
    dist.barrier()
"""),
        24,
    ),
    Innocent(
        "a_pipe_that_the_end_of_a_child_writes",
        training("""
import select


def misbehave():
    if rank == 3:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end)
        child = subprocess.Popen(["sleep", "15"])
        select.select([read_end], [], [])
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child.wait()
    dist.barrier()
"""),
        24,
    ),
    Innocent(
        "a_training_in_a_thread_while_the_main_thread_sleeps",
        training("""
def misbehave():
    if rank == 2:
        subprocess.run(["sleep", "20"], check=True)
""", threaded=True),
        28,
    ),
    Innocent(
        "an_upload_of_60_s",
        training("""
import socket


def misbehave():
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            mine = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        child = os.fork()
        if not child:
            if not os.fork():  # not below the rank: as if it were on another host
                os.setsid()
                mine.close()
                while theirs.recv(100_000):
                    time.sleep(0.1)  # a megabyte a second
            os._exit(0)
        theirs.close()
        os.waitpid(child, 0)
        mine.sendall(bytes(60_000_000))
        mine.close()
    dist.barrier()
"""),
        70, spec={"monitor": {"hang_timeout": 30}},
    ),
    Innocent(
        "an_answer_over_http_after_150_s",
        training("""
import http.server, urllib.request


class Slow(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(150)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"done")


def misbehave():
    if rank == 1:
        server = http.server.HTTPServer(("127.0.0.1", 0), Slow)
        if not os.fork():
            if not os.fork():
                os.setsid()
                server.handle_request()
            os._exit(0)
        os.wait()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/") as answer:
            assert answer.read() == b"done"
    dist.barrier()
"""),
        160,
    ),
    Innocent(
        "a_barrier_that_a_thread_enters_later",
        training("""
def saves(group):
    time.sleep(20)
    dist.barrier(group)


def misbehave():
    group = dist.new_group([2, 3])
    train(20)
    if rank == 3:
        threading.Thread(target=saves, args=(group,)).start()
    if rank == 2:
        dist.barrier(group)
"""),
        30,
    ),
    Innocent(
        "a_key_that_a_thread_sets_later",
        training("""
def misbehave():
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        threading.Timer(20, store.set, ("go on", "yes")).start()
    if rank == 2:
        store.get("go on")
"""),
        28,
    ),
    Innocent(
        "a_wait_of_another_library_for_20_s",
        training("""
import multiprocessing


class Handle:
    def __init__(self):
        self.lock = multiprocessing.get_context("fork").Lock()
        self.lock.acquire()
        self.wait = self.lock._semlock.acquire
        if not os.fork():
            if not os.fork():
                os.setsid()
                time.sleep(20)
                self.lock.release()
            os._exit(0)
        os.wait()


def misbehave():
    if rank == 1:
        handle = Handle()
        handle.wait()  # as of asynchronous I/O: C code, and no frame of Python
"""),
        28,
    ),
    Innocent(
        "a_destructor_that_waits_for_an_answer_for_20_s",
        training("""
class Upload:
    def __init__(self):
        self.read, self.ours, theirs = os.read, *os.pipe()
        if not os.fork():
            if not os.fork():
                os.setsid()
                time.sleep(20)
                os.write(theirs, b"done")
            os._exit(0)
        os.wait()
        os.close(theirs)

    def __del__(self):
        assert self.read(self.ours, 4) == b"done"


def leave():
    if rank == 2:
        sys.kept = Upload()  # until the interpreter's very end
"""),
        28,
    ),
    Innocent(
        "a_member_ends_when_its_part_of_a_gather_is_done",
        training("""
def misbehave():
    def client():
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    if rank == 2:
        if not os.fork():
            if not os.fork():
                os.setsid()
                time.sleep(20)
                client().set("go on", "yes")
            os._exit(0)
        os.wait()
        store = client()
        store.wait(["go on"])
    dist.gather(torch.ones(10), [torch.zeros(10) for _ in range(4)] if rank == 0 else None, 0)
    if rank == 0:
        time.sleep(1)
    os._exit(0)
"""),
        28,
    ),
    Innocent(
        "a_lock_that_a_callback_of_a_collective_releases",
        training("""
def misbehave():
    pair = dist.new_group([0, 1])
    train(20)
    if rank == 1:
        time.sleep(20)
    if rank < 2:
        lock = threading.Lock()
        lock.acquire()
        work = dist.all_reduce(torch.ones(10), group=pair, async_op=True)
        work.get_future().then(lambda _: lock.release())
        lock.acquire()
"""),
        30,
    ),
)  # fmt: skip
