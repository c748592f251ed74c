"""Failure of a rank: the uncaught exception that its hook noted, the stacks at a fatal signal, else the last traceback or
the last line of its log."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.agent.ranks import stack_dump
from orchestrator.agent.ranks.hook.layout import ERROR_FILE, STACKS_FILE
from orchestrator.core import codec
from orchestrator.core.jobdir import full_disk, ownership
from orchestrator.core.jobdir.layout import TORCHELASTIC_ERROR_FILE
from orchestrator.core.observations import LINE_CHARS_MAX, Failure
from orchestrator.core.status_types import Frame


def diagnose_exit(folder: Path, log: Path, pid: int, exit_code: int) -> Failure | None:
    """Return why a rank died: the hook's error file, else the last traceback in its log, else the log's last line.

    A script may have caught and logged exceptions, or its workers may have died of theirs: a rank that a signal killed
    did not die of those, and an uncaught exception always exits with code 1. A shell passes the signal of its script on in
    its code. Code 0: the exception whose traceback is the last thing that the rank has printed.
    """
    own_file = folder / ERROR_FILE.format(pid)
    signum = -exit_code if exit_code < 0 else exit_code - SHELL_SIGNAL_BASE
    if signum in FATAL_SIGNALS and not own_file.exists():
        fatal = find_fatal_signal(folder, log, pid, signum)
        if fatal is not None or exit_code < 0:
            return fatal
    if signum == signal.SIGINT and exit_code < 0:
        return find_interrupt(log)
    if exit_code == 0:
        before, caught, printed = _split_ending(log)
        return None if printed or "Exception ignored" in before.rstrip().rpartition("\n")[2] else caught
    if exit_code < 0 and not own_file.exists():
        return None
    error = _name_child_error(find_error(folder, pid), folder, pid, log) or (
        find_traceback(log) if exit_code == 1 else None
    )
    return error or (last_line(log) if exit_code > 0 else None)


def find_error(folder: Path, pid: int) -> Failure | None:
    """Return the uncaught exception of the rank's first process, else the newest of any process of the rank."""
    own = folder / ERROR_FILE.format(pid)
    others = sorted(folder.glob(ERROR_FILE.format("*")), key=_mtime_ns, reverse=True)
    for path in (own, *others):
        error = _read_error(path)
        if error is not None:
            return error
    return None


def read_raised(folder: Path, pid: int) -> Failure | None:
    """Return the uncaught exception that a process has noted and not yet died of."""
    error = _read_error(folder / ERROR_FILE.format(pid))
    return summarize(error) if error is not None else None


def summarize(error: Failure) -> Failure:
    """Return an exception without its traceback, with the name of its file alone."""
    where = error.where.brief if error.where is not None else None
    return Failure(error.type, error.message[:LINE_CHARS_MAX], "", where)


def _read_error(path: Path) -> Failure | None:
    try:
        return parse_error(ownership.read_regular(path))
    except OSError:
        return None


def parse_error(text: bytes) -> Failure | None:
    """Return an exception as the hook has written it, or None: what another process raised, if its text says that."""
    try:
        error = codec.loads(Failure, text)
    except codec.CodecError:
        return None  # not of this hook: a script may write anything into the folder
    is_remote = _REMOTE.search(f"{error.type}\n{error.traceback}")
    origin_text = error.traceback.partition("\nThe above exception was")[0] if is_remote else error.traceback
    has_origin = is_remote or _NESTED.search(error.message)
    return _merge_inner(
        error, parse_traceback(_NESTED.sub(_HEAD, _ESCAPE.sub("", origin_text))) if has_origin else None
    )


def _merge_inner(error: Failure, inner: Failure | None) -> Failure:
    """Return an exception under the name and the place of the one that another process raised, `inner`; its own text follows.
    Where /dev/shm has no room its size is named."""
    if inner is not None:
        message = f"{inner.message.strip()}\n{error.message}"
        error = replace(error, type=inner.type, message=message, where=inner.where or error.where)
    size = f"/dev/shm has {shutil.disk_usage('/dev/shm').total >> 20:,} MiB" if _SHM.search(error.message) else ""
    return replace(error, message=_SHM.sub(rf"\g<0> ({size})", _ESCAPE.sub("", error.message), count=1))


