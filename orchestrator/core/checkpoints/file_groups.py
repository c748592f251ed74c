"""Grouping of files by their names: which files below a checkpoint folder form one checkpoint. Pure.

Rules, the first that fits:
- A folder with a count in its name (`checkpoint-500`, `step_10`, `020000`), or with a file that only the folder of a
  checkpoint has (`.metadata`, `trainer_state.json`, `random_states_0.pkl`), is one checkpoint with all that is below
  it. A folder with such folders, or with files of several steps, is not one.
- Files of one folder with the same numbers in their names are one checkpoint: `model_100.pt`, `meta_100.json`,
  `optim_100_rank0.pt`. The numbers of ranks, shards and parts do not count; a decimal, such as a loss, separates
  files that are a complete checkpoint each.
- Files without a number are parts of one checkpoint if their names say so (`model.pt`, `optimizer.pt`, `scheduler.pt`);
  any other name is a separate checkpoint (`ckpt.pt`, `last.ckpt`), overwritten each time. So are best and last ones.

Folders of ranks (`rank_0/`, `mp_rank_01/`) do not separate the files of a checkpoint.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

METADATA = ".metadata"
TRAINER_STATE = "trainer_state.json"
TRAINING_ARGS = "training_args.bin"
LIGHTNING_LAST = "meta.pt"
"""The file that Lightning adds last to a folder of torch.distributed.checkpoint."""

POINTERS = frozenset({"latest", "latest_checkpointed_iteration.txt", "last_checkpoint", "latest_step.txt"})
"""Files that name the newest checkpoint beside them (DeepSpeed, Megatron, detectron2)."""


def _suffixes(text: str) -> frozenset[str]:
    return frozenset(f".{ending}" for ending in text.split())


SUFFIXES = _suffixes(
    "pt pth ckpt bin safetensors pkl npz tar distcp model zip h5 hdf5 npy msgpack eqx keras joblib state params weights"
)
"""Suffixes of files that may hold training state."""

_TEXTS = _suffixes(
    "json jsonl yaml yml toml ini cfg txt log csv tsv md html out err py sh diff patch xml png jpg jpeg svg gif pdf mp4"
    " wav lock pid idx gz bz2 xz db sqlite wandb tfevents"
)
"""Suffixes of files that are not a checkpoint by themselves; they may be part of one."""

_TEMPORARY = re.compile(r"^tmp|[._-](tmp|temp|incomplete|lock)([._-]|\d|$)|\.(part|partial)$|~$", re.IGNORECASE)
_UNFINISHED = re.compile(r"(?:^|[._-])(?:is-)?(?:incomplete|unfinished|in-?_?progress)(?:[._-]|$)", re.I)
_MARKER_FILE = re.compile(r"(.+?)[._-](?:incomplete|unfinished|in-?_?progress|tmp[._-]?done)$", re.IGNORECASE)

_PART = r"(?:mp_rank|rank|shard|part|worker|node|gpu|device|proc|process|rng_state|random_states)"
_PART_NUMBERS = re.compile(rf"\d+[-_]of[-_]\d+|{_PART}[-_=]?\d+(?:[-_]\d+)?|(?<![a-z])[ptd]p[-_=]?\d+", re.I)
"""Numbers of ranks and other parts of one checkpoint, which are not steps."""

_STEP_WORD = r"(?:(?<![a-z])(?:step|iter|iteration|update|batch|ba|it)|global[-_]?step)s?[-_=. ]?"
_STEPS = re.compile(
    rf"{_STEP_WORD}(\d{{1,15}})(?![\d.]*[a-z])|(?<![a-z\d])(\d{{1,15}})[-_]?(?:step|iter)s?(?![-_=. ]?\d)",
    re.I,
)
_WORD_COUNT = re.compile(
    r"(?:(?<![a-z])(?:step|iter|iteration|update|batch|ba|ep|epoch|checkpoint|ckpt|chkpt|snapshot|save)"
    r"|global[-_]?step)s?[-_=. ]?(\d+)|(?<![a-z\d])(\d+)[-_]?(?:epoch|step|iter)s?(?![-_=. ]?\d)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?<!\d\.)\d+(?![A-Za-z0-9]|\.\d)|-v\d+(?=\.\w+$|$)")
"""A separate number, and the version that Lightning appends to a name that exists."""
_DECIMAL = re.compile(r"\d+\.\d+(?:e[-+]?\d+)?(?!\d*\.\d)", re.IGNORECASE)
_TAG = re.compile(r"(?<![a-z])(best|last|latest|final)(?![a-z])|\d+(best)(?![a-z])", re.IGNORECASE)
_INNER = re.compile(r"custom_checkpoint_\d+|step_count", re.IGNORECASE)

_MARKS = re.compile(r"\.metadata|__\d+\.metadata|trainer_state\.json|random_states_\d+\.pkl|.*\.distcp")


class Role(enum.Enum):
    """Role of a file in its checkpoint, by its name."""

    MAIN = "main"
    MODEL = "model"
    OPTIMIZER = "optimizer"
    STATE = "state"  # of scheduler, scaler, random numbers, loop
    AVERAGE = "average"
    OTHER = "other"


def _word_pattern(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z])(?:{'|'.join(text.split())})(?![a-z])")


_NO_STATE = (
    "vocab|vocabulary|tokenizer|token_bytes|merges|metrics?|evaluations?|stats|loss|losses|logs?|history|results?|embeddings?|predictions?"
    "|samples?|dataset|data|args|config|hparams|hyperparameters"
)
_ROLES = (
    (Role.OPTIMIZER, _word_pattern("optim optimizer optimizers opt")),
    (Role.STATE, _word_pattern("sched scheduler schedulers lr scaler rng random sampler dataloader loader")),
    (Role.AVERAGE, _word_pattern("ema swa avg ave average averaged")),
    (Role.OTHER, re.compile(rf"^(?:{_NO_STATE})(?![a-z])|(?<![a-z])(?:{_NO_STATE})$")),
    (Role.STATE, _word_pattern("meta trainer (?:train|training)[-_]?state")),
    (
        Role.MODEL,
        _word_pattern(
            "model models weights net network adapter generator discriminator encoder decoder unet policy critic actor"
        ),
    ),
)


_CHECKPOINT_WORDS = _word_pattern("ckpt chkpt checkpoint snapshot state step epoch iter iteration params")


@dataclass(slots=True)
class FileGroup:
    """Files that form one checkpoint. `main`: the folder or file that represents it; `unfinished_reason`: why it is unfinished."""

    key: str
    series: str
    main: str
    is_folder: bool
    # The numbers in its name that count up, empty for a name that is overwritten
    count: tuple[str, ...]
    tag: str
    names: list[str] = field(default_factory=list)
    unfinished_reason: str = ""

    @property
    def is_overwritten(self) -> bool:
        """Return whether its files are overwritten by the next one."""
        return not self.count


def is_temporary(name: str) -> bool:
    """Return whether a name marks a file as unfinished."""
    return _TEMPORARY.search(name) is not None


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file may be a checkpoint or the main part of one, by its suffix and name."""
    path = PurePosixPath(name)
    if path.suffix in SUFFIXES:
        return True
    is_text = any(suffix.lower() in _TEXTS for suffix in path.suffixes) or "tfevents" in name
    return not is_text and _WORD_COUNT.search(path.name) is not None


