"""Validation of a checkpoint's files: its format, the files that it needs, damage, and its step. Reads, changes nothing.

`find_fault` returns why it cannot be complete. `is_format_complete` tells whether its format alone shows that it is complete, for
when no later step of the ranks can show that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from orchestrator.core.checkpoints import file_groups, formats
from orchestrator.core.checkpoints.checkpoint import (
    CheckpointFile,
    Content,
    Format,
    GroupReading,
    RequiredFile,
)
from orchestrator.core.text import format_count

CLOCK_TICK_NS = 20_000_000
"""Times of two files that differ by less may be out of order: they come from the kernel's coarse clock."""

SHOWN_MAX = 3

_CHECKPOINT_N = re.compile(r"checkpoint-\d+")
_ZERO = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)|mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(optimizer|optim|scheduler)[\w-]*\.(pt|bin|pth)")
_RANDOM = re.compile(r"(random_states_|rng_state_)\d+\.")
_EVERY_RANK = re.compile(r"(random_states_|rng_state_|zero_pp_rank_)#")
"""Files, as `ranks_in` names them, that every rank writes; others may be written by the first rank alone."""
_ANY_NUMBER = re.compile(r"(?<![mp]p_)rank[-_=]?#")
"""Files, as `ranks_in` names them, whose only number may not be a rank: `lora_rank16.pt`."""


def read_group(
    root: Path,
    group: file_groups.FileGroup,
    files: Mapping[str, CheckpointFile],
    pointed: Collection[str] = (),
    *,
    trusts_times: bool = False,
) -> GroupReading:
    """Read a group whose files have these sizes and times. `pointed`: names that pointer files and links refer to;
    `trusts_times`: whether times show the order of writing, for files that no agent has watched."""
    readings = {name: formats.read_file(root, name, files[name].size_bytes) for name in group.names}
    faults = [f"{name} {reading.fault}" for name, reading in readings.items() if reading.fault]
    faults += [group.unfinished_reason] if group.unfinished_reason else []
    faults += _find_late_files(group, files, readings) if trusts_times else []
    if not faults and not any(files[name].size_bytes for name in group.names):
        faults.append(f"{group.names[0]} is empty")
    format_ = _detect_format(group, readings)
    main = readings.get(group.main, formats.NOTHING)
    needs = {
        need for name, reading in readings.items() for need in (*reading.needs, *formats.find_numbered_parts(name))
    }
    needs |= _required_files(format_, group)
    return GroupReading(
        format=format_,
        content=_classify_content(format_, group, readings),
        fits_any_size=_fits_any_size(format_, group.names),
        faults=tuple(faults),
        is_unsure=any(finding.is_unsure for finding in readings.values()),
        needs=tuple(sorted(needs, key=lambda need: need.name)),
        is_proved=not faults
        and all(readings[name].is_proved for name in group.names if _must_be_proved(name, files[name].size_bytes)),
        is_marked_complete=_is_marked_complete(format_, group, files, main, pointed),
        step=_find_step(format_, group, readings, main),
        cites=tuple(
            dict.fromkeys([*(cite for finding in readings.values() for cite in finding.cites), *sorted(pointed)])
        ),
    )


def _must_be_proved(name: str, size_bytes: int) -> bool:
    """Return whether the format of a file must prove it complete before its checkpoint counts as proved."""
    is_cut = name.endswith(".json") and not size_bytes
    return (
        is_cut
        or file_groups.is_checkpoint_file(name)
        or name.endswith((file_groups.METADATA, file_groups.TRAINER_STATE, ".index.json"))
    )


def merge_readings(first: GroupReading, second: GroupReading) -> GroupReading:
    """Join the readings of two hosts, each of its own files."""
    rank = list(Format).index
    leading = max(first, second, key=lambda reading: rank(reading.format) % rank(Format.UNKNOWN))
    return replace(
        leading,
        content=min(first.content, second.content, key=list(Content).index),
        fits_any_size=first.fits_any_size and second.fits_any_size,
        faults=(*first.faults, *second.faults),
        is_unsure=first.is_unsure or second.is_unsure,
        needs=tuple(sorted({*first.needs, *second.needs}, key=lambda need: need.name)),
        is_proved=first.is_proved and second.is_proved,
        is_marked_complete=first.is_marked_complete or second.is_marked_complete,
        step=first.step if first.step is not None else second.step,
        cites=tuple(dict.fromkeys((*first.cites, *second.cites))),
    )


