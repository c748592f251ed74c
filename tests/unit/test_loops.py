"""Is it known of a loop whether it can end? Each way to write one, and what must be said of it."""

from __future__ import annotations

import warnings

import pytest

from orchestrator.node.loops import Ending, caught, ending

IMPORTS = "import time, math, random, itertools, torch, re, functools, operator\nfrom itertools import count, repeat\nfrom collections import deque\n"
"""Three lines before each of the texts below."""

NEVER = [
    ("while True:\n    x += 1\n", 2),
    ("while 1:\n    if x:\n        y = x * 2\n    else:\n        continue\n", 3),
    ("while True:\n    while y < 3:\n        y += 1\n", 3),
    ("while True:\n    x = x % 7 / 2.0\n", 2),
    ("while True:\n    x //= 2\n", 2),
    ("while True:\n    time.sleep(0.1)\n", 2),
    ("while True:\n    x = math.sqrt(abs(x)) + random.random()\n", 2),
    ("while True:\n    sum(range(1000))\n", 2),
    ("while True:\n    a, b = b, a + b\n", 2),
    ("while True:\n    for i in range(1000):\n        x += i\n", 3),
    ("while True:\n    y = torch.ones(3) + torch.mm(a, b)\n", 2),
    ("def f():\n    while True:\n        pass\n", 3),
    ("try:\n    while True:\n        time.sleep(1)\nexcept KeyboardInterrupt:\n    pass\n", 3),
    ("for _ in itertools.count():\n    pass\n", 2),
    ("for _ in iter(int, 1):\n    x += 1\n", 1),
    ("for _ in repeat(None):\n    time.sleep(0.5)\n", 2),
    ("sum(itertools.repeat(1))\n", 1),
    ("def f():\n    return deque(repeat(0), maxlen=0)\n", 2),
    ("x = sum(1 for _ in count())\n", 1),
    ("x = max(y * 2 for y in itertools.cycle(z) if y > 3)\n", 1),
    ("x = sum(range(10**12))\n", 1),
    ("x += max(range(1, 1 << 60, 2))\n", 1),
    ("for i in range(5 * 10**12):\n    x = i\n", 2),
    ("deque(repeat(0, 10**15), maxlen=0)\n", 1),
    ("while True:\n    sum(i * i for i in range(1000))\n", 2),
    ("while True:\n    y = [i ** 2 for i in range(9) if i > x]\n", 2),
    ("while True:\n    for i in (1, 2, 3):\n        if i == x: break\n", 3),
    ("while True:\n    self.turns += 1\n", 2),
    ("while True:\n    x = f'{x:>9}'\n", 2),
    ("def f(n):\n    return n * 31 % 1000003\nwhile True:\n    x = f(x)\n", 4),
    (
        "def f(n):\n    if n < 2:\n        return n\n    return f(n - 1) + f(n - 2)\nwhile True:\n    f(25)\n",
        6,
    ),
    (
        "def g(n):\n    for i in range(n):\n        if i > 3: return i\ndef f(n=3):\n    g(n)\nwhile True:\n    f(n=2)\n",
        7,
    ),
    ("def f():\n    global x\n    x += 1\nwhile 1:\n    f()\n", 5),
    ("print(sum(repeat(1)))\n", 1),
    ("y = x + work(3, key=max(count()))\n", 1),
    ("if sum(repeat(1)) > 3:\n    work()\n", 1),
    ("n = 10**15\nx = sum(range(n))\n", 2),
    ("forever = count()\nx = sum(forever)\n", 2),
    ("any(repeat(False))\n", 1),
    ("all(repeat(True))\n", 1),
    ("-1 in count()\n", 1),
    ("None in repeat(0)\n", 1),
    ("sum(map(abs, count()))\n", 1),
    ("sum(map(lambda x: x * 2, count()))\n", 1),
    ("deque(enumerate(zip(count(), repeat(1))), maxlen=0)\n", 1),
    ("x = [y for y in count()]\n", 1),
    ("next(iter(sorted(filter(None, repeat(0)))))\n", 1),
    ("functools.reduce(operator.add, repeat(1))\n", 1),
    ("functools.reduce(lambda a, b: a + b, count())\n", 1),
    ("sum(itertools.islice(count(), 10**13))\n", 1),
    ("sum(itertools.chain([1, 2], repeat(3)))\n", 1),
    ("math.prod(repeat(1))\n", 1),
    ("operator.countOf(repeat(1), 2)\n", 1),
    ("x = 7 ** 10**10\n", 1),
    ("x = pow(3, 10**10)\n", 1),
    ("sum(range(10**10**10))\n", 1),
    ("math.factorial(10**7)\n", 1),
    ("import hashlib\nhashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)\n", 2),
    ("x = 10**10**8\n", 1),
    ("x = 2 ** (10**19)**20\n", 1),
    ("import os\nwhile True:\n    os.sched_yield()\n", 3),
    ("from datetime import datetime\nwhile True:\n    now = datetime.now()\n", 3),
    ("re.match('(a+)+$', 'a' * 64 + 'b')\n", 1),
    ("text = 'a' * 64 + '!'\nif re.search(r'^(\\w+\\s?)*$', text):\n    pass\n", 2),
    ("p = re.compile(r'(x+x+)+y')\np.match('x' * 99)\n", 2),
    ("re.compile(b'(a|aa)+$').sub(b'', b'a' * 99 + b'b')\n", 1),
    ("re.sub('(.*)*b', '', 'a' * 64)\n", 1),
]
UNKNOWN = [
    ("while True:\n    x += 1\n    if x > 9: break\n", 2),
    ("def f():\n    while True:\n        if x: return 1\n", 3),
    ("def f():\n    while True:\n        yield 1\n", 3),
    ("while True:\n    work()\n", 2),
    ("while True:\n    x.work()\n", 2),
    ("while True:\n    x.update(y)\n", 2),
    ("while True:\n    print(work())\n", 2),
    ("while True:\n    torch.distributed.all_reduce(x)\n", 2),
    ("while True:\n    torch.save(x, y)\n", 2),
    ("while True:\n    print(x)\n    if x: break\n", 2),
    ("while True:\n    with lock:\n        print(x)\n", 3),
    ("while True:\n    with torch.no_grad():\n        work()\n", 3),
    ("while True:\n    try:\n        print(x)\n    except OSError:\n        pass\n", 3),
    ("def f():\n    while True:\n        print(x)\n        yield x\n", 3),
    ("while True:\n    for x in y:\n        print(x)\n", 1),
    ("while True:\n    exit()\n", 2),
    ("while True:\n    [x for x in y]\n", 2),
    ("def f():\n    return next(y)\nwhile True:\n    f()\n", 4),
    ("def f():\n    raise StopIteration\nwhile True:\n    f()\n", 4),
    ("@retried\ndef f():\n    pass\nwhile True:\n    f()\n", 5),
    ("def f():\n    pass\nf = g\nwhile True:\n    f()\n", 5),
    ("class C:\n    def f(self):\n        pass\nwhile True:\n    f()\n", 5),
    ("def f():\n    yield 1\nwhile True:\n    f()\n", 4),
    ("def f():\n    g()\ndef g():\n    h()\ndef h():\n    work()\nwhile True:\n    f()\n", 8),
    ("while True:\n    for i in (1, 2, 3):\n        pass\n    else:\n        break\n", 1),
    ("while True:\n    for i in y:\n        pass\n", 1),
    ("while True:\n    sum(i for i in y)\n", 2),
    ("while not x.done:\n    time.sleep(1)\n", 2),
    ("sum(range(10**9))\n", 1),
    ("sum(range(n))\n", 1),
    ("n = 10**15\nn = 3\nsum(range(n))\n", 3),
    ("def f(n=10**15):\n    sum(range(n))\n", 2),
    ("x = lambda: sum(repeat(1))\n", 1),
    ("x = y or sum(repeat(1))\n", 1),
    ("if x:\n    work()\nelse:\n    sum(repeat(1))\n", 2),
    ("any(repeat(True))\n", 1),
    ("any(count())\n", 1),
    ("3 in count()\n", 1),
    ("3.0 in count()\n", 1),
    ("1 in repeat(True)\n", 1),
    ("sum(map(work, count()))\n", 1),
    ("sum(zip(count(), x))\n", 1),
    ("x = [work(y) for y in count()]\n", 1),
    ("next(filter(None, count()))\n", 1),
    ("functools.reduce(work, repeat(1))\n", 1),
    ("sum(itertools.islice(count(), 10**6))\n", 1),
    ("x = 7 ** 10**6\n", 1),
    ("x = y ** 10**10\n", 1),
    ("x = 1 ** 10**12\n", 1),
    ("math.factorial(10**6)\n", 1),
    ("re.match('(a+)+$', 'a' * 24 + 'b')\n", 1),
    ("re.match('a+$', 'a' * 64 + 'b')\n", 1),
    ("re.match('(a+)+$', x)\n", 1),
    ("re.match(x, 'a' * 64)\n", 1),
    ("re.match('(a+', 'a' * 64)\n", 1),
    ("p = re.compile('(a+)+$')\np = work()\np.match('a' * 64)\n", 3),
    ("re.compile('(a+)+$').groups\n", 1),
    ("re.compile('(a+)+$').finditer('a' * 64 + 'b')\n", 1),
    ("operator.indexOf(count(), 3)\n", 1),
    ("from mine import *\nn = 10**15\nsum(range(n))\n", 3),
    ("sum(range(0, 10**12, 0))\n", 1),
    ("sum(range(10**12, 0))\n", 1),
    ("range(10**12)\n", 1),
    ("for i in range(10**12):\n    work(i)\n", 3),
    ("while True:\n    x = next(y)\n", 2),
    ("while True:\n    x = torch.load(path)\n", 2),
    ("while True:\n    torch.distributed.barrier()\n", 2),
    ("while True:\n    time.sleep(wanted())\n", 2),
    ("while True:\n    pass\nx = 1\n", 3),
    ("while True\n", 1),
    ("while not done():\n    time.sleep(1)\n", 2),
    ("while not self.done:\n    time.sleep(1)\n", 2),
    ("def len(x):\n    raise StopIteration\nwhile True:\n    len(x)\n", 4),
    ("def f(time):\n    while True:\n        time.sleep(1)\n", 3),
    ("from mine import *\nwhile True:\n    abs(x)\n", 3),
    ("from mine import sum\nsum(repeat(1))\n", 2),
    ("sum(repeat(1, 5))\n", 1),
    ("sum(repeat(1, times=5))\n", 1),
    ("sum(repeat(1)) if x else work()\n", 1),
    ("for _ in count():\n    if ready(): break\n    time.sleep(1)\n", 3),
    ("for x in y:\n    def f():\n        time.sleep(1)\n", 3),
    ("x = 1\nwhile x:\n    x -= 1\n", 3),
    ("import flags\nwhile not flags:\n    pass\n", 3),
    ("stop = False\ndef f():\n    global stop\n    stop = True\nwhile not stop:\n    pass\n", 6),
    ("x = []\nwhile not x:\n    if time.time() > last + 30:\n        last = say()\n", 3),
    ("x = 1\n", 1),
    ("a = 1\n" + "".join(f"a{n} = a{n - 1} + a{n - 1}\n" for n in range(1, 40)) + "range(a39)\n", 41),
    ("stop = False\nwhile not stop:\n    losses = list(loader)\n", 3),
    ("done = False\nsignal.signal(15, lambda *_: globals().update(done=1))\nwhile not done:\n    pass\n", 4),
    ("from shared import int\nn = int(0)\nwhile len(n) < 3:\n    pass\n", 4),
    ("from .random import step\nwhile True:\n    step()\n", 3),
    (
        "try:\n    from fast import sleep\nexcept ImportError:\n    from time import sleep\nwhile True:\n    sleep(1)\n",
        6,
    ),
    ("done = False\nwhile done:\n    pass\nelse:\n    train()\n", 5),
    ("n = False\nmatch x:\n    case {'n': n}:\n        pass\nwhile not n:\n    pass\n", 6),
]
BY_ERROR = [
    ("while True:\n    print(x)\n", 2),
    ("while True:\n    x = y[0]\n", 2),
    (
        "import logging\nlog = logging.getLogger()\nwhile True:\n    log.info('waits')\n    logging.error(x)\n",
        4,
    ),
    ("while True:\n    x = 1 / y\n", 2),
    ("while True:\n    x = x ** y\n", 2),
    ("while True:\n    x %= 0\n", 2),
    ("while True:\n    x = x @ y\n", 2),
    ("while True:\n    x = torch.nn.functional.relu(x).clamp(0, 1)\n", 2),
    ("while True:\n    x.mul_(2).add_(y)\n    z = x.sum().item()\n", 3),
    ("while True:\n    with torch.no_grad():\n        y.append(torch.linalg.inv(x))\n", 3),
    ("import numpy as np\nwhile True:\n    x = np.dot(x, np.random.rand(3, 3))\n", 3),
    ("import hashlib\nwhile True:\n    x = hashlib.sha256(x).digest()\n", 3),
    ("def f(x):\n    return x[0] % len(x)\nfor _ in count():\n    f(x)\n", 4),
    ("while True:\n    assert x, 'gone'\n    y = {**z, 'a': [*x]}\n", 3),
]
CHANGED_FROM_AFAR = [
    ("def f(done):\n    while not done:\n        time.sleep(1)\n", 3),
    ("go = []\nwhile not go:\n    time.sleep(1)\n", 3),
    ("now = torch.zeros(1)\nwhile now < 25:\n    advance = torch.add(now, 1)\n", 3),
    ("flag = torch.from_file(path, shared=True, size=1)\nwhile flag == 0:\n    time.sleep(1)\n", 3),
    ("done = False\nfor done in y:\n    pass\nwhile not done:\n    pass\n", 5),
    ("done, go = make()\nwhile not done:\n    pass\n", 3),
]
BY_OTHERS = [
    ("done = False\nwhile not done:\n    pass\n", 3),
    ("rank, n = int(text), 0\nwhile rank == 3:\n    time.sleep(1)\n", 3),
    ("def f():\n    done: bool = False\n    while not done:\n        time.sleep(1)\n", 4),
    ("def f():\n    i, n = 0, 10\n    while i < n:\n        x = 2\n", 4),
]
SURE = [
    ("for i in range(8):\n    try:\n        fetch()\n    except OSError:\n        time.sleep(10)\n", 5),
    ("for x in y:\n    z += work(x)\n", 2),
    ("for i in range(10**11 - 1000 * x):\n    pass\n", 2),
    ("while time.monotonic() < until:\n    time.sleep(1)\n", 2),
    (
        "while not ready():\n    if time.time() - began > 600:\n        raise TimeoutError\n    time.sleep(5)\n",
        4,
    ),
    ("while True:\n    for wait_s in (1, 2, 4):\n        time.sleep(wait_s)\n        work()\n", 3),
]
CASES = [
    *((text, row, Ending.NEVER) for text, row in NEVER),
    *((text, row, Ending.UNKNOWN) for text, row in UNKNOWN),
    *((text, row, Ending.UNKNOWN) for text, row in CHANGED_FROM_AFAR),
    *((text, row, Ending.BY_OTHERS) for text, row in BY_OTHERS),
    *((text, row, Ending.BY_ERROR) for text, row in BY_ERROR),
    *((text, row, Ending.SURE) for text, row in SURE),
]


