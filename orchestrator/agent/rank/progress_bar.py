"""Progress bar of a rank that makes no steps: the last one in its log, as tqdm prints it.

A bar is rewritten in its line after a carriage return, each time with its count: ` 3%|▍ | 37/1200 [00:03<01:55, 10.1it/s]`,
or `37it [00:03, 10.1it/s]` where its end is not known.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 8192

_BAR = re.compile(
    rb"(?P<done>\d{1,18})/(?P<total>\d{1,18}) \[\d+:\d\d(?::\d\d)?<|(?<![\w.])(?P<count>\d{1,18})it \[\d+:\d\d"
)


class ProgressBar:
    """The last bar in a log, read when the log has grown."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._size_bytes = 0
        self._text = ""

    def text(self, optimizer_steps: int) -> str:
        """Return the bar of a rank without optimizer steps, such as `37/1200 (tqdm)`; empty where there is none."""
        if optimizer_steps:
            return ""
        try:
            with self._log.open("rb") as file:
                size_bytes = file.seek(0, os.SEEK_END)
                if size_bytes != self._size_bytes:
                    file.seek(max(0, size_bytes - TAIL_BYTES))
                    self._text, self._size_bytes = last_bar(file.read(TAIL_BYTES)) or self._text, size_bytes
        except OSError:
            pass  # the log may be gone; what was seen last is still true
        return self._text


def last_bar(tail: bytes) -> str:
    """Return the last bar in the end of a log; empty for none."""
    bars = list(_BAR.finditer(tail))
    if not bars:
        return ""
    last = bars[-1]
    count = last["count"]
    shown = f"{int(count)}" if count else f"{int(last['done'])}/{int(last['total'])}"
    return f"{shown} (tqdm)"