def find_fault(reading: GroupReading, sizes: Mapping[str, int]) -> str:
    """Return why files of these sizes are not a complete checkpoint; empty if no fault is found."""
    if reading.faults:
        return _list_some(reading.faults)
    missing = {need.name: need.by for need in reading.needs if need.name not in sizes}
    if missing:
        by = next(iter(missing.values()))
        text = f"{_list_some(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        return f"{text}, but listed in {by}" if by else text
    short = [need for need in reading.needs if sizes[need.name] < need.size_bytes]
    if short:
        size, need = sizes[short[0].name], short[0]
        return f"{need.name} has {size:,} bytes; {need.by} says {need.size_bytes:,}"
    for series, ranks in file_groups.find_ranks(sizes).items():
        if len(ranks) == 1 and _ANY_NUMBER.search(series):
            continue
        start = 1 if "shard" in series else 0  # shards may count from 1
        lowest = next(number for number in itertools.count(start) if number not in ranks)
        if lowest < max(ranks):
            return f"{series.replace('#', str(lowest))} is missing"
    return ""


def find_stale_metadata(reading: GroupReading, stale: Collection[str]) -> str:
    """Return the fault of a `.metadata` that is still that of the previous checkpoint, while files in it are new."""
    named = (need for need in reading.needs if need.by.endswith(file_groups.METADATA) and need.by in stale)
    new = next((need for need in named if need.name not in stale), None)
    return f"{new.name} was rewritten after {new.by}" if new is not None else ""


def is_format_complete(reading: GroupReading, sizes: Collection[str], world_size: int) -> bool:
    """Return whether the format shows that all is written: the file that it writes last is there, and the files of every
    rank. Only for a group without a fault."""
    ranks = file_groups.find_ranks(sizes)
    return (
        reading.is_marked_complete
        and reading.is_proved
        and all(
            len(own) == world_size or (own == {0} and not _EVERY_RANK.search(series)) for series, own in ranks.items()
        )
    )


def _list_some(texts: Collection[str]) -> str:
    first = list(texts)[:SHOWN_MAX]
    more = len(texts) - len(first)
    return ", ".join(first) + (f" and {format_count(more, 'more file')}" if more else "")


def _is_nested(group: file_groups.FileGroup) -> bool:
    """Return whether the folder of a checkpoint has subfolders, as that of a sharded model."""
    return any("/" in name.removeprefix(f"{group.main}/") for name in group.names)


def _base_names(group: file_groups.FileGroup) -> set[str]:
    return {PurePosixPath(name).name for name in group.names}


def _detect_format(group: file_groups.FileGroup, readings: Mapping[str, formats.FileReading]) -> Format:
    base = _base_names(group)
    is_trainer_folder = _CHECKPOINT_N.fullmatch(PurePosixPath(group.main).name) or any(map(_OPTIMIZER.fullmatch, base))
    if group.is_folder and (
        file_groups.TRAINER_STATE in base or (file_groups.TRAINING_ARGS in base and is_trainer_folder)
    ):
        return Format.TRAINER
    if group.is_folder and any(name.startswith("random_states_") for name in base):
        return Format.ACCELERATE
    if any(reading.is_lightning for reading in readings.values()):
        return Format.LIGHTNING
    if file_groups.METADATA in base or any(name.endswith((".distcp", file_groups.METADATA)) for name in base):
        is_lightning = group.is_folder and (group.main.endswith(".ckpt") or file_groups.LIGHTNING_LAST in base)
        return Format.LIGHTNING if is_lightning else Format.DCP
    if any(map(_ZERO.search, base)):
        return Format.DEEPSPEED
    if "model_optim_rng.pt" in base or re.fullmatch(r"iter_\d{7}", PurePosixPath(group.main).name):
        return Format.MEGATRON
    main = readings.get(group.main, formats.NOTHING)
    if main.is_torch or any(reading.is_torch for reading in readings.values()):
        return Format.TORCH
    if any(name.endswith(".safetensors") for name in base):
        return Format.SAFETENSORS
    return Format.UNKNOWN


def _required_files(format_: Format, group: file_groups.FileGroup) -> set[RequiredFile]:
    folders = {str(PurePosixPath(name).parent) for name in group.names if name.endswith(".distcp")}
    has = {str(PurePosixPath(name).parent) for name in group.names if name.endswith(file_groups.METADATA)}
    # Other files of the folder may be there before these, which a thread may still write
    needs = {RequiredFile(f"{folder}/{file_groups.METADATA}", 1, "") for folder in folders - has}
    if format_ is Format.TRAINER and file_groups.TRAINER_STATE not in _base_names(group):
        needs.add(RequiredFile(f"{group.main}/{file_groups.TRAINER_STATE}", 1, ""))
    return needs