@pytest.mark.parametrize(("text", "row", "wanted"), CASES)
def test_only_what_is_plain_to_see_is_said_of_a_loop(text: str, row: int, wanted: Ending) -> None:
    assert ending(IMPORTS + text, row + IMPORTS.count("\n")) is wanted


CAUGHT = [
    ("try:\n    x\nexcept ValueError:\n    pass\n", 2, Ending.UNKNOWN),
    ("try:\n    x\nexcept KeyboardInterrupt:\n    pass\n", 2, Ending.BY_OTHERS),
    ("try:\n    x\nexcept Exception as err:\n    print(err)\n    raise\n", 2, Ending.NEVER),
    ("try:\n    x\nfinally:\n    y\n", 2, Ending.NEVER),
    ("def f():\n    try:\n        x\n    finally:\n        return 1\n", 3, Ending.UNKNOWN),
    (
        "for i in n:\n    try:\n        x\n    except E:\n        if i: continue\n        raise\n",
        3,
        Ending.UNKNOWN,
    ),
    ("try:\n    x\nexcept ValueError:\n    y\n", 4, Ending.NEVER),
    (
        "def f():\n    try:\n        try:\n            x\n        finally:\n            y\n    except:\n        pass\n",
        4,
        Ending.UNKNOWN,
    ),
    ("with contextlib.suppress(OSError):\n    x\n", 2, Ending.UNKNOWN),
    ("with time_limit(30):\n    x\n", 2, Ending.UNKNOWN),
    ("with torch.no_grad(), open(path) as file:\n    x\n", 2, Ending.NEVER),
    ("x\n", 1, Ending.NEVER),
    ("(\n", 1, Ending.UNKNOWN),
]


@pytest.mark.parametrize(("text", "row", "wanted"), CAUGHT)
def test_an_exception_may_leave_a_loop_and_be_caught(text: str, row: int, wanted: Ending) -> None:
    assert caught(text, row) is wanted


def test_a_text_that_python_does_not_read_says_nothing() -> None:
    assert ending("(" * 5000, 1) is Ending.UNKNOWN
    assert ending("x = '\0'", 1) is Ending.UNKNOWN
    assert ending(f"while True:\n    x = {'1 + ' * 900}1\n", 2) is Ending.UNKNOWN, "deeper than Python goes"


def test_functions_that_call_each_other_without_end_are_not_followed() -> None:
    chain = "".join(f"def f{i}():\n    f{i + 1}(); f{i + 1}()\n" for i in range(300))
    assert ending(f"{chain}while True:\n    f0()\n", 602) is Ending.UNKNOWN
    assert ending(f"{chain}def f300():\n    pass\nwhile True:\n    f0()\n", 604) is Ending.NEVER


def test_what_python_thinks_of_a_script_is_not_said_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ending("while True:\n    x = '\\d'\n", 2) is Ending.NEVER
