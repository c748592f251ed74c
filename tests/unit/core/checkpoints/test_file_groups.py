"""Names of files alone: which of them are one save, and what they say of it."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.checkpoints import file_groups
from orchestrator.core.checkpoints.file_groups import Role
from tests.support.file_layouts import Layout
from tests.support.layouts import LAYOUTS


def grouped(*files: str) -> list[list[str]]:
    """Return the files of each group."""
    return sorted(sorted(group.names) for group in file_groups.group_files(files).values())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_files_of_checkpoint_are_one_named_group(layout: Layout) -> None:
    """The files of a checkpoint are one group with the name that a person would give it."""
    groups = file_groups.group_files([name for save in layout.saves for name in save.files] + list(layout.others))
    found = {group.main: sorted(group.names) for group in groups.values()}
    assert {save.main: sorted(save.files) for save in layout.saves}.items() <= found.items()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_key_of_file_stays_while_more_is_written(layout: Layout) -> None:
    files = [*layout.others, *(name for save in layout.saves for name in save.files)]
    last = {name: key for key, group in file_groups.group_files(files).items() for name in group.names}
    for count in range(1, len(files)):
        for key, group in file_groups.group_files(files[:count]).items():
            assert {last[name] for name in group.names} == {key}


@pytest.mark.parametrize(
    "files",
    [
        [["model.100.pt"], ["model.200.pt"]],
        [["weights.05-0.32.hdf5"], ["weights.06-0.31.hdf5"]],
        [["epoch=3-loss=1.5e-05.ckpt"], ["epoch=4-loss=2.5e-05.ckpt"]],
        [["epoch=3-loss=0.32-v1.ckpt"], ["epoch=3-loss=0.32.ckpt"]],
        [["epoch=3-loss=0.31.ckpt"], ["epoch=3-loss=0.32.ckpt"]],
        [["model_3_loss0.31.pt", "optim_3.pt"]],
        [["ckpt_10.pt"], ["epoch_10.pt"]],
        [["ckpt_10.pt", "ema_10.pt", "meta_10.json"], ["ckpt_20.pt"]],
        [["best_10.pt"], ["ckpt_10.pt"], ["last.pt"]],
        [["a/ckpt_10.pt"], ["b/ckpt_10.pt"]],
        [["rank_0/ckpt_10.pt", "rank_1/ckpt_10.pt"], ["rank_0/ckpt_20.pt"]],
        [["ckpt_10_gpu0.pt", "ckpt_10_gpu1.pt"]],
        [["ckpt-tp0-pp1-10.pt", "ckpt-tp1-pp0-10.pt"]],
        [["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]],
        [["model.pt", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"]],
        [["resnet50.pth"], ["vit_b16.pth"]],
        [["latest/.metadata", "latest/__0_0.distcp"]],
        [["run/step_10/a.pt", "run/step_10/deep/er/b.pt"], ["run/step_9/a.pt"]],
        [["epoch_3/step_10.pt"], ["epoch_3/step_20.pt"]],
        [["7/step_10.pt"], ["7/step_20.pt"]],
        [["checkpoint-5/custom_checkpoint_0.pkl", "checkpoint-5/custom_checkpoint_1.pkl"]],
        [["seed_1/checkpoint-5/model.pt"], ["seed_2/checkpoint-5/model.pt"]],
    ],
)  # fmt: skip
def test_groups_match_human_judgement(files: list[list[str]]) -> None:
    """Groups are those that a person would make."""
    assert grouped(*(name for group in files for name in group)) == files


@pytest.mark.parametrize(
    "name",
    ["tmp-step.pt", "tmpabc.pt", "step.pt.tmp", "step.tmp3", "step_temp.pt", "step.pt.part", "step.pt.partial", "step.pt~",
     "step.pt.incomplete", "step.pt.lock", "step_20.unfinished", "latest", "run/latest_checkpointed_iteration.txt",
     "last_checkpoint"],
)  # fmt: skip
def test_temporary_files_markers_and_pointers_are_ungrouped(name: str) -> None:
    assert grouped(name) == []


@pytest.mark.parametrize(
    "name", ["model-part-1.pt", "attempt.pt", "template.pt", "locksmith.ckpt", "party.pt", "latest.pt"]
)
def test_similar_looking_names_are_grouped(name: str) -> None:
    """Names that only resemble them are in a group."""
    assert grouped(name) == [[name]]


@pytest.mark.parametrize(
    ("files", "unfinished"),
    [
        (["step_20/a.pt", "step_20-unfinished"], "step_20"),
        (["step_20-unfinished/a.pt"], "step_20-unfinished"),
        (["step_20/a.pt", "step_20-unfinished/a.pt"], "step_20"),
        (["step_20/a.pt", "step_20/.incomplete"], "step_20"),
        (["step_20/a.pt", "step_20/checkpoint-is-incomplete.txt"], "step_20"),
        (["step_20/a.pt", "step_20/b.pt.tmp"], "step_20"),
        (["step_20.tmp/a.pt"], "step_20.tmp"),
        (["ckpt_20.pt", "ckpt_20.pt.in_progress"], "ckpt_20.pt"),
    ],
)
def test_marker_marks_checkpoint_as_unfinished(files: list[str], unfinished: str) -> None:
    marked = {
        group.main: group.unfinished_reason
        for group in file_groups.group_files([*files, "step_10/a.pt", "ckpt_10.pt"]).values()
    }
    assert "unfinished" in marked[unfinished]
    assert marked["step_10"] == marked["ckpt_10.pt"] == ""


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=1200.ckpt", 1200), ("epoch=3-step=1200-v1.ckpt", 1200), ("step-20.pt", 20), ("step_000500.pt", 500),
        ("global_step500", 500), ("model-iter-70.pth", 70), ("iter_0000100", 100), ("rl_model_10000_steps.zip", 10000),
        ("ep0-ba100-rank0.pt", 100), ("step_10_rank_3.pt", 10), ("run_7/step_20", 20), ("step_20/7.pt", None),
        ("checkpoint-500", None), ("checkpoint-3.pt", None), ("020000", None), ("epoch_7.pt", None), ("last.pt", None),
        ("last-v1.ckpt", None), ("timestep3.pt", None), ("steps.pt", None), ("step_1b_tokens.pt", None),
    ],
)  # fmt: skip
def test_only_step_word_makes_number_a_step(name: str, step: int | None) -> None:
    assert file_groups.find_step(name) == step


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("ckpt.pt", Role.MAIN), ("020000", Role.MAIN), ("checkpoint_last.pt", Role.MAIN), ("model_100.pt", Role.MODEL),
        ("pytorch_model.bin", Role.MODEL), ("adapter_model.safetensors", Role.MODEL), ("critic.pt", Role.MODEL),
        ("optim_100_rank0.pt", Role.OPTIMIZER), ("model_optim_rng.pt", Role.OPTIMIZER), ("optimizer.bin", Role.OPTIMIZER),
        ("lr_scheduler.pt", Role.STATE), ("random_states_0.pkl", Role.STATE), ("training_state.pt", Role.STATE),
        ("meta_100.json", Role.STATE), ("ema_100.pt", Role.AVERAGE), ("swa_model.pt", Role.AVERAGE),
        ("vocab.pt", Role.OTHER), ("tokenizer.model", Role.OTHER), ("token_bytes.pt", Role.OTHER),
        ("training_args.bin", Role.OTHER), ("evaluations.npz", Role.OTHER), ("grads.npy", Role.OTHER), ("ckpt_10.npz", Role.MAIN),
        ("metrics_epoch_1.pkl", Role.OTHER),
        ("locomotion.pt", Role.MAIN), ("remodel.pt", Role.MAIN),
    ],
)  # fmt: skip
def test_role_is_a_whole_word_of_name(name: str, role: Role) -> None:
    assert file_groups.file_role(name) is role


def test_texts_and_pictures_are_no_checkpoints() -> None:
    """Texts and pictures are no checkpoints, whatever numbers they have."""
    texts = [
        "metrics.json",
        "loss_step_5.png",
        "events.out.tfevents.17",
        "train_epoch_3.log",
        "notes",
        "v1",
        "data.csv",
    ]
    saves = ["a.ckpt", "b.distcp", "last.pth.tar", "ckpt_20", "iter-7", "model.safetensors"]
    assert [name for name in (*texts, *saves) if file_groups.is_checkpoint_file(name)] == saves


def test_rank_files_are_counted_by_rest_of_name() -> None:
    files = [f"d/optim_5_rank{rank}.pt" for rank in (0, 2)] + ["d/rng_state_1.pth", "d/mp_rank_00_model.pt"]
    assert file_groups.find_ranks(files) == {
        "d/optim_5_rank#.pt": {0, 2}, "d/rng_state_#.pth": {1}, "d/mp_rank_#_model.pt": {0},
    }  # fmt: skip


FOLDERS = st.sampled_from(
    ["", "run", "step_5", "step_6", "005", "rank_0", "rank_1", "last", "checkpoint-5", "epoch=1", "x.tmp", "step_5-unfinished"]
)  # fmt: skip
WORDS = st.sampled_from(
    [
        "ckpt",
        "model",
        "optim",
        "__0_0",
        "best",
        "last",
        "step",
        "epoch",
        "rank",
        "vocab",
        "random_states",
        "tmp",
        ".",
        "",
    ]
)
FILES = st.builds(
    lambda above, word, gap, number, end: "/".join([*filter(None, above), f"{word}{gap}{number}{end}" or "x"]),
    st.lists(FOLDERS, max_size=3), WORDS, st.sampled_from(["", "_", "-", "=", "."]),
    st.sampled_from(["", "0", "5", "006", "0.5", "5_rank_1", "1-of-2", "9" * 30]),
    st.sampled_from(["", ".pt", ".ckpt", ".json", ".distcp", ".pkl", ".metadata", ".tmp", ".incomplete"]),
) | st.text("ab0._-=~é\u202e/", min_size=1, max_size=12).map(lambda text: text.strip("/").replace("//", "/") or "a")  # fmt: skip


def are_files(found: list[str]) -> bool:
    """Tell whether no name is a folder of another."""
    folders = {str(above) for name in found for above in PurePosixPath(name).parents}
    return not folders & set(found) and all(str(PurePosixPath(name)) == name for name in found)


@pytest.mark.slow
@given(st.lists(FILES, unique=True, max_size=8).filter(are_files), st.randoms())
@settings(max_examples=300, database=None)
def test_groups_are_disjoint_complete_and_order_independent(files: list[str], random: object) -> None:
    """Groups are disjoint, leave out only what is in no checkpoint and do not depend on order."""
    groups = file_groups.group_files(files)
    placed = [name for group in groups.values() for name in group.names]
    assert len(placed) == len(set(placed)) and set(placed) <= set(files)
    for name in set(files) - set(placed):
        last = PurePosixPath(name).name
        is_left = file_groups.is_temporary(last) or last in file_groups.POINTERS
        assert is_left or last.endswith(("incomplete", "unfinished")), name
    for key, group in groups.items():
        assert key == group.key and group.is_overwritten == (not group.count)
        if group.is_folder:
            assert all(group.main == "." or name.startswith(f"{group.main}/") for name in group.names)
        else:
            assert group.main in group.names
    assert file_groups.group_files(files[::-1]) == groups
    shuffled = list(files)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert file_groups.group_files(shuffled) == groups
