"""How long loops take that have an end: what is written is all that counts, and too little is said rather than too much."""

from __future__ import annotations

import math

import pytest

from orchestrator.node.loops import Ending, ending, lasts_s

IMPORTS = "import time, math\nfrom time import monotonic, sleep\n"
BOUND = "until = time.time() + 600\n"

LASTS = [
    ("for _ in range(600):\n    time.sleep(1)\n", 2, 600.0),
    ("for _ in range(600):\n    time.sleep(1)\n", 1, 600.0),
    ("for _ in range(10 * 60):\n    x = 1\n    sleep(0.5)\n", 2, 300.0),
    ("for i in range(100):\n    for j in range(100):\n        sleep(0.25)\n", 3, 2500.0),
    ("MINUTES = 5\nfor _ in range(60 * 5):\n    sleep(1)\n", 3, 300.0),
    ("SPAN_S = 90\nuntil = monotonic() + SPAN_S\nwhile monotonic() < until:\n    pass\n", 4, 90.0),
    (f"{BOUND}while time.time() < until:\n    pass\n", 3, 600.0),
    (f"{BOUND}while until > time.time():\n    sleep(0.1)\n", 3, 600.0),
    (f"{BOUND}print('spins', flush=True)\nn = 0\nwhile time.time() <= until:\n    n += 1\n", 5, 600.0),
    ("until = 2 * 60.5 + time.monotonic()\nwhile time.monotonic() < until:\n    pass\n", 3, 121.0),
    ("began = time.perf_counter()\nwhile time.perf_counter() - began < 3600:\n    pass\n", 2, 3600.0),
    ("began = time.time()\nwhile time.time() < began + 1e9:\n    pass\n", 3, 1e9),
    (
        "began = time.time()\nwhile True:\n    if time.time() - began > 100:\n        break\n    x = 1\n",
        3,
        100.0,
    ),
    (f"def f():\n    {BOUND}    while True:\n        if time.time() >= until: return\n", 4, 600.0),
    (f"{BOUND}while time.time() < until:\n    if time.time() > until: break\n", 3, 600.0),
    (
        f"def f():\n    {BOUND}    while time.time() < until:\n        for i in range(9):\n            x = i\n",
        5,
        600.0,
    ),
]

