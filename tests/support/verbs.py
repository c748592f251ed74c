"""Verbs run in this process, each held to what every one owes: an exit code of the contract and a sentence, soon."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

from orchestrator.cli import app

VERB_S_MAX = 60
"""A verb that takes longer waits for what never comes."""

SENTENCE_CHARS_MAX = 3000


def examples(usual: int) -> int:
    """Return how much bad input is tried: `ORCH_FUZZ` times as much as usual, and a third of that where it is not set."""
    return usual * int(os.environ["ORCH_FUZZ"]) if "ORCH_FUZZ" in os.environ else usual // 3


def checked(words: Sequence[str]) -> tuple[int, str]:
    """Run a verb and return its exit code and what it printed. Fails where it is told of in no sentence, or hangs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _within(VERB_S_MAX):
        code = app.run(list(words))
    said = err.getvalue()
    assert code in (0, 1, 2, 3), words
    assert code in (0, 1) or said.strip(), words
    assert len(said) < SENTENCE_CHARS_MAX and "Error(" not in said and "Traceback" not in said, (words, said)
    assert not set("\x1b\u202e") & set(out.getvalue() + said), words
    return code, out.getvalue()


@contextlib.contextmanager
def _within(limit_s: int) -> Iterator[None]:
    def late(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"still at work after {limit_s} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
