"""Groups of files read as saves: what they are, what they lack, and what is never claimed of them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from orchestrator.core.checkpoints import file_groups, tree, validation
from orchestrator.core.checkpoints.checkpoint import Content, Format, GroupReading, RequiredFile
from orchestrator.core.checkpoints.resume_choice import choose_checkpoint
from tests.support.file_layouts import Layout, Saved
from tests.support.layouts import LAYOUTS
from tests.support.saved_files import (
    MS,
    SAVED_NS,
    Model,
    S,
    adam,
    distributed,
    metadata,
    safetensors,
    saved,
    sight,
    torch_save,
    trainer_state,
    weights_index,
    write,
    write_all,
    zipped,
)

CANDIDATES = frozenset(Content) - {Content.PART, Content.OTHER}

LAST_WORDS = {
    "nanogpt", "litgpt-fsdp", "torchtitan", "timm", "fairseq", "espnet", "detectron2", "trainer", "trainer-ranks", "accelerate",
    "accelerate-steps", "accelerate-epochs", "accelerate-numbers", "dcp-latest", "deepspeed", "megatron", "megatron-dist",
    "lightning", "lightning-fsdp", "vocabulary", "deep",
}  # fmt: skip
"""Layouts whose newest save shows by itself that nothing more was to be written."""


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_framework_checkpoint_is_read_as_described(tmp_path: Path, layout: Layout) -> None:
    layout.write(tmp_path)
    seen = sight(tmp_path)
    found = [
        Saved(group.main, dict.fromkeys(group.names, b""), *described(seen.readings[key]))
        for key, group in seen.groups.items()
        if seen.readings[key].content in CANDIDATES
    ]
    wanted = [dataclasses.replace(save, files=dict.fromkeys(save.files, b"")) for save in layout.saves]
    assert sorted(found, key=lambda save: save.main) == sorted(wanted, key=lambda save: save.main)
    assert [seen.fault(key) for key in seen.groups if seen.fault(key)] == []


def described(state: GroupReading) -> tuple[int | None, Format, Content, bool]:
    return state.step, state.format, state.content, state.fits_any_size


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_frameworks_own_resume_choice_is_chosen(tmp_path: Path, layout: Layout) -> None:
    """The checkpoint that the framework itself would resume from is chosen."""
    layout.write(tmp_path)
    seen = sight(tmp_path)
    times = {key: max(seen.tree.files[name].mtime_ns for name in group.names) for key, group in seen.groups.items()}
    saves = [
        saved(
            number,
            main=seen.groups[key].main,
            content=seen.readings[key].content,
            step=seen.readings[key].step,
        )
        for number, key in enumerate(sorted(times, key=lambda key: times[key]), 1)
    ]
    choice = choose_checkpoint(saves, layout.ranks).checkpoint
    assert choice is not None and choice.main == layout.resume


@pytest.mark.parametrize("name", LAYOUTS)
def test_completion_marker_is_found_where_format_has_one(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    layout.write(tmp_path)
    seen = sight(tmp_path)
    assert seen.has_last_word(seen.of(layout.resume), layout.ranks) == (name in LAST_WORDS)


PIECES = [(name, file) for name, layout in LAYOUTS.items() for file in layout.saves[-1].files]
"""Each file of the last save of each layout."""


UNKNOWABLE = {"mp_rank_01/model_optim_rng.pt", "config.json", "scheduler.pt", "scheduler.bin", "sampler.bin", "optimizer.bin", "custom_checkpoint_0.pkl",
              "tokenizer.json", "model_config.yaml", "training_args.bin", "common.pt", "metadata.json", "distrib_optim.pt"}  # fmt: skip
"""Files that a framework writes or leaves out as it is told; nothing that it writes last names them."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), PIECES)
def test_checkpoint_missing_a_file_is_faulty_or_unproven(tmp_path: Path, name: str, file: str) -> None:
    """A checkpoint without one of its files is faulty or not called complete."""
    layout = LAYOUTS[name]
    layout.write(tmp_path)
    (tmp_path / file).unlink()
    seen = sight(tmp_path)
    left = {key for key, group in seen.groups.items() if set(group.names) & set(layout.saves[-1].files)}
    for key in left:
        if file.endswith(tuple(UNKNOWABLE)) or seen.readings[key].content not in CANDIDATES:
            continue
        lost = layout.saves[-1].content is Content.STATE and seen.readings[key].content is Content.WEIGHTS
        assert seen.fault(key) or not seen.has_last_word(key, layout.ranks) or lost, key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), PIECES)
