"""Series of checkpoints: which entries belong together by name, which of them count, and which are old.

A series has one kind (folders, or files of one suffix), one folder, and one name apart from its numbers:
`checkpoint-500` and `checkpoint-1000`. With the default `checkpoint.path: "*"` one series counts:
- Its number follows a counting word (step, epoch, checkpoint …), or is the whole name. Entries of the same kind that are
  called `last`, or plainly `ckpt`, count too.
- Of several series the one written last counts; of those that end at the same number (`step-10.pt` and
  `ema-step-10.pt`) the one with the shortest name.
- Without a series every entry that looks like a checkpoint counts: such names are overwritten.

Only members of a series grow old. An old member has a smaller number and an earlier time than all that are kept, and a
step other than that of the last of them: of two files that one save wrote, neither is old.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.agent.outputs.checkpoint_formats import METADATA, SUFFIXES, Shape

FILE_KINDS = frozenset({".pt", ".pth", ".ckpt", ".tar", ".bin", ".safetensors"})
"""Suffixes whose series are taken for checkpoints, and not for statistics or pictures."""

_SEPARATOR = r"s?[-_=. ]?"
_STEPS = re.compile(rf"(?:step|iter|iteration|update|batch){_SEPARATOR}(\d+)", re.IGNORECASE)
_COUNTS = re.compile(rf"(?:epoch|checkpoint|ckpt|chkpt){_SEPARATOR}(\d+)", re.IGNORECASE)
_ONLY_A_NUMBER = re.compile(r"\d+(\.[a-z.]+)?", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?P<place>(?:rank|shard|part|worker|node|gpu|device|of)[-_=]?\d+)|\d+(?:\.\d+)?", re.IGNORECASE
)
"""A number in a name; `place` is the number of a rank or another part of one save, which does not count up."""

_AGAIN = re.compile(r"-v\d+(?=\.\w+$|$)")
"""What Lightning appends when a file of that name exists already."""

_LAST = re.compile(
    r"(?:^|[^a-z])(?:last|latest)(?:[^a-z]|$)|^(?:ckpt|checkpoint|snapshot|resume)\.", re.IGNORECASE
)

Order = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Member:
    """An entry with its place in a series."""

    path: Path
    mtime_ns: int
    # "/" for a folder, else the suffix
    kind: str
    # path with "#" for each number
    series: str
    # grows with the numbers in the name; empty without one
    order: Order
    # whether its number counts checkpoints
    counts: bool

    @property
    def is_numbered(self) -> bool:
        """Tell whether its series is taken for checkpoints."""
        return self.counts and (self.kind == "/" or self.kind in FILE_KINDS)


def member(path: Path, mtime_ns: int, is_folder: bool) -> Member:
    """Return an entry with its place in its series."""
    kind = "/" if is_folder else path.suffix
    name = _AGAIN.sub("", path.name)
    series = _NUMBER.sub(lambda match: match[0] if match["place"] else "#", name) + " folder" * is_folder
    numbers = tuple(float(match[0]) for match in _NUMBER.finditer(name) if not match["place"])
    first = tuple(map(float, _STEPS.findall(name) or _COUNTS.findall(name))) or numbers
    counts = _has_count(name) or _ONLY_A_NUMBER.fullmatch(name) is not None
    return Member(
        path, mtime_ns, kind, str(path.parent / series), (first, numbers) if numbers else (), counts
    )


def is_plausible(path: Path, shape: Shape) -> bool:
    """Tell whether an entry looks like a checkpoint: one of its files has a suffix that checkpoints have.

    A folder of checkpoints with a count in their names is not itself a checkpoint, unless it has the file `latest…` of
    DeepSpeed or Megatron that names the one to load.
    """
    names = [PurePosixPath(name) for name, _, _ in shape.files]
    if names == [PurePosixPath()]:
        return path.suffix in SUFFIXES
    has_latest = any(str(name).startswith("latest") for name in names)
    return any(map(_is_checkpoint_file, names)) and (has_latest or not holds_checkpoints(path, shape))


def holds_checkpoints(path: Path, shape: Shape) -> bool:
    """Tell whether a folder is not a checkpoint itself, but holds checkpoints with a count in their names."""
    names = [name for name, _, _ in shape.files if _is_checkpoint_file(PurePosixPath(name))]
    return not member(path, 0, is_folder=True).counts and any(map(_has_count, names))


def counted(shapes: Mapping[Path, Shape]) -> set[Path]:
    """Return which of a folder's plausible entries count as checkpoints."""
    members = members_of(shapes)
    series: dict[str, list[Member]] = {}
    for entry in members:
        if entry.is_numbered:
            series.setdefault(entry.series, []).append(entry)
    if not series:
        return set(shapes)
    last = max((entry for group in series.values() for entry in group), key=lambda entry: entry.mtime_ns)
    ends = {name: max(entry.order for entry in group) for name, group in series.items()}
    alike = [name for name in series if ends[name][0] == ends[last.series][0]]
    chosen = series[min(alike, key=lambda name: (len(name), name))]
    kind = chosen[0].kind
    unnumbered = [entry for entry in members if entry.kind == kind and not entry.order and _is_last(entry)]
    return {entry.path for entry in (*chosen, *unnumbered)}


def members_of(shapes: Mapping[Path, Shape]) -> list[Member]:
    """Return entries with their places in their series."""
    return [member(path, shape.mtime_ns, shape.files[0][0] != ".") for path, shape in shapes.items()]


def old(members: Iterable[Member], keep: int, has_step_between: Callable[[int, int], bool]) -> list[Member]:
    """Return the members to delete so that the newest `keep` of each series stay; all must be known to be whole.

    `has_step_between` tells whether a step was made between two times (ns).
    """
    series: dict[str, list[Member]] = {}
    for entry in members:
        if entry.order:
            series.setdefault(entry.series, []).append(entry)
    return [entry for group in series.values() for entry in _old(group, keep, has_step_between)]


def _old(group: list[Member], keep: int, has_step_between: Callable[[int, int], bool]) -> list[Member]:
    by_time = sorted(group, key=lambda entry: entry.mtime_ns)
    kept = [*sorted(group, key=lambda entry: entry.order)[-keep:], *by_time[-keep:]]
    order, mtime_ns = min(entry.order for entry in kept), min(entry.mtime_ns for entry in kept)
    older = [entry for entry in by_time if entry.order < order and entry.mtime_ns < mtime_ns]
    return [entry for entry in older if has_step_between(entry.mtime_ns, by_time[-1].mtime_ns)]


def _is_checkpoint_file(name: PurePosixPath) -> bool:
    return name.suffix in SUFFIXES or name.name == METADATA


def _has_count(name: str) -> bool:
    return _STEPS.search(name) is not None or _COUNTS.search(name) is not None


def _is_last(entry: Member) -> bool:
    return _LAST.search(f"{entry.path.name}.") is not None
