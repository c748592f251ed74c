"""What does the user's own line say? Read from the file that a frame names, as the rank itself would find it.

A script that was edited since it was loaded would mislead: a file younger than its process is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.node.frames import Frame
from orchestrator.node.loops import Ending, caught, ending, lasts_s, least, returns

SOURCE_BYTES_MAX = 2 << 20
LINE_CHARS_MAX = 300
START_SLACK_S = 2.0
"""A file this much younger than its process is believed: the kernel's and the file system's clocks are coarse, and a
script may be written at the moment it is started."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source; `ending`: what is known of the end of the loop around it."""

    text: str
    ending: Ending


NO_LINE = Line("", Ending.UNKNOWN)

_SUREST = (Ending.NEVER, Ending.LONG, Ending.BY_OTHERS)

_STARTERS = ("<frozen runpy>",)
"""What starts a script and catches nothing of it: `python -m`."""

LOOP_FRAMES_MAX = 64
"""So many of the user's frames are looked at for a loop, the innermost first."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop around the line of a frame that does not end, or only by another thread's doing. `lasts_s`: or ends after
    that, which is long; then 0 is none that ends."""

    frame: Frame
    ending: Ending
    lasts_s: float = 0.0


def line_at(pid: int, frame: Frame, started_s: float) -> Line:
    """Return the line of a frame of process `pid`; empty when it cannot be had. `started_s`: Unix time of its start."""
    text = _source(pid, frame.file, started_s)
    said = _line(text, frame.line)
    return NO_LINE if said is None else Line(said, ending(text, frame.line))


def loop_at(pid: int, stack: tuple[Frame, ...], started_s: float) -> Loop | None:
    """Return the loop without an end that a stack is in, whatever its body has called by now; None without one. Where
    it is interrupted, as by a handler of a signal, it is not what the stack is in."""
    mine = [frame for frame in stack if frame.is_users][:LOOP_FRAMES_MAX]
    texts = {file: _source(pid, file, started_s) for file in dict.fromkeys(frame.file for frame in mine)}
    found = []
    for number, frame in enumerate(mine):
        ends = ending(texts[frame.file], frame.line)
        if ends is Ending.BY_ERROR and _is_the_users_alone(stack, frame):
            ends = Ending.NEVER  # nobody goes on after it
        if ends in (Ending.NEVER, Ending.BY_OTHERS, Ending.LONG):
            around = [caught(texts[one.file], one.line) for one in mine[number:]]
            found.append(Loop(frame, least([ends, *around]), lasts_s(texts[frame.file], frame.line)))
        if not returns(texts[frame.file], frame.function):
            break
    proofs = [loop for loop in found if loop.ending in _SUREST]
    return min(proofs, key=lambda loop: _SUREST.index(loop.ending), default=None)


def _is_the_users_alone(stack: tuple[Frame, ...], frame: Frame) -> bool:
    """Tell whether no library has called what a frame is in: it might catch an error."""
    return all(one.is_users or one.file in _STARTERS for one in stack[stack.index(frame) :])


def text_at(pid: int, frame: Frame, started_s: float) -> str:
    """Return the same without what is known of its loop."""
    return _line(_source(pid, frame.file, started_s), frame.line) or ""


def _line(text: str, row: int) -> str | None:
    lines = text.splitlines()
    return lines[row - 1].strip()[:LINE_CHARS_MAX] if 0 < row <= len(lines) else None


def _source(pid: int, file: str, started_s: float) -> str:
    path = Path(file)
    if not path.is_absolute():
        try:
            path = Path(f"/proc/{pid}/cwd").readlink() / path
        except OSError:
            return ""
    try:
        about = path.stat()
        if about.st_mtime > started_s + START_SLACK_S or about.st_size > SOURCE_BYTES_MAX:
            return ""
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
