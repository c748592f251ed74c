"""Folders in which ranks may write checkpoints among other files: the working folder, or one where hooks saw writes.

- A folder in which a rank has written is scanned as a whole, also behind a link.
- Of a folder that was there when the attempt began, files count that may be checkpoints by their names. One with more than
  `DATA_FILES_MIN` of them holds data, and is skipped.
- A folder that ranks have made counts as a whole, but for one of more than `MADE_FILES_MAX` files without a checkpoint's mark.
- A folder is listed again only when its own time has changed, so one with 200,000 files of data costs a call of the kernel.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.checkpoints import file_groups, tree

DATA_FILES_MIN = 100
MADE_FILES_MAX = 1_000

SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules", "site-packages", "wandb"))
"""Folders of code and of trackers, in which no script writes checkpoints; others with a `CACHEDIR.TAG` are caches."""

CACHE_TAG = "CACHEDIR.TAG"
"""The file by which a cache says that it is one, see https://bford.info/cachedir/."""


class FolderUse(enum.Enum):
    """What is known of a folder."""

    WRITTEN = enum.auto()  # a hook has seen a rank write in it
    PREEXISTING = enum.auto()  # it was there when the attempt began
    CREATED = enum.auto()  # by ranks, or programs of theirs


@dataclass(slots=True)
class _Listing:
    """What counts of a folder, as it was when its time was `mtime_ns`; `is_settled`: it has been listed twice since."""

    use: FolderUse
    mtime_ns: int
    is_settled: bool
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WrittenFolders:
    """All below `root`. `walks`: also where no rank was seen to write."""

    root: Path
    walks: bool = True
    _listings: dict[str, _Listing] = field(default_factory=dict)
    _preexisting: frozenset[str] = frozenset()
    _written: frozenset[str] = frozenset()
    _is_beginning: bool = False

    def begin(self) -> tree.Tree:
        """Return the files that exist when an attempt begins: none of them is the attempt's."""
        self._preexisting = self._written = frozenset()
        self._listings.clear()
        self._is_beginning = True
        found = self._scan()
        self._preexisting, self._is_beginning = frozenset(self._listings), False
        return found

    def scan(self, written: Collection[str]) -> tuple[tree.Tree, set[str]]:
        """Return the files that exist, and those of them that become visible only now, though they may be old. `written`: the
        files that ranks have written in this attempt, relative to the root."""
        new = frozenset(name.rpartition("/")[0] for name in written) - self._written
        self._written |= new
        listing = self._scan()
        appeared = {name for name in listing.files if name.rpartition("/")[0] in new}
        return listing, appeared.difference(written)

    def dump(self) -> codec.Json:
        """Return what another agent needs to continue, for JSON: which folders existed before, and in which ranks have written."""
        return {"brought": sorted(self._preexisting), "written": sorted(self._written)}

    def load(self, data: codec.Json) -> None:
        """Continue where another agent stopped. Raises CodecError, KeyError."""
        self._preexisting = frozenset(codec.unpack(tuple[str, ...], data["brought"]))
        self._written = frozenset(codec.unpack(tuple[str, ...], data["written"]))

    def _scan(self) -> tree.Tree:
        listing_tree = tree.Tree(self.root)
        todo = [("", 0)] if self.walks else [(folder, 0) for folder in sorted(self._written, reverse=True)]
        count, due_s = 0, time.monotonic() + tree.SCAN_S_MAX
        while todo:
            folder, depth = todo.pop()
            try:
                listing = self._list_folder(folder, listing_tree)
            except OSError as err:
                self._listings.pop(folder, None)
                if not isinstance(err, FileNotFoundError):
                    listing_tree.unreadable.append(f"{folder or self.root}: {err.strerror}")
                continue
            inner = [*listing.folders, *self._written_links(listing.links)] if self.walks else []
            count += len(listing.files) + len(inner)
            if count > tree.ENTRIES_MAX or time.monotonic() > due_s:
                listing_tree.cut = f"not all within {tree.SCAN_S_MAX:g} s and {tree.ENTRIES_MAX:,} entries"
                return listing_tree
            for name in (*listing.files, *listing.links):
                with contextlib.suppress(OSError):
                    tree.add_entry(listing_tree, f"{self.root}/{name}", name, is_top=False)
            if depth < tree.DEPTH_MAX:
                todo += [(name, depth + 1) for name in reversed(inner)]
        return listing_tree

    def _folder_use(self, folder: str) -> FolderUse:
        if folder in self._written:
            return FolderUse.WRITTEN
        return FolderUse.PREEXISTING if self._is_beginning or folder in self._preexisting else FolderUse.CREATED

    def _list_folder(self, folder: str, found: tree.Tree) -> _Listing:
        """Return what counts of a folder. Raises OSError. A second change in the same tick of the clock leaves the folder's time as
        it is, so only a second listing with the same time is relied on."""
        path, use = f"{self.root}/{folder}" if folder else str(self.root), self._folder_use(folder)
        mtime_ns = os.stat(path).st_mtime_ns  # noqa: PTH116 -- a Path for each of many folders takes twice as long
        previous = self._listings.get(folder)
        is_same = previous is not None and (previous.use, previous.mtime_ns) == (use, mtime_ns)
        if previous is not None and is_same and previous.is_settled:
            return previous
        new = self._listings[folder] = _Listing(use, mtime_ns, is_same)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith(".") and entry.name != file_groups.METADATA:
                    continue
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_symlink():
                    new.links.append(name)
                elif not entry.is_dir(follow_symlinks=False):
                    new.files.append(name)
                elif entry.name not in SKIPPED_FOLDERS:
                    new.folders.append(name)
        _filter_listing(new, found, folder)
        return new

    def _written_links(self, links: list[str]) -> Iterator[str]:
        """Yield the links behind which a rank has written."""
        for link in links:
            if any(folder == link or folder.startswith(f"{link}/") for folder in self._written):
                yield link


def _filter_listing(listing: _Listing, found: tree.Tree, folder: str) -> None:
    if any(name.rpartition("/")[2] == CACHE_TAG for name in listing.files):
        listing.files, listing.folders, listing.links = [], [], []
    elif listing.use is FolderUse.PREEXISTING:
        saved = [name for name in listing.files if file_groups.is_checkpoint_file(name)]
        listing.files = saved if len(saved) <= DATA_FILES_MIN else []
    elif listing.use is FolderUse.CREATED and _holds_too_much(listing.files):
        found.cut = f"{folder} has more than {MADE_FILES_MAX:,} files"
        listing.files = []
    for entries in (listing.files, listing.folders, listing.links):
        entries.sort()


def _holds_too_much(files: list[str]) -> bool:
    is_sharded = any(name.endswith((".distcp", file_groups.METADATA)) for name in files)
    return len(files) > MADE_FILES_MAX and not is_sharded
