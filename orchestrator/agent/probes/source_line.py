"""Source line of a frame in the user's code, read by the path that the rank itself has.

A script that was edited after it was loaded would mislead: a file younger than its process is not read.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.agent.probes.stack_frames import Frame

SOURCE_BYTES_MAX = 2 << 20
LINE_CHARS_MAX = 300
START_SLACK_S = 2.0
"""A file this much younger than its process is still read: the kernel's and the file system's clocks are coarse, and a
script may be written at the moment it is started."""


def line_at(pid: int, frame: Frame, started_s: float) -> str:
    """Return the line of a frame of process `pid`, which began at `started_s` (Unix time); empty if unreadable."""
    lines = _source(pid, frame.file, started_s).splitlines()
    return lines[frame.line - 1].strip()[:LINE_CHARS_MAX] if 0 < frame.line <= len(lines) else ""


def _source(pid: int, file: str, started_s: float) -> str:
    path = Path(file)
    try:
        if not path.is_absolute():
            path = Path(f"/proc/{pid}/cwd").readlink() / path
        stat = path.stat()
        if stat.st_mtime > started_s + START_SLACK_S or stat.st_size > SOURCE_BYTES_MAX:
            return ""
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
