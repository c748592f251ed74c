"""Folders in which ranks write checkpoints: `checkpoint.path`, the ranks' working folder, and others in which hooks have seen writes.

The key of a checkpoint begins with `START` where ranks start, and with the folder's path elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from orchestrator.agent.outputs.checkpoint_watch import CheckpointWatch
from orchestrator.agent.outputs.written_folders import WrittenFolders
from orchestrator.core import codec
from orchestrator.core.checkpoints import file_groups, tree
from orchestrator.core.checkpoints.checkpoint import START_PREFIX
from orchestrator.core.jobdir.layout import JobDir

ELSEWHERE_MAX = 20
"""How many folders outside of the job's are scanned."""

CHECKPOINT_DEPTH_MAX = 3
"""How many folders a file of a checkpoint may lie below the one that holds the checkpoints."""

WatchedFiles: TypeAlias = tuple[CheckpointWatch, dict[str, int]]


class CheckpointFolders:
    """The watches of these folders; the first is that of `checkpoint.path`."""

    def __init__(self, job: JobDir, checkpoint_glob: str, *, ships: bool = False) -> None:
        """`ships`: checkpoints in the job's folder are copied to the submitting machine."""
        self._root = os.path.realpath(job.root) if ships else "/"
        root, glob = tree.split_glob(*job.checkpoint_location(checkpoint_glob))
        leaves = glob if root == job.code else ""
        start = CheckpointWatch(job.code, "*", START_PREFIX, WrittenFolders(job.code), leaves)
        self.watches = [CheckpointWatch(root, glob), start]
        # Where checkpoints are without memory
        self._disk_names: tuple[str, ...] = ()

    def use_memory(self, folder: Path) -> None:
        """Watch a folder in memory, from which links lead to the disk, in place of that of `checkpoint.path`."""
        first = self.watches[0]
        if first.root != folder:
            self._disk_names = self._disk_names or _root_names(first)
            self.watches[0] = CheckpointWatch(folder, first.glob, disk_folder=Path(self._disk_names[-1]))

    def begin(self, attempt: int) -> None:
        """Begin an attempt: files that exist now belong to earlier ones."""
        del self.watches[2:]
        for watch in self.watches:
            watch.begin(attempt)

    def assign_files(self, paths: Mapping[str, int], attempt: int, *, finds_more: bool) -> list[WatchedFiles]:
        """Return each watch with the files that ranks have written in its folder, and at which step. `finds_more`: also those of
        folders that are not watched yet."""
        roots = [(f"{root}/", at) for at, watch in enumerate(self.watches) for root in _root_names(watch)]
        files_by_watch: list[dict[str, int]] = [{} for _ in self.watches]
        for path, step in paths.items():
            inside = next(((root, at) for root, at in roots if path.startswith(root)), None)
            if inside is None and finds_more and len(self.watches) < 2 + ELSEWHERE_MAX:
                root = find_checkpoints_folder(path)
                new = CheckpointWatch(Path(root), "*", f"{root.rstrip('/')}/", WrittenFolders(Path(root), walks=False))
                new.attempt = attempt
                inside = f"{root.rstrip('/')}/", len(self.watches)
                self.watches.append(new)
                roots.append(inside)
                files_by_watch.append({})
            if inside is not None:
                files_by_watch[inside[1]][path.removeprefix(inside[0])] = step
        return list(zip(self.watches, files_by_watch, strict=True))

    def resolve_link(self, path: str) -> str:
        """Return a path below where ranks start that leads out of the job's folder by a link as what the link leads to, where the
        job's files are copied: this one is not."""
        folder, _, name = path.rpartition("/")
        real = os.path.realpath(folder)
        is_below = path.startswith(tuple(f"{root}/" for root in _root_names(self.watches[1])))
        return f"{real}/{name}" if is_below and not Path(real).is_relative_to(self._root) else path

    def checkpoint_name(self, path: str) -> str:
        """Return a file as the supervisor knows it: relative to the checkpoints' folder, or with `START` to where ranks start, or
        absolute."""
        for watch in self.watches[:2]:
            for root in (*_root_names(watch), *(() if watch.prefix else self._disk_names)):
                name = path.removeprefix(f"{root}/")
                if name != path and (watch.prefix or tree.matches_glob(name, watch.glob)):
                    return f"{watch.prefix}{name}"
        return path

    def dump(self) -> bytes:
        """Return what another agent needs to continue if this one dies."""
        return json.dumps({"watches": [watch.dump() for watch in self.watches]}).encode()

    def load(self, raw: bytes) -> None:
        """Continue where another agent stopped. Raises CodecError, KeyError, ValueError."""
        data = codec.loads_plain(raw)["watches"]
        del self.watches[2:]
        for at, watch_data in enumerate(data):
            if at >= len(self.watches):
                root = Path(watch_data["root"])
                self.watches.append(CheckpointWatch(root, "*", f"{root}/", WrittenFolders(root, walks=False)))
            self.watches[at].load(watch_data)


def _root_names(watch: CheckpointWatch) -> tuple[str, ...]:
    """Return the names of a watch's folder: as the job has it, and as the kernel shows it to a rank in it."""
    return tuple(dict.fromkeys((str(watch.root), os.path.realpath(watch.root))))


def find_checkpoints_folder(path: str) -> str:
    """Return the folder that holds the checkpoint of which a file is: the one that the file is in, or the one around a folder
    whose name counts, such as `checkpoint-500`."""
    folders = PurePosixPath(path).parents
    inner = [at for at, folder in enumerate(folders[:CHECKPOINT_DEPTH_MAX]) if file_groups.is_counted(folder.name)]
    return str(folders[max(inner) + 1] if inner else folders[0])