def test_checkpoint_with_truncated_file_is_faulty_or_unproven(tmp_path: Path, name: str, file: str) -> None:
    """A checkpoint with a file that is empty or cut off is faulty or not called complete."""
    layout = LAYOUTS[name]
    layout.write(tmp_path)
    data, key = (tmp_path / file).read_bytes(), sight(tmp_path).of(file)
    at_ns = (tmp_path / file).stat().st_mtime_ns
    for length in {0, 1, 9, len(data) // 3, len(data) // 2, len(data) - 23, len(data) - 1} & set(range(len(data))):
        write(tmp_path / file, data[:length], at_ns)
        seen = sight(tmp_path)
        is_read = file.endswith(
            (".pt", ".pth", ".tar", ".bin", ".safetensors", ".json", ".distcp", ".metadata", ".ckpt")
        )
        fault = seen.fault(key)
        assert fault or not seen.has_last_word(key, layout.ranks) or file.endswith((".yaml", ".txt")), length
        if is_read and length >= 9 and not file.endswith("tokenizer.model"):
            assert fault, length


@pytest.mark.parametrize("name", LAYOUTS)
def test_completion_marker_appears_only_with_last_relevant_file(tmp_path: Path, name: str) -> None:
    """A checkpoint being written has no completion marker before its last file that matters."""
    layout = LAYOUTS[name]
    save = layout.saves[-1]
    files, matters = list(save.files), [file for file in save.files if not file.endswith(tuple(UNKNOWABLE))]
    for count in range(1, len(files)):
        root = tmp_path / str(count)
        write_all(root, {file: save.files[file] for file in files[:count]})
        seen = sight(root)
        for key in seen.groups:
            is_said = seen.has_last_word(key, layout.ranks) and seen.readings[key].content is save.content
            assert not is_said or set(matters) <= set(files[:count]), files[:count]


# Pieces and what names them


def test_files_named_by_metadata_must_exist_in_length(tmp_path: Path) -> None:
    """Files that the metadata names must exist and be long enough."""
    write_all(tmp_path, distributed("step-5", 3))
    assert sight(tmp_path).has_last_word("step-5", 3)
    size = (tmp_path / "step-5/__1_0.distcp").stat().st_size
    (tmp_path / "step-5/__1_0.distcp").unlink()
    seen = sight(tmp_path)
    assert seen.fault("step-5") == "step-5/__1_0.distcp is missing, but listed in step-5/.metadata"
    write(tmp_path / "step-5/__1_0.distcp", distributed("x", 1, 1)["x/__0_0.distcp"])
    assert f"; step-5/.metadata says {size:,}" in sight(tmp_path).fault("step-5")
    (tmp_path / "step-5/.metadata").unlink()
    assert sight(tmp_path).fault("step-5") == "step-5/.metadata is missing"


@pytest.mark.parametrize(
    "last", [{"trainer_state.json": trainer_state(8)}, {"random_states_0.pkl": torch_save({"a": 1})}]
)
def test_shards_of_framework_need_their_metadata(tmp_path: Path, last: dict[str, bytes]) -> None:
    """What a framework writes last may be there before shards that a thread writes."""
    files = distributed("checkpoint-8/pytorch_model_fsdp_0")
    write_all(tmp_path, {**files, **{f"checkpoint-8/{name}": data for name, data in last.items()}})
    assert sight(tmp_path).fault("checkpoint-8") == ""
    (tmp_path / "checkpoint-8/pytorch_model_fsdp_0/.metadata").unlink()
    assert sight(tmp_path).fault("checkpoint-8") == "checkpoint-8/pytorch_model_fsdp_0/.metadata is missing"


def test_file_newer_than_metadata_is_of_other_checkpoint(tmp_path: Path) -> None:
    """A file that was written after the metadata belongs to another checkpoint."""
    files = distributed("latest")
    write_all(tmp_path, files)
    write(
        tmp_path / "latest/__0_0.distcp",
        files["latest/__0_0.distcp"],
        SAVED_NS + validation.CLOCK_TICK_NS + 3 * MS,
    )
    assert sight(tmp_path).fault("latest") == "latest/__0_0.distcp was rewritten after latest/.metadata"
    write(tmp_path / "latest/__0_0.distcp", files["latest/__0_0.distcp"], SAVED_NS + validation.CLOCK_TICK_NS)
    assert sight(tmp_path).fault("latest") == ""


def test_ranks_saving_without_collectives_have_own_metadata(tmp_path: Path) -> None:
    """Ranks that save without collectives have a metadata file each."""
    lengths, files = {}, distributed("s")
    for rank in (0, 1):
        lengths[rank] = len(files[f"s/__{rank}_0.distcp"])
        write(tmp_path / f"s/__{rank}_0.distcp", files[f"s/__{rank}_0.distcp"])
        write(tmp_path / f"s/__{rank}.metadata", metadata({f"__{rank}_0.distcp": [lengths[rank]]}))
    assert sight(tmp_path).fault("s") == ""
    (tmp_path / "s/__1_0.distcp").unlink()
    assert "s/__1_0.distcp is missing" in sight(tmp_path).fault("s")


@pytest.mark.parametrize("data", [b"", b"of another kind", b"\x80\x04N."])
def test_unreadable_metadata_proves_nothing(tmp_path: Path, data: bytes) -> None:
    """A metadata file that cannot be understood proves nothing."""
    write_all(tmp_path, {**distributed("step-5"), "step-5/.metadata": data})
    assert not sight(tmp_path).has_last_word("step-5", 2)


def test_sharded_weights_are_complete_with_indexed_files(tmp_path: Path) -> None:
    """Weights in several files are complete with all files that their index names."""
    parts = [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    for name in parts:
        write(tmp_path / "step_5" / name, safetensors())
    write(tmp_path / "step_5/model.safetensors.index.json", weights_index(parts))
    assert sight(tmp_path).fault("step_5") == ""
    (tmp_path / "step_5" / parts[1]).unlink()
    assert "model-00002-of-00003.safetensors is missing" in sight(tmp_path).fault("step_5")
    (tmp_path / "step_5/model.safetensors.index.json").unlink()
    assert "model-00002-of-00003.safetensors is missing" in sight(tmp_path).fault("step_5"), "their names say so, too"


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ("optim_5_rank0.pt optim_5_rank2.pt", "optim_5_rank1.pt is missing"),
        ("optim_5_rank1.pt optim_5_rank3000000.pt", "optim_5_rank0.pt is missing"),
        ("5_mp_rank_01.pt", "5_mp_rank_0.pt is missing"),
        ("5_lora_rank16.pt", ""),
        ("ckpt_5_shard0.pt ckpt_5_shard2.pt", "ckpt_5_shard1.pt is missing"),
        ("ckpt_5_shard1.pt ckpt_5_shard2.pt", ""),
        ("ckpt_5_rank0.pt", ""),
    ],
)
def test_missing_rank_between_others_is_noticed(tmp_path: Path, files: str, fault: str) -> None:
    for name in files.split():
        write(tmp_path / name, torch_save(adam()))
    seen = sight(tmp_path)
    assert seen.fault("#5") == fault
    assert not seen.has_last_word("#5", 4), "others may have been about to write theirs"


