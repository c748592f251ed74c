"""Series of checkpoints: what belongs together by its name, which of a folder's entries count, and which are old.

A series is of one kind (folders, or files of one ending), in one folder, and of one name but for its numbers:
`checkpoint-500` and `checkpoint-1000`. With the default `checkpoint.path: "*"` one series counts:
- Its number follows a word that counts (step, epoch, checkpoint …), or is the whole name. Beside it counts what is of
  its kind and called `last`, or plainly `ckpt`.
- Of several it is the one that was written last; of those that end at the same number (`step-10.pt` and
  `ema-step-10.pt`) the one of the shortest name.
- Where there is none, all that looks like a checkpoint counts: names that are overwritten.

Only members of a series grow old. Old is what has a smaller number and an earlier time than all that are kept, and
another step than the last of them: of two files that one save has written, neither is old.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.agent.outputs.checkpoint_formats import METADATA, SUFFIXES, Shape

FILE_KINDS = frozenset({".pt", ".pth", ".ckpt", ".tar", ".bin", ".safetensors"})
"""Endings of files of which a series is taken for checkpoints, and not for statistics or pictures."""

_SEPARATOR = r"s?[-_=. ]?"
_STEPS = re.compile(rf"(?:step|iter|iteration|update|batch){_SEPARATOR}(\d+)", re.IGNORECASE)
_COUNTS = re.compile(rf"(?:epoch|checkpoint|ckpt|chkpt){_SEPARATOR}(\d+)", re.IGNORECASE)
_ONLY_A_NUMBER = re.compile(r"\d+(\.[a-z.]+)?", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?P<place>(?:rank|shard|part|worker|node|gpu|device|of)[-_=]?\d+)|\d+(?:\.\d+)?", re.IGNORECASE
)
"""A number in a name; that of a rank or another part of one save does not count up."""

_AGAIN = re.compile(r"-v\d+(?=\.\w+$|$)")
"""What Lightning appends where there is a file of the name already."""

_LAST = re.compile(
    r"(?:^|[^a-z])(?:last|latest)(?:[^a-z]|$)|^(?:ckpt|checkpoint|snapshot|resume)\.", re.IGNORECASE
)

Order = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Member:
    """An entry with its place in a series: `order` grows with the numbers in its name, and is empty without one."""

    path: Path
    mtime_ns: int
    kind: str
    series: str
    order: Order
    counts: bool

    @property
    def is_numbered(self) -> bool:
        """Tell whether it is of a series that is taken for checkpoints."""
        return self.counts and (self.kind == "/" or self.kind in FILE_KINDS)


def member(path: Path, mtime_ns: int, is_folder: bool) -> Member:
    """Return an entry with its place in its series."""
    kind = "/" if is_folder else path.suffix
    name = _AGAIN.sub("", path.name)
    series = _NUMBER.sub(lambda found: found[0] if found["place"] else "#", name) + " folder" * is_folder
    numbers = tuple(float(found[0]) for found in _NUMBER.finditer(name) if not found["place"])
    first = tuple(map(float, _STEPS.findall(name) or _COUNTS.findall(name))) or numbers
    counts = _says_a_count(name) or _ONLY_A_NUMBER.fullmatch(name) is not None
    return Member(
        path, mtime_ns, kind, str(path.parent / series), (first, numbers) if numbers else (), counts
    )


def is_plausible(path: Path, shape: Shape) -> bool:
    """Tell whether an entry looks like a checkpoint: some file of it has an ending of the trade.

    A folder that holds checkpoints with a count in their names is none itself, unless DeepSpeed's or Megatron's
    `latest…` beside them tells which to take.
    """
    names = [PurePosixPath(name) for name, _, _ in shape.files]
    if names == [PurePosixPath()]:
        return path.suffix in SUFFIXES
    has_latest = any(str(name).startswith("latest") for name in names)
    return any(map(_is_of_the_trade, names)) and (has_latest or not holds_checkpoints(path, shape))


def holds_checkpoints(path: Path, shape: Shape) -> bool:
    """Tell whether a folder is not a checkpoint, but has some below it with a count in their names."""
    names = [name for name, _, _ in shape.files if _is_of_the_trade(PurePosixPath(name))]
    return not member(path, 0, is_folder=True).counts and any(map(_says_a_count, names))


def counted(shapes: Mapping[Path, Shape]) -> set[Path]:
    """Return which of a folder's plausible entries count as checkpoints."""
    members = members_of(shapes)
    series: dict[str, list[Member]] = {}
    for one in members:
        if one.is_numbered:
            series.setdefault(one.series, []).append(one)
    if not series:
        return set(shapes)
    last = max((one for group in series.values() for one in group), key=lambda one: one.mtime_ns)
    ends = {name: max(one.order for one in group) for name, group in series.items()}
    alike = [name for name in series if ends[name][0] == ends[last.series][0]]
    chosen = series[min(alike, key=lambda name: (len(name), name))]
    beside = [one for one in members if one.kind == chosen[0].kind and not one.order and _is_last(one)]
    return {one.path for one in (*chosen, *beside)}


def members_of(shapes: Mapping[Path, Shape]) -> list[Member]:
    """Return entries with their places in their series."""
    return [member(path, shape.mtime_ns, shape.files[0][0] != ".") for path, shape in shapes.items()]


def old(members: Iterable[Member], keep: int, has_step_between: Callable[[int, int], bool]) -> list[Member]:
    """Return what may go of checkpoints that are all known to be whole, so that of each series the newest `keep` stay.

    `has_step_between` tells of two times whether a step was made between them.
    """
    series: dict[str, list[Member]] = {}
    for one in members:
        if one.order:
            series.setdefault(one.series, []).append(one)
    return [one for group in series.values() for one in _old(group, keep, has_step_between)]


def _old(group: list[Member], keep: int, has_step_between: Callable[[int, int], bool]) -> list[Member]:
    by_time = sorted(group, key=lambda one: one.mtime_ns)
    kept = [*sorted(group, key=lambda one: one.order)[-keep:], *by_time[-keep:]]
    order, mtime_ns = min(one.order for one in kept), min(one.mtime_ns for one in kept)
    older = [one for one in by_time if one.order < order and one.mtime_ns < mtime_ns]
    return [one for one in older if has_step_between(one.mtime_ns, by_time[-1].mtime_ns)]


def _is_of_the_trade(name: PurePosixPath) -> bool:
    return name.suffix in SUFFIXES or name.name == METADATA


def _says_a_count(name: str) -> bool:
    return _STEPS.search(name) is not None or _COUNTS.search(name) is not None


def _is_last(one: Member) -> bool:
    return _LAST.search(f"{one.path.name}.") is not None
