"""Which computations look as if they never ended, and do? Data only, as in `innocents.py`."""

from __future__ import annotations

from .innocents import Innocent
from .script import training

BUSY = (
    Innocent(
        "a_step_of_20_s_busy_in_python",
        training("""
def misbehave():
    if rank == 3:
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            pass
"""),
        26,
    ),
    Innocent(
        "a_step_of_20_s_busy_in_torch",
        training("""
def misbehave():
    if rank == 3:
        until_s = time.monotonic() + 20
        one = torch.ones(700, 700)
        while time.monotonic() < until_s:
            one = (one @ one).clamp(0, 1)
"""),
        26,
    ),
    Innocent(
        "a_loop_of_20_s_that_an_error_leaves",
        training("""
def misbehave():
    if rank == 3:
        until_s, left = time.monotonic() + 20, [1]
        one = torch.ones(700, 700)
        try:
            while True:
                one = (one @ one).clamp(0, 1)
                left[time.monotonic() > until_s]
        except IndexError:
            pass
"""),
        28,
    ),
    Innocent(
        "one_call_of_20_s_into_c_that_holds_the_gil",
        training("""
def misbehave():
    if rank == 3:
        import itertools
        began_s = time.monotonic()
        sum(itertools.repeat(1, 20_000_000))
        sum(itertools.repeat(1, int(20_000_000 * 18 / (time.monotonic() - began_s))))
"""),
        28,
    ),
    Innocent(
        "one_call_of_20_s_into_torch",
        training("""
def misbehave():
    if rank == 3:
        began_s = time.monotonic()
        torch.logcumsumexp(torch.ones(2_000_000), 0)
        torch.logcumsumexp(torch.ones(int(2_000_000 * 18 / (time.monotonic() - began_s))), 0)
"""),
        28,
    ),
    Innocent(
        "loops_that_handlers_and_errors_end",
        training("""
import contextlib

library = os.path.join(os.getcwd(), "site-packages")
os.makedirs(library, exist_ok=True)
with open(os.path.join(library, f"stream_{rank}.py"), "w") as file:
    file.write("class Stream:\\n    @property\\n    def item(self):\\n        return next(self.items)\\n")
sys.path.insert(0, library)


class TimeLimit:
    def __enter__(self):
        def ring(*_):
            raise TimeoutError

        signal.signal(signal.SIGALRM, ring)
        signal.alarm(20)

    def __exit__(self, kind, *_):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return kind is TimeoutError


class Buffer(list):
    def append(self, one):
        if len(self) == 100:
            raise BufferError
        super().append(one)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        return kind is BufferError


def in_a_context_of_its_own():
    with TimeLimit():
        while True:
            time.sleep(0.01)


def until_a_buffer_is_full():
    with Buffer() as buffer:
        while True:
            buffer.append(time.sleep(0.2))


def until_a_handler_exits():
    signal.signal(signal.SIGALRM, lambda *_: sys.exit())
    signal.alarm(20)
    try:
        while True:
            time.sleep(0.01)
    except SystemExit:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def until_a_stream_ends():
    module = __import__(f"stream_{rank}")
    stream = module.Stream()
    stream.items = iter(range(100))
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(StopIteration))
        while True:
            time.sleep(0.2 + 0 * stream.item)


def misbehave():
    (in_a_context_of_its_own, until_a_buffer_is_full, until_a_handler_exits, until_a_stream_ends)[rank]()
    dist.barrier()
    if rank == 2:
        in_a_context_of_its_own()
    dist.barrier()
"""),
        50,
    ),
    Innocent(
        "a_loop_that_computes_and_sleeps",
        training("""
def misbehave():
    if rank == 1:
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            time.sleep(0.6)
            busy_s = time.monotonic() + 0.9
            while time.monotonic() < busy_s:
                pass
"""),
        28,
    ),
    Innocent(
        "one_call_of_150_s_into_c",
        training("""
def misbehave():
    if rank == 3:
        import itertools
        began_s = time.monotonic()
        sum(itertools.repeat(1, 20_000_000))
        sum(itertools.repeat(1, int(20_000_000 * 150 / (time.monotonic() - began_s))))
"""),
        160,
    ),
    Innocent(
        "a_rank_that_is_held_back_now_and_then",
        training("""
def limit(pid):
    until_s = time.monotonic() + 15
    while time.monotonic() < until_s:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)


def misbehave():
    if rank == 2:
        pid = os.getpid()
        if not os.fork():
            if not os.fork():
                os.setsid()
                limit(pid)
            os._exit(0)
        os.wait()
        end_s = time.process_time() + 0.3
        while time.process_time() < end_s:
            pass
"""),
        24,
    ),
    Innocent(
        "a_rank_that_begins_again_by_exec",
        training("""
def arrive():
    if "AGAIN" not in os.environ:
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for _ in range(5):
            layer(torch.ones(2)).sum().backward()
            optimizer.step()
        os.environ["AGAIN"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])


def misbehave():
    if rank == 1:
        time.sleep(15)
"""),
        24,
    ),
)