UNKNOWN_OR_SHORT = [
    ("for _ in range(59):\n    time.sleep(1)\n", 2),
    ("for _ in range(n):\n    time.sleep(1)\n", 2),
    ("for _ in range(600):\n    time.sleep(1)\n    if done(): break\n", 2),
    ("for _ in range(600):\n    time.sleep(1)\n    if x: break\n", 2),
    ("for _ in range(600):\n    time.sleep(wait_s)\n", 2),
    ("for _ in range(600):\n    if x: time.sleep(1)\n", 2),
    ("for _ in range(600):\n    time.sleep(1)\nelse:\n    work()\n", 4),
    ("for _ in range(600):\n    train()\n    time.sleep(1)\n", 3),
    ("for x in data:\n    time.sleep(100)\n", 2),
    ("until = time.time() + 60\nwhile time.time() < until:\n    pass\n", 3),
    (f"{BOUND}train()\nwhile time.time() < until:\n    pass\n", 4),
    (f"{BOUND}for x in y:\n    train(x)\nwhile time.time() < until:\n    pass\n", 5),
    (f"{BOUND}while time.time() < until:\n    train()\n", 3),
    (f"{BOUND}while time.time() < until:\n    until -= 1\n", 3),
    (f"{BOUND}while time.time() < until and not done:\n    pass\n", 3),
    (f"{BOUND}while time.monotonic() < until:\n    pass\n", 3),
    (f"{BOUND}while time.time() > until:\n    pass\n", 3),
    (f"{BOUND}while True:\n    if time.time() < until: break\n", 3),
    (f"{BOUND}while True:\n    if time.time() > until:\n        raise TimeoutError\n", 3),
    (f"{BOUND}while True:\n    if time.time() > until or done():\n        break\n", 3),
    (f"{BOUND}while True:\n    if x: break\n    if time.time() > until: break\n", 3),
    (f"{BOUND}until = 0\nwhile time.time() < until:\n    pass\n", 4),
    ("until = time.time() + wanted()\nwhile time.time() < until:\n    pass\n", 3),
    ("until = start + 600\nwhile time.time() < until:\n    pass\n", 3),
    ("until = [time.time() + 600]\nwhile time.time() < until[0]:\n    pass\n", 3),
    ("until = time.time() - 600\nwhile time.time() < until:\n    pass\n", 3),
    (f"def stop():\n    global until\n    until = 0\n{BOUND}while time.time() < until:\n    pass\n", 6),
    ("def time(): pass\nuntil = time.time() + 600\nwhile time.time() < until:\n    pass\n", 4),
    (f"{BOUND}while time.time() < until:\n    def f():\n        x = 1\n", 4),
    ("for i in range(1000):\n    if i % 100:\n        continue\n    sleep(1)\n", 5),
    ("for i in range(600 - len(x)):\n    sleep(1)\n", 2),
    ("for i in range(start + 1, 1000):\n    sleep(1)\n", 2),
    ("for i in range(100):\n    sleep(1 - 0.999)\n", 2),
    ("for i in range(600):\n    x = math.sqrt(5 - i)\n    sleep(1)\n", 3),
    ("for i in range(600):\n    sleep(5 - i)\n    sleep(1)\n", 3),
    ("WAIT = 600\nexec(open(path).read())\nfor _ in range(WAIT):\n    sleep(1)\n", 4),
    ("time.sleep = print\nfor _ in range(600):\n    time.sleep(1)\n", 3),
    ("from unittest import mock\nfor _ in range(600):\n    time.sleep(1)\n", 3),
    ("from helpers import *\nfor _ in range(600):\n    time.sleep(1)\n", 3),
    ("monkeypatch.setattr(time, 'sleep', print)\nfor _ in range(600):\n    time.sleep(1)\n", 3),
    ("from .time import nap\nfor _ in range(600):\n    nap(1)\n", 3),
    (f"def f():\n    {BOUND}    yield\n    while time.time() < until:\n        sleep(1)\n", 5),
    (f"{BOUND}batches = [b for b in loader]\nwhile time.time() < until:\n    sleep(1)\n", 4),
    (f"{BOUND}x = dataset[0]\nwhile time.time() < until:\n    sleep(1)\n", 4),
    (f"{BOUND}x = job.result\nwhile time.time() < until:\n    sleep(1)\n", 4),
    (f"{BOUND}y = a @ b\nwhile time.time() < until:\n    sleep(1)\n", 4),
    (f"{BOUND}bench.time(step)\nwhile time.time() < until:\n    sleep(1)\n", 4),
    (f"{BOUND}print(loss)\nwhile time.time() < until:\n    sleep(1)\n", 4),
    (f"{BOUND}print(until := 5)\nwhile time.time() < until:\n    sleep(1)\n", 4),
    ("start = x\nuntil = start + 600\nstart = time.time()\nwhile time.time() < until:\n    pass\n", 5),
    ("until = time.time() + (600 - used)\nwhile time.time() < until:\n    pass\n", 3),
    ("t0 = time.time()\nwhile time.time() - t0 < 600 - used:\n    pass\n", 3),
    ("t0 = time.time()\nwhile time.monotonic() - t0 < 600:\n    pass\n", 3),
    ("while time.time() - t0 < 600:\n    pass\n", 2),
    ("for _ in range(10 ** 400):\n    x = y[0]\n", 2),
]


@pytest.mark.parametrize(("text", "row", "wanted_s"), LASTS)
def test_a_loop_takes_as_long_as_is_written_in_it(text: str, row: int, wanted_s: float) -> None:
    row += IMPORTS.count("\n")
    assert ending(IMPORTS + text, row) is Ending.LONG
    assert math.isclose(lasts_s(IMPORTS + text, row), wanted_s, rel_tol=0.01)


@pytest.mark.parametrize(("text", "row"), UNKNOWN_OR_SHORT)
def test_nothing_is_said_of_a_loop_that_may_end_sooner(text: str, row: int) -> None:
    row += IMPORTS.count("\n")
    assert ending(IMPORTS + text, row) in (Ending.UNKNOWN, Ending.SURE, Ending.BY_ERROR)
    assert lasts_s(IMPORTS + text, row) == 0.0
