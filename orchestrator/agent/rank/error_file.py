"""Error file of a rank: the uncaught exception that its hook wrote there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.rank.hook import ERROR_FILE
from orchestrator.core import codec
from orchestrator.core.jobdir import full_disk
from orchestrator.core.jobdir.layout import TORCHELASTIC_ERROR_FILE


@dataclass(frozen=True, slots=True)
class RankError:
    """The uncaught exception that ended a rank's process; its place is in the user's code if possible."""

    type: str
    message: str
    traceback: str
    file: str
    line: int
    function: str
    loading: str = ""


def error_of(folder: Path, pid: int) -> RankError | None:
    """Return the uncaught exception of the rank's first process, else the newest of any process of the rank."""
    own = folder / ERROR_FILE.format(pid)
    others = sorted(folder.glob(ERROR_FILE.format("*")), key=_mtime_ns, reverse=True)
    for path in (own, *others):
        error = _read_error(path)
        if error is not None:
            return error
    return None


def _read_error(path: Path) -> RankError | None:
    try:
        data = codec.loads_plain(path.read_bytes())
        return RankError(
            type=str(data["type"]),
            message=str(data["message"]),
            traceback=str(data["traceback"]),
            file=str(data["file"]),
            line=int(data["line"]),
            function=str(data["function"]),
            loading=str(data.get("loading", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing, or not of this hook: a script may write anything into the folder


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
