"""What can a second process do meanwhile? What a submit needs whatever the job file says, while that is still read.

Most of what `orch submit` takes is the loading of libraries, by one core. The second process loads some of them, and
makes what they are for; whatever it cannot do, the first one does itself, as it does where there is no second.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

ANSWER_S_MAX = 5.0
"""How long an answer of the second process is waited for; after that it is not asked again."""

T = TypeVar("T")
P = ParamSpec("P")
Deed: TypeAlias = tuple[Any, ...]
"""A function and its arguments."""

_second: ContextVar[socket.socket | None] = ContextVar("second", default=None)
"""The line to the second process, where there is one."""


@contextlib.contextmanager
def process(*deeds: Deed) -> Iterator[None]:
    """Let a second process do these, and keep what they return for the first `call` of each. It forks, so this is not
    for processes with threads."""
    with contextlib.ExitStack() as stack:
        try:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            stack.callback(theirs.close)
            pid = os.fork()
        except OSError:
            yield  # no room for it: the first process does all, or says why not
            return
        if pid == 0:
            _be_second(ours, theirs, deeds)
        theirs.close()
        stack.callback(_end, pid)
        ours.settimeout(ANSWER_S_MAX)
        stack.callback(_second.reset, _second.set(ours))
        yield


def _end(pid: int) -> None:
    # It is ours until waited for; but where SIGCHLD is ignored, as some shells do, nobody can wait for it.
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a function returns, done by the second process where that can do it. What it raises is raised here."""
    line = _second.get()
    if line is not None:
        try:
            line.sendall(pickle.dumps((function, args, kwargs)))
            with line.makefile("rb") as answer:
                done: list[T] = pickle.load(answer)
        except (OSError, EOFError, AttributeError, TypeError, pickle.PickleError):
            _second.set(None)  # it is gone, or does not answer; or its question or answer cannot be told
        else:
            if done:
                return done[0]
    return function(*args, **kwargs)


def _be_second(ours: socket.socket, theirs: socket.socket, deeds: tuple[Deed, ...]) -> NoReturn:
    """Do what is to be done ahead, then what the first process asks for, until that is gone; without a word."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        ours.close()
        ready = [(deed, _tried(*deed)) for deed in deeds]
        with theirs.makefile("rb") as questions:
            while True:
                function, args, kwargs = pickle.load(questions)
                made = next((one for one in ready if one[0] == (function, *args) and not kwargs), None)
                if made is not None:
                    ready.remove(made)
                theirs.sendall(pickle.dumps(made[1] if made else _tried(function, *args, **kwargs)))
    finally:
        os._exit(0)


def _leave(*_: object) -> NoReturn:
    raise SystemExit  # not at once: a file that is being written is not left half done


def _tried(function: Callable[..., object], *args: object, **kwargs: object) -> list[object]:
    """Return what a function returns, or nothing where it fails: then the first process is told why, when it tries."""
    try:
        return [function(*args, **kwargs)]
    except Exception:
        return []