def test_only_rank_0_file_is_completion_marker() -> None:
    """The only file of a rank is the completion marker for the first rank alone."""
    done = GroupReading(Format.TORCH, Content.STATE, True, is_proved=True, is_marked_complete=True)
    said = [validation.is_format_complete(done, [f"step_5/optim_rank{rank}.pt"], 4) for rank in range(4)]
    assert said == [True, False, False, False]


def test_many_faults_are_summarised_shortly(tmp_path: Path) -> None:
    """Many faults are named in one short text."""
    for rank in range(9):
        write(tmp_path / f"step_5/rank{rank}.pt", b"PK\x03\x04")
    assert sight(tmp_path).fault("step_5").endswith("step_5/rank2.pt is cut off: its zip has no end and 6 more files")


def test_marked_checkpoint_is_unfinished_despite_complete_files(tmp_path: Path) -> None:
    """A checkpoint with a marker is unfinished, however complete its files are."""
    write_all(tmp_path, distributed("step_20"))
    write(tmp_path / "step_20-unfinished", b"")
    seen = sight(tmp_path)
    assert seen.fault("step_20") == "step_20-unfinished marks it as unfinished"
    assert not seen.has_last_word("step_20", 2)


# Formats and contents


@pytest.mark.parametrize("gone", ["model.safetensors", "trainer_state.json", "optimizer.pt", "rng_state_1.pth"])
def test_trainer_folder_needs_state_model_and_random_states(tmp_path: Path, gone: str) -> None:
    """The state, the model and each rank's random numbers count in a trainer's folder."""
    files = {
        "model.safetensors": safetensors(), "training_args.bin": torch_save({"a": 1}), "optimizer.pt": torch_save(adam()),
        "rng_state_0.pth": torch_save({"a": 1}), "rng_state_1.pth": torch_save({"a": 1}), "trainer_state.json": trainer_state(8),
    }  # fmt: skip
    write_all(tmp_path, {f"checkpoint-8/{name}": data for name, data in files.items()})
    assert sight(tmp_path).has_last_word("checkpoint-8", 2)
    (tmp_path / "checkpoint-8" / gone).unlink()
    seen = sight(tmp_path)
    if gone == "optimizer.pt":
        assert seen.readings["checkpoint-8"].content is Content.WEIGHTS
    else:
        assert not seen.has_last_word("checkpoint-8", 2)
    assert bool(seen.fault("checkpoint-8")) == (gone == "trainer_state.json")