def is_counted(name: str) -> bool:
    """Return whether a folder's name has a word and a number, as that of one checkpoint of many."""
    return _WORD_COUNT.search(_PART_NUMBERS.sub(" ", name)) is not None


def file_role(name: str) -> Role:
    """Return the role of a file in its checkpoint. NumPy arrays are training state only if their name says so."""
    stem = name.rpartition("/")[2].lower().partition(".")[0]
    is_array = name.endswith((".npy", ".npz")) and not _CHECKPOINT_WORDS.search(stem)
    return next((found for found, words in _ROLES if words.search(stem)), Role.OTHER if is_array else Role.MAIN)


def mask_numbers(name: str) -> str:
    """Return a name with `#` for its numbers, except for those of ranks and other parts."""
    kept = [match.span() for match in _PART_NUMBERS.finditer(name)]
    return re.sub(r"\d+", lambda m: m[0] if any(a <= m.start() < b for a, b in kept) else "#", name)


def find_step(name: str) -> int | None:
    """Return the step in a name, after a word for it; any other number may be an epoch or a counter."""
    found = [match[1] or match[2] for match in _STEPS.finditer(_stem(name))]
    return int(found[-1]) if found else None


def _stem(name: str) -> str:
    """Return the last part of a name, without a suffix of letters."""
    path = PurePosixPath(name)
    return path.stem if path.suffix[1:].isalpha() else path.name