def _name_child_error(error: Failure | None, folder: Path, pid: int, log: Path) -> Failure | None:
    """Return an exception that only says that a child has failed under the name of the child's: the last one that a hook noted
    in another process, else the one printed before it."""
    if error is None or not _CHILD.search(f"{error.type}: {error.message}"):
        return error
    paths = sorted(set(folder.glob(ERROR_FILE.format("*"))) - {folder / ERROR_FILE.format(pid)}, key=_mtime_ns)
    noted = [found for path in paths if (found := _read_error(path))]
    log_before = _RANK_PREFIX.sub("", _read_tail(log)).partition(error.traceback[:LINE_CHARS_MAX])[0]
    if (child := noted[-1] if noted else parse_traceback(log_before)) is None:
        return error
    traceback = f"{child.traceback}\n\n{error.traceback}"[-TRACEBACK_CHARS_MAX:]
    return replace(_merge_inner(error, child), traceback=traceback)


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def forget_errors(node_folder: Path) -> None:
    """Delete the error files of ranks: they hold secrets in full, and were reported with the secrets masked."""
    for name in (ERROR_FILE.format("*"), TORCHELASTIC_ERROR_FILE):
        for path in node_folder.glob(f"attempt-*/rank-*/{name}"):
            try:
                path.unlink(missing_ok=True)
            except OSError as err:  # some disks need room to delete: the next call does it
                if not full_disk.is_full(err):
                    raise


_HEAD = "Traceback (most recent call last):"
_NESTED = re.compile(r"Traceback \(most recent call last\):|^.*ray::.*$", re.MULTILINE)
"""Marks, in the text of an exception, of one in another process: DataLoader's, mp.spawn's, Ray's."""

_REMOTE = re.compile(r"^\S*(?:RemoteTraceback: |InstantiationException$)", re.MULTILINE)
"""Marks in the cause of an exception: multiprocessing's, concurrent.futures', joblib's; and hydra's, which only names its cause."""

_CHILD = re.compile(
    r"(?:ProcessExitedException|ChildFailedError|CalledProcessError): |DataLoader worker \(pid.*exited unexpectedly"
)
_SHM = re.compile(r"</torch_\d+\w*>: No space[^\n]*|out of shared memory|shared memory \(shm\)")
"""torch's messages where a batch has no room in /dev/shm."""

TAIL_BYTES = 64 << 10
TRACEBACK_CHARS_MAX = 20_000
MESSAGE_CHARS_MAX = 1_000

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_WATCHDOG = re.compile(
    r"Watchdog caught|op\.preamble\.length|heartbeat|Timed out waiting|CUDA error|NCCL error|ncclRemoteError"
    r"|what\(\):|Assertion `|(malloc|free|realloc)\(\)|double free",
    re.IGNORECASE,
)
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_LIBRARY_WARNING = re.compile(r"\[W\d{3,}")
"""The start of a warning of torch's C++ part, such as NCCL's at an exit without destroy_process_group."""

FATAL_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
SHELL_SIGNAL_BASE = 128
"""A shell's exit code is this and the number of the signal that ended its script."""

_FATAL = "Fatal Python error: "
_LAST = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_FRAME = re.compile(r'^\s+File "(.+?)", line (\d+)(?:, in (.+))?$', re.MULTILINE)


def find_traceback(log: Path) -> Failure | None:
    """Return the last uncaught exception printed in the last `TAIL_BYTES` of `log`, or None."""
    return parse_traceback(_read_tail(log))


def find_watchdog_line(log: Path) -> Failure | None:
    """Return the line that the process wrote to `log` before it aborted, as a failure without a type, or None."""
    lines = [
        line.strip().removeprefix("what():").strip() for line in _read_tail(log).splitlines() if _WATCHDOG.search(line)
    ]
    return Failure("", lines[0][:MESSAGE_CHARS_MAX], "", None) if lines else None