@pytest.mark.parametrize(
    ("name", "state", "content"),
    [
        ("ckpt.pt", {"model": Model(), "optimizer": adam()}, Content.STATE),
        ("ckpt.pt", {"epoch": 3}, Content.STATE),
        ("ckpt.pt", Model(), Content.WEIGHTS),
        ("model.pt", Model(), Content.WEIGHTS),
        ("model.pt", {"model": Model(), "optimizer": adam()}, Content.STATE),
        ("best.pt", {"model": Model(), "optimizer": adam()}, Content.BEST),
        ("ema.pt", Model(), Content.AVERAGE),
        ("optimizer.pt", adam(), Content.PART),
        ("vocab.pt", {"a": 1}, Content.OTHER),
    ],
)
def test_single_file_is_classified_by_name_or_content(
    tmp_path: Path, name: str, state: object, content: Content
) -> None:
    """A single file is what its name says unless its content says more."""
    write(tmp_path / name, torch_save(state))
    seen = sight(tmp_path)
    assert seen.readings[seen.of(name)].content is content


def test_pointer_counts_only_for_its_run(tmp_path: Path) -> None:
    for run in ("a", "b"):
        files = {f"{run}/global_step5/mp_rank_00_model_states.pt": torch_save({"module": Model()}),
                 f"{run}/global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt": torch_save(adam())}  # fmt: skip
        write_all(tmp_path, files)
    write(tmp_path / "a/latest", b"global_step5")
    seen = sight(tmp_path)
    assert [seen.has_last_word(f"{run}/global_step5", 1) for run in ("a", "b")] == [True, False]


def test_universal_deepspeed_checkpoint_fits_any_world_size(tmp_path: Path) -> None:
    """A universal checkpoint of DeepSpeed fits any number of ranks."""
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        write(tmp_path / "global_step5" / name, torch_save(adam()))
        write(tmp_path / "global_step5_universal" / name, torch_save(adam()))
    seen = sight(tmp_path)
    fits = {key: state.fits_any_size for key, state in seen.readings.items()}
    assert fits == {"global_step5": False, "global_step5_universal": True}


def test_readings_of_hosts_without_shared_disk_are_joined() -> None:
    need = RequiredFile("s/__1_0.distcp", 400, "s/.metadata")
    first = GroupReading(
        Format.DCP,
        Content.STATE,
        True,
        needs=(need,),
        is_proved=True,
        is_marked_complete=True,
        step=5,
        cites=("last",),
    )
    second = GroupReading(Format.UNKNOWN, Content.STATE, True, is_proved=True, cites=("best",))
    for one, other in ((first, second), (second, first)):
        both = validation.merge_readings(one, other)
        assert (both.format, both.content, both.needs, both.step) == (Format.DCP, Content.STATE, (need,), 5)
        assert both.is_proved and both.is_marked_complete and set(both.cites) == {"last", "best"}
        worse = validation.merge_readings(
            both, dataclasses.replace(second, faults=("x is empty",), is_proved=False, fits_any_size=False)
        )
        assert not worse.is_proved and worse.faults == ("x is empty",) and not worse.fits_any_size
    assert validation.find_fault(first, {"s/.metadata": 9}).startswith("s/__1_0.distcp is missing")
    assert validation.find_fault(first, {"s/.metadata": 9, "s/__1_0.distcp": 400}) == ""


@pytest.mark.parametrize("files", [["step-059.json"], ["a_7.gz", "a_7_rank1.gz"], ["step_7/x.db", "step_7/y.db"]])
def test_checkpoint_without_bytes_is_none(tmp_path: Path, files: list[str]) -> None:
    """A checkpoint without a byte is none, whatever its names are."""
    for name in files:
        write(tmp_path / name, b"")
    found = tree.scan(tmp_path).files
    states = [validation.read_group(tmp_path, group, found) for group in file_groups.group_files(found).values()]
    assert [state.faults for state in states] == [(f"{files[0]} is empty",)]


def test_file_vanishing_during_reading_is_a_fault(tmp_path: Path) -> None:
    write_all(
        tmp_path,
        {**distributed("step_5"), "a_6.pt": torch_save(Model()), "b_6.zip": zipped({})},
        SAVED_NS + S,
    )
    seen = sight(tmp_path)
    shutil.rmtree(tmp_path / "step_5")
    (tmp_path / "a_6.pt").unlink()
    for key, group in seen.groups.items():
        assert validation.read_group(tmp_path, group, seen.tree.files).faults, key
