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
)
