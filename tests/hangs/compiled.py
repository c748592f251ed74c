"""Which loops of machine code look as if they never ended, and do? Data only, as in `innocents.py`."""

from __future__ import annotations

from .innocents import Innocent
from .script import NATIVE, training

COMPILED = (
    Innocent(
        "one_compiled_loop_of_20_s_that_holds_the_gil",
        training(NATIVE + """
code = {"x86_64": "48ffcf75fbc3", "aarch64": "000400f1e1ffff54c0035fd6"}
count_down = native(code, ctypes.c_long)  # while (--number);


def misbehave():
    if rank == 3:
        began_s = time.monotonic()
        count_down(200_000_000)
        count_down(int(200_000_000 * 18 / (time.monotonic() - began_s)))
"""),
        28,
    ),
    Innocent(
        "a_compiled_loop_that_another_thread_ends",
        training(NATIVE + """
code = {"x86_64": "803f0074fbc3", "aarch64": "01004039e1ffff34c0035fd6"}
await_flag = native(code, ctypes.c_void_p, prototype=ctypes.CFUNCTYPE)  # while (!*flag);


def misbehave():
    if rank == 3:
        flag = ctypes.c_byte(0)
        threading.Timer(15, lambda: setattr(flag, "value", 1)).start()
        await_flag(ctypes.addressof(flag))
"""),
        24,
    ),
)  # fmt: skip
