"""Loops that ask functions of the script: what is settled once and for all, and what might change."""

from __future__ import annotations

import pytest

from orchestrator.node.loops import Ending, ending

IMPORTS = "import random, signal, sys, threading, time\nfrom other import serve\n"
READY = "ready = set()\ndef is_ready(path):\n    return path in ready\n"
WAIT = "while not is_ready('shard'):\n    pass\n"
FLAG = "done = False\ndef is_done():\n    'Tell it.'\n    return done\n"

FIXED = [
    READY + WAIT,
    READY + "while not is_ready('shard'):\n    time.sleep(1)\n    n = random.random()\n",
    FLAG + "while not is_done():\n    pass\n",
    f"model.eval()\nsetattr(job, 'name', vars(job))\n{READY}{WAIT}",
    FLAG + "print(done)\nwhile not is_done():\n    pass\n",
    "def wait():\n    global ready\n    ready = set()\n    while not is_ready(1):\n        pass\ndef is_ready(n):\n    return n in ready\n",
    READY + "def both(n):\n    return is_ready(n) or is_ready(None)\nwhile not both(3):\n    pass\n",
    "found = []\nwhile len(found) < 3:\n    pass\n",
]
NOT_FIXED = [
    READY.replace("set()", "open(path)") + WAIT,
    READY.replace("set()", "{'a'}") + WAIT,
    READY.replace("set()", "set(found)") + WAIT,
    READY + "import ready\n" + WAIT,
    READY + "from other import ready\n" + WAIT,
    READY + "from other import *\n" + WAIT,
    READY + "for ready in x:\n    pass\n" + WAIT,
    READY + "ready |= {'shard'}\n" + WAIT,
    READY + "del ready\n" + WAIT,
    READY + "while not is_ready('shard'):\n    ready = {'shard'}\n",
    READY + "while not is_ready(path):\n    pass\n",
    READY + "path = 1\nwhile not is_ready(path):\n    path = 2\n",
    READY
    + "def more():\n    global ready\n    ready = {'shard'}\nwhile not is_ready('shard'):\n    more()\n",
    f"{READY}def more():\n    ready.add('shard')\n{WAIT}",
    f"{READY}work.then(ready.add)\n{WAIT}",
    f"{READY}serve(ready)\n{WAIT}",
    f"{READY}also = ready\n{WAIT}",
    f"{READY}also = [ready]\n{WAIT}",
    f"{READY}also = ready or None\n{WAIT}",
    f"{READY}def fill(among=ready):\n    pass\n{WAIT}",
    f"{READY}def fill(ready):\n    pass\n{WAIT}",
    f"{READY}globals()['ready'] = 1\n{WAIT}",
    f"{READY}exec(text)\n{WAIT}",
    f"{READY}setattr(sys.modules[__name__], 'ready', 1)\n{WAIT}",
    f"{READY}import __main__\n{WAIT}",
    f"{READY}setattr(job, 'ready', 1)\n{WAIT}",
    f"{READY}setattr(job, name, 1)\n{WAIT}",
    f"{READY}vars()['ready'] = 1\n{WAIT}",
    f"{READY}vars(sys.modules[__name__])['ready'] = 1\n{WAIT}",
    f"{READY}match x:\n    case {{'q': ready}}:\n        pass\n{WAIT}",
    f"{READY}@cached\ndef is_ready(n):\n    return n in ready\n{WAIT}",
    READY.replace("(path)", "(path, among=found)") + WAIT,
    READY.replace("path in ready", "time.time() > 5") + WAIT,
    READY.replace("path in ready", "random.random() < 0.5") + WAIT,
    READY.replace("path in ready", "path in job.ready") + WAIT,
    READY.replace("path in ready", "path in found") + WAIT,
    READY.replace("path in ready", "exists(path)") + WAIT,
    READY.replace("    return", "    yield") + WAIT,
    READY.replace("    return", "    raise KeyError\n    return") + WAIT,
    READY.replace("    return", "    for i in range(10**9): pass\n    return") + WAIT,
    FLAG
    + "def stop(*_):\n    global done\n    done = True\nsignal.signal(15, stop)\nwhile not is_done():\n    pass\n",
    "n = 10**9\nwhile sum(range(n)) > 5:\n    pass\n",
    "found = []\nwhile len(found) < 3:\n    found.append(1)\n",
    "found = []\nwhile len(found) < 3:\n    pass\nelse:\n    train()\n",
    "def f(n):\n    return f(n)\nwhile f(1):\n    pass\n",
]


@pytest.mark.parametrize("text", FIXED)
def test_what_is_asked_is_settled(text: str) -> None:
    assert Ending.BY_OTHERS in {ending(IMPORTS + text, row) for row in loop_rows(text)}


@pytest.mark.parametrize("text", NOT_FIXED)
def test_what_might_change_is_not_known(text: str) -> None:
    assert ending(IMPORTS + text, len((IMPORTS + text).splitlines())) is Ending.UNKNOWN


def loop_rows(text: str) -> list[int]:
    """Return the lines of a text that begin a loop."""
    return [row for row, line in enumerate((IMPORTS + text).splitlines(), 1) if "while" in line]