def find_ranks(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of ranks and shards in names, by the rest of the name: `optim_100_rank#.pt` → {0, 1}."""
    ranks_by_series: dict[str, set[int]] = {}
    pattern = re.compile(r"(rank[-_=]?|shard[-_=]?|random_states_|rng_state_)(\d+)")
    for name in names:
        for match in pattern.finditer(name):
            around = name[: match.start(2)], name[match.end(2) :]
            series = "#".join(pattern.sub(r"\1*", part) for part in around)
            ranks_by_series.setdefault(series, set()).add(int(match[2]))
    return ranks_by_series


def group_files(names: Iterable[str]) -> dict[str, FileGroup]:
    """Return the groups of files with these names, which are relative to the checkpoint folder, by their keys."""
    files = sorted(names)
    tree = _FolderTree(files)
    groups: dict[str, FileGroup] = {}
    beside = {match[1]: name for name in (*files, *tree.folders) if (match := _MARKER_FILE.fullmatch(name))}
    for name in files:
        above, _, last = name.rpartition("/")
        folder = tree.checkpoint_group(above or ".")
        if folder is not None:
            file_group = groups.setdefault(folder.key, folder)
            if is_temporary(last) or _UNFINISHED.search(last):
                file_group.unfinished_reason = file_group.unfinished_reason or f"{name} marks it as unfinished"
        elif is_temporary(last) or last in POINTERS or _MARKER_FILE.fullmatch(last):
            continue
        else:
            new = _single_file_group(tree.key_prefix(above or "."), last)
            file_group = groups.setdefault(new.key, new)
        file_group.names.append(name)
    for file_group in groups.values():
        markers = [beside[own] for own in (file_group.main, *file_group.names) if own in beside]
        if file_group.main in beside.values():
            markers.append(file_group.main)
        if markers:
            file_group.unfinished_reason = file_group.unfinished_reason or f"{markers[0]} marks it as unfinished"
        if is_temporary(PurePosixPath(file_group.main).name) and file_group.is_folder:
            file_group.unfinished_reason = file_group.unfinished_reason or "its name marks it as unfinished"
        if not file_group.is_folder:
            file_group.main = min(file_group.names, key=_main_file_order)
    return groups


def _main_file_order(name: str) -> tuple[int, int, str]:
    order = (Role.MAIN, Role.MODEL, Role.AVERAGE, Role.STATE, Role.OPTIMIZER, Role.OTHER)
    return order.index(file_role(name)), len(name), name


class _FolderTree:
    """The folders below a checkpoint folder, and which of them are checkpoints."""

    def __init__(self, files: list[str]) -> None:
        self.folders: dict[str, tuple[set[str], set[str]]] = {".": (set(), set())}
        for name in files:
            above, _, last = name.rpartition("/")
            self._children(above or ".")[0].add(last)
        self._saves: dict[str, FileGroup | None] = {}
        self._plain: dict[str, str] = {}

    def _children(self, folder: str) -> tuple[set[str], set[str]]:
        if folder not in self.folders:
            self.folders[folder] = (set(), set())
            above, _, last = folder.rpartition("/")
            self._children(above or ".")[1].add(last)
        return self.folders[folder]

    def checkpoint_group(self, name: str) -> FileGroup | None:
        """Return the group of the outermost folder that is a checkpoint, among a folder and its parents."""
        if name not in self._saves:
            above = name.rpartition("/")[0]
            found = self.checkpoint_group(above) if above else None
            if found is None and self._is_checkpoint(PurePosixPath(name)):
                found = _folder_group(PurePosixPath(name))
            self._saves[name] = found
        return self._saves[name]

    def key_prefix(self, name: str) -> str:
        """Return the common start of the keys of files in a folder: its name without folders of ranks."""
        if name not in self._plain:
            parts = [part for part in PurePosixPath(name).parts if not _PART_NUMBERS.fullmatch(part)]
            self._plain[name] = "".join(f"{part}/" for part in parts)
        return self._plain[name]

    def _is_checkpoint(self, folder: PurePosixPath) -> bool:
        files, folders = self.folders[str(folder)]
        if not folder.name:
            return METADATA in files
        counts = bool(_count(folder.name)) and not _PART_NUMBERS.fullmatch(folder.name)
        marked = any(map(_MARKS.fullmatch, files))
        return (counts and not self._has_other_steps(folder)) or (marked and not any(map(_count, folders)))

    def _has_other_steps(self, folder: PurePosixPath) -> bool:
        files, folders = self.folders[str(folder)]
        own_numbers = {int(number) for number in re.findall(r"\d+", folder.name)}
        only_number = folder.name.isdigit()
        for name in (*files, *folders):
            if _INNER.search(name):
                continue
            words = _WORD_COUNT if only_number else _STEPS
            numbers = {int(found) for match in words.finditer(_stem(name)) for found in match.groups() if found}
            if numbers and not numbers & own_numbers:
                return True
        return False


def _folder_group(folder: PurePosixPath) -> FileGroup:
    name = str(folder)
    count = _count(folder.name)
    return FileGroup(name, _series(name), name, True, count, _tag(folder.name))


def _single_file_group(folder: str, name: str) -> FileGroup:
    tag, count = _tag(name), _numbers(name)
    prefix = f"{folder}{tag}{'@' if tag else ''}"
    if count:
        unit = "epoch" if re.search(r"epoch", name, re.IGNORECASE) else ""
        # The best ones of one epoch differ in a loss; a part of a checkpoint has the loss of the others or none.
        loss = "".join(f"~{number}" for number in _DECIMAL.findall(name)) if file_role(name) is Role.MAIN else ""
        key = f"{prefix}#{unit}{'-'.join(count)}{loss}"
        return FileGroup(key, f"{prefix}#{unit}", "", False, count, tag)
    stem = "parts" if file_role(name) not in (Role.MAIN, Role.OTHER) else _PART_NUMBERS.sub("", name)
    return FileGroup(f"{prefix}{stem}", f"{prefix}{stem}", "", False, (), tag)


def _tag(name: str) -> str:
    match = _TAG.search(name)
    return (match[1] or match[2]).lower() if match else ""


def _series(name: str) -> str:
    head, _, last = name.rpartition("/")
    return f"{head}/{re.sub(r'[0-9]+', '#', last)}" if head else re.sub(r"\d+", "#", last)


def _count(name: str) -> tuple[str, ...]:
    """Return the numbers in a folder's name, if one of them counts checkpoints or is the full name."""
    plain = _PART_NUMBERS.sub(" ", name)
    if name.isdigit() or _WORD_COUNT.search(plain):
        return tuple(str(int(number)) for number in re.findall(r"\d+", plain))
    return ()


def _numbers(name: str) -> tuple[str, ...]:
    plain = _DECIMAL.sub(" ", _PART_NUMBERS.sub(" ", name))
    words = [match[1] or match[2] for match in _WORD_COUNT.finditer(plain)]
    alone = _NUMBER.findall(plain)
    versions = [number for number in alone if number.startswith("-v")]
    numbers = words or [number for number in alone if number not in versions]
    both = dict.fromkeys([*numbers, *(number for number in alone if number not in versions)])
    return (*(str(int(number)) for number in both), *versions) if both else ()
