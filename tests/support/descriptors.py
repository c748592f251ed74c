"""A process that has few descriptors left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def few_descriptors(left: int) -> Iterator[list[int]]:
    """Allow this process so many more, and give those that use them up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used: list[int] = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used[0] + left, hard))
    try:
        yield used
    finally:
        for fd in used:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def use_up(used: list[int]) -> None:
    """Open files until no more can be."""
    with contextlib.suppress(OSError):
        while True:
            used.append(os.open(os.devnull, os.O_RDONLY))
