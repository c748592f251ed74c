"""Files as frameworks save them, made by hand without any of them: their formats to the byte where a reader looks at it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.core.checkpoints import file_groups, tree, validation
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointState,
    CompletionReason,
    Content,
    Format,
    GroupReading,
    StepSource,
)
from orchestrator.core.checkpoints.file_groups import FileGroup

S = 1_000_000_000
MS = 1_000_000
SAVED_NS = 1_000 * S
"""When the files of these tests are written, the first of them."""


class Tensor:
    """Stands in a pickle where torch has a tensor, in the same opcodes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (_Storage(), 0, (4,), (1,), False, OrderedDict())


class _Storage:
    pass


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return ("storage", float, "0", "cpu", 4) if isinstance(value, _Storage) else None


class Model(OrderedDict[str, Any]):
    """The `state_dict` of a module, which has an attribute of its own."""

    def __init__(self, *modules: str) -> None:
        super().__init__((f"{module}.weight", Tensor()) for module in modules or ("embed", "blocks.0.mlp", "head"))
        self._metadata = OrderedDict({"": {"version": 1}})

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter(self.items())


def adam(step: int = 0) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer; some count their steps as numbers."""
    own = {"step": step if step else Tensor(), "exp_avg": Tensor(), "exp_avg_sq": Tensor()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]
    return {"state": {0: dict(own), 1: dict(own)}, "param_groups": groups}


def torch_save(state: object, top: str = "archive", data: bytes = bytes(256)) -> bytes:
    """Return what torch.save writes; `data` are the bytes of a tensor."""
    pickled = io.BytesIO()
    _Pickler(pickled, 2).dump(state)
    return zipped(
        {
            f"{top}/data.pkl": pickled.getvalue(),
            f"{top}/.format_version": b"1",
            f"{top}/byteorder": b"little",
            f"{top}/data/0": data,
            f"{top}/version": b"3\n",
            f"{top}/.data/serialization_id": b"0" * 40,
        }
    )


def zipped(records: Mapping[str, bytes]) -> bytes:
    """Return a zip of these records, which are not compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, record in records.items():
            archive.writestr(zipfile.ZipInfo(name), record)
    return out.getvalue()


def safetensors(about: Mapping[str, str] | None = None, data: bytes = bytes(16)) -> bytes:
    """Return a safetensors file of one tensor."""
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    header["w"] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def weights_index(pieces: Iterable[str]) -> bytes:
    """Return a `….safetensors.index.json`."""
    weights = {f"layers.{number}.weight": piece for number, piece in enumerate(pieces)}
    return json.dumps({"metadata": {"total_size": 16}, "weight_map": weights}, indent=2).encode()


def trainer_state(step: int, best: str | None = None) -> bytes:
    """Return the `trainer_state.json` of the HF Trainer."""
    history = [{"epoch": 0.1, "loss": 2.5, "step": done} for done in range(10, step + 1, 10)]
    state = {
        "best_model_checkpoint": best,
        "epoch": 0.5,
        "global_step": step,
        "log_history": history,
        "max_steps": 9999,
    }
    return json.dumps(state, indent=2, sort_keys=True).encode()


@dataclass(frozen=True)
class MetadataIndex:
    """As in torch.distributed.checkpoint."""

    fqn: str
    offset: tuple[int, ...]
    index: int


@dataclass
class _StorageInfo:
    relative_path: str
    offset: int
    length: int


@dataclass
class Metadata:
    """As in torch.distributed.checkpoint."""

    state_dict_metadata: dict[str, Any]
    planner_data: Any
    storage_data: dict[MetadataIndex, _StorageInfo]


def metadata(pieces: Mapping[str, Sequence[int]]) -> bytes:
    """Return a `.metadata` of torch.distributed.checkpoint that names pieces, each with values of these lengths."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    about: dict[str, Any] = {}
    for piece, lengths in pieces.items():
        for number, length in enumerate(lengths):
            fqn = f"model.layers.{number}.weight"
            about[fqn] = {"size": (64, 64), "chunks": [(number, 0)], "length": 4}
            index = MetadataIndex(fqn, (len(storage), 0), number)
            storage[index] = _StorageInfo(piece, sum(lengths[:number]), length)
    return pickle.dumps(Metadata(about, {"step": ("step",)}, storage), 4)


def distributed(top: str, ranks: int = 2, values: int = 2) -> dict[str, bytes]:
    """Return the files of torch.distributed.checkpoint in the order of writing: in each piece a torch.save of each value."""
    lengths, files = {}, {}
    for rank in range(ranks):
        saved = [torch_save(Tensor(), data=bytes([rank]) * 100 * number) for number in range(1, values + 1)]
        lengths[f"__{rank}_0.distcp"] = [len(value) for value in saved]
        files[f"{top}/__{rank}_0.distcp"] = b"".join(saved)
    return {**files, f"{top}/.metadata": metadata(lengths)}


def write(path: Path, data: bytes = b"data", at_ns: int = SAVED_NS) -> Path:
    """Write a file that is of that time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(at_ns, at_ns))
    return path


def write_all(root: Path, files: Mapping[str, bytes], at_ns: int = SAVED_NS) -> None:
    """Write files one after the other, a millisecond each."""
    for number, (name, data) in enumerate(files.items()):
        write(root / name, data, at_ns + number * MS)


@dataclass(frozen=True, slots=True)
class Sight:
    """What is below a place: its groups of files by key, and what each says."""

    tree: tree.Tree
    groups: dict[str, FileGroup]
    readings: dict[str, GroupReading]

    def sizes(self, key: str) -> dict[str, int]:
        """Return the sizes of a group's files."""
        return {name: self.tree.files[name].size_bytes for name in self.groups[key].names}

    def fault(self, key: str) -> str:
        """Return why a group cannot be whole."""
        return validation.find_fault(self.readings[key], self.sizes(key))

    def has_last_word(self, key: str, world_size: int) -> bool:
        """Tell whether a group is whole by its format alone."""
        return not self.fault(key) and validation.is_format_complete(self.readings[key], self.sizes(key), world_size)

    def of(self, name: str) -> str:
        """Return the key of the group of a file or folder."""
        return next(key for key, group in self.groups.items() if name in (group.main, *group.names))


def sight(root: Path, glob: str = "*") -> Sight:
    """Look at a place, and read all groups that may be saves."""
    found = tree.scan(root, glob)
    groups = {
        key: group
        for key, group in file_groups.group_files(found.files).items()
        if any(map(file_groups.is_checkpoint_file, group.names))
    }
    readings = {
        key: validation.read_group(root, group, found.files, found.pointed, trusts_times=True)
        for key, group in groups.items()
    }
    return Sight(found, groups, readings)


def saved(number: int, **fields: Any) -> Checkpoint:
    """Return a whole save of the first attempt that made `10 * number` steps by then; `fields` are those that differ."""
    main = fields.get("main", f"ckpt_{10 * number}.pt")
    step = None if fields.get("state") is CheckpointState.OPEN else fields.get("stated", 10 * number)
    base = Checkpoint(
        number=number, key=f"#{10 * number}", series="#", main=main, attempt=1, world_size=2, steps=10 * number,
        format=Format.TORCH, content=Content.STATE, fits_any_size=True, state=CheckpointState.WHOLE, closed_by=CompletionReason.STEPS,
        step=step, step_source=StepSource.COUNTED, stated=None,
    )  # fmt: skip
    return dataclasses.replace(base, **fields)
