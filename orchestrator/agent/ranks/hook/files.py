"""Files that a process of a rank opens: checkpoints that it reads before its first step, and what it writes that may be one.

Python's audit events report each `open` and rename; torch and safetensors open files in C++ and Rust, so functions of theirs
are wrapped to report the names first. A record is a line in the rank's folder. From these the agent knows where and at which
step a script writes checkpoints, and which checkpoint it has resumed from.
"""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH100, PTH118

import _thread
import os
import sys

from .layout import FILES_FILE, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .errors import HookNotes

LINES_MAX = 20_000
LINES_OF_FILE_MAX = 2_000
READS_MAX = 500
"""How many records a process writes, how many of them about one file, and about reading; what comes later is not known."""

ENDINGS = frozenset(
    [
        "pt",
        "pth",
        "ckpt",
        "bin",
        "safetensors",
        "pkl",
        "npz",
        "tar",
        "distcp",
        "model",
        "zip",
        "h5",
        "hdf5",
        "npy",
        "msgpack",
        "eqx",
        "keras",
        "joblib",
        "state",
        "params",
        "weights",
        "metadata",
        "pickle",
    ]
)
NAME_PARTS = ("ckpt", "checkpoint", "snapshot", "epoch", "step", "iter", "state", "save")
"""Endings of files that may belong to a checkpoint, and what is in the names of others that have no ending."""

WRAPPED_FUNCTIONS = (
    ("torch.serialization", "_check_save_filelike", os.O_WRONLY),
    ("safetensors.torch", "serialize_file", os.O_WRONLY),
    ("safetensors.torch", "safe_open", os.O_RDONLY),
)
"""Functions of libraries, which look them up by name when they call them, and how each opens a file: the first path among its
arguments. torch calls the first one before it saves."""

SKIPPED_FOLDERS = ("/dev/", "/proc/", "/sys/", sys.prefix + os.sep, sys.base_prefix + os.sep)
"""Folders in which no script writes checkpoints, unless orch's folder for them is there, in memory; the rank's own folder, which is
orch's, is another."""


class FileWatch:
    """The files of one process. What its forked children read is not noted: they may be workers for data."""

    def __init__(self, folder: str, notes: "HookNotes", step: "Callable[[], int]", *, is_child: bool = False) -> None:
        """`step`: returns how many steps of the script this process has made; `is_child`: as in `Steps`."""
        self._file, self._own = os.path.join(folder, FILES_FILE), folder + os.sep
        self._given = os.path.join(os.environ.get("ORCH_CHECKPOINT_DIR") or os.devnull, "")
        self._notes = notes
        self._step = step
        self._reader_pid = 0 if is_child else os.getpid()
        self._read: set[str] = set()
        self._written: dict[str, list[int]] = {}
        self._lines = 0
        self._busy = _thread._local()
        self._awaited = [one for one in WRAPPED_FUNCTIONS if not self._wrap(*one)]
        if not is_child:
            self._add(f"pid {os.getpid()} 0 ''\n")
        sys.addaudithook(self._on_audit_event)

    def _on_audit_event(self, event: str, args: "tuple[Any, ...]") -> None:
        # All audit events of the process come here, and an exception would end what has raised the event.
        if event == "open":
            self.note_opening(args[0], args[2])
        elif event == "os.rename":
            self.note_opening(args[1], os.O_WRONLY)
        elif event == "import" and self._awaited:
            self._awaited = [one for one in self._awaited if not self._wrap(*one)]

    def note_opening(self, path: "Any", flags: "Any") -> None:
        """Note a file that is about to be opened with these flags, or renamed to this name. Raises nothing."""
        if self._lines >= LINES_MAX or getattr(self._busy, "here", False):
            return
        self._busy.here = True  # what is done here opens a file itself
        try:
            if isinstance(path, (str, bytes, os.PathLike)):
                self._note(os.fsdecode(path), flags & os.O_ACCMODE != os.O_RDONLY)
        except Exception as err:
            self._lines = LINES_MAX
            self._notes.add("files", err)
        finally:
            self._busy.here = False

    def _note(self, name: str, writes: bool) -> None:
        if not may_be_checkpoint(name):
            return
        step = self._step()
        if not writes and (
            step or self._reader_pid != os.getpid() or name in self._read or len(self._read) >= READS_MAX
        ):
            return
        whole = os.path.abspath(name)
        is_skipped = whole.startswith((*SKIPPED_FOLDERS, self._own)) and not whole.startswith(self._given)
        if is_skipped or "/site-packages/" in whole:
            return
        if not writes:
            self._read.add(name)
            self._add(f"read {step} 0 {whole!a}\n")
            return
        if self._reader_pid != os.getpid():
            step = -1  # the steps are those of another process
        count, last = self._written.get(whole, (0, -2))
        if last != step and count < LINES_OF_FILE_MAX:
            self._written[whole] = [count + 1, step]
            is_new = not count and not os.path.lexists(whole)
            self._add(f"written {step} {int(is_new)} {whole!a}\n")

    def _add(self, line: str) -> None:
        self._lines += 1
        fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def _wrap(self, module: str, name: str, flags: int) -> bool:
        """Wrap a function of a library that is loaded; return whether it is."""
        names = getattr(sys.modules.get(module), "__dict__", {})
        function = names.get(name)
        if function is None:
            return False

        def wrapper(*args: "Any", **options: "Any") -> "Any":
            paths = [one for one in (*args, *options.values()) if isinstance(one, (str, os.PathLike))]
            if paths:
                self.note_opening(paths[0], flags)
            return function(*args, **options)

        names[name] = wrapper
        return True


def may_be_checkpoint(name: str) -> bool:
    """Return whether a file may belong to a checkpoint, by its ending, or by a word in its name."""
    last = name.rpartition("/")[2].lower()
    _, dot, ending = last.rpartition(".")
    if ending in ENDINGS:
        return True
    return (not dot or not ending.isalpha()) and any(word in last for word in NAME_PARTS)
