"""Dump of the stacks of Python threads: parser of what `faulthandler` writes, and the source of its frames.

`faulthandler` writes dumps without locks, so every line may be torn: a line that cannot be parsed is passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.jobdir import ownership
from orchestrator.core.status_types import Frame

LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib(64)?/python3[^/]*/|^<|/torch/(distributed|nn|autograd)/")
"""Files that are not the user's: installed packages, the standard library, frozen modules."""

ORCH_FILES = re.compile(r"/nodes/[^/]+/template/|/hook/(sitecustomize\.py$|_orch_hook/)")
"""Files of orch in a rank, whose frames no person needs: the template that ranks are forked from, and the hook."""

FRAMES_MAX = 100
"""Frames kept of one thread; `faulthandler` itself writes at most as many."""

_HEAD = re.compile(r"(Current thread|Thread|Stack)(?: 0x([0-9a-f]+))?(?: \[(.*)\])? \(most recent call first\)")
_FRAME = re.compile(r'\s+File "(.*)", line (\d+|\?+)(?: in (.*))?')
CUT_MARK = "..."
"""The last line of a dump with more than 100 threads, which shows the youngest of them."""


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread with a Python stack, innermost frame first."""

    # Its pthread, 0 where it has dumped only itself.
    ident: int
    # Empty before Python 3.14.
    name: str
    current: bool
    frames: tuple[Frame, ...]

    @property
    def chain(self) -> tuple[tuple[str, str], ...]:
        """File and function of each frame: while this is the same, no call has been made or has returned."""
        return tuple((frame.file, frame.function) for frame in self.frames)

    @property
    def callers(self) -> tuple[tuple[str, int], ...]:
        """File and line of all frames but the innermost: these do not change during one call."""
        return tuple((frame.file, frame.line) for frame in self.frames[1:])


def parse_dump(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of a dump, in its order: the oldest, which is the main one, comes last."""
    threads: list[ThreadStack] = []
    frames: list[Frame] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            frames = []
            current = head[1] == "Current thread"
            threads.append(ThreadStack(int(head[2] or "0", 16), (head[3] or "").strip(), current, ()))
        frame = _FRAME.match(line)
        if frame is not None and threads and len(frames) < FRAMES_MAX and not ORCH_FILES.search(frame[1]):
            number = int(frame[2]) if frame[2].isdigit() else 0
            frames.append(Frame(frame[1], number, frame[3] or "?"))
            last = threads[-1]
            threads[-1] = ThreadStack(last.ident, last.name, last.current, tuple(frames))
    return tuple(threads)


def format_traceback(threads: Iterable[ThreadStack], source: Callable[[Frame], str]) -> str:
    """Return stacks as Python prints tracebacks, outermost frame first, with the user's source."""
    lines = []
    for thread in threads:
        head = "Current thread" if thread.current else "Thread"
        whose = " ".join(filter(None, (f"{head} 0x{thread.ident:x}" if thread.ident else "Stack", thread.name)))
        lines.append(f"{whose} (most recent call last):")
        for frame in reversed(thread.frames):
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            if is_users_frame(frame) and (line := source(frame)):
                lines.append(f"    {line}")
        lines.append("")
    return "\n".join(lines)


def dumped_stack(text: str) -> ThreadStack | None:
    """Return the thread that has dumped itself, None where there is no stack in `text`."""
    threads = parse_dump(text)
    return threads[-1] if threads else None


def is_users_frame(frame: Frame) -> bool:
    """Return whether a frame is the user's code, not a package's or Python's own."""
    return LIBRARY.search(frame.file) is None


def find_users_frame(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of the user's own code."""
    return next(filter(is_users_frame, frames), None)


SOURCE_BYTES_MAX = 2 << 20
LINE_CHARS_MAX = 300
START_SLACK_S = 2.0
"""A file this much younger than its process is still read: the kernel's and the file system's clocks are coarse, and a
script may be written at the moment it is started."""


def read_source_line(frame: Frame, began_s: float = math.inf, folder: str = "") -> str:
    """Return the line of a frame; empty if it cannot be read, or if the file is younger than its process, which began at
    `began_s` (Unix time). `folder`: where that process looks for relative paths."""
    path = Path(folder, frame.file)
    try:
        stat = path.stat()
        is_other = stat.st_mtime > began_s + START_SLACK_S or stat.st_size > SOURCE_BYTES_MAX
        if is_other or not path.is_absolute():
            return ""
        lines = ownership.read_regular(path).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return ""
    return lines[frame.line - 1].strip()[:LINE_CHARS_MAX] if 0 < frame.line <= len(lines) else ""
