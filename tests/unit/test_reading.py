"""Loops that ask functions of the script: which come out the same each time, and which might not."""

from __future__ import annotations

import pytest

from orchestrator.node.loops import Ending, ending

IMPORTS = "import math, random, signal, threading, time\nfrom other import serve\n"
READY = "ready = set()\ndef is_ready(path):\n    return path in ready\n"
WAIT = "while not is_ready('shard'):\n    pass\n"

FIXED = [
    READY + WAIT,
    READY + "while not is_ready('shard'):\n    time.sleep(1)\n    n = random.random()\n",
    f"{READY}def wait():\n    while is_ready(1) == False:\n        x = 1\n        x += 1\nwait()\n",
    READY
    + "def all_ready(n):\n    return is_ready(n) and is_ready(n + 1)\nwhile not all_ready(3):\n    pass\n",
    f"def fill():\n    ready.add(1)\nfill()\n{READY}{WAIT}",
    "def f(n):\n    m = n * 2\n    return m < 3\nlow = 1\nwhile f(low):\n    pass\n",
    "done = {'a': [1, 2], 'b': (3,)}\nwhile len(done) < 3:\n    pass\n",
    "sizes = [3]\nwhile math.floor(0.5) == 0 and not sizes:\n    pass\n",
]
NOT_FIXED = [
    READY.replace("set()", "open(path)") + WAIT,
    READY.replace("set()", "Shared()") + WAIT,
    READY.replace("set()", "set(found)") + WAIT,
    READY + "import ready\n" + WAIT,
    READY + "from other import ready\n" + WAIT,
    READY + "for ready in x:\n    pass\n" + WAIT,
    READY + "while not is_ready('shard'):\n    ready = fetch()\n",
    READY + "while not is_ready('shard'):\n    ready = {'shard'}\n",
    READY + "while not is_ready(path):\n    pass\n",
    READY + "path = 1\nwhile not is_ready(path):\n    path = 2\n",
    READY
    + "def more():\n    global ready\n    ready = {'shard'}\nwhile not is_ready('shard'):\n    more()\n",
    READY + "def more():\n    ready.add('shard')\nwhile not is_ready('shard'):\n    more()\n",
    READY + "def more():\n    a = ready\n    a |= other\nwhile not is_ready('shard'):\n    more()\n",
    f"{READY}def more():\n    ready.add('shard')\nwork.then(more)\n{WAIT}",
    f"{READY}def more():\n    ready.add('shard')\nthreading.Thread(target=more).start()\n{WAIT}",
    f"{READY}def more():\n    ready.add('shard')\ndef on(*_):\n    more()\nsignal.signal(10, on)\n{WAIT}",
    f"{READY}work.then(lambda _: ready.add('shard'))\n{WAIT}",
    f"{READY}class Hook:\n    def done(self):\n        ready.add('shard')\n{WAIT}",
    f"{READY}def f():\n    def more():\n        ready.add('shard')\n    call(more)\n{WAIT}",
    f"{READY}@hook\ndef more():\n    ready.add('shard')\n{WAIT}",
    f"{READY}work.then(ready.add)\n{WAIT}",
    f"{READY}serve(ready)\n{WAIT}",
    f"{READY}also = ready\nserve(also)\n{WAIT}",
    f"{READY}job.ready = [ready]\n{WAIT}",
    f"{READY}def f():\n    return ready or None\nserve(f())\n{WAIT}",
    READY.replace("(path)", "(path, among=found)") + WAIT,
    READY.replace("path in ready", "time.time() > 5") + WAIT,
    READY.replace("path in ready", "random.random() < 0.5") + WAIT,
    READY.replace("path in ready", "path in job.ready") + WAIT,
    READY.replace("path in ready", "path in found") + WAIT,
    READY.replace("path in ready", "exists(path)") + WAIT,
    READY.replace("    return", "    yield") + WAIT,
    READY.replace("    return", "    raise KeyError\n    return") + WAIT,
    "class Box:\n    pass\nbox = Box()\ndef f():\n    return box.full\nwhile not f():\n    pass\n",
    "def f():\n    box.n = 1\n    return n\nn = 0\nwhile not f():\n    pass\n",
    "queue = []\nwhile len(queue) < 3:\n    queue.append(1)\n",
]


@pytest.mark.parametrize("text", FIXED)
def test_what_is_asked_is_the_same_each_time(text: str) -> None:
    assert ending(IMPORTS + text, last_row(text)) is Ending.BY_OTHERS


@pytest.mark.parametrize("text", NOT_FIXED)
def test_what_might_change_is_not_known(text: str) -> None:
    assert ending(IMPORTS + text, last_row(text)) is Ending.UNKNOWN


def last_row(text: str) -> int:
    """Return the last line of the loop that ends each text but for a call."""
    rows = (IMPORTS + text).splitlines()
    return len(rows) - (not rows[-1].startswith(" "))