def find_fatal_signal(folder: Path, log: Path, pid: int, signum: int) -> Failure | None:
    """Return where a fatal signal found the rank, as a failure without a type, or None.

    The stacks are in the file that the hook has given to `faulthandler`; in the log where the user has enabled it.
    """
    watchdog = find_watchdog_line(log) if signum == signal.SIGABRT else None
    others = sorted(folder.glob(STACKS_FILE.format("*")), key=_mtime_ns, reverse=True)
    for path in (folder / STACKS_FILE.format(pid), *others, log):
        text = _read_tail(path)
        if _FATAL in text:
            traceback, where = _format_dump(text[text.rindex(_FATAL) :])
            return Failure("", watchdog.message if watchdog else "", traceback, where)
    return watchdog


def _format_dump(dump: str) -> tuple[str, Frame | None]:
    """Return the stacks of a fatal signal as Python prints tracebacks, the thread that it hit last, and the user's place
    there. A thread of C code has no stack: then the main thread, the last one of a dump, is used."""
    threads = [thread for thread in stack_dump.parse_dump(dump) if thread.frames]
    threads.sort(key=lambda thread: thread.current)
    text = stack_dump.format_traceback(threads, stack_dump.read_source_line)
    return text[-TRACEBACK_CHARS_MAX:], _users_place(threads[-1].frames) if threads else None


def find_interrupt(log: Path) -> Failure | None:
    """Return where Ctrl-C found the rank, by the traceback in its log, as a failure without a type, or None."""
    interrupt = find_traceback(log)
    if interrupt is None or interrupt.type != "KeyboardInterrupt":
        return None
    return Failure("", "", interrupt.traceback, interrupt.where)


def last_line(log: Path) -> Failure | None:
    """Return the last line in `log` with text, as a failure without a type, or None.

    Only lines after the last traceback count: its exception was caught, and a line above it is old.
    """
    _, _, messages = _split_ending(log)
    return Failure("", messages[-1][:MESSAGE_CHARS_MAX], "", None) if messages else None


def _split_ending(log: Path) -> tuple[str, Failure | None, list[str]]:
    """Return the end of a log before its last traceback, that exception, and the lines with text after it."""
    text = _RANK_PREFIX.sub("", _ESCAPE.sub("", _read_tail(log)))
    caught = parse_traceback(text)
    before, _, rest = text.rpartition(caught.traceback) if caught is not None else ("", "", text)
    lines = ("".join(filter(str.isprintable, line)).strip() for line in rest.splitlines())
    return before, caught, [line for line in lines if line and not _LIBRARY_WARNING.match(line)]


def _read_tail(log: Path) -> str:
    """Return the last complete lines, unless one is longer than the tail: the mask would not find half a secret."""
    try:
        with ownership.open_for_reading(log) as file:
            begin = max(0, log.stat().st_size - TAIL_BYTES)
            file.seek(begin)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[2] or text if begin else text


def parse_traceback(text: str) -> Failure | None:
    """Return the last traceback in `text` as a Failure, or None when there is none.

    torch.distributed's own hook puts `[rank0]: ` before each line of it.
    """
    text = _RANK_PREFIX.sub("", text)
    start = max(text.rfind(_HEAD), _syntax_error_start(text))
    if start < 0:
        return None
    lines = text[start:].splitlines()
    for number, line in enumerate(lines[1:], start=1):
        last = _LAST.match(line)
        if last and not line.startswith(" "):
            body = "\n".join(lines[: number + 1])
            found = _FRAME.findall(body)
            where = _users_place([Frame(file, int(row), function) for file, row, function in found[::-1]])
            message = last.group(2) or next((one.strip() for one in lines[number + 1 :] if one.startswith("  ")), "")
            return Failure(last.group(1), message, body[-TRACEBACK_CHARS_MAX:], where)
    return None


def _users_place(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame, the first one, of the user's own code, else the innermost of all."""
    return stack_dump.find_users_frame(frames) or next(iter(frames), None)


def _syntax_error_start(text: str) -> int:
    """Return where a syntax error of the script itself begins, its `File` line: it is printed without `Traceback`."""
    starts = [frame.start() for frame in re.finditer(r'^  File ".+", line \d+$', text, re.MULTILINE)]
    return starts[-1] if starts and "Traceback" not in text[starts[-1] :] else -1
