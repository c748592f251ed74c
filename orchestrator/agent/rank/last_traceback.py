"""Last traceback or last line in a rank's log: why it died, where the hook has not noted it."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.core.observations import Failure

TAIL_BYTES = 64 << 10
TRACEBACK_CHARS_MAX = 20_000
MESSAGE_CHARS_MAX = 1_000

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_WATCHDOG = re.compile(
    r"Watchdog caught|op\.preamble\.length|heartbeat|Timed out waiting|CUDA error|NCCL error|ncclRemoteError",
    re.IGNORECASE,
)
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_LIBRARY_WARNING = re.compile(r"\[W\d{3,}")
"""The start of a warning of torch's C++ part, such as NCCL's at an exit without destroy_process_group."""

_LAST = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_FRAME = re.compile(r'^\s+File "(.+?)", line (\d+)(?:, in (.+))?$', re.MULTILINE)


def find(log: Path) -> Failure | None:
    """Return the last uncaught exception printed in the last `TAIL_BYTES` of `log`, or None."""
    return parse(_tail(log))


def of_a_watchdog(log: Path) -> Failure | None:
    """Return the line that NCCL or gloo wrote to `log` before it aborted the process, as a failure without a type, or
    None."""
    lines = [line for line in _tail(log).splitlines() if _WATCHDOG.search(line)]
    return Failure("", lines[0][:MESSAGE_CHARS_MAX], "", "") if lines else None


def last_line(log: Path) -> Failure | None:
    """Return the last line in `log` with text, as a failure without a type, or None.

    Only lines after the last traceback count: its exception was caught, and a line above it is old.
    """
    text = _RANK_PREFIX.sub("", _ESCAPE.sub("", _tail(log)))
    caught = parse(text)
    rest = text.rpartition(caught.traceback)[2] if caught is not None else text
    lines = ("".join(filter(str.isprintable, line)).strip() for line in rest.splitlines())
    messages = [line for line in lines if line and not _LIBRARY_WARNING.match(line)]
    return Failure("", messages[-1][:MESSAGE_CHARS_MAX], "", "") if messages else None


def _tail(log: Path) -> str:
    """Return the last lines, whole unless one is longer than all of it: the mask would not find half a secret."""
    try:
        with log.open("rb") as file:
            begin = max(0, log.stat().st_size - TAIL_BYTES)
            file.seek(begin)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[2] or text if begin else text


def parse(text: str) -> Failure | None:
    """Return the last traceback in `text` as a Failure, or None when there is none.

    torch.distributed's own hook puts `[rank0]: ` before each line of it.
    """
    text = _RANK_PREFIX.sub("", text)
    start = max(text.rfind("Traceback (most recent call last):"), _syntax_error_start(text))
    if start < 0:
        return None
    lines = text[start:].splitlines()
    for number, line in enumerate(lines[1:], start=1):
        last = _LAST.match(line)
        if last and not line.startswith(" "):
            body = "\n".join(lines[: number + 1])
            frames = _FRAME.findall(body)
            file, row, function = frames[-1] if frames else ("", "", "")
            where = f"{file}:{row} {function}".strip() if file else ""
            return Failure(last.group(1), last.group(2) or "", body[-TRACEBACK_CHARS_MAX:], where)
    return None


def _syntax_error_start(text: str) -> int:
    """Return where a syntax error of the script itself begins, its `File` line: it is printed without `Traceback`."""
    starts = [frame.start() for frame in re.finditer(r'^  File ".+", line \d+$', text, re.MULTILINE)]
    return starts[-1] if starts and "Traceback" not in text[starts[-1] :] else -1