def _find_late_files(
    group: file_groups.FileGroup,
    files: Mapping[str, CheckpointFile],
    readings: Mapping[str, formats.FileReading],
) -> list[str]:
    """Return faults of files that were written after the `.metadata`, which is written last."""
    late = []
    for name, reading in readings.items():
        if not name.endswith(file_groups.METADATA):
            continue
        written_ns = files[name].mtime_ns + CLOCK_TICK_NS
        late += [
            f"{need.name} was rewritten after {name}"
            for need in reading.needs
            if need.name in files and files[need.name].mtime_ns > written_ns
        ]
    return late[:1]


def _classify_content(
    format_: Format, group: file_groups.FileGroup, readings: Mapping[str, formats.FileReading]
) -> Content:
    if group.tag == "best":
        return Content.BEST
    own = [name for name in group.names if file_groups.is_checkpoint_file(name)]
    roles = {file_groups.file_role(name) for name in own or group.names}
    has_optimizer = any(reading.has_optimizer for reading in readings.values())
    if format_ is Format.TRAINER:
        return Content.STATE if has_optimizer or _is_nested(group) else Content.WEIGHTS
    if format_ not in (Format.TORCH, Format.SAFETENSORS, Format.UNKNOWN):
        return Content.STATE
    if file_groups.Role.MAIN in roles:
        is_weights = readings[group.names[0]].is_weights and len(group.names) == 1 and not has_optimizer
        return Content.WEIGHTS if is_weights else Content.STATE
    if file_groups.Role.MODEL in roles:
        return Content.STATE if has_optimizer or file_groups.Role.OPTIMIZER in roles else Content.WEIGHTS
    if file_groups.Role.AVERAGE in roles:
        return Content.AVERAGE
    return Content.PART if roles - {file_groups.Role.OTHER} else Content.OTHER


def _fits_any_size(format_: Format, group_names: Collection[str]) -> bool:
    """Return whether another number of ranks can load it: not if ranks have separate files, other than random states."""
    if any("zero_pp_rank_" in name for name in group_names):
        return any("universal" in name for name in group_names)
    own = [name for name in group_names if not _RANDOM.search(name)]
    shared = format_ in (Format.DCP, Format.LIGHTNING)
    return format_ is not Format.MEGATRON and (
        shared or all(len(ranks) == 1 for ranks in file_groups.find_ranks(own).values())
    )


def _is_marked_complete(
    format_: Format,
    group: file_groups.FileGroup,
    files: Mapping[str, CheckpointFile],
    main: formats.FileReading,
    pointed: Collection[str],
) -> bool:
    base = _base_names(group)
    match format_:
        case Format.TRAINER:
            has_model = any(file_groups.file_role(name) is file_groups.Role.MODEL for name in base) or _is_nested(group)
            return file_groups.TRAINER_STATE in base and has_model
        case Format.ACCELERATE:
            return any(name.startswith(("model", "pytorch_model")) for name in base)
        case Format.DCP:
            # If it lies deeper, more is written to the folder around it.
            top = PurePosixPath(group.main)
            return any(
                name.endswith(file_groups.METADATA) and PurePosixPath(name).parent == top for name in group.names
            )
        case Format.LIGHTNING if group.is_folder:
            return file_groups.LIGHTNING_LAST in base or "checkpoint" in base
        case Format.DEEPSPEED | Format.MEGATRON:
            number = str(PurePosixPath(group.main).with_name("".join(group.count)))
            has_model = any("model" in name for name in base)
            return has_model and (group.main in pointed or number in pointed)
        case _:
            is_alone = len(group.names) == 1 and not group.is_folder and not file_groups.find_ranks(group.names)
            return is_alone and (file_groups.file_role(group.main) is file_groups.Role.MAIN or main.has_optimizer)


def _find_step(
    format_: Format,
    group: file_groups.FileGroup,
    readings: Mapping[str, formats.FileReading],
    main: formats.FileReading,
) -> int | None:
    """Return the step from its state file, its main file or its name."""
    state = next((readings[name].step for name in group.names if name.endswith(f"/{file_groups.TRAINER_STATE}")), None)
    if format_ is Format.TRAINER and state is not None:
        return state
    if format_ is Format.LIGHTNING and main.step is not None:
        return main.step
    by_name = file_groups.find_step(group.main)
    if by_name is not None:
        return by_name
    if format_ is Format.ACCELERATE:
        return None  # what its random states call a step counts batches
    inner = [
        reading.step
        for name, reading in sorted(readings.items())
        if reading.step is not None
        and file_groups.file_role(name) not in (file_groups.Role.OTHER, file_groups.Role.OPTIMIZER)
    ]
    return main.step if main.step is not None else inner[0] if inner else None
